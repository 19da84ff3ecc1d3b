"""Training of the instant model: what a step is given, and that a run can be continued."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from addnorm.errors import ConfigError
from addnorm.models.instant import read_instant, write_instant
from addnorm.tabular import instant_training
from addnorm.tabular.instant_training import (
    InstantSettings,
    InstantTraining,
    batch_loss,
    export_weights,
    load_weights,
    make_loop,
    make_model,
    train_instant,
)

SMALL = InstantSettings(
    width=8,
    depth=2,
    heads=2,
    cells=400,
    curriculum=20,
    growth_start=20,
    growth_end=40,
    small_rows=60,
    small_columns=3,
    rows=80,
    columns=5,
)
FEW = ((20, 10, 3, 2, 4), (20, 10, 3, 0, 4))


@pytest.fixture(autouse=True)
def few_validation_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instant_training, "VALIDATION", FEW)


def test_a_step_is_a_function_of_its_number() -> None:
    one, two = InstantTraining(SMALL), InstantTraining(SMALL)
    for part in (0, 7, 40):
        a, b = one.batch(part), two.batch(part)
        assert torch.equal(a["cells"].nan_to_num(), b["cells"].nan_to_num())
        assert torch.equal(a["target"], b["target"])


def test_tables_become_larger_and_stay_within_their_limits() -> None:
    task = InstantTraining(SMALL)
    early = [task.shape(part) for part in range(20)]
    late = [task.shape(part) for part in range(40, 140)]
    assert max(columns for _, _, columns, _, _ in early) <= 3
    assert 3 < max(columns for _, _, columns, _, _ in late) <= 5
    assert {classes for *_, classes, _ in late} >= {0, 2}
    assert all(known + unknown <= 60 for known, unknown, *_ in early)
    assert 60 < max(known + unknown for known, unknown, *_ in late) <= 80
    assert task.count_tables(3) == sum(tables for *_, tables in early[:3])


def test_numbers_are_standardised_and_losses_add_up() -> None:
    task, model = InstantTraining(SMALL), make_model(SMALL)
    batch = next(b for b in map(task.batch, range(40)) if not int(b["classes"]))
    assert batch["known"].mean(dim=1).abs().max() < 1e-4
    total = task.tokens(batch)
    whole, half = (batch_loss(model, batch, count).item() for count in (total, 2 * total))
    assert whole == pytest.approx(2 * half, rel=1e-5)


@pytest.mark.trains
def test_a_run_is_resumed_and_annealed(tmp_path: Path) -> None:
    whole = make_loop(SMALL, tmp_path / "whole", steps=6, evaluate_every=3)
    whole.run()
    make_loop(SMALL, tmp_path / "parts", steps=3, evaluate_every=3).run()
    rest = make_loop(SMALL, tmp_path / "parts", steps=6, evaluate_every=3)
    assert rest.state.step == 3
    rest.run()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, rest.model.state_dict()[name]), name
    lines = (tmp_path / "parts" / "curve.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    read_instant(tmp_path / "parts" / "weights" / "step-000006.safetensors")
    assert [row["step"] for row in rows] == [3, 6] and rows[1]["tables"] > rows[0]["tables"]
    annealed = make_loop(SMALL, tmp_path / "annealed", steps=99, anneal=4, start=tmp_path / "parts")
    assert annealed.state.step == 6 and annealed.settings.steps == 10
    assert [annealed.settings.schedule(step) for step in (6, 8, 10)] == [
        rest.settings.schedule(6),
        0.5 * rest.settings.schedule(6),
        0.0,
    ]
    annealed.run()
    again = make_loop(SMALL, tmp_path / "annealed", steps=99, anneal=4, start=tmp_path / "parts")
    assert again.state.step == 10 and again.settings.steps == 10  # from its own checkpoint
    with pytest.raises(ConfigError, match="was begun with --anneal 4: got 5"):
        make_loop(SMALL, tmp_path / "annealed", steps=99, anneal=5, start=tmp_path / "parts")
    export_weights(annealed, tmp_path / "w.safetensors")
    read = read_instant(tmp_path / "w.safetensors")
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, annealed.averages[f"ema.{name}"]), name


@pytest.mark.trains
def test_the_command_writes_weights(tmp_path: Path) -> None:
    sizes = ["--width", "8", "--depth", "2", "--cells", "300", "--rows", "70", "--columns", "4"]
    train_instant([str(tmp_path / "run"), "--steps", "2", "--evaluate-every", "2", *sizes])
    assert read_instant(tmp_path / "run" / "instant.safetensors").config.trunk.width == 8
    train_instant([str(tmp_path / "run"), "--anneal", "2", *sizes])
    assert (tmp_path / "run" / "annealed" / "instant.safetensors").is_file()


@pytest.mark.parametrize(("schedule", "last"), (("constant", 1.0), ("cosine", 0.0)))
def test_a_schedule_that_falls_is_refitted_to_a_time_limit(
    tmp_path: Path, schedule: str, last: float
) -> None:
    settings = replace(SMALL, schedule=schedule, warmup=2)
    loop = make_loop(settings, tmp_path / "run", steps=50, seconds=9.0)
    assert loop.settings.schedule(50) == last and loop.settings.refit == (schedule == "cosine")


def test_a_run_may_begin_with_weights(tmp_path: Path) -> None:
    first = make_model(replace(SMALL, seed=5, identity=0))
    write_instant(first, first.state_dict(), tmp_path / "w.safetensors")
    model = make_model(SMALL)
    drawn = model.state_dict()["identities.weight"].clone()
    load_weights(model, tmp_path / "w.safetensors")
    for name, tensor in first.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(model.state_dict()["identities.weight"], drawn)
    with pytest.raises(ConfigError, match="Give the sizes that it was trained with"):
        load_weights(make_model(replace(SMALL, width=16)), tmp_path / "w.safetensors")


@pytest.mark.slow
@pytest.mark.process
def test_torchrun_trains_on_more_tables(tmp_path: Path) -> None:
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = shlex.split("--width 8 --depth 2 --cells 300 --steps 3 --evaluate-every 3")
    command = [*starter, "-m", "addnorm.tabular.instant_training", str(tmp_path / "run"), *sizes]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "run" / "curve.jsonl").read_text().splitlines()
    alone = InstantTraining(InstantSettings(cells=300)).count_tables(3)
    assert json.loads(line)["tables"] == 2 * alone
    assert read_instant(tmp_path / "run" / "instant.safetensors").config.trunk.width == 8
