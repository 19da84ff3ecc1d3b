"""scikit-learn's estimator checks; those that cannot pass are listed with the reason."""

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from addnorm.tabular import (
    FTTransformerClassifier,
    FTTransformerOrdinal,
    FTTransformerRegressor,
    InstantClassifier,
    InstantRegressor,
    SAINTClassifier,
    SAINTRegressor,
    TabTransformerClassifier,
    TabTransformerRegressor,
)
from addnorm.tabular.instant import PACKAGE_WEIGHTS as INSTANT_WEIGHTS

SMALL: dict[str, Any] = {
    "width": 16,
    "depth": 1,
    "heads": 2,
    "epochs": 12,
    "batch_size": 32,
    "learning_rate": 5e-3,
    "attention_dropout": 0.0,
    "ffn_dropout": 0.0,
    "drop_cells": 0.0,
    "random_state": 0,
}
LONGER = SMALL | {"epochs": 60, "learning_rate": 1e-2}
"""TabTransformer without categories is an MLP with as many units as columns: it learns slowly.
Blobs are not in the order of their classes: a model of ordered classes needs longer, too."""
PACKAGE_WEIGHTS = {"check_sample_weight_equivalence_on_dense_data": "batches are drawn by row"}
BATCH_DEPENDENT = "the prediction for a row depends on the other rows of its batch"


def expected(estimator: Any) -> dict[str, str]:
    if estimator.ordered:
        return PACKAGE_WEIGHTS | {"check_classifiers_classes": "ordered classes must be numbers"}
    if estimator.kind != "saint":
        return PACKAGE_WEIGHTS
    return PACKAGE_WEIGHTS | {
        "check_methods_subset_invariance": BATCH_DEPENDENT,
        "check_methods_sample_order_invariance": BATCH_DEPENDENT,
    }


@pytest.mark.trains
@pytest.mark.slow
@parametrize_with_checks(
    [
        FTTransformerClassifier(**SMALL),
        FTTransformerOrdinal(**LONGER),
        FTTransformerRegressor(**SMALL),
        TabTransformerClassifier(**LONGER),
        TabTransformerRegressor(**LONGER),
        SAINTClassifier(**SMALL),
        SAINTRegressor(**SMALL),
    ],
    expected_failed_checks=expected,
    xfail_strict=False,  # a check of rounding may pass by chance on another CPU
)
def test_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.skipif(not INSTANT_WEIGHTS.exists(), reason="the package has no instant weights")
@parametrize_with_checks([InstantClassifier(), InstantRegressor()])
def test_checks_of_instant_estimators(estimator: Any, check: Any) -> None:
    check(estimator)
