"""Tables, ranks and pictures of the results that bench.tables_accuracy has written.

    python -m bench.tables_ranks F.jsonl [--pictures FOLDER]

The mean of every model over the splits of a table, the paired difference of our default to the best
boosting library at its defaults, and mean ranks with the critical difference of Nemenyi's test
(Demšar 2006, "Statistical comparisons of classifiers over multiple data sets", §3.2.2):

    CD = q √(k (k + 1) / 6N),   k models, N tables, q for 5 %

Models whose intervals of mean rank ± CD/2 do not overlap differ. Pictures: ranks, and what the time
of a fit gains.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from addnorm.report import line_chart, write_picture
from addnorm.report.bars import interval_chart
from bench.tables_choose import BOOSTING
from bench.tables_data import TABLES

NEMENYI = {2: 1.960, 3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102}
"""q of Nemenyi's test at 5 %, by the number of models (Demšar 2006, table 5)."""
EFFORTS = ("low", "default", "high")
Results = dict[str, dict[str, dict[int, dict[str, Any]]]]
"""Rows by table, model and seed."""


def read_results(path: Path) -> Results:
    """Return the rows of the file by table, model and seed."""
    results: Results = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        results.setdefault(row["table"], {}).setdefault(row["name"], {})[row["seed"]] = row
    return {table: results[table] for table in TABLES if table in results}


def error_name(table: str) -> str:
    """Return the metric that is compared on a table."""
    return "auc" if TABLES[table].classes else "rmse"


def errors(rows: dict[int, dict[str, Any]], table: str, seeds: Sequence[int]) -> Any:
    """Return what is to be small, by seed: 1 − AUC, or the RMSE."""
    values = np.array([rows[seed][error_name(table)] for seed in seeds])
    return 1 - values if TABLES[table].classes else values


def shared_seeds(models: dict[str, dict[int, Any]], names: Sequence[str]) -> list[int]:
    """Return the seeds with which all of these models were measured."""
    found = [set(models.get(name, {})) for name in names]
    return sorted(set.intersection(*found)) if found else []


def print_table(results: Results) -> None:
    """Print means by model, and the paired difference of the default to the best library."""
    names = list(dict.fromkeys(name for models in results.values() for name in models))
    names = [name for name in names if name != "catboost-quantiles" and name != "ngboost"]
    print(f"| | splits | {' | '.join(names)} | difference | time / CatBoost's |")
    print("|---" * (len(names) + 4) + "|")
    for table, models in results.items():
        metric, cells = error_name(table), []
        for name in names:
            rows = models.get(name, {})
            mean = np.mean([row[metric] for row in rows.values()]) if rows else math.nan
            cells.append("–" if not rows else f"{mean:.4f}" if mean < 1 else f"{mean:.2f}")
        seeds = shared_seeds(models, ("default", "catboost"))
        difference, ratio = "–", "–"
        libraries = [name for name in BOOSTING if set(seeds) <= set(models.get(name, {}))]
        if seeds and libraries:
            best = min(libraries, key=lambda name: errors(models[name], table, seeds).mean())
            gap = errors(models["default"], table, seeds) - errors(models[best], table, seeds)
            spread = gap.std(ddof=1) / math.sqrt(len(gap)) if len(gap) > 1 else math.nan
            difference = f"{gap.mean():+.4f} ± {spread:.4f} ({best})"
            times = [
                np.mean([models[name][seed]["seconds"] for seed in seeds])
                for name in ("default", "catboost")
            ]
            ratio = f"{times[0] / times[1]:.1f}"
        count = max(len(rows) for rows in models.values())
        print(f"| {table}, {metric} | {count} | {' | '.join(cells)} | {difference} | {ratio} |")


def print_distributions(results: Results) -> None:
    """Print coverage and pinball loss of numbers."""
    for table, models in results.items():
        for name, rows in models.items():
            if TABLES[table].classes or not all("pinball" in row for row in rows.values()):
                continue
            shares = [
                100 * np.mean([row[f"coverage_{level}"] for row in rows.values()])
                for level in (80, 90, 95)
            ]
            words = ", ".join(f"{share:.1f}" for share in shares)
            pinball = np.mean([row["pinball"] for row in rows.values()])
            print(f"| {table} | {name} | {len(rows)} | {words} | {pinball:.4g} |")


def mean_ranks(results: Results, names: Sequence[str]) -> tuple[dict[str, float], float, list[str]]:
    """Return mean ranks over tables, the critical difference, and the tables that have them all.

    A table's rank is that of the mean error over its shared splits; equal errors share a rank.
    """
    ranks: list[list[float]] = []
    used = []
    for table, models in results.items():
        seeds = shared_seeds(models, names)
        if not seeds:
            continue
        means = [errors(models[name], table, seeds).mean() for name in names]
        ranks.append([sum(b < a for b in means) + (means.count(a) + 1) / 2 for a in means])
        used.append(table)
    count = len(names)
    critical = NEMENYI[count] * math.sqrt(count * (count + 1) / (6 * max(len(used), 1)))
    average = np.mean(ranks, axis=0) if ranks else [math.nan] * count
    return dict(zip(names, map(float, average), strict=True)), critical, used


def time_points(results: Results, name: str) -> tuple[float, float] | None:
    """Return the geometric mean of CPU seconds and the mean excess error in %, over all tables.

    The excess is over the best of all models on a table; None if a table was not measured.
    """
    seconds, excess = [], []
    for table, models in results.items():
        if name not in models:
            return None
        means = {
            other: errors(rows, table, sorted(rows)).mean()
            for other, rows in models.items()
            if all(error_name(table) in row for row in rows.values())
        }
        seconds.append(np.mean([row["seconds"] for row in models[name].values()]))
        excess.append(100 * (means[name] / min(means.values()) - 1))
    return float(np.exp(np.mean(np.log(seconds)))), float(np.mean(excess))


def draw(results: Results, folder: Path, names: Sequence[str]) -> None:
    """Write the pictures of ranks and of time."""
    ranks, critical, used = mean_ranks(results, names)
    rows = [(name, rank, critical / 2) for name, rank in sorted(ranks.items(), key=lambda r: r[1])]
    title = f"Mean rank over {len(used)} tables, with half the critical difference"
    write_picture(interval_chart(rows, title=title, x="mean rank"), folder / "tables-ranks.svg")
    points = {name: time_points(results, name) for name in (*EFFORTS, *BOOSTING)}
    series = {"addnorm, by effort": [p for name in EFFORTS if (p := points[name])]}
    series |= {name: [p] for name in BOOSTING if (p := points[name])}
    chart = line_chart(
        series,
        title="What the time of a fit gains",
        x="CPU seconds of a fit",
        y="error above the best, %",
        log_x=True,
    )
    write_picture(chart, folder / "tables-time.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("results", type=Path)
    parser.add_argument("--names", nargs="+", default=["default", *BOOSTING])
    parser.add_argument(
        "--pictures", type=Path, help="folder for tables-ranks.svg, tables-time.svg"
    )
    args = parser.parse_args()
    results = read_results(args.results)
    print_table(results)
    print_distributions(results)
    ranks, critical, used = mean_ranks(results, args.names)
    print(f"mean ranks over {', '.join(used)}; critical difference {critical:.2f}:")
    for name, rank in sorted(ranks.items(), key=lambda row: row[1]):
        print(f"  {rank:.2f} {name}")
    if args.pictures:
        draw(results, args.pictures, args.names)


if __name__ == "__main__":
    main()
