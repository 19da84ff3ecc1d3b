"""The loop on a small task: exact resume, accumulation, averages, skipped steps, signals."""

import math
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from addnorm import build, presets, token_loss
from addnorm.errors import SavedError
from addnorm.files import CHECKPOINT_STATE, FAILED_STEP_BATCH, FAILED_STEP_MODEL
from addnorm.models.saved import read_tensors, write_tensors
from addnorm.training import checkpoint
from addnorm.training.loop import (
    Batch,
    DivergedError,
    Loop,
    LoopSettings,
    Observer,
    Step,
    TrainingState,
    _is_better,
)
from addnorm.training.optimizer import make_optimizer
from addnorm.training.schedule import make_schedule
from tests.conftest import slow_off_diagonal
from tests.portable import training


class Counting:
    """A task: the next token of sequences that count by threes, of different lengths."""

    metric, higher_is_better = "loss", False

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.is_bad: Callable[[int], bool] = lambda start: False
        self.figures: list[float] = []

    def plan(self, epoch: int) -> Sequence[int]:
        order = torch.randperm(6, generator=torch.Generator().manual_seed(epoch))
        return [int(i) * self.size for i in order]

    def batch(self, part: int) -> Batch:
        rows = torch.arange(part, part + self.size)
        ids = (torch.arange(9) * 3 + rows[:, None]) % 16
        targets = ids[:, 1:].masked_fill(torch.arange(8) >= 4 + rows[:, None] % 5, -100)
        return {"ids": ids[:, :-1], "targets": targets, "start": torch.tensor([part])}

    def tokens(self, batch: Batch) -> int:
        return int((batch["targets"] != -100).sum())

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        loss = token_loss(model, model.hidden(batch["ids"]), batch["targets"], total=total)
        return loss * math.nan if self.is_bad(int(batch["start"])) else loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if self.figures:
            return {"loss": self.figures.pop(0)}
        batch = self.batch(0)
        return {"loss": float(self.loss(model, batch, self.tokens(batch)))}


def make(
    steps: int, *, dropout: float = 0.1, task: Counting | None = None, **settings: Any
) -> tuple[Loop, Counting]:
    torch.manual_seed(training.seed)
    task = task or Counting()
    model = build(presets.gpt2(vocab=16, width=16, depth=1, heads=2, dropout=dropout))
    run = settings.pop("run", None)
    optimizer = make_optimizer(model, settings.pop("optimizer", "adamw"), lr=1e-2)
    schedule = make_schedule("cosine", warmup=3, steps=steps)
    loop = Loop(
        model, task, optimizer, LoopSettings(steps, schedule, **settings), run_directory=run
    )
    return loop, task


def weights(loop: Loop) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.trains
def test_training_reduces_the_loss() -> None:
    loop, _ = make(90, dropout=0.0, evaluate_every=10)
    loop.run()
    losses = [row["loss"] for row in loop.state.history]
    assert losses[-1] < losses[0] / 3 and loop.state.best == min(losses)


@pytest.mark.trains
def test_accumulated_parts_equal_one_large_batch() -> None:
    """The parts have different numbers of targets: only a mean over all tokens is equal."""

    class Whole(Counting):
        def plan(self, epoch: int) -> Sequence[int]:
            return [0]

    class Halves(Counting):
        def plan(self, epoch: int) -> Sequence[int]:
            return [0, 4]

    big, _ = make(3, dropout=0.0, task=Whole(8))
    parts, _ = make(3, dropout=0.0, task=Halves(4), accumulate=2)
    for loop in (big, parts):
        loop.model.double()
        loop.run()
    for name, tensor in weights(big).items():
        torch.testing.assert_close(tensor, weights(parts)[name], rtol=0, atol=1e-9)


