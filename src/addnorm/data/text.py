"""Pairs of lines for translation: read from two aligned files or one table, and sifted aloud."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from addnorm.data.cells import Cells, find_column, is_table, read_cells
from addnorm.data.files import read_lines
from addnorm.data.report import Finding, Report, find, need_choice, need_positive
from addnorm.errors import ConfigError, InputError

HEADS = (
    "source target src tgt trg input output text translation reference "
    "ar cs da de el en es fi fr he hi hu it ja ko nl no pl pt ro ru sv tr uk vi zh "
    "arabic chinese czech danish dutch english finnish french german greek hebrew hindi hungarian "
    "italian japanese korean norwegian polish portuguese romanian russian spanish swedish turkish "
    "ukrainian vietnamese"
)
"""Words that make the first line of a table of pairs a header, if it has no others."""


@dataclass(frozen=True)
class Pairs:
    """Sources and targets, row by row, with the line each pair came from."""

    source: list[str]
    target: list[str]
    lines: list[int]
    """The line of the file, counted from 1."""
    report: Report

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Iterable[int]) -> "Pairs":
        """Some of the pairs, in the order given."""
        rows = list(rows)
        source, target = ([side[row] for row in rows] for side in (self.source, self.target))
        return replace(self, source=source, target=target, lines=[self.lines[row] for row in rows])


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What to do with rows that are empty, too long, or there before: drop, cut or keep."""

    longest: int | None = None
    """Characters that a text may have; None for any number."""
    empty: str = "drop"
    long: str = "drop"
    repeated: str = "keep"

    def __post_init__(self) -> None:
        need_choice("empty", self.empty, ("drop", "keep"))
        need_choice("long", self.long, ("drop", "cut", "keep"))
        need_choice("repeated", self.repeated, ("drop", "keep"))
        need_positive("longest", self.longest)


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
    """Pairs from two files whose lines correspond, or from one .tsv or .csv with two columns.

    `columns` are names or numbers, for a table with more than two. `limit` is how many pairs to
    read; `longest` how many characters a side may have. What happens to empty, over-long and
    repeated pairs is up to you, and always in the report.

    >>> _ = Path("pairs.tsv").write_text("a cat\\teine Katze\\na dog\\t\\n", encoding="utf-8")
    >>> read_pairs("pairs.tsv").report.lines()[1:]
    ['1 pair has an empty side (line 2): left out.']
    """
    rules = Rules(longest=longest, empty=empty, long=long, repeated=repeated)
    need_positive("limit", limit)
    if target is None:
        name, rows, lines, notes = _from_table(source, columns)
    else:
        name, rows, lines, notes = _from_files(source, target, columns)
    if limit is not None and limit < len(rows):
        notes = [*notes, f"only the first {limit} of {len(rows)} pairs are read."]
        rows, lines = rows[:limit], lines[:limit]
    kept, findings = sift(rows, lines, rules, sides=2)
    report = Report(
        name=name,
        thing="pair",
        read=len(rows),
        kept=len(kept),
        findings=findings,
        notes=tuple(notes),
    )
    if not kept:
        raise InputError(f"there must be a pair to learn from: {' '.join(report.lines())}")
    sources, targets = ([cells[side] for _, cells in kept] for side in (0, 1))
    return Pairs(sources, targets, [lines[row] for row, _ in kept], report)


def sift(
    rows: Sequence[tuple[str, ...]], lines: Sequence[int], rules: Rules, *, sides: int
) -> tuple[list[tuple[int, tuple[str, ...]]], dict[str, Finding]]:
    """The rows to keep, with their numbers, and what was found; the first `sides` cells are text.

    A row is repeated if all its cells are those of an earlier one.
    """
    kept = []
    empty, long, repeated = [], [], []
    seen: set[tuple[str, ...]] = set()
    longest = rules.longest
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        texts, is_new = row[:sides], row not in seen
        seen.add(row)
        if not all(text.strip() for text in texts):
            empty.append(line)
            if rules.empty == "drop":
                continue
        if longest is not None and any(len(text) > longest for text in texts):
            long.append(line)
            if rules.long == "drop":
                continue
            if rules.long == "cut":
                row = (*(text[:longest] for text in texts), *row[sides:])
        if not is_new:
            repeated.append(line)
            if rules.repeated == "drop":
                continue
        kept.append((number, row))
    what = "an empty side" if sides > 1 else "no text"
    return kept, {
        "empty": find(("has", "have"), what, rules.empty, empty),
        "long": find(("has", "have"), f"more than {longest} characters", rules.long, long),
        "repeated": find(("repeats", "repeat"), "an earlier one", rules.repeated, repeated),
    }


