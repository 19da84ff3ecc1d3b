"""A case: what a step that went wrong was given, kept so that it can be seen again.

    cases/step-00000412/   batch-0.safetensors …      what the model was given
                           weights.safetensors        its weights before the step
                           random.safetensors         the dice, as dropout found them
                           case.json                  what was seen at the time

The configuration is that of the run around it. Replaying runs the batches through the weights, with
the same dropout, and names the first result that is not finite, in forward order, and the
gradients that are not.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic.call import answer_of, unchanged
from addnorm.clinic.measure import gradients, size
from addnorm.clinic.trace import Trace, watch
from addnorm.config import Config
from addnorm.disk import read_text, to_json, write_whole
from addnorm.errors import AddnormError, SavedError
from addnorm.models.build import build
from addnorm.models.saved import read_tensors, write_tensors

FACTS, WEIGHTS, RANDOM = "case.json", "weights.safetensors", "random.safetensors"
IGNORE = -100
"""The target of a position that has none."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class How:
    """How the step was made, besides its batches and weights."""

    smoothing: float = 0.0
    precision: str = "float32"
    random: Tensor | None = None
    """The state of the dice; where it is not known, dropout is left out."""

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast("cpu", getattr(torch, self.precision))


@dataclass(frozen=True)
class Seen:
    """What batches show when they are run through the weights."""

    loss: float
    first_bad: str | None
    """The first result that is not finite: operation and module."""
    bad_weights: tuple[str, ...]
    bad_gradients: tuple[str, ...]
    loudest: tuple[tuple[str, float], ...]
    """The sites whose sum is largest, with its root mean square."""

    def text(self) -> str:
        """In a few lines."""
        lines = [f"loss {self.loss:.4g}"]
        if self.bad_weights:
            lines.append(f"weights that are not finite: {', '.join(self.bad_weights[:5])}")
        lines.append(f"first result that is not finite: {self.first_bad or 'none, going forward'}")
        if self.bad_gradients:
            shown = ", ".join(self.bad_gradients[:5])
            lines.append(f"gradients that are not finite: {len(self.bad_gradients)}, first {shown}")
        loud = ", ".join(f"{name} {size:.3g}" for name, size in self.loudest)
        return "\n".join([*lines, f"loudest sites: {loud}"])


@dataclass(frozen=True)
class Case:
    """A case run again: what was noted at the time, and what is seen now."""

    step: int | None
    kind: str
    """not finite, or spike."""
    loss: float | None
    """Of the step, at the time; None if it was not finite, or not noted."""
    seen: Seen

    def text(self) -> str:
        """What it was, then what is seen."""
        then = "not finite" if self.loss is None else f"{self.loss:.4g}"
        where = "a step" if self.step is None else f"step {self.step}"
        return f"{where}: {self.kind}; its loss was {then}. Run again:\n{self.seen.text()}"

    def json(self) -> str:
        return to_json(asdict(self))


def see(model: nn.Module, batches: Sequence[Tensors], how: How | None = None) -> Seen:
    """Run the batches of a step forward and back, and leave no mark."""
    how = how or How()
    total = sum(int((batch["targets"] != IGNORE).sum()) for batch in batches)
    loss, first = 0.0, None
    bad: list[str] = []
    loudest: tuple[tuple[str, float], ...] = ()
    with unchanged(model):
        if how.random is not None:
            model.train()
            torch.set_rng_state(how.random)
        for batch in batches:
            with how.autocast():
                trace = watch(model, lambda batch=batch: call(model, batch), list(batch.values()))  # type: ignore[misc]
            part = cross_entropy(answer_of(trace.output), batch["targets"], how.smoothing)
            part = part / max(total, 1)
            _, weights = gradients(model, part, trace.sites)
            loss += float(part.detach())
            bad += [n for n, g in weights.items() if n not in bad and not bool(g.isfinite().all())]
            first = first or _first(trace)
            loudest = max(loudest, _loudest(trace), key=lambda pairs: [size for _, size in pairs])
    wrong = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    return Seen(loss, first, tuple(wrong), tuple(bad), loudest)


def call(model: nn.Module, batch: Tensors) -> Any:
    """The model's answer to a batch of a task."""
    if "source" in batch:
        return model(batch["source"], batch["target_in"])
    return model(batch["inputs"])


def cross_entropy(answer: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The sum over all positions that have a target."""
    return F.cross_entropy(
        answer.flatten(0, -2).float(),
        targets.flatten().long(),
        ignore_index=IGNORE,
        label_smoothing=smoothing,
        reduction="sum",
    )


def _first(trace: Trace) -> str | None:
    bad = trace.watch.bad
    return None if bad is None else f"{bad.operation} in {bad.path or 'the model'}"


def _loudest(trace: Trace) -> tuple[tuple[str, float], ...]:
    sizes = [(site.name, size(site.total)) for site in trace.sites]
    known = [(name, each) for name, each in sizes if math.isfinite(each)]
    return tuple(sorted(known, key=lambda pair: -pair[1])[:3])


def write_case(
    folder: Path,
    facts: Mapping[str, Any],
    seen: Seen,
    batches: Sequence[Tensors],
    weights: Tensors | None,
    random: Tensor | None,
) -> None:
    """Write a case; without weights, those and the batches are for the loop to write."""
    folder.mkdir(parents=True, exist_ok=True)
    if weights is not None:
        for i, batch in enumerate(batches):
            write_tensors(folder / f"batch-{i}.safetensors", batch, {})
        write_tensors(folder / WEIGHTS, weights, {})
    if random is not None:
        write_tensors(folder / RANDOM, {"random": random}, {})
    write_whole(folder / FACTS, to_json({**facts, "seen": asdict(seen)}).encode())


def replay(folder: str | Path) -> Case:
    """Run a case again, from what is on disk alone."""
    folder = Path(folder)
    path = folder.parent.parent / "config.toml"
    if not (folder / WEIGHTS).is_file():
        raise SavedError(
            f"there is no case in {str(folder)!r}. Try the folder of a step, such as "
            "runs/mine/cases/step-00000412."
        )
    config = Config.parse(read_text(path), source=str(path))
    model = build(config)
    weights, _ = read_tensors(folder / WEIGHTS)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise SavedError(f"the case in {str(folder)!r} is of another model: {reason}") from None
    batches = sorted(folder.glob("batch-*.safetensors"))
    if not batches:
        raise SavedError(f"the case in {str(folder)!r} has lost its batch.")
    facts = _facts(folder)
    random = None
    if (folder / RANDOM).is_file():
        random = read_tensors(folder / RANDOM)[0]["random"]
    how = How(config.train.smoothing, facts.get("precision", "float32"), random)
    seen = see(model, [read_tensors(each)[0] for each in batches], how)
    return Case(facts.get("step"), facts.get("kind", "not finite"), facts.get("loss"), seen)


def _facts(folder: Path) -> dict[str, Any]:
    """What was noted at the time; nothing if the clinic did not watch the run."""
    if not (folder / FACTS).is_file():
        return {}
    try:
        found: dict[str, Any] = dict(json.loads(read_text(folder / FACTS)))
    except (ValueError, TypeError, AddnormError) as error:
        raise SavedError(f"{str(folder / FACTS)!r} is damaged: {error}. Delete it.") from None
    return found


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Whether a loss stands far above the last ones: by 6 deviations and by half of their mean."""
    if len(before) < 20 or not math.isfinite(loss):
        return False
    mean = sum(before) / len(before)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in before) / len(before))
    return loss > mean + 6 * deviation and loss > 1.5 * mean
