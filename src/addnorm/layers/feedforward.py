"""Position-wise feed-forward networks: the same two or three matrices at every position.

Shapes: (batch, length, width) in and out, (batch, length, ffn_width) inside.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.layers.context import Context
from addnorm.layers.dropout import Dropout

Activation = Callable[[Tensor], Tensor]

gelu_tanh: Activation = partial(F.gelu, approximate="tanh")


class FeedForward(nn.Module):
    """F(x) = U σ(V x + b) + c. Vaswani et al. 2017, eq. 2, with any σ.

    Parameters
    ----------
    width, ffn_width
        Width of the stream, and of the hidden layer.
    activation
        σ.
    bias
        Whether both projections have biases.
    dropout
        Dropout after the activation.
    inner
        Module between the activation and U (the norm of NormFormer and Sub-LN).
    """

    parts = 1
    """Matrices that read the stream."""

    def __init__(
        self,
        width: int,
        ffn_width: int,
        activation: Activation,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        inner: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.input = nn.Linear(width, self.parts * ffn_width, bias=bias)
        self.inner = inner or nn.Identity()
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(ffn_width, width, bias=bias)

    def activate(self, x: Tensor) -> Tensor:
        """Return the hidden layer, (batch, length, ffn_width)."""
        return self.activation(x)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.output(self.dropout(self.inner(self.activate(self.input(x)))))

    def matrices(self) -> dict[str, Tensor]:
        """Return the weight of each projection as a view."""
        return {"input": self.input.weight, "output": self.output.weight}

    def scale_(self, gain: float) -> None:
        """Multiply U and V (not the gate G): the weights that arrangements scale."""
        with torch.no_grad():
            for name in ("input", "output"):
                self.matrices()[name].mul_(gain)


class GatedFeedForward(FeedForward):
    """F(x) = U (σ(G x) ⊙ V x). Shazeer 2020 (2002.05202), eq. 5–6. Rows of `input`: G, then V."""

    parts = 2

    def activate(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return self.activation(gate) * value

    def matrices(self) -> dict[str, Tensor]:
        gate, value = self.input.weight.chunk(2)
        return {"gate": gate, "input": value, "output": self.output.weight}


FEEDFORWARDS: dict[str, tuple[type[FeedForward], Activation]] = {
    "relu": (FeedForward, F.relu),
    "gelu": (FeedForward, F.gelu),
    "gelu-tanh": (FeedForward, gelu_tanh),
    "silu": (FeedForward, F.silu),
    "glu": (GatedFeedForward, torch.sigmoid),
    "reglu": (GatedFeedForward, F.relu),
    "geglu": (GatedFeedForward, F.gelu),
    "geglu-tanh": (GatedFeedForward, gelu_tanh),
    "swiglu": (GatedFeedForward, F.silu),
}