def limit_tokens(
    sides: Sequence[Sequence[list[int]]],
    longest: int,
    *,
    long: str = "cut",
    lines: Sequence[int] | None = None,
) -> tuple[list[list[list[int]]], list[int], Finding]:
    """Rows of token ids of one or more sides, held to a length; the rows kept; what was found.

    A row is too long if one of its sides is. `lines` are for the finding; rows count from 1 else.

    >>> limit_tokens([[[5, 6, 7], [8]]], 2)[:2]
    ([[[5, 6], [8]]], [0, 1])
    """
    need_choice("long", long, ("drop", "cut", "keep"))
    need_positive("longest", longest)
    rows = range(len(sides[0]))
    over = {row for side in sides for row in rows if len(side[row]) > longest}
    kept = [row for row in rows if row not in over or long != "drop"]
    stop = longest if long == "cut" else None
    held = [[side[row][:stop] for row in kept] for side in sides]
    places = [row + 1 if lines is None else lines[row] for row in sorted(over)]
    return held, kept, find(("has", "have"), f"more than {longest} tokens", long, places)


def _from_files(
    source: str | Path, target: str | Path, columns: tuple[str, str] | None
) -> tuple[str, list[tuple[str, ...]], list[int], list[str]]:
    """Name, pairs, lines and notes of two files."""
    if columns is not None:
        raise ConfigError(
            f"columns are for one table: got {columns} and two files. Leave one of them out."
        )
    one, other = read_lines(source), read_lines(target)
    if len(one) != len(other):
        raise InputError(
            f"source and target must have the same number of lines: {str(source)!r} has "
            f"{len(one)}, {str(target)!r} has {len(other)}. Line n of one translates line n of the "
            "other."
        )
    rows: list[tuple[str, ...]] = list(zip(one, other, strict=True))
    return f"{source}, {target}", rows, list(range(1, len(rows) + 1)), []


def _from_table(
    path: str | Path, columns: tuple[str, str] | None
) -> tuple[str, list[tuple[str, ...]], list[int], list[str]]:
    """Name, pairs, lines and notes of a table."""
    if not is_table(path):
        raise InputError(
            f"pairs need a source and a target: only {str(path)!r} was given. Give a second file "
            "with the same lines, or one .tsv or .csv with two columns."
        )
    cells = read_cells(path)
    if columns is None and cells.width != 2:
        raise InputError(
            f"a table of pairs must have 2 columns: {cells.name!r} has {cells.width}. "
            "Say which two, by name or number: columns=('1', '2')."
        )
    head, note = _head(cells, columns)
    places = [find_column(cells, name, head) for name in columns or ("1", "2")]
    skip = 0 if head is None else 1
    rows = [tuple(row[place] for place in places) for row in cells.rows[skip:]]
    return cells.name, rows, cells.lines[skip:], [*cells.notes, *note]


def _head(cells: Cells, columns: tuple[str, str] | None) -> tuple[list[str] | None, list[str]]:
    """The header of a table of pairs, if its first line is one, and a note about it."""
    first = [cell.strip() for cell in cells.rows[0]]
    named = columns is not None and any(not name.isdecimal() for name in columns)
    if named or all(cell.lower() in HEADS.split() for cell in first):
        return first, [f"line {cells.lines[0]} is taken as the header: {', '.join(first)}."]
    return None, []
