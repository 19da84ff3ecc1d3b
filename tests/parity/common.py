"""Helpers of the parity tests: random weights, padded ids, tolerances."""

import torch
from torch import Tensor, nn

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest allowed difference of a logit; a wrong epsilon, activation or mask exceeds it."""


@torch.no_grad()
def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Randomise every parameter, so that no gain is 1 and no bias 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue  # a fixed table, such as sinusoids
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        elif "norm" in name.lower() or ".ln_" in name:
            parameter.copy_(noise * 0.2 + (1.0 if name.endswith("weight") else 0.0))
        else:
            parameter.copy_(noise * 0.2)
    return model


def padded(
    lengths: tuple[int, ...], vocab: int, side: str = "right", pad: int = 0, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Random ids (batch, longest) with padding on one side, and which of them are real."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(4, vocab, (len(lengths), longest), generator=generator)
    slots, sizes = torch.arange(longest), torch.tensor(lengths)[:, None]
    real = slots < sizes if side == "right" else slots >= longest - sizes
    return ids.masked_fill(~real, pad), real


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference; a NaN anywhere makes it NaN, which is not below any limit."""
    assert one.shape == other.shape and one.dtype == other.dtype
    return float((one - other).detach().abs().max())
