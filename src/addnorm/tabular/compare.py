"""Gradient boosting as a baseline, fitted and evaluated on the same rows."""

import time
from collections.abc import Callable, Iterator
from html import escape
from importlib.util import find_spec
from typing import Any

import numpy as np

from addnorm.data.table.encode import MISSING, EncodedTable
from addnorm.data.table.frame import Array
from addnorm.errors import require
from addnorm.metrics import classification_metrics, regression_metrics

MAX_CATEGORIES = 255
"""Categories that scikit-learn's gradient boosting accepts in a column."""


def boosters(classes: int, categories: list[int], seed: int) -> Iterator[tuple[str, Any]]:
    """Yield scikit-learn's gradient boosting and others that are installed, with their defaults."""
    ensemble = require("sklearn.ensemble", "tables")
    names = ("HistGradientBoostingClassifier", "HistGradientBoostingRegressor")
    kind = getattr(ensemble, names[0 if classes else 1])
    yield (
        "HistGradientBoosting",
        kind(
            categorical_features=categories or None,
            early_stopping=True,
            max_iter=500,
            random_state=seed,
        ),
    )
    suffix = "Classifier" if classes else "Regressor"
    others: dict[str, Callable[[Any], Any]] = {
        "lightgbm": lambda m: getattr(m, f"LGBM{suffix}")(random_state=seed, verbose=-1),
        "xgboost": lambda m: getattr(m, f"XGB{suffix}")(random_state=seed),
        "catboost": lambda m: getattr(m, f"CatBoost{suffix}")(
            random_seed=seed, verbose=False, allow_writing_files=False
        ),
    }
    for package, make in others.items():
        if find_spec(package) is not None:
            yield package, make(require(package, "tables"))


class Comparison(list[dict[str, Any]]):
    """One row of metrics for each model: a list that is shown as a table.

    >>> Comparison([{"model": "one", "auc": 0.9}, {"model": "two", "auc": 0.75, "brier": 0.125}])
    model  auc   brier
    one    0.9   –
    two    0.75  0.125
    """

    def cells(self) -> list[list[str]]:
        """Return the header and the rows as texts, the figures with four digits."""
        names = list(dict.fromkeys(name for row in self for name in row))
        return [names, *([_format_figure(row.get(name)) for name in names] for row in self)]

    def __repr__(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        header, *rows = self.cells()
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _format_figure(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def compare(
    train: tuple[EncodedTable, Array], test: tuple[EncodedTable, Array], classes: int, seed: int = 0
) -> "Comparison":
    """Fit gradient boosting on the training rows, and return the metrics of each library.

    The scaling of numbers does not matter to trees; categorical columns are passed as such.

    Parameters
    ----------
    train, test : encoded rows and their targets: class indices, or numbers.
    classes : number of classes; 0 for regression.
    seed : the random seed.
    """
    rows = Comparison()
    for name, model in boosters(classes, small_categories(train[0]), seed):
        start = time.perf_counter()
        model.fit(matrix(train[0]), train[1])
        fitted = time.perf_counter()
        if classes:
            figures = classification_metrics(
                np.asarray(model.predict_proba(matrix(test[0]))), test[1]
            )
        else:
            figures = regression_metrics(model.predict(matrix(test[0])), test[1])
        done = time.perf_counter()
        times = {"fit_seconds": fitted - start, "predict_seconds": done - fitted}
        rows.append({"model": name, **figures, **times})
    return rows


def small_categories(table: EncodedTable) -> list[int]:
    """Return the columns of the matrix that are categories with few enough values."""
    count, codes = table.numbers.shape[1], table.codes
    sizes = codes.max(dim=0).values.tolist() if len(codes.T) else []
    return [count + i for i, size in enumerate(sizes) if size < MAX_CATEGORIES]


def matrix(table: EncodedTable) -> Array:
    """Return encoded rows as one matrix: numbers, then codes; NaN where a value is missing."""
    codes = table.codes.double()
    codes = codes.masked_fill(table.codes == MISSING, float("nan"))
    return np.concatenate((table.numbers.double().numpy(), codes.numpy()), axis=1)
