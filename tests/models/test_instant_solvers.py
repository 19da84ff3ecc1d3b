"""Closed-form models of the known rows: against plain solutions, and what must not change them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm.models.instant_cells import cell_features, column_stats
from addnorm.models.instant_solvers import (
    KERNELS,
    MAX_PARTS,
    PARTS,
    SOLVERS,
    count_parts,
    solve,
    solver_features,
)

NEAR = 1e-6
ALIKE = [place for place, (_, weighted, _) in enumerate(KERNELS) if not weighted]


def rows_of(rows: int = 12, columns: int = 3, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Features of rows, and one-hot classes."""
    cells = torch.randn(2, rows, columns)
    is_category = torch.zeros(2, columns, dtype=torch.bool)
    is_category[:, 0] = True
    cells[:, :, 0] = torch.randint(0, 6, (2, rows)).float()
    cells[torch.rand(cells.shape) < 0.1] = float("nan")
    features = cell_features(cells, column_stats(cells), is_category)
    parts = solver_features(cells, features, is_category, count_parts(cells, is_category))
    target = torch.randint(0, classes, (2, rows))
    return parts, F.one_hot(target, classes).float()


def test_the_linear_solver_is_a_ridge_regression() -> None:
    features, target = rows_of()
    solved, _ = solve(features[:, :10], target[:, :10])
    place = next(i for i in ALIKE if KERNELS[i][0] == "linear")
    answers = solved.predict(features[:, 10:])[:, :, place]
    for table in range(2):
        # (XᵀX + α I)⁻¹ Xᵀ Y with the columns of the table at the same variance
        x = features[table].double()
        x = x - x[:10].mean(dim=0)
        variance = x[:10].square().sum(dim=2).mean(dim=0)
        x = (x / variance[None, :, None].sqrt() / 3**0.5).flatten(1)
        y = target[table, :10].double()
        mean = y.mean(dim=0)
        gram = x[:10].T @ x[:10] + KERNELS[place][2] * torch.eye(x.shape[1])
        wanted = mean + x[10:] @ torch.linalg.solve(gram, x[:10].T @ (y - mean))
        assert torch.allclose(answers[table].double(), wanted, atol=NEAR)


@pytest.mark.parametrize("count", (12, 40))  # more features than rows, and fewer
@pytest.mark.parametrize("place", ALIKE)
def test_a_known_row_is_predicted_without_itself(place: int, count: int) -> None:
    """The kernel matrix without the row gives the same; features stay those of all rows."""
    features, target = rows_of(count)
    assert (features.shape[2] * features.shape[3] < count) == (count == 40)
    solved, own = solve(features, target)
    kind, weighted, ridge = KERNELS[place]
    rows = solved.known[weighted][0]
    kernel = rows @ rows.T
    if kind == "smooth":
        squares = kernel.diagonal()
        kernel = (2 * kernel - squares[:, None] - squares).exp()
    y = target[0].double() - solved.mean[0]
    for row in (0, 5):
        rest = [other for other in range(count) if other != row]
        inner = kernel[rest][:, rest] + ridge * torch.eye(count - 1)
        wanted = solved.mean[0, 0] + kernel[row, rest] @ torch.linalg.solve(inner, y[rest])
        assert torch.allclose(own[0, row, place].double(), wanted, atol=NEAR)


def test_order_and_padding_change_nothing() -> None:
    features, target = rows_of()
    rows, columns = torch.randperm(10), torch.tensor([2, 0, 1])
    solved, own = solve(features[:, :10], target[:, :10])
    asked = solved.predict(features[:, 10:])
    moved = features[:, :, columns]
    again, own_again = solve(moved[:, rows], target[:, rows])
    assert torch.allclose(own_again, own[:, rows], atol=NEAR)
    assert torch.allclose(again.predict(moved[:, 10:]), asked, atol=NEAR)
    assert torch.allclose(again.quality, solved.quality, atol=NEAR)
    padded = torch.cat((features, torch.randn(2, 12, 2, features.shape[-1])), dim=2)
    real = torch.tensor([[True] * 3 + [False] * 2]).expand(2, -1)
    wide, own_wide = solve(padded[:, :10], target[:, :10], real)
    assert torch.allclose(own_wide, own, atol=NEAR)
    assert torch.allclose(wide.predict(padded[:, 10:]), asked, atol=NEAR)


def test_relevant_columns_have_larger_weights() -> None:
    features, _ = rows_of(rows=200)
    target = features[:, :, 2, :1]
    solved, _ = solve(features, target)
    alike, relevant = (weight[:, 0, :, 0] * features.std() for weight in solved.weights)
    assert bool((relevant[:, 2] > 2 * relevant[:, 1]).all())
    assert bool((alike[:, 2] < 2 * alike[:, 1]).all())
    assert bool((solved.quality > 0.8).all())


@pytest.mark.parametrize("outcomes", (1, 4))
def test_without_known_rows_or_content(outcomes: int) -> None:
    features, _ = rows_of()
    solved, own = solve(features[:, :0], torch.zeros(2, 0, outcomes))
    assert own.shape == (2, 0, SOLVERS, outcomes)
    answers = solved.predict(features)
    assert torch.equal(answers, torch.full_like(answers, 0.25 if outcomes == 4 else 0.0))
    empty = torch.zeros(2, 6, 3, PARTS)
    solved, own = solve(empty, torch.rand(2, 6, outcomes))
    assert bool(own.isfinite().all()) and bool(solved.predict(empty).isfinite().all())


def test_categories_have_a_part_for_each_value() -> None:
    cells = torch.tensor([[[0.0, 3.0], [5.0, 99.0], [float("nan"), 1.0]]])
    is_category = torch.tensor([[True, False]])
    parts = count_parts(cells, is_category)
    assert parts == 6 and count_parts(cells, None) == PARTS
    assert count_parts(100 * cells, is_category) == MAX_PARTS
    features = cell_features(cells, column_stats(cells), is_category)
    found = solver_features(cells, features, is_category, parts)
    assert found[0, :, 0].tolist() == [[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1], [0.0] * 6]
    assert found[0, :, 1, PARTS:].abs().sum() == 0
