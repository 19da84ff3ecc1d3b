"""The nine development tables: rows, targets, splits into training and test rows.

The folder is described in the documentation of the data: one file for each table, `adult` with an
official test set, the others with a random fifth for testing, drawn by the seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from addnorm.data.table.frame import Array, Frame, read_frame


@dataclass(frozen=True)
class BenchTable:
    """A table of the benchmark: its file, its target, the columns to leave out."""

    file: str
    target: str
    classes: int
    drop: Sequence[str] = ()


TABLES = {
    "titanic": BenchTable("titanic.csv.gz", "Survived", 2, ("PassengerId",)),
    "german": BenchTable("german_credit.csv.gz", "class", 2),
    "churn": BenchTable("churn_modelling.csv.gz", "Exited", 2,
                        ("RowNumber", "CustomerId", "Surname")),
    "online_shoppers": BenchTable("online_shoppers.csv.gz", "Revenue", 2),
    "magic": BenchTable("magic_telescope.csv.gz", "Class", 2),
    "adult": BenchTable("adult_train.csv.gz", "income", 2),
    "bike": BenchTable("bike_sharing_hour.csv.gz", "cnt", 0,
                       ("instant", "dteday", "casual", "registered")),
    "california": BenchTable("california_housing.csv.gz", "MedHouseVal", 0),
    "diamonds": BenchTable("diamonds.csv.gz", "price", 0),
}  # fmt: skip
"""The development tables, classes before numbers, small before large."""

Labelled = tuple[Frame, Array]
FINAL_SEEDS = (11, 12, 13, 14, 15)
"""Seeds of the splits that are reported; the last two only of tables with up to 2,000 rows."""
SMALL_ROWS = 2_000


def read_table(folder: Path, name: str, file: str | None = None) -> Labelled:
    """Return the rows and the targets of a table: class indices, or numbers."""
    table = TABLES[name]
    frame = read_frame(folder / (file or table.file))
    values = frame.columns[table.target]
    for column in (table.target, *table.drop):
        frame = frame.without(column) if column in frame.columns else frame
    if not table.classes:
        return frame, values.astype(np.float64)
    labels = np.array([str(value).strip().rstrip(".") for value in values])
    return frame, np.unique(labels, return_inverse=True)[1].astype(np.int64)


def split_table(folder: Path, name: str, seed: int) -> tuple[Labelled, Labelled]:
    """Return training and test rows: the official test set of Adult, a random fifth of others."""
    X, y = read_table(folder, name)
    if name == "adult":
        return (X, y), read_table(folder, name, "adult_test.csv.gz")
    return divide(X, y, len(y) // 5, seed)


def divide(X: Frame, y: Array, count: int, seed: int) -> tuple[Labelled, Labelled]:
    """Return the rows without, and those of, a random part of `count` rows."""
    order = np.random.default_rng(seed).permutation(len(y))
    inside, outside = order[:-count], order[-count:]
    return (X.take(inside), y[inside]), (X.take(outside), y[outside])


def development_pool(folder: Path, name: str) -> Labelled:
    """Return the rows that are test rows in none of the reported splits."""
    X, y = read_table(folder, name)
    if name == "adult":
        return X, y
    seeds = FINAL_SEEDS if len(y) <= SMALL_ROWS else FINAL_SEEDS[:3]
    orders = [np.random.default_rng(seed).permutation(len(y)) for seed in seeds]
    tested = np.concatenate([order[-(len(y) // 5) :] for order in orders])
    inside = np.setdiff1d(np.arange(len(y)), tested)
    return X.take(inside), y[inside]
