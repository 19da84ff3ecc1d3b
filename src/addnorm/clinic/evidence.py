"""Everything that an examination measures, before any rule is applied to it."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from addnorm import __version__
from addnorm.clinic.arrangement import Arrangement, find_arrangement, unnormed_end
from addnorm.clinic.call_model import (
    ClinicBatch,
    Loss,
    NotExamined,
    Objective,
    answer_of,
    choose_objective,
    chosen_answer,
    deviation_of,
    is_causal,
    padding_id,
    require_fit,
    unchanged,
)
from addnorm.clinic.coverage import PLANNED, RULES_OF_CHECKS
from addnorm.clinic.forward_stats import ActivationStats, AttentionStats, NonFinite
from addnorm.clinic.input_experiments import ExperimentResults, run_experiments
from addnorm.clinic.measure import (
    NormGain,
    NormPlacement,
    SiteMeasurement,
    dependency_map,
    equal_matrices,
    is_untrained,
    measure_sites,
    norm_gains,
    norm_placement,
    weight_gains,
)
from addnorm.clinic.optimizer_check import OptimizerFacts, read_optimizer
from addnorm.clinic.padding_experiments import find_padding
from addnorm.clinic.parameter_checks import (
    idle_attention,
    large_epsilons,
    shrunk_gradients,
    unregistered_weights,
    untrained_in_training_mode,
    unused_blocks,
)
from addnorm.clinic.prediction import WILL_NOT_TRAIN, Prediction, Rehearsal, predict_outcome
from addnorm.clinic.rehearsal import (
    Alternative,
    TrainingPlan,
    rehearse_alternatives,
    rehearse_plan,
)
from addnorm.clinic.residual_trace import trace_stream
from addnorm.clinic.sharpness import Sharpness, measure_sharpness
from addnorm.clinic.stream_records import Trace
from addnorm.clinic.weight_perturbation import Growth, amplification, fit_growth
from addnorm.config import ModelConfig
from addnorm.errors import InputError
from addnorm.models.tabular import TabularConfig

MIN_GROWTH_POINTS = 6
"""Branches that a law of growth needs."""


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
    transformer : whether softmax attention was found
    built_by_addnorm : whether addnorm built the model, so that settings of its configuration help
    padded : whether the batch holds padding
    data : what the batch is
    version : version of addnorm
    date : day of the examination
    arrangement : how branches join the stream
    missing_gradients : trained parameters of branches that the loss has no gradient for
    non_finite_gradients : parameters whose gradient is not finite
    cut_sites : sites where the stream or the branch was detached
    trained : share of the parameters that require a gradient
    frozen_embeddings : token embeddings that are not trained while others are
    frozen_head : matrices of the output that are not trained while others are
    equal_weights : matrices of branches whose rows are all equal
    linear_branches : feed-forward branches without an activation function
    evaluation_dropout : the largest dropout probability in evaluation mode, and its module
    unregistered : trained values that the answer depends on and that are no parameters of the model
    unused_blocks : blocks without any gradient, while others of their list have one
    shrunk_gradients : sites whose sum gets far less gradient than the next passes back unscaled
    misnormed_attention : attention whose weights sum to 1 over another axis than the keys
    idle_attention : attention branches whose queries and keys have no gradient
    large_epsilons : norms whose ε is larger than what they norm
    untrained_in_training : whether in training mode no branch has a gradient, but others have
    zero_head : whether the output layer starts at zero, so that nothing else has a gradient yet
    batch_norms : number of modules that norm over the batch
    optimizer : settings of the optimizer, if one was passed
    not_examined : why a check could not be made, by its name
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
    prediction : whether the planned training will work, and why
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
    transformer: bool = True
    built_by_addnorm: bool = False
    padded: bool = False
    data: str = ""
    version: str = ""
    date: str = ""
    arrangement: Arrangement = field(default_factory=Arrangement)
    missing_gradients: tuple[str, ...] = ()
    non_finite_gradients: tuple[str, ...] = ()
    cut_sites: tuple[str, ...] = ()
    trained: float = 1.0
    frozen_embeddings: tuple[str, ...] = ()
    frozen_head: tuple[str, ...] = ()
    equal_weights: tuple[str, ...] = ()
    linear_branches: tuple[str, ...] = ()
    evaluation_dropout: tuple[float, str] = (0.0, "")
    unregistered: int = 0
    unused_blocks: tuple[str, ...] = ()
    shrunk_gradients: tuple[str, ...] = ()
    misnormed_attention: tuple[str, ...] = ()
    idle_attention: tuple[str, ...] = ()
    large_epsilons: tuple[str, ...] = ()
    untrained_in_training: bool = False
    zero_head: bool = False
    batch_norms: int = 0
    optimizer: OptimizerFacts | None = None
    not_examined: Mapping[str, str] = field(default_factory=dict)
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
    prediction: Prediction | None = None
    rehearsals: Mapping[str, Rehearsal] = field(default_factory=dict)
    alternatives: Mapping[str, Alternative] = field(default_factory=dict)
    experiments: ExperimentResults = field(default_factory=ExperimentResults)
    notes: Sequence[str] = ()

    def all_rehearsals(self) -> dict[str, Rehearsal]:
        """Return every rehearsal by name, including those of other arrangements."""
        others = {name: other.rehearsal for name, other in self.alternatives.items()}
        return {**self.rehearsals, **others}

    @property
    def fine_tuned(self) -> bool:
        """Whether most of the branches hold frozen parameters, as adapters leave them."""
        frozen = [site for site in self.sites if site.trainable < 1]
        return 2 * len(frozen) > len(self.sites)

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
    optimizer: Optimizer | None = None,
    data: str = "",
    say: Callable[[str], object] = lambda text: None,
) -> Evidence:
    """Measure everything and return it; the model is left unchanged.

    Parameters
    ----------
    model : the model
    batches : the batch that is examined, then those that a rehearsal learns from
    loss, plan, pad, causal, sharpness, optimizer, data, say : as for `examine`
    """
    start = time.perf_counter()
    batch = batches[0]
    non_finite_input = _name_of_non_finite(batch.arguments)
    non_finite_weight = _name_of_non_finite(dict(model.named_parameters()))
    reasons: dict[str, str] = {}
    pad = padding_id(model) if pad is None else pad
    with unchanged(model):
        require_fit(model, batch)
        with chosen_answer(model, batch):
            objective = choose_objective(model, batch, loss, pad)
            trace = trace_stream(model, batch)
            value = objective.value(trace.output, batch)
            reached = answer_of(trace.output)
            unregistered = unregistered_weights(model, reached, batch)
            answer = reached.detach().float()
            arrangement = find_arrangement(trace)
            with _attempt("gradients", reasons):
                sites, gradients = measure_sites(model, trace, value)
            if "gradients" in reasons:
                sites, gradients = measure_sites(model, trace, value.detach())
                if _trains(model, batch, objective):  # a cache may be written in evaluation mode
                    reasons["gradients"] = "the backward pass works in training mode only"
            more: dict[str, Any] = {}
            non_finite = trace.stats.non_finite
            if non_finite and not _reaches_loss(value, answer, batch, pad):
                non_finite = None  # hidden again, by torch.where or in the padding
            if non_finite or non_finite_input or non_finite_weight:
                _skip_all(reasons, "a value of the forward pass is not finite")
            else:
                more = _measure_finite(
                    model, batch, objective, trace, gradients, pad, sharpness, reasons
                )
                if plan is not None and gradients:
                    with _attempt(PLANNED, reasons):
                        more |= _rehearse(model, batches, objective, plan, say)
    experiments = more.get("experiments", ExperimentResults())
    reasons |= experiments.not_examined
    if plan is None:
        reasons[PLANNED] = "no plan was passed"
    if optimizer is None:
        reasons["optimizer"] = "no optimizer was passed"
    transformer = bool(trace.stats.attention)
    for check in ("residual stream", "norms") if arrangement.unseen else ():
        reasons.setdefault(check, arrangement.unseen)
    if not trace.sites:
        for check in ("residual stream", "norms"):
            reasons.setdefault(check, "no residual stream was found")
    if not transformer:
        reasons.setdefault("attention", "no softmax attention was found")
    untrained = is_untrained(model)
    if not untrained:
        reasons.setdefault("initial weights", "the model is trained")
    if not trace.stats.activations:
        reasons.setdefault("activations", "no activation function was found")
    labels_are_later = experiments.label_shift in (1, 2)
    hidden = causal if causal is not None else is_causal(model) or labels_are_later
    classes = answer.shape[-1] if objective.cross_entropy else 0
    every = sum(p.numel() for p in model.parameters())
    return Evidence(
        model=type(model).__name__,
        parameters=every,
        causal=bool(hidden),
        untrained=untrained,
        without_positions=_without_positions(model),
        transformer=transformer,
        built_by_addnorm=isinstance(getattr(model, "config", None), ModelConfig | TabularConfig),
        padded=_is_padded(batch, pad),
        data=data or describe_batch(batch),
        version=__version__,
        date=time.strftime("%Y-%m-%d"),
        arrangement=arrangement,
        missing_gradients=_missing_gradients(model, trace, sites, gradients),
        non_finite_gradients=tuple(
            name for name, grad in gradients.items() if not bool(grad.isfinite().all())
        ),
        cut_sites=tuple(site.name for site in trace.sites if site.cut),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad) / every,
        frozen_embeddings=_frozen_parts(model, tuple(trace.embeddings)),
        frozen_head=_frozen_parts(model, trace.head),
        equal_weights=equal_matrices(model, trace),
        linear_branches=tuple(site.name for site in trace.sites if site.linear),
        evaluation_dropout=trace.dropouts,
        unregistered=unregistered,
        unused_blocks=unused_blocks(model, trace, gradients) if gradients else (),
        shrunk_gradients=shrunk_gradients(trace, sites),
        misnormed_attention=tuple(dict.fromkeys(trace.misnormed)),
        idle_attention=idle_attention(trace, gradients),
        large_epsilons=large_epsilons(model),
        zero_head=_is_zero(model, trace.head),
        batch_norms=sum(isinstance(m, _BatchNorm) for m in model.modules()),
        optimizer=None if optimizer is None else read_optimizer(model, optimizer),
        not_examined=reasons,
        loss=float(value.detach()),
        loss_description=objective.description,
        uniform_loss=math.log(classes) if classes > 1 else None,
        answer_deviation=float(deviation_of(answer)),
        seconds=time.perf_counter() - start,
        sites=sites,
        signs={site.name: site.sign for site in trace.sites},
        norms=norm_placement(trace, arrangement.kind, unnormed_end(trace)),
        attention=trace.stats.attention,
        activations=trace.stats.activations,
        non_finite=non_finite,
        non_finite_input=non_finite_input,
        non_finite_weight=non_finite_weight,
        largest_value=trace.stats.largest,
        norm_gains=norm_gains(model),
        weight_gain=_median(weight_gains(model, trace.sites)),
        plan=None if plan is None else plan.described(),
        notes=[] if trace.sites else ["no residual stream was found in this model"],
        **more,
    )


@contextmanager
def _attempt(check: str, reasons: dict[str, str]) -> Iterator[None]:
    """Record an error as the reason why a check was not made; errors of the input are raised."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # of the model's own code, or of torch: other checks go on
        line = (str(error).splitlines() or ["no message"])[0][:160]
        reasons[check] = f"the measurement failed: {type(error).__name__}: {line}"


