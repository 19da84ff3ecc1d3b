"""What can only be known by changing the input and seeing what moves.

Masks that leak, padding that is attended to, positions that cannot be told apart, labels that are
off by one: the shapes are right and the loss falls, so only an experiment shows them. Nothing here
looks at the code of the model, so it holds for anyone's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from addnorm.clinic.call import (
    Batch,
    Objective,
    answer_of,
    ids_of,
    is_table,
    parts,
    run,
    tensors,
    with_parts,
)
from addnorm.clinic.trace import watch

MOVED = 1e-4
"""Change, relative to the answers' spread, from which an answer has moved: beyond rounding."""
MOVED_DOUBLE = 1e-10
"""The same in float64: with small initial weights positions are told apart by very little."""


@dataclass(frozen=True)
class Experiments:
    """What the experiments showed; None where one could not be done."""

    future: bool | None = None
    """An answer moves when a later token of the same sequence changes."""
    padding: float | None = None
    """Change of the answers at real positions when padding is taken away, over their spread."""
    same_positions: tuple[int, ...] | None = None
    """Positions p whose token may be swapped with that at p + 1 and no later position notices."""
    token_share: float | None = None
    """Share of the variance of what enters the first block that depends on the tokens."""
    label_shift: int | None = None
    """Labels at t are the tokens at t + shift; None if they are none of those."""


def experiment(
    model: nn.Module, batch: Batch, objective: Objective, pad: int | None
) -> Experiments:
    """Do every experiment that the batch allows."""
    if is_table(model) or not ids_of(batch):
        return Experiments()
    with torch.no_grad():
        return Experiments(
            future=sees_future(model, batch),
            padding=padding_change(model, batch, pad),
            same_positions=same_positions(model, batch),
            token_share=token_share(model, batch),
            label_shift=label_shift(model, batch, objective),
        )


def _answered_ids(model: nn.Module, batch: Batch) -> tuple[str, Tensor, Tensor] | None:
    """The ids that the answers stand beside: the last of that length, with the answer."""
    answer = answer_of(run(model, batch))
    fit = [(n, ids) for n, ids in ids_of(batch).items() if ids.shape == answer.shape[:2]]
    return (*fit[-1], answer) if fit and answer.ndim == 3 else None


def _other(ids: Tensor) -> Tensor:
    """Ids that differ from the given ones everywhere, taken from among them."""
    known = torch.unique(ids)
    if len(known) < 2:
        return (ids - 1).abs()
    return known[(torch.searchsorted(known, ids.contiguous()) + 1) % len(known)]


def _far(one: Tensor, two: Tensor) -> Tensor:
    """Largest change at each position, relative to the spread of all."""
    spread = one.float().std().clamp(min=1e-12)
    return (one.float() - two.float()).abs().amax(dim=-1) / spread


@torch.no_grad()
def sees_future(model: nn.Module, batch: Batch) -> bool | None:
    """Change the second half of the tokens: does an answer in the first half move?"""
    found = _answered_ids(model, batch)
    if found is None or found[1].shape[1] < 2:
        return None
    name, ids, answer = found
    half = ids.shape[1] // 2
    changed = torch.cat((ids[:, :half], _other(ids)[:, half:]), dim=1)
    after = answer_of(run(model, with_parts(batch, {name: changed})))
    return bool((_far(answer, after)[:, :half] > MOVED).any())


def padding_change(model: nn.Module, batch: Batch, pad: int | None) -> float | None:
    """Take the padding of the shortest sequence away: how far do its answers move?"""
    found = _answered_ids(model, batch)
    mask = parts(batch).get("attention_mask")
    if found is None or (pad is None and not isinstance(mask, Tensor)):
        return None
    _, ids, answer = found
    side = _padded(batch, ids, mask, pad)
    if side is None:
        return None
    name, row, real = side
    kept = int(real.sum())
    if kept == 0 or bool((real[:kept] == 0).any()):
        return None  # padding on the left moves the positions themselves
    length = real.shape[0]
    alone: dict[str, Tensor] = {}
    for part_name, part in parts(batch).items():
        if isinstance(part, Tensor) and part.ndim and part.shape[0] == ids.shape[0]:
            cut = part[row : row + 1]
            if part.ndim > 1 and part.shape[1] == length and _same_side(batch, part_name, name):
                cut = cut[:, :kept]
            alone[part_name] = cut
    after = answer_of(run(model, with_parts(batch, alone)))
    before = answer[row : row + 1, : after.shape[1]]
    return float(_far(before, after)[:, : min(kept, after.shape[1])].max())


def _same_side(batch: Batch, part: str, ids: str) -> bool:
    """Whether an argument speaks of the same sequence as these ids."""
    sides = [name.startswith(("decoder", "target", "tgt", "label")) for name in (part, ids)]
    if isinstance(batch, Tensor) or not isinstance(parts(batch).get(part), Tensor):
        return True
    return sides[0] == sides[1] if not part.isdigit() else part == ids


