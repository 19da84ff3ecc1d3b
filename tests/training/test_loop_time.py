"""The loop against a simulated clock: refits, extensions, checkpoints, threads, and resume."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from addnorm.training import checkpoint
from addnorm.training.loop import Loop, Observer, Step, TrainingState
from addnorm.training.pace import SUMMARY_CPU, Extension
from addnorm.training.schedule import make_schedule
from addnorm.training.threads import ThreadTuner
from tests.training.test_loop import Counting, make, same, weights

Load = Callable[[float], float]


class Clock:
    """A clock that moves when a batch is read or an evaluation is made."""

    def __init__(self, load: Load = lambda seconds: 1.0) -> None:
        self.seconds, self.load = 0.0, load

    def __call__(self) -> float:
        return self.seconds

    def spend(self, seconds: float) -> None:
        self.seconds += seconds * self.load(self.seconds)


class TimedTask(Counting):
    """Steps of 1 s and evaluations of 2 s on a simulated clock, beside a load."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def batch(self, part: int) -> dict[str, torch.Tensor]:
        self.clock.spend(1.0)
        return super().batch(part)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.clock.spend(1.0)  # and 1 s for its batch
        return super().evaluate(model)


class Changes(Observer):
    """Records rates and changes."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.changes: list[tuple[int, str, dict[str, Any]]] = []
        self.messages: list[str] = []

    def on_step(self, loop: Loop, step: Step) -> None:
        self.rates.append(step.rate)

    def on_change(self, loop: Loop, change: str, facts: dict[str, Any]) -> None:
        self.changes.append((loop.state.step, change, facts))

    def on_message(self, loop: Loop, text: str) -> None:
        self.messages.append(text)


def timed(steps: int, load: Load, start: float = 0.0, **settings: Any) -> tuple[Loop, Changes]:
    """Return a loop on a simulated clock, and what it reports."""
    clock = Clock(load)
    clock.seconds = start
    loop, _ = make(steps, task=TimedTask(clock), **settings)
    loop.clock = clock
    observer = Changes()
    loop.observers.append(observer)
    return loop, observer


def slower(seconds: float) -> float:
    return 3.0 if 40 < seconds < 80 else 1.0


@pytest.mark.trains
@pytest.mark.parametrize(
    "load", [slower, lambda s: 4.0, lambda s: 0.5], ids=["changing", "slower", "faster"]
)
def test_a_run_is_refitted_to_its_time(load: Load) -> None:
    loop, observer = timed(110, load, refit=True, max_seconds=120.0, evaluate_every=10)
    state = loop.run()
    assert state.finished and 108 <= state.total_seconds <= 132
    assert state.total_seconds == pytest.approx(loop.clock())
    assert observer.rates[-1] < 0.05 * max(observer.rates), "the rate reached its end"
    assert [step for step, change, _ in observer.changes] == [s.step for s in state.segments]
    assert {change for _, change, _ in observer.changes} == {"refit"}


@pytest.mark.trains
def test_without_a_budget_nothing_is_refitted() -> None:
    loop, observer = timed(20, lambda s: 1.0 + s, refit=True, evaluate_every=5)
    assert loop.run().segments == [] and observer.changes == []
    plain, _ = make(20, evaluate_every=5)
    plain.run()
    assert same(weights(loop), weights(plain))


@pytest.mark.trains
def test_a_resumed_run_continues_with_its_segments(tmp_path: Path) -> None:
    """The clock continues, so the refits after the checkpoint are those of the unbroken run."""
    fields: dict[str, Any] = dict(
        refit=True, max_seconds=120.0, evaluate_every=10, save_every=20, keep_checkpoints=9
    )
    whole, _ = timed(110, slower, run=tmp_path / "whole", **fields)
    whole.run()
    path = tmp_path / "whole" / "checkpoints" / "step-00000020"
    for later in checkpoint.steps(tmp_path / "whole"):
        if later.name > path.name:
            later.rename(tmp_path / later.name)
    read = checkpoint.read(path)
    saved = TrainingState.parse(read.plain["state"], read)
    again, _ = timed(110, slower, saved.total_seconds, run=tmp_path / "whole", **fields)
    assert again.resume() and again.state.segments == saved.segments
    again.run()
    assert again.state.segments == whole.state.segments and again.state.step == whole.state.step
    assert same(weights(again), weights(whole))


def extended(
    steps: int, *extensions: Extension, run: Path, **settings: Any
) -> tuple[Loop, Changes]:
    """Return a loop whose schedule is extended."""
    schedules = tuple(
        (each, make_schedule("cosine", warmup=each.warmup, steps=each.steps)) for each in extensions
    )
    return timed(
        steps, lambda s: 1.0, run=run, evaluate_every=4, save_every=2, keep_checkpoints=20,
        refit=True, extensions=schedules, **settings,
    )  # fmt: skip


@pytest.mark.trains
def test_a_finished_run_is_extended_with_a_new_warm_up(tmp_path: Path) -> None:
    loop, _ = extended(10, run=tmp_path)
    first = loop.run()
    loop, observer = extended(10, Extension(10, 8, 2, 4), run=tmp_path)
    assert loop.resume() and not loop.state.finished and loop.steps == 18
    state = loop.run()
    assert (
        state.finished
        and state.step == 18
        and state.history[: len(first.history)] == (first.history)
    )
    schedule = make_schedule("cosine", warmup=2, steps=8)
    assert observer.rates == pytest.approx([1e-2 * schedule(step) for step in range(1, 9)])
    assert observer.changes == [(10, "extension", {"steps": 18, "evaluate_every": 4})]
    assert [row["step"] for row in state.history] == [4, 8, 10, 14, 18]
    again, _ = extended(10, Extension(10, 8, 2, 4), run=tmp_path)
    assert again.resume() and again.state.finished, "it begins only once"


@pytest.mark.trains
def test_an_extension_is_repeated_from_an_older_checkpoint(tmp_path: Path) -> None:
    extension = Extension(10, 8, 2, 4)
    loop, _ = extended(10, run=tmp_path)
    loop.run()
    loop, _ = extended(10, extension, run=tmp_path)
    loop.resume()
    loop.run()
    for path in checkpoint.steps(tmp_path)[3:]:  # up to step 6 remain
        path.rename(tmp_path / path.name)
    again, _ = extended(10, extension, run=tmp_path)
    assert again.resume() and again.state.step == 6
    again.run()
    assert again.state.segments[0].step == 10 and again.state.history == loop.state.history
    assert same(weights(again), weights(loop))


@pytest.mark.trains
def test_a_time_extends_a_run(tmp_path: Path) -> None:
    loop, _ = extended(10, run=tmp_path)
    before = loop.run().total_seconds
    loop, _ = extended(10, Extension(10, 400, 20, 10, minutes=1.0), run=tmp_path)
    loop.resume()
    state = loop.run()
    reserve = state.pace.summary(60.0)
    assert state.finished and 54 <= state.total_seconds - before + reserve <= 66


@pytest.mark.trains
def test_checkpoints_follow_evaluations_if_their_interval_is_not_set(tmp_path: Path) -> None:
    loop, _ = timed(9, lambda s: 1.0, run=tmp_path, evaluate_every=4, save_every=None)
    loop.settings = replace(loop.settings, keep_checkpoints=9)
    loop.run()
    assert [path.name[-2:] for path in checkpoint.steps(tmp_path)] == ["04", "08", "09"]


@pytest.mark.trains
def test_the_time_before_and_after_training_counts() -> None:
    """30 s of reading come before the first step; some seconds are kept for the summary."""
    loop, observer = timed(80, lambda s: 1.0, 30.0, refit=True, max_seconds=120.0)
    loop.began = 0.0
    loop.state.pace.add_evaluation(2.0)
    state = loop.run()
    assert state.other_seconds == 30.0 and loop.clock() == state.total_seconds
    assert 108 <= state.total_seconds + state.pace.summary(120.0) <= 122
    assert state.pace.summary(120.0) == 4.5 and state.pace.summary(16.0) == 2.0
    assert observer.rates[-1] < 0.05 * max(observer.rates)


@pytest.mark.trains
def test_a_time_that_is_over_before_training_leaves_one_step() -> None:
    loop, observer = timed(80, lambda s: 1.0, 200.0, refit=True, max_seconds=120.0)
    loop.began = 0.0
    state = loop.run()
    assert state.finished and state.step == 1 and len(state.history) == 1
    assert observer.messages == ["time limit reached after 1 step."]


@pytest.mark.slow
@pytest.mark.trains
def test_a_change_of_threads_is_recorded_and_restored(tmp_path: Path) -> None:
    """Two threads become 20 times slower at 30 s."""
    used: list[int] = []

    def load(seconds: float) -> float:
        used.append(torch.get_num_threads())
        return 20.0 if seconds > 30 and used[-1] == 2 else 1.0

    def durations(threads: int) -> float:
        return 1.0 if threads == 1 else 20.0

    before = torch.get_num_threads()
    loop, observer = timed(80, load, run=tmp_path, save_every=80)
    loop.tuner = ThreadTuner([1, 2], durations)
    loop.run()
    assert torch.get_num_threads() == before
    (start, change) = loop.state.threads
    assert start == {"step": 0, "threads": 2} and change["threads"] == 1
    assert 30 < change["step"] < 40 and used.count(2) == change["step"]
    assert (change["step"], "threads", {"threads": 1}) in observer.changes
    assert "1 thread instead of 2; a step took 20 s, and 1 s before." in observer.messages[0]
    again, _ = timed(90, load, run=tmp_path)
    again.tuner = ThreadTuner([1, 2], durations)
    used.clear()
    assert again.resume()
    again.state.finished = False
    again.run()
    assert set(used) == {1} and again.state.threads == loop.state.threads


@pytest.mark.trains
def test_the_summary_is_given_more_time_on_a_busy_machine() -> None:
    """The process gets a quarter of a core: what ends the run takes four times its CPU time."""
    loop, _ = timed(80, lambda s: 1.0, refit=True, max_seconds=60.0)
    loop.cpu_clock = lambda: loop.clock() / 4
    state = loop.run()
    assert state.pace.slowdowns == [pytest.approx(4.0)] * 3
    kept = state.pace.summary(60.0)
    assert kept == pytest.approx(4 * SUMMARY_CPU + 2 * state.pace.evaluations[-1])
    assert kept == pytest.approx(replace(state.pace, slowdowns=[]).summary(60.0) + 3 * SUMMARY_CPU)
    assert 54 <= state.total_seconds + kept <= 62
