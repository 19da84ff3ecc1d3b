"""Experiments on what the answers read: all tokens, their own label, the places of an image.

Like those of input_experiments.py, they change the input and measure which answers move.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import (
    MIN_CHANGE,
    ClinicBatch,
    NotExamined,
    answer_of,
    call_model,
    different_ids,
    relative_change,
)

NOISE = 0.02
"""Standard deviation of what is added to every weight, so that no branch starts at zero."""

ROUNDING = 1e-5
"""Relative change of an answer when the same numbers are summed in another order."""


def only_token_read(model: nn.Module, batch: ClinicBatch) -> str:
    """Return `first` or `last` if one answer for a whole row reads that token alone; else "".

    Branches that start at zero hide what they will read: the weights are changed for a second test.
    """
    if len(batch.token_ids) != 1:
        raise NotExamined("the batch does not hold one sequence of token ids")
    name, ids = next(iter(batch.token_ids.items()))
    answer = answer_of(call_model(model, batch))
    if answer.ndim != 2 or answer.shape[0] != ids.shape[0] or ids.shape[1] < 4:
        raise NotExamined("there is not one answer for each sequence")
    for which, position in (("first", 0), ("last", -1)):
        changed = different_ids(ids)
        changed[:, position] = ids[:, position]
        other = batch.replace({name: changed})
        if not _moves(model, batch, other):
            with _noisy_weights(model):
                if not _moves(model, batch, other):
                    return which
    return ""


def _moves(model: nn.Module, one: ClinicBatch, two: ClinicBatch, least: float = 0.0) -> bool:
    before, after = (answer_of(call_model(model, each)) for each in (one, two))
    return bool((relative_change(before, after) > least).any())


@contextmanager
def _noisy_weights(model: nn.Module) -> Iterator[None]:
    """Add noise to every trained weight; restore all of them after."""
    weights = [p for p in model.parameters() if p.is_floating_point() and p.requires_grad]
    originals = [p.detach().clone() for p in weights]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        try:
            for p in weights:
                noise = torch.randn(p.shape, generator=generator)
                p.add_(NOISE * noise.to(p.device, p.dtype))
            yield
        finally:
            for p, original in zip(weights, originals, strict=True):
                p.copy_(original)


def reads_own_label(model: nn.Module, batch: ClinicBatch) -> bool:
    """Return whether the last answer moves with the last label: the answer is in the input."""
    labels = batch.arguments.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        raise NotExamined("the model is not called with a label for each token")
    answer = answer_of(call_model(model, batch))
    if answer.ndim != 3 or answer.shape[:2] != labels.shape:
        raise NotExamined("there is not one answer for each label")
    counted = labels >= 0
    changed = labels.clone()
    last = different_ids(labels.clamp(min=0))[:, -1]
    changed[:, -1] = torch.where(counted[:, -1], last, labels[:, -1])
    after = answer_of(call_model(model, batch.replace({"labels": changed})))
    moved = relative_change(answer, after)[:, -1] > MIN_CHANGE
    return bool(moved.any())


def places_of_image_unread(model: nn.Module, batch: ClinicBatch) -> bool:
    """Return whether the answer is the same for an image rolled by half of its width and height."""
    images = [
        (name, argument)
        for name, argument in batch.arguments.items()
        if isinstance(argument, Tensor) and argument.is_floating_point() and argument.ndim == 4
    ]
    if len(images) != 1 or batch.token_ids:
        raise NotExamined("the batch does not hold images alone")
    name, image = images[0]
    answer = answer_of(call_model(model, batch))
    if answer.ndim != 2 or min(image.shape[-2:]) < 8:
        raise NotExamined("there is not one answer for each image")
    other = batch.replace(
        {name: image.roll((image.shape[-2] // 2, image.shape[-1] // 2), (-2, -1))}
    )
    if _moves(model, batch, other, ROUNDING):
        return False
    with _noisy_weights(model):
        return not _moves(model, batch, other, ROUNDING)
