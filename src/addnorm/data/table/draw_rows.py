"""Rows like those of the training, drawn from what an encoder stores: no training row is needed.

Each column is drawn independently of the others, from its own training distribution: a category by
its shares, a number by its quantiles, both missing as often as they were. Every column is
stratified: of n rows, one is drawn from each n-th of its distribution.
"""

import numpy as np
import torch

from addnorm.data.table.encode import (
    FIRST_VALUE,
    CategoryRule,
    EncodedTable,
    NumberRule,
    TableEncoder,
    scale,
)
from addnorm.data.table.frame import Array


def has_distributions(encoder: TableEncoder) -> bool:
    """Whether an encoder stores the distribution of every column; those saved before do not."""
    numbers = all(rule.missing is not None for rule in encoder.numbers)
    return numbers and all(rule.shares for rule in encoder.categories)


def draw_rows(encoder: TableEncoder, count: int, rng: np.random.Generator) -> EncodedTable:
    """Return rows with each column drawn from its training distribution.

    A column whose distribution is not stored is drawn from a standard normal distribution, which
    scaled numbers have roughly, or evenly from the values of a category.
    """
    numbers = np.empty((count, len(encoder.numbers)), dtype=np.float32)
    for i, rule in enumerate(encoder.numbers):
        numbers[:, i] = _draw_numbers(rule, _stratified_shares(count, rng), rng)
    codes = np.empty((count, len(encoder.categories)), dtype=np.int64)
    for i, category in enumerate(encoder.categories):
        codes[:, i] = _draw_codes(category, _stratified_shares(count, rng))
    return EncodedTable(torch.from_numpy(numbers), torch.from_numpy(codes))


def _stratified_shares(count: int, rng: np.random.Generator) -> Array:
    """Return numbers from 0 to 1 in random order, one in each of `count` equal parts."""
    return (rng.permutation(count) + rng.random(count)) / count


def _draw_numbers(rule: NumberRule, shares: Array, rng: np.random.Generator) -> Array:
    grid = np.asarray(rule.knots if rule.scaling == "quantile" else rule.quantiles)
    if not len(grid):
        if rule.scaling == "none":
            return scale(rule.low + shares * (rule.high - rule.low), rule)
        return rng.normal(size=len(shares))
    missing = rule.missing or 0.0
    present = np.clip((shares - missing) / max(1 - missing, 1e-9), 0, 1)
    return scale(np.where(shares < missing, np.nan, _quantile(grid, present)), rule)


def _quantile(grid: Array, shares: Array) -> Array:
    """Return quantiles from a grid of them: interpolated, but beside a tie the nearer of the two.

    A tie is a value that many rows share; between it and the next there may be no others.
    """
    position = shares * (len(grid) - 1)
    low = np.minimum(position.astype(int), len(grid) - 2)
    fraction = position - low
    tied = np.concatenate(([False], np.diff(grid) == 0, [False]))
    beside_tie = tied[low] | tied[low + 2]
    fraction = np.where(beside_tie, np.round(fraction), fraction)
    return np.asarray(grid[low] * (1 - fraction) + grid[low + 1] * fraction)


def _draw_codes(rule: CategoryRule, shares: Array) -> Array:
    if not rule.shares:
        return FIRST_VALUE + (shares * max(len(rule.values), 1)).astype(int)
    ends = np.cumsum(rule.shares)
    found = np.searchsorted(ends, shares * ends[-1], side="right")
    return np.minimum(found, len(ends) - 1)
