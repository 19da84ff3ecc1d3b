"""Other models as baselines: gradient boosting, random forest, linear models, on the same rows.

Every model is fitted to the same training rows, and those that stop early do so on the same
held-out rows. Categories are passed as categories to every library that takes them: as codes they
cost CatBoost a point of AUC on some tables. Names, versions and settings are part of the result.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np

from addnorm.data.table.encode import MISSING, EncodedTable
from addnorm.data.table.frame import Array
from addnorm.errors import require
from addnorm.metrics import classification_metrics, regression_metrics

MAX_CATEGORIES = 255
"""Categories that scikit-learn's gradient boosting accepts in a column."""
BOOSTING_ROUNDS, BOOSTING_PATIENCE = 1000, 50
"""Trees at most, and rounds without a better held-out loss after which boosting stops."""
MODULES = {"scikit-learn": "sklearn.ensemble"}
"""Modules of packages whose names are others."""
LINEAR_ROUNDS = 1000
"""Iterations of logistic regression at most."""

Labelled = tuple[EncodedTable, Array]
"""Encoded rows and their targets: class indices, or numbers."""
PredictRows = Callable[[EncodedTable], Array]
"""A function from rows to class probabilities, or to numbers."""
FitBaseline = Callable[["BaselineData"], PredictRows]
"""A function that fits a model and returns how it predicts."""


@dataclass(frozen=True)
class BaselineData:
    """What a baseline is fitted to.

    Parameters
    ----------
    train : training rows.
    valid : held-out rows for early stopping, if any.
    classes : number of classes; 0 for regression.
    seed : random seed.
    """

    train: Labelled
    valid: Labelled | None
    classes: int
    seed: int = 0

    @property
    def suffix(self) -> str:
        return "Classifier" if self.classes else "Regressor"

    def predictor(self, model: Any, prepare: Callable[[EncodedTable], Any]) -> PredictRows:
        """Return how a fitted model predicts rows that `prepare` makes ready for it."""
        method = model.predict_proba if self.classes else model.predict
        return lambda table: np.asarray(method(prepare(table)))


@dataclass(frozen=True)
class Baseline:
    """One model to compare with: its name, its package, its settings in words, and its fit."""

    name: str
    package: str
    settings: str
    fit: FitBaseline


def fit_scikit_learn(data: BaselineData) -> PredictRows:
    """Fit scikit-learn's histogram gradient boosting."""
    ensemble = require("sklearn.ensemble", "tables")
    kind = getattr(ensemble, f"HistGradientBoosting{data.suffix}")
    model = kind(
        categorical_features=small_categories(data.train[0]) or None,
        max_iter=BOOSTING_ROUNDS if data.valid else 100,
        early_stopping=data.valid is not None,
        n_iter_no_change=BOOSTING_PATIENCE,
        random_state=data.seed,
    )
    held = {}
    if data.valid is not None:
        held = {"X_val": matrix(data.valid[0]), "y_val": data.valid[1]}
    model.fit(matrix(data.train[0]), data.train[1], **held)
    return data.predictor(model, matrix)


def fit_lightgbm(data: BaselineData) -> PredictRows:
    """Fit LightGBM."""
    lightgbm = require("lightgbm", "tables")
    model = getattr(lightgbm, f"LGBM{data.suffix}")(
        n_estimators=BOOSTING_ROUNDS if data.valid else 100, random_state=data.seed, verbose=-1
    )
    options: dict[str, Any] = {"categorical_feature": code_columns(data.train[0]) or "auto"}
    if data.valid is not None:
        options["eval_set"] = [(matrix(data.valid[0]), data.valid[1])]
        options["callbacks"] = [lightgbm.early_stopping(BOOSTING_PATIENCE, verbose=False)]
    model.fit(matrix(data.train[0]), data.train[1], **options)
    return data.predictor(model, matrix)


def fit_xgboost(data: BaselineData) -> PredictRows:
    """Fit XGBoost."""
    xgboost = require("xgboost", "tables")
    numbers, codes = data.train[0].numbers.shape[1], data.train[0].codes.shape[1]
    model = getattr(xgboost, f"XGB{data.suffix}")(
        n_estimators=BOOSTING_ROUNDS if data.valid else 100,
        early_stopping_rounds=BOOSTING_PATIENCE if data.valid else None,
        enable_categorical=True,
        feature_types=["q"] * numbers + ["c"] * codes,
        random_state=data.seed,
    )
    held = [] if data.valid is None else [(matrix(data.valid[0]), data.valid[1])]
    model.fit(matrix(data.train[0]), data.train[1], eval_set=held or None, verbose=False)
    return data.predictor(model, matrix)


