"""Call any model with any batch, for its output and its loss, and leave the model unchanged.

The inputs are what the model is called with: a tensor, a tuple of positional arguments, or a
dictionary of named ones. The answer is the floating-point tensor that the model returns, or the
`logits` of what it returns.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.config import ModelConfig
from addnorm.cpu import require_bfloat16
from addnorm.errors import InputError
from addnorm.models.tabular import TabularConfig

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Loss = Callable[[Any, Any], Tensor]
"""From the model's output and the batch's targets (its inputs, if it has none) to a scalar."""
NOT_TOKENS = ("mask", "label", "position", "segment", "type", "length")
"""Words in the names of integer arguments that hold no token ids."""
MIN_CHANGE = 1e-4
"""Change of an answer, relative to the standard deviation of all answers, beyond rounding."""


class NotExamined(Exception):
    """An experiment was not possible; the message says why."""


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
            and name != "targets"
            and not any(word in name for word in NOT_TOKENS)
        }


def as_batch(batch: ClinicBatch | Inputs) -> ClinicBatch:
    """Return the batch itself, or inputs as a batch without targets."""
    if isinstance(batch, ClinicBatch):
        return batch
    if not isinstance(batch, Tensor | tuple | list | Mapping):
        raise InputError(
            "a batch must be a tensor, a tuple of positional arguments, a dictionary of named ones "
            f"or a ClinicBatch: got {type(batch).__name__}. Try torch.as_tensor."
        )
    return ClinicBatch(batch)


def require_same_form(batches: Sequence[ClinicBatch]) -> None:
    """Raise an InputError if a batch has other arguments, or of other types, than the first."""
    first = _form_of(batches[0])
    for number, batch in enumerate(batches[1:]):
        if _form_of(batch) != first:
            raise InputError(
                f"every one of more_batches must have the form of the batch, {first}: number "
                f"{number} has {_form_of(batch)}."
            )


def _form_of(batch: ClinicBatch) -> dict[str, str]:
    return {
        name: f"{part.dtype}, {part.ndim} axes" if isinstance(part, Tensor) else type(part).__name__
        for name, part in batch.arguments.items()
    }


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


_ANSWER: ContextVar[str | None] = ContextVar("answer", default=None)
"""Which of several tensors in the output holds the answers, while a model is examined."""


def answer_of(output: Any) -> Tensor:
    """Return the tensor in a model's output that holds its answers."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    candidates = _answers(output)
    chosen = candidates.get(_ANSWER.get() or "")
    if chosen is not None:
        return chosen
    if candidates:
        return next(iter(candidates.values()))
    raise InputError(
        f"a model must return a floating-point tensor, or an output that holds one: got "
        f"{type(output)}. Wrap it in a module that returns its logits."
    )


