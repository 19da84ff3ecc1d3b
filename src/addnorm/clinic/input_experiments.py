"""Experiments: change the input and measure which answers move.

Masks that leak, padding that is attended to, rows that see each other, a source that is not read,
labels that are off by one: the shapes are right and the loss falls, so only an experiment shows
them. None of them depends on the code of the model. An experiment that the batch does not allow
raises `NotExamined` with the reason.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.answer_experiments import (
    only_token_read,
    places_of_image_unread,
    reads_own_label,
)
from addnorm.clinic.call_model import (
    MIN_CHANGE,
    ClinicBatch,
    NotExamined,
    Objective,
    answer_of,
    answered_ids,
    call_model,
    deviation_of,
    different_ids,
    is_tabular,
    relative_change,
    sees_future,
)
from addnorm.clinic.residual_trace import trace_stream

MIN_CHANGE_FLOAT32 = 1e-5
"""Relative change in float32 beyond rounding, where the model cannot be run in float64."""
MIN_CHANGE_FLOAT64 = 1e-10
"""Relative change in float64 beyond rounding: small initial weights make small differences."""
ROW_CHANGE = 1e-3
"""Relative change of one row's answers beyond rounding when the others change."""


@dataclass(frozen=True)
class LabelFacts:
    """What the gradient of the loss in the answers says about the targets.

    Parameters
    ----------
    shift : the labels at t are the tokens at t + shift; None if no shift fits
    other_rows : whether they are the tokens of other rows of the batch
    padding : share of the padded positions whose answers the loss counts; None without padding
    probabilities : whether the answers sum to 1 and the loss applies a softmax to them again
    smoothing : label smoothing of a cross-entropy; None if the loss is another
    unnormalised : whether the loss is −logit of the target, without a softmax
    cross_entropy : whether the gradient is that of one: negative at one class of each answer
    length_first : whether the labels are shifted along the first axis: the batch is (length, rows)
    """

    shift: int | None = None
    other_rows: bool = False
    padding: float | None = None
    probabilities: bool = False
    smoothing: float | None = None
    unnormalised: bool = False
    cross_entropy: bool = False
    length_first: bool = False


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
    _require_tokens(batch)
    result = sees_future(model, batch)
    if result is None:
        raise NotExamined("there is not one answer for each token, or only one token")
    return result


def _require_tokens(batch: ClinicBatch) -> None:
    if not batch.token_ids:
        raise NotExamined("the batch holds no token ids")


# ── Padding ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Padded:
    """The row with the most padding: of which ids, which row, where it is real, on which side."""

    name: str
    row: int
    real: Tensor
    masked: bool
    """Whether an attention mask says so."""

    @property
    def on_the_right(self) -> bool:
        return not bool((self.real[: int(self.real.sum())] == 0).any())


def find_padding(batch: ClinicBatch, pad: int | None) -> _Padded:
    """Return the row with the most padding; raise NotExamined if there is none."""
    _require_tokens(batch)
    mask = batch.arguments.get("attention_mask")
    if pad is None and not isinstance(mask, Tensor):
        raise NotExamined("neither an attention mask nor the id of padding is known")
    for name, ids in batch.token_ids.items():
        own = isinstance(mask, Tensor) and mask.shape == ids.shape and "decoder" not in name
        if not own and pad is None:
            continue
        real = mask.bool() if own and isinstance(mask, Tensor) else _differs(ids, pad)
        counts = real.sum(dim=1)
        row = int(counts.argmin())
        if 0 < int(counts[row]) < ids.shape[1]:
            return _Padded(name, row, real[row], own)
    raise NotExamined("no row of the batch is padded")


def _differs(ids: Tensor, pad: int | None) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool) if pad is None else ids.ne(pad)


def padding_change(model: nn.Module, batch: ClinicBatch, pad: int | None) -> float:
    """Return how far the answers of the most padded row move when its padding changes.

    Under a mask, other tokens are put into the padding. Where it is on the right it is also
    removed, and the smaller change counts: a model may derive its mask from the tokens.
    """
    padded = find_padding(batch, pad)
    changes = []
    if padded.masked:
        changes.append(_change_by_content(model, batch, padded))
    if padded.on_the_right:
        changes.append(_change_by_removal(model, batch, padded))
    if not changes:
        change = _change_by_removal(model, batch, padded)
        if change > MIN_CHANGE:
            raise NotExamined("padding on the left, without an attention mask")
        changes.append(change)
    change = min(changes)
    per_token = answer_of(call_model(model, batch)).ndim == 3
    if change > MIN_CHANGE and per_token and not _is_attended(model, batch, padded):
        # The model derives its mask from the tokens that were changed; or a convolution, not
        # attention, reads its neighbours, as in ConvBERT.
        return 0.0
    return change


