"""Distributions over bins: every formula against a plain loop or a numerical integral."""

import math

import pytest
import torch
from torch import Tensor

from addnorm.models.bins import (
    bin_means,
    cdf_of,
    crps_of,
    cumulative,
    positions_of,
    quantiles_of,
    recalibrated,
    recalibrated_mean,
    shaped_logits,
    smoothed_labels,
)

EDGES = torch.tensor([-1.0, 0.0, 0.0, 0.5, 2.0, 5.0], dtype=torch.float64)
"""Five bins; the second is the value 0 alone."""


def chances(rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(rows, 5, generator=generator, dtype=torch.float64).softmax(dim=1)


def naive_cdf(p: Tensor, y: float) -> float:
    total = 0.0
    for k in range(5):
        low, high = float(EDGES[k]), float(EDGES[k + 1])
        share = 1.0 if y >= high else 0.0 if y < low else (y - low) / (high - low)
        total += float(p[k]) * share
    return total


def test_cdf_of_a_plain_loop() -> None:
    p = chances()
    for y in (-2.0, -1.0, -0.3, 0.0, 0.2, 0.5, 4.9, 5.0, 7.0):
        _, upto = cdf_of(p, EDGES, torch.full((4,), y, dtype=torch.float64))
        assert upto.tolist() == pytest.approx([naive_cdf(row, y) for row in p])
    below, upto = cdf_of(p, EDGES, torch.zeros(4, dtype=torch.float64))
    assert (upto - below).tolist() == pytest.approx(p[:, 1].tolist()), "F jumps at a value"
    several = torch.tensor([[0.2, 1.0]] * 4, dtype=torch.float64)
    assert cdf_of(p, EDGES, several)[1][:, 1].tolist() == pytest.approx(
        [naive_cdf(row, 1.0) for row in p]
    )


def test_crps_is_the_integral() -> None:
    p = chances()
    grid = torch.linspace(-4, 9, 260_001, dtype=torch.float64)
    for y in (-3.0, -0.4, 0.0, 1.0, 4.0, 8.0):
        expected = []
        for row in p:
            below = cumulative(row[None])[0]
            places = torch.searchsorted(EDGES, grid, right=True).clamp(1, 5) - 1
            width = (EDGES[places + 1] - EDGES[places]).clamp(min=1e-300)
            share = ((grid - EDGES[places]) / width).clamp(0, 1)
            F = below[places] + share * (below[places + 1] - below[places])
            expected.append(float((F - (grid >= y).double()).square().sum() * 13 / 260_000))
        found = crps_of(p, EDGES, torch.full((4,), y, dtype=torch.float64))
        assert found.tolist() == pytest.approx(expected, abs=2e-3)


def test_crps_of_a_certain_value_is_the_distance() -> None:
    sure = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for y in (-7.0, -0.5, 0.0, 0.3, 3.0, 9.0):
        found = crps_of(sure, EDGES, torch.tensor([y], dtype=torch.float64))
        assert float(found) == pytest.approx(abs(y))


def test_quantiles_invert_the_cdf_and_rise() -> None:
    p, levels = chances(), torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    found = quantiles_of(p, EDGES, levels)
    assert bool((found.diff(dim=1) >= 0).all())
    for row in range(4):
        for level, value in zip(levels.tolist(), found[row].tolist(), strict=True):
            if abs(value) > 1e-9:
                assert naive_cdf(p[row], value) == pytest.approx(level)
    assert bool((found == 0).any()), "the value 0 has a probability of its own"
    own = quantiles_of(p, EDGES, torch.full((4, 1), 0.5))
    assert own[:, 0].tolist() == pytest.approx(found[:, 49].tolist())


def test_positions_are_counted_in_bins() -> None:
    y = torch.tensor([-9.0, -1.0, -0.5, 0.0, 0.25, 0.5, 3.5, 5.0, 9.0], dtype=torch.float64)
    expected = [0.0, 0.0, 0.5, 1.5, 2.5, 3.0, 4.5, 5.0, 5.0]
    assert positions_of(y, EDGES).tolist() == pytest.approx(expected)


def test_labels_are_a_normal_distribution_around_the_target() -> None:
    position = torch.tensor([0.0, 1.5, 2.7, 5.0], dtype=torch.float64)
    label = smoothed_labels(position, EDGES, 0.75)
    assert label.sum(dim=1).tolist() == pytest.approx([1.0] * 4)
    assert label[1].tolist() == [0, 1, 0, 0, 0], "a value has no neighbours"
    phi = [0.5 * (1 + math.erf((k - 2.7) / 0.75 / math.sqrt(2))) for k in range(6)]
    total = phi[5] - phi[0]
    expected = [(phi[k + 1] - phi[k]) / total for k in range(5)]
    assert label[2].tolist() == pytest.approx(expected)


KNOTS = ((0.0, 0.0), (0.2, 0.1), (0.7, 0.9), (1.0, 1.0))


def test_recalibration_changes_f_everywhere() -> None:
    """Not only at the edges: a knot within a bin bends F there."""
    p, table = chances(), torch.tensor(KNOTS, dtype=torch.float64)
    after, edges = recalibrated(p, EDGES, table[:, 0], table[:, 1])
    for y in (-2.0, -1.0, -0.9, -0.1, 0.0, 0.2, 0.3, 0.5, 0.9, 1.5, 2.5, 4.9, 5.0, 7.0):
        numbers = torch.full((4,), y, dtype=torch.float64)
        for found, before in zip(
            cdf_of(after, edges, numbers), cdf_of(p, EDGES, numbers), strict=True
        ):
            expected = []
            for F in before.tolist():
                if F <= 0.2:
                    expected.append(F / 2)
                elif F <= 0.7:
                    expected.append(0.1 + (F - 0.2) * 0.8 / 0.5)
                else:
                    expected.append(0.9 + (F - 0.7) / 3)
            assert found.tolist() == pytest.approx(expected)
    same, places = recalibrated(p, EDGES, table[:, 0], table[:, 0])
    assert crps_of(same, places, numbers).tolist() == pytest.approx(crps_of(p, EDGES, numbers))


def test_quantiles_after_recalibration_are_those_at_the_stated_level() -> None:
    p, table = chances(), torch.tensor(KNOTS, dtype=torch.float64)
    after = quantiles_of(*recalibrated(p, EDGES, table[:, 0], table[:, 1]), table[1:3, 1])
    assert torch.allclose(after, quantiles_of(p, EDGES, table[1:3, 0]))


def test_the_recalibrated_mean_needs_no_sorting() -> None:
    sure = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    p, table = torch.cat((chances(), sure.double())), torch.tensor(KNOTS, dtype=torch.float64)
    after, edges = recalibrated(p, EDGES, table[:, 0], table[:, 1])
    expected = (after * bin_means(edges)).sum(dim=1)
    assert torch.allclose(recalibrated_mean(p, EDGES, KNOTS), expected)
    assert recalibrated_mean(p.float(), EDGES, KNOTS).dtype == torch.float32


def test_logits_are_corrections_of_a_student_distribution() -> None:
    raw = torch.tensor([[0.5, 0.0, 1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    scale = math.log(2) + 0.02
    expected = [
        r - 2 * math.log1p(((middle - 0.5) / scale) ** 2 / 3)
        for r, middle in zip((1.0, 2.0, 3.0, 4.0), (-1.5, -0.5, 0.5, 1.5), strict=True)
    ]
    assert shaped_logits(raw)[0].tolist() == pytest.approx(expected)
    assert bin_means(EDGES).tolist() == [-0.5, 0.0, 0.25, 1.25, 3.5]