def _answers(output: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors of an output, by name or number."""
    if isinstance(output, Mapping):
        named = dict(output)
    elif isinstance(output, tuple | list):
        named = {str(i): value for i, value in enumerate(output)}
    else:
        named = {}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
    }


def own_loss(output: Any) -> Tensor | None:
    """Return the loss that a model computes itself: `loss`, or the one number of its output."""
    if isinstance(getattr(output, "loss", None), Tensor):
        loss: Tensor = output.loss
        return loss
    if isinstance(output, Mapping):
        named = output.get("loss")
        return named if isinstance(named, Tensor) and named.numel() == 1 else None
    if isinstance(output, tuple | list):
        numbers = [v for v in output if isinstance(v, Tensor) and v.ndim == 0]
        return numbers[0] if len(numbers) == 1 and numbers[0].is_floating_point() else None
    return None


@contextmanager
def chosen_answer(model: nn.Module, batch: ClinicBatch) -> Iterator[None]:
    """Within, `answer_of` returns the last of the output's tensors: the one made of the others.

    Of (hidden, logits) these are the logits: their gradient reaches the hidden states.
    """
    with torch.enable_grad():
        candidates = _answers(call_model(model, batch))
    name = None
    for each, tensor in candidates.items() if len(candidates) > 1 else ():
        others = [t for other, t in candidates.items() if other != each and t.requires_grad]
        if not (tensor.requires_grad and others):
            continue
        grads = torch.autograd.grad(tensor.sum(), others, retain_graph=True, allow_unused=True)
        if any(grad is not None for grad in grads):
            name = each
    token = _ANSWER.set(name)
    try:
        yield
    finally:
        _ANSWER.reset(token)


# ── Wrapped models, incomplete batches ────────────────────────────────────────────────────────────


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile, DataParallel or DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(
            model, nn.DataParallel | nn.parallel.DistributedDataParallel
        ):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def complete_batch(model: nn.Module, batch: ClinicBatch) -> ClinicBatch:
    """Return a batch of labels for an encoder-decoder with the decoder's input beside them.

    Models of transformers derive it from the labels themselves, where no experiment could reach it.
    """
    config, arguments = getattr(model, "config", None), batch.arguments
    labels = arguments.get("labels")
    known = {"decoder_input_ids", "decoder_inputs_embeds"} & set(arguments)
    if known or not isinstance(labels, Tensor) or labels.ndim != 2:
        return batch
    if not getattr(config, "is_encoder_decoder", False):
        return batch
    start = getattr(config, "decoder_start_token_id", None)
    pad = getattr(config, "pad_token_id", None)
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if start is None or pad is None:
        return batch
    if prepare is not None:
        ids = prepare(labels=labels)
    else:
        first = torch.full_like(labels[:, :1], start)
        ids = torch.cat((first, labels[:, :-1]), dim=1).masked_fill_(
            torch.cat((first, labels[:, :-1]), dim=1) == -100, pad
        )
    return ClinicBatch({**arguments, "decoder_input_ids": ids}, batch.targets)


def require_fit(model: nn.Module, batch: ClinicBatch) -> None:
    """Raise an InputError if the model cannot be called with the batch."""
    for parameter in model.parameters():
        require_bfloat16(parameter.device.type, str(parameter.dtype).removeprefix("torch."))
    try:
        with torch.no_grad():
            call_model(model, batch)
    except Exception as error:  # whatever the model's own code raises
        shapes = ", ".join(
            f"{name} {tuple(a.shape) if isinstance(a, Tensor) else type(a).__name__}"
            for name, a in batch.arguments.items()
        )
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise InputError(
            f"the batch must be what {type(model).__name__}.forward takes: got {shapes}, and the "
            f"model raised {type(error).__name__}: {reason}. Pass a tensor, a tuple of positional "
            "arguments, or a dictionary of named ones."
        ) from error


def is_tabular(model: nn.Module) -> bool:
    """Return whether integer inputs are category codes of columns, not tokens in an order."""
    return isinstance(getattr(model, "config", None), TabularConfig)


def is_causal(model: nn.Module) -> bool:
    """Return whether the configuration says that later positions are hidden."""
    config = getattr(model, "config", None)
    if isinstance(config, ModelConfig):
        return config.mode != "encoder"
    names = getattr(config, "architectures", None) or [type(model).__name__]
    causal = ("CausalLM" in name or "LMHeadModel" in name for name in names)
    return any(causal) and not any("XLNet" in name for name in names)  # which sees all tokens


def padding_id(model: nn.Module) -> int | None:
    """Return the id of padding in the model's configuration."""
    config = getattr(model, "config", None)
    pad: int | None = getattr(config, "pad", getattr(config, "pad_token_id", None))
    return pad


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; restore weights, gradients, buffers, modes and RNG state after.

    Within, nothing is compiled and activations are not recomputed (reentrant checkpointing has no
    gradients of single tensors). The RNG state of every device of the model is restored.
    """
    modes = {module: module.training for module in model.modules()}
    grads = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers()}
    versions = {p: p._version for p in model.parameters()}
    weights = {p: p.detach().clone() for p in model.parameters()}
    model.eval()
    try:
        with ExitStack() as stack:
            for kind, indices in _accelerators(model).items():
                stack.enter_context(torch.random.fork_rng(indices, device_type=kind))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(plain_execution())
            stack.enter_context(torch.enable_grad())
            yield
    finally:
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


def _accelerators(model: nn.Module) -> dict[str, list[int]]:
    """Return the indices of the devices of a model that have an RNG of their own, by kind."""
    devices: dict[str, set[int]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            devices.setdefault(tensor.device.type, set()).add(tensor.device.index or 0)
    return {kind: sorted(indices) for kind, indices in devices.items()}


@contextmanager
def plain_execution() -> Iterator[None]:
    """Run compiled functions as they are written, and checkpointed ones without recomputation."""
    from torch.utils.checkpoint import CheckpointFunction

    def call(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        # As there: no gradient comes out if none goes in, whatever weights are used within.
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        ):
            return function(*args)

    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its padded rows are NaN
    original = CheckpointFunction.__dict__.get("apply")
    CheckpointFunction.apply = staticmethod(call)  # type: ignore[method-assign]
    try:
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # else nothing has been compiled
                stance = torch.compiler.set_stance("force_eager")
                stack.enter_context(stance)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        if original is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = original  # type: ignore[method-assign]


def require_tokens(batch: ClinicBatch) -> None:
    """Raise NotExamined if the batch holds no token ids."""
    if not batch.token_ids:
        raise NotExamined("the batch holds no token ids")


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
    return (before.float() - after.float()).abs().amax(dim=-1) / deviation_of(before)


def deviation_of(answer: Tensor) -> Tensor:
    """Return the standard deviation of the answers that are finite; padding may not be."""
    values = answer.detach().float()
    values = values[values.isfinite()]
    return (values.std() if len(values) > 1 else values.new_zeros(())).clamp(min=1e-12)


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
    moved = relative_change(answer, after) > MIN_CHANGE
    mask = batch.arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        moved &= mask != 0  # a padded position may see anything
    return bool(moved[:, :half].any())


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
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise InputError(
                f"the loss must also work for {batch.row_count} rows of the batch, as a function "
                f"of output and targets: {str(error).rstrip('.')}. If it "
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
    model: nn.Module,
    batch: ClinicBatch,
    loss: Objective | Loss | None,
    pad: int | None = None,
) -> Objective:
    """Return the loss passed in, else the model's own, else one that suits the answer's shape.

    Parameters
    ----------
    model, batch : the model, and what it is called with
    loss : the loss passed in, if any
    pad : the id of padding, which a loss that is chosen here does not count
    """
    if isinstance(loss, Objective):
        return loss
    if loss is not None:
        return Objective(loss, "the loss passed in")
    with torch.no_grad():
        output = call_model(model, batch)
    if own_loss(output) is not None:
        own = "the model's own loss"
        return Objective(lambda output, inputs: own_loss(output), own, cross_entropy=True)  # type: ignore[arg-type, return-value]
    answer = answer_of(output)
    ids = [] if is_tabular(model) else list(batch.token_ids.values())
    aligned = answer.ndim == 3 and bool(ids) and ids[-1].shape == answer.shape[:2]
    if aligned and int(ids[-1].max()) < answer.shape[-1] and _returns_logits(model, answer):
        return _token_objective(model, batch, padding_id(model) if pad is None else pad)
    if answer.ndim == 2 and answer.shape[1] > 1:
        name = "cross-entropy against classes drawn at random"
        return Objective(_random_classes, name, cross_entropy=True, random_targets=True)
    name = "half the mean squared distance from noise"
    return Objective(_distance_from_noise, name, random_targets=True)


def _random_classes(output: Any, inputs: Inputs) -> Tensor:
    answer, generator = answer_of(output), torch.Generator().manual_seed(0)
    classes = torch.randint(answer.shape[1], answer.shape[:1], generator=generator, device="cpu")
    return F.cross_entropy(answer.float(), classes.to(answer.device))


def _distance_from_noise(output: Any, inputs: Inputs) -> Tensor:
    answer, generator = answer_of(output), torch.Generator().manual_seed(0)
    noise = torch.randn(answer.shape, generator=generator, device="cpu").to(answer.device)
    return (answer.float() - noise).pow(2).mean() / 2


def _returns_logits(model: nn.Module, answer: Tensor) -> bool:
    config = getattr(model, "config", None)
    width = getattr(config, "width", getattr(config, "hidden_size", None))
    return answer.shape[-1] != width or getattr(config, "head", "") in ("token", "masked")


def _token_objective(model: nn.Module, batch: ClinicBatch, pad: int | None) -> Objective:
    """Return the cross-entropy of next tokens, or of the tokens themselves if not causal."""
    shift = 0 if sees_future(model, batch) and not is_causal(model) else 1

    def loss(output: Any, inputs: Inputs) -> Tensor:
        arguments = ClinicBatch(inputs).arguments
        ids = list(ClinicBatch(inputs).token_ids.values())[-1]
        logits = answer_of(output)[:, : ids.shape[1] - shift]
        targets = ids.long() if pad is None else ids.long().masked_fill(ids == pad, -100)
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            targets = targets.masked_fill(mask == 0, -100)
        # The mean is over what is not padding.
        return F.cross_entropy(logits.flatten(0, 1).float(), targets[:, shift:].flatten())

    name = "the next token" if shift else "the tokens themselves"
    return Objective(loss, f"cross-entropy of {name}", cross_entropy=True)
