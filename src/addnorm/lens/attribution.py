"""Which inputs an output depends on: integrated gradients over token embeddings.

    c_i = (x_i − b_i) · ∫₀¹ ∂f/∂x_i (b + α (x − b)) dα,   Σ c_i = f(x) − f(b)

Sundararajan et al. 2017 (1703.01365), eq. 1. The integral is a sum at Gauss-Legendre nodes; how far
the contributions are from their known sum (completeness) is returned with them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.layers.embeddings import Tokens
from addnorm.lens.attention import Metric
from addnorm.lens.look import look
from addnorm.lens.places import ModelInputs, call, find_sides, require_eval


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Contributions to a metric by input position.

    Parameters
    ----------
    contributions
        Of each side (encoder, decoder), (batch, length).
    value, baseline
        The metric of the input and of the baseline, summed over the batch.
    """

    contributions: dict[str, Tensor]
    value: float
    baseline: float

    @property
    def completeness(self) -> float:
        """Sum of the contributions − (value − baseline): 0 if the integral were exact."""
        total = sum(float(each.double().sum()) for each in self.contributions.values())
        return total - (self.value - self.baseline)


def integrated_gradients(
    model: nn.Module,
    inputs: ModelInputs,
    metric: Metric,
    *,
    baseline: str = "mean",
    steps: int = 32,
) -> Attribution:
    """Return the contribution of every input token to a metric of the output.

    Parameters
    ----------
    model, inputs
        What is called, with what: token ids.
    metric
        From the output to a number, or to one for each row; see `logit_metric`.
    baseline
        What the path starts from at every position: `mean`, the mean token embedding, or `zero`.
        Positions are the same at both ends, and a summary token is not moved.
    steps
        Nodes of the integral.

    >>> from addnorm import ModelConfig, build
    >>> from addnorm.lens.patching import logit_metric
    >>> model = build(ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=1)).eval()
    >>> result = integrated_gradients(model, torch.tensor([[3, 1, 4]]), logit_metric(2))
    >>> abs(result.completeness) < 0.1 * abs(result.value - result.baseline)
    True
    """
    require_eval(model, "integrated_gradients")
    ends = {name: pair[0] for name, pair in look(model, inputs, ()).embeddings.items()}
    starts = {name: _start(model, name, x, baseline) for name, x in ends.items()}
    nodes, weights = gauss_legendre(steps)
    totals = {name: torch.zeros_like(x) for name, x in ends.items()}
    for node, weight in zip(nodes, weights, strict=True):
        at = {n: (starts[n] + node * (ends[n] - starts[n])).requires_grad_() for n in ends}
        with torch.enable_grad():
            value = _call_from(model, inputs, at, metric)
        for name, grad in zip(at, torch.autograd.grad(value, list(at.values())), strict=True):
            totals[name] += weight * grad
    with torch.no_grad():
        high, low = (float(_call_from(model, inputs, x, metric)) for x in (ends, starts))
    contributions = {n: ((ends[n] - starts[n]) * total).sum(dim=-1) for n, total in totals.items()}
    return Attribution(contributions=contributions, value=high, baseline=low)


def gauss_legendre(count: int) -> tuple[list[float], list[float]]:
    """Return nodes and weights of an integral from 0 to 1.

    >>> gauss_legendre(1)
    ([0.5], [1.0])
    """
    if count < 1:
        raise InputError(f"steps must be 1 or more: got {count}. Try 32.")
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()


def _start(model: nn.Module, side: str, x: Tensor, baseline: str) -> Tensor:
    if baseline not in ("mean", "zero"):
        raise InputError(f"baseline must be mean or zero: got {baseline!r}.")
    start = torch.zeros_like(x)
    if baseline == "mean":
        tokens = _token_embedding(model, side)
        if tokens is None:
            raise InputError("a mean baseline needs token ids as input. Try baseline='zero'.")
        start = start + (tokens.weight.mean(dim=0) * tokens.scale).detach()
    if getattr(model, "summary", None) is not None:
        start[:, 0] = x[:, 0]
    return start


def _token_embedding(model: nn.Module, side: str) -> Tokens | None:
    found = getattr(model, "tokens", None)
    if side == "encoder" and "decoder" in find_sides(model):
        found = model.source_tokens or found
    return found if isinstance(found, Tokens) else None


def _call_from(
    model: nn.Module, inputs: ModelInputs, at: dict[str, Tensor], metric: Metric
) -> Tensor:
    """Return the metric, summed over rows, with other embeddings entering the sides."""

    def replace(x: Tensor) -> Callable[..., Any]:
        return lambda side, args: (x, *args[1:])

    sides = find_sides(model)
    handles = [sides[name].register_forward_pre_hook(replace(x)) for name, x in at.items()]
    try:
        return metric(call(model, inputs)).sum()
    finally:
        for handle in handles:
            handle.remove()
