"""Loggers of a run: progress bar, lines of text, metrics.jsonl, TensorBoard."""

import html
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress import TaskID as BarID

from addnorm.errors import require
from addnorm.files import JOURNAL_LIMIT, read_text, to_json, unwritable, write_whole
from addnorm.training.loop import Loop, Observer, Step

LINE_EVERY = 10.0
"""Seconds between two lines if there is no terminal."""
BAR_EVERY = 0.2
"""Seconds between two updates of the bar."""
PERCENT = ("accuracy", "f1")
"""Metrics that are shown as percentages."""


class RecentSpeed:
    """Moving averages of loss and speed, and the remaining time."""

    def __init__(self) -> None:
        self.loss, self.tokens, self.step_seconds = math.nan, math.nan, math.nan

    def add(self, step: Step) -> None:
        """Update the exponential moving averages with a step."""
        seconds = max(step.seconds, 1e-9)
        for name, value in (
            ("loss", step.loss),
            ("tokens", step.tokens / seconds),
            ("step_seconds", seconds),
        ):
            average = getattr(self, name)
            updated = value if math.isnan(average) else 0.95 * average + 0.05 * value
            setattr(self, name, updated if math.isfinite(updated) else average)

    def seconds_left(self, loop: Loop) -> float:
        """Return the remaining seconds; evaluations keep their share of the time so far."""
        state = loop.state
        share = state.evaluation_seconds / state.training_seconds if state.training_seconds else 0.0
        rest = (loop.steps - state.step) * self.step_seconds * (1 + share)
        limit = loop.segment.until
        return min(rest, limit - state.total_seconds) if limit else rest


