"""Calling anyone's model with a batch of any form, for its answer and its loss; leaving no mark.

A batch is what the model is called with: a tensor, a tuple of arguments, or a dictionary of named
ones. The answer is the floating-point tensor that comes out, or the `logits` of what does.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.config import ModelConfig
from addnorm.errors import InputError
from addnorm.models.tabular import TabularConfig

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Loss = Callable[[Any, Any], Tensor]
"""From the model's output and the batch to a scalar."""


def run(model: nn.Module, batch: Batch) -> Any:
    """The model's own output for a batch."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch)


def parts(batch: Batch) -> dict[str, Any]:
    """The arguments of a batch by name, or by number."""
    if isinstance(batch, Tensor):
        return {"0": batch}
    if isinstance(batch, Mapping):
        return dict(batch)
    return {str(i): part for i, part in enumerate(batch)}


def with_parts(batch: Batch, changed: Mapping[str, Any]) -> Batch:
    """The batch with some of its arguments replaced."""
    new = parts(batch) | dict(changed)
    if isinstance(batch, Tensor):
        return new["0"]
    return new if isinstance(batch, Mapping) else tuple(new.values())


def tensors(batch: Batch) -> list[Tensor]:
    return [part for part in parts(batch).values() if isinstance(part, Tensor)]


def work(model: nn.Module, batch: Batch) -> float:
    """Operations of a step, forward and back: 6 for each weight of a matrix and each position."""
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    return 6.0 * weights * sum(math.prod(t.shape[:2]) for t in tensors(batch))


def answer_of(output: Any) -> Tensor:
    """The tensor that a model answers with."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    values = output.values() if isinstance(output, Mapping) else output
    if isinstance(values, tuple | list) or isinstance(output, Mapping):
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
                return value
    raise InputError(
        f"a model must answer with a floating-point tensor, or hold one: got {type(output)}. "
        "Wrap it in a module that returns its logits."
    )


@dataclass(frozen=True)
class Objective:
    """What is minimised, and in words."""

    loss: Loss
    said: str
    made_up: bool = False
    """Targets are drawn at random for one batch: nothing can be learnt from another."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.of(run(model, batch), batch)

    def of(self, output: Any, batch: Batch) -> Tensor:
        value = self.loss(output, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError(
                "the loss must be one number for a batch: "
                f"got {tuple(value.shape) if isinstance(value, Tensor) else type(value)}. "
                "Try its mean."
            )
        return value.reshape(())


def is_table(model: nn.Module) -> bool:
    """Whether whole numbers are codes of columns: neither tokens of one kind nor in an order."""
    return isinstance(getattr(model, "config", None), TabularConfig)


def ids_of(batch: Batch) -> dict[str, Tensor]:
    """The token ids of a batch: whole numbers of shape (batch, length), masks and labels aside."""
    return {
        name: part
        for name, part in parts(batch).items()
        if isinstance(part, Tensor)
        and part.ndim == 2
        and not part.is_floating_point()
        and part.dtype != torch.bool
        and not any(word in name for word in ("mask", "label", "position", "segment", "type"))
    }


def is_causal(model: nn.Module) -> bool:
    """Whether the configuration says that the future is hidden."""
    config = getattr(model, "config", None)
    if isinstance(config, ModelConfig):
        return config.mode != "encoder"
    names = getattr(config, "architectures", None) or [type(model).__name__]
    return any("CausalLM" in name or "LMHeadModel" in name for name in names)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; then weights, gradients, buffers, modes and dice as before."""
    modes = {module: module.training for module in model.modules()}
    grads = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers()}
    weights = {p: p._version for p in model.parameters()}
    kept = {p: p.detach().clone() for p in model.parameters()}
    random = torch.get_rng_state()
    model.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for parameter, value in kept.items():
                if parameter._version != weights[parameter]:
                    parameter.copy_(value)
            for buffer, value in buffers.items():
                buffer.copy_(value)
        for parameter, grad in grads.items():
            parameter.grad = grad
        for module, mode in modes.items():
            module.training = mode
