"""Block and Stack: the list of sublayers, joined by whatever Add & Norm was chosen.

x ─ open ─┬─► [ addnorm(attention) ► addnorm(memory) ► addnorm(ffn) ] × depth ─► close ─► out
          └── the stream: a tensor, or what the arrangement makes of it ──┘
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.layers.addnorm import AddNorm, Ends, Stream
from addnorm.layers.attention import Attention, SelfAttention
from addnorm.layers.context import Context
from addnorm.layers.feedforward import FeedForward


class Block(nn.Module):
    """Sublayers in order, each joined to the stream by its own Add & Norm box.

    The branch an Add & Norm box gets is the whole of it: the sublayer, then dropout.
    """

    def __init__(
        self,
        sublayers: Mapping[str, nn.Module],
        addnorms: Mapping[str, AddNorm],
        dropout: nn.Module,
    ) -> None:
        super().__init__()
        self.sublayers = nn.ModuleDict(sublayers)
        self.addnorms = nn.ModuleDict(addnorms)
        self.dropout = dropout

    def forward(self, stream: Stream, context: Context, asking: int | None = None) -> Stream:
        for role, sublayer in self.sublayers.items():

            def branch(x: Tensor, sublayer: nn.Module = sublayer) -> Tensor:
                if asking is None or asking == x.shape[-2]:
                    return self.dropout(sublayer(x, context))
                assert isinstance(sublayer, SelfAttention)
                asked = self.dropout(sublayer.ask(x, context, asking))
                # What the other positions would have got is cut off below.
                return F.pad(asked, (0, 0, 0, x.shape[-2] - asking))

            stream = self.addnorms[role](stream, branch)
            stream = stream if asking is None else cut(stream, asking)
        return stream


def cut(stream: Stream, count: int) -> Stream:
    """The first so many positions of a stream, whatever an arrangement made of it."""
    if isinstance(stream, tuple):
        return tuple(cut(part, count) for part in stream)
    if isinstance(stream, Tensor) and stream.ndim > 1:
        return stream[..., :count, :]
    return stream


class Stack(nn.Module):
    """Blocks between the two ends of an arrangement, and one more norm where that is wanted.

    Takes and gives (batch, length, width), or with `asking` the first so many positions alone: then
    in the last block no other asks, and none goes on to its feed-forward (Gorishniy et al. 2021).
    """

    def __init__(self, blocks: Sequence[Block], ends: Ends, norm: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.ends = ends
        self.norm = norm

    def steps(self) -> Iterator[tuple[Attention | FeedForward, AddNorm]]:
        """Each sublayer with its Add & Norm box, in the order in which the stream meets them."""
        for block in self.blocks:
            assert isinstance(block, Block)
            for role, sublayer in block.sublayers.items():
                box = block.addnorms[role]
                assert isinstance(sublayer, Attention | FeedForward) and isinstance(box, AddNorm)
                yield sublayer, box

    def forward(self, x: Tensor, context: Context, asking: int | None = None) -> Tensor:
        stream = self.ends.open(x)
        for number, block in enumerate(self.blocks, start=1):
            stream = block(stream, context, asking if number == len(self.blocks) else None)
        closed = self.ends.close(stream if asking is None else cut(stream, asking))
        return self.norm(closed)
