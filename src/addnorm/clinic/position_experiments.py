"""Experiments with positions and tokens: swap them, change them, and see what the stream holds."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import (
    MIN_CHANGE,
    ClinicBatch,
    NotExamined,
    answer_of,
    answered_ids,
    call_model,
    different_ids,
    relative_change,
    require_tokens,
)
from addnorm.clinic.residual_trace import trace_stream

MIN_CHANGE_FLOAT32 = 1e-5
"""Relative change in float32 beyond rounding, where the model cannot be run in float64."""
NEIGHBOUR_ROWS = 4
"""Rows in which tokens are changed one by one; packed sequences end elsewhere in each."""
MIN_CHANGE_FLOAT64 = 1e-10
"""Relative change in float64 beyond rounding: small initial weights make small differences."""


def swappable_positions(model: nn.Module, batch: ClinicBatch, most: int = 4) -> tuple[int, ...]:
    """Return which neighbours can be swapped without changing the first attention behind them."""
    require_tokens(batch)
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
    require_tokens(batch)
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


def unread_neighbours(model: nn.Module, batch: ClinicBatch) -> tuple[int, ...]:
    """Return positions p whose answer does not depend on the token at p − 1.

    Tried are halves, thirds and quarters of the length, where heads that were cut out of the
    sequence without a transpose end. The answer at p + 1 must depend on the token at p.
    """
    batch = batch.rows(0, NEIGHBOUR_ROWS)
    answered = answered_ids(model, batch)
    if answered is None:
        raise NotExamined("there is not one answer for each token")
    name, ids, answer = answered
    length = ids.shape[1]
    if length < 8:
        raise NotExamined("the sequences are shorter than 8 tokens")
    if any("mask" in key and a.ndim > 2 for key, a in batch.arguments.items() if _is_tensor(a)):
        raise NotExamined("the batch has a mask for each pair of positions")
    where = {length // 2, length // 3, length // 4, 3 * length // 4}
    other = different_ids(ids)

    def moved(position: int) -> float:
        """Return how far the answer after a position moves with the token there."""
        changed = torch.cat(
            (ids[:, :position], other[:, position, None], ids[:, position + 1 :]), 1
        )
        after = answer_of(call_model(model, batch.replace({name: changed})))
        return float(relative_change(answer, after)[:, position + 1].nan_to_num().max())

    unread = [p for p in sorted(where) if moved(p - 1) <= MIN_CHANGE]
    return tuple(p for p in unread if moved(p) > 10 * MIN_CHANGE)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _stream_starts(model: nn.Module, batch: ClinicBatch) -> list[Tensor]:
    return [
        node.start
        for node in trace_stream(model, batch, sites_only=True).nodes
        if node.start is not None
    ]
