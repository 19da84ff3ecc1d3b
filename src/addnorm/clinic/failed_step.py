"""A case: the inputs of a training step that failed, saved so that it can be replayed.

    cases/step-00000412/   batch-0.safetensors …      the batches of the step
                           weights.safetensors        the weights before the step
                           random.safetensors         the RNG state before the step
                           case.json                  the report at the time

The configuration is that of the run that contains it. A replay runs the batches through the
weights, with the same dropout, and reports the first result that is not finite, in forward order,
and the gradients that are not.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic.call_model import ClinicBatch, answer_of, unchanged
from addnorm.clinic.measure import gradients, root_mean_square
from addnorm.clinic.residual_trace import trace_stream
from addnorm.clinic.stream_records import Trace
from addnorm.config import Config
from addnorm.errors import SavedError
from addnorm.files import (
    FAILED_STEP,
    FAILED_STEP_BATCH,
    FAILED_STEP_MODEL,
    FAILED_STEP_RNG,
    nonfinite_to_null,
    read_document,
    read_text,
    to_json,
    write_document,
)
from addnorm.models.saved import build_with, read_tensors, write_tensors

CASE_FILE, CASE_WEIGHTS, CASE_RNG = "case.json", "weights.safetensors", "random.safetensors"
NO_TARGET = -100
"""The target of a position that has none."""

TaskBatch = Mapping[str, Tensor]


@dataclass(frozen=True)
class StepSettings:
    """How a step is computed, besides its batches and weights."""

    smoothing: float = 0.0
    precision: str = "float32"
    rng_state: Tensor | None = None
    """The RNG state before the step; if it is unknown, the step is replayed without dropout."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the step's precision."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast("cpu", getattr(torch, self.precision))


@dataclass(frozen=True)
class StepReport:
    """What a forward and a backward pass of a step's batches show.

    Parameters
    ----------
    loss : loss of the step
    first_non_finite : the first result that is not finite: operation and module
    non_finite_weights : weights that are not finite
    non_finite_gradients : gradients that are not finite
    largest_sites : the sites whose sum is largest, with its root mean square
    """

    loss: float
    first_non_finite: str | None
    non_finite_weights: tuple[str, ...]
    non_finite_gradients: tuple[str, ...]
    largest_sites: tuple[tuple[str, float], ...]

    def text(self) -> str:
        """Return the report in a few lines."""
        lines = [f"loss {self.loss:.4g}"]
        if self.non_finite_weights:
            lines.append(f"weights that are not finite: {', '.join(self.non_finite_weights[:5])}")
        first = self.first_non_finite or "none in the forward pass"
        lines.append(f"first result that is not finite: {first}")
        if self.non_finite_gradients:
            count, shown = len(self.non_finite_gradients), ", ".join(self.non_finite_gradients[:5])
            lines.append(f"gradients that are not finite: {count}, first {shown}")
        sites = ", ".join(f"{name} {size:.3g}" for name, size in self.largest_sites)
        return "\n".join([*lines, f"largest sites: {sites}"])


@dataclass(frozen=True)
class Case:
    """A replayed case: what was recorded at the time, and the report of the replay.

    Parameters
    ----------
    step : number of the step, if known
    kind : not finite, or spike
    loss : the loss of the step at the time; None if it was not finite or not recorded
    report : report of the replay
    """

    step: int | None
    kind: str
    loss: float | None
    report: StepReport

    def text(self) -> str:
        """Return what was recorded, then the report."""
        loss = "not finite" if self.loss is None else f"{self.loss:.4g}"
        step = "unknown step" if self.step is None else f"step {self.step}"
        return f"{step}: {self.kind}; its loss was {loss}. Replayed:\n{self.report.text()}"

    def json(self) -> str:
        """Return everything as JSON."""
        return to_json(asdict(self))


def report_step(
    model: nn.Module, batches: Sequence[TaskBatch], settings: StepSettings | None = None
) -> StepReport:
    """Run the batches of a step forward and back; the model is left unchanged."""
    settings = settings or StepSettings()
    count = sum(int((batch["targets"] != NO_TARGET).sum()) for batch in batches)
    loss, first = 0.0, None
    non_finite: list[str] = []
    largest: tuple[tuple[str, float], ...] = ()
    with unchanged(model):
        if settings.rng_state is not None:
            model.train()
            torch.set_rng_state(settings.rng_state)
        for batch in batches:
            with settings.autocast():
                trace = trace_stream(model, ClinicBatch.from_task(batch))
            part = cross_entropy(answer_of(trace.output), batch["targets"], settings.smoothing)
            part = part / max(count, 1)
            _, weights = gradients(model, part, trace.sites)
            loss += float(part.detach())
            non_finite += [
                name
                for name, grad in weights.items()
                if name not in non_finite and not bool(grad.isfinite().all())
            ]
            first = first or _describe_non_finite(trace)
            largest = max(largest, _largest_sites(trace), key=lambda sites: [s for _, s in sites])
    wrong = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    return StepReport(loss, first, tuple(wrong), tuple(non_finite), largest)


