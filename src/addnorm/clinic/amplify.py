"""How much the output moves when the weights move a little, against depth.

    amplification at depth i:   Var[F_i(x, W + δ) − F_i(x, W)] / Var[F_i(x, W)],
                                δ ~ share · √mean W² · N(0, 1) in every matrix of every branch

Liu et al. 2020 (2004.08249), §4.3, theorem 2: about Σ_i β²_ii, which grows like N for post-norm and
like log N for pre-norm and Admin, N branches.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from addnorm.clinic.call import Batch, run, tensors
from addnorm.clinic.trace import Site, watch


@dataclass(frozen=True)
class Growth:
    """How a positive quantity grows with 1, 2, 3, ..."""

    exponent: float
    """p of the best y = c xᵖ, by least squares of the logarithms."""
    linear: float
    """R² of y = a + b x."""
    logarithmic: float
    """R² of y = a + b log x."""

    @property
    def law(self) -> str:
        """In words, by the exponent: a logarithm over 2 to 64 has one of about a half."""
        words = ((0.15, "does not grow"), (0.75, "slower than linear"), (1.5, "about linear"))
        return next((word for most, word in words if self.exponent < most), "faster than linear")


def growth(x: Sequence[float], y: Sequence[float]) -> Growth:
    """Fit the three laws.

    >>> growth([1, 2, 4, 8], [3, 6, 12, 24]).law
    'about linear'
    """
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and b > 0 and math.isfinite(b)]
    if len(pairs) < 3:
        return Growth(0.0, 0.0, 0.0)
    logs = [math.log(a) for a, _ in pairs]
    slope, _ = _line(logs, [math.log(b) for _, b in pairs])
    values = [b for _, b in pairs]
    return Growth(slope, _line([a for a, _ in pairs], values)[1], _line(logs, values)[1])


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and R² of the least-squares line."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    sxx = sum((a - mx) ** 2 for a in x)
    sxy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    syy = sum((b - my) ** 2 for b in y)
    if sxx == 0 or syy == 0:
        return 0.0, 0.0
    return sxy / sxx, sxy * sxy / (sxx * syy)


def amplification(
    model: nn.Module, batch: Batch, sites: Sequence[Site], *, share: float = 0.01, draws: int = 2
) -> list[float]:
    """Relative variance of the change of each site's sum, the mean of a few draws of δ."""
    named = dict(model.named_parameters(remove_duplicate=False))
    matrices = {
        name: named[name]
        for site in sites
        for name in site.weights
        if name in named and named[name].ndim >= 2
    }
    generator = torch.Generator().manual_seed(0)
    change = [0.0] * len(sites)
    for _ in range(draws):
        with torch.no_grad(), moved(matrices, lambda w: share * _size(w) * _noise(w, generator)):
            after = watch(model, lambda: run(model, batch), tensors(batch)).sites
        for i, (site, other) in enumerate(zip(sites, after, strict=True)):
            change[i] += _relative(site.total, other.total) / draws
    return change


@contextmanager
def moved(weights: Mapping[str, Tensor], step: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Weights changed for a while, then put back bit by bit; one that is shared moves once."""
    once = {id(w): w for w in weights.values()}
    kept = {number: w.detach().clone() for number, w in once.items()}
    try:
        with torch.no_grad():
            for w in once.values():
                w.add_(step(w))
        yield
    finally:
        with torch.no_grad():
            for number, w in once.items():
                w.copy_(kept[number])


def _relative(one: Tensor, two: Tensor) -> float:
    whole = float(one.detach().float().var())
    change = float((two.detach().float() - one.detach().float()).var())
    return change / whole if whole > 0 else 0.0


def _size(w: Tensor) -> float:
    return float(w.detach().float().pow(2).mean().sqrt())


def _noise(w: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(w.shape, generator=generator).to(w)
