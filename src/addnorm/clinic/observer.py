"""The clinic during training: a few signals now and then, early warnings, a case when it breaks.

    update ratio    √mean Δw² / √mean w² of one step, Δw = lr · m̂ / (√v̂ + ε): 1e-3 is usual
    starved         share of weights with √v̂ < ε: Adam's ε swallows their gradient
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
from addnorm.clinic.case import call, is_spike, see, write_case
from addnorm.clinic.measure import dependency, distinct
from addnorm.clinic.trace import watch

SIGNALS = "clinic.jsonl"
MOST_CASES = 3
"""More of one run would say the same."""


class Clinic:
    """Pass it among the loop's observers; `every` steps it looks at the stream."""

    def __init__(self, path: Path | None = None, every: int = 100) -> None:
        self.path, self.every = path, every
        self.recent: deque[float] = deque(maxlen=100)
        self.signals: list[dict[str, Any]] = []
        self.warned: set[str] = set()
        self.grads: dict[str, float] = {}
        self.cases = 0

    def begin(self, loop: Any) -> None:
        """Where the run keeps its files is where the signals go."""
        self.path = self.path or loop.run_directory

    def gradients(self, loop: Any, step: int) -> None:
        """The gradient of each block, while there is one."""
        if step % self.every == 0:
            self.grads = by_block(loop.model)

    def stepped(self, loop: Any, step: Any) -> None:
        if not step.applied:
            self._keep_case(loop, step, "not finite")
            return
        if is_spike(step.loss, list(self.recent)):
            self._keep_case(loop, step, "spike")
        self.recent.append(step.loss)
        if step.number % self.every == 0:
            self._look(loop, step)

    def evaluated(self, loop: Any, figures: Mapping[str, float], better: bool) -> None: ...

    def said(self, loop: Any, text: str) -> None: ...

    def end(self, loop: Any) -> None: ...

    def _look(self, loop: Any, step: Any) -> None:
        found: dict[str, Any] = {
            "step": step.number,
            "loss": step.loss,
            "gradient": step.norm,
            "blocks": self.grads,
            **updates(loop.optimizer),
            **stream(loop.model, batch_of(loop)),
        }
        self.signals.append(found)
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / SIGNALS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        for name, text in warnings_of(found).items():
            if name not in self.warned:
                self.warned.add(name)
                loop.say(f"clinic, step {step.number}: {text}")

    def _keep_case(self, loop: Any, step: Any, kind: str) -> None:
        self.cases += 1
        if self.cases > MOST_CASES:
            return
        batch = batch_of(loop)
        seen = see(loop.model, batch)
        text = f"clinic, step {step.number}: {kind}; {seen.text().replace(chr(10), '; ')}"
        if self.path is not None:
            folder = self.path / "cases" / f"step-{step.number:08d}"
            facts = {"step": step.number, "kind": kind, "loss": step.loss, "norm": step.norm}
            # Of a step that is not finite the loop itself keeps batch and weights.
            write_case(folder, facts, seen, loop.model if step.applied else None, batch)
            text += f"; addnorm clinic replay {folder}"
        loop.say(text)


def batch_of(loop: Any) -> dict[str, Tensor]:
    """The last batch of the step that was just made."""
    at = loop.progress
    part = loop.task.plan(at.epoch)[at.index - 1]
    batch: dict[str, Tensor] = loop.task.batch(part)
    return {name: tensor.to(loop.device) for name, tensor in batch.items()}


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
            starved += float((root < group["eps"]).sum())
            count += root.numel()
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


def warnings_of(found: Mapping[str, Any]) -> dict[str, str]:
    """What in these signals goes before divergence, in words."""
    rules = {
        "update": (found.get("update", 0.0) > 0.1, "a step changes weights by {update:.0%}"),
        "starved": (
            found.get("starved", 0.0) > 0.5,
            "Adam's ε swallows {starved:.0%} of gradients",
        ),
        "entropy": (
            found.get("entropy", 1.0) < 0.1,
            "attention has collapsed: entropy {entropy:.2f}",
        ),
        "logit": (found.get("logit", 0.0) > 50, "attention logits have grown to {logit:.0f}"),
        "distinct": (
            found.get("distinct", 1.0) < 0.05,
            "positions have become the same: they differ in {distinct:.1%} of the stream",
        ),
    }
    return {name: text.format(**found) for name, (holds, text) in rules.items() if holds}
