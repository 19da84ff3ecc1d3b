"""Scalings of numbers against their definitions, value by value."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from addnorm.data.table.frame import Array
from addnorm.data.table.scaling import SCALINGS, deviation

RNG = np.random.default_rng(5)


def scaled(kind: str, train: Array, values: Array | None = None) -> list[float]:
    fit, use = SCALINGS[kind]
    result: list[float] = use(train if values is None else values, fit(train)).tolist()
    return result


@pytest.mark.parametrize(
    ("rows", "count"), ((1, 10), (299, 10), (330, 11), (3000, 100), (30_000, 1000), (60_000, 1000))
)
def test_one_quantile_per_thirty_rows_from_10_to_1000(rows: int, count: int) -> None:
    knots = SCALINGS["quantile"][0](RNG.normal(size=rows))
    assert len(knots) == count and list(knots) == sorted(knots)


def test_quantile_scaling_makes_any_column_normal() -> None:
    """Φ⁻¹ of the share of rows below each value, by counting."""
    train = np.exp(RNG.normal(size=6001))
    some = np.sort(train)[[1000, 3000, 5000]]
    for value, result in zip(some, scaled("quantile", train, some), strict=True):
        below = sum(v < value for v in train) / 6000
        assert result == pytest.approx(NormalDist().inv_cdf(below), abs=0.01)
    everything = np.array(scaled("quantile", train))
    middle = everything[np.abs(everything) < 4]
    assert middle.mean() == pytest.approx(0, abs=0.02)
    assert middle.std() == pytest.approx(1, abs=0.03)


def test_quantile_scaling_keeps_the_order_and_clips() -> None:
    train = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0] * 9)
    result = scaled("quantile", train, np.array([-1e9, 1.0, 2.5, 4.0, 8.0, 9.0, 1e9]))
    assert result == sorted(result) and len(set(result)) >= 5
    assert result[0] == pytest.approx(NormalDist().inv_cdf(1e-7), rel=1e-6)
    assert result[-1] == pytest.approx(-result[0], rel=1e-6)
    assert scaled("quantile", -train, np.array([-2.5]))[0] == pytest.approx(-result[2], abs=1e-9)


def test_a_value_that_most_rows_have_is_in_the_middle_of_its_step() -> None:
    """With zeros in six of ten rows, the share of a zero is 0.3: the middle of 0 to 0.6."""
    train = np.concatenate((np.zeros(601), np.linspace(1, 2, 400)))
    assert scaled("quantile", train, np.zeros(1))[0] == pytest.approx(
        NormalDist().inv_cdf(0.3), abs=0.03
    )


def robust(x: float, middle: float, width: float) -> float:
    z = (x - middle) / width
    return z / math.sqrt(1 + (z / 3) ** 2)


def test_robust_scaling_is_smooth_and_inside_three() -> None:
    train = RNG.normal(size=401) * 5 + 100
    inside = np.sort(train)
    low, middle, high = inside[100], inside[200], inside[300]
    some = np.array([middle, low, high, 0.0, 1e9, -1e90])
    wanted = [robust(x, middle, high - low) for x in some]
    result = scaled("robust", train, some)
    assert result == pytest.approx(wanted, rel=1e-9)
    assert result[0] == 0 and result[4:] == pytest.approx([3, -3])
    huge = np.array([1e102, -1e120, 1e150, 1e300])
    assert scaled("robust", train, huge) == pytest.approx([3, -3, 3, 3])


@pytest.mark.parametrize(
    ("train", "width"), (([0.0] * 9 + [8.0], 4.0), ([2.0] * 9, 1.0), ([0.0, 1.0, 2.0], 1.0))
)
def test_robust_scaling_where_most_values_are_equal(train: list[float], width: float) -> None:
    """Half the range replaces an interquartile range of 0."""
    middle = sorted(train)[len(train) // 2]
    result = scaled("robust", np.array(train), np.array([middle, middle + 1, middle - 2]))
    assert result == pytest.approx([robust(middle + d, middle, width) for d in (0, 1, -2)])


def test_standard_scaling_and_none_are_cut_at_a_million() -> None:
    train = np.array([1.0, 2.0, 3.0, 6.0])
    spread = math.sqrt(sum((v - 3) ** 2 for v in train) / 4)
    values = np.array([3.0, 5.0, 1e300, -1e300])
    assert scaled("standard", train, values) == pytest.approx([0, 2 / spread, 1e6, -1e6])
    assert scaled("none", train, values) == [3.0, 5.0, 1e6, -1e6]
    assert scaled("standard", np.full(3, 7.0), np.array([7.0, 9.0])) == [0.0, 2.0]


@pytest.mark.parametrize("sentinel", (999_999_999.0, 1e30, 1e300, -1e12))
def test_one_absurd_cell_leaves_the_others_apart(sentinel: float) -> None:
    train = np.append(RNG.normal(size=99), sentinel)
    values = np.array(scaled("standard", train), dtype=np.float32)
    assert len(set(values.tolist())) == 100
    assert (np.argsort(values) == np.argsort(train)).all()
    assert np.abs(values).max() < 11  # √99: as far out as one of a hundred can be
    assert scaled("standard", train, train[-1:] / 10) == pytest.approx(values[-1:])


def test_numbers_whose_squares_are_no_float() -> None:
    train = RNG.normal(size=50)
    for unit in (1e-300, 1e-200, 1e-160, 1e140):
        assert scaled("standard", train * unit) == pytest.approx(scaled("standard", train))
    weights = RNG.uniform(size=50)
    wanted = np.cov(train, aweights=weights, ddof=0) ** 0.5
    assert deviation(train * 1e-200, weights) == pytest.approx(wanted * 1e-200)
    assert deviation(np.full(4, 0.1)) == 0


@pytest.mark.parametrize("kind", SCALINGS)
def test_missing_stays_missing(kind: str) -> None:
    result = scaled(kind, np.arange(40.0), np.array([np.nan, 3.0]))
    assert math.isnan(result[0]) and math.isfinite(result[1])
