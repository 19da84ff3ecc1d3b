"""Texts with labels for classification, from a .tsv or .csv file with or without a header."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from addnorm.data.delimited import DelimitedTable, read_delimited
from addnorm.data.text.pairs import RowFilter, filter_rows
from addnorm.data.text.reading_report import ReadingIssue, ReadingReport, check_choice, count_issue
from addnorm.errors import InputError, nearest

LABEL_NAMES = ("label", "class", "category", "target", "sentiment", "stars", "rating", "y")
"""Column names that mark the label, unless the caller names a column."""
TEXT_NAMES = ("text", "texts", "sentence", "review", "question", "comment", "message", "content")
"""Column names of texts: a first row of these and LABEL_NAMES alone is a header."""
MAX_HEADER_LENGTH = 40
"""Characters that a column name may have."""

NumberedRows = list[tuple[int, tuple[str, ...]]]
"""Rows of text and label, each with its index."""


@dataclass(frozen=True)
class LabelledTexts:
    """Texts and their labels, with the line of each row."""

    texts: list[str]
    labels: list[str]
    lines: list[int]
    """The line of the file, counted from 1."""
    names: tuple[str, ...]
    """All distinct labels, sorted: as numbers if all are numbers, else as texts."""
    report: ReadingReport

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def targets(self) -> list[int]:
        """The labels as indices of `names`."""
        indices = {name: index for index, name in enumerate(self.names)}
        return [indices[label] for label in self.labels]

    def take(self, rows: Iterable[int]) -> "LabelledTexts":
        """Return some of the rows, in the order of `rows`, with all `names`."""
        rows = list(rows)
        texts, labels = ([column[row] for row in rows] for column in (self.texts, self.labels))
        return replace(self, texts=texts, labels=labels, lines=[self.lines[row] for row in rows])


def read_labelled(
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
) -> LabelledTexts:
    """Return the texts and labels of a table.

    Parameters
    ----------
    path
        A .tsv or .csv file. Whether it has a header is inferred; the report says how it was read.
    text, label
        Column names, or numbers from 1; by default inferred.
    names
        The labels of a trained model: any other label is an error.
    longest
        Characters that a text may have; None for no limit.
    empty, long, repeated
        What to do with texts that are empty, too long or repeated: drop, cut (long only) or keep.
    rare
        What to do with labels that occur once, and so cannot be both trained on and validated:
        error, drop or keep.
    limit
        Rows to read; None for all.

    Examples
    --------
    >>> _ = Path("films.tsv").write_text("a joy\\t1\\na bore\\t0\\nno fun\\t0\\nfun\\t1\\n")
    >>> films = read_labelled("films.tsv")
    >>> films.texts[1], films.targets, films.names
    ('a bore', [1, 0, 0, 1], ('0', '1'))
    """
    check_choice("rare", rare, ("error", "drop", "keep"))
    row_filter = RowFilter(longest=longest, empty=empty, long=long, repeated=repeated)
    table = read_delimited(path)
    rows, lines, notes = _two_columns(table, text, label)
    rows, lines = rows[:limit], lines[:limit]
    kept, issues = filter_rows(rows, lines, row_filter, sides=1)
    kept, issues["unlabelled"] = _drop_unlabelled(kept, lines)
    issues["conflicting"] = _find_conflicts(kept, lines)
    if names is None:
        kept, issues["rare"] = _drop_rare(kept, lines, rare, table.name)
        names = _sort_labels({row[1] for _, row in kept})
    _check_labels(kept, lines, names, table.name)
    report = ReadingReport(
        name=table.name,
        row_name="text",
        read=len(rows),
        kept=len(kept),
        issues=issues,
        notes=(*table.notes, *notes),
    )
    texts, labels = [row[0] for _, row in kept], [row[1] for _, row in kept]
    return LabelledTexts(texts, labels, [lines[n] for n, _ in kept], tuple(names), report)


def read_text_column(
    path: str | Path, text: str | None = None, *, limit: int | None = None
) -> tuple[list[str], list[int], list[str]]:
    """Return the cells of one column of texts, their lines, and notes on what was inferred."""
    table = read_delimited(path)
    header = _infer_header(table, [] if text is None else [text])
    skip = 0 if header is None else 1
    body = table.rows[skip:]
    if not body:
        raise InputError(f"{table.name!r} must have rows of text: it has only a header.")
    columns = list(zip(*body, strict=True))
    if text is None:
        # As in `read_labelled`: a column with the name of a label is not the text.
        index = _infer_columns(body, header, None, None)[0] if table.width > 1 else 0
    else:
        index = table.column_index(text, header)
    column = f"column {index + 1}; no header line" if header is None else f"{header[index]!r}"
    notes = [*table.notes, f"the texts are those of {column}."]
    return list(columns[index])[:limit], table.lines[skip:][:limit], notes


def _two_columns(
    table: DelimitedTable, text: str | None, label: str | None
) -> tuple[list[tuple[str, ...]], list[int], list[str]]:
    """Return text and label of every row below the header, their lines, and notes."""
    if table.width == 1:
        raise InputError(
            f"{table.name!r} must have a column of texts and one of labels: it has one column. "
            "Separate them by commas, and quote the texts that hold one."
        )
    names = [name for name in (text, label) if name is not None]
    header = _infer_header(table, names)
    skip = 0 if header is None else 1
    body = table.rows[skip:]
    if not body:
        raise InputError(f"{table.name!r} must have rows of text: it has only a header.")
    indices = [None if name is None else table.column_index(name, header) for name in (text, label)]
    if None not in indices and indices[0] == indices[1]:
        raise InputError(f"text and label must be two columns: both are {names[0]!r}.")
    text_index, label_index = _infer_columns(body, header, indices[0], indices[1])
    if text is None and not _amount_of_text([row[text_index] for row in body])[0]:
        raise InputError(
            f"{table.name!r} must have a column of texts: all its columns are numbers. "
            "Name it: text='1'."
        )
    rows: list[tuple[str, ...]] = [(row[text_index], row[label_index].strip()) for row in body]
    if header is None:
        columns = f"column {text_index + 1}, the label column {label_index + 1}"
        note = f"no header line: the text is {columns}."
    else:
        columns = f"{header[text_index]!r}, the label {header[label_index]!r}"
        note = f"by the header line, the text is {columns}."
    return rows, table.lines[skip:], [note]


def _infer_header(table: DelimitedTable, names: Sequence[str]) -> list[str] | None:
    """Return the first row, if it has one of the names or looks like a row of names."""
    first = [cell.strip() for cell in table.rows[0]]
    has_name = any(name in first for name in names if not name.isdecimal())
    return first if has_name or _looks_like_header(table) else None


def _infer_columns(
    body: Sequence[Sequence[str]], header: Sequence[str] | None, text: int | None, label: int | None
) -> tuple[int, int]:
    """Return the columns of text and label; a given one is kept.

    The text is the longest column that is not numeric; the label has a name of `LABEL_NAMES`, or
    the fewest distinct values.
    """
    columns = list(zip(*body, strict=True))
    free = [index for index in range(len(columns)) if index not in (text, label)]
    if label is None and header is not None:
        label = next((index for index in free if header[index].lower() in LABEL_NAMES), None)
        free = [index for index in free if index != label]
    if text is None:
        text = max(free, key=lambda index: _amount_of_text(columns[index]))
        free.remove(text)
    if label is None:
        # A constant column is no label; of equals, the last is taken.
        values = {index: len(set(columns[index])) for index in free}
        label = min(reversed(free), key=lambda index: (values[index] < 2, values[index]))
    return text, label


def _looks_like_header(table: DelimitedTable) -> bool:
    """Return whether the first row has the usual names, or short, distinct cells that are new.

    The second only if none of them is the label of another row.
    """
    first, body = [cell.strip() for cell in table.rows[0]], table.rows[1:]
    known = [cell.lower() for cell in first]
    if set(known) & set(TEXT_NAMES) and set(known) <= {*TEXT_NAMES, *LABEL_NAMES}:
        return True
    are_short = all(0 < len(cell) <= MAX_HEADER_LENGTH and cell[-1] not in ".!?" for cell in first)
    if not body or not are_short or len(set(first)) < len(first):
        return False
    if table.width == 1:  # a single word above texts of several words
        several_words = sum(" " in row[0].strip() for row in body)
        return " " not in first[0] and several_words > len(body) / 2
    _, label = _infer_columns(body, first, None, None)
    values = {row[label].strip() for row in body}
    are_numbers = all(_is_number_text(value) for value in values if value)
    return first[label] not in values and not (are_numbers and _is_number_text(first[label]))


def _drop_unlabelled(kept: NumberedRows, lines: Sequence[int]) -> tuple[NumberedRows, ReadingIssue]:
    missing = [lines[index] for index, row in kept if not row[1]]
    issue = count_issue(("has", "have"), "no label", "drop", missing)
    return [(index, row) for index, row in kept if row[1]], issue


def _find_conflicts(kept: NumberedRows, lines: Sequence[int]) -> ReadingIssue:
    """Return the issue of rows whose text has another label in an earlier row."""
    first: dict[str, str] = {}
    for _, (text, label) in kept:
        first.setdefault(text, label)
    conflicts = [lines[index] for index, (text, label) in kept if first[text] != label]
    return count_issue(
        ("has", "have"), "another label than the same text before", "keep", conflicts
    )


def _drop_rare(
    kept: NumberedRows, lines: Sequence[int], rare: str, name: str
) -> tuple[NumberedRows, ReadingIssue]:
    """Return the rows, without those whose label occurs once if `rare` is drop, and the issue."""
    counts = Counter(row[1] for _, row in kept)
    unique = [(lines[index], row[1]) for index, row in kept if counts[row[1]] == 1]
    if rare == "error" and len(unique) > max(20, len(kept) // 4):
        raise InputError(
            f"labels must repeat: {name!r} has {len(counts)} distinct labels in {len(kept)} rows. "
            "Is it the right column?"
        )
    if rare == "error" and unique and len(counts) > 1:
        line, label = unique[0]
        more = f" (and {len(unique) - 1} more labels)" if len(unique) > 1 else ""
        raise InputError(
            f"each label must occur twice, once to train on and once to validate: {name!r} has "
            f"{label!r} only in line {line}{more}. Correct it, or drop it with "
            "data.on_rare_label=drop."
        )
    issue = count_issue(
        ("has", "have"), "a label that occurs only once", rare, [line for line, _ in unique]
    )
    if rare == "drop":
        kept = [(index, row) for index, row in kept if counts[row[1]] > 1]
    return kept, issue


def _check_labels(
    kept: NumberedRows, lines: Sequence[int], names: Sequence[str], file: str
) -> None:
    if not kept:
        raise InputError(f"{file!r} must have a text with a label: no row has both.")
    if len(names) < 2:
        raise InputError(
            f"there must be two distinct labels or more: {file!r} has only {names[0]!r}. "
            "Is it the right column?"
        )
    known = set(names)
    for index, (_, label) in kept:
        if label not in known:
            raise InputError(
                f"line {lines[index]} of {file!r} has a label that is not one of the model's: "
                f"{label!r}. {nearest(label, names)}"
            )


def _sort_labels(labels: set[str]) -> tuple[str, ...]:
    if all(_is_number_text(label) for label in labels):
        return tuple(sorted(labels, key=lambda label: (float(label), label)))
    return tuple(sorted(labels))


def _amount_of_text(column: Sequence[str]) -> tuple[bool, int]:
    """Return a sort key for the column of texts: whether it is not numeric, and its length."""
    return not all(_is_number_text(cell) for cell in column if cell), sum(map(len, column))


def _is_number_text(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False
