"""The images task: reading, batches, loss, a resumed run and the verb."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import addnorm
from addnorm.cli.main import main
from addnorm.config import Config
from addnorm.errors import InputError
from addnorm.tasks.images import Images
from addnorm.training.loop import Loop

DISTORTIONS = ("shift", "rotation", "zoom")
SETTINGS = ["model.width=16", "model.depth=1", "model.heads=2", "train.steps=12", "train.batch=16"]


def make_images(count: int = 48) -> tuple[Any, Any]:
    """Return 8 × 8 images of one bright quarter; the quarter is the class."""
    generator = np.random.default_rng(0)
    labels = np.arange(count) % 4
    images = generator.integers(0, 60, (count, 8, 8)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 150
    return images, labels


@pytest.fixture
def data(tmp_path: Path) -> Path:
    images, labels = make_images()
    np.savez(tmp_path / "quarters.npz", images=images, labels=labels)
    return tmp_path / "quarters.npz"


def train(data: Path, out: Path, **options: Any) -> addnorm.Run:
    return addnorm.train("images", data, out=out, progress=False, set=SETTINGS, **options)


def bound(data: Path, *settings: str) -> Images:
    request = Config().override("run.task=images", f"data.source='{data}'", *settings)
    task = Images.read(request)
    config = Images.defaults(request, task.facts(), None)
    return task.bind(config.override(*settings))


def test_splits_and_batches_are_functions_of_the_seed(data: Path) -> None:
    task = bound(data, "train.batch=16")
    assert sorted(task.train_rows + task.held_rows) == list(range(48))
    assert {task.targets[row] for row in task.held_rows} == {0, 1, 2, 3}
    assert sorted(row for part in task.epoch(1) for row in part) == task.train_rows
    assert task.epoch(1) == task.epoch(1) != task.epoch(2)
    part = task.plan(0)[0]
    assert torch.equal(task.batch(part)["inputs"], task.batch(part)["inputs"])
    pixels = task.collate(task.train_rows)["inputs"]
    assert float(pixels.mean()) == pytest.approx(0, abs=1e-5)
    assert float(pixels.std()) == pytest.approx(1, rel=1e-2)


def test_training_images_are_distorted_and_held_out_ones_are_not(data: Path) -> None:
    task, plain = bound(data), bound(data, *(f"data.image_{n}=0" for n in DISTORTIONS))
    part = task.plan(0)[0]
    same = plain.collate(part[1])["inputs"]
    assert torch.equal(plain.batch(part)["inputs"], same)
    moved = task.batch(part)["inputs"]
    assert all(not torch.equal(a, b) for a, b in zip(moved, same, strict=True))
    assert not torch.equal(moved, task.batch((1, part[1]))["inputs"])
    assert torch.equal(task.collate(part[1])["inputs"], same)
    for name in DISTORTIONS:
        others = [f"data.image_{n}=0" for n in DISTORTIONS if n != name]
        assert not torch.equal(bound(data, *others).batch(part)["inputs"], same)


@torch.no_grad()
def test_loss_and_accuracy_equal_a_loop(data: Path) -> None:
    task = bound(data, *SETTINGS, "train.label_smoothing=0.0")
    model = task.make_model(None, print).eval()
    total, right = 0.0, 0
    for row in task.held_rows:
        logits = model(task.collate([row])["inputs"])[0]
        total -= float(logits.log_softmax(dim=0)[task.targets[row]])
        right += int(logits.argmax()) == task.targets[row]
    count = len(task.held_rows)
    assert task.evaluate(model) == pytest.approx({"loss": total / count, "accuracy": right / count})
    batch = task.collate(task.held_rows)
    assert float(task.loss(model, batch, count)) == pytest.approx(total / count)


@pytest.mark.trains
def test_a_run_is_trained_opened_evaluated_and_used(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(data, tmp_path / "run")
    assert run.summary["finished"] and run.record.labels == ["0", "1", "2", "3"]
    opened = addnorm.open(tmp_path / "run")
    assert opened.evaluate()["accuracy"] == pytest.approx(run.summary["best"]["accuracy"])
    images, _ = make_images(3)
    rows = opened.classify(images)
    assert len(rows) == 3 and all(sum(row.values()) == pytest.approx(1) for row in rows)
    assert opened.evaluate(data)["images"] == 48
    assert main(["classify", str(tmp_path / "run"), str(data)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 48 and lines[0].split("\t")[0] in "0123"
    with pytest.raises(InputError, match=r"trained on images of shape \(1, 8, 8\)"):
        opened.classify(np.zeros((1, 9, 9)))


class PowerCut(Exception):
    pass


@pytest.mark.trains
def test_a_resumed_run_equals_an_unbroken_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(data, tmp_path / "whole")
    step = Loop._step

    def cut(loop: Loop, parts: list[Any]) -> None:
        if loop.state.step == 7:
            raise PowerCut
        step(loop, parts)

    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(Loop, "_step", cut)
        train(data, tmp_path / "cut")
    addnorm.train(resume=tmp_path / "cut", progress=False)
    ours, theirs = (load_file(tmp_path / n / "best/model.safetensors") for n in ("whole", "cut"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
