"""Which rows are held out: at random, with the classes' shares kept, or by group, or by time."""

from collections.abc import Callable

import numpy as np

from addnorm.data.table.frame import Array
from addnorm.errors import ConfigError, InputError, choose

FEWEST = 30
"""Rows below which nothing is held out unless asked for."""
MANY = 10_000
"""Rows from which a tenth is enough to stop by: the others are worth more in training."""


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

    Of classes every one keeps a row to train on. Groups are held out whole: those that fit into the
    share, in an order drawn at random, or else the smallest. With order = time the last rows are
    held out: the table must be in order of time.

    >>> train, valid = hold_out(10, 0.2, order="time")
    >>> valid.tolist()
    [8, 9]
    """
    if share is None:
        share = 0.0 if rows < FEWEST else 0.2 if rows < MANY else 0.1
    if not 0 <= share < 1:
        raise ConfigError(f"the share held out must be at least 0 and below 1: got {share}.")
    need_one_way(order, groups is not None)
    ways: dict[str, Callable[[], Array]] = {
        "random": lambda: _random(rows, share, classes, seed),
        "time": lambda: np.arange(rows) >= rows - round(share * rows),
    }
    if groups is not None and share:
        ways["random"] = lambda: _groups(groups, share, seed)
    held = choose("split", order, ways)()
    if held.all() or not held.any():
        held = np.zeros(rows, dtype=bool)
    return np.flatnonzero(~held), np.flatnonzero(held)


def need_one_way(order: str, grouped: bool) -> None:
    """Raise ConfigError if rows are to be held out by their groups and by time."""
    if grouped and order == "time":
        raise ConfigError(
            "rows must be held out by groups or by time, not by both: got groups and split='time'. "
            "Leave one out."
        )


def say_groups(groups: Array | None, held: Array, eval_set: bool) -> list[str]:
    """What became of the groups, in a sentence."""
    if groups is None:
        return []
    if eval_set:
        return ["eval_set is what is held out: groups have no part in it."]
    taken = len(np.unique(groups[held]))
    return [f"{taken} of {len(np.unique(groups))} groups are held out, whole."]


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
    held: list[int] = []
    for group in np.random.default_rng(seed).permutation(len(names)):
        if counts[[*held, group]].sum() <= share * len(groups):
            held.append(group)
    return np.isin(place, held or [counts.argmin()])
