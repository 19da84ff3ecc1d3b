"""Calibration of distributions on held-out rows."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm, poisson

from addnorm.metrics import interval_metrics
from addnorm.models.bins import recalibrated
from addnorm.tabular.conformal import (
    calibration_knots,
    is_calibration,
    is_widening,
    widening_knots,
)
from addnorm.tabular.distribution import Knots, NumberDistribution


def predict(scale: np.ndarray[Any, Any], stated: float) -> NumberDistribution:
    """Normal distributions of rows, `stated` times as wide as they should be, and shifted."""
    edges = np.linspace(-12, 12, 97)
    below = norm.cdf((edges - 0.2 * scale[:, None]) / (stated * scale[:, None]))
    p = np.diff(below, axis=1)
    return NumberDistribution(p / p.sum(axis=1, keepdims=True), edges)


def calibrated(raw: NumberDistribution, knots: Knots, widening: Knots = ()) -> NumberDistribution:
    table = torch.tensor(knots, dtype=torch.float64)
    p, edges = torch.from_numpy(raw.probabilities), torch.from_numpy(raw.edges)
    after, places = recalibrated(p, edges, table[:, 0], table[:, 1])
    return NumberDistribution(after.numpy(), places.numpy(), widening)


def calibrate(raw: NumberDistribution, y: Any) -> tuple[Knots, Knots]:
    """Knots of a distribution and of its intervals, from held-out rows."""
    knots = calibration_knots(raw.pit(y))
    return knots, widening_knots(calibrated(raw, knots).interval_scores(y))


def draw_with_values(
    kind: str, rows: int, seed: int, stated: float
) -> tuple[NumberDistribution, Any]:
    """Rows whose target is often one value, and what a model says of them.

    The model is right if `stated` is 1; otherwise it is wrong about the spread or the mean.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows)
    if kind == "clipped":  # a limit of the scale, which 12 % of the rows have
        inner = np.linspace(-3, 1.8, 60)
        below = norm.cdf((inner - 1.2 * x[:, None]) / (0.6 * stated))
        p = np.c_[below[:, :1], np.diff(below, axis=1), 1 - below[:, -1:]]
        y = np.clip(1.2 * x + rng.normal(size=rows) * 0.6, -3, 1.8)
        return NumberDistribution(p, np.r_[-3, inner, 1.8]), y
    if kind == "zeros":  # half of the rows, the others skewed
        mean, nothing = np.exp(1 + 0.5 * rng.normal(size=rows)), 1 / (1 + np.exp(-x))
        inner = np.r_[0, np.geomspace(0.05, 60, 60)]
        below = 1 - np.exp(-inner / (stated * mean)[:, None])
        p = np.c_[nothing, np.diff(below, axis=1) * (1 - nothing)[:, None]]
        y = np.where(rng.random(rows) < nothing, 0, np.minimum(rng.exponential(mean), 60))
        return NumberDistribution(p / p.sum(axis=1, keepdims=True), np.r_[0, inner]), y
    values, mean = np.arange(31.0), np.exp(0.5 + 0.7 * x)
    p = np.zeros((rows, 61))
    p[:, ::2] = poisson.pmf(values, stated * mean[:, None])
    edges = np.sort(np.r_[values, values])
    y = np.minimum(rng.poisson(mean), 30.0)
    return NumberDistribution(p / p.sum(axis=1, keepdims=True), edges), y


@pytest.mark.parametrize("kind", ("clipped", "zeros", "counts"))
@pytest.mark.parametrize("stated", (1.0, 1.4))
def test_intervals_of_frequent_values_hold_what_they_state(kind: str, stated: float) -> None:
    """Closed intervals between two quantiles would hold up to 12 points more of such targets."""
    shares: list[list[float]] = []
    for seed in range(2):
        knots, widening = calibrate(*draw_with_values(kind, 1500, seed, stated))
        assert is_widening(widening)
        raw, y = draw_with_values(kind, 3000, 100 + seed, stated)
        after = calibrated(raw, knots, widening)
        ends = [after.interval(level) for level in (0.5, 0.8, 0.9, 0.95)]
        for inner, outer in pairwise(ends):
            assert (outer[:, 0] <= inner[:, 0]).all() and (inner[:, 1] <= outer[:, 1]).all()
        shares.append([interval_metrics(each, y)[0] for each in ends[1:]])
    assert np.mean(shares, axis=0) == pytest.approx([0.8, 0.9, 0.95], abs=0.02)


