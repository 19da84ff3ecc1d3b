"""The distribution of a predicted number, and the bins over which a network predicts it.

The bins of a target are placed by a rule, on the training rows alone:

    values      a value that a share of at least 1/bins of the rows has (0, or the limit of a
                scale) is a bin of its own, without width
    the others  each bin takes an equal share of ½ (rows) + ½ (length), so that bins are narrow
                where rows are, and wide in the tail of a skewed target
    ends        a tenth of the range beyond the smallest and the largest number; but not beyond a
                value with a bin of its own, and not below 0 if no training row is

Bins are ranges of the target itself. The mean of the distribution is that of the target, with
nothing to transform back: for a skewed target, exp of a mean logarithm would be the median.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from addnorm.data.table.frame import Array
from addnorm.errors import ConfigError, InputError
from addnorm.metrics import interval_metrics, pinball_loss, regression_metrics
from addnorm.models.bins import bin_means, cdf_of, crps_of, cumulative, quantiles_of

TARGET_BINS = 64
"""Bins of a target, besides the values that are bins of their own."""
MIN_BINS, ROWS_PER_BIN = 16, 4
"""Fewest bins, and training rows for each bin above that."""
MAX_OWN_VALUES, MIN_OWN_ROWS = 32, 5
"""Most values that are bins of their own, and the fewest rows that must have one."""
BEYOND = 0.1
"""How far the bins reach beyond the training targets, as a share of their range."""
PLACES = 4096
LEAST = 1e-12
"""A bin without width is a value if it has a greater probability."""
INTERVALS = (0.8, 0.9, 0.95)
"""Intervals whose coverage is reported."""
LEVEL_ERROR, HALVINGS = 1e-9, 34
"""Rounding that two levels may differ by; steps of halving that find a level, to 2⁻³⁴."""
Knots = tuple[tuple[float, float], ...]
"""Pairs of levels that ascend from 0 to 1."""
FAN_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
MAX_GROUPS, MIN_GROUP = 40, 10
"""Groups of rows of a fan chart, and the fewest rows of one."""
PINBALL = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Levels of quantiles whose pinball loss is reported."""


@dataclass(frozen=True)
class TargetBins:
    """The bins of a target.

    Parameters
    ----------
    edges : edges of the bins in units of the target, ascending; equal neighbours are one value.
    values : how many bins are one value.
    bounds : sentences on the ends of the bins.
    """

    edges: Array
    values: int
    bounds: tuple[str, ...]

    def describe(self) -> str:
        """Return a sentence on the bins, for the report."""
        low, high = self.edges[0], self.edges[-1]
        alone = f", {self.values} of them single values" if self.values else ""
        ends = f" ({'; '.join(self.bounds)})" if self.bounds else ""
        return f"{len(self.edges) - 1} bins from {low:.6g} to {high:.6g}{alone}{ends}"


