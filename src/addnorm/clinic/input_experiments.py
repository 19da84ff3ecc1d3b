"""Experiments: change the input and measure which answers move.

Masks that leak, padding that is attended to, positions that cannot be distinguished, labels that
are off by one: the shapes are right and the loss falls, so only an experiment shows them. None of
them depends on the code of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import (
    MIN_CHANGE,
    ClinicBatch,
    Objective,
    answer_of,
    answered_ids,
    call_model,
    different_ids,
    is_tabular,
    relative_change,
    sees_future,
)
from addnorm.clinic.residual_trace import trace_stream

MIN_CHANGE_FLOAT64 = 1e-10
"""Relative change in float64 beyond rounding: small initial weights make small differences."""


@dataclass(frozen=True)
class ExperimentResults:
    """Results of the experiments; None where one was not possible.

    Parameters
    ----------
    sees_future : whether an answer moves when a later token of the same sequence changes
    padding_change : change of the answers at real positions when padding is removed, relative to
        their standard deviation
    swappable_positions : positions p whose token may be swapped with that at p + 1 without effect
        on later ones
    token_share : share of the variance of the first block's input that depends on the tokens
    label_shift : the labels at t are the tokens at t + shift; None if no shift fits
    """

    sees_future: bool | None = None
    padding_change: float | None = None
    swappable_positions: tuple[int, ...] | None = None
    token_share: float | None = None
    label_shift: int | None = None


def run_experiments(
    model: nn.Module, batch: ClinicBatch, objective: Objective, pad: int | None
) -> ExperimentResults:
    """Run every experiment that the batch allows.

    Parameters
    ----------
    model : the model, in evaluation mode
    batch : what it is called with
    objective : the loss, for the labels
    pad : the id of padding, if known
    """
    if is_tabular(model) or not batch.token_ids:
        return ExperimentResults()
    with torch.no_grad():
        return ExperimentResults(
            sees_future=sees_future(model, batch),
            padding_change=padding_change(model, batch, pad),
            swappable_positions=swappable_positions(model, batch),
            token_share=token_share(model, batch),
            label_shift=label_shift(model, batch, objective),
        )


def padding_change(model: nn.Module, batch: ClinicBatch, pad: int | None) -> float | None:
    """Return how far the answers of the shortest sequence move when its padding is removed."""
    answered = answered_ids(model, batch)
    mask = batch.arguments.get("attention_mask")
    if answered is None or (pad is None and not isinstance(mask, Tensor)):
        return None
    _, ids, answer = answered
    padded = _most_padded(batch, mask, pad)
    if padded is None:
        return None
    name, row, real = padded
    kept = int(real.sum())
    if kept == 0 or bool((real[:kept] == 0).any()):
        return None  # removing padding on the left would move the positions
    length = real.shape[0]
    alone: dict[str, Tensor] = {}
    for other, argument in batch.arguments.items():
        if isinstance(argument, Tensor) and argument.ndim and argument.shape[0] == ids.shape[0]:
            cut = argument[row : row + 1]
            if argument.ndim > 1 and argument.shape[1] == length and _same_side(batch, other, name):
                cut = cut[:, :kept]
            alone[other] = cut
    after = answer_of(call_model(model, batch.replace(alone)))
    before = answer[row : row + 1, : after.shape[1]]
    return float(relative_change(before, after)[:, : min(kept, after.shape[1])].max())


def _same_side(batch: ClinicBatch, argument: str, ids: str) -> bool:
    """Return whether an argument belongs to the same sequence as these ids."""
    sides = [name.startswith(("decoder", "target", "tgt", "label")) for name in (argument, ids)]
    if isinstance(batch.inputs, Tensor) or not isinstance(batch.arguments.get(argument), Tensor):
        return True
    return sides[0] == sides[1] if not argument.isdigit() else argument == ids


def _most_padded(
    batch: ClinicBatch, mask: object, pad: int | None
) -> tuple[str, int, Tensor] | None:
    """Return the ids with padding, their row with the most, and where that row is real."""
    for name, ids in batch.token_ids.items():
        real = ids != pad if pad is not None else torch.ones_like(ids, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.shape == ids.shape and "decoder" not in name:
            real = mask.bool()
        counts = real.sum(dim=1)
        row = int(counts.argmin())
        if int(counts[row]) < ids.shape[1]:
            return name, row, real[row]
    return None


def swappable_positions(
    model: nn.Module, batch: ClinicBatch, most: int = 4
) -> tuple[int, ...] | None:
    """Return which neighbours can be swapped without changing the first attention behind them."""
    name, ids = next(iter(batch.token_ids.items()))
    if ids.shape[1] < 4:
        return None
    alone = batch.rows(0, 1)
    row = alone.arguments[name]
    branch = _first_attention(model, alone)
    if branch is None or branch.shape[1] != ids.shape[1] or not bool(branch.any()):
        return None  # a branch that starts at zero shows nothing
    swappable = []
    tried = 0
    for p in range(min(most, row.shape[1] - 3)):
        if int(row[0, p]) == int(row[0, p + 1]):
            continue
        tried += 1
        swapped = row.clone()
        swapped[:, p], swapped[:, p + 1] = row[:, p + 1], row[:, p]
        other = alone.replace({name: swapped})
        after = _first_attention(model, other)
        moves = after is None or bool(
            (relative_change(branch, after)[:, p + 2 :] > MIN_CHANGE).any()
        )
        if not (moves or _differs_in_float64(model, alone, other, p + 2)):
            swappable.append(p)
    return tuple(swappable) if tried else None


def _first_attention(model: nn.Module, batch: ClinicBatch) -> Tensor | None:
    sites = trace_stream(model, batch).sites
    branch = next((site.branch for site in sites if site.role == "attention"), None)
    return branch if branch is not None and branch.ndim == 3 else None


def _differs_in_float64(
    model: nn.Module, batch: ClinicBatch, other: ClinicBatch, start: int
) -> bool:
    """Return whether the first attention's branch differs in float64, from position `start` on."""
    try:
        with _float64(model):
            one, two = (_first_attention(model, each) for each in (batch, other))
    except RuntimeError:  # a model that casts to float32 itself
        return False
    if one is None or two is None or one.dtype != torch.float64:
        return False
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


