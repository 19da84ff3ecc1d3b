"""From queries and keys to weights, and from weights to mixed values.

    A = softmax(score(q, k) + bias) over the keys that may be seen;   mixed = A v

torch's fused kernel does this wherever it knows the score; otherwise the plain path does it in the
open. No (query, key) table is made that the kernel can do without, and a large one is made a few
queries at a time, so memory stays linear in the length.

Shapes: q (batch, heads, query, head_width); k, v (batch, kv_heads, key, head_width).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm.layers.context import Table

LARGE = 2**22
"""Entries of a (query, key) table beyond which it is made piece by piece."""
PIECE = 512
"""Queries in such a piece."""


class DotScore(nn.Module):
    """score(q, k) = s q·k, s = 1/√head_width; with a cap c, then c tanh(score / c).

    Vaswani et al. 2017, eq. 1. The cap is that of Gemma 2 (2408.00118), §2.
    """

    def __init__(self, scale: float, cap: float | None = None) -> None:
        super().__init__()
        self.scale, self.cap = scale, cap

    @property
    def fused(self) -> bool:
        """Whether torch's kernel can do it."""
        return self.cap is None

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.scale * q @ k.transpose(-1, -2)
        return scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)


class AdditiveScore(nn.Module):
    """score(q, k) = v·tanh(q + k), v learned for each head.

    Bahdanau et al. 2015 (1409.0473), A.1.2: q and k are W_q x and W_k y already.
    """

    fused = False
    scale = 1.0

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(heads, head_width).normal_(std=head_width**-0.5))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        joined = torch.tanh(q[..., :, None, :] + k[..., None, :, :])
        return torch.einsum("bhqkw,hw->bhqk", joined, self.vector)


Score = DotScore | AdditiveScore


def mix(
    q: Tensor, k: Tensor, v: Tensor, score: Score, table: Table, local: nn.Module, dropout: float
) -> Tensor:
    """Values mixed by the attention weights, (batch, heads, query, head_width)."""
    table.mask.check(q.shape[0], table.query, table.key)
    light = score.fused and table.light(q.device, dropout)
    if table.query * table.key > LARGE and not (light and dropout == 0):
        return _mix_in_pieces(q, k, v, score, table, local, dropout)
    return _mix_whole(q, k, v, score, table, local, dropout)


def weigh(q: Tensor, k: Tensor, score: Score, table: Table, local: nn.Module) -> Tensor:
    """Attention weights, (batch, heads, query, key); a query that sees nothing weighs nothing."""
    scores = score(q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    bias = table.bias(q, local, score.scale)
    scores = scores if bias is None else scores + bias
    hidden = ~table.seen(q.device)
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(hidden, 0.0)


def _mix_whole(
    q: Tensor, k: Tensor, v: Tensor, score: Score, table: Table, local: nn.Module, dropout: float
) -> Tensor:
    if not score.fused:
        weights = F.dropout(weigh(q, k, score, table, local), dropout)
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    mask, causal = table.mask, False
    if table.light(q.device, dropout):
        causal = mask.hides_future and table.query > 1
        seen = None if mask.real is None else mask.real[:, None, None, slice(*table.among)]
    else:
        seen = table.seen(q.device)
        bias = table.bias(q, local, score.scale)
        seen = seen if bias is None else bias.masked_fill(~seen, float("-inf"))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen,
        dropout_p=dropout,
        is_causal=causal,
        scale=score.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _mix_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, score: Score, table: Table, local: nn.Module, dropout: float
) -> Tensor:
    """The same, a few queries at a time; each piece is computed again on the way back."""

    def mix_piece(q: Tensor, k: Tensor, v: Tensor, piece: Table) -> Tensor:
        # What a table makes is not kept: it is made again on the way back.
        return _mix_whole(q, k, v, score, piece.fresh(), local, dropout)

    pieces = []
    for start in range(0, table.query, PIECE):
        piece = table.piece(start, min(start + PIECE, table.query))
        queries, keys = slice(*piece.part), slice(*piece.among)
        some = (q[:, :, queries], k[:, :, keys], v[:, :, keys])
        pieces.append(checkpoint(mix_piece, *some, piece, use_reentrant=False))
    return torch.cat(pieces, dim=2)
