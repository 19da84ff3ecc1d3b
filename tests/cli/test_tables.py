"""The verbs for tables, and forty tables that are broken on purpose."""

import gzip
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from addnorm.cli import learn, tables
from addnorm.cli.main import main, make_parser
from addnorm.data.frame import read_frame
from addnorm.data.schema import Schema
from addnorm.errors import AddnormError
from addnorm.tabular import load
from addnorm.tabular.holdout import hold_out
from addnorm.tabular.pretrain import METHODS, pretrain

pytest.importorskip("sklearn")
QUICK = ["table.epochs=1", "table.width=8", "table.depth=1", "table.heads=1", "table.ffn_width=8"]


def run(verb: str, *arguments: object) -> None:
    """A verb as the command line runs it, errors and all."""
    actions = {
        "train": learn.train_table,
        "predict": tables.predict,
        "explain": tables.explain,
        "schema": tables.schema,
    }
    task = ["table"] if verb == "train" else []
    actions[verb](make_parser().parse_args([verb, *task, *map(str, arguments)]))


def train(path: Path, *more: object, target: str = "y") -> None:
    settings = [part for setting in QUICK for part in ("--set", setting)]
    shutil.rmtree(path.parent / "run", ignore_errors=True)
    run("train", path, "--target", target, "--out", path.parent / "run", *settings, *more)


def rows(count: int = 60, *, unseen: str = "") -> str:
    draw = random.Random(0)
    lines = ["age,job,y"]
    for i in range(count):
        age = draw.randint(18, 80)
        lines.append(f"{age},{unseen or 'ab'[i % 2]},{'yes' if age > 40 else 'no'}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "t.csv"
    path.write_text(rows())
    train(path)
    return path


@pytest.mark.trains
def test_train_says_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, test = tmp_path / "t.csv", tmp_path / "test.csv"
    path.write_text(rows())
    test.write_text(rows(30, unseen="z").replace("yes", "yes.").replace("no\n", "no.\n"))
    train(path, "--test", test, "--compare")
    shown = capsys.readouterr()
    assert "accuracy" in shown.out and "HistGradientBoosting" in shown.out
    assert "labels such as 'no.' are taken for 'no'" in shown.err
    assert "job: 30 rows have values that training had not" in shown.err
    names = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert names == {"model.safetensors", "schema.toml", "report.json", "summary.html"}
    found = json.loads((tmp_path / "run/report.json").read_text())
    assert [row["model"] for row in found["results"]][1:] == [
        "FTTransformerClassifier",
        "HistGradientBoosting",
    ]


@pytest.mark.trains
@pytest.mark.parametrize("model", ("tab", "saint"))
def test_other_models(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows())
    train(path, "--model", model, "--json")
    assert json.loads(capsys.readouterr().out)["rows"] == 48


@pytest.mark.trains
def test_compare_without_a_test_file_sets_rows_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows(100))
    train(path, "--compare", "--json")
    shown = capsys.readouterr()
    assert "20 rows are set aside to compare on" in shown.err
    found = json.loads(shown.out)
    assert found["rows"] + found["held_out"] == 80
    assert {row["on"] for row in found["results"][1:]} == {"rows set aside"}
    assert sum(count for *_, count in found["reliability"]["test"]) == 20
    path.write_text("age,y\n1,a\n2,b\n")
    with pytest.raises(AddnormError, match=r"rows enough to set some aside for --compare: got 2"):
        train(path, "--compare")


@pytest.mark.trains
def test_rows_without_answers_are_learnt_from_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, more = tmp_path / "t.csv", tmp_path / "more.csv"
    path.write_text(rows())
    more.write_text(rows(90, unseen="c").replace(",yes", ",").replace(",no", ","))
    train(path, "--unlabelled", more)
    assert "pre-trained (masked) on 150 rows, those of both files" in capsys.readouterr().err
    kept = load(tmp_path / "run").recipe_
    assert kept.categories[0].values == ("a", "b", "c") and kept.schema.target == "y"
    more.write_text("age,jobs\n3,a\n")
    with pytest.raises(AddnormError, match="it comes without 'job' and with 'jobs'"):
        train(path, "--unlabelled", more)


