"""Sublayers over the rows of a batch instead of the columns of a row.

The vectors of all columns of a row are concatenated: (batch, columns, width) becomes one sequence
of `batch` positions of width columns · width, and is reshaped back afterwards.

Intersample attention: Somepalli et al. 2021 (2106.01342), §3.2. The prediction for a row depends on
the other rows of its batch. The Add & Norm boxes around these sublayers are the usual ones, so the
norm is over each column's own vector; in the authors' code it is over the whole row.
"""

from torch import Tensor, nn

from addnorm.layers.attention import SelfAttention
from addnorm.layers.context import Context
from addnorm.layers.feedforward import FeedForward, GatedFeedForward


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
