"""The kind of each column of a table: inferred from the rows, shown, edited, saved as TOML.

    number     used as a number; a text that is not numeric is treated as missing
    category   used by its values
    date       split into parts: date, day, month, weekday, hour
    text       free text, used by its words; no text is stored
    ignore     not used; the note says why

No column is ignored silently: every column has its entry in the schema, and its note.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from addnorm.data.table.frame import Frame
from addnorm.data.table.parse import DATE_FORMS, NUMBER_FORMS, parse_form
from addnorm.errors import ConfigError, InputError, nearest
from addnorm.files import read_text, write_whole
from addnorm.section import parse_toml, write_value

COLUMN_KINDS = ("number", "category", "date", "text", "ignore")
TABLE_TASKS = ("classes", "number", "ordinal")
SCHEMA_VERSION = 1
COLUMN_FIELDS = ("name", "kind", "form", "note")


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its name, its kind, and what was observed."""

    name: str
    kind: str
    note: str = ""
    """What was observed; after a semicolon, what a person should check."""
    form: str = ""
    """How its numbers or dates are written, if not as programs do: 1.234,5 € or day/month/year."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The target of a table, and all its other columns."""

    columns: tuple[Column, ...]
    target: str | None = None
    task: str | None = None
    """classes, number or ordinal."""
    form: str = ""
    """How the numbers of the target are written; see Column."""

    @property
    def used(self) -> list[Column]:
        return [column for column in self.columns if column.kind != "ignore"]

    def kinds(self) -> dict[str, str]:
        return {column.name: column.kind for column in self.columns}

    def change(self, kinds: Mapping[str, str]) -> "Schema":
        """Return a copy in which some columns have another kind."""
        known = self.kinds()
        for name, kind in kinds.items():
            if name not in known:
                raise ConfigError(f"the schema has no column {name!r}. {nearest(name, known)}")
            _check_kind(name, kind)
        return replace(
            self,
            columns=tuple(
                _as_requested(column, kinds[column.name]) if column.name in kinds else column
                for column in self.columns
            ),
        )

    def check(self, frame: Frame) -> None:
        """Raise InputError if columns are missing or new; their order does not matter."""
        absent = [column.name for column in self.used if column.name not in frame.columns]
        extra = self._extra(frame)
        if not absent and not extra:
            return
        parts = [f"lacks {list_names(absent)}"] if absent else []
        parts += [f"has {list_names(extra)}, which training did not have"] if extra else []
        raise InputError(
            f"{frame.name} must have the columns of the training rows: it "
            f"{' and '.join(parts)}. Add or drop columns to match."
        )

    def select(self, frame: Frame) -> Frame:
        """Return a table without columns that training did not have, with a note on them."""
        extra = self._extra(frame)
        if any(column.name not in frame.columns for column in self.used):
            self.check(frame)
        if not extra:
            return frame
        note = f"not used, because training did not have it: {list_names(extra)}."
        return replace(frame.without(*extra), notes=(*frame.notes, note))

    def _extra(self, frame: Frame) -> list[str]:
        known = {self.target, *(column.name for column in self.columns)}
        return [name for name in frame.columns if name not in known]

    def dump(self) -> str:
        """Return the schema as TOML that `parse` reads back equal."""
        lines = [f"# Kinds of column: {', '.join(COLUMN_KINDS)}. Edit, then pass with --schema."]
        lines.append(
            f"# A number may have a form: {' or '.join(NUMBER_FORMS)}, with a sign such as $ or %; "
            f"a date {' or '.join(DATE_FORMS)}."
        )
        lines.append(f"version = {SCHEMA_VERSION}")
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
        """Return the schema of a TOML text; unknown fields are errors."""
        table = parse_toml(text, source)
        known = ("version", "target", "task", "form", "columns")
        for key in table:
            if key not in known:
                raise ConfigError(f"{source} has no field {key!r}. {nearest(key, known)}")
        if table.get("version", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise ConfigError(
                f"{source} has version {table['version']!r}; this addnorm reads {SCHEMA_VERSION}. "
                "Update addnorm to open it."
            )
        if table.get("task") not in (None, *TABLE_TASKS):
            raise ConfigError(
                f"{source}: task must be classes, number or ordinal: got {table['task']!r}."
            )
        rows = table.get("columns", [])
        columns = tuple(_parse_column(row, source) for row in rows)
        counts = Counter(column.name for column in columns)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(f"{source} has column {repeated[0]!r} twice. Remove one.")
        return cls(
            columns=columns,
            target=table.get("target"),
            task=table.get("task"),
            form=_parse_form_field(table, source),
        )

    @classmethod
    def load(cls, path: str | Path) -> "Schema":
        return cls.parse(read_text(path), str(path))


def _as_requested(column: Column, kind: str) -> Column:
    form = column.form if kind == column.kind else ""
    return replace(column, kind=kind, form=form, note="as requested")


def list_names(names: Sequence[str]) -> str:
    """Return the first names, each shortened to 60 characters, and how many more there are."""
    shown = ", ".join(repr(name if len(name) <= 60 else f"{name[:59]}…") for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _parse_column(row: Any, source: str) -> Column:
    if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
        raise ConfigError(f"{source}: every [[columns]] must have a name: got {row!r}.")
    for key in row:
        if key not in COLUMN_FIELDS:
            raise ConfigError(
                f"{source}: column {row['name']!r} has no field {key!r}. "
                f"{nearest(key, COLUMN_FIELDS)}"
            )
    kind = row.get("kind", "")
    _check_kind(row["name"], kind)
    form = _parse_form_field(row, f"{source}: column {row['name']!r}", kind)
    return Column(name=row["name"], kind=kind, note=str(row.get("note", "")), form=form)


def _parse_form_field(table: Mapping[str, Any], where: str, kind: str = "number") -> str:
    form = str(table.get("form", ""))
    if form:
        try:
            check_form(form, kind)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return form


def check_form(form: str, kind: str) -> None:
    """Raise ConfigError if a form is not one of numbers, or for a date not one of dates."""
    if kind != "date":
        parse_form(form)
    elif form not in DATE_FORMS:
        raise ConfigError(
            f"the form of a date must be {' or '.join(DATE_FORMS)}: got {form!r}. Dates such as "
            "2024-12-31 need none."
        )


def _check_kind(name: str, kind: str) -> None:
    if kind not in COLUMN_KINDS:
        raise ConfigError(
            f"column {name!r} must be one of {', '.join(COLUMN_KINDS)}: got {kind!r}. "
            f"{nearest(str(kind), COLUMN_KINDS)}"
        )
