"""Copies of a model for inference alone, whose matrices are held in another form than its own."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from addnorm.errors import InputError, SavedError
from addnorm.layers.heads import TokenHead
from addnorm.models.build import Model


class Frozen(nn.Module):
    """What nn.Linear computes, from a matrix in some other form; not for training or saving."""

    named, verb = "a frozen model", "freeze"

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.outputs, self.inputs = weight.shape

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}"

    def _save_to_state_dict(self, *rest: object) -> None:
        raise SavedError(
            f"{self.named} cannot be saved. Save the model that it was made from, and {self.verb} "
            "after loading."
        )


Freeze = Callable[[Tensor, Tensor | None], Frozen]
"""From the weight and the bias of a linear layer to what stands in its place."""


def freeze(model: Model, make: Freeze) -> Model:
    """A copy of a model with all linear layers and the output matrix replaced; itself left alone.

    Whatever `make` is given belongs to the model: what it keeps of that must be a copy.
    """
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise InputError(
            f"int8 and packed matrices are for models on a CPU: got {', '.join(sorted(devices))}."
        )
    linears = [part for part in model.modules() if type(part) is nn.Linear]
    # Matrices that are about to be replaced need not be copied first.
    shared = {id(part): part for linear in linears for part in linear.parameters()}
    clone = copy.deepcopy(model, shared)
    with torch.no_grad():
        for parent in list(clone.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, make(child.weight, child.bias))
        if isinstance(clone.head, TokenHead):
            clone.head = FrozenHead(clone.head, clone.embedding(), make)
    return clone.eval().requires_grad_(False)


class FrozenHead(TokenHead):
    """The next-token head with its output matrix replaced, a copy of the embedding where tied."""

    def __init__(self, head: TokenHead, embedding: Tensor, make: Freeze) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.scale = None, None, head.scale
        self.output = make(head.matrix(embedding), head.bias)
        head.weight = None
        self.inner = head

    def prepare(self, x: Tensor) -> Tensor:
        return self.inner.prepare(x)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return self.output(self.prepare(x))
