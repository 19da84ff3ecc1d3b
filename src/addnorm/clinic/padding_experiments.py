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
        own = isinstance(mask, Tensor) and mask.shape == ids.shape and "decoder" not in name
        if not own and pad is None:
            continue
        real = mask.bool() if own and isinstance(mask, Tensor) else is_real(ids, pad)
        counts = real.sum(dim=1)
        row = int(counts.argmin())
        if 0 < int(counts[row]) < ids.shape[1]:
            return _Padded(name, row, real[row], own)
    raise NotExamined("no row of the batch is padded")


def is_real(ids: Tensor, pad: int | None) -> Tensor:
    """Return where ids are not padding."""
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
