"""Estimators: fitting and prediction, accepted inputs, saved files, messages."""

import ast
import inspect
import json
import pickle
import pydoc
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from addnorm.data.table.bins import make_edges
from addnorm.data.table.frame import Frame
from addnorm.data.table.infer import infer
from addnorm.data.table.schema import Schema
from addnorm.errors import ConfigError, InputError, SavedError
from addnorm.tabular import (
    FTTransformerClassifier,
    FTTransformerRegressor,
    SAINTClassifier,
    TabTransformerClassifier,
    load_estimator,
    save_estimator,
)
from addnorm.tabular.estimators import ESTIMATORS
from addnorm.tabular.fitting import TableTraining
from addnorm.tabular.holdout import hold_out
from tests.portable import training
from tests.tabular.data import QUICK, people

pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
X, Y = people()
DATE_COLUMNS = ["start", "start (day)", "start (month)", "start (weekday)"]


def documented_parameters(text: str | None) -> list[str]:
    """Return the names in the Parameters section of a numpydoc docstring, in their order."""
    section = (text or "").partition("Parameters\n----------\n")[2]
    section = re.split(r"\n\n\w+\n-{3,}\n", section)[0]
    return re.findall(r"^(\w+) : \S", section, flags=re.MULTILINE)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_parameter_is_documented(name: str) -> None:
    """The class docstring is what help() shows; IDEs show that of the constructor."""
    kind = ESTIMATORS[name]
    parameters = list(inspect.signature(kind).parameters)
    assert len(parameters) == 39
    assert documented_parameters(inspect.getdoc(kind)) == parameters
    assert documented_parameters(inspect.getdoc(kind.__init__)) == parameters
    shown = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    assert all(f" {parameter} : " in shown for parameter in parameters)


def test_documented_defaults_are_those_of_the_signature() -> None:
    text = inspect.getdoc(FTTransformerClassifier.__init__) or ""
    defaults = dict(re.findall(r"^(\w+) : .*default=(\S+)$", text, flags=re.MULTILINE))
    for name, parameter in inspect.signature(FTTransformerClassifier).parameters.items():
        assert ast.literal_eval(defaults[name]) == parameter.default, name


@pytest.mark.parametrize("kind", (FTTransformerClassifier, FTTransformerRegressor))
@pytest.mark.parametrize("method", ("fit", "pretrain"))
def test_every_argument_of_fitting_is_documented(kind: Any, method: str) -> None:
    arguments = list(inspect.signature(getattr(kind, method)).parameters)[1:]
    assert documented_parameters(inspect.getdoc(getattr(kind, method))) == arguments


@pytest.fixture(scope="module")
def fitted() -> FTTransformerClassifier:
    return FTTransformerClassifier(**QUICK | {"epochs": 25}).fit(X, Y)


@pytest.mark.slow
@pytest.mark.trains
def test_it_learns(fitted: FTTransformerClassifier) -> None:
    other, y = people(seed=1)
    assert fitted.score(other, y) > 0.9
    predicted = fitted.predict_proba(other)
    assert predicted.shape == (240, 2) and np.allclose(predicted.sum(axis=1), 1)
    assert list(fitted.classes_) == ["no", "yes"]
    assert fitted.report_["valid"]["accuracy"] > 0.85 and fitted.temperature_ != 1.0


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("kind", (TabTransformerClassifier, SAINTClassifier))
def test_other_models_learn(kind: Any) -> None:
    model = kind(**QUICK | {"width": 32, "epochs": 20}).fit(X, Y)
    other, y = people(seed=1)
    assert model.score(other, y) > 0.8


@pytest.mark.slow
@pytest.mark.trains
def test_regression_predicts_in_units_of_the_target() -> None:
    y = 1000 + 50 * np.nan_to_num(X.columns["age"], nan=40)
    model = FTTransformerRegressor(**QUICK | {"epochs": 25}).fit(X, y)
    assert model.score(X, y) > 0.9
    assert model.report_["valid"]["rmse"] < 0.3 * y.std()


