"""addnorm train table, and forty tables that are broken on purpose."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from addnorm.cli.main import main
from addnorm.config import Config
from addnorm.data.table.frame import read_frame
from addnorm.data.table.schema import Schema
from addnorm.errors import AddnormError
from addnorm.runs.resolve import StepTimes
from addnorm.runs.run import Run
from addnorm.tabular import load_estimator
from addnorm.tabular.holdout import hold_out
from addnorm.tabular.pretrain import METHODS, pretrain
from tests.cli.tables import QUICK, rows, run, train
from tests.conftest import slow_except
from tests.runs.common import Trained

pytest.importorskip("sklearn")


@pytest.mark.trains
def test_train_prints_and_writes_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, test = tmp_path / "t.csv", tmp_path / "test.csv"
    path.write_text(rows())
    test.write_text(rows(30, unseen="z").replace("yes", "yes.").replace("no\n", "no.\n"))
    train(path, "--test", test, "--compare")
    shown = capsys.readouterr()
    assert "accuracy" in shown.out and "HistGradientBoosting" in shown.out
    assert "labels such as 'no.' are read as 'no'" in shown.err
    assert "job: 30 values are unknown or were rare in training" in shown.err
    names = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert names == {
        *("best", "checkpoints", "columns.json", "config.toml", "metrics.jsonl", "run.json"),
        *("schema.toml", "summary.html", "summary.json"),
    }
    names = {entry.name for entry in (tmp_path / "run/best").iterdir()}
    assert names == {"model.safetensors", "schema.toml", "report.json"}
    report = json.loads((tmp_path / "run/best/report.json").read_text())
    assert report["results"] == Run.open(tmp_path / "run").summary["results"]
    optional = {"LightGBM", "XGBoost", "CatBoost"}  # compared with if they are installed
    models = [row["model"] for row in report["results"] if row["model"] not in optional]
    assert models[1:5] == [
        *("FTTransformerClassifier", "HistGradientBoosting", "random forest"),
        "logistic regression",
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
    assert "20 rows are set aside for the comparison" in shown.err
    report = json.loads(shown.out)
    assert report["rows"] + report["held_out"] == 80
    assert {row["on"] for row in report["results"][1:]} == {"rows set aside"}
    assert sum(count for *_, count in report["reliability"]["test"]) == 20
    path.write_text("age,y\n1,a\n2,b\n")
    with pytest.raises(AddnormError, match=r"enough rows to set some aside for --compare: got 2"):
        train(path, "--compare")


@pytest.mark.trains
def test_unlabelled_rows_are_used_for_pretraining(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, more = tmp_path / "t.csv", tmp_path / "more.csv"
    path.write_text(rows())
    more.write_text(rows(90, unseen="c").replace(",yes", ",").replace(",no", ","))
    train(path, "--unlabelled", more)
    assert "pre-training (masked) on 150 rows, those of both files" in capsys.readouterr().err
    kept = load_estimator(tmp_path / "run/best").encoder_
    assert kept.categories[0].values == ("a", "b", "c") and kept.schema.target == "y"
    more.write_text("age,jobs\n3,a\n")
    with pytest.raises(AddnormError, match="it lacks 'job' and has 'jobs'"):
        train(path, "--unlabelled", more)


@pytest.mark.trains
@pytest.mark.parametrize("method", slow_except(("masked",), METHODS))
def test_the_method_of_pretraining_is_chosen(
    tmp_path: Path,
    method: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods = []

    def remember(*arguments: Any, **more: Any) -> Any:
        methods.append(arguments[4])
        return pretrain(*arguments, **more)

    monkeypatch.setattr("addnorm.tabular.base.pretrain", remember)
    path = tmp_path / "t.csv"
    path.write_text(rows())
    train(path, "--unlabelled", path, "--pretrain", method)
    assert methods == [method]
    assert f"pre-training ({method}) on 120 rows" in capsys.readouterr().err
    with pytest.raises(AddnormError, match=f"pretrain={method} needs rows without targets"):
        train(path, "--pretrain", method)


def test_choices_of_pretrain_and_split() -> None:
    for method in METHODS:
        assert Config().override(f"table.pretrain={method}").table.pretrain == method
    for split in ("random", "time"):
        assert Config().override(f"table.split={split}").table.split == split
        hold_out(40, 0.2, order=split)
    for name in ("pretrain", "split"):
        with pytest.raises(AddnormError, match=f"table.{name} must be one of"):
            Config().override(f"table.{name}=other")


def patients(count: int = 60, *, lost: int = 0) -> str:
    """Return five rows per patient; the first `lost` rows have no patient."""
    head, *lines = rows(count).strip().split("\n")
    named = [f"{'' if i < lost else f'p{i // 5}'},{line}" for i, line in enumerate(lines)]
    return "\n".join([f"patient,{head}", *named]) + "\n"


@pytest.mark.trains
def test_groups_are_held_out_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(patients())
    train(path, "--groups", "patient", "--compare", "--json")
    shown = capsys.readouterr()
    assert "10 rows (2 of 12 groups) are set aside for the comparison" in shown.err
    assert "2 of 10 groups are held out." in shown.err
    assert "column 'patient' is left out: used only to keep rows of a group together." in shown.err
    report = json.loads(shown.out)
    assert (report["rows"], report["held_out"]) == (40, 10)
    assert load_estimator(tmp_path / "run/best").encoder_.names == ["age", "job"]
    (tmp_path / "new.csv").write_text(rows(7))
    run("predict", tmp_path / "run", tmp_path / "new.csv")
    run("predict", tmp_path / "run", path)
    assert len(capsys.readouterr().out.splitlines()) == 8 + 61


@pytest.mark.trains
def test_a_schema_decides_if_groups_are_an_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text(patients())
    run("schema", path, "--target", "y", "-o", schema)
    Schema.load(schema).change({"patient": "category"}).save(schema)
    train(path, "--groups", "patient", "--schema", schema)
    assert "column 'patient' is also used as an input, as" in capsys.readouterr().err
    assert "patient" in load_estimator(tmp_path / "run/best").encoder_.names
    run("schema", path, "--target", "y", "-o", schema)
    left = [column for column in Schema.load(schema).columns if column.name != "patient"]
    Schema(columns=tuple(left)).save(schema)
    train(path, "--groups", "patient", "--schema", schema)
    assert "patient" not in load_estimator(tmp_path / "run/best").encoder_.names


@pytest.mark.parametrize(
    ("flags", "message"),
    (
        (("--groups", "patient", "--split", "time"), "by groups or by time, not by both"),
        (("--groups", "patient", "--set", "table.split=time"), "by groups or by time, not by both"),
        (("--groups", "pateint"), "has no column 'pateint'. Did you mean 'patient'?"),
        (("--groups", "y"), "--groups must name another column than the target 'y'."),
        (("--groups", "patient"), "every row must have a group: 3 have none. Leave the row out"),
    ),
)
def test_invalid_groups_are_refused(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(patients(lost=3))
    with pytest.raises(AddnormError) as caught:
        train(path, *flags, "--unlabelled", path)
    assert message in str(caught.value)


@pytest.mark.trains
def test_the_last_rows_can_be_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows().replace(",a,", ",z,", 100) + "30,late,no\n40,late,yes\n" * 10)
    train(path, "--split", "time")
    assert load_estimator(tmp_path / "run/best").encoder_.categories[0].values == ("b", "late", "z")
    train(path, "--split", "time", "--compare")
    assert load_estimator(tmp_path / "run/best").encoder_.categories[0].values == ("b", "z")
    assert "16 rows are set aside for the comparison" in capsys.readouterr().err


@pytest.mark.trains
def test_a_table_in_a_spreadsheet_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Semicolons, decimal commas, euros, percent, postcodes, dashes, \\r\\n, a byte order mark."""
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
    assert "column 'Preis' is read as numbers like 1.234,5 €." in shown.err
    assert shown.err.count("separated by semicolons") == 1 and "determines" not in shown.err
    assert "column 'Fläche': numbers are read in the form 1.234,5." in shown.err
    assert "16 values are not numeric ('-'); treated as missing" in shown.err
    kept = load_estimator(tmp_path / "run/best")
    assert kept.encoder_.schema.kinds() == {
        "PLZ": "category",
        "Fläche": "number",
        "Anteil": "number",
        "Baujahr": "number",
    }
    assert 1000 < kept.predict(read_frame(path).without("Preis")).mean() < 4000
    run("schema", path, "--target", "Preis", "-o", tmp_path / "s.toml")
    capsys.readouterr()
    train(path, "--schema", tmp_path / "s.toml", "--test", path, target="Preis")
    assert "numbers like 1.234,5 €" in capsys.readouterr().err


