"""The clinic during training: a few signals now and then, early warnings, a case when it breaks.

    update ratio    √mean Δw² / √mean w² of one step, Δw = lr · m̂ / (√v̂ + ε): 1e-3 is usual
    starved         share of weights with 0 < √v̂ < ε: Adam's ε swallows their gradient
    the stream      dependency, attention entropy, distinct positions: of one batch, every k steps

Wortsman et al. 2023 (2309.14322), §3. The stream is looked at in one traced forward pass of the
step's own batch in evaluation mode, with the dice put back, so a run that is watched is the run
that is not, bit for bit. It only has the methods that the loop calls on its observers.
"""

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from addnorm.clinic.call import unchanged
from addnorm.clinic.case import How, call, is_spike, see, write_case
from addnorm.clinic.measure import dependency, distinct
from addnorm.clinic.trace import watch
from addnorm.disk import read_text, to_json, write_whole
from addnorm.errors import ConfigError

SIGNALS = "clinic.jsonl"
EVERY = 100
"""Steps from one look at the stream to the next: bench/clinic_cost.py measures what it costs."""
EARLY = (10, 30)
"""Steps at which it is looked at besides: what diverges often does so before the first hundred."""
MOST_CASES = 3
"""More of one run would say the same."""


class Clinic:
    """Pass it among the loop's observers; `every` steps it looks at the stream."""

    def __init__(self, path: Path | None = None, every: int = EVERY) -> None:
        self.path, self.every = path, every
        self.recent: deque[float] = deque(maxlen=100)
        self.signals: list[dict[str, Any]] = []
        self.warned: set[str] = set()
        self.grads: dict[str, float] = {}
        self.cases = 0
        self.random: Tensor | None = None
        """The dice before the step."""
        self.own: list[Tensor] = []
        self.weights: dict[str, Tensor] = {}
        """The model's own weights; and as they were before the step."""

    def begin(self, loop: Any) -> None:
        """Where the run keeps its files is where the signals go; those of a lost future go."""
        if any(hasattr(p, "full_tensor") for p in loop.model.parameters()):
            raise ConfigError(
                "the clinic watches a model that each worker holds whole: got run.parallel=fsdp. "
                "Try run.parallel=ddp."
            )
        self.path = self.path or loop.run_directory
        if self.path is not None and (self.path / SIGNALS).is_file():
            lines = read_text(self.path / SIGNALS).splitlines(keepends=True)
            kept = [line for line in lines if _step(line) <= loop.progress.step]
            write_whole(self.path / SIGNALS, "".join(kept).encode())
        state = loop.model.state_dict()
        self.own = list(state.values())
        self.weights = {name: tensor.detach().clone() for name, tensor in state.items()}
        self._note_dice(loop)

    def _is_due(self, step: int) -> bool:
        return step % self.every == 0 or step in EARLY

    def gradients(self, loop: Any, step: int) -> None:
        """The gradient of each block, and the weights, before the optimizer's step."""
        if self._is_due(step):
            self.grads = by_block(loop.model)
        torch._foreach_copy_(list(self.weights.values()), self.own)

    def stepped(self, loop: Any, step: Any) -> None:
        if not step.applied:
            self._keep_case(loop, step, "not finite")
        else:
            if is_spike(step.loss, self.recent):
                self._keep_case(loop, step, "spike")
            self.recent.append(step.loss)
            if self._is_due(step.number):
                self._look(loop, step)
        self._note_dice(loop)

    def evaluated(self, loop: Any, figures: Mapping[str, float], better: bool) -> None:
        self._note_dice(loop)

    def said(self, loop: Any, text: str) -> None: ...

    def end(self, loop: Any) -> None: ...

    def _note_dice(self, loop: Any) -> None:
        # The dice of other devices are not those that a replay has.
        self.random = torch.get_rng_state() if loop.device.type == "cpu" else None

    def _look(self, loop: Any, step: Any) -> None:
        found: dict[str, Any] = {
            "step": step.number,
            "loss": step.loss,
            "gradient": step.norm,
            "blocks": self.grads,
            **updates(loop.optimizer),
            **stream(loop.model, batches_of(loop)[-1]),
        }
        self.signals.append(found)
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / SIGNALS).open("a", encoding="utf-8") as file:
                file.write(to_json(found, None) + "\n")
        for name, text in warnings_of(found).items():
            if name not in self.warned:
                self.warned.add(name)
                loop.say(f"clinic, step {step.number}: {text}")

    def _keep_case(self, loop: Any, step: Any, kind: str) -> None:
        self.cases += 1
        if self.cases > MOST_CASES:
            return
        batches = batches_of(loop)
        train = getattr(getattr(loop.task, "config", None), "train", None)
        precision = str(loop.settings.precision).removeprefix("torch.")
        how = How(getattr(train, "smoothing", 0.0), precision, self.random)
        after = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        loop.model.load_state_dict(self.weights)
        try:
            seen = see(loop.model, batches, how)
        finally:
            loop.model.load_state_dict(after)
        text = f"clinic, step {step.number}: {kind}; {seen.text().replace(chr(10), '; ')}"
        if self.path is not None:
            folder = self.path / "cases" / f"step-{step.number:08d}"
            facts = {
                "step": step.number,
                "kind": kind,
                "loss": step.loss,
                "norm": step.norm,
                "rate": step.rate,
                "precision": precision,
                **updates(loop.optimizer),
            }
            # Of a step that was not applied the loop itself keeps batches and weights.
            weights = self.weights if step.applied else None
            write_case(folder, facts, seen, batches, weights, self.random)
            text += f"; addnorm clinic replay {folder}"
        loop.say(text)


