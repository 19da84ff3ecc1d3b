"""Pictures of docs/instant.md: probability surfaces, and the loss against tables seen.

python -m bench.instant_pictures FOLDER [--weights W] [--curve curve.jsonl --annealed curve.jsonl]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets  # type: ignore[import-untyped]
from sklearn.ensemble import (  # type: ignore[import-untyped]
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

from addnorm.data.table.frame import Array
from addnorm.metrics import log_loss
from addnorm.report import line_chart, write_picture
from addnorm.report.surfaces import Surface, surface_chart
from addnorm.tabular import InstantClassifier

POINTS, TEST, GRID = 80, 2000, 48


def toys(rows: int, seed: int) -> dict[str, tuple[Array, Array]]:
    """Two-dimensional tables with two classes."""
    rng = np.random.default_rng(seed)
    square = rng.uniform(-1, 1, (rows, 2))
    cross = (square[:, 0] > 0) ^ (square[:, 1] > 0)
    flipped = np.where(rng.random(rows) < 0.1, ~cross, cross).astype(int)
    line = rng.normal(size=(rows, 2))
    noisy = (line @ [1.0, 0.6] + 0.7 * rng.normal(size=rows) > 0).astype(int)
    return {
        "moons": datasets.make_moons(rows, noise=0.25, random_state=seed),
        "circles": datasets.make_circles(rows, noise=0.15, factor=0.45, random_state=seed),
        "squares": (square, flipped),
        "line": (line, noisy),
    }


def surfaces(weights: Path | None) -> Any:
    """Return the picture of four toy tables and four models, with log-losses on test points."""
    models = {
        "logistic regression": LogisticRegression(),
        "boosting": HistGradientBoostingClassifier(random_state=0),
        "random forest": RandomForestClassifier(random_state=0),
        "instant": InstantClassifier(weights=weights),
    }
    train, test = toys(POINTS, 0), toys(TEST, 1)
    panels = []
    for name, (X, y) in train.items():
        low, high = X.min(axis=0) - 0.3, X.max(axis=0) + 0.3
        across, down = (np.linspace(low[i], high[i], GRID) for i in (0, 1))
        plane = np.array([(x, z) for z in down[::-1] for x in across])
        place = (X - low) / (high - low)
        points = [(float(a), float(1 - b), int(k)) for (a, b), k in zip(place, y, strict=True)]
        row = []
        for model in models.values():
            chances = model.fit(X, y).predict_proba(plane)[:, 1].reshape(GRID, GRID)
            X_test, y_test = test[name]
            loss = log_loss(np.clip(model.predict_proba(X_test), 1e-3, 1), y_test)
            row.append(Surface(chances.tolist(), points, f"log-loss {loss:.2f}"))
        panels.append(row)
    title = f"Probability of the second class, from {POINTS} points"
    return surface_chart(panels, [*train], [*models], title=title)


def points(path: Path) -> list[tuple[float, float]]:
    """Return tables seen and validation loss from a file of a training run."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["tables"], row["loss"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--curve", type=Path, help="of the run with a constant rate")
    parser.add_argument("--annealed", type=Path, nargs="*", default=[], help="of annealed copies")
    args = parser.parse_args()
    torch.set_num_threads(1)
    write_picture(surfaces(args.weights), args.folder / "instant-surfaces.svg")
    if args.curve:
        curves = {"constant rate": points(args.curve)}
        for path in args.annealed:
            found = points(path)
            before = [point for point in curves["constant rate"] if point[0] < found[0][0]]
            curves[f"annealed to {found[-1][0] // 1000},000 tables"] = [*before[-1:], *found]
        chart = line_chart(
            curves,
            title="Loss on synthetic validation tables, relative to uniform guesses",
            x="tables seen",
            y="loss",
            log_x=True,
        )
        write_picture(chart, args.folder / "instant-curve.svg")


if __name__ == "__main__":
    main()
