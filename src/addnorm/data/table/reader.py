"""Tables read and written in parts, so that memory does not grow with the file."""

import csv
import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from addnorm.data.delimited import is_delimited
from addnorm.data.table.frame import (
    ARROW_ERRORS,
    ARROW_FORMATS,
    Frame,
    damaged_arrow,
    delimited_frames,
    to_frame,
)
from addnorm.data.text.files import require_file
from addnorm.errors import InputError, require
from addnorm.files import whole


def read_parts(
    path: str | Path, rows: int = 20_000, on_progress: Callable[[float], object] | None = None
) -> Iterator[Frame]:
    """Yield the rows of a .csv, .tsv, .parquet or .feather file as frames of at most `rows` rows.

    `on_progress` is called with the share of the file that has been read, before each frame.

    >>> _ = Path("n.csv").write_text("a,b\\n1,2\\n3,4\\n5,6\\n")
    >>> [len(part) for part in read_parts("n.csv", rows=2)]
    [2, 1]
    """
    path = require_file(Path(path))
    if path.suffix.lower() in ARROW_FORMATS:
        yield from _arrow_parts(path, ARROW_FORMATS[path.suffix.lower()], rows, on_progress)
    else:
        yield from delimited_frames(path, rows, on_progress)


def _arrow_parts(
    path: Path, kind: str, rows: int, on_progress: Callable[[float], object] | None
) -> Iterator[Frame]:
    arrow = require("pyarrow", "tables")
    batches = _parquet_batches(path, rows) if kind == "parquet" else _feather_batches(path)
    try:
        for batch, share in batches:
            for start in range(0, batch.num_rows, rows):
                if on_progress is not None:
                    on_progress(share)
                table = arrow.Table.from_batches([batch.slice(start, rows)])
                table.validate(full=True)
                yield to_frame(table, repr(str(path)))
    except ARROW_ERRORS as error:
        if isinstance(error, InputError):
            raise
        raise damaged_arrow(path, kind, error) from None


def _parquet_batches(path: Path, rows: int) -> Iterator[tuple[Any, float]]:
    """Yield batches of `rows` rows, each with the share of the file read after it."""
    file = require("pyarrow.parquet", "tables").ParquetFile(str(path))
    done = 0
    for batch in file.iter_batches(batch_size=rows):
        done += batch.num_rows
        yield batch, done / file.metadata.num_rows


def _feather_batches(path: Path) -> Iterator[tuple[Any, float]]:
    """Yield batches as they were written; an uncompressed file is memory-mapped, not read."""
    arrow, ipc = require("pyarrow", "tables"), require("pyarrow.ipc", "tables")
    file = ipc.open_file(arrow.memory_map(str(path)))
    for number in range(file.num_record_batches):
        yield file.get_batch(number), (number + 1) / file.num_record_batches


class TableWriter(Protocol):
    """A file that frames are appended to."""

    def write(self, frame: Frame) -> None: ...


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

    def write(self, frame: Frame) -> None:
        if not self.has_header:
            self.writer.writerow(frame.names)
            self.has_header = True
        columns = [column.tolist() for column in frame.columns.values()]
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

    def write(self, frame: Frame) -> None:
        kinds = {"f": self.arrow.float64(), "M": self.arrow.timestamp("s")}
        arrays = {
            name: self.arrow.array(column, type=kinds.get(column.dtype.kind, self.arrow.string()))
            for name, column in frame.columns.items()
        }
        table = self.arrow.table(arrays)
        if self.writer is None:
            self.writer = self.parquet.ParquetWriter(str(self.path), table.schema)
        self.writer.write_table(table)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