def _padded(
    batch: Batch, ids: Tensor, mask: object, pad: int | None
) -> tuple[str, int, Tensor] | None:
    """An input, a row of it and where that row is real, for the row with the most padding."""
    for name, part in ids_of(batch).items():
        real = part != pad if pad is not None else torch.ones_like(part, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.shape == part.shape and "decoder" not in name:
            real = mask.bool()
        counts = real.sum(dim=1)
        row = int(counts.argmin())
        if int(counts[row]) < part.shape[1]:
            return name, row, real[row]
    return None


def same_positions(model: nn.Module, batch: Batch, most: int = 4) -> tuple[int, ...] | None:
    """Swap neighbours; look at the first attention's branch where it stands behind both."""
    ids = ids_of(batch)
    name, first = next(iter(ids.items()))
    if first.shape[1] < 4:
        return None
    alone = with_parts(
        batch,
        {
            n: part[:1]
            for n, part in parts(batch).items()
            if isinstance(part, Tensor) and part.ndim and part.shape[0] == first.shape[0]
        },
    )
    row = parts(alone)[name]
    branch = _first_attention(model, alone)
    if branch is None or branch.shape[1] != first.shape[1] or not bool(branch.any()):
        return None  # a branch that starts at zero tells nothing
    found = []
    tried = 0
    for p in range(min(most, row.shape[1] - 3)):
        if int(row[0, p]) == int(row[0, p + 1]):
            continue
        tried += 1
        swapped = row.clone()
        swapped[:, p], swapped[:, p + 1] = row[:, p + 1], row[:, p]
        other = with_parts(alone, {name: swapped})
        after = _first_attention(model, other)
        moves = after is None or bool((_far(branch, after)[:, p + 2 :] > MOVED).any())
        if not (moves or _moves_in_double(model, alone, other, p + 2)):
            found.append(p)
    return tuple(found) if tried else None


def _first_attention(model: nn.Module, batch: Batch) -> Tensor | None:
    sites = watch(model, lambda: run(model, batch), tensors(batch)).sites
    branch = next((site.branch for site in sites if site.role == "attention"), None)
    return branch if branch is not None and branch.ndim == 3 else None


def _moves_in_double(model: nn.Module, batch: Batch, other: Batch, start: int) -> bool:
    """Whether the first attention's branch differs in float64, from a position on."""
    try:
        with _double(model):
            one, two = (_first_attention(model, each) for each in (batch, other))
    except RuntimeError:  # a model that insists on float32
        return False
    if one is None or two is None or one.dtype != torch.float64:
        return False
    return float((one - two)[:, start:].abs().max() / one.std()) > MOVED_DOUBLE


@contextmanager
def _double(model: nn.Module) -> Iterator[None]:
    """The model in float64 for a while; its own tensors are kept and put back."""
    every = [*model.parameters(), *model.buffers()]
    kept = [(tensor, tensor.data) for tensor in every if tensor.is_floating_point()]
    try:
        for tensor, data in kept:
            tensor.data = data.double()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


def token_share(model: nn.Module, batch: Batch) -> float | None:
    """Var[x(ids) − x(other ids)] / (2 Var[x]) of what enters the first block."""
    name, ids = next(iter(ids_of(batch).items()))
    entered = _first_stream(model, batch)
    after = _first_stream(model, with_parts(batch, {name: _other(ids)}))
    if entered is None or after is None or entered.shape != after.shape:
        return None
    whole = float(entered.float().var())
    return float((entered.float() - after.float()).var()) / (2 * whole) if whole > 0 else None


def _first_stream(model: nn.Module, batch: Batch) -> Tensor | None:
    sites = watch(model, lambda: run(model, batch), tensors(batch)).sites
    return sites[0].shortcut.detach() if sites else None


def label_shift(model: nn.Module, batch: Batch, objective: Objective) -> int | None:
    """Which token each answer is asked for, read from the loss's gradient.

    The gradient of cross-entropy in the logits is softmax − target: negative at the target alone.
    """
    found = _answered_ids(model, batch)
    if found is None or found[1].shape[1] < 4:
        return None
    _, ids, _ = found
    with torch.enable_grad():
        output = run(model, batch)
        answer = answer_of(output)
        loss = objective.of(output, batch)
        if not (loss.requires_grad and answer.requires_grad):
            return None
        (gradient,) = torch.autograd.grad(loss, answer, allow_unused=True)
    if gradient is None or int(ids.max()) >= answer.shape[-1]:
        return None
    asked = (gradient < 0).any(dim=-1)
    wanted = gradient.argmin(dim=-1)
    best, shift = 0.9, None
    for offset in (1, 0, 2, -1):
        length = ids.shape[1]
        here = slice(max(0, -offset), length - max(0, offset))
        there = slice(max(0, offset), length - max(0, -offset))
        kept = asked[:, here]
        if int(kept.sum()) < 4:
            continue
        same = float((wanted[:, here] == ids[:, there])[kept].float().mean())
        if same > best:
            best, shift = same, offset
    return shift
