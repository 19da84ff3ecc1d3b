"""Multi-head attention.

    q, k, v = W_q x, W_k y, W_v y        each split into heads of head_width
    out     = W_o concat_h(softmax(score(q, k)) v)

Self-attention has y = x; encoder-decoder attention has y = the encoder's output, the memory. Maps,
if the context has a place for them, are computed in addition to the result, so that they change no
bit of it.

Shapes: x (batch, length, width); inside (batch, heads, length, head_width).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.errors import InputError
from addnorm.layers.attention_kernels import DotScore, Score, attention_weights, mix_values
from addnorm.layers.context import Context
from addnorm.layers.key_value import PersistentVectors
from addnorm.layers.masks import AttentionTable, Mask
from addnorm.layers.norms import Norm
from addnorm.layers.positions import RelativePart
from addnorm.layers.span import AdaptiveSpan


class Attention(nn.Module):
    """Base class of self-attention and encoder-decoder attention.

    With fewer key/value heads than heads, head h reads key/value head ⌊h · kv_heads / heads⌋
    (Shazeer 2019, 1911.02150; Ainslie et al. 2023, 2305.13245).

    Parameters
    ----------
    width
        Width of the stream.
    heads, kv_heads, head_width
        Query heads, key/value heads, and the width of each.
    layer
        Number of the block, from 0: where the cache stores this layer's keys and values.
    bias
        Which projections have a bias: all, qkv or none.
    dropout
        Dropout on the attention weights.
    score
        Score of a query and a key; the scaled dot product by default.
    query_norm, key_norm
        Norms of queries and keys before the scores.
    inner
        Module between the mixed values and the output projection.
    local
        Parameters of the position scheme that belong to this layer.
    window
        This layer alone sees only keys fewer than this many positions away; the mask decides by
        default.
    persistent
        Learned keys and values that every query sees besides the sequence (all-attention).
    span
        Learned spans of the heads.
    """

    input: nn.Linear

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        layer: int,
        *,
        bias: str = "all",
        dropout: float = 0.0,
        score: Score | None = None,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        inner: nn.Module | None = None,
        local: nn.Module | None = None,
        window: int | None = None,
        persistent: PersistentVectors | None = None,
        span: AdaptiveSpan | None = None,
    ) -> None:
        super().__init__()
        self.persistent, self.span = persistent, span
        self.heads, self.kv_heads, self.head_width, self.layer = heads, kv_heads, head_width, layer
        self.dropout, self.window = dropout, window
        self.sizes = [heads * head_width, kv_heads * head_width, kv_heads * head_width]
        self.make_projections(width, bias != "none")
        self.score = score or DotScore(head_width**-0.5)
        self.query_norm = query_norm or nn.Identity()
        self.key_norm = key_norm or nn.Identity()
        self.inner = inner or nn.Identity()
        self.local = local or nn.Identity()
        self.output = nn.Linear(heads * head_width, width, bias=bias == "all")

    def make_projections(self, width: int, bias: bool) -> None:
        """Create the projections to queries, keys and values."""

    def matrices(self) -> dict[str, Tensor]:
        """Return the weight of each projection as a view: query, key, value, output, ..."""
        return {"output": self.output.weight}

    def scale_(self, gain: float) -> None:
        """Multiply the value and output weights: those that arrangements scale."""
        with torch.no_grad():
            for name in ("value", "output"):
                self.matrices()[name].mul_(gain)
        if self.persistent is not None:
            self.persistent.scale_(gain)

    @property
    def extra_keys(self) -> int:
        """Number of learned keys that every query sees besides the sequence."""
        return 0 if self.persistent is None else self.persistent.count

    def split(self, x: Tensor) -> Tensor:
        """(batch, length, heads · head_width) -> (batch, heads, length, head_width)"""
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, table: AttentionTable, context: Context
    ) -> Tensor:
        """Return the mixed values of all heads, (batch, length, heads · head_width).

        Parameters
        ----------
        q, k, v
            Queries, keys and values, (batch, heads, length, head_width).
        table
            Mask and score bias.
        context
            Stores the attention weights if it has `maps`.
        """
        if context.maps is not None:
            with torch.no_grad():
                weights = attention_weights(q, k, self.score, table.fresh(), self.local)
                context.maps[self] = weights
        dropout = self.dropout if self.training else 0.0
        mixed = mix_values(q, k, v, self.score, table, self.local, dropout)
        return mixed[..., : self.head_width].transpose(1, 2).flatten(2)


class SelfAttention(Attention):
    """Queries, keys and values from the stream, by one projection: rows for q, then k, then v."""

    def make_projections(self, width: int, bias: bool) -> None:
        self.input = nn.Linear(width, sum(self.sizes), bias=bias)

    def matrices(self) -> dict[str, Tensor]:
        query, key, value = torch.split(self.input.weight, self.sizes)
        matrices = {"query": query, "key": key, "value": value} | super().matrices()
        if isinstance(self.local, RelativePart):
            matrices["relative"] = self.local.project.weight
        return matrices

    def forward(self, x: Tensor, context: Context) -> Tensor:
        before = 0 if context.segments is None else context.segments.used
        y = x if context.segments is None else context.segments.join(self.layer, x)
        q, k, v = (self.split(part) for part in self.input(y).split(self.sizes, dim=-1))
        q, k = self.query_norm(q[:, :, before:]), self.key_norm(k)
        unplaced = q
        if context.positions is not None:
            indices = torch.arange(k.shape[2], device=x.device) + context.offset - before
            windowed = self.window is not None
            q = context.positions.rotate(q, indices[before:], windowed)
            k = context.positions.rotate(k, indices, windowed)
            q = context.positions.shift_queries(q, self.local)
        if context.cache is not None:
            k, v = context.cache.write(self.layer, k, v)
        table = context.table(q.shape[2], k.shape[2], self._own_window(), self.extra_keys)
        table = table if self.span is None else replace(table, span=self.span)
        q, k, v = self._with_persistent(unplaced, q, k, v, context)
        mixed = self.attend(q, k, v, table, context)
        return self.output(self.inner(mixed))

    def _own_window(self) -> int | None:
        """Return the window of this layer, by its own setting or by the span of its heads."""
        if self.span is None:
            return self.window
        if self.training:
            self.span.clamp_()
        span = self.span.window()
        return span if self.window is None else min(span, self.window)

    def _with_persistent(
        self, unplaced: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values with the learned keys and values after the others.

        A learned key has no position, so a query must meet it unrotated: if positions rotate,
        queries are (rotated, unrotated), keys (key, 0) and learned keys (0, key).

        Parameters
        ----------
        unplaced
            Queries before positions, (batch, heads, query, head_width).
        q, k, v
            Queries, keys and values.
        context
            Has the position scheme.
        """
        if self.persistent is None:
            return q, k, v
        keys, values = self.persistent(k.shape[0])
        if context.positions is not None and context.positions.rotates:
            width = self.head_width
            q, k = torch.cat((q, unplaced), dim=-1), F.pad(k, (0, width))
            keys, values, v = (
                F.pad(keys, (width, 0)),
                F.pad(values, (0, width)),
                F.pad(v, (0, width)),
            )
        return q, torch.cat((k, keys), dim=2), torch.cat((v, values), dim=2)

    def attend_from_first(self, x: Tensor, context: Context, count: int) -> Tensor:
        """Return the result for the first `count` queries only, (batch, count, width); no cache."""
        weight, bias = self.input.weight, self.input.bias
        own, rest = self.sizes[0], sum(self.sizes[1:])
        biases = (None, None) if bias is None else torch.split(bias, [own, rest])
        q = self.split(F.linear(x[:, :count], weight[:own], biases[0]))
        k, v = torch.split(F.linear(x, weight[own:], biases[1]), self.sizes[1:], dim=-1)
        q, k, v = self.query_norm(q), self.key_norm(self.split(k)), self.split(v)
        unplaced = q
        if context.positions is not None:
            indices = torch.arange(x.shape[1], device=x.device)
            windowed = self.window is not None
            q = context.positions.rotate(q, indices[:count], windowed)
            k = context.positions.rotate(k, indices, windowed)
            q = context.positions.shift_queries(q, self.local)
        mask, length, positions = context.mask or Mask(), x.shape[1], context.positions
        window = self._own_window()
        mask = mask if window is None else mask & Mask.window(window)
        table = AttentionTable(
            mask,
            length,
            length,
            positions=positions,
            query_range=(0, count),
            extra=self.extra_keys,
            span=self.span,
        )
        q, k, v = self._with_persistent(unplaced, q, k, v, context)
        return self.output(self.inner(self.attend(q, k, v, table, context)))


