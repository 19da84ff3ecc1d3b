"""Folds: which rows a model is trained on, out-of-fold predictions, saving and explaining."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.data.table.encode import EncodedTable
from addnorm.errors import ConfigError, InputError
from addnorm.models.tabular import FoldModel
from addnorm.tabular import (
    FTTransformerClassifier,
    FTTransformerRegressor,
    load_estimator,
    save_estimator,
)
from addnorm.tabular.explain import explain_row
from addnorm.tabular.fitting import FitSettings, Rows, TableTraining, held_out_outputs
from addnorm.tabular.holdout import make_folds
from tests.tabular.data import QUICK, people

SMALL: dict[str, Any] = QUICK | {"epochs": 1, "random_state": 0}


def test_folds_are_of_equal_size_and_keep_the_shares_of_classes() -> None:
    classes = np.array([0] * 70 + [1] * 30)
    folds = make_folds(100, 5, classes=classes, seed=0)
    assert np.bincount(folds).tolist() == [20] * 5
    assert all(5 <= classes[folds == fold].sum() <= 7 for fold in range(5))
    assert (folds == make_folds(100, 5, classes=classes, seed=0)).all()
    assert (folds != make_folds(100, 5, classes=classes, seed=1)).any()


def test_groups_stay_in_one_fold() -> None:
    groups = np.repeat(np.arange(12), [1, 1, 2, 3, 5, 8, 1, 1, 2, 3, 5, 8])
    folds = make_folds(40, 4, groups=groups, seed=0)
    assert all(len(set(folds[groups == group])) == 1 for group in range(12))
    assert np.ptp(np.bincount(folds)) <= 1
    with pytest.raises(InputError, match="as many groups as folds: got 2"):
        make_folds(4, 3, groups=np.array([0, 0, 1, 1]), seed=0)


@pytest.mark.parametrize("count", (1, 5))
def test_the_number_of_folds_is_checked(count: int) -> None:
    with pytest.raises(ConfigError, match="folds must be between 2 and the number of rows, 4"):
        make_folds(4, count, seed=0)


@pytest.fixture(scope="module")
def fitted() -> FTTransformerClassifier:
    X, y = people(90)
    return FTTransformerClassifier(**SMALL, folds=3).fit(X, y)


@pytest.mark.trains
def test_no_model_is_trained_on_its_own_fold(fitted: FTTransformerClassifier) -> None:
    """The gradient of a model does not depend on the rows of its fold, but on all others."""
    model = fitted.model_
    assert isinstance(model, FoldModel)
    numbers = torch.randn(6, model.config.numbers)
    codes = torch.zeros(6, len(model.config.categories), dtype=torch.long)
    fold = torch.tensor([0, 0, 1, 1, 2, 2])
    rows = Rows(EncodedTable(numbers, codes), torch.tensor([0, 1] * 3), torch.ones(6), fold)
    training = TableTraining(rows, None, FitSettings(batch=6, epochs=1, rate=0.1), 2)
    batch = training.batch(torch.arange(6))
    batch["numbers"].requires_grad_()
    for number, part in enumerate(model.eval().parts()):
        model.zero_grad()
        batch["numbers"].grad = None
        loss = training.loss(model, batch, 6)
        (own,) = torch.autograd.grad(loss, [part.head.bias], create_graph=True)
        own.sum().backward()
        moved = batch["numbers"].grad.abs().sum(dim=1) > 0
        assert (moved == (fold != number)).all()


@pytest.mark.trains
def test_out_of_fold_outputs_are_those_of_the_model_without_the_row(
    fitted: FTTransformerClassifier,
) -> None:
    X, _ = people(90)
    table = fitted.encoder_.encode(X)
    fold = torch.arange(90) % 3
    rows = Rows(table, torch.zeros(90, dtype=torch.long), torch.ones(90), fold)
    outputs = held_out_outputs(fitted.model_, rows, 90)
    each = fitted.model_(table.numbers, table.codes)
    assert torch.allclose(outputs[:, 0], each[torch.arange(90), fold], atol=1e-5)
    assert fitted.report_["held_out"] == fitted.report_["rows"] == 90
    assert fitted.report_["folds"] == 3
    mean = each.mean(dim=1)[:, 0] / fitted.temperature_
    assert np.allclose(fitted.predict_proba(X)[:, 1], mean.sigmoid().detach(), atol=1e-6)


@pytest.mark.trains
def test_a_model_with_folds_is_saved_and_explained(
    fitted: FTTransformerClassifier, tmp_path: Path
) -> None:
    X, _ = people(90)
    save_estimator(fitted, tmp_path / "model")
    loaded = load_estimator(tmp_path / "model")
    assert (loaded.predict_proba(X) == fitted.predict_proba(X)).all()
    explanation = explain_row(fitted, X, 0)
    assert np.isfinite(explanation.contributions).all()


@pytest.mark.trains
def test_a_regressor_with_folds_is_calibrated_on_all_rows(tmp_path: Path) -> None:
    X, _ = people(120)
    model = FTTransformerRegressor(**SMALL, folds=2).fit(X, X.columns["noise"])
    assert model.predict_interval(X, 0.8).shape == (120, 2)
    assert model.report_["valid"]["rmse"] > 0 and model.report_["held_out"] == 120
    save_estimator(model, tmp_path / "model")
    loaded: Any = load_estimator(tmp_path / "model")
    assert (loaded.predict_interval(X, 0.8) == model.predict_interval(X, 0.8)).all()


def test_folds_exclude_other_ways_to_hold_out_rows() -> None:
    X, y = people(60)
    with pytest.raises(ConfigError, match="folds and eval_set exclude one another"):
        FTTransformerClassifier(**SMALL, folds=2).fit(X, y, eval_set=(X, y))
    with pytest.raises(ConfigError, match="exclude split='time'"):
        FTTransformerClassifier(**SMALL, folds=2, split="time").fit(X, y)
