"""Pre-training on unlabelled rows: each loss against a naive loop, and the weights of `fit`."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from addnorm.data.table.encode import EncodedTable
from addnorm.errors import ConfigError
from addnorm.models.tabular import FTTransformerModel, TabularConfig, build_tabular, trunk_of
from addnorm.tabular import FTTransformerClassifier, SAINTClassifier, TabTransformerClassifier
from addnorm.tabular.fitting import FitSettings
from addnorm.tabular.pretrain import (
    METHODS,
    PretrainingModel,
    PretrainingTask,
    mark_cells,
    pretrain,
    replace_marked,
)
from tests.portable import training
from tests.tabular.data import QUICK, people

X, Y = people()
TRUNK: dict[str, Any] = {"width": 16, "depth": 1, "heads": 2, "ffn_width": 8}


def make_model(method: str) -> PretrainingModel:
    config = TabularConfig(
        kind="ft", numbers=2, categories=(4, 3), outputs=1, trunk=trunk_of("ft", **TRUNK)
    )
    return PretrainingModel(build_tabular(config), method).eval()


def draw_batch() -> dict[str, Tensor]:
    codes = torch.stack((torch.randint(4, (6,)), torch.randint(3, (6,))), dim=1)
    batch = mark_cells(EncodedTable(torch.randn(6, 2), codes))
    batch["numbers"][0, 0] = float("nan")
    batch["hide_numbers"][:2, 0] = True
    return batch


@torch.no_grad()
def test_the_masked_loss() -> None:
    model, batch = make_model("masked"), draw_batch()
    numbers, codes = batch["numbers"].clone(), batch["codes"].clone()
    numbers[batch["hide_numbers"]], codes[batch["hide_codes"]] = float("nan"), 0
    hidden = model.states(numbers, codes)
    assert model.numbers is not None
    squares = [
        float(
            hidden[r, j] @ model.numbers.weight[j] + model.numbers.bias[j] - batch["numbers"][r, j]
        )
        ** 2
        for r in range(6)
        for j in range(2)
        if batch["hide_numbers"][r, j] and not batch["numbers"][r, j].isnan()
    ]
    expected = sum(squares) / len(squares)
    for j, head in enumerate(model.categories):
        masked_rows = [r for r in range(6) if batch["hide_codes"][r, j]]
        losses = [
            -float(head(hidden[r, 2 + j]).log_softmax(0)[batch["codes"][r, j]]) for r in masked_rows
        ]
        expected += sum(losses) / max(len(losses), 1) / 2
    assert float(model(batch)) == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_the_replaced_loss() -> None:
    model, batch = make_model("replaced"), draw_batch()
    numbers, codes = replace_marked(batch)
    for r in range(6):
        other = int(batch["order"][r])
        for j in range(2):
            source = other if batch["hide_codes"][r, j] else r
            assert codes[r, j] == batch["codes"][source, j]
    hidden, total = model.states(numbers, codes), 0.0
    for r in range(6):
        for t in range(4):
            now = numbers[r, t] if t < 2 else codes[r, t - 2]
            was = batch["numbers"][r, t] if t < 2 else batch["codes"][r, t - 2]
            same = bool(now == was) or (math.isnan(float(now)) and math.isnan(float(was)))
            p = torch.sigmoid(hidden[r, t] @ model.detector.weight[t] + model.detector.bias[t])
            total -= math.log(float(1 - p if same else p))
    assert float(model(batch)) == pytest.approx(total / 24, rel=1e-4)


@torch.no_grad()
def test_the_contrastive_loss() -> None:
    model, batch = make_model("contrastive"), draw_batch()
    body = model.body
    assert isinstance(body, FTTransformerModel)
    views = []
    for numbers, codes in ((batch["numbers"], batch["codes"]), replace_marked(batch)):
        z = model.project(body.hidden(body.tokens(numbers, codes))[:, 0])
        views.append([row / row.norm() for row in z])
    total = 0.0
    for one, other in (views, views[::-1]):
        for i in range(6):
            each = [math.exp(float(one[i] @ other[j]) / 0.7) for j in range(6)]
            total -= math.log(each[i] / sum(each)) / 12
    assert float(model(batch)) == pytest.approx(total, rel=1e-4)


def table_of(rows: int) -> EncodedTable:
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randn(rows, 2, generator=generator)
    codes = torch.stack([torch.randint(n, (rows,), generator=generator) for n in (4, 3)], dim=1)
    return EncodedTable(numbers, codes)


def test_three_in_ten_cells_are_marked_independently() -> None:
    batch = mark_cells(table_of(4000), torch.Generator().manual_seed(0))
    for name in ("hide_numbers", "hide_codes"):
        assert batch[name].shape == (4000, 2)
        assert batch[name].float().mean(dim=0).tolist() == pytest.approx([0.3, 0.3], abs=0.03)
        both = float((batch[name][:, 0] & batch[name][:, 1]).float().mean())
        assert both == pytest.approx(0.09, abs=0.02)
    assert sorted(batch["order"].tolist()) == list(range(4000))


def test_each_epoch_has_every_row_once_in_a_new_order() -> None:
    task = PretrainingTask(table_of(20), None, FitSettings(batch=8, epochs=1, rate=0.1, seed=3))
    orders = [torch.cat(list(task.plan(epoch))).tolist() for epoch in (0, 1, 0)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] == orders[2] != orders[1]
    assert [len(part) for part in task.plan(0)] == [8, 8, 4]
    part = task.plan(0)[2]
    assert torch.equal(task.batch(part)["numbers"], table_of(20).numbers[part])


@torch.no_grad()
def test_losses_of_accumulated_batches_are_weighted_by_rows() -> None:
    model = make_model("masked")
    task = PretrainingTask(table_of(6), None, FitSettings(batch=6, epochs=1, rate=0.1))
    batch = draw_batch()
    assert task.tokens(batch) == 6
    whole = float(model(batch))
    assert float(task.loss(model, batch, 6)) == pytest.approx(whole)
    assert float(task.loss(model, batch, 24)) == pytest.approx(whole / 4)


@torch.no_grad()
def test_marked_cells_of_held_out_rows_are_always_the_same() -> None:
    """The loss is the mean over rows, and does not depend on the RNG state."""
    model, held = make_model("masked"), table_of(18)
    task = PretrainingTask(table_of(20), held, FitSettings(batch=8, epochs=1, rate=0.1, seed=3))
    torch.manual_seed(1)
    first = task.evaluate(model)
    torch.manual_seed(2)
    assert task.evaluate(model) == first
    generator = torch.Generator().manual_seed(3)
    batches = [
        mark_cells(held.take(torch.arange(i, min(i + 8, 18))), generator) for i in (0, 8, 16)
    ]
    each = [float(model(batch)) for batch in batches]
    assert first["loss"] == pytest.approx((8 * each[0] + 8 * each[1] + 2 * each[2]) / 18)
    without_held_out = PretrainingTask(held, None, FitSettings(batch=8, epochs=1, rate=0.1))
    assert without_held_out.evaluate(model) == {"loss": 0}


@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains_the_body_and_its_own_head_only(method: str) -> None:
    model, batch = make_model(method).train(), draw_batch()
    batch["hide_codes"][0] = True
    batch["numbers"][5, 1], batch["hide_numbers"][5, 1] = float("nan"), False  # missing in the data
    model(batch).backward()
    for name, parameter in model.body.named_parameters():
        assert (parameter.grad is None) is name.startswith("head."), name
    own = {
        "masked": ("numbers", "categories"),
        "replaced": ("detector",),
        "contrastive": ("project",),
    }
    for name, parameter in model.named_parameters():
        if not name.startswith("body."):
            assert (parameter.grad is not None) is name.startswith(own[method]), name


def test_parameter_groups_hold_every_parameter_once() -> None:
    model = make_model("masked")
    decayed, spared = model.parameter_groups(0.25)
    assert decayed["weight_decay"] == 0.25 and spared["weight_decay"] == 0
    every = [*decayed["params"], *spared["params"]]
    assert {id(p) for p in every} == {id(p) for p in model.parameters()}
    assert len(every) == len(list(model.parameters()))
    heads = [p for name, p in model.named_parameters() if not name.startswith("body.")]
    assert {id(p) for p in heads} <= {id(p) for p in decayed["params"]}


@pytest.mark.trains
def test_pretraining_keeps_the_best_weights_on_held_out_rows() -> None:
    """Held-out rows are evaluated after every epoch, and the best weights are kept."""
    body = make_model("masked").body
    settings = FitSettings(batch=8, epochs=6, rate=0.03, patience=6)
    state = pretrain(body, table_of(24), table_of(16), settings, "masked").progress
    assert [row["step"] for row in state.history] == [3, 6, 9, 12, 15, 18]
    best = min(state.history, key=lambda row: row["loss"])
    assert state.best_step == best["step"]
    alone = pretrain(make_model("masked").body, table_of(24), None, settings, "masked")
    assert alone.progress.step == 18 and not alone.stopped


@pytest.mark.trains
def test_pretraining_has_its_own_epochs_and_restores_the_rng_state() -> None:
    settings = QUICK | {"epochs": 7, "valid": 0.25, "batch_size": 30}
    before = torch.get_rng_state()
    model = FTTransformerClassifier(**settings).pretrain(X.take(np.arange(80)), epochs=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert [row["step"] for row in model.pretrained_.history] == [2, 4]
    again = FTTransformerClassifier(**settings).pretrain(X.take(np.arange(80)), epochs=2)
    one, two = (m.pretrained_.body.state_dict() for m in (model, again))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.trains
def test_the_new_head_has_one_output_for_each_class() -> None:
    """Pre-training does not need to know the number of classes."""
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}).pretrain(X)
    for classes, outputs in ((0, 1), (2, 1), (3, 3), (5, 5)):
        started = model.pretrained_.make_model(classes)
        assert started.config.outputs == outputs
        body = model.pretrained_.body
        assert started.config.replace(outputs=1) == body.config
    y = np.array(["a", "b", "c"])[np.arange(240) % 3]
    assert model.fit(X, y).predict_proba(X).shape == (240, 3)


@pytest.mark.trains
@pytest.mark.parametrize("method", METHODS)
def test_fit_starts_from_the_pretrained_weights(method: str) -> None:
    settings = QUICK | {"epochs": 2, "embedding": "piecewise"}
    model = FTTransformerClassifier(**settings).pretrain(X, method=method)
    started = model.pretrained_.make_model(2).state_dict()
    body = model.pretrained_.body.state_dict()
    assert all(torch.equal(started[n], body[n]) for n in body if not n.startswith("head."))
    model.set_params(epochs=1).fit(X.take(np.arange(60)), Y[:60])
    assert model.encoder_ == model.pretrained_.encoder and model.predict(X).shape == (240,)


MAX_LOSS_RATIO = {"masked": 0.6, "replaced": 0.92, "contrastive": 0.92}
"""Limits on the loss relative to untrained weights; seeds 0 to 7 gave at most .34, .80 and .83."""


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("method", METHODS)
def test_each_method_lowers_its_loss_on_held_out_rows(method: str) -> None:
    """Columns that repeat each other, so that a hidden cell can be predicted from the others."""
    number, code = torch.randn(400, 1), torch.randint(3, (400, 1))
    table = EncodedTable(torch.cat((number, -number), dim=1), torch.cat((code, code), dim=1))
    train, held = (table.take(torch.arange(i, i + 200)) for i in (0, 200))

    def best_loss(rate: float) -> float:
        torch.manual_seed(training.seed)  # the same first weights, body and head
        settings = FitSettings(batch=50, epochs=60, rate=rate, patience=60, seed=training.seed)
        history = pretrain(make_model(method).body, train, held, settings, method).progress.history
        return min(row["loss"] for row in history)

    assert best_loss(1e-2) < MAX_LOSS_RATIO[method] * best_loss(1e-9)


@pytest.mark.trains
@pytest.mark.parametrize("kind", (SAINTClassifier, TabTransformerClassifier))
@pytest.mark.parametrize("method", ("masked", "replaced"))
def test_other_models_can_be_pretrained(kind: Any, method: str) -> None:
    model = kind(**QUICK | {"epochs": 1}).pretrain(X, method=method).fit(X, Y)
    assert model.predict(X).shape == (240,)


def test_invalid_methods() -> None:
    quick = QUICK | {"epochs": 1}
    with pytest.raises(ConfigError, match=r"method has no choice 'maskd'\. Did you mean 'masked'"):
        FTTransformerClassifier(**quick).pretrain(X, method="maskd")
    with pytest.raises(
        ConfigError, match="TabTransformer can only be pre-trained on categorical columns"
    ):
        TabTransformerClassifier(**quick).pretrain(X, method="contrastive")
