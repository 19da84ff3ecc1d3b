"""Monitor a model during training: signals every k steps, early warnings, a case if a step fails.

    update ratio    √mean Δw² / √mean w² of one step, Δw = lr · m̂ / (√v̂ + ε): 1e-3 is usual
    starved         share of weights with 0 < √v̂ < ε: Adam's ε outweighs their gradient
    the stream      dependency, attention entropy, variance between positions: of one batch

Wortsman et al. 2023 (2309.14322), §3. The stream is measured in one traced forward pass of the
step's own batch in evaluation mode, and the RNG state is restored, so a monitored run is bit for
bit the same as one that is not. The class has the methods that the loop calls on its observers.
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

from addnorm.clinic.call_model import ClinicBatch, unchanged
from addnorm.clinic.failed_step import StepSettings, is_spike, report_step, write_case
from addnorm.clinic.measure import dependency, position_variance
from addnorm.clinic.residual_trace import trace_stream
from addnorm.errors import ConfigError
from addnorm.files import JOURNAL_LIMIT, read_text, to_json, write_whole

SIGNALS_FILE = "clinic.jsonl"
SIGNAL_STEPS = 100
"""Steps between two measurements of the stream: bench/clinic_cost.py measures what they cost."""
EARLY_STEPS = (10, 30)
"""Further steps that are measured: divergence often starts before the first hundred."""
MAX_CASE_FOLDERS = 3
"""Cases that are written for one run; later ones are only reported."""


class TrainingMonitor:
    """An observer of the training loop that measures the stream every `every` steps.

    Signals and cases are written to `path`, by default the directory of the run.
    """

    def __init__(self, path: Path | None = None, every: int = SIGNAL_STEPS) -> None:
        self.path, self.every = path, every
        self.recent: deque[float] = deque(maxlen=100)
        self.signals: list[dict[str, Any]] = []
        self.warned: set[str] = set()
        self.block_gradients: dict[str, float] = {}
        self.cases = 0
        self.rng_state: Tensor | None = None
        """The RNG state before the step."""
        self.model_weights: list[Tensor] = []
        """The tensors of the model itself."""
        self.weights: dict[str, Tensor] = {}
        """Copies of them from before the step."""

    def on_begin(self, loop: Any) -> None:
        """Find the file for the signals; drop those of steps after the one resumed from."""
        if any(hasattr(p, "full_tensor") for p in loop.model.parameters()):
            raise ConfigError(
                "the clinic needs the whole model in each worker: got run.parallel=fsdp. "
                "Try run.parallel=ddp."
            )
        self.path = self.path or loop.run_directory
        if self.path is not None and (self.path / SIGNALS_FILE).exists():
            lines = read_text(self.path / SIGNALS_FILE, JOURNAL_LIMIT).splitlines(keepends=True)
            kept = [line for line in lines if _step(line) <= loop.state.step]
            write_whole(self.path / SIGNALS_FILE, "".join(kept).encode())
        state = loop.model.state_dict()
        self.model_weights = list(state.values())
        self.weights = {name: tensor.detach().clone() for name, tensor in state.items()}
        self._save_rng_state(loop)

    def _is_due(self, step: int) -> bool:
        return step % self.every == 0 or step in EARLY_STEPS

    def on_gradients(self, loop: Any, step: int) -> None:
        """Save the gradient norm of each block, and the weights, before the optimizer's step."""
        if self._is_due(step):
            self.block_gradients = gradient_norms(loop.model)
        torch._foreach_copy_(list(self.weights.values()), self.model_weights)

    def on_step(self, loop: Any, step: Any) -> None:
        """Measure the signals if they are due; save a case if the step failed."""
        if not step.applied:
            self._save_case(loop, step, "not finite")
        else:
            if is_spike(step.loss, self.recent):
                self._save_case(loop, step, "spike")
            self.recent.append(step.loss)
            if self._is_due(step.number):
                self._measure(loop, step)
        self._save_rng_state(loop)

    def on_evaluate(self, loop: Any, figures: Mapping[str, float], better: bool) -> None:
        """Save the RNG state, which an evaluation may change."""
        self._save_rng_state(loop)

    def on_message(self, loop: Any, text: str) -> None:
        """Do nothing."""

    def on_change(self, loop: Any, change: str, facts: Mapping[str, Any]) -> None:
        """Do nothing."""

    def on_end(self, loop: Any) -> None:
        """Do nothing."""

    def _save_rng_state(self, loop: Any) -> None:
        # A replay runs on the CPU, so the RNG state of another device is of no use to it.
        self.rng_state = torch.get_rng_state() if loop.device.type == "cpu" else None

    def _measure(self, loop: Any, step: Any) -> None:
        signals: dict[str, Any] = {
            "step": step.number,
            "loss": step.loss,
            "gradient": step.norm,
            "blocks": self.block_gradients,
            **update_signals(loop.optimizer),
            **stream_signals(loop.model, step_batches(loop)[-1]),
        }
        self.signals.append(signals)
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / SIGNALS_FILE).open("a", encoding="utf-8") as file:
                file.write(to_json(signals, None) + "\n")
        for name, text in early_warnings(signals).items():
            if name not in self.warned:
                self.warned.add(name)
                loop.log(f"clinic, step {step.number}: {text}")

    def _save_case(self, loop: Any, step: Any, kind: str) -> None:
        self.cases += 1
        if self.cases > MAX_CASE_FOLDERS:
            return
        batches = step_batches(loop)
        if "targets" not in batches[0]:  # rows of a table, whose loss is that of their task
            loop.log(f"clinic, step {step.number}: {kind}; its loss was {step.loss:.4g}.")
            return
        train = getattr(getattr(loop.task, "config", None), "train", None)
        precision = str(loop.settings.precision).removeprefix("torch.")
        settings = StepSettings(getattr(train, "label_smoothing", 0.0), precision, self.rng_state)
        after = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        loop.model.load_state_dict(self.weights)
        try:
            report = report_step(loop.model, batches, settings)
        finally:
            loop.model.load_state_dict(after)
        text = f"clinic, step {step.number}: {kind}; {report.text().replace(chr(10), '; ')}"
        if self.path is not None:
            folder = self.path / "cases" / f"step-{step.number:08d}"
            facts = {
                "step": step.number,
                "kind": kind,
                "loss": step.loss,
                "norm": step.norm,
                "rate": step.rate,
                "precision": precision,
                **update_signals(loop.optimizer),
            }
            # The loop itself saves batches and weights of a step that was not applied.
            weights = self.weights if step.applied else None
            write_case(folder, facts, report, batches, weights, self.rng_state)
            text += f"; addnorm clinic replay {folder}"
        loop.log(text)


