"""A rehearsal: a few steps of the planned training, on weights that are restored. Does it learn?

    w ← Adam(w, g_s, lr · min(1, s / r)),  s = 1 … n;   r = n/2 if there is warm-up, else 1

A learning rate that is too high shows within a few steps at the peak: the loss rises, or it stays
where it is while the token representations collapse to one vector, from which nothing is learnt.
Each step uses another batch, and the loss is measured on a batch that no step uses: a model that
could only memorise one batch does not pass. If there is only one batch, the steps alternate between
its halves. A long warm-up is shortened to r steps.

If the plan fails, others are rehearsed too: with warm-up, at lower rates, with other arrangements.
The warm-up to recommend is

    warm-up ≥ 2 / (1 − β₂) · max(1, lr / stable),   stable the largest rate the sharpness allows

because Adam's estimate of the gradient's size settles in about 2 / (1 − β₂) steps (Ma, Yarats 2021,
1910.04209, §5); the rate should stay below the stable one until then.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from addnorm.clinic.call_model import ClinicBatch, Objective, call_model, step_operations
from addnorm.clinic.measure import position_variance
from addnorm.clinic.residual_trace import trace_stream
from addnorm.clinic.weight_perturbation import amplification
from addnorm.config import ModelConfig
from addnorm.errors import ConfigError
from addnorm.layers.init import measure_
from addnorm.models.build import build

REHEARSAL_STEPS, MIN_REHEARSAL_STEPS = 48, 12
"""Steps of a rehearsal, and the fewest steps of one of a large model."""
MEASURE_EVERY = 8
"""Steps between two measurements of the stream."""
MAX_REHEARSAL_OPERATIONS = 2e12
"""Multiplications and additions that one rehearsal may take."""
FINAL_VARIANCE, LOWEST_VARIANCE = 0.05, 0.01
"""Share of the variance that must be between positions in the end, and at every measurement.

