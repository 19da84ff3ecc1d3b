"""What the path and the result of a module say: which block it belongs to, whether it is a norm."""

import torch
from torch import Tensor, nn


def block_of(path: str) -> str:
    """Return the path up to its last number: one block of a stack.

    >>> block_of("encoder.layer.3.output.dense")
    'encoder.layer.3'
    """
    parts = path.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else ""


def common_block(one: str, two: str) -> str:
    """Return the numbered block that two paths share, with a final dot, or an empty string."""
    shared = []
    for a, b in zip(one.split("."), two.split("."), strict=False):
        if a != b:
            break
        shared.append(a)
    while shared and not shared[-1].isdigit():
        shared.pop()
    return ".".join(shared) + "." if shared else ""


@torch.no_grad()
def is_norm(module: nn.Module, argument: Tensor, result: Tensor) -> bool:
    """Return whether every position has the same size after a module, up to gain and offset."""
    if argument.shape != result.shape or argument.ndim < 3 or not result.is_floating_point():
        return False
    gain, offset = getattr(module, "weight", None), getattr(module, "bias", None)
    y = result if not isinstance(offset, Tensor) else result - offset
    if isinstance(gain, Tensor):
        if gain.ndim > 1 or (gain == 0).any():
            return isinstance(module, nn.LayerNorm | nn.RMSNorm)
        y = y / gain
    if isinstance(module, nn.Linear | nn.Embedding | nn.Dropout | nn.Identity):
        return False
    size = y.float().pow(2).mean(dim=-1).sqrt()
    even = float(size.std()) < 0.01 * float(size.mean()) if size.numel() > 1 else False
    return even or isinstance(module, nn.LayerNorm | nn.RMSNorm)
