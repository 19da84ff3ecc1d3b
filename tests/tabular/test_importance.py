"""Permutation importance with its error over rows."""

from typing import Any

import numpy as np
import pytest

from addnorm.tabular import FTTransformerClassifier, FTTransformerOrdinal
from addnorm.tabular.importance import MIN_SHUFFLED, measure_importance, permutation_importance

SMALL: dict[str, Any] = {"width": 8, "depth": 1, "heads": 2, "epochs": 1, "random_state": 0}
RNG = np.random.default_rng(0)
X = {"useful": RNG.normal(size=200), "noise": RNG.normal(size=200), "kind": RNG.choice(["a"], 200)}
Y = (X["useful"] > 0).astype(int)


@pytest.mark.trains
def test_mean_and_standard_error_over_rows() -> None:
    model = FTTransformerClassifier(**SMALL).fit(X, Y)
    rows = model.rows(X, Y)
    found = measure_importance(model, rows, seed=3)
    assert {each["column"] for each in found} == {"useful", "noise"}
    assert [each["importance"] for each in found] == sorted(
        (each["importance"] for each in found), reverse=True
    )
    rng = np.random.default_rng(3)
    drawn = np.sort(rng.choice(200, 200, replace=False))
    table = rows.table.take(drawn)
    rises = permutation_importance(model.model_, table, rows.target[drawn], [0, 1], rng, 3)
    by_name = {each["column"]: each for each in found}
    for index, name in enumerate(("useful", "noise")):
        one = by_name[name]
        assert one["importance"] == pytest.approx(rises[:, index].mean())
        assert one["error"] == pytest.approx(rises[:, index].std(ddof=1) / np.sqrt(200))


@pytest.mark.trains
def test_many_columns_shuffle_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FTTransformerClassifier(**SMALL).fit(X, Y)
    seen = []

    def record(model: Any, table: Any, *rest: Any) -> Any:
        seen.append(len(table))
        return np.zeros((len(table), 2))

    monkeypatch.setattr("addnorm.tabular.importance.permutation_importance", record)
    measure_importance(model, model.rows(X, Y), most=600)
    measure_importance(model, model.rows(X, Y), most=1)
    assert seen == [100, MIN_SHUFFLED]


@pytest.mark.trains
def test_ordered_classes() -> None:
    target = np.digitize(X["useful"], [-0.5, 0.5])
    model = FTTransformerOrdinal(**SMALL).fit(X, target)
    found = measure_importance(model, model.rows(X, target))
    assert all(np.isfinite(each["importance"]) for each in found)