def _skip_all(reasons: dict[str, str], reason: str) -> None:
    for check in (*RULES_OF_CHECKS, PLANNED):
        if check != "forward pass":
            reasons.setdefault(check, reason)


def describe_batch(batch: ClinicBatch) -> str:
    """Return the names and shapes of what the model is called with.

    >>> import torch
    >>> describe_batch(ClinicBatch({"input_ids": torch.zeros(2, 5, dtype=torch.long)}))
    'input_ids 2 × 5'
    """
    parts = []
    for name, argument in batch.arguments.items():
        if isinstance(argument, Tensor):
            shape = " × ".join(map(str, argument.shape)) or "one number"
            parts.append(shape if name.isdigit() else f"{name} {shape}")
    return ", ".join(parts)


def _is_padded(batch: ClinicBatch, pad: int | None) -> bool:
    try:
        find_padding(batch, pad)
    except NotExamined:
        return False
    return True


def _reaches_loss(value: Tensor, answer: Tensor, batch: ClinicBatch, pad: int | None) -> bool:
    """Return whether the loss, or an answer that is not at padding, is not finite."""
    if not bool(value.isfinite()):
        return True
    wrong = ~answer.isfinite()
    mask = batch.arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == answer.shape[:2]:
        wrong = wrong & (mask[..., None] != 0)
    return bool(wrong.any())