def fit_catboost(data: BaselineData, **parameters: Any) -> PredictRows:
    """Fit CatBoost; `parameters` override its defaults."""
    return data.predictor(_catboost_model(data, **parameters), mixed_matrix)


def _catboost_model(data: BaselineData, **parameters: Any) -> Any:
    catboost = require("catboost", "tables")
    settings = {"iterations": BOOSTING_ROUNDS, "random_seed": data.seed, **parameters}
    model = getattr(catboost, f"CatBoost{data.suffix}")(
        **settings, verbose=False, allow_writing_files=False
    )
    held: dict[str, Any] = {}
    if data.valid is not None:
        held = {
            "eval_set": (mixed_matrix(data.valid[0]), data.valid[1]),
            "early_stopping_rounds": BOOSTING_PATIENCE,
        }
    rows, target = data.train
    return model.fit(mixed_matrix(rows), target, cat_features=code_columns(rows), **held)


def tune_catboost(
    seconds: float, clock: Callable[[], float] = time.perf_counter, **fixed: Any
) -> FitBaseline:
    """Return the fit of CatBoost after a random search of a given time, its defaults first.

    The held-out rows choose; they also stop each fit. `fixed` are parameters of every fit.
    """

    def fit(data: BaselineData) -> PredictRows:
        if data.valid is None:
            raise ValueError("tuning needs held-out rows")
        rng, start = np.random.default_rng(data.seed), clock()
        best, lowest = None, np.inf
        parameters: dict[str, Any] = {}
        while best is None or clock() - start < seconds:
            model = _catboost_model(data, **fixed, **parameters)
            (loss,) = [
                value
                for scores in [model.get_best_score()["validation"]]
                for name, value in scores.items()
                if name == model.get_all_params()["loss_function"]
            ]
            if loss < lowest:
                best, lowest = model, loss
            parameters = {
                "depth": int(rng.integers(4, 11)),
                "learning_rate": float(np.exp(rng.uniform(np.log(0.01), np.log(0.3)))),
                "l2_leaf_reg": float(np.exp(rng.uniform(np.log(1), np.log(30)))),
                "random_strength": float(rng.uniform(0, 3)),
                "bagging_temperature": float(rng.uniform(0, 1)),
                "iterations": 2 * BOOSTING_ROUNDS,
            }
        return data.predictor(best, mixed_matrix)

    return fit


def fit_forest(data: BaselineData) -> PredictRows:
    """Fit scikit-learn's random forest with its defaults."""
    ensemble = require("sklearn.ensemble", "tables")
    model = getattr(ensemble, f"RandomForest{data.suffix}")(random_state=data.seed)
    model.fit(matrix(data.train[0]), data.train[1])
    return data.predictor(model, matrix)


def fit_linear(data: BaselineData) -> PredictRows:
    """Fit logistic regression, or ridge regression for numbers: one-hot categories, scaled numbers.

    A missing number is the median, and a column that says so.
    """
    linear = require("sklearn.linear_model", "tables")
    compose, impute = require("sklearn.compose", "tables"), require("sklearn.impute", "tables")
    pipeline = require("sklearn.pipeline", "tables")
    preprocessing = require("sklearn.preprocessing", "tables")
    numbers = [*range(data.train[0].numbers.shape[1])]
    columns = compose.make_column_transformer(
        (
            pipeline.make_pipeline(
                impute.SimpleImputer(
                    strategy="median", add_indicator=True, keep_empty_features=True
                ),
                preprocessing.StandardScaler(),
            ),
            numbers,
        ),
        (preprocessing.OneHotEncoder(handle_unknown="ignore"), code_columns(data.train[0])),
    )
    model = linear.LogisticRegression(max_iter=LINEAR_ROUNDS) if data.classes else linear.RidgeCV()
    fitted = pipeline.make_pipeline(columns, model).fit(matrix(data.train[0]), data.train[1])
    return data.predictor(fitted, matrix)


