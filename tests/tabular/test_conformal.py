"""Calibration of distributions on held-out rows."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from addnorm.models.bins import recalibrated
from addnorm.tabular.conformal import calibration_knots, is_calibration
from addnorm.tabular.distribution import NumberDistribution


def predict(scale: np.ndarray[Any, Any], stated: float) -> NumberDistribution:
    """Normal distributions of rows, `stated` times as wide as they should be, and shifted."""
    edges = np.linspace(-12, 12, 97)
    below = norm.cdf((edges - 0.2 * scale[:, None]) / (stated * scale[:, None]))
    p = np.diff(below, axis=1)
    return NumberDistribution(p / p.sum(axis=1, keepdims=True), edges)


@pytest.mark.parametrize("stated", (0.5, 1.0, 1.8))
@pytest.mark.parametrize("rows", (150, 1500))
def test_calibrated_intervals_cover_what_they_state(stated: float, rows: int) -> None:
    """Rows differ in their noise; the model is wrong about its size, in one way for all rows."""
    rng = np.random.default_rng(3)
    scale, other = rng.uniform(0.3, 2.0, rows), rng.uniform(0.3, 2.0, 4000)
    knots = calibration_knots(predict(scale, stated).pit(rng.normal(size=rows) * scale))
    assert is_calibration(knots)
    table = torch.tensor(knots, dtype=torch.float64)
    raw, targets = predict(other, stated), rng.normal(size=4000) * other
    p = recalibrated(torch.from_numpy(raw.probabilities), table[:, 0], table[:, 1])
    after = NumberDistribution(p.numpy(), raw.edges)
    far = 3 * np.sqrt(0.16 / rows) + 0.02
    pit = np.sort(after.pit(targets))
    assert np.abs(pit - np.linspace(0, 1, 4000)).max() < 1.63 / np.sqrt(rows) + 0.03
    for level in (0.8, 0.9, 0.95):
        low, high = after.interval(level).T
        assert ((low <= targets) & (targets <= high)).mean() == pytest.approx(level, abs=far)


def test_ranks_are_of_one_more_row() -> None:
    """Of 39 rows, the second smallest is the 5 % quantile of a new row: 2/(39 + 1)."""
    pit = np.linspace(0.025, 0.975, 39)
    assert dict((observed, stated) for stated, observed in calibration_knots(pit)) == {
        0.0: 0.0,
        **{level: pytest.approx(level) for level in (0.025, 0.05, 0.1, 0.5, 0.9, 0.95, 0.975)},
        1.0: 1.0,
    }


def test_few_rows_change_nothing() -> None:
    assert calibration_knots(np.full(19, 0.5)) == ()
    few = calibration_knots(np.linspace(0.1, 0.9, 20))
    assert [observed for _, observed in few] == [0.0, 0.05, 0.1, 0.5, 0.9, 0.95, 1.0]


def test_equal_values_leave_an_ascending_calibration() -> None:
    for pit in (np.zeros(50), np.ones(50), np.full(50, 0.5)):
        assert is_calibration(calibration_knots(pit))


@pytest.mark.parametrize(
    "knots",
    (
        ((0.0, 0.0),),
        ((0.0, 0.0), (0.5, 0.6)),
        ((0.0, 0.0), (0.6, 0.5), (0.5, 0.6), (1.0, 1.0)),
        ((0.0, 0.0), (0.5, float("nan")), (1.0, 1.0)),
        ((0, 0), (1, 1)),
        [(0.0, 0.0), (1.0, 1.0)],
        ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        7,
    ),
)
def test_what_is_not_a_calibration(knots: Any) -> None:
    assert not is_calibration(knots)
