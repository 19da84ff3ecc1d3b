"""Extending a run, and the number of threads of a run."""

import time
from pathlib import Path

import pytest
import torch

from addnorm.config import Config
from addnorm.errors import ConfigError, SavedError
from addnorm.runs.resolve import StepTimes, make_extension
from addnorm.runs.run import Run, RunRecord
from addnorm.runs.train import (
    PlannedRun,
    describe_plan,
    loop_settings,
    make_run_tuner,
    plan_run,
    resume_run,
)
from addnorm.training import checkpoint
from addnorm.training.loop import LoopSettings
from addnorm.training.pace import Extension
from tests.runs.common import ALL_TASKS, default_observers, quiet, request_for, resume, train
from tests.runs.test_train import Cut, PowerCut, same_runs


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_finished_run_is_extended(task: str, data: Path, tmp_path: Path) -> None:
    out, messages = tmp_path / "run", []
    first = train(request_for(task, data), out)
    done = resume_run(out, observers=default_observers, steps="+4", say=messages.append)
    assert "extending it after step 6 by 4 steps, with a new warm-up." in messages
    state = done.progress
    assert state.finished and state.step == 10
    assert state.history[:2] == first.progress.history and state.history[-1]["step"] == 10
    run = Run.open(out)
    (extension,) = run.record.extensions
    every = extension.evaluate_every  # at most a fifth of the time, but as often as the run itself
    assert extension == Extension(step=6, steps=4, warmup=1, evaluate_every=every)
    assert 1 <= every <= run.config.train.evaluate_every
    assert run.summary["steps"] == 10 and run.config.train.steps == 6
    changes = [row for row in run.history if "change" in row]
    assert changes == [{"step": 6, "change": "extension", "steps": 10, "evaluate_every": every}]
    assert resume(out).progress.step == 10, "it is finished again"
    assert resume_run(out, observers=default_observers, steps="+3", say=quiet).progress.step == 13


@pytest.mark.slow
@pytest.mark.trains
def test_a_killed_extension_equals_an_unbroken_one(data: Path, tmp_path: Path) -> None:
    request = request_for("language", data, "model.dropout=0.2", steps=6, save_every=2)
    for name in ("whole", "cut"):
        train(request, tmp_path / name)
    resume_run(tmp_path / "whole", observers=default_observers, steps="+6", say=quiet)
    with pytest.raises(PowerCut):
        observers = lambda path: [*default_observers(path), Cut(7)]  # noqa: E731
        resume_run(tmp_path / "cut", observers=observers, steps="+6", say=quiet)
    with pytest.raises(PowerCut):
        resume(tmp_path / "cut", Cut(10))
    assert resume(tmp_path / "cut").progress.step == 12
    same_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.trains
def test_a_time_extends_a_run(data: Path, tmp_path: Path) -> None:
    out, messages = tmp_path / "run", []
    train(request_for("language", data), out)
    done = resume_run(out, observers=default_observers, minutes="+0.005", say=messages.append)
    assert "extending it after step 6 by 0.005 minutes, with a new warm-up." in messages
    assert done.progress.finished and done.progress.step > 6
    assert done.progress.segments[0].until > done.progress.segments[0].began > 0


