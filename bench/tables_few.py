"""Gain of pre-training on Adult with few labelled rows.

    python -m bench.tables_few DATA --out F.json [--threads 2] [--draws 5]

Each method is pre-trained once on all training rows without labels, and then fitted on 50, 200 and
500 labelled rows, drawn several times; all methods, and fitting without pre-training, have the same
rows. AUC is on the official test set. The network is small, so that it takes minutes.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from addnorm.cpu import keep_memory
from addnorm.data.table.frame import Array
from addnorm.files import write_whole
from addnorm.metrics import auc
from addnorm.tabular import FTTransformerClassifier
from bench.tables_data import split_table

METHODS = ("none", "masked", "replaced", "contrastive")
SIZES = (50, 200, 500)
SMALL: dict[str, Any] = {
    **{"width": 32, "depth": 2, "heads": 4, "ffn_width": 64},
    **{"bins": "quantile", "embedding_options": {"bins": 16}},
}
EPOCHS = 10
"""Epochs of pre-training."""


def draw_rows(y: Array, size: int, draw: int) -> Array:
    """Return random rows, stratified by class."""
    rng = np.random.default_rng(1000 * size + draw)
    each = [np.flatnonzero(y == k) for k in (0, 1)]
    counts = [size - round(size * y.mean()), round(size * y.mean())]
    return np.concatenate(
        [rng.choice(rows, n, replace=False) for rows, n in zip(each, counts, strict=True)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    (X, y), (X_test, y_test) = split_table(args.folder, "adult", 0)
    rows: list[dict[str, Any]] = json.loads(args.out.read_text()) if args.out.exists() else []
    for method in args.methods:
        if any(row["method"] == method for row in rows):
            continue
        model, start, results = FTTransformerClassifier(**SMALL, random_state=0), time.time(), []
        if method != "none":
            model.pretrain(X, method=method, epochs=args.epochs)
        pretrain_seconds = time.time() - start
        for size in SIZES:
            for draw in range(args.draws):
                drawn = draw_rows(y, size, draw)
                model.set_params(random_state=draw).fit(X.take(drawn), y[drawn])
                figure = auc(model.predict_proba(X_test)[:, 1], y_test)
                facts = {"method": method, "size": size, "draw": draw, "auc": figure}
                results.append({**facts, "pretrain_seconds": pretrain_seconds})
                print(json.dumps(results[-1]), flush=True)
        rows += results
        write_whole(args.out, json.dumps(rows, indent=1).encode())
    for size in SIZES:
        means = {
            method: np.mean([r["auc"] for r in rows if r["method"] == method and r["size"] == size])
            for method in args.methods
        }
        print(size, {method: round(float(mean), 4) for method, mean in means.items()})


if __name__ == "__main__":
    main()
