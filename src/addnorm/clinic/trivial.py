"""The loss that is reached without looking at the input: that of the best constant answer.

    L₀ = min over c of E[loss(c, target)],   the same c for every row and position

For cross-entropy this is the entropy of the token (or class) frequencies, for squared error the
variance of the target. A model has learnt something from its input only below L₀.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import ClinicBatch, Objective, answer_of, call_model

SMOOTHING = 0.5
"""Added to the count of every class, so that a class that was not seen costs a finite loss."""
MAX_FITTED = 4096
"""Numbers in an answer up to which the constant is fitted through the loss itself."""
MAX_FIT_BATCHES = 16
"""Batches that the constant is fitted to through the loss."""
FIT_ITERATIONS = 25


def trivial_losses(
    model: nn.Module, batches: Sequence[ClinicBatch], objective: Objective
) -> list[float] | None:
    """Return the loss of the best constant answer for each batch, or None if it is unknown.

    The constant is chosen on one half of the batches and measured on the other, both ways round.
    """
    with torch.no_grad():
        output = call_model(model, batches[0])
        if not _depends_on_answer(output, batches[0], objective):
            entropy = _label_entropy(batches)
            return None if entropy is None else [entropy] * len(batches)
    odd, even = batches[1::2], batches[0::2]
    constants = [_best_constant(output, half or even, objective) for half in (odd, even)]
    with torch.no_grad():
        losses = [
            float(objective.value(_constant_output(output, constants[i % 2], batch), batch))
            for i, batch in enumerate(batches)
        ]
    return losses if all(map(math.isfinite, losses)) else None


def _depends_on_answer(output: Any, batch: ClinicBatch, objective: Objective) -> bool:
    """Return whether the loss changes with the answer (a model's own loss was computed before)."""
    answer = answer_of(output)
    zero = torch.zeros_like(answer)
    same = objective.value(_with_answer(output, answer), batch)
    return not torch.equal(same, objective.value(_with_answer(output, zero), batch))


def _with_answer(output: Any, answer: Tensor) -> Any:
    """Return the model's output with another answer in it."""
    if isinstance(output, Tensor):
        return answer
    previous = answer_of(output)
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        return type(output)(answer if part is previous else part for part in output)
    changed = copy.copy(output)
    if isinstance(output, Mapping):
        name = next(name for name, part in output.items() if part is previous)
        changed[name] = answer
    for name, part in vars(output).items() if hasattr(output, "__dict__") else ():
        if part is previous:
            setattr(changed, name, answer)
    return changed


def _constant_output(output: Any, constant: Tensor, batch: ClinicBatch) -> Any:
    """Return an output for a batch whose answer is the constant everywhere."""
    answer = answer_of(output)
    targets = batch.targets
    if answer.ndim > 1 and targets is not None and targets.ndim >= answer.ndim - 1:
        lead = tuple(targets.shape[: answer.ndim - 1])
    else:
        ids = list(batch.token_ids.values())
        lead = tuple(answer.shape[:-1])
        if ids and answer.ndim == 3:
            lead = tuple(ids[-1].shape)
        elif answer.ndim >= 1 and batch.row_count != answer.shape[0]:
            lead = (batch.row_count, *answer.shape[1:-1])
    shape = (*lead, answer.shape[-1]) if answer.ndim > 1 else (batch.row_count,)
    return _with_answer(output, constant.expand(shape))


def _best_constant(output: Any, batches: Sequence[ClinicBatch], objective: Objective) -> Tensor:
    """Return the constant with the smallest loss: from counts, then fitted where it is small."""
    answer = answer_of(output).detach()
    outputs = answer.shape[-1] if answer.ndim > 1 else 1
    constant = torch.zeros(outputs, device=answer.device)
    labels = [_integer_targets(batch) for batch in batches]
    if outputs > 1 and all(each is not None for each in labels):
        counts = torch.full((outputs,), SMOOTHING, device=answer.device)
        for each in labels:
            assert each is not None
            counted = each[(each >= 0) & (each < outputs)]
            counts += torch.bincount(counted.flatten(), minlength=outputs)[:outputs]
        constant = (counts / counts.sum()).log()
    if outputs > MAX_FITTED:
        return constant
    constant = constant.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [constant], max_iter=FIT_ITERATIONS, line_search_fn="strong_wolfe"
    )
    used = batches[:MAX_FIT_BATCHES]
    prior = constant.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [
            objective.value(_constant_output(output, constant, batch), batch) for batch in used
        ]
        # A weak pull to the smoothed counts keeps classes that were not seen finite.
        loss = torch.stack(losses).mean() + 1e-4 * (constant - prior).pow(2).sum()
        torch.autograd.backward(loss)
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return constant.detach()


def _integer_targets(batch: ClinicBatch) -> Tensor | None:
    """Return integer targets: those of the batch, or its labels, or its last token ids."""
    if batch.targets is not None:
        return None if batch.targets.is_floating_point() else batch.targets.long()
    labels = batch.arguments.get("labels")
    if isinstance(labels, Tensor):
        return None if labels.is_floating_point() else labels.long()
    ids = list(batch.token_ids.values())
    return ids[-1].long() if ids else None


def _label_entropy(batches: Sequence[ClinicBatch]) -> float | None:
    """Return the entropy of the labels' frequencies, or the variance of labels that are numbers."""
    labels = [batch.arguments.get("labels") for batch in batches]
    tensors = [each.flatten() for each in labels if isinstance(each, Tensor)]
    if len(tensors) < len(batches):
        return None
    every = torch.cat(tensors)
    if every.is_floating_point():
        return float(every.float().var())
    counts = torch.bincount(every[every >= 0].long()).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum())
