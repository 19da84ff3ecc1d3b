"""The reader of delimited files, .csv and .tsv, plain or .gz, for texts and tables alike.

Rows are streamed, so that memory does not grow with the file. A first pass over the whole file
decides how its columns are separated; training and prediction therefore read every file alike.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from addnorm.data.text.files import TextFile, empty_file
from addnorm.errors import InputError, nearest


class DelimitedFormat(NamedTuple):
    """The separator of columns, and whether fields may be quoted."""

    separator: str
    quoted: bool


DELIMITED_FORMATS = {
    ".tsv": (DelimitedFormat("\t", False), DelimitedFormat("\t", True)),
    ".csv": tuple(DelimitedFormat(separator, True) for separator in ",;\t|"),
}
"""By file extension, the formats in the order they are tried.

In a .tsv a quotation mark is part of the text, unless only quoting gives every row the same number
of columns: published corpora do not quote, and an unpaired mark would join lines.
"""
SEPARATOR_NAMES = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}
PARSE_CHUNK = 1000
"""Rows parsed at a time while the limit of the csv module is lifted."""
_LIMIT_LOCK = Lock()


class DelimitedFile:
    """A delimited file whose format is detected when it is opened, and whose rows are streamed.

    The format is the first in which all rows have the same number of columns, and more than one.
    If there is none, it is the usual one of the file's extension.

    >>> _ = Path("pets.csv").write_text('kind;age\\n"cat; big";3\\n\\n')
    >>> list(DelimitedFile("pets.csv").rows())
    [(1, ['kind', 'age']), (2, ['cat; big', '3']), (3, [])]
    """

    def __init__(self, path: str | Path) -> None:
        if not is_delimited(path):
            raise InputError(f"{str(path)!r} must be a table: give a .tsv or .csv file.")
        self.path = path
        with TextFile(path) as self._file:
            if not any(map(str.strip, self._file)):
                raise empty_file(path)
        formats = DELIMITED_FORMATS[_extension(path)]
        self.format = next((each for each in formats if self._suits(each)), formats[0])
        self.notes: list[str] = []
        """What was detected, in sentences."""
        if self.format != formats[0]:
            quoting = ", with quoted fields" if self.format.separator == "\t" else ""
            name = SEPARATOR_NAMES[self.format.separator]
            self.notes.append(f"columns are separated by {name}{quoting}.")

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each row with the line it begins on, counted from 1.

        A blank line is a row without cells, for the caller to count; those before the first row are
        skipped. A row with another number of columns than the first raises InputError.
        """
        return self._rows(self.format)

    def share_read(self) -> float:
        """Return the share of the file that `rows` has read so far."""
        return self._file.share_read()

    def _suits(self, form: DelimitedFormat) -> bool:
        width = 0
        try:
            for _, cells in self._rows(form):
                width = width or len(cells)
        except InputError:
            return False
        return width > 1

    def _rows(self, form: DelimitedFormat) -> Iterator[tuple[int, list[str]]]:
        first, width = 0, 0
        with TextFile(self.path) as self._file:
            parse = _parse_quoted if form.quoted else _parse_unquoted
            for line, cells in parse(self._file, form.separator, str(self.path)):
                if not first and cells:
                    first, width = line, len(cells)
                if cells and len(cells) != width:
                    raise InputError(
                        f"{str(self.path)!r} must have the same number of columns in every row: "
                        f"line {line} has {len(cells)}, line {first} has {width}. Quote the fields "
                        f"that hold {SEPARATOR_NAMES[form.separator]}."
                    )
                if first:
                    yield line, cells


@dataclass(frozen=True)
class DelimitedTable:
    """All rows of a delimited file: every row has the same number of cells."""

    name: str
    rows: list[list[str]]
    lines: list[int]
    """The line of the file that each row begins on, counted from 1."""
    notes: list[str]
    """What was detected, in sentences."""

    @property
    def width(self) -> int:
        return len(self.rows[0])

    def column_index(self, name: str, header: Sequence[str] | None) -> int:
        """Return the position of a column given by its name, or by its number from 1."""
        if header is not None and name in header:
            return header.index(name)
        if name.isdecimal() and 1 <= int(name) <= self.width:
            return int(name) - 1
        if header is None:
            known = [str(number + 1) for number in range(self.width)]
            raise InputError(
                f"{self.name!r} has no header line, so no column {name!r}. Give a number: "
                f"{', '.join(known)}."
            )
        raise InputError(f"{self.name!r} has no column {name!r}. {nearest(name, header)}")


def read_delimited(path: str | Path) -> DelimitedTable:
    """Return all rows of a .tsv or .csv file, also .gz; a blank line is a row of empty cells."""
    file = DelimitedFile(path)
    lines: list[int] = []
    rows: list[list[str]] = []
    for line, cells in file.rows():
        lines.append(line)
        rows.append(cells or [""] * len(rows[0]))
    return DelimitedTable(str(path), rows, lines, file.notes)


def is_delimited(path: str | Path) -> bool:
    """Return whether a file's extension is that of a delimited file."""
    return _extension(path) in DELIMITED_FORMATS


def parse_header(cells: Sequence[str], line: int, path: str | Path) -> tuple[list[str], list[str]]:
    """Return the column names of a header row, and notes on columns without a name.

    A column without a name is called by its number. Two columns of one name raise InputError.
    """
    names = [cell.strip() or f"column {number}" for number, cell in enumerate(cells, start=1)]
    notes = [
        f"column {number} of {str(path)!r} has no name in line {line}: it is called {name!r}."
        for number, (name, cell) in enumerate(zip(names, cells, strict=True), start=1)
        if not cell.strip()
    ]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"{str(path)!r} must have a different name for each column: {name!r} occurs {count} "
            f"times in line {line}. Rename one."
        )
    return names, notes


def _extension(path: str | Path) -> str:
    return Path(str(path).lower().removesuffix(".gz")).suffix


def _parse_unquoted(
    lines: Iterable[str], separator: str, name: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield one row for each line; a blank line is a row without cells."""
    for number, line in enumerate(lines, start=1):
        text = line.removesuffix("\n")
        yield number, text.split(separator) if text else []


def _parse_quoted(
    lines: Iterable[str], separator: str, name: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield rows whose fields may be quoted; a blank line is a row without cells.

    Strict, because an unclosed quote would silently swallow the rest of the file.
    """
    reader = csv.reader(lines, delimiter=separator, strict=True)
    line, problem = 1, None
    while problem is None:
        chunk = []
        try:
            with _any_field_length():
                for cells in islice(reader, PARSE_CHUNK):
                    chunk.append((line, cells))
                    line = reader.line_num + 1
        except csv.Error as error:
            problem = error
        yield from chunk
        if not chunk:
            break
    if problem is not None:
        raise InputError(
            f"{name!r} must be a valid delimited file: line {line} cannot be read ({problem}). "
            "Double the quotes inside a quoted field."
        )


@contextmanager
def _any_field_length() -> Iterator[None]:
    """Lift the limit on the length of a field, 131,072 characters, which the csv module sets.

    It is one for the whole process, so that it is lifted only while rows are parsed.
    """
    with _LIMIT_LOCK:
        limit = csv.field_size_limit(2**31 - 1)
        try:
            yield
        finally:
            csv.field_size_limit(limit)
