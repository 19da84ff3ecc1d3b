"""Who watches a run: a bar, lines, a journal of figures, TensorBoard."""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.progress import TaskID as BarID

from addnorm.disk import write_whole
from addnorm.errors import require
from addnorm.train.loop import Loop, Observer, Step

LINE_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""
BAR_EVERY = 0.2


class Pace:
    """Loss and speed of late, and the time that is left."""

    def __init__(self) -> None:
        self.loss, self.speed, self.step_seconds = math.nan, math.nan, math.nan

    def add(self, step: Step) -> None:
        """Means that forget: a step of long ago counts for little."""
        seconds = max(step.seconds, 1e-9)
        for name, value in (
            ("loss", step.loss),
            ("speed", step.tokens / seconds),
            ("step_seconds", seconds),
        ):
            before = getattr(self, name)
            mixed = value if math.isnan(before) else 0.95 * before + 0.05 * value
            setattr(self, name, mixed if math.isfinite(mixed) else before)

    def left(self, loop: Loop) -> float:
        """Seconds that are left, evaluations counted as they were so far."""
        at = loop.progress
        share = at.evaluating / at.seconds if at.seconds else 0.0
        rest = (loop.settings.steps - at.step) * self.step_seconds * (1 + share)
        limit = loop.settings.seconds
        return min(rest, limit - at.seconds - at.evaluating) if limit else rest


def say_time(seconds: float) -> str:
    """A duration for people.

    >>> say_time(75), say_time(7300), say_time(float("nan"))
    ('1:15', '2:01:40', '–')
    """
    if not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def say_figures(figures: dict[str, float]) -> str:
    """Figures in a line: loss 2.31, accuracy 78.1 %."""
    said = []
    for name, value in figures.items():
        percent = name in ("accuracy", "f1")
        words = name.replace("_", " ")
        said.append(f"{words} {value:.1%}" if percent else f"{words} {value:.4g}")
    return ", ".join(said)


class Lines(Observer):
    """Plain lines, for logs."""

    def __init__(self, stream: TextIO | None = None, every: float = LINE_EVERY) -> None:
        self.stream, self.every, self.pace = stream or sys.stderr, every, Pace()
        self.said_at = time.monotonic()

    def stepped(self, loop: Loop, step: Step) -> None:
        self.pace.add(step)
        if time.monotonic() - self.said_at < self.every and step.number > 1:
            return
        self.said_at = time.monotonic()
        self._print(
            f"step {step.number:>6}/{loop.settings.steps}  loss {self.pace.loss:.4f}  "
            f"{self.pace.speed:,.0f} tokens/s  lr {step.rate:.2e}  "
            f"{say_time(self.pace.left(loop))} left"
        )

    def evaluated(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        mark = "  (best)" if better else ""
        self._print(f"step {loop.progress.step:>6}  held out: {say_figures(figures)}{mark}")

    def said(self, loop: Loop, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class Bar(Observer):
    """A live bar: loss, speed, rate, time left, best so far."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.pace, self.drawn_at = Pace(), 0.0
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

    def begin(self, loop: Loop) -> None:
        self.bar = self.progress.add_task("", total=loop.settings.steps, text="")
        self.live.start()

    def stepped(self, loop: Loop, step: Step) -> None:
        self.pace.add(step)
        if time.monotonic() - self.drawn_at < BAR_EVERY or self.bar is None:
            return
        self.drawn_at = time.monotonic()
        text = (
            f"loss {self.pace.loss:.4f} · {self.pace.speed:,.0f} tokens/s · lr {step.rate:.1e} · "
            f"{say_time(self.pace.left(loop))} left{self.best}"
        )
        self.progress.update(self.bar, completed=step.number, text=text)

    def evaluated(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        at = loop.progress
        if at.best is not None:
            self.best = f" · best {loop.task.metric} {at.best:.4g}"
        mark = "  [green]best[/green]" if better else ""
        self.console.print(f"step {at.step:>6}  {say_figures(figures)}{mark}", highlight=False)

    def said(self, loop: Loop, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def end(self, loop: Loop) -> None:
        if self.bar is not None:
            self.progress.update(self.bar, completed=loop.progress.step)
        self.live.stop()


class Journal(Observer):
    """metrics.jsonl: a line for every evaluation, and for a step now and then."""

    def __init__(self, path: Path, every: int = 10) -> None:
        self.path, self.every = path, every

    def begin(self, loop: Loop) -> None:
        """Lines about steps after the one a resumed run goes on from are of a past that is gone."""
        kept = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= loop.progress.step:
                        kept.append(line)
                except (ValueError, KeyError):
                    continue
        write_whole(self.path, "".join(line + "\n" for line in kept).encode())
        self.file = self.path.open("a", encoding="utf-8")

    def stepped(self, loop: Loop, step: Step) -> None:
        if step.number % self.every == 0 or step.number <= self.every or not step.applied:
            at = loop.progress
            self._write(
                step=step.number,
                loss=step.loss,
                rate=step.rate,
                norm=step.norm,
                tokens=at.tokens,
                seconds=round(at.seconds + at.evaluating, 3),
            )

    def evaluated(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        at = loop.progress
        held = {f"valid_{name}": value for name, value in figures.items()}
        self._write(step=at.step, best=better, seconds=round(at.seconds + at.evaluating, 3), **held)

    def said(self, loop: Loop, text: str) -> None:
        if hasattr(self, "file"):
            self._write(step=loop.progress.step, text=text)

    def end(self, loop: Loop) -> None:
        self.file.close()

    def _write(self, **row: Any) -> None:
        plain = {k: _plain(v) for k, v in row.items()}
        self.file.write(json.dumps(plain, ensure_ascii=False) + "\n")
        self.file.flush()


class Board(Observer):
    """The same figures for TensorBoard, by tensorboardX."""

    def __init__(self, folder: Path) -> None:
        self.writer: Any = require("tensorboardX", "track").SummaryWriter(str(folder))

    def stepped(self, loop: Loop, step: Step) -> None:
        for name in ("loss", "rate", "norm"):
            self.writer.add_scalar(f"train/{name}", getattr(step, name), step.number)

    def evaluated(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(f"valid/{name}", value, loop.progress.step)

    def end(self, loop: Loop) -> None:
        self.writer.close()


def watchers(path: Path, *, terminal: bool, board: bool = False) -> Sequence[Observer]:
    """Those that a run has by default."""
    face: Observer = Bar() if terminal else Lines()
    return [face, Journal(path / "metrics.jsonl"), *([Board(path / "board")] if board else [])]


def _plain(value: Any) -> Any:
    """JSON has no word for what is not finite."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