def padding_shift(model: nn.Module, batch: ClinicBatch, pad: int | None) -> float:
    """Return how far the answers move when padding on the left is removed."""
    padded = find_padding(batch, pad)
    if padded.on_the_right:
        raise NotExamined("the padding is on the right")
    return _change_by_removal(model, batch, padded)


def _change_by_content(model: nn.Module, batch: ClinicBatch, padded: _Padded) -> float:
    ids = batch.token_ids[padded.name]
    changed = ids.clone()
    known = torch.unique(ids[padded.row][padded.real])
    others = known[torch.arange(int((~padded.real).sum()), device=ids.device) % len(known)]
    changed[padded.row, ~padded.real] = others
    before = answer_of(call_model(model, batch))
    after = answer_of(call_model(model, batch.replace({padded.name: changed})))
    return _largest_change(before, after, padded, slice(None), _is_answered(model, batch, padded))


def _change_by_removal(model: nn.Module, batch: ClinicBatch, padded: _Padded) -> float:
    rows, length = batch.token_ids[padded.name].shape
    kept = slice(0, int(padded.real.sum()))
    if not padded.on_the_right:
        kept = slice(length - int(padded.real.sum()), length)
        if bool((padded.real[kept] == 0).any()):
            raise NotExamined("there is padding inside the sequence")
    alone: dict[str, Tensor] = {}
    for other, argument in batch.arguments.items():
        if isinstance(argument, Tensor) and argument.ndim and argument.shape[0] == rows:
            cut = argument[padded.row : padded.row + 1]
            same = argument.ndim > 1 and argument.shape[1] == length
            alone[other] = cut[:, kept] if same and _same_side(batch, other, padded.name) else cut
    before = answer_of(call_model(model, batch))
    after = answer_of(call_model(model, batch.replace(alone)))
    aligned = _is_answered(model, batch, padded)
    return _largest_change(before, after, padded, kept, aligned, alone=True)


def _is_answered(model: nn.Module, batch: ClinicBatch, padded: _Padded) -> bool:
    """Return whether there is one answer for each of the padded tokens."""
    answered = answered_ids(model, batch)
    return answered is not None and answered[0] == padded.name


def _largest_change(
    before: Tensor,
    after: Tensor,
    padded: _Padded,
    kept: slice,
    aligned: bool,
    *,
    alone: bool = False,
) -> float:
    """Return the largest change of a row's answers at its real positions."""
    one = before[padded.row : padded.row + 1]
    two = after if alone else after[padded.row : padded.row + 1]
    if aligned:
        where = padded.real[kept] if alone else padded.real
        one = one[:, kept] if alone else one
        if one.shape[1] != len(where) or two.shape[1] != len(where):
            raise NotExamined("the answers have another length without padding")
        one, two = one[:, where], two[:, where]
    if one.shape != two.shape:
        raise NotExamined("the answers have another shape without padding")
    deviation = deviation_of(before)
    change = ((one.float() - two.float()).abs() / deviation).flatten()
    if bool((one.isfinite() & ~two.isfinite()).any()):
        return math.inf  # without its padding, a row sees nothing at all
    return float(change[change.isfinite()].max()) if bool(change.isfinite().any()) else 0.0


def _is_attended(model: nn.Module, batch: ClinicBatch, padded: _Padded) -> bool:
    """Return whether attention gives weight to the padding of the padded row."""
    trace = trace_stream(model, batch, padding=~padded.real, row=padded.row)
    return trace.stats.padding_weight > 1e-6


def _same_side(batch: ClinicBatch, argument: str, ids: str) -> bool:
    """Return whether an argument belongs to the same sequence as these ids."""
    if isinstance(batch.inputs, Tensor) or not isinstance(batch.arguments.get(argument), Tensor):
        return True
    if argument.isdigit():
        return argument == ids
    has_decoder = any(name.startswith(("decoder", "target", "tgt")) for name in batch.arguments)
    if not has_decoder:
        return True
    sides = [name.startswith(("decoder", "target", "tgt", "label")) for name in (argument, ids)]
    return sides[0] == sides[1]


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


# ── Positions and tokens ──────────────────────────────────────────────────────────────────────────


