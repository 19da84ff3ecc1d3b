"""Everything that an examination measures, before any rule is applied to it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import (
    ClinicBatch,
    Loss,
    Objective,
    answer_of,
    choose_objective,
    is_causal,
    unchanged,
)
from addnorm.clinic.forward_stats import ActivationStats, AttentionStats, NonFinite
from addnorm.clinic.input_experiments import ExperimentResults, run_experiments
from addnorm.clinic.measure import (
    NormGain,
    NormPlacement,
    SiteMeasurement,
    dependency_map,
    is_untrained,
    measure_sites,
    norm_gains,
    norm_placement,
    weight_gains,
)
from addnorm.clinic.rehearsal import (
    Alternative,
    Rehearsal,
    TrainingPlan,
    rehearse_alternatives,
    rehearse_plan,
)
from addnorm.clinic.residual_trace import Trace, trace_stream
from addnorm.clinic.sharpness import Sharpness, measure_sharpness
from addnorm.clinic.weight_perturbation import Growth, amplification, fit_growth
from addnorm.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The measurements of one model. What could not be measured is None or empty.

    Parameters
    ----------
    model : class name of the model
    parameters : number of its parameters
    causal : whether later positions should be hidden: as configured, or because they are the labels
    untrained : whether nothing has been trained yet
    without_positions : whether the model is configured without positions
    loss : loss of the batch
    loss_description : what the loss is
    uniform_loss : log of the number of classes: the loss of a uniform answer
    answer_deviation : standard deviation of the answer
    seconds : duration of the examination
    sites : measurements of every residual connection
    dependency_map : for each site, the share of each branch in its sum
    signs : by site: + or −, how the branch joins the stream
    norms : where the norms stand
    amplification : relative variance of the change of each sum when the weights change
    weight_change : relative size of the weight change behind `amplification`
    growth : how `amplification` grows with depth
    attention : statistics of each attention sublayer
    activations : statistics of each activation function
    non_finite : the first result that is not finite
    non_finite_input : name of the first input that is not finite
    non_finite_weight : name of the first weight that is not finite
    largest_value : largest value of the forward pass
    norm_gains : the gain of each norm
    weight_gain : median over the branches' matrices; 1 is that of Glorot and Bengio
    sharpness : sharpness of the loss
    plan : the planned training
    rehearsals : by name: `planned`, and if that fails, what else was tried
    alternatives : if the plan fails and the model is of addnorm: other arrangements, built and
        rehearsed
    experiments : results of the experiments with the input
    notes : further remarks
    """

    model: str
    parameters: int
    causal: bool
    untrained: bool
    without_positions: bool = False
    loss: float
    loss_description: str
    uniform_loss: float | None
    answer_deviation: float
    seconds: float = 0.0
    sites: Sequence[SiteMeasurement] = ()
    dependency_map: Sequence[Mapping[str, float]] = ()
    signs: Mapping[str, str] = field(default_factory=dict)
    norms: NormPlacement = field(default_factory=NormPlacement)
    amplification: Sequence[float] = ()
    weight_change: float = 0.01
    growth: Growth | None = None
    attention: Sequence[AttentionStats] = ()
    activations: Sequence[ActivationStats] = ()
    non_finite: NonFinite | None = None
    non_finite_input: str | None = None
    non_finite_weight: str | None = None
    largest_value: float = 0.0
    norm_gains: Sequence[NormGain] = ()
    weight_gain: float | None = None
    sharpness: Sharpness | None = None
    plan: TrainingPlan | None = None
    rehearsals: Mapping[str, Rehearsal] = field(default_factory=dict)
    alternatives: Mapping[str, Alternative] = field(default_factory=dict)
    experiments: ExperimentResults = field(default_factory=ExperimentResults)
    notes: Sequence[str] = ()

    def all_rehearsals(self) -> dict[str, Rehearsal]:
        """Return every rehearsal by name, including those of other arrangements."""
        others = {name: other.rehearsal for name, other in self.alternatives.items()}
        return {**self.rehearsals, **others}

    @property
    def output_change(self) -> float:
        """Relative change of the last sum behind `amplification`, as a standard deviation."""
        return float(self.amplification[-1] ** 0.5)


