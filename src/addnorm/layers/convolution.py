"""Convolution over the positions, in place of self-attention: the baseline of Gehring et al. 2017.

What a position reads in one layer ends k − 1 positions away, so that signals between positions n
apart pass n / (k − 1) layers; in self-attention they pass one (Vaswani et al. 2017, table 1).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.errors import ConfigError
from addnorm.layers.context import Context
from addnorm.layers.masks import require_padding_only


class Convolution(nn.Module):
    """F(x)_t = W_o (a_t ⊙ σ(g_t)) + c,   (a_t, g_t) = Σ_j W_j x_(t + j − p) + b,   j = 0 … k − 1

    A gated convolution: Gehring et al. 2017 (1705.03122), §3.2. p = k − 1 if it is causal, ⌊k / 2⌋
    else; positions beyond the ends, and padding, count as 0. The output projection W_o is not in
    the paper: every branch here ends with one, which arrangements scale. The W_j are one matrix,
    (2 · width, k · width), with the columns of W_0 first.

    Parameters
    ----------
    width
        Width of the stream.
    kernel
        k.
    layer
        Number of the block, from 0: where the cache stores this layer's inputs.
    causal
        Whether later positions are hidden.
    heads
        The cache stores the stream as this many heads.
    bias
        Whether both projections have biases.
    inner
        Module between the gate and the output projection.
    """

    def __init__(
        self,
        width: int,
        kernel: int,
        layer: int,
        *,
        causal: bool,
        heads: int,
        bias: bool = True,
        inner: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"a convolution needs heads that divide width: width={width}, heads={heads}. "
                "Try heads=1."
            )
        self.kernel, self.layer, self.causal, self.heads = kernel, layer, causal, heads
        self.input = nn.Linear(kernel * width, 2 * width, bias=bias)
        self.inner = inner or nn.Identity()
        self.output = nn.Linear(width, width, bias=bias)

    def matrices(self) -> dict[str, Tensor]:
        """Return the weight of each projection as a view: value, gate, output."""
        value, gate = self.input.weight.chunk(2)
        return {"value": value, "gate": gate, "output": self.output.weight}

    def scale_(self, gain: float) -> None:
        """Multiply the value and output weights: those that arrangements scale."""
        with torch.no_grad():
            for name in ("value", "output"):
                self.matrices()[name].mul_(gain)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return (batch, length, width) for (batch, length, width)."""
        length, reach = x.shape[1], self.kernel - 1
        real = require_padding_only(context.mask, "a convolution")
        before = reach if self.causal else self.kernel // 2
        x = self._with_earlier(x, context)[:, -(length + before) :]
        if real is not None:
            x = x * real[:, -x.shape[1] :, None]
        x = F.pad(x, (0, 0, before - (x.shape[1] - length), reach - before))
        # (batch, length, width, kernel) -> (batch, length, kernel · width)
        near = x.unfold(1, self.kernel, 1).transpose(-1, -2).flatten(2)
        value, gate = self.input(near).chunk(2, dim=-1)
        return self.output(self.inner(value * torch.sigmoid(gate)))

    def _with_earlier(self, x: Tensor, context: Context) -> Tensor:
        """Return x after what this layer read before: in the cache, or in earlier segments."""
        if context.segments is not None:
            return context.segments.join(self.layer, x)
        if context.cache is None:
            return x
        split = x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
        read = context.cache.write(self.layer, split, split)[0]
        return read[:, :, -(x.shape[1] + self.kernel - 1) :].transpose(1, 2).flatten(2)
