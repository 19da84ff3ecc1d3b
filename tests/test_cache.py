"""Decoding with a cache equals decoding without one, at every step."""

from copy import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from addnorm import Cache, Mask
from addnorm.errors import InputError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.attention import MemoryAttention
from addnorm.layers.context import Context
from tests.conftest import PAD, POSITIONS, VARIANTS, close, draw, make, pad_rows

modes = pytest.mark.parametrize("mode", ("decoder", "encoder-decoder"))
ONE_BY_ONE = (1,) * 7
UNEVEN = (3, 1, 2, 1)


class Decoding:
    """A model with its memory, if it has one: the same interface for both modes."""

    def __init__(self, mode: str, batch: int = 2, **changes: Any) -> None:
        self.model = make(mode, **changes)
        self.source = pad_rows([draw(3 + i) for i in range(batch)], "right")
        self.memory: dict[str, Any] = {}
        if mode == "encoder-decoder":
            self.memory["memory"] = self.model.encode(self.source)
            self.memory["memory_mask"] = Mask.padding(self.source != PAD)

    def run(self, ids: Tensor, mask: Mask | None = None, cache: Cache | None = None) -> Tensor:
        if self.memory:
            return self.model.decode(ids, **self.memory, mask=mask, cache=cache)
        return self.model.hidden(ids, mask=mask, cache=cache)

    def only(self, row: int) -> "Decoding":
        """Return the same model with the memory of one row."""
        one = copy(self)
        if self.memory:
            mask = Mask.padding(self.source[row : row + 1] != PAD)
            one.memory = {"memory": self.memory["memory"][row : row + 1], "memory_mask": mask}
        return one

    def steps(self, ids: Tensor, chunks: tuple[int, ...], mask: Mask | None = None) -> Tensor:
        """Return the result of `run` in chunks with a cache; `mask` is that of the first."""
        cache = self.model.cache(ids.shape[0], ids.shape[1])
        parts = ids.split(chunks, dim=1)
        first = self.run(parts[0], mask, cache)
        rest = [self.run(part, None, cache) for part in parts[1:]]
        assert cache.used == ids.shape[1]
        return torch.cat((first, *rest), dim=1)


# ── Cached equals uncached ────────────────────────────────────────────────────────────────────────


@modes
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("chunks", (ONE_BY_ONE, UNEVEN), ids=("one by one", "uneven"))
def test_a_cache_changes_nothing(mode: str, positions: str, chunks: tuple[int, ...]) -> None:
    decoding = Decoding(mode, positions=positions)
    ids = draw(2, 7)
    close(decoding.steps(ids, chunks), decoding.run(ids))


@modes
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_changes_nothing_in_any_variant(mode: str, variant: str) -> None:
    decoding = Decoding(mode, **VARIANTS[variant])
    ids = draw(2, 7)
    close(decoding.steps(ids, ONE_BY_ONE), decoding.run(ids))
    close(decoding.steps(ids, UNEVEN), decoding.run(ids))


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_a_cache_changes_nothing_in_any_arrangement(addnorm: str) -> None:
    decoding = Decoding("encoder-decoder", addnorm=addnorm)
    ids = draw(2, 7)
    close(decoding.steps(ids, UNEVEN), decoding.run(ids))


@given(cuts=st.lists(st.integers(1, 6), max_size=4, unique=True))
@settings(max_examples=15)
@pytest.mark.parametrize("positions", ("learned", "relative"))
def test_a_cache_changes_nothing_at_any_split(positions: str, cuts: list[int]) -> None:
    torch.manual_seed(0)
    decoding = Decoding("decoder", positions=positions, kv_heads=2, window=4)
    ids, ends = draw(2, 7), [0, *sorted(cuts), 7]
    chunks = tuple(stop - start for start, stop in pairwise(ends))
    close(decoding.steps(ids, chunks), decoding.run(ids))


@modes
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_cache_keeps_the_padding_of_the_prompt(mode: str, positions: str) -> None:
    decoding = Decoding(mode, batch=3, positions=positions)
    prompt = pad_rows([draw(4), draw(2), draw(1)], "left")
    ids = torch.cat((prompt, draw(3, 3)), dim=1)
    real = ids != PAD
    whole = decoding.run(ids)
    by_id = decoding.steps(ids, (4, 1, 2))
    by_mask = decoding.steps(ids, (4, 1, 1, 1), Mask.padding(real[:, :4]))
    close(by_id[real], whole[real])
    close(by_mask[real], whole[real])
    for i, row in enumerate(ids):
        close(by_id[i][real[i]], decoding.only(i).run(row[real[i]][None])[0])


