"""Split rows into training and held-out rows: stratified at random, by group, or by time."""

from collections.abc import Callable

import numpy as np

from addnorm.data.table.frame import Array
from addnorm.errors import ConfigError, InputError, choose

MIN_ROWS_TO_SPLIT = 30
"""Fewer rows are all used for training, unless a share is set."""
MANY_ROWS, MANY_ROWS_OF_CLASSES = 10_000, 500
"""From this many rows on, a tenth is held out instead of a fifth. A temperature needs few rows;
the intervals of a number need many."""


def hold_out(
    rows: int,
    share: float | None,
    *,
    classes: Array | None = None,
    groups: Array | None = None,
    order: str = "random",
    seed: int = 0,
) -> tuple[Array, Array]:
    """Return the indices of the training rows and of the held-out rows.

    Parameters
    ----------
    rows : number of rows.
    share : fraction to hold out; None is 0, 0.2 or 0.1, by the rows and whether they have classes.
    classes : class of each row; each class keeps its share, and at least one training row.
    groups : group of each row. Whole groups are held out: in random order those that fit into the
        share, or else the smallest.
    order : random, or time, which holds out the last rows; the table must then be sorted by time.
    seed : seed of the random choice.

    >>> train, valid = hold_out(10, 0.2, order="time")
    >>> valid.tolist()
    [8, 9]
    """
    if share is None:
        many = MANY_ROWS if classes is None else MANY_ROWS_OF_CLASSES
        share = 0.0 if rows < MIN_ROWS_TO_SPLIT else 0.2 if rows < many else 0.1
    if not 0 <= share < 1:
        raise ConfigError(f"the fraction to hold out must be at least 0 and below 1: got {share}.")
    require_one_split(order, groups is not None)
    splits: dict[str, Callable[[], Array]] = {
        "random": lambda: _random(rows, share, classes, seed),
        "time": lambda: np.arange(rows) >= rows - round(share * rows),
    }
    if groups is not None and share:
        splits["random"] = lambda: _groups(groups, share, seed)
    held = choose("split", order, splits)()
    if held.all() or not held.any():
        held = np.zeros(rows, dtype=bool)
    return np.flatnonzero(~held), np.flatnonzero(held)


def make_folds(
    rows: int, count: int, *, classes: Array | None = None, groups: Array | None = None, seed: int
) -> Array:
    """Return the fold of each row, 0 to count − 1, of equal size as far as possible.

    Parameters
    ----------
    rows : number of rows.
    count : number of folds.
    classes : class of each row; each is spread over the folds.
    groups : group of each row; whole groups are in one fold, the largest ones placed first.
    seed : seed of the random choice.

    >>> make_folds(4, 2, seed=0).tolist()
    [1, 0, 0, 1]
    """
    if not 2 <= count <= rows:
        raise ConfigError(f"folds must be between 2 and the number of rows, {rows}: got {count}.")
    rng = np.random.default_rng(seed)
    if groups is None:
        strata = [np.arange(rows)] if classes is None else _rows_by_class(classes)
        order = np.concatenate([rng.permutation(stratum) for stratum in strata])
        folds = np.empty(rows, dtype=np.int64)
        folds[order] = np.arange(rows) % count
        return folds
    names, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if len(names) < count:
        raise InputError(f"there must be at least as many groups as folds: got {len(names)}.")
    filled, fold_of = np.zeros(count), np.empty(len(names), dtype=np.int64)
    draw = rng.random(len(names))
    for group in np.lexsort((draw, -sizes)):
        fold_of[group] = filled.argmin()
        filled[fold_of[group]] += sizes[group]
    return np.asarray(fold_of[index])


def require_one_split(order: str, grouped: bool) -> None:
    """Raise ConfigError if rows would be held out both by group and by time."""
    if grouped and order == "time":
        raise ConfigError(
            "rows can be held out by groups or by time, not by both: got groups and split='time'. "
            "Leave one out."
        )


def describe_groups(groups: Array | None, held: Array, eval_set: bool) -> list[str]:
    """Return a sentence about how many groups are held out."""
    if groups is None:
        return []
    if eval_set:
        return ["groups are ignored, because eval_set is passed."]
    taken = len(np.unique(groups[held]))
    return [f"{taken} of {len(np.unique(groups))} groups are held out."]


def _random(rows: int, share: float, classes: Array | None, seed: int) -> Array:
    """Return a mask of random rows, the same share of each class."""
    draw = np.random.default_rng(seed).random(rows)
    held = np.zeros(rows, dtype=bool)
    strata = [np.arange(rows)] if classes is None else _rows_by_class(classes)
    for stratum in strata:
        count = min(round(share * len(stratum)), len(stratum) - 1)
        held[stratum[np.argsort(draw[stratum])[:count]]] = True
    return held


def _rows_by_class(classes: Array) -> list[Array]:
    return [np.flatnonzero(classes == k) for k in np.unique(classes)]


def _groups(groups: Array, share: float, seed: int) -> Array:
    """Return a mask of the rows of random groups."""
    names, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise InputError(f"there must be at least two groups to hold one out: got {len(names)}.")
    held: list[int] = []
    for group in np.random.default_rng(seed).permutation(len(names)):
        if counts[[*held, group]].sum() <= share * len(groups):
            held.append(group)
    return np.isin(index, held or [counts.argmin()])
