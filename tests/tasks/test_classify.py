"""Text classification: one forward pass per evaluation, calibration, token dropout."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from addnorm.cli.main import main
from addnorm.config import Config
from addnorm.data.text.masking import drop_tokens
from addnorm.data.text.special_tokens import FIRST, MASK
from addnorm.errors import ConfigError, SavedError
from addnorm.metrics import classification_metrics
from addnorm.runs.request import RunRequest
from addnorm.runs.resolve import resolve
from addnorm.runs.run import Run
from addnorm.tasks.base import BEST
from addnorm.tasks.baseline import BASELINE
from addnorm.tasks.classify import Classify, class_logits
from addnorm.training.calibration import CALIBRATION_FILE, probabilities_of
from addnorm.training.loss import contrast_loss
from tests.portable import training
from tests.runs.common import label, lines, quiet, request_for, train, write
from tests.tasks.test_tasks import read


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with enough held-out texts to be calibrated."""
    training.note()
    folder = write(tmp_path_factory.mktemp("classes"), count=300)
    with torch.enable_grad():
        return train(
            request_for("classify", folder, steps=30, evaluate_every=10), folder / "run"
        ).run


def test_an_evaluation_is_one_forward_pass(data: Path) -> None:
    task, _ = read("classify", data)
    model, rows = task.make_model(None, quiet).eval(), []
    model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    metrics = task.evaluate(model)
    assert sum(rows) == len(task.valid[0])  # type: ignore[attr-defined]
    assert set(metrics) == {"loss", "accuracy", "f1", "ece"}


