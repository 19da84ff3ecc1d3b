"""Experiments: change the input and measure which answers move.

Masks that leak, padding that is attended to, rows that see each other, a source that is not read,
labels that are off by one: the shapes are right and the loss falls, so only an experiment shows
them. None of them depends on the code of the model. An experiment that the batch does not allow
raises `NotExamined` with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from addnorm.clinic.answer_experiments import (
    only_token_read,
    places_of_image_unread,
    reads_own_label,
)
from addnorm.clinic.call_model import (
    ClinicBatch,
    NotExamined,
    Objective,
    answer_of,
    call_model,
    deviation_of,
    different_ids,
    is_tabular,
    relative_change,
    require_tokens,
    sees_future,
)
from addnorm.clinic.label_experiments import LabelFacts, read_labels
from addnorm.clinic.padding_experiments import padding_change, padding_shift
from addnorm.clinic.position_experiments import (
    reads_own_token,
    swappable_positions,
    token_share,
    unread_neighbours,
)
from addnorm.clinic.residual_trace import trace_stream

ROW_CHANGE = 1e-3
"""Relative change of one row's answers beyond rounding when the others change."""


@dataclass(frozen=True)
class ExperimentResults:
    """Results of the experiments; None where one was not possible.

    Parameters
    ----------
    sees_future : whether an answer moves when a later token of the same sequence changes
    padding_change : change of the answers at real positions when padding is changed or removed,
        relative to their standard deviation
    padding_shift : the same when padding on the left is removed, although its content has no effect
    swappable_positions : positions p whose token may be swapped with that at p + 1 without effect
        on later ones
    unread_neighbours : positions whose answer does not depend on the token before
    future_in_statistics : whether answers move with later tokens while batch norms train
    token_share : share of the variance of the first block's input that depends on the tokens
    labels : the targets, as the gradient of the loss shows them
    reads_own_token : whether the answer at the last position moves with the token there
    row_change : change of a row's answers when the other rows of the batch change
    source_change : change of the decoder's answers when the encoder's input changes
    dropout : the largest dropout probability in training mode, and its module
    only_token_read : `first` or `last`, if one answer for a row reads that token alone; else ""
    reads_own_label : whether an answer moves with the label that it is compared with
    places_unread : whether an image may be rolled without effect on its answer
    not_examined : why an experiment was not possible, by the name of its check
    """

    sees_future: bool | None = None
    padding_change: float | None = None
    padding_shift: float | None = None
    swappable_positions: tuple[int, ...] | None = None
    unread_neighbours: tuple[int, ...] | None = None
    future_in_statistics: bool | None = None
    token_share: float | None = None
    labels: LabelFacts | None = None
    reads_own_token: bool | None = None
    row_change: float | None = None
    source_change: float | None = None
    dropout: tuple[float, str] | None = None
    only_token_read: str | None = None
    reads_own_label: bool | None = None
    places_unread: bool | None = None
    not_examined: dict[str, str] = field(default_factory=dict)

    @property
    def label_shift(self) -> int | None:
        """The labels at t are the tokens at t + shift; None if no shift fits."""
        return None if self.labels is None else self.labels.shift


