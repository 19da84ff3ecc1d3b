"""Sublayers over the rows of a batch instead of the columns of a row.

The vectors of all columns of a row are concatenated: (batch, columns, width) becomes one sequence
of `batch` positions of width columns · width, and is reshaped back afterwards.

Intersample attention: Somepalli et al. 2021 (2106.01342), §3.2. The prediction for a row depends on
the other rows of its batch. The Add & Norm boxes around these sublayers are the usual ones, so the
norm is over each column's own vector; in the authors' code it is over the whole row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.layers.attention import SelfAttention
from addnorm.layers.context import Context
from addnorm.layers.feedforward import FeedForward, GatedFeedForward
from addnorm.layers.masks import AttentionTable, Mask


class AlongRows(nn.Module):
    """Mixin that applies a sublayer to rows instead of columns."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        rows = x.flatten(1)[None]  # (1, batch, columns · width)
        return super().forward(rows, Context(maps=context.maps))[0].view(x.shape)


class RowAttention(AlongRows, SelfAttention):
    """Self-attention in which every row of the batch attends to every row."""


class RowFeedForward(AlongRows, FeedForward):
    """U σ(V x + b) + c on the concatenated row."""


class GatedRowFeedForward(AlongRows, GatedFeedForward):
    """U (σ(G x) ⊙ V x) on the concatenated row."""


ROW_FEEDFORWARDS: dict[type[FeedForward], type[FeedForward]] = {
    FeedForward: RowFeedForward,
    GatedFeedForward: GatedRowFeedForward,
}


# ── Rows of several tables, some of them known ────────────────────────────────────────────────────

RowCache = dict[int, tuple[Tensor, Tensor]]
"""By number of the block: keys and values of the known rows."""


@dataclass(kw_only=True)
class RowContext(Context):
    """The context of a stream with the rows of several tables, (tables · rows, columns, width).

    Parameters
    ----------
    rows
        Rows of each table in the stream.
    known
        Leading rows of each table that may be attended to; the others see these only.
    row_cache
        If given and empty, keys and values of the known rows are stored in it; if it holds them,
        they are used, and every row of the stream is one of the others.
    """

    rows: int
    known: int
    row_cache: RowCache | None = None


class KnownRowAttention(SelfAttention):
    """Self-attention along each column: every row attends to the known rows of its table.

    A row's own key is among them only if the row is known, so the others do not see one another.
    With no known row the result is that of mixed values of 0.
    """

    def forward(self, x: Tensor, context: Context) -> Tensor:
        assert isinstance(context, RowContext)
        rows, columns, width = context.rows, x.shape[1], x.shape[2]
        # (tables · rows, columns, width) -> (tables · columns, rows, width)
        along = x.view(-1, rows, columns, width).transpose(1, 2).reshape(-1, rows, width)
        own = self.sizes[0]
        weight, bias = self.input.weight, self.input.bias
        q = F.linear(along, weight[:own], None if bias is None else bias[:own])
        q = self.query_norm(self.split(q))
        if context.known:
            k, v = self.known_keys_values(along, context)
            mixed = self.attend(q, k, v, AttentionTable(Mask(), rows, k.shape[2]), context)
        else:
            mixed = torch.zeros_like(q).transpose(1, 2).flatten(2)
        mixed = self.output(self.inner(mixed))
        return mixed.view(-1, columns, rows, width).transpose(1, 2).reshape(x.shape)

    def known_keys_values(self, along: Tensor, context: RowContext) -> tuple[Tensor, Tensor]:
        """Return keys and values of the known rows, from the cache if it holds them."""
        if context.row_cache is not None and self.layer in context.row_cache:
            return context.row_cache[self.layer]
        own = self.sizes[0]
        weight, bias = self.input.weight, self.input.bias
        known = along[:, : context.known]
        both = F.linear(known, weight[own:], None if bias is None else bias[own:])
        k, v = torch.split(both, self.sizes[1:], dim=-1)
        k, v = self.key_norm(self.split(k)), self.split(v)
        if context.row_cache is not None:
            context.row_cache[self.layer] = k, v
        return k, v
