"""A race is fair, continues after an interruption, and ranks its entries."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import addnorm
from addnorm.clinic.rules import Finding
from addnorm.config import Config
from addnorm.errors import ConfigError, SavedError
from addnorm.races import Entry, EntryResult, RaceResult, entries_of, run_entries
from addnorm.races.entries import remedy_entries
from addnorm.races.page import race_page
from addnorm.races.run import RESULT_FILE
from addnorm.runs.request import RunRequest
from tests.portable import training


@pytest.fixture
def run_request(tmp_path: Path) -> RunRequest:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "the", "dog", "ran", "to", "see", "it"]
    torch.manual_seed(0)
    lines = [" ".join(words[int(i)] for i in torch.randint(12, (8,))) for _ in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    table = {
        "run": {"task": "language", "size": "tiny", "device": "cpu"},
        "data": {"source": str(tmp_path / "text.txt"), "tokenizer": "characters", "max_length": 32},
        "model": {"width": 16, "depth": 1, "heads": 2, "dropout": 0.0},
        "train": {"steps": 12, "batch": 256, "evaluate_every": 6, "lr": 1e-2},
    }
    return RunRequest(table)


@pytest.mark.slow
@pytest.mark.trains
def test_a_race_runs_resumes_and_is_shown(run_request: RunRequest, tmp_path: Path) -> None:
    entries = entries_of(["model.addnorm=post,pre"])
    said: list[str] = []
    first = run_entries(run_request, entries, tmp_path / "out", seeds=2, jobs=1, say=said.append)
    assert first.entry_names() == ["addnorm=post", "addnorm=pre"] and len(first.results) == 4
    assert len(said) == 4 and said[-1].startswith("4 of 4: addnorm=pre, seed 1: loss")
    for result in first.results:
        assert [step for step, _ in result.curve] == [6, 12] and not result.diverged
        assert result.loss == min(loss for _, loss in result.curve)
    one, two = first.results_of("addnorm=pre")
    assert one.loss != two.loss
    done = tmp_path / "out" / "addnorm-pre" / "seed-0" / RESULT_FILE
    stamp = done.stat().st_mtime_ns
    (tmp_path / "out" / "addnorm-post" / "seed-1" / RESULT_FILE).unlink()
    again = run_entries(run_request, entries, tmp_path / "out", seeds=2, jobs=1, say=said.append)
    assert done.stat().st_mtime_ns == stamp
    assert again == first
    assert "addnorm=pre" in first.text() and "±" in first.text()
    assert len(json.loads(first.json())["results"]) == 4
    page = race_page(first, settings=("train.steps=12",)).html()
    assert "Held-out loss" in page and "addnorm=post" in page
    done.write_text("{}")
    with pytest.raises(SavedError, match=r"is damaged: .* Delete it"):
        run_entries(run_request, entries, tmp_path / "out", seeds=2, jobs=1, say=said.append)


@pytest.mark.trains
@pytest.mark.slow
def test_runs_in_processes_equal_runs_in_sequence(
    run_request: RunRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "seed", 0)  # gradients are not perturbed in child processes
    # One thread each: sums of several threads are rounded differently.
    monkeypatch.setattr("addnorm.races.run.torch.get_num_threads", lambda: 1)
    entries = entries_of(["model.addnorm=post,pre"])
    row = run_entries(run_request, entries, tmp_path / "row", jobs=1, say=lambda text: None)
    side = run_entries(run_request, entries, tmp_path / "side", jobs=2, say=lambda text: None)
    assert [r.curve for r in row.results] == [r.curve for r in side.results]


@pytest.mark.slow
@pytest.mark.trains
def test_a_race_that_is_stopped_goes_on_with_the_run_it_was_in(
    run_request: RunRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = entries_of(["model.addnorm=post,pre"])
    whole = run_entries(run_request, entries, tmp_path / "whole", jobs=1, say=lambda text: None)
    monkeypatch.setattr(
        "addnorm.runs.loggers.Journal.on_evaluate",
        lambda self, loop, figures, better: setattr(loop, "stop_requested", True),
    )
    with pytest.raises(KeyboardInterrupt):
        run_entries(run_request, entries, tmp_path / "out", jobs=1, say=lambda text: None)
    assert not list((tmp_path / "out").rglob(RESULT_FILE))
    assert not (tmp_path / "out" / "addnorm-pre").exists()
    monkeypatch.undo()
    again = run_entries(run_request, entries, tmp_path / "out", jobs=1, say=lambda text: None)
    assert [result.loss for result in again.results] == [result.loss for result in whole.results]


@pytest.mark.slow
@pytest.mark.trains
def test_a_time_budget_gives_every_entry_the_same_steps(
    run_request: RunRequest, tmp_path: Path
) -> None:
    said: list[str] = []
    entries = entries_of(["train.lr=0.01,0.001"])
    done = run_entries(
        run_request, entries, tmp_path / "out", minutes=0.02, jobs=1, say=said.append
    )
    assert len({result.steps for result in done.results}) == 1
    steps = json.loads((tmp_path / "out" / "steps.json").read_text())["steps"]
    assert f"{steps:,} steps for each of 2 runs" in said[0]
    assert done.results[0].steps == steps


def result(name: str, seed: int, loss: float, diverged: bool = False) -> EntryResult:
    return EntryResult(name, seed, loss, 10, 1.0, diverged, ((5.0, 2 * loss), (10.0, loss)))


def test_the_standing_is_mean_and_deviation() -> None:
    done = RaceResult(
        (
            result("a", 0, 3.0),
            result("a", 1, 1.0),
            result("b", 0, 1.5),
            result("b", 1, math.inf, diverged=True),
            result("c", 0, 2.5),
            result("c", 1, 2.5),
        )
    )
    assert done.standings() == [
        ("a", 2.0, pytest.approx(math.sqrt(2)), 0),
        ("c", 2.5, 0.0, 0),
        ("b", 1.5, 0.0, 1),
    ]
    assert "1 of 2" in done.text()
    assert "1 of 2 diverged" in race_page(done).html()
    assert json.loads(done.json())["results"][3]["loss"] is None


def test_a_result_is_shown_in_a_console_and_in_a_notebook() -> None:
    lost = result("<i>b</i>", 0, math.inf, diverged=True)
    done = RaceResult((result("a", 0, 3.0), result("a", 1, 1.0), lost))
    head, best, last = repr(done).splitlines()
    assert head.split() == ["entry", "held-out", "loss", "diverged"]
    assert best.startswith("a ") and "2.0000 ± 1.4142" in best and "0 of 2" in best
    assert "–" in last and "1 of 1" in last
    html = done._repr_html_()
    assert "<td>2.0000 ± 1.4142</td><td>0 of 2</td>" in html
    assert "&lt;i&gt;b&lt;/i&gt;</td><td>–</td><td>1 of 1</td>" in html and "<i>" not in html


def test_who_recovered() -> None:
    calm = [result("unchanged", 0, 2.0), result("a", 0, 1.0), result("b", 0, 1.95)]
    lost = [result("unchanged", 0, 2.0, diverged=True), result("a", 0, 3.0)]
    assert RaceResult(tuple(calm)).recovery() == "recovered: a (1.0000)"
    assert RaceResult(tuple(lost)).recovery() == "recovered: a (3.0000)"
    assert RaceResult((calm[0], calm[2])).recovery() == "recovered: none"


def test_varying_is_every_combination() -> None:
    found = entries_of(["model.addnorm=post,pre", "train.warmup=0,4"])
    assert [entry.settings for entry in found] == [
        ("model.addnorm=post", "train.warmup=0"),
        ("model.addnorm=post", "train.warmup=4"),
        ("model.addnorm=pre", "train.warmup=0"),
        ("model.addnorm=pre", "train.warmup=4"),
    ]
    assert len({entry.folder for entry in found}) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    (
        ("model.addnorm", r"must read section.field=value,value: got 'model.addnorm'"),
        ("addnorm=post", "must read section.field=value,value"),
        ("model.addnrom=post", "has no field 'addnrom'"),
        ("model.addnorm=post,post", "every entry must differ"),
    ),
)
def test_what_cannot_vary_is_said(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entries_of([given])


def test_a_race_without_entries_is_refused(run_request: RunRequest, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="a race needs at least one entry and one seed: got 0 and 1"
    ):
        run_entries(run_request, [], tmp_path)


def test_remedies_follow_the_findings() -> None:
    finding = Finding("token embeddings too small", "problem", "", "", "")
    config: Any = Config().replace(train=Config().train.replace(lr=0.01, steps=400))
    names = [entry.name for entry in remedy_entries([finding], config)]
    assert names == [
        "unchanged",
        "scaled embedding",
        "addnorm=pre",
        "addnorm=admin",
        "warm-up",
        "a tenth of the learning rate",
    ]
    assert Entry("unchanged").folder == "unchanged"


@pytest.mark.slow
@pytest.mark.trains
def test_the_front_door_takes_a_file_and_mappings(
    run_request: RunRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = run_request.table["data"]["source"]
    path = tmp_path / "run.toml"
    path.write_text(f"[run]\ntask = 'language'\n[data]\nsource = '{source}'\n")
    settings = {
        f"{section}.{name}": value
        for section in ("model", "train")
        for name, value in run_request.table[section].items()
    }
    compared = {"model.addnorm": ["post", "pre"]}
    options: dict[str, Any] = {"vary": compared, "set": settings, "jobs": 1, "progress": False}
    result = addnorm.race(path, **options)
    assert result.entry_names() == ["addnorm=post", "addnorm=pre"]
    assert capfd.readouterr() == ("", "")
    texts = [f"{name}={value}" for name, value in settings.items()]
    options |= {"vary": "model.addnorm=post,pre", "set": texts, "progress": True}
    again = addnorm.race(run_request, out=tmp_path / "race", **options)
    assert [r.name for r in again.results] == [r.name for r in result.results]
    assert "2 of 2: addnorm=pre, seed 0: loss" in capfd.readouterr().err
    assert (tmp_path / "race" / "addnorm-pre" / "seed-0" / RESULT_FILE).is_file()
    with pytest.raises(ConfigError, match=r"values to compare must read section\.field=value"):
        addnorm.race(path, vary={"addnorm": ["post"]}, progress=False)


@pytest.mark.slow
@pytest.mark.trains
def test_the_models_before_race_on_pairs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = [[str(int(i)) for i in torch.randint(10, (5,))] for _ in range(80)]
    lines = [f"{' '.join(row)}\t{' '.join(reversed(row))}" for row in rows]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    table = {
        "run": {"task": "translate", "size": "tiny", "device": "cpu"},
        "data": {"source": str(tmp_path / "pairs.tsv"), "tokenizer": "characters"},
        "model": {"width": 16, "depth": 1, "heads": 2, "dropout": 0.0},
        "train": {"steps": 4, "batch": 256, "evaluate_every": 2, "lr": 1e-2},
    }
    entries = entries_of(["model.mixing=attention,convolution,recurrent"])
    result = run_entries(
        RunRequest(table), entries, tmp_path / "out", jobs=1, say=lambda text: None
    )
    assert result.entry_names() == [entry.name for entry in entries]
    assert all(math.isfinite(each.loss) and len(each.curve) == 2 for each in result.results)
    for entry in entries:
        run = addnorm.open(tmp_path / "out" / entry.folder / "seed-0")
        assert isinstance(run.translate("1 2 3", beam=2)[0], str)
