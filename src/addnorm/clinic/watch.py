"""Watch the training of any model in any loop: signals, early warnings, scalars for a tracker.

    with watch(model, optimizer) as watching:
        for batch in loader:
            loss = model(batch).loss
            loss.backward()
            optimizer.step()
            watching.step(loss)
            optimizer.zero_grad()

What the model is called with is remembered by a hook; every `every` steps the last call is repeated
in evaluation mode and traced. Weights, buffers, gradients, modes and RNG states are restored, so a
watched training is the same as one that is not. Nothing is created on another device than the
model's.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from html import escape
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from addnorm.clinic.call_model import ClinicBatch, own_loss, unwrap
from addnorm.clinic.failed_step import is_spike
from addnorm.clinic.training_monitor import (
    EARLY_STEPS,
    SIGNAL_STEPS,
    early_warnings,
    gradient_norms,
    stream_signals,
    update_signals,
)
from addnorm.errors import ConfigError, require

Report = Callable[[str], None]
MAX_WARNINGS = 20
"""Warnings about single steps that are kept."""


class Watch:
    """Signals of a training loop; see `watch`.

    Parameters
    ----------
    model : the model that is trained
    optimizer : its optimizer
    every : steps between two measurements
    report : called with each warning, as a sentence
    writer : an object with `add_scalar(name, value, step)`, such as TensorBoard's SummaryWriter
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        every: int = SIGNAL_STEPS,
        report: Report | None = None,
        writer: Any = None,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every must be at least 1 step: got {every}. Try every=100.")
        self.model, self.optimizer = unwrap(model), optimizer
        self.every, self.report, self.writer = every, report, writer
        self.steps = 0
        self.signals: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self._warned: set[str] = set()
        self._recent: deque[float] = deque(maxlen=100)
        self._blocks: dict[str, float] | None = None
        self._calls: dict[nn.Module, ClinicBatch] = {}
        self._loss: Tensor | None = None
        self._measuring = False
        parts = [
            self.model,
            *(m for m in self.model.children() if any(True for _ in m.parameters())),
        ]
        self._hooks = [
            part.register_forward_pre_hook(self._enter, with_kwargs=True) for part in parts
        ]
        self._hooks.append(self.model.register_forward_hook(self._leave))

    # ── What the model is called with ─────────────────────────────────────────────────────────────

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._measuring or not self._is_due(self.steps + 1):
            return
        named = {name: value for name, value in kwargs.items() if value is not None}
        if args and named:
            return  # positional and named arguments together cannot be repeated as one batch
        self._calls[module] = ClinicBatch(named or tuple(args))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._measuring:
            loss = own_loss(output)
            self._loss = None if loss is None else loss.detach()

    def _is_due(self, step: int) -> bool:
        return step % self.every == 0 or step in EARLY_STEPS

    # ── The two calls ─────────────────────────────────────────────────────────────────────────────

    def gradients(self) -> None:
        """Measure the gradients; needed before the optimizer's step only if that clears them."""
        if self._is_due(self.steps + 1):
            self._blocks = gradient_norms(self.model)

    def step(self, loss: Tensor | float | None = None) -> dict[str, Any] | None:
        """Record one step, after the optimizer's; return the signals if they were measured."""
        self.steps += 1
        number = self._number(loss)
        if number is not None:
            if not math.isfinite(number):
                self._warn(f"step {self.steps}: the loss is {number}")
            elif is_spike(number, self._recent):
                self._warn(f"step {self.steps}: the loss jumped to {number:.4g}")
            if math.isfinite(number):
                self._recent.append(number)
        if not self._is_due(self.steps):
            return None
        signals = self._measure(number)
        self.signals.append(signals)
        for name, text in early_warnings(signals).items():
            if name not in self._warned:
                self._warned.add(name)
                self._warn(f"step {self.steps}: {text}")
        self._write(signals)
        self._calls.clear()
        self._blocks = None
        return signals

    def _number(self, loss: Tensor | float | None) -> float | None:
        loss = self._loss if loss is None else loss
        return float(loss.detach()) if isinstance(loss, Tensor) else loss

    def _measure(self, loss: float | None) -> dict[str, Any]:
        blocks = gradient_norms(self.model) if self._blocks is None else self._blocks
        whole = math.sqrt(sum(value * value for value in blocks.values()))
        signals: dict[str, Any] = {"step": self.steps, "gradient": whole, "blocks": blocks}
        if loss is not None:
            signals["loss"] = loss
        if self.optimizer is not None:
            signals |= update_signals(self.optimizer)
        self._measuring = True
        try:
            for module in sorted(self._calls, key=_size, reverse=True)[:1]:
                signals |= stream_signals(module, self._calls[module])
        except Exception as error:  # of the model's own code: training goes on
            self._warn(f"step {self.steps}: the stream was not measured: {error}")
        finally:
            self._measuring = False
        return signals

    def _warn(self, text: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(text)
            if self.report is not None:
                self.report(f"clinic, {text}")

    def _write(self, signals: Mapping[str, Any]) -> None:
        scalars = scalars_of(signals)
        if self.writer is not None:
            for name, value in scalars.items():
                self.writer.add_scalar(name, value, self.steps)
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            run.log(scalars, commit=False)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._calls.clear()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ── Display ───────────────────────────────────────────────────────────────────────────────────

    def text(self) -> str:
        """Return the last signals and all warnings."""
        lines = [f"{self.steps} steps, {len(self.signals)} measurements"]
        if self.signals:
            last = scalars_of(self.signals[-1])
            lines.append(", ".join(f"{n.removeprefix('clinic/')} {v:.3g}" for n, v in last.items()))
        return "\n".join([*lines, *(f"! {warning}" for warning in self.warnings)])

    __repr__ = text

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self.signals for name in scalars_of(row)))
        head = "".join(f"<th>{escape(name.removeprefix('clinic/'))}</th>" for name in names)
        rows = ""
        for row in self.signals[-10:]:
            values = scalars_of(row)
            cells = (f"<td>{values[n]:.3g}</td>" if n in values else "<td></td>" for n in names)
            rows += f"<tr><td>{row['step']}</td>{''.join(cells)}</tr>"
        warnings = "".join(f"<li>{escape(warning)}</li>" for warning in self.warnings)
        table = f"<table><tr><th>step</th>{head}</tr>{rows}</table>"
        return f"<div>{table}{f'<ul>{warnings}</ul>' if warnings else ''}</div>"


