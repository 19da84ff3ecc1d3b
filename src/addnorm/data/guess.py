"""What each column of a table may be, guessed from rows: those to train on, and no others."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from addnorm.data.frame import Array, Frame, as_text
from addnorm.data.schema import Column, Schema, gone, to_dates, to_numbers
from addnorm.errors import InputError

FEW = 50
"""A column of texts with more different values than this, most of them met once, is no category."""
STRAY = 0.02
"""Share of texts in a column of numbers that are taken for mistakes in it."""
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
    columns = [_infer_column(name, column) for name, column in rest.columns.items()]
    columns = _mark_duplicates(columns, rest)
    if answers is not None:
        columns = _mark_leaks(columns, rest, answers, str(target))
    return Schema(columns=tuple(columns), target=target, task=task)


def guess_task(answers: Array) -> str:
    """classes or number: numbers with many values, or any that is not whole, are numbers."""
    numbers, stray = to_numbers(answers)
    present = numbers[~np.isnan(numbers)]
    if stray or answers.dtype.kind == "M" or not len(present):
        return "classes"
    whole = bool((present == np.floor(present)).all())
    return "classes" if whole and len(np.unique(present)) <= 20 else "number"


def _infer_column(name: str, column: Array) -> Column:
    here = ~gone(column)
    present, rows = column[here], len(column)
    missing = "" if here.all() else f", {rows - int(here.sum())} of {rows} missing"
    if not len(present):
        return Column(name=name, kind="ignore", note="all values are missing")
    values = np.unique(present) if present.dtype != object else np.array(sorted(set(present)))
    if len(values) == 1 and here.all():
        shown = as_text(present[:1])[0]
        return Column(name=name, kind="ignore", note=f"constant: always {shown!r}")
    if to_dates(present[:1000]) is not None and to_dates(present) is not None:
        return Column(name=name, kind="date", note=f"dates{missing}")
    numbers, stray = to_numbers(present)
    if len(stray) <= STRAY * len(present):
        return _number_column(name, numbers, stray, rows, missing)
    if len(values) > FEW and len(values) > len(present) / 2:
        note = f"texts: {len(values)} different values in {len(present)} rows{missing}"
        return Column(name=name, kind="ignore", note=note)
    return Column(name=name, kind="category", note=f"{len(values)} values{missing}")


def _number_column(
    name: str, numbers: Array, stray: Sequence[str], rows: int, missing: str
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
    note = f"{different} values from {finite.min():g} to {finite.max():g}{missing}"
    if len(finite) < int((~np.isnan(numbers)).sum()):
        note += ", with infinities"
    if stray:
        shown = ", ".join(repr(text) for text in sorted(set(stray))[:3])
        note += f"; {len(stray)} texts that are no number ({shown}) count as missing"
    return Column(name=name, kind="number", note=note)


def _mark_duplicates(columns: list[Column], frame: Frame) -> list[Column]:
    """Leave out a column that says the same as one before it, row by row."""
    first: dict[bytes, str] = {}
    found = []
    for column in columns:
        if column.kind != "ignore":
            key = _fingerprint(frame.columns[column.name])
            if key in first:
                note = f"the same in every row as {first[key]!r}"
                column = replace(column, kind="ignore", note=note)
            else:
                first[key] = column.name
        found.append(column)
    return found


def _fingerprint(column: Array) -> bytes:
    numbers, stray = to_numbers(column)
    if not stray:
        return numbers.tobytes()
    return "\x1f".join("\x1e" if text is None else text for text in as_text(column)).encode()


def _mark_leaks(columns: list[Column], frame: Frame, answers: Array, target: str) -> list[Column]:
    """Say which columns tell the target exactly: they may be copies of it."""
    codes = _codes(as_text(answers))
    found = []
    for column in columns:
        values = frame.columns[column.name]
        if column.kind in ("number", "category") and _tells(_codes(as_text(values)), codes):
            warning = f"tells {target!r} exactly: is it known when predicting?"
            column = replace(column, note=f"{column.note}; {warning}")
        found.append(column)
    return found


def _codes(texts: Array) -> Array:
    places: dict[Any, int] = {}
    return np.array([places.setdefault(text, len(places)) for text in texts])


def _tells(column: Array, target: Array) -> bool:
    """Whether each value goes with one answer, though values repeat and answers differ."""
    pairs = len(np.unique(column.astype(np.int64) * (target.max() + 1) + target))
    values, answers = len(np.unique(column)), len(np.unique(target))
    return pairs == values and answers > 1 and (values == answers or values < len(column) / 10)
