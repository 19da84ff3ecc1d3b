"""How much the stream changes, by depth, when the weights change a little.

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

from addnorm.clinic.call_model import ClinicBatch
from addnorm.clinic.measure import root_mean_square
from addnorm.clinic.residual_trace import trace_stream
from addnorm.clinic.stream_records import Site


@dataclass(frozen=True)
class Growth:
    """How a positive quantity y grows with x = 1, 2, 3, ..."""

    exponent: float
    """p of the best y = c xᵖ, by least squares of the logarithms."""
    linear: float
    """R² of y = a + b x."""
    logarithmic: float
    """R² of y = a + b log x."""

    @property
    def law(self) -> str:
        """The law in words, by the exponent; that of a logarithm over 2 to 64 is about a half."""
        laws = ((0.15, "does not grow"), (0.75, "slower than linear"), (1.5, "about linear"))
        return next((law for limit, law in laws if self.exponent < limit), "faster than linear")


def fit_growth(x: Sequence[float], y: Sequence[float]) -> Growth:
    """Return the fit of a power, a line and a logarithm.

    >>> fit_growth([1, 2, 4, 8], [3, 6, 12, 24]).law
    'about linear'
    """
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and b > 0 and math.isfinite(b)]
    if len(pairs) < 3:
        return Growth(0.0, 0.0, 0.0)
    logs = [math.log(a) for a, _ in pairs]
    slope, _ = _fit_line(logs, [math.log(b) for _, b in pairs])
    values = [b for _, b in pairs]
    return Growth(slope, _fit_line([a for a, _ in pairs], values)[1], _fit_line(logs, values)[1])


def _fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return slope and R² of the least-squares line."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    sxx = sum((a - mx) ** 2 for a in x)
    sxy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    syy = sum((b - my) ** 2 for b in y)
    if sxx == 0 or syy == 0:
        return 0.0, 0.0
    return sxy / sxx, sxy * sxy / (sxx * syy)


def amplification(
    model: nn.Module,
    batch: ClinicBatch,
    sites: Sequence[Site],
    *,
    share: float = 0.01,
    draws: int = 2,
) -> list[float]:
    """Return the relative variance of the change of each site's sum, the mean over draws of δ.

    Parameters
    ----------
    model : the model, in evaluation mode; its weights are restored
    batch : what it is called with
    sites : its sites for that batch, with unchanged weights
    share : size of the change, relative to the size of each matrix
    draws : number of random changes
    """
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
        with (
            torch.no_grad(),
            perturbed(matrices, lambda w: share * root_mean_square(w) * _noise(w, generator)),
        ):
            after = trace_stream(model, batch, sites_only=True).sites
        for i, (site, other) in enumerate(zip(sites, after, strict=True)):
            change[i] += _relative_variance(site.total, other.total) / draws
    return change


@contextmanager
def perturbed(weights: Mapping[str, Tensor], step: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Add `step(w)` to each weight; restore them exactly. A shared weight is changed once."""
    unique = {id(w): w for w in weights.values()}
    before = {key: w.detach().clone() for key, w in unique.items()}
    try:
        with torch.no_grad():
            for w in unique.values():
                w.add_(step(w))
        yield
    finally:
        with torch.no_grad():
            for key, w in unique.items():
                w.copy_(before[key])


def _relative_variance(before: Tensor, after: Tensor) -> float:
    total = float(before.detach().float().var())
    change = float((after.detach().float() - before.detach().float()).var())
    return change / total if total > 0 else 0.0


def _noise(w: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(w.shape, generator=generator, device="cpu").to(w)