@pytest.mark.trains
def test_a_note_if_a_number_column_has_few_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text(rows())
    run("schema", path, "--target", "y", "-o", schema)
    Schema.load(schema).change({"job": "number"}).save(schema)
    capsys.readouterr()
    train(path, "--schema", schema)
    output = capsys.readouterr().err
    assert "column 'job': 48 of 48 values are not numeric" in output and "Warning" not in output


@pytest.mark.parametrize(
    ("setting", "message"),
    (
        ("train.batch=2.5", "train.batch must be a whole number, or left out: got 2.5"),
        ("model.width=wide", "model.width must be a whole number: got 'wide'"),
        ("data.valid_fraction=x", "data.valid_fraction must be a number, or left out: got 'x'"),
        ("table.scaling=log", "table.scaling must be one of"),
        ("table.embedding_options=3", "table.embedding_options must be"),
        ("table.schema=3", "table.schema must be"),
    ),
)
def test_invalid_settings_are_refused(
    tmp_path: Path, setting: str, message: str, capsys: Any
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows())
    common = ["train", "table", str(path), "--target", "y", "--out", str(tmp_path / "run")]
    assert main([*common, "--set", setting]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.trains
def test_undefined_metrics_are_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, test = tmp_path / "t.csv", tmp_path / "test.csv"
    path.write_text(rows())
    test.write_text("age,job,y\n30,a,no\n35,b,no\n")
    train(path, "--test", test, "--json")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    outputs = capsys.readouterr().out, (tmp_path / "run/best/report.json").read_text()
    for text in outputs:
        assert json.loads(text, parse_constant=refuse)["results"][1]["auc"] is None


@pytest.mark.trains
def test_the_page_has_its_charts(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows(150))
    train(path, "--test", path)
    page = (tmp_path / "run/summary.html").read_text()
    report = Run.open(tmp_path / "run").summary
    for heading in (
        *("Loss of training batches, and of held-out data.", "Predicted probability and frequency"),
        *(">test<", "FTTransformerClassifier · held-out rows", "target = &quot;y&quot;"),
        *(f"{report['parameters']:,} parameters", f"{report['held_out']} rows were held out"),
    ):
        assert heading in page
    path.write_text("x,y\n" + "".join(f"{i},{i * 1.5}\n{i + 0.5},{i}\n" for i in range(40)))
    train(path)
    assert "Predicted probability" not in (tmp_path / "run/summary.html").read_text()


@pytest.mark.trains
def test_schema_is_shown_edited_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text(rows())
    run("schema", path, "--target", "y", "-o", schema)
    assert Schema.parse(capsys.readouterr().out) == Schema.load(schema)
    Schema.load(schema).change({"job": "ignore"}).save(schema)
    train(path, "--schema", schema)
    assert "column 'job' is left out: as requested" in capsys.readouterr().err
    schema.write_text("[[columns]]\nname = 'age'\nkind = 'number'\n")
    with pytest.raises(AddnormError, match="has no entry for column 'job'"):
        train(path, "--schema", schema)


@pytest.mark.trains
def test_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "run"
    path.write_text(rows())
    train(path)
    before = {entry: entry.read_bytes() for entry in out.rglob("*") if entry.is_file()}
    assert main(["train", "table", str(path), "--target", "y", "--out", str(out)]) == 2
    assert f"{str(out)!r} already has a run. Choose another --out" in capsys.readouterr().err
    after = {entry: entry.read_bytes() for entry in out.rglob("*") if entry.is_file()}
    assert after == before


def test_misuse(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows())
    with pytest.raises(AddnormError, match="--out must name a directory for the run"):
        run("train", "table", path, "--target", "y")
    with pytest.raises(AddnormError, match=r"table\.target must name the column to predict"):
        run("train", "table", path, "--out", tmp_path / "run")
    with pytest.raises(AddnormError, match=r"data\.source must name a table to train on"):
        run("train", "table", "--target", "y", "--out", tmp_path / "run")
    with pytest.raises(AddnormError, match=r"table has no field 'impte'\. Did you mean 'impute'"):
        train(path, "--set", "table.impte=mean")
    with pytest.raises(AddnormError, match=r"model has no field 'widht'\. Did you mean 'width'"):
        train(path, "--set", "model.widht=3")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flag", ("--size", "--valid-target", "--valid-source", "--text", "--label")
)
def test_a_table_has_no_text_options(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows())
    common = ["train", "table", str(path), "--target", "y", "--out", str(tmp_path / "run")]
    assert main([*common, flag, "tiny"]) == 2
    assert f"train table has no option {flag!r}. " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("age,job,y\n30,a,maybe\n", "a class that training did not have: 'maybe'"),
        ("age,y\n30,no\n", "must have the columns of the training rows: it lacks 'job'"),
        ("age,job\n30,a\n", "has no column 'y'"),
    ),
)
def test_test_rows_are_refused_before_training(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: object) -> None:
        raise AssertionError("trained in vain")

    monkeypatch.setattr("addnorm.training.loop.Loop.run", fit)
    path, test = tmp_path / "t.csv", tmp_path / "test.csv"
    path.write_text(rows())
    test.write_text(text)
    with pytest.raises(AddnormError, match=message):
        train(path, "--test", test)


