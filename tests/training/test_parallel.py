"""Several processes: the losses of one process, resuming with more or fewer, lost workers."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from addnorm.cli.main import main
from addnorm.runs.run import Run
from addnorm.training import checkpoint, parallel
from tests.cli.test_train import command, wait_for
from tests.runs.common import resume, write
from tests.runs.test_train import Cut, PowerCut

TOLERANCE = 1e-5
"""Between the losses of two workers and of one: sums have another order."""


def test_one_process_gathers_nothing() -> None:
    assert (parallel.rank(), parallel.world_size()) == (0, 1)
    assert parallel.sum_over_workers(1.5, 2.0) == [1.5, 2.0]
    parallel.barrier()
    parallel.destroy_process_group()
    model = nn.Linear(2, 2)
    inside = parallel.distribute(model, "fsdp")
    assert inside(lambda module: module) is model and parallel.without_ddp(inside) is inside
    with parallel.defer_gradient_sync(inside, last=False):
        pass
    tensors = {"a": torch.ones(3)}
    assert parallel.unshard_all(tensors)["a"] is tensors["a"]
    assert parallel.shard_all_like(tensors, {"a": torch.zeros(3)}.items())["a"] is tensors["a"]
    assert torch.equal(parallel.rng_states()["0"], torch.get_rng_state())


def test_one_process_initialises_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    parallel.init_process_group(torch.device("cpu"))
    assert parallel.world_size() == 1


def test_a_worker_that_does_not_respond_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RuntimeError, match="Connection reset"), parallel.detect_lost_workers():
        raise RuntimeError("Connection reset by peer")  # with one process, it has another cause
    monkeypatch.setattr(parallel, "world_size", lambda: 2)
    with (
        pytest.raises(
            parallel.WorkerLostError,
            match=r"another worker .* does not respond \(Connection reset\)\. .* with --resume\.",
        ),
        parallel.detect_lost_workers(),
    ):
        raise RuntimeError("Connection reset\nand more")
    with pytest.raises(RuntimeError, match="size mismatch"), parallel.detect_lost_workers():
        raise RuntimeError("size mismatch")
    own = parallel.WorkerLostError("Connection closed by peer")
    with (
        pytest.raises(parallel.WorkerLostError, match=r"^Connection closed by peer$"),
        parallel.detect_lost_workers(),
    ):
        raise own  # not said twice


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return texts whose number of rows two workers cannot always share evenly."""
    return write(tmp_path_factory.mktemp("parallel"), 51)


