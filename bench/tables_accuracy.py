"""The nine development tables on their test rows: FT-Transformer by effort, and boosting.

    python -m bench.tables_accuracy DATA --out F.jsonl [--tables NAME …] [--how NAME …] [--seeds 0]
    python -m bench.tables_ranks F.jsonl --pictures FOLDER

Every model is fitted to all training rows, on one thread; seconds are CPU time of the process. The
boosting libraries are at their defaults, with native categories; catboost-quantiles predicts the
quantiles of a number, ngboost (if installed) a normal distribution; catboost-tuned searches for
--tune CPU seconds. F.jsonl gets a line after every
fit; fits that it already has are skipped, and none is started after --seconds.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from addnorm.cpu import keep_memory
from bench.tables_choose import (
    BOOSTING,
    QUANTILES,
    fit_boosting,
    fit_ngboost,
    fit_ours,
    fit_quantiles,
    fit_tuned,
)
from bench.tables_data import TABLES, split_table

OURS: dict[str, dict[str, Any]] = {
    "default": {},
    "low": {"effort": "low"},
    "high": {"effort": "high"},
    "published": {"effort": "published"},
}
"""Names of the variants of FT-Transformer, and their parameters."""


def measure(folder: Path, table: str, name: str, seed: int, tune: float) -> dict[str, Any]:
    """Return the metrics on test rows and the seconds of one fit."""
    train, test = split_table(folder, table, seed)
    classes = TABLES[table].classes
    if name == QUANTILES:
        result = fit_quantiles(train, test, seed)
    elif name == "ngboost":
        result = fit_ngboost(train, test, seed)
    elif name == "catboost-tuned":
        result = fit_tuned(train, test, classes, seed, tune)
    elif name in BOOSTING:
        result = fit_boosting(name, train, test, classes, seed)
    else:
        result = fit_ours(OURS[name], train, test, classes, seed)
    return {"table": table, "name": name, "seed": seed, "rows": len(train[1]), **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--how", nargs="+", default=[*BOOSTING, "default"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--tune", type=float, default=300.0, help="CPU seconds of a search")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    begun = time.perf_counter()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {(r["table"], r["name"], r["seed"]) for r in map(json.loads, lines)}
    for seed in args.seeds:
        for name in args.how:
            for table in args.tables:
                if (table, name, seed) in done or time.perf_counter() - begun > args.seconds:
                    continue
                row = measure(args.folder, table, name, seed, args.tune)
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                score = row["auc"] if TABLES[table].classes else row.get("rmse", row.get("pinball"))
                print(table, name, seed, f"{score:.4f} {row['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