def test_the_error_for_a_numeric_target_suggests_classes(tmp_path: Path) -> None:
    path, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text(rows())
    columns = "".join(f"[[columns]]\nname = '{n}'\nkind = 'number'\n" for n in ("age", "job"))
    schema.write_text(f"task = 'number'\n{columns}")
    with pytest.raises(AddnormError, match=r"must hold numbers: got '(yes|no)'.*'classes'"):
        train(path, "--schema", schema)
    schema.write_text(f"target = 'z'\n{columns}")
    with pytest.raises(AddnormError, match=r"has the target 'z', not 'y'\. Change it"):
        train(path, "--schema", schema)


def begin(folder: Path, name: str, *more: object) -> list[str]:
    """Return the command that trains on a small table, into a directory of that name."""
    path = folder / "t.csv"
    path.write_text(rows())
    settings = [part for setting in QUICK for part in ("--set", setting)]
    words = ["train", "table", path, "--target", "y", "--out", folder / name, *settings, *more]
    return [str(word) for word in words]


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "best/model.safetensors")


def equal(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.trains
def test_a_dry_run_of_a_table_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(begin(tmp_path, "run", "--dry-run")) == 0
    output = capsys.readouterr().out
    config = Config.parse(output)
    assert config.run.task == "table" and config.table.target == "y" and config.train.steps == 2
    assert config.train.batch == 32 and config.model.width == 8
    assert (
        " parameters; " in output
        and " s per step, " in output
        and "# expected duration: " in output
    )
    assert main(begin(tmp_path, "run", "--dry-run", "--json", "--minutes", "0.5")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert Config.parse(facts.pop("config")).run.minutes == 0.5
    assert facts["parameters"] > 0 and facts["step_flops"] > 0 and facts["step_seconds"] > 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.csv"]


@pytest.mark.trains
def test_the_time_bounds_the_steps_of_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("addnorm.runs.train.measure_steps", lambda *_: StepTimes(10.0, 0.0))
    assert main(begin(tmp_path, "run", "--minutes", "1", "--set", "train.epochs=50")) == 0
    assert Run.open(tmp_path / "run").config.train.steps == int(0.95 * 60 / 10)
    monkeypatch.undo()
    assert main(begin(tmp_path, "plain")) == 0
    assert main(begin(tmp_path, "timed", "--minutes", "100")) == 0
    assert Run.open(tmp_path / "timed").summary["steps"] == 2 and "measuring the speed" in (
        capsys.readouterr().err
    )
    assert equal(tmp_path / "plain", tmp_path / "timed")


@pytest.mark.trains
def test_a_table_starts_from_the_weights_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(begin(tmp_path, "first")) == 0
    path = tmp_path / "t.csv"
    path.write_text(rows(80, unseen="c"))
    words = ["train", "table", path, "--target", "y", "--from", tmp_path / "first"]
    words += ["--set", "train.steps=1", "--set", "train.lr=1e-12", "--out", tmp_path / "run"]
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "first")
    message = f"loaded {len(theirs)} of {len(ours)} tensors from the starting model."
    assert message in capsys.readouterr().err
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-9)
    kept = load_estimator(tmp_path / "run/best").encoder_
    assert kept.categories[0].values == ("a", "b"), "the columns are encoded as they were"
    assert Run.open(tmp_path / "run").config.model.width == 8


