"""addnorm train table --model instant: a run without training."""

import json
from pathlib import Path

import pytest

import addnorm
from addnorm.errors import ConfigError
from addnorm.models.instant import write_instant
from addnorm.models.instant_table import InstantPredictor
from addnorm.runs.run import Run
from addnorm.tabular import instant, load_estimator
from addnorm.tabular.instant_training import InstantSettings, make_model
from tests.cli.tables import rows, run


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table, and a small network with random weights in place of the package's."""
    model = make_model(InstantSettings(width=8, depth=2))
    write_instant(model, model.state_dict(), tmp_path / "w.safetensors")
    monkeypatch.setattr(instant, "PACKAGE_WEIGHTS", tmp_path / "w.safetensors")
    path = tmp_path / "t.csv"
    path.write_text(rows())
    return path


def test_it_is_evaluated_and_saved(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = table.parent / "run"
    run("train", "table", table, "--target", "y", "--model", "instant", "--out", out, "--compare")
    assert "it needs no training." in capsys.readouterr().err
    found = [(row["model"], row["on"]) for row in Run.open(out).summary["results"]]
    assert found == [
        ("InstantClassifier", "held-out rows"),
        ("InstantClassifier", "rows set aside"),
        ("HistGradientBoosting", "rows set aside"),
        *((name, on) for name, on in found[3:] if name not in ("Instant", "InstantClassifier")),
    ]
    assert type(load_estimator(out / "best")).__name__ == "InstantClassifier"
    run("predict", out, table, "--json")
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first


def test_it_says_that_it_leaves_columns_out(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *lines = table.read_text().splitlines()
    more = ",".join(f"c{i}" for i in range(70))
    wide = [
        f"{line},{','.join(str((i + 3) * k * k % 101) for i in range(70))}"
        for k, line in enumerate(lines)
    ]
    path, out = table.parent / "wide.csv", table.parent / "run"
    path.write_text("\n".join([f"{header},{more}", *wide]))
    words = ("train", "table", path, "--target", "y", "--model", "instant", "--out", out)
    run(*words)
    err = capsys.readouterr().err
    assert "columns are used, the most informative ones" in err


def test_a_file_of_weights_can_be_given(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, out = table.parent / "w.safetensors", table.parent / "run"
    monkeypatch.setattr(instant, "PACKAGE_WEIGHTS", Path("nowhere"))
    words = ("train", "table", table, "--target", "y", "--model", "instant", "--out", out)
    with pytest.raises(ConfigError, match="no weights for instant models"):
        run(*words)
    run(*words, "--set", f"table.weights={weights}")
    assert type(load_estimator(out / "best")).__name__ == "InstantClassifier"


def test_numbers_come_with_intervals(
    table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = table.parent / "run"
    monkeypatch.setattr(instant, "own_trust", lambda model: 0.3)  # fitted in a run, too
    run("train", "table", table, "--target", "age", "--model", "instant", "--out", out)
    capsys.readouterr()
    run("predict", out, table, "--json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 60
    assert all(line["age (5 %)"] < line["age (95 %)"] for line in lines)
    model = load_estimator(out / "best").model_
    assert isinstance(model, InstantPredictor) and float(model.trust) == pytest.approx(0.3)


@pytest.mark.slow
def test_the_front_door(table: Path) -> None:
    trained = addnorm.train("table", table, target="y", model="instant", progress=False)
    answers = trained.predict(table)
    assert len(answers) == 60 and set(answers) <= {"yes", "no"}
    assert trained.explain(table).columns


def test_sizes_and_unlabelled_rows_are_refused(table: Path) -> None:
    out = table.parent / "run"
    words = ("train", "table", table, "--target", "y", "--model", "instant", "--out", out)
    with pytest.raises(ConfigError, match="sizes cannot be changed"):
        run(*words, "--set", "model.width=16")
    with pytest.raises(ConfigError, match="trained already"):
        run(*words, "--unlabelled", table)


@pytest.mark.trains
def test_others_are_compared_with_it(table: Path) -> None:
    out = table.parent / "run"
    sizes = ("train.epochs=1", "model.width=8", "model.depth=1", "model.heads=1")
    settings = [part for setting in sizes for part in ("--set", setting)]
    run("train", "table", table, "--target", "y", "--out", out, "--compare", *settings)
    assert "Instant" in [row["model"] for row in Run.open(out).summary["results"]]
