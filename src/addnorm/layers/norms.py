"""The norms: each takes (..., width) and returns the same shape."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]
"""Makes a norm of a width: an entry of NORMS with its settings bound."""


class LayerNorm(nn.LayerNorm):
    """N(x) = γ ⊙ (x − mean x) / √(var x + ε) + β, over the width.

    Ba, Kiros, Hinton 2016 (1607.06450). Before γ and β the result has mean 0 and norm √width.
    """

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__(width, eps=eps, bias=bias)


class RMSNorm(nn.Module):
    """N(x) = γ ⊙ x / √(mean x² + ε): no centring, no offset.

    Zhang, Sennrich 2019 (1910.07467); T5's "layer norm" (Raffel et al. 2020, §2.1).
    """

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class OffsetRMSNorm(RMSNorm):
    """N(x) = (1 + γ) ⊙ x / √(mean x² + ε): the gain is stored as its offset from 1, initially 0.

    Gemma (2403.08295), as in its authors' code; weight decay then pulls the gain to 1, not to 0.
    """

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__(width, eps, bias)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), 1.0 + self.weight, self.eps)


class ScaleNorm(nn.Module):
    """N(x) = g x / max(‖x‖, ε) with one scalar g, which starts at √width.

    Nguyen, Salazar 2019 (1910.05895), eq. 5.
    """

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.tensor(width**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * F.normalize(x, dim=-1, eps=self.eps)


class BatchNorm(nn.BatchNorm1d):
    """N(x) = γ ⊙ (x − μ) / √(σ² + ε) + β, μ and σ² of each channel over all positions of the batch.

    Ioffe, Szegedy 2015 (1502.03167). For comparison: in training, the statistics include every
    position, also padding, so the sequences of a batch are not independent of one another.
    """

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class InstanceNorm(nn.Module):
    """N(x) = γ ⊙ (x − μ) / √(σ² + ε) + β, μ and σ² of each channel over one sequence.

    Ulyanov, Vedaldi, Lempitsky 2016 (1607.08022). For comparison: it averages over the sequence, so
    it works neither in a causal stack nor with padding.
    """

    along_sequence = True
    """Whether the result at one position depends on other positions of the sequence."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=-2, keepdim=True, correction=0)
        normal = self.weight * (x - mean) / (variance + self.eps).sqrt()
        return normal if self.bias is None else normal + self.bias


class NoNorm(nn.Identity):
    """N(x) = x."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()


NORMS: dict[str, type[nn.Module]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "rms-offset": OffsetRMSNorm,
    "scale": ScaleNorm,
    "batch": BatchNorm,
    "instance": InstanceNorm,
    "none": NoNorm,
}