@pytest.mark.trains
def test_a_text_task_cannot_start_from_a_table_or_vice_versa(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(begin(tmp_path, "run", "--from", trained["masked"])) == 2
    assert "was trained for masked" in capsys.readouterr().err.splitlines()[-1]
    texts = ["train", "classify", str(trained.data / "labelled.csv"), "--out", str(tmp_path / "c")]
    assert main([*texts, "--from", str(trained["table"])]) == 2
    assert "was trained for table" in capsys.readouterr().err.splitlines()[-1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.csv"]


@pytest.mark.slow
@pytest.mark.trains
def test_the_clinic_does_not_change_the_training_of_a_table(tmp_path: Path) -> None:
    more = ("--set", "train.epochs=6", "--set", "model.dropout=0.1")
    assert main(begin(tmp_path, "plain", *more)) == 0
    assert main(begin(tmp_path, "examined", "--clinic", *more)) == 0
    assert equal(tmp_path / "plain", tmp_path / "examined")
    signals = (tmp_path / "examined/clinic.jsonl").read_text().splitlines()
    assert signals and all(json.loads(line) for line in signals)


@pytest.mark.trains
def test_device_and_precision_are_those_of_all_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = ("--set", "run.device=cpu", "--set", "run.precision=float32")
    assert main(begin(tmp_path, "plain")) == main(begin(tmp_path, "same", *same)) == 0
    assert equal(tmp_path / "plain", tmp_path / "same")
    monkeypatch.setattr("addnorm.runs.train.is_slow", lambda device, dtype: False)
    monkeypatch.setattr("addnorm.cpu.is_slow", lambda device, dtype: False)
    assert main(begin(tmp_path, "narrow", "--set", "run.precision=bfloat16")) == 0
    assert not equal(tmp_path / "plain", tmp_path / "narrow")
    monkeypatch.setattr("addnorm.runs.train.is_slow", lambda device, dtype: True)
    assert main(begin(tmp_path, "slow", "--set", "run.precision=bfloat16")) == 2
    assert "run.precision=bfloat16 is many times slower" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(begin(tmp_path, "cuda", "--set", "run.device=cuda")) == 2
    assert "run.device=cuda needs a GPU" in capsys.readouterr().err
    assert not (tmp_path / "slow").exists() and not (tmp_path / "cuda").exists()


@pytest.mark.trains
@pytest.mark.parametrize("more", ((), ("--split", "time"), ("--groups", "job"), ("--compare",)))
def test_resuming_a_finished_table_changes_nothing(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "run"
    path.write_text(rows().replace(",a,", ",z,", 9))
    train(path, *more)
    before = {entry: entry.read_bytes() for entry in out.rglob("*") if entry.is_file()}
    capsys.readouterr()
    assert main(["train", "--resume", str(out)]) == 0
    assert "it is already finished." in capsys.readouterr().err
    assert before == {entry: entry.read_bytes() for entry in out.rglob("*") if entry.is_file()}
    path.write_text(rows().replace("18,", "19,").replace("yes", "no", 1))
    assert main(["train", "--resume", str(out)]) == 2
    assert "changed since the run started. Restore the files" in capsys.readouterr().err


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
    "uneven rows": (GOOD + "1,2\n", "must have the same number of columns in every row"),
    "open quote": (GOOD + '1,"a,yes\n', "cannot be read"),
    "quoted line ends": (GOOD.replace(",a,", ',"a\nb",'), None),
    "Windows line ends": (GOOD.replace("\n", "\r\n"), None),
    "Macintosh line ends": (GOOD.replace("\n", "\r"), None),
    "blank lines": (GOOD.replace("\n", "\n\n"), None),
    "ten thousand columns": (
        f"{WIDE},y\n" + "".join(f"{','.join(['1'] * 10_000)},{'ab'[i % 2]}\n" for i in range(4)),
        "all are ignored",
    ),
    "unicode headers": (GOOD.replace("age", "âge €").replace("job", "職業"), None),
    "header of spaces": (GOOD.replace("age", "  ", 1), None),
    "infinities": (GOOD.replace("\n", "\ninf,a,no\n-inf,b,yes\n", 1), None),
    "1e300": (GOOD.replace("\n", "\n1e300,a,no\n-1e300,b,yes\n", 1), None),
    "all missing column": (GOOD.replace(",a,", ",?,").replace(",b,", ",NA,"), None),
    "constant columns alone": ("a,y\n" + "1,no\n1,yes\n" * 9, "all are ignored"),
    "target alone": ("y\n" + "no\nyes\n" * 9, "must have a column besides the target"),
    "identifiers alone": (
        "id,y\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(90)),
        "all are ignored",
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
    "half a gzip": (gzip.compress(GOOD.encode())[:60], "gzip data is truncated"),
    "zip archive": (b"PK\x03\x04" + GOOD.encode(), "a zip archive"),
}


READ_BY_FAST_TESTS = ("bars", "unicode headers", "quoted line ends")
"""Unusual tables that fast tests train on; the others are read in slow tests."""
REFUSED = [name for name, (_, message) in BROKEN.items() if message is not None]


@pytest.mark.trains
@pytest.mark.parametrize("name", slow_except([*READ_BY_FAST_TESTS, *REFUSED], BROKEN))
def test_broken_tables_train_or_get_one_clear_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if message is None:
        train(path)
        assert (tmp_path / "run/best/model.safetensors").is_file() and capsys.readouterr().out
        return
    with pytest.raises(AddnormError) as caught:
        train(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_there_are_forty_broken_tables() -> None:
    assert len(BROKEN) >= 40
