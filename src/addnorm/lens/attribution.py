"""Which inputs an output depends on: integrated gradients over embeddings of tokens or patches.

    c_i = (x_i − b_i) · ∫₀¹ ∂f/∂x_i (b + α (x − b)) dα,   Σ c_i = f(x) − f(b)

Sundararajan et al. 2017 (1703.01365), eq. 1. The integral is a sum at Gauss-Legendre nodes; how far
the contributions are from their known sum (completeness) is returned with them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.layers.embeddings import Patches, Tokens
from addnorm.lens.attention import Metric
from addnorm.lens.places import (
    ModelInputs,
    as_tensors,
    call,
    find_entries,
    no_grad_call,
    require_eval,
)


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Contributions to a metric by input position.

    Parameters
    ----------
    contributions
        Of each side (encoder, decoder), (batch, length).
    values, baselines
        The metric of the inputs and of the baselines: one number, or one for each row.
    """

    contributions: dict[str, Tensor]
    values: Tensor
    baselines: Tensor

    @property
    def value(self) -> float:
        """The metric of the input, summed over the batch."""
        return float(self.values.double().sum())

    @property
    def baseline(self) -> float:
        """The metric of the baseline, summed over the batch."""
        return float(self.baselines.double().sum())

    @property
    def completeness(self) -> float:
        """Sum of the contributions − (value − baseline): 0 if the integral were exact."""
        total = sum(float(each.double().sum()) for each in self.contributions.values())
        return total - (self.value - self.baseline)

    def row_errors(self) -> Tensor:
        """Return the completeness of each row, (batch,), if the metric has a value for each."""
        totals = torch.stack([each.double().sum(dim=1) for each in self.contributions.values()])
        if self.values.shape != totals.shape[1:]:
            raise InputError("this metric has one value for the whole batch: see `completeness`.")
        return totals.sum(dim=0) - (self.values - self.baselines).double()


def integrated_gradients(
    model: nn.Module,
    inputs: ModelInputs,
    metric: Metric,
    *,
    baseline: str | Mapping[str, Tensor] = "mean",
    steps: int = 32,
) -> Attribution:
    """Return the contribution of every input token or patch to a metric of the output.

    Parameters
    ----------
    model, inputs
        What is called, with what: token ids, or images.
    metric
        From the output to a number, or to one for each row; see `logit_metric`.
    baseline
        What the path starts from at every position: `mean`, the mean token embedding; `zero`; or
        of each side other token ids or images, of the shape of the inputs. Positions are the same
        at both ends, and a summary token is not moved. A model has never read a mean embedding, and
        may answer anything for it: where that matters, use ids, and the mean over several draws.
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
    ends = _embedded(model, inputs)
    if isinstance(baseline, str):
        starts = {name: _start(model, name, x, baseline) for name, x in ends.items()}
    else:
        starts = _starts_from_inputs(model, inputs, ends, baseline)
    nodes, weights = gauss_legendre(steps)
    totals = {name: torch.zeros_like(x) for name, x in ends.items()}
    for node, weight in zip(nodes, weights, strict=True):
        at = {n: (starts[n] + node * (ends[n] - starts[n])).requires_grad_() for n in ends}
        with torch.enable_grad():
            value = _call_from(model, inputs, at, metric).sum()
        for name, grad in zip(at, torch.autograd.grad(value, list(at.values())), strict=True):
            totals[name] += weight * grad
    with torch.no_grad():
        high, low = (_call_from(model, inputs, x, metric) for x in (ends, starts))
    contributions = {n: ((ends[n] - starts[n]) * total).sum(dim=-1) for n, total in totals.items()}
    return Attribution(contributions=contributions, values=high, baselines=low)


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
        tokens = token_embedding(model, side)
        if tokens is None:
            raise InputError("a mean baseline needs token ids as input. Try baseline='zero'.")
        start = start + (tokens.weight.mean(dim=0) * tokens.scale).detach()
    if getattr(model, "summary", None) is not None:
        start[:, 0] = x[:, 0]
    return start


def _starts_from_inputs(
    model: nn.Module,
    inputs: ModelInputs,
    ends: Mapping[str, Tensor],
    baseline: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the embeddings of other inputs; segments and a summary stay as they are."""
    starts = {}
    for (name, x), ids in zip(ends.items(), as_tensors(inputs), strict=False):
        tokens, other = input_embedding(model, name), baseline.get(name)
        if tokens is None or other is None or other.shape != ids.shape:
            raise InputError(
                f"baseline must have inputs of the same shape for {name!r}: "
                f"{tuple(ids.shape)}. Got {None if other is None else tuple(other.shape)}."
            )
        with torch.no_grad():
            change = tokens(other) - tokens(ids)
        starts[name] = x + nn.functional.pad(change, (0, 0, x.shape[1] - change.shape[1], 0))
    return starts


def input_embedding(model: nn.Module, side: str) -> Tokens | Patches | None:
    """Return the embedding of a side's token ids or images, or None if it reads neither."""
    tokens = getattr(model, "tokens", None)
    if side == "encoder" and "decoder" in find_entries(model):
        tokens = getattr(model, "source_tokens", None) or tokens
    return tokens if isinstance(tokens, Tokens | Patches) else None


def token_embedding(model: nn.Module, side: str) -> Tokens | None:
    """Return the embedding of a side's token ids, or None if it reads no ids."""
    embedding = input_embedding(model, side)
    return embedding if isinstance(embedding, Tokens) else None


def _embedded(model: nn.Module, inputs: ModelInputs) -> dict[str, Tensor]:
    """Return what enters each side, (batch, length, width)."""
    found: dict[str, Tensor] = {}

    def store(name: str) -> Callable[..., None]:
        def hook(side: nn.Module, args: tuple[Any, ...]) -> None:
            found[name] = args[0]

        return hook

    entries = find_entries(model).items()
    handles = [side.register_forward_pre_hook(store(name)) for name, side in entries]
    try:
        no_grad_call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _call_from(
    model: nn.Module, inputs: ModelInputs, at: dict[str, Tensor], metric: Metric
) -> Tensor:
    """Return the metric with other embeddings entering the sides."""

    def replace(x: Tensor) -> Callable[..., Any]:
        return lambda side, args: (x, *args[1:])

    sides = find_entries(model)
    handles = [sides[name].register_forward_pre_hook(replace(x)) for name, x in at.items()]
    try:
        return metric(call(model, inputs))
    finally:
        for handle in handles:
            handle.remove()
