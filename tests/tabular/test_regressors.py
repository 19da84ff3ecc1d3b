"""Regressors: the distribution they predict, its calibration, saving it; ordered classes."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.errors import ConfigError, InputError, SavedError
from addnorm.files import TABLE_MODEL
from addnorm.models.bins import bin_means, positions_of, smoothed_labels
from addnorm.models.saved import WEIGHTS, read_tensors, write_tensors
from addnorm.models.tabular import build_tabular
from addnorm.tabular import (
    FTTransformerClassifier,
    FTTransformerOrdinal,
    FTTransformerRegressor,
    load_estimator,
    save_estimator,
)
from addnorm.tabular.fitting import SQUARED_ERROR, losses, mean_of_members, ordinal_losses
from tests.tabular.data import QUICK

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 2))
COUNTS = RNG.poisson(np.exp(1 + X[:, 0])).astype(float)
pytestmark = pytest.mark.trains


@pytest.fixture(scope="module")
def model() -> FTTransformerRegressor:
    return FTTransformerRegressor(**QUICK | {"epochs": 3, "members": 2}).fit(X, COUNTS)


def test_the_prediction_is_the_mean_or_the_median(model: FTTransformerRegressor) -> None:
    one = model.predict_distribution(X)
    assert np.array_equal(model.predict(X), one.mean)
    assert np.array_equal(model.predict(X, "median"), one.quantile(0.5))
    assert one.probabilities.sum(axis=1) == pytest.approx(np.ones(200))
    with pytest.raises(ConfigError, match="point must be mean or median: got 'mode'"):
        model.predict(X, "mode")


def test_quantiles_rise_and_counts_are_not_negative(model: FTTransformerRegressor) -> None:
    found = model.predict_quantiles(X, np.linspace(0.001, 0.999, 30))
    assert found.shape == (200, 30) and (np.diff(found, axis=1) >= 0).all() and found.min() >= 0
    assert model.predict(X).min() >= 0, "no training target is below 0"
    assert 0.0 in model.edges_[1:] and 1.0 in model.edges_, "frequent values have their own bin"
    ends, wider = model.predict_interval(X, 0.8), model.predict_interval(X, 0.95)
    assert (wider[:, 0] <= ends[:, 0]).all() and (ends[:, 1] <= wider[:, 1]).all()
    one = model.predict_distribution(X)
    assert np.array_equal(ends, one.interval(0.8)), "the same calibrated intervals in both"
    assert one.widening == model.model_.config.widening and one.widening[0] == (0.0, 0.0)
    with pytest.raises(ConfigError, match="level must lie between 0 and 1: got 90"):
        model.predict_interval(X, 90)


def test_held_out_rows_calibrate_the_distribution(model: FTTransformerRegressor) -> None:
    """Intervals hold for the held-out rows although the model is barely trained."""
    figures = model.report_["valid"]
    for level in (80, 90, 95):
        assert figures[f"coverage_{level}"] >= level / 100 - 1e-12
    assert set(figures) == set(model.evaluate(X, COUNTS))
    assert model.model_.config.calibration[0] == (0.0, 0.0)
    assert "single values" in model.report_["target"]
    assert set(model.report_["coverage"]) == {"as trained", "calibrated"}


def test_held_out_targets_are_the_numbers_that_were_given(model: FTTransformerRegressor) -> None:
    """To the last digit: else a count is not the value that has a bin of its own."""
    _, found = model.labelled(model.rows(X, COUNTS))
    assert found.dtype == np.float64 and np.array_equal(found, COUNTS)


def test_the_network_answers_with_the_calibrated_mean(model: FTTransformerRegressor) -> None:
    found = model._predict(X)[:, 0].double().numpy() * model.scale_ + model.mean_
    assert found == pytest.approx(model.predict(X), rel=1e-4, abs=1e-4)


def test_few_held_out_rows_calibrate_nothing() -> None:
    small = FTTransformerRegressor(**QUICK | {"epochs": 1}).fit(X[:40], COUNTS[:40])
    assert small.model_.config.calibration == ()
    assert any("8 rows are held out, and 20 are needed" in n for n in small.report_["notes"])


def test_members_are_a_mixture(model: FTTransformerRegressor) -> None:
    network: Any = copy.copy(model.model_)
    network.config = network.config.replace(calibration=())
    table = model.encoder_.encode(model._frame(X[:5], fitting=False))
    with torch.no_grad():
        outputs = network(table.numbers, table.codes)
    expected = (outputs[:, 0].softmax(dim=1) + outputs[:, 1].softmax(dim=1)) / 2
    assert torch.allclose(network.bin_probabilities(outputs), expected)
    assert torch.allclose(mean_of_members(outputs, network.edges)[:, 0].exp(), expected)
    means = expected @ bin_means(network.edges)
    assert torch.allclose(network.answers(outputs)[:, 0], means, atol=1e-6)


def test_the_loss_of_bins_is_that_of_a_plain_loop() -> None:
    edges = torch.tensor([-2.0, -1.0, 0.0, 0.0, 3.0])
    outputs, target = torch.randn(3, 2, 4), torch.tensor([-1.4, 0.0, 2.0])
    found = losses(outputs, target, 0, edges)
    for row in range(3):
        label = smoothed_labels(positions_of(target, edges), edges)[row]
        total = 0.0
        for member in range(2):
            p = outputs[row, member].softmax(0)
            total -= sum(float(q * chance.log()) for q, chance in zip(label, p, strict=True))
            total += SQUARED_ERROR * (float(p @ bin_means(edges)) - float(target[row])) ** 2
        assert float(found[row]) == pytest.approx(total / 2, rel=1e-4)


# ── On disk ───────────────────────────────────────────────────────────────────────────────────────


def test_a_saved_distribution_is_loaded_bit_for_bit(
    model: FTTransformerRegressor, tmp_path: Path
) -> None:
    save_estimator(model, tmp_path)
    again: Any = load_estimator(tmp_path)
    assert again.edges_ == model.edges_ and again.model_.config == model.model_.config
    one, other = again.predict_distribution(X), model.predict_distribution(X)
    assert np.array_equal(one.probabilities, other.probabilities)
    assert np.array_equal(one.edges, other.edges)
    assert np.array_equal(one.interval(0.9), other.interval(0.9))


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    (
        ("network", "edges", [0.0, 1.0], "network.edges must be the standardised edges"),
        ("network", "calibration", [[0.0, 0.0]], "network.calibration must be pairs that ascend"),
        ("network", "calibration", [[0.0, 0.0], [1.0, "1"]], "network.calibration must be pairs"),
        ("network", "widening", [[0.0, 0.0]], "network.widening must be pairs that ascend"),
        ("network", "outputs", 3, "network.outputs must be [0-9]+ for a regressor with"),
        ("fitted", "edges_", [2.0, 1.0], "fitted.edges_ must be finite numbers in ascending order"),
        ("fitted", "edges_", 5, "fitted.edges_ must be finite numbers in ascending order: got 5"),
        ("fitted", "edges_", [1.0, 1.0], "fitted.edges_ must be finite numbers in ascending"),
    ),
)
def test_bins_that_do_not_fit(
    model: FTTransformerRegressor,
    tmp_path: Path,
    part: str,
    field: str,
    value: Any,
    message: str,
) -> None:
    save_estimator(model, tmp_path)
    tensors, content = read_tensors(tmp_path / WEIGHTS, *TABLE_MODEL)
    content[part][field] = value
    write_tensors(tmp_path / WEIGHTS, tensors, *TABLE_MODEL, content)
    with pytest.raises(SavedError, match=message):
        load_estimator(tmp_path)


def test_a_model_without_a_distribution_is_still_loaded(
    model: FTTransformerRegressor, tmp_path: Path
) -> None:
    """Models that were saved before distributions were predicted have one output, and no edges."""
    old = copy.copy(model)
    old.edges_ = ()
    config = model.model_.config
    plain = config.replace(outputs=1, edges=(), calibration=(), widening=())
    old.model_ = build_tabular(plain).eval()
    save_estimator(old, tmp_path)
    tensors, content = read_tensors(tmp_path / WEIGHTS, *TABLE_MODEL)
    del content["network"]["edges"], content["network"]["calibration"], content["fitted"]["edges_"]
    del content["network"]["widening"]
    write_tensors(tmp_path / WEIGHTS, tensors, *TABLE_MODEL, content)
    again: Any = load_estimator(tmp_path)
    table = again.encoder_.encode(again._frame(X, fitting=False))
    with torch.no_grad():
        expected = old.model_(table.numbers, table.codes).mean(dim=1)[:, 0].numpy()
    assert again.predict(X) == pytest.approx(expected * model.scale_ + model.mean_, rel=1e-4)
    assert set(again.evaluate(X, COUNTS)) == {"rmse", "mae", "r2"}
    for ask in (again.predict_distribution, again.predict_quantiles, again.predict_interval):
        with pytest.raises(ConfigError, match="saved before distributions were predicted"):
            ask(X)
    with pytest.raises(ConfigError, match="saved before distributions were predicted"):
        again.predict(X, "median")


def test_classifiers_have_no_quantiles() -> None:
    for name in ("predict_quantiles", "predict_interval", "predict_distribution"):
        assert not hasattr(FTTransformerClassifier(), name)


# ── Ordered classes ───────────────────────────────────────────────────────────────────────────────


def test_ordered_classes_are_in_the_order_of_their_numbers() -> None:
    marks = np.array(["9", "10", "11", "12"])[np.digitize(X[:, 0], (-1, 0, 1))]
    ordinal = FTTransformerOrdinal(**QUICK | {"epochs": 1}).fit(X, marks)
    assert ordinal.classes_.tolist() == ["9", "10", "11", "12"]
    assert (
        ordinal._encode_target(marks[:20]).tolist() == np.digitize(X[:20, 0], (-1, 0, 1)).tolist()
    )
    assert {"accuracy", "mae", "kappa", "rps"} <= set(ordinal.evaluate(X, marks))
    assert {"mae", "kappa", "rps"} <= set(ordinal.report_["valid"])


def test_an_ordinal_target_must_be_numbers() -> None:
    with pytest.raises(InputError, match=r"an ordinal target must be numbers: got .*'high'"):
        FTTransformerOrdinal(**QUICK).fit(X, np.array(["low", "high"] * 100))


@pytest.mark.parametrize("classes", (2, 5))
def test_the_loss_of_ordered_classes_is_that_of_a_plain_loop(classes: int) -> None:
    outputs = torch.randn(6, 2, classes if classes > 2 else 1)
    target = torch.arange(6) % classes
    found = ordinal_losses(outputs, target)
    for row in range(6):
        total = 0.0
        for member in range(2):
            z = outputs[row, member]
            p = (z if classes > 2 else torch.cat((torch.zeros(1), z))).softmax(0)
            for k in range(classes - 1):
                F = float(p[: k + 1].sum())
                total -= math.log(F if target[row] <= k else 1 - F)
        assert float(found[row]) == pytest.approx(total / 2 / (classes - 1), rel=1e-4)
