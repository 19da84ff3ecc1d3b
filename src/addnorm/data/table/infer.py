"""Inference of the schema of a table from its training rows."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from addnorm.data.table.column_arrays import is_missing
from addnorm.data.table.frame import Array, Frame, to_texts
from addnorm.data.table.parse import (
    MAX_NON_NUMERIC,
    detect_date_form,
    detect_form,
    is_ambiguous_date,
    most_dates,
    to_dates,
    to_numbers,
    without_missing,
)
from addnorm.data.table.schema import Column, Schema
from addnorm.data.table.text import is_free_text
from addnorm.errors import InputError

MANY_VALUES = 50
"""A column of texts with more distinct values than this, most of them unique, is ignored."""
MAX_DIGITS = 15
"""Integers with more digits are not exact as numbers: they are identifiers."""
FEW_ROWS, NEARLY_ALL, MOST = 8, 0.75, 0.5
"""From this number of rows on, a column of texts is ignored if more than NEARLY_ALL of them differ,
or if MOST of the rows or more have a value that no other row has."""
EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
IDENTIFIER = re.compile(
    r"(?i:(^|[_ .-])(id|uuid|guid|key|index|row ?number|nr|no)$)|[a-z](Id|ID|Number)$"
)


def infer(frame: Frame, target: str | None = None, task: str | None = None) -> Schema:
    """Return the schema inferred from training rows.

    >>> pets = Frame("pets", {"kind": np.array(["cat", "dog"] * 9, dtype=object)})
    >>> infer(pets).columns[0].note
    '2 values'
    """
    labels = None if target is None else frame.column(target)
    if labels is not None and task is None:
        task = infer_task(labels)
    rest = frame if target is None else frame.without(target)
    if not rest.columns:
        raise InputError(f"{frame.name} must have a column besides the target {target!r}.")
    columns = [
        _infer_column(name, column, name in frame.declared) for name, column in rest.columns.items()
    ]
    columns = _mark_duplicates(columns, rest)
    form = ""
    if labels is not None:
        form = infer_form(labels) if task == "number" else ""
        columns = _mark_leaks(columns, rest, labels, str(target), form)
    return Schema(columns=tuple(columns), target=target, task=task, form=form)


def infer_task(labels: Array) -> str:
    """Return number if a value is not an integer or there are many; otherwise classes."""
    numbers, non_numeric, _ = _parse_numbers(labels[~is_missing(labels)])
    present = numbers[~np.isnan(numbers)]
    if non_numeric or labels.dtype.kind == "M" or not len(present):
        return "classes"
    are_integers = bool((present == np.floor(present)).all())
    return "classes" if are_integers and len(np.unique(present)) <= 20 else "number"


def infer_form(labels: Array) -> str:
    """Return how the numbers of a target are written; "" if as programs do."""
    return _parse_numbers(labels[~is_missing(labels)])[2]


def _infer_column(name: str, column: Array, declared: bool) -> Column:
    is_present = ~is_missing(column)
    present, rows = column[is_present], len(column)
    missing = "" if is_present.all() else f", {rows - len(present)} of {rows} missing"
    if not len(present):
        return Column(name=name, kind="ignore", note="all values are missing")
    values = np.unique(present) if present.dtype != object else np.array(sorted(set(present)))
    if len(values) == 1 and is_present.all():
        shown = to_texts(present[:1])[0]
        return Column(name=name, kind="ignore", note=f"constant: always {shown!r}")
    if declared:
        return Column(name=name, kind="category", note=f"{len(values)} values, declared{missing}")
    if detect_date_form(present[:100]) is not None:
        form = detect_date_form(present)
        if form is not None and (dates := to_dates(present, form)) is not None:
            return _date_column(name, dates, present, missing, form)
    code_note = _code_note(values) + _nearly_dates_note(present)
    numbers, non_numeric, form = _parse_numbers(present)
    is_numeric = len(without_missing(non_numeric)) <= MAX_NON_NUMERIC * len(present) and len(
        non_numeric
    ) < len(present)
    if is_numeric and not code_note:
        return replace(_number_column(name, numbers, non_numeric, rows, missing, form), form=form)
    if _are_emails(values):
        note = f"e-mail addresses: {len(values)} distinct values in {len(present)} rows{missing}"
        return Column(name=name, kind="ignore", note=note)
    if _is_mostly_unique(present):
        note = f"texts: {len(values)} distinct values in {len(present)} rows{missing}{code_note}"
        is_text = not code_note and is_free_text(present.tolist())
        return Column(name=name, kind="text" if is_text else "ignore", note=note)
    return Column(name=name, kind="category", note=f"{len(values)} values{missing}{code_note}")


def _is_mostly_unique(present: Array) -> bool:
    """Return whether texts identify rows, such as names: they are ignored and never stored.

    Either most values of a long column are different, or nearly all of a short one, or most rows
    have a value of their own.
    """
    counts = Counter(present.tolist())
    rows, values = len(present), len(counts)
    if values > MANY_VALUES:
        return values > rows / 2
    alone = sum(count == 1 for count in counts.values())
    return rows >= FEW_ROWS and (values > NEARLY_ALL * rows or alone >= MOST * rows)


def _are_emails(values: Array) -> bool:
    """Return whether most of the distinct texts are e-mail addresses, which belong to somebody."""
    if values.dtype.kind not in "OU":
        return False
    matches = sum(EMAIL.fullmatch(str(value).strip()) is not None for value in values.tolist())
    return matches > len(values) / 2


def _parse_numbers(present: Array) -> tuple[Array, list[str], str]:
    """Return the numbers, the non-numeric texts, and the form in which these are fewest."""
    numbers, non_numeric = to_numbers(present)
    form = detect_form(without_missing(present.tolist())) if non_numeric else ""
    if form:
        formatted, others = to_numbers(present, form)
        if len(others) < len(non_numeric):
            return formatted, others, form
    return numbers, non_numeric, ""


def _code_note(values: Array) -> str:
    """Return why texts of digits are codes, not numbers: leading zeros, or too many digits."""
    if values.dtype.kind not in "OU" or not all(text.isdecimal() for text in values.tolist()):
        return ""
    if any(len(text.lstrip("0")) > MAX_DIGITS for text in values.tolist()):
        return f"; integers of more than {MAX_DIGITS} digits are treated as codes, not numbers"
    zeros = sum(len(text) > 1 and text.startswith("0") for text in values.tolist())
    equal_lengths = len({len(text) for text in values.tolist()}) == 1
    if zeros > 0 and (equal_lengths or zeros > MAX_NON_NUMERIC * len(values)):
        return "; digits with leading zeros are treated as codes, not numbers"
    return ""


def _nearly_dates_note(present: Array) -> str:
    """Return how many texts are dates, if most are but not all: such a column is not read."""
    if present.dtype != object or most_dates(present[:100].tolist()) is None:
        return ""
    found = most_dates(present.tolist())
    if found is None:
        return ""
    form, count, other = found
    return (
        f"; {count} of {len(present)} are dates{f' like {form}' if form else ''}, but {other!r} is "
        "not: a column of dates needs one form (write year-month-day, or leave the cell empty)"
    )


def _date_column(name: str, dates: Array, present: Array, missing: str, form: str) -> Column:
    markers = present[np.isnat(dates)]
    if len(markers) == len(present):
        return Column(name=name, kind="ignore", note="all values are missing")
    read_as = f", read as {form}" if form else ""
    guess = ""
    if form and is_ambiguous_date(present.tolist()):
        guess = "; no part is above 12, so that the order is a guess: set its form in the schema"
    note = f"dates{read_as}{missing}{guess}{_invalid_note(markers, 'dates')}"
    return Column(name=name, kind="date", form=form, note=note)


def _invalid_note(texts: Sequence[str] | Array, kind: str) -> str:
    if not len(texts):
        return ""
    examples = ", ".join(repr(text) for text in sorted(set(texts))[:3])
    return f"; {len(texts)} values are not {kind} ({examples}); treated as missing"


def _number_column(
    name: str, numbers: Array, non_numeric: Sequence[str], rows: int, missing: str, form: str
) -> Column:
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return Column(name=name, kind="ignore", note="no finite value")
    are_integers = not non_numeric and bool((finite == np.floor(finite)).all())
    distinct = len(np.unique(finite))
    if are_integers and distinct == len(finite) == rows > MANY_VALUES:
        is_sequence = float(finite.max() - finite.min()) == rows - 1
        if is_sequence or IDENTIFIER.search(name):
            note = "a different integer in every row: it looks like an identifier"
            return Column(name=name, kind="ignore", note=note)
    low, high = (float(end) + 0.0 for end in (finite.min(), finite.max()))
    note = f"{distinct} values from {low:g} to {high:g}{missing}"
    if len(finite) < int((~np.isnan(numbers)).sum()):
        note += ", with infinities"
    if form:
        note += f"; numbers are read in the form {form}"
    return Column(name=name, kind="number", note=note + _invalid_note(non_numeric, "numeric"))


def _mark_duplicates(columns: list[Column], frame: Frame) -> list[Column]:
    """Ignore columns that equal an earlier column in every row."""
    first: dict[bytes, str] = {}
    marked = []
    for column in columns:
        if column.kind != "ignore":
            key = _fingerprint(frame.columns[column.name], column)
            if key in first:
                note = f"equal to {first[key]!r} in every row"
                column = replace(column, kind="ignore", note=note)
            else:
                first[key] = column.name
        marked.append(column)
    return marked


def _fingerprint(values: Array, column: Column) -> bytes:
    if column.kind == "number":
        numbers, non_numeric = to_numbers(values, column.form)
        if not non_numeric:
            return numbers.tobytes()
    return "\x1f".join("\x1e" if text is None else text for text in to_texts(values)).encode()


def _mark_leaks(
    columns: list[Column], frame: Frame, labels: Array, target: str, form: str
) -> list[Column]:
    """Note which columns determine the target exactly: they may be copies of it."""
    codes = _codes(to_texts(labels))
    marked = []
    for column in columns:
        values = frame.columns[column.name]
        if column.kind not in ("number", "category"):
            is_leak = False
        elif len(np.unique(codes)) == len(codes):
            is_leak = _is_linear(to_numbers(values, column.form)[0], to_numbers(labels, form)[0])
        else:
            is_leak = _determines(_codes(to_texts(values)), codes)
        if is_leak:
            warning = f"determines {target!r} exactly: is it known when predicting?"
            column = replace(column, note=f"{column.note}; {warning}")
        marked.append(column)
    return marked


def _codes(texts: Array) -> Array:
    codes: dict[Any, int] = {}
    return np.array([codes.setdefault(text, len(codes)) for text in texts])


def _is_linear(column: Array, target: Array) -> bool:
    """Return whether distinct numbers are a linear function of the target, such as another unit."""
    is_finite = np.isfinite(column) & np.isfinite(target)
    x, y = (np.clip(values[is_finite], -1e100, 1e100) for values in (column, target))
    if len(x) < 10 or not x.std() or not y.std():
        return False
    return bool(abs(np.corrcoef(x, y)[0, 1]) > 1 - 1e-12)


def _determines(column: Array, target: Array) -> bool:
    """Return whether each value has one label, although values repeat and labels vary."""
    pairs = len(np.unique(column.astype(np.int64) * (target.max() + 1) + target))
    values, labels = len(np.unique(column)), len(np.unique(target))
    return pairs == values and labels > 1 and (values == labels or values < len(column) / 10)
