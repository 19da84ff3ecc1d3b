"""Call any model with any batch, for its output and its loss, and leave the model unchanged.

The inputs are what the model is called with: a tensor, a tuple of positional arguments, or a
dictionary of named ones. The answer is the floating-point tensor that the model returns, or the
`logits` of what it returns.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.config import ModelConfig
from addnorm.errors import InputError
from addnorm.models.tabular import TabularConfig

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Loss = Callable[[Any, Any], Tensor]
"""From the model's output and the batch's targets (its inputs, if it has none) to a scalar."""
MIN_CHANGE = 1e-4
"""Change of an answer, relative to the standard deviation of all answers, beyond rounding."""


@dataclass(frozen=True, eq=False)
class ClinicBatch:
    """What a model is called with, and the targets that its output is compared with."""

    inputs: Inputs
    targets: Tensor | None = None

    @classmethod
    def from_task(cls, batch: Mapping[str, Tensor]) -> "ClinicBatch":
        """Return a task's batch with its targets, whatever the names of its inputs are."""
        known = (("source", "target_in"), ("numbers", "codes"), ("inputs",))
        names = next(names for names in known if names[0] in batch)
        return cls(tuple(batch[name] for name in names), batch.get("targets"))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, or by number."""
        if isinstance(self.inputs, Tensor):
            return {"0": self.inputs}
        if isinstance(self.inputs, Mapping):
            return dict(self.inputs)
        return {str(i): argument for i, argument in enumerate(self.inputs)}

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments that are tensors."""
        return [part for part in self.arguments.values() if isinstance(part, Tensor)]

    def replace(self, changes: Mapping[str, Any]) -> "ClinicBatch":
        """Return the batch with some of its arguments replaced."""
        new = self.arguments | dict(changes)
        if isinstance(self.inputs, Tensor):
            return ClinicBatch(new["0"], self.targets)
        inputs = new if isinstance(self.inputs, Mapping) else tuple(new.values())
        return ClinicBatch(inputs, self.targets)

    def rows(self, start: int, stop: int) -> "ClinicBatch":
        """Return some rows of every argument that has as many rows as the batch."""
        count = self.row_count
        part = self.replace(
            {
                name: argument[start:stop]
                for name, argument in self.arguments.items()
                if isinstance(argument, Tensor) and argument.ndim and argument.shape[0] == count
            }
        )
        targets = None if self.targets is None else self.targets[start:stop]
        return ClinicBatch(part.inputs, targets)

    @property
    def row_count(self) -> int:
        """The rows of the first argument of token ids, or else of the first tensor."""
        tensors = [*self.token_ids.values(), *self.tensors]
        return next((tensor.shape[0] for tensor in tensors if tensor.ndim), 1)

    def split(self, count: int) -> "list[ClinicBatch]":
        """Return the rows as `count` batches of equal size; rows that are left over are dropped."""
        size = max(1, self.row_count // count)
        starts = range(0, size * min(count, self.row_count), size)
        return [self.rows(start, start + size) for start in starts]

    @property
    def token_ids(self) -> dict[str, Tensor]:
        """The integer arguments of shape (batch, length) that are neither masks nor labels."""
        return {
            name: part
            for name, part in self.arguments.items()
            if isinstance(part, Tensor)
            and part.ndim == 2
            and not part.is_floating_point()
            and part.dtype != torch.bool
            and not any(word in name for word in ("mask", "label", "position", "segment", "type"))
        }


def as_batch(batch: ClinicBatch | Inputs) -> ClinicBatch:
    """Return the batch itself, or inputs as a batch without targets."""
    return batch if isinstance(batch, ClinicBatch) else ClinicBatch(batch)


def call_model(model: nn.Module, batch: ClinicBatch) -> Any:
    """Return the model's own output for a batch."""
    if isinstance(batch.inputs, Tensor):
        return model(batch.inputs)
    if isinstance(batch.inputs, Mapping):
        return model(**batch.inputs)
    return model(*batch.inputs)


def step_operations(model: nn.Module, batch: ClinicBatch) -> float:
    """Return the operations of a step, forward and back: 6 for each matrix weight and position."""
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    return 6.0 * weights * sum(math.prod(tensor.shape[:2]) for tensor in batch.tensors)


def answer_of(output: Any) -> Tensor:
    """Return the tensor in a model's output that holds its answers."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    values = output.values() if isinstance(output, Mapping) else output
    if isinstance(values, tuple | list) or isinstance(output, Mapping):
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
                return value
    raise InputError(
        f"a model must return a floating-point tensor, or an output that holds one: got "
        f"{type(output)}. Wrap it in a module that returns its logits."
    )


def is_tabular(model: nn.Module) -> bool:
    """Return whether integer inputs are category codes of columns, not tokens in an order."""
    return isinstance(getattr(model, "config", None), TabularConfig)


def is_causal(model: nn.Module) -> bool:
    """Return whether the configuration says that later positions are hidden."""
    config = getattr(model, "config", None)
    if isinstance(config, ModelConfig):
        return config.mode != "encoder"
    names = getattr(config, "architectures", None) or [type(model).__name__]
    return any("CausalLM" in name or "LMHeadModel" in name for name in names)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; restore weights, gradients, buffers, modes and RNG state after."""
    modes = {module: module.training for module in model.modules()}
    grads = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers()}
    versions = {p: p._version for p in model.parameters()}
    weights = {p: p.detach().clone() for p in model.parameters()}
    rng_state = torch.get_rng_state()
    model.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_rng_state(rng_state)
        with torch.no_grad():
            for parameter, value in weights.items():
                if parameter._version != versions[parameter]:
                    parameter.copy_(value)
            for buffer, value in buffers.items():
                buffer.copy_(value)
        for parameter, grad in grads.items():
            parameter.grad = grad
        for module, mode in modes.items():
            module.training = mode


