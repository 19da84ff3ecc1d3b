"""Verbs that use a trained run: translate, generate, classify, predict, explain, evaluate, runs."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from addnorm.cli.main import main
from addnorm.cli.predict import _is_file
from addnorm.data.table.frame import read_frame
from addnorm.errors import AddnormError
from addnorm.runs.run import Run
from tests.cli.tables import rows, run, train
from tests.runs.common import Trained, answer, label, lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "test.source"
    path.write_text("".join(text + "\n" for text in lines(6, seed=5)))
    return path


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.trains
def test_translations_are_printed_line_by_line(
    trained: Trained, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained["translate"])
    assert main(["translate", run, str(source), "--beam", "2"]) == 0
    output = capsys.readouterr()
    wanted = Run.open(run).translate(lines(6, seed=5), beam=2)
    assert output.out.splitlines() == wanted and "engine: " in output.err
    assert main(["translate", run, str(source), "--nbest", "3", "--scores", "--beam", "2"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [str(n) for n in range(1, 7) for _ in range(3)]
    best = Run.open(run).translate(lines(6, seed=5), beam=3, nbest=3)
    flat = [answer for answers in best for answer in answers]
    assert [row[1:] for row in rows] == [[f"{a.score:.4f}", a] for a in flat]
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
    output = capsys.readouterr()
    assert output.err.endswith(
        "addnorm: the standard input must be UTF-8 text: line 3 is not. If it is Latin-1, "
        "convert it: iconv -f LATIN1 -t UTF-8.\n"
    )


@pytest.mark.trains
def test_generation(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", str(trained["language"]), "--prompt", "Ba", "--tokens", "30"]
    output = []
    for more in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"]):
        assert main([*ask, "--temperature", "2", *more]) == 0
        output.append(capsys.readouterr().out)
    assert output[0] == output[1] != output[2] and all(text.startswith("Ba") for text in output)
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
    rows = list(Run.open(run).trained.iter_labels(lines(6, seed=5)))
    best = [max(row, key=row.__getitem__) for row in rows]
    wanted = "".join(f"{b}\t{row[b]:.4f}\n" for b, row in zip(best, rows, strict=True))
    assert main(["classify", run, str(source)]) == 0
    assert capsys.readouterr().out == wanted
    feed(monkeypatch, source.read_bytes())
    assert main(["classify", run, "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == rows and all(sum(row.values()) == pytest.approx(1) for row in printed)


@pytest.mark.trains
def test_blank_lines_pass_through_aligned(
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["", "ba be", " ", "bi", "\t"]
    path = tmp_path / "texts.txt"
    path.write_text("".join(text + "\n" for text in texts))
    run, other = trained["translate"], trained["classify"]
    plain = Run.open(run).translate(["ba be", "bi"], beam=2)
    labels = Run.open(other).classify(["ba be", "bi"])
    assert Run.open(run).translate(texts, beam=2) == ["", plain[0], "", plain[1], ""]
    best = Run.open(run).translate(texts, beam=2, nbest=2)
    assert [len(each) for each in best] == [1, 2, 1, 2, 1]
    assert (best[0][0].score, best[0][0].pieces) == (0.0, [])
    assert Run.open(other).classify(texts) == [{}, labels[0], {}, labels[1], {}]
    for more in ([], ["--stream"]):
        assert main(["translate", str(run), str(path), "--beam", "2", *more]) == 0
        assert capsys.readouterr().out.split("\n") == ["", plain[0], "", plain[1], "", ""]
        feed(monkeypatch, path.read_bytes())
        assert main(["classify", str(other), *more]) == 0
        printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        assert [bool(name) and bool(value) for name, value in printed] == [
            *(False, True, False, True, False)
        ]
        assert main(["classify", str(other), str(path), "--json", *more]) == 0
        printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row == {} for row in printed] == [True, False, True, False, True]


class RecordedInput:
    """A standard input that notes how many lines were printed when each line is read."""

    def __init__(self, texts: list[str], printed: io.StringIO) -> None:
        self.texts, self.printed, self.counts = texts, printed, list[int]()

    @property
    def buffer(self) -> Any:
        for text in self.texts:
            self.counts.append(self.printed.getvalue().count("\n"))
            yield f"{text}\n".encode()

    def isatty(self) -> bool:
        return False


@pytest.mark.trains
@pytest.mark.parametrize("verb", ["translate", "classify"])
def test_a_stream_is_answered_line_by_line(
    verb: str, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for more in ([], ["--stream"]):
        printed = io.StringIO()
        stdin = RecordedInput(["ba", "", "be bi"], printed)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", printed)
        assert main([verb, str(trained[verb]), *more]) == 0
        counts.append(stdin.counts)
    assert counts == [[0, 0, 0], [0, 1, 2]]


@pytest.mark.trains
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_is_classified_by_its_text_column(
    ending: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, sign = trained["classify"], {"csv": ",", "tsv": "\t"}[ending]
    texts = lines(8, seed=5)
    labels = [max(row, key=row.__getitem__) for row in Run.open(run).classify(texts)]
    table = tmp_path / f"new.{ending}"
    rows = [["number", "text", "label"], *([str(n), t, label(t)] for n, t in enumerate(texts))]
    rows.insert(3, ["9", "", "no"])
    table.write_text("".join(sign.join(row) + "\n" for row in rows))
    assert main(["classify", str(run), str(table)]) == 0
    output = capsys.readouterr()
    printed = [line.split("\t")[0] for line in output.out.splitlines()]
    assert printed == [*labels[:2], "", *labels[2:]]
    assert "the texts are those of 'text'.\n" in output.err
    assert main(["evaluate", str(run), str(table), "--json"]) == 0
    share = json.loads(capsys.readouterr().out)["accuracy"]
    assert share == pytest.approx(sum(map(str.__eq__, labels, map(label, texts))) / 8)


@pytest.mark.trains
def test_nbest_above_beam_raises_the_beam(
    trained: Trained, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["translate", str(trained["translate"]), str(source), "--nbest", "3"]
    assert main([*command, "--beam", "2"]) == 0
    output = capsys.readouterr()
    assert output.err.startswith("--nbest 3 is above --beam 2: searching with --beam 3.\n")
    assert main([*command, "--beam", "3"]) == 0
    again = capsys.readouterr()
    assert again.out == output.out and "engine: " in again.err


@pytest.mark.trains
def test_metrics_of_files(
    trained: Trained, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "test.target"
    target.write_text("".join(answer(text) + "\n" for text in lines(6, seed=5)))
    files = ["--source", str(source), "--target", str(target), "--beam", "2"]
    assert main(["evaluate", str(trained["translate"]), *files, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics == Run.open(trained["translate"]).evaluate(str(source), str(target), beam=2)
    assert main(["evaluate", str(trained["translate"]), *files]) == 0
    output = capsys.readouterr().out
    assert f"{'bleu':<22} {metrics['bleu']:.4g}\n" in output and f"beam{' ' * 19}2" in output
    assert f"{'exact':<22} {metrics['exact']:.1%}\n" in output
    assert f"{'bleu lower signature':<22} {metrics['bleu_lower_signature']}\n" in output
    table = tmp_path / "test.csv"
    table.write_text("text,label\n" + "".join(f"{t},{label(t)}\n" for t in lines(9, seed=5)))
    assert main(["evaluate", str(trained["classify"]), str(table)]) == 0
    assert "%\n" in capsys.readouterr().out
    assert main(["evaluate", str(trained["language"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 0
    assert main(["evaluate", str(trained["language"]), "a", "--source", "b"]) == 2
    assert "there must be one file to evaluate on: got 'a' and 'b'." in capsys.readouterr().err


@pytest.mark.trains
def test_runs_are_listed(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [trained["language"], trained["translate"]]
    assert main(["runs", str(trained.folder)]) == 0
    output = capsys.readouterr().out.splitlines()
    for path in runs:
        (line,) = [line for line in output if line.startswith(f"{path} ")]
        assert path.name in line and "finished" in line and "loss " in line
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
    "binary": ("classify {classify} {binary}", "'{binary}' is not text: byte 3 of line 1 is 0."),
    "latin-1": ("classify {classify} {latin}", "'{latin}' must be UTF-8 text: byte 4 of line 1"),
    "other task": (
        "translate {language} {text}",
        "'{language}' was trained for language: it has no verb 'translate'. "
        "Its verbs: generate, explain.",
    ),
    "long prompt": (
        "generate {language} --prompt bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
        "a prompt must fit the context of 32 tokens: got 42. Shorten it, or pass only its end.",
    ),
    "strange": ("generate {language} --prompt baß", "the prompt has a character that is not in"),
    "beam": ("translate {translate} {text} --beam 0", "nbest must be 1 or more, and at most"),
    "nbest": ("translate {translate} {text} --nbest 0", "nbest must be 1 or more"),
    "penalty": ("translate {translate} {text} --penalty none-such", "penalty"),
    "top-p": ("generate {language} --prompt ba --top-p 2", "top_p must be above 0 and at most 1"),
    "temperature": ("generate {language} --prompt ba --temperature -1", "temperature must be"),
    "one side": ("evaluate {translate} {text}", "pairs need a source and a target: got only"),
    "newer": (
        "evaluate {newer}",
        "'{newer}/run.json' is a run of format 3; this addnorm reads format 2. Train",
    ),
}


@pytest.mark.trains
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(
    name: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("ba be\n")
    (tmp_path / "binary").write_bytes(b"ba\x00\n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "run.json").write_text('{"version": 3}')
    places = {task: trained[task] for task in ("translate", "language", "classify")}
    places |= {file: tmp_path / file for file in ("text", "binary", "latin", "newer")}
    places |= {"folder": tmp_path}
    arguments, message = (text.format(**places) for text in MISTAKES[name])
    assert main(arguments.split()) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"addnorm: {message}") and output.err.count("\n") == 1, output.err
    assert not output.out


# ── Tables ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.trains
def test_every_verb_prints_json(
    trained_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = trained_table.parent / "run"
    capsys.readouterr()
    run("schema", trained_table, "--target", "y", "--json")
    schema = json.loads(capsys.readouterr().out)
    assert (schema["target"], schema["task"]) == ("y", "classes")
    assert [column["kind"] for column in schema["columns"]] == ["number", "category"]
    run("predict", where, trained_table, "--json", "--proba")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["row"] for line in lines] == list(range(1, 61))
    assert list(lines[0]) == ["row", "y (predicted)", "p(no)", "p(yes)"]
    assert lines[0]["p(no)"] + lines[0]["p(yes)"] == pytest.approx(1)
    run("predict", where, trained_table, "--json", "-o", tmp_path / "o.csv")
    shown = capsys.readouterr()
    wanted = {"rows": 60, "out": str(tmp_path / "o.csv"), "columns": ["y (predicted)"]}
    assert json.loads(shown.out) == wanted and not shown.err


@pytest.mark.trains
def test_unknown_values_are_reported_when_predicting(
    trained_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    where, new = trained_table.parent / "run", tmp_path / "new.csv"
    new.write_text("age,job\n" + "old,astronaut\n" * 5 + "-,diver\n" * 4 + "30,a\n")
    monkeypatch.setattr("addnorm.tasks.table.ROWS_PER_CHUNK", 3)
    for more in ((), ("-o", tmp_path / "o.csv")):
        run("predict", where, new, *more)
        output = capsys.readouterr().err
        assert "age: 5 values are not numeric (for example 'old'); treated as missing" in output
        assert (
            "job: 9 values are unknown or were rare in training (for example 'astronaut'" in output
        )
    new.write_text("age,job\n,a\n?,b\n")
    run("predict", where, new)
    assert "age: all values are missing." in capsys.readouterr().err
    run("explain", where, new, "--row", 1)
    new.write_text("age,job\nold,a\n")
    run("explain", where, new, "--row", 1)
    assert "age: 1 values are not numeric" in capsys.readouterr().err


@pytest.mark.trains
@pytest.mark.parametrize("name", ("model.safetensors", "schema.toml", "report.json"))
@pytest.mark.parametrize("harm", (b"", b"\0nothing", None))
def test_a_damaged_run_is_one_clear_error(
    trained_table: Path, tmp_path: Path, name: str, harm: bytes | None, capsys: Any
) -> None:
    where = tmp_path / "run"
    shutil.copytree(trained_table.parent / "run", where)
    file = where / "best" / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if harm is None else harm)
    assert main(["predict", str(where), str(trained_table)]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1 and name in shown.err
    file.unlink()
    status = 2 if name == "model.safetensors" else 0
    assert main(["predict", str(where), str(trained_table)]) == status


@pytest.mark.trains
@pytest.mark.parametrize(
    ("harm", "message"),
    (
        *((b"", "is damaged"), (b"\0nothing", "is damaged"), (None, "is damaged")),
        *((b"[]", "was not written by addnorm"), (b"{}", "was not written by addnorm")),
    ),
)
def test_a_table_with_damaged_columns_is_not_resumed(
    trained_table: Path, tmp_path: Path, harm: bytes | None, message: str, capsys: Any
) -> None:
    where = tmp_path / "run"
    shutil.copytree(trained_table.parent / "run", where)
    content = (where / "columns.json").read_bytes()
    (where / "columns.json").write_bytes(content[: len(content) // 2] if harm is None else harm)
    assert main(["train", "--resume", str(where)]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1
    assert f"{str(where / 'columns.json')!r} {message}" in shown.err


@pytest.mark.parametrize(
    "command",
    (
        "predict nothing rows.csv -o",
        "explain nothing rows.csv --report",
        "embed nothing rows.csv -o",
        "clinic nothing --report",
    ),
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), str(tmp_path / "none" / "out.npy")]) == 2
    assert "addnorm: there is no directory '" in capsys.readouterr().err


def test_vectors_are_written_as_npy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "nothing", "rows.csv", "-o", "vectors.txt"]) == 2
    assert "addnorm: --out must end in .npy: got 'vectors.txt'." in capsys.readouterr().err


@pytest.mark.trains
def test_predict_does_not_overwrite_its_input(trained_table: Path, tmp_path: Path) -> None:
    where, path = trained_table.parent / "run", tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{i / 7},{i * 1.5}\n" for i in range(40)))
    with pytest.raises(AddnormError, match="-o must differ from the file that is read"):
        run("predict", where, trained_table, "-o", trained_table)
    with pytest.raises(AddnormError, match=r"is a file\. Choose another --out"):
        train(path, "--out", path)
    train(path)
    with pytest.raises(
        AddnormError,
        match="--proba needs a model that predicts classes: this",
    ):
        run("predict", tmp_path / "run", path, "--proba")
    with pytest.raises(AddnormError, match="--quantiles needs a model that predicts numbers: this"):
        run("predict", where, trained_table, "--quantiles", "0.5")
    with pytest.raises(AddnormError, match="--point median needs a model that predicts numbers"):
        run("predict", where, trained_table, "--point", "median")
    for levels in ("1.5", "0.8,", "high", "0"):
        with pytest.raises(AddnormError, match="--intervals must be numbers between 0 and 1"):
            run("predict", tmp_path / "run", path, "--intervals", levels)


@pytest.mark.trains
def test_intervals_and_quantiles_are_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{i / 7},{i * 1.5}\n" for i in range(150)))
    train(path)
    assert "intervals, held-out rows: 80 % hold " in capsys.readouterr().out
    levels = ("--intervals", "0.8,0.95", "--quantiles", "0.5,0.1")
    run("predict", tmp_path / "run", path, *levels, "--point", "median")
    names, *lines = csv.reader(capsys.readouterr().out.splitlines())
    ends = (f"{level} % {end}" for level in (80, 95) for end in ("low", "high"))
    assert names == ["y (predicted)", *(f"y ({end})" for end in (*ends, "10 %", "50 %"))]
    table = [[float(cell) for cell in line] for line in lines]
    assert len(table) == 150
    for point, low80, high80, low95, high95, tenth, middle in table:
        assert low95 <= low80 <= point == middle <= high80 <= high95
        assert low80 == pytest.approx(tenth)
    opened: Any = Run.open(tmp_path / "run")
    low, high = opened.predict_interval(str(path), 0.95).T
    assert low.tolist() == pytest.approx([row[3] for row in table])
    assert high.tolist() == pytest.approx([row[4] for row in table])
    assert opened.predict_quantiles(str(path), [0.5])[:, 0].tolist() == [row[0] for row in table]
    assert len(opened.predict_distribution(str(path))) == 150


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.trains
@pytest.mark.parametrize("terminal", (True, False))
def test_a_bar_is_for_terminals(
    trained_table: Path, tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen() if terminal else io.StringIO()
    monkeypatch.setattr("addnorm.tasks.table.ROWS_PER_CHUNK", 7)
    monkeypatch.setattr("sys.stderr", screen)
    run("predict", trained_table.parent / "run", trained_table, "-o", tmp_path / "out.csv")
    shown = screen.getvalue()
    assert shown.endswith("60 rows predicted: " + str(tmp_path / "out.csv") + "\n")
    assert ("\x1b[" in shown) == terminal and ("0 rows" in shown)
    assert terminal or shown.count("\n") == 1


@pytest.mark.trains
@pytest.mark.parametrize("name", ("out.csv", "out.parquet"))
def test_predict_adds_columns(
    trained_table: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("addnorm.tasks.table.ROWS_PER_CHUNK", 7)
    run("predict", trained_table.parent / "run", trained_table, "-o", tmp_path / name, "--proba")
    frame = read_frame(tmp_path / name)
    assert frame.names == ["age", "job", "y", "y (predicted)", "p(no)", "p(yes)"]
    assert len(frame) == 60
    total = [
        float(a) + float(b)
        for a, b in zip(frame.columns["p(no)"], frame.columns["p(yes)"], strict=True)
    ]
    assert total == pytest.approx([1.0] * 60)
    with pytest.raises(
        AddnormError, match=r"already has a column 'y \(predicted\)'|which training"
    ):
        run("predict", trained_table.parent / "run", tmp_path / name, "-o", tmp_path / "again.csv")


def quoted_tabs(row: int) -> str:
    return f'{row % 7}\t"a\tb{row % 3}"\t{"yes" if row % 2 else "no"}\n' + "\n" * (row % 20 == 5)


def long_cell(row: int) -> str:
    cell = "x" * 140_000 if row == 3 else f"n{row % 3}"
    return f"{row % 7},{cell},{'yes' if row % 2 else 'no'}\n"


@pytest.mark.trains
@pytest.mark.parametrize(
    ("name", "row", "notes"),
    [
        ("t.tsv", quoted_tabs, ("separated by tabs, with quoted fields", "blank lines skipped: 2")),
        ("t.csv", long_cell, ()),
    ],
)
def test_a_file_is_predicted_as_it_was_trained_on(
    tmp_path: Path, name: str, row: Any, notes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A quoted tab, blank lines and a cell beyond the limit of the csv module."""
    separator = "\t" if name.endswith(".tsv") else ","
    path = tmp_path / name
    path.write_text(separator.join(("age", "job", "y")) + "\n" + "".join(map(row, range(40))))
    train(path)
    trained_on = capsys.readouterr().err
    run("predict", tmp_path / "run", path, "-o", tmp_path / "out.csv")
    output = capsys.readouterr().err
    assert all(note in trained_on and note in output for note in notes)
    assert len(output) < 1000, "a long cell is shortened in messages"
    source, scored = read_frame(path), read_frame(tmp_path / "out.csv")
    assert len(scored) == len(source) == 40 and len(scored.names) == 4
    assert all(
        scored.columns[column].tolist() == source.columns[column].tolist()
        for column in source.names
    )


