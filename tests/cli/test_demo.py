"""The demo, from phrases to a report, on a few hundred phrases."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import addnorm.demo.phrases
from addnorm.cli.demo import VALID
from addnorm.cli.main import main
from addnorm.demo.phrases import Phrases, make_phrases


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(list(words))
    return status, *capsys.readouterr()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred phrases instead of thousands."""
    whole = make_phrases(to="de", seed=0)
    part = replace(whole, train=whole.train[:400], held_out=whole.held_out[: VALID + 40])
    monkeypatch.setattr(addnorm.demo.phrases, "make_phrases", lambda **options: part)


@pytest.mark.slow
@pytest.mark.trains
def test_a_demo_trains_translates_and_writes_a_page(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["demo", "--out", str(tmp_path / "demo"), "--minutes", "0.05"]
    status, out, err = run(capsys, *command, "--json")
    assert status == 0, err
    metrics = json.loads(out)
    assert metrics["held_out"] == 40 and 0 <= metrics["exact"] <= 1 and 0 <= metrics["bleu"] <= 100
    page = Path(metrics["report"]).read_text()
    assert "<title>English to German</title>" in page
    wanted = ("Held-out phrases", "Attention", "Contribution of each sublayer", "Loss")
    assert all(f">{title}</h2>" in page for title in wanted) and page.count("<svg") >= 5
    train_lines = (tmp_path / "demo/phrases/train.en").read_text().splitlines()
    held = (tmp_path / "demo/phrases/test.en").read_text().splitlines()
    assert len(train_lines) == 400 and not set(train_lines) & set(held)
    status, out, _ = run(capsys, *command)  # the files of an earlier demo are deleted
    assert status == 0 and "held-out phrase" in out and "exact: " in out and "report: " in out


@pytest.mark.parametrize(("code", "name"), [("de", "German"), ("pt_BR", "Portuguese (Brazil)")])
def test_the_language_has_a_name(code: str, name: str) -> None:
    assert Phrases(code, [], []).language == name


def test_a_demo_is_not_written_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("mine")
    status, _, err = run(capsys, "demo", "--out", str(tmp_path / "notes"))
    assert status == 2 and "must be a folder: it is a file. Choose another --out." in err
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("names", [("phrases/poem.txt",), ("phrases/train.en", "thesis.tex")])
def test_a_demo_deletes_only_files_of_a_demo(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "phrases").mkdir()
    for name in names:
        (tmp_path / name).touch()
    status, _, err = run(capsys, "demo", "--out", str(tmp_path))
    assert status == 2 and "has other files than those of a demo" in err
    assert all((tmp_path / name).exists() for name in names)


def test_an_unknown_language_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "demo", "--to", "xx", "--out", str(tmp_path / "demo"))
    assert status == 2 and not out and "must be a code of CLDR other than English: got 'xx'" in err
    assert not (tmp_path / "demo").exists()
