"""Baselines: their inputs, their metrics, and the comparison table."""

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from addnorm.data.table.encode import EncodedTable
from addnorm.tabular import compare as module
from addnorm.tabular.compare import (
    BaselineData,
    Comparison,
    compare,
    fit_scikit_learn,
    matrix,
    small_categories,
    tune_catboost,
)


def table(rows: int, seed: int) -> EncodedTable:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(5, (rows, 1), generator=generator)
    return EncodedTable(torch.randn(rows, 2, generator=generator), codes)


def targets(rows: EncodedTable, classes: int) -> Any:
    score = rows.numbers[:, 0].numpy() + (rows.codes[:, 0] == 2).numpy()
    return np.digitize(score, [0.3, 1.2][: classes - 1]) if classes else score


@pytest.fixture
def scikit_learn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)


@pytest.mark.slow
@pytest.mark.parametrize("classes", (0, 2, 3))
@pytest.mark.parametrize("held_out", (False, True))
def test_metrics_are_of_the_test_rows(
    classes: int, held_out: bool, scikit_learn_only: None
) -> None:
    """With shuffled test targets the metrics are no better than those of a constant."""
    train, test, valid = table(400, 0), table(200, 1), table(100, 2)
    data = train, targets(train, classes)
    held = (valid, targets(valid, classes)) if held_out else None
    rng = np.random.default_rng(0)
    comparison = compare(data, (test, targets(test, classes)), classes, valid=held)
    linear = "logistic regression" if classes else "ridge regression"
    assert [row["model"] for row in comparison] == [
        *("HistGradientBoosting", "random forest"),
        linear,
    ]
    assert linear in repr(comparison) and "<table>" in comparison._repr_html_()
    shuffled = compare(data, (test, rng.permutation(targets(test, classes))), classes, valid=held)
    for good, bad in zip(comparison, shuffled, strict=True):
        if classes:
            assert good["accuracy"] > 0.8 and bad["accuracy"] < 0.75
            assert set(good) >= {"model", "log_loss", "brier", "ece"}
        else:
            assert good["r2"] > 0.8 and bad["r2"] < 0.1
        assert good["fit_seconds"] > 0 and good["predict_seconds"] > 0
        assert good["version"].startswith("scikit-learn 1.") and good["settings"]


def test_boosting_stops_on_the_rows_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out targets that contradict the training rows end boosting at once."""
    train = table(200, 0)
    target = targets(train, 2)
    rounds = []
    real = BaselineData.predictor

    def remember(self: BaselineData, model: Any, prepare: Any) -> Any:
        rounds.append(model.n_iter_)
        return real(self, model, prepare)

    monkeypatch.setattr(BaselineData, "predictor", remember)
    monkeypatch.setattr(module, "BOOSTING_PATIENCE", 3)
    fit_scikit_learn(BaselineData((train, target), (train, 1 - target), 2))
    fit_scikit_learn(BaselineData((train, target), (train, target), 2))
    assert rounds[0] <= 4 < rounds[1]


class Library:
    """Stands for another library: every estimator remembers how it was made and fitted."""

    def __init__(self, fail: bool = False) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fail = fail

    def early_stopping(self, rounds: int, verbose: bool) -> str:
        return f"early stopping after {rounds}"

    def __getattr__(self, name: str) -> Any:
        def make(**options: Any) -> "Library":
            self.calls.append((name, options))
            return self

        return make

    def fit(self, X: Any, y: Any, **options: Any) -> "Library":
        if self.fail:
            raise RuntimeError("out of luck\nand more")
        self.calls.append(("fit", {"X": X, **options}))
        return self

    def predict_proba(self, X: Any) -> Any:
        return np.full((len(X), 2), 0.5)

    def predict(self, X: Any) -> Any:
        return np.zeros(len(X))


@pytest.mark.parametrize("package", ("lightgbm", "xgboost", "catboost"))
@pytest.mark.parametrize("classes", (0, 2))
def test_other_libraries_get_native_categories_and_the_held_out_rows(
    package: str, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, real = Library(), module.require
    monkeypatch.setattr(
        module, "require", lambda name, extra: library if name == package else real(name, extra)
    )
    train, valid = table(30, 0), table(10, 1)
    data = BaselineData((train, targets(train, 2)), (valid, targets(valid, 2)), classes, seed=5)
    predict = getattr(module, f"fit_{package}")(data)
    assert len(predict(valid)) == 10
    (name, made), (_, fitted) = library.calls
    assert name.endswith("Classifier" if classes else "Regressor")
    assert 5 in (made.get("random_state"), made.get("random_seed"))
    marked = {
        "lightgbm": fitted.get("categorical_feature") == [2],
        "xgboost": made.get("feature_types") == ["q", "q", "c"],
        "catboost": fitted.get("cat_features") == [2] and isinstance(fitted["X"][0, 2], str),
    }
    assert marked[package] and fitted["eval_set"]
    stops = {
        "lightgbm": fitted.get("callbacks") == ["early stopping after 50"],
        "xgboost": made.get("early_stopping_rounds") == 50,
        "catboost": fitted.get("early_stopping_rounds") == 50,
    }
    assert stops[package]


def test_a_library_that_fails_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: name == "catboost" or None)
    monkeypatch.setattr(module, "version", lambda name: "1")
    monkeypatch.setattr(module, "fit_scikit_learn", lambda data: lambda rows: np.zeros(len(rows)))
    real = module.require
    library = Library(fail=True)
    monkeypatch.setattr(
        module, "require", lambda name, extra: library if name == "catboost" else real(name, extra)
    )
    monkeypatch.setattr(module, "fit_forest", module.fit_scikit_learn)
    train = table(30, 0)
    messages: list[str] = []
    rows = compare((train, targets(train, 0)), (train, targets(train, 0)), 0, say=messages.append)
    names = [row["model"] for row in rows]
    assert names == ["HistGradientBoosting", "random forest", "ridge regression"]
    assert "CatBoost failed: RuntimeError: out of luck" in messages


def test_a_fit_is_timed_without_its_import_and_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first import of a library takes seconds; what it deprecates is not the user's concern."""
    real, imported = module.require, []

    def slow_import(name: str, extra: str) -> Any:
        if name == "sklearn.ensemble" and not imported:
            imported.append(name)
            now[0] += 100.0
        return real(name, extra)

    def fit(data: BaselineData) -> Any:
        module.require("sklearn.ensemble", "tables")
        warnings.warn("this will change", FutureWarning, stacklevel=1)
        return lambda rows: np.zeros(len(rows))

    now = [0.0]
    monkeypatch.setattr(module, "require", slow_import)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    one = module.Baseline("forest", "scikit-learn", "defaults", fit)
    monkeypatch.setattr(module, "baselines", lambda classes, seconds: [one])
    train = table(30, 0)
    (row,) = compare((train, targets(train, 0)), (train, targets(train, 0)), 0)
    assert imported and row["fit_seconds"] == 0.0