def baselines(classes: int, tune_seconds: float = 0.0) -> Iterator[Baseline]:
    """Yield the models to compare with: those of scikit-learn, and of other libraries if installed.

    `tune_seconds` adds CatBoost after a search of that time.
    """
    stopping = f"early stopping after {BOOSTING_PATIENCE}"
    boosting = f"{BOOSTING_ROUNDS:,} rounds at most, {stopping}; native categories"
    linear = "logistic regression" if classes else "ridge regression"
    yield Baseline("HistGradientBoosting", "scikit-learn", boosting, fit_scikit_learn)
    others = (
        Baseline("LightGBM", "lightgbm", boosting, fit_lightgbm),
        Baseline("XGBoost", "xgboost", boosting, fit_xgboost),
        Baseline("CatBoost", "catboost", boosting, fit_catboost),
    )
    yield from (each for each in others if find_spec(each.package) is not None)
    if tune_seconds and find_spec("catboost") is not None:
        words = f"random search of {tune_seconds:.0f} s, chosen on the held-out rows"
        yield Baseline("CatBoost, tuned", "catboost", words, tune_catboost(tune_seconds))
    yield Baseline("random forest", "scikit-learn", "defaults", fit_forest)
    yield Baseline(linear, "scikit-learn", "scaled numbers, one-hot categories", fit_linear)


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
    train: Labelled,
    test: Labelled,
    classes: int,
    seed: int = 0,
    *,
    valid: Labelled | None = None,
    tune_seconds: float = 0.0,
    say: Callable[[str], object] = lambda text: None,
) -> Comparison:
    """Fit the baselines on the training rows, and return the metrics of each on the test rows.

    A baseline that fails is one message, and has no row.

    Parameters
    ----------
    train, test : encoded rows and their targets: class indices, or numbers.
    classes : number of classes; 0 for regression.
    seed : the random seed.
    valid : held-out rows, on which boosting stops; without them it runs its default rounds.
    tune_seconds : also tune CatBoost for this time.
    say : receives messages.
    """
    data, rows = BaselineData(train, valid, classes, seed), Comparison()
    measure = classification_metrics if classes else regression_metrics
    for baseline in baselines(classes, tune_seconds):
        say(f"fitting {baseline.name} for comparison.")
        try:
            require(MODULES.get(baseline.package, baseline.package), "tables")  # no part of a fit
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of other libraries, about their own future
                start = time.perf_counter()
                predict = baseline.fit(data)
                fitted = time.perf_counter()
                figures = measure(predict(test[0]), test[1])
                done = time.perf_counter()
        except Exception as error:  # another library's, on any table: it must not end the run
            reason = (str(error).splitlines() or [""])[0][:200]
            say(f"{baseline.name} failed: {type(error).__name__}: {reason}")
            continue
        times = {"fit_seconds": fitted - start, "predict_seconds": done - fitted}
        about = {
            "version": f"{baseline.package} {version(baseline.package)}",
            "settings": baseline.settings,
        }
        rows.append({"model": baseline.name, **figures, **times, **about})
    return rows


def code_columns(table: EncodedTable) -> list[int]:
    """Return the columns of the matrix that are categories."""
    count = table.numbers.shape[1]
    return [count + i for i in range(table.codes.shape[1])]


def small_categories(table: EncodedTable) -> list[int]:
    """Return the columns of the matrix that are categories with few enough values."""
    sizes = table.codes.max(dim=0).values.tolist() if table.codes.shape[1] else []
    columns = code_columns(table)
    return [column for column, size in zip(columns, sizes, strict=True) if size < MAX_CATEGORIES]


def matrix(table: EncodedTable) -> Array:
    """Return encoded rows as one matrix: numbers, then codes; NaN where a value is missing."""
    codes = table.codes.double()
    codes = codes.masked_fill(table.codes == MISSING, float("nan"))
    return np.concatenate((table.numbers.double().numpy(), codes.numpy()), axis=1)


def mixed_matrix(table: EncodedTable) -> Array:
    """Return encoded rows as one matrix of objects: numbers, then codes as texts, for CatBoost."""
    numbers = table.numbers.double().numpy().astype(object)
    return np.concatenate((numbers, table.codes.numpy().astype(str).astype(object)), axis=1)