def gather_evidence(
    model: nn.Module,
    batches: Sequence[ClinicBatch],
    loss: Objective | Loss | None = None,
    *,
    plan: TrainingPlan | None = None,
    pad: int | None = None,
    causal: bool | None = None,
    sharpness: bool = True,
) -> Evidence:
    """Measure everything and return it; the model is left unchanged.

    Parameters
    ----------
    model : the model
    batches : the batch that is examined, then those that a rehearsal learns from
    loss, plan, pad, causal, sharpness : as for `examine`
    """
    start = time.perf_counter()
    batch = batches[0]
    non_finite_input = _name_of_non_finite(batch.arguments)
    non_finite_weight = _name_of_non_finite(dict(model.named_parameters()))
    with unchanged(model):
        objective = choose_objective(model, batch, loss)
        trace = trace_stream(model, batch)
        value = objective.value(trace.output, batch)
        answer = answer_of(trace.output).detach().float()
        sites, gradients = measure_sites(model, trace, value)
        more: dict[str, Any] = {}
        if not (trace.stats.non_finite or non_finite_input or non_finite_weight):
            more = _measure_finite(model, batch, objective, trace, gradients, pad, sharpness)
            if plan is not None and gradients:
                more |= _rehearse(model, batches, objective, plan)
    labels_are_later = more.get("experiments", ExperimentResults()).label_shift in (1, 2)
    hidden = causal if causal is not None else is_causal(model) or labels_are_later
    classes = answer.shape[-1] if objective.cross_entropy else 0
    return Evidence(
        model=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        causal=bool(hidden),
        untrained=is_untrained(model),
        without_positions=_without_positions(model),
        loss=float(value.detach()),
        loss_description=objective.description,
        uniform_loss=float(torch.tensor(float(classes)).log()) if classes > 1 else None,
        answer_deviation=float(answer.std()),
        seconds=time.perf_counter() - start,
        sites=sites,
        signs={site.name: site.sign for site in trace.sites},
        norms=norm_placement(trace),
        attention=trace.stats.attention,
        activations=trace.stats.activations,
        non_finite=trace.stats.non_finite,
        non_finite_input=non_finite_input,
        non_finite_weight=non_finite_weight,
        largest_value=trace.stats.largest,
        norm_gains=norm_gains(model),
        weight_gain=_median(weight_gains(model, trace.sites)),
        plan=plan,
        notes=[] if trace.sites else ["no residual stream was found in this model"],
        **more,
    )


def _measure_finite(
    model: nn.Module,
    batch: ClinicBatch,
    objective: Objective,
    trace: Trace,
    gradients: Mapping[str, Tensor],
    pad: int | None,
    sharpness: bool,
) -> dict[str, Any]:
    """Return what can be measured if all values are finite, as fields of the evidence."""
    changes = amplification(model, batch, trace.sites) if trace.sites else []
    if pad is None:
        pad = getattr(getattr(model, "config", None), "pad", None)
    steps = range(1, len(changes) + 1)
    sharp = measure_sharpness(model, batch, objective) if sharpness and gradients else None
    return {
        "dependency_map": dependency_map(trace),
        "amplification": changes,
        "growth": fit_growth(steps, changes) if len(changes) > 3 else None,
        "sharpness": sharp,
        "experiments": run_experiments(model, batch, objective, pad),
    }


def _rehearse(
    model: nn.Module, batches: Sequence[ClinicBatch], objective: Objective, plan: TrainingPlan
) -> dict[str, Any]:
    """Rehearse the plan, and if it fails other arrangements, as fields of the evidence."""
    rehearsals = rehearse_plan(model, batches, objective, plan)
    if rehearsals["planned"].learns:
        return {"rehearsals": rehearsals}
    others = rehearse_alternatives(model, batches, objective, plan)
    return {"rehearsals": rehearsals, "alternatives": others}


def _name_of_non_finite(named: Mapping[str, Any]) -> str | None:
    """Return the name of the first tensor that is not finite."""
    tensors = ((name, value) for name, value in named.items() if isinstance(value, Tensor))
    return next((name for name, tensor in tensors if not bool(tensor.isfinite().all())), None)


def _without_positions(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return isinstance(config, ModelConfig) and config.positions == "none"


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