def _step(line: str) -> float:
    """The step that a line speaks of; one that is cut off is of no step that was."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def batches_of(loop: Any) -> list[dict[str, Tensor]]:
    """The batches of the step that was just made."""
    at, several = loop.progress, loop.settings.accumulate
    first = (at.index - 1) // several * several
    return [
        {name: tensor.to(loop.device) for name, tensor in loop.task.batch(part).items()}
        for part in loop.task.plan(at.epoch)[first : at.index]
    ]


def by_block(model: nn.Module) -> dict[str, float]:
    """Norm of the gradient of each numbered block, and of the rest."""
    squares: dict[str, float] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            parts = name.split(".")
            end = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
            block = ".".join(parts[: end + 1]) or parts[0]
            squares[block] = squares.get(block, 0.0) + float(p.grad.detach().float().pow(2).sum())
    return {block: math.sqrt(value) for block, value in squares.items()}


@torch.no_grad()
def updates(optimizer: Optimizer) -> dict[str, float]:
    """Update-to-weight ratio of the matrices, the median, and the share that Adam's ε starves."""
    ratios, starved, count = [], 0.0, 0
    for group in optimizer.param_groups:
        b1, b2 = group.get("betas", (0.0, 0.0))
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if "exp_avg" not in state or p.ndim < 2:
                continue
            step = float(state["step"])
            root = (state["exp_avg_sq"] / (1 - b2**step)).sqrt_()
            met = root > 0  # embeddings of tokens that have not come up have no gradient at all
            starved += float(((root < group["eps"]) & met).sum())
            count += int(met.sum())
            change = state["exp_avg"] / (1 - b1**step) / (root + group["eps"])
            size = float(p.float().norm())
            ratios.append(group["lr"] * float(change.float().norm()) / size if size else 0.0)
    if not ratios:
        return {}
    return {"update": sorted(ratios)[len(ratios) // 2], "starved": starved / max(count, 1)}


def stream(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """What one traced forward pass says of the stream."""
    with unchanged(model), torch.no_grad():
        trace = watch(model, lambda: call(model, batch), list(batch.values()))
    found: dict[str, float] = {}
    if trace.sites:
        shares = [dependency(site) for site in trace.sites]
        found["dependency"] = sum(shares) / len(shares)
        found["distinct"] = distinct(trace.sites[-1].total)
        found["largest"] = trace.watch.largest
    if trace.watch.heads:
        found["entropy"] = min(sum(h.entropy) / len(h.entropy) for h in trace.watch.heads)
        found["logit"] = max(max(h.largest) for h in trace.watch.heads)
    return found


SIGNS: dict[str, tuple[str, float, str]] = {
    "update": (">", 0.1, "a step changes weights by {update:.0%}: lower the rate, or warm up"),
    "starved": (">", 0.5, "Adam's ε swallows {starved:.0%} of gradients: make it smaller"),
    "entropy": ("<", 0.1, "attention has collapsed, entropy {entropy:.2f}: try model.qk_norm=head"),
    "logit": (">", 50.0, "attention logits have grown to {logit:.0f}: try model.qk_norm=head"),
    "distinct": ("<", 0.01, "positions differ in {distinct:.1%} of the stream: lower the rate"),
}
"""What goes before divergence: the signal, on which side of which limit, and in words.

bench/clinic_limits.py prints where runs that train lie, and one that does not.
"""


def warnings_of(found: Mapping[str, Any]) -> dict[str, str]:
    """What in these signals goes before divergence, in words."""
    said = {}
    for name, (side, limit, text) in SIGNS.items():
        if name in found and (found[name] > limit if side == ">" else found[name] < limit):
            said[name] = text.format(**found)
    return said