def _trains(model: nn.Module, batch: ClinicBatch, objective: Objective) -> bool:
    """Return whether the backward pass works in training mode."""
    weights = [p for p in model.parameters() if p.requires_grad]
    model.train()
    try:
        torch.autograd.grad(objective(model, batch), weights, allow_unused=True)
    except RuntimeError:
        return False
    finally:
        model.eval()
    return True


def _missing_gradients(
    model: nn.Module,
    trace: Trace,
    sites: Sequence[SiteMeasurement],
    gradients: Mapping[str, Tensor],
) -> tuple[str, ...]:
    """Return trained parameters of branches without gradient, where the branch is not zero."""
    if not gradients:
        return ()
    named = dict(model.named_parameters(remove_duplicate=False))
    missing = []
    used = {i for i in range(len(trace.sites)) if i in trace.used_sites}
    for i, (site, measured) in enumerate(zip(trace.sites, sites, strict=True)):
        cut = i in used and measured.branch > 0 and measured.weight_gradient == 0
        if cut and not measured.stream_gradient:
            missing += [w for w in site.weights if w in named and named[w].requires_grad]
    return tuple(dict.fromkeys(missing))


def _is_zero(model: nn.Module, names: Sequence[str]) -> bool:
    """Return whether the matrices among these parameters are all zero."""
    named = dict(model.named_parameters(remove_duplicate=False))
    matrices = [named[name] for name in names if name in named and named[name].ndim > 1]
    return bool(matrices) and not any(bool(matrix.any()) for matrix in matrices)


