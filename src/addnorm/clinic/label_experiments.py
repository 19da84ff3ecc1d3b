"""Labels, as the gradient of the loss in the answers shows them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import (
    MIN_CHANGE,
    ClinicBatch,
    NotExamined,
    Objective,
    answer_of,
    answered_ids,
    call_model,
    different_ids,
    relative_change,
)
from addnorm.clinic.padding_experiments import real_tokens


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
    name, ids, _ = answered
    has_target = (gradient < 0).any(dim=-1)
    facts["padding"] = _counted_padding(~real_tokens(batch, name, pad)[0], gradient)
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


def _counted_padding(padding: Tensor, gradient: Tensor) -> float | None:
    """Return the share of padded positions that the loss counts; one for each row is none.

    The last padding before a sequence may predict its first token.
    """
    if not bool(padding.any()):
        return None
    counted = (gradient.abs().amax(dim=-1) > 0) & padding
    several = counted & (counted.sum(dim=1, keepdim=True) > 1)
    return float(several.sum()) / int(padding.sum())


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
