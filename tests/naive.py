"""Reference implementation: formulas written out in loops, independent of the library.

Weights are read by name from a model's state dict; `Weights` records the names, so that a test can
check that all of them were used.
"""

import math
from collections.abc import Callable, Collection, Mapping
from itertools import product

import torch
from torch import Tensor, nn

IsVisible = Callable[[int, int, int], bool]
"""Whether key j is visible to query i in row b."""
Score = Callable[[Tensor, Tensor, int, int, int], Tensor]
"""Score of a query and a key; further arguments: head, index of the query, index of the key."""
Function = Callable[[Tensor], Tensor]

EPS = 1e-5


class Weights:
    """The tensors of a state dict whose names start with a prefix; records which are read."""

    def __init__(
        self, tensors: Mapping[str, Tensor], prefix: str = "", read: set[str] | None = None
    ) -> None:
        self.tensors, self.prefix = tensors, prefix
        self.read: set[str] = set() if read is None else read

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(self.prefix + name)
        return self.tensors[self.prefix + name]

    def under(self, *names: object) -> "Weights":
        return Weights(self.tensors, self.prefix + "".join(f"{n}." for n in names), self.read)


def linear(x: Tensor, w: Weights) -> Tensor:
    y = x @ w["weight"].T
    return y + w["bias"] if "bias" in w else y


