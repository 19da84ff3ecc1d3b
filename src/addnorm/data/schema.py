"""What each column of a table is to a model: guessed from the rows, shown, edited, saved as TOML.

    number     learnt from as a number; a text that is none counts as missing
    category   learnt from by its values
    date       taken apart: when, month, weekday, hour
    ignore     left out, and said why

Nothing is left out in silence: every column has its row in the schema, and its note.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from addnorm.data.frame import Array, Frame
from addnorm.data.written import FORMS, need_form
from addnorm.disk import read_text, write_whole
from addnorm.errors import ConfigError, InputError, nearest
from addnorm.section import write_value

KINDS = ("number", "category", "date", "ignore")
TASKS = ("classes", "number")
VERSION = 1
FIELDS = ("name", "kind", "form", "note")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its name, what it is, and what was found."""

    name: str
    kind: str
    note: str = ""
    """What was found; after a semicolon, what a person should look at."""
    form: str = ""
    """How its numbers are written, where that is not as programs do: 1,234.5 or 1.234,5 €."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All columns of a table but the target, and the target."""

    columns: tuple[Column, ...]
    target: str | None = None
    task: str | None = None
    """classes or number."""
    form: str = ""
    """How the numbers of the target are written; see Column."""

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

    def check(self, frame: Frame) -> None:
        """Raise InputError where columns are missing or new; their order does not matter."""
        known = [column.name for column in self.columns]
        absent = [column.name for column in self.used if column.name not in frame.columns]
        extra = [name for name in frame.columns if name not in known and name != self.target]
        if not absent and not extra:
            return
        parts = [f"without {list_names(absent)}"] if absent else []
        parts += [f"with {list_names(extra)}, which training did not have"] if extra else []
        raise InputError(
            f"{frame.name} must have the columns of the training rows: it comes "
            f"{' and '.join(parts)}. Add or drop columns to match."
        )

    def dump(self) -> str:
        """The schema as TOML that `parse` reads back equal."""
        lines = [f"# Kinds of column: {', '.join(KINDS)}. Edit and give to --schema."]
        lines.append(
            f"# A number may have a form: {' or '.join(FORMS)}, with its sign, such as $ or %."
        )
        lines.append(f"version = {VERSION}")
        if self.target is not None:
            lines.append(f"target = {write_value(self.target)}")
        if self.task is not None:
            lines.append(f"task = {write_value(self.task)}")
        if self.form:
            lines.append(f"form = {write_value(self.form)}")
        for column in self.columns:
            lines += ["", "[[columns]]", f"name = {write_value(column.name)}"]
            lines.append(f"kind = {write_value(column.kind)}")
            lines += [f"form = {write_value(column.form)}"] if column.form else []
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
        known = ("version", "target", "task", "form", "columns")
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
        return cls(
            columns=columns,
            target=table.get("target"),
            task=table.get("task"),
            form=_read_form(table, source),
        )

    @classmethod
    def load(cls, path: str | Path) -> "Schema":
        return cls.parse(read_text(path), str(path))


def list_names(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _read_column(row: Any, source: str) -> Column:
    if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
        raise ConfigError(f"{source}: every [[columns]] must have a name: got {row!r}.")
    for key in row:
        if key not in FIELDS:
            raise ConfigError(
                f"{source}: column {row['name']!r} has no field {key!r}. {nearest(key, FIELDS)}"
            )
    kind = row.get("kind", "")
    _need_kind(row["name"], kind)
    form = _read_form(row, f"{source}: column {row['name']!r}")
    return Column(name=row["name"], kind=kind, note=str(row.get("note", "")), form=form)


def _read_form(table: Mapping[str, Any], where: str) -> str:
    form = str(table.get("form", ""))
    if form:
        try:
            need_form(form)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return form


def _need_kind(name: str, kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(
            f"column {name!r} must be one of {', '.join(KINDS)}: got {kind!r}. "
            f"{nearest(str(kind), KINDS)}"
        )


def gone(column: Array) -> Array:
    """Which values are missing."""
    if column.dtype.kind == "f":
        return np.isnan(column)
    if column.dtype.kind == "M":
        return np.isnat(column)
    return np.array([text is None for text in column], dtype=bool)