If the share is smaller to begin with, it must not fall in the end, nor to a tenth in between.
A held-out loss that was halved makes up for what happened in between.
Chosen on bench/clinic_grid.py's first grid: of its runs that trained none came within 2.7 times.
"""
TRIED_WARMUP = 1000
"""Steps of warm-up to try if the plan has none."""
TRIED_ARRANGEMENTS = ("admin", "pre")
"""Arrangements to try in place of one that fails."""
ADAM_BETA2 = 0.98


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The part of the planned training that a rehearsal needs: Adam's learning rate and warm-up."""

    lr: float
    """Peak learning rate."""
    warmup: int = 0
    """Steps of linear warm-up."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf") or self.warmup < 0:
            raise ConfigError(
                "a training plan must have a positive learning rate and no negative warm-up: "
                f"got lr={self.lr}, warmup={self.warmup}. Try lr=1e-3, warmup=1000."
            )


@dataclass(frozen=True)
class Rehearsal:
    """The losses of a rehearsal, and the variance between positions.

    Parameters
    ----------
    losses : loss of each step's batch, before the step
    before : loss of the batch that no step uses, before the first step
    after : the same, after the last step
    position_variance : share of the last site's variance between positions: before, every few
        steps, after
    """

    losses: tuple[float, ...]
    before: float
    after: float
    position_variance: tuple[float, ...]

    @property
    def gain(self) -> float:
        """By how much the loss fell."""
        return self.before - self.after

    @property
    def learns(self) -> bool:
        """Whether all losses are finite, the held-out loss fell and positions did not collapse."""
        finite = all(math.isfinite(loss) for loss in (*self.losses, self.after))
        first, *later = self.position_variance
        differ = later[-1] >= min(FINAL_VARIANCE, first)
        steady = min(later) >= min(LOWEST_VARIANCE, first / 10) or self.after < self.before / 2
        return finite and self.gain > 0 and differ and steady


@dataclass(frozen=True)
class Alternative:
    """The same model with another arrangement, untrained, and its rehearsal."""

    output_change: float
    """How far the output moves when every matrix changes by 1 %, relative to its deviation."""
    rehearsal: Rehearsal


def rehearse(
    model: nn.Module,
    batches: Sequence[ClinicBatch],
    objective: Objective,
    *,
    lr: float,
    warmup: int,
    steps: int = REHEARSAL_STEPS,
) -> Rehearsal:
    """Train for a few steps, measure the loss on the first batch, and restore every weight.

    Parameters
    ----------
    model : the model, in evaluation mode
    batches : the batch that is measured, then those that are learnt from
    objective : the loss
    lr : peak learning rate of Adam
    warmup : steps of the planned warm-up; any number above 0 warms up over half of the steps
    steps : steps to train
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    originals = [p.detach().clone() for p in weights]
    train_batches = training_batches(batches, objective)
    ramp = max(1, steps // 2) if warmup else 1
    before, first = _loss_and_variance(model, batches[0], objective)
    variances = [first]
    optimizer = torch.optim.Adam(weights, lr=lr, betas=(0.9, ADAM_BETA2), eps=1e-9)
    losses = []
    try:
        for step in range(1, steps + 1):
            loss = objective(model, train_batches[step % len(train_batches)])
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            grads = torch.autograd.grad(loss, weights, allow_unused=True)
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad
            optimizer.param_groups[0]["lr"] = lr * min(1.0, step / ramp)
            optimizer.step()
            if step % MEASURE_EVERY == 0 and step < steps:
                variances.append(_loss_and_variance(model, batches[0], objective)[1])
        after, last = _loss_and_variance(model, batches[0], objective)
        return Rehearsal(tuple(losses), before, after, (*variances, last))
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


def training_batches(batches: Sequence[ClinicBatch], objective: Objective) -> list[ClinicBatch]:
    """Return what is learnt from: all but the first batch, or the halves of the only one."""
    if objective.random_targets:
        return [batches[0]]
    if len(batches) > 1:
        return list(batches[1:])
    return objective.split(batches[0], 2)


@torch.no_grad()
def _loss_and_variance(
    model: nn.Module, batch: ClinicBatch, objective: Objective
) -> tuple[float, float]:
    """Return the loss of a batch, and the share of the last site's variance between positions."""
    trace = trace_stream(model, batch)
    variance = position_variance(trace.sites[-1].total) if trace.sites else 1.0
    return float(objective.value(trace.output, batch)), variance


# ── The plan, and alternatives to it ──────────────────────────────────────────────────────────────


def rehearse_plan(
    model: nn.Module, batches: Sequence[ClinicBatch], objective: Objective, plan: TrainingPlan
) -> dict[str, Rehearsal]:
    """Rehearse the plan, and if it fails others, with warm-up and at lower rates, until one learns.

    Parameters
    ----------
    model, batches, objective : as for `rehearse`
    plan : the planned training
    """
    plans = {"planned": plan}
    if not plan.warmup:
        plans["with warm-up"] = TrainingPlan(lr=plan.lr, warmup=TRIED_WARMUP)
    for divisor in (10, 100):
        lower = plan.lr / divisor
        plans[f"at lr {lower:.2g}"] = TrainingPlan(lr=lower, warmup=plan.warmup)
    rehearsals: dict[str, Rehearsal] = {}
    for name, each in plans.items():
        rehearsals[name] = rehearse_once(model, batches, objective, each)
        if rehearsals[name].learns:
            break
    return rehearsals


def rehearse_once(
    model: nn.Module, batches: Sequence[ClinicBatch], objective: Objective, plan: TrainingPlan
) -> Rehearsal:
    """Rehearse one plan; if it fails with its warm-up shortened, with three times the steps.

    Parameters
    ----------
    model, batches, objective : as for `rehearse`
    plan : the planned training
    """
    steps = affordable_steps(model, batches[0])
    once = rehearse(model, batches, objective, lr=plan.lr, warmup=plan.warmup, steps=steps)
    if once.learns or steps < REHEARSAL_STEPS or plan.warmup <= steps // 2:
        return once
    return rehearse(model, batches, objective, lr=plan.lr, warmup=plan.warmup, steps=3 * steps)


def affordable_steps(model: nn.Module, batch: ClinicBatch) -> int:
    """Return the steps of a rehearsal: fewer for a large model."""
    steps = int(MAX_REHEARSAL_OPERATIONS / max(step_operations(model, batch), 1.0))
    return max(MIN_REHEARSAL_STEPS, min(REHEARSAL_STEPS, steps))


def rehearse_alternatives(
    model: nn.Module, batches: Sequence[ClinicBatch], objective: Objective, plan: TrainingPlan
) -> dict[str, Alternative]:
    """Rebuild a model of addnorm with other arrangements, and rehearse the same plan.

    Parameters
    ----------
    model, batches, objective : as for `rehearse`
    plan : the planned training
    """
    config = getattr(model, "config", None)
    alternatives: dict[str, Alternative] = {}
    if not isinstance(config, ModelConfig):
        return alternatives
    batch = batches[0]
    for kind in TRIED_ARRANGEMENTS:
        if kind == config.addnorm:
            continue
        torch.manual_seed(0)
        try:
            other = build(config.replace(addnorm=kind, decoder_addnorm=None)).eval()
        except ConfigError:
            continue  # this configuration does not allow the arrangement
        if kind == "admin":
            measure_(other, lambda other=other: call_model(other, batch))  # type: ignore[misc]
        with torch.no_grad():
            sites = trace_stream(other, batch).sites
        change = amplification(other, batch, sites, draws=1)[-1] ** 0.5
        rehearsal = rehearse_once(other, batches, objective, plan)
        alternatives[f"addnorm={kind}"] = Alternative(change, rehearsal)
    return alternatives


def recommended_warmup(plan: TrainingPlan, stable: float | None) -> int:
    """Return the steps of warm-up by the rule above, to two digits; `stable` may be unknown.

    >>> recommended_warmup(TrainingPlan(lr=1e-3), 4e-5)
    2500
    >>> recommended_warmup(TrainingPlan(lr=1e-3), None)
    100
    """
    settled = 2 / (1 - ADAM_BETA2)
    ratio = 1.0 if stable is None or stable <= 0 else max(1.0, plan.lr / stable)
    return int(float(f"{settled * ratio:.2g}"))