def cross_entropy(answer: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the cross-entropy over all positions that have a target."""
    return F.cross_entropy(
        answer.flatten(0, -2).float(),
        targets.flatten().long(),
        ignore_index=NO_TARGET,
        label_smoothing=smoothing,
        reduction="sum",
    )


def _describe_non_finite(trace: Trace) -> str | None:
    first = trace.stats.non_finite
    return None if first is None else f"{first.operation} in {first.path or 'the model'}"


def _largest_sites(trace: Trace) -> tuple[tuple[str, float], ...]:
    sizes = [(site.name, root_mean_square(site.total)) for site in trace.sites]
    finite = [(name, size) for name, size in sizes if math.isfinite(size)]
    return tuple(sorted(finite, key=lambda pair: -pair[1])[:3])


def write_case(
    folder: Path,
    facts: Mapping[str, Any],
    report: StepReport,
    batches: Sequence[TaskBatch],
    weights: TaskBatch | None,
    rng_state: Tensor | None,
) -> None:
    """Write a case.

    Parameters
    ----------
    folder : where to write it
    facts : step, kind and loss, for case.json
    report : the report of the step
    batches : the batches of the step
    weights : the weights before it, or None if the training loop saves weights and batches itself
    rng_state : the RNG state before it, if known
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"step": facts["step"]}
    if weights is not None:
        for i, batch in enumerate(batches):
            write_tensors(folder / f"batch-{i}.safetensors", batch, *FAILED_STEP_BATCH, content)
        write_tensors(folder / CASE_WEIGHTS, weights, *FAILED_STEP_MODEL, content)
    if rng_state is not None:
        write_tensors(folder / CASE_RNG, {"random": rng_state}, *FAILED_STEP_RNG, content)
    document = nonfinite_to_null({**facts, "report": asdict(report)})
    write_document(folder / CASE_FILE, *FAILED_STEP, document)


def replay(folder: str | Path) -> Case:
    """Run a case again, from its files alone."""
    folder = Path(folder)
    path = folder.parent.parent / "config.toml"
    if not (folder / CASE_WEIGHTS).is_file():
        raise SavedError(
            f"there is no case in {str(folder)!r}. Try the folder of a step, such as "
            "runs/mine/cases/step-00000412."
        )
    config = Config.parse(read_text(path), source=str(path))
    weights, _ = read_tensors(folder / CASE_WEIGHTS, *FAILED_STEP_MODEL)
    try:
        model = build_with(config, weights, folder)
    except SavedError as error:
        raise SavedError(
            f"the weights of the case in {str(folder)!r} do not fit the run's config.toml: {error}"
        ) from None
    batches = sorted(folder.glob("batch-*.safetensors"))
    if not batches:
        raise SavedError(f"the case in {str(folder)!r} has no batch file.")
    facts = _read_facts(folder)
    rng_state = None
    if (folder / CASE_RNG).is_file():
        rng_state = read_tensors(folder / CASE_RNG, *FAILED_STEP_RNG)[0]["random"]
    precision = facts.get("precision", "float32")
    settings = StepSettings(config.train.label_smoothing, precision, rng_state)
    tensors = [read_tensors(each, *FAILED_STEP_BATCH)[0] for each in batches]
    report = report_step(model, tensors, settings)
    return Case(facts.get("step"), facts.get("kind", "not finite"), facts.get("loss"), report)


def _read_facts(folder: Path) -> dict[str, Any]:
    """Return the contents of case.json; empty if the run had no training monitor."""
    if not (folder / CASE_FILE).is_file():
        return {}
    return read_document(folder / CASE_FILE, *FAILED_STEP)


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Return whether a loss is 6 standard deviations and half the mean above the last ones."""
    if len(before) < 20 or not math.isfinite(loss):
        return False
    mean = sum(before) / len(before)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in before) / len(before))
    return loss > mean + 6 * deviation and loss > 1.5 * mean