def swappable_positions(model: nn.Module, batch: ClinicBatch, most: int = 4) -> tuple[int, ...]:
    """Return which neighbours can be swapped without changing the first attention behind them."""
    _require_tokens(batch)
    name, ids = next(iter(batch.token_ids.items()))
    if ids.shape[1] < 4:
        raise NotExamined("the sequences are shorter than 4 tokens")
    alone = batch.rows(0, 1)
    row = alone.arguments[name]
    branch = _first_attention(model, alone)
    if branch is None or branch.shape[1] != ids.shape[1] or not bool(branch.any()):
        raise NotExamined("no attention reads the tokens, or its branch starts at zero")
    others = _first_attention(model, alone.replace({name: different_ids(row)}))
    if others is not None and torch.equal(branch, others):
        raise NotExamined("the first attention does not depend on the tokens")
    swappable = []
    tried = 0
    for p in range(min(most, row.shape[1] - 3)):
        if int(row[0, p]) == int(row[0, p + 1]):
            continue
        tried += 1
        swapped = row.clone()
        swapped[:, p], swapped[:, p + 1] = row[:, p + 1], row[:, p]
        other = alone.replace({name: swapped})
        if _later_change(model, other, branch, p + 2) <= MIN_CHANGE and not (
            _differs_in_float64(model, alone, other, p + 2)
        ):
            changed = torch.cat((row[:, :p], different_ids(row)[:, p : p + 2], row[:, p + 2 :]), 1)
            if _later_change(model, alone.replace({name: changed}), branch, p + 2) > 0:
                swappable.append(p)  # else no later position sees them: local attention
    if not tried:
        raise NotExamined("the first tokens are all equal")
    return tuple(swappable)


def _later_change(model: nn.Module, other: ClinicBatch, branch: Tensor, start: int) -> float:
    """Return how far the first attention's branch moves from position `start` on."""
    after = _first_attention(model, other)
    return math.inf if after is None else float(relative_change(branch, after)[:, start:].max())


def _first_attention(model: nn.Module, batch: ClinicBatch) -> Tensor | None:
    sites = trace_stream(model, batch, until_attention=True).sites
    branch = next((site.branch for site in sites if site.role in ("attention", "parallel")), None)
    if branch is None or branch.ndim != 3:
        return None
    return branch.transpose(0, 1) if batch.row_count == 1 == branch.shape[1] else branch


def _differs_in_float64(
    model: nn.Module, batch: ClinicBatch, other: ClinicBatch, start: int
) -> bool:
    """Return whether the first attention's branch differs in float64, from position `start` on."""
    try:
        with _float64(model):
            one, two = (_first_attention(model, each) for each in (batch, other))
    except RuntimeError:  # a model that casts to float32 itself
        one = two = None
    if one is None or two is None or one.dtype != torch.float64 or not bool(one.isfinite().all()):
        one, two = (_first_attention(model, each) for each in (batch, other))
        if one is None or two is None:
            return False
        return float((one - two)[:, start:].abs().max() / one.std()) > MIN_CHANGE_FLOAT32
    return float((one - two)[:, start:].abs().max() / one.std()) > MIN_CHANGE_FLOAT64


@contextmanager
def _float64(model: nn.Module) -> Iterator[None]:
    """Convert the model to float64; restore its own tensors after."""
    every = [*model.parameters(), *model.buffers()]
    originals = [(tensor, tensor.data) for tensor in every if tensor.is_floating_point()]
    try:
        for tensor, data in originals:
            tensor.data = data.double()
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


def token_share(model: nn.Module, batch: ClinicBatch) -> float:
    """Return Var[x(ids) − x(other ids)] / (2 Var[x]) of the first block's input x.

    In an encoder-decoder, that of the stream in which the tokens have the largest share.
    """
    _require_tokens(batch)
    changes = {name: different_ids(ids) for name, ids in batch.token_ids.items()}
    before = _stream_starts(model, batch)
    after = _stream_starts(model, batch.replace(changes))
    if not before or [x.shape for x in before] != [x.shape for x in after]:
        raise NotExamined("no residual stream begins with the tokens")
    shares = []
    for one, two in zip(before, after, strict=True):
        total = float(one.float().var())
        shares.append(float((one.float() - two.float()).var()) / (2 * total) if total > 0 else 0.0)
    if max(shares) == 0.0 and _answers_move(model, batch, changes):
        raise NotExamined("the tokens are read by attention, the stream begins with something else")
    return max(shares)


def _answers_move(model: nn.Module, batch: ClinicBatch, changes: dict[str, Tensor]) -> bool:
    one, two = (answer_of(call_model(model, each)) for each in (batch, batch.replace(changes)))
    return one.shape != two.shape or not torch.equal(one.nan_to_num(), two.nan_to_num())