def _frozen_parts(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return which of these parameters are not trained, if any parameter of the model is."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if not any(p.requires_grad for p in named.values()):
        return ()
    return tuple(sorted(n for n in names if n in named and not named[n].requires_grad))


def _measure_finite(
    model: nn.Module,
    batch: ClinicBatch,
    objective: Objective,
    trace: Trace,
    gradients: Mapping[str, Tensor],
    pad: int | None,
    sharpness: bool,
    reasons: dict[str, str],
) -> dict[str, Any]:
    """Return what can be measured if all values are finite, as fields of the evidence.

    Parameters
    ----------
    model, batch, objective : the model, what it is called with, and its loss
    trace : the traced forward pass
    gradients : gradient of each parameter
    pad, sharpness : as for `examine`
    reasons : receives why something could not be measured
    """
    changes: list[float] = []
    with _attempt("amplification", reasons):
        changes = amplification(model, batch, trace.sites) if trace.sites else []
    steps = range(1, len(changes) + 1)
    sharp = None
    finite = all(bool(grad.isfinite().all()) for grad in gradients.values())
    if sharpness and gradients and finite:
        with _attempt("sharpness", reasons):
            sharp = measure_sharpness(model, batch, objective)
    shares: list[dict[str, float]] = []
    with _attempt("dependency map", reasons):
        shares = dependency_map(trace)
    untrained = False
    with _attempt("gradients in training mode", reasons):
        untrained = untrained_in_training_mode(model, batch, objective, trace)
    reasons.pop("gradients in training mode", None)
    return {
        "untrained_in_training": untrained,
        "dependency_map": shares,
        "amplification": changes,
        "growth": fit_growth(steps, changes) if len(changes) >= MIN_GROWTH_POINTS else None,
        "sharpness": sharp,
        "experiments": run_experiments(model, batch, objective, pad),
    }


def _rehearse(
    model: nn.Module,
    batches: Sequence[ClinicBatch],
    objective: Objective,
    plan: TrainingPlan,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Rehearse the plan, and if it will not train other arrangements, as fields of the evidence."""
    rehearsals = rehearse_plan(model, batches, objective, plan, say)
    prediction = predict_outcome(rehearsals["planned"])
    others = {}
    if prediction.answer == WILL_NOT_TRAIN:
        planned = rehearsals["planned"]
        others = rehearse_alternatives(model, batches, objective, plan, planned, say)
    return {"prediction": prediction, "rehearsals": rehearsals, "alternatives": others}


def _name_of_non_finite(named: Mapping[str, Any]) -> str | None:
    """Return the name of the first tensor that is not finite."""
    tensors = ((name, value) for name, value in named.items() if isinstance(value, Tensor))
    return next((name for name, tensor in tensors if not bool(tensor.isfinite().all())), None)


def _without_positions(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return isinstance(config, ModelConfig) and config.positions == "none"


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
