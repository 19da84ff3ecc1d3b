"""Calibration of distributions on held-out rows."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from addnorm.metrics import interval_metrics
from addnorm.models.bins import recalibrated
from addnorm.tabular.conformal import Knots, calibration_knots, is_calibration
from addnorm.tabular.distribution import NumberDistribution


def predict(scale: np.ndarray[Any, Any], stated: float) -> NumberDistribution:
    """Normal distributions of rows, `stated` times as wide as they should be, and shifted."""
    edges = np.linspace(-12, 12, 97)
    below = norm.cdf((edges - 0.2 * scale[:, None]) / (stated * scale[:, None]))
    p = np.diff(below, axis=1)
    return NumberDistribution(p / p.sum(axis=1, keepdims=True), edges)


def calibrated(raw: NumberDistribution, knots: Knots) -> NumberDistribution:
    table = torch.tensor(knots, dtype=torch.float64)
    p, edges = torch.from_numpy(raw.probabilities), torch.from_numpy(raw.edges)
    after, places = recalibrated(p, edges, table[:, 0], table[:, 1])
    return NumberDistribution(after.numpy(), places.numpy())


def draw(kind: str, rows: int, rng: np.random.Generator) -> tuple[NumberDistribution, Any]:
    """Rows of a skewed target or of counts, and what a network with random weights says of them."""
    x = rng.normal(size=(rows, 2))
    if kind == "counts":
        y, values = np.minimum(rng.poisson(np.exp(0.3 + 0.5 * x[:, 0])), 5.0), np.arange(6.0)
        edges = np.sort(np.concatenate((values, values)))
    else:
        y, edges = (
            np.minimum(np.exp(x[:, 0] + rng.normal(size=rows)), 400),
            np.geomspace(1, 401, 20),
        )
        edges = edges - 1
    weights = np.random.default_rng(5).normal(size=(3, len(edges) - 1))
    logits = 2 * np.tanh(np.c_[x, np.ones(rows)]) @ weights
    return NumberDistribution(*(torch.from_numpy(logits).softmax(dim=1).numpy(), edges)), y


@pytest.mark.parametrize("kind", ("skewed", "counts"))
@pytest.mark.parametrize("rows", (20, 39, 40, 100, 1000))
def test_held_out_rows_are_covered_whatever_the_network(kind: str, rows: int) -> None:
    """With finitely many rows, and for a network that has learnt nothing."""
    for seed in range(4):
        raw, y = draw(kind, rows, np.random.default_rng(seed))
        after = calibrated(raw, calibration_knots(raw.pit(y, seed)))
        for level in (0.8, 0.9, 0.95):
            covered, _ = interval_metrics(after.interval(level), y)
            assert covered >= level - 1e-12, (seed, level)
            if kind == "skewed":
                assert covered < level + 4 / rows or rows < 39, (seed, level)


@pytest.mark.parametrize("kind", ("skewed", "counts"))
def test_new_rows_are_covered_on_average(kind: str) -> None:
    """Over ten draws of 1000 held-out rows; counts are covered more often, never less."""
    rng, shares = np.random.default_rng(0), []
    for seed in range(10):
        raw, y = draw(kind, 1000, rng)
        knots = calibration_knots(raw.pit(y, seed))
        other, new = draw(kind, 1000, rng)
        after = calibrated(other, knots)
        shares.append([interval_metrics(after.interval(p), new)[0] for p in (0.8, 0.9, 0.95)])
    for share, level in zip(np.mean(shares, axis=0), (0.8, 0.9, 0.95), strict=True):
        assert share >= level - 0.03
        assert kind == "counts" or share <= level + 0.03


def test_the_calibrated_distribution_agrees_with_itself() -> None:
    raw, y = draw("counts", 30, np.random.default_rng(0))
    one = calibrated(raw, calibration_knots(raw.pit(y)))
    low, high = one.interval(0.8).T
    assert (one.cdf(low) >= 0.1 - 1e-9).all() and (one.cdf(high) >= 0.9 - 1e-9).all()
    samples = one.sample(4000, seed=0)
    assert one.mean == pytest.approx(samples.mean(axis=1), abs=0.15)
    assert one.std == pytest.approx(samples.std(axis=1), abs=0.15)
    spread = np.abs(samples[:, :2000] - samples[:, 2000:]).mean(axis=1) / 2
    crps = np.abs(samples - y[:, None]).mean(axis=1) - spread
    assert one.crps(y) == pytest.approx(crps, abs=0.15)
    assert np.isinf(one.pdf(2.0)).all() and np.isfinite(one.pdf(2.5)).all()
    assert np.array_equal(one[3:5].interval(0.9), one.interval(0.9)[3:5])
    assert np.array_equal(one[3].interval(0.9)[0], one.interval(0.9)[3]) and "0 to 5" in repr(one)


@pytest.mark.parametrize("stated", (0.5, 1.0, 1.8))
@pytest.mark.parametrize("rows", (150, 1500))
def test_calibrated_intervals_cover_what_they_state(stated: float, rows: int) -> None:
    """Rows differ in their noise; the model is wrong about its size, in one way for all rows."""
    rng = np.random.default_rng(3)
    scale, other = rng.uniform(0.3, 2.0, rows), rng.uniform(0.3, 2.0, 4000)
    knots = calibration_knots(predict(scale, stated).pit(rng.normal(size=rows) * scale))
    assert is_calibration(knots)
    raw, targets = predict(other, stated), rng.normal(size=4000) * other
    after = calibrated(raw, knots)
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