def test_padding_may_come_later_than_the_first_step() -> None:
    decoding = Decoding("decoder")
    ids = torch.cat((draw(2, 2), pad_rows([draw(3), draw(1)], "right"), draw(2, 2)), dim=1)
    real = ids != PAD
    close(decoding.steps(ids, (2, 3, 1, 1))[real], decoding.run(ids)[real])


@modes
def test_a_prefix_in_one_step_sees_itself(mode: str) -> None:
    decoding = Decoding(mode)
    ids, mask = draw(2, 7), Mask.causal(prefix=torch.tensor([3, 2]))
    close(decoding.steps(ids, (3, 1, 3), mask), decoding.run(ids, mask))
    assert (decoding.run(ids, mask) - decoding.run(ids)).abs().max() > 1e-3


@pytest.mark.parametrize("positions", ("none", "rotary", "linear-bias"))
def test_groups_work_with_a_cache(positions: str) -> None:
    model = make("decoder", positions=positions)
    ids, numbers = draw(1, 6), torch.tensor([[0, 0, 0, 1, 1, 1]])
    cache = model.cache(1)
    first = model(ids[:, :2], mask=Mask.grouped(numbers[:, :2]), cache=cache)
    rest = model(ids[:, 2:], mask=Mask.grouped(numbers[:, 2:], numbers), cache=cache)
    close(torch.cat((first, rest), dim=1), model(ids, mask=Mask.grouped(numbers)))


@pytest.mark.parametrize("positions", ("sinusoidal", "learned"))
def test_groups_work_with_a_cache_and_absolute_positions(positions: str) -> None:
    test_groups_work_with_a_cache(positions)


@modes
def test_maps_of_a_cached_step_are_rows_of_the_whole(mode: str) -> None:
    decoding = Decoding(mode)
    ids = draw(2, 5)
    whole: dict[str, Tensor] = {}
    step: dict[str, Tensor] = {}
    extra = decoding.memory
    call = decoding.model.decode if extra else decoding.model.hidden
    call(ids, **extra, maps=whole)
    cache = decoding.model.cache(2)
    call(ids[:, :3], **extra, cache=cache)
    call(ids[:, 3:], **extra, cache=cache, maps=step)
    assert set(step) == set(whole)
    for name, weights in step.items():
        close(weights, whole[name][:, :, 3:])


def test_a_cache_longer_than_needed_changes_nothing() -> None:
    model = make("decoder")
    ids, cache = draw(2, 5), model.cache(2, 100)
    close(model(ids, cache=cache), model(ids))
    assert (cache.length, cache.batch, cache.used) == (100, 2, 5)
    assert model.cache(3).length == model.config.length


# ── Beams ─────────────────────────────────────────────────────────────────────────────────────────


@modes
@pytest.mark.parametrize("index", ([1, 1, 0, 2], [3, 2, 1, 0], [0, 0, 0, 0], [0, 1, 2, 3]))
def test_reordering_gathers_rows_of_the_batch(mode: str, index: list[int]) -> None:
    # One memory for all rows, as for the beams of one sentence.
    decoding = Decoding(mode, batch=1)
    prompt = pad_rows([draw(4), draw(2), draw(1), draw(3)], "left")
    more = draw(4, 3)
    cache = decoding.model.cache(4)
    decoding.run(prompt, None, cache)
    decoding.run(more[:, :1], None, cache)
    order = torch.tensor(index)
    cache.reorder(order)
    moved = torch.cat((prompt, more[:, :1]), dim=1)[order]
    ids = torch.cat((moved, more[:, 1:]), dim=1)
    close(decoding.run(more[:, 1:2], None, cache), decoding.run(ids[:, :6])[:, -1:])
    # A second time, because two buffers alternate.
    cache.reorder(order)
    ids = torch.cat((ids[:, :6][order], more[:, 2:]), dim=1)
    close(decoding.run(more[:, 2:], None, cache), decoding.run(ids)[:, -1:])


