"""Tables of text, .tsv and .csv, as rows of cells with the line each row begins on."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from addnorm.data.files import read_document
from addnorm.errors import InputError, nearest

FORMS = {
    ".tsv": (("\t", False), ("\t", True)),
    ".csv": ((",", True), (";", True), ("\t", True), ("|", True)),
}
"""By file name: separators, and whether fields may be quoted, in the order they are tried.

In a .tsv a quotation mark is one of the text's, unless only quoting makes the columns come out
even: published corpora do not quote, and a stray mark would swallow lines.
"""
NAMES = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}


@dataclass(frozen=True)
class Cells:
    """A table: every row has the same number of cells."""

    name: str
    rows: list[list[str]]
    lines: list[int]
    """The line of the file that each row begins on, counted from 1."""
    notes: list[str]
    """What was found out about the table, in sentences."""

    @property
    def width(self) -> int:
        return len(self.rows[0])


def is_table(path: str | Path) -> bool:
    """Whether a file's name says that it is a table."""
    return _ending(path) in FORMS


def read_cells(path: str | Path) -> Cells:
    """The rows of a .tsv or .csv file, also .gz; quoted fields may hold line ends."""
    ending = _ending(path)
    if ending not in FORMS:
        raise InputError(f"{str(path)!r} must be a table: give a .tsv or .csv file.")
    text = read_document(path)
    tried: list[tuple[list[list[str]], list[int], str | None]] = []
    for separator, quoted in FORMS[ending]:
        rows, lines, problem = _parse(text, separator, quoted)
        if problem is None and len(rows[0]) > 1:
            notes = [] if not tried else [_say_form(separator, quoted)]
            return Cells(str(path), rows, lines, notes)
        tried.append((rows, lines, problem))
    rows, lines, problem = tried[0]
    if problem is not None:
        raise InputError(f"{str(path)!r} must have the same columns in every line: {problem}")
    return Cells(str(path), rows, lines, [])


def find_column(cells: Cells, name: str, head: Sequence[str] | None) -> int:
    """The place of a column that is called by its name, or by its number from 1."""
    if head is not None and name in head:
        return head.index(name)
    if name.isdecimal() and 1 <= int(name) <= cells.width:
        return int(name) - 1
    if head is None:
        known = [str(number + 1) for number in range(cells.width)]
        raise InputError(
            f"{cells.name!r} has no header line, so no column {name!r}. Give a number: "
            f"{', '.join(known)}."
        )
    raise InputError(f"{cells.name!r} has no column {name!r}. {nearest(name, head)}")


def _ending(path: str | Path) -> str:
    return Path(str(path).lower().removesuffix(".gz")).suffix


def _parse(
    text: str, separator: str, quoted: bool
) -> tuple[list[list[str]], list[int], str | None]:
    """Rows, the lines they begin on, and what is wrong with them.

    An empty line becomes a row of empty cells, for the caller to count.
    """
    try:
        rows, lines = (_quoted if quoted else _plain)(text, separator)
    except csv.Error as error:
        return [], [], f"{error}. Double the quotes inside a quoted field."
    width, first = next((len(row), n) for row, n in zip(rows, lines, strict=True) if row)
    for row, line in zip(rows, lines, strict=True):
        if row and len(row) != width:
            return rows, lines, _say_uneven(line, len(row), first, width, separator)
    return [row or [""] * width for row in rows], lines, None


def _plain(text: str, separator: str) -> tuple[list[list[str]], list[int]]:
    """Rows of a table without quoting: one line, one row."""
    rows = [line.split(separator) if line else [] for line in text.removesuffix("\n").split("\n")]
    return rows, list(range(1, len(rows) + 1))


def _quoted(text: str, separator: str) -> tuple[list[list[str]], list[int]]:
    """Rows of a table with quoting; strict, as an open quote would swallow the rest in silence."""
    reader = csv.reader(io.StringIO(text, newline="\n"), delimiter=separator, strict=True)
    rows: list[list[str]] = []
    lines = [1]
    try:
        with _any_field():
            for row in reader:
                rows.append(row)
                lines.append(reader.line_num + 1)
    except csv.Error as error:
        raise csv.Error(f"line {lines[-1]} cannot be read ({error})") from None
    return rows, lines[:-1]


@contextmanager
def _any_field() -> Iterator[None]:
    """Lift the limit that the csv module sets to the length of a field: a text may be a book."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _say_uneven(line: int, cells: int, first: int, width: int, separator: str) -> str:
    return (
        f"line {line} has {cells}, line {first} has {width}. Quote the fields that hold "
        f"{NAMES[separator]}."
    )


def _say_form(separator: str, quoted: bool) -> str:
    if separator == "\t" and quoted:
        return "columns are taken as separated by tabs, with quoted fields."
    return f"columns are taken as separated by {NAMES[separator]}."
