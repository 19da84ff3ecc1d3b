"""Batches: every example once, reproducible, little padding, and exact resuming."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from addnorm.data.text.batches import Batches, shard
from addnorm.data.text.collate import (
    collate_labelled,
    collate_pairs,
    pad,
    pair_lengths,
    text_lengths,
)
from addnorm.data.text.special_tokens import BEGIN, END, FIRST, IGNORE, PAD
from addnorm.data.text.windows import Windows, collate_windows, join_texts
from addnorm.errors import AddnormError, ConfigError, InputError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
ROWS = st.lists(st.lists(st.integers(FIRST, 30), max_size=8), min_size=1, max_size=20)


def refuse(message: str, run: Callable[[], object], kind: type[AddnormError] = InputError) -> None:
    with pytest.raises(kind, match=message):
        run()


def lines(count: int = 6000, seed: int = 0) -> np.ndarray:
    """Lengths of pairs like those of a translation corpus: mean 15, correlated, a long tail."""
    generator = np.random.default_rng(seed)
    source = np.exp(generator.normal(2.6, 0.35, count))
    target = source * np.exp(generator.normal(0, 0.16, count))
    return np.stack([source, target]).round().astype(int) + 1


# ── Which examples ────────────────────────────────────────────────────────────────────────────────


@given(
    sides=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=60),
    tokens=st.integers(1, 300),
    noise=st.sampled_from((0.0, 0.05, 0.5)),
)
def test_every_example_is_in_one_batch_within_the_budget(
    sides: list[tuple[int, int]], tokens: int, noise: float
) -> None:
    lengths = list(zip(*sides, strict=True))
    batches = Batches(lengths, tokens, noise=noise)
    for number in range(3):
        epoch = batches.epoch(number)
        assert sorted(row for batch in epoch for row in batch) == list(range(len(sides)))
        for batch in epoch:
            real = [sum(sides[row]) for row in batch]
            top = sum(max(sides[row][side] for row in batch) for side in range(2))
            assert len(batch) == 1 or len(batch) * top <= tokens
            assert real == sorted(real, reverse=True)
    assert len(batches) == len(sides)


def test_batches_are_as_large_as_the_budget_allows() -> None:
    batches = Batches([[10] * 95], tokens=100).epoch(0)
    assert sorted(map(len, batches)) == [5] + [10] * 9


def share_of_real_tokens(batches: Batches) -> float:
    padded = [len(batch) * batches.lengths[batch].max(axis=0).sum() for batch in batches.epoch(0)]
    return float(batches.lengths.sum() / sum(padded))


@pytest.mark.parametrize(
    ("tokens", "least"), ((1024, 0.93), (2048, 0.92), (4096, 0.89), (8192, 0.85))
)
def test_few_tokens_are_padding(tokens: int, least: float) -> None:
    assert least < share_of_real_tokens(Batches(list(lines()), tokens)) < 0.99


def test_few_tokens_of_long_documents_are_padding() -> None:
    assert share_of_real_tokens(Batches([lines()[0] * 10], tokens=8192)) > 0.93


def test_epochs_depend_on_seed_and_number_alone() -> None:
    lengths = list(lines(500))
    one, again, other = (Batches(lengths, 500, seed=seed) for seed in (3, 3, 4))
    assert [one.epoch(n) for n in (0, 1)] == [again.epoch(n) for n in (0, 1)]
    assert again.epoch(7) == one.epoch(7), "not on the epochs asked for before"
    assert one.epoch(0) != one.epoch(1) and one.epoch(0) != other.epoch(0)


@pytest.mark.process
def test_epochs_are_the_same_in_another_process() -> None:
    code = "from addnorm.data.text.batches import Batches\n"
    code += "print(Batches([range(1, 99)], 200).epoch(5))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(Batches([range(1, 99)], 200).epoch(5))


def test_epochs_continue_after_the_batches_done() -> None:
    batches = Batches(list(lines(300)), 400, seed=1)
    whole = [batch for number in range(3) for batch in batches.epoch(number)]
    done = len(batches.epoch(0)) + 4
    fresh = Batches(list(lines(300)), 400, seed=1)
    rest = fresh.epoch(1)[4:] + fresh.epoch(2)
    assert whole[:done] + rest == whole


def share_again(batches: Batches) -> float:
    """Return how often two examples of one batch share a batch in the next epoch."""
    home = {row: place for place, batch in enumerate(batches.epoch(1)) for row in batch}
    pairs = together = 0
    for batch in batches.epoch(0):
        counts = np.bincount([home[row] for row in batch])
        pairs += len(batch) * (len(batch) - 1)
        together += int((counts * (counts - 1)).sum())
    return together / pairs


def test_neighbours_change_between_epochs() -> None:
    assert share_again(Batches(list(lines()), 2048)) < 0.3
    assert share_again(Batches(list(lines()), 2048, noise=0)) > 0.5


def test_the_order_is_not_by_length() -> None:
    epoch = Batches(list(lines()), 1024).epoch(0)
    longest = [float(lines()[:, batch].sum(axis=0).max()) for batch in epoch]
    steps = list(range(len(longest)))
    assert abs(np.corrcoef(steps, longest)[0, 1]) < 0.15


@pytest.mark.parametrize(
    ("message", "arguments", "settings", "kind"),
    (
        ("room for tokens: got tokens=0. Try 4096", ([[1]], 0), {}, ConfigError),
        ("noise must be 0 or more and below 1: got -1", ([[1]], 9), {"noise": -1}, ConfigError),
        ("noise must be", ([[1]], 9), {"noise": 1.0}, ConfigError),
        ("one sequence for each side.*got shapes none", ([], 9), {}, InputError),
        (r"not empty: got shapes \(0,\)", ([[]], 9), {}, InputError),
        (r"got shapes \(2,\), \(1,\)", ([[1, 2], [1]], 9), {}, InputError),
        (r"got shapes \(\), \(\). For one side, write \[lengths\]", ([1, 2], 9), {}, InputError),
        ("whole numbers, 0 or more: got float64 values", ([[1.5]], 9), {}, InputError),
        ("whole numbers, 0 or more", ([[-1]], 9), {}, InputError),
    ),
)
def test_invalid_batches_are_refused(
    message: str, arguments: Any, settings: Any, kind: Any
) -> None:
    refuse(message, lambda: Batches(*arguments, **settings), kind)


# ── Workers ───────────────────────────────────────────────────────────────────────────────────────


@given(lengths=LENGTHS, tokens=st.integers(1, 200), world=st.integers(1, 5))
def test_workers_together_equal_a_single_worker(
    lengths: list[int], tokens: int, world: int
) -> None:
    epoch = Batches([lengths], tokens).epoch(0)
    parts = [shard(epoch, rank, world) for rank in range(world)]
    assert {len(part) for part in parts} == {len(epoch)}, "equally many steps"
    for step, batch in enumerate(epoch):
        dealt = [row for part in parts for row in part[step]]
        assert sorted(dealt) == sorted(batch)
        sizes = [len(part[step]) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    assert shard(epoch, 0, 1) == epoch


def test_workers_have_about_equal_parts() -> None:
    lengths = lines()
    epoch = Batches(list(lengths), 4096).epoch(0)
    work = [
        [len(part) * lengths[:, part].max(axis=1).sum() for part in shard(epoch, rank, 2)]
        for rank in (0, 1)
    ]
    longest = np.max(work, axis=0).sum()
    assert np.sum(work) / (2 * longest) > 0.95
    real = [sum(int(lengths[:, part].sum()) for part in shard(epoch, rank, 2)) for rank in (0, 1)]
    assert max(real) / min(real) < 1.02


@pytest.mark.parametrize(("rank", "world"), ((2, 2), (-1, 2), (0, 0)))
def test_invalid_ranks_are_refused(rank: int, world: int) -> None:
    refuse(f"got rank={rank}, world={world}", lambda: shard([[1]], rank, world), ConfigError)


# ── Tensors ───────────────────────────────────────────────────────────────────────────────────────


@given(rows=ROWS, value=st.sampled_from((PAD, IGNORE)))
def test_padding_fills_short_rows(rows: list[list[int]], value: int) -> None:
    longest = max(map(len, rows))
    padded = pad(rows, value)
    assert padded.dtype == torch.long and padded.shape == (len(rows), longest)
    assert padded.tolist() == [row + [value] * (longest - len(row)) for row in rows]
    assert torch.equal(pad([np.array(row, dtype=np.int32) for row in rows], value), padded)


def test_padding_of_nothing_is_nothing() -> None:
    assert pad([]).shape == (0, 0) and pad([[], []]).shape == (2, 0)


@given(ROWS, st.randoms(use_true_random=False))
def test_pairs_are_shifted_by_one(rows: list[list[int]], random: Any) -> None:
    targets = random.sample(rows, len(rows))
    batch = collate_pairs(rows, targets)
    widths = [max(side) for side in pair_lengths(rows, targets)]
    assert [part.shape for part in batch] == [
        (len(rows), width) for width in (widths[0], widths[1], widths[1])
    ]
    for source, target_in, target, row, wanted in zip(*batch, rows, targets, strict=True):
        assert source[source != PAD].tolist() == [*row, END]
        assert target_in[target_in != PAD].tolist() == [BEGIN, *wanted]
        assert target[target != IGNORE].tolist() == [*wanted, END]
        assert torch.equal(target_in != PAD, target != IGNORE)


def test_texts_are_enclosed_by_begin_and_end() -> None:
    rows = [[5, 6], [], [7]]
    inputs, labels = collate_labelled(rows, [1, 0, 2])
    assert inputs.tolist() == [[1, 5, 6, 2], [1, 2, 0, 0], [1, 7, 2, 0]]
    assert labels.tolist() == [1, 0, 2] and labels.dtype == torch.long
    assert text_lengths(rows) == [[4, 2, 3]]


def test_sides_must_have_equal_lengths() -> None:
    refuse("as many targets as rows: got 1 for 2", lambda: collate_pairs([[5], [6]], [[5]]))
    refuse("as many targets as rows: got 1 for 2", lambda: pair_lengths([[5], [6]], [[5]]))
    refuse("as many labels as rows: got 2 for 1", lambda: collate_labelled([[5]], [0, 1]))


# ── Streams ───────────────────────────────────────────────────────────────────────────────────────


@given(
    tokens=st.integers(2, 80),
    length=st.integers(1, 20),
    rows=st.integers(1, 5),
    order=st.sampled_from(("shuffled", "straight")),
    number=st.integers(0, 3),
)
def test_every_token_but_the_first_is_a_target_once(
    tokens: int, length: int, rows: int, order: str, number: int
) -> None:
    stream = torch.arange(tokens) + 100
    all_targets = []
    for windows in Windows(tokens, length, rows, order=order).epoch(number):
        inputs, targets = collate_windows(stream, windows)
        assert 1 <= len(windows) <= rows and inputs.shape == targets.shape
        assert all(start < stop for start, stop in windows)
        assert inputs.shape[1] <= length
        real = targets != IGNORE
        assert torch.equal(inputs[real] + 1, targets[real]), "the token before"
        assert (inputs[~real] == PAD).all()
        assert torch.equal(real, real.cummin(dim=1).values), "padded on the right"
        all_targets += targets[real].tolist()
    assert sorted(all_targets) == stream[1:].tolist()
    if order == "straight":
        assert all_targets == sorted(all_targets)


def test_windows_differ_between_epochs() -> None:
    windows = Windows(1000, 50, 4, seed=3)
    starts = [{start for batch in windows.epoch(n) for start, _ in batch} for n in range(4)]
    assert len({frozenset(part) for part in starts}) == 4, "another offset"
    assert windows.epoch(2) == Windows(1000, 50, 4, seed=3).epoch(2)
    assert windows.epoch(2) != Windows(1000, 50, 4, seed=4).epoch(2)


def test_texts_are_joined_to_a_stream() -> None:
    assert join_texts([[5, 6], [], [7]]).tolist() == [5, 6, END, END, 7, END]
    assert join_texts([]).shape == (0,)


def test_streams_of_small_integers_become_ids() -> None:
    for kind in (torch.uint8, torch.int16, torch.int32):
        inputs, targets = collate_windows(torch.tensor([5, 6, 7], dtype=kind), [(0, 2), (0, 1)])
        assert inputs.dtype == targets.dtype == torch.long
        assert inputs.tolist() == [[5, 6], [5, PAD]]
        assert targets.tolist() == [[6, 7], [6, IGNORE]]


@pytest.mark.parametrize(
    ("message", "arguments", "order", "kind"),
    (
        ("a token to read and one to predict: got 1", (1, 5, 5), "shuffled", InputError),
        ("got length=0, rows=5", (9, 0, 5), "shuffled", ConfigError),
        ("got length=5, rows=0", (9, 5, 0), "shuffled", ConfigError),
        ("one of shuffled, straight: got 'sorted'", (9, 5, 5), "sorted", ConfigError),
    ),
)
def test_invalid_windows_are_refused(message: str, arguments: Any, order: str, kind: Any) -> None:
    refuse(message, lambda: Windows(*arguments, order=order), kind)
