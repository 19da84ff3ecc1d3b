"""Everything an examination measures, before anything is concluded from it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.amplify import Growth, amplification, growth
from addnorm.clinic.call import (
    Batch,
    Loss,
    Objective,
    answer_of,
    is_causal,
    parts,
    run,
    tensors,
    unchanged,
)
from addnorm.clinic.intervene import Experiments, experiment
from addnorm.clinic.measure import Measured, dependency_map, measure
from addnorm.clinic.objective import objective
from addnorm.clinic.rehearsal import Rehearsal
from addnorm.clinic.remedy import Plan, Prediction, predict, rehearse_plan
from addnorm.clinic.sharpness import Sharpness, sharpness
from addnorm.clinic.structure import Gain, Structure, gains, is_fresh, structure, weight_gains
from addnorm.clinic.trace import Trace, watch
from addnorm.clinic.watch import Bad, Heads, Units
from addnorm.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured. Where something could not be, it is None or empty."""

    model: str
    parameters: int
    causal: bool
    """The future is meant to be hidden: the configuration says so, or the labels are the future."""
    fresh: bool
    """Nothing has been trained yet."""
    positionless: bool = False
    """The configuration asks for no positions."""
    loss: float
    loss_said: str
    even_loss: float | None
    """log of the number of classes: the loss of a model that knows nothing."""
    spread: float
    """Standard deviation of the answer."""
    seconds: float = 0.0
    sites: Sequence[Measured] = ()
    map: Sequence[Mapping[str, float]] = ()
    signs: Mapping[str, str] = field(default_factory=dict)
    structure: Structure = field(default_factory=Structure)
    amplification: Sequence[float] = ()
    share: float = 0.01
    """Relative size of the weight change behind `amplification`."""
    growth: Growth | None = None
    heads: Sequence[Heads] = ()
    units: Sequence[Units] = ()
    bad: Bad | None = None
    bad_input: str | None = None
    bad_weight: str | None = None
    largest: float = 0.0
    gains: Sequence[Gain] = ()
    weight_gain: float | None = None
    """Median over the branches' matrices; 1 is that of Glorot and Bengio."""
    sharpness: Sharpness | None = None
    plan: Plan | None = None
    rehearsals: Mapping[str, Rehearsal] = field(default_factory=dict)
    """By name: `planned`, and if that fails, what else was tried."""
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    """If it fails, and the model is ours: other arrangements, built and rehearsed in its place."""
    experiments: Experiments = field(default_factory=Experiments)
    notes: Sequence[str] = ()

    def tried(self) -> dict[str, Rehearsal]:
        """Every rehearsal, those of other arrangements too."""
        others = {name: other.rehearsal for name, other in self.predictions.items()}
        return {**self.rehearsals, **others}


def gather(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None = None,
    *,
    plan: Plan | None = None,
    more: Sequence[Batch] = (),
    pad: int | None = None,
    causal: bool | None = None,
    sharp: bool = True,
) -> Evidence:
    """Measure everything; the model is left exactly as it was."""
    began = time.perf_counter()
    bad_input = next((n for n, t in _named(batch) if not bool(t.isfinite().all())), None)
    bad_weight = next(
        (n for n, p in model.named_parameters() if not bool(p.isfinite().all())), None
    )
    with unchanged(model):
        aim = objective(model, batch, loss)
        trace = watch(model, lambda: run(model, batch), tensors(batch))
        value = aim.of(trace.output, batch)
        answer = answer_of(trace.output).detach().float()
        measured, gradients = measure(model, trace, value)
        facts: dict[str, Any] = {}
        if trace.watch.bad is None and bad_input is None and bad_weight is None:
            facts = _more(model, batch, aim, trace, gradients, pad, sharp)
            if plan is not None and gradients:
                facts |= _rehearse(model, [batch, *more], aim, plan)
    done = facts.get("experiments", Experiments())
    meant = causal if causal is not None else is_causal(model) or done.label_shift in (1, 2)
    classes = answer.shape[-1] if "entropy" in aim.said or "own loss" in aim.said else None
    facts["notes"] = [] if trace.sites else ["no residual stream was found in this model"]
    return Evidence(
        model=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        causal=bool(meant),
        fresh=is_fresh(model),
        positionless=_positionless(model),
        loss=float(value.detach()),
        loss_said=aim.said,
        even_loss=float(torch.tensor(float(classes)).log()) if classes and classes > 1 else None,
        spread=float(answer.std()),
        seconds=time.perf_counter() - began,
        sites=measured,
        signs={site.name: site.sign for site in trace.sites},
        structure=structure(trace),
        heads=trace.watch.heads,
        units=trace.watch.units,
        bad=trace.watch.bad,
        bad_input=bad_input,
        bad_weight=bad_weight,
        largest=trace.watch.largest,
        gains=gains(model),
        weight_gain=_median(weight_gains(model, trace.sites)),
        plan=plan,
        **facts,
    )


def _more(
    model: nn.Module,
    batch: Batch,
    aim: Objective,
    trace: Trace,
    gradients: Mapping[str, Tensor],
    pad: int | None,
    sharp: bool,
) -> dict[str, Any]:
    """What can be measured of a model whose numbers are all finite."""
    moved = amplification(model, batch, trace.sites) if trace.sites else []
    config = getattr(model, "config", None)
    if pad is None:
        pad = getattr(config, "pad", None)
    return {
        "map": dependency_map(trace),
        "amplification": moved,
        "growth": growth(range(1, len(moved) + 1), moved) if len(moved) > 3 else None,
        "sharpness": sharpness(model, batch, aim) if sharp and gradients else None,
        "experiments": experiment(model, batch, aim, pad),
    }


def _rehearse(
    model: nn.Module, batches: Sequence[Batch], aim: Objective, plan: Plan
) -> dict[str, Any]:
    """The planned training, and where it fails, what else would do."""
    done = rehearse_plan(model, batches, aim, plan)
    others = {} if done["planned"].learns else predict(model, batches, aim, plan)
    return {"rehearsals": done, "predictions": others}


def _named(batch: Batch) -> list[tuple[str, Tensor]]:
    return [
        (name, part)
        for name, part in parts(batch).items()
        if isinstance(part, Tensor) and part.is_floating_point()
    ]


def _positionless(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return isinstance(config, ModelConfig) and config.positions == "none"


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