def reads_own_token(model: nn.Module, batch: ClinicBatch) -> bool:
    """Return whether the answer at the last position moves when only the token there changes."""
    answered = answered_ids(model, batch)
    if answered is None:
        raise NotExamined("there is not one answer for each token")
    name, ids, answer = answered
    changed = torch.cat((ids[:, :-1], different_ids(ids)[:, -1:]), dim=1)
    after = answer_of(call_model(model, batch.replace({name: changed})))
    return bool((relative_change(answer, after)[:, -1] > MIN_CHANGE).any())


def _stream_starts(model: nn.Module, batch: ClinicBatch) -> list[Tensor]:
    return [
        node.start
        for node in trace_stream(model, batch, sites_only=True).nodes
        if node.start is not None
    ]


# ── Labels, from the gradient of the loss ─────────────────────────────────────────────────────────


def read_labels(
    model: nn.Module, batch: ClinicBatch, objective: Objective, pad: int | None
) -> LabelFacts:
    """Return what each answer is compared with, read from the loss's gradient.

    The gradient of cross-entropy in the logits is softmax − target: negative at the target alone.

    Parameters
    ----------
    model : the model, in evaluation mode
    batch : what it is called with
    objective : the loss
    pad : the id of padding, if known
    """
    with torch.enable_grad():
        output = call_model(model, batch)
        answer = answer_of(output)
        loss = objective.value(output, batch)
        if not (loss.requires_grad and answer.requires_grad):
            raise NotExamined("the loss has no gradient in the answers")
        (gradient,) = torch.autograd.grad(loss, answer, allow_unused=True)
    if gradient is None:
        raise NotExamined("the loss does not depend on the answers")
    if objective.random_targets:
        raise NotExamined("no labels were passed: the targets are random")
    answer, gradient = answer.detach().float(), gradient.float()
    facts: dict[str, Any] = {
        "probabilities": _are_probabilities(answer, gradient),
        "smoothing": _label_smoothing(answer, gradient),
        "unnormalised": _is_unnormalised(answer, gradient),
        "cross_entropy": _is_cross_entropy(gradient),
    }
    answered = answered_ids(model, batch)
    if answered is None:
        return LabelFacts(**facts)
    _, ids, _ = answered
    has_target = (gradient < 0).any(dim=-1)
    facts["padding"] = _counted_padding(batch, gradient, pad)
    if int(ids.max()) < answer.shape[-1] and ids.shape[1] >= 4:
        targets = gradient.argmin(dim=-1)
        facts["shift"] = _shift_of(targets, has_target, ids)
        if facts["shift"] is None and ids.shape[0] >= 4:
            turned = (each.transpose(0, 1) for each in (targets, has_target, ids))
            facts["length_first"] = _shift_of(*turned) == 1 and not _mixes_columns(model, batch)
            facts["shift"] = 1 if facts["length_first"] else None
        if facts["shift"] is None:
            facts["other_rows"] = _are_of_other_rows(targets, has_target, ids)
    return LabelFacts(**facts)


def _mixes_columns(model: nn.Module, batch: ClinicBatch) -> bool:
    """Return whether answers in the second half of axis 1 move with tokens in the first half."""
    answered = answered_ids(model, batch)
    if answered is None:
        return True
    name, ids, answer = answered
    half = ids.shape[1] // 2
    changed = torch.cat((different_ids(ids)[:, :half], ids[:, half:]), dim=1)
    after = answer_of(call_model(model, batch.replace({name: changed})))
    return bool((relative_change(answer, after)[:, half:] > MIN_CHANGE).any())


def _shift_of(targets: Tensor, has_target: Tensor, ids: Tensor) -> int | None:
    """Return by how much the targets are the shifted tokens; None if no shift fits."""
    best, shift = 0.9, None
    for offset in (1, 0, 2, -1):
        here, there = _slices(ids.shape[1], offset)
        counted = has_target[:, here]
        if int(counted.sum()) < 4:
            continue
        same = float((targets[:, here] == ids[:, there])[counted].float().mean())
        if same > best:
            best, shift = same, offset
    return shift


def _slices(length: int, offset: int) -> tuple[slice, slice]:
    here = slice(max(0, -offset), length - max(0, offset))
    return here, slice(max(0, offset), length - max(0, -offset))


