"""A time budget: rehearsed without a trace, and fitted."""

from pathlib import Path

import pytest
import torch

from addnorm.config import Config
from addnorm.models.saved import read_tensors
from addnorm.runs import budget
from addnorm.runs.budget import Pace, fit_to_time, rehearse
from addnorm.runs.train import plan
from addnorm.train import checkpoint
from tests.runs.common import TASKS, Told, quiet, train, wish


@pytest.mark.trains
@pytest.mark.parametrize("task", TASKS)
def test_a_rehearsal_leaves_everything_as_it_was(task: str, data: Path) -> None:
    settled = plan(wish(task, data), say=quiet)
    before = {name: tensor.clone() for name, tensor in settled.model.state_dict().items()}
    state, metric = torch.get_rng_state(), settled.task.metric
    pace = rehearse(settled.model, settled.task, settled.config)
    assert pace.step > 0 and pace.evaluation > 0
    assert torch.equal(state, torch.get_rng_state()) and settled.task.metric == metric
    after = settled.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in settled.model.parameters())


@pytest.mark.trains
def test_a_rehearsed_run_is_bit_equal_to_one_that_was_not(data: Path, tmp_path: Path) -> None:
    given = dict(steps=7, evaluate=3, warmup=2)
    train(wish("translate", data, **given), tmp_path / "plain")
    train(wish("translate", data, "run.minutes=1000", **given), tmp_path / "timed")
    for name in ("best/model.safetensors", "checkpoints/step-00000007/weights.safetensors"):
        one, other = (read_tensors(tmp_path / run / name)[0] for run in ("plain", "timed"))
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    one, other = (
        checkpoint.read(tmp_path / run / "checkpoints" / "step-00000007").state
        for run in ("plain", "timed")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def config(*settings: str) -> Config:
    return Config().override("run.minutes=10", *settings)


def test_the_arithmetic() -> None:
    """570 s: 40 evaluations of 1 s, the rest in steps of 0.1 s."""
    found = fit_to_time(config(), config(), Pace(0.1, 1.0)).train
    assert found.steps == 5300 and found.evaluate == 132 and found.warmup == 530
    # Evaluations of 10 s: a tenth of the time is 5.7 of them.
    found = fit_to_time(config(), config(), Pace(0.1, 10.0)).train
    assert found.steps == int((570 - 57) / 0.1) and found.evaluate == int(found.steps / 5.7)
    # Evaluations of 40 s: four of them fit into a third of the time.
    found = fit_to_time(config(), config(), Pace(1.0, 40.0)).train
    assert found.steps == 570 - 160 and found.evaluate == 102
    # Evaluations of 100 s: those that do, and of 400 s: one, and half the time to learn.
    found = fit_to_time(config(), config(), Pace(1.0, 100.0)).train
    assert found.steps == 570 - 190 and found.evaluate == 200
    found = fit_to_time(config(), config(), Pace(1.0, 400.0)).train
    assert found.steps == 285 and found.evaluate == 285
    found = fit_to_time(config(), config(), Pace(1000.0, 0.0)).train
    assert found.steps == 1 and found.evaluate == 1


def test_what_was_asked_for_by_name_stays() -> None:
    asked = config("train.steps=50", "train.evaluate=9", "train.warmup=5", "train.save=3")
    found = fit_to_time(asked, asked, Pace(0.1, 1.0)).train
    assert (found.steps, found.evaluate, found.warmup, found.save) == (50, 9, 5, 3)
    asked = config("train.steps=999999")
    assert fit_to_time(asked, asked, Pace(0.1, 1.0)).train.steps == 5300
    settled = config("train.warmup=7", "train.evaluate=8", "train.save=9", "train.lr=0.3")
    found = fit_to_time(config(), settled, Pace(0.1, 1.0)).train
    assert (found.warmup, found.evaluate, found.save, found.lr) == (530, 132, 132, 0.3)


def test_the_total_counts_evaluations() -> None:
    asked = config("train.steps=100", "train.evaluate=10")
    assert Pace(0.5, 2.0).total(asked) == pytest.approx(70)


@pytest.mark.trains
def test_the_clock_stops_a_run_that_was_planned_too_long(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("addnorm.runs.train.rehearse", lambda *given: Pace(1e-7, 1e-7))
    told = Told()
    done = train(wish("language", data, "run.minutes=0.005", steps=10**6), tmp_path / "run", told)
    at = done.progress
    assert at.finished and 0 < at.step < 10**6
    assert told.texts == [f"the time is up after {at.step} steps."]
    assert at.history[-1]["step"] == at.step, "evaluated at the end"
    assert checkpoint.steps(done.run.path)[-1].name == f"step-{at.step:08d}"


@pytest.mark.trains
def test_the_rehearsal_is_short(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = plan(wish("classify", data), say=quiet)
    seen = []
    batch = settled.task.batch
    monkeypatch.setattr(settled.task, "batch", lambda part: seen.append(part) or batch(part))
    rehearse(settled.model, settled.task, settled.config)
    parts = len(settled.task.plan(0))
    assert len(seen) == max(3, parts)
    seen.clear()
    monkeypatch.setattr(budget, "LONGEST", 0.0)
    rehearse(settled.model, settled.task, settled.config)
    assert len(seen) == 3
