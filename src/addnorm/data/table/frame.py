"""Tables in one form, from files, numpy arrays, and every data frame that narwhals supports.

A column becomes one of three arrays: float64 with NaN, texts with None, or dates with NaT, each
with its own missing value. How a model uses a column is decided by the schema, not here; the text
of a cell is not changed, except that surrounding spaces are removed.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from addnorm.data.delimited import PARSE_CHUNK, DelimitedFile, is_delimited, parse_header
from addnorm.data.table.column_arrays import Array as Array
from addnorm.data.table.column_arrays import (
    conversion_notes,
    is_missing_value,
    number_text,
    object_array,
    to_array,
)
from addnorm.data.text.files import require_file
from addnorm.errors import InputError, SavedError, nearest, require

MISSING_CELLS = frozenset(
    ("", "?", "NA", "N/A", "n/a", "#N/A", "<NA>", "nan", "NaN", "NAN", "null", "NULL", "None")
)
"""Cells of a file that stand for a missing value."""
ARROW_FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".feather": "feather",
    ".arrow": "feather",
}
ARROW_ERRORS = (OSError, ValueError, MemoryError, LookupError, TypeError, NotImplementedError)
"""What pyarrow raises for a damaged file; all of its exceptions are one of these, too."""


@dataclass(frozen=True)
class Frame:
    """Columns of equal length, by name."""

    name: str
    """Where the table came from, for messages."""
    columns: dict[str, Array]
    notes: tuple[str, ...] = ()
    """What was noticed while reading, in sentences."""
    named: bool = True
    """Whether the columns had names; those of an array are numbered: x0, x1, ..."""
    declared: frozenset[str] = frozenset()
    """Columns that the data frame declares as categories, whatever their values."""

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def take(self, rows: Array) -> "Frame":
        """Return some of the rows, by number or as booleans."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return replace(self, columns=columns)

    def without(self, *names: str) -> "Frame":
        columns = {name: column for name, column in self.columns.items() if name not in names}
        return replace(self, columns=columns)

    def column(self, name: str) -> Array:
        """Return one column; if there is none of that name, the error suggests the nearest."""
        if name not in self.columns:
            raise InputError(f"{self.name} has no column {name!r}. {nearest(name, self.columns)}")
        return self.columns[name]


