"""Settings for tables, compared on held-out rows of the development tables; test rows unseen.

    python -m bench.tables_choose DATA --out F.jsonl [--tables NAME …] [--settings NAME …]

Only rows are used that are test rows in none of the reported splits: --rows of them to fit, at most
4,000 others to score. F.jsonl gets a line after every fit; fits that it already has are skipped.
"""

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from addnorm.cpu import keep_memory
from addnorm.data.table.encode import EncodedTable, fit_encoder
from addnorm.data.table.frame import Array
from addnorm.data.table.infer import infer
from addnorm.metrics import (
    classification_metrics,
    interval_metrics,
    pinball_loss,
    regression_metrics,
)
from addnorm.tabular import FTTransformerClassifier, FTTransformerRegressor
from addnorm.tabular.compare import (
    BaselineData,
    PredictRows,
    fit_catboost,
    fit_lightgbm,
    fit_scikit_learn,
    matrix,
    tune_catboost,
)
from addnorm.tabular.distribution import PINBALL
from addnorm.tabular.holdout import hold_out
from bench.tables_data import SMALL_ROWS, TABLES, Labelled, development_pool

MAX_SCORED = 4_000
"""Most rows to score."""


def development_split(folder: Path, table: str, seed: int, rows: int) -> tuple[Labelled, Labelled]:
    """Return rows to fit and rows to score, none of which is a test row of a reported split."""
    X, y = development_pool(folder, table)
    order = np.random.default_rng(1000 + seed).permutation(len(y))
    inside, outside = order[:rows], order[rows : rows + MAX_SCORED]
    return (X.take(inside), y[inside]), (X.take(outside), y[outside])


def fit_boosting(name: str, train: Labelled, test: Labelled, classes: int, seed: int) -> Any:
    """Return the metrics and seconds of a boosting library at its defaults, one thread."""
    encoder = fit_encoder(train[0], infer(train[0]))
    data = BaselineData((encoder.encode(train[0]), train[1]), None, classes, seed)
    start = time.process_time()
    if name == "catboost":
        predict = fit_catboost(data, thread_count=1)
    else:
        predict = {"lightgbm": fit_lightgbm, "histgradient": fit_scikit_learn}[name](data)
    seconds = time.process_time() - start
    return score(predict, encoder.encode(test[0]), test[1], classes) | {"seconds": seconds}


def score(predict: PredictRows, table: EncodedTable, target: Array, classes: int) -> Any:
    """Return the metrics of predictions, and the CPU seconds that they took."""
    measure = classification_metrics if classes else regression_metrics
    start = time.process_time()
    found = predict(table)
    return measure(found, target) | {"predict_seconds": time.process_time() - start}


def fit_tuned(train: Labelled, test: Labelled, classes: int, seed: int, seconds: float) -> Any:
    """Return the metrics of CatBoost after a random search of some CPU seconds, one thread.

    A tenth of the training rows, a fifth below 2,000, chooses and stops, as for our models.
    """
    encoder = fit_encoder(train[0], infer(train[0]))
    labels = train[1] if classes else None
    share = 0.1 if len(train[1]) >= SMALL_ROWS else 0.2
    inside, held = hold_out(len(train[1]), share, classes=labels, seed=seed)
    known, valid = ((encoder.encode(train[0].take(i)), train[1][i]) for i in (inside, held))
    data = BaselineData(known, valid, classes, seed)
    start = time.process_time()
    predict = tune_catboost(seconds, time.process_time, thread_count=1)(data)
    spent = time.process_time() - start
    return score(predict, encoder.encode(test[0]), test[1], classes) | {"seconds": spent}


