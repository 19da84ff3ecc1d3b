"""The verbs clinic and race, as the command line calls them."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from addnorm import Config, ModelConfig
from addnorm.cli import clinic as verbs
from addnorm.cli.main import main
from addnorm.clinic.subject import SUBJECT_ROWS
from addnorm.data.table.frame import read_frame
from addnorm.data.table.infer import infer
from addnorm.errors import ConfigError, InputError, SavedError
from addnorm.files import FAILED_STEP, read_document
from addnorm.runs.clinic_subject import subject_from_request
from addnorm.tabular import FTTransformerClassifier, save_estimator
from tests.clinic import models
from tests.conftest import slow_except
from tests.runs.common import TASKS

SMALL = ("model.width=32", "model.depth=2", "model.heads=4", "model.vocab=64")


def call(verb: str, *arguments: str) -> None:
    parser = argparse.ArgumentParser()
    getattr(verbs, f"{verb}_flags")(parser)
    getattr(verbs, verb)(parser.parse_args(arguments))


def small(*arguments: str) -> tuple[str, ...]:
    return (*arguments, *(part for setting in SMALL for part in ("--set", setting)))


@pytest.mark.slow
@pytest.mark.trains
def test_a_preset_is_examined(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "clinic.html"
    call("clinic", *small("gpt2", "--quick", "--report", str(page), "--lr", "1e-3"))
    output = capsys.readouterr()
    assert "no findings" in output.out and "rehearsal       planned: will train" in output.out
    assert "the batch was drawn at random: 8 × 32 tokens of 64." in output.err
    assert "the rehearsal of the plan takes 64 steps, about " in output.err
    assert page.is_file()


def test_clinic_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    call("clinic", *small("gpt2", "--quick", "--json"))
    assert json.loads(capsys.readouterr().out)["findings"] == []


@pytest.mark.slow
def test_a_hugging_face_directory_is_examined(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model: Any = models.gpt2()[0]
    model.save_pretrained(tmp_path / "theirs")
    call("clinic", str(tmp_path / "theirs"), "--quick")
    assert "GPT2LMHeadModel" in capsys.readouterr().out
    (tmp_path / "theirs" / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["Nothing"]}'
    )
    with pytest.raises(SavedError, match="is not a model of transformers"):
        call("clinic", str(tmp_path / "theirs"))


def test_fail_on_sets_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    sound = small("clinic", "gpt2", "--quick", "--fail-on", "warning")
    assert main(list(sound)) == 0
    assert "needs about" in capsys.readouterr().err
    bare = small("clinic", "gpt2", "--quick", "--set", "model.addnorm=none")
    assert main([*bare, "--fail-on", "problem"]) == verbs.FOUND_CODE == 3
    assert main(list(bare)) == 0
    assert "no residual connections" in capsys.readouterr().out


@pytest.mark.slow
def test_a_directory_of_a_speech_model_is_examined(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 16, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ends = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.WhisperConfig(
        **sizes, **heads, **ends, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20,
        max_target_positions=32, decoder_start_token_id=2, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path / "theirs")
    assert main(["clinic", str(tmp_path / "theirs"), "--quick", "--fail-on", "warning"]) == 0
    output = capsys.readouterr()
    assert "4 × 8 × 40 numbers as sound" in output.err and "arrangement     pre" in output.out
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(InputError, match="WhisperForConditionalGeneration reads input_features"):
        call("clinic", str(tmp_path / "theirs"), "--data", str(tmp_path / "a.txt"))


def fitted_table(folder: Path) -> Path:
    """Fit and save a model for a small table; return the file of the table."""
    path = folder / "rows.csv"
    lines = [f"{i % 7},{'ab'[i % 2]},{'yes' if i % 3 else 'no'}" for i in range(130)]
    path.write_text("\n".join(["age,town,answer", *lines]) + "\n")
    frame = read_frame(path)
    schema = infer(frame, "answer")
    model = FTTransformerClassifier(
        width=8, depth=1, heads=2, epochs=1, schema=schema, random_state=0
    )
    save_estimator(model.fit(frame.without("answer"), frame.columns["answer"]), folder / "run")
    return path


@pytest.mark.slow
@pytest.mark.trains
def test_a_table_is_examined(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows, run = fitted_table(tmp_path), str(tmp_path / "run")
    call("clinic", run, "--quick")
    output = capsys.readouterr()
    assert "drawn at random: 64 rows of 1 numbers and 1 categories." in output.err
    assert "FTTransformerModel" in output.out and "distance from noise" in output.out
    call("clinic", run, "--quick", "--data", str(rows), "--lr", "1e-3")
    output = capsys.readouterr()
    assert f"the batches are the first rows of {rows}, 64 each." in output.err
    assert "(the loss of the table's targets)" in output.out and "planned: " in output.out
    with pytest.raises(ConfigError, match="--data takes one file for a table: got 2"):
        call("clinic", run, "--data", str(rows), str(rows))
    with pytest.raises(InputError, match="no column 'answer'"):
        other = tmp_path / "other.csv"
        other.write_text("age,town\n1,a\n")
        call("clinic", run, "--data", str(other))


@pytest.mark.slow
@pytest.mark.trains
def test_a_table_that_does_not_know_its_target_is_examined_without_rows(tmp_path: Path) -> None:
    model = FTTransformerClassifier(width=8, depth=1, heads=2, epochs=1, random_state=0)
    save_estimator(model.fit([[float(i)] for i in range(40)], [0, 1] * 20), tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"saved without the name of its target\. Leave out --data"
    ):
        call("clinic", str(tmp_path / "run"), "--data", "rows.csv")


def test_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replay needs the folder of a case"):
        call("clinic", "replay")
    with pytest.raises(SavedError, match="there is no case in"):
        call("clinic", "replay", str(tmp_path))
    with pytest.raises(ConfigError, match="clinic takes one target: got 'base' and 'gpt2'"):
        call("clinic", "base", "gpt2")
    with pytest.raises(ConfigError, match=r"--try trains, so it needs .* Try --data text.txt"):
        call("clinic", "base", "--try")
    with pytest.raises(
        ConfigError, match=r"--warmup 9 needs a learning rate. Try adding --lr 1e-3"
    ):
        call("clinic", "base", "--warmup", "9")
    with pytest.raises(ConfigError, match="--data takes one file, or two for translation: got 3"):
        call("clinic", "base", "--data", "a", "b", "c")
    with pytest.raises(ConfigError, match="an encoder with head=none has no text task"):
        call("clinic", "bert", "--set", "model.head=none", "--data", "a")
    with pytest.raises(SavedError, match=r"there is no file 'nothing.txt'"):
        call("clinic", "gpt2", "--data", "nothing.txt")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    words = ["cat", "dog", "sat", "ran", "the", "on"]
    lines = [" ".join(words[int(i)] for i in torch.randint(6, (8,))) for _ in range(200)]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
[run]
task = "language"
device = "cpu"
[data]
source = "{tmp_path / "text.txt"}"
tokenizer = "characters"
max_length = 32
[model]
width = 16
depth = 1
heads = 2
dropout = 0.0
[train]
steps = 6
batch = 256
evaluate_every = 3
lr = 0.01
warmup = 2
"""
    )
    return path


