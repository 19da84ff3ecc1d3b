"""Instant models on real tables, compared with scikit-learn's models at their defaults.

    python -m bench.instant DATA --out F.jsonl [--weights W --name N] [--draws 5]
    python -m bench.instant DATA --out F.jsonl --show [--each]

DATA holds the files of CLASSES and NUMBERS; wine, digits, iris and diabetes are scikit-learn's own.
From every table 100, 400 and min(1000, 60 %) rows are drawn to learn from, with the classes in
their shares, five times; up to 2,000 others are the test rows. All models see the same rows.
Measured: AUC (of several classes the mean of one against the rest), log-loss, calibration error
(ECE, 15 bins), or of numbers RMSE and CRPS relative to the standard deviation of the test targets;
and seconds of fitting and predicting together, of instant models CPU time, too. Of instant models
also: the share of test targets within intervals, the weight of the Gaussian process, and the ECE
that the same probabilities would have on as many test rows if they were exact (`ece_floor`). These
tables choose nothing: weights are chosen on synthetic tables. F.jsonl gets one line for each fit;
what it has already is not done again.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets  # type: ignore[import-untyped]
from sklearn.ensemble import (  # type: ignore[import-untyped]
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.impute import SimpleImputer  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression, Ridge  # type: ignore[import-untyped]
from sklearn.model_selection import cross_val_predict  # type: ignore[import-untyped]
from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

from addnorm.cpu import keep_memory
from addnorm.data.table.encode import EncodedTable, fit_encoder
from addnorm.data.table.frame import Array, Frame, read_frame, to_frame, to_texts
from addnorm.data.table.infer import infer
from addnorm.metrics import calibration_error, classification_metrics
from addnorm.tabular.compare import matrix, small_categories
from addnorm.tabular.instant import InstantClassifier, InstantRegressor

SIZES = (100, 400, 1000)
TEST_ROWS = 2000
CLASSES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "adult": ("adult_train.csv.gz", "income", ()),
    "titanic": ("titanic.csv.gz", "Survived", ("PassengerId", "Name", "Ticket", "Cabin")),
    "churn": ("churn_modelling.csv.gz", "Exited", ("RowNumber", "CustomerId", "Surname")),
    "magic": ("magic_telescope.csv.gz", "Class", ()),
    "shoppers": ("online_shoppers.csv.gz", "Revenue", ()),
    "german": ("german_credit.csv.gz", "class", ()),
    **{name: ("", "", ()) for name in ("wine", "iris", "digits")},
}
"""File, target, and columns that are left out; no file: scikit-learn's own."""
NUMBERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "california": ("california_housing.csv.gz", "MedHouseVal", ()),
    "california mixed": ("california_housing_mixed.csv.gz", "median_house_value", ()),
    "diamonds": ("diamonds.csv.gz", "price", ()),
    "bike": ("bike_sharing_hour.csv.gz", "cnt", ("instant", "dteday", "casual", "registered")),
    "diabetes": ("", "", ()),
}
BASELINES = ("linear", "boosting", "forest")
INTERVALS = (0.5, 0.8, 0.9, 0.95)


def read(folder: Path, name: str) -> tuple[Frame, Array]:
    """Return the rows of a table, and its targets: places of classes, or numbers."""
    file, target, dropped = (CLASSES | NUMBERS)[name]
    if not file:
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        return to_frame(X), y
    table = read_frame(folder / file)
    values = table.columns[target]
    for column in (target, *(c for c in dropped if c in table.columns)):
        table = table.without(column)
    if name in NUMBERS:
        return table, values.astype(np.float64)
    return table, np.unique(to_texts(values).astype(str), return_inverse=True)[1]


def sizes_of(rows: int) -> list[tuple[int, int]]:
    """Return (size as named, rows) for each size that the table has rows for."""
    most = int(0.6 * rows)
    named = [(size, min(size, most)) for size in SIZES]
    return [(size, count) for size, count in named if count == size or size in (100, 1000)]


