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
    """Return whether a module rescales each position to one size, up to gain and offset.

    A norm keeps the direction of x or of x − mean x, and gives all positions the same size. Where
    the class is called a norm, its direction is enough: a size may be lost in ε.
    """
    if argument.shape != result.shape or argument.ndim < 3 or not result.is_floating_point():
        return False
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    if isinstance(module, nn.Linear | nn.Embedding | nn.Dropout | nn.Identity):
        return False
    gain, offset = getattr(module, "weight", None), getattr(module, "bias", None)
    width = result.shape[-1:]
    if any(isinstance(part, Tensor) and part.shape != width for part in (gain, offset)):
        return False  # a matrix, or a norm over another axis, such as BatchNorm
    x, y = argument.float(), result.float()
    y = y - offset.float() if isinstance(offset, Tensor) else y
    gains = [1.0] if not isinstance(gain, Tensor) else [gain.float(), 1 + gain.float()]
    named = "norm" in type(module).__name__.lower()
    return any(
        _keeps_direction(x, y / each) and (named or _is_rescaled(x, y / each)) for each in gains
    )


def _keeps_direction(x: Tensor, y: Tensor) -> bool:
    for each in (x, x - x.mean(dim=-1, keepdim=True)):
        cosine = torch.cosine_similarity(each, y, dim=-1)
        counted = (each.norm(dim=-1) > 0) & y.isfinite().all(dim=-1)
        if bool(counted.any()) and float((cosine[counted] > 0.999).float().mean()) > 0.9:
            return not torch.equal(x, y)
    return False


def _is_rescaled(x: Tensor, y: Tensor) -> bool:
    """Return whether positions of different size have the same size afterwards."""
    before, after = x.norm(dim=-1), y.norm(dim=-1)
    ratio = (after / before.clamp(min=1e-30))[before > 0]
    constant = ratio.numel() < 2 or float(ratio.std()) < 1e-4 * float(ratio.mean())
    return has_even_sizes(y) and not constant


def has_even_sizes(y: Tensor) -> bool:
    """Return whether most positions that are not zero have the same size, to 3 %."""
    size = y.detach().float().pow(2).mean(dim=-1).sqrt().flatten()
    size = size[size > 1e-6]
    if size.numel() < 2 or not bool(size.isfinite().all()):
        return False
    middle = size.median()
    return float(((size - middle).abs() < 0.03 * middle).float().mean()) > 0.8
