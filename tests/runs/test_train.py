"""Runs in one process: start, stop, resume, start from the weights of another run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from addnorm.config import Config
from addnorm.errors import ConfigError, SavedError
from addnorm.models.saved import load_model
from addnorm.runs.run import Run, RunRecord
from addnorm.runs.train import (
    find_device,
    find_precision,
    loop_settings,
    plan_run,
    resume_run,
    start_run,
)
from addnorm.training import checkpoint
from addnorm.training.loop import Loop, Observer, Step
from tests.conftest import slow_except
from tests.runs.common import (
    ALL_TASKS,
    RecordingObserver,
    Trained,
    default_observers,
    quiet,
    request_for,
    resume,
    train,
    write,
)


class PowerCut(Exception):
    pass


class Cut(Observer):
    """Raises after a step, as if the process had been killed."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, loop: Loop, step: Step) -> None:
        if step.number == self.at:
            raise PowerCut


def same_tensors(one: Path, other: Path) -> bool:
    first, second = (load_file(path) for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def same_runs(one: Path, other: Path) -> None:
    """Assert that best model, last checkpoint and journal (except for times) are bit-identical."""
    last = [checkpoint.steps(path)[-1] for path in (one, other)]
    assert last[0].name == last[1].name
    for name in ("weights.safetensors", "state.safetensors"):
        assert same_tensors(last[0] / name, last[1] / name), name
    assert same_tensors(one / "best" / "model.safetensors", other / "best" / "model.safetensors")
    rows = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in Run.open(path).history]
        for path in (one, other)
    ]
    assert rows[0] == rows[1]
    times = {"seconds": 0, "training_seconds": 0}
    summaries = [Run.open(path).summary | times for path in (one, other)]
    for row in (row for summary in summaries for row in summary.get("results", ())):
        row["fit_seconds"] = 0
    assert summaries[0] == summaries[1]


