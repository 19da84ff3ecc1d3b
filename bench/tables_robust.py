"""AUC on Adult's test set when a share of its cells is missing, or replaced by noise.

    python -m bench.tables_robust DATA --model RUN --out F.json [--threads 2] [--picture F.svg]

RUN is an FT-Transformer for Adult that save_estimator wrote. Gradient boosting is trained on
the same rows. Noise is a value of the same column from another row of the test set (Huang et al.
2020, 2012.06678, §3.2); every share is drawn three times, the same cells for both models.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from addnorm.cpu import keep_memory
from addnorm.data.table.encode import MISSING, EncodedTable
from addnorm.data.table.frame import Array
from addnorm.files import write_whole
from addnorm.metrics import auc
from addnorm.report import line_chart, write_picture
from addnorm.report.svg import Svg
from addnorm.tabular import load_estimator
from addnorm.tabular.compare import BaselineData, fit_scikit_learn
from addnorm.training.calibration import probabilities_of
from bench.tables_data import split_table

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
DRAWS = 3


def corrupt(table: EncodedTable, kind: str, share: float, seed: int) -> EncodedTable:
    """Return the table with a share of its cells missing, or with another row's value."""
    rng = np.random.default_rng(seed)
    numbers, codes = table.numbers.clone(), table.codes.clone()
    for cells, missing in ((numbers, float("nan")), (codes, MISSING)):
        for column in cells.T:
            hit = torch.from_numpy(rng.random(len(column)) < share)
            other = column[torch.from_numpy(rng.permutation(len(column)))]
            column.copy_(torch.where(hit, other if kind == "noise" else missing, column))
    return EncodedTable(numbers, codes)


def curves(rows: list[dict[str, Any]]) -> Svg:
    """Return a chart of the mean AUC over runs and draws, by the share of corrupted cells."""
    series: dict[str, list[tuple[float, float]]] = {}
    for kind in ("missing", "noise"):
        for name, label in (("FTTransformer", "FT"), ("HistGradientBoosting", "boosting")):
            for share in SHARES:
                same = [r[name] for r in rows if (r["kind"], r["share"]) == (kind, share)]
                point = (100 * share, float(np.mean(same)))
                series.setdefault(f"{label}, {kind}", []).append(point)
    return line_chart(series, title="AUC with corrupted cells", x="cells corrupted, %", y="AUC")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--picture", type=Path, metavar="F.svg", help="draw the curves")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    (X, y), (X_test, y_test) = split_table(args.folder, "adult", 0)
    rows: list[dict[str, Any]] = []
    for path in args.model:
        ours: Any = load_estimator(path)
        train, test = ours.encoder_.encode(X), ours.encoder_.encode(X_test)
        theirs = fit_scikit_learn(BaselineData((train, y), None, 2, ours.seed_))

        def predict(
            table: EncodedTable, ours: Any = ours, theirs: Any = theirs
        ) -> dict[str, Array]:
            probabilities = probabilities_of(ours._predict_encoded(table), ours.temperature_)
            return {
                "FTTransformer": probabilities[:, 1].numpy(),
                "HistGradientBoosting": theirs(table)[:, 1],
            }

        for kind in ("missing", "noise"):
            for share in SHARES:
                for draw in range(DRAWS if share else 1):
                    predictions = predict(corrupt(test, kind, share, draw))
                    figures = {name: auc(p, y_test) for name, p in predictions.items()}
                    row = {"run": path.name, "kind": kind, "share": share, "draw": draw}
                    rows.append({**row, **figures})
                    write_whole(args.out, json.dumps(rows, indent=1).encode())
                    print(json.dumps(rows[-1]), flush=True)
    if args.picture is not None:
        write_picture(curves(rows), args.picture)


if __name__ == "__main__":
    main()
