"""The bins of a target, and the distribution of a predicted number."""

from typing import Any

import numpy as np
import pytest

from addnorm.errors import ConfigError, InputError
from addnorm.tabular.distribution import (
    INTERVALS,
    NumberDistribution,
    coverage_curve,
    fan_groups,
    make_target_bins,
    number_metrics,
)

RNG = np.random.default_rng(0)
SKEWED = np.exp(RNG.normal(size=2000))


def test_bins_of_a_skewed_target_are_narrow_where_rows_are() -> None:
    bins = make_target_bins(SKEWED)
    widths = np.diff(bins.edges)
    assert len(bins.edges) == 65 and bins.edges[0] == 0.0 and bins.values == 0
    assert widths[:10].max() < widths[-5:].min() / 3
    assert bins.edges[-1] == pytest.approx(SKEWED.max() + 0.1 * np.ptp(SKEWED))
    assert "not below 0" in bins.describe()


def test_bins_reach_below_zero_if_a_row_does() -> None:
    assert make_target_bins(np.append(SKEWED, -1e-6)).edges[0] < -0.1


def test_frequent_values_are_bins_of_their_own() -> None:
    target = np.concatenate((np.zeros(500), np.minimum(SKEWED, 5.0)))
    bins = make_target_bins(target)
    alone = bins.edges[:-1][np.diff(bins.edges) == 0]
    assert alone.tolist() == [0.0, 5.0] and bins.values == 2
    assert bins.edges[0] == 0.0 and bins.edges[-1] == 5.0, "the ends of the scale"


@pytest.mark.parametrize("target", ([3.0, 3.0], [0.0, 0.0], [-1.0, 1.0], [1e300, 1e300]))
def test_bins_of_few_rows(target: list[float]) -> None:
    edges = make_target_bins(np.array(target)).edges
    assert np.isfinite(edges).all() and edges[0] < edges[-1] and (np.diff(edges) >= 0).all()
    assert edges[0] <= min(target) <= max(target) <= edges[-1]


def test_rows_of_weight_zero_do_not_count() -> None:
    weight = np.array([1.0] * 50 + [0.0])
    assert make_target_bins(np.append(np.arange(50.0), 1e9), weight).edges[-1] < 100


def uneven() -> NumberDistribution:
    p = RNG.dirichlet(np.ones(5), size=6)
    return NumberDistribution(p, [0.0, 0.0, 1.0, 2.0, 4.0, 9.0])


def test_moments_are_those_of_many_samples() -> None:
    one = uneven()
    drawn = one.sample(100_000, seed=1)
    assert drawn.mean(axis=1) == pytest.approx(one.mean, abs=0.05)
    assert drawn.std(axis=1) == pytest.approx(one.std, abs=0.05)
    assert np.median(drawn, axis=1) == pytest.approx(one.median, abs=0.08)
    assert (drawn <= 3.0).mean(axis=1) == pytest.approx(one.cdf(3.0), abs=0.01)
    assert (one.sample(3, seed=5) == one.sample(3, seed=5)).all()


def test_crps_is_the_distance_of_samples() -> None:
    """CRPS = E|X − y| − ½ E|X − X'| (Gneiting, Raftery 2007, eq. 21)."""
    one = uneven()
    x, other = one.sample(100_000, seed=1), one.sample(100_000, seed=2)
    for y in (0.0, 1.3, 12.0):
        expected = np.abs(x - y).mean(axis=1) - np.abs(x - other).mean(axis=1) / 2
        assert one.crps(np.full(6, y)) == pytest.approx(expected, abs=0.03)


def test_the_density_integrates_to_the_bins() -> None:
    one = uneven()
    assert one.pdf(1.5) == pytest.approx(one.probabilities[:, 2])
    assert one.pdf(9.0) == pytest.approx(one.probabilities[:, 4] / 5)
    assert (one.pdf(0.0) == np.inf).all() and (one.pdf(-1.0) == 0).all()
    assert (one.pdf(9.5) == 0).all()


def test_quantiles_and_intervals() -> None:
    one = uneven()
    plain = NumberDistribution(one.probabilities, np.linspace(0.0, 5.0, 6))
    assert plain.interval(0.8) == pytest.approx(plain.quantile([0.1, 0.9]))
    low, high = one.interval(0.8).T  # a bin of one value: an interval that ends there has all of it
    ends = one.quantile([0.1, 0.9]).T
    assert (low >= ends[0] - 1e-6).all() and (high <= ends[1] + 1e-6).all()
    assert (one.cdf(high) - one.cdf(low) + one.probabilities[:, 0] * (low == 0) >= 0.799999).all()
    assert one.quantile(0.3).shape == (6,) and one.quantile([0.3]).shape == (6, 1)
    assert (np.diff(one.quantile(np.linspace(0.01, 0.99, 50)), axis=1) >= 0).all()
    assert one.quantile(0.5).min() >= 0.0, "no number is below the first bin"
    assert len(one[2]) == 1 and len(one[:3]) == 3
    assert repr(one).startswith("<6 distributions over 5 bins from 0 to 9>\n  row 0: mean ")


@pytest.mark.parametrize("level", (0, 1, -0.1, 1.5, np.nan, "high", []))
def test_levels_lie_between_0_and_1(level: Any) -> None:
    with pytest.raises(ConfigError, match="must lie between 0 and 1"):
        uneven().quantile(level)


def test_there_is_one_number_for_each_row() -> None:
    with pytest.raises(InputError, match=r"one for each of the 6 rows: got the shape \(5,\)"):
        uneven().crps(np.zeros(5))


def test_figures_are_those_of_plain_loops() -> None:
    one, y = uneven(), np.array([0.0, 0.5, 1.5, 3.0, 8.0, 10.0])
    figures = number_metrics(one, y)
    assert figures["rmse"] == pytest.approx(float(np.sqrt(((one.mean - y) ** 2).mean())))
    assert figures["crps"] == pytest.approx(one.crps(y).mean())
    total = 0.0
    for step in range(1, 20):
        for q, target in zip(one.quantile(step / 20), y, strict=True):
            level, error = step / 20, target - q
            total += level * error if error > 0 else (level - 1) * error
    assert figures["pinball"] == pytest.approx(total / 19 / 6)
    for level in INTERVALS:
        ends = one.interval(level)
        inside = [low <= t <= high for (low, high), t in zip(ends, y, strict=True)]
        assert figures[f"coverage_{100 * level:.0f}"] == pytest.approx(np.mean(inside))
        assert figures[f"width_{100 * level:.0f}"] == pytest.approx(np.diff(ends).mean())
    levels = [level for level, _, _ in coverage_curve(one, y)]
    assert levels == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]


def test_a_fan_shows_no_single_row() -> None:
    one = NumberDistribution(RNG.dirichlet(np.ones(5), size=95), np.arange(6.0))
    groups = fan_groups(one, RNG.uniform(0, 5, 95))
    assert len(groups) == 9 and min(group["rows"] for group in groups) >= 10
    assert fan_groups(one[:9], np.zeros(9)) == []
