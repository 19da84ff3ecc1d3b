"""A few steps of the planned training, on weights that are put back: does it learn?

    w ← Adam(w, g_s, lr · min(1, s / r)),  s = 1 … n;   r = n/2 if there is warm-up, else 1

Too large a rate shows within a few steps at the peak: the loss rises, or it stays where it is while
the positions of the stream become one and the same vector, from which nothing is learnt any more.
Every step learns from another batch, and the loss is looked at on one that is not learnt from: a
model that could only learn one batch by heart does not pass. Where there is one batch alone, its
halves take turns. A long warm-up is shortened to r steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from addnorm.clinic.call import Batch, Objective, run, tensors
from addnorm.clinic.measure import distinct
from addnorm.clinic.sharpness import split
from addnorm.clinic.trace import watch

STEPS, LOOK = 48, 8
"""How many steps, and from one look at the stream to the next."""
APART, COLLAPSED = 0.05, 0.01
"""Share of the variance in which positions must differ in the end, and at every look.

Where they differ in less to begin with, it must not become less in the end, nor a tenth in between.
A loss that was halved on text not learnt from makes up for what happened in between.
Chosen on bench/clinic_grid.py's first grid: of its runs that trained none came within 2.7 times.
"""


@dataclass(frozen=True)
class Rehearsal:
    """How the loss went, and what became of the stream."""

    losses: tuple[float, ...]
    """Of each step's batch, before the step."""
    before: float
    after: float
    """Of the batch that is looked at."""
    distinct: tuple[float, ...]
    """Share of the last site's variance in which positions differ: before, now and then, after."""

    @property
    def gain(self) -> float:
        """By how much the loss fell."""
        return self.before - self.after

    @property
    def learns(self) -> bool:
        """Whether training will get anywhere: all finite, less than before, positions apart."""
        finite = all(math.isfinite(loss) for loss in (*self.losses, self.after))
        first, *later = self.distinct
        apart = later[-1] >= min(APART, first)
        steady = min(later) >= min(COLLAPSED, first / 10) or self.after < self.before / 2
        return finite and self.gain > 0 and apart and steady


def rehearse(
    model: nn.Module,
    batches: Sequence[Batch],
    objective: Objective,
    *,
    lr: float,
    warmup: int,
    steps: int = STEPS,
) -> Rehearsal:
    """Train for a few steps, look at the first batch, and put every weight back."""
    weights = [p for p in model.parameters() if p.requires_grad]
    kept = [p.detach().clone() for p in weights]
    lessons = lessons_of(model, batches, objective)
    ramp = max(1, steps // 2) if warmup else 1
    before, first = _look(model, batches[0], objective)
    apart = [first]
    optimizer = torch.optim.Adam(weights, lr=lr, betas=(0.9, 0.98), eps=1e-9)
    losses = []
    try:
        for step in range(1, steps + 1):
            loss = objective(model, lessons[step % len(lessons)])
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            found = torch.autograd.grad(loss, weights, allow_unused=True)
            for weight, grad in zip(weights, found, strict=True):
                weight.grad = grad
            optimizer.param_groups[0]["lr"] = lr * min(1.0, step / ramp)
            optimizer.step()
            if step % LOOK == 0 and step < steps:
                apart.append(_look(model, batches[0], objective)[1])
        after, last = _look(model, batches[0], objective)
        return Rehearsal(tuple(losses), before, after, (*apart, last))
    finally:
        with torch.no_grad():
            for weight, old in zip(weights, kept, strict=True):
                weight.copy_(old)


def lessons_of(model: nn.Module, batches: Sequence[Batch], objective: Objective) -> list[Batch]:
    """What is learnt from: all but the first, or the halves of the only one."""
    if objective.made_up:
        return [batches[0]]
    if len(batches) > 1:
        return list(batches[1:])
    halves = split(batches[0], 2)
    try:
        with torch.no_grad():
            for half in halves:
                objective(model, half)
    except (RuntimeError, ValueError):  # a loss that knows its targets has no parts
        return [batches[0]]
    return halves


@torch.no_grad()
def _look(model: nn.Module, batch: Batch, objective: Objective) -> tuple[float, float]:
    """The loss of a batch, and how far its positions are apart."""
    trace = watch(model, lambda: run(model, batch), tensors(batch))
    apart = distinct(trace.sites[-1].total) if trace.sites else 1.0
    return float(objective.of(trace.output, batch)), apart
