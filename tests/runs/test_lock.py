"""A run is used by one process at a time; leftovers of killed processes are recognised."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from addnorm.config import Config
from addnorm.errors import SavedError
from addnorm.runs import lock
from addnorm.runs.lock import LOCK_FILE, InUseError, LockHolder, locked, stale_lock
from addnorm.runs.request import as_settings
from addnorm.runs.run import Run, RunRecord, require_unused, sweep_run
from addnorm.runs.train import lock_run, resume_run


def write_lock(folder: Path, process: int, host: str | None = None) -> None:
    holder = {"process": process, "host": host or socket.gethostname(), "started": "2026-01-02"}
    (folder / LOCK_FILE).write_text(json.dumps(holder))


ID_TOO_LARGE = b'{"process": 99999999999999999999, "host": "elsewhere", "started": "x"}'


def make(path: Path) -> Run:
    return Run.create(path, Config(), RunRecord("language", fingerprint="x"))


def test_a_lock_is_held_by_one_and_deleted_at_the_end(tmp_path: Path) -> None:
    with locked(tmp_path) as stale:
        assert stale is None and not stale_lock(tmp_path)
        message = rf"is in use by process {os.getpid()} since 20\d\d-.*\. Wait until it ends"
        with pytest.raises(InUseError, match=message), locked(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_stale_lock_is_recognised(tmp_path: Path) -> None:
    write_lock(tmp_path, 5)
    assert stale_lock(tmp_path)
    with locked(tmp_path) as stale:
        assert stale == LockHolder(5, socket.gethostname(), "2026-01-02")
        assert stale.describe() == "process 5 since 2026-01-02"


def test_the_lock_of_another_host_is_respected(tmp_path: Path) -> None:
    write_lock(tmp_path, 5, "elsewhere")
    message = r"in use by process 5 on elsewhere since 2026-01-02\. .*delete '.*run\.lock'\.$"
    with pytest.raises(InUseError, match=message), locked(tmp_path):
        pass


def test_without_flock_a_process_that_is_alive_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    write_lock(tmp_path, os.getpid())
    with pytest.raises(InUseError, match="in use by process"), locked(tmp_path):
        pass
    monkeypatch.setattr(lock, "_is_alive", lambda process: False)
    with locked(tmp_path) as stale:
        assert stale is not None


@pytest.mark.parametrize(
    "content", (b"", b"[", b"[" * 9000, b"{}", b'{"process": "1"}', b"\xff", ID_TOO_LARGE)
)
def test_a_damaged_lock_file_counts_as_stale(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    with locked(tmp_path) as stale:
        assert stale is None


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")]
)
def test_a_directory_that_cannot_be_written_is_one_clear_error(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise error

    run = make(tmp_path / "run")
    monkeypatch.setattr(os, "open", refuse)
    message = rf"cannot be locked for writing: {error.strerror}\. Change its permissions \(chmod"
    with pytest.raises(SavedError, match=message):
        resume_run(run.path, observers=lambda path: [])


def test_a_lock_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    def fifo(path: Path) -> None:
        os.mkfifo(path)

    def listen(path: Path) -> None:
        monkey = socket.socket(socket.AF_UNIX)
        os.chdir(path.parent)  # the path of a socket may have a hundred bytes
        monkey.bind(path.name)
        monkey.close()

    def link(path: Path) -> None:
        path.symlink_to(tmp_path / "mine.txt")

    (tmp_path / "mine.txt").write_text("mine")
    for make_file in (fifo, listen, link, Path.mkdir):
        run = make(tmp_path / str(make_file.__name__))
        make_file(run.path / LOCK_FILE)
        message = r"run\.lock' must be a regular file, and is not one\. Delete it\.$"
        with pytest.raises(SavedError, match=message):
            resume_run(run.path, observers=lambda path: [])
        assert not stale_lock(run.path)
        (run.path / "run.json").unlink()
        with pytest.raises(SavedError, match="is not empty"):
            require_unused(run.path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_two_cannot_resume_a_run_at_once(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with locked(run.path), pytest.raises(InUseError, match="is in use by process"):
        resume_run(run.path, observers=lambda path: [])


def test_a_run_that_was_killed_before_its_record_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    for name in ("config.toml", "tokenizer/tokenizer.json", ".run.json.0123abcd"):
        (tmp_path / name).write_text("half")
    with pytest.raises(SavedError, match=r"is not empty\. Choose another --out: it has '.run"):
        require_unused(tmp_path)  # without a lock file these are the user's
    write_lock(tmp_path, 5)
    assert require_unused(tmp_path) == tmp_path
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK_FILE]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.toml").write_text("half")
    with pytest.raises(SavedError, match=r"Choose another --out: it has 'notes.txt'"):
        require_unused(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_temporary_files_of_a_run_are_swept_and_others_stay(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run.path / "best").mkdir()
    for name in (".run.json.0123abcd", "best/.model.safetensors.00000000", "best/.tmpg4kYRa"):
        (run.path / name).write_text("half")
    for name in (".notes.txt.0123abcd", ".run.json.swp", ".run.json.0123abcg"):
        (run.path / name).write_text("mine")
    swept = [".run.json.0123abcd", ".model.safetensors.00000000", ".tmpg4kYRa"]
    assert sweep_run(run.path) == swept
    assert len(list(run.path.glob(".*"))) == 3


def test_what_a_killed_process_left_is_reported(tmp_path: Path) -> None:
    run, messages = make(tmp_path / "run"), []
    write_lock(run.path, 5)
    for name in (".run.json.0123abcd", ".config.toml.0123abcd"):
        (run.path / name).write_text("half")
    with lock_run(run.path, messages.append):
        assert (run.path / LOCK_FILE).exists()
    assert messages == [
        f"the last use of {run.path}, by process 5 since 2026-01-02, was not ended properly.",
        "deleted 2 unfinished files of that use.",
    ]
    messages.clear()
    with lock_run(run.path, messages.append):
        assert messages == []


def test_a_changed_configuration_is_named_and_refused(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    path = run.path / "config.toml"
    assert Run.open(run.path).config == run.config
    path.write_text(path.read_text() + "\n[train]\nlr = 0.5\n")
    message = (
        r"config\.toml' was changed since the run started \(train\.lr: none → 0\.5\), but a run "
        r"keeps its configuration\. For a new run with the change: addnorm train language … --from "
        r".*run --set train\.lr=0\.5\. To keep the old values, delete config\.toml\.$"
    )
    with pytest.raises(SavedError, match=message):
        resume_run(run.path, observers=lambda path: [])
    path.unlink()
    assert Run.open(run.path).config == run.config


@pytest.mark.parametrize(
    ("before", "after", "option"),
    (
        ({"train.steps": 20}, {"train.steps": 40}, "--steps +20"),
        ({"train.steps": 20, "train.epochs": 2.0}, {"train.epochs": 5.0}, "--steps +30"),
        ({"run.minutes": 1.0}, {"run.minutes": 3.5}, "--minutes +2.5"),
        ({"train.steps": 20}, {"train.steps": 10}, None),
        ({"train.steps": 20}, {"train.steps": 40, "train.lr": 0.5}, None),
    ),
)
def test_longer_training_in_an_edited_configuration_is_an_extension(
    before: dict[str, Any], after: dict[str, Any], option: str | None, tmp_path: Path
) -> None:
    config = Config().override(*as_settings(before))
    run = Run.create(tmp_path / "run", config, RunRecord("language", fingerprint="0"))
    (run.path / "config.toml").write_text(config.override(*as_settings(after)).dump())
    with pytest.raises(SavedError, match="was changed since the run started") as caught:
        Run.open(run.path)
    wanted = f" To train it further: addnorm train --resume {run.path} {option}. For a new run "
    assert (wanted in str(caught.value)) == (option is not None)
    assert ("To train it further" in str(caught.value)) == (option is not None)


@pytest.mark.parametrize(
    ("line", "reason"), (("lr = -1", "train.lr must"), ("rate = 1", "no field 'rate'"))
)
def test_an_invalid_edit_names_the_file(line: str, reason: str, tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    path = run.path / "config.toml"
    path.write_text(f"{path.read_text()}\n[train]\n{line}\n")
    with pytest.raises(SavedError) as caught:
        Run.open(run.path)
    message = f"{str(path)!r} was changed since the run started, and cannot be used: "
    assert str(caught.value).startswith(message) and reason in str(caught.value)
    assert str(caught.value).endswith(" To keep the old values, delete config.toml.")


def test_a_damaged_summary_is_refused_before_training(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run.path / "summary.json").write_text("{")
    with pytest.raises(SavedError, match=r"summary\.json' is damaged: "):
        resume_run(run.path, observers=lambda path: [], steps="+1")
    assert not (run.path / LOCK_FILE).exists()


def test_a_saved_model_is_not_resumed(tmp_path: Path) -> None:
    from addnorm import build, presets

    build(presets.gpt2(vocab=16, width=8, depth=1, heads=2)).save(tmp_path)
    with pytest.raises(SavedError, match=r"is a saved model, not a run, so it cannot be resumed"):
        resume_run(tmp_path, observers=lambda path: [])


def test_a_record_that_is_not_a_regular_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(SavedError, match=r"run\.json' is not a regular file"):
        Run.open(tmp_path)