def to_frame(source: Any, name: str = "the table") -> Frame:
    """Return a table from a path, a 2-D array, a mapping of columns, dicts, or a data frame.

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
        return _from_mapping(source, name)
    if isinstance(source, np.ndarray):
        return _from_array(source, name)
    return _from_data_frame(source, name)


def read_frame(path: str | Path) -> Frame:
    """Return the table in a file: .csv or .tsv, plain or .gz, .parquet or .feather.

    >>> _ = Path("pets.csv").write_text("kind, age\\ncat, 3\\ndog, ?\\n")
    >>> read_frame("pets.csv").columns["age"].tolist()
    ['3', None]
    """
    extension = Path(path).suffix.lower()
    if extension in ARROW_FORMATS:
        return _read_arrow(Path(path), ARROW_FORMATS[extension])
    return next(delimited_frames(path))


def delimited_frames(
    path: str | Path, rows: int | None = None, on_progress: Callable[[float], object] | None = None
) -> Iterator[Frame]:
    """Yield the rows of a .csv or .tsv file as frames of at most `rows` rows; None for one frame.

    Blank lines are skipped, and counted in the notes of the frame they belong to; a line of
    separators only is a row of missing values. `on_progress` is called with the share of the file
    that has been read, before each frame.
    """
    if not is_delimited(path):
        raise InputError(
            f"{str(path)!r} must be a table: give a .csv, .tsv, .parquet or .feather file."
        )
    file = DelimitedFile(path)
    lines = file.rows()
    line, header = next(lines)
    names, header_notes = parse_header(header, line, path)
    notes, blank, is_empty = [*file.notes, *header_notes], 0, True

    def filled() -> Iterator[list[str]]:
        nonlocal blank
        for _, cells in lines:
            if cells:
                yield cells
            else:
                blank += 1

    body = filled()
    while len((columns := _parse_columns(body, len(names), rows or sys.maxsize))[0]):
        notes += [f"blank lines skipped: {blank}."] if blank else []
        if on_progress is not None:
            on_progress(file.share_read())
        yield Frame(repr(str(path)), dict(zip(names, columns, strict=True)), tuple(notes))
        notes, blank, is_empty = [], 0, False
    if is_empty:
        raise InputError(f"{str(path)!r} must have rows below its header: it has none.")


def _parse_columns(body: Iterator[list[str]], width: int, rows: int) -> list[Array]:
    """Return the columns of the next `rows` rows, parsed in chunks that stay in the cache."""
    columns: list[list[str | None]] = [[] for _ in range(width)]
    while chunk := list(islice(body, min(PARSE_CHUNK, rows - len(columns[0])))):
        for place, column in enumerate(columns):
            column += parse_cells([cells[place] for cells in chunk])
    return [object_array(column) for column in columns]


def parse_cells(cells: Iterable[str]) -> list[str | None]:
    """Return the cells of a file without surrounding spaces, and None for a missing value."""
    return [None if (text := cell.strip()) in MISSING_CELLS else text for cell in cells]


def to_texts(column: Array) -> Array:
    """Return a column as texts, integers without a decimal point; None where missing.

    >>> to_texts(np.array([3.0, 2.5, np.nan])).tolist()
    ['3', '2.5', None]
    """
    if column.dtype == object:
        return column
    if column.dtype.kind == "M":
        return object_array(None if np.isnat(value) else str(value) for value in column)
    return object_array(number_text(value) for value in column.tolist())


def _checked_frame(name: str, columns: list[tuple[str, Array]]) -> Frame:
    """Return a frame of columns; InputError if names repeat or lengths differ."""
    counts = Counter(column for column, _ in columns)
    if repeated := [column for column, count in counts.items() if count > 1]:
        raise InputError(
            f"{name} must have a different name for each column: {repeated[0]!r} occurs "
            f"{counts[repeated[0]]} times. Rename one."
        )
    if not columns:
        raise InputError(f"{name} must have a column: it has none.")
    lengths = {column: len(values) for column, values in columns}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{name} must have columns of one length: got {lengths}.")
    return Frame(name, dict(columns))


def _from_mapping(source: Mapping[Any, Any], name: str) -> Frame:
    named = [(str(key), value) for key, value in source.items()]
    if scalars := [key for key, value in named if not _is_sequence(value)]:
        raise InputError(
            f"{name} must have a sequence for each column: {scalars[0]!r} is not one. "
            "Try [value] for one row."
        )
    frame = _checked_frame(name, [(key, to_array(value)) for key, value in named])
    return replace(frame, notes=tuple(conversion_notes(named, frame.columns)))


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)


def _from_array(array: Array, name: str) -> Frame:
    if array.ndim != 2:
        raise InputError(
            f"{name} must have rows and columns: got {array.ndim} dimensions. "
            "Try .reshape(-1, 1) for one column."
        )
    named = [(f"x{i}", array[:, i]) for i in range(array.shape[1])]
    columns = {key: to_array(column) for key, column in named}
    return Frame(name, columns, tuple(conversion_notes(named, columns)), named=False)


def _from_data_frame(source: Any, name: str) -> Frame:
    """Return any data frame that narwhals supports; what it does not, as an array."""
    narwhals = require("narwhals", "tables")
    try:
        native = narwhals.from_native(source)
    except TypeError:
        return _from_array(np.asarray(source), name)
    except narwhals.exceptions.DuplicateError as error:
        raise InputError(
            f"{name} must have a different name for each column. {' '.join(str(error).split())}"
        ) from None
    if not hasattr(native, "iter_columns"):
        raise InputError(
            f"{name} must be a data frame in memory: got {type(source).__name__}. "
            "Try .collect(), or a frame of one column."
        )
    named = [(str(column.name), column) for column in native.iter_columns()]
    frame = _checked_frame(name, [(key, _from_series(key, column)) for key, column in named])
    dates = (narwhals.Date, narwhals.Datetime)  # to_list needs their time zone to be known
    firsts = [
        (key, [] if column.dtype in dates else column.drop_nulls().head(1).to_list())
        for key, column in named
    ]
    categories = (narwhals.Categorical, narwhals.Enum)
    return replace(
        frame,
        notes=tuple(conversion_notes(firsts, frame.columns)),
        declared=frozenset(key for key, column in named if column.dtype in categories),
    )


def _from_series(name: str, series: Any) -> Array:
    """Return a column of a data frame as an array."""
    import narwhals

    kind = series.dtype
    if kind.is_numeric():
        try:
            return np.asarray(series.cast(narwhals.Float64).to_numpy(), dtype=np.float64)
        except ValueError:  # integers that float64 cannot represent: arrow does not round
            return to_array(series.to_list())
    if kind in (narwhals.Date, narwhals.Datetime):
        return _from_dates(name, series, getattr(kind, "time_zone", None))
    try:
        return to_array(series.to_list())
    except InputError as error:
        raise InputError(f"column {name!r}: {error}") from None


def _from_dates(name: str, series: Any, zone: str | None) -> Array:
    """Return dates of a data frame, converted to UTC if they have a time zone."""
    if zone is not None:
        try:
            series = series.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        except Exception as error:  # each library has its own
            raise InputError(
                f"column {name!r} must have a time zone that this computer knows: got {zone!r} "
                f"({_first_line(error)}). Convert it to UTC first."
            ) from None
    try:
        dates = [None if is_missing_value(value) else value for value in series.to_list()]
        return np.array([np.datetime64(value, "s") for value in dates], dtype="datetime64[s]")
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"column {name!r} must have dates of the years 1 to 9999: {_first_line(error)}. Set "
            "the others to missing."
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _read_arrow(path: Path, kind: str) -> Frame:
    require_file(path)
    reader = require(f"pyarrow.{kind}", "tables")
    try:
        table = reader.read_table(str(path))
        table.validate(full=True)  # a damaged file may have offsets outside its buffers
    except ARROW_ERRORS as error:
        raise damaged_arrow(path, kind, error) from None
    frame = to_frame(table, repr(str(path)))
    if not len(frame):
        raise InputError(f"{str(path)!r} must have rows: it has none.")
    return frame


def damaged_arrow(path: Path, kind: str, error: Exception) -> SavedError:
    """Return the error for a parquet or feather file that pyarrow cannot read."""
    reason = str(error).splitlines()[0]
    return SavedError(f"{str(path)!r} is damaged or not a {kind} file: {reason}")