@pytest.mark.trains
def test_predict_prints(trained_table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("predict", trained_table.parent / "run", trained_table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "y (predicted)" and len(lines) == 61 and set(lines[1:]) <= {"yes", "no"}


@pytest.mark.slow
@pytest.mark.trains
def test_explain_a_text(
    trained: Trained, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, page = str(trained["translate"]), tmp_path / "why.html"
    assert main(["explain", where, "ba be", "--report", str(page)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("ba be → ") and "completeness: their sum" in said.out
    assert f"page: {page}" in said.err and "Choose an output word" in page.read_text()
    second = source.read_text().splitlines()[1]
    assert main(["explain", where, str(source), "--row", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"].startswith(f"{second} → ")
    for output in found["outputs"]:
        assert len(output["inputs"]["encoder"]) == len(found["tokens"]["encoder"])
        assert 0 <= output["probability"] <= 1 and output["pieces"]
    for row in ("99", "0", "-1"):
        assert main(["explain", where, str(source), f"--row={row}"]) == 2
        assert f"row must be 1 to 6: got {row}" in capsys.readouterr().err
    assert main(["explain", where, str(source)]) == 0  # of several lines the first, which is said
    said = capsys.readouterr()
    assert "text 1 of 6 is explained" in said.err
    assert said.out.startswith(source.read_text().splitlines()[0])
    for text, message in {
        " ": "must not be blank",
        "": "must not be blank",
        "missing.txt": "there is no file 'missing.txt'",
    }.items():
        assert main(["explain", where, text]) == 2 and message in capsys.readouterr().err
    assert main(["explain", where, "ba", "--memory", "0"]) == 2  # the size, before anything runs
    assert "more than the limit of 0 bytes" in capsys.readouterr().err
    assert not _is_file("ä" * 200)  # too long for the name of a file
    assert main(["explain", str(source), "ba"]) == 2 and "no run in" in capsys.readouterr().err


@pytest.mark.trains
def test_explain(trained_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = trained_table.parent / "run"
    run("explain", where, trained_table, "--report", tmp_path / "why.html")
    assert "agreement of ranks: permutation and gradient" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "why.html").read_text()
    run("explain", where, trained_table, "--row", 17)
    assert "row 17: the log-odds of yes is" in capsys.readouterr().out
    run("explain", where, trained_table, "--row", 17, "--report", tmp_path / "one.html")
    assert "row 17" in (tmp_path / "one.html").read_text()
    capsys.readouterr()
    run("explain", where, trained_table, "--row", 1, "--json")
    assert json.loads(capsys.readouterr().out)["columns"] == ["age", "job"]
    with pytest.raises(AddnormError, match="row must be 1 to 60: got 61"):
        run("explain", where, trained_table, "--row", 61)


@pytest.mark.trains
def test_a_run_is_evaluated_on_other_rows(
    trained_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics are those of its predictions, row by row."""
    later = tmp_path / "later.csv"
    later.write_text(rows(40))
    assert main(["evaluate", str(trained_table.parent / "run"), str(later), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    run("predict", trained_table.parent / "run", later, "-o", tmp_path / "scored.csv")
    scored = read_frame(tmp_path / "scored.csv").columns
    right = [str(a) == str(b) for a, b in zip(scored["y"], scored["y (predicted)"], strict=True)]
    assert metrics["accuracy"] == pytest.approx(sum(right) / 40) and metrics["rows"] == 40
    assert set(metrics) == {"accuracy", "auc", "log_loss", "brier", "ece", "f1", "rows"}
    shutil.copytree(trained_table.parent / "run", tmp_path / "bare")
    for path in (tmp_path / "bare").rglob("schema.toml"):
        path.unlink()  # the page is not needed and may be deleted
    assert main(["evaluate", str(tmp_path / "bare"), "--source", str(later)]) == 0
    assert f"{metrics['accuracy']:.1%}" in capsys.readouterr().out
    for more, message in (
        ((), "does not store its rows, so evaluation needs a file"),
        ((str(later), "--int8"), "int8 is for text models: this run is for a table"),
        ((str(later), "--target", "y"), "--target is for translations, not for tables"),
    ):
        assert main(["evaluate", str(trained_table.parent / "run"), *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.trains
def test_runs_of_tables_are_listed(
    trained_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained_table.parent / "run", tmp_path / "runs" / "one")
    shutil.copytree(trained_table.parent / "run", tmp_path / "runs" / "two")
    (tmp_path / "runs" / "two" / "summary.json").write_text("{")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"{tmp_path / 'runs' / 'one'}  table      finished ")
    assert "accuracy " in output.out and len(output.out.splitlines()) == 1
    assert "not listed: " in output.err and "summary.json' is damaged" in output.err
    assert main(["runs", str(tmp_path / "runs"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["task"] == "table" and row["finished"] and row["best"]["accuracy"] <= 1


@pytest.mark.trains
def test_runs_of_texts_and_tables_are_listed_together(
    trained: Trained, trained_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, path in (("a", trained["language"]), ("b", trained_table.parent / "run")):
        shutil.copytree(path, tmp_path / name)
    assert main(["runs", str(tmp_path)]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one.startswith(f"{tmp_path / 'a'}  language   finished ") and "perplexity" in one
    assert other.startswith(f"{tmp_path / 'b'}  table      finished ") and "auc" in other
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert [row["task"] for row in json.loads(capsys.readouterr().out)] == ["language", "table"]


@pytest.mark.trains
def test_text_verbs_are_refused_for_a_table(
    trained_table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", str(trained_table.parent / "run")]) == 2
    assert (
        "was trained for table: it has no verb 'translate'. Its verbs: predict, predict_proba"
        in capsys.readouterr().err
    )
