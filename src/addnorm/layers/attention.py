"""Multi-head attention.

    q, k, v = W_q x, W_k y, W_v y        each split into heads of head_width
    out     = W_o concat_h(softmax(score(q, k)) v)

Self-attention has y = x; attention to the memory has y = the encoder's output. Maps, if the context
asks for them, are worked out beside the result and not instead of it: asking changes no number.

Shapes: x (batch, length, width); inside (batch, heads, length, head_width).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.errors import InputError
from addnorm.layers.context import Context, Mask, Table
from addnorm.layers.norms import Norm
from addnorm.layers.positions import RelativePart
from addnorm.layers.scores import DotScore, Score, mix, weigh


class Attention(nn.Module):
    """What self-attention and attention to the memory share.

    With fewer key/value heads than heads, head h reads key/value head ⌊h · kv_heads / heads⌋
    (Shazeer 2019, 1911.02150; Ainslie et al. 2023, 2305.13245). `inner` stands before the output
    projection, `query_norm` and `key_norm` before the scores; `local` is what the positions keep
    here.
    """

    inward: nn.Linear

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
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width, self.layer = heads, kv_heads, head_width, layer
        self.dropout = dropout
        self.sizes = [heads * head_width, kv_heads * head_width, kv_heads * head_width]
        self.build_inward(width, bias != "none")
        self.score = score or DotScore(head_width**-0.5)
        self.query_norm = query_norm or nn.Identity()
        self.key_norm = key_norm or nn.Identity()
        self.inner = inner or nn.Identity()
        self.local = local or nn.Identity()
        self.output = nn.Linear(heads * head_width, width, bias=bias == "all")

    def build_inward(self, width: int, bias: bool) -> None:
        """Make the projections to queries, keys and values."""

    def matrices(self) -> dict[str, Tensor]:
        """The weight of each projection by itself, as views: query, key, value, output, ..."""
        return {"output": self.output.weight}

    def scale_(self, gain: float) -> None:
        """Multiply the value and output weights: the part of a branch that arrangements scale."""
        with torch.no_grad():
            for name in ("value", "output"):
                self.matrices()[name].mul_(gain)

    def split(self, x: Tensor) -> Tensor:
        """(batch, length, heads · head_width) -> (batch, heads, length, head_width)"""
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, table: Table, context: Context) -> Tensor:
        """From heads of queries, keys and values to the mixed values of all heads, joined."""
        if context.maps is not None:
            with torch.no_grad():
                context.maps[self] = weigh(q, k, self.score, table.fresh(), self.local)
        dropout = self.dropout if self.training else 0.0
        return mix(q, k, v, self.score, table, self.local, dropout).transpose(1, 2).flatten(2)


class SelfAttention(Attention):
    """Queries, keys and values from the stream, by one projection whose rows are theirs in turn."""

    def build_inward(self, width: int, bias: bool) -> None:
        self.inward = nn.Linear(width, sum(self.sizes), bias=bias)

    def matrices(self) -> dict[str, Tensor]:
        query, key, value = torch.split(self.inward.weight, self.sizes)
        found = {"query": query, "key": key, "value": value} | super().matrices()
        if isinstance(self.local, RelativePart):
            found["relative"] = self.local.project.weight
        return found

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = (self.split(part) for part in self.inward(x).split(self.sizes, dim=-1))
        q, k = self.query_norm(q), self.key_norm(k)
        if context.positions is not None:
            slots = torch.arange(q.shape[2], device=x.device) + context.offset
            q, k = context.positions.turn(q, slots), context.positions.turn(k, slots)
            q = context.positions.shift(q, self.local)
        if context.cache is not None:
            k, v = context.cache.write(self.layer, k, v)
        mixed = self.attend(q, k, v, context.table(q.shape[2], k.shape[2]), context)
        return self.output(self.inner(mixed))

    def ask(self, x: Tensor, context: Context, count: int) -> Tensor:
        """The answers to the first `count` positions alone, (batch, count, width); no cache."""
        weight, bias = self.inward.weight, self.inward.bias
        asks, rest = self.sizes[0], sum(self.sizes[1:])
        biases = (None, None) if bias is None else torch.split(bias, [asks, rest])
        q = self.split(F.linear(x[:, :count], weight[:asks], biases[0]))
        k, v = torch.split(F.linear(x, weight[asks:], biases[1]), self.sizes[1:], dim=-1)
        q, k, v = self.query_norm(q), self.key_norm(self.split(k)), self.split(v)
        if context.positions is not None:
            slots = torch.arange(x.shape[1], device=x.device)
            q, k = context.positions.turn(q, slots[:count]), context.positions.turn(k, slots)
            q = context.positions.shift(q, self.local)
        mask, length = context.mask or Mask(), x.shape[1]
        table = Table(mask, length, length, positions=context.positions, part=(0, count))
        return self.output(self.inner(self.attend(q, k, v, table, context)))


class MemoryAttention(Attention):
    """Queries from the stream; keys and values from the encoder's output, computed once if cached.

    The memory may have fewer rows than the stream: then each of its rows serves as many consecutive
    rows, which is how the beams of one sentence share one memory.
    """

    def build_inward(self, width: int, bias: bool) -> None:
        self.inward = nn.Linear(width, self.sizes[0], bias=bias)
        self.memory = nn.Linear(width, self.sizes[1] + self.sizes[2], bias=bias)

    def matrices(self) -> dict[str, Tensor]:
        key, value = torch.split(self.memory.weight, self.sizes[1:])
        return {"query": self.inward.weight, "key": key, "value": value} | super().matrices()

    def read(self, context: Context) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory, from the cache after the first step."""
        if context.cache is not None and self.layer in context.cache.memory:
            return context.cache.memory[self.layer]
        if context.memory is None:
            raise InputError("attention to a memory needs one: pass the encoder's output.")
        k, v = (self.split(part) for part in self.memory(context.memory).split(self.sizes[1:], -1))
        k = self.key_norm(k)
        if context.cache is not None:
            context.cache.memory[self.layer] = k, v
        return k, v

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q = self.query_norm(self.split(self.inward(x)))
        k, v = self.read(context)
        rows, shared = k.shape[0], x.shape[0] // k.shape[0]
        if shared != 1:
            # (rows · shared, heads, length, ...) -> (rows, heads, shared · length, ...)
            q = q.unflatten(0, (rows, shared)).transpose(1, 2).flatten(2, 3)
        mixed = self.attend(q, k, v, context.memory_table(q.shape[2], k.shape[2]), context)
        if shared != 1 and context.maps is not None:
            # (rows, heads, shared · length, key) -> (rows · shared, heads, length, key)
            joined = context.maps[self]
            apart = joined.view(rows, self.heads, shared, x.shape[1], -1)
            context.maps[self] = apart.transpose(1, 2).flatten(0, 1)
        return self.output(self.inner(mixed.view(x.shape[0], x.shape[1], -1)))


class HeadGain(nn.Module):
    """One learned factor for each head, on the mixed values before the output projection.

    NormFormer: Shleifer et al. 2021 (2110.09456), eq. 3. (The authors' code has it after the output
    projection; we follow the paper.)
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