# ── Whether answers depend on later tokens ────────────────────────────────────────────────────────


def answered_ids(model: nn.Module, batch: ClinicBatch) -> tuple[str, Tensor, Tensor] | None:
    """Return name and value of the last ids with one answer for each, and the answers."""
    answer = answer_of(call_model(model, batch))
    fit = [(n, ids) for n, ids in batch.token_ids.items() if ids.shape == answer.shape[:2]]
    return (*fit[-1], answer) if fit and answer.ndim == 3 else None


def different_ids(ids: Tensor) -> Tensor:
    """Return ids that occur in `ids` and differ from it at every position."""
    known = torch.unique(ids)
    if len(known) < 2:
        return (ids - 1).abs()
    return known[(torch.searchsorted(known, ids.contiguous()) + 1) % len(known)]


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """Return the largest change at each position, relative to the standard deviation of all."""
    deviation = before.float().std().clamp(min=1e-12)
    return (before.float() - after.float()).abs().amax(dim=-1) / deviation


@torch.no_grad()
def sees_future(model: nn.Module, batch: ClinicBatch) -> bool | None:
    """Return whether changing the second half of the tokens moves an answer in the first half."""
    answered = answered_ids(model, batch)
    if answered is None or answered[1].shape[1] < 2:
        return None
    name, ids, answer = answered
    half = ids.shape[1] // 2
    changed = torch.cat((ids[:, :half], different_ids(ids)[:, half:]), dim=1)
    after = answer_of(call_model(model, batch.replace({name: changed})))
    return bool((relative_change(answer, after)[:, :half] > MIN_CHANGE).any())


