"""Float32 for inference: a copy of a model whose matrices lie as the processor reads them.

A product W x of few vectors x spends much of its time on laying W out for the processor, and for
less than about fifty vectors torch's own does not share it among its threads. Here W is laid out
once, by oneDNN. The numbers are those of the model, up to the rounding of float32.
"""

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.generate.frozen import Frozen, freeze
from addnorm.models.build import Model

ROWS = 80
"""Vectors that the layout is best for; it serves any number of them."""


def pack(model: Model) -> Model:
    """A copy of a float32 model, for inference on a CPU, that decodes faster.

    It takes as much memory again as the model, and that of the embedding once more where the output
    is tied to it. The model itself is left alone.

    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=1, heads=2)).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> bool((pack(model)(ids) - model(ids)).abs().max() < 1e-5)
    True
    """
    if not can_pack():
        raise InputError("packing needs a torch with oneDNN: this one has none. Decode without it.")
    kinds = {parameter.dtype for parameter in model.parameters()}
    if kinds != {torch.float32}:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise InputError(f"packing is for models in float32: got {names}. Try model.float().")
    return freeze(model, PackedLinear)


def can_pack() -> bool:
    """Whether this build of torch can lay a matrix out by oneDNN."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    known = all(hasattr(torch.ops.mkldnn, name) for name in names)
    return known and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class PackedLinear(Frozen):
    """What nn.Linear computes, with its matrix laid out in advance."""

    named, verb = "a packed model", "pack"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        self.bias = None if bias is None else bias.detach().clone()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
