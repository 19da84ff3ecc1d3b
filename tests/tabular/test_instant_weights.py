"""The weights of the package: their card, and what must hold for their predictions."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris, make_moons

from addnorm.models.instant_table import InstantPredictor
from addnorm.tabular import (
    InstantClassifier,
    InstantRegressor,
    instant,
    load_estimator,
    save_estimator,
)
from addnorm.tabular.instant import PACKAGE_WEIGHTS, load_network, own_temperature

CARD = PACKAGE_WEIGHTS.with_name("instant_card.md")
NEAR = 1e-5


def moons(rows: int = 120) -> tuple[Any, Any]:
    return make_moons(rows, noise=0.2, random_state=0)


def test_the_card_describes_the_file() -> None:
    assert PACKAGE_WEIGHTS.stat().st_size <= 20 * 2**20
    card = CARD.read_text(encoding="utf-8")
    assert hashlib.sha256(PACKAGE_WEIGHTS.read_bytes()).hexdigest() in card
    assert f"{load_network().count():,} parameters" in card


def test_the_order_of_rows_and_columns_changes_nothing() -> None:
    X, y = load_iris(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(y))
    known, asked = rows[:80], rows[80:]
    before = InstantClassifier().fit(X[known], y[known]).predict_proba(X[asked])
    shuffled, columns = rows[:80][::-1], [2, 0, 3, 1]
    model = InstantClassifier().fit(X[shuffled][:, columns], y[shuffled])
    assert np.allclose(model.predict_proba(X[asked][:, columns]), before, rtol=0, atol=NEAR)
    alone = [model.predict_proba(X[[row]][:, columns])[0] for row in asked[:3]]
    assert np.allclose(alone, before[:3], rtol=0, atol=NEAR)


def test_the_order_changes_nothing_with_categories_and_missing_cells() -> None:
    """Numbers far from 0, so that a mean that depended on the order of rows would be seen."""
    rng = np.random.default_rng(0)
    X = np.empty((70, 4), dtype=object)
    X[:, 0], X[:, 1] = rng.normal(5000, 9, 70), rng.exponential(3, 70)
    X[:, 2], X[:, 3] = rng.choice(list("uvw"), 70), rng.normal(size=70)
    X[rng.random(70) < 0.2, 3] = np.nan
    y = X[:, 0].astype(float) + 5 * (X[:, 2] == "u") + rng.normal(size=70)
    rows, columns = rng.permutation(60), [2, 0, 3, 1]
    before = InstantRegressor().fit(X[:60], y[:60]).predict(X[60:])
    moved = InstantRegressor().fit(X[rows][:, columns], y[rows]).predict(X[60:][:, columns])
    assert np.allclose(moved, before, rtol=0, atol=NEAR * y.std())


@pytest.mark.parametrize("estimator", (InstantClassifier, InstantRegressor))
@pytest.mark.parametrize("values", ("uv", "uvwxyz"))
def test_the_order_of_several_categorical_columns_changes_nothing(
    estimator: Any, values: str
) -> None:
    """With several members, duplicated columns, missing cells and values that were not known."""
    rng = np.random.default_rng(0)
    X = np.empty((60, 5), dtype=object)
    X[:, 0], X[:, 1] = rng.choice(list(values), 60), rng.choice(list(values), 60)
    X[:, 2], X[:, 3], X[:, 4] = rng.choice(list("abc"), 60), X[:, 0], rng.normal(size=60)
    X[rng.random(60) < 0.1, 1] = np.nan
    X[55, 2] = "never seen"
    y = (X[:, 0] == "u") + 2.0 * (X[:, 1] == "v") + rng.normal(size=60)
    is_regressor = estimator is InstantRegressor
    target = y if is_regressor else np.digitize(y, (0.5, 1.5))
    answers = []
    for columns in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        # Not calibrated, so that half of a number is the network's.
        model = estimator(members=2, calibrate=not is_regressor)
        model.fit(X[:50, columns], target[:50])
        predict = model.predict if is_regressor else model.predict_proba
        answers.append(predict(X[50:, columns]))
    assert np.allclose(*answers, rtol=0, atol=NEAR)


@pytest.mark.parametrize("estimator", (InstantClassifier, InstantRegressor))
@pytest.mark.parametrize("values", ("01", "abc"))
def test_the_order_of_rows_that_differ_in_where_their_values_stand(
    estimator: Any, values: str
) -> None:
    """(a, b) and (b, a) are other rows. Equal targets, so that content alone orders the rows."""
    rng = np.random.default_rng(0)
    X = rng.choice(list(values), (72, 4)).astype(object)
    y = np.where(rng.random(72) < 0.2, X[:, 0] != "0", X[:, 1] == values[0])
    target = y.astype(float) if estimator is InstantRegressor else y
    answers = []
    for rows in (np.arange(60), rng.permutation(60)):
        model = estimator(members=1).fit(X[rows], target[rows])
        trust = model.report_.get("process", 1.0)
        predict = model.predict if estimator is InstantRegressor else model.predict_proba
        answers.append((model.temperature_, trust, *predict(X[60:]).flatten()))
    assert np.allclose(*answers, rtol=0, atol=NEAR)


@pytest.mark.parametrize("unit", (1e-300, 1e-200, 1e140))
def test_numbers_of_any_size_are_predicted_alike(unit: float) -> None:
    X = np.random.default_rng(0).normal(size=(30, 2))
    usual, other = (InstantRegressor(members=1).fit(X, X[:, 0] * u) for u in (1.0, unit))
    assert np.allclose(other.predict(X) / unit, usual.predict(X), rtol=0, atol=NEAR)


def test_one_absurd_cell_does_not_hide_a_column(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(120, 2))
    y = X[:, 0] > 0
    X[3, 0] = 1e15
    model = InstantClassifier(members=1).fit(X[:60], y[:60])
    assert model.score(X[60:], y[60:]) > 0.8
    save_estimator(model, tmp_path / "saved")
    assert np.array_equal(
        load_estimator(tmp_path / "saved").predict_proba(X), model.predict_proba(X)
    )


def test_it_predicts_classes_that_a_line_cannot_separate() -> None:
    X, y = moons()
    model = InstantClassifier().fit(X[:80], y[:80])
    assert model.score(X[80:], y[80:]) > 0.85
    chances = model.predict_proba(X[80:])[np.arange(40), y[80:]]
    assert -np.log(chances).mean() < 0.4  # guessing: 0.69


def test_three_classes_are_calibrated_better_than_guesses() -> None:
    X, y = load_iris(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(y))
    model = InstantClassifier().fit(X[rows[:80]], y[rows[:80]])
    chances = model.predict_proba(X[rows[80:]])[np.arange(70), y[rows[80:]]]
    assert -np.log(chances).mean() < 0.4  # guessing: 1.10


@pytest.mark.parametrize("rows", (90, pytest.param(500, marks=pytest.mark.slow)))
def test_answers_that_are_too_unsure_are_sharpened(rows: int) -> None:
    X, y = moons(rows)
    model = InstantClassifier().fit(X, y)
    assert isinstance(model.model_, InstantPredictor)
    assert 0.5 <= model.temperature_ <= 2 and model.report_["temperature"] == model.temperature_
    flat = copy.deepcopy(model.model_)
    flat.read_rows.clear()
    with torch.no_grad():
        flat.network.class_vote.query.weight.mul_(0.6)
    assert own_temperature(flat) < own_temperature(model.model_)
    plain = InstantClassifier(calibrate=False).fit(X, y)
    assert plain.temperature_ == 1
    odds = [np.log(m.predict_proba(X) / (1 - m.predict_proba(X))) for m in (plain, model)]
    assert np.allclose(odds[0], odds[1] * model.temperature_, atol=1e-4)


@pytest.mark.parametrize("value", (7.0, 0.1, -3e5))
def test_a_constant_number_is_predicted_exactly_and_certainly(value: float) -> None:
    X = np.random.default_rng(0).normal(size=(12, 2))
    model = InstantRegressor().fit(X, np.full(12, value))
    assert (model.predict(X[:3]) == value).all()
    assert (model.predict_distribution(X[:3]).interval(0.9) == value).all()


def test_a_table_whose_only_column_is_missing_predicts_the_shares_of_the_classes() -> None:
    X = {"empty": [None] * 30}
    model = InstantClassifier().fit(X, np.arange(30) % 3 == 0)
    assert np.allclose(model.predict_proba(X), [2 / 3, 1 / 3], atol=0.1)


def test_of_no_rows_nothing_is_predicted() -> None:
    X = np.random.default_rng(0).normal(size=(12, 2))
    model = InstantRegressor().fit(X, X[:, 0])
    assert model.predict(X[:0]).shape == (0,)
    assert model.predict_distribution(X[:0]).interval(0.9).shape == (0, 2)


def test_numbers_and_their_intervals() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (300, 3))
    y = 10 + 3 * X[:, 0] + X[:, 1] ** 2 + 0.3 * rng.normal(size=300)
    model = InstantRegressor().fit(X[:150], y[:150])
    assert model.score(X[150:], y[150:]) > 0.7
    low, high = model.predict_interval(X[150:], 0.8).T
    assert 0.65 < ((low <= y[150:]) & (y[150:] <= high)).mean() <= 1


@pytest.mark.parametrize("kind", (InstantClassifier, InstantRegressor))
def test_columns_without_content_are_harmless(kind: Any) -> None:
    X, y = moons()
    empty = np.full((120, 1), np.nan)
    wide = np.concatenate((X, np.ones((120, 1)), empty), axis=1)
    target = y if kind is InstantClassifier else y.astype(float) + X[:, 0]
    model = kind().fit(wide[:80], target[:80])
    assert model.score(wide[80:], target[80:]) > 0.6
    nothing = kind().fit(wide[:80, 2:], target[:80])  # no column has content
    assert np.isfinite(nothing.predict(wide[80:, 2:])).all()


def test_weights_are_loaded_when_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    network, loaded = load_network(), list[Any]()

    def load(*key: Any) -> Any:
        loaded.append(key)
        return network

    monkeypatch.setattr(instant, "_load", load)
    model = InstantClassifier()
    assert not loaded
    model.fit(*moons(30))
    assert loaded[0][0] == str(PACKAGE_WEIGHTS)
