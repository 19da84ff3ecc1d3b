"""The Gaussian process of the known rows: against plain formulas, and what must not change it."""

import math

import pytest
import torch
from torch import Tensor

from addnorm.models import instant_process
from addnorm.models.instant_cells import cell_features, column_stats
from addnorm.models.instant_process import (
    FLOOR,
    HALF,
    LENGTHS,
    MIN_ROWS,
    SPREADS,
    Process,
    evidence,
    expand_cells,
    first_parameters,
    fit_process,
    fit_shares,
    fitted_rows,
    make_layout,
)
from addnorm.models.instant_solvers import count_parts, solver_features

IS_CATEGORY = torch.tensor([False, True, False])


def table(rows: int = 30) -> tuple[Tensor, Tensor]:
    """Features of two numbers and a category, some cells missing, and a target of all three."""
    cells = torch.randn(1, rows, 3)
    cells[..., 1] = torch.randint(0, 4, (1, rows)).float()
    target = cells[0, :, 0] + (cells[0, :, 1] == 2) * cells[0, :, 2].sin()
    cells[torch.rand(cells.shape) < 0.1] = float("nan")
    features = cell_features(cells, column_stats(cells), IS_CATEGORY[None])
    parts = count_parts(cells, IS_CATEGORY[None])
    return solver_features(cells, features, IS_CATEGORY[None], parts)[0], target.double()


def kernel_by_hand(features: Tensor, log: Tensor) -> Tensor:
    """K from the formulas, one pair of rows at a time; the features are those of `table`."""
    layout = make_layout(IS_CATEGORY, features.shape[2])
    value = iter(log.exp().tolist())
    amplitude = [[next(value) for _ in range(1 if c else 5)] for c in IS_CATEGORY]
    weight = [[next(value) for _ in range(1 if c else 2)] for c in IS_CATEGORY]
    g = next(value)
    kernel = torch.zeros(len(features), len(features), dtype=torch.float64)
    variances = layout.effect[2:5, 2:22]
    for i in range(len(features)):
        for j in range(len(features)):
            squares = 0.0
            for c, category in enumerate(IS_CATEGORY.tolist()):
                a, b = features[i, c].tolist(), features[j, c].tolist()
                if category:
                    squares += weight[c][0] * (a != b)
                    kernel[i, j] += amplitude[c][0] * (a == b)
                    continue
                kernel[i, j] += amplitude[c][0] * a[0] * b[0] + amplitude[c][1] * a[3] * b[3]
                squares += weight[c][0] * (a[0] - b[0]) ** 2
                squares += weight[c][1] * ((a[1] - b[1]) ** 2 + (a[3] - b[3]) ** 2)
                for k in range(1, 21):  # a missing number has no effect of its rank
                    waves = [
                        math.sin(math.pi * k * (u + HALF) / (2 * HALF)) * (1 - missing)
                        for _, u, _, missing, *_ in (a, b)
                    ]
                    variance = torch.tensor(amplitude[c][2:]).double() @ variances[:, k - 1]
                    kernel[i, j] += variance * waves[0] * waves[1] / HALF
            root = math.sqrt(3 * squares + 1e-10)
            kernel[i, j] += g * (1 + root) * math.exp(-root)
    return kernel


def test_the_evidence_is_that_of_a_normal_distribution() -> None:
    features, y = table(12)
    layout = make_layout(IS_CATEGORY, features.shape[2])
    log = first_parameters(layout)[0] + 0.3 * torch.randn(layout.count)
    found, _ = evidence(log, layout, *expand_cells(features, layout), y, -1.0)
    noise, delta = log[-2:].exp()
    bent = (-y - (-y).min() + delta).log()
    deviation, mean = torch.std_mean(bent, correction=0)
    covariance = kernel_by_hand(features, log) + (noise + FLOOR) * torch.eye(12)
    normal = torch.distributions.MultivariateNormal(torch.zeros(12).double(), covariance)
    # The density of y: that of the bent target, times the derivatives 1 / (exp(bent) deviation).
    wanted = -normal.log_prob((bent - mean) / deviation) + bent.sum() + 12 * deviation.log()
    assert float(found) == pytest.approx(float(wanted) - 6 * math.log(2 * math.pi), rel=1e-6)


def test_the_gradient_is_that_of_small_steps() -> None:
    features, y = table()
    layout = make_layout(IS_CATEGORY, features.shape[2])
    expanded = expand_cells(features, layout)
    log = first_parameters(layout)[0] + 0.3 * torch.randn(layout.count)
    _, slope = evidence(log, layout, *expanded, y, 1.0)
    for place in range(layout.count):
        step = torch.zeros_like(log)
        step[place] = 1e-5
        high, low = (evidence(log + s, layout, *expanded, y, 1.0)[0] for s in (step, -step))
        assert float(slope[place]) == pytest.approx(float(high - low) / 2e-5, abs=1e-4)


def test_sines_make_a_matern_process() -> None:
    u = torch.linspace(-1.7, 1.7, 35, dtype=torch.float64)
    features = torch.zeros(35, 1, 4)
    features[:, 0, 1] = u
    layout = make_layout(torch.tensor([False]), 4)
    sines = expand_cells(features, layout)[0][:, 2:]
    for place, length in enumerate(LENGTHS[1:], start=3):  # the longest is 0 too near the ends
        found = (sines * layout.effect[place, 2:]) @ sines.T
        r = 3**0.5 * (u[:, None] - u).abs() / length
        wanted = (1 + r) * (-r).exp()
        inside = slice(6, -6)
        assert float((found - wanted)[inside, inside].abs().max()) < 0.12


