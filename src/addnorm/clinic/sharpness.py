"""The sharpest direction of the loss, and the largest learning rate that it allows.

    plain            λ = largest eigenvalue of H;              gradient descent is stable below 2/λ
    preconditioned   λ = largest eigenvalue of P⁻½ H P⁻½,  P = diag(√v + ε);
                     Adam is stable below (2 + 2β₁) / ((1 − β₁) λ), 38/λ at β₁ = 0.9

Cohen et al. 2021 (2103.00065), §2; 2022 (2207.14484), §3. Found by power iteration on
Hessian-vector products, which are exact where everything can be differentiated twice and else
central differences of the gradient. v is the mean square of the gradient over parts of the batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from addnorm.clinic.amplify import moved
from addnorm.clinic.call import Batch, Objective, parts, with_parts

Vector = list[Tensor]


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
    """The largest eigenvalue of a symmetric matrix, by power iteration.

    If the one of largest size is negative, the matrix less that one has the same order and no
    negative eigenvalue, and is iterated again.
    """
    value = _dominant(multiply, like, iterations, mask, 0.0)
    return value if value >= 0 else _dominant(multiply, like, iterations, mask, value)


def _dominant(
    multiply: Callable[[Vector], Vector],
    like: Sequence[Tensor],
    iterations: int,
    mask: Vector | None,
    shift: float,
) -> float:
    generator = torch.Generator().manual_seed(0)
    vector = [torch.randn(w.shape, generator=generator).to(w) for w in like]
    value = 0.0
    for _ in range(iterations):
        if mask is not None:
            vector = [m * v for m, v in zip(mask, vector, strict=True)]
        norm = math.sqrt(_dot(vector, vector))
        if norm == 0 or not math.isfinite(norm):
            break
        vector = [v / norm for v in vector]
        product = multiply(vector)
        value = _dot(vector, product)
        vector = [p - shift * v for p, v in zip(product, vector, strict=True)]
    return value


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