@pytest.mark.trains
def test_a_run_without_a_checkpoint_cannot_be_extended(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(PowerCut):
        train(request_for("language", data), out, Cut(1))
    with pytest.raises(SavedError, match=r"has no checkpoint to extend. Resume it first: addnorm"):
        resume_run(out, observers=default_observers, steps="+3", say=quiet)
    assert checkpoint.steps(out) == [] and Run.open(out).record.extensions == []


@pytest.mark.parametrize(
    ("steps", "usual", "apart", "every"),
    ((20, 50, 8, 8), (20, 50, 30, 20), (200, 50, 8, 20), (200, 5, 8, 5), (20, None, 8, 8)),
)
def test_evaluations_of_an_extension_cost_at_most_a_fifth(
    steps: int, usual: int | None, apart: int, every: int
) -> None:
    config = Config() if usual is None else Config().override(f"train.evaluate_every={usual}")
    assert make_extension(config, 7, steps=steps, apart=apart).evaluate_every == every


@pytest.mark.parametrize(
    ("steps", "warmup", "every"), [(1, 1, 1), (400, 20, 40), (10**6, 1000, 50)]
)
def test_an_extension_has_a_short_warm_up(steps: int, warmup: int, every: int) -> None:
    extension = make_extension(Config().override("train.evaluate_every=50"), 7, steps=steps)
    assert (extension.step, extension.steps, extension.warmup) == (7, steps, warmup)
    assert extension.evaluate_every == every


def test_intervals_that_were_not_requested_follow_the_clock(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("addnorm.runs.train.measure_steps", lambda *given: StepTimes(0.1, 0.1))
    request = request_for("language", data, "run.minutes=1", steps=30)
    settings = loop_settings_of(plan_run(request, say=quiet))
    assert settings.fixed_evaluations and settings.max_steps == 30
    table = {**request.table, "train": {"batch": 8}}
    planned = plan_run(type(request)(table, request.settings), say=quiet)
    settings = loop_settings_of(planned)
    assert planned.requested == {} and settings.max_steps is None
    assert settings.save_every is None and not settings.fixed_evaluations


def loop_settings_of(planned: PlannedRun) -> LoopSettings:
    record = RunRecord("language", "", requested=planned.requested)
    return loop_settings(planned.config, torch.device("cpu"), record)


def test_the_user_may_set_the_number_of_threads(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_run(request_for("language", data, "run.threads=3"), say=quiet)
    tuner = make_run_tuner(planned.config, planned.task, planned.model)
    assert tuner is not None and tuner.candidates == [3] and tuner.chosen == 3
    planned = plan_run(request_for("language", data), say=quiet)
    assert make_run_tuner(planned.config, planned.task, planned.model) is None, (
        "OMP_NUM_THREADS is set"
    )
    monkeypatch.setattr("addnorm.runs.train.thread_candidates", lambda requested: (1, 2))
    tuner = make_run_tuner(planned.config, planned.task, planned.model)
    assert tuner is not None and tuner.candidates == [2, 1]
    assert tuner.measure(1) > 0 and tuner.measure(2) > 0
    with pytest.raises(ConfigError, match=r"run.threads must be positive: got 0"):
        Config().override("run.threads=0")


@pytest.mark.slow
@pytest.mark.trains
def test_threads_of_a_run_are_used_recorded_and_given_back(data: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(PowerCut):
        train(request_for("language", data, "run.threads=2"), tmp_path / "run", Cut(2))
    assert torch.get_num_threads() == before
    done = resume(tmp_path / "run")
    assert torch.get_num_threads() == before
    assert done.progress.threads == [{"step": 0, "threads": 2}]


@pytest.mark.parametrize("crowded", [False, True])
def test_the_first_choice_of_threads_is_reported(
    crowded: bool, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("addnorm.runs.train.thread_candidates", lambda requested: (1, 2))
    slow = {1: 0.01, 2: 0.1 if crowded else 0.01}
    monkeypatch.setattr("addnorm.training.threads.time_matrix_products", slow.get)
    monkeypatch.setattr(
        "addnorm.training.threads.gradient_timer", lambda *given: {1: 0.2, 2: 0.1}.get
    )
    messages: list[str] = []
    request = request_for("language", data, steps=5000)
    planned = plan_run(request, train=True, say=messages.append)
    assert planned.tuner is not None and planned.tuner.chosen == (1 if crowded else 2)
    message = "using 1 of 2 threads: measured to be faster now."
    assert (message in messages) == crowded


def test_the_plan_says_what_the_minutes_are_for(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("addnorm.runs.train.measure_steps", lambda *given: StepTimes(0.1, 0.1))
    messages: list[str] = []
    request = request_for("language", data, "run.minutes=1")
    planned = plan_run(request, began=time.perf_counter() - 20, say=messages.append)
    assert "measuring the speed of a few steps." in messages
    *_, budget = describe_plan(planned).split("\n")
    assert budget.startswith("1 minutes are for all of the run, its summary included; 2")
    assert budget.endswith(" s are over. The number of steps follows the measured pace.")
    planned = plan_run(request, began=time.perf_counter() - 80, say=quiet)
    *_, budget = describe_plan(planned).split("\n")
    assert budget.startswith("run.minutes=1 is over after reading the data and measuring (8")
    assert budget.endswith(" s): only one step is trained. Try more minutes.")
    assert planned.config.train.steps == 1
    assert "minutes" not in describe_plan(plan_run(request_for("language", data), say=quiet))
