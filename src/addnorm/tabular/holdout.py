"""Which rows are held out: at random, with the classes' shares kept, or by group, or by time."""

from collections.abc import Callable

import numpy as np

from addnorm.data.frame import Array
from addnorm.errors import ConfigError, InputError, choose

FEWEST = 30
"""Rows below which nothing is held out unless asked for."""


def hold_out(
    rows: int,
    share: float | None,
    *,
    classes: Array | None = None,
    groups: Array | None = None,
    order: str = "random",
    seed: int = 0,
) -> tuple[Array, Array]:
    """Numbers of the rows to train on, and of those held out (none, if the share is 0).

    Of classes every one keeps a row to train on. Groups are held out whole. With order = time the
    last rows are held out: the table must be in order of time.

    >>> train, valid = hold_out(10, 0.2, order="time")
    >>> valid.tolist()
    [8, 9]
    """
    if share is None:
        share = 0.0 if rows < FEWEST else 0.2 if rows < 20_000 else 0.15
    if not 0 <= share < 1:
        raise ConfigError(f"the share held out must be at least 0 and below 1: got {share}.")
    ways: dict[str, Callable[[], Array]] = {
        "random": lambda: _random(rows, share, classes, seed),
        "time": lambda: np.arange(rows) >= rows - round(share * rows),
    }
    held = choose("split", order, ways)() if groups is None else _groups(groups, share, seed)
    if share and (held.all() or not held.any()):
        held = np.zeros(rows, dtype=bool)
    return np.flatnonzero(~held), np.flatnonzero(held)


def _random(rows: int, share: float, classes: Array | None, seed: int) -> Array:
    """Ranks inside each class, at random; the lowest are held out."""
    draw = np.random.default_rng(seed).random(rows)
    held = np.zeros(rows, dtype=bool)
    strata = [np.arange(rows)] if classes is None else _members(classes)
    for stratum in strata:
        count = min(round(share * len(stratum)), len(stratum) - 1)
        held[stratum[np.argsort(draw[stratum])[:count]]] = True
    return held


def _members(classes: Array) -> list[Array]:
    return [np.flatnonzero(classes == k) for k in np.unique(classes)]


def _groups(groups: Array, share: float, seed: int) -> Array:
    names, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise InputError(f"there must be two groups or more to hold one out: got {len(names)}.")
    order = np.random.default_rng(seed).permutation(len(names))
    taken = np.cumsum(counts[order]) <= max(share * len(groups), counts[order][0])
    return np.isin(place, order[taken])