def fit_ngboost(train: Labelled, test: Labelled, seed: int) -> Any:
    """Return RMSE, pinball loss and coverage of NGBoost's normal distribution, at its defaults.

    Missing numbers are medians; categories are codes.
    """
    ngboost = importlib.import_module("ngboost")
    encoder = fit_encoder(train[0], infer(train[0]), impute="median")
    known, unknown = (matrix(encoder.encode(part[0])) for part in (train, test))
    middle = np.nanmedian(known, axis=0)
    known, unknown = (np.where(np.isnan(part), middle, part) for part in (known, unknown))
    start = time.process_time()
    model = ngboost.NGBRegressor(random_state=seed, verbose=False).fit(known, train[1])
    seconds = time.process_time() - start
    found = model.pred_dist(unknown)
    figures = regression_metrics(found.mean(), test[1]) | {"seconds": seconds}
    levels = np.stack([found.ppf(level) for level in PINBALL], axis=1)
    figures["pinball"] = pinball_loss(levels, PINBALL, test[1])
    for level, (low, high) in INTERVAL_ENDS.items():
        pair = np.stack((found.ppf(low), found.ppf(high)), axis=1)
        figures[f"coverage_{level}"] = interval_metrics(pair, test[1])[0]
    return figures


def fit_quantiles(train: Labelled, test: Labelled, seed: int) -> Any:
    """Return pinball loss and coverage of CatBoost's MultiQuantile, one thread."""
    encoder = fit_encoder(train[0], infer(train[0]))
    data = BaselineData((encoder.encode(train[0]), train[1]), None, 0, seed)
    levels = sorted({*PINBALL, *(end for ends in INTERVAL_ENDS.values() for end in ends)})
    loss = f"MultiQuantile:alpha={','.join(map(str, levels))}"
    start = time.process_time()
    predict = fit_catboost(data, thread_count=1, loss_function=loss)
    seconds = time.process_time() - start
    found = np.sort(predict(encoder.encode(test[0])), axis=1)
    chosen = found[:, [levels.index(level) for level in PINBALL]]
    figures = {"pinball": pinball_loss(chosen, PINBALL, test[1]), "seconds": seconds}
    for level, ends in INTERVAL_ENDS.items():
        pair = found[:, [levels.index(end) for end in ends]]
        figures[f"coverage_{level}"] = interval_metrics(pair, test[1])[0]
    return figures


def fit_ours(
    parameters: dict[str, Any], train: Labelled, test: Labelled, classes: int, seed: int
) -> Any:
    """Return the metrics and seconds of FT-Transformer with some parameters."""
    kind = FTTransformerClassifier if classes else FTTransformerRegressor
    start = time.process_time()
    model = kind(**parameters, random_state=seed).fit(*train)
    seconds = time.process_time() - start
    best = model.report_["best_step"] / model.report_["steps"]
    start = time.process_time()
    figures = model.evaluate(*test)
    spent = time.process_time() - start
    return figures | {"seconds": seconds, "predict_seconds": spent, "best": best}


BOOSTING = ("catboost", "lightgbm", "histgradient")
QUANTILES = "catboost-quantiles"
"""CatBoost's distribution of a number."""
INTERVAL_ENDS = {80: (0.1, 0.9), 90: (0.05, 0.95), 95: (0.025, 0.975)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", type=Path, help="JSON: name to parameters")
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rows", type=int, default=5_000, help="rows to fit")
    parser.add_argument("--seconds", type=float, default=540.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    begun = time.perf_counter()
    settings = json.loads(args.settings.read_text()) if args.settings else {}
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["table"], row["name"], row["seed"], row["fitted"]) for row in rows}
    for seed in args.seeds:
        for name in args.only or (*BOOSTING, *settings):
            for table in args.tables:
                if (
                    table,
                    name,
                    seed,
                    args.rows,
                ) in done or time.perf_counter() - begun > args.seconds:
                    continue
                train, test = development_split(args.folder, table, seed, args.rows)
                classes = TABLES[table].classes
                if name in BOOSTING:
                    result = fit_boosting(name, train, test, classes, seed)
                else:
                    result = fit_ours(settings[name], train, test, classes, seed)
                row = {"table": table, "name": name, "seed": seed, "fitted": args.rows, **result}
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                score = row["auc"] if classes else row["rmse"]
                print(table, name, seed, f"{score:.4f} {row['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
