"""A case: what a step that went wrong was given, kept so that it can be seen again.

    cases/step-00000412/   batch-0.safetensors, weights.safetensors   what the model was given
                           case.json                                  what was seen at the time

The configuration is that of the run around it. Replaying runs the batch through the weights and
names the first result that is not finite, in forward order, and the gradients that are not.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic.call import answer_of, unchanged
from addnorm.clinic.measure import gradients
from addnorm.clinic.trace import Trace, watch
from addnorm.config import Config
from addnorm.disk import read_text, write_whole
from addnorm.errors import SavedError
from addnorm.models.build import build
from addnorm.models.saved import read_tensors, write_tensors

FACTS, WEIGHTS = "case.json", "weights.safetensors"


@dataclass(frozen=True)
class Seen:
    """What a batch shows when it is run through the weights."""

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


def see(model: nn.Module, batch: Mapping[str, Tensor]) -> Seen:
    """Run one batch of a task forward and back, in evaluation mode, and leave no mark."""
    with unchanged(model):
        trace = watch(model, lambda: call(model, batch), list(batch.values()))
        loss = _loss(answer_of(trace.output), batch["targets"])
        _, weights = gradients(model, loss, trace.sites)
    bad = [name for name, g in weights.items() if not bool(g.isfinite().all())]
    wrong = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    return Seen(float(loss.detach()), _first(trace), tuple(wrong), tuple(bad), _loudest(trace))


def call(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """The model's answer to a batch of a task."""
    if "source" in batch:
        return model(batch["source"], batch["target_in"])
    return model(batch["inputs"])


def _loss(answer: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(answer.flatten(0, -2), targets.flatten().long(), ignore_index=-100)


def _first(trace: Trace) -> str | None:
    bad = trace.watch.bad
    return None if bad is None else f"{bad.operation} in {bad.path or 'the model'}"


def _loudest(trace: Trace) -> tuple[tuple[str, float], ...]:
    sizes = [(s.name, float(s.total.detach().float().pow(2).mean().sqrt())) for s in trace.sites]
    known = [(name, size) for name, size in sizes if math.isfinite(size)]
    return tuple(sorted(known, key=lambda pair: -pair[1])[:3])


def write_case(
    folder: Path,
    facts: Mapping[str, Any],
    seen: Seen,
    model: nn.Module | None,
    batch: Mapping[str, Tensor],
) -> None:
    """Write a case; weights too if the model is given, else the loop writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        write_tensors(folder / "batch-0.safetensors", batch, {})
        write_tensors(folder / WEIGHTS, model.state_dict(), {})
    text = json.dumps({**facts, "seen": asdict(seen)}, indent=1, ensure_ascii=False)
    write_whole(folder / FACTS, text.replace("NaN", "null").encode())


def replay(folder: str | Path) -> Seen:
    """Run a case again, from what is on disk alone."""
    folder = Path(folder)
    config = folder.parent.parent / "config.toml"
    if not (folder / WEIGHTS).is_file():
        raise SavedError(
            f"there is no case in {str(folder)!r}. Try the folder of a step, such as "
            "runs/mine/cases/step-00000412."
        )
    model = build(Config.parse(read_text(config), source=str(config)))
    weights, _ = read_tensors(folder / WEIGHTS)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise SavedError(f"the case in {str(folder)!r} is of another model: {reason}") from None
    batches = sorted(folder.glob("batch-*.safetensors"))
    if not batches:
        raise SavedError(f"the case in {str(folder)!r} has lost its batch.")
    seen = [see(model, read_tensors(path)[0]) for path in batches]
    return next((each for each in seen if each.first_bad or each.bad_gradients), seen[0])


def is_spike(loss: float, before: list[float]) -> bool:
    """Whether a loss stands far above the last ones: by 6 deviations and by half of their mean."""
    if len(before) < 20 or not math.isfinite(loss):
        return False
    mean = sum(before) / len(before)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in before) / len(before))
    return loss > mean + 6 * deviation and loss > 1.5 * mean