def test_an_evaluation_reads_at_most_max_held_out_tokens(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, config = read("classify", data)
    assert isinstance(task, Classify)
    monkeypatch.setattr(Classify, "max_held_out", 60)
    logits, targets = task.bind(config).held_out_logits(task.make_model(None, quiet).eval())
    assert 1 <= len(logits) < len(task.valid[0])
    assert targets.tolist() == task.valid_targets[: len(logits)]


@torch.no_grad()
def test_contrast_is_added_in_training_and_groups_the_vectors_of_a_label(data: Path) -> None:
    task, config = read("classify", data)
    model = task.make_model(None, quiet).eval()
    batch = task.batch(task.plan(0)[0])
    plain = float(task.total_loss(model, batch, 1, 0.0))
    changed = config.replace(train=config.train.replace(contrast=0.5))
    task = task.bind(changed)
    vectors = model.head.vector(model.hidden(batch["inputs"]), batch["inputs"] != 0)
    added = 0.5 * float(contrast_loss(vectors, batch["targets"]))
    found = float(task.total_loss(model, batch, 1, 0.0))
    assert added > 0 and found == pytest.approx(plain + added, rel=1e-5)
    assert task.evaluate(model) == read("classify", data)[0].bind(config).evaluate(model)


def test_tokens_are_counted_without_padding(data: Path) -> None:
    for name in ("classify", "translate", "masked", "language"):
        task, _ = read(name, data)
        (epoch, part), *_ = task.plan(0)
        batch = task.batch((epoch, part))
        sides = [batch[key] for key in ("inputs", "source", "target_in") if key in batch]
        assert task.tokens_read(batch) == sum(int((side != 0).sum()) for side in sides)
        assert task.tokens_read(task.batch((0, []))) == 0
    texts, _ = read("classify", data)
    batch = texts.batch(texts.plan(0)[0])
    assert texts.tokens_read(batch) > 5 * texts.tokens(batch)


@pytest.mark.trains
def test_probabilities_are_calibrated_on_the_held_out_texts(run: Run, tmp_path: Path) -> None:
    summary, trained = run.summary, run.trained
    temperature = summary["temperature"]
    assert temperature == trained.temperature != 1.0  # type: ignore[attr-defined]
    before, after, baseline = summary["results"]
    assert [row["on"] for row in (before, after)] == ["as trained", "calibrated"]
    assert baseline["model"] == BASELINE and baseline["accuracy"] > 0.5
    assert after["log_loss"] <= before["log_loss"] and after["accuracy"] == before["accuracy"]
    assert {"brier", "ece"} <= before.keys() & after.keys()
    texts = lines(30, seed=5)
    ids = run.tokenizer.encode_many(texts)
    wanted = probabilities_of(class_logits(run.model, ids), temperature)
    names = run.labels
    for row, probabilities in zip(run.classify(texts), wanted.tolist(), strict=True):
        assert row == pytest.approx(dict(zip(names, probabilities, strict=True)))
    table = tmp_path / "test.csv"
    table.write_text("text,label\n" + "".join(f"{t},{label(t)}\n" for t in texts))
    metrics = run.evaluate(str(table))
    targets = [names.index(label(text)) for text in texts]
    assert metrics["log_loss"] == pytest.approx(
        classification_metrics(wanted.numpy(), targets)["log_loss"]
    )
    held = run.evaluate()
    assert held["loss"] == pytest.approx(after["log_loss"])
    assert held["ece"] == pytest.approx(after["ece"])


@pytest.mark.trains
def test_a_calibration_of_other_weights_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    file = copy / BEST / CALIBRATION_FILE
    text = file.read_text()
    file.write_text(text.replace('"temperature": ', '"temperature": 1'))
    assert main(["classify", str(copy), str(run.path / "config.toml")]) == 2
    assert str(file) in capsys.readouterr().err
    file.write_text(text)
    weights = copy / BEST / "model.safetensors"
    first = weights.read_bytes()
    weights.write_bytes(first + b" ")
    with pytest.raises(SavedError):
        Run.open(copy).classify("ba")
    weights.write_bytes(first)
    file.unlink()
    assert Run.open(copy).trained.temperature == 1.0  # type: ignore[attr-defined]


@pytest.mark.trains
def test_new_best_weights_remove_the_calibration(tmp_path: Path, data: Path) -> None:
    task, _ = read("classify", data)
    model = task.make_model(None, quiet)
    task.save_model(model, model.state_dict(), tmp_path)
    (tmp_path / CALIBRATION_FILE).write_text("old")
    task.save_model(model, model.state_dict(), tmp_path)
    assert not (tmp_path / CALIBRATION_FILE).exists()


@pytest.mark.trains
def test_the_summary_is_printed_with_the_baseline(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [f"model.{name}={value}" for name, value in
             {"width": 16, "depth": 1, "heads": 2, "ffn_width": 32}.items()]  # fmt: skip
    flags = [word for setting in [*small, "train.steps=2"] for word in ("--set", setting)]
    table, out = str(data / "labelled.csv"), str(tmp_path / "run")
    assert main(["train", "classify", table, "--out", out, *flags]) == 0
    output = capsys.readouterr()
    assert "Transformer · as trained" in output.out and "Transformer · calibrated" in output.out
    assert f"{BASELINE} · held-out" in output.out and "brier" in output.out
    assert "TF-IDF + logistic regression is ahead on the held-out texts: " in output.err
    assert "is ahead on the held-out texts" in (tmp_path / "run" / "summary.html").read_text()


def test_token_dropout_hides_tokens_of_training_texts_alone(data: Path) -> None:
    task, _ = read("classify", data, "data.token_dropout=0.4")
    plain, _ = read("classify", data, "data.token_dropout=0")
    part = list(range(40))
    one, other = (task.collate(part, epoch=epoch)["inputs"] for epoch in (0, 1))
    clean = plain.collate(part, epoch=0)["inputs"]
    hidden = one == MASK
    share = float(hidden.sum() / (clean >= FIRST).sum())
    assert 0.3 < share < 0.5 and torch.equal(one[~hidden], clean[~hidden])
    assert not torch.equal(one, other) and torch.equal(one, task.collate(part, epoch=0)["inputs"])
    # What is hidden depends on the text, not on its batch.
    row = task.collate([7], epoch=0)["inputs"][0]
    assert one[7, : len(row)].tolist() == row.tolist()
    held = [each.collate(range(5), epoch=None)["inputs"] for each in (task, plain)]
    assert torch.equal(*held)


def test_few_texts_are_trained_on_with_a_small_model(data: Path, tmp_path: Path) -> None:
    request = RunRequest(
        {"data": {"source": str(data / "labelled.csv")}, "run": {"task": "classify"}}
    )
    facts = Classify.read(request.over(Config())).facts()
    config = resolve(request, facts)
    assert (config.model.depth, config.data.token_dropout) == (1, 0.15)
    assert (config.train.label_smoothing, config.train.average_checkpoints) == (0.1, 3)
    assert resolve(request, replace(facts, size=500_000)).model.depth == 2
    sized = RunRequest(request.table, ("run.size=tiny", "data.token_dropout=0"))
    assert resolve(sized, facts).model.depth == 2
    assert resolve(sized, facts).data.token_dropout == 0


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_special_tokens_are_not_dropped(rate: float) -> None:
    row = [1, 2, 3, *range(FIRST, 200)]
    dropped = drop_tokens(row, rate, seed=1234567)
    assert dropped[:3] == row[:3] and len(dropped) == len(row)
    assert (MASK in dropped) == (rate > 0)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_an_impossible_token_dropout_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="token_dropout must be at least 0 and below 1: got"):
        Config().data.replace(token_dropout=rate)


def test_the_baseline_of_a_run_in_minutes_is_fitted_before_training(data: Path) -> None:
    task, config = read("classify", data)
    assert isinstance(task, Classify)
    prepared = task.prepare(config, quiet)
    assert task.baseline is None and prepared.baseline is not None
    assert prepared.baseline[0]["model"] == BASELINE
    assert prepared.bind(config).baseline is prepared.baseline


def test_the_page_of_a_run_in_minutes_has_a_deadline(data: Path) -> None:
    task, _ = read("classify", data)
    now = time.perf_counter()
    assert task.until(now - 1.0).page_seconds == 0.0 < task.page_seconds
    assert 0.0 < task.until(now + 1.0).page_seconds <= 0.5


@pytest.mark.trains
def test_texts_that_are_too_long_are_said(run: Run) -> None:
    trained, notes = run.trained, list[str]()
    rows = list(trained.iter_labels(["ba", "ba " * 400, "", "be " * 500], say=notes.append))
    assert [len(row) for row in rows] == [2, 2, 0, 2]
    assert notes == ["2 texts had more than 254 tokens: the rest of each was not read."]


@pytest.mark.trains
def test_a_column_with_the_name_of_a_label_is_not_the_text(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "few.tsv"
    path.write_text("text\tlabel\nba\tpositive\n\tnegative\n")
    notes: list[str] = []
    assert list(run.trained.iter_file_texts(str(path), notes.append)) == ["ba", ""]
    assert notes == ["the texts are those of 'text'."]
