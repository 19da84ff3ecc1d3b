"""Bin edges against an exhaustive search of all splits."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from addnorm.data.table.bins import make_edges, quantile_edges, tree_edges
from addnorm.data.table.frame import Array

RNG = np.random.default_rng(3)


def gini(y: Array) -> float:
    """Rows times the chance that two of them, drawn with replacement, are of different classes."""
    return len(y) * (1 - sum((n / len(y)) ** 2 for n in Counter(y.tolist()).values()))


def squares(y: Array) -> float:
    return float(sum((v - y.mean()) ** 2 for v in y))


def best_split(x: Array, y: Array, classes: bool, least: int) -> float:
    """The middle of the two neighbours between which a split leaves the least impurity."""
    cost = gini if classes else squares
    order = np.argsort(x)
    x, y = x[order], y[order]
    places = range(least, len(x) - least + 1)
    best = min(places, key=lambda i: cost(y[:i]) + cost(y[i:]))
    return float(x[best - 1] + x[best]) / 2


CLASSES = np.array([0] * 10 + [2] * 50 + [1] * 50)


@pytest.mark.parametrize("classes", (True, False))
def test_a_tree_splits_where_the_target_changes(classes: bool) -> None:
    """Codes of classes are not numbers: the two kinds of tree split the same rows differently."""
    x = np.sort(RNG.normal(size=110))
    (low, middle, high) = tree_edges(x, CLASSES, classes, bins=2, seed=0)
    assert (low, high) == (np.float32(x.min()), np.float32(x.max()))
    assert middle == pytest.approx(best_split(x, CLASSES, classes, least=2), rel=1e-6)
    assert int((x < middle).sum()) == (60 if classes else 10)


@pytest.mark.parametrize("rows", (60, 1000, 6400))
def test_noise_makes_no_bins_of_a_few_rows(rows: int) -> None:
    """No bin has fewer rows than a fiftieth of all, or than 64 if that is less."""
    x, y = RNG.normal(size=rows), RNG.normal(size=rows)
    edges = tree_edges(x, y, classes=False, bins=48, seed=0)
    counts = [int(((x >= a) & (x < b)).sum()) for a, b in pairwise([*edges[:-1], np.inf])]
    assert sum(counts) == pytest.approx(rows, abs=1) and len(counts) > 3
    assert min(counts) >= min(64, rows // 50) - 1, "the first edge is rounded to float32"
    assert min(counts) <= 2 * min(64, rows // 50) + 1, "and not many more"


@pytest.mark.parametrize("bins", (1, 2, 5, 48))
def test_there_are_at_most_as_many_bins_as_requested(bins: int) -> None:
    x, y = RNG.normal(size=4000), RNG.normal(size=4000)
    assert len(tree_edges(x, y, classes=False, bins=bins, seed=0)) == max(2, bins) + 1
    assert len(quantile_edges(x, bins)) == bins + 1


def test_quantile_bins_have_as_many_rows_each() -> None:
    x = RNG.permutation(np.exp(np.linspace(-3, 3, 1001)))
    edges = quantile_edges(x, 10)
    for a, b in pairwise(edges):
        assert int(((x >= np.float64(a)) & (x < b)).sum()) == pytest.approx(100, abs=1)


def test_a_constant_is_in_the_middle_of_its_only_bin() -> None:
    x = np.full(40, 7.0)
    for kind in ("quantile", "target"):
        (edges,) = make_edges(x[:, None], RNG.random(40), kind=kind, classes=False, bins=8, seed=0)
        assert len(edges) == 2 and edges[0] < 7 < edges[1]
        assert sum(edges) == 14


def test_edges_equal_in_float32_are_merged() -> None:
    x = np.array([1.0, 1.0 + 1e-12, 2.0, 2.0 + 1e-12, 3.0])
    assert quantile_edges(x, 4) == [1.0, 2.0, 3.0]


def test_edges_ignore_rows_with_a_missing_value() -> None:
    """The target jumps at 0.5 in rows with a value, and varies in rows without one."""
    x, y = np.linspace(0, 1, 100), np.zeros(100)
    y[50:] = 1.0
    missing = np.arange(100) % 3 == 0
    numbers = np.column_stack((np.where(missing, np.nan, x), -x))
    other = np.where(missing, 1000.0 * np.arange(100) % 7, y)
    edges = make_edges(numbers, other, kind="target", classes=False, bins=2, seed=0)
    assert edges[0] == pytest.approx([x[1], (x[49] + x[50]) / 2, x[98]])
    assert edges[1][0] == -1 and edges[1][-1] == 0
