"""The Gaussian process of instant regressors on the tables that chose its kernel and its prior.

    python -m bench.instant_process [--rows 400] [--each]

Tables of `addnorm.tabular.prior` (all kinds of targets; waves, trees, networks, additive and
products each alone) with 6 and 12 columns, scikit-learn's friedman1 to 3, and columns of its breast
cancer table predicted from the others: none of them is in bench.instant. Printed are the RMSE of
the process alone, boosting and forest at their defaults, relative to the deviation of 600 test
targets (of breast cancer 169), CRPS and the share of targets within 90 % intervals of the process,
and CPU seconds.
"""

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch
from sklearn import datasets  # type: ignore[import-untyped]
from sklearn.ensemble import (  # type: ignore[import-untyped]
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)

from addnorm.data.table.frame import Array
from addnorm.models.bins import bin_means, crps_of, quantiles_of
from addnorm.models.instant_cells import cell_features, column_stats
from addnorm.models.instant_process import fit_process
from addnorm.models.instant_solvers import count_parts, solver_features
from addnorm.models.instant_table import PIECES, cut
from addnorm.tabular.instant import load_network
from addnorm.tabular.prior import sample_tables

TEST_ROWS = 600
KINDS = {None: 4, "waves": 4, "trees": 1, "network": 1, "additive": 1, "products": 1}
"""Kinds of targets, None for the whole prior, and how many tables of each."""
CANCER = {1: "texture", 4: "smoothness", 9: "fractal", 8: "symmetry"}
Table = tuple[str, Array, Array, Array]


def tables(rows: int, seed: int = 0) -> Iterator[Table]:
    """Yield name, cells, which columns are categories, and targets."""
    for kind, count in KINDS.items():
        generator = torch.Generator().manual_seed(seed + rows + sum(map(ord, kind or "")))
        for columns in (6, 12):
            batch = sample_tables(
                generator,
                tables=2 * count,
                rows=rows + TEST_ROWS,
                columns=columns,
                classes=0,
                targets=None if kind is None else {kind: 1.0},
            )
            for i in range(count):
                cells, target = batch.cells[i].numpy(), batch.target[i].double().numpy()
                yield f"{kind or 'prior'} × {columns}", cells, batch.is_category[i].numpy(), target
    for name, noise in (("friedman1", 1.0), ("friedman2", 100.0), ("friedman3", 0.1)):
        make = getattr(datasets, f"make_{name}")
        X, y = make(rows + TEST_ROWS, random_state=seed, noise=noise)
        yield name, X.astype(np.float32), np.zeros(X.shape[1], dtype=bool), y
    X, _ = datasets.load_breast_cancer(return_X_y=True)
    chosen = np.random.default_rng(seed).permutation(len(X))[: rows + 169]
    for column, name in CANCER.items() if rows + 169 <= len(X) else ():
        others = [other for other in range(10) if other != column]
        cells = X[chosen][:, others].astype(np.float32)
        yield name, cells, np.zeros(9, dtype=bool), X[chosen][:, column]


def measure(table: Table, rows: int) -> dict[str, float]:
    """Return the figures of one table."""
    _, cells, is_category, y = table
    began = time.process_time()
    x, category = torch.from_numpy(cells)[None], torch.from_numpy(is_category)[None]
    features = cell_features(x, column_stats(x[:, :rows]), category)
    parts = solver_features(x, features, category, count_parts(x[:, :rows], category))[0]
    mean, unit = y[:rows].mean(), y[:rows].std()
    target = torch.from_numpy((y - mean) / unit)
    process = fit_process(parts[:rows], category[0], target[:rows])
    assert process is not None
    edges, asked = cut(load_network().edges, PIECES).double(), target[rows:]
    chances = process.probabilities(*process.latent(parts[rows:]), edges)
    cpu = time.process_time() - began
    spread = float(asked.std(correction=0))
    error = chances @ bin_means(edges) - asked
    low, high = quantiles_of(chances, edges, edges.new_tensor([0.05, 0.95])).T
    figures = {
        "process": float(error.square().mean().sqrt()) / spread,
        "crps": float(crps_of(chances, edges, asked).mean()) / spread,
        "within 0.9": float(((low <= asked) & (asked <= high)).double().mean()),
        "cpu": cpu,
    }
    named = np.flatnonzero(is_category)
    boosting = HistGradientBoostingRegressor(categorical_features=named if len(named) else None)
    forest, filled = RandomForestRegressor(random_state=0), np.nan_to_num(cells)
    for name, model, X in (("boosting", boosting, cells), ("forest", forest, filled)):
        predicted = model.set_params(random_state=0).fit(X[:rows], y[:rows]).predict(X[rows:])
        figures[name] = float(np.sqrt(np.mean((predicted - y[rows:]) ** 2)) / y[rows:].std())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--each", action="store_true", help="print each table, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for table in tables(args.rows):
        found.append(measure(table, args.rows))
        if args.each:
            print(f"{table[0]:16s}", "  ".join(f"{k} {v:.3f}" for k, v in found[-1].items()))
    means = {key: float(np.mean([row[key] for row in found])) for key in found[0]}
    print(f"{len(found)} tables     ", "  ".join(f"{k} {v:.4f}" for k, v in means.items()))


if __name__ == "__main__":
    main()
