"""What each column of a table may be, guessed from rows: those to train on, and no others."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from addnorm.data.frame import Array, Frame, as_text
from addnorm.data.schema import Column, Schema, gone
from addnorm.data.written import (
    STRAY,
    find_form,
    look_like_dates,
    to_dates,
    to_numbers,
    without_gaps,
)
from addnorm.errors import InputError

FEW = 50
"""A column of texts with more different values than this, most of them met once, is no category."""
IDENTIFIER = re.compile(
    r"(?i:(^|[_ .-])(id|uuid|guid|key|index|row ?number|nr|no)$)|[a-z](Id|ID|Number)$"
)


def infer(frame: Frame, target: str | None = None, task: str | None = None) -> Schema:
    """A schema guessed from rows: those to train on, and no others.

    >>> pets = Frame("pets", {"kind": np.array(["cat", "dog"] * 9, dtype=object)})
    >>> infer(pets).columns[0].note
    '2 values'
    """
    answers = None if target is None else frame.column(target)
    if answers is not None and task is None:
        task = guess_task(answers)
    rest = frame if target is None else frame.without(target)
    if not rest.columns:
        raise InputError(f"{frame.name} must have a column besides the target {target!r}.")
    columns = [
        _infer_column(name, column, name in frame.declared) for name, column in rest.columns.items()
    ]
    columns = _mark_duplicates(columns, rest)
    form = ""
    if answers is not None:
        form = guess_form(answers) if task == "number" else ""
        columns = _mark_leaks(columns, rest, answers, str(target), form)
    return Schema(columns=tuple(columns), target=target, task=task, form=form)


def guess_task(answers: Array) -> str:
    """classes or number: numbers with many values, or any that is not whole, are numbers."""
    numbers, stray, _ = _read_numbers(answers[~gone(answers)])
    present = numbers[~np.isnan(numbers)]
    if stray or answers.dtype.kind == "M" or not len(present):
        return "classes"
    whole = bool((present == np.floor(present)).all())
    return "classes" if whole and len(np.unique(present)) <= 20 else "number"


def guess_form(answers: Array) -> str:
    """How the numbers of a target are written; "" as programs do."""
    return _read_numbers(answers[~gone(answers)])[2]


def _infer_column(name: str, column: Array, declared: bool) -> Column:
    here = ~gone(column)
    present, rows = column[here], len(column)
    missing = "" if here.all() else f", {rows - int(here.sum())} of {rows} missing"
    if not len(present):
        return Column(name=name, kind="ignore", note="all values are missing")
    values = np.unique(present) if present.dtype != object else np.array(sorted(set(present)))
    if len(values) == 1 and here.all():
        shown = as_text(present[:1])[0]
        return Column(name=name, kind="ignore", note=f"constant: always {shown!r}")
    if declared:
        return Column(name=name, kind="category", note=f"{len(values)} values, declared{missing}")
    if to_dates(present[:1000]) is not None and (dates := to_dates(present)) is not None:
        return _date_column(name, dates, present, missing)
    codes = _are_codes(values)
    numbers, stray, form = _read_numbers(present)
    few = len(without_gaps(stray)) <= STRAY * len(present) and len(stray) < len(present)
    if few and not codes:
        return replace(_number_column(name, numbers, stray, rows, missing, form), form=form)
    if len(values) > FEW and len(values) > len(present) / 2:
        note = f"texts: {len(values)} different values in {len(present)} rows{missing}"
        return Column(name=name, kind="ignore", note=note + _hint(values))
    note = f"{len(values)} values{missing}"
    if codes:
        note += "; digits with leading zeros are taken for codes, not numbers"
    return Column(name=name, kind="category", note=note + _hint(values))


def _hint(values: Array) -> str:
    seen = values[:100].tolist() if values.dtype.kind in "OU" else []
    return "; if they are dates, write them as 2024-12-31" if look_like_dates(seen) else ""


def _read_numbers(present: Array) -> tuple[Array, list[str], str]:
    """Numbers, the texts that are none, and the form in which the fewest are none."""
    numbers, stray = to_numbers(present)
    form = find_form(without_gaps(present.tolist())) if stray else ""
    if not form:
        return numbers, stray, ""
    written, other = to_numbers(present, form)
    return (written, other, form) if len(other) < len(stray) else (numbers, stray, "")


def _are_codes(values: Array) -> bool:
    """Whether texts are digits that begin with 0, and not by mistake: postcodes, say."""
    if values.dtype.kind not in "OU" or not all(text.isdecimal() for text in values.tolist()):
        return False
    zeros = sum(len(text) > 1 and text.startswith("0") for text in values.tolist())
    alike = len({len(text) for text in values.tolist()}) == 1
    return zeros > 0 and (alike or zeros > STRAY * len(values))


def _date_column(name: str, dates: Array, present: Array, missing: str) -> Column:
    lost = present[np.isnat(dates)]
    if len(lost) == len(present):
        return Column(name=name, kind="ignore", note="all values are missing")
    return Column(name=name, kind="date", note=f"dates{missing}{_say_stray(lost, 'date')}")


def _say_stray(texts: Sequence[str] | Array, what: str) -> str:
    if not len(texts):
        return ""
    shown = ", ".join(repr(text) for text in sorted(set(texts))[:3])
    return f"; {len(texts)} texts that are no {what} ({shown}) count as missing"


def _number_column(
    name: str, numbers: Array, stray: Sequence[str], rows: int, missing: str, form: str
) -> Column:
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return Column(name=name, kind="ignore", note="no finite value")
    whole = not stray and bool((finite == np.floor(finite)).all())
    different = len(np.unique(finite))
    if whole and different == len(finite) == rows > FEW:
        counted = float(finite.max() - finite.min()) == rows - 1
        if counted or IDENTIFIER.search(name):
            note = "a different whole number in every row: it looks like an identifier"
            return Column(name=name, kind="ignore", note=note)
    low, high = (float(end) + 0.0 for end in (finite.min(), finite.max()))
    note = f"{different} values from {low:g} to {high:g}{missing}"
    if len(finite) < int((~np.isnan(numbers)).sum()):
        note += ", with infinities"
    if form:
        note += f"; they are taken as written like {form}"
    return Column(name=name, kind="number", note=note + _say_stray(stray, "number"))


def _mark_duplicates(columns: list[Column], frame: Frame) -> list[Column]:
    """Leave out a column that says the same as one before it, row by row."""
    first: dict[bytes, str] = {}
    found = []
    for column in columns:
        if column.kind != "ignore":
            key = _fingerprint(frame.columns[column.name], column)
            if key in first:
                note = f"the same in every row as {first[key]!r}"
                column = replace(column, kind="ignore", note=note)
            else:
                first[key] = column.name
        found.append(column)
    return found


def _fingerprint(values: Array, column: Column) -> bytes:
    numbers, stray = to_numbers(values, column.form)
    if not stray and column.kind != "category":
        return numbers.tobytes()
    return "\x1f".join("\x1e" if text is None else text for text in as_text(values)).encode()


def _mark_leaks(
    columns: list[Column], frame: Frame, answers: Array, target: str, form: str
) -> list[Column]:
    """Say which columns tell the target exactly: they may be copies of it."""
    codes = _codes(as_text(answers))
    found = []
    for column in columns:
        values = frame.columns[column.name]
        if column.kind not in ("number", "category"):
            tells = False
        elif len(np.unique(codes)) == len(codes):
            tells = _is_line(to_numbers(values, column.form)[0], to_numbers(answers, form)[0])
        else:
            tells = _tells(_codes(as_text(values)), codes)
        if tells:
            warning = f"tells {target!r} exactly: is it known when predicting?"
            column = replace(column, note=f"{column.note}; {warning}")
        found.append(column)
    return found


def _codes(texts: Array) -> Array:
    places: dict[Any, int] = {}
    return np.array([places.setdefault(text, len(places)) for text in texts])


def _is_line(column: Array, target: Array) -> bool:
    """Whether numbers, of which no two are equal, are the target's in another unit."""
    here = np.isfinite(column) & np.isfinite(target)
    x, y = (np.clip(part[here], -1e100, 1e100) for part in (column, target))
    if len(x) < 10 or not x.std() or not y.std():
        return False
    return bool(abs(np.corrcoef(x, y)[0, 1]) > 1 - 1e-12)


def _tells(column: Array, target: Array) -> bool:
    """Whether each value goes with one answer, though values repeat and answers differ."""
    pairs = len(np.unique(column.astype(np.int64) * (target.max() + 1) + target))
    values, answers = len(np.unique(column)), len(np.unique(target))
    return pairs == values and answers > 1 and (values == answers or values < len(column) / 10)
