"""Embeddings of the input: token ids, image patches, or vectors of the model's width.

Every embedding returns (batch, length, width).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.errors import InputError

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Types that token ids may have."""


def has_values(x: Tensor) -> bool:
    """Return whether the values of a tensor can be read now.

    They cannot while torch.compile traces, inside transforms of torch.func, and on `meta`.
    """
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def check_tensor(x: object, name: str, example: str) -> None:
    """Raise InputError unless `x` is a tensor, and not a sparse one."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor: got {type(x).__name__}. Try {example}.")
    if x.layout != torch.strided:
        raise InputError(f"{name} must be dense: got {x.layout}. Try .to_dense().")


def check_device(x: Tensor, weight: Tensor, name: str) -> None:
    """Raise InputError unless `x` is on the same kind of device as the weights."""
    if x.device.type != weight.device.type:
        raise InputError(
            f"{name} must be on the device of the model, {weight.device}: got {x.device}. "
            f"Try .to({str(weight.device)!r})."
        )


class Tokens(nn.Module):
    """E[id], times √width if `scaled`. Vaswani et al. 2017, §3.4."""

    def __init__(self, vocab: int, width: int, scaled: bool) -> None:
        super().__init__()
        self.vocab = vocab
        self.scale = width**0.5 if scaled else 1.0
        self.weight = nn.Parameter(torch.empty(vocab, width))

    def forward(self, ids: Tensor) -> Tensor:
        self.check(ids)
        x = F.embedding(ids.long(), self.weight)
        return x if self.scale == 1.0 else x * self.scale

    def check(self, ids: Tensor) -> None:
        """Raise InputError unless the ids are integers below `vocab`, (batch, length)."""
        check_tensor(ids, "token ids", "torch.tensor([[1, 2, 3]])")
        if ids.dtype not in INTEGERS or ids.ndim != 2:
            raise InputError(
                "token ids must be integers of shape (batch, length): "
                f"got {ids.dtype} of shape {tuple(ids.shape)}."
            )
        if 0 in ids.shape:
            raise InputError(
                f"token ids must not be empty: got a tensor of shape {tuple(ids.shape)}."
            )
        check_device(ids, self.weight, "token ids")
        # On other devices reading values would synchronise; their kernels report a bad id anyway.
        if ids.device.type == "cpu" and has_values(ids):
            low, high = (int(end) for end in ids.aminmax())
            if low < 0 or high >= self.vocab:
                raise InputError(
                    f"token ids must be 0 to {self.vocab - 1}: got {low if low < 0 else high}. "
                    "Check that the tokenizer belongs to this model."
                )


class Patches(nn.Module):
    """Square patches of an image, flattened and projected: E vec(patch) + b.

    ViT: Dosovitskiy et al. 2021 (2010.11929), eq. 1. Takes (batch, channels, height, width).

    Parameters
    ----------
    image, patch
        Height and width of an image and of a patch, in pixels.
    channels
        Colour channels.
    width
        Width of the embedding.
    """

    def __init__(self, image: int, patch: int, channels: int, width: int) -> None:
        super().__init__()
        self.image, self.patch, self.channels = image, patch, channels
        self.project = nn.Linear(channels * patch * patch, width)

    def forward(self, images: Tensor) -> Tensor:
        expected = (self.channels, self.image, self.image)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise InputError(
                f"images must have shape (batch, {', '.join(map(str, expected))}): "
                f"got {tuple(images.shape)}."
            )
        check_finite(images, "images")
        return self.project(F.unfold(images, self.patch, stride=self.patch).transpose(1, 2))


class Vectors(nn.Module):
    """Identity on vectors of the model's width, which checks them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, vectors: Tensor) -> Tensor:
        if vectors.ndim != 3 or vectors.shape[-1] != self.width:
            raise InputError(
                f"vectors must have shape (batch, length, {self.width}): "
                f"got {tuple(vectors.shape)}."
            )
        check_finite(vectors, "vectors")
        return vectors


class Summary(nn.Module):
    """Put a learned summary vector before the first position (the CLS token)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.weight.expand(x.shape[0], 1, -1), x), dim=1)


def check_finite(x: Tensor, name: str) -> None:
    """Raise InputError if there is a NaN or an infinity, which would spread to the whole batch."""
    if not has_values(x):
        return
    finite = x.isfinite()
    if not bool(finite.all()):
        where = tuple(int(i) for i in (~finite).nonzero()[0])
        raise InputError(
            f"{name} must be finite: got {float(x[where])} at {where}. "
            "Fill or drop such values first."
        )


def shift_right(targets: Tensor, start: int) -> Tensor:
    """Return the decoder's input to predict `targets`: the start token, then all but the last.

    Parameters
    ----------
    targets : token ids to predict, (batch, length)
    start : the token that starts a sequence

    Examples
    --------
    >>> shift_right(torch.tensor([[5, 6, 7]]), start=1).tolist()
    [[1, 5, 6]]
    """
    return F.pad(targets[:, :-1], (1, 0), value=start)