def _step(line: str) -> float:
    """Return the step of a line of signals, infinite if the line is cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def step_batches(loop: Any) -> list[dict[str, Tensor]]:
    """Return the batches of the last step of a loop; the RNG state is left unchanged."""
    progress, accumulate = loop.state, loop.settings.accumulate
    first = (progress.index - 1) // accumulate * accumulate
    with torch.random.fork_rng(devices=[]):  # a table hides cells at random
        return [
            {name: tensor.to(loop.device) for name, tensor in loop.task.batch(part).items()}
            for part in loop.task.plan(progress.epoch)[first : progress.index]
        ]


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Return the norm of the gradient of each numbered block, and of each other module."""
    squares: dict[str, float] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            parts = name.split(".")
            end = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
            block = ".".join(parts[: end + 1]) or parts[0]
            squares[block] = squares.get(block, 0.0) + float(p.grad.detach().float().pow(2).sum())
    return {block: math.sqrt(value) for block, value in squares.items()}


@torch.no_grad()
def update_signals(optimizer: Optimizer) -> dict[str, float]:
    """Return the median update-to-weight ratio of the matrices, and the share that ε starves."""
    ratios, starved, count = [], 0.0, 0
    for group in optimizer.param_groups:
        b1, b2 = group.get("betas", (0.0, 0.0))
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if "exp_avg" not in state or p.ndim < 2:
                continue
            step = float(state["step"])
            root = (state["exp_avg_sq"] / (1 - b2**step)).sqrt_()
            positive = root > 0  # embeddings of tokens that did not occur have no gradient at all
            starved += float(((root < group["eps"]) & positive).sum())
            count += int(positive.sum())
            change = state["exp_avg"] / (1 - b1**step) / (root + group["eps"])
            size = float(p.float().norm())
            ratios.append(group["lr"] * float(change.float().norm()) / size if size else 0.0)
    if not ratios:
        return {}
    return {"update": sorted(ratios)[len(ratios) // 2], "starved": starved / max(count, 1)}


def stream_signals(model: nn.Module, batch: Mapping[str, Tensor] | ClinicBatch) -> dict[str, float]:
    """Return the signals of one traced forward pass of a batch, or of a task's batch."""
    inputs = batch if isinstance(batch, ClinicBatch) else ClinicBatch.from_task(batch)
    with unchanged(model), torch.no_grad():
        trace = trace_stream(model, inputs)
    signals: dict[str, float] = {}
    if trace.sites:
        shares = [dependency(site) for site in trace.sites]
        signals["dependency"] = sum(shares) / len(shares)
        signals["position_variance"] = position_variance(trace.sites[-1].total)
        signals["largest"] = trace.stats.largest
    if trace.stats.attention:
        signals["entropy"] = min(sum(a.entropy) / len(a.entropy) for a in trace.stats.attention)
        signals["logit"] = max(max(a.largest) for a in trace.stats.attention)
    return signals


EARLY_WARNINGS: dict[str, tuple[str, float, str]] = {
    "update": (">", 0.1, "a step changes the weights by {update:.0%}: lower the rate, or warm up"),
    "starved": (">", 0.5, "Adam's ε outweighs {starved:.0%} of the gradients: make it smaller"),
    "entropy": ("<", 0.1, "attention has collapsed, entropy {entropy:.2f}: norm queries and keys"),
    "logit": (">", 50.0, "attention logits have grown to {logit:.0f}: norm queries and keys"),
    "position_variance": (
        "<", 0.01, "token representations collapse: {position_variance:.1%} of the variance is "
        "between positions: lower the learning rate",
    ),
}  # fmt: skip
"""Signs of divergence to come: the signal, the side of the limit, the limit, and the words.

bench/clinic_limits.py prints the signals of runs that train, and of one that does not.
"""


def early_warnings(signals: Mapping[str, Any]) -> dict[str, str]:
    """Return a warning for each signal beyond its limit, by name."""
    warnings = {}
    for name, (side, limit, text) in EARLY_WARNINGS.items():
        if name in signals and (signals[name] > limit if side == ">" else signals[name] < limit):
            warnings[name] = text.format(**signals)
    return warnings
