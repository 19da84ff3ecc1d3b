"""Embeddings of columns against loops over rows, columns and channels."""

import math

import pytest
import torch
from torch import Tensor

from addnorm.errors import ConfigError, InputError
from addnorm.layers.columns import (
    Categories,
    Columns,
    HiddenNumbers,
    LinearNumbers,
    MixedNumbers,
    NamedCategories,
    PeriodicNumbers,
    PiecewiseNumbers,
    uniform,
)
from tests.conftest import close

ROWS, COLUMNS, WIDTH = 5, 3, 8
X = torch.tensor([[0.3, -2.0, 1.0], [0.0, 0.5, 9.0], [-7.0, 1.5, 2.0]], dtype=torch.float64)


def relu(x: float) -> float:
    return max(x, 0.0)


def per_column(vectors: list[list[list[float]]], weight: Tensor, bias: Tensor, cut: bool) -> Tensor:
    """Σ_i u_i V_j[i, w] + b_j[w] for each row, column j and channel w."""
    weight, bias = weight.detach(), bias.detach()
    rows = []
    for row in vectors:
        tokens = []
        for j, u in enumerate(row):
            token = []
            for w in range(weight.shape[-1]):
                total = float(bias[j, 0, w]) + sum(
                    a * float(weight[j, i, w]) for i, a in enumerate(u)
                )
                token.append(relu(total) if cut else total)
            tokens.append(token)
        rows.append(tokens)
    return torch.tensor(rows, dtype=torch.float64)


def test_linear() -> None:
    embed = LinearNumbers(COLUMNS, WIDTH).double()
    tokens = embed(X)
    for r in range(len(X)):
        for j in range(COLUMNS):
            close(tokens[r, j], X[r, j] * embed.weight[j] + embed.bias[j])


def test_periodic() -> None:
    embed = PeriodicNumbers(COLUMNS, WIDTH, frequencies=4, sigma=0.5).double()
    vectors = []
    for row in X.tolist():
        angles = [
            [2 * math.pi * c * x for c in embed.frequency[j].tolist()] for j, x in enumerate(row)
        ]
        vectors.append(
            [[math.cos(a) for a in each] + [math.sin(a) for a in each] for each in angles]
        )
    close(embed(X), per_column(vectors, embed.project.weight, embed.project.bias, cut=True))


EDGES = [[0.0, 1.0], [-1.0, 0.0, 1.0, 4.0], [0.5, 2.0, 3.0]]


def piecewise(x: float, edges: list[float], bins: int) -> list[float]:
    """Gorishniy et al. 2022, eq. 1, bin by bin."""
    shares = []
    for t in range(bins):
        if t >= len(edges) - 1:
            shares.append(0.0)
            continue
        share = (x - edges[t]) / (edges[t + 1] - edges[t])
        if share < 0 and t > 0:
            share = 0.0
        if share > 1 and t < len(edges) - 2:
            share = 1.0
        shares.append(share)
    return shares


def test_piecewise() -> None:
    embed = PiecewiseNumbers(COLUMNS, WIDTH, edges=EDGES).double()
    vectors = [[piecewise(x, EDGES[j], 3) for j, x in enumerate(row)] for row in X.tolist()]
    close(embed.encode(X), torch.tensor(vectors, dtype=torch.float64))
    close(embed(X), per_column(vectors, embed.project.weight, embed.project.bias, cut=True))


def test_mixed_is_piecewise_and_periodic() -> None:
    embed = MixedNumbers(COLUMNS, WIDTH, edges=EDGES, frequencies=2, sigma=0.5).double()
    vectors = []
    for row in X.tolist():
        vectors.append([])
        for j, x in enumerate(row):
            angles = [2 * math.pi * c * x for c in embed.frequency[j].tolist()]
            waves = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
            vectors[-1].append(piecewise(x, EDGES[j], 3) + waves)
    close(embed(X), per_column(vectors, embed.project.weight, embed.project.bias, cut=True))
    with pytest.raises(ConfigError, match="frequencies above 0 and sigma above 0"):
        MixedNumbers(COLUMNS, WIDTH, edges=EDGES, frequencies=0)