@pytest.mark.trains
@pytest.mark.parametrize("make", (pandas.DataFrame, polars.DataFrame))
def test_every_data_frame_library_gives_the_same_predictions(
    fitted: FTTransformerClassifier, make: Any
) -> None:
    expected = fitted.predict_proba(X)
    start = X.columns["start"].astype("datetime64[us]")
    frame = make({**X.columns, "start": start})
    assert np.array_equal(fitted.predict_proba(frame), expected)
    assert np.array_equal(fitted.predict_proba(frame[list(X.columns)[::-1]]), expected)


@pytest.mark.trains
def test_errors_name_the_columns(fitted: FTTransformerClassifier) -> None:
    with pytest.raises(InputError, match="lacks 'age'"):
        fitted.predict(X.without("age"))
    with pytest.raises(InputError, match="has 'z', which training did not have"):
        fitted.predict(Frame("t", {**X.columns, "z": X.columns["age"]}))


@pytest.mark.trains
def test_missing_and_unknown_values_are_accepted(fitted: FTTransformerClassifier) -> None:
    rows = Frame("t", {name: column[:3].copy() for name, column in X.columns.items()})
    rows.columns["job"][:] = ["astronaut", None, "cook"]
    rows.columns["age"][:] = [np.nan, np.inf, -1e300]
    assert np.isfinite(fitted.predict_proba(rows)).all()


@pytest.mark.trains
def test_the_seed_makes_fit_reproducible() -> None:
    settings = QUICK | {"epochs": 2, "drop_cells": 0.2, "dropout": 0.1}
    torch.manual_seed(1)
    one = FTTransformerClassifier(**settings).fit(X, Y).predict_proba(X)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = FTTransformerClassifier(**settings).fit(X, Y).predict_proba(X)
    assert np.array_equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
    three = (
        FTTransformerClassifier(**settings | {"random_state": training.seed + 1})
        .fit(X, Y)
        .predict_proba(X)
    )
    assert not np.array_equal(one, three)


@pytest.mark.trains
@pytest.mark.parametrize(
    ("labels", "kind"),
    (([True, False], "b"), ([3, 7], "i"), (["ü", "x"], "U"), ([0, 1, 2], "i"), ([0.0, 1.0], "f")),
)
def test_labels_of_every_type(labels: list[Any], kind: str) -> None:
    y = np.array(labels)[np.arange(60) % len(labels)]
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X.take(np.arange(60)), y)
    assert model.classes_.tolist() == sorted(labels) and model.classes_.dtype.kind == kind
    assert set(model.predict(X).tolist()) <= set(labels)


@pytest.mark.trains
def test_a_class_with_one_row() -> None:
    y = np.array(["common"] * 100 + ["rare"])
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X.take(np.arange(101)), y)
    assert model.predict_proba(X).shape == (240, 2)


@pytest.mark.slow
@pytest.mark.trains
def test_sample_weights_are_used() -> None:
    """Rows with weight 0 have no effect: their labels are inverted."""
    weight = (np.arange(len(Y)) % 2 == 0).astype(float)
    inverted = np.where(weight > 0, Y, np.where(Y == "yes", "no", "yes"))
    model = FTTransformerClassifier(**QUICK | {"epochs": 25}).fit(X, inverted, sample_weight=weight)
    assert model.score(X, Y) > 0.85
    with pytest.raises(InputError, match="sample_weight must be 0 or more: got -1"):
        model.fit(X, Y, sample_weight=-np.ones(len(Y)))


@pytest.mark.trains
def test_eval_set_replaces_held_out_rows() -> None:
    other = people(60, seed=3)
    model = FTTransformerClassifier(**QUICK | {"epochs": 2}).fit(X, Y, eval_set=[other])
    assert model.report_["held_out"] == 60 and model.report_["rows"] == 240
    assert model.n_iter_ == model.report_["epochs"] == 2
    with pytest.raises(InputError, match="y must have only classes of the training data: got"):
        model.fit(X, Y, eval_set=(other[0], np.array(["maybe"] * 60)))
    with pytest.raises(InputError, match=r"eval_set must be a pair \(X, y\)"):
        model.fit(X, Y, eval_set=(other[0],))
    with pytest.raises(InputError, match="X and y must have the same number of rows: got 60 and 9"):
        model.fit(X, Y, eval_set=(other[0], other[1][:9]))