@pytest.mark.slow
@pytest.mark.trains
def test_a_race_is_run_and_shown(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "race"
    call("race", str(run_file), "--vary", "model.addnorm=post,pre", "--out", str(out), "--jobs=1")
    output = capsys.readouterr()
    assert "addnorm=pre" in output.out and "2 of 2: addnorm=pre" in output.err
    assert (out / "race.html").is_file()


@pytest.mark.trains
def test_a_configuration_is_examined_with_its_own_text(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call("clinic", str(run_file), "--quick")
    output = capsys.readouterr()
    assert "the batches are the first " in output.err and "text.txt." in output.err
    assert "cross-entropy of the task's targets" in output.out
    assert "schedule        peak 0.01, warm-up over 2 steps" in output.out


def test_the_loss_is_that_of_the_task(run_file: Path) -> None:
    from addnorm.runs.request import RunRequest
    from addnorm.runs.train import plan_run

    subject = subject_from_request(RunRequest.load(run_file))
    planned = plan_run(RunRequest.load(run_file), say=lambda text: None)
    batch = planned.task.batch(planned.task.plan(0)[0])
    few = {name: tensor[:SUBJECT_ROWS] for name, tensor in batch.items()}
    assert subject.loss is not None
    with torch.no_grad():
        loss = subject.loss(subject.model, subject.batches[0])
        expected = planned.task.total_loss(planned.model, few, planned.task.tokens(few), 0.0)
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert len(subject.batches) > 1 and subject.plan is not None and subject.plan.lr == 0.01


@pytest.mark.slow
@pytest.mark.trains
def test_a_preset_is_examined_with_text(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, few = str(run_file.parent / "text.txt"), ("--set", "data.tokenizer=characters")
    sizes = [*few, *(part for setting in SMALL[:3] for part in ("--set", setting))]
    call("clinic", "gpt2", "--set", "model.length=32", "--data", text, "--quick", *sizes)
    output = capsys.readouterr()
    assert f"of {text}." in output.err and "cross-entropy of the task's targets" in output.out
    call("clinic", "base", "--data", text, text, "--quick", *sizes)
    assert "memory" in capsys.readouterr().out


@pytest.mark.trains
@pytest.mark.slow
def test_remedies_are_tried(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "remedies"
    call("clinic", str(run_file), "--try", "--out", str(out), "--steps", "6", "--jobs", "1")
    output = capsys.readouterr().out
    assert "unchanged" in output and "recovered: " in output
    assert (out / "race.html").is_file()


# ── During training ───────────────────────────────────────────────────────────────────────────────


def watched(task: str, data: Path, out: Path, *settings: str) -> int:
    files = {
        "translate": ["--source", str(data / "a.source"), "--target", str(data / "a.target")],
        "language": [str(data / "book.txt"), "--set", "model.length=32"],
        "masked": [str(data / "texts.txt")],
        "classify": [str(data / "labelled.csv"), "--text", "text", "--label", "label"],
    }
    small = ("width=16", "depth=1", "heads=2", "ffn_width=32")
    assignments = [f"model.{field}" for field in small] + ["data.tokenizer=characters", *settings]
    flags = [part for setting in assignments for part in ("--set", setting)]
    return main(["train", task, *files[task], "--out", str(out), "--clinic", *flags])


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("task", slow_except(("translate",), TASKS))
def test_the_clinic_monitors_a_run(task: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    calm = (
        "train.steps=100",
        "train.evaluate_every=100",
        "train.batch=128",
        "train.schedule=constant",
    )
    assert watched(task, data, out, *calm) == 0
    rows = [json.loads(line) for line in (out / "clinic.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 30, 100]
    for row in rows:
        assert row["dependency"] > 0 and 0 < row["entropy"] <= 1
        assert 0 < row["update"] < 1 and row["blocks"]


@pytest.mark.trains
def test_a_run_that_breaks_leaves_a_case_that_the_command_line_replays(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert watched("language", data, out, "train.lr=1e30", "train.steps=40") == 1
    output = capsys.readouterr().err
    folder = sorted((out / "cases").iterdir())[0]
    assert f"addnorm clinic replay {folder}" in output
    first = read_document(folder / "case.json", *FAILED_STEP)["report"]["first_non_finite"]
    assert first is not None
    assert main(["clinic", "replay", str(folder)]) == 0
    assert f"first result that is not finite: {first}" in capsys.readouterr().out


def test_replaying_a_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from addnorm import build
    from addnorm.files import FAILED_STEP_BATCH, FAILED_STEP_MODEL
    from addnorm.models.saved import write_tensors

    config = ModelConfig(mode="decoder", vocab=19, width=16, depth=1, heads=2)
    folder = tmp_path / "cases" / "step-00000001"
    folder.mkdir(parents=True)
    (tmp_path / "config.toml").write_text(Config(model=config).dump())
    write_tensors(
        folder / "weights.safetensors", build(config).state_dict(), *FAILED_STEP_MODEL, {}
    )
    ids = torch.randint(19, (2, 6))
    batch = {"inputs": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    write_tensors(folder / "batch-0.safetensors", batch, *FAILED_STEP_BATCH, {})
    call("clinic", "replay", str(folder))
    assert "first result that is not finite: none in the forward pass" in capsys.readouterr().out
    call("clinic", "replay", str(folder), "--json")
    assert json.loads(capsys.readouterr().out)["report"]["first_non_finite"] is None
