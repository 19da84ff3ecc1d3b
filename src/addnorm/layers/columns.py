"""Embeddings of the columns of a table: one token for each number and each category.

    numbers (batch, columns) float, NaN where missing   ─► embedding ─┐
                                                                      ├─► (batch, columns, width)
    codes   (batch, columns) integers from 0            ─► embedding ─┘

The feature tokenizer of Gorishniy et al. 2021 (2106.11959), §3.3. Numbers come before categories.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from addnorm.errors import ConfigError, InputError

UNBOUNDED = 1e9
"""Limit of the first bin below and the last bin above: in effect none."""


def uniform(*shape: int, width: int) -> nn.Parameter:
    """Return a parameter drawn from U(−1/√width, 1/√width)."""
    return nn.Parameter(torch.empty(shape).uniform_(-(width**-0.5), width**-0.5))


class LinearNumbers(nn.Module):
    """T_j = x_j W_j + b_j. Gorishniy et al. 2021, §3.3."""

    def __init__(self, columns: int, width: int) -> None:
        super().__init__()
        self.weight = uniform(columns, width, width=width)
        self.bias = uniform(columns, width, width=width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, x[..., None], self.weight)


class PerColumn(nn.Module):
    """T_j = V_j u_j + b_j for the vector u_j of each column j, optionally with a ReLU.

    Parameters
    ----------
    columns
        Number of columns.
    inner, width
        Widths of u_j and of T_j.
    relu
        Apply a ReLU to the result.
    """

    def __init__(self, columns: int, inner: int, width: int, *, relu: bool) -> None:
        super().__init__()
        self.relu = relu
        self.weight = uniform(columns, inner, width, width=inner)
        self.bias = uniform(columns, 1, width, width=inner)

    def forward(self, u: Tensor) -> Tensor:
        # (batch, columns, inner) -> (columns, batch, width) -> (batch, columns, width)
        y = torch.baddbmm(self.bias, u.transpose(0, 1), self.weight)
        return (y.relu() if self.relu else y).transpose(0, 1)


def random_frequencies(columns: int, count: int, sigma: float) -> nn.Parameter:
    """Return c from N(0, sigma²), (columns, count)."""
    if count < 1 or sigma <= 0:
        raise ConfigError(
            "periodic embeddings must have frequencies above 0 and sigma above 0: "
            f"got {count} and {sigma}. Try 48 and 0.05."
        )
    return nn.Parameter(torch.empty(columns, count).normal_(std=sigma))


def waves(x: Tensor, frequency: Tensor) -> Tensor:
    """Return [cos 2πc_j x_j, sin 2πc_j x_j], (batch, columns, 2 · frequencies)."""
    angle = 2 * math.pi * frequency * x[..., None]
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


class PeriodicNumbers(nn.Module):
    """T_j = ReLU(V_j [cos 2πc_j x_j, sin 2πc_j x_j] + b_j), c learned, from N(0, sigma²)

    PLR: Gorishniy et al. 2022 (2203.05556), §3.3.

    Parameters
    ----------
    columns, width
        Number of columns, and width of a token.
    frequencies
        Number of c_j for each column.
    sigma
        Standard deviation of the initial c_j.
    """

    def __init__(
        self, columns: int, width: int, *, frequencies: int = 48, sigma: float = 0.05
    ) -> None:
        super().__init__()
        self.frequency = random_frequencies(columns, frequencies, sigma)
        self.project = PerColumn(columns, 2 * frequencies, width, relu=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(waves(x, self.frequency))


class PiecewiseNumbers(nn.Module):
    """T_j = ReLU(V_j e(x_j) + b_j),   e_t(x) = (x − a_t) / (a_t+1 − a_t), clipped to [0, 1]

    The a_t are the `edges` of the column's bins; e is not clipped below the first and above the
    last bin. Gorishniy et al. 2022 (2203.05556), eq. 1. Columns may have different numbers of bins.
    """

    low: Tensor
    gap: Tensor
    least: Tensor
    most: Tensor

    def __init__(self, columns: int, width: int, *, edges: Sequence[Sequence[float]]) -> None:
        super().__init__()
        if len(edges) != columns or any(
            len(row) < 2 or any(b <= a for a, b in pairwise(row)) for row in edges
        ):
            raise ConfigError(
                "every column must have at least two bin edges, in increasing order: "
                f"got {len(edges)} lists for {columns} columns. Leave out columns with one value."
            )
        bins = max((len(row) for row in edges), default=2) - 1
        # All are finite, so that an average of weights over time leaves them unchanged.
        for name, value in (("low", 0.0), ("gap", 1.0), ("least", 0.0), ("most", 0.0)):
            self.register_buffer(name, torch.full((columns, bins), value))
        for j, row in enumerate(edges):
            a = torch.tensor(list(row), dtype=torch.float64)
            count = len(row) - 1
            self.low[j, :count], self.gap[j, :count] = a[:-1].float(), a.diff().float()
            self.most[j, : count - 1] = 1.0
            self.least[j, 0], self.most[j, count - 1] = -UNBOUNDED, UNBOUNDED
        self.project = PerColumn(columns, bins, width, relu=True)

    def encode(self, x: Tensor) -> Tensor:
        """Return e(x), (batch, columns, bins); bins that a column does not have are 0."""
        share = (x[..., None] - self.low) / self.gap
        return share.clamp(self.least, self.most)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.encode(x))


class MixedNumbers(PiecewiseNumbers):
    """T_j = ReLU(V_j [e(x_j), cos 2πc_j x_j, sin 2πc_j x_j] + b_j): bins and waves together.

    e as for PiecewiseNumbers, c as for PeriodicNumbers: steps and smooth curves in one embedding.

    Parameters
    ----------
    columns, width
        Number of columns, and width of a token.
    edges
        Edges of the bins of each column.
    frequencies, sigma
        Number of c_j for each column, and standard deviation of their initial values.
    """

    def __init__(
        self,
        columns: int,
        width: int,
        *,
        edges: Sequence[Sequence[float]],
        frequencies: int = 16,
        sigma: float = 0.1,
    ) -> None:
        super().__init__(columns, width, edges=edges)
        self.frequency = random_frequencies(columns, frequencies, sigma)
        inner = self.low.shape[1] + 2 * frequencies
        self.project = PerColumn(columns, inner, width, relu=True)

    def encode(self, x: Tensor) -> Tensor:
        """Return [e(x), cos, sin], (batch, columns, bins + 2 · frequencies)."""
        return torch.cat((super().encode(x), waves(x, self.frequency)), dim=-1)


class HiddenNumbers(nn.Module):
    """T_j = V_j ReLU(u_j x_j + a_j) + b_j

    Somepalli et al. 2021 (2106.01342), §4.1; the authors' code has 100 hidden units.
    """

    def __init__(self, columns: int, width: int, *, units: int = 100) -> None:
        super().__init__()
        self.weight = uniform(columns, units, width=1)
        self.bias = uniform(columns, units, width=1)
        self.project = PerColumn(columns, units, width, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.addcmul(self.bias, x[..., None], self.weight).relu())


NUMBERS: dict[str, Callable[..., nn.Module]] = {
    "linear": LinearNumbers,
    "periodic": PeriodicNumbers,
    "piecewise": PiecewiseNumbers,
    "mixed": MixedNumbers,
    "hidden": HiddenNumbers,
}


class Categories(nn.Module):
    """T_j = E_j[code] + b_j, with all E_j in one matrix. Gorishniy et al. 2021, §3.3.

    `sizes` are the numbers of codes of each column.
    """

    offset: Tensor

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.register_buffer("offset", torch.tensor([0, *sizes[:-1]]).cumsum(0), persistent=False)
        self.weight = uniform(sum(sizes), width, width=width)
        self.bias = uniform(len(sizes), width, width=width)

    def forward(self, codes: Tensor) -> Tensor:
        return self.look_up(codes) + self.bias

    def look_up(self, codes: Tensor) -> Tensor:
        """Return E_j[code] of every column."""
        check_codes(codes, self.sizes)
        return nn.functional.embedding(codes + self.offset, self.weight)


class NamedCategories(Categories):
    """T_j = [c_j ; E_j[code]]: an eighth of the width identifies the column, the rest the value.

    TabTransformer: Huang et al. 2020 (2012.06678), §2.
    """

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        name = width // 8
        super().__init__(sizes, width - name)
        self.bias = uniform(len(sizes), name, width=width)

    def forward(self, codes: Tensor) -> Tensor:
        name = self.bias.expand(codes.shape[0], *self.bias.shape)
        return torch.cat((name, self.look_up(codes)), dim=-1)


class Columns(nn.Module):
    """Numeric, then categorical columns as tokens, (batch, columns, width).

    With `missing`, each numeric column has a learned vector for missing values (NaN); without it,
    NaN is an error. `numbers` or `categories` is None if there are no such columns.
    """

    def __init__(
        self,
        numbers: nn.Module | None,
        categories: Categories | None,
        missing: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        if numbers is None and categories is None:
            raise ConfigError("a table must have at least one feature column: got none.")
        self.numbers, self.categories, self.missing = numbers, categories, missing

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        parts = []
        if self.numbers is not None:
            parts.append(self.embed_numbers(self.numbers, numbers))
        if self.categories is not None:
            parts.append(self.categories(codes))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def embed_numbers(self, embed: nn.Module, x: Tensor) -> Tensor:
        """Return the tokens of the numeric columns, with `missing` in place of NaN."""
        is_missing = x.isnan()
        if not torch.compiler.is_compiling() and not bool(is_missing.any()):
            return embed(x)
        if self.missing is None:
            raise InputError(
                "these columns were built without missing values: got a NaN. "
                "Build with missing=True, or impute the values first."
            )
        filled = x.masked_fill(is_missing, 0.0)
        return torch.where(is_missing[..., None], self.missing, embed(filled))


def check_codes(codes: Tensor, sizes: Sequence[int]) -> None:
    """Raise InputError if a code is not below the size of its column."""
    if torch.compiler.is_compiling() or codes.device.type != "cpu" or not len(codes):
        return
    low, high = codes.amin(dim=0).tolist(), codes.amax(dim=0).tolist()
    for column, (least, most, size) in enumerate(zip(low, high, sizes, strict=True)):
        if least < 0 or most >= size:
            raise InputError(
                f"codes of category column {column} must be 0 to {size - 1}: "
                f"got {least if least < 0 else most}."
            )