def test_piecewise_is_finite_and_linear_beyond_the_edges() -> None:
    embed = PiecewiseNumbers(1, WIDTH, edges=[[0.0, 1.0, 2.0]])
    assert all(bool(buffer.isfinite().all()) for buffer in embed.buffers())
    close(embed.encode(torch.tensor([[-3.0], [5.0]])), torch.tensor([[[-3.0, 0.0]], [[1.0, 4.0]]]))


def test_hidden() -> None:
    embed = HiddenNumbers(COLUMNS, WIDTH, units=4).double()
    vectors = [
        [
            [
                relu(u * x + a)
                for u, a in zip(embed.weight[j].tolist(), embed.bias[j].tolist(), strict=True)
            ]
            for j, x in enumerate(row)
        ]
        for row in X.tolist()
    ]
    close(embed(X), per_column(vectors, embed.project.weight, embed.project.bias, cut=False))


def test_each_category_column_has_its_own_table() -> None:
    embed = Categories((2, 3), WIDTH)
    codes = torch.tensor([[0, 0], [1, 2]])
    tokens = embed(codes)
    starts = [0, 2]
    for r in range(2):
        for j in range(2):
            close(tokens[r, j], embed.weight[starts[j] + int(codes[r, j])] + embed.bias[j])


def test_named_categories_start_with_the_column() -> None:
    embed = NamedCategories((2, 3), 16)
    tokens = embed(torch.tensor([[1, 2]]))
    assert embed.bias.shape == (2, 2) and embed.weight.shape == (5, 14)
    for j, place in enumerate((1, 2 + 2)):
        close(tokens[0, j], torch.cat((embed.bias[j], embed.weight[place])))


def test_numbers_come_before_categories_and_missing_ones_have_their_own_vector() -> None:
    missing = uniform(2, WIDTH, width=WIDTH)
    columns = Columns(LinearNumbers(2, WIDTH), Categories((4,), WIDTH), missing)
    x, codes = torch.tensor([[1.0, math.nan], [math.nan, 2.0]]), torch.tensor([[3], [0]])
    tokens = columns(x, codes)
    assert columns.numbers is not None and columns.categories is not None
    assert tokens.shape == (2, 3, WIDTH)
    close(tokens[0, 0], columns.numbers(x)[0, 0])
    close(tokens[0, 1], missing[1])
    close(tokens[1, 0], missing[0])
    close(tokens[:, 2:], columns.categories(codes))


def test_gradients_are_finite_with_missing_values() -> None:
    missing = uniform(1, WIDTH, width=WIDTH)
    columns = Columns(PeriodicNumbers(1, WIDTH), None, missing)
    columns(torch.tensor([[math.nan], [1.0]]), torch.zeros(2, 0)).sum().backward()
    for parameter in columns.parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all())


def test_missing_numbers_need_a_vector() -> None:
    columns = Columns(LinearNumbers(1, WIDTH), None)
    message = r"without missing values: got a NaN\. Build with missing=True"
    with pytest.raises(InputError, match=message):
        columns(torch.tensor([[math.nan]]), torch.zeros(1, 0))


@pytest.mark.parametrize(("code", "message"), ((4, "got 4"), (-1, "got -1")))
def test_codes_are_checked(code: int, message: str) -> None:
    with pytest.raises(InputError, match=f"category column 1 must be 0 to 2: {message}"):
        Categories((9, 3), WIDTH)(torch.tensor([[0, code]]))


def test_no_columns() -> None:
    with pytest.raises(ConfigError, match="must have at least one feature column: got none"):
        Columns(None, None)


@pytest.mark.parametrize("edges", ([[0.0]], [[1.0, 1.0]], [[2.0, 1.0]], []))
def test_edges_are_checked(edges: list[list[float]]) -> None:
    with pytest.raises(ConfigError, match="at least two bin edges, in increasing order"):
        PiecewiseNumbers(1, WIDTH, edges=edges)


def test_frequencies_are_checked() -> None:
    with pytest.raises(ConfigError, match="frequencies above 0 and sigma above 0: got 0 and 1"):
        PeriodicNumbers(1, WIDTH, frequencies=0, sigma=1.0)
