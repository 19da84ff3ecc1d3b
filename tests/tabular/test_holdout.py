"""Held-out rows: how many, of which classes, and for different seeds."""

import numpy as np
import pytest

from addnorm.tabular.holdout import hold_out


@pytest.mark.parametrize(
    ("rows", "held"),
    ((2, 0), (29, 0), (30, 6), (9_999, 2000), (10_000, 1000), (40_000, 4000)),
)
def test_the_default_share_depends_on_the_number_of_rows(rows: int, held: int) -> None:
    train, valid = hold_out(rows, None)
    assert len(valid) == held and len(train) == rows - held


@pytest.mark.parametrize(("rows", "held"), ((29, 0), (30, 6), (490, 98), (500, 50), (9_000, 900)))
def test_fewer_rows_are_held_out_if_there_are_classes(rows: int, held: int) -> None:
    _, valid = hold_out(rows, None, classes=np.arange(rows) % 2)
    assert len(valid) == held


def test_every_row_is_on_one_side_and_any_row_may_be_held_out() -> None:
    counts = np.zeros(40)
    for seed in range(60):
        train, valid = hold_out(40, 0.25, seed=seed)
        assert sorted([*train, *valid]) == list(range(40)) and len(valid) == 10
        again = hold_out(40, 0.25, seed=seed)
        assert np.array_equal(again[0], train) and np.array_equal(again[1], valid)
        counts[valid] += 1
    assert counts.min() >= 5 and counts.max() <= 27, "a quarter of 60 draws is 15"


@pytest.mark.parametrize("share", (0.2, 0.5, 0.9))
def test_each_class_keeps_its_share_and_a_training_row(share: float) -> None:
    classes = np.array([0, 1] * 20 + [1] * 7 + [2] * 3 + [3])
    train, valid = hold_out(len(classes), share, classes=classes, seed=1)
    for k in range(4):
        rows = int((classes == k).sum())
        expected = min(round(share * rows), rows - 1)
        assert int((classes[valid] == k).sum()) == expected
        assert k in classes[train]


@pytest.mark.parametrize("order", ("random", "time"))
def test_at_least_one_training_row_remains(order: str) -> None:
    for rows in (2, 3):
        train, valid = hold_out(rows, 0.99, order=order)
        assert len(train) + len(valid) == rows and len(train) > 0


def test_time_holds_out_the_last_rows() -> None:
    for rows in range(2, 40):
        _, valid = hold_out(rows, 0.3, order="time")
        assert valid.tolist() == list(range(rows))[rows - round(0.3 * rows) :]


def test_no_share_holds_out_nothing() -> None:
    for order in ("random", "time"):
        train, valid = hold_out(50, 0.0, order=order)
        assert train.tolist() == list(range(50)) and len(valid) == 0


def test_which_groups_are_held_out_depends_on_the_seed() -> None:
    groups = np.repeat(np.arange(12), 5)[np.random.default_rng(0).permutation(60)]
    held_out_once = set()
    for seed in range(20):
        train, valid = hold_out(60, 0.25, groups=groups, seed=seed)
        held = set(groups[valid].tolist())
        assert len(held) == 3 and not held & set(groups[train].tolist())
        assert len(valid) == 15 and len(train) == 45
        held_out_once |= held
    assert held_out_once == set(range(12))
