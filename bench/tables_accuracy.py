"""Adult and California housing: FT-Transformer as published and as recommended, and boosting.

    python -m bench.tables_accuracy DATA --out F.json [--threads 2] [--seeds 0 1 2] [--keep FOLDER]

DATA holds adult_train.csv.gz, adult_test.csv.gz (the official test set) and
california_housing.csv.gz, of which a random fifth is the test set. The estimators hold out their
default share of rows; "published" is the default with a fifth of the rest held out, as in the
paper. F.json is written after every fit; fits that it already has are skipped.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from addnorm.cpu import keep_memory
from addnorm.data.table.encode import fit_encoder
from addnorm.data.table.frame import Array, Frame, read_frame
from addnorm.data.table.infer import infer
from addnorm.files import write_whole
from addnorm.tabular import (
    RECOMMENDED,
    FTTransformerClassifier,
    FTTransformerRegressor,
    save_estimator,
)
from addnorm.tabular.compare import compare

VARIANTS = ("boosting", "recommended", "default", "published")
HELD_OUT = {"valid": 0.2}
"""The parameter in which the default differs from the paper: rows held out for early stopping."""
Split = tuple[tuple[Frame, Array], tuple[Frame, Array]]


def adult(folder: Path, seed: int = 0) -> Split:
    """Return rows and labels, 0 or 1, of the training and the test set, the same for every seed."""
    parts = []
    for name in ("adult_train.csv.gz", "adult_test.csv.gz"):
        table = read_frame(folder / name)
        rich = np.array([text.startswith(">50K") for text in table.columns["income"]])
        parts.append((table.without("income"), rich.astype(np.int64)))
    return parts[0], parts[1]


def california(folder: Path, seed: int) -> Split:
    """Return a training set of four fifths and a test set of one, drawn by the seed."""
    table = read_frame(folder / "california_housing.csv.gz")
    y = table.columns["MedHouseVal"].astype(np.float64)
    order = np.random.default_rng(seed).permutation(len(y))
    inside, outside = order[: -(len(y) // 5)], order[-(len(y) // 5) :]
    X = table.without("MedHouseVal")
    return (X.take(inside), y[inside]), (X.take(outside), y[outside])


DATA: dict[str, Callable[[Path, int], Split]] = {"adult": adult, "california": california}


def fit(
    data: str, variant: str, seed: int, folder: Path, models: Path | None
) -> list[dict[str, Any]]:
    """Fit and evaluate one estimator, or all gradient boosting libraries."""
    (X, y), (X_test, y_test) = DATA[data](folder, seed)
    if variant == "boosting":
        encoder = fit_encoder(X, infer(X))
        train, test = (encoder.encode(X), y), (encoder.encode(X_test), y_test)
        rows = compare(train, test, 2 if data == "adult" else 0, seed)
        return [{"data": data, "how": variant, "seed": seed, **row} for row in rows]
    kind = FTTransformerClassifier if data == "adult" else FTTransformerRegressor
    task = "classes" if data == "adult" else "number"
    settings = {"recommended": RECOMMENDED[task], "published": HELD_OUT}.get(variant, {})
    start, cpu_start = time.perf_counter(), time.process_time()
    model = kind(**settings, random_state=seed).fit(X, y)
    fitted, cpu_seconds = time.perf_counter(), time.process_time() - cpu_start
    figures = model.evaluate(X_test, y_test)
    if models is not None:
        save_estimator(model, models / f"{data}-{variant}-{seed}")
    report = model.report_
    return [
        {
            **{"data": data, "how": variant, "seed": seed, "model": kind.__name__, **figures},
            "fit_seconds": fitted - start,
            "processor_seconds": cpu_seconds,
            "predict_seconds": time.perf_counter() - fitted,
            **{name: report[name] for name in ("epochs", "best_step", "parameters", "valid")},
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", dest="models", type=Path, help="folder for the fitted models")
    parser.add_argument("--data", nargs="+", choices=sorted(DATA), default=["california", "adult"])
    parser.add_argument("--how", dest="variant", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    rows: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else []
    done = {(row["data"], row["how"], row["seed"]) for row in rows}
    for seed in args.seeds:
        for variant in args.variant:
            for data in args.data:
                if (data, variant, seed) in done:
                    continue
                rows += fit(data, variant, seed, args.folder, args.models)
                write_whole(args.out, json.dumps(rows, indent=1).encode())
                print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