def run_experiments(
    model: nn.Module, batch: ClinicBatch, objective: Objective, pad: int | None
) -> ExperimentResults:
    """Run every experiment that the batch allows; one that fails does not end the others.

    Parameters
    ----------
    model : the model, in evaluation mode
    batch : what it is called with
    objective : the loss, for the labels
    pad : the id of padding, if known
    """
    labels, reason = _run_experiment(lambda: read_labels(model, batch, objective, pad))
    if labels is not None and labels.length_first:
        model, batch = _BatchFirst(model), _transposed(batch)
    experiments: dict[str, tuple[str, Callable[[], Any]]] = {
        "own token": ("reads_own_token", lambda: reads_own_token(model, batch)),
        "future": ("sees_future", lambda: _future(model, batch)),
        "padding": ("padding_change", lambda: padding_change(model, batch, pad)),
        "left padding": ("padding_shift", lambda: padding_shift(model, batch, pad)),
        "positions": ("swappable_positions", lambda: swappable_positions(model, batch)),
        "neighbours": ("unread_neighbours", lambda: unread_neighbours(model, batch)),
        "future in statistics": (
            "future_in_statistics",
            lambda: future_in_statistics(model, batch),
        ),
        "token embeddings": ("token_share", lambda: token_share(model, batch)),
        "rows of the batch": ("row_change", lambda: row_change(model, batch)),
        "source": ("source_change", lambda: source_change(model, batch)),
        "training mode": ("dropout", lambda: training_dropout(model, batch)),
        "tokens read": ("only_token_read", lambda: only_token_read(model, batch)),
        "own label": ("reads_own_label", lambda: reads_own_label(model, batch)),
        "places": ("places_unread", lambda: places_of_image_unread(model, batch)),
    }
    tabular = is_tabular(model)
    values: dict[str, Any] = {} if tabular else {"labels": labels}
    reasons: dict[str, str] = {"labels": reason} if reason else {}
    random = _is_random(model, batch)
    for check, (name, run) in experiments.items():
        if tabular and check != "training mode":
            reasons[check] = "the columns of a table have no order, and its rows may see each other"
            continue
        if random and check != "training mode":
            reasons[check] = "the answers are random in evaluation mode, too"
            continue
        value, reason = _run_experiment(run)
        if reason:
            reasons[check] = reason
        else:
            values[name] = value
    if tabular:
        reasons["labels"] = reasons["future"]
    reasons.pop("own token", None)  # asked by the rule of the labels only
    reasons.pop("own label", None)  # a part of the labels
    reasons.pop("future in statistics", None)  # a part of the training mode
    if reasons.pop("places", None) is None:
        reasons.pop("positions", None)  # of an image, not of tokens
    return ExperimentResults(**values, not_examined=reasons)