def draw_rows(y: Array, size: int, draw: int, *, stratified: bool) -> tuple[Array, Array]:
    """Return training rows, with every class at least once, and test rows."""
    rng = np.random.default_rng(10_000 * size + draw)
    order = rng.permutation(len(y))
    if stratified:
        shares = np.empty(len(y))
        for k in np.unique(y):
            rows = order[y[order] == k]
            shares[rows] = np.arange(len(rows)) / len(rows)
        order = order[np.argsort(shares[order], kind="stable")]
    inside, outside = order[:size], rng.permutation(order[size:])
    return rng.permutation(inside), outside[:TEST_ROWS]


# ── Baselines ─────────────────────────────────────────────────────────────────────────────────────


def one_hot(table: EncodedTable, sizes: tuple[int, ...]) -> Array:
    """Return numbers, and one column for each value of each category."""
    parts = [table.numbers.double().numpy()]
    parts += [np.eye(size)[table.codes[:, i].numpy()] for i, size in enumerate(sizes)]
    return np.concatenate(parts, axis=1)


def baseline(name: str, classes: int, categories: list[int], seed: int) -> Any:
    """Return a scikit-learn model at its defaults."""
    fill = SimpleImputer(keep_empty_features=True)
    if name == "linear":
        last = LogisticRegression(max_iter=1000) if classes else Ridge()
        return make_pipeline(fill, StandardScaler(), last)
    if name == "boosting":
        kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
        return kind(categorical_features=categories or None, random_state=seed)
    forest = RandomForestClassifier if classes else RandomForestRegressor
    return make_pipeline(fill, forest(random_state=seed))


def run_baseline(
    name: str, train: tuple[Frame, Array], test: tuple[Frame, Array], classes: int, seed: int
) -> dict[str, float]:
    """Return the figures of one baseline."""
    encoder = fit_encoder(train[0], infer(train[0]), scaling="standard")
    learnt, other = encoder.encode(train[0]), encoder.encode(test[0])
    if name == "linear":
        X, X_test = one_hot(learnt, encoder.sizes), one_hot(other, encoder.sizes)
    else:
        X, X_test = matrix(learnt), matrix(other)
    began = time.perf_counter()
    model = baseline(name, classes, small_categories(learnt), seed).fit(X, train[1])
    if classes:
        figures = classification_metrics(model.predict_proba(X_test), test[1])
        return {**figures, "seconds": time.perf_counter() - began}
    predicted = model.predict(X_test)
    seconds = time.perf_counter() - began
    # A normal distribution around the prediction, with the deviation of held-out residuals.
    deviation = float(np.std(train[1] - cross_val_predict(model, X, train[1], cv=5)))
    error = test[1] - predicted
    return {**numbers(error, normal_crps(error, deviation), test[1]), "seconds": seconds}


def normal_crps(error: Array, deviation: float) -> Array:
    """σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π), z = error / σ. Gneiting, Raftery 2007, eq. 21."""
    z = error / max(deviation, 1e-12)
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    share = torch.special.ndtr(torch.from_numpy(z)).numpy()
    return np.asarray(deviation * (z * (2 * share - 1) + 2 * density - 1 / math.sqrt(math.pi)))


def numbers(error: Array, crps: Array, targets: Array) -> dict[str, float]:
    unit = float(targets.std())
    return {"rmse": float(np.sqrt(np.mean(error**2))) / unit, "crps": float(crps.mean()) / unit}


# ── Instant models ────────────────────────────────────────────────────────────────────────────────


def run_instant(
    weights: Path | None, train: tuple[Frame, Array], test: tuple[Frame, Array], classes: int
) -> dict[str, float]:
    """Return the figures of an instant model."""
    began, cpu = time.perf_counter(), time.process_time()
    if classes:
        model = InstantClassifier(weights=weights).fit(*train)
        probabilities = model.predict_proba(test[0])
        seconds = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        figures = classification_metrics(probabilities, test[1])
        return {**figures, "ece_floor": ece_floor(probabilities), **seconds}
    regressor = InstantRegressor(weights=weights).fit(*train)
    error = test[1] - regressor.predict(test[0])
    seconds = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
    levels = np.arange(1, 100) / 100
    predicted = regressor.predict_distribution(test[0])
    gap = test[1][:, None] - predicted.quantile(levels)
    crps = 2 * np.maximum(levels * gap, (levels - 1) * gap).mean(axis=1)
    covered = {}
    for level in INTERVALS:
        low, high = predicted.interval(level).T
        covered[f"within {level}"] = float(((low <= test[1]) & (test[1] <= high)).mean())
    trust = {"process": regressor.report_["process"]}
    return {**numbers(error, crps, test[1]), **covered, **trust, **seconds}


