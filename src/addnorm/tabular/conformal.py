"""Calibrate predicted distributions on held-out rows, so that intervals cover what they state.

With u_i = F_i(y_i) on n held-out rows, in ascending order, a new row's u is below u_(k) with the
probability k/(n + 1), whatever the model, if its rows are like the held-out ones. So

    F ← R(F),    R(u_(k)) = k/(n + 1) for some k, piecewise linear between, R(0) = 0, R(1) = 1

makes quantiles, and intervals between two quantiles, cover what they state on average; with n rows
their coverage varies by √(p(1 − p)/n) about p. Kuleshov et al. 2018 (1807.00263) recalibrate F so;
Chernozhukov et al. 2021 (1909.07889, distributional conformal prediction) take the rank of u.

For a level p of a knot, k is rounded outwards: ⌊p(n + 1)⌋ below the median, ⌈p(n + 1)⌉ above. An
interval between two knots then covers at least what it states, and at most 2/(n + 1) more, of new
targets on average, and at least what it states of the held-out rows themselves (Vovk et al. 2005;
Lei et al. 2018, 1604.04173, theorem 2.2). Where F jumps, at a value that many rows have, u is drawn
from the jump: the value is inside of a closed interval if any part of its jump is, so intervals of
counts would cover more than they state. A target outside of all bins is in no interval.

Such intervals are therefore calibrated by themselves. Let s_i be the level above which row i's
interval contains y_i: the probability that the model gives to all narrower ones. A new row's s is
at most s_(k) with the probability k/(n + 1), or more if scores are equal, so the interval that is
stated as p is that of the level s_(k), k = ⌈p(n + 1)⌉ (split conformal prediction: Lei et al. 2018,
§2). Scores seldom are equal even for counts, since the probabilities differ from row to row.
The held-out rows also decided when to stop, which makes u a little too even; test rows show how
much.
"""

from typing import Any

import numpy as np

from addnorm.data.table.frame import Array
from addnorm.tabular.distribution import Knots

MIN_CALIBRATION_ROWS = 20
"""Fewer held-out rows change nothing: their quantiles say too little."""
FEW_KNOTS_ROWS = 200
"""Up to this number of held-out rows, R has few knots."""
FEW_LEVELS = (0.025, 0.05, 0.1, 0.5, 0.9, 0.95, 0.975)
MANY_LEVELS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99, 0.995),
)
INTERVAL_LEVELS = (*(step / 10 for step in range(1, 10)), 0.85, 0.95, 0.975, 0.99)
"""Levels of intervals with knots of their own."""
MIN_GAP = 1e-9
"""Distance of knots, and by how much they lie outside of the row that they come from."""


def calibration_knots(pit: Array) -> Knots:
    """Return the knots (u, R(u)) from u = F(y) of held-out rows; none if there are too few rows.

    >>> [round(x, 4) for x in calibration_knots(np.linspace(0.25, 0.75, 39))[3]]
    [0.2895, 0.1]
    """
    count = len(pit)
    if count < MIN_CALIBRATION_ROWS:
        return ()
    levels = np.array(MANY_LEVELS if count > FEW_KNOTS_ROWS else FEW_LEVELS)
    places = np.round(levels * (count + 1), 6)
    is_known = (places >= 1) & (places <= count)
    levels, places = levels[is_known], places[is_known]
    ordered = np.sort(pit)
    stated = np.interp(places, np.arange(1, count + 1), ordered)
    is_low, is_high = levels < 0.5, levels > 0.5
    stated[is_low] = ordered[np.floor(places[is_low]).astype(int) - 1] - MIN_GAP
    stated[is_high] = ordered[np.ceil(places[is_high]).astype(int) - 1] + MIN_GAP
    # Equal knots are moved apart, away from the median.
    steps, middle = MIN_GAP * np.arange(len(levels)), int(is_low.sum())
    low = np.minimum.accumulate((stated - steps)[: middle + 1][::-1])[::-1] + steps[: middle + 1]
    high = np.maximum.accumulate((stated - steps)[middle:]) + steps[middle:]
    stated = np.concatenate((low[:-1], high))
    stated = np.clip(stated, steps + MIN_GAP, 1 - MIN_GAP - steps[::-1])
    inner = zip(stated.tolist(), levels.tolist(), strict=True)
    return ((0.0, 0.0), *inner, (1.0, 1.0))


def widening_knots(scores: Array) -> Knots:
    """Return (stated, used) levels of intervals from the scores of held-out rows; none for few.

    >>> widening_knots(np.arange(39) / 64)[10]
    (0.9, 0.546875)
    """
    count = len(scores)
    if count < MIN_CALIBRATION_ROWS:
        return ()
    levels = np.sort(INTERVAL_LEVELS)
    places = np.ceil(np.round(levels * (count + 1), 6)).astype(int)
    is_known = places <= count
    used = np.clip(np.sort(scores)[places[is_known] - 1], 0.0, 1.0)
    inner = zip(levels[is_known].tolist(), used.tolist(), strict=True)
    return ((0.0, 0.0), *inner, (1.0, 1.0))


def is_widening(knots: Any) -> bool:
    """Whether knots are levels of intervals: stated ones ascend, used ones do not descend."""
    steps = _steps_of(knots)
    return steps is not None and bool((steps[:, 0] > 0).all() and (steps[:, 1] >= 0).all())


def is_calibration(knots: Any) -> bool:
    """Whether knots are those of a calibration: finite pairs that ascend from 0 to 1, or none."""
    steps = _steps_of(knots)
    return steps is not None and bool((steps > 0).all())


def _steps_of(knots: Any) -> Array | None:
    """Return the steps from knot to knot, (knots − 1, 2), if they go from (0, 0) to (1, 1).

    None if they do not, or are not pairs of numbers; no knots have no steps.
    """
    if not isinstance(knots, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 and all(type(x) is float for x in pair)
        for pair in knots
    ):
        return None
    if not knots:
        return np.empty((0, 2))
    table = np.array(knots)
    has_ends = bool((table[0] == 0).all() and (table[-1] == 1).all())
    return np.diff(table, axis=0) if has_ends else None