@pytest.mark.trains
@pytest.mark.parametrize(
    ("optimizer", "more"),
    slow_off_diagonal(("adam", "adamw", "adafactor", "muon"), ("nothing", "ema", "average")),
)
def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path, optimizer: str, more: str) -> None:
    averaging: dict[str, Any] = {"nothing": {}, "ema": {"ema": 0.9}, "average": {"average": 2}}
    common = averaging[more] | dict(
        optimizer=optimizer, evaluate_every=3, save_every=4, accumulate=2
    )
    whole, _ = make(14, **common)
    whole.run()
    broken, _ = make(14, run=tmp_path, **common)

    class Stop(Observer):
        def on_step(self, loop: Loop, step: Step) -> None:
            if step.number == 9:
                raise RuntimeError("the power failed")

    broken.observers.append(Stop())
    with pytest.raises(RuntimeError, match="the power failed"):
        broken.run()
    again, _ = make(14, run=tmp_path, **common)
    assert again.resume() and again.state.step == 8
    again.run()
    assert same(weights(whole), weights(again))
    assert whole.state.history == again.state.history
    assert (whole.averaged_weights() is None) == (again.averaged_weights() is None)
    if whole.averaged_weights() is not None:
        assert same(whole.averaged_weights() or {}, again.averaged_weights() or {})


SCRIPT = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.training.test_loop import make
from addnorm.training.loop import Observer

class Slow(Observer):
    def on_step(self, loop, step):
        print(step.number, flush=True)
        time.sleep(float(sys.argv[2]))