# ── The loss ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Objective:
    """The loss that is minimised, and its description.

    Parameters
    ----------
    loss : from the model's output and the batch's targets to a scalar.
    description : what the loss is, in a few words.
    cross_entropy : whether the loss of a uniform answer is the log of the number of classes.
    random_targets : whether the targets are drawn at random for one batch, so that nothing learnt
        from it holds for another.
    by_rows : whether the loss can be measured for some of the rows, not only for whole batches.
    """

    loss: Loss
    description: str
    cross_entropy: bool = False
    random_targets: bool = False
    by_rows: bool = True

    def __call__(self, model: nn.Module, batch: ClinicBatch) -> Tensor:
        return self.value(call_model(model, batch), batch)

    def split(self, batch: ClinicBatch, count: int) -> list[ClinicBatch]:
        """Return `count` parts of a batch, or the batch itself if the loss is not by rows."""
        return batch.split(count) if self.by_rows else [batch]

    def value(self, output: Any, batch: ClinicBatch) -> Tensor:
        """Return the loss of the model's output for a batch."""
        targets = batch.inputs if batch.targets is None else batch.targets
        try:
            loss = self.loss(output, targets)
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"the loss must also work for {batch.row_count} rows of the batch: {error}. If it "
                "compares with fixed targets, pass them with the batch: ClinicBatch(inputs, "
                "targets)."
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InputError(
                "the loss must be one number for a batch: "
                f"got {tuple(loss.shape) if isinstance(loss, Tensor) else type(loss)}. "
                "Try its mean."
            )
        return loss.reshape(())


def choose_objective(
    model: nn.Module, batch: ClinicBatch, loss: Objective | Loss | None
) -> Objective:
    """Return the loss passed in, else the model's own, else one that suits the answer's shape."""
    if isinstance(loss, Objective):
        return loss
    if loss is not None:
        return Objective(loss, "the loss passed in")
    with torch.no_grad():
        output = call_model(model, batch)
    if isinstance(getattr(output, "loss", None), Tensor):
        own = "the model's own loss"
        return Objective(lambda output, inputs: output.loss, own, cross_entropy=True)
    answer = answer_of(output)
    ids = [] if is_tabular(model) else list(batch.token_ids.values())
    aligned = answer.ndim == 3 and bool(ids) and ids[-1].shape == answer.shape[:2]
    if aligned and int(ids[-1].max()) < answer.shape[-1] and _returns_logits(model, answer):
        return _token_objective(model, batch)
    if answer.ndim == 2 and answer.shape[1] > 1:
        name = "cross-entropy against classes drawn at random"
        return Objective(_random_classes, name, cross_entropy=True, random_targets=True)
    name = "half the mean squared distance from noise"
    return Objective(_distance_from_noise, name, random_targets=True)


def _random_classes(output: Any, inputs: Inputs) -> Tensor:
    answer, generator = answer_of(output), torch.Generator().manual_seed(0)
    classes = torch.randint(answer.shape[1], answer.shape[:1], generator=generator)
    return F.cross_entropy(answer.float(), classes)


def _distance_from_noise(output: Any, inputs: Inputs) -> Tensor:
    answer, generator = answer_of(output), torch.Generator().manual_seed(0)
    return (answer.float() - torch.randn(answer.shape, generator=generator)).pow(2).mean() / 2


def _returns_logits(model: nn.Module, answer: Tensor) -> bool:
    config = getattr(model, "config", None)
    width = getattr(config, "width", getattr(config, "hidden_size", None))
    return answer.shape[-1] != width or getattr(config, "head", "") in ("token", "masked")


def _token_objective(model: nn.Module, batch: ClinicBatch) -> Objective:
    """Return the cross-entropy of next tokens, or of the tokens themselves if not causal."""
    config = getattr(model, "config", None)
    pad = getattr(config, "pad", getattr(config, "pad_token_id", None))
    shift = 0 if sees_future(model, batch) and not is_causal(model) else 1

    def loss(output: Any, inputs: Inputs) -> Tensor:
        ids = list(ClinicBatch(inputs).token_ids.values())[-1]
        logits = answer_of(output)[:, : ids.shape[1] - shift]
        ignore = -100 if pad is None else pad  # the mean is over what is not padding
        targets = ids[:, shift:].flatten().long()
        return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=ignore)

    name = "the next token" if shift else "the tokens themselves"
    return Objective(loss, f"cross-entropy of {name}", cross_entropy=True)
