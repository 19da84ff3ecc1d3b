"""What each column of a table is to a model: guessed from the rows, shown, edited, saved as TOML.

    number     learnt from as a number; a text that is none counts as missing
    category   learnt from by its values
    date       taken apart: when, month, weekday, hour
    ignore     left out, and said why

Nothing is left out in silence: every column has its row in the schema, and its note.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from addnorm.data.frame import Array, Frame, as_text
from addnorm.disk import read_text, write_whole
from addnorm.errors import ConfigError, InputError, nearest
from addnorm.section import write_value

KINDS = ("number", "category", "date", "ignore")
TASKS = ("classes", "number")
VERSION = 1
FEW = 50
"""A column of texts with more different values than this, most of them met once, is no category."""
STRAY = 0.02
"""Share of texts in a column of numbers that are taken for mistakes in it."""
IDENTIFIER = re.compile(
    r"(?i:(^|[_ .-])(id|uuid|guid|key|index|row ?number|nr|no)$)|[a-z](Id|ID|Number)$"
)
DATE = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})"
    r"(?:[T ](\d{1,2}):(\d{2})(?::(\d{2})(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
)
"""ISO 8601, with or without a time. Other forms are ambiguous: 03/04 is March in one country."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its name, what it is, and what was found."""

    name: str
    kind: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All columns of a table but the target, and the target."""

    columns: tuple[Column, ...]
    target: str | None = None
    task: str | None = None
    """classes or number."""

    @property
    def used(self) -> list[Column]:
        return [column for column in self.columns if column.kind != "ignore"]

    def kinds(self) -> dict[str, str]:
        return {column.name: column.kind for column in self.columns}

    def change(self, kinds: Mapping[str, str]) -> "Schema":
        """A copy in which some columns are of another kind."""
        known = self.kinds()
        for name, kind in kinds.items():
            if name not in known:
                raise ConfigError(f"the schema has no column {name!r}. {nearest(name, known)}")
            _need_kind(name, kind)
        return replace(
            self,
            columns=tuple(
                replace(c, kind=kinds[c.name], note="as asked for") if c.name in kinds else c
                for c in self.columns
            ),
        )

    def dump(self) -> str:
        """The schema as TOML that `parse` reads back equal."""
        lines = [f"# Kinds of column: {', '.join(KINDS)}. Edit and give to --schema."]
        lines.append(f"version = {VERSION}")
        if self.target is not None:
            lines.append(f"target = {write_value(self.target)}")
        if self.task is not None:
            lines.append(f"task = {write_value(self.task)}")
        for column in self.columns:
            lines += ["", "[[columns]]", f"name = {write_value(column.name)}"]
            lines.append(f"kind = {write_value(column.kind)}")
            lines += [f"note = {write_value(column.note)}"] if column.note else []
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        write_whole(Path(path), self.dump().encode())

    @classmethod
    def parse(cls, text: str, source: str = "the schema") -> "Schema":
        """A schema from TOML, strictly."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{source} is not TOML: {error}.") from None
        known = ("version", "target", "task", "columns")
        for key in table:
            if key not in known:
                raise ConfigError(f"{source} has no field {key!r}. {nearest(key, known)}")
        if table.get("version", VERSION) != VERSION:
            raise ConfigError(
                f"{source} has version {table['version']!r}; this addnorm reads {VERSION}. "
                "Update addnorm to open it."
            )
        if table.get("task") not in (None, *TASKS):
            raise ConfigError(f"{source}: task must be classes or number: got {table['task']!r}.")
        rows = table.get("columns", [])
        columns = tuple(_read_column(row, source) for row in rows)
        counts = Counter(column.name for column in columns)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(f"{source} has column {twice[0]!r} twice. Leave one out.")
        return cls(columns=columns, target=table.get("target"), task=table.get("task"))

    @classmethod
    def load(cls, path: str | Path) -> "Schema":
        return cls.parse(read_text(path), str(path))


def _read_column(row: Any, source: str) -> Column:
    if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
        raise ConfigError(f"{source}: every [[columns]] must have a name: got {row!r}.")
    for key in row:
        if key not in ("name", "kind", "note"):
            raise ConfigError(
                f"{source}: column {row['name']!r} has no field {key!r}. "
                f"{nearest(key, ('name', 'kind', 'note'))}"
            )
    kind = row.get("kind", "")
    _need_kind(row["name"], kind)
    return Column(name=row["name"], kind=kind, note=str(row.get("note", "")))


def _need_kind(name: str, kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(
            f"column {name!r} must be one of {', '.join(KINDS)}: got {kind!r}. "
            f"{nearest(str(kind), KINDS)}"
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


def to_numbers(column: Array) -> tuple[Array, list[str]]:
    """A column as numbers, NaN where it is missing or none, and the texts that are no numbers.

    >>> to_numbers(np.array(["3", None, "many"], dtype=object))[1]
    ['many']
    """
    if column.dtype.kind == "f":
        return column, []
    if column.dtype.kind == "M":
        seconds = column.astype("datetime64[s]").astype(np.float64)
        return np.where(np.isnat(column), np.nan, seconds), []
    found = np.full(len(column), np.nan)
    try:
        here = np.array([text is not None for text in column], dtype=bool)
        found[here] = column[here].astype(np.float64)
        return found, []
    except (ValueError, TypeError):
        pass
    stray = []
    for row, text in enumerate(column.tolist()):
        if text is not None:
            number = _number(text)
            if number is None:
                stray.append(text)
            else:
                found[row] = number
    return found, stray


def _number(text: str) -> float | None:
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def to_dates(column: Array) -> Array | None:
    """A column as dates, or None if some text in it is no date."""
    if column.dtype.kind == "M":
        return column
    if column.dtype != object:
        return None
    found = np.full(len(column), np.datetime64("NaT"), dtype="datetime64[s]")
    for row, text in enumerate(column.tolist()):
        if text is None:
            continue
        match = DATE.fullmatch(text)
        if match is None:
            return None
        year, month, day, hour, minute, second = (int(part or 0) for part in match.groups())
        try:
            found[row] = np.datetime64(
                f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}", "s"
            )
        except ValueError:
            return None
    return found


def gone(column: Array) -> Array:
    """Which values are missing."""
    if column.dtype.kind == "f":
        return np.isnan(column)
    if column.dtype.kind == "M":
        return np.isnat(column)
    return np.array([text is None for text in column], dtype=bool)


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