@pytest.mark.trains
@pytest.mark.parametrize("method", learn.METHODS)
def test_how_rows_without_answers_are_learnt_from_is_chosen(
    tmp_path: Path,
    method: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def remember(*given: Any, **more: Any) -> Any:
        asked.append(given[4])
        return pretrain(*given, **more)

    monkeypatch.setattr("addnorm.tabular.base.pretrain", remember)
    path = tmp_path / "t.csv"
    path.write_text(rows())
    train(path, "--unlabelled", path, "--pretrain", method)
    assert asked == [method]
    assert f"pre-trained ({method}) on 120 rows" in capsys.readouterr().err
    with pytest.raises(AddnormError, match=f"--pretrain {method} needs rows to learn from: give"):
        train(path, "--pretrain", method)


def test_choices_are_those_that_there_are() -> None:
    assert tuple(METHODS) == learn.METHODS
    for split in learn.SPLITS:
        hold_out(40, 0.2, order=split)


def patients(count: int = 60, *, lost: int = 0) -> str:
    """Five rows of each patient; the first rows are nobody's."""
    head, *lines = rows(count).strip().split("\n")
    named = [f"{'' if i < lost else f'p{i // 5}'},{line}" for i, line in enumerate(lines)]
    return "\n".join([f"patient,{head}", *named]) + "\n"


@pytest.mark.trains
def test_groups_are_held_out_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(patients())
    train(path, "--groups", "patient", "--compare", "--json")
    shown = capsys.readouterr()
    assert "10 rows, 2 groups of 12 are set aside to compare on" in shown.err
    assert "2 of 10 groups are held out, whole." in shown.err
    assert "column 'patient' is left out: it says which rows belong together." in shown.err
    found = json.loads(shown.out)
    assert (found["rows"], found["held_out"]) == (40, 10)
    assert load(tmp_path / "run").recipe_.names == ["age", "job"]
    (tmp_path / "new.csv").write_text(rows(7))
    run("predict", tmp_path / "run", tmp_path / "new.csv")
    run("predict", tmp_path / "run", path)
    assert len(capsys.readouterr().out.splitlines()) == 8 + 61


@pytest.mark.trains
def test_a_schema_decides_if_groups_are_learnt_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text(patients())
    run("schema", path, "--target", "y", "-o", schema)
    Schema.load(schema).change({"patient": "category"}).save(schema)
    train(path, "--groups", "patient", "--schema", schema)
    assert "column 'patient' is learnt from, too, as" in capsys.readouterr().err
    assert "patient" in load(tmp_path / "run").recipe_.names
    run("schema", path, "--target", "y", "-o", schema)
    left = [column for column in Schema.load(schema).columns if column.name != "patient"]
    Schema(columns=tuple(left)).save(schema)
    train(path, "--groups", "patient", "--schema", schema)
    assert "patient" not in load(tmp_path / "run").recipe_.names


@pytest.mark.parametrize(
    ("flags", "said"),
    (
        (("--groups", "patient", "--split", "time"), "by groups or by time, not by both"),
        (("--groups", "patient", "--set", "table.split=time"), "by groups or by time, not by both"),
        (("--groups", "pateint"), "has no column 'pateint'. Did you mean 'patient'?"),
        (("--groups", "y"), "--groups must name another column than the target 'y'."),
        (("--groups", "patient"), "every row must have a group: 3 have none. Leave the row out"),
    ),
)
def test_groups_that_cannot_be(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(patients(lost=3))
    with pytest.raises(AddnormError) as caught:
        train(path, *flags, "--unlabelled", path)
    assert said in str(caught.value)


@pytest.mark.trains
def test_the_last_rows_can_be_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows().replace(",a,", ",z,", 100) + "30,late,no\n40,late,yes\n" * 10)
    train(path, "--split", "time")
    assert load(tmp_path / "run").recipe_.categories[0].values == ("b", "late", "z")
    train(path, "--split", "time", "--compare")
    assert load(tmp_path / "run").recipe_.categories[0].values == ("b", "z")
    assert "16 rows are set aside to compare on" in capsys.readouterr().err


@pytest.mark.trains
def test_every_verb_prints_json(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = trained.parent / "run"
    capsys.readouterr()
    run("schema", trained, "--target", "y", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["task"]) == ("y", "classes")
    assert [column["kind"] for column in found["columns"]] == ["number", "category"]
    run("predict", where, trained, "--json", "--proba")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["row"] for line in lines] == list(range(1, 61))
    assert list(lines[0]) == ["row", "y (predicted)", "p(no)", "p(yes)"]
    assert lines[0]["p(no)"] + lines[0]["p(yes)"] == pytest.approx(1)
    run("predict", where, trained, "--json", "-o", tmp_path / "o.csv")
    shown = capsys.readouterr()
    told = {"rows": 60, "out": str(tmp_path / "o.csv"), "columns": ["y (predicted)"]}
    assert json.loads(shown.out) == told and not shown.err


@pytest.mark.trains
def test_a_table_as_an_office_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Semicolons, decimal commas, euros, percent, postcodes, dashes for gaps, line ends, a mark."""
    lines = ["PLZ;Fläche;Anteil;Baujahr;Preis"]
    for i in range(80):
        year = "-" if i % 5 == 0 else str(1950 + i % 60)
        lines.append(
            f"0{1000 + i % 4};{50 + i},5;{i % 9},25 %;{year};{i % 3 + 1}.{100 + i},{i % 90 + 10} €"
        )
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    train(path, target="Preis")
    shown = capsys.readouterr()
    assert "column 'Preis' is taken as numbers, written as 1.234,5 €." in shown.err
    assert shown.err.count("separated by semicolons") == 1 and "tells" not in shown.err
    assert "column 'Fläche': they are taken as written like 1.234,5." in shown.err
    assert "16 texts that are no number ('-') count as missing" in shown.err
    kept = load(tmp_path / "run")
    assert kept.recipe_.schema.kinds() == {
        "PLZ": "category",
        "Fläche": "number",
        "Anteil": "number",
        "Baujahr": "number",
    }
    assert 1000 < kept.predict(read_frame(path).without("Preis")).mean() < 4000
    run("schema", path, "--target", "Preis", "-o", tmp_path / "s.toml")
    capsys.readouterr()
    train(path, "--schema", tmp_path / "s.toml", "--test", path, target="Preis")
    assert "written as 1.234,5 €" in capsys.readouterr().err


@pytest.mark.trains
def test_what_training_did_not_know_is_said_when_predicting(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    where, new = trained.parent / "run", tmp_path / "new.csv"
    new.write_text("age,job\n" + "old,astronaut\n" * 5 + "-,diver\n" * 4 + "30,a\n")
    monkeypatch.setattr(tables, "PART", 3)
    for more in ((), ("-o", tmp_path / "o.csv")):
        run("predict", where, new, *more)
        said = capsys.readouterr().err
        assert "age: 5 rows have texts that are no numbers ('old'): they count as missing" in said
        assert "job: 9 rows have values that training had not, or seldom ('astronaut', 'di" in said
    new.write_text("age,job\n,a\n?,b\n")
    run("predict", where, new)
    assert "age: no row has a value; all are predicted as missing it" in capsys.readouterr().err
    run("explain", where, new, "--row", 1)
    new.write_text("age,job\nold,a\n")
    run("explain", where, new, "--row", 1)
    assert "age: 1 rows have texts that are no numbers" in capsys.readouterr().err


@pytest.mark.trains
def test_numbers_asked_for_where_there_are_few_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text(rows())
    run("schema", path, "--target", "y", "-o", schema)
    Schema.load(schema).change({"job": "number"}).save(schema)
    capsys.readouterr()
    train(path, "--schema", schema)
    said = capsys.readouterr().err
    assert "column 'job': 48 of 48 values are no numbers" in said and "Warning" not in said


@pytest.mark.trains
@pytest.mark.parametrize("name", ("model.safetensors", "schema.toml", "report.json"))
@pytest.mark.parametrize("harm", (b"", b"\0nothing", None))
def test_a_damaged_run_is_one_clear_error(
    trained: Path, tmp_path: Path, name: str, harm: bytes | None, capsys: Any
) -> None:
    where = tmp_path / "run"
    shutil.copytree(trained.parent / "run", where)
    content = (where / name).read_bytes()
    (where / name).write_bytes(content[: len(content) // 2] if harm is None else harm)
    assert main(["predict", str(where), str(trained)]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1 and name in shown.err
    (where / name).unlink()
    gone = 2 if name == "model.safetensors" else 0
    assert main(["predict", str(where), str(trained)]) == gone


@pytest.mark.parametrize(
    ("setting", "said"),
    (
        ("batch_size=2.5", "batch_size must be a whole number, 1 or more: got 2.5"),
        ("width=wide", "width must be a whole number, 1 or more: got 'wide'"),
        ("valid=x", "valid must be between 0 and 1: got 'x'"),
        ("scaling=log", "scaling has no choice 'log'"),
        ("embedding_options=3", "embedding_options must be a table of names and values: got 3"),
        ("schema=3", "schema must be a Schema, a path, or a table of column: kind: got int"),
    ),
)
def test_settings_that_cannot_be(tmp_path: Path, setting: str, said: str, capsys: Any) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows())
    common = ["train", "table", str(path), "--target", "y", "--out", str(tmp_path / "run")]
    assert main([*common, "--set", f"table.{setting}"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.trains
def test_figures_that_there_are_none_of_are_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, test = tmp_path / "t.csv", tmp_path / "test.csv"
    path.write_text(rows())
    test.write_text("age,job,y\n30,a,no\n35,b,no\n")
    train(path, "--test", test, "--json")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    told = capsys.readouterr().out, (tmp_path / "run/report.json").read_text()
    for text in told:
        assert json.loads(text, parse_constant=refuse)["results"][1]["auc"] is None


@pytest.mark.trains
def test_files_that_would_be_lost_are_kept(trained: Path, tmp_path: Path) -> None:
    where, path = trained.parent / "run", tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{i / 7},{i * 1.5}\n" for i in range(40)))
    with pytest.raises(AddnormError, match="-o must name another file than the one that is read"):
        run("predict", where, trained, "-o", trained)
    with pytest.raises(AddnormError, match=r"--out must name a directory for the run: .* a file"):
        train(path, "--out", path)
    train(path)
    with pytest.raises(AddnormError, match=r"--proba is for models of classes: this one tells"):
        run("predict", tmp_path / "run", path, "--proba")


@pytest.mark.trains
def test_the_page_has_its_pictures(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows(150))
    train(path, "--test", path)
    page = (tmp_path / "run/summary.html").read_text()
    for said in ("Held-out loss", "What was said, and how often it came true", ">test<"):
        assert said in page
    path.write_text("x,y\n" + "".join(f"{i},{i * 1.5}\n{i + 0.5},{i}\n" for i in range(40)))
    train(path)
    assert "What was said" not in (tmp_path / "run/summary.html").read_text()


class Screen(io.StringIO):
    """A terminal to write to."""

    def isatty(self) -> bool:
        return True


@pytest.mark.trains
@pytest.mark.parametrize("terminal", (True, False))
def test_a_bar_is_for_terminals(
    trained: Path, tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen() if terminal else io.StringIO()
    monkeypatch.setattr(tables, "PART", 7)
    monkeypatch.setattr("sys.stderr", screen)
    run("predict", trained.parent / "run", trained, "-o", tmp_path / "out.csv")
    shown = screen.getvalue()
    assert shown.endswith("60 rows predicted: " + str(tmp_path / "out.csv") + "\n")
    assert ("\x1b[" in shown) == terminal and ("0 rows" in shown)
    assert terminal or shown.count("\n") == 1


@pytest.mark.trains
@pytest.mark.parametrize("name", ("out.csv", "out.parquet"))
def test_predict_adds_columns(
    trained: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PART", 7)
    run("predict", trained.parent / "run", trained, "-o", tmp_path / name, "--proba")
    found = read_frame(tmp_path / name)
    assert found.names == ["age", "job", "y", "y (predicted)", "p(no)", "p(yes)"]
    assert len(found) == 60
    total = [
        float(a) + float(b)
        for a, b in zip(found.columns["p(no)"], found.columns["p(yes)"], strict=True)
    ]
    assert total == pytest.approx([1.0] * 60)
    with pytest.raises(
        AddnormError, match=r"has a column 'y \(predicted\)' already|which training"
    ):
        run("predict", trained.parent / "run", tmp_path / name, "-o", tmp_path / "again.csv")


@pytest.mark.trains
def test_predict_prints(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("predict", trained.parent / "run", trained)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "y (predicted)" and len(lines) == 61 and set(lines[1:]) <= {"yes", "no"}


@pytest.mark.trains
def test_explain(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = trained.parent / "run"
    run("explain", where, trained, "--out", tmp_path / "why.html")
    assert "agreement of ranks: permutation and gradient" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "why.html").read_text()
    run("explain", where, trained, "--row", 17)
    assert "row 17: the log-odds of yes is" in capsys.readouterr().out
    run("explain", where, trained, "--row", 17, "--out", tmp_path / "one.html")
    assert "row 17" in (tmp_path / "one.html").read_text()
    capsys.readouterr()
    run("explain", where, trained, "--row", 1, "--json")
    assert json.loads(capsys.readouterr().out)["columns"] == ["age", "job"]
    with pytest.raises(AddnormError, match="--row must be 1 to 60: got 61"):
        run("explain", where, trained, "--row", 61)


@pytest.mark.trains
def test_a_run_is_evaluated_on_other_rows(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are those of its predictions, row by row."""
    later = tmp_path / "later.csv"
    later.write_text(rows(40))
    assert main(["evaluate", str(trained.parent / "run"), str(later), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    run("predict", trained.parent / "run", later, "-o", tmp_path / "scored.csv")
    scored = read_frame(tmp_path / "scored.csv").columns
    right = [str(a) == str(b) for a, b in zip(scored["y"], scored["y (predicted)"], strict=True)]
    assert told["accuracy"] == pytest.approx(sum(right) / 40) and told["rows"] == 40
    assert set(told) == {"accuracy", "auc", "log_loss", "brier", "ece", "rows"}
    shutil.copytree(trained.parent / "run", tmp_path / "bare")
    (tmp_path / "bare" / "schema.toml").unlink()  # it is for people, and may be deleted
    assert main(["evaluate", str(tmp_path / "bare"), "--source", str(later)]) == 0
    assert f"{told['accuracy']:.1%}" in capsys.readouterr().out
    for more, said in (
        ((), "keeps no rows to be evaluated on: give a file"),
        ((str(later), "--int8"), "--int8 is for models of text, not for tables"),
        ((str(later), "--target", "y"), "--target is for models of text, not for tables"),
    ):
        assert main(["evaluate", str(trained.parent / "run"), *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.trains
def test_runs_of_tables_are_listed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.parent / "run", tmp_path / "runs" / "one")
    shutil.copytree(trained.parent / "run", tmp_path / "runs" / "two")
    (tmp_path / "runs" / "two" / "report.json").write_text("{")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{tmp_path / 'runs' / 'one'}  table      finished ")
    assert "accuracy " in said.out and len(said.out.splitlines()) == 1
    assert "left out: " in said.err and "report.json' is damaged" in said.err
    assert main(["runs", str(tmp_path / "runs"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["task"] == "table" and row["finished"] and row["best"]["accuracy"] <= 1


@pytest.mark.trains
def test_verbs_of_texts_say_what_a_table_is(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", str(trained.parent / "run")]) == 2
    assert "holds a model for tables. Try addnorm predict" in capsys.readouterr().err


@pytest.mark.trains
def test_schema_is_shown_edited_and_given_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text(rows())
    run("schema", path, "--target", "y", "-o", schema)
    assert Schema.parse(capsys.readouterr().out) == Schema.load(schema)
    Schema.load(schema).change({"job": "ignore"}).save(schema)
    train(path, "--schema", schema)
    assert "column 'job' is left out: as asked for" in capsys.readouterr().err
    schema.write_text("[[columns]]\nname = 'age'\nkind = 'number'\n")
    with pytest.raises(AddnormError, match="says nothing of column 'job'"):
        train(path, "--schema", schema)


@pytest.mark.trains
def test_a_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "run"
    path.write_text(rows())
    train(path)
    before = {entry.name: entry.read_bytes() for entry in out.iterdir()}
    assert main(["train", "table", str(path), "--target", "y", "--out", str(out)]) == 2
    assert f"{str(out)!r} holds a run already. Choose another --out" in capsys.readouterr().err
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == before


def test_misuse(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows())
    with pytest.raises(AddnormError, match="train table needs a file, --target COLUMN and --out"):
        run("train", path)
    with pytest.raises(AddnormError, match=r"table has no field 'widht'\. Did you mean 'width'"):
        train(path, "--set", "table.widht=3")
    with pytest.raises(AddnormError, match=r"must read table.NAME=VALUE: got 'model.width=3'"):
        train(path, "--set", "model.width=3")


@pytest.mark.parametrize("flag", ("--source", "--size", "--from", "--valid-target", "--dry-run"))
def test_flags_of_texts_are_refused(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows())
    value = [] if flag == "--dry-run" else ["tiny"]
    common = ["train", "table", str(path), "--target", "y", "--out", str(tmp_path / "run")]
    assert main([*common, flag, *value]) == 2
    assert f"{flag} is for models of text, not for tables" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    (
        ("age,job,y\n30,a,maybe\n", "a class that training had not: 'maybe'"),
        ("age,y\n30,no\n", "must have the columns of the training rows: it comes without 'job'"),
        ("age,job,z,y\n30,a,1,no\n", "with 'z', which training did not have"),
        ("age,job\n30,a\n", "has no column 'y'"),
    ),
)
def test_test_rows_are_refused_before_training(
    tmp_path: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: object) -> None:
        raise AssertionError("trained in vain")

    monkeypatch.setattr("addnorm.tabular.FTTransformerClassifier.fit", fit)
    path, test = tmp_path / "t.csv", tmp_path / "test.csv"
    path.write_text(rows())
    test.write_text(text)
    with pytest.raises(AddnormError, match=said):
        train(path, "--test", test)


def test_a_target_of_numbers_says_how_to_have_classes(tmp_path: Path) -> None:
    path, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text(rows())
    columns = "".join(f"[[columns]]\nname = '{n}'\nkind = 'number'\n" for n in ("age", "job"))
    schema.write_text(f"task = 'number'\n{columns}")
    with pytest.raises(AddnormError, match=r"must hold numbers: got '(yes|no)'.*'classes'"):
        train(path, "--schema", schema)
    schema.write_text(f"target = 'z'\n{columns}")
    with pytest.raises(AddnormError, match=r"has the target 'z', not 'y'\. Change it"):
        train(path, "--schema", schema)


# ── Forty broken tables: each trains, or gets one clear error ─────────────────────────────────────

GOOD = rows(40)
HEAD, BODY = GOOD.split("\n", 1)
LINES = BODY.strip().split("\n")
WIDE = ",".join(f"c{i}" for i in range(10_000))
BROKEN: dict[str, tuple[str | bytes, str | None]] = {
    "empty file": ("", "it is empty"),
    "spaces only": ("  \n \n", "it is empty"),
    "header only": ("age,job,y\n", "must have rows below its header"),
    "header without line end": ("age,job,y", "must have rows below its header"),
    "no target column": ("age,job,z\n1,a,no\n", "has no column 'y'"),
    "target in another case": (
        GOOD.replace("y\n", "Y\n", 1),
        "has no column 'y'. Known: Y, age",
    ),
    "one class": (GOOD.replace("yes", "no"), "the target has one class"),
    "target missing throughout": ("age,y\n1,\n2,\n", "must have values: it has none"),
    "target missing in some rows": (GOOD.replace("yes", "", 3), None),
    "duplicate names": ("age,age,y\n1,2,no\n", "a different name for each column"),
    "nameless column": (GOOD.replace("age,job", ",job", 1), None),
    "two nameless columns": ("," + GOOD.replace("\n", "\n1,").replace("age", "", 1)[:-2], None),
    "mixed types": (GOOD.replace("job", "job", 1).replace(",a,", ",7,"), None),
    "a text among numbers": (GOOD.replace("\n", "\nold,a,no\n", 1), None),
    "NUL bytes": (GOOD.encode().replace(b"a", b"\0", 5), "is not text"),
    "Latin-1": (GOOD.replace("a,", "é,").encode("latin-1"), "must be UTF-8 text"),
    "UTF-16": (GOOD.encode("utf-16"), "UTF-16 text"),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD.encode(), None),
    "semicolons": (GOOD.replace(",", ";"), None),
    "tabs": (GOOD.replace(",", "\t"), None),
    "bars": (GOOD.replace(",", "|"), None),
    "spaces after commas": (GOOD.replace(",", ", "), None),
    "colons": (GOOD.replace(",", ":"), "has no column 'y'"),
    "uneven rows": (GOOD + "1,2\n", "must have the same columns in every line"),
    "open quote": (GOOD + '1,"a,yes\n', "cannot be read"),
    "quoted line ends": (GOOD.replace(",a,", ',"a\nb",'), None),
    "Windows line ends": (GOOD.replace("\n", "\r\n"), None),
    "Macintosh line ends": (GOOD.replace("\n", "\r"), None),
    "blank lines": (GOOD.replace("\n", "\n\n"), None),
    "ten thousand columns": (
        f"{WIDE},y\n" + "".join(f"{','.join(['1'] * 10_000)},{'ab'[i % 2]}\n" for i in range(4)),
        "all are left out",
    ),
    "unicode headers": (GOOD.replace("age", "âge €").replace("job", "職業"), None),
    "header of spaces": (GOOD.replace("age", "  ", 1), None),
    "infinities": (GOOD.replace("\n", "\ninf,a,no\n-inf,b,yes\n", 1), None),
    "1e300": (GOOD.replace("\n", "\n1e300,a,no\n-1e300,b,yes\n", 1), None),
    "all missing column": (GOOD.replace(",a,", ",?,").replace(",b,", ",NA,"), None),
    "constant columns alone": ("a,y\n" + "1,no\n1,yes\n" * 9, "all are left out"),
    "target alone": ("y\n" + "no\nyes\n" * 9, "must have a column besides the target"),
    "identifiers alone": (
        "id,y\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(90)),
        "all are left out",
    ),
    "one row": (f"{HEAD}\n{LINES[0]}\n", "one class"),
    "two rows": (f"{HEAD}\n30,a,no\n50,b,yes\n", None),
    "as many classes as rows": (
        f"{HEAD}\n"
        + "".join(f"{30 + i % 5},a,label{i}\n{40 + i % 5},b,label{i}\n" for i in range(9)),
        None,
    ),
    "a copy of the target": (GOOD.replace("job", "copy").replace(",a,no", ",no,no"), None),
    "two equal columns": (GOOD.replace("age,", "age,age2,", 1).replace("\n4", "\n4,4"), "columns"),
    "half a gzip": (gzip.compress(GOOD.encode())[:60], "gzip data break off"),
    "zip archive": (b"PK\x03\x04" + GOOD.encode(), "a zip archive"),
}


@pytest.mark.trains
@pytest.mark.parametrize("name", BROKEN)
def test_broken_tables_train_or_get_one_clear_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, said = BROKEN[name]
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if said is None:
        train(path)
        assert (tmp_path / "run/model.safetensors").is_file() and capsys.readouterr().out
        return
    with pytest.raises(AddnormError) as caught:
        train(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_there_are_forty() -> None:
    assert len(BROKEN) >= 40
