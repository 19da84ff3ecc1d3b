"""The images task: reading, batches, loss, a resumed run and the verbs."""

import json
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
from addnorm.tasks.image_classifier import mean_image, normalise_images, reduce_mean
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


@pytest.mark.slow
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


@pytest.mark.trains
def test_an_image_is_explained(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    run = train(data, tmp_path / "run")
    messages: list[str] = []
    one = run.explain(data, 3, say=messages.append)
    assert messages == [] and one.title == "image 3 of quarters.npz"
    assert one.notes == ["Its label is 2."] and one.baseline == "the mean of the training images"
    probabilities = run.classify(data)[2]
    assert probabilities[one.outputs[0]] == pytest.approx(one.probabilities[0], abs=1e-5)
    run.explain(data, say=messages.append)
    assert messages == ["image 1 of 48 is explained; choose another with row (--row N)."]
    with pytest.raises(InputError, match="row must be 1 to 48: got 49"):
        run.explain(data, 49)
    Image.fromarray(make_images(3)[0][2]).save(tmp_path / "one.png")
    page = tmp_path / "why.html"
    capsys.readouterr()
    files = [str(tmp_path / "one.png"), "--report", str(page), "--json"]
    assert main(["explain", str(run.path), *files]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["outputs"][0]["output"] == one.outputs[0] and printed["patches"]["rows"] == 2
    assert "data:image/png" in page.read_text()
    assert main(["explain", str(run.path), str(tmp_path / "none.png")]) == 2
    assert "none.png" in capsys.readouterr().err


def test_the_mean_image_is_stored_small(data: Path, tmp_path: Path) -> None:
    task = bound(data)
    task.save_assets(tmp_path)
    assets = Images.load_assets(tmp_path)
    mean, name = mean_image(assets, task.config.model)
    inputs = task.collate(task.train_rows)["inputs"]
    assert name == "the mean of the training images"
    assert torch.allclose(mean, inputs.mean(dim=0, keepdim=True), atol=1e-3)
    # A large image is reduced by blocks; a run of an older version has its mean colour.
    reduced = np.array(reduce_mean(np.arange(2 * 64 * 64.0).reshape(2, 1, 64, 64)))
    assert reduced.shape == (1, 32, 32) and reduced[0, 0, 0] == (0 + 1 + 64 + 65) / 4 + 2048
    old, name = mean_image({**assets, "mean_image": None}, task.config.model)
    assert not old.any() and name == "an image of the mean colour"


def test_a_model_of_colours_reads_grey_images(data: Path, tmp_path: Path) -> None:
    task = bound(data)
    pixels = task.images[:3]
    assets = {"mean": [10.0, 20.0, 30.0], "scale": [1.0, 2.0, 4.0]}
    model = task.config.model.replace(channels=3)
    coloured = normalise_images(pixels.repeat(3, axis=1), assets, model)
    assert torch.equal(normalise_images(pixels, assets, model), coloured)
