"""Tables from anywhere, in one form: files, numpy arrays, and every data frame that narwhals knows.

A column becomes one of three arrays: float64 with NaN, texts with None, or dates with NaT, where
the last of each stands for a missing value. What kind of column it is to a model is not decided
here but by the schema; what a cell says is not changed, but for the spaces around it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from addnorm.data.cells import is_table, read_cells
from addnorm.data.files import need_file
from addnorm.data.values import Array as Array
from addnorm.data.values import is_gone, number_text, say_taken, to_array
from addnorm.errors import InputError, SavedError, nearest, require

MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "null", "NULL", "None")
"""Texts of a file that stand for a missing value."""
ARROW = {".parquet": "parquet", ".pq": "parquet", ".feather": "feather", ".arrow": "feather"}


@dataclass(frozen=True)
class Frame:
    """Columns of equal length, by name."""

    name: str
    """Where it came from, for messages."""
    columns: dict[str, Array]
    notes: tuple[str, ...] = ()
    """What was found out in reading, in sentences."""
    named: bool = True
    """Whether the columns had names; those of an array are numbered: x0, x1, ..."""
    declared: frozenset[str] = frozenset()
    """Columns that their frame says are categories, whatever their values look like."""

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def take(self, rows: Array) -> "Frame":
        """Some of the rows, by number or as booleans."""
        some = {name: column[rows] for name, column in self.columns.items()}
        return replace(self, columns=some)

    def without(self, *names: str) -> "Frame":
        rest = {name: column for name, column in self.columns.items() if name not in names}
        return replace(self, columns=rest)

    def column(self, name: str) -> Array:
        """One column; an error that helps if there is none of that name."""
        if name not in self.columns:
            raise InputError(f"{self.name} has no column {name!r}. {nearest(name, self.columns)}")
        return self.columns[name]


def to_frame(source: Any, name: str = "the table") -> Frame:
    """A table of any kind: a path, a 2-D array, a mapping of columns, rows as dicts, a data frame.

    >>> to_frame({"age": [31, None], "job": ["cook", " "]}).columns["age"].tolist()
    [31.0, nan]
    """
    if isinstance(source, Frame):
        return source
    if isinstance(source, str | Path):
        return read_frame(source)
    if hasattr(source, "toarray"):
        raise InputError(
            f"{name} must not be sparse: sparse input is not supported. "
            f"Got {type(source).__name__}; try X.toarray()."
        )
    if isinstance(source, list) and source and all(isinstance(row, Mapping) for row in source):
        names = dict.fromkeys(key for row in source for key in row)
        return to_frame({key: [row.get(key) for row in source] for key in names}, name)
    if isinstance(source, Mapping):
        listed = [(str(key), value) for key, value in source.items()]
        if lone := [key for key, value in listed if not _is_column(value)]:
            raise InputError(
                f"{name} must have a sequence for each column: {lone[0]!r} is none. "
                "Try [value] for one row."
            )
        found = _checked(name, [(key, to_array(value)) for key, value in listed])
        return replace(found, notes=tuple(say_taken(listed, found.columns)))
    if isinstance(source, np.ndarray):
        return _from_array(source, name)
    narwhals = require("narwhals", "tables")
    try:
        frame = narwhals.from_native(source)
    except TypeError:
        return _from_array(np.asarray(source), name)
    except narwhals.exceptions.DuplicateError as error:
        raise InputError(
            f"{name} must have a different name for each column. {' '.join(str(error).split())}"
        ) from None
    if not hasattr(frame, "iter_columns"):
        raise InputError(
            f"{name} must have rows and columns that are at hand: got {type(source).__name__}. "
            "Try .collect(), or a frame of one column."
        )
    listed = [(str(column.name), column) for column in frame.iter_columns()]
    found = _checked(name, [(key, _from_series(key, column)) for key, column in listed])
    firsts = [(key, column.drop_nulls().head(1).to_list()) for key, column in listed]
    found = replace(found, notes=tuple(say_taken(firsts, found.columns)))
    kinds = (narwhals.Categorical, narwhals.Enum)
    return replace(found, declared=frozenset(key for key, col in listed if col.dtype in kinds))


def read_frame(path: str | Path) -> Frame:
    """A table from a file: .csv or .tsv, plain or .gz, .parquet or .feather.

    >>> _ = Path("pets.csv").write_text("kind, age\\ncat, 3\\ndog, ?\\n")
    >>> read_frame("pets.csv").columns["age"].tolist()
    ['3', None]
    """
    ending = Path(path).suffix.lower()
    if ending in ARROW:
        return _read_arrow(Path(path), ARROW[ending])
    if not is_table(path):
        raise InputError(
            f"{str(path)!r} must be a table: give a .csv, .tsv, .parquet or .feather file."
        )
    cells = read_cells(path)
    head, body = cells.rows[0], cells.rows[1:]
    kept = [row for row in body if any(cell.strip() for cell in row)]
    notes = list(cells.notes)
    if len(kept) < len(body):
        notes.append(f"{len(body) - len(kept)} rows with nothing in them are left out.")
    if not kept:
        raise InputError(f"{str(path)!r} must have rows below its header: it has none.")
    names, named_notes = head_names(head, str(path))
    columns = [(name, texts([row[i] for row in kept])) for i, name in enumerate(names)]
    return _checked(repr(str(path)), columns, (*notes, *named_notes))


def head_names(head: Sequence[str], where: str) -> tuple[list[str], list[str]]:
    """The names of a header line; a column without a name is called by its number."""
    names, notes = [], []
    for number, cell in enumerate(head, start=1):
        text = cell.strip()
        if not text:
            text = f"column {number}"
            notes.append(f"column {number} of {where!r} has no name: it is called {text!r}.")
        names.append(text)
    return names, notes


def texts(cells: Sequence[str]) -> Array:
    """Cells of a file: without the spaces around them, and None where one stands for nothing."""
    gone = frozenset(MISSING)
    column = np.empty(len(cells), dtype=object)
    column[:] = [None if (text := cell.strip()) in gone else text for cell in cells]
    return column


def as_text(column: Array) -> Array:
    """A column as texts: whole numbers without a point, None where missing.

    >>> as_text(np.array([3.0, 2.5, np.nan])).tolist()
    ['3', '2.5', None]
    """
    if column.dtype == object:
        return column
    found = np.empty(len(column), dtype=object)
    if column.dtype.kind == "M":
        found[:] = [None if np.isnat(value) else str(value) for value in column]
    else:
        found[:] = [number_text(value) for value in column.tolist()]
    return found


def _checked(name: str, pairs: list[tuple[str, Array]], notes: Sequence[str] = ()) -> Frame:
    counts = Counter(column for column, _ in pairs)
    twice = [column for column, count in counts.items() if count > 1]
    if twice:
        raise InputError(
            f"{name} must have a different name for each column: {twice[0]!r} stands "
            f"{counts[twice[0]]} times. Rename one."
        )
    if not pairs:
        raise InputError(f"{name} must have a column: it has none.")
    lengths = {column: len(values) for column, values in pairs}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{name} must have columns of one length: got {lengths}.")
    return Frame(name, dict(pairs), tuple(notes))


def _from_array(array: Array, name: str) -> Frame:
    if array.ndim != 2:
        raise InputError(
            f"{name} must have rows and columns: got {array.ndim} dimensions. "
            "Try .reshape(-1, 1) for one column."
        )
    listed = [(f"x{i}", array[:, i]) for i in range(array.shape[1])]
    columns = {key: to_array(column) for key, column in listed}
    return Frame(name, columns, tuple(say_taken(listed, columns)), named=False)


def _is_column(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)


def _from_series(name: str, series: Any) -> Array:
    """A column of a data frame."""
    import narwhals

    kind = series.dtype
    if kind.is_numeric():
        try:
            return np.asarray(series.cast(narwhals.Float64).to_numpy(), dtype=np.float64)
        except ValueError:  # whole numbers that float64 has not: arrow does not round
            return to_array(series.to_list())
    if kind in (narwhals.Date, narwhals.Datetime):
        if getattr(kind, "time_zone", None) is not None:
            series = series.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        listed = [None if is_gone(value) else value for value in series.to_list()]
        return np.array([np.datetime64(value, "s") for value in listed], dtype="datetime64[s]")
    try:
        return to_array(series.to_list())
    except InputError as error:
        raise InputError(f"column {name!r}: {error}") from None


def _read_arrow(path: Path, kind: str) -> Frame:
    need_file(path)
    reader = require(f"pyarrow.{kind}", "tables")
    try:
        table = reader.read_table(str(path))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SavedError(f"{str(path)!r} is damaged or no {kind} file: {reason}") from None
    frame = to_frame(table, repr(str(path)))
    if not len(frame):
        raise InputError(f"{str(path)!r} must have rows: it has none.")
    return frame