def ece_floor(probabilities: Array, draws: int = 20) -> float:
    """Return the mean ECE if classes are drawn from the probabilities: of an exact model."""
    rng, below = np.random.default_rng(0), probabilities.cumsum(axis=1)
    last = probabilities.shape[1] - 1
    found = [
        calibration_error(
            probabilities, (rng.random((len(below), 1)) > below).sum(axis=1).clip(max=last)
        )
        for _ in range(draws)
    ]
    return float(np.mean(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="a file of weights; else the package's")
    parser.add_argument("--name", default="instant", help="what to call these weights in F.jsonl")
    parser.add_argument("--models", nargs="+", choices=["instant", *BASELINES])
    parser.add_argument("--tables", nargs="+", choices=[*CLASSES, *NUMBERS])
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=SIZES)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="only print what F.jsonl has")
    parser.add_argument("--each", action="store_true", help="print each table, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    results: list[dict[str, Any]] = [json.loads(line) for line in lines]
    if args.show:
        return show(results, each=args.each)
    done = {(r["table"], r["size"], r["draw"], r["model"]) for r in results}
    models: dict[str, Callable[..., dict[str, float]]] = {}
    for model in args.models or ["instant", *BASELINES]:
        name = args.name if model == "instant" else model
        models[name] = (
            (lambda train, test, classes, draw: run_instant(args.weights, train, test, classes))
            if model == "instant"
            else (
                lambda train, test, classes, draw, model=model: run_baseline(
                    model, train, test, classes, draw
                )
            )
        )
    for table in args.tables or [*CLASSES, *NUMBERS]:
        X, y = read(args.folder, table)
        classes = len(np.unique(y)) if table in CLASSES else 0
        for size, count in sizes_of(len(y)):
            for draw in range(args.draws if size in args.sizes else 0):
                inside, outside = draw_rows(y, count, draw, stratified=classes > 0)
                train, test = (X.take(inside), y[inside]), (X.take(outside), y[outside])
                for name, run in models.items():
                    key = {"table": table, "size": size, "draw": draw, "model": name}
                    if tuple(key.values()) in done:
                        continue
                    row = {**key, "rows": count, **run(train, test, classes, draw)}
                    results.append(row)
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    show(results, each=args.each)


def show(results: list[dict[str, Any]], *, each: bool = False) -> None:
    """Print the mean over tables of the mean over draws, by size and model."""
    covered = [f"within {level}" for level in INTERVALS]
    names = (
        ("auc", "log_loss", "ece", "ece_floor", "seconds", "cpu"),
        ("rmse", "crps", *covered, "process", "seconds", "cpu"),
    )
    groups: dict[str, list[str]] = {
        "two classes": [name for name in CLASSES if CLASSES[name][0]],
        "more classes": [name for name in CLASSES if not CLASSES[name][0]],
        "all classes": list(CLASSES),
        "numbers": list(NUMBERS),
    }
    if each:
        groups |= {name: [name] for name in (*CLASSES, *NUMBERS)}
    models = list(dict.fromkeys(row["model"] for row in results))
    for group, tables in groups.items():
        columns = names[1] if tables[0] in NUMBERS else names[0]
        for size in SIZES:
            for model in models:
                rows = [r for r in results if (r["size"], r["model"]) == (size, model)]
                found = [[r for r in rows if r["table"] == name] for name in tables]
                found = [part for part in found if part]
                if found:
                    line = "  ".join(
                        f"{c} {np.mean([np.mean([r[c] for r in part]) for part in found]):.4f}"
                        for c in columns
                        if all(c in row for part in found for row in part)
                    )
                    print(f"{group:16s} {size:5d} {model:14s} {line}  ({len(found)} tables)")


if __name__ == "__main__":
    main()