def token_share(model: nn.Module, batch: ClinicBatch) -> float | None:
    """Return Var[x(ids) − x(other ids)] / (2 Var[x]) of the first block's input x."""
    name, ids = next(iter(batch.token_ids.items()))
    before = _first_stream(model, batch)
    after = _first_stream(model, batch.replace({name: different_ids(ids)}))
    if before is None or after is None or before.shape != after.shape:
        return None
    total = float(before.float().var())
    return float((before.float() - after.float()).var()) / (2 * total) if total > 0 else None


def _first_stream(model: nn.Module, batch: ClinicBatch) -> Tensor | None:
    sites = trace_stream(model, batch).sites
    return sites[0].shortcut.detach() if sites else None


def label_shift(model: nn.Module, batch: ClinicBatch, objective: Objective) -> int | None:
    """Return which token each answer is compared with, read from the loss's gradient.

    The gradient of cross-entropy in the logits is softmax − target: negative at the target alone.
    """
    answered = answered_ids(model, batch)
    if answered is None or answered[1].shape[1] < 4:
        return None
    _, ids, _ = answered
    with torch.enable_grad():
        output = call_model(model, batch)
        answer = answer_of(output)
        loss = objective.value(output, batch)
        if not (loss.requires_grad and answer.requires_grad):
            return None
        (gradient,) = torch.autograd.grad(loss, answer, allow_unused=True)
    if gradient is None or int(ids.max()) >= answer.shape[-1]:
        return None
    has_target = (gradient < 0).any(dim=-1)
    targets = gradient.argmin(dim=-1)
    best, shift = 0.9, None
    for offset in (1, 0, 2, -1):
        length = ids.shape[1]
        here = slice(max(0, -offset), length - max(0, offset))
        there = slice(max(0, offset), length - max(0, -offset))
        counted = has_target[:, here]
        if int(counted.sum()) < 4:
            continue
        same = float((targets[:, here] == ids[:, there])[counted].float().mean())
        if same > best:
            best, shift = same, offset
    return shift