def launch(*arguments: str) -> "subprocess.Popen[str]":
    """Start the same command with torchrun and two workers."""
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [sys.executable, *starter, "-m", "addnorm", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_two(*arguments: str) -> str:
    with launch(*arguments) as process:
        _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    return errors


def train_command(task: str, texts: Path, out: Path, *settings: str) -> list[str]:
    """Return a command without dropout: two workers have other random numbers than one."""
    options = (
        "model.dropout=0",
        "train.batch=96",
        "train.steps=12",
        "train.evaluate_every=4",
        *settings,
    )
    more = [word for setting in options for word in ("--set", setting)]
    return command(task, texts, out, *more)


def curve(path: Path) -> list[float]:
    """Return every loss in the history, of steps and evaluations."""
    rows = Run.open(path).history
    return [row[name] for row in rows for name in ("loss", "norm", "valid_loss") if name in row]


def same_curve(one: Path, other: Path) -> None:
    """Weights are not compared: where a gradient is zero, Adam amplifies rounding to full steps."""
    assert len(curve(one)) == len(curve(other)) > 20
    assert curve(one) == pytest.approx(curve(other), rel=TOLERANCE)


@pytest.mark.trains
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind", "more"),
    [
        ("translate", "ddp", ("train.accumulate=2", "train.average_checkpoints=2")),
        ("translate", "fsdp", ("train.accumulate=2", "train.average_checkpoints=2")),
        ("language", "ddp", ()),
        ("masked", "ddp", ("train.average_checkpoints=0", "train.ema=0.9")),
        ("masked", "fsdp", ("train.average_checkpoints=0", "train.ema=0.9")),
        ("classify", "ddp", ("train.batch=40",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_workers_train_the_same_model_as_one(
    task: str, kind: str, more: tuple[str, ...], texts: Path, tmp_path: Path
) -> None:
    assert main(train_command(task, texts, tmp_path / "one", *more)) == 0
    run_two(*train_command(task, texts, tmp_path / "two", f"run.parallel={kind}", *more))
    same_curve(tmp_path / "one", tmp_path / "two")


@pytest.mark.trains
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_resumes_with_more_or_fewer_workers(kind: str, texts: Path, tmp_path: Path) -> None:
    more = (f"run.parallel={kind}", "train.keep_checkpoints=9", "train.average_checkpoints=2")
    assert main(train_command("translate", texts, tmp_path / "one", *more)) == 0
    run_two(*train_command("translate", texts, tmp_path / "two", *more))
    for name in ("one", "two"):
        for late in checkpoint.steps(tmp_path / name)[1:]:
            shutil.rmtree(late)
    shutil.copytree(tmp_path / "one", tmp_path / "whole")
    assert "resuming after step 4." in run_two("train", "--resume", str(tmp_path / "one"))
    assert main(["train", "--resume", str(tmp_path / "two")]) == 0
    assert main(["train", "--resume", str(tmp_path / "whole")]) == 0
    for name in ("one", "two"):
        assert Run.open(tmp_path / name).summary["finished"]
        same_curve(tmp_path / "whole", tmp_path / name)


def workers(process: "subprocess.Popen[str]") -> dict[str, int]:
    """Return the processes that torchrun started, by rank."""
    ranks = {}
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in map(int, children):
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                ranks[entry[5:].decode()] = child
    return ranks


@pytest.mark.trains
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("lost", ["0", "1"])
def test_a_lost_worker_ends_the_job_and_the_run_can_be_resumed(
    lost: str, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with launch(*train_command("language", texts, out, "train.steps=100000")) as process:
        output = wait_for(process, lambda line: "step      8  held out" in line)
        os.kill(workers(process)[lost], signal.SIGKILL)
        _, errors = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "another worker of this run does not respond" in output + errors
    newest = checkpoint.newest(out, notes := [])
    assert newest is not None and notes == []
    with pytest.raises(PowerCut):
        resume(out, Cut(newest.plain["step"] + 2))


@pytest.mark.trains
@pytest.mark.slow
def test_an_interrupt_reaches_all_workers(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ("train.steps=100000", "train.save_every=100000")
    with launch(*train_command("language", texts, out, *settings)) as process:
        wait_for(process, lambda line: "step      4  held out" in line)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert f"resume with: addnorm train --resume {out}\n" in errors
    (saved,) = checkpoint.steps(out)
    assert saved.name == f"step-{Run.open(out).summary['steps']:08d}"


def test_sharding_is_refused_for_other_optimizers_and_for_tables(
    monkeypatch: pytest.MonkeyPatch, texts: Path, tmp_path: Path
) -> None:
    from addnorm.config import Config
    from addnorm.errors import ConfigError
    from addnorm.runs.train import make_run_optimizer
    from addnorm.tasks import find_task

    monkeypatch.setattr(parallel, "world_size", lambda: 2)
    config = Config().override("run.parallel=fsdp", "train.optimizer=muon", "train.lr=1")
    task: Any = find_task("language")
    with pytest.raises(ConfigError, match=r"fsdp needs train.optimizer adam or adamw: got muon"):
        make_run_optimizer(config, task, nn.Linear(2, 2))
    config, task = config.override("train.optimizer=adamw"), find_task("table")
    with pytest.raises(ConfigError, match=r"run.parallel=fsdp is for text models: got a table"):
        make_run_optimizer(config, task, nn.Linear(2, 2))
