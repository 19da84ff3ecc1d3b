"""Gradient boosting beside our model, on the same rows: one honest table."""

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from addnorm.data.table.encode import MISSING, EncodedTable
from addnorm.data.table.frame import Array
from addnorm.errors import require
from addnorm.metrics import classification_metrics, regression_metrics

MOST_CATEGORIES = 255


def boosters(classes: int, categories: list[int], seed: int) -> Iterator[tuple[str, Any]]:
    """scikit-learn's boosting, and the others that are installed, with their own defaults."""
    ensemble = require("sklearn.ensemble", "tables")
    names = ("HistGradientBoostingClassifier", "HistGradientBoostingRegressor")
    kind = getattr(ensemble, names[0 if classes else 1])
    known = categories or None
    yield (
        "HistGradientBoosting",
        kind(categorical_features=known, early_stopping=True, max_iter=500, random_state=seed),
    )
    word = "Classifier" if classes else "Regressor"
    others: dict[str, Callable[[Any], Any]] = {
        "lightgbm": lambda m: getattr(m, f"LGBM{word}")(random_state=seed, verbose=-1),
        "xgboost": lambda m: getattr(m, f"XGB{word}")(random_state=seed),
        "catboost": lambda m: getattr(m, f"CatBoost{word}")(
            random_seed=seed, verbose=False, allow_writing_files=False
        ),
    }
    for package, make in others.items():
        if find_spec(package) is not None:
            yield package, make(require(package, "tables"))


def compare(
    train: tuple[EncodedTable, Array], test: tuple[EncodedTable, Array], classes: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Each booster fitted on encoded rows and measured on others; classes 0 means numbers.

    Trees do not care how numbers are scaled; categories are given as categories.
    """
    rows = []
    for name, model in boosters(classes, small_categories(train[0]), seed):
        began = time.perf_counter()
        model.fit(matrix(train[0]), train[1])
        fitted = time.perf_counter()
        if classes:
            figures = classification_metrics(
                np.asarray(model.predict_proba(matrix(test[0]))), test[1]
            )
        else:
            figures = regression_metrics(model.predict(matrix(test[0])), test[1])
        done = time.perf_counter()
        times = {"fit_seconds": fitted - began, "predict_seconds": done - fitted}
        rows.append({"model": name, **figures, **times})
    return rows


def small_categories(table: EncodedTable) -> list[int]:
    """Columns of the matrix that are categories with few enough values to be given as such."""
    count, codes = table.numbers.shape[1], table.codes
    sizes = codes.max(dim=0).values.tolist() if len(codes.T) else []
    return [count + i for i, size in enumerate(sizes) if size < MOST_CATEGORIES]


def matrix(table: EncodedTable) -> Array:
    """Encoded rows as boosters take them: numbers, then codes; NaN where a value is missing."""
    codes = table.codes.double()
    codes = codes.masked_fill(table.codes == MISSING, float("nan"))
    return np.concatenate((table.numbers.double().numpy(), codes.numpy()), axis=1)