def _are_of_other_rows(targets: Tensor, has_target: Tensor, ids: Tensor) -> bool:
    """Return whether each row's targets are the shifted tokens of another row."""
    for offset in (1, 0):
        here, there = _slices(ids.shape[1], offset)
        best = []
        for row in range(len(ids)):
            counted = has_target[row, here]
            if int(counted.sum()) < 4:
                continue
            same = (targets[row, here] == ids[:, there])[:, counted].float().mean(dim=1)
            same[row] = 0.0
            best.append(float(same.max()))
        if len(best) > 1 and sum(best) / len(best) > 0.9:
            return True
    return False


def _counted_padding(batch: ClinicBatch, gradient: Tensor, pad: int | None) -> float | None:
    """Return the share of padded positions that the loss counts; one for each row is none.

    The last padding before a sequence may predict its first token.
    """
    try:
        name = find_padding(batch, pad).name
    except NotExamined:
        return None
    mask, ids = batch.arguments.get("attention_mask"), batch.token_ids[name]
    own = isinstance(mask, Tensor) and mask.shape == ids.shape
    real = mask.bool() if own and isinstance(mask, Tensor) else _differs(ids, pad)
    padding = ~real
    if padding.shape != gradient.shape[:2]:
        return None
    counted = (gradient.abs().amax(dim=-1) > 0) & padding
    several = counted & (counted.sum(dim=1, keepdim=True) > 1)
    return float(several.sum()) / max(int(padding.sum()), 1)


def _are_probabilities(answer: Tensor, gradient: Tensor) -> bool:
    """Return whether the answers are probabilities, and the loss moves all of them at once.

    −log p_target moves the target alone; a second softmax moves every class.
    """
    if answer.shape[-1] < 2 or float(answer.min()) < 0:
        return False
    if float((answer.sum(dim=-1) - 1).abs().max()) > 1e-3:
        return False
    counted = gradient.abs().amax(dim=-1) > 0
    return bool((gradient[counted] != 0).float().mean() > 0.9) if bool(counted.any()) else False


def _is_unnormalised(answer: Tensor, gradient: Tensor) -> bool:
    """Return whether the gradient is −1/n at one class of each row, and answers are no log p."""
    rows = gradient.flatten(0, -2)
    rows = rows[rows.abs().amax(dim=-1) > 0]
    if len(rows) < 2 or rows.shape[-1] < 2 or bool(((rows != 0).sum(dim=-1) != 1).any()):
        return False
    lowest = rows.amin(dim=-1)
    even = bool((lowest < 0).all()) and float(lowest.std()) < 1e-3 * float(lowest.abs().mean())
    return even and float(answer.logsumexp(dim=-1).abs().max()) > 1e-2


def _is_cross_entropy(gradient: Tensor) -> bool:
    """Return whether each answer's gradient sums to 0 and is negative at one class alone."""
    rows = gradient.flatten(0, -2)
    rows = rows[rows.abs().amax(dim=-1) > 0]
    if not len(rows) or rows.shape[-1] < 3:
        return False
    size = rows.abs().amax(dim=-1)
    one = ((rows < -1e-6 * size[:, None]).sum(dim=-1) == 1).float().mean()
    return bool(one > 0.9) and float((rows.sum(dim=-1).abs() / size).max()) < 1e-2


def _label_smoothing(answer: Tensor, gradient: Tensor) -> float | None:
    """Return ε of (1 − ε) one-hot + ε/K, from p − s g = ε/K at every class but the target.

    p is the softmax of the answers, g the gradient, s the number of targets that are averaged; s
    and ε are fitted by least squares. None if g is not that of a cross-entropy.
    """
    classes = answer.shape[-1]
    p, g = answer.softmax(dim=-1).flatten(0, -2), gradient.flatten(0, -2)
    counted = g.abs().amax(dim=-1) > 0
    p, g = p[counted].double(), g[counted].double()
    if classes < 8 or len(g) < 8 or float(g.sum(dim=-1).abs().max()) > 1e-3 * float(g.abs().max()):
        return None
    others = torch.ones_like(g, dtype=torch.bool).scatter_(1, g.argmin(dim=1, keepdim=True), False)
    x, y = g[others], p[others]
    for _ in range(3):  # where smoothing is large, the smallest gradient may not be the target's
        if float(x.var()) <= 1e-20:
            return None
        slope = ((x - x.mean()) * (y - y.mean())).mean() / ((x - x.mean()) ** 2).mean()
        left = y - slope * x
        off = (left - left.median()).abs()
        kept = off <= off.kthvalue(len(off) - max(1, round(1.2 * len(off) / classes))).values
        x, y, left = x[kept], y[kept], left[kept]
    if float(left.std()) > 0.05 * float(p.std()) + 1e-4:
        return None  # another loss, or weights of the classes
    return max(0.0, float(left.mean()) * classes)
