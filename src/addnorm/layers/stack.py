"""Block and Stack: the list of sublayers, joined by whatever Add & Norm was chosen.

x ─ open ─┬─► [ addnorm(attention) ► addnorm(memory) ► addnorm(ffn) ] × depth ─► close ─► out
          └── the stream: a tensor, or what the arrangement makes of it ──┘
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from addnorm.layers.addnorm import AddNorm, Ends, Stream
from addnorm.layers.attention import Attention
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

    def forward(self, stream: Stream, context: Context) -> Stream:
        for role, sublayer in self.sublayers.items():

            def branch(x: Tensor, sublayer: nn.Module = sublayer) -> Tensor:
                return self.dropout(sublayer(x, context))

            stream = self.addnorms[role](stream, branch)
        return stream


class Stack(nn.Module):
    """Blocks between the two ends of an arrangement, and one more norm where that is wanted.

    Takes and gives (batch, length, width).
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

    def forward(self, x: Tensor, context: Context) -> Tensor:
        stream = self.ends.open(x)
        for block in self.blocks:
            stream = block(stream, context)
        return self.norm(self.ends.close(stream))