@pytest.mark.trains
@pytest.mark.parametrize("task", slow_except(("translate", "table"), ALL_TASKS))
def test_a_resumed_run_equals_an_unbroken_one(task: str, data: Path, tmp_path: Path) -> None:
    request = request_for(
        task, data, "model.dropout=0.2", steps=9, evaluate_every=4, save_every=2, accumulate=2
    )
    train(request, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(request, tmp_path / "cut", Cut(1))  # no checkpoint yet
    for at in (5, 8):
        with pytest.raises(PowerCut):
            resume(tmp_path / "cut", Cut(at))
    done = resume(tmp_path / "cut")
    assert done.progress.finished and done.progress.step == 9
    same_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.trains
def test_messages_of_a_resumed_run(data: Path, tmp_path: Path) -> None:
    out, messages = tmp_path / "run", []
    with pytest.raises(PowerCut):
        train(request_for("language", data, steps=5, evaluate_every=2), out, Cut(1))
    with pytest.raises(PowerCut):
        resume_run(out, observers=lambda path: [Cut(4)], say=messages.append)
    assert messages[-1] == "there is no checkpoint yet: starting from the beginning."
    resume_run(out, observers=default_observers, say=messages.append)
    assert messages[-2:] == [f"resuming {out}.", "resuming after step 2."]


@pytest.mark.trains
def test_a_finished_run_is_not_changed(data: Path, tmp_path: Path) -> None:
    out, messages = tmp_path / "run", []
    train(request_for("classify", data), out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    observer = RecordingObserver()
    done = resume_run(out, observers=lambda path: [observer], say=messages.append)
    assert done.progress.finished and not observer.started
    assert messages[-1] == "it is already finished."
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (out / "summary.json").unlink()  # killed before it was written
    resume_run(out, observers=default_observers, say=quiet)
    assert json.loads((out / "summary.json").read_text())["finished"]


@pytest.mark.trains
def test_patience_stops_a_run(data: Path, tmp_path: Path) -> None:
    request = request_for(
        "language", data, steps=40, evaluate_every=1, save_every=100, lr=1e-12, patience=3
    )
    observer = RecordingObserver()
    done = train(request, tmp_path / "run", observer)
    assert done.progress.finished and done.progress.step < 40
    assert "stopping early: no improvement in loss for 3 evaluations." in observer.messages
    again = RecordingObserver()
    assert resume(tmp_path / "run", again).progress.step == done.progress.step
    assert again.losses == []


@pytest.mark.trains
def test_a_stop_at_the_last_step_is_finished(data: Path, tmp_path: Path) -> None:
    class Stop(Observer):
        def on_step(self, loop: Loop, step: Step) -> None:
            loop.stop_requested = step.number == 3

    done = train(request_for("language", data, steps=3, evaluate_every=2), tmp_path / "run", Stop())
    assert done.progress.finished and done.progress.history[-1]["step"] == 3


@pytest.mark.trains
def test_data_that_changed_are_an_error(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "data"), tmp_path / "run"
    with pytest.raises(PowerCut):
        train(request_for("translate", folder, evaluate_every=1), out, Cut(4))
    text = (folder / "a.source").read_text()
    (folder / "a.source").write_text(text.replace("ba", "be", 1))
    with pytest.raises(SavedError, match=r"changed since the run started. Restore the files"):
        resume(out)
    (folder / "a.source").write_text(text)
    assert resume(out).progress.finished


@pytest.mark.slow
@pytest.mark.trains
def test_a_damaged_checkpoint_is_skipped_with_a_message(data: Path, tmp_path: Path) -> None:
    request = request_for("language", data, steps=8, evaluate_every=2)
    train(request, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(request, tmp_path / "cut", Cut(7))
    newest = checkpoint.steps(tmp_path / "cut")[-1] / "weights.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 0xFF
    newest.write_bytes(content)
    observer = RecordingObserver()
    resume(tmp_path / "cut", observer)
    assert len(observer.messages) == 1 and observer.messages[0].startswith(
        "skipped step-00000006: "
    )
    assert len(observer.losses) == 4
    same_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("addnorm", ["admin", "dlcl"])
def test_measured_initial_weights_are_restored(addnorm: str, data: Path, tmp_path: Path) -> None:
    request = request_for("translate", data, f"model.addnorm={addnorm}", steps=3, evaluate_every=1)
    train(request, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(request, tmp_path / "cut", Cut(1))
    resume(tmp_path / "cut")
    same_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.trains
def test_a_classifier_starts_from_pretrained_weights(trained: Trained, tmp_path: Path) -> None:
    source_run, messages = Run.open(trained["masked"]), []
    request = request_for(
        "classify", trained.data, f"run.start={str(source_run.path)!r}", steps=1, lr=1e-12
    )
    request = type(request)(
        {k: v for k, v in request.table.items() if k != "model"}, request.settings
    )
    done = start_run(request, tmp_path / "run", observers=default_observers, say=messages.append)
    config = done.run.config
    assert config.model.width == 16 and config.model.head == "class"
    assert config.run.start == str(source_run.path)
    ours, theirs = load_model(done.run.path / "best").state_dict(), source_run.model.state_dict()
    shared = [name for name in ours if name in theirs]
    assert len(shared) > 10
    for name in shared:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-9)
    (sentence,) = [text for text in messages if "from the starting model" in text]
    assert sentence == (
        f"loaded {len(shared)} of {len(ours)} tensors from the starting model; "
        "newly initialised: head."
    )
    assert done.run.tokenizers == source_run.tokenizers


@pytest.mark.trains
def test_texts_longer_than_the_starting_model_are_cut(tmp_path: Path) -> None:
    """A classifier reads 256 tokens by default; a starting model may have fewer positions."""
    folder = write(tmp_path / "data", 60)
    masked = request_for("masked", folder, "model.length=12", "data.max_length=10", steps=1)
    train(masked, tmp_path / "first")
    request = request_for(
        "classify", folder, f"run.start={str(tmp_path / 'first')!r}", steps=2, evaluate_every=1
    )
    request = type(request)(
        {k: v for k, v in request.table.items() if k != "model"}, request.settings
    )
    with pytest.raises(PowerCut):
        train(request, tmp_path / "run", Cut(2))
    done = resume(tmp_path / "run")
    assert done.progress.finished and done.run.config.data.max_length == 12
    assert any("more than 10 tokens" in note for note in done.run.record.notes)


def test_a_missing_starting_run_is_an_error(data: Path, tmp_path: Path) -> None:
    request = request_for("classify", data, "run.start=nowhere")
    with pytest.raises(SavedError, match="there is no run in 'nowhere' to start from"):
        train(request, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.trains
def test_a_run_from_another_restarts_identically(data: Path, tmp_path: Path) -> None:
    train(request_for("language", data, steps=2), tmp_path / "first")
    request = request_for(
        "language", data, f"run.start={str(tmp_path / 'first')!r}", steps=3, evaluate_every=1
    )
    train(request, tmp_path / "whole")
    with pytest.raises(PowerCut):
        train(request, tmp_path / "cut", Cut(1))
    resume(tmp_path / "cut")
    same_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.trains
def test_a_run_resumes_from_another_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths are stored as absolute paths."""
    monkeypatch.chdir(data)
    request = request_for(
        "translate", Path("."), "data.valid_source=a.source", "data.valid_target=a.target"
    )
    with pytest.raises(PowerCut):
        train(request, tmp_path / "run", Cut(4))
    monkeypatch.chdir(tmp_path)
    assert resume(tmp_path / "run").progress.finished
    kept = Run.open(tmp_path / "run").config.data
    assert kept.source == kept.valid_source == str(data / "a.source")
    assert kept.target == kept.valid_target == str(data / "a.target")


@pytest.mark.slow
@pytest.mark.trains
def test_the_seed_decides(data: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        train(
            request_for("language", data, f"run.seed={seed}", "model.dropout=0.1"), tmp_path / name
        )
    same_runs(tmp_path / "one", tmp_path / "two")
    files = [tmp_path / name / "best" / "model.safetensors" for name in ("one", "other")]
    assert not same_tensors(*files)


@pytest.mark.trains
def test_nothing_is_written_before_the_configuration_is_resolved(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"train.metric must be one of"):
        train(request_for("language", data, "train.metric=bleu"), out)
    with pytest.raises(
        ConfigError, match=r"run.task must be one of translate, language, .*: got none"
    ):
        train(type(request_for("language", data))({}), out)
    assert not out.exists()
    train(request_for("language", data, steps=1), out)
    shutil.rmtree(out / "best")
    with pytest.raises(SavedError, match="already has a run"):
        train(request_for("language", data), out)


@pytest.mark.trains
def test_loop_settings_follow_the_configuration(data: Path) -> None:
    fields = dict(
        accumulate=2,
        clip=0.5,
        evaluate_every=4,
        save_every=6,
        keep_checkpoints=5,
        patience=7,
        average_checkpoints=9,
    )
    more = dict(steps=8, warmup=3, min_lr_ratio=0.1)
    planned = plan_run(request_for("language", data, "run.minutes=2", **fields, **more), say=quiet)
    record = RunRecord("language", "", requested=planned.requested)
    settings = loop_settings(planned.config, torch.device("cpu"), record)
    wanted: dict[str, Any] = dict(
        steps=8, accumulate=2, clip=0.5, evaluate_every=4, save_every=6, keep_checkpoints=5,
        patience=7, average=9, ema=0.0, max_seconds=120.0, precision=torch.float32,
        fixed_evaluations=True, max_steps=8, refit=True,
    )  # fmt: skip
    assert {name: getattr(settings, name) for name in wanted} == wanted
    assert settings.schedule(1) == pytest.approx(1 / 3) and settings.schedule(8) == pytest.approx(
        0.1
    )


def test_bfloat16_only_where_it_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, narrow = torch.device("cpu"), Config().override("run.precision=bfloat16")
    assert find_precision(Config(), cpu) == torch.float32
    monkeypatch.setattr("addnorm.runs.train.is_slow", lambda device, dtype: True)
    with pytest.raises(ConfigError, match=r"slower than float32 on this CPU.*precision=float32"):
        find_precision(narrow, cpu)
    monkeypatch.setattr("addnorm.runs.train.is_slow", lambda device, dtype: False)
    assert find_precision(narrow, cpu) == torch.bfloat16
    assert find_precision(Config().override("run.precision=float32"), cpu) == torch.float32


def test_a_device_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(Config()) == find_device(Config().override("run.device=cpu"))
    with pytest.raises(ConfigError, match=r"run.device=cuda needs a GPU"):
        find_device(Config().override("run.device=cuda"))
