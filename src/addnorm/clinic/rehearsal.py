"""A rehearsal: the first steps of the planned training, on weights that are restored afterwards.

    w ← optimizer(w, g_s, lr · factor(s)),  s = 1 … n

Schedule, optimizer, clipping and dropout are those of the plan, and each step uses another batch.
Only a warm-up that is longer than the rehearsal allows is shortened, to half of its steps, and the
result says so. At every step the loss is recorded before the step, and the *advantage*

    loss(answers, targets of another row) − loss(answers, their own targets):

what the answers say about their own input, whatever the frequencies of the targets. Some batches
are held out: their loss shows whether what was learnt holds for others. How a training will end is
decided from these curves alone, in prediction.py.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from addnorm.clinic.call_model import ClinicBatch, Objective, call_model, step_operations
from addnorm.clinic.measure import is_untrained, position_variance
from addnorm.clinic.prediction import WILL_NOT_TRAIN, Rehearsal, is_better, predict_outcome
from addnorm.clinic.residual_trace import trace_stream
from addnorm.clinic.trivial import trivial_losses
from addnorm.clinic.weight_perturbation import amplification
from addnorm.config import ModelConfig
from addnorm.errors import ConfigError, choose
from addnorm.layers.init import measure_
from addnorm.models.build import build

REHEARSAL_STEPS, MIN_REHEARSAL_STEPS = 64, 12
"""Steps of a rehearsal, and the fewest steps of one of a large model."""
MEASUREMENTS = 4
"""How often the held-out loss and the stream are measured, besides at the start."""
HELD_OUT_BATCHES = 2
"""Batches that are held out, if there are enough."""
REHEARSAL_BATCHES = HELD_OUT_BATCHES + REHEARSAL_STEPS
"""Batches of a rehearsal in which every step uses another."""
MAX_REHEARSAL_OPERATIONS = 2e12
"""Multiplications and additions that one rehearsal may take."""
TRIED_ARRANGEMENTS = ("admin", "pre")
"""Arrangements to try in place of one that fails."""

TRIED_FACTORS = (0.1, 0.01, 10.0)
"""Factors on a rate that will not train, to try in turn."""

MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The planned training, as far as a rehearsal repeats it.

    Parameters
    ----------
    lr : peak learning rate
    warmup : steps of linear warm-up
    steps : steps of the whole training; unknown if None
    schedule : constant, cosine, linear, or inverse-sqrt (noam), after the warm-up
    min_lr_ratio : fraction of the peak rate at which cosine and linear end
    optimizer : adam, adamw, sgd, or a function from the model to an optimizer of torch
    betas, eps : of Adam
    momentum : of SGD
    weight_decay : of all parameters; a function as `optimizer` may decay some of them only
    clip : largest norm of the gradient; 0 for no clipping

    Examples
    --------
    >>> plan = TrainingPlan(lr=1e-3, warmup=2, steps=10, schedule="linear")
    >>> [round(plan.factor(step), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """

    lr: float
    warmup: int = 0
    steps: int | None = None
    schedule: str = "constant"
    min_lr_ratio: float = 0.0
    optimizer: str | MakeOptimizer = "adam"
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf") or self.warmup < 0:
            raise ConfigError(
                "a training plan must have a positive learning rate and no negative warm-up: "
                f"got lr={self.lr}, warmup={self.warmup}. Try lr=1e-3, warmup=1000."
            )
        if self.steps is not None and self.steps < 1:
            raise ConfigError(
                f"a training plan must have at least one step: got steps={self.steps}. "
                "Leave it out if it is unknown."
            )
        choose("TrainingPlan.schedule", self.schedule, PLAN_SCHEDULES)
        if isinstance(self.optimizer, str):
            choose("TrainingPlan.optimizer", self.optimizer, PLAN_OPTIMIZERS)

    @classmethod
    def from_optimizer(cls, optimizer: Optimizer, **changes: Any) -> "TrainingPlan":
        """Return a plan with the class and settings of an optimizer of torch.

        Settings that differ between its groups of parameters are those of the defaults.

        >>> adamw = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=3e-4)
        >>> TrainingPlan.from_optimizer(adamw, warmup=100).lr
        0.0003
        """
        kind, defaults = type(optimizer), dict(optimizer.defaults)

        def make(model: nn.Module) -> Optimizer:
            return kind([p for p in model.parameters() if p.requires_grad], **defaults)

        make.__name__ = kind.__name__
        return cls(**{"lr": float(defaults["lr"]), "optimizer": make, **changes})

    def factor(self, step: int) -> float:
        """Return the factor on the peak rate at a step, counted from 1."""
        if step < self.warmup:
            return step / self.warmup
        return PLAN_SCHEDULES[self.schedule](self, step)

    def optimizer_for(self, model: nn.Module) -> Optimizer:
        """Return the optimizer over the model's trainable parameters."""
        if not isinstance(self.optimizer, str):
            return self.optimizer(model)
        return PLAN_OPTIMIZERS[self.optimizer](
            self, [p for p in model.parameters() if p.requires_grad]
        )

    @property
    def optimizer_name(self) -> str:
        """The optimizer in a word."""
        name = self.optimizer
        return name if isinstance(name, str) else getattr(name, "__name__", "a function")

    def described(self) -> "TrainingPlan":
        """Return the plan with plain values only, for JSON: a function becomes its name."""
        described = copy.copy(self)
        object.__setattr__(described, "optimizer", self.optimizer_name)
        return described

    def progress(self, steps: int) -> float:
        """Return the sum of the factors of the first steps: how far the rates alone reach."""
        return sum(self.factor(step) for step in range(1, steps + 1))


