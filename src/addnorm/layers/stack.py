"""Block and Stack: the list of sublayers, joined by the chosen Add & Norm boxes.

x ─ open ─┬─► [ addnorm(attention) ► addnorm(memory) ► addnorm(ffn) ] × depth ─► close ─► out
          └── the stream: a tensor, or a tuple that the arrangement defines ──┘
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.layers.addnorm import AddNorm, Ends, Stream
from addnorm.layers.attention import Attention, SelfAttention
from addnorm.layers.context import Context
from addnorm.layers.convolution import Convolution
from addnorm.layers.feedforward import FeedForward
from addnorm.layers.key_value import ProductKeyMemory

AnySublayer = Attention | Convolution | FeedForward | ProductKeyMemory
"""What stands between two Add & Norm boxes."""


class Block(nn.Module):
    """Sublayers in order, each joined to the stream by its own Add & Norm box.

    The branch that a box receives is complete: the sublayer, then dropout.
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
            stream = self.step(stream, context, sublayer, self.addnorms[role])
        return stream

    def step(self, stream: Stream, context: Context, sublayer: nn.Module, box: nn.Module) -> Stream:
        """Return the stream after one sublayer and its Add & Norm box.

        Parameters
        ----------
        stream, context
            The inputs of the block.
        sublayer, box
            The sublayer, and the box that joins it to the stream.
        """

        def branch(x: Tensor) -> Tensor:
            return self.dropout(sublayer(x, context))

        return box(stream, branch)


class LastBlock(Block):
    """The last block of a stack, which computes only the positions that the stack returns.

    With `context.output_length`, only that many leading positions are queries of self-attention,
    and only they go through the sublayers after it (Gorishniy et al. 2021, §3.3).
    """

    def step(self, stream: Stream, context: Context, sublayer: nn.Module, box: nn.Module) -> Stream:
        count = context.output_length
        if count is None:
            return super().step(stream, context, sublayer, box)

        def branch(x: Tensor) -> Tensor:
            rest = x.shape[-2] - count
            if rest == 0 or isinstance(sublayer, Convolution):
                return self.dropout(sublayer(x, context))
            assert isinstance(sublayer, SelfAttention)
            y = self.dropout(sublayer.attend_from_first(x, context, count))
            return F.pad(y, (0, 0, 0, rest))  # the padding is removed again after the box

        return first_positions(box(stream, branch), count)


def first_positions(stream: Stream, count: int) -> Stream:
    """Return the first `count` positions of a stream, in every tensor of it that has positions."""
    if isinstance(stream, tuple):
        return tuple(first_positions(part, count) for part in stream)
    if isinstance(stream, Tensor) and stream.ndim > 1:
        return stream[..., :count, :]
    return stream


class Stack(nn.Module):
    """Blocks between the two ends of an arrangement, then an optional final norm.

    Takes and returns (batch, length, width); with `context.output_length`, returns the first
    positions only.
    """

    def __init__(self, blocks: Sequence[Block], ends: Ends, norm: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.ends = ends
        self.norm = norm

    def steps(self) -> Iterator[tuple[AnySublayer, AddNorm]]:
        """Yield each sublayer with its Add & Norm box, in the order of the forward pass."""
        for block in self.blocks:
            assert isinstance(block, Block)
            for role, sublayer in block.sublayers.items():
                box = block.addnorms[role]
                assert isinstance(sublayer, AnySublayer) and isinstance(box, AddNorm)
                yield sublayer, box

    def forward(self, x: Tensor, context: Context) -> Tensor:
        stream = self.ends.open(x)
        for block in self.blocks:
            stream = block(stream, context)
        if context.output_length is not None:
            stream = first_positions(stream, context.output_length)
        return self.norm(self.ends.close(stream))