def layer_norm(x: Tensor, w: Weights, eps: float = EPS) -> Tensor:
    mean = x.sum(dim=-1, keepdim=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(dim=-1, keepdim=True) / x.shape[-1]
    y = (x - mean) / (variance + eps).sqrt() * w["weight"]
    return y + w["bias"] if "bias" in w else y


def rms_norm(x: Tensor, w: Weights, eps: float = EPS) -> Tensor:
    return x / ((x**2).sum(dim=-1, keepdim=True) / x.shape[-1] + eps).sqrt() * w["weight"]


NORMS = {"layer": layer_norm, "rms": rms_norm}


def dot(q: Tensor, k: Tensor, head: int, i: int, j: int) -> Tensor:
    return (q * k).sum() / math.sqrt(len(q))


def attend(
    q: Tensor, k: Tensor, v: Tensor, is_visible: IsVisible, score: Score = dot
) -> tuple[Tensor, Tensor]:
    """Return mixed values and weights: for each query, one softmax over the keys visible to it."""
    (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    mixed = q.new_zeros(batch, heads, queries, v.shape[-1])
    weights = q.new_zeros(batch, heads, queries, keys)
    for b, h, i in product(range(batch), range(heads), range(queries)):
        group = h * kv_heads // heads
        visible = [j for j in range(keys) if is_visible(b, i, j)]
        if not visible:
            continue
        powers = torch.stack([score(q[b, h, i], k[b, group, j], h, i, j) for j in visible]).exp()
        for j, power in zip(visible, powers / powers.sum(), strict=True):
            weights[b, h, i, j] = power
            mixed[b, h, i] += power * v[b, group, j]
    return mixed, weights


def split(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads · head_width) -> (batch, heads, length, head_width), head by head."""
    width = x.shape[-1] // heads
    return torch.stack([x[..., h * width : (h + 1) * width] for h in range(heads)], dim=1)


def join(x: Tensor) -> Tensor:
    """Inverse of `split`."""
    return torch.cat([x[:, h] for h in range(x.shape[1])], dim=-1)


def same(x: Tensor) -> Tensor:
    return x


def attention(
    x: Tensor,
    source: Tensor,
    w: Weights,
    heads: int,
    is_visible: IsVisible,
    *,
    kv_heads: int | None = None,
    score: Score = dot,
    on_query: Function = same,
    on_key: Function = same,
    inner: Function = same,
) -> tuple[Tensor, Tensor]:
    """Return output and weights of multi-head attention from x to source."""
    kv_heads = kv_heads or heads
    if "memory.weight" in w:
        q = linear(x, w.under("input"))
        k, v = linear(source, w.under("memory")).chunk(2, dim=-1)
    else:
        rows = w["input.weight"].shape[0] // (heads + 2 * kv_heads)
        sizes = [heads * rows, kv_heads * rows, kv_heads * rows]
        q, k, v = linear(x, w.under("input")).split(sizes, dim=-1)
    q, k, v = on_query(split(q, heads)), on_key(split(k, kv_heads)), split(v, kv_heads)
    mixed, weights = attend(q, k, v, is_visible, score)
    return linear(inner(join(mixed)), w.under("output")), weights


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def feedforward(x: Tensor, w: Weights, inner: Function = same) -> Tensor:
    return linear(inner(relu(linear(x, w.under("input")))), w.under("output"))


def head_gain(mixed: Tensor, gain: Tensor) -> Tensor:
    """Multiply each head's part of the joined values by its gain."""
    width = mixed.shape[-1] // len(gain)
    return torch.cat([gain[h] * part for h, part in enumerate(mixed.split(width, -1))], dim=-1)


class Box:
    """One Add & Norm box: its branch f, its role in the block, and its own weights."""

    def __init__(self, role: str, f: Function, w: Weights, norm: str) -> None:
        self.role, self.f, self.w, self.kind = role, f, w, NORMS[norm]

    def norm(self, x: Tensor, name: str = "norm") -> Tensor:
        return self.kind(x, self.w.under(name))


class Stack:
    """The boxes of one side, block by block, and the weights of its ends."""

    def __init__(
        self,
        w: Weights,
        *,
        side: str,
        depth: int,
        peer_depth: int,
        heads: int,
        norm: str,
        inside: Collection[str],
        is_visible: IsVisible,
        memory: Tensor | None = None,
        is_memory_visible: IsVisible | None = None,
    ) -> None:
        self.side, self.depth, self.peer_depth = side, depth, peer_depth
        self.heads, self.norm, self.inside = heads, norm, inside
        self.is_visible, self.memory, self.is_memory_visible = is_visible, memory, is_memory_visible
        roles = ("attention", "ffn") if memory is None else ("attention", "memory", "ffn")
        self.blocks = [
            [self.box(w.under("blocks", layer), role) for role in roles] for layer in range(depth)
        ]
        self.ends = Box("ends", same, w.under("ends"), norm)

    def box(self, w: Weights, role: str) -> Box:
        sublayer = w.under("sublayers", role)

        def inner(x: Tensor) -> Tensor:
            if role != "ffn" and "head-gain" in self.inside:
                return head_gain(x, sublayer["inner.gain"])
            if ("ffn-norm" if role == "ffn" else "attention-norm") in self.inside:
                return NORMS[self.norm](x, sublayer.under("inner"))
            return x

        def f(x: Tensor) -> Tensor:
            if role == "ffn":
                return feedforward(x, sublayer, inner)
            source, is_visible = (
                (x, self.is_visible)
                if role == "attention"
                else (self.memory, self.is_memory_visible)
            )
            return attention(x, source, sublayer, self.heads, is_visible, inner=inner)[0]

        return Box(role, f, w.under("addnorms", role), self.norm)


Formula = Callable[[Tensor, Stack], Tensor]


def run(model: nn.Module, formula: Formula, inside: Collection[str], *ids: Tensor) -> tuple:
    """Return the expected output of a model without positions and head, and the weights read.

    Padding is hidden, and a decoder is causal.
    """
    c = model.config
    w = Weights(model.state_dict())

    def embed(tokens: Tensor) -> Tensor:
        return w["tokens.weight"][tokens] * math.sqrt(c.width)

    def real(tokens: Tensor) -> IsVisible:
        return lambda b, i, j: bool(tokens[b, j] != c.pad)

    def past(tokens: Tensor) -> IsVisible:
        return lambda b, i, j: j <= i and bool(tokens[b, j] != c.pad)

    two = c.mode == "encoder-decoder"
    common = dict(heads=c.heads, norm=c.norm, inside=inside)
    depths = {"encoder": c.depth, "decoder": c.decoder_depth or c.depth}
    out = None
    for side, tokens in zip(("encoder", "decoder") if two else (c.mode,), ids, strict=True):
        other = "decoder" if side == "encoder" else "encoder"
        stack = Stack(
            w.under(side, "stack"),
            side=side,
            depth=depths[side],
            peer_depth=depths[other] if two else 0,
            is_visible=real(tokens) if side == "encoder" else past(tokens),
            memory=out,
            is_memory_visible=real(ids[0]),
            **common,
        )
        out = formula(embed(tokens), stack)
    return out, w.read


@torch.no_grad()
def randomise_(module: nn.Module, std: float = 0.3) -> nn.Module:
    """Add noise to every parameter, so that none keeps its initial 0 or 1."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=std)
    return module
