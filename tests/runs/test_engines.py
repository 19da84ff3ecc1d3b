"""Engines answer the verbs of a run as torch does, and are made once."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import addnorm
from addnorm.cli.main import main
from addnorm.errors import ConfigError, InputError
from addnorm.generate import Decoding
from addnorm.interop.engines import Engine
from addnorm.runs import engines
from addnorm.runs.engines import fastest_engine, use_engine
from addnorm.runs.run import Run
from tests.portable import training
from tests.runs.common import lines, quiet, request_for, train, write

pytestmark = pytest.mark.parity
pytest.importorskip("ctranslate2")
SMALL = {"train.steps": 1, "model.width": 16, "model.depth": 1, "model.heads": 2}


class NoEngine(Engine):
    name = "none"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each task, trained for a few steps."""
    training.note()
    folder = write(tmp_path_factory.mktemp("engines"))
    with torch.enable_grad():
        return {
            task: train(request_for(task, folder, steps=steps), folder / task).run.path
            for task, steps in (("translate", 60), ("language", 12), ("classify", 12))
        }


@pytest.mark.trains
def test_ctranslate2_translates_greedily_as_torch_does(runs: dict[str, Path]) -> None:
    run = Run.open(runs["translate"])
    texts = lines(200, seed=5)
    expected = run.translate(texts, beam=1)
    notes: list[str] = []
    use_engine(run, "ctranslate2", notes.append)
    assert "log-probabilities of tokens differ by up to" in notes[-1]
    assert run.translate(texts, beam=1) == expected
    assert run.trained.engine.name == "ctranslate2" and run.trained.engine.precision == "float32"
    # Made once: the second run reads what the first has written.
    again, notes = Run.open(runs["translate"]), []
    use_engine(again, "ctranslate2", notes.append)
    assert not notes and again.translate(["ba be", " "], beam=3)[1] == ""
    assert len(again.translate("ba be", beam=3, nbest=2)[0]) == 2
    with pytest.raises(ConfigError, match="no penalty gnmt"):
        again.translate("ba be", penalty="gnmt")
    use_engine(again, "torch", quiet)
    assert again.trained.engine is None and again.translate(texts[:9], beam=1) == expected[:9]


@pytest.mark.trains
def test_an_engine_is_made_again_for_other_weights(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["translate"], tmp_path / "run")
    run, notes = Run.open(tmp_path / "run"), []
    use_engine(run, "ctranslate2", notes.append)
    model = run.model
    with torch.no_grad():
        model.tokens.weight.mul_(-1.0)
    model.save(tmp_path / "run/best")
    changed, notes = Run.open(tmp_path / "run"), []
    use_engine(changed, "ctranslate2", notes.append)
    assert notes and changed.translate(lines(20), beam=1) == Run.open(tmp_path / "run").translate(
        lines(20), beam=1
    )