@pytest.mark.parametrize("positions", ("sinusoidal", "buckets"))
@pytest.mark.parametrize("cached", (False, True))
def test_one_row_of_memory_serves_several_beams(positions: str, cached: bool) -> None:
    model = make("encoder-decoder", positions=positions, kv_heads=2)
    source = pad_rows([draw(5), draw(3)], "right")
    memory, real = model.encode(source), source != PAD
    target = draw(6, 4)
    shared = {"memory": memory, "memory_mask": Mask.padding(real)}
    repeated = {
        "memory": memory.repeat_interleave(3, dim=0),
        "memory_mask": Mask.padding(real.repeat_interleave(3, dim=0)),
    }
    expected = model.decode(target, **repeated)
    if not cached:
        close(model.decode(target, **shared), expected)
        return
    cache = model.cache(6)
    chunks = target.split((2, 1, 1), dim=1)
    close(torch.cat([model.decode(c, **shared, cache=cache) for c in chunks], dim=1), expected)


def test_maps_of_beams_have_a_row_for_each_beam() -> None:
    model = make("encoder-decoder", kv_heads=2)
    memory, target = model.encode(draw(2, 5)), draw(6, 4)
    shared: dict[str, Tensor] = {}
    repeated: dict[str, Tensor] = {}
    model.decode(target, memory, maps=shared)
    model.decode(target, memory.repeat_interleave(3, dim=0), maps=repeated)
    assert shared["decoder.0.attention"].shape == (6, 4, 4, 4)
    assert shared["decoder.0.memory"].shape == (6, 4, 4, 5)
    for name, weights in shared.items():
        close(weights, repeated[name])


def test_keys_of_the_memory_are_computed_once() -> None:
    decoding = Decoding("encoder-decoder")
    layers = [part for part in decoding.model.modules() if isinstance(part, MemoryAttention)]
    calls: list[torch.nn.Module] = []
    for layer in layers:
        layer.memory.register_forward_hook(lambda module, *rest: calls.append(module))
    ids = draw(2, 7)
    decoding.steps(ids, ONE_BY_ONE)
    assert len(layers) == 2 and calls == [layer.memory for layer in layers]
    calls.clear()
    decoding.run(ids)
    decoding.run(ids)
    assert len(calls) == 4  # without a cache, at each call


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


@modes
def test_more_positions_than_the_cache_has_are_refused(mode: str) -> None:
    decoding = Decoding(mode)
    cache = decoding.model.cache(2, 5)
    decoding.run(draw(2, 4), None, cache)
    message = r"the cache has room for 5 positions: got 6\. Create it with length=6 or more\."
    with pytest.raises(InputError, match=message):
        decoding.run(draw(2, 2), None, cache)
    assert cache.used == 4
    assert decoding.run(draw(2, 1), None, cache).shape == (2, 1, 16)


@modes
def test_another_batch_is_refused(mode: str) -> None:
    decoding = Decoding(mode, batch=1)
    cache = decoding.model.cache(2, 5)
    message = r"the cache is for a batch of 2: got 3\. Create a cache for this batch\."
    with pytest.raises(InputError, match=message):
        decoding.run(draw(3, 2), None, cache)


def test_another_batch_is_refused_after_padding() -> None:
    decoding = Decoding("decoder")
    cache = decoding.model.cache(2)
    decoding.run(pad_rows([draw(3), draw(2)], "left"), None, cache)
    with pytest.raises(InputError, match="the cache is for a batch of 2: got 3"):
        decoding.run(draw(3, 1), None, cache)


def test_a_refused_step_does_not_change_the_cache() -> None:
    decoding = Decoding("decoder")
    prompt = pad_rows([draw(3), draw(2)], "left")
    cache = decoding.model.cache(2, 4)
    decoding.run(prompt, None, cache)
    with pytest.raises(InputError, match="the cache has room for 4 positions: got 5"):
        decoding.run(draw(2, 2), None, cache)
    newest = draw(2, 1)
    whole = decoding.run(torch.cat((prompt, newest), dim=1))
    close(decoding.run(newest, None, cache), whole[:, -1:])


def test_with_a_cache_a_padding_mask_covers_the_new_tokens() -> None:
    decoding = Decoding("decoder")
    cache = decoding.model.cache(2)
    decoding.run(draw(2, 3), None, cache)
    with pytest.raises(InputError, match=r"a padding mask must have shape \(2, 1\) here: got"):
        decoding.run(draw(2, 1), Mask.padding(torch.ones(2, 4, dtype=torch.bool)), cache)


def test_attention_to_a_memory_needs_one() -> None:
    layer = make("encoder-decoder").decoder.stack.blocks[0].sublayers["memory"]
    message = r"encoder-decoder attention needs a memory: pass the encoder's output\."
    with pytest.raises(InputError, match=message):
        layer(torch.zeros(1, 2, 16).double(), Context())
