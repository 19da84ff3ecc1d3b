"""A time budget: measuring changes nothing, and the steps are fitted to the time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from addnorm.config import Config
from addnorm.runs import budget
from addnorm.runs.budget import measure_steps
from addnorm.runs.request import RunRequest
from addnorm.runs.resolve import StepTimes, resolve, schedule_within
from addnorm.runs.train import plan_run
from addnorm.tasks.base import DataFacts, TextTask
from addnorm.tasks.page_parts import PAGE_SECONDS
from addnorm.training import checkpoint
from tests.runs.common import ALL_TASKS, quiet, request_for, train


@pytest.mark.trains
@pytest.mark.parametrize("task", ALL_TASKS)
def test_measuring_changes_nothing(task: str, data: Path) -> None:
    planned = plan_run(request_for(task, data), say=quiet)
    before = {name: tensor.clone() for name, tensor in planned.model.state_dict().items()}
    state, metric = torch.get_rng_state(), planned.task.metric
    times = measure_steps(planned.model, planned.task, planned.config)
    assert times.step > 0 and times.evaluation > 0
    assert torch.equal(state, torch.get_rng_state()) and planned.task.metric == metric
    after = planned.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in planned.model.parameters())


@pytest.mark.trains
def test_a_measured_run_is_bit_equal_to_one_that_was_not(data: Path, tmp_path: Path) -> None:
    fields = dict(steps=7, evaluate_every=3, warmup=2)
    train(request_for("translate", data, **fields), tmp_path / "plain")
    train(request_for("translate", data, "run.minutes=1000", **fields), tmp_path / "timed")
    for name in ("best/model.safetensors", "checkpoints/step-00000007/weights.safetensors"):
        one, other = (load_file(tmp_path / run / name) for run in ("plain", "timed"))
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    one, other = (
        checkpoint.read(tmp_path / run / "checkpoints" / "step-00000007").state
        for run in ("plain", "timed")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def fitted(times: StepTimes, *settings: str) -> Any:
    """Return the train section of a configuration that is fitted to 10 minutes."""
    return schedule_within(10, Config().override(*settings), times).train


def test_schedule_within_a_time() -> None:
    """570 s: 40 evaluations of 1 s, the rest in steps of 0.1 s."""
    train_config = fitted(StepTimes(0.1, 1.0))
    assert (
        train_config.steps == 5300
        and train_config.evaluate_every == 132
        and train_config.warmup == 530
    )
    # Evaluations of 10 s: a tenth of the time is 5.7 of them.
    train_config = fitted(StepTimes(0.1, 10.0))
    assert train_config.steps == int((570 - 57) / 0.1) and train_config.evaluate_every == int(
        train_config.steps / 5.7
    )
    # Evaluations of 20 s: four of them fit into a fifth of the time.
    train_config = fitted(StepTimes(1.0, 20.0))
    assert train_config.steps == 570 - 80 and train_config.evaluate_every == 122
    # Evaluations of 50 s: as many as fit into a fifth; of 400 s: one, and half the time for steps.
    train_config = fitted(StepTimes(1.0, 50.0))
    assert train_config.steps == 570 - 114 and train_config.evaluate_every == 200
    train_config = fitted(StepTimes(1.0, 400.0))
    assert train_config.steps == 285 and train_config.evaluate_every == 285
    # Reading and measuring are part of the time.
    assert fitted(StepTimes(1.0, 0.0, elapsed=20.0)).steps == 550
    assert fitted(StepTimes(1.0, 0.0, elapsed=900.0)).steps == 1
    train_config = fitted(StepTimes(1000.0, 0.0))
    assert train_config.steps == 1 and train_config.evaluate_every == 1


def test_requested_fields_are_kept() -> None:
    settings = ("train.steps=50", "train.evaluate_every=9", "train.warmup=5", "train.save_every=3")
    train_config = fitted(StepTimes(0.1, 1.0), *settings)
    assert (
        train_config.steps,
        train_config.evaluate_every,
        train_config.warmup,
        train_config.save_every,
    ) == (50, 9, 5, 3)
    assert fitted(StepTimes(0.1, 1.0), "train.steps=999999").steps == 5300


def test_steps_follow_the_time_if_minutes_are_set() -> None:
    fields = {"mode": "decoder", "head": "token", "vocab": 9, "pad": 0}
    facts = DataFacts(1000, batches=lambda config: 20, longest=lambda config: 1, model=fields)
    request = RunRequest({"run": {"task": "language", "minutes": 10}, "train": {"lr": 0.3}})
    train_config = resolve(request, facts).train
    assert (
        train_config.steps,
        train_config.warmup,
        train_config.evaluate_every,
        train_config.save_every,
    ) == (200, 20, 5, 5)
    train_config = resolve(request, facts, StepTimes(0.1, 1.0)).train
    assert (
        train_config.steps,
        train_config.warmup,
        train_config.evaluate_every,
        train_config.save_every,
    ) == (
        5300,
        530,
        132,
        132,
    )
    assert train_config.lr == 0.3


def test_the_total_counts_evaluations() -> None:
    config = Config().override("train.steps=100", "train.evaluate_every=10")
    assert StepTimes(0.5, 2.0).total(config) == pytest.approx(70)


@pytest.mark.trains
def test_a_run_that_was_planned_too_long_is_refitted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "addnorm.runs.train.measure_steps", lambda *arguments: StepTimes(1e-7, 1e-7)
    )
    done = train(request_for("language", data, "run.minutes=0.005", steps=10**6), tmp_path / "run")
    at = done.progress
    assert at.finished and 0 < at.step < 10**6
    refits = [row["step"] for row in done.run.history if row.get("change") == "refit"]
    assert refits == [segment.step for segment in at.segments] and refits
    assert at.history[-1]["step"] == at.step, "evaluated at the end"
    assert checkpoint.steps(done.run.path)[-1].name == f"step-{at.step:08d}"


@pytest.mark.trains
def test_measuring_is_short(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_run(request_for("classify", data), say=quiet)
    parts_read = []
    batch = planned.task.batch
    monkeypatch.setattr(planned.task, "batch", lambda part: parts_read.append(part) or batch(part))
    measure_steps(planned.model, planned.task, planned.config)
    parts = len(planned.task.plan(0))
    assert len(parts_read) == max(3, parts)
    parts_read.clear()
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.0)
    measure_steps(planned.model, planned.task, planned.config)
    assert len(parts_read) == 3


def test_an_evaluation_is_timed_by_its_first_parts(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_run(request_for("language", data, "train.batch=8"), say=quiet)
    task, calls, clock = planned.task, [], iter(range(0, 1000, 2))
    assert isinstance(task, TextTask)
    monkeypatch.setattr(task, "total_loss", lambda *given: calls.append(given))
    monkeypatch.setattr("addnorm.tasks.base.time.perf_counter", lambda: float(next(clock)))
    parts = len(task.held_out())
    assert parts > 2
    seconds = task.time_evaluation(planned.model, 1.0)
    assert len(calls) == 1, "the time is over after the first part"
    assert seconds == parts * 2.0, "a part took 2 s"


def test_parts_of_the_page_take_a_second_for_each_minute(data: Path) -> None:
    task = plan_run(request_for("language", data), say=quiet).task
    assert task.page_seconds == PAGE_SECONDS
    for minutes, seconds in ((1.5, 1.5), (60.0, PAGE_SECONDS)):
        run = task.config.run.replace(minutes=minutes)
        assert task.bind(task.config.replace(run=run)).page_seconds == seconds