def scalars_of(signals: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the signals, by the name that a tracker shows.

    >>> scalars_of({"step": 10, "loss": 2.0, "blocks": {"layers.0": 1.0}})
    {'clinic/loss': 2.0, 'clinic/gradient/layers.0': 1.0}
    """
    scalars: dict[str, float] = {}
    for name, value in signals.items():
        if name == "blocks":
            scalars |= {f"clinic/gradient/{block}": size for block, size in value.items()}
        elif name != "step":
            scalars[f"clinic/{name}"] = float(value)
    return scalars


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def watch(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    every: int = SIGNAL_STEPS,
    report: Report | None = print,
    writer: Any = None,
) -> Watch:
    """Watch a training loop: call `.step(loss)` after the optimizer's step, `.close()` at the end.

    Parameters
    ----------
    model : nn.Module
        The model that is trained.
    optimizer : torch.optim.Optimizer, optional
        Its optimizer, for the size of its steps.
    every : int
        Steps between two measurements of the stream.
    report : callable, optional
        Called with each warning; by default it is printed.
    writer : optional
        An object with `add_scalar(name, value, step)`, as of TensorBoard. A run of W&B that is open
        gets the scalars anyway.

    Returns
    -------
    Watch
        With `.signals` and `.warnings`; a context manager that closes itself.

    Examples
    --------
    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> with watch(model, every=1) as watching:
    ...     loss = model(torch.ones(4, 3)).pow(2).mean()
    ...     loss.backward()
    ...     signals = watching.step(loss)
    >>> sorted(signals)
    ['blocks', 'gradient', 'loss', 'step']
    """
    return Watch(model, optimizer, every=every, report=report, writer=writer)


# ── Trainers of other libraries ───────────────────────────────────────────────────────────────────


def trainer_callback(*, every: int = SIGNAL_STEPS, report: Report | None = print) -> Any:
    """Return a callback for the Trainer of Hugging Face: `Trainer(..., callbacks=[…])`.

    Its signals are added to the Trainer's log, and so to every tracker that it reports to.
    """
    library = require("transformers", "huggingface")

    class ClinicCallback(library.TrainerCallback):  # type: ignore[misc, name-defined]
        """Watches the model of a Trainer."""

        watching: Watch | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Start to watch."""
            self.watching = Watch(
                kwargs["model"], kwargs.get("optimizer"), every=every, report=report
            )

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Measure the gradients, which the Trainer clears after the step."""
            if self.watching is not None:
                self.watching.gradients()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Record the step."""
            if self.watching is not None:
                self.watching.step()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Add the last signals to the log."""
            logs = kwargs.get("logs")
            if self.watching is not None and self.watching.signals and logs is not None:
                logs.update(scalars_of(self.watching.signals[-1]))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Remove the hooks."""
            if self.watching is not None:
                self.watching.close()

    return ClinicCallback()


def lightning_callback(*, every: int = SIGNAL_STEPS, report: Report | None = print) -> Any:
    """Return a callback for Lightning: `Trainer(callbacks=[…])`."""
    try:
        library = require("lightning.pytorch", "lightning")
    except ImportError:
        library = require("pytorch_lightning", "lightning")

    class ClinicCallback(library.Callback):  # type: ignore[misc, name-defined]
        """Watches a LightningModule."""

        watching: Watch | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Start to watch."""
            optimizers = list(trainer.optimizers)
            first = optimizers[0] if optimizers else None
            self.watching = Watch(pl_module, first, every=every, report=report)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            """Measure the gradients."""
            if self.watching is not None:
                self.watching.gradients()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            """Record the step."""
            if self.watching is None:
                return
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            signals = self.watching.step(loss)
            if signals is not None and trainer.logger is not None:
                trainer.logger.log_metrics(scalars_of(signals), step=trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            """Remove the hooks."""
            if self.watching is not None:
                self.watching.close()

    return ClinicCallback()
