"""From queries and keys to attention weights, and from weights to mixed values.

    A = softmax(score(q, k) + bias) over the visible keys;   mixed = A v

torch's fused kernel computes this wherever it supports the score; otherwise it is written out. A
(query, key) table is computed only if the kernel needs it, and a large one a few queries at a time,
so that memory stays linear in the length.

Shapes: q (batch, heads, query, head_width); k, v (batch, kv_heads, key, head_width).
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm.layers.masks import AttentionTable

MAX_TABLE_ENTRIES = 2**22
"""Entries of a (query, key) table above which it is computed in chunks of queries."""
CHUNK_QUERIES = 512
"""Queries in such a chunk."""
FEW_QUERIES, FEW_KEYS, MANY_HEADS = 8, 128, 64
"""Decoding has few queries; with at most this many keys, and at least this many heads over all rows
of the batch, the kernel takes a quarter more time on a CPU than its formula written out."""


class DotScore(nn.Module):
    """score(q, k) = s q·k, s = 1/√head_width; with a cap c, then c tanh(score / c).

    Vaswani et al. 2017, eq. 1. The cap is that of Gemma 2 (2408.00118), §2.
    """

    def __init__(self, scale: float, cap: float | None = None) -> None:
        super().__init__()
        self.scale, self.cap = scale, cap

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernel supports it."""
        return self.cap is None

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        scores = self.scale * q @ k.transpose(-1, -2)
        return scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)


class AdditiveScore(nn.Module):
    """score(q, k) = v·tanh(q + k), v learned for each head.

    Bahdanau et al. 2015 (1409.0473), A.1.2: q and k are already W_q x and W_k y.
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


def mix_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    table: AttentionTable,
    local: nn.Module,
    dropout: float,
) -> Tensor:
    """Return the values mixed by the attention weights, (batch, heads, query, head_width).

    Parameters
    ----------
    q, k, v
        Queries, keys and values; see the shapes above.
    score
        Score of a query and a key.
    table
        Mask and score bias.
    local
        Parameters of the position scheme that belong to this layer.
    dropout
        Dropout on the attention weights.
    """
    table.mask.check(q.shape[0], table.query, table.key)
    implicit = score.fused and table.fits_kernel(q.device, dropout)
    entries = table.query * (table.key + table.extra)
    if entries > MAX_TABLE_ENTRIES and not (implicit and dropout == 0):
        return _mix_in_chunks(q, k, v, score, table, local, dropout)
    return _mix_whole(q, k, v, score, table, local, dropout)


def attention_weights(
    q: Tensor, k: Tensor, score: Score, table: AttentionTable, local: nn.Module
) -> Tensor:
    """Return attention weights, (batch, heads, query, key); all 0 for a query that sees no key.

    Parameters
    ----------
    q, k
        Queries and keys; see the shapes above.
    score, table, local
        As for `mix_values`.
    """
    scores = score(q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    bias = table.bias(q, local, score.scale)
    scores = scores if bias is None else scores + bias
    hidden = ~table.visible(q.device)
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(hidden, 0.0)


def _mix_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    table: AttentionTable,
    local: nn.Module,
    dropout: float,
) -> Tensor:
    if not score.fused:
        return _mix_by_weights(q, k, v, score, table, local, dropout)
    mask, causal = table.mask, False
    if table.fits_kernel(q.device, dropout):
        causal = mask.hides_future and bool(table.query > 1)  # symbolic while exporting
        visible = None if mask.real is None else mask.real[:, None, None, slice(*table.key_range)]
        if not causal and dropout == 0 and _is_short(q, k):
            return _mix_short(q, k, v, score.scale, visible)
    else:
        visible = table.visible(q.device)
        bias = table.bias(q, local, score.scale)
        visible = visible if bias is None else bias.masked_fill(~visible, float("-inf"))
    fused = partial(
        F.scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=visible,
        dropout_p=dropout,
        is_causal=causal,
        scale=score.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if torch.compiler.is_compiling():
        return fused()
    try:
        return fused()
    except NotImplementedError as error:
        if "forward AD" not in str(error):
            raise
        # torch.func.jvp: the fused kernels have no forward-mode derivative.
        return _mix_by_weights(q, k, v, score, table, local, dropout)


def _is_short(q: Tensor, k: Tensor) -> bool:
    """Whether this is a step of decoding that is faster without the fused kernel."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or q.device.type != "cpu":
        return False
    few = q.shape[2] < k.shape[2] <= FEW_KEYS and q.shape[2] <= FEW_QUERIES
    return few and q.shape[0] * q.shape[1] >= MANY_HEADS and q.shape[1] == k.shape[1]


def _mix_short(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    """Return the mixed values of a few queries; `visible` marks the keys."""
    scores = (scale * q) @ k.transpose(-1, -2)
    if visible is None:
        return scores.softmax(dim=-1) @ v
    hidden = ~visible
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(hidden, 0.0) @ v


def _mix_by_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    table: AttentionTable,
    local: nn.Module,
    dropout: float,
) -> Tensor:
    """Return the mixed values from the table of attention weights, without a fused kernel."""
    weights = F.dropout(attention_weights(q, k, score, table, local), dropout)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def _mix_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    table: AttentionTable,
    local: nn.Module,
    dropout: float,
) -> Tensor:
    """Return the same, a few queries at a time; each chunk is recomputed in the backward pass."""

    def mix_chunk(q: Tensor, k: Tensor, v: Tensor, chunk: AttentionTable) -> Tensor:
        # The table is not stored: it is recomputed in the backward pass.
        return _mix_whole(q, k, v, score, chunk.fresh(), local, dropout)

    mixed = []
    for start in range(0, table.query, CHUNK_QUERIES):
        chunk = table.chunk(start, min(start + CHUNK_QUERIES, table.query))
        queries = slice(*chunk.query_range)
        inputs = (q[:, :, queries], chunk.take_keys(k), chunk.take_keys(v))
        mixed.append(checkpoint(mix_chunk, *inputs, chunk, use_reentrant=False))
    return torch.cat(mixed, dim=2)
