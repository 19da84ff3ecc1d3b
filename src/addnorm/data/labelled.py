"""Texts with labels, for classification: read from a .tsv or .csv, with or without a header."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from addnorm.data.cells import Cells, find_column, read_cells
from addnorm.data.report import Finding, Report, find, need_choice
from addnorm.data.text import Rules, sift
from addnorm.errors import InputError, nearest

LABEL_HEADS = ("label", "class", "category", "target", "sentiment", "stars", "rating", "y")
"""Names that make a column the label, if no other is asked for."""
LONGEST_HEAD = 40
"""Characters of a cell that could be the name of a column."""

Numbered = list[tuple[int, tuple[str, ...]]]
"""Rows of text and label, with their numbers."""


@dataclass(frozen=True)
class Labelled:
    """Texts and their labels, row by row, with the line each came from."""

    texts: list[str]
    labels: list[str]
    lines: list[int]
    """The line of the file, counted from 1."""
    names: tuple[str, ...]
    """All labels in a fixed order: by number if they are numbers, else by alphabet."""
    report: Report

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def targets(self) -> list[int]:
        """The labels as numbers: places in `names`."""
        places = {name: place for place, name in enumerate(self.names)}
        return [places[label] for label in self.labels]

    def take(self, rows: Iterable[int]) -> "Labelled":
        """Some of the rows, in the order given; `names` stay all."""
        rows = list(rows)
        texts, labels = ([column[row] for row in rows] for column in (self.texts, self.labels))
        return replace(self, texts=texts, labels=labels, lines=[self.lines[row] for row in rows])


def read_table(
    path: str | Path,
    text: str | None = None,
    label: str | None = None,
    *,
    names: Sequence[str] | None = None,
    longest: int | None = None,
    empty: str = "drop",
    long: str = "cut",
    repeated: str = "keep",
    rare: str = "error",
    limit: int | None = None,
) -> Labelled:
    """Texts and labels of a table; `text` and `label` are column names, or numbers from 1.

    A column not named is guessed, and so is whether there is a header; the report says what was
    taken. `names` are the labels that a model knows already: others are an error. `rare` is about
    labels seen only once, which cannot be both learnt and checked: error, drop or keep. `limit` is
    how many rows are read.

    >>> _ = Path("films.tsv").write_text("a joy\\t1\\na bore\\t0\\nno fun\\t0\\nfun\\t1\\n")
    >>> films = read_table("films.tsv")
    >>> films.texts[1], films.targets, films.names
    ('a bore', [1, 0, 0, 1], ('0', '1'))
    """
    need_choice("rare", rare, ("error", "drop", "keep"))
    rules = Rules(longest=longest, empty=empty, long=long, repeated=repeated)
    cells = read_cells(path)
    rows, lines, notes = _two_columns(cells, text, label)
    rows, lines = rows[:limit], lines[:limit]
    kept, findings = sift(rows, lines, rules, sides=1)
    kept, findings["unlabelled"] = _drop_unlabelled(kept, lines)
    findings["conflicting"] = _find_conflicts(kept, lines)
    if names is None:
        kept, findings["rare"] = _drop_rare(kept, lines, rare, cells.name)
        names = _order({row[1] for _, row in kept})
    _check_labels(kept, lines, names, cells.name)
    report = Report(
        name=cells.name,
        thing="text",
        read=len(rows),
        kept=len(kept),
        findings=findings,
        notes=(*cells.notes, *notes),
    )
    texts, labels = [row[0] for _, row in kept], [row[1] for _, row in kept]
    return Labelled(texts, labels, [lines[n] for n, _ in kept], tuple(names), report)


def read_texts(
    path: str | Path, text: str | None = None, *, limit: int | None = None
) -> tuple[list[str], list[int], list[str]]:
    """One column of texts: its cells, the lines they came from, and what was guessed."""
    cells = read_cells(path)
    head = _head(cells, [] if text is None else [text])
    skip = 0 if head is None else 1
    body = cells.rows[skip:]
    if not body:
        raise InputError(f"{cells.name!r} must have rows of text: it has only a header.")
    columns = list(zip(*body, strict=True))
    if text is None:
        place = max(range(len(columns)), key=lambda place: _amount_of_text(columns[place]))
    else:
        place = find_column(cells, text, head)
    named = f"column {place + 1}; no header line" if head is None else f"{head[place]!r}"
    notes = [*cells.notes, f"the texts are those of {named}."]
    return list(columns[place])[:limit], cells.lines[skip:][:limit], notes


def _two_columns(
    cells: Cells, text: str | None, label: str | None
) -> tuple[list[tuple[str, ...]], list[int], list[str]]:
    """Text and label of every row below the header, their lines, and what was guessed."""
    if cells.width == 1:
        raise InputError(
            f"{cells.name!r} must have a column of texts and one of labels: it has one column. "
            "Separate them by commas, and quote the texts that hold one."
        )
    asked = [name for name in (text, label) if name is not None]
    head = _head(cells, asked)
    skip = 0 if head is None else 1
    body = cells.rows[skip:]
    if not body:
        raise InputError(f"{cells.name!r} must have rows of text: it has only a header.")
    places = [None if name is None else find_column(cells, name, head) for name in (text, label)]
    if None not in places and places[0] == places[1]:
        raise InputError(f"text and label must be two columns: both are {asked[0]!r}.")
    of_text, of_label = _guess(body, head, places[0], places[1])
    if text is None and not _amount_of_text([row[of_text] for row in body])[0]:
        raise InputError(
            f"{cells.name!r} must have a column of texts: all its columns are numbers. "
            "Say which it is: text='1'."
        )
    rows: list[tuple[str, ...]] = [(row[of_text], row[of_label].strip()) for row in body]
    if head is None:
        note = f"no header line: the text is column {of_text + 1}, the label column {of_label + 1}."
    else:
        note = f"by the header line, the text is {head[of_text]!r}, the label {head[of_label]!r}."
    return rows, cells.lines[skip:], [note]


def _head(cells: Cells, asked: Sequence[str]) -> list[str] | None:
    """The first row, if it holds a name that was asked for or reads like a row of names."""
    first = [cell.strip() for cell in cells.rows[0]]
    held = any(name in first for name in asked if not name.isdecimal())
    return first if held or _seems_head(cells) else None


def _guess(
    body: Sequence[Sequence[str]], head: Sequence[str] | None, text: int | None, label: int | None
) -> tuple[int, int]:
    """The columns of text and label: the longest that is not all numbers, and the one named so or
    of fewest values.
    """
    columns = list(zip(*body, strict=True))
    free = [place for place in range(len(columns)) if place not in (text, label)]
    if label is None and head is not None:
        named = [place for place in free if head[place].lower() in LABEL_HEADS]
        label = named[0] if named else None
        free = [place for place in free if place != label]
    if text is None:
        text = max(free, key=lambda place: _amount_of_text(columns[place]))
        free.remove(text)
    if label is None:
        # A column of one value tells nothing; of equals, the last.
        values = {place: len(set(columns[place])) for place in free}
        label = min(reversed(free), key=lambda place: (values[place] < 2, values[place]))
    return text, label


def _seems_head(cells: Cells) -> bool:
    """Whether the first row reads like names: short, different, and no label of another row."""
    first, body = [cell.strip() for cell in cells.rows[0]], cells.rows[1:]
    short = all(0 < len(cell) <= LONGEST_HEAD and cell[-1] not in ".!?" for cell in first)
    if not body or not short or len(set(first)) < len(first):
        return False
    if cells.width == 1:  # a single word above texts of several
        several = sum(" " in row[0].strip() for row in body)
        return " " not in first[0] and several > len(body) / 2
    _, label = _guess(body, first, None, None)
    values = {row[label].strip() for row in body}
    numbers = all(_is_number(value) for value in values if value)
    return first[label] not in values and not (numbers and _is_number(first[label]))


def _drop_unlabelled(kept: Numbered, lines: Sequence[int]) -> tuple[Numbered, Finding]:
    missing = [lines[number] for number, row in kept if not row[1]]
    finding = find(("has", "have"), "no label", "drop", missing)
    return [(number, row) for number, row in kept if row[1]], finding


def _find_conflicts(kept: Numbered, lines: Sequence[int]) -> Finding:
    """Rows whose text was there before with another label."""
    first: dict[str, str] = {}
    for _, (text, label) in kept:
        first.setdefault(text, label)
    other = [lines[number] for number, (text, label) in kept if first[text] != label]
    return find(("has", "have"), "another label than the same text before", "keep", other)


def _drop_rare(
    kept: Numbered, lines: Sequence[int], rare: str, name: str
) -> tuple[Numbered, Finding]:
    """The rows without those whose label is seen once, if that was asked for."""
    counts = Counter(row[1] for _, row in kept)
    once = [(lines[number], row[1]) for number, row in kept if counts[row[1]] == 1]
    if rare == "error" and len(once) > max(20, len(kept) // 4):
        raise InputError(
            f"labels must repeat: {name!r} has {len(counts)} different ones in {len(kept)} rows. "
            "Is it the right column?"
        )
    if rare == "error" and once and len(counts) > 1:
        line, label = once[0]
        more = f" (and {len(once) - 1} more labels)" if len(once) > 1 else ""
        raise InputError(
            f"each label must be seen twice, once to learn and once to check: {name!r} has "
            f"{label!r} only in line {line}{more}. Correct it, or leave it out with data.rare=drop."
        )
    finding = find(("has", "have"), "a label seen only once", rare, [line for line, _ in once])
    if rare == "drop":
        kept = [(number, row) for number, row in kept if counts[row[1]] > 1]
    return kept, finding


def _check_labels(kept: Numbered, lines: Sequence[int], names: Sequence[str], file: str) -> None:
    if not kept:
        raise InputError(f"{file!r} must have a text with a label: no row has both.")
    if len(names) < 2:
        raise InputError(
            f"there must be two different labels or more: {file!r} has only {names[0]!r}. "
            "Is it the right column?"
        )
    known = set(names)
    for number, (_, label) in kept:
        if label not in known:
            raise InputError(
                f"line {lines[number]} of {file!r} has a label that is not one of the model's: "
                f"{label!r}. {nearest(label, names)}"
            )


def _order(labels: set[str]) -> tuple[str, ...]:
    if all(_is_number(label) for label in labels):
        return tuple(sorted(labels, key=lambda label: (float(label), label)))
    return tuple(sorted(labels))


def _amount_of_text(column: Sequence[str]) -> tuple[bool, int]:
    """What the column of texts has more of than others: cells that are no numbers, characters."""
    return not all(_is_number(cell) for cell in column if cell), sum(map(len, column))


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False
