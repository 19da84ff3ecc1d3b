"""What one forward pass shows besides the stream: attention, units, and the first bad number."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ACTIVATIONS = {"relu", "gelu", "silu", "tanh", "sigmoid", "hardtanh", "elu", "leaky_relu", "relu_"}
KERNEL = "_scaled_dot_product_"
LARGE = 2**24
"""Entries of attention tables beyond which only the first rows of a batch are looked at."""


@dataclass(frozen=True)
class Heads:
    """One attention, head by head."""

    path: str
    entropy: tuple[float, ...]
    """Mean over the queries of −Σ a log a / log n, n the keys that a query sees: 1 is even."""
    largest: tuple[float, ...]
    """The largest logit, of those that are not masked, less their mean."""
    spread: tuple[float, ...]
    """Standard deviation of the logits."""


@dataclass(frozen=True)
class Units:
    """One activation function."""

    path: str
    kind: str
    count: int
    positions: int
    dead: float
    """Share of units that pass nothing on at any position."""
    saturated: float
    """For tanh and sigmoid: share of values at the flat ends."""


@dataclass(frozen=True)
class Bad:
    """The first result that is not finite though all that went into it was, in forward order."""

    path: str
    operation: str
    dtype: str
    count: int
    given: str
    """What was bad of what went in, if something was: `weights`, `inputs`, or nothing."""


@dataclass
class Watch:
    """Kept by the tracer while the model runs."""

    heads: list[Heads] = field(default_factory=list)
    units: list[Units] = field(default_factory=list)
    bad: Bad | None = None
    largest: float = 0.0
    """The largest of all results."""

    def operation(
        self, name: str, args: Any, kwargs: Any, out: Any, given: list[Tensor], path: str
    ) -> None:
        with torch.no_grad():
            result = out[0] if isinstance(out, tuple | list) and out else out
            if not isinstance(result, Tensor) or not result.is_floating_point():
                return
            if name.startswith(KERNEL) and result.ndim == 4:
                self.heads.append(fused_heads(path, args, kwargs))
            elif name in ("_softmax", "_safe_softmax") and result.ndim == 4:
                self.heads.append(heads(path, args[0].float(), result.float()))
            elif name in ACTIVATIONS and result.ndim >= 2:
                self.units.append(units(path, name, result))
            self._look(name, result, given, path)

    def _look(self, name: str, result: Tensor, given: list[Tensor], path: str) -> None:
        if self.bad is not None or name in ("empty", "empty_like", "new_empty", "full", "fill_"):
            return
        if name in ("masked_fill", "where", "masked_fill_", "new_full", "full_like", "triu"):
            return
        if not result.numel() or (not name.endswith("_") and _is_view(result, given)):
            return  # it looks at memory that something else made, or that nothing has written yet
        low, high = (float(end) for end in result.detach().aminmax())
        size = max(-low, high)
        if math.isfinite(size):
            self.largest = max(self.largest, high)  # masks are large, too, but negative
            return
        if math.isinf(size) and _masks(result):
            return
        wrong = [tensor for tensor in given if tensor.is_floating_point() and _is_bad(tensor)]
        of = "" if not wrong else "weights" if any(t.requires_grad for t in wrong) else "inputs"
        dtype = str(result.dtype).removeprefix("torch.")
        count = int((~result.isfinite()).sum())
        self.bad = Bad(path, name, dtype, count, of)


def _is_view(result: Tensor, given: list[Tensor]) -> bool:
    home = result.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == home for tensor in given)


def _masks(tensor: Tensor) -> bool:
    """Whether all that is not finite is −∞: how masks are written."""
    return bool((tensor.isfinite() | (tensor == -math.inf)).all())


def _is_bad(tensor: Tensor) -> bool:
    return not bool(tensor.isfinite().all()) and not _masks(tensor)


def heads(path: str, logits: Tensor, weights: Tensor) -> Heads:
    """Measures of (batch, heads, query, key) logits, masked ones very negative, and weights.

    Entropy as in Zhai et al. 2023 (2303.06296), divided by its largest value.
    """
    seen = logits > 0.5 * torch.finfo(logits.dtype).min
    seen &= logits > -9e3
    count = seen.sum(dim=-1)
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(dim=-1)
    several = count > 1
    even = torch.where(several, entropy / count.clamp(min=2).log(), 0.0)
    each = even.sum(dim=(0, 2)) / several.sum(dim=(0, 2)).clamp(min=1)
    if not bool(several.any()):
        each = torch.ones_like(each)
    inside = logits.masked_fill(~seen, 0.0)
    mean = inside.sum(dim=-1, keepdim=True) / count.clamp(min=1)[..., None]
    off = (inside - mean).masked_fill(~seen, 0.0)
    spread = (off.pow(2).sum(dim=(0, 2, 3)) / seen.sum(dim=(0, 2, 3)).clamp(min=1)).sqrt()
    largest = off.amax(dim=(0, 2, 3))
    return Heads(path, _floats(each), _floats(largest), _floats(spread))


def fused_heads(path: str, args: Any, kwargs: Any) -> Heads:
    """The same of a fused kernel: the table that it does without is made beside it."""
    q, k = args[0].detach().float(), args[1].detach().float()
    rows = max(1, LARGE // max(1, q.shape[1] * q.shape[2] * k.shape[2]))
    q, k = q[:rows], k[:rows]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = kwargs.get("scale")
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if any(part is True for part in args[4:6]) or kwargs.get("is_causal"):
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(future, -math.inf)
    mask = kwargs.get("attn_mask")
    if mask is not None:
        mask = mask[:rows] if mask.shape[0] == args[0].shape[0] else mask
        hidden = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -math.inf) if hidden else logits + mask
    weights = logits.softmax(dim=-1).nan_to_num(0.0)
    return heads(path, logits, weights)


def units(path: str, kind: str, result: Tensor) -> Units:
    """Of an activation's output (..., units): who is never heard, and who is at the end."""
    flat = result.detach().float().reshape(-1, result.shape[-1])
    loudest = flat.abs().amax(dim=0)
    # gelu and silu fade out rather than stop.
    dead = loudest <= (0.0 if kind.startswith("relu") else 1e-4)
    ends = {"tanh": flat.abs() > 0.99, "sigmoid": (flat - 0.5).abs() > 0.49}.get(kind)
    saturated = 0.0 if ends is None else float(ends.float().mean())
    return Units(path, kind, flat.shape[1], len(flat), float(dead.float().mean()), saturated)


def _floats(tensor: Tensor) -> tuple[float, ...]:
    return tuple(float(value) for value in tensor)
