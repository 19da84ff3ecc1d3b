"""Shortcuts that no sum shows, found by the gradient: an identity within ∂c/∂a.

a is any result before an attention, c any result between it and the next one, both of one size.
For random signs v, the mean over positions of v ⊙ (∂c/∂a)ᵀv is the diagonal of the Jacobian,
channel by channel (Hutchinson 1989). Of c = a + f(a) it is near 1 in every channel; of a branch
alone its signs are random, whatever its size. Attention without a shortcut passes its values in
every channel, too, but to other positions as much as to their own: what reaches the neighbour is
subtracted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from addnorm.clinic.lineage import same_size

MIN_DIAGONAL, MIN_CERTAINTY = 0.1, 6.0
"""Mean diagonal of an identity, and how many standard errors it must be away from 0."""
MAX_RESULTS, MAX_ATTENTIONS, RANDOM_PROBES = 16, 6, 2
"""Results that are tried on either side of an attention, attentions, and random signs."""


def hidden_shortcuts(results: Sequence[Tensor], attended: Sequence[tuple[int, int]]) -> list[int]:
    """Return the attentions around which a gradient passes unchanged, by number.

    Parameters
    ----------
    results : the result of every operation, in order
    attended : how many results came before the softmax and before the end of each attention
    """
    starts = [start for start, _ in attended] + [len(results)]
    ends = [0] + [end for _, end in attended]
    found = []
    for number in range(min(len(attended), MAX_ATTENTIONS)):
        before = _differentiable(results[ends[number] : starts[number]])
        after = _differentiable(results[ends[number + 1] : starts[number + 1]])
        if any(_contains_identity(c, before) for c in after):
            found.append(number)
    return found


def _differentiable(results: Sequence[Tensor]) -> list[Tensor]:
    """Return the last results that have a gradient, one of those that share their memory."""
    by_memory = {
        each.untyped_storage().data_ptr(): each
        for each in results
        if each.is_floating_point() and each.requires_grad and each.ndim > 1
    }
    return list(by_memory.values())[-MAX_RESULTS:]


def _contains_identity(c: Tensor, before: Sequence[Tensor]) -> bool:
    sources = [a for a in before if same_size(tuple(a.shape), tuple(c.shape))]
    products: list[list[Tensor]] = [[] for _ in sources]
    generator = torch.Generator().manual_seed(0)
    for _ in range(RANDOM_PROBES if sources else 0):
        signs = torch.randint(2, c.shape, generator=generator, device="cpu").to(c) * 2 - 1
        grads = torch.autograd.grad(c, sources, signs, retain_graph=True, allow_unused=True)
        for a, grad, found in zip(sources, grads, products, strict=True):
            if grad is not None:
                shape = max(a.shape, c.shape, key=len)
                found.append(torch.stack((grad.reshape(shape), signs.reshape(shape))).float())
    return any(_is_identity(found) for found in products if found)


def _is_identity(probes: Sequence[Tensor]) -> bool:
    """Return whether the diagonal is an identity, along every axis of the positions.

    Parameters
    ----------
    probes : (gradient, signs) of each probe, of one shape
    """
    grads, signs = torch.stack(list(probes), dim=1)
    axes = [axis for axis in range(1, grads.ndim - 1) if grads.shape[axis] > 1]
    diagonals = []
    for axis in axes:
        size = grads.shape[axis] - 1
        later = signs.narrow(axis, 1, size)  # v at i: against the gradient at i, and at i − 1
        step = (grads.narrow(axis, 1, size) - grads.narrow(axis, 0, size)) * later
        diagonals.append(step.reshape(-1, grads.shape[-1]).mean(dim=0))
    if not diagonals or grads.shape[-1] < 2:
        return False
    return all(_is_above_noise(diagonal) for diagonal in diagonals)


def _is_above_noise(diagonal: Tensor) -> bool:
    mean, error = float(diagonal.mean()), float(diagonal.std()) / len(diagonal) ** 0.5
    return mean > MIN_DIAGONAL and mean > MIN_CERTAINTY * error
