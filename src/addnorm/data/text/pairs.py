"""Sentence pairs for translation, read from two aligned files or one table, and filtered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from addnorm.data.delimited import DelimitedTable, is_delimited, read_delimited
from addnorm.data.text.files import read_lines
from addnorm.data.text.reading_report import (
    ReadingIssue,
    ReadingReport,
    check_choice,
    check_positive,
    count_issue,
)
from addnorm.errors import ConfigError, InputError

HEADER_WORDS = (
    "source target src tgt trg input output text translation reference "
    "ar cs da de el en es fi fr he hi hu it ja ko nl no pl pt ro ru sv tr uk vi zh "
    "arabic chinese czech danish dutch english finnish french german greek hebrew hindi hungarian "
    "italian japanese korean norwegian polish portuguese romanian russian spanish swedish turkish "
    "ukrainian vietnamese"
)
"""A first line of a table of pairs that has only such words is a header."""


@dataclass(frozen=True)
class Pairs:
    """Source and target sentences, with the line of each pair."""

    source: list[str]
    target: list[str]
    lines: list[int]
    """The line of the file, counted from 1."""
    report: ReadingReport

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Iterable[int]) -> "Pairs":
        """Return some of the pairs, in the order of `rows`."""
        rows = list(rows)
        source, target = ([side[row] for row in rows] for side in (self.source, self.target))
        return replace(self, source=source, target=target, lines=[self.lines[row] for row in rows])


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """What to do with rows that are empty, too long or repeated: drop, cut or keep."""

    longest: int | None = None
    """Characters that a text may have; None for no limit."""
    empty: str = "drop"
    long: str = "drop"
    repeated: str = "keep"

    def __post_init__(self) -> None:
        check_choice("empty", self.empty, ("drop", "keep"))
        check_choice("long", self.long, ("drop", "cut", "keep"))
        check_choice("repeated", self.repeated, ("drop", "keep"))
        check_positive("longest", self.longest)


def read_pairs(
    source: str | Path,
    target: str | Path | None = None,
    *,
    columns: tuple[str, str] | None = None,
    limit: int | None = None,
    longest: int | None = None,
    empty: str = "drop",
    long: str = "drop",
    repeated: str = "keep",
) -> Pairs:
    """Return pairs from two files whose lines correspond, or from one .tsv or .csv file.

    Parameters
    ----------
    source
        The file of source sentences, or a table of both sides.
    target
        The file of target sentences; None for a table.
    columns
        Names or numbers of the two columns, for a table with more than two.
    limit
        Pairs to read; None for all.
    longest
        Characters that a side may have; None for no limit.
    empty, long, repeated
        What to do with pairs that have an empty side, are too long, or repeat an earlier one:
        drop, cut (long only) or keep. The report counts all of them.

    Examples
    --------
    >>> _ = Path("pairs.tsv").write_text("a cat\\teine Katze\\na dog\\t\\n", encoding="utf-8")
    >>> read_pairs("pairs.tsv").report.lines()[1:]
    ['1 pair has an empty side (line 2): left out.']
    """
    row_filter = RowFilter(longest=longest, empty=empty, long=long, repeated=repeated)
    check_positive("limit", limit)
    if target is None:
        name, rows, lines, notes = _from_table(source, columns)
    else:
        name, rows, lines, notes = _from_files(source, target, columns)
    if limit is not None and limit < len(rows):
        notes = [*notes, f"only the first {limit} of {len(rows)} pairs are read."]
        rows, lines = rows[:limit], lines[:limit]
    kept, issues = filter_rows(rows, lines, row_filter, sides=2)
    report = ReadingReport(
        name=name,
        row_name="pair",
        read=len(rows),
        kept=len(kept),
        issues=issues,
        notes=tuple(notes),
    )
    if not kept:
        raise InputError(f"there must be a pair to learn from: {' '.join(report.lines())}")
    sources, targets = ([cells[side] for _, cells in kept] for side in (0, 1))
    return Pairs(sources, targets, [lines[row] for row, _ in kept], report)


def filter_rows(
    rows: Sequence[tuple[str, ...]], lines: Sequence[int], row_filter: RowFilter, *, sides: int
) -> tuple[list[tuple[int, tuple[str, ...]]], dict[str, ReadingIssue]]:
    """Return the rows to keep, with their indices, and the issues of all rows.

    Parameters
    ----------
    rows
        The cells of each row; a row is repeated if all its cells equal those of an earlier one.
    lines
        The line of each row, for the report.
    row_filter
        What to do with empty, long and repeated rows.
    sides
        How many cells, from the first, are texts.
    """
    kept = []
    empty, long, repeated = [], [], []
    earlier: set[tuple[str, ...]] = set()
    longest = row_filter.longest
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        texts, is_new = row[:sides], row not in earlier
        earlier.add(row)
        if not all(text.strip() for text in texts):
            empty.append(line)
            if row_filter.empty == "drop":
                continue
        if longest is not None and any(len(text) > longest for text in texts):
            long.append(line)
            if row_filter.long == "drop":
                continue
            if row_filter.long == "cut":
                row = (*(text[:longest] for text in texts), *row[sides:])
        if not is_new:
            repeated.append(line)
            if row_filter.repeated == "drop":
                continue
        kept.append((number, row))
    description = "an empty side" if sides > 1 else "no text"
    return kept, {
        "empty": count_issue(("has", "have"), description, row_filter.empty, empty),
        "long": count_issue(
            ("has", "have"), f"more than {longest} characters", row_filter.long, long
        ),
        "repeated": count_issue(
            ("repeats", "repeat"), "an earlier one", row_filter.repeated, repeated
        ),
    }


def limit_tokens(
    sides: Sequence[Sequence[list[int]]],
    longest: int,
    *,
    long: str = "cut",
    lines: Sequence[int] | None = None,
) -> tuple[list[list[list[int]]], list[int], ReadingIssue]:
    """Return rows of token ids limited in length, the indices of the rows kept, and the issue.

    Parameters
    ----------
    sides
        Rows of token ids, for each side; a row is too long if one of its sides is.
    longest
        Tokens that a side may have.
    long
        What to do with a row that is too long: drop, cut or keep.
    lines
        The line of each row, for the report; by default rows are counted from 1.

    Examples
    --------
    >>> limit_tokens([[[5, 6, 7], [8]]], 2)[:2]
    ([[[5, 6], [8]]], [0, 1])
    """
    check_choice("long", long, ("drop", "cut", "keep"))
    check_positive("longest", longest)
    rows = range(len(sides[0]))
    too_long = {row for side in sides for row in rows if len(side[row]) > longest}
    kept = [row for row in rows if row not in too_long or long != "drop"]
    stop = longest if long == "cut" else None
    limited = [[side[row][:stop] for row in kept] for side in sides]
    long_lines = [row + 1 if lines is None else lines[row] for row in sorted(too_long)]
    issue = count_issue(("has", "have"), f"more than {longest} tokens", long, long_lines)
    return limited, kept, issue


def _from_files(
    source: str | Path, target: str | Path, columns: tuple[str, str] | None
) -> tuple[str, list[tuple[str, ...]], list[int], list[str]]:
    """Return the name, pairs, lines and notes of two files."""
    if columns is not None:
        raise ConfigError(
            f"columns are for one table: got {columns} and two files. Omit one of them."
        )
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise InputError(
            f"source and target must have the same number of lines: {str(source)!r} has "
            f"{len(sources)}, {str(target)!r} has {len(targets)}. Line n of one must translate "
            "line n of the other."
        )
    rows: list[tuple[str, ...]] = list(zip(sources, targets, strict=True))
    return f"{source}, {target}", rows, list(range(1, len(rows) + 1)), []


def _from_table(
    path: str | Path, columns: tuple[str, str] | None
) -> tuple[str, list[tuple[str, ...]], list[int], list[str]]:
    """Return the name, pairs, lines and notes of a table."""
    if not is_delimited(path):
        raise InputError(
            f"pairs need a source and a target: got only {str(path)!r}. Give a second file "
            "with the same lines, or one .tsv or .csv with two columns."
        )
    table = read_delimited(path)
    if columns is None and table.width != 2:
        raise InputError(
            f"a table of pairs must have 2 columns: {table.name!r} has {table.width}. "
            "Name two of them, or give their numbers: columns=('1', '2')."
        )
    header, note = _find_header(table, columns)
    indices = [table.column_index(name, header) for name in columns or ("1", "2")]
    skip = 0 if header is None else 1
    rows = [tuple(row[index] for index in indices) for row in table.rows[skip:]]
    return table.name, rows, table.lines[skip:], [*table.notes, *note]


def _find_header(
    table: DelimitedTable, columns: tuple[str, str] | None
) -> tuple[list[str] | None, list[str]]:
    """Return the header of a table of pairs, if its first line is one, and a note about it."""
    first = [cell.strip() for cell in table.rows[0]]
    has_names = columns is not None and any(not name.isdecimal() for name in columns)
    if has_names or all(cell.lower() in HEADER_WORDS.split() for cell in first):
        return first, [f"line {table.lines[0]} is read as the header: {', '.join(first)}."]
    return None, []
