"""Tables read and written in parts, so that memory does not grow with the file."""

import csv
import gzip
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from addnorm.data.delimited import is_delimited
from addnorm.data.table.arrow_files import (
    ARROW_ERRORS,
    ARROW_FORMATS,
    arrow_batches,
    damaged_arrow,
)
from addnorm.data.table.frame import Array, Frame, delimited_frames, to_frame
from addnorm.data.text.files import require_file
from addnorm.errors import InputError, require
from addnorm.files import whole

NOTHING: Mapping[str, Array] = MappingProxyType({})
"""No added columns."""


def read_parts(
    path: str | Path,
    rows: int = 20_000,
    on_progress: Callable[[float], object] | None = None,
    *,
    keep_original: bool = False,
) -> Iterator[Frame]:
    """Yield the rows of a .csv, .tsv, .parquet or .feather file as frames of at most `rows` rows.

    Parameters
    ----------
    path : the file.
    rows : the most rows of a frame.
    on_progress : called with the share of the file that has been read, before each frame.
    keep_original : whether frames keep what the file had, for `TableWriter.write`.

    Examples
    --------
    >>> _ = Path("n.csv").write_text("a,b\\n1,2\\n3,4\\n5,6\\n")
    >>> [len(part) for part in read_parts("n.csv", rows=2)]
    [2, 1]
    """
    path = require_file(Path(path))
    if path.suffix.lower() in ARROW_FORMATS:
        kind = ARROW_FORMATS[path.suffix.lower()]
        for table, share in _arrow_parts(path, kind, rows):
            if on_progress is not None:
                on_progress(share)
            frame = to_frame(table, repr(str(path)))
            yield replace(frame, original=table) if keep_original else frame
    else:
        yield from delimited_frames(path, rows, on_progress, keep_original=keep_original)


def _arrow_parts(path: Path, kind: str, rows: int) -> Iterator[tuple[Any, float]]:
    """Yield Arrow tables of at most `rows` rows, each with the share of the file read after it."""
    try:
        for batch, share in arrow_batches(path, kind, rows):
            for start in range(0, batch.num_rows, rows):
                table = batch.slice(start, rows)
                table.validate(full=True)
                yield table, share
    except ARROW_ERRORS as error:
        if isinstance(error, InputError):
            raise
        raise damaged_arrow(path, kind, error) from None


class TableWriter(Protocol):
    """A file that frames are appended to."""

    def write(self, frame: Frame, added: Mapping[str, Array] = ...) -> None:
        """Append the rows of a frame, as they were read, and columns that are added to them."""


@contextmanager
def open_table_writer(path: str | Path) -> Iterator[TableWriter]:
    """Open a .csv, .tsv (also .gz) or .parquet file that appears when all frames are written."""
    path = Path(path)
    is_parquet = ARROW_FORMATS.get(path.suffix.lower()) == "parquet"
    if not is_parquet and not is_delimited(path):
        raise InputError(f"{str(path)!r} cannot be written: name a .csv, .tsv or .parquet file.")
    with whole(path) as temporary:
        writer = _ParquetWriter(temporary) if is_parquet else _DelimitedWriter(temporary, path)
        try:
            yield writer
        finally:
            writer.close()


class _DelimitedWriter:
    def __init__(self, temporary: Path, path: Path) -> None:
        name = path.name.lower()
        opener: Any = gzip.open if name.endswith(".gz") else open
        self.file = opener(temporary, "wt", encoding="utf-8", newline="")
        separator = "\t" if name.removesuffix(".gz").endswith(".tsv") else ","
        self.writer = csv.writer(self.file, delimiter=separator, lineterminator="\n")
        self.has_header = False

    def write(self, frame: Frame, added: Mapping[str, Array] = NOTHING) -> None:
        if not self.has_header:
            self.writer.writerow([*frame.names, *added])
            self.has_header = True
        if frame.original is None:
            columns = [column.tolist() for column in frame.columns.values()]
        elif isinstance(frame.original, list):
            columns = frame.original
        else:
            columns = [column.to_pylist() for column in frame.original.columns]
        columns = [*columns, *(column.tolist() for column in added.values())]
        for row in zip(*columns, strict=True):
            self.writer.writerow(["" if v is None or v != v else v for v in row])

    def close(self) -> None:
        self.file.close()


class _ParquetWriter:
    def __init__(self, temporary: Path) -> None:
        self.arrow = require("pyarrow", "tables")
        self.parquet = require("pyarrow.parquet", "tables")
        self.path = temporary
        self.writer: Any = None

    def write(self, frame: Frame, added: Mapping[str, Array] = NOTHING) -> None:
        table = frame.original
        if not isinstance(table, self.arrow.Table):
            table = self.arrow.table(
                {name: self._array(column) for name, column in frame.columns.items()}
            )
        for name, column in added.items():
            table = table.append_column(name, self._array(column))
        if self.writer is None:
            self.writer = self.parquet.ParquetWriter(str(self.path), table.schema)
        self.writer.write_table(table)

    def _array(self, column: Array) -> Any:
        kinds = {"f": self.arrow.float64(), "M": self.arrow.timestamp("s")}
        return self.arrow.array(column, type=kinds.get(column.dtype.kind, self.arrow.string()))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
