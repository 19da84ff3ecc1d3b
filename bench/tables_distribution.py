"""Distributions of predicted numbers: heads compared on development rows, intervals on test rows.

    python -m bench.tables_distribution heads DATA --rows 4000 --out F.json
    python -m bench.tables_distribution boosting DATA --rows 8000 --out F.json

DATA is a folder with california_housing.csv.gz, diamonds.csv.gz and bike_sharing_hour.csv.gz. A
fifth of each table, drawn by the seed, is the test set. `heads` never uses it: it trains on some of
the other rows and measures on others of them. `boosting` trains on some of the other rows (all
with --rows 0), and compares on 4,000 test rows with CatBoost's MultiQuantile and with NGBoost
(normal distribution), those that are installed. The pinball loss is over the same 21 levels for
all; twice its mean is about the CRPS. Figures are in standard deviations of the target.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm.data.table.frame import Array, Frame, read_frame
from addnorm.files import to_json, write_whole
from addnorm.metrics import interval_metrics, pinball_loss, regression_metrics
from addnorm.models.bins import positions_of, smoothed_labels
from addnorm.models.tabular import build_tabular
from addnorm.tabular import FTTransformerRegressor
from addnorm.tabular.choices import choose_network
from addnorm.tabular.distribution import NumberDistribution
from addnorm.tabular.fitting import Rows, losses, predict_outputs, swap_cells

TABLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "california": ("california_housing.csv.gz", "MedHouseVal", ()),
    "diamonds": ("diamonds.csv.gz", "price", ()),
    "bike": ("bike_sharing_hour.csv.gz", "cnt", ("instant", "dteday", "casual", "registered")),
}
LEVELS = (0.025, *(round(0.05 * step, 2) for step in range(1, 20)), 0.975)
INTERVALS = {0.8: (0.1, 0.9), 0.9: (0.05, 0.95), 0.95: (0.025, 0.975)}
QUANTILES = 64
"""Quantiles of the head of quantiles."""
MEASURED = 3000
SETTINGS: dict[str, Any] = {}


def read_table(folder: Path, name: str) -> tuple[Frame, Array]:
    """Return the columns of a table, without those that give the target away, and its target."""
    file, target, dropped = TABLES[name]
    frame = read_frame(folder / file)
    values = np.asarray(frame.columns[target], dtype=float)
    return frame.without(target, *(n for n in dropped if n in frame.columns)), values


def development_rows(count: int, seed: int) -> tuple[Array, Array]:
    """Return the rows that are not test rows, and the test rows, both in random order."""
    order = np.random.default_rng(seed).permutation(count)
    return order[: round(0.8 * count)], order[round(0.8 * count) :]


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        cells = [row.get(name, "") for name in names]
        print(f"| {' | '.join(f'{c:.4f}' if isinstance(c, float) else str(c) for c in cells)} |")


# ── Heads ─────────────────────────────────────────────────────────────────────────────────────────


def spaced(outputs: Tensor) -> Tensor:
    """Return quantiles that cannot cross: the first output, then positive steps."""
    steps = F.softplus(outputs[..., 1:] - 2.0).cumsum(dim=-1)
    return torch.cat((torch.zeros_like(steps[..., :1]), steps), dim=-1) + outputs[..., :1] - 1.5


def pinball_of(outputs: Tensor, target: Tensor) -> Tensor:
    levels = (torch.arange(QUANTILES) + 0.5) / QUANTILES
    error = target[:, None, None] - spaced(outputs)
    return 2 * torch.maximum(levels * error, (levels - 1) * error).mean(dim=(1, 2))


def plain_entropy(outputs: Tensor, target: Tensor, edges: Tensor) -> Tensor:
    label = smoothed_labels(positions_of(target, edges), edges)
    return -(label[:, None] * outputs.log_softmax(dim=-1)).sum(dim=-1).mean(dim=1)


HEADS = ("squared error", "quantiles", "bins, cross-entropy", "bins")
"""The last is that of the library: a Student distribution with corrections, both losses."""


def train_head(head: str, rows: Rows, model: Any, epochs: int, batch: int = 128) -> None:
    """Train with a cosine schedule and averaged weights, the same for every head."""
    optimizer = torch.optim.AdamW(model.parameter_groups(1e-4), lr=1e-3)
    steps, step = epochs * math.ceil(len(rows) / batch), 0
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    edges = rows.edges
    assert edges is not None
    loss_of: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "squared error": lambda outputs, target: losses(outputs, target, 0),
        "quantiles": pinball_of,
        "bins, cross-entropy": lambda outputs, target: plain_entropy(outputs, target, edges),
        "bins": lambda outputs, target: losses(outputs, target, 0, edges),
    }
    model.train()
    for _ in range(epochs):
        for part in torch.split(torch.randperm(len(rows)), batch):
            table = swap_cells(rows.table.take(part), SETTINGS["swap_cells"])
            outputs = model(table.numbers, table.codes)
            optimizer.zero_grad()
            loss_of[head](outputs, rows.target[part]).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1, step / 50) * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.step()
            step += 1
            for name, tensor in model.state_dict().items():
                average[name].lerp_(tensor, 0.01)
    model.load_state_dict(average)


def score_head(head: str, outputs: Tensor, target: Tensor, edges: Tensor, spread: Array) -> Any:
    """Return RMSE, CRPS and coverage of 90 %, before any calibration.

    The squared error has one distribution for all rows: the residuals `spread` of other rows.
    """
    y = target.double().numpy()
    if head.startswith("bins"):
        one = NumberDistribution(outputs.double().softmax(dim=-1)[:, 0], edges.double())
        mean, crps, ends = one.mean, float(one.crps(y).mean()), one.interval(0.9)
    elif head == "quantiles":
        values = spaced(outputs.double())[:, 0].numpy()
        levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
        mean, crps = values.mean(axis=1), 2 * pinball_loss(values, levels, y)
        ends = values[:, [round(q * QUANTILES - 0.5) for q in (0.05, 0.95)]]
    else:
        mean = outputs[:, 0, 0].double().numpy()
        levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
        values = mean[:, None] + np.quantile(spread, levels)
        crps, ends = (
            2 * pinball_loss(values, levels, y),
            mean[:, None] + np.quantile(spread, (0.05, 0.95)),
        )
    rmse = regression_metrics(mean, y)["rmse"]
    return {"RMSE": rmse, "CRPS": crps, "90 % hold": interval_metrics(ends, y)[0]}


def compare_heads(
    folder: Path, tables: list[str], count: int, epochs: int, seeds: int
) -> list[dict[str, Any]]:
    """Return a row for each table and head: means over seeds, on development rows."""
    found = []
    for name in tables:
        frame, y = read_table(folder, name)
        for head in HEADS:
            figures, seconds = [], 0.0
            for seed in range(seeds):
                inside = development_rows(len(y), seed)[0]
                train, other = inside[:count], inside[count : count + MEASURED + 1000]
                estimator = FTTransformerRegressor(**SETTINGS, random_state=seed, valid=0.0)
                torch.manual_seed(seed)
                estimator.check_rows(frame.take(train), y[train])
                split = estimator.split_rows(frame.take(train), y[train], 0, np.ones(len(train)))
                edges = split.rows.edges
                assert edges is not None
                network = choose_network(estimator, split.rows.table, y[train], "target", 0)
                sizes = {"squared error": 1, "quantiles": QUANTILES}
                fields: dict[str, Any] = {"outputs": sizes.get(head, len(edges) - 1)}
                if head == "bins":
                    fields = estimator._head(0)
                model = build_tabular(network.replace(**fields))
                began = time.process_time()
                train_head(head, split.rows, model, epochs)
                seconds += time.process_time() - began
                table = estimator.encoder_.encode(frame.take(other))
                outputs, target = predict_outputs(model, table, 1024), estimator._targets(y[other])
                spread = (target[:1000] - outputs[:1000, 0, 0]).double().numpy()
                measured = outputs[1000:], target[1000:]
                figures.append(score_head(head, *measured, edges, spread))
            means = {key: float(np.mean([f[key] for f in figures])) for key in figures[0]}
            found.append({"table": name, "head": head, **means, "CPU s": seconds / seeds})
            print(found[-1], flush=True)
    return found


# ── Against boosting ──────────────────────────────────────────────────────────────────────────────


def ours(X: Frame, y: Array, test: Frame, seed: int, epochs: int) -> tuple[Array, Array]:
    """Return mean and quantiles of test rows."""
    model = FTTransformerRegressor(
        **SETTINGS | {"epochs": epochs, "schedule": "cosine"}, random_state=seed
    )
    one = model.fit(X, y).predict_distribution(test)
    return one.mean, one.quantile(LEVELS)


def catboost(X: Frame, y: Array, test: Frame, seed: int, epochs: int) -> tuple[Array, Array]:
    from catboost import CatBoostRegressor  # type: ignore[import-not-found]

    def matrix(frame: Frame) -> tuple[Any, list[int]]:
        columns = [np.asarray(c, dtype=object) for c in frame.columns.values()]
        texts = [i for i, c in enumerate(columns) if isinstance(c[0], str)]
        return np.stack(columns, axis=1), texts

    rows, texts = matrix(X)
    levels = ",".join(map(str, LEVELS))
    common = {"random_seed": seed, "verbose": False, "thread_count": 1, "cat_features": texts}
    quantiles = CatBoostRegressor(loss_function=f"MultiQuantile:alpha={levels}", **common)
    mean = CatBoostRegressor(**common).fit(rows, y).predict(matrix(test)[0])
    found = quantiles.fit(rows, y).predict(matrix(test)[0])
    return np.asarray(mean), np.sort(np.asarray(found), axis=1)


def ngboost(X: Frame, y: Array, test: Frame, seed: int, epochs: int) -> tuple[Array, Array]:
    from ngboost import NGBRegressor  # type: ignore[import-not-found]
    from scipy.stats import norm  # type: ignore[import-untyped]
    from sklearn.preprocessing import OrdinalEncoder  # type: ignore[import-untyped]

    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    texts = [n for n, c in X.columns.items() if isinstance(c[0], str)]
    numbers = [n for n in X.columns if n not in texts]
    if texts:
        encoder.fit(np.stack([X.columns[n] for n in texts], axis=1))

    def matrix(frame: Frame) -> Array:
        columns = [np.asarray(frame.columns[n], dtype=float) for n in numbers]
        parts = [np.stack(columns, axis=1)]
        if texts:
            parts.append(encoder.transform(np.stack([frame.columns[n] for n in texts], axis=1)))
        return np.concatenate(parts, axis=1)

    model = NGBRegressor(random_state=seed, verbose=False).fit(matrix(X), y)
    one = model.pred_dist(matrix(test))
    mean, scale = one.params["loc"], one.params["scale"]
    return mean, norm.ppf(np.array(LEVELS), mean[:, None], scale[:, None])


MODELS = {"FT-Transformer": ours, "CatBoost MultiQuantile": catboost, "NGBoost": ngboost}


def compare_models(
    folder: Path, tables: list[str], count: int, epochs: int, seeds: int
) -> list[dict[str, Any]]:
    """Return a row for each table, model and seed, on test rows."""
    found = []
    for name in tables:
        frame, y = read_table(folder, name)
        for seed in range(seeds):
            inside, test = development_rows(len(y), seed)
            train, test = inside[: count or None], test[:4000]
            scale = float(y[train].std())
            for label, predict in MODELS.items():
                began = time.process_time()
                try:
                    mean, quantiles = predict(
                        frame.take(train), y[train], frame.take(test), seed, epochs
                    )
                except ImportError as error:
                    print(f"{label}: {error}", flush=True)
                    continue
                row: dict[str, Any] = {"table": name, "model": label, "rows": len(train)}
                row["RMSE"] = regression_metrics(mean, y[test])["rmse"] / scale
                row["2 × pinball"] = 2 * pinball_loss(quantiles, LEVELS, y[test]) / scale
                for level, ends in INTERVALS.items():
                    pair = quantiles[:, [LEVELS.index(end) for end in ends]]
                    share, width = interval_metrics(pair, y[test])
                    row |= {f"{level:.0%} hold": share, f"{level:.0%} width": width / scale}
                found.append(row | {"CPU s": time.process_time() - began})
                print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("heads", "boosting"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--tables", nargs="*", choices=[*TABLES], default=[*TABLES])
    parser.add_argument("--rows", type=int, default=4000, help="training rows; 0 for all")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", help="write the rows to this JSON file too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = compare_heads if args.what == "heads" else compare_models
    rows = run(args.data, args.tables, args.rows, args.epochs, args.seeds)
    show(rows)
    if args.out:
        write_whole(Path(args.out), to_json(rows).encode())


if __name__ == "__main__":
    main()
