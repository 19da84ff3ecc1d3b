"""Gradient boosting as a baseline: its inputs, its metrics, and the comparison table."""

import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from addnorm.data.table.encode import EncodedTable
from addnorm.tabular import compare as module
from addnorm.tabular.compare import Comparison, boosters, compare, matrix, small_categories


def table(rows: int, seed: int) -> EncodedTable:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(5, (rows, 1), generator=generator)
    return EncodedTable(torch.randn(rows, 2, generator=generator), codes)


@pytest.mark.parametrize("classes", (0, 2, 3))
def test_scikit_learn_comes_first(classes: int) -> None:
    name, model = next(boosters(classes, [2], seed=5))
    kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    assert name == "HistGradientBoosting" and type(model) is kind
    assert model.categorical_features == [2] and model.random_state == 5
    assert next(boosters(classes, [], seed=5))[1].categorical_features is None


@pytest.mark.parametrize("package", ("lightgbm", "xgboost", "catboost"))
@pytest.mark.parametrize("classes", (0, 2))
def test_other_libraries_are_used_if_installed(
    package: str, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        """Returns the name and the options of any estimator."""

        def __getattr__(self, name: str) -> Any:
            return lambda **options: (name, options)

    real = module.require
    monkeypatch.setattr(module, "find_spec", lambda name: name == package or None)
    monkeypatch.setattr(
        module, "require", lambda name, extra: Library() if name == package else real(name, extra)
    )
    models = dict(boosters(classes, [], seed=5))
    assert list(models) == ["HistGradientBoosting", package]
    name, options = models[package]
    assert name.endswith("Classifier" if classes else "Regressor")
    assert 5 in (options.get("random_state"), options.get("random_seed"))
    assert find_spec("sklearn") is not None


@pytest.mark.parametrize("classes", (0, 2))
def test_metrics_are_of_the_test_rows(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With shuffled test targets the metrics are no better than those of a constant."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    train, test = table(400, 0), table(200, 1)
    rng = np.random.default_rng(0)

    def targets(rows: EncodedTable) -> Any:
        score = rows.numbers[:, 0].numpy() + (rows.codes[:, 0] == 2).numpy()
        return (score > 0.3).astype(int) if classes else score

    comparison = compare((train, targets(train)), (test, targets(test)), classes)
    assert "HistGradientBoosting" in repr(comparison) and "<table>" in comparison._repr_html_()
    (good,) = comparison
    (bad,) = compare((train, targets(train)), (test, rng.permutation(targets(test))), classes)
    if classes:
        assert good["accuracy"] > 0.93 and bad["accuracy"] < 0.7
        assert set(good) >= {"model", "log_loss", "auc", "brier", "ece"}
    else:
        assert good["r2"] > 0.9 and bad["r2"] < 0
    assert good["fit_seconds"] > 0 and good["predict_seconds"] > 0


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