def test_a_known_row_is_predicted_without_itself() -> None:
    features, y = table()
    process = fit_process(features, IS_CATEGORY, y)
    assert process is not None
    bent = ((process.sign * y - process.least + process.log[-1].exp()).log() - process.mean) / (
        process.deviation
    )
    whole = process.factor @ process.factor.T
    for row in (0, 7):
        rest = [other for other in range(30) if other != row]
        solved = torch.linalg.solve(whole[rest][:, rest], whole[rest, row])
        mean, variance = solved @ bent[rest], whole[row, row] - solved @ whole[rest, row]
        assert float(process.own[0][row]) == pytest.approx(float(mean), abs=1e-8)
        assert float(process.own[1][row]) == pytest.approx(float(variance.sqrt()), abs=1e-8)


def answers(process: Process | None, features: Tensor) -> Tensor:
    assert process is not None
    return process.probabilities(*process.latent(features), torch.linspace(-3, 3, 40))


@pytest.mark.parametrize("fitted", (20, 40))
def test_the_order_of_rows_and_columns_changes_nothing(
    fitted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instant_process, "fitted_rows", lambda rows, columns: fitted)
    features, y = table(60)
    y = y.round(decimals=0)  # equal targets: the content of the rows decides
    before = answers(fit_process(features[:40], IS_CATEGORY, y[:40]), features[40:])
    rows, columns = torch.randperm(40), torch.tensor([2, 0, 1])
    moved = features[:, columns]
    process = fit_process(moved[rows], IS_CATEGORY[columns], y[rows])
    assert torch.allclose(answers(process, moved[40:]), before, atol=1e-7)
    assert torch.allclose(answers(process, moved[[41]])[0], before[1], atol=1e-9)
    assert torch.allclose(before.sum(dim=1), torch.ones(20).double())


def test_parameters_are_fitted_to_a_sample_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fitted_rows(*s) for s in ((90, 3), (2000, 3), (2000, 20), (2000, 60))] == [
        *(90, 500, 300, 250)
    ]
    features, y = table(60)
    sizes = list[int]()
    plain = instant_process.evidence

    def counted(log: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        sizes.append(len(rest[1]))  # type: ignore[arg-type]
        return plain(log, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(instant_process, "evidence", counted)
    monkeypatch.setattr(instant_process, "fitted_rows", lambda rows, columns: 20)
    process = fit_process(features, IS_CATEGORY, y)
    assert process is not None and set(sizes) == {20} and len(process.alpha) == 60


def test_peaks_that_a_category_switches_are_learnt() -> None:
    """An hour with three peaks on some days and one on others, and a skewed target."""
    hour, day = torch.rand(500), torch.randint(0, 2, (500,))
    score = torch.where(day > 0, (6 * math.pi * hour).sin(), (2 * math.pi * hour).cos())
    y = (score + 0.1 * torch.randn(500)).exp().double()
    y = (y - y[:300].mean()) / y[:300].std(correction=0)
    cells = torch.stack((hour, day.float()), dim=1)[None]
    is_category = torch.tensor([[False, True]])
    features = cell_features(cells, column_stats(cells[:, :300]), is_category)
    parts = solver_features(cells, features, is_category, 4)[0]
    process = fit_process(parts[:300], is_category[0], y[:300])
    assert process is not None and process.sign == 1 and float(process.log[-1].exp()) < 1
    edges = torch.linspace(-3, 6, 400)
    chances = process.probabilities(*process.latent(parts[300:]), edges)
    error = chances @ (edges[1:] + edges[:-1]).double().div(2) - y[300:]
    assert float(error.square().mean().sqrt()) < 0.3


def test_a_mirrored_target_has_mirrored_answers() -> None:
    features, y = table(60)
    y = (1.5 * y).exp()
    right = answers(fit_process(features[:40], IS_CATEGORY, y[:40]), features[40:])
    left = answers(fit_process(features[:40], IS_CATEGORY, -y[:40]), features[40:])
    assert torch.allclose(left, right.flip(1), atol=1e-6)


@pytest.mark.parametrize("rows", (MIN_ROWS - 1, MIN_ROWS))
def test_few_rows_or_one_target(rows: int) -> None:
    features, y = table()
    assert (fit_process(features[:rows], IS_CATEGORY, y[:rows]) is None) == (rows < MIN_ROWS)
    assert fit_process(features, IS_CATEGORY, torch.zeros(30)) is None
    nothing = fit_process(torch.zeros_like(features), IS_CATEGORY, y)
    assert bool(answers(nothing, features).isfinite().all())


def test_errors_with_tails_widen_the_mixture() -> None:
    errors = torch.randn(2000).double()
    plain = fit_shares(errors)
    assert float(plain.sum()) == pytest.approx(1) and float(plain @ plain.new_tensor(SPREADS)) < 1.2
    errors[:300] *= 3
    assert float(fit_shares(errors)[4:].sum()) > float(plain[4:].sum()) + 0.05