def _share_done(plan: TrainingPlan, step: int) -> float:
    """Return the share of the steps after the warm-up so far; 0 if the steps are unknown."""
    if plan.steps is None:
        return 0.0
    return min(1.0, (step - plan.warmup) / max(plan.steps - plan.warmup, 1))


def _from_floor(plan: TrainingPlan, share: float) -> float:
    return plan.min_lr_ratio + (1 - plan.min_lr_ratio) * share


def _inverse_root(plan: TrainingPlan, step: int) -> float:
    return math.sqrt(max(plan.warmup, 1) / step)


PLAN_SCHEDULES: dict[str, Callable[[TrainingPlan, int], float]] = {
    "constant": lambda plan, step: 1.0,
    "cosine": lambda p, s: _from_floor(p, (1 + math.cos(math.pi * _share_done(p, s))) / 2),
    "linear": lambda p, s: _from_floor(p, 1 - _share_done(p, s)),
    "inverse-sqrt": _inverse_root,
    "noam": _inverse_root,
}
"""Factors after the warm-up, as in training/schedule.py, which the clinic does not import."""


def _adam_like(kind: Any) -> Callable[[TrainingPlan, list[nn.Parameter]], Optimizer]:
    return lambda plan, weights: kind(
        weights, lr=plan.lr, betas=plan.betas, eps=plan.eps, weight_decay=plan.weight_decay
    )


PLAN_OPTIMIZERS: dict[str, Callable[[TrainingPlan, list[nn.Parameter]], Optimizer]] = {
    "adam": _adam_like(torch.optim.Adam),
    "adamw": _adam_like(torch.optim.AdamW),
    "sgd": lambda plan, weights: torch.optim.SGD(
        weights, lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay
    ),
}


# ── One rehearsal ─────────────────────────────────────────────────────────────────────────────────


