"""The instant estimators, with a small network whose weights are random."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.data.table.encode import EncodedTable
from addnorm.errors import ConfigError, InputError
from addnorm.models.bins import crps_of
from addnorm.models.instant import write_instant
from addnorm.models.instant_table import InstantPredictor
from addnorm.tabular import (
    InstantClassifier,
    InstantRegressor,
    instant,
    load_estimator,
    save_estimator,
)
from addnorm.tabular.explain import explain_row, explain_table
from addnorm.tabular.instant import (
    compare_instant,
    informative_columns,
    stratified_sample,
)
from addnorm.tabular.instant_training import InstantSettings, make_model


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random weights, large enough for answers to differ."""
    path = tmp_path_factory.mktemp("instant") / "weights.safetensors"
    model = make_model(InstantSettings(width=16, depth=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    write_instant(model, model.state_dict(), path)
    return path


def table(rows: int = 60) -> dict[str, Any]:
    """Numbers, a category, missing cells, a constant column and one that is missing."""
    rng = np.random.default_rng(0)
    size = rng.normal(size=rows)
    size[::7] = np.nan
    return {
        "size": size,
        "colour": rng.choice(["red", "green", "blue"], rows).astype(object),
        "same": np.ones(rows),
        "price": 1e6 + rng.normal(size=rows),
    }


def classes_of(X: dict[str, Any], count: int = 3) -> Any:
    return np.array([f"k{i % count}" for i in range(len(X["price"]))])


def test_probabilities_of_mixed_columns(weights: Path) -> None:
    X = table()
    y = classes_of(X)
    model = InstantClassifier(weights=weights).fit(X, y)
    chances = model.predict_proba(X)
    assert chances.shape == (60, 3) and np.allclose(chances.sum(axis=1), 1)
    assert model.classes_.tolist() == ["k0", "k1", "k2"]
    assert len(np.unique(chances.round(6), axis=0)) > 30
    assert set(model.predict(X)) <= set(y)
    unseen = {**X, "colour": np.array(["violet"] * 60, dtype=object)}
    missing = {**X, "colour": np.array([None] * 60, dtype=object)}
    assert np.allclose(model.predict_proba(unseen), model.predict_proba(missing))
    assert not np.allclose(model.predict_proba(unseen), chances)


@pytest.mark.parametrize("count", (2, 10))
def test_from_two_to_ten_classes(weights: Path, count: int) -> None:
    X = table()
    chances = InstantClassifier(weights=weights).fit(X, classes_of(X, count)).predict_proba(X)
    assert chances.shape == (60, count) and np.allclose(chances.sum(axis=1), 1)


def test_more_classes_are_refused(weights: Path) -> None:
    X = table()
    with pytest.raises(InputError, match="up to 10 classes: got 11"):
        InstantClassifier(weights=weights).fit(X, classes_of(X, 11))


def test_rows_alone_and_together_are_predicted_alike(weights: Path) -> None:
    X = table()
    model = InstantClassifier(weights=weights).fit(X, classes_of(X))
    whole = model.predict_proba(X)
    few = {name: column[5:8] for name, column in X.items()}
    assert np.allclose(model.predict_proba(few), whole[5:8], atol=1e-5)


def test_numbers_with_their_distribution(weights: Path) -> None:
    X = table()
    y = 1000 + 5 * X["price"]
    model = InstantRegressor(weights=weights).fit(X, y)
    predicted, (low, high) = model.predict(X), model.predict_interval(X, 0.8).T
    assert (low < high).all()
    assert abs(predicted.mean() - y.mean()) < 3 * y.std()
    quantiles = model.predict_quantiles(X, (0.1, 0.5, 0.9))
    assert np.allclose(quantiles[:, 0], low) and np.allclose(quantiles[:, 2], high)
    chances, edges = model.predict_bins(X)
    assert chances.shape == (60, len(edges) - 1)
    middle = (edges[1:] + edges[:-1]) / 2
    assert np.allclose(chances @ middle, predicted, rtol=1e-6)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        model.predict_interval(X, 1.0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        model.predict_quantiles(X, (0.5, 2.0))


def test_many_rows_are_sampled_and_it_says_so(weights: Path) -> None:
    X = table()
    with pytest.warns(UserWarning, match="20 of 60 training rows"):
        model = InstantClassifier(weights=weights, max_rows=20).fit(X, classes_of(X))
    assert isinstance(model.model_, InstantPredictor)
    assert torch.bincount(model.model_.known_target).tolist() in ([7, 7, 6], [7, 6, 7], [6, 7, 7])
    assert any("20 of 60" in note for note in model.report_["notes"])


def test_the_most_informative_columns_are_used_and_it_says_so(weights: Path) -> None:
    X = table()
    y = X["price"] > 1e6
    with pytest.warns(UserWarning, match="1 of 3 columns"):
        model = InstantClassifier(weights=weights, max_columns=1).fit(X, y)
    changed = {**X, "size": -X["size"], "colour": X["colour"][::-1]}
    assert np.array_equal(model.predict_proba(changed), model.predict_proba(X))


def test_a_sample_has_the_classes_in_their_shares() -> None:
    target = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
    rows = stratified_sample(target, 3, 100, seed=0)
    assert len(set(rows.tolist())) == 100
    assert torch.bincount(target[rows]).tolist() == [90, 9, 1]
    assert torch.equal(stratified_sample(target, 3, 1000, seed=0), torch.arange(1000))
    assert not torch.equal(stratified_sample(target, 3, 100, seed=1), rows)
    numbers = stratified_sample(torch.randn(50), 0, 10, seed=0)
    assert len(set(numbers.tolist())) == 10


def test_columns_are_ranked_by_what_they_tell() -> None:
    target = torch.randint(0, 2, (200,))
    numbers = torch.randn(200, 3)
    numbers[:, 1] += 3 * target
    codes = torch.stack((torch.randint(0, 4, (200,)), 2 + target), dim=1)
    kept = informative_columns(EncodedTable(numbers, codes), target, 2, 2)
    assert kept.tolist() == [1, 4]
    hidden = numbers.clone()
    hidden[:, 1] = torch.where(target.bool(), float("nan"), hidden[:, 0])  # missing tells the class
    assert informative_columns(EncodedTable(hidden, codes), target, 2, 2).tolist() == [1, 4]
    by_number = informative_columns(EncodedTable(numbers, codes), numbers[:, 2], 0, 1)
    assert by_number.tolist() == [2]


@pytest.mark.parametrize("kind", (InstantClassifier, InstantRegressor))
def test_a_saved_estimator_answers_alike(kind: Any, weights: Path, tmp_path: Path) -> None:
    X = table()
    y = classes_of(X) if kind is InstantClassifier else X["price"]
    model = kind(weights=weights, members=2).fit(X, y)
    save_estimator(model, tmp_path / "saved")
    again = load_estimator(tmp_path / "saved")
    assert type(again) is kind
    ask = "predict_proba" if kind is InstantClassifier else "predict"
    assert np.array_equal(getattr(again, ask)(X), getattr(model, ask)(X))
    assert float(again.model_.trust) == float(model.model_.trust)


def test_the_weight_of_the_process_has_the_least_crps(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = table()
    y = X["price"] + 0.5 * np.random.default_rng(1).normal(size=60)
    model = InstantRegressor(weights=weights).fit(X, y)
    predictor = model.model_
    assert isinstance(predictor, InstantPredictor)
    assert model.report_["process"] == pytest.approx(float(predictor.trust))
    assert InstantRegressor(weights=weights, calibrate=False).fit(X, y).model_.trust == 0.5
    monkeypatch.setattr(instant, "TRUST_ROWS", 0)
    # A network that says the same of every row, at the shares of the targets: some weight is best.
    edges = predictor.fine_edges.double()
    place = torch.searchsorted(edges[1:-1], predictor.known_target.double())
    shares = torch.bincount(place, minlength=len(edges) - 1).double() / 60
    rows = torch.arange(60)
    monkeypatch.setattr(instant, "predict_known_rows", lambda _: (rows, shares.expand(60, -1)))
    process = predictor.process()
    assert process is not None
    own = process.probabilities(*process.own, edges)
    mixed = [t * own + (1 - t) * shares for t in torch.linspace(0, 1, 101).double()]
    target = predictor.known_target.double()
    scores = torch.stack([crps_of(chances, edges, target).mean() for chances in mixed])
    assert instant.own_trust(predictor) == pytest.approx(0.01 * int(scores.argmin()), abs=0.02)


def test_it_can_be_explained(weights: Path) -> None:
    X = table()
    y = classes_of(X)
    model = InstantClassifier(weights=weights).fit(X, y)
    whole = explain_table(model, X, y, repeats=1)
    assert whole.columns == ("size", "price", "colour") or set(whole.columns) >= {"size", "price"}
    assert any(whole.permutation) and any(whole.gradient)
    assert whole.attention is not None and any(whole.attention)
    one = explain_row(model, X, 3)
    assert sum(one.contributions) == pytest.approx(one.output - one.baseline, abs=0.05)
    assert any(abs(contribution) > 1e-4 for contribution in one.contributions)


@pytest.mark.parametrize("name", ("members", "max_rows", "max_columns"))
@pytest.mark.parametrize("value", (0, 1.5, True))
def test_parameters_that_cannot_be_are_refused(name: str, value: Any, weights: Path) -> None:
    X = table()
    with pytest.raises(ConfigError, match=f"{name} must be a whole number, 1 or more"):
        InstantClassifier(weights=weights, **{name: value}).fit(X, classes_of(X))


def test_without_weights_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instant, "PACKAGE_WEIGHTS", Path("nowhere"))
    X = table()
    with pytest.raises(ConfigError, match="no weights for instant models"):
        InstantClassifier().fit(X, classes_of(X))


@pytest.mark.parametrize("classes", (0, 2, 3))
def test_the_comparison_has_a_row(
    classes: int, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instant, "PACKAGE_WEIGHTS", weights)
    numbers, codes = torch.randn(40, 2), torch.randint(0, 4, (40, 1))
    y = np.arange(40) % classes if classes else np.arange(40.0)
    train = EncodedTable(numbers, codes), y
    (row,) = compare_instant(train, train, classes)
    assert row["model"] == "Instant"
    assert np.isfinite(row["auc" if classes else "rmse"])
    monkeypatch.setattr(instant, "PACKAGE_WEIGHTS", Path("nowhere"))
    assert compare_instant(train, train, classes) == []