def make_target_bins(target: Array, weight: Array | None = None) -> TargetBins:
    """Return the bins of a target by the rule above; rows of weight 0 do not count.

    >>> make_target_bins(np.arange(100.0)).describe()
    '25 bins from 0 to 108.9 (not below 0, as no training row is)'
    """
    known = target if weight is None or not weight.any() else target[weight > 0]
    ordered = np.sort(known.astype(np.float64))
    low, high = float(ordered[0]), float(ordered[-1])
    span = (high - low) or max(abs(low), 1.0)
    count = int(np.clip(len(ordered) // ROWS_PER_BIN, MIN_BINS, TARGET_BINS))
    values = _frequent_values(ordered, count)
    start, stop, bounds = low - BEYOND * span, high + BEYOND * span, []
    if low in values and high > low:
        start, bounds = low, [f"not below {low:.6g}, which many rows have"]
    elif low >= 0 > start:
        start, bounds = 0.0, ["not below 0, as no training row is"]
    if high in values and high > low:
        stop, bounds = high, [*bounds, f"not above {high:.6g}, which many rows have"]
    rest = ordered[~np.isin(ordered, values)]
    grid = np.linspace(start, stop, PLACES)
    share = np.searchsorted(rest, grid, side="right") / max(len(rest), 1)
    mixed = (share + np.linspace(0, 1, PLACES)) / (2 if len(rest) else 1)
    edges = np.interp(np.linspace(mixed[0], mixed[-1], count + 1), mixed, grid)
    edges = np.unique(np.concatenate((edges, values)))
    return TargetBins(np.sort(np.concatenate((edges, values))), len(values), tuple(bounds))


def _frequent_values(ordered: Array, bins: int) -> Array:
    values, rows = np.unique(ordered, return_counts=True)
    most = np.argsort(-rows, kind="stable")[:MAX_OWN_VALUES]
    is_frequent = (rows[most] >= len(ordered) / bins) & (rows[most] >= MIN_OWN_ROWS)
    return np.asarray(np.sort(values[most[is_frequent]]))


class NumberDistribution:
    """The predicted distributions of some rows: of each, the probability of every bin.

    Parameters
    ----------
    probabilities : (rows, bins); of a row, they add up to 1.
    edges : (bins + 1,), or (rows, bins + 1) if each row has its own; ascending, in units of the
        target. After calibration each row has its own: its knots are edges, too.
    widening : (stated, used) levels of intervals, found on held-out rows (conformal.py); () if
        intervals are used as stated.

    Examples
    --------
    >>> coin = NumberDistribution(np.array([[0.5, 0.5]]), np.array([0.0, 1.0, 3.0]))
    >>> coin.mean, coin.quantile(0.5), coin.cdf([2.0])
    (array([1.25]), array([1.]), array([0.75]))
    """

    def __init__(self, probabilities: ArrayLike, edges: ArrayLike, widening: Knots = ()) -> None:
        self.probabilities = np.asarray(probabilities, dtype=np.float64)
        self.edges = np.asarray(edges, dtype=np.float64)
        self.widening = widening

    def __len__(self) -> int:
        return len(self.probabilities)

    def __getitem__(self, rows: Any) -> "NumberDistribution":
        edges = self.edges if self.edges.ndim == 1 else np.atleast_2d(self.edges[rows])
        return NumberDistribution(np.atleast_2d(self.probabilities[rows]), edges, self.widening)

    def __repr__(self) -> str:
        bins, low, high = self.probabilities.shape[1], self.edges.min(), self.edges.max()
        ends = f"{low:.6g} to {high:.6g}"
        shown = ""
        for row in range(min(len(self), 3)):
            mean = self.mean[row]
            first, last = self[row].interval(0.9)[0]
            shown += f"\n  row {row}: mean {mean:.6g}, 90 % between {first:.6g} and {last:.6g}"
        more = "\n  …" if len(self) > 3 else ""
        return f"<{len(self)} distributions over {bins} bins from {ends}>{shown}{more}"

    @property
    def mean(self) -> Array:
        """Mean of each row."""
        return np.asarray((self._p * bin_means(self._e)).sum(dim=1).numpy())

    @property
    def median(self) -> Array:
        """Median of each row."""
        return self.quantile(0.5)

    @property
    def std(self) -> Array:
        """Standard deviation of each row."""
        low, high = self._e[..., :-1], self._e[..., 1:]
        square = (self._p * (low * low + low * high + high * high) / 3).sum(dim=1)
        return np.asarray(np.sqrt(np.maximum(square.numpy() - self.mean**2, 0.0)))

    def quantile(self, levels: ArrayLike) -> Array:
        """Return quantiles: (rows,) of one level, (rows, levels) of several."""
        several = check_levels(levels)
        found = quantiles_of(self._p, self._e, torch.from_numpy(several)).numpy()
        return np.asarray(found if np.ndim(levels) else found[:, 0])

    def interval(self, level: float = 0.9) -> Array:
        """Return low and high ends, (rows, 2), between which a share `level` of targets falls.

        The ends belong to the interval. They are the quantiles (1 − t)/2 and (1 + t)/2, where t is
        the level, or, if single values have probabilities, the least t whose interval has the
        probability `level`: one that ends at 0, which 4 of 10 rows have, holds all of these.
        """
        used = np.full(len(self), float(check_levels(level, "level")[0]))
        if self.has_values:
            if self.widening:
                stated, found = np.array(self.widening).T
                used = np.interp(used, stated, found)
            used = self._spread_of(used)
        return self._ends(used).numpy()

    @property
    def has_values(self) -> bool:
        """Whether a bin of one value has a probability."""
        return bool(((np.diff(self.edges) == 0) & (self.probabilities > LEAST)).any())

    def interval_scores(self, y: ArrayLike) -> Array:
        """Return, of each row, the level above which its interval contains y.

        y is within the quantiles (1 − t)/2 and (1 + t)/2 if (1 − t)/2 ≤ P(Y ≤ y) and
        P(Y < y) ≤ (1 + t)/2. The level is the probability of the intervals of all smaller t.
        """
        below, upto = (part.numpy() for part in cdf_of(self._p, self._e, self._numbers(y)))
        spread = np.maximum(1 - 2 * upto, 2 * below - 1) - 2 * LEVEL_ERROR
        return np.where(spread > 0, self._probability_of(np.maximum(spread, 0.0)), 0.0)

    def _ends(self, spread: Array) -> Tensor:
        """Return the quantiles (1 − t)/2 and (1 + t)/2 of each row, for its t."""
        t = torch.from_numpy(np.minimum(spread, 1.0))[:, None]
        return quantiles_of(self._p, self._e, torch.cat(((1 - t) / 2, (1 + t) / 2), dim=1))

    def _probability_of(self, spread: Array) -> Array:
        """Return the probability of the closed interval between those quantiles.

        It is (1 + t)/2 − (1 − t)/2 = t, but where an end is one value all of its probability.
        """
        t = torch.from_numpy(np.minimum(spread + LEVEL_ERROR, 1.0))[:, None]
        ends = torch.cat(((1 - t) / 2, (1 + t) / 2), dim=1)
        below, low, high = self._jumps
        place = torch.searchsorted(below, ends, right=True).clamp(1, low.shape[1]) - 1
        first = torch.minimum(ends[:, 0], low.gather(1, place[:, :1])[:, 0])
        last = torch.maximum(ends[:, 1], high.gather(1, place[:, 1:])[:, 0])
        return np.asarray((last - first).numpy())

    @cached_property
    def _jumps(self) -> tuple[Tensor, Tensor, Tensor]:
        """F at each edge, and of each bin P(Y < v) and P(Y ≤ v) if it is one value v, else 1 and 0.

        Neighbouring bins of the same value are one: a knot of the calibration may divide it.
        """
        below, edges = cumulative(self._p), self._e
        count, is_same = edges.shape[-1], edges.diff() == 0
        index = torch.arange(count).expand(edges.shape)
        none = torch.zeros_like(is_same[..., :1])
        first = index.masked_fill(torch.cat((none, is_same), dim=-1), 0).cummax(dim=-1).values
        last = index.masked_fill(torch.cat((is_same, none), dim=-1), count).flip(-1)
        last = last.cummin(dim=-1).values.flip(-1)
        first, last = (places[..., :-1].expand(len(below), -1) for places in (first, last))
        low = torch.where(is_same, below.gather(1, first), 1.0)
        high = torch.where(is_same, below.gather(1, last), 0.0)
        return below, low, high

    def _spread_of(self, probability: Array) -> Array:
        """Return the least t of each row whose interval has at least a probability."""
        low, high = np.zeros(len(self)), np.ones(len(self))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            is_enough = self._probability_of(middle) >= probability + LEVEL_ERROR
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
        return high + LEVEL_ERROR

    def cdf(self, y: ArrayLike) -> Array:
        """Return the probability of at most y: one number, or one for each row."""
        return np.asarray(cdf_of(self._p, self._e, self._numbers(y))[1].numpy())

    def pdf(self, y: ArrayLike) -> Array:
        """Return the density at y, one number or one for each row; infinite at a bin of one value.

        It is constant within a bin, and 0 outside of all bins.
        """
        numbers = self._numbers(y).numpy()[:, None]
        edges = np.broadcast_to(self.edges, (len(self), self.edges.shape[-1]))
        low, high = edges[:, :-1], edges[:, 1:]
        is_last = (numbers == high) & (high == edges[:, -1:])
        is_here = ((low <= numbers) & (numbers < high)) | (is_last & (low < high))
        width = np.where(high > low, high - low, 1.0)
        density = np.where(is_here, self.probabilities / width, 0.0).sum(axis=1)
        is_value = (low == high) & (low == numbers) & (self.probabilities > LEAST)
        return np.where(is_value.any(axis=1), np.inf, density)

    def pit(self, y: ArrayLike, seed: int = 0) -> Array:
        """Return F(y) of each row, uniform if the distributions are right (Dawid 1984).

        Where F jumps, at a bin of one value, a number is drawn from the jump.
        """
        below, upto = (part.numpy() for part in cdf_of(self._p, self._e, self._numbers(y)))
        draw = np.random.default_rng(seed).uniform(size=len(below))
        return np.asarray(below + (upto - below) * draw)

    def crps(self, y: ArrayLike) -> Array:
        """Return the continuous ranked probability score of each row; see models/bins.py."""
        return np.asarray(crps_of(self._p, self._e, self._numbers(y)).numpy())

    def sample(self, count: int = 1, seed: int | None = None) -> Array:
        """Return random numbers of each row, (rows, count)."""
        draws = np.random.default_rng(seed).uniform(size=(len(self), count))
        return np.asarray(quantiles_of(self._p, self._e, torch.from_numpy(draws)).numpy())

    @property
    def _p(self) -> Tensor:
        return torch.from_numpy(self.probabilities)

    @property
    def _e(self) -> Tensor:
        return torch.from_numpy(self.edges)

    def _numbers(self, y: ArrayLike) -> Tensor:
        numbers = np.asarray(y, dtype=np.float64)
        if numbers.ndim > 1 or (numbers.ndim and len(numbers) != len(self)):
            raise InputError(
                f"y must be one number, or one for each of the {len(self)} rows: got the shape "
                f"{numbers.shape}."
            )
        return torch.from_numpy(np.array(np.broadcast_to(numbers, (len(self),))))


def number_metrics(distribution: NumberDistribution, targets: Array) -> dict[str, float]:
    """Return RMSE, MAE and R² of the mean, CRPS, pinball loss, coverage and width of intervals."""
    figures = regression_metrics(distribution.mean, targets)
    figures["crps"] = float(distribution.crps(targets).mean())
    figures["pinball"] = pinball_loss(distribution.quantile(PINBALL), PINBALL, targets)
    for level in INTERVALS:
        covered, width = interval_metrics(distribution.interval(level), targets)
        figures |= {f"coverage_{100 * level:.0f}": covered, f"width_{100 * level:.0f}": width}
    return figures


def coverage_curve(
    distribution: NumberDistribution, targets: Array
) -> list[tuple[float, float, int]]:
    """Return (stated level, share of targets inside, rows) of intervals from 10 to 95 %."""
    levels = (*(step / 10 for step in range(1, 10)), 0.95)
    shares = [interval_metrics(distribution.interval(level), targets)[0] for level in levels]
    return [(level, share, len(targets)) for level, share in zip(levels, shares, strict=True)]


def fan_groups(distribution: NumberDistribution, targets: Array) -> list[dict[str, Any]]:
    """Return groups of rows, by their predicted median: predicted and observed quantiles, rows.

    Groups have at least MIN_GROUP rows, so that none shows the target of a row; the residual is
    that of the mean.
    """
    count = min(MAX_GROUPS, len(targets) // MIN_GROUP)
    if not count:
        return []
    order = np.argsort(distribution.median, kind="stable")
    predicted, residual = distribution.quantile(FAN_LEVELS), targets - distribution.mean
    return [
        {
            "predicted": predicted[rows].mean(axis=0).tolist(),
            "observed": np.quantile(targets[rows], FAN_LEVELS).tolist(),
            "residual": np.quantile(residual[rows], FAN_LEVELS).tolist(),
            "rows": len(rows),
        }
        for rows in np.array_split(order, count)
    ]


def check_levels(levels: ArrayLike, name: str = "levels") -> Array:
    """Return levels as an array; ConfigError if one is not between 0 and 1.

    >>> check_levels(0.9)
    array([0.9])
    """
    try:
        several = np.atleast_1d(np.asarray(levels, dtype=np.float64))
    except (TypeError, ValueError):
        several = np.array([np.nan])
    if several.ndim != 1 or not len(several) or not ((several > 0) & (several < 1)).all():
        raise ConfigError(f"{name} must lie between 0 and 1: got {levels!r}. Try 0.9.")
    return several
