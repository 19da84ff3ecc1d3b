"""The cache during beam search: rows are copied, repeated and dropped."""

import pytest
import torch

from addnorm import Cache, Mask
from tests.conftest import PAD, close, draw, make, pad_rows

INDICES = {
    "repeated": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
    "in place": [0, 0, 2, 2],
    "in place, none moved": [0, 1, 2, 3],
    "reversed": [3, 2, 1, 0],
    "chained": [1, 2, 3, 3],
    "dropped": [3, 1],
    "one": [2],
}


def filled() -> Cache:
    """Return a cache of 4 rows and 6 positions, 4 of which have random values."""
    cache = Cache(
        depth=2,
        batch=4,
        heads=2,
        length=6,
        head_width=3,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    for layer in range(2):
        cache.write(layer, *torch.randn(2, 4, 2, 4, 3, dtype=torch.float64))
        cache.memory[layer] = (torch.randn(4, 2, 5, 3), torch.randn(4, 2, 5, 3))
    cache.advance(4)
    cache.real = torch.rand(4, 4) < 0.5
    return cache


@pytest.mark.parametrize("first", INDICES)
@pytest.mark.parametrize("second", ([0, 0], [1, 0], [0], None))
def test_reordering_is_indexing(first: str, second: list[int] | None) -> None:
    cache = filled()
    expected, real = cache.store[..., :4, :].clone(), cache.real
    assert real is not None
    for index in (INDICES[first], second):
        if index is None or (second and max(second) >= len(INDICES[first])):
            continue
        cache.reorder(torch.tensor(index))
        expected, real = expected[:, :, index], real[index]
        assert cache.batch == len(index) and cache.used == 4 and cache.length == 6
        assert torch.equal(cache.store[..., :4, :], expected)
        assert cache.real is not None and torch.equal(cache.real, real)


def test_rows_can_be_written_after_some_were_dropped_and_others_repeated() -> None:
    cache = filled()
    for index in ([2, 0], [0, 0, 1, 1, 0], [4, 3, 3]):
        cache.reorder(torch.tensor(index))
        remaining = cache.store[..., : cache.used, :].clone()
        newest = torch.randn(2, len(index), 2, 1, 3, dtype=torch.float64)
        if cache.used < 6:
            keys, values = cache.write(0, *newest)
            assert torch.equal(keys, torch.cat((remaining[0, 0], newest[0]), dim=2))
            assert torch.equal(values, torch.cat((remaining[0, 1], newest[1]), dim=2))


def test_only_moved_rows_are_written_in_place() -> None:
    cache = filled()
    place = cache.store.data_ptr()
    cache.reorder(torch.tensor([0, 0, 2, 2]))
    assert cache.store.data_ptr() == place and cache.spare is None


def test_the_memory_of_finished_sentences_is_dropped() -> None:
    cache = filled()
    before = dict(cache.memory)
    cache.select_memory(torch.tensor([3, 1]))
    for layer in range(2):
        for rows, expected in zip(cache.memory[layer], before[layer], strict=True):
            assert torch.equal(rows, expected[[3, 1]])


@pytest.mark.slow
def test_a_model_continues_with_the_remaining_rows() -> None:
    model = make("encoder-decoder")
    source = pad_rows([draw(5), draw(3), draw(4)], "right")
    target = draw(3, 5)
    real = Mask.padding(source != PAD)
    memory = model.encode(source)
    whole = model.decode(target, memory, memory_mask=real)
    cache = model.cache(3)
    model.decode(target[:, :2], memory, memory_mask=real, cache=cache)
    left = torch.tensor([2, 0])
    cache.reorder(left)
    cache.select_memory(left)
    mask = Mask.padding((source != PAD)[left])
    for step in range(2, 5):
        newest = target[left, step : step + 1]
        output = model.decode(newest, memory[:2], memory_mask=mask, cache=cache)
        close(output, whole[left, step : step + 1])