class MemoryAttention(Attention):
    """Encoder-decoder attention: queries from the stream, keys and values from the memory.

    With a cache, keys and values are computed once. The memory may have fewer rows than the stream:
    each of its rows then serves an equal number of consecutive rows, so that the beams of one
    sentence share one memory.
    """

    def make_projections(self, width: int, bias: bool) -> None:
        self.input = nn.Linear(width, self.sizes[0], bias=bias)
        self.memory = nn.Linear(width, self.sizes[1] + self.sizes[2], bias=bias)

    def matrices(self) -> dict[str, Tensor]:
        key, value = torch.split(self.memory.weight, self.sizes[1:])
        return {"query": self.input.weight, "key": key, "value": value} | super().matrices()

    def memory_keys_values(self, context: Context) -> tuple[Tensor, Tensor]:
        """Return keys and values of the memory, from the cache after the first step."""
        if context.cache is not None and self.layer in context.cache.memory:
            return context.cache.memory[self.layer]
        if context.memory is None:
            raise InputError("encoder-decoder attention needs a memory: pass the encoder's output.")
        k, v = (self.split(part) for part in self.memory(context.memory).split(self.sizes[1:], -1))
        k = self.key_norm(k)
        if context.cache is not None:
            # Each head together in memory, because every later step reads them.
            k, v = k.contiguous(), v.contiguous()
            context.cache.memory[self.layer] = k, v
        return k, v

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = self.query_norm(self.split(self.input(x)))
        k, v = self.memory_keys_values(context)
        rows, shared = k.shape[0], x.shape[0] // k.shape[0]
        if shared != 1:
            # (rows · shared, heads, length, ...) -> (rows, heads, shared · length, ...)
            q = q.unflatten(0, (rows, shared)).transpose(1, 2).flatten(2, 3)
        mixed = self.attend(q, k, v, context.memory_table(q.shape[2], k.shape[2]), context)
        if shared != 1 and context.maps is not None:
            # (rows, heads, shared · length, key) -> (rows · shared, heads, length, key)
            weights = context.maps[self].view(rows, self.heads, shared, x.shape[1], -1)
            context.maps[self] = weights.transpose(1, 2).flatten(0, 1)
        return self.output(self.inner(mixed.view(x.shape[0], x.shape[1], -1)))


class HeadGain(nn.Module):
    """One learned factor for each head, on the mixed values before the output projection.

    NormFormer: Shleifer et al. 2021 (2110.09456), eq. 3. (The authors' code applies it after the
    output projection; we follow the paper.)
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.repeat_interleave(x.shape[-1] // len(self.gain))


class AcrossHeads(nn.Module):
    """A norm over all heads of queries or keys together, not over each (OLMo 2, 2501.00656)."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.shape[1]
        joined = self.norm(x.transpose(1, 2).flatten(2))
        return joined.unflatten(-1, (heads, -1)).transpose(1, 2)
