"""A few steps of the planned training, on one batch, on weights that are put back: does it learn?

    w ← Adam(w, g, lr · min(1, s / r)),  s = 1 … n;   r = n/2 if there is warm-up, else 1

Too large a rate shows within a few steps at the peak: the loss rises, or it stays where it is while
the positions of the stream become one and the same vector, from which nothing is learnt any more.
A long warm-up is shortened to r steps, so a rehearsal says less of how long it must be.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from addnorm.clinic.call import Batch, Objective, run, tensors
from addnorm.clinic.measure import distinct
from addnorm.clinic.trace import watch

APART = 0.05
"""Share of the variance in which positions must still differ: bench/clinic_grid.py measured it."""


@dataclass(frozen=True)
class Rehearsal:
    """How the loss went, and what became of the stream."""

    losses: tuple[float, ...]
    """Before each step, and after the last."""
    distinct_before: float
    distinct_after: float
    """Share of the last site's variance in which positions differ, before and after."""

    @property
    def gain(self) -> float:
        """By how much the loss fell, from the first to the mean of the last quarter."""
        tail = self.losses[-max(1, len(self.losses) // 4) :]
        return self.losses[0] - sum(tail) / len(tail)

    @property
    def learns(self) -> bool:
        """Whether training will get anywhere: all finite, less than before, positions apart."""
        finite = all(math.isfinite(loss) for loss in self.losses)
        return finite and self.gain > 0 and self.distinct_after >= APART


def rehearse(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    *,
    lr: float,
    warmup: int,
    steps: int = 24,
) -> Rehearsal:
    """Train for a few steps, look, and put every weight back."""
    weights = [p for p in model.parameters() if p.requires_grad]
    kept = [p.detach().clone() for p in weights]
    ramp = max(1, steps // 2) if warmup else 1
    before = _last_distinct(model, batch)
    optimizer = torch.optim.Adam(weights, lr=lr, betas=(0.9, 0.98), eps=1e-9)
    losses = []
    try:
        for step in range(1, steps + 1):
            loss = objective(model, batch)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            found = torch.autograd.grad(loss, weights, allow_unused=True)
            for weight, grad in zip(weights, found, strict=True):
                weight.grad = grad
            optimizer.param_groups[0]["lr"] = lr * min(1.0, step / ramp)
            optimizer.step()
        with torch.no_grad():
            losses.append(float(objective(model, batch)))
        return Rehearsal(tuple(losses), before, _last_distinct(model, batch))
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, kept, strict=True):
                weight.copy_(old)


@torch.no_grad()
def _last_distinct(model: nn.Module, batch: Batch) -> float:
    sites = watch(model, lambda: run(model, batch), tensors(batch)).sites
    return distinct(sites[-1].total) if sites else 1.0
