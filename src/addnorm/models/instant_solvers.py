"""Closed-form models of the known rows, whose predictions are inputs of the instant model.

Four ridge regressions of the targets (classes: one column of 0 and 1 for each) on the known rows:

    c = (K + α I)⁻¹ (Y − mean Y)            prediction for a row x:  mean Y + k(x)ᵀ c
    of a known row without itself           y_i − c_i / [(K + α I)⁻¹]_ii

with K = Φ Φᵀ (linear) or exp(−|φ − φ'|²) (smooth), each once with all columns alike and once with
columns weighted by how well they go with the target (the norm of their covariance with it, above
what chance gives: kernel alignment, Cristianini et al. 2002). Φ has for a number z, its rank u and
the Legendre polynomial P₂(u); for a category one column of 0 and 1 for each value; 1 if missing;
all centred, and every column of the table with the same variance.

The network sees these predictions next to the true targets of the known rows, so it can judge in
each table which of them to trust, and adds to them. A solver as a layer: Bertinetto et al. 2019
(1805.08136); the prediction without the row itself: Allen 1974 (PRESS).

Shapes: features (tables, rows, columns, parts); predictions (tables, rows, SOLVERS, outcomes).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PARTS = 4
"""Parts of a number: z, u, P₂(u), missing."""
MAX_PARTS = 64
"""Most values of a category that have a part of their own."""
KERNELS = (
    ("linear", False, 0.5),
    ("linear", True, 0.2),
    ("smooth", False, 0.1),
    ("smooth", True, 0.1),
)
"""Kind, whether columns are weighted, and α."""
SOLVERS = len(KERNELS)


def solver_features(
    cells: Tensor, features: Tensor, is_category: Tensor | None, parts: int
) -> Tensor:
    """Return the parts of each cell, (tables, rows, columns, parts).

    Parameters
    ----------
    cells
        (tables, rows, columns), NaN where missing.
    features
        What `cell_features` makes of them: z, u, ..., missing, category.
    is_category
        (tables, columns).
    parts
        How many; see `count_parts`.
    """
    z, u, missing = features[..., 0], features[..., 1], features[..., -2]
    bent = 0.7 * 5**0.5 * (1.5 * u.square() - 0.5) * (1 - missing)
    numbers = torch.stack((z, 3**0.5 * u, bent, missing), dim=-1)
    if is_category is None or not bool(is_category.any()):
        return numbers
    codes = cells.nan_to_num(0.0).long().clamp(0, parts - 1)
    named = F.one_hot(codes, parts).to(z.dtype) * (1 - missing)[..., None]
    return torch.where(is_category[:, None, :, None], named, F.pad(numbers, (0, parts - PARTS)))


def count_parts(cells: Tensor, is_category: Tensor | None) -> int:
    """Return how many parts the columns of known cells (tables, rows, columns) need."""
    if is_category is None or not bool(is_category.any()) or not cells.shape[1]:
        return PARTS
    largest = cells.nan_to_num(0.0).masked_fill(~is_category[:, None], 0.0).max()
    return max(PARTS, min(MAX_PARTS, int(largest) + 1))


@dataclass(frozen=True)
class Solved:
    """The solvers of a batch of tables, fitted to their known rows."""

    parts: int
    centre: Tensor
    """(tables, 1, columns, parts)"""
    weights: tuple[Tensor, Tensor]
    """Of the columns, (tables, 1, columns, 1): alike, and by relevance."""
    known: tuple[Tensor, Tensor]
    """The known rows with each of the weights, (tables, known, columns · parts)."""
    mean: Tensor
    """(tables, 1, outcomes)"""
    coefficients: tuple[Tensor, ...]
    """Of each solver, (tables, known, outcomes)."""
    quality: Tensor
    """(tables, SOLVERS): 1 − squared error / variance on the known rows, each without itself."""

    def predict(self, features: Tensor) -> Tensor:
        """Return (tables, rows, SOLVERS, outcomes) for rows that are not known."""
        if not self.coefficients:
            return self.mean[:, :, None].expand(-1, features.shape[1], SOLVERS, -1).float()
        centred = features.double() - self.centre
        rows = [(centred * weight).flatten(2) for weight in self.weights]
        answers = [
            self.mean + _kernel(kind, rows[weighted], self.known[weighted]) @ coefficients
            for (kind, weighted, _), coefficients in zip(KERNELS, self.coefficients, strict=True)
        ]
        return torch.stack(answers, dim=2).float()


@torch.no_grad()
def solve(features: Tensor, target: Tensor, real: Tensor | None = None) -> tuple[Solved, Tensor]:
    """Return the solvers, and what each predicts for the known rows without themselves.

    Parameters
    ----------
    features
        Of the known rows, (tables, known, columns, parts).
    target
        (tables, known, outcomes): one-hot classes, or a standardised number.
    real
        (tables, columns): False for columns that are padding.
    """
    phi, y = features.double(), target.double()
    tables, known, columns, parts = phi.shape
    if not known:
        one = phi.new_ones(tables, 1, columns, 1)
        mean = y.new_full((tables, 1, y.shape[-1]), 1 / y.shape[-1] if y.shape[-1] > 1 else 0.0)
        nothing = (phi.flatten(2), phi.flatten(2))
        centre, quality = one.expand(-1, -1, -1, parts), target.new_zeros(tables, SOLVERS)
        solved = Solved(parts, centre, (one, one), nothing, mean, (), quality)
        return solved, target.new_zeros(tables, 0, SOLVERS, y.shape[-1])
    centre, mean = phi.mean(dim=1, keepdim=True), y.mean(dim=1, keepdim=True)
    phi, y = phi - centre, y - mean
    variance = phi.square().sum(dim=-1).mean(dim=1)  # (tables, columns)
    scale = torch.where(variance > 1e-6, variance.clamp(min=1e-6).rsqrt(), 0.0)
    if real is not None:
        scale = scale * real
    covariance = torch.einsum("tncp,tnk->tcpk", phi, y) / known
    spread = y.square().sum(dim=-1).mean(dim=1)[:, None].clamp(min=1e-9)
    gain = covariance.square().sum(dim=(2, 3)) * scale.square() / spread
    relevance = ((gain - 1 / known).clamp(min=0).sqrt() + 0.03) * (scale > 0)
    alike, by_relevance = (
        (scale * (share / share.sum(dim=1, keepdim=True).clamp(min=1e-9)).sqrt())[:, None, :, None]
        for share in ((scale > 0).double(), relevance)
    )
    weights = alike, by_relevance
    rows = (phi * alike).flatten(2), (phi * by_relevance).flatten(2)
    coefficients, others = [], []
    identity = torch.eye(known, dtype=phi.dtype, device=phi.device)
    for kind, weighted, ridge in KERNELS:
        if kind == "linear" and columns * parts < known:
            solution, own = _solve_linear(rows[weighted], y, ridge)
        else:
            kernel = _kernel(kind, rows[weighted], rows[weighted]) + ridge * identity
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel))
            solution, own = inverse @ y, torch.diagonal(inverse, dim1=1, dim2=2)
        coefficients.append(solution)
        others.append(mean + y - solution / own[..., None])
    answers = torch.stack(others, dim=2)
    error = (answers - mean[:, :, None] - y[:, :, None]).square().sum(dim=3).mean(dim=1)
    quality = (1 - error / spread).clamp(-1, 1).float()
    solved = Solved(parts, centre, weights, rows, mean, tuple(coefficients), quality)
    return solved, answers.float()


def _solve_linear(x: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return (X Xᵀ + α I)⁻¹ Y and the diagonal of the inverse, for fewer columns than rows.

    (X Xᵀ + α I)⁻¹ = (I − X (Xᵀ X + α I)⁻¹ Xᵀ) / α    (Woodbury 1950)
    """
    gram = x.transpose(1, 2) @ x
    gram = gram + ridge * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    half = torch.linalg.solve_triangular(
        torch.linalg.cholesky(gram), x.transpose(1, 2), upper=False
    )
    solution = (y - half.transpose(1, 2) @ (half @ y)) / ridge
    return solution, (1 - half.square().sum(dim=1)) / ridge


def _kernel(kind: str, a: Tensor, b: Tensor) -> Tensor:
    """Return (tables, rows of a, rows of b)."""
    product = a @ b.transpose(1, 2)
    if kind == "linear":
        return product
    squares = a.square().sum(dim=-1)[:, :, None] + b.square().sum(dim=-1)[:, None]
    return (2 * product - squares).exp()
