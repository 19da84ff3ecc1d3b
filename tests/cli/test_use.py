"""Verbs that ask a trained run, as a user meets them."""

import io
import json
import sys
from pathlib import Path

import pytest

from addnorm.cli.main import main
from addnorm.runs.use import Trained as Asked
from tests.runs.common import Trained, answer, label, lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "test.source"
    path.write_text("".join(text + "\n" for text in lines(6, seed=5)))
    return path


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


@pytest.mark.trains
def test_translations_a_line_each(
    trained: Trained, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained["translate"])
    assert main(["translate", run, str(source), "--beam", "2"]) == 0
    said = capsys.readouterr()
    wanted = list(Asked(run).translate(lines(6, seed=5), beam=2))
    assert said.out.splitlines() == [best[0].text for best in wanted] and not said.err
    assert main(["translate", run, str(source), "--nbest", "3", "--scores", "--beam", "2"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [str(n) for n in range(1, 7) for _ in range(3)]
    found = [a for best in Asked(run).translate(lines(6, seed=5), beam=3, nbest=3) for a in best]
    assert [row[1:] for row in rows] == [[f"{a.score:.4f}", a.text] for a in found]
    assert main(["translate", run, str(source), "--json", "--nbest", "2", "--scores"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5, 6]
    best = rows[0]["answers"][0]
    assert best.keys() == {"text", "score", "pieces"} and len(rows[0]["answers"]) == 2
    assert sum(value for _, value in best["pieces"]) < 0
    assert main(["translate", run, str(source), "--json"]) == 0
    assert "pieces" not in capsys.readouterr().out


@pytest.mark.trains
def test_lines_of_the_standard_input(
    trained: Trained,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = str(trained["translate"])
    assert main(["translate", run, str(source), "--beam", "1"]) == 0
    wanted = capsys.readouterr().out
    feed(monkeypatch, source.read_bytes().replace(b"\n", b"\r\n"))
    assert main(["translate", run, "--beam", "1"]) == 0
    assert capsys.readouterr().out == wanted
    feed(monkeypatch, b"ba\nbe\ncaf\xe9\n")
    assert main(["translate", run, "-", "--beam", "1"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "addnorm: the standard input must be UTF-8 text: line 3 is not. If it is Latin-1, "
        "convert it: iconv -f LATIN1 -t UTF-8.\n"
    )


@pytest.mark.trains
def test_generation(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", str(trained["language"]), "--prompt", "Ba", "--tokens", "30"]
    said = []
    for more in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"]):
        assert main([*ask, "--temperature", "2", *more]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2] and all(text.startswith("Ba") for text in said)
    assert main([*ask, "--temperature", "0", "--json"]) == 0
    greedy = json.loads(capsys.readouterr().out)
    assert greedy["prompt"] == "Ba" and len(greedy["pieces"]) == 30
    assert main([*ask, "--top-k", "1", "--seed", "9"]) == 0
    assert capsys.readouterr().out == "Ba" + greedy["text"] + "\n"
    assert main([*ask, "--top-p", "0.0001", "--seed", "9"]) == 0
    assert capsys.readouterr().out == "Ba" + greedy["text"] + "\n"


@pytest.mark.trains
def test_labels(
    trained: Trained,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = str(trained["classify"])
    rows = list(Asked(run).classify(lines(6, seed=5)))
    best = [max(row, key=row.__getitem__) for row in rows]
    wanted = "".join(f"{b}\t{row[b]:.4f}\n" for b, row in zip(best, rows, strict=True))
    assert main(["classify", run, str(source)]) == 0
    assert capsys.readouterr().out == wanted
    feed(monkeypatch, source.read_bytes())
    assert main(["classify", run, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == rows and all(sum(row.values()) == pytest.approx(1) for row in found)


@pytest.mark.trains
def test_figures(
    trained: Trained, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "test.target"
    target.write_text("".join(answer(text) + "\n" for text in lines(6, seed=5)))
    files = ["--source", str(source), "--target", str(target), "--beam", "2"]
    assert main(["evaluate", str(trained["translate"]), *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == Asked(trained["translate"]).evaluate(str(source), str(target), beam=2)
    assert main(["evaluate", str(trained["translate"]), *files]) == 0
    said = capsys.readouterr().out
    assert f"{'bleu':<22} {found['bleu']:.4g}\n" in said and f"beam{' ' * 19}2" in said
    assert f"{'exact':<22} {found['exact']:.1%}\n" in said
    assert f"{'bleu lower signature':<22} {found['bleu_lower_signature']}\n" in said
    table = tmp_path / "test.csv"
    table.write_text("text,label\n" + "".join(f"{t},{label(t)}\n" for t in lines(9, seed=5)))
    assert main(["evaluate", str(trained["classify"]), str(table)]) == 0
    assert "%\n" in capsys.readouterr().out
    assert main(["evaluate", str(trained["language"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 0
    assert main(["evaluate", str(trained["language"]), "a", "--source", "b"]) == 2
    assert "one file to evaluate on, not two: 'a' and 'b'." in capsys.readouterr().err


@pytest.mark.trains
def test_runs_are_listed(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [trained["language"], trained["translate"]]
    assert main(["runs", str(trained.folder)]) == 0
    said = capsys.readouterr().out.splitlines()
    for run in runs:
        (line,) = [line for line in said if line.startswith(f"{run} ")]
        assert run.name in line and "finished" in line and "loss " in line
    assert main(["runs", str(trained.folder), "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows[str(runs[0])]["best"]["loss"] > 0 and rows[str(runs[1])]["task"] == "translate"
    (trained.folder / "killed").mkdir(exist_ok=True)
    for name in ("run.json", "config.toml"):
        (trained.folder / "killed" / name).write_bytes((runs[0] / name).read_bytes())
    assert main(["runs", str(trained.folder / "killed")]) == 0
    assert "running or killed" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().err == f"no runs in {tmp_path / 'empty'}\n"
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err


MISTAKES = {
    "no run": ("translate {folder}/none {text}", "there is no run in '{folder}/none'. Check"),
    "no file": ("translate {translate} {folder}/none", "there is no file '{folder}/none'. "),
    "empty line": ("translate {translate} {blank}", "there must be a text on each line: line 2 is"),
    "empty text": ("classify {classify} {blank}", "there must be a text on each line: line 2 is"),
    "binary": ("classify {classify} {binary}", "'{binary}' is not text: byte 3 of line 1 is 0."),
    "latin-1": ("classify {classify} {latin}", "'{latin}' must be UTF-8 text: byte 4 of line 1"),
    "other task": ("translate {language} {text}", "translate needs a run trained to translate: "),
    "long prompt": (
        "generate {language} --prompt bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
        "a prompt must fit the context of 32 tokens: got 42. Shorten it, or give only its end.",
    ),
    "strange": ("generate {language} --prompt baß", "the prompt has a character that the model"),
    "beam": ("translate {translate} {text} --beam 0", "nbest must be 1 or more, and at most"),
    "nbest": ("translate {translate} {text} --nbest 0", "nbest must be 1 or more"),
    "penalty": ("translate {translate} {text} --penalty none-such", "penalty"),
    "top-p": ("generate {language} --prompt ba --top-p 2", "top_p must be above 0 and at most 1"),
    "temperature": ("generate {language} --prompt ba --temperature -1", "temperature must be"),
    "one side": ("evaluate {translate} {text}", "pairs need a source and a target: only"),
    "newer": ("evaluate {newer}", "'{newer}' is a run of format 2; this addnorm reads 1. Update"),
}


@pytest.mark.trains
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(
    name: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("ba be\n")
    (tmp_path / "blank").write_text("ba be\n \nbi\n")
    (tmp_path / "binary").write_bytes(b"ba\x00\n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "run.json").write_text('{"version": 2}')
    places = {task: trained[task] for task in ("translate", "language", "classify")}
    places |= {file: tmp_path / file for file in ("text", "blank", "binary", "latin", "newer")}
    places |= {"folder": tmp_path}
    arguments, message = (text.format(**places) for text in MISTAKES[name])
    assert main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"addnorm: {message}") and said.err.count("\n") == 1, said.err
    assert not said.out