def rehearse(
    model: nn.Module,
    batches: Sequence[ClinicBatch],
    objective: Objective,
    plan: TrainingPlan,
    *,
    steps: int = REHEARSAL_STEPS,
    trivial: Sequence[float] | None = None,
    seed: int = 0,
) -> Rehearsal:
    """Train for a few steps as planned, record the curves, and restore every weight.

    Parameters
    ----------
    model : the model; its training flags are restored by the caller
    batches : those that are held out, then those that are learnt from
    objective : the loss
    plan : the planned training
    steps : steps to train
    trivial : loss of the best constant answer for each batch; measured if None
    seed : of dropout and of the order of the batches
    """
    if trivial is None:
        trivial = trivial_losses(model.eval(), batches, objective)
    held_out, learnt = hold_out_batches(batches, objective)
    constant = _by_batch(trivial, len(batches), len(learnt))
    shortened = max(1, steps // 2) if plan.warmup > steps // 2 and plan.warmup > 1 else None
    used = plan if shortened is None else replace(plan, warmup=shortened)
    state = _SavedState(model)
    torch.manual_seed(seed)
    order = torch.randperm(len(learnt)).tolist() if seed else list(range(len(learnt)))
    losses: list[float] = []
    advantages: list[float] = []
    factors: list[float] = []
    measured = [_measure_held_out(model, held_out, objective, 0)]
    every = max(1, steps // MEASUREMENTS)
    try:
        optimizer = used.optimizer_for(model)
        peaks = [group["lr"] for group in optimizer.param_groups]
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        model.train()
        for step in range(1, steps + 1):
            batch = learnt[order[(step - 1) % len(learnt)]]
            output = call_model(model, batch)
            loss = objective.value(output, batch)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            advantage = _advantage(output, batch, objective, loss)
            if advantage is not None:
                advantages.append(advantage)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if plan.clip:
                nn.utils.clip_grad_norm_(weights, plan.clip)
            factors.append(used.factor(step))
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factors[-1]
            optimizer.step()
            if step % every == 0 or step == steps:
                measured.append(_measure_held_out(model, held_out, objective, step))
                model.train()
    finally:
        state.restore()
        model.eval()
    return Rehearsal(
        losses=tuple(losses),
        advantages=tuple(advantages),
        factors=tuple(factors),
        held_out=tuple((m.step, m.loss) for m in measured),
        held_out_advantages=tuple(m.advantage for m in measured if m.advantage is not None),
        position_variance=tuple(m.variance for m in measured),
        trivial=tuple(
            constant[order[i % len(learnt)]] for i in range(len(losses) * bool(constant))
        ),
        held_out_trivial=_mean_or_none(None if trivial is None else trivial[: len(held_out)]),
        fresh=len(learnt) >= steps and not objective.random_targets,
        same_batch=len(batches) == 1 or objective.random_targets,
        planned_steps=plan.steps,
        planned_progress=None if plan.steps is None else plan.progress(plan.steps),
        planned_warmup=plan.warmup,
        shortened_warmup=shortened,
    )


def _by_batch(trivial: Sequence[float] | None, batches: int, learnt: int) -> list[float]:
    """Return the trivial loss of each batch that is learnt from, or nothing if it is unknown."""
    if trivial is None:
        return []
    if learnt < batches:
        return list(trivial[-learnt:])
    return [sum(trivial) / len(trivial)] * learnt  # parts of the only batch


def _mean_or_none(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


class _SavedState:
    """Weights and buffers of a model, to be restored."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = [*model.parameters(), *model.buffers()]
        self.originals = [tensor.detach().clone() for tensor in self.tensors]
        self.grads = {parameter: parameter.grad for parameter in model.parameters()}
        for parameter in self.grads:
            parameter.grad = None

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, original in zip(self.tensors, self.originals, strict=True):
                tensor.copy_(original)
        for parameter, grad in self.grads.items():
            parameter.grad = grad


@dataclass(frozen=True)
class _HeldOut:
    step: int
    loss: float
    advantage: float | None
    variance: float


@torch.no_grad()
def _measure_held_out(
    model: nn.Module, batches: Sequence[ClinicBatch], objective: Objective, step: int
) -> _HeldOut:
    """Return held-out loss and advantage, and the last site's variance between positions."""
    model.eval()
    trace = trace_stream(model, batches[0])
    variance = position_variance(trace.sites[-1].total) if trace.sites else 1.0
    losses, advantages = [], []
    for number, batch in enumerate(batches):
        output = trace.output if number == 0 else call_model(model, batch)
        loss = objective.value(output, batch)
        losses.append(float(loss))
        advantages.append(_advantage(output, batch, objective, loss, model))
    known = [each for each in advantages if each is not None]
    advantage = sum(known) / len(known) if known else None
    return _HeldOut(step, sum(losses) / len(losses), advantage, variance)


@torch.no_grad()
def _advantage(
    output: Any,
    batch: ClinicBatch,
    objective: Objective,
    loss: Tensor,
    model: nn.Module | None = None,
) -> float | None:
    """Return how much larger the loss is with the targets of another row; None if unknown.

    A loss that the model computes from `labels` needs another call, made if `model` is given.
    """
    if batch.row_count < 2 or objective.random_targets:
        return None
    value = objective.value(output, with_targets_of_another_row(batch))
    if float(value) != float(loss) or not isinstance(getattr(output, "loss", None), Tensor):
        return float(value) - float(loss)
    if model is None or "labels" not in batch.arguments:
        return None
    labels = batch.arguments["labels"]
    moved = batch.replace({"labels": labels.roll(1, 0)})
    return float(objective.value(call_model(model, moved), moved)) - float(loss)


def with_targets_of_another_row(batch: ClinicBatch) -> ClinicBatch:
    """Return the batch with every row moved by one, for a loss that compares with its targets."""
    rows = batch.row_count

    def moved(part: Any) -> Any:
        fits = isinstance(part, Tensor) and part.ndim > 0 and part.shape[0] == rows
        return part.roll(1, 0) if fits else part

    inputs = batch.replace({name: moved(part) for name, part in batch.arguments.items()}).inputs
    return ClinicBatch(inputs, None if batch.targets is None else moved(batch.targets))


def hold_out_batches(
    batches: Sequence[ClinicBatch], objective: Objective
) -> tuple[list[ClinicBatch], list[ClinicBatch]]:
    """Return what is held out and what is learnt from; of a single batch, its halves are learnt."""
    if objective.random_targets:
        return [batches[0]], [batches[0]]
    if len(batches) == 1:
        return [batches[0]], objective.split(batches[0], 2)
    held_out = HELD_OUT_BATCHES if len(batches) > 4 * HELD_OUT_BATCHES else 1
    return list(batches[:held_out]), list(batches[held_out:])


# ── The plan, and alternatives to it ──────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Alternative:
    """The same model with another arrangement, untrained, and its rehearsal."""

    output_change: float
    """How far the output moves when every matrix changes by 1 %, relative to its deviation."""
    rehearsal: Rehearsal


def rehearse_plan(
    model: nn.Module,
    batches: Sequence[ClinicBatch],
    objective: Objective,
    plan: TrainingPlan,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Rehearsal]:
    """Rehearse the plan, and if it will not train, others until one is predicted to.

    A plan that is ahead is rehearsed again beside the planned one, both from other initial weights
    and with the batches in another order, and counts only if it is ahead again: how a training at
    the edge ends depends on the weights that were drawn.

    Parameters
    ----------
    model, batches, objective, plan : as for `rehearse`
    say : receives a message before each rehearsal
    """
    trivial = trivial_losses(model.eval(), batches, objective)
    steps = affordable_steps(model, batches[0], plan)
    rehearsals: dict[str, Rehearsal] = {}
    for name, each in {"planned": plan, **other_plans(plan)}.items():
        say(f"rehearsing the plan{'' if name == 'planned' else f' {name}'}: {steps} steps.")
        rehearsals[name] = rehearse(model, batches, objective, each, steps=steps, trivial=trivial)
        if name == "planned" and predict_outcome(rehearsals[name]).answer != WILL_NOT_TRAIN:
            break
        if is_better(rehearsals[name], rehearsals["planned"]):
            with other_initial_weights(model):
                again, planned = (
                    rehearse(model, batches, objective, p, steps=steps, trivial=trivial, seed=1)
                    for p in (each, plan)
                )
            rehearsals[name] = replace(rehearsals[name], confirmed=is_better(again, planned))
            if rehearsals[name].confirmed:
                break
    return rehearsals


@contextmanager
def other_initial_weights(model: nn.Module, seed: int = 1) -> Iterator[None]:
    """Shuffle the entries of every matrix of an untrained model: another draw of the same kind."""
    matrices = [p for p in model.parameters() if p.ndim > 1] if is_untrained(model) else []
    originals = [matrix.detach().clone() for matrix in matrices]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for matrix, original in zip(matrices, originals, strict=True):
                order = torch.randperm(matrix.numel(), generator=generator).to(matrix.device)
                matrix.copy_(original.flatten()[order].view_as(matrix))
        yield
    finally:
        with torch.no_grad():
            for matrix, original in zip(matrices, originals, strict=True):
                matrix.copy_(original)


def other_plans(plan: TrainingPlan) -> dict[str, TrainingPlan]:
    """Return what to try in place of a plan that will not train: warm-up, then other rates.

    >>> list(other_plans(TrainingPlan(lr=0.03, steps=4000)))
    ['with warm-up 100', 'at lr 0.003', 'at lr 0.0003', 'at lr 0.3']
    """
    plans = {}
    warmup = recommended_warmup(plan)
    if plan.warmup < warmup:
        plans[f"with warm-up {warmup}"] = replace(plan, warmup=warmup)
    for factor in TRIED_FACTORS:
        plans[f"at lr {plan.lr * factor:.2g}"] = _at_rate(plan, float(f"{plan.lr * factor:.2g}"))
    return plans


def _at_rate(plan: TrainingPlan, lr: float) -> TrainingPlan:
    """Return the plan at another rate, also where a function makes the optimizer."""
    if isinstance(plan.optimizer, str):
        return replace(plan, lr=lr)
    make, ratio = plan.optimizer, lr / plan.lr

    def scaled(model: nn.Module) -> Optimizer:
        optimizer = make(model)
        for group in optimizer.param_groups:
            group["lr"] *= ratio
        return optimizer

    scaled.__name__ = plan.optimizer_name
    return replace(plan, lr=lr, optimizer=scaled)


def affordable_steps(model: nn.Module, batch: ClinicBatch, plan: TrainingPlan) -> int:
    """Return the steps of a rehearsal: not more than planned, and fewer for a large model."""
    steps = int(MAX_REHEARSAL_OPERATIONS / max(step_operations(model, batch), 1.0))
    steps = max(MIN_REHEARSAL_STEPS, min(REHEARSAL_STEPS, steps))
    return steps if plan.steps is None else min(steps, plan.steps)


def rehearse_alternatives(
    model: nn.Module,
    batches: Sequence[ClinicBatch],
    objective: Objective,
    plan: TrainingPlan,
    planned: Rehearsal,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Alternative]:
    """Rebuild a model of addnorm with other arrangements, and rehearse the same plan.

    One that is ahead of the plan is rehearsed again beside it, as in `rehearse_plan`.

    Parameters
    ----------
    model, batches, objective, plan : as for `rehearse`
    planned : the rehearsal of the plan
    say : receives a message before each rehearsal
    """
    config = getattr(model, "config", None)
    alternatives: dict[str, Alternative] = {}
    if not isinstance(config, ModelConfig):
        return alternatives
    batch = batches[0]
    steps = affordable_steps(model, batch, plan)
    for kind in TRIED_ARRANGEMENTS:
        if kind == config.addnorm:
            continue
        try:
            other = _rebuilt(config, kind, batch, seed=0)
        except ConfigError:
            continue  # this configuration does not allow the arrangement
        say(f"rehearsing the plan with addnorm={kind}: {steps} steps.")
        with torch.no_grad():
            sites = trace_stream(other, batch).sites
        change = amplification(other, batch, sites, draws=1)[-1] ** 0.5
        rehearsal = rehearse(other, batches, objective, plan, steps=steps)
        if is_better(rehearsal, planned):
            other = _rebuilt(config, kind, batch, seed=1)
            again = rehearse(other, batches, objective, plan, steps=steps, seed=1)
            with other_initial_weights(model):
                beside = rehearse(model, batches, objective, plan, steps=steps, seed=1)
            rehearsal = replace(rehearsal, confirmed=is_better(again, beside))
        alternatives[f"addnorm={kind}"] = Alternative(change, rehearsal)
    return alternatives


def _rebuilt(config: ModelConfig, kind: str, batch: ClinicBatch, seed: int) -> nn.Module:
    """Return a model of this configuration with another arrangement, untrained."""
    torch.manual_seed(seed)
    other = build(config.replace(addnorm=kind, decoder_addnorm=None)).eval()
    if kind == "admin":
        measure_(other, lambda: call_model(other, batch))
    return other


def recommended_warmup(plan: TrainingPlan, stable: float | None = None) -> int:
    """Return the steps of warm-up to recommend, to two digits; `stable` may be unknown.

        2 / (1 − β₂) · max(1, lr / stable), at most a quarter of the planned steps

    because Adam's estimate of the gradient's size settles in about 2 / (1 − β₂) steps (Ma, Yarats
    2021, 1910.04209, §5); the rate should stay below the stable one until then.

    >>> recommended_warmup(TrainingPlan(lr=1e-3), 4e-5)
    2500
    >>> recommended_warmup(TrainingPlan(lr=1e-3, steps=200))
    50
    """
    settled = 2 / (1 - plan.betas[1])
    ratio = 1.0 if stable is None or stable <= 0 else max(1.0, plan.lr / stable)
    most = math.inf if plan.steps is None else plan.steps // 4
    return int(float(f"{min(settled * ratio, most):.2g}"))
