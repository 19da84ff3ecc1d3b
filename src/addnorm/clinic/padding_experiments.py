"""Experiments with padding: change it, remove it, and measure which answers move."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import (
    MIN_CHANGE,
    ClinicBatch,
    NotExamined,
    answer_of,
    answered_ids,
    call_model,
    deviation_of,
    require_tokens,
)
from addnorm.clinic.residual_trace import trace_stream

MIN_WEIGHT = 1e-6
"""Attention weight of padding, beyond rounding."""


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
    require_tokens(batch)
    mask = batch.arguments.get("attention_mask")
    if pad is None and not isinstance(mask, Tensor):
        raise NotExamined("neither an attention mask nor the id of padding is known")
    for name, ids in batch.token_ids.items():
        real, masked = real_tokens(batch, name, pad)
        counts = real.sum(dim=1)
        row = int(counts.argmin())
        if 0 < int(counts[row]) < ids.shape[1]:
            return _Padded(name, row, real[row], masked)
    raise NotExamined("no row of the batch is padded")


def real_tokens(batch: ClinicBatch, name: str, pad: int | None) -> tuple[Tensor, bool]:
    """Return where these ids are not padding, and whether their attention mask says so."""
    ids = batch.token_ids[name]
    mask = batch.arguments.get(f"{'decoder_' if 'decoder' in name else ''}attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return mask.bool(), True
    return torch.ones_like(ids, dtype=torch.bool) if pad is None else ids.ne(pad), False


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
    per_token = answer_of(call_model(model, batch)).ndim == 3 or _is_answered(model, batch, padded)
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
    kept = _real_end(padded)
    if bool((padded.real[kept] == 0).any()):
        raise NotExamined("there is padding inside the sequence")
    before = answer_of(call_model(model, batch))
    after = answer_of(call_model(model, _row_alone(batch, padded, kept)))
    aligned = _is_answered(model, batch, padded)
    return _largest_change(before, after, padded, kept, aligned, alone=True)


def _real_end(padded: _Padded) -> slice:
    """Return the end of the sequence that holds its tokens if there is no padding inside."""
    length, count = len(padded.real), int(padded.real.sum())
    return slice(0, count) if padded.on_the_right else slice(length - count, length)


def _row_alone(batch: ClinicBatch, padded: _Padded, kept: slice) -> ClinicBatch:
    """Return a batch of the padded row alone, with some of its positions."""
    rows, length = batch.token_ids[padded.name].shape
    alone: dict[str, Tensor] = {}
    for other, argument in batch.arguments.items():
        if isinstance(argument, Tensor) and argument.ndim and argument.shape[0] == rows:
            cut = argument[padded.row : padded.row + 1]
            same = argument.ndim > 1 and argument.shape[1] == length
            alone[other] = cut[:, kept] if same and _same_side(batch, other, padded.name) else cut
    return batch.replace(alone)


def _is_answered(model: nn.Module, batch: ClinicBatch, padded: _Padded) -> bool:
    """Return whether there is one answer for each of the padded tokens.

    Answers of (rows, length) may also be classes of whole rows: those are as many for fewer tokens.
    """
    answered = answered_ids(model, batch)
    if answered is not None:
        return answered[0] == padded.name
    answer = answer_of(call_model(model, batch))
    if answer.shape != batch.token_ids[padded.name].shape:
        return False
    kept = _real_end(padded)
    shorter = answer_of(call_model(model, _row_alone(batch, padded, kept)))
    return shorter.shape == (1, kept.stop - kept.start)


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
    """Return whether attention gives weight to the padding of the padded row.

    Raise NotExamined if the weights were not seen, as those of a kernel of its own, or if they are
    of (rows · heads, query, key) and only one of the two orders says so.
    """
    trace = trace_stream(model, batch, padding=~padded.real, row=padded.row)
    attended = [[w > MIN_WEIGHT for w in each] for each in trace.stats.padding_weights]
    if any(all(each) for each in attended):
        return True
    if not attended:
        raise NotExamined("answers move with the padding, but no attention weights were seen")
    if any(any(each) for each in attended):
        raise NotExamined("answers move with the padding, but which weights are a row's is unclear")
    return False


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