def _run_experiment(run: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of an experiment, or None and the reason why there is none."""
    try:
        with torch.no_grad():
            return run(), ""
    except NotExamined as reason:
        return None, str(reason)
    except Exception as error:  # of the model's own code: the other experiments go on
        return None, f"the experiment failed: {type(error).__name__}: {_first_line_of(error)}"


class _BatchFirst(nn.Module):
    """A model of (length, rows), called with (rows, length)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        positional = [_swap(each) for each in args]
        output = self.model(*positional, **{name: _swap(each) for name, each in kwargs.items()})
        return _swap(answer_of(output))


def _swap(value: Any) -> Any:
    return value.transpose(0, 1) if isinstance(value, Tensor) and value.ndim > 1 else value


def _transposed(batch: ClinicBatch) -> ClinicBatch:
    return batch.replace({name: _swap(each) for name, each in batch.arguments.items()})


@torch.no_grad()
def _is_random(model: nn.Module, batch: ClinicBatch) -> bool:
    """Return whether two calls with the same batch give different answers."""
    one, two = (answer_of(call_model(model, batch)) for _ in range(2))
    return one.shape != two.shape or not torch.equal(one.nan_to_num(), two.nan_to_num())


def _first_line_of(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0][:160]


def _future(model: nn.Module, batch: ClinicBatch) -> bool:
    require_tokens(batch)
    result = sees_future(model, batch)
    if result is None:
        raise NotExamined("there is not one answer for each token, or only one token")
    return result


def future_in_statistics(model: nn.Module, batch: ClinicBatch) -> bool:
    """Return whether an answer moves with a later token while the batch norms are in training."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        raise NotExamined("no module norms over the batch")
    buffers = {buffer: buffer.clone() for norm in norms for buffer in norm.buffers()}
    for norm in norms:
        norm.train()
    try:
        return _future(model, batch)
    finally:
        for norm in norms:
            norm.eval()
        for buffer, value in buffers.items():
            buffer.copy_(value)


# ── Rows and sources ──────────────────────────────────────────────────────────────────────────────


def _changed(argument: Tensor, where: Tensor) -> Tensor:
    """Return an argument with other content where `where` (broadcast) is true."""
    if argument.is_floating_point():
        other = -argument
    else:
        other = different_ids(argument.reshape(argument.shape[0], -1)).reshape(argument.shape)
    return torch.where(where, other.to(argument.dtype), argument)


def _content_of(batch: ClinicBatch) -> dict[str, Tensor]:
    """Return the arguments that hold content: token ids, else floating-point tensors."""
    floats = {
        name: a
        for name, a in batch.arguments.items()
        if isinstance(a, Tensor) and a.is_floating_point() and a.ndim > 1 and "mask" not in name
    }
    return {**batch.token_ids, **floats}


def _moved(model: nn.Module, batch: ClinicBatch, axis: int) -> float:
    """Return how far the first answers along an axis move when all other content along it does."""
    content = _content_of(batch)
    size = next(iter(content.values())).shape[axis]
    changes = {}
    for name, argument in content.items():
        if argument.ndim > axis and argument.shape[axis] == size:
            index = torch.arange(size, device=argument.device) > 0
            shape = [1] * argument.ndim
            shape[axis] = size
            changes[name] = _changed(argument, index.view(shape))
    before = answer_of(call_model(model, batch))
    after = answer_of(call_model(model, batch.replace(changes)))
    if before.shape != after.shape or before.ndim <= axis or before.shape[axis] != size:
        raise NotExamined("the answers do not have the rows of the batch")
    deviation = deviation_of(before)
    first = (before.float() - after.float()).select(axis, 0).abs().flatten()
    first = first[first.isfinite()]
    return float(first.max() / deviation) if len(first) else 0.0


def row_change(model: nn.Module, batch: ClinicBatch) -> float:
    """Return how far a row's answers move when the other rows of the batch change.

    Where the batch may be (length, rows), the rows are those that do not see each other.
    """
    content = _content_of(batch)
    if not content or batch.row_count < 2:
        raise NotExamined("the batch has fewer than two rows")
    answer = answer_of(call_model(model, batch))
    if answer.ndim == 2 and answer.shape == (batch.row_count, batch.row_count):
        raise NotExamined("the answers compare the rows of the batch")
    change = _moved(model, batch, 0)
    first = next(iter(content.values()))
    if change <= ROW_CHANGE or first.ndim < 2 or batch.token_ids or first.ndim == 4:
        return change
    if answer.ndim < 3:
        return change
    return min(change, _moved(model, batch, 1))


def source_change(model: nn.Module, batch: ClinicBatch) -> float:
    """Return how far the decoder's answers move when only the encoder's input changes."""
    content = _content_of(batch)
    labels = batch.arguments.get("labels")
    own = next(iter(content.values())).shape[:2] if content else None
    if len(content) == 1 and isinstance(labels, Tensor) and labels.shape[:2] != own:
        content["labels"] = labels  # of another length: the decoder's input is made from them
    if len(content) < 2:
        raise NotExamined("the model has no source beside its input")
    source, argument = next(iter(content.items()))
    answer = answer_of(call_model(model, batch))
    last = list(content.values())[-1]
    if answer.ndim != 3 or answer.shape[:2] != last.shape[:2]:
        raise NotExamined("there is not one answer for each token of the decoder")
    other = batch.replace({source: _changed(argument, torch.ones_like(argument, dtype=torch.bool))})
    after = answer_of(call_model(model, other))
    return float(relative_change(answer, after).max())


def training_dropout(model: nn.Module, batch: ClinicBatch) -> tuple[float, str]:
    """Return the largest dropout probability of a forward pass in training mode, and its module."""
    model.train()
    try:
        share, path = trace_stream(model, batch, sites_only=True).dropouts
    finally:
        model.eval()
    for name, module in model.named_modules():  # those that draw their own random bits
        p = getattr(module, "p", 0.0)
        if "dropout" in type(module).__name__.lower() and isinstance(p, float) and p > share:
            share, path = p, name
    return share, path
