"""Models for tables as ONNX with their preprocessing: the same predictions from raw columns."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import addnorm
from addnorm.cli.main import main
from addnorm.data.table.encode import NumberRule, scale
from addnorm.errors import ConfigError, InputError
from addnorm.interop.onnx_table import ScaleGraph, normal_quantile

RNG = np.random.default_rng(1)
COLUMNS: dict[str, Any] = {
    "size": np.where(RNG.random(120) < 0.1, np.nan, RNG.normal(size=120) ** 3),
    "rooms": RNG.integers(1, 5, 120).astype(float),
    "the town": RNG.choice(np.array(["Rome", "Oslo", "New York"], object), 120),
}
SMALL = {"train.steps": 3, "model.width": 16, "model.depth": 1, "model.heads": 2}


@pytest.mark.parametrize(
    ("kind", "knots"),
    (
        ("quantile", (-2.0, -1.0, -1.0, -1.0, 0.0, 3.0, 3.0)),
        ("robust", (0.5, 2.0)),
        ("standard", (0.5, 2.0)),
        ("standard", (0.5, 2.0, -0.7, 2.1)),
        ("none", ()),
    ),
)
@pytest.mark.parametrize("fill", [None, 0.25])
def test_scalings(kind: str, knots: tuple[float, ...], fill: float | None) -> None:
    rule = NumberRule(
        column="a", part=None, scaling=kind, knots=knots, low=-2.0, high=3.0, fill=fill
    )
    special = [-np.inf, -5.0, -2.0, -1.0, -0.5, 0.0, 2.9, 3.0, 9.0, np.inf, np.nan]
    values = np.array([*special, *RNG.normal(size=50)])
    found = ScaleGraph(rule)(torch.from_numpy(values)).numpy()
    np.testing.assert_allclose(found, scale(values, rule), rtol=1e-7, atol=1e-8)


def test_quantiles_of_the_normal_distribution() -> None:
    p = torch.cat((torch.logspace(-7, -0.31, 300), 1 - torch.logspace(-7, -0.31, 300))).double()
    torch.testing.assert_close(normal_quantile(p), torch.special.ndtri(p), rtol=2e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("target", ["class", "number"])
@pytest.mark.parametrize("used", [("size", "rooms", "the town"), ("size",), ("the town",)])
def test_predictions_from_raw_columns(target: str, used: tuple[str, ...], tmp_path: Path) -> None:
    library = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    noise = np.linspace(0, 0.5, 120)  # so that no two are equal: these are numbers, not classes
    values = (COLUMNS["rooms"] + (COLUMNS["the town"] == "Oslo") + noise).tolist()
    answers = ["no" if value < 3 else "yes" for value in values] if target == "class" else values
    rows = {name: COLUMNS[name] for name in used}
    run = addnorm.train("table", {**rows, "y": answers}, target="y", progress=False, set=SMALL)
    notes = run.export(tmp_path / "out", to="onnx")
    assert "preprocessing included" in notes[0] and "differ by up to" in notes[1]
    session = library.InferenceSession(str(tmp_path / "out/model.onnx"))
    assert [item.name for item in session.get_inputs()] == list(used)
    (found,) = session.run(None, rows)
    expected = run.predict_proba(rows) if target == "class" else run.predict(rows)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.trains
def test_dates_and_other_forms_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    days = [f"2024-0{1 + n % 9}-1{n % 7}" for n in range(60)]
    data = {"when": days, "y": ["a", "b"] * 30}
    run = addnorm.train("table", data, target="y", out=tmp_path / "run", progress=False, set=SMALL)
    with pytest.raises(ConfigError, match="dates are not written as ONNX: 'when' is one"):
        run.export(tmp_path / "out", to="onnx")
    with pytest.raises(InputError, match="trained for table is exported as onnx only: got torch"):
        run.export(tmp_path / "out", to="torch")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "onnx"]) == 2
    assert "dates are not written" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_instant_models_are_refused(tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    data = {"a": [*range(20)], "y": ["a", "b"] * 10}
    run = addnorm.train("table", data, target="y", progress=False, set={"table.model": "instant"})
    with pytest.raises(ConfigError, match="an instant model reads its training rows"):
        run.export(tmp_path / "out", to="onnx")
    assert not (tmp_path / "out").exists()
