"""Gradient boosting beside our model, on the same rows: one honest table."""

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from addnorm.data.frame import Array
from addnorm.data.recipe import Encoded
from addnorm.errors import require
from addnorm.tabular.metrics import class_figures, number_figures

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
        "catboost": lambda m: getattr(m, f"CatBoost{word}")(random_seed=seed, verbose=False),
    }
    for package, make in others.items():
        if find_spec(package) is not None:
            yield package, make(require(package, "tables"))


def compare(
    train: tuple[Encoded, Array], test: tuple[Encoded, Array], classes: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Each booster fitted on encoded rows and measured on others; classes 0 means numbers.

    Trees do not care how numbers are scaled; categories are given as categories.
    """
    count = train[0].numbers.shape[1]
    sizes = train[0].codes.max(dim=0).values.tolist() if len(train[0].codes.T) else []
    categories = [count + i for i, size in enumerate(sizes) if size < MOST_CATEGORIES]
    rows = []
    for name, model in boosters(classes, categories, seed):
        began = time.perf_counter()
        model.fit(_matrix(train[0]), train[1])
        fitted = time.perf_counter()
        if classes:
            figures = class_figures(np.asarray(model.predict_proba(_matrix(test[0]))), test[1])
        else:
            figures = number_figures(np.asarray(model.predict(_matrix(test[0]))), test[1])
        done = time.perf_counter()
        times = {"fit_seconds": fitted - began, "predict_seconds": done - fitted}
        rows.append({"model": name, **figures, **times})
    return rows


def _matrix(table: Encoded) -> Array:
    return np.concatenate((table.numbers.double().numpy(), table.codes.double().numpy()), axis=1)
