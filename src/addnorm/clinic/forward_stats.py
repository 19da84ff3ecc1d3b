"""Statistics of one forward pass: attention, activations, the first non-finite value."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from addnorm.clinic.module_names import has_even_sizes

ACTIVATIONS = {"relu", "gelu", "silu", "tanh", "sigmoid", "hardtanh", "elu", "leaky_relu", "relu_"}
FUSED_ATTENTION = "_scaled_dot_product_"
UNWRITTEN = {"empty", "empty_like", "new_empty", "full", "fill_"}
MASKING = {"masked_fill", "where", "masked_fill_", "new_full", "full_like", "triu"}
MAX_ATTENTION_WEIGHTS = 2**24
"""Attention weights beyond which only the first rows of a batch are measured."""


@dataclass(frozen=True)
class AttentionStats:
    """One attention sublayer, head by head.

    Parameters
    ----------
    path : the module
    entropy : mean over the queries of −Σ a log a / log n, n the keys that a query sees: 1 is
        uniform
    largest : the largest logit that is not masked, minus the mean of those
    spread : standard deviation of the logits
    own : share of the positions, but the first, that attend to themselves, in the row with most of
        them; None if there are not as many keys as queries
    bounded : whether all queries and all keys have one size, as in cosine attention
    keys : number of keys
    """

    path: str
    entropy: tuple[float, ...]
    largest: tuple[float, ...]
    spread: tuple[float, ...]
    own: float | None = None
    bounded: bool = False
    keys: int = 0


@dataclass(frozen=True)
class ActivationStats:
    """One activation function.

    Parameters
    ----------
    path : the module
    kind : name of the function
    count : number of units
    positions : number of positions in the batch
    dead : share of units whose output is zero at every position
    saturated : for tanh and sigmoid: share of values at the flat ends
    """

    path: str
    kind: str
    count: int
    positions: int
    dead: float
    saturated: float


@dataclass(frozen=True)
class NonFinite:
    """The first result, in forward order, that is not finite.

    Parameters
    ----------
    path : the module
    operation : the operation
    dtype : dtype of its result
    count : number of values that are not finite
    source : which of the operation's arguments were not finite: `weights`, `inputs`, or none ("")
    """

    path: str
    operation: str
    dtype: str
    count: int
    source: str


@dataclass
class ForwardStats:
    """Statistics that the tracer collects while the model runs.

    Parameters
    ----------
    attention : each attention sublayer
    activations : each activation function
    non_finite : the first result that is not finite
    largest : the largest of all results
    """

    attention: list[AttentionStats] = field(default_factory=list)
    activations: list[ActivationStats] = field(default_factory=list)
    non_finite: NonFinite | None = None
    largest: float = 0.0
    unheaded: dict[int, tuple[str, Tensor, Tensor]] = field(default_factory=dict)
    """Softmax over (rows, query, key), by memory: attention if a product with values follows."""
    bounded: set[str] = field(default_factory=set)
    """Modules in which queries and keys of one size were multiplied."""
    padding: tuple[int, int, Tensor] | None = None
    """A row of the batch, the number of rows, and where that row is padded."""
    padding_weights: list[tuple[float, ...]] = field(default_factory=list)
    """The largest weight that a real position of that row gives to its padding, for each attention
    over keys of its length; two where rows and heads share an axis and either may come first."""

    def update(
        self, name: str, args: Any, kwargs: Any, out: Any, operands: list[Tensor], path: str
    ) -> None:
        """Add one operation.

        Parameters
        ----------
        name : name of the operation, as torch dispatches it
        args, kwargs : its arguments
        out : its result
        operands : the tensors among its arguments
        path : the module in whose forward pass it runs
        """
        with torch.no_grad():
            result = out[0] if isinstance(out, tuple | list) and out else out
            if not isinstance(result, Tensor) or not result.is_floating_point():
                return
            if name in ("_softmax", "_safe_softmax") and result.ndim > 4:  # windows, then heads
                logits, weights = args[0].flatten(0, -4), result.flatten(0, -4)
                self._append_attention(path, logits.float(), weights.float())
                self._weigh_padding(result)
            elif name.startswith(FUSED_ATTENTION) and result.ndim == 4:
                logits, weights = fused_weights(args, kwargs)
                if has_even_sizes(args[0]) and has_even_sizes(args[1]):
                    self.bounded.add(path)
                self._append_attention(path, logits, weights)
                self._weigh_padding(weights)
            elif name in ("_softmax", "_safe_softmax") and result.ndim == 4:
                self._append_attention(path, args[0].float(), result.float())
                self._weigh_padding(result)
            elif name in ("_softmax", "_safe_softmax") and result.ndim == 3:
                memory = result.untyped_storage().data_ptr()
                self.unheaded[memory] = path, args[0].float(), result.float()
            elif name == "bmm" and operands[0].untyped_storage().data_ptr() in self.unheaded:
                where, logits, weights = self.unheaded.pop(operands[0].untyped_storage().data_ptr())
                self._append_attention(where, logits[:, None], weights[:, None])
                self._weigh_padding(weights)
            elif name in ("bmm", "baddbmm") and self._multiplies_even(operands[-2:]):
                self.bounded.add(path)
            elif name in ACTIVATIONS and result.ndim in (2, 3):  # 4: channels are not the last
                self.activations.append(activation_stats(path, name, result))
            self._check_finite(name, result, operands, path)

    def _append_attention(self, path: str, logits: Tensor, weights: Tensor) -> None:
        stats = attention_stats(path, logits, weights)
        self.attention.append(replace(stats, bounded=path in self.bounded))

    def _multiplies_even(self, operands: list[Tensor]) -> bool:
        """Return whether q (…, n, d) and kᵀ (…, d, m) have rows and columns of one size."""
        q, k = operands
        return has_even_sizes(q) and has_even_sizes(k.transpose(-1, -2))

    def _weigh_padding(self, weights: Tensor) -> None:
        """Append the weight of the padding, of weights (rows or rows · heads, …, query, key)."""
        if self.padding is None:
            return
        row, rows, padded = self.padding
        if len(weights) <= row or weights.shape[-1] != len(padded):
            return
        parts = [weights[row : row + 1]]
        if len(weights) > rows and len(weights) % rows == 0:
            heads = len(weights) // rows
            parts = [weights[row * heads : (row + 1) * heads], weights[row::rows]]
        if weights.shape[-2] == len(padded):
            parts = [part[..., ~padded, :] for part in parts]
        self.padding_weights.append(tuple(float(part[..., padded].max()) for part in parts))

    def _check_finite(self, name: str, result: Tensor, operands: list[Tensor], path: str) -> None:
        if self.non_finite is not None or name in UNWRITTEN | MASKING:
            return
        if not result.numel() or (not name.endswith("_") and _is_view(result, operands)):
            return  # memory that another operation wrote, or that none has written yet
        low, high = (float(end) for end in result.detach().aminmax())
        size = max(-low, high)
        if math.isfinite(size):
            self.largest = max(self.largest, high)  # masks are large, too, but negative
            return
        if math.isinf(size) and _is_mask(result):
            return
        wrong = [t for t in operands if t.is_floating_point() and not _is_finite_or_mask(t)]
        source = "" if not wrong else "weights" if any(t.requires_grad for t in wrong) else "inputs"
        dtype = str(result.dtype).removeprefix("torch.")
        count = int((~result.isfinite()).sum())
        self.non_finite = NonFinite(path, name, dtype, count, source)


def _is_view(result: Tensor, operands: list[Tensor]) -> bool:
    memory = result.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == memory for tensor in operands)


def _is_mask(tensor: Tensor) -> bool:
    """Return whether every value that is not finite is −∞, as in additive masks."""
    return bool((tensor.isfinite() | (tensor == -math.inf)).all())


def _is_finite_or_mask(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all()) or _is_mask(tensor)


def attention_stats(path: str, logits: Tensor, weights: Tensor) -> AttentionStats:
    """Return statistics of (batch, heads, query, key) logits, masked ones very negative.

    Entropy as in Zhai et al. 2023 (2303.06296), divided by its largest value.
    """
    visible = logits > 0.5 * torch.finfo(logits.dtype).min
    visible &= logits > -9e3
    count = visible.sum(dim=-1)
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(dim=-1)
    several = count > 1
    relative = torch.where(several, entropy / count.clamp(min=2).log(), 0.0)
    each = relative.sum(dim=(0, 2)) / several.sum(dim=(0, 2)).clamp(min=1)
    if not bool(several.any()):
        each = torch.ones_like(each)
    inside = logits.masked_fill(~visible, 0.0)
    mean = inside.sum(dim=-1, keepdim=True) / count.clamp(min=1)[..., None]
    off = (inside - mean).masked_fill(~visible, 0.0)
    spread = (off.pow(2).sum(dim=(0, 2, 3)) / visible.sum(dim=(0, 2, 3)).clamp(min=1)).sqrt()
    largest = off.amax(dim=(0, 2, 3))
    own = None
    if weights.shape[-1] == weights.shape[-2] > 1:
        seen = (weights.diagonal(dim1=-2, dim2=-1)[..., 1:] > 0).float()
        own = float(seen.mean(dim=(1, 2)).max())
    keys = weights.shape[-1]
    return AttentionStats(path, _floats(each), _floats(largest), _floats(spread), own, keys=keys)


def fused_weights(args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return logits and weights of a fused kernel, of the first rows of a large batch."""
    q, k = args[0].detach().float(), args[1].detach().float()
    rows = max(1, MAX_ATTENTION_WEIGHTS // max(1, q.shape[1] * q.shape[2] * k.shape[2]))
    q, k = q[:rows], k[:rows]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = kwargs.get("scale")
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if any(part is True for part in args[4:6]) or kwargs.get("is_causal"):
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
    mask = kwargs.get("attn_mask")
    if mask is not None:
        mask = mask[:rows] if mask.shape[0] == args[0].shape[0] else mask
        boolean = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -math.inf) if boolean else logits + mask
    return logits, logits.softmax(dim=-1).nan_to_num(0.0)


def activation_stats(path: str, kind: str, result: Tensor) -> ActivationStats:
    """Return statistics of an activation's output (..., units)."""
    flat = result.detach().float().reshape(-1, result.shape[-1])
    largest = flat.abs().amax(dim=0)
    # gelu and silu approach zero without reaching it.
    dead = largest <= (0.0 if kind.startswith("relu") else 1e-6)
    ends = {"tanh": flat.abs() > 0.99, "sigmoid": (flat - 0.5).abs() > 0.49}.get(kind)
    saturated = 0.0 if ends is None else float(ends.float().mean())
    return ActivationStats(
        path, kind, flat.shape[1], len(flat), float(dead.float().mean()), saturated
    )


def _floats(tensor: Tensor) -> tuple[float, ...]:
    return tuple(float(value) for value in tensor)
