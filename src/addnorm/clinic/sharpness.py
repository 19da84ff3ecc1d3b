"""The sharpest direction of the loss, and the largest learning rate that it allows.

    plain            λ = largest eigenvalue of H;              gradient descent is stable below 2/λ
    preconditioned   λ = largest eigenvalue of P⁻½ H P⁻½,  P = diag(√v + ε);
                     Adam is stable below (2 + 2β₁) / ((1 − β₁) λ), 38/λ at β₁ = 0.9

Cohen et al. 2021 (2103.00065), §2; 2022 (2207.14484), §3. Found by the method of Lanczos
on Hessian-vector products, which are exact where everything can be differentiated twice and else
central differences of the gradient. v is the mean square of the gradient over parts of the batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from addnorm.clinic.amplify import moved
from addnorm.clinic.call import Batch, Objective, parts, with_parts, work

Vector = list[Tensor]
WORK = 5e10
"""Operations of a pass, beyond which only the first rows of a batch are taken."""


@dataclass(frozen=True)
class Sharpness:
    """Largest eigenvalues, and the rates they allow."""

    plain: float
    adam: float
    iterations: int
    beta: float = 0.9

    @property
    def plain_rate(self) -> float:
        """Largest stable rate of gradient descent."""
        return 2 / self.plain if self.plain > 0 else math.inf

    @property
    def adam_rate(self) -> float:
        """Largest stable rate of Adam."""
        if self.adam <= 0:
            return math.inf
        return (2 + 2 * self.beta) / ((1 - self.beta) * self.adam)


def sharpness(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    *,
    iterations: int = 6,
    chunks: int = 4,
    eps: float = 1e-8,
    beta: float = 0.9,
) -> Sharpness:
    """Both largest eigenvalues at the present weights."""
    weights: Vector = [p for p in model.parameters() if p.requires_grad]
    batch = _fewer_rows(model, batch, objective)
    multiply = _products(model, batch, objective, weights)
    plain = largest(multiply, weights, iterations)
    square = _squares(model, batch, objective, weights, chunks)
    scale = [(v.sqrt() + eps) ** -0.5 for v in square]

    def preconditioned(vector: Vector) -> Vector:
        inner = multiply([s * v for s, v in zip(scale, vector, strict=True)])
        return [s * v for s, v in zip(scale, inner, strict=True)]

    # Directions along which no part of the batch has a gradient are not of this loss.
    start = [(v > 0).to(v) for v in square]
    return Sharpness(plain, largest(preconditioned, weights, iterations, start), iterations, beta)


def largest(
    multiply: Callable[[Vector], Vector],
    like: Sequence[Tensor],
    iterations: int,
    mask: Vector | None = None,
) -> float:
    """The largest eigenvalue of a symmetric matrix A, by the method of Lanczos 1950.

    β_i v_{i+1} = A v_i − α_i v_i − β_{i−1} v_{i−1},  α_i = v_iᵀ A v_i; then that of the matrix with
    α on its diagonal and β beside it. Large negative eigenvalues do not stand in its way.
    """
    generator = torch.Generator().manual_seed(0)
    vector = [torch.randn(w.shape, generator=generator).to(w) for w in like]
    vector = vector if mask is None else [m * v for m, v in zip(mask, vector, strict=True)]
    before, norm = [torch.zeros_like(v) for v in vector], math.sqrt(_dot(vector, vector))
    alphas: list[float] = []
    betas: list[float] = []
    while len(alphas) < iterations and norm > 1e-6 * max(map(abs, alphas), default=0.0):
        vector = [v / norm for v in vector]
        product = multiply(vector)
        if mask is not None:
            product = [m * p for m, p in zip(mask, product, strict=True)]
        alphas.append(_dot(vector, product))
        betas.append(norm)
        back = norm if len(alphas) > 1 else 0.0
        rest = [
            p - alphas[-1] * v - back * b for p, v, b in zip(product, vector, before, strict=True)
        ]
        before, vector = vector, rest
        norm = math.sqrt(_dot(rest, rest))
    if not all(map(math.isfinite, alphas)):
        return math.nan
    beside = torch.diag(torch.tensor(betas[1:], dtype=torch.float64), 1)
    whole = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + beside + beside.T
    return float(torch.linalg.eigvalsh(whole)[-1]) if alphas else 0.0


def split(batch: Batch, count: int) -> list[Batch]:
    """A batch as several, by rows."""
    rows = min((t.shape[0] for t in parts(batch).values() if isinstance(t, Tensor)), default=1)
    size = max(1, rows // count)
    return [
        with_parts(
            batch,
            {
                name: part[i : i + size]
                for name, part in parts(batch).items()
                if isinstance(part, Tensor) and part.ndim and part.shape[0] == rows
            },
        )
        for i in range(0, size * min(count, rows), size)
    ]


def _fewer_rows(model: nn.Module, batch: Batch, objective: Objective) -> Batch:
    """As many of the first rows as one product may take work for."""
    fewer = split(batch, math.ceil(work(model, batch) / WORK))[0]
    try:
        with torch.no_grad():
            objective(model, fewer)
    except (RuntimeError, ValueError):  # a loss that knows its targets has no parts
        return batch
    return fewer


def _squares(
    model: nn.Module, batch: Batch, objective: Objective, weights: Vector, chunks: int
) -> Vector:
    """Mean square of the gradient over parts of the batch, or of the whole if it has none."""
    pieces = split(batch, chunks)
    try:
        found = [_gradient(model, piece, objective, weights) for piece in pieces]
    except (RuntimeError, ValueError):  # a loss that knows its targets has no parts
        found = [_gradient(model, batch, objective, weights)]
    return [torch.stack([g**2 for g in parts]).mean(dim=0) for parts in zip(*found, strict=True)]


def _products(
    model: nn.Module, batch: Batch, objective: Objective, weights: Vector
) -> Callable[[Vector], Vector]:
    """v to H v: by differentiating twice, or if that cannot be, by central differences.

    A function that can be differentiated once may pass for constant the second time and say
    nothing, so one product is held against the difference before the exact way is trusted.
    """

    def differ(vector: Vector) -> Vector:
        return _difference(model, batch, objective, weights, vector)

    generator = torch.Generator().manual_seed(1)
    probe = [torch.randn(w.shape, generator=generator).to(w) for w in weights]
    rough = differ(probe)  # before the graph is made: it moves the weights and puts them back
    try:
        with sdpa_kernel(SDPBackend.MATH):
            first = _grad(objective(model, batch), weights, create_graph=True)

        def multiply(vector: Vector) -> Vector:
            with sdpa_kernel(SDPBackend.MATH):
                return _grad(_dot_tensor(first, vector), weights, retain_graph=True)

        exact = multiply(probe)
    except RuntimeError:
        return differ
    gap = [a - b for a, b in zip(exact, rough, strict=True)]
    return multiply if _dot(gap, gap) <= 0.1 * _dot(exact, exact) else differ


def _difference(
    model: nn.Module, batch: Batch, objective: Objective, weights: Vector, vector: Vector
) -> Vector:
    """(g(w + hv) − g(w − hv)) / 2h, hv a thousandth of w in size."""
    h = 1e-3 * math.sqrt(_dot(weights, weights) / max(_dot(vector, vector), 1e-30))
    steps = {id(w): v for w, v in zip(weights, vector, strict=True)}
    named = {str(i): w for i, w in enumerate(weights)}
    sides = []
    for sign in (h, -h):
        with moved(named, lambda w, sign=sign: sign * steps[id(w)]):  # type: ignore[misc]
            sides.append(_gradient(model, batch, objective, weights))
    return [(a - b) / (2 * h) for a, b in zip(*sides, strict=True)]


def _gradient(model: nn.Module, batch: Batch, objective: Objective, weights: Vector) -> Vector:
    return _grad(objective(model, batch), weights)


def _grad(
    value: Tensor, weights: Vector, *, create_graph: bool = False, retain_graph: bool | None = None
) -> Vector:
    found = torch.autograd.grad(
        value, weights, allow_unused=True, create_graph=create_graph, retain_graph=retain_graph
    )
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, weights, strict=True)]


def _dot_tensor(one: Vector, two: Vector) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, two, strict=True)]).sum()


def _dot(one: Vector, two: Vector) -> float:
    return float(_dot_tensor([w.detach() for w in one], [w.detach() for w in two]))
