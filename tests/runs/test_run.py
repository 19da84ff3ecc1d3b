"""Run directories: created, opened strictly, listed."""

import json
import shutil
from pathlib import Path

import pytest

from addnorm.config import Config
from addnorm.errors import SavedError
from addnorm.files import RUN, write_document
from addnorm.runs.run import Run, RunRecord, require_unused, runs_in
from tests.runs.common import Trained


def make(path: Path) -> Run:
    return Run.create(path, Config(), RunRecord("language", "0" * 64, ["größer"], ["a", "b"]))


def test_an_opened_run_equals_the_created_one(tmp_path: Path) -> None:
    created, opened = make(tmp_path / "deep" / "run"), Run.open(tmp_path / "deep" / "run")
    assert (opened.path, opened.config, opened.record) == (
        created.path,
        created.config,
        created.record,
    )
    assert opened.record.notes == ["größer"]
    assert json.loads((opened.path / "run.json").read_text())["version"] == RUN.version == 2
    assert opened.summary == {} and opened.history == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 3}', r"is a run of format 3; this addnorm reads format 2\. Train it again"),
        ("[]", "run.json' was not written by addnorm"),
        ('{"version": 2,', "run.json' is damaged: "),
        ('{"version": 2, "task": "language"}', "run.json' was changed after it was written"),
    ],
    ids=["newer", "list", "cut", "incomplete"],
)
def test_a_run_is_read_strictly(tmp_path: Path, content: str, message: str) -> None:
    run = make(tmp_path / "run")
    (run.path / "run.json").write_text(content)
    with pytest.raises(SavedError, match=message):
        Run.open(run.path)
    write_document(run.path / "run.json", *RUN, {"task": "language"})
    with pytest.raises(SavedError, match=r"run.json' is damaged: .*fingerprint"):
        Run.open(run.path)


def test_missing_parts_of_a_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"there is no run in .*nothing'. Check the path"):
        Run.open(tmp_path / "nothing")
    run = make(tmp_path / "run")
    with pytest.raises(SavedError, match=r"has no model yet.*addnorm train --resume .*run"):
        _ = run.model
    (run.path / "best").mkdir()
    with pytest.raises(SavedError, match="has no tokenizer: the folder is missing"):
        _ = run.tokenizers
    (run.path / "config.toml").unlink()
    assert Run.open(run.path).config == run.config


def test_a_new_run_needs_an_empty_directory(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with pytest.raises(SavedError, match=r"already has a run.*addnorm train --resume"):
        require_unused(run.path)
    (tmp_path / "empty").mkdir()
    assert require_unused(tmp_path / "empty") == tmp_path / "empty"
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(SavedError, match=r"is (not empty|a file)\. Choose another --out"):
            require_unused(path)
    with pytest.raises(SavedError, match="cannot be created: Not a directory"):
        make(tmp_path / "file" / "run")


def test_truncated_lines_of_metrics_are_skipped(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert run.history == [{"step": 1}, {"step": 2}]


def test_runs_in_subfolders_are_listed_by_name(tmp_path: Path) -> None:
    for name in ("b", "a/deep"):
        make(tmp_path / name)
    assert runs_in(tmp_path) == [tmp_path / "a/deep", tmp_path / "b"]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_summary_is_an_error(tmp_path: Path, text: str) -> None:
    run = make(tmp_path / "run")
    assert run.summary == {}
    (run.path / "summary.json").write_text(text)
    with pytest.raises(SavedError, match=r"summary\.json' is damaged"):
        _ = run.summary


@pytest.mark.trains
def test_the_directory_has_no_other_files(trained: Trained, tmp_path: Path) -> None:
    path = trained["translate"]
    # Another test may have translated with this run, which measures engines and stores them.
    assert sorted(entry.name for entry in path.iterdir() if entry.name != "engines") == [
        "best",
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "run.json",
        "summary.html",
        "summary.json",
        "tokenizer",
    ]
    assert len(list((path / "checkpoints").iterdir())) == 2
    facts = json.loads((path / "run.json").read_text())["content"]
    assert facts["task"] == "translate" and facts["labels"] == []
    assert Run.open(trained["classify"]).record.labels == ["no", "yes"]
    moved = shutil.copytree(path, tmp_path / "moved")
    assert Run.open(moved).model.count() == Run.open(path).model.count()


def test_an_empty_out_is_not_the_working_directory() -> None:
    with pytest.raises(SavedError, match=r"^--out must name a directory: it is empty\. Try runs/m"):
        require_unused("")
