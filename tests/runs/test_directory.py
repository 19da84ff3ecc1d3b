"""A run on disk: made, opened strictly, listed."""

import json
import shutil
from pathlib import Path

import pytest

from addnorm.config import Config
from addnorm.errors import SavedError
from addnorm.runs.directory import Facts, Run, free, runs_in
from tests.runs.common import Trained


def make(path: Path) -> Run:
    return Run.create(path, Config(), Facts("language", "0" * 64, ["größer"], ["a", "b"]), {})


def test_a_run_opens_as_it_was_made(tmp_path: Path) -> None:
    made, found = make(tmp_path / "deep" / "run"), Run.open(tmp_path / "deep" / "run")
    assert found == made and found.facts.notes == ["größer"] and found.facts.version == 1
    assert found.summary() == {} and found.metrics() == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 2}', r"is a run of format 2; this addnorm reads 1\. Update addnorm"),
        ("[]", "is a run of format None; this addnorm reads 1"),
        ('{"version": 1,', "run.json' is damaged: "),
        ('{"version": 1, "task": "language"}', "run.json' is damaged: .*fingerprint"),
    ],
    ids=["newer", "list", "cut", "incomplete"],
)
def test_a_run_is_read_strictly(tmp_path: Path, content: str, message: str) -> None:
    run = make(tmp_path / "run")
    (run.path / "run.json").write_text(content)
    with pytest.raises(SavedError, match=message):
        Run.open(run.path)


def test_a_run_that_lacks_something_says_what(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"there is no run in .*nothing'. Check the path"):
        Run.open(tmp_path / "nothing")
    run = make(tmp_path / "run")
    with pytest.raises(SavedError, match="has lost its tokenizer"):
        run.tokenizers()
    with pytest.raises(SavedError, match=r"has no model yet.*addnorm train --resume .*run"):
        run.model()
    (run.path / "config.toml").unlink()
    with pytest.raises(SavedError, match=r"there is no file .*config.toml"):
        Run.open(run.path)


def test_a_new_run_takes_only_an_empty_place(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with pytest.raises(SavedError, match=r"holds a run already.*addnorm train --resume"):
        free(run.path)
    (tmp_path / "empty").mkdir()
    assert free(tmp_path / "empty") == tmp_path / "empty"
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(SavedError, match=r"is not empty\. Choose another --out"):
            free(path)
    with pytest.raises(SavedError, match="cannot be made: Not a directory"):
        make(tmp_path / "file" / "run")


def test_lines_of_metrics_that_are_cut_off_are_passed_over(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert run.metrics() == [{"step": 1}, {"step": 2}]


def test_runs_are_listed_by_name_wherever_they_lie(tmp_path: Path) -> None:
    for name in ("b", "a/deep"):
        make(tmp_path / name)
    assert runs_in(tmp_path) == [tmp_path / "a/deep", tmp_path / "b"]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_summary_is_said_to_be(tmp_path: Path, text: str) -> None:
    run = make(tmp_path / "run")
    assert run.summary() == {}
    (run.path / "summary.json").write_text(text)
    with pytest.raises(SavedError, match=r"summary\.json' is damaged"):
        run.summary()


@pytest.mark.trains
def test_the_directory_holds_nothing_else(trained: Trained, tmp_path: Path) -> None:
    path = trained["translate"]
    assert sorted(entry.name for entry in path.iterdir()) == [
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
    facts = json.loads((path / "run.json").read_text())
    assert facts["task"] == "translate" and facts["labels"] == []
    assert Run.open(trained["classify"]).facts.labels == ["no", "yes"]
    moved = shutil.copytree(path, tmp_path / "moved")
    assert Run.open(moved).model().count() == Run.open(path).model().count()
