"""Loggers of a run: lines, progress bar, metrics.jsonl, TensorBoard."""

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from addnorm.clinic.training_monitor import TrainingMonitor
from addnorm.errors import ExtraError, SavedError
from addnorm.runs import loggers as progress
from addnorm.runs.loggers import (
    Bar,
    Board,
    Journal,
    Lines,
    RecentSpeed,
    format_duration,
    format_metrics,
    make_observers,
)
from addnorm.training.loop import DivergedError, Loop, Observer, Step
from tests.training.test_loop import make


def step(number: int, loss: float = 2.0, tokens: int = 100, seconds: float = 0.5) -> Step:
    return Step(number, loss, tokens, 1e-3, 0.7, seconds, math.isfinite(loss))


def watched(observer: Observer, steps: int = 12, **settings: Any) -> Loop:
    loop, _ = make(steps, **({"evaluate_every": 5} | settings))
    loop.observers.append(observer)
    loop.run()
    return loop


@pytest.mark.trains
def test_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    loop = watched(Lines(stream, every=0.0))
    output = stream.getvalue().splitlines()
    assert len(output) == 12 + 3 and output[0].startswith("step      1/12  loss ")
    assert "tokens/s  lr 3.33e-03" in output[0] and output[0].endswith(" left")
    held = [line for line in output if "held out: loss" in line]
    assert len(held) == 3 and held[0].startswith("step      5  held out: loss ")
    assert held[0].endswith("(best)")
    loop.log("something")
    assert stream.getvalue().endswith("left\nsomething\n") or stream.getvalue().endswith(
        "something\n"
    )


@pytest.mark.trains
def test_lines_are_printed_at_intervals() -> None:
    stream = io.StringIO()
    watched(Lines(stream, every=1000.0))
    output = stream.getvalue().splitlines()
    assert [line for line in output if "/12" in line] == output[:1]


@pytest.mark.trains
@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_shows_progress(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "BAR_EVERY", 0.0)
    stream = io.StringIO()
    bar = Bar(Console(file=stream, force_terminal=terminal, width=120))
    loop = watched(bar)
    loop.log("[a] note in brackets")
    output = stream.getvalue()
    assert "step      5  loss " in output and "best" in output
    assert "[a] note in brackets" in output
    assert "12/12" in output and "tokens/s" in output and "· best loss " in output
    assert not bar.live.is_started


def test_the_bar_stops_when_a_run_fails() -> None:
    bar = Bar(Console(file=io.StringIO(), force_terminal=True))
    loop, task = make(30, max_skipped_steps=2)
    loop.observers.append(bar)
    task.is_bad = lambda start: True
    with pytest.raises(DivergedError):
        loop.run()
    assert not bar.live.is_started


@pytest.mark.trains
def test_the_journal_is_json_whatever_happens(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    loop, task = make(30, evaluate_every=10)
    loop.observers.append(Journal(path))
    bad = task.plan(2)[0]  # step 13
    task.is_bad = lambda start: start == bad and loop.state.epoch == 2
    loop.run()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [*range(1, 11), 13, 20, 30]
    assert steps[10]["loss"] is None and steps[0]["rate"] == pytest.approx(1e-2 / 3)
    assert [row["step"] for row in rows if "valid_loss" in row] == [10, 20, 30]
    assert rows[0].keys() == {"step", "loss", "rate", "norm", "tokens", "seconds"}
    (text,) = [row["text"] for row in rows if "text" in row]
    assert text.startswith("step 13: the loss is nan")


@pytest.mark.trains
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")

    class FullDisk(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    class FillsDisk(Observer):
        def on_step(self, loop: Loop, step: Step) -> None:
            journal.file.close()
            journal.file = FullDisk()  # type: ignore[assignment]

    loop, _ = make(3)
    loop.observers += [FillsDisk(), journal]
    message = r"metrics\.jsonl' cannot be written: No space left on device\. Free some space"
    with pytest.raises(SavedError, match=message):
        loop.run()


def test_the_journal_drops_lines_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "loss": 1}\n{"step": 4}\n{"step": 5}\nnonsense\n{"loss": 1}\n{"s')
    loop, _ = make(6)
    loop.state.step = 4
    journal = Journal(path)
    journal.on_message(loop, "before it begins")
    journal.on_begin(loop)
    assert path.read_text() == '{"step": 3, "loss": 1}\n{"step": 4}\n'
    journal.on_end(loop)


@pytest.mark.trains
def test_the_board_writes_tensorboard_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    watched(Board(tmp_path / "board"))
    (file,) = (tmp_path / "board").iterdir()
    content = file.read_bytes()
    for name in (b"train/loss", b"train/rate", b"train/norm", b"valid/loss"):
        assert name in content
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ExtraError, match=r"tensorboardX.*pip install 'addnorm\[track\]'"):
        Board(tmp_path / "other")


def test_the_observers_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert [type(o) for o in make_observers(tmp_path)] == [Lines, Journal]
    assert [type(o) for o in make_observers(tmp_path, progress=False)] == [Journal]
    watched = make_observers(tmp_path, clinic=True)
    assert [type(o) for o in watched] == [Lines, Journal, TrainingMonitor]
    pytest.importorskip("tensorboardX")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    observers = make_observers(tmp_path, board=True)
    assert [type(o) for o in observers] == [Bar, Journal, Board]
    observers[-1].on_end(None)  # type: ignore[arg-type]


def test_recent_speed_is_a_moving_average_of_finite_values() -> None:
    speed = RecentSpeed()
    speed.add(step(1, loss=4.0))
    assert (speed.loss, speed.tokens, speed.step_seconds) == (4.0, 200.0, 0.5)
    speed.add(step(2, loss=2.0))
    assert speed.loss == pytest.approx(0.95 * 4 + 0.05 * 2)
    speed.add(step(3, loss=math.nan, tokens=0, seconds=0.0))
    assert speed.loss == pytest.approx(3.9) and math.isfinite(speed.tokens)


def test_the_remaining_time() -> None:
    loop, _ = make(100)
    speed = RecentSpeed()
    speed.add(step(1, seconds=0.5))
    loop.state.step = 60
    assert speed.seconds_left(loop) == pytest.approx(40 * 0.5)
    loop.state.training_seconds, loop.state.evaluation_seconds = 30.0, 15.0
    assert speed.seconds_left(loop) == pytest.approx(40 * 0.5 * 1.5)
    loop, _ = make(100, max_seconds=50.0)
    loop.state.step = 60
    loop.state.training_seconds, loop.state.evaluation_seconds = 30.0, 15.0
    assert speed.seconds_left(loop) == pytest.approx(5)


def test_metrics_and_durations_are_formatted() -> None:
    metrics = {"loss": 2.34567, "bits_per_byte": 1.5, "accuracy": 0.781, "f1": 1.0}
    assert format_metrics(metrics) == "loss 2.346, bits per byte 1.5, accuracy 78.1%, f1 100.0%"
    assert format_metrics({}) == ""
    assert [format_duration(s) for s in (-3, 59.6, 3599, 3600)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
    ]
    assert format_duration(math.inf) == "–"