def test_catboost_is_tuned_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out loss chooses among the defaults and random settings, until the time is over."""
    losses, tried = iter((0.5, 0.3, 0.4)), []

    class Model:
        def __init__(self) -> None:
            self.loss = next(losses)

        def get_best_score(self) -> Any:
            return {"validation": {"Logloss": self.loss, "other": 0.0}}

        def get_all_params(self) -> Any:
            return {"loss_function": "Logloss"}

        def predict_proba(self, X: Any) -> Any:
            return np.full((len(X), 2), self.loss)

    def make(data: BaselineData, **parameters: Any) -> Model:
        tried.append(parameters)
        return Model()

    monkeypatch.setattr(module, "_catboost_model", make)
    times = iter((0.0, 4.0, 8.0, 12.0))
    train = table(30, 0)
    data = BaselineData((train, targets(train, 2)), (train, targets(train, 2)), 2)
    predict = tune_catboost(10.0, clock=lambda: next(times))(data)
    assert predict(train)[0, 0] == 0.3
    assert tried[0] == {} and len(tried) == 3 and 4 <= tried[1]["depth"] <= 10
    with pytest.raises(ValueError, match="tuning needs held-out rows"):
        tune_catboost(1.0)(BaselineData(data.train, None, 2))


def test_categories_with_too_many_values_are_left_out() -> None:
    """scikit-learn accepts codes up to 254 as categories."""
    codes = torch.tensor([[254, 255, 3], [0, 1, 2]])
    assert small_categories(EncodedTable(torch.zeros(2, 4), codes)) == [4, 6]
    assert small_categories(EncodedTable(torch.zeros(2, 4), torch.zeros(2, 0).long())) == []
    most = matrix(EncodedTable(torch.zeros(255, 0), torch.arange(255)[:, None]))
    known = HistGradientBoostingRegressor(categorical_features=[0], max_iter=2)
    assert known.fit(most, np.arange(255.0)).predict(most).shape == (255,)


def test_a_comparison_is_a_list_shown_as_a_table() -> None:
    rows = [{"model": "<b>", "auc": 0.912345, "rows": 7}, {"model": "other", "brier": 0.5}]
    comparison = Comparison(rows)
    assert comparison == rows and json.loads(json.dumps(comparison)) == rows
    assert repr(comparison).splitlines() == [
        "model  auc     rows  brier",
        "<b>    0.9123  7     –",
        "other  –       –     0.5",
    ]
    html = comparison._repr_html_()
    assert html.startswith("<table>") and html.endswith("</table>")
    assert "<td>&lt;b&gt;</td><td>0.9123</td><td>7</td><td>–</td>" in html and "<b>" not in html
    assert Comparison()._repr_html_().count("<tr>") == 1 and repr(Comparison()) == ""
