"""Where the planned training fails its rehearsal: what else would do, tried and not only named.

    warm-up ≥ 2 / (1 − β₂) · max(1, lr / stable),   stable the largest rate the sharpness allows

Adam's estimate of the gradient's size settles in about 2 / (1 − β₂) steps (Ma, Yarats 2021,
1910.04209, §5); the rule asks that the rate stay below the stable one until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from addnorm.clinic.amplify import amplification
from addnorm.clinic.call import Batch, Objective, run, tensors, work
from addnorm.clinic.rehearsal import STEPS, Rehearsal, rehearse
from addnorm.clinic.trace import watch
from addnorm.config import ModelConfig
from addnorm.errors import ConfigError
from addnorm.layers.init import measure_
from addnorm.models.build import build

BETA = 0.98
LONG = 1000
"""Steps of warm-up to try where there is none."""
WORK = 2e12
"""Multiplications and additions that one rehearsal may take."""
LEAST = 12
"""Steps of a rehearsal, however large the model."""
OTHERS = ("admin", "pre")
"""Arrangements that are tried in place of one that fails."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the patient is to be trained, as far as it matters here: Adam, its rate, its warm-up."""

    lr: float
    """Peak learning rate."""
    warmup: int = 0
    """Steps of linear warm-up."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf") or self.warmup < 0:
            raise ConfigError(
                "a plan must have a positive rate and no negative warm-up: "
                f"got lr={self.lr}, warmup={self.warmup}. Try lr=1e-3, warmup=1000."
            )


@dataclass(frozen=True)
class Prediction:
    """What another arrangement would do in this one's place, untrained."""

    moved: float
    """How far the output moves when every matrix moves by 1 %, relative to its spread."""
    rehearsal: Rehearsal


def rehearse_plan(
    model: nn.Module, batches: Sequence[Batch], aim: Objective, plan: Plan
) -> dict[str, Rehearsal]:
    """The plan, and where it fails: with warm-up, and at lower rates, until one does not."""
    tries = {"planned": plan}
    if not plan.warmup:
        tries["with warm-up"] = Plan(lr=plan.lr, warmup=LONG)
    for part in (10, 100):
        tries[f"at lr {plan.lr / part:.2g}"] = Plan(lr=plan.lr / part, warmup=plan.warmup)
    done: dict[str, Rehearsal] = {}
    for name, each in tries.items():
        done[name] = rehearse_once(model, batches, aim, each)
        if done[name].learns:
            break
    return done


def rehearse_once(
    model: nn.Module, batches: Sequence[Batch], aim: Objective, plan: Plan
) -> Rehearsal:
    """One plan; if it fails with its warm-up shortened, it is given three times as long."""
    steps = affordable(model, batches[0])
    done = rehearse(model, batches, aim, lr=plan.lr, warmup=plan.warmup, steps=steps)
    if done.learns or steps < STEPS or plan.warmup <= steps // 2:
        return done
    return rehearse(model, batches, aim, lr=plan.lr, warmup=plan.warmup, steps=3 * steps)


def affordable(model: nn.Module, batch: Batch) -> int:
    """Steps of a rehearsal: fewer for a large model."""
    return max(LEAST, min(STEPS, int(WORK / max(work(model, batch), 1.0))))


def predict(
    model: nn.Module, batches: Sequence[Batch], aim: Objective, plan: Plan
) -> dict[str, Prediction]:
    """Build the patient anew with other arrangements, and rehearse the same plan; ours alone."""
    config = getattr(model, "config", None)
    found: dict[str, Prediction] = {}
    if not isinstance(config, ModelConfig):
        return found
    batch = batches[0]
    for kind in OTHERS:
        if kind == config.addnorm:
            continue
        torch.manual_seed(0)
        try:
            other = build(config.replace(addnorm=kind)).eval()
        except ConfigError:
            continue  # an arrangement that this configuration rules out
        if kind == "admin":
            measure_(other, lambda other=other: run(other, batch))  # type: ignore[misc]
        with torch.no_grad():
            sites = watch(other, lambda other=other: run(other, batch), tensors(batch)).sites  # type: ignore[misc]
        moved = amplification(other, batch, sites, draws=1)[-1] ** 0.5
        tried = rehearse_once(other, batches, aim, plan)
        found[f"addnorm={kind}"] = Prediction(moved, tried)
    return found


def advise_warmup(plan: Plan, stable: float | None) -> int:
    """Steps of warm-up by the rule above, to two digits; `stable` may not be known.

    >>> advise_warmup(Plan(lr=1e-3), 4e-5), advise_warmup(Plan(lr=1e-3), None)
    (2500, 100)
    """
    settle = 2 / (1 - BETA)
    ratio = 1.0 if stable is None or stable <= 0 else max(1.0, plan.lr / stable)
    return int(float(f"{settle * ratio:.2g}"))
