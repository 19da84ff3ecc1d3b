"""Boosting beside our model: what it is given, and what is said of it."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from addnorm.data.table.encode import EncodedTable
from addnorm.tabular import compare as module
from addnorm.tabular.compare import boosters, compare, matrix, small_categories


def table(rows: int, seed: int) -> EncodedTable:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(5, (rows, 1), generator=generator)
    return EncodedTable(torch.randn(rows, 2, generator=generator), codes)


@pytest.mark.parametrize("classes", (0, 2, 3))
def test_scikit_learns_boosting_comes_first(classes: int) -> None:
    name, model = next(boosters(classes, [2], seed=5))
    kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    assert name == "HistGradientBoosting" and type(model) is kind
    assert model.categorical_features == [2] and model.random_state == 5
    assert next(boosters(classes, [], seed=5))[1].categorical_features is None


@pytest.mark.parametrize("package", ("lightgbm", "xgboost", "catboost"))
@pytest.mark.parametrize("classes", (0, 2))
def test_the_others_stand_beside_where_they_are_installed(
    package: str, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        """Any booster by name, with what it was made with."""

        def __getattr__(self, name: str) -> Any:
            return lambda **options: (name, options)

    real = module.require
    monkeypatch.setattr(module, "find_spec", lambda name: name == package or None)
    monkeypatch.setattr(
        module, "require", lambda name, extra: Library() if name == package else real(name, extra)
    )
    found = dict(boosters(classes, [], seed=5))
    assert list(found) == ["HistGradientBoosting", package]
    name, options = found[package]
    assert name.endswith("Classifier" if classes else "Regressor")
    assert 5 in (options.get("random_state"), options.get("random_seed"))
    assert find_spec("sklearn") is not None


@pytest.mark.parametrize("classes", (0, 2))
def test_figures_are_of_the_other_rows(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learnt from some rows and measured on others, where a model of the mean is no better."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    train, test = table(400, 0), table(200, 1)
    rng = np.random.default_rng(0)

    def answers(some: EncodedTable) -> Any:
        clear = some.numbers[:, 0].numpy() + (some.codes[:, 0] == 2).numpy()
        return (clear > 0.3).astype(int) if classes else clear

    (good,) = compare((train, answers(train)), (test, answers(test)), classes)
    (bad,) = compare((train, answers(train)), (test, rng.permutation(answers(test))), classes)
    if classes:
        assert good["accuracy"] > 0.93 and bad["accuracy"] < 0.7
        assert set(good) >= {"model", "log_loss", "auc", "brier", "ece"}
    else:
        assert good["r2"] > 0.9 and bad["r2"] < 0
    assert good["fit_seconds"] > 0 and good["predict_seconds"] > 0


def test_categories_are_those_that_fit() -> None:
    """Codes up to 254: what scikit-learn's boosting takes as categories."""
    codes = torch.tensor([[254, 255, 3], [0, 1, 2]])
    assert small_categories(EncodedTable(torch.zeros(2, 4), codes)) == [4, 6]
    assert small_categories(EncodedTable(torch.zeros(2, 4), torch.zeros(2, 0).long())) == []
    most = matrix(EncodedTable(torch.zeros(255, 0), torch.arange(255)[:, None]))
    known = HistGradientBoostingRegressor(categorical_features=[0], max_iter=2)
    assert known.fit(most, np.arange(255.0)).predict(most).shape == (255,)