def format_duration(seconds: float) -> str:
    """Return a duration as minutes and seconds, or with hours.

    >>> format_duration(75), format_duration(7300), format_duration(float("nan"))
    ('1:15', '2:01:40', '–')
    """
    if not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Return metrics as a line of text; values that are not numbers are left out.

    >>> format_metrics({"loss": 2.314, "accuracy": 0.781, "auc": None})
    'loss 2.314, accuracy 78.1%'
    """
    return ", ".join(
        f"{name.replace('_', ' ')} " + (f"{value:.1%}" if name in PERCENT else f"{value:.4g}")
        for name, value in metrics.items()
        if isinstance(value, int | float)
    )


class Lines(Observer):
    """Progress as lines of text on a stream, for log files."""

    def __init__(self, stream: TextIO | None = None, every: float = LINE_EVERY) -> None:
        self.stream, self.every, self.speed = stream or sys.stderr, every, RecentSpeed()
        self.printed_at = time.monotonic()

    def on_step(self, loop: Loop, step: Step) -> None:
        self.speed.add(step)
        if time.monotonic() - self.printed_at < self.every and step.number > 1:
            return
        self.printed_at = time.monotonic()
        self._print(
            f"step {step.number:>6}/{loop.steps}  loss {self.speed.loss:.4f}  "
            f"{self.speed.tokens:,.0f} {_batch_unit(loop)}/s  lr {step.rate:.2e}  "
            f"{format_duration(self.speed.seconds_left(loop))} left"
        )

    def on_evaluate(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        mark = "  (best)" if better else ""
        self._print(f"step {loop.state.step:>6}  held out: {format_metrics(figures)}{mark}")

    def on_message(self, loop: Loop, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class Bar(Observer):
    """A progress bar with loss, speed, learning rate, remaining time and best metric."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.speed, self.drawn_at = RecentSpeed(), 0.0
        self.progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            expand=True,
        )
        self.live = Live(self.progress, console=self.console, refresh_per_second=8)
        self.bar: BarID | None = None
        self.best = ""

    def on_begin(self, loop: Loop) -> None:
        self.bar = self.progress.add_task("", total=loop.steps, text="")
        self.live.start()

    def on_step(self, loop: Loop, step: Step) -> None:
        self.speed.add(step)
        if time.monotonic() - self.drawn_at < BAR_EVERY or self.bar is None:
            return
        self.drawn_at = time.monotonic()
        text = (
            f"loss {self.speed.loss:.4f} · {self.speed.tokens:,.0f} {_batch_unit(loop)}/s · "
            f"lr {step.rate:.1e} · {format_duration(self.speed.seconds_left(loop))} left{self.best}"
        )
        self.progress.update(self.bar, completed=step.number, total=loop.steps, text=text)

    def on_evaluate(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        at = loop.state
        if at.best is not None:
            self.best = f" · best {loop.task.metric} {at.best:.4g}"
        mark = "  [green]best[/green]" if better else ""
        self.console.print(f"step {at.step:>6}  {format_metrics(figures)}{mark}", highlight=False)

    def on_message(self, loop: Loop, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def on_end(self, loop: Loop) -> None:
        if self.bar is not None:
            self.progress.update(self.bar, completed=loop.state.step)
        self.live.stop()


class Journal(Observer):
    """metrics.jsonl: a line for every evaluation and message, and for every tenth step."""

    def __init__(self, path: Path, every: int = 10) -> None:
        self.path, self.every = path, every
        self.changes: list[dict[str, Any]] = []
        """Changes before the beginning, such as an extension of a finished run."""

    def on_begin(self, loop: Loop) -> None:
        """Remove lines of steps after the checkpoint that a run resumes from."""
        kept = []
        if self.path.exists():
            for line in read_text(self.path, JOURNAL_LIMIT).split("\n"):
                try:
                    if json.loads(line)["step"] <= loop.state.step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # truncated when the process was killed
        write_whole(self.path, "".join(line + "\n" for line in kept).encode())
        self.file = self.path.open("a", encoding="utf-8")
        for row in self.changes:
            if to_json(row, indent=None) not in kept:  # a killed run has written it already
                self._write(**row)
        self.changes.clear()

    def on_step(self, loop: Loop, step: Step) -> None:
        if step.number % self.every == 0 or step.number <= self.every or not step.applied:
            at = loop.state
            self._write(
                step=step.number,
                loss=step.loss,
                rate=step.rate,
                norm=step.norm,
                tokens=at.tokens,
                seconds=round(at.total_seconds, 3),
            )

    def on_evaluate(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        at = loop.state
        held = {f"valid_{name}": value for name, value in figures.items()}
        self._write(step=at.step, best=better, seconds=round(at.total_seconds, 3), **held)

    def on_message(self, loop: Loop, text: str) -> None:
        if hasattr(self, "file"):
            self._write(step=loop.state.step, text=text)

    def on_change(self, loop: Loop, change: str, facts: dict[str, Any]) -> None:
        row = {"step": loop.state.step, "change": change, **facts}
        if hasattr(self, "file"):
            self._write(**row)
        else:
            self.changes.append(row)

    def on_end(self, loop: Loop) -> None:
        with suppress(OSError):  # of a line that could not be written, which was reported
            self.file.close()

    def _write(self, **row: Any) -> None:
        try:
            self.file.write(to_json(row, indent=None) + "\n")
            self.file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from None


class Board(Observer):
    """Losses and metrics for TensorBoard, written by tensorboardX."""

    def __init__(self, folder: Path) -> None:
        self.writer: Any = require("tensorboardX", "track").SummaryWriter(str(folder))

    def on_step(self, loop: Loop, step: Step) -> None:
        for name in ("loss", "rate", "norm"):
            self.writer.add_scalar(f"train/{name}", getattr(step, name), step.number)

    def on_evaluate(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(f"valid/{name}", value, loop.state.step)

    def on_end(self, loop: Loop) -> None:
        self.writer.close()


class NotebookBar(Observer):
    """A line in the output of a notebook cell, updated during training."""

    def __init__(self) -> None:
        display = require("IPython.display", "dev")
        self.speed, self.drawn_at, self.best = RecentSpeed(), 0.0, ""
        self.html, self.handle = display.HTML, display.display(display.HTML(""), display_id=True)

    def on_step(self, loop: Loop, step: Step) -> None:
        self.speed.add(step)
        if time.monotonic() - self.drawn_at > 1.0 or step.number == loop.steps:
            self.drawn_at = time.monotonic()
            self._show(loop)

    def on_evaluate(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        self.best = f" · held out: {format_metrics(figures)}" if better else self.best
        self._show(loop)

    def _show(self, loop: Loop) -> None:
        at, steps = loop.state, loop.steps
        text = f"step {at.step:,}/{steps:,} · loss {self.speed.loss:.4f}{self.best}"
        bar = f"<progress value={at.step} max={steps}></progress>"
        self.handle.update(self.html(f"<div>{bar} {html.escape(text)}</div>"))


def in_notebook() -> bool:
    """Return whether the code runs in a notebook cell."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def make_observers(
    path: Path, *, progress: bool = True, board: bool = False, clinic: bool = False
) -> Sequence[Observer]:
    """Return the observers of a run: metrics.jsonl, and what else is asked for.

    Parameters
    ----------
    path : directory of the run.
    progress : show a bar (in a terminal or a notebook) or lines (elsewhere) on stderr.
    board : write the figures for TensorBoard, too.
    clinic : examine the model while it trains, and warn early.
    """
    observers: list[Observer] = [Journal(path / "metrics.jsonl")]
    if progress:
        shown = NotebookBar if in_notebook() else Bar if sys.stderr.isatty() else Lines
        observers.insert(0, shown())
    if board:
        observers.append(Board(path / "board"))
    if clinic:
        from addnorm.clinic.training_monitor import TrainingMonitor

        observers.append(cast(Observer, TrainingMonitor(path)))
    return observers


def _batch_unit(loop: Loop) -> str:
    """Return the unit of the batch sizes of the task."""
    return str(getattr(loop.task, "unit", "tokens"))