@pytest.mark.trains
def test_rows_returns_encoded_targets() -> None:
    """Classes are indices; numbers are standardised by mean and deviation of the training rows."""
    classes = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, Y)
    rows = classes.rows(X, Y)
    assert rows.target.tolist() == [sorted(set(Y)).index(label) for label in Y]
    assert classes.rows(X, Y.astype(object)).target.tolist() == rows.target.tolist()
    assert rows.table.numbers.shape[0] == len(rows) == len(Y)
    settings = QUICK | {"epochs": 1, "valid": 0.0}
    values = np.arange(len(Y), dtype=float)
    numbers = FTTransformerRegressor(**settings).fit(X, values)
    expected = (values - values.mean()) / values.std()
    np.testing.assert_allclose(numbers.rows(X, values).target.numpy(), expected, atol=1e-6)
    with pytest.raises(
        InputError, match="X and y must have the same number of rows: got 240 and 2"
    ):
        numbers.rows(X, values[:2])


class SuppliedLosses:
    """Replaces the held-out loss by supplied values, and records the weights at each evaluation."""

    def __init__(self, losses: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.losses, self.weights = iter(losses), []
        monkeypatch.setattr(TableTraining, "evaluate", self.evaluate)

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        self.weights.append({name: t.clone() for name, t in model.state_dict().items()})
        return {"loss": next(self.losses), "accuracy": 0.5}


@pytest.mark.trains
@pytest.mark.parametrize(
    ("epochs", "patience", "losses", "best"),
    (
        (12, 2, [0.9, 0.5, 0.6, 0.5], 1),  # equal is not better
        (12, 3, [0.9, 0.5, 0.6, 0.55, 0.4, 0.8, 0.7, 0.41], 4),
        (8, 9, [0.9, 0.3, 0.6, 0.4, 0.5, 0.7, 0.8, 0.9], 1),  # stopped by the epochs alone
    ),
)
def test_early_stopping_keeps_the_best_weights(
    epochs: int,
    patience: int,
    losses: list[float],
    best: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supplied = SuppliedLosses(losses, monkeypatch)
    settings = QUICK | {"epochs": epochs, "patience": patience}
    model = FTTransformerClassifier(**settings).fit(X, Y)
    assert [row["loss"] for row in model.report_["history"]] == losses
    assert model.report_["best_step"] == model.report_["history"][best]["step"]
    for i, weights in enumerate(supplied.weights):
        best_weights = model.model_.state_dict()
        assert all(torch.equal(best_weights[name], weights[name]) for name in best_weights) == (
            i == best
        )


@pytest.mark.trains
def test_predictions_use_the_best_weights() -> None:
    """The metrics of held-out rows are those of the weights with the smallest loss."""
    report = FTTransformerClassifier(**QUICK | {"epochs": 6, "patience": 6}).fit(X, Y).report_
    losses = [row["loss"] for row in report["history"]]
    assert report["valid"]["log_loss"] == pytest.approx(min(losses), abs=1e-4)


@pytest.mark.trains
def test_everything_is_fitted_on_training_rows_only() -> None:
    """The held-out last fifth has other numbers, another category, and a column that varies."""
    rng, inside = np.random.default_rng(0), np.arange(100) < 80
    columns = {
        "v": np.where(inside, rng.random(100), 1000.0),
        "c": np.where(inside, rng.choice(["a", "b"], 100), "z").astype(object),
        "k": np.where(inside, 1.0, rng.random(100)),
    }
    y = np.where(inside, rng.random(100) + columns["v"], 1e6)
    settings = QUICK | {"epochs": 1, "split": "time", "valid": 0.2, "rare": 1, "bins": "target"}
    model = FTTransformerRegressor(
        **settings, embedding="piecewise", embedding_options={"bins": 8}
    ).fit(Frame("t", columns), y)
    assert model.encoder_.names == ["v", "c"]
    assert "column 'k' is left out: constant: always '1'." in model.report_["notes"]
    assert model.encoder_.numbers[0].high < 1 and model.encoder_.categories[0].values == ("a", "b")
    assert model.mean_ == pytest.approx(y[:80].mean()) and model.scale_ == pytest.approx(
        y[:80].std()
    )
    numbers = model.encoder_.encode(Frame("t", columns)).numbers[:80].numpy()
    expected = make_edges(numbers, y[:80], kind="target", classes=False, bins=8, seed=0)
    assert model.model_.config.embedding_options["edges"] == expected


@pytest.mark.trains
def test_the_time_limit_is_respected() -> None:
    model = FTTransformerClassifier(**QUICK | {"epochs": 10_000, "minutes": 1e-4}).fit(X, Y)
    assert model.report_["epochs"] < 100  # of 10,000
    assert model.predict_proba(X).shape == (240, 2)


@pytest.mark.trains
def test_an_interrupted_fit_leaves_a_usable_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from addnorm.tabular import fitting

    class InterruptingLogger(fitting.FitLogger):
        def on_step(self, loop: Any, step: Any) -> None:
            loop.stop_requested = step.number == 3

    monkeypatch.setattr(fitting, "FitLogger", InterruptingLogger)
    model = FTTransformerClassifier(**QUICK).fit(X, Y)
    assert model.report_["stopped"] and model.report_["steps"] == 3
    assert model.predict(X).shape == (240,)


@pytest.mark.trains
@pytest.mark.parametrize("embedding", ("piecewise", "mixed"))
def test_ema_works_with_bins(embedding: str) -> None:
    settings = QUICK | {"epochs": 3, "ema": 0.9, "embedding": embedding}
    model = FTTransformerClassifier(**settings, embedding_options={"bins": 4}).fit(X, Y)
    assert np.isfinite([row["loss"] for row in model.report_["history"]]).all()


@pytest.mark.trains
def test_members() -> None:
    model = FTTransformerClassifier(epochs=1, members=3, width=16).fit(X, Y)
    assert model.model_.config.members == 3 and model.predict_proba(X).shape == (240, 2)


@pytest.mark.trains
def test_schema_overrides_the_inferred_kinds(tmp_path: Path) -> None:
    quick = QUICK | {"epochs": 1}
    model = FTTransformerClassifier(**quick, schema={"noise": "ignore"}).fit(X, Y)
    assert "noise" not in model.encoder_.names
    assert "column 'noise' is left out: as requested." in model.report_["notes"]
    path = tmp_path / "schema.toml"
    infer(X).change({"start": "ignore"}).save(path)
    names = FTTransformerClassifier(**quick, schema=path).fit(X, Y).encoder_.names
    assert names == ["age", "noise", "job"]
    values = Schema.load(path)
    assert FTTransformerClassifier(**quick, schema=values).fit(X, Y).encoder_.names == names
    with pytest.raises(ConfigError, match="schema must be a Schema, a path, or a dictionary"):
        FTTransformerClassifier(**quick, schema=3).fit(X, Y)


@pytest.mark.parametrize(
    ("y", "message"),
    (
        (["a"] * 240, "the target has one class, .*'a'"),
        (None, "requires y to be passed, but the target y is None"),
        ([None] * 240, "Input y contains NaN or None: 240 targets are missing"),
        (["a", "b"], "X and y must have the same number of rows: got 240 and 2"),
    ),
)
def test_invalid_classes(y: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FTTransformerClassifier(**QUICK).fit(X, y)


def test_invalid_numbers() -> None:
    with pytest.raises(InputError, match=r"y must be numbers: got <U\d+. Try the classifier"):
        FTTransformerRegressor(**QUICK).fit(X, Y)
    with pytest.raises(InputError, match="y contains NaN or infinity: every row must have a numb"):
        FTTransformerRegressor(**QUICK).fit(X, np.full(240, np.inf))
    with pytest.raises(ConfigError, match="epochs must be a whole number, 1 or more: got -1"):
        FTTransformerRegressor(**QUICK | {"epochs": -1}).fit(X, X.columns["noise"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    (
        ("epochs", 0, "epochs must be a whole number, 1 or more: got 0. Leave it out."),
        ("batch_size", 2.5, "batch_size must be a whole number, 1 or more: got 2.5"),
        ("learning_rate", -1.0, "learning_rate must be 0 or more: got -1.0"),
        ("minutes", -1, "minutes must be 0 or more: got -1"),
        ("valid", "much", "valid must be between 0 and 1: got 'much'"),
        ("dropout", 2, "dropout must be between 0 and 1: got 2"),
        ("members", True, "members must be a whole number, 1 or more: got True"),
        ("random_state", -1, "random_state must be 0 or more: got -1"),
    ),
)
def test_invalid_parameters(name: str, value: Any, message: str) -> None:
    model = FTTransformerClassifier(**QUICK | {name: value})
    for method in (lambda: model.fit(X, Y), lambda: model.pretrain(X)):
        with pytest.raises(ConfigError) as caught:
            method()
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("y", "message"),
    (
        (pandas.array([True, None] * 120, dtype="boolean"), "contains NaN or None: 120 targets"),
        (np.array([1, "a"] * 120, dtype=object), "y has int and str. Convert them to texts"),
        (np.array([Decimal(1), Decimal(2)] * 120), "y has Decimal. Convert them to texts"),
    ),
)
def test_class_labels_of_unsupported_types(y: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FTTransformerClassifier(**QUICK).fit(X, y)


def test_numeric_targets_out_of_range_or_of_other_types() -> None:
    model = FTTransformerRegressor(**QUICK)
    with pytest.raises(InputError, match=r"y must be between ±1e\+150: got 1e\+300\. Use a larger"):
        model.fit(X, np.array([0.0, 1e300] * 120))
    with pytest.raises(
        InputError, match=r"y must be numbers: got timedelta64.*Convert it to a unit"
    ):
        model.fit(X, np.ones(240, dtype="timedelta64[s]"))
    with pytest.raises(InputError, match="Input y contains NaN or infinity: every row must have"):
        model.fit(X, np.array([1, pandas.NA] * 120, dtype=object))


def test_eval_set_is_a_single_pair() -> None:
    with pytest.raises(InputError, match=r"eval_set must be a pair \(X, y\), or a list of one"):
        FTTransformerClassifier(**QUICK).fit(X, Y, eval_set=[(X, Y), (X, Y)])


@pytest.mark.trains
def test_rows_as_a_list_of_dictionaries(fitted: FTTransformerClassifier) -> None:
    expected = fitted.predict(X)[0]
    row = {name: column[0] for name, column in X.columns.items()}
    assert fitted.predict([row, {**row, "age": None}])[0] == expected
    with pytest.raises(InputError, match=r"'age' is not one\. Try \[value\] for one row"):
        fitted.predict(row)
    for empty in (X.take(np.arange(0)), pandas.DataFrame(X.columns).iloc[:0]):
        assert fitted.predict(empty).shape == (0,)
        assert fitted.predict_proba(empty).shape == (0, len(fitted.classes_))


@pytest.mark.trains
def test_text_in_a_numeric_column_gives_a_warning(fitted: FTTransformerClassifier) -> None:
    rows = X.take(np.arange(4))
    age = np.array(["31 years", "-", "40", None], dtype=object)
    with pytest.warns(UserWarning, match=r"'age': 1 of 4 values are not numeric \(for example '3"):
        predicted = fitted.predict_proba(Frame("t", {**rows.columns, "age": age}))
    number = np.array([np.nan, np.nan, 40, np.nan])
    same = fitted.predict_proba(Frame("t", {**rows.columns, "age": number}))
    assert np.array_equal(predicted, same)


@pytest.mark.trains
def test_notes_report_unusual_columns() -> None:
    price = np.array([f"${1000 + i:,}.50" for i in range(240)], dtype=object)
    code = np.array(["01067", "80331", "20095"] * 80, dtype=object)
    table = Frame("t", {**X.columns, "price": price, "code": code})
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(table, Y)
    assert model.report_["notes"] == [
        "column 'price': numbers are read in the form $1,234.5.",
        "column 'code': digits with leading zeros are treated as codes, not numbers.",
    ]
    assert model.encoder_.names == ["age", "noise", *DATE_COLUMNS, "price", "job", "code"]


# ── scikit-learn tools ────────────────────────────────────────────────────────────────────────────


@pytest.mark.trains
def test_pipelines_searches_and_calibration() -> None:
    numbers = np.column_stack((np.nan_to_num(X.columns["age"]), X.columns["noise"]))
    quick = FTTransformerClassifier(**QUICK | {"epochs": 2})
    scaled = make_column_transformer((StandardScaler(), ["age"]), remainder="passthrough")
    scaled.set_output(transform="pandas")
    pipe = make_pipeline(scaled, clone(quick))
    pipe.fit(pandas.DataFrame(numbers, columns=["age", "noise"]), Y)
    assert list(pipe[-1].feature_names_in_) == ["standardscaler__age", "remainder__noise"]
    search = GridSearchCV(quick, {"depth": [1, 2]}, cv=2).fit(numbers, Y)
    assert search.best_params_["depth"] in (1, 2)
    assert CalibratedClassifierCV(quick, cv=2).fit(numbers, Y).predict_proba(numbers).shape == (
        240,
        2,
    )
    assert cross_val_score(quick, numbers, Y, cv=2).shape == (2,)


# ── Saved estimators ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.trains
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_loaded_estimator_predicts_the_same(tmp_path: Path, name: str) -> None:
    settings = QUICK | {"epochs": 1}
    if name.startswith("FT"):
        settings |= {"embedding": "piecewise", "members": 2}
    y = X.columns["noise"] if name.endswith("Regressor") else Y
    if name.endswith("Ordinal"):
        y = np.arange(len(Y)) % 3
    model: Any = ESTIMATORS[name](**settings)
    model.fit(X, y)
    save_estimator(model, tmp_path / "m")
    again: Any = load_estimator(tmp_path / "m")
    assert type(again) is type(model) and again.get_params() == model.get_params()
    assert np.array_equal(again.predict(X), model.predict(X))
    assert again.predict(X).dtype == model.predict(X).dtype
    pickled = pickle.loads(pickle.dumps(model))
    assert np.array_equal(pickled.predict(X), model.predict(X))


@pytest.mark.trains
def test_no_training_row_is_saved(fitted: FTTransformerClassifier, tmp_path: Path) -> None:
    """A text that only one row has is in no file."""
    table = Frame("t", {name: column.copy() for name, column in X.columns.items()})
    table.columns["noise"][5] = 0.123456789
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}, rare=2)
    table.columns["job"][5] = "Methuselah"
    model.fit(table, Y)
    save_estimator(model, tmp_path)
    for content in (pickle.dumps(model), (tmp_path / "model.safetensors").read_bytes()):
        assert b"Methuselah" not in content and len(content) < 300_000


@pytest.mark.trains
def test_schema_and_report_are_saved_as_readable_files(
    fitted: FTTransformerClassifier, tmp_path: Path
) -> None:
    save_estimator(fitted, tmp_path)
    assert Schema.load(tmp_path / "schema.toml") == fitted.encoder_.schema
    assert json.loads((tmp_path / "report.json").read_text())["rows"] == 192


@pytest.mark.trains
def test_date_classes_are_saved(tmp_path: Path) -> None:
    y = np.array(["2024-01-01", "2024-02-01"], dtype="datetime64[D]")[np.arange(240) % 2]
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, y)
    save_estimator(model, tmp_path)
    assert np.array_equal(load_estimator(tmp_path).predict(X), model.predict(X))


@pytest.mark.trains
@pytest.mark.parametrize("name", ("schema.toml", "report.json"))
def test_readable_files_may_be_deleted_but_not_edited(
    fitted: FTTransformerClassifier, tmp_path: Path, name: str
) -> None:
    save_estimator(fitted, tmp_path)
    path, before = tmp_path / name, load_estimator(tmp_path).predict(X)
    for content in (b"", b"[[", b"\xff\xfe", b"target = 'z'\n"):
        path.write_bytes(content)
        with pytest.raises(SavedError, match=f"{name}' differs from what model.safetensors holds"):
            load_estimator(tmp_path)
    path.unlink()
    assert np.array_equal(load_estimator(tmp_path).predict(X), before)


# ── Held-out rows ─────────────────────────────────────────────────────────────────────────────────


def test_held_out_rows_are_stratified() -> None:
    classes = np.array([0] * 80 + [1] * 20 + [2])
    train, valid = hold_out(101, 0.2, classes=classes, seed=3)
    assert sorted([*train, *valid]) == list(range(101))
    assert np.bincount(classes[valid], minlength=3).tolist() == [16, 4, 0]


def test_groups_and_time() -> None:
    groups = np.repeat(np.arange(10), 7)
    train, valid = hold_out(70, 0.3, groups=groups)
    assert not set(groups[train]) & set(groups[valid]) and len(valid) == 21
    train, valid = hold_out(70, 0.3, order="time")
    assert valid.tolist() == list(range(49, 70))
    assert len(hold_out(20, None)[1]) == 0 and len(hold_out(100, None)[1]) == 20
    with pytest.raises(
        ConfigError, match="fraction to hold out must be at least 0 and below 1: got 1"
    ):
        hold_out(70, 1.0)
    with pytest.raises(InputError, match="at least two groups to hold one out: got 1"):
        hold_out(5, 0.2, groups=np.zeros(5))
    with pytest.raises(ConfigError, match="split has no choice 'tme'"):
        hold_out(50, 0.2, order="tme")


@pytest.mark.trains
def test_groups_are_ignored_with_an_eval_set() -> None:
    groups = np.repeat(np.arange(10), 7)
    train, valid = hold_out(70, 0, groups=groups)
    assert len(train) == 70 and not len(valid)
    rows, y = X.take(np.arange(70)), Y[:70]
    model = FTTransformerClassifier(**QUICK | {"epochs": 1})
    model.fit(rows, y, eval_set=people(30, seed=3), groups=groups)
    assert model.report_["rows"] == 70 and model.report_["held_out"] == 30
    assert "groups are ignored, because eval_set is passed." in model.report_["notes"]
    model.fit(rows, y, groups=groups)
    assert model.report_["rows"] == 56
    assert "2 of 10 groups are held out." in model.report_["notes"]


def test_the_largest_group_is_a_training_group() -> None:
    groups = np.array(["all"] * 90 + ["a"] * 4 + ["b"] * 6)
    for seed in range(9):
        train, valid = hold_out(100, 0.1, groups=groups, seed=seed)
        assert set(groups[valid]) == {"a", "b"} and len(train) == 90
    _, valid = hold_out(100, 0.01, groups=groups)
    assert set(groups[valid]) == {"a"}


@pytest.mark.parametrize(
    ("groups", "message"),
    (
        (np.arange(3), "groups must have one value for each of 240 rows: got 3"),
        ([None, *range(239)], "every row must have a group: 1 has none. Leave the row out"),
    ),
)
def test_invalid_groups(groups: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FTTransformerClassifier(**QUICK).fit(X, Y, groups=groups)


@pytest.mark.trains
def test_groups_and_time_cannot_be_combined() -> None:
    groups = np.arange(240) % 6
    with pytest.raises(ConfigError, match="by groups or by time, not by both"):
        FTTransformerClassifier(**QUICK, split="time").fit(X, Y, groups=groups)
    mixed = [1, "1", 2.0, "b", True, np.float64(3)] * 40
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, Y, groups=mixed)
    assert "1 of 5 groups are held out." in model.report_["notes"]


@pytest.mark.trains
def test_a_note_reports_a_class_without_training_rows() -> None:
    y = np.where(np.arange(240) < 230, Y, "late")
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}, split="time").fit(X, y)
    assert (
        "no training row has the class 'late': all of its rows are held out."
        in model.report_["notes"]
    )