@pytest.mark.trains
def test_the_fastest_engine_is_measured_once_and_said(
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(runs["translate"], tmp_path / "run")
    shutil.rmtree(tmp_path / "run/engines", ignore_errors=True)
    (tmp_path / "texts").write_text("".join(f"{line}\n" for line in lines(30)))
    words = ["translate", str(tmp_path / "run"), str(tmp_path / "texts"), "--beam", "1"]
    assert main(words) == 0
    few = capsys.readouterr()
    assert "engine" not in few.err and not (tmp_path / "run/engines").exists()
    monkeypatch.setattr(engines, "AUTO_LINES", 30)
    assert main(words) == 0
    first = capsys.readouterr()
    assert "texts/s). Choose another with --engine." in first.err and first.out == few.out
    stored = json.loads((tmp_path / "run/engines/speed.json").read_text())
    assert stored["engine"] == min(stored["seconds"], key=stored["seconds"].get)
    # A stored choice is used as it is, for short files, too.
    stored["engine"] = "ctranslate2"
    (tmp_path / "run/engines/speed.json").write_text(json.dumps(stored))
    monkeypatch.setattr(engines, "AUTO_LINES", 10**9)
    assert main(words) == 0
    second = capsys.readouterr()
    assert "engine: ctranslate2, which was the fastest when it was measured" in second.err
    assert second.out == few.out
    assert main([*words, "--engine", "torch"]) == 0
    assert "engine" not in capsys.readouterr().err
    # A damaged file, or one of other weights, counts as none.
    (tmp_path / "run/engines/speed.json").write_text("{")
    run = Run.open(tmp_path / "run")
    assert fastest_engine(run, ["ba"], Decoding(), quiet) == "torch"


@pytest.mark.trains
def test_ctranslate2_generates_greedily_as_torch_does(runs: dict[str, Path]) -> None:
    run = Run.open(runs["language"])
    options: dict[str, Any] = {"tokens": 12, "temperature": 0}
    expected = run.generate("Ba be", **options)
    use_engine(run, "ctranslate2", quiet)
    assert run.generate("Ba be", **options) == expected
    assert len(run.generate("Ba be", tokens=12, temperature=0.9, top_k=5)) > 0
    with pytest.raises(InputError, match="does not go beyond the context of"):
        run.generate("Ba", tokens=10_000)


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("name", ["ctranslate2", "onnx"])
def test_200_prompts_are_continued_greedily_as_by_torch(runs: dict[str, Path], name: str) -> None:
    pytest.importorskip("onnxscript" if name == "onnx" else name)
    run, prompts = Run.open(runs["language"]), lines(200, seed=7)
    options: dict[str, Any] = {"tokens": 5, "temperature": 0}
    expected = [run.generate(prompt[:12], **options) for prompt in prompts]
    use_engine(run, name, quiet)
    assert [run.generate(prompt[:12], **options) for prompt in prompts] == expected


@pytest.mark.slow
@pytest.mark.trains
def test_onnx_answers_as_torch_does(runs: dict[str, Path]) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    texts = [*lines(20, seed=9), "ba"]
    run = Run.open(runs["classify"])
    expected = run.classify(texts)
    use_engine(run, "onnx", quiet)
    for one, other in zip(run.classify(texts), expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    run = Run.open(runs["language"])
    for options in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}):
        run.trained.engine = None
        expected = run.generate("Ba be", tokens=10, **options)
        use_engine(run, "onnx", quiet)
        assert run.generate("Ba be", tokens=10, **options) == expected
    run, texts = Run.open(runs["translate"]), lines(200, seed=9)
    expected = run.translate(texts, beam=1)
    use_engine(run, "onnx", quiet)
    found = run.translate(texts, beam=1)
    assert found == expected
    assert found[0].score == pytest.approx(expected[0].score, abs=1e-4)
    with pytest.raises(ConfigError, match="translates greedily: got beam=5"):
        run.translate("ba")


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("target", ["kind", "price"])
def test_onnx_predicts_tables_as_torch_does(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    rng = np.random.default_rng(0)
    rows = 1100  # more than one call of onnxruntime
    data = {
        "size": [f"{x:.2f}" if x > -1 else "" for x in rng.normal(size=rows)],
        "town": rng.choice(["Rome", "Oslo", "", "a, b"], rows).tolist(),
        "kind": rng.choice(["old", "new"], rows).tolist(),
        "price": rng.normal(size=rows).round(5).tolist(),
    }
    left_out = {"kind", "price"} - {target}
    used = {name: column for name, column in data.items() if name not in left_out}
    path = tmp_path / "run"
    run = addnorm.train("table", used, target=target, progress=False, out=path, set=SMALL)
    with (tmp_path / "rows.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["town", "size", "more"])
        writer.writerows([*zip(data["town"], data["size"], range(rows), strict=True)])
        writer.writerow(["Paris", "inf", 0])
    words = ["predict", str(path), str(tmp_path / "rows.csv")]
    words += ["--proba"] if target == "kind" else []
    assert main(words) == 0
    expected = [*csv.reader(capsys.readouterr().out.splitlines())]
    assert main([*words, "--engine", "onnx"]) == 0
    out, err = capsys.readouterr()
    assert "engine onnx: run in onnxruntime" in err
    found = [*csv.reader(out.splitlines())]
    assert found[0] == expected[0] and len(found) == len(expected) == rows + 2
    numbers = [[float(cell) for cell in row if "." in cell] for row in found[1:]]
    others = [[float(cell) for cell in row if "." in cell] for row in expected[1:]]
    np.testing.assert_allclose(numbers, others, rtol=0, atol=1e-4)
    # In Python the same, from what the first use has written.
    run = Run.open(path)
    by_torch = run.predict(used)
    use_engine(run, "onnx", pytest.fail)
    if target == "kind":
        assert (run.predict(used) == by_torch).mean() > 0.99
    else:
        np.testing.assert_allclose(run.predict(used), by_torch, rtol=0, atol=1e-4)


@pytest.mark.trains
def test_what_an_engine_cannot_do_is_refused(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = Run.open(runs["classify"])
    with pytest.raises(ConfigError, match="needs a model that predicts tokens"):
        use_engine(run, "ctranslate2", quiet)
    with pytest.raises(ConfigError, match=r"there is no engine 'tensorrt'\."):
        use_engine(run, "tensorrt", quiet)
    with pytest.raises(ConfigError, match="computes in float32"):
        use_engine(Run.open(runs["translate"], int8=True), "onnx", quiet)
    table = addnorm.train(
        "table", {"a": [*range(40)], "b": ["x", "y"] * 20}, target="b", progress=False, set=SMALL
    )
    with pytest.raises(ConfigError, match=r"this run is for table\. Try torch or onnx\."):
        use_engine(table, "ctranslate2", quiet)
    with pytest.raises(ConfigError, match="the engine none does not predict"):
        NoEngine().predict({})
    words = ["classify", str(runs["classify"]), str(tmp_path / "none"), "--engine", "ctranslate2"]
    assert main(words) == 2 and "CTranslate2" in capsys.readouterr().err
