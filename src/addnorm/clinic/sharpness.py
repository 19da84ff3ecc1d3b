"""The sharpness of the loss, and the largest learning rate that it allows.

    plain            λ = largest eigenvalue of H;              gradient descent is stable below 2/λ
    preconditioned   λ = largest eigenvalue of P⁻½ H P⁻½,  P = diag(√v + ε);
                     Adam is stable below (2 + 2β₁) / ((1 − β₁) λ), 38/λ at β₁ = 0.9

Cohen et al. 2021 (2103.00065), §2; 2022 (2207.14484), §3. Computed by the method of Lanczos on
Hessian-vector products, which are exact if the loss can be differentiated twice, and otherwise
central differences of the gradient. v is the mean square of the gradient over parts of the batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from addnorm.clinic.call_model import ClinicBatch, Objective, step_operations
from addnorm.clinic.weight_perturbation import perturbed

Vector = list[Tensor]
MAX_OPERATIONS = 5e10
"""Operations of a step beyond which only the first rows of a batch are used."""


@dataclass(frozen=True)
class Sharpness:
    """The largest eigenvalues, and the learning rates they allow.

    Parameters
    ----------
    plain : largest eigenvalue of the Hessian
    adam : largest eigenvalue of the Hessian preconditioned as Adam does
    iterations : iterations of the method of Lanczos
    beta : β₁ of Adam
    """

    plain: float
    adam: float
    iterations: int
    beta: float = 0.9

    @property
    def plain_rate(self) -> float:
        """Largest stable learning rate of gradient descent."""
        return 2 / self.plain if self.plain > 0 else math.inf

    @property
    def adam_rate(self) -> float:
        """Largest stable learning rate of Adam."""
        if self.adam <= 0:
            return math.inf
        return (2 + 2 * self.beta) / ((1 - self.beta) * self.adam)


def measure_sharpness(
    model: nn.Module,
    batch: ClinicBatch,
    objective: Objective,
    *,
    iterations: int = 6,
    chunks: int = 4,
    eps: float = 1e-8,
    beta: float = 0.9,
) -> Sharpness:
    """Return both largest eigenvalues at the present weights.

    Parameters
    ----------
    model, batch, objective : the loss
    iterations : steps of the method of Lanczos
    chunks : parts of the batch over which the gradient's mean square is taken
    eps, beta : ε and β₁ of Adam
    """
    weights: Vector = [p for p in model.parameters() if p.requires_grad]
    parts = math.ceil(step_operations(model, batch) / MAX_OPERATIONS)
    batch = objective.split(batch, max(1, parts))[0]
    multiply = _products(model, batch, objective, weights)
    plain = largest_eigenvalue(multiply, weights, iterations)
    square = _squared_gradients(model, batch, objective, weights, chunks)
    scale = [(v.sqrt() + eps) ** -0.5 for v in square]

    def preconditioned(vector: Vector) -> Vector:
        inner = multiply([s * v for s, v in zip(scale, vector, strict=True)])
        return [s * v for s, v in zip(scale, inner, strict=True)]

    # Weights whose gradient is zero for every part of the batch are left out.
    start = [(v > 0).to(v) for v in square]
    adam = largest_eigenvalue(preconditioned, weights, iterations, start)
    return Sharpness(plain, adam, iterations, beta)


def largest_eigenvalue(
    multiply: Callable[[Vector], Vector],
    like: Sequence[Tensor],
    iterations: int,
    mask: Vector | None = None,
) -> float:
    """Return the largest eigenvalue of a symmetric matrix A, by the method of Lanczos 1950.

    β_i v_{i+1} = A v_i − α_i v_i − β_{i−1} v_{i−1},  α_i = v_iᵀ A v_i; then that of the
    tridiagonal matrix with diagonal α and off-diagonal β. Large negative eigenvalues do no harm.

    Parameters
    ----------
    multiply : the product A v of a vector, as a list of tensors
    like : tensors of the shapes of a vector
    iterations : products to compute, at most
    mask : 1 for the elements of the start vector that may differ from zero, 0 for the others
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
    off_diagonal = torch.diag(torch.tensor(betas[1:], dtype=torch.float64), 1)
    tridiagonal = (
        torch.diag(torch.tensor(alphas, dtype=torch.float64)) + off_diagonal + off_diagonal.T
    )
    return float(torch.linalg.eigvalsh(tridiagonal)[-1]) if alphas else 0.0


def _squared_gradients(
    model: nn.Module, batch: ClinicBatch, objective: Objective, weights: Vector, chunks: int
) -> Vector:
    """Return the mean square of the gradient over parts of the batch."""
    every = [_gradient(model, part, objective, weights) for part in objective.split(batch, chunks)]
    return [torch.stack([g**2 for g in each]).mean(dim=0) for each in zip(*every, strict=True)]


def _products(
    model: nn.Module, batch: ClinicBatch, objective: Objective, weights: Vector
) -> Callable[[Vector], Vector]:
    """Return the function v ↦ H v, by differentiating twice or by central differences.

    A function that can be differentiated only once may count as constant the second time without
    an error, so one exact product is compared with the difference before it is trusted.
    """

    def differ(vector: Vector) -> Vector:
        return _difference(model, batch, objective, weights, vector)

    generator = torch.Generator().manual_seed(1)
    probe = [torch.randn(w.shape, generator=generator).to(w) for w in weights]
    rough = differ(probe)  # before the graph is built: it changes and restores the weights
    try:
        with sdpa_kernel(SDPBackend.MATH):
            first = _grad(objective(model, batch), weights, create_graph=True)

        def multiply(vector: Vector) -> Vector:
            with sdpa_kernel(SDPBackend.MATH):
                return _grad(_dot_tensor(first, vector), weights, retain_graph=True)

        exact = multiply(probe)
    except RuntimeError:  # torch says in no other way that there is no second derivative
        return differ
    gap = [a - b for a, b in zip(exact, rough, strict=True)]
    return multiply if _dot(gap, gap) <= 0.1 * _dot(exact, exact) else differ


def _difference(
    model: nn.Module, batch: ClinicBatch, objective: Objective, weights: Vector, vector: Vector
) -> Vector:
    """Return (g(w + hv) − g(w − hv)) / 2h, hv a thousandth of w in size."""
    h = 1e-3 * math.sqrt(_dot(weights, weights) / max(_dot(vector, vector), 1e-30))
    steps = {id(w): v for w, v in zip(weights, vector, strict=True)}
    named = {str(i): w for i, w in enumerate(weights)}
    sides = []
    for sign in (h, -h):
        with perturbed(named, lambda w, sign=sign: sign * steps[id(w)]):  # type: ignore[misc]
            sides.append(_gradient(model, batch, objective, weights))
    return [(a - b) / (2 * h) for a, b in zip(*sides, strict=True)]


def _gradient(
    model: nn.Module, batch: ClinicBatch, objective: Objective, weights: Vector
) -> Vector:
    return _grad(objective(model, batch), weights)


def _grad(
    value: Tensor, weights: Vector, *, create_graph: bool = False, retain_graph: bool | None = None
) -> Vector:
    grads = torch.autograd.grad(
        value, weights, allow_unused=True, create_graph=create_graph, retain_graph=retain_graph
    )
    return [torch.zeros_like(w) if g is None else g for g, w in zip(grads, weights, strict=True)]


def _dot_tensor(one: Vector, two: Vector) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, two, strict=True)]).sum()


def _dot(one: Vector, two: Vector) -> float:
    return float(_dot_tensor([w.detach() for w in one], [w.detach() for w in two]))
