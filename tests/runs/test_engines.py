"""Engines answer the verbs of a run as torch does, and are made once."""

import csv
import io
import json
import shutil
import sys
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
from addnorm.runs.engines import engine_for_translation, use_engine
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
    expected = run.translate(texts, beam=1, engine="torch")
    notes: list[str] = []
    use_engine(run, "ctranslate2", notes.append)
    assert "log-probabilities of tokens differ by up to" in notes[-1]
    assert notes[-1].endswith("(random sequences and 8 texts of the data).")
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
    again = Run.open(tmp_path / "run").translate(lines(20), beam=1, engine="torch")
    assert notes and changed.translate(lines(20), beam=1) == again


@pytest.fixture
def fresh(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the run for translation that has no engines."""
    shutil.copytree(runs["translate"], tmp_path / "run", ignore=shutil.ignore_patterns("engines"))
    return tmp_path / "run"


def stored(run: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((run / "engines/speed.json").read_text())["choices"]
    return rows


def prefer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make one engine the fastest, whatever the machine does."""
    measure = engines._time_engines

    def measured(*args: Any) -> Any:
        seconds, found = measure(*args)
        return {each: 1.0 + (each != name) for each in seconds}, found

    monkeypatch.setattr(engines, "_time_engines", measured)


@pytest.mark.trains
@pytest.mark.parametrize("name", ["torch", "ctranslate2"])
def test_the_fastest_engine_is_measured_once_and_said(
    name: str,
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "texts").write_text("".join(f"{line}\n" for line in lines(3)))
    words = ["translate", str(fresh), str(tmp_path / "texts"), "--beam", "1"]
    assert main([*words, "--engine", "torch"]) == 0
    expected = capsys.readouterr().out
    assert not (fresh / "engines").exists()
    prefer(monkeypatch, name)
    threads = torch.get_num_threads()
    assert main(words) == 0
    first = capsys.readouterr()
    assert f"engine: {name}, the fastest one here (speeds: torch 1.0, " in first.err
    assert first.out == expected
    assert [row["engine"] for row in stored(fresh)] == [name]
    assert stored(fresh)[0]["seconds"].keys() == {"torch", "ctranslate2"}
    monkeypatch.setattr(engines, "_time_engines", None)
    assert torch.get_num_threads() == threads  # loading CTranslate2 sets those of OpenMP
    assert main([*words, "--json"]) == 0
    again = capsys.readouterr()
    assert f"engine: {name}, the fastest one here, measured once" in again.err
    assert {json.loads(line)["engine"] for line in again.out.splitlines()} == {name}


@pytest.mark.trains
def test_a_pipe_a_stream_and_python_use_the_fastest_engine(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefer(monkeypatch, "ctranslate2")
    texts = lines(3)
    for words, rows in ((["--beam", "1"], 1), (["--beam", "1", "--stream"], 2), ([], 3)):
        content = "".join(f"{line}\n" for line in texts).encode()
        stdin = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["translate", str(fresh), *words]) == 0
        output = capsys.readouterr()
        assert "engine: ctranslate2, the fastest" in output.err and len(stored(fresh)) == rows
    monkeypatch.setattr(engines, "_time_engines", None)
    by_default = addnorm.open(fresh).translate([*texts, ""])
    assert by_default[:3] == output.out.splitlines()
    assert [answer.engine for answer in by_default[:3]] == ["ctranslate2"] * 3
    by_torch = Run.open(fresh).translate(texts, beam=1, engine="torch")
    assert {answer.engine for answer in by_torch} == {"torch"}
    by_name = Run.open(fresh).translate(texts, beam=1, engine="ctranslate2")
    for one, other in zip(by_name, by_torch, strict=True):
        assert (one, [piece for piece, _ in one.pieces]) == (other, [p for p, _ in other.pieces])
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert [v for _, v in one.pieces] == pytest.approx([v for _, v in other.pieces], abs=1e-4)


@pytest.mark.trains
def test_where_only_torch_can_be_used(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, notes = Run.open(fresh), []
    assert engine_for_translation(run, None, Decoding(penalty="gnmt"), notes.append) is None
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert engine_for_translation(run, None, Decoding(), notes.append) is None
    assert "gnmt" in notes[0] and "not installed: pip install 'addnorm[export]'" in notes[1]
    assert not (fresh / "engines").exists()


@pytest.mark.trains
def test_a_damaged_choice_counts_as_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "torch")
    (fresh / "engines").mkdir()
    for content in ("{", "[]", '{"choices": 3}', '{"choices": [{"engine": "tensorrt"}, 7]}'):
        (fresh / "engines/speed.json").write_text(content)
        assert engine_for_translation(Run.open(fresh), None, Decoding(), quiet) is None
        assert len(stored(fresh)) == 1
    # Choices of other weights are forgotten, one that cannot be stored is used all the same.
    changed = stored(fresh)
    changed[0]["conditions"]["weights"] = "other"
    (fresh / "engines/speed.json").write_text(json.dumps({"choices": changed}))
    engine_for_translation(Run.open(fresh), None, Decoding(), quiet)
    assert [row["conditions"]["weights"] for row in stored(fresh)] != ["other"]


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
    expected = run.translate(texts, beam=1, engine="torch")
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
    with pytest.raises(
        ConfigError, match=r"the engine none does not predict\. Try --engine torch\."
    ):
        NoEngine().predict({})
    words = ["classify", str(runs["classify"]), str(tmp_path / "none"), "--engine", "ctranslate2"]
    assert main(words) == 2 and "CTranslate2" in capsys.readouterr().err
