"""Training on tables: batches, losses, metrics, dropped cells, and the final weights."""

import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.data.table.encode import MISSING, OTHER, EncodedTable
from addnorm.models.tabular import TabularConfig, TabularModel, build_tabular, trunk_of
from addnorm.tabular import FTTransformerClassifier, FTTransformerRegressor, SAINTClassifier
from addnorm.tabular.fitting import (
    FitSettings,
    Lesson,
    Rows,
    TableTraining,
    drop_cells,
    fit_network,
    likeliest_class,
    losses,
    predict_outputs,
    soft_losses,
    swap_cells,
)
from addnorm.training.calibration import fit_temperature
from tests.tabular.data import QUICK, people

TRUNK: dict[str, Any] = {
    **{"width": 16, "depth": 1, "heads": 2, "ffn_width": 8},
    **{"dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0},
}


def network(outputs: int = 1, members: int = 1, kind: str = "ft") -> TabularModel:
    torch.manual_seed(2)
    config = TabularConfig(
        kind=kind,
        numbers=2,
        categories=(5,),
        outputs=outputs,
        members=members,
        trunk=trunk_of(kind, **TRUNK),
    )
    return build_tabular(config).eval()


def draw(rows: int, classes: int, *, weighted: bool = False) -> Rows:
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randn(rows, 2, generator=generator)
    codes = torch.randint(5, (rows, 1), generator=generator)
    score = numbers[:, 0] + codes[:, 0] / 4
    target = (score * 1.5).round().long().clamp(0, classes - 1) if classes else score
    weight = torch.rand(rows, generator=generator) * 3 if weighted else torch.ones(rows)
    return Rows(EncodedTable(numbers, codes), target, weight)


def make_settings(**changes: Any) -> FitSettings:
    return FitSettings(**{"batch": 8, "epochs": 1, "rate": 1e-2, **changes})


def test_each_epoch_has_every_row_once_in_a_new_order() -> None:
    task = TableTraining(draw(30, 2), None, make_settings(seed=4), 2)
    orders = []
    for epoch in range(3):
        parts = task.plan(epoch)
        assert [len(part) for part in parts] == [8, 8, 8, 6]
        orders.append(torch.cat(list(parts)).tolist())
        assert sorted(orders[-1]) == list(range(30))
        assert orders[-1] == torch.cat(list(task.plan(epoch))).tolist()
    other = TableTraining(draw(30, 2), None, make_settings(seed=5), 2)
    orders.append(torch.cat(list(other.plan(0))).tolist())
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("classes", (2, 3))
def test_soft_targets_of_one_class_are_that_class(classes: int) -> None:
    outputs = torch.randn(12, 4, 1 if classes == 2 else classes)
    target = torch.arange(12) % classes
    soft = torch.nn.functional.one_hot(target, classes).float()
    torch.testing.assert_close(soft_losses(outputs, soft), losses(outputs, target, classes))


def test_second_rows_follow_the_rows_of_a_batch() -> None:
    rows = draw(30, 2)
    soft, second_soft = torch.rand(30, 2), torch.rand(30, 2)
    lesson = Lesson(soft, draw(31, 2).table.take(torch.arange(30)), second_soft)
    taught = Rows(rows.table, rows.target, rows.weight, lesson=lesson)
    part = torch.tensor([4, 7, 9])
    batch = TableTraining(taught, None, make_settings(), 2).batch(part)
    assert torch.equal(batch["numbers"][:3], rows.table.numbers[part])
    assert torch.equal(batch["numbers"][3:], lesson.second.numbers[part])
    assert torch.equal(batch["soft"], torch.cat((soft[part], second_soft[part])))
    assert batch["weight"].shape == batch["target"].shape == (6,)


@torch.no_grad()
def test_the_held_out_loss_of_classes_is_that_of_calibrated_probabilities() -> None:
    rows, model = draw(400, 2, weighted=True), network()
    outputs = predict_outputs(model, rows.table, 64)
    temperature = fit_temperature(outputs[:, 0], rows.target, rows.weight)
    assert abs(temperature - 1) > 0.1
    each = losses(outputs / temperature, rows.target, 2) * rows.weight
    found = TableTraining(rows, rows, make_settings(), 2).evaluate(model)["loss"]
    assert found == pytest.approx(float(each.sum() / rows.weight.sum()), abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("classes", (0, 2, 3))
def test_the_loss_of_a_batch_is_the_weighted_mean_of_its_rows(classes: int) -> None:
    rows = draw(12, classes, weighted=True)
    model = network(3 if classes == 3 else 1, members=2)
    task = TableTraining(rows, None, make_settings(), classes)
    batch = task.batch(torch.arange(3, 9))
    assert task.tokens(batch) == 6
    outputs = model(rows.table.numbers, rows.table.codes)
    total = 0.0
    for row in range(3, 9):
        for member in range(2):
            y, t = outputs[row, member], rows.target[row]
            if classes == 3:
                loss = -float(y.log_softmax(0)[t])
            elif classes:
                loss = -math.log(float(torch.sigmoid(y[0] if t else -y[0])))
            else:
                loss = float((y[0] - t) ** 2)
            total += float(rows.weight[row]) * loss / 2
    assert float(task.loss(model, batch, 6)) == pytest.approx(total / 6, rel=1e-4)
    assert float(task.loss(model, batch, 24)) == pytest.approx(total / 24, rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("classes", (0, 2, 3))
def test_held_out_metrics_are_weighted_and_of_the_mean_of_the_members(classes: int) -> None:
    rows = draw(19, classes, weighted=True)  # too few for a temperature
    model = network(3 if classes == 3 else 1, members=3)
    result = TableTraining(rows, rows, make_settings(), classes).evaluate(model)
    outputs = model(rows.table.numbers, rows.table.codes).mean(dim=1)
    loss = correct = total = 0.0
    for y, t, w in zip(outputs, rows.target, rows.weight.tolist(), strict=True):
        total += w
        if classes:
            probabilities = (
                y.softmax(0) if classes == 3 else torch.sigmoid(torch.stack((-y[0], y[0])))
            )
            loss -= w * math.log(float(probabilities[t]))
            correct += w * (int(probabilities.argmax()) == int(t))
        else:
            loss += w * float(y[0] - t) ** 2
    assert result["loss"] == pytest.approx(loss / total, rel=1e-4)
    assert ("accuracy" in result) is bool(classes)
    if classes:
        assert result["accuracy"] == pytest.approx(correct / total, rel=1e-5)


def test_accuracy_may_decide_which_weights_are_best() -> None:
    task = TableTraining(draw(9, 2), None, make_settings(metric="accuracy"), 2)
    assert task.metric == "accuracy" and task.higher_is_better
    numbers = TableTraining(draw(9, 0), None, make_settings(metric="accuracy"), 0)
    assert numbers.metric == "loss" and not numbers.higher_is_better


def test_likeliest_class() -> None:
    assert likeliest_class(torch.tensor([[-0.1], [0.1], [7.0]])).tolist() == [0, 1, 1]
    assert likeliest_class(torch.tensor([[3.0, 1.0, 2.0], [0.0, -1.0, 5.0]])).tolist() == [0, 2]


def test_cells_are_dropped_independently_and_others_unchanged() -> None:
    torch.manual_seed(0)
    rows = draw(3000, 2).table
    numbers, codes = drop_cells(rows, 0.4)
    dropped = numbers.isnan()
    assert torch.equal(numbers[~dropped], rows.numbers[~dropped])
    both = float((dropped[:, 0] & dropped[:, 1]).float().mean())
    assert both == pytest.approx(0.16, abs=0.03), "cells are drawn, not rows"
    known = (codes != MISSING) & (codes != OTHER)
    assert torch.equal(codes[known], rows.codes[known])
    assert not bool(rows.numbers.isnan().any()), "the rows themselves are not changed"


def test_nearly_all_cells_may_be_dropped_or_swapped() -> None:
    torch.manual_seed(0)
    rows = draw(2000, 2).table
    assert float(drop_cells(rows, 1.0)[0].isnan().float().mean()) == 1.0
    swapped = swap_cells(rows, 0.999)
    assert float((swapped.numbers != rows.numbers).float().mean()) > 0.98
    for j in range(2):
        assert set(swapped.numbers[:, j].tolist()) <= set(rows.numbers[:, j].tolist())


@pytest.mark.trains
def test_a_weight_of_two_equals_a_repeated_row() -> None:
    """In one step over all rows, a row of weight 2 is the same as that row twice."""
    rows = draw(6, 0)
    weight = torch.tensor([2.0, 1.0, 1.0, 2.0, 1.0, 1.0])
    twice = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5])
    ends = []
    for data in (
        Rows(rows.table, rows.target, weight / weight.mean()),
        Rows(rows.table.take(twice), rows.target[twice], torch.ones(8)),
    ):
        model = network()
        fit_network(model, data, None, make_settings(batch=8, weight_decay=0.0, clip=0.0), 0)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    same = (ends[0] - ends[1]).abs() < 1e-4
    assert float(same.float().mean()) > 0.98, "Adam's first step is ± the rate, whatever the size"


@pytest.mark.trains
def test_targets_are_standardised_by_weighted_mean_and_deviation() -> None:
    """A row of weight 2 counts twice; if all training rows have weight 0, they count equally."""
    X, _ = people(20)
    y, weight = 100 + 7 * X.columns["noise"], np.arange(20) % 3.0
    settings = QUICK | {"epochs": 1, "valid": 0.0}
    model = FTTransformerRegressor(**settings).fit(X, y, sample_weight=weight)
    often = [v for v, w in zip(y, weight, strict=True) for _ in range(int(w))]
    assert model.mean_ == pytest.approx(np.mean(often))
    assert model.scale_ == pytest.approx(np.std(often))
    late = settings | {"valid": 0.2, "split": "time"}
    none = FTTransformerRegressor(**late).fit(X, y, sample_weight=np.arange(20) >= 16)
    assert none.mean_ == pytest.approx(y[:16].mean())
    assert none.scale_ == pytest.approx(y[:16].std())
    same = FTTransformerRegressor(**settings).fit(X, np.full(20, 3.0))
    assert (same.mean_, same.scale_) == (3.0, 1.0)


@pytest.mark.parametrize("rows", (1, 31, 32, 33, 100))
def test_outputs_equal_those_of_single_rows(rows: int) -> None:
    model, table = network(3, members=2), draw(rows, 2).table
    result = predict_outputs(model, table, 40)
    assert result.shape == (rows, 2, 3)
    with torch.no_grad():
        for row in range(rows):
            one = model(table.numbers[row : row + 1], table.codes[row : row + 1])[0]
            assert torch.allclose(result[row], one, atol=1e-5)


def test_batches_of_saint_are_not_padded() -> None:
    """SAINT attends to rows, so no row is added to a batch."""
    model, table = network(kind="saint"), draw(21, 2).table
    with torch.no_grad():
        parts = [model(table.numbers[i : i + 8], table.codes[i : i + 8]) for i in (0, 8, 16)]
    assert torch.equal(predict_outputs(model, table, 8), torch.cat(parts))


@pytest.mark.trains
def test_saint_predicts_in_batches_of_the_training_size() -> None:
    X, y = people(70)
    model = SAINTClassifier(**QUICK | {"epochs": 1, "batch_size": 16}).fit(X, y)
    outputs, table = model._predict(X), model.encoder_.encode(X)
    assert torch.equal(outputs, predict_outputs(model.model_, table, 16)[:, 0])
    assert not torch.equal(outputs, predict_outputs(model.model_, table, 70)[:, 0])


@pytest.mark.trains
def test_without_held_out_rows_the_last_weights_are_kept() -> None:
    """All epochs are run: without held-out rows there is no early stopping."""
    rows, model = draw(20, 2), network()
    result = fit_network(model, rows, None, make_settings(epochs=5, patience=1), 2)
    assert result.progress.step == 15 and not result.stopped and not result.notes
    assert not any(row["loss"] for row in result.progress.history), "nothing was evaluated"
    assert TableTraining(rows, None, make_settings(), 2).evaluate(model) == {"loss": 0.0}
    assert not model.training


@pytest.mark.trains
def test_warmup_is_a_fraction_of_all_steps() -> None:
    """With warm-up over all ten steps the mean learning rate is about half of the peak."""
    moved = []
    for warmup in (0.0, 1.0):
        model, rows = network(), draw(80, 0)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        fit_network(
            model, rows, None, make_settings(epochs=1, batch=8, warmup=warmup, weight_decay=0.0), 0
        )
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        moved.append(float((after - before).norm()))
    assert 0.3 < moved[1] / moved[0] < 0.8


@pytest.mark.trains
@pytest.mark.parametrize("batch_size", (64, 200))
def test_epochs_are_counted_from_steps(batch_size: int) -> None:
    X, _ = people(160)
    settings = QUICK | {"epochs": 3, "batch_size": batch_size, "valid": 0.25}
    model = FTTransformerRegressor(**settings).fit(X, X.columns["noise"])
    each = 2 if batch_size == 64 else 1
    assert model.report_["rows"] == 120 and model.report_["held_out"] == 40
    assert model.report_["steps"] == 3 * each and model.n_iter_ == 3
    assert [row["step"] for row in model.report_["history"]] == [each, 2 * each, 3 * each]


@pytest.mark.trains
def test_verbose_prints_each_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    X, y = people(60)
    settings = QUICK | {"epochs": 2}
    model = FTTransformerClassifier(**settings, verbose=True).fit(X, y)
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == "" and [line.split()[:2] for line in lines] == [
        ["epoch", "1"],
        ["epoch", "2"],
    ]
    for line, row in zip(lines, model.report_["history"], strict=True):
        assert f"loss {row['loss']:.4f}" in line and f"accuracy {row['accuracy']:.4f}" in line
    best = int(np.argmin([row["loss"] for row in model.report_["history"]]))
    assert lines[best].endswith(" *")
    FTTransformerClassifier(**settings).fit(X, y)
    quiet = capsys.readouterr()
    assert quiet.out == quiet.err == ""


@pytest.mark.trains
def test_the_report_has_the_training_time() -> None:
    X, y = people(40)
    start = time.perf_counter()
    seconds = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, y).report_["seconds"]
    assert 0 < seconds <= time.perf_counter() - start