def test_without_held_out_rows_an_interval_has_at_least_its_probability() -> None:
    """Of each row: 0 has the probability 0.4, so that 90 % are from 0 to the 90 % quantile."""
    one = NumberDistribution([[0.4, 0.6]], [0.0, 0.0, 6.0])
    assert one.interval(0.9)[0] == pytest.approx([0.0, 5.0])
    assert one.quantile((0.05, 0.95))[0] == pytest.approx([0.0, 5.5])
    assert one.interval(0.4)[0] == pytest.approx([0.0, 2.0]), "between the quantiles .4 and .6"
    assert one.cdf(-1.0)[0] == 0 and one.cdf(0.0)[0] == 0.4, "none is below the first value"
    assert NumberDistribution([[1.0]], [2.0, 2.0]).interval(0.9).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("kind", ("clipped", "zeros", "counts"))
def test_the_probability_of_an_interval_is_that_between_its_ends(kind: str) -> None:
    """Also where knots of the calibration divide the bin of a value."""
    raw, y = draw_with_values(kind, 300, 0, 1.4)
    one = calibrated(raw, calibration_knots(raw.pit(y)))
    for level in (0.05, 0.37, 0.8, 0.91, 0.99):
        low, high = one.quantile(((1 - level) / 2, (1 + level) / 2)).T
        below = one.cdf(low) - one.cdf(low - 1e-9)  # the probability of the value `low`, if any
        expected = one.cdf(high) - one.cdf(low) + below
        assert one._probability_of(np.full(300, level)) == pytest.approx(expected, abs=1e-6)


def test_held_out_scores_are_levels_from_which_on_targets_are_inside() -> None:
    for kind in ("clipped", "zeros", "counts"):
        one, y = draw_with_values(kind, 200, 0, 1.0)
        scores = one.interval_scores(y)
        assert (scores >= 0).all() and (scores < 1).all()
        for level in (0.3, 0.8, 0.9):
            low, high = one.interval(level).T
            inside, far = (low <= y) & (y <= high), np.abs(scores - level) > 1e-6
            assert np.array_equal(inside[far], (scores < level)[far])


@pytest.mark.parametrize(
    "knots",
    (
        [[0.0, 0.0], [1.0, 1.0]],
        ((0.0, 0.0), (0.5, 0.6), (0.5, 0.7), (1.0, 1.0)),
        ((0.0, 0.0), (0.5, 0.6), (0.6, 0.5), (1.0, 1.0)),
        ((0.0, 0.0), (0.5, float("nan")), (1.0, 1.0)),
        ((0.0, 0.0), (0.5, 0.6)),
    ),
)
def test_what_are_no_levels_of_intervals(knots: Any) -> None:
    assert not is_widening(knots)
    assert is_widening(()) and is_widening(((0.0, 0.0), (0.5, 0.0), (0.6, 0.0), (1.0, 1.0)))


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
        after = calibrated(raw, *calibrate(raw, y))
        for level in (0.8, 0.9, 0.95):
            covered, _ = interval_metrics(after.interval(level), y)
            assert covered >= level - 1e-12, (seed, level)
            if kind == "skewed":
                assert covered < level + 4 / rows or rows < 39, (seed, level)


@pytest.mark.parametrize("kind", ("skewed", "counts"))
def test_new_rows_are_covered_on_average(kind: str) -> None:
    """Over ten draws of 1000 held-out rows; of six counts and of a network that has learnt nothing.

    The rows are told apart by random weights only, and yet that is enough.
    """
    rng, shares = np.random.default_rng(0), []
    for _ in range(10):
        knots = calibrate(*draw(kind, 1000, rng))
        other, new = draw(kind, 1000, rng)
        after = calibrated(other, *knots)
        shares.append([interval_metrics(after.interval(p), new)[0] for p in (0.8, 0.9, 0.95)])
    for share, level in zip(np.mean(shares, axis=0), (0.8, 0.9, 0.95), strict=True):
        assert level - 0.03 <= share <= level + 0.03


def test_the_calibrated_distribution_agrees_with_itself() -> None:
    raw, y = draw("counts", 30, np.random.default_rng(0))
    one = calibrated(raw, calibration_knots(raw.pit(y)))
    low, high = one.quantile((0.1, 0.9)).T
    assert (one.cdf(low) >= 0.1 - 1e-9).all() and (one.cdf(high) >= 0.9 - 1e-9).all()
    low, high = one.interval(0.8).T
    assert (one.cdf(high) - one.cdf(np.nextafter(low, -1)) >= 0.8 - 1e-6).all()
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
