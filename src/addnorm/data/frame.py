"""Tables from anywhere, in one form: files, numpy arrays, and every data frame that narwhals knows.

A column becomes one of three arrays: float64 with NaN, texts with None, or dates with NaT, where
the last of each stands for a missing value. What kind of column it is to a model is not decided
here but by the schema; what a cell says is not changed, but for the spaces around it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from addnorm.data.cells import is_table, read_cells
from addnorm.data.files import need_file
from addnorm.errors import InputError, SavedError, nearest, require

MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "null", "NULL", "None")
"""Texts of a file that stand for a missing value."""
ARROW = {".parquet": "parquet", ".pq": "parquet", ".feather": "feather", ".arrow": "feather"}

Array = np.ndarray[Any, Any]


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

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def take(self, rows: Array) -> "Frame":
        """Some of the rows, by number or as booleans."""
        some = {name: column[rows] for name, column in self.columns.items()}
        return Frame(self.name, some, self.notes, self.named)

    def without(self, *names: str) -> "Frame":
        rest = {name: column for name, column in self.columns.items() if name not in names}
        return Frame(self.name, rest, self.notes, self.named)

    def column(self, name: str) -> Array:
        """One column; an error that helps if there is none of that name."""
        if name not in self.columns:
            raise InputError(f"{self.name} has no column {name!r}. {nearest(name, self.columns)}")
        return self.columns[name]


def to_frame(source: Any, name: str = "the table") -> Frame:
    """A table of any kind: a path, a 2-D array, a mapping of columns, a data frame.

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
    if isinstance(source, Mapping):
        return _checked(name, [(str(key), _values(value)) for key, value in source.items()])
    if isinstance(source, np.ndarray):
        return _from_array(source, name)
    narwhals = require("narwhals", "tables")
    try:
        frame = narwhals.from_native(source, eager_only=True)
    except TypeError:
        return _from_array(np.asarray(source), name)
    if not hasattr(frame, "iter_columns"):
        raise InputError(f"{name} must have rows and columns: got {type(source).__name__}.")
    pairs = [(str(column.name), _from_series(column)) for column in frame.iter_columns()]
    return _checked(name, pairs)


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
        found[:] = [_number_text(value) for value in column.tolist()]
    return found


def _number_text(value: float) -> str | None:
    if math.isnan(value):
        return None
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(value)


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
    columns = {f"x{i}": _values(array[:, i]) for i in range(array.shape[1])}
    return Frame(name, columns, (), named=False)


def _values(values: Any) -> Array:
    """Any sequence as one of the three kinds of array."""
    array = values if isinstance(values, np.ndarray) else _as_objects(values)
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    if array.dtype.kind == "M":
        return array.astype("datetime64[s]")
    if array.dtype.kind == "c":
        raise InputError("complex numbers cannot be learnt from. Give two columns of real numbers.")
    listed = [_plain(value) for value in array.tolist()]
    present = [value for value in listed if value is not None]
    if present and all(isinstance(value, float) for value in present):
        return np.array([math.nan if value is None else value for value in listed])
    column = np.empty(len(listed), dtype=object)
    column[:] = [_number_text(v) if isinstance(v, float) else v for v in listed]
    return column


def _as_objects(values: Any) -> Array:
    listed = list(values)
    array = np.empty(len(listed), dtype=object)
    array[:] = listed
    return array


def _plain(value: Any) -> float | str | None:
    """A value as a number or a text; None if it is missing."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | float | Decimal | np.number):
        number = float(value)
        return None if math.isnan(number) else number
    text = str(value).strip()
    return text or None


def _from_series(series: Any) -> Array:
    """A column of a data frame."""
    import narwhals

    kind = series.dtype
    if kind.is_numeric():
        return np.asarray(series.cast(narwhals.Float64).to_numpy(), dtype=np.float64)
    if kind in (narwhals.Date, narwhals.Datetime):
        if getattr(kind, "time_zone", None) is not None:
            series = series.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        listed = [None if _plain(value) is None else value for value in series.to_list()]
        return np.array([np.datetime64(value, "s") for value in listed], dtype="datetime64[s]")
    return _values(series.to_list())


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
