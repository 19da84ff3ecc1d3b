"""Tables read and written a part at a time, so that memory does not grow with the file."""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TextIO

from addnorm.data.cells import FORMS, is_table
from addnorm.data.files import SIGNS, need_file
from addnorm.data.frame import ARROW, Frame, head_names, texts, to_frame
from addnorm.disk import whole
from addnorm.errors import InputError, SavedError, require

HEAD = 200
"""Lines that decide how the columns are separated."""


def read_parts(
    path: str | Path, rows: int = 20_000, told: Callable[[float], object] | None = None
) -> Iterator[Frame]:
    """The rows of a .csv, .tsv, .parquet or .feather file as frames of so many rows.

    `told` is called with the share of the file that has been read, before each part is given.

    >>> _ = Path("n.csv").write_text("a,b\\n1,2\\n3,4\\n5,6\\n")
    >>> [len(part) for part in read_parts("n.csv", rows=2)]
    [2, 1]
    """
    path, tell = need_file(Path(path)), told or _nobody
    if path.suffix.lower() in ARROW:
        yield from _arrow_parts(path, ARROW[path.suffix.lower()], rows, tell)
        return
    if not is_table(path):
        raise InputError(
            f"{str(path)!r} must be a table: give a .csv, .tsv, .parquet or .feather file."
        )
    with _open_text(path) as (file, raw):
        reader, size = _rows(path, file), path.stat().st_size
        head, _ = next(reader, ([], 0))
        if not head:
            raise InputError(f"{str(path)!r} must hold some text: it is empty.")
        names, _ = head_names(head, str(path))
        if len(set(names)) < len(names):
            raise InputError(f"{str(path)!r} must have a different name for each column.")
        empty = True
        while part := list(islice(reader, rows)):
            empty = False
            for row, line in part:
                if len(row) != len(names):
                    raise InputError(
                        f"{str(path)!r} must have the same columns in every line: line {line} has "
                        f"{len(row)}, the header has {len(names)}."
                    )
            columns = {n: texts([row[i] for row, _ in part]) for i, n in enumerate(names)}
            tell(raw.tell() / size)
            yield Frame(repr(str(path)), columns)
        if empty:
            raise InputError(f"{str(path)!r} must have rows below its header: it has none.")


def _nobody(share: float) -> None:
    """Told how far the file is read, and keeps it."""


@contextmanager
def _open_text(path: Path) -> Iterator[tuple[TextIO, BinaryIO]]:
    """The text of a file, and the file itself, which knows how far it is read."""
    try:
        with path.open("rb") as raw:
            start = raw.read(8)
            raw.seek(0)
            for sign, what in SIGNS.items():
                if start.startswith(sign):
                    raise SavedError(f"{str(path)!r} is not UTF-8 text: it is {what}.")
            packed = start.startswith(b"\x1f\x8b")
            stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            yield io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), raw
    except UnicodeDecodeError as error:
        raise SavedError(
            f"{str(path)!r} must be UTF-8 text: {error.reason}. If it is Latin-1, convert it: "
            "iconv -f LATIN1 -t UTF-8."
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise SavedError(f"{str(path)!r} is damaged: its gzip data break off.") from None


def _rows(path: Path, file: TextIO) -> Iterator[tuple[list[str], int]]:
    """Rows, each with the line it ends on; a line without even a separator is none."""
    first = list(islice(file, HEAD))
    ending = Path(str(path).lower().removesuffix(".gz")).suffix
    separator, quoted = _form(first, FORMS[ending])
    lines = _no_nul(path, chain(first, file))
    reader = _reader(lines, separator, quoted, strict=quoted)
    try:
        for row in reader:
            if row:
                yield row, reader.line_num
    except csv.Error as error:
        raise InputError(
            f"{str(path)!r}: line {reader.line_num} cannot be read ({error}). "
            "Double the quotes inside a quoted field."
        ) from None


def _reader(lines: Iterable[str], separator: str, quoted: bool, *, strict: bool) -> Any:
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    return csv.reader(lines, delimiter=separator, quoting=quoting, strict=strict)


def _no_nul(path: Path, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise SavedError(
                f"{str(path)!r} is not text: line {number} holds a byte 0. "
                "Give a file of UTF-8 text."
            )
        yield line


def _form(first: Sequence[str], forms: Sequence[tuple[str, bool]]) -> tuple[str, bool]:
    """The first form in which all but the last of the first lines have as many cells."""
    for separator, quoted in forms:
        rows = [row for row in _reader(first, separator, quoted, strict=False) if row]
        widths = {len(row) for row in (rows[:-1] or rows)}
        if len(widths) == 1 and widths != {1}:
            return separator, quoted
    return forms[0]


def _arrow_parts(
    path: Path, kind: str, rows: int, tell: Callable[[float], object]
) -> Iterator[Frame]:
    arrow = require("pyarrow", "tables")
    try:
        for batch, share in (_parquet if kind == "parquet" else _feather)(path, rows):
            for start in range(0, batch.num_rows, rows):
                tell(share)
                table = arrow.Table.from_batches([batch.slice(start, rows)])
                yield to_frame(table, repr(str(path)))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).splitlines()[0]
        raise SavedError(f"{str(path)!r} is damaged or no {kind} file: {reason}") from None


def _parquet(path: Path, rows: int) -> Iterator[tuple[Any, float]]:
    """Batches of so many rows, with the share of the file that is read after each."""
    file = require("pyarrow.parquet", "tables").ParquetFile(str(path))
    done = 0
    for batch in file.iter_batches(batch_size=rows):
        done += batch.num_rows
        yield batch, done / file.metadata.num_rows


def _feather(path: Path, rows: int) -> Iterator[tuple[Any, float]]:
    """Batches as they were written; an uncompressed one is mapped into memory, not read."""
    arrow, ipc = require("pyarrow", "tables"), require("pyarrow.ipc", "tables")
    file = ipc.open_file(arrow.memory_map(str(path)))
    for number in range(file.num_record_batches):
        yield file.get_batch(number), (number + 1) / file.num_record_batches


class Sink(Protocol):
    """Where frames go, one after the other."""

    def write(self, frame: Frame) -> None: ...


@contextmanager
def open_sink(path: str | Path) -> Iterator[Sink]:
    """A .csv, .tsv (also .gz) or .parquet file that appears whole when all parts are written."""
    path = Path(path)
    is_parquet = ARROW.get(path.suffix.lower()) == "parquet"
    if not is_parquet and not is_table(path):
        raise InputError(f"{str(path)!r} cannot be written: name a .csv, .tsv or .parquet file.")
    with whole(path) as temporary:
        sink = _ParquetSink(temporary) if is_parquet else _TextSink(temporary, path)
        try:
            yield sink
        finally:
            sink.close()


class _TextSink:
    def __init__(self, temporary: Path, path: Path) -> None:
        name = path.name.lower()
        opener: Any = gzip.open if name.endswith(".gz") else open
        self.file = opener(temporary, "wt", encoding="utf-8", newline="")
        tabs = name.removesuffix(".gz").endswith(".tsv")
        self.writer = csv.writer(self.file, delimiter="\t" if tabs else ",", lineterminator="\n")
        self.begun = False

    def write(self, frame: Frame) -> None:
        if not self.begun:
            self.writer.writerow(frame.names)
            self.begun = True
        columns = [column.tolist() for column in frame.columns.values()]
        for row in zip(*columns, strict=True):
            self.writer.writerow(["" if v is None or v != v else v for v in row])

    def close(self) -> None:
        self.file.close()


class _ParquetSink:
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
