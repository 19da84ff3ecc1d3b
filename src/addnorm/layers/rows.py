"""Sublayers that look along the rows of a batch, not along the columns of a row.

A row is the vectors of all its columns, joined: (batch, columns, width) becomes one sequence of
`batch` positions of columns · width numbers, and comes back as it was.

Intersample attention: Somepalli et al. 2021 (2106.01342), §3.2. What is answered for a row depends
on the rows that it comes with. The Add & Norm boxes around these sublayers are the usual ones, so
the norm is over each column's own vector; in the authors' code it is over the joined row.
"""

from torch import Tensor, nn

from addnorm.layers.attention import SelfAttention
from addnorm.layers.context import Context
from addnorm.layers.feedforward import FeedForward, GatedFeedForward


class AlongRows(nn.Module):
    """What stands before a sublayer's class to turn it from columns to rows."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        joined = x.flatten(1)[None]  # (1, batch, columns · width)
        return super().forward(joined, Context(maps=context.maps))[0].view(x.shape)


class RowAttention(AlongRows, SelfAttention):
    """Every row of the batch looks at every row."""


class RowFeedForward(AlongRows, FeedForward):
    """U σ(V x + b) + c on the joined row."""


class GatedRowFeedForward(AlongRows, GatedFeedForward):
    """U (σ(G x) ⊙ V x) on the joined row."""


ROW_FEEDFORWARDS: dict[type[FeedForward], type[FeedForward]] = {
    FeedForward: RowFeedForward,
    GatedFeedForward: GatedRowFeedForward,
}