every = dict(save_every=2, evaluate_every=7, keep_checkpoints=3)
loop, _ = make(30, run=Path(sys.argv[1]), ema=0.9, **every)
loop.observers.append(Slow())
loop.resume()
loop.run()
"""


def run_script(run: Path, pause: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(run), str(pause)]
    root = Path(__file__).parent.parent.parent
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, cwd=root, text=True, **pipes)  # type: ignore[call-overload]


@pytest.mark.trains
@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bits(tmp_path: Path) -> None:
    with run_script(tmp_path / "whole", 0.0) as whole:
        _, errors = whole.communicate(timeout=120)
        assert whole.returncode == 0, errors
    for kills in range(4):
        with run_script(tmp_path / "killed", 0.02) as process:
            assert process.stdout is not None
            for _ in range(5 + 2 * kills):
                process.stdout.readline()
            time.sleep(0.013 * kills)
            process.kill()
            assert process.wait() == -signal.SIGKILL
    with run_script(tmp_path / "killed", 0.0) as last:
        out, errors = last.communicate(timeout=120)
        assert last.returncode == 0, errors
    assert int((out.split() or ["31"])[0]) > 5, "it started over instead of resuming"
    one = checkpoint.read(checkpoint.steps(tmp_path / "whole")[-1])
    other = checkpoint.read(checkpoint.steps(tmp_path / "killed")[-1])
    assert same(one.weights, other.weights)
    assert same(one.state, other.state)


@pytest.mark.trains
def test_an_interrupt_finishes_the_step_saves_and_can_be_resumed(tmp_path: Path) -> None:
    loop, _ = make(20, run=tmp_path)
    messages: list[str] = []

    class Interrupt(Observer):
        def on_step(self, loop: Loop, step: Step) -> None:
            if step.number == 5:
                signal.raise_signal(signal.SIGINT)

        def on_message(self, loop: Loop, text: str) -> None:
            messages.append(text)

    loop.observers.append(Interrupt())
    before = signal.getsignal(signal.SIGINT)
    progress = loop.run()
    assert progress.step == 5 and not progress.finished
    assert messages == ["stopping after this step; interrupt again to stop immediately."]
    assert signal.getsignal(signal.SIGINT) is before
    again, _ = make(20, run=tmp_path)
    assert again.resume()
    again.run()
    whole, _ = make(20)
    whole.run()
    assert same(weights(whole), weights(again))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.trains
@pytest.mark.parametrize("file", ["weights.safetensors", "state.safetensors"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, file: str) -> None:
    loop, _ = make(8, run=tmp_path, save_every=2, keep_checkpoints=3)
    loop.run()
    newest = checkpoint.steps(tmp_path)[-1]
    damage(newest / file)
    notes: list[str] = []
    saved = checkpoint.newest(tmp_path, notes)
    assert saved is not None and saved.plain["step"] == 6
    assert len(notes) == 1 and notes[0].startswith("skipped step-00000008: ")


@pytest.mark.trains
def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    loop, _ = make(9, run=tmp_path, save_every=2, keep_checkpoints=2)
    loop.run()
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-00000008", "step-00000009"]


@pytest.mark.trains
def test_a_checkpoint_of_another_model_or_version_is_refused(tmp_path: Path) -> None:
    loop, _ = make(2, run=tmp_path)
    loop.run()
    other = build(presets.gpt2(vocab=16, width=8, depth=1, heads=2))
    saved = checkpoint.newest(tmp_path, [])
    assert saved is not None
    with pytest.raises(SavedError, match="is of another model"):
        checkpoint.restore_(saved, other, make_optimizer(other, "adamw", lr=1.0))
    path = saved.path / "state.safetensors"
    tensors, content = read_tensors(path, *CHECKPOINT_STATE)
    write_tensors(path, tensors, CHECKPOINT_STATE.kind, 99, content)
    with pytest.raises(SavedError, match="checkpoint state of format 99; this addnorm reads forma"):
        checkpoint.read(saved.path)
    write_tensors(path, tensors, *CHECKPOINT_STATE, content | {"step": 1})
    with pytest.raises(SavedError, match=r"must be of one step: weights.* of step 2, state.* 1\.$"):
        checkpoint.read(saved.path)
    shutil.copy(saved.path / "weights.safetensors", path)
    with pytest.raises(SavedError, match="must be a checkpoint state: it is a checkpoint model"):
        checkpoint.read(saved.path)
    save_file(tensors, saved.path / "weights.safetensors", {"format": "addnorm", "version": "1"})
    with pytest.raises(
        SavedError, match=r"checkpoint model of format 1; .* Train it again, or use"
    ):
        checkpoint.read(saved.path)


@pytest.mark.trains
def test_values_that_are_not_finite_and_the_order_of_keys_survive_a_checkpoint(
    tmp_path: Path,
) -> None:
    loop, _ = make(2, run=tmp_path)
    loop.run()
    loop.state.history = [{"step": 2, "nll": math.nan, "best": -math.inf}]
    loop.save()
    again, _ = make(2, run=tmp_path)
    assert again.resume()
    (row,) = again.state.history
    assert list(row) == ["step", "nll", "best"]
    assert math.isnan(row["nll"]) and row["best"] == -math.inf


@pytest.mark.trains
def test_a_step_that_is_not_finite_is_skipped_and_saved(tmp_path: Path) -> None:
    loop, task = make(7, run=tmp_path)
    messages: list[str] = []
    weights_at_steps: list[tuple[dict[str, Tensor], bool]] = []

    class Recorder(Observer):
        def on_gradients(self, loop: Loop, step: int) -> None:
            weights_at_steps.append((weights(loop), False))

        def on_step(self, loop: Loop, step: Step) -> None:
            before, _ = weights_at_steps.pop()
            assert same(before, weights(loop)) is (not step.applied or step.rate == 0)
            weights_at_steps.append((before, step.applied))

        def on_message(self, loop: Loop, text: str) -> None:
            messages.append(text)

    loop.observers.append(Recorder())
    bad = task.plan(0)[2]
    task.is_bad = lambda start: start == bad
    progress = loop.run()
    assert [applied for _, applied in weights_at_steps][:6] == [True, True, False, True, True, True]
    assert progress.finished and progress.skipped_in_a_row == 0
    folder = tmp_path / "cases" / "step-00000003"
    assert len(messages) == 1
    assert messages[0].startswith("step 3: the loss is nan; the step was skipped")
    assert str(folder) in messages[0]
    saved, content = read_tensors(folder / "batch-0.safetensors", *FAILED_STEP_BATCH)
    assert int(saved["start"]) == bad and content == {"step": 3}
    _, content = read_tensors(folder / "weights.safetensors", *FAILED_STEP_MODEL)
    assert content == {"step": 3}


def test_too_many_skipped_steps_end_the_run() -> None:
    loop, task = make(50, max_skipped_steps=4)
    task.is_bad = lambda start: True
    with pytest.raises(DivergedError, match=r"4 steps in a row were not finite.*Try a lower"):
        loop.run()
    assert loop.state.step == 4


@pytest.mark.trains
def test_patience_stops_and_the_best_is_kept() -> None:
    loop, task = make(50, evaluate_every=1, patience=3)
    task.figures = [5.0, 4.0, 4.5, 3.0, 3.0, 3.5, 3.1, 1.0]
    best_steps: list[int] = []
    loop.on_best = lambda model: best_steps.append(loop.state.step)
    progress = loop.run()
    assert (progress.step, progress.best, progress.best_step) == (7, 3.0, 4)
    assert best_steps == [1, 2, 4]


@pytest.mark.parametrize(
    ("accuracy", "loss", "better"),
    [(0.9, 9.0, True), (0.7, 0.1, False), (0.8, 0.4, True), (0.8, 0.5, False), (0.8, 0.6, False)],
)
def test_equal_metrics_are_decided_by_the_loss(accuracy: float, loss: float, better: bool) -> None:
    history = [{"step": 3, "accuracy": 0.8, "loss": 0.5}, {"step": 6, "accuracy": 0.6, "loss": 0.1}]
    state = TrainingState(step=9, best=0.8, best_step=3, history=history)
    task = Counting()
    task.metric, task.higher_is_better = "accuracy", True
    assert _is_better({"accuracy": accuracy, "loss": loss}, state, task) == better
    assert not _is_better({"accuracy": math.nan, "loss": 0.1}, state, task)
    assert _is_better({"accuracy": 0.0, "loss": 9.0}, TrainingState(), task)
    assert not _is_better({"accuracy": 0.8}, state, task)


@pytest.mark.trains
def test_tokens_are_counted_as_the_task_reads_them() -> None:
    loop, task = make(2)
    loop.run()
    assert loop.state.tokens == sum(task.tokens(task.batch(part)) for part in task.plan(0)[:2])
    loop, task = make(2)
    task.tokens_read = lambda batch: batch["ids"].numel()  # type: ignore[attr-defined]
    loop.run()
    assert loop.state.tokens == 2 * 4 * 8


@pytest.mark.trains
def test_the_mean_of_the_last_weights() -> None:
    loop, _ = make(12, evaluate_every=2, average=3)
    states: list[dict[str, Tensor]] = []

    class Recorder(Observer):
        def on_step(self, loop: Loop, step: Step) -> None:
            if step.number % 2 == 0:
                states.append(weights(loop))

    loop.observers.append(Recorder())
    loop.run()
    mean = loop.averaged_weights()
    assert mean is not None
    for name, tensor in mean.items():
        expected = sum(row[name] for row in states[-3:]) / 3
        torch.testing.assert_close(tensor, expected)
    assert same(weights(loop), states[-1]), "evaluation must restore the model's own weights"


@pytest.mark.trains
def test_the_exponential_average() -> None:
    loop, _ = make(6, ema=0.8)
    expected: dict[str, Tensor] = {}

    class Recorder(Observer):
        def on_step(self, loop: Loop, step: Step) -> None:
            for name, tensor in weights(loop).items():
                old = expected.get(name, tensor)
                expected[name] = 0.8 * old + 0.2 * tensor

    loop.observers.append(Recorder())
    loop.run()
    averages = loop.averaged_weights()
    assert averages is not None
    for name, tensor in averages.items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.trains
def test_the_rate_follows_the_schedule_and_the_norm_is_clipped() -> None:
    loop, _ = make(8, clip=1e-3)
    rates: list[float] = []

    class Recorder(Observer):
        def on_step(self, loop: Loop, step: Step) -> None:
            rates.append(step.rate)
            assert step.norm > 1e-3

    loop.observers.append(Recorder())
    loop.run()
    schedule = make_schedule("cosine", warmup=3, steps=8)
    assert rates == pytest.approx([1e-2 * schedule(step) for step in range(1, 9)])
