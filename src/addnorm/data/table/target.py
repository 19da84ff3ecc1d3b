"""The target column: its schema, the rows that have a target, and its values."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from addnorm.data.table.column_arrays import is_missing
from addnorm.data.table.frame import Array, Frame, to_texts
from addnorm.data.table.infer import infer, infer_form, infer_task
from addnorm.data.table.parse import to_numbers
from addnorm.data.table.schema import Column, Schema
from addnorm.errors import ConfigError, InputError, nearest

MIN_LEVELS, MAX_SPREAD = 4, 2
"""A target may be ordered if it has this many whole numbers, and at most this distance on average
between them."""


def resolve_schema(
    table: Frame,
    target: str,
    path: str | None,
    groups: str | None,
    say: Callable[[str], None],
    task: str | None = None,
) -> Schema:
    """Return the schema of a file, checked against the table, or an inferred schema.

    The column of groups is ignored, unless the file gives it another kind.

    Parameters
    ----------
    table : the training rows.
    target : name of the target column.
    path : file of the schema; None to infer it.
    groups : name of the column of groups; None if there is none.
    say : receives messages.
    task : classes, number or ordinal; None for that of the file, or to infer it.
    """
    table.column(target)
    grouping = []
    if groups is not None:
        table.column(groups)
        if groups == target:
            raise ConfigError(f"--groups must name another column than the target {target!r}.")
        note = "used only to keep rows of a group together"
        grouping = [Column(name=groups, kind="ignore", note=note)]
    if path is None:
        inferred = infer(table if groups is None else table.without(groups), target, task)
        return replace(inferred, columns=(*inferred.columns, *grouping))
    schema = Schema.load(path)
    if schema.target not in (None, target):
        raise ConfigError(
            f"{path!r} has the target {schema.target!r}, not {target!r}. Change it in the file."
        )
    for column in schema.columns:
        table.column(column.name)
    if groups in schema.kinds():
        grouping = []
        if schema.kinds()[groups] != "ignore":
            say(f"column {groups!r} is also used as an input, as {path!r} gives it a kind.")
    schema = replace(schema, columns=(*schema.columns, *grouping))
    known = {*schema.kinds(), target}
    extra = [name for name in table.names if name not in known]
    if extra:
        raise ConfigError(
            f"{path!r} has no entry for column {extra[0]!r}. Add it, with kind = 'ignore'."
        )
    task = task or schema.task or infer_task(table.columns[target])
    form = schema.form or (infer_form(table.columns[target]) if task == "number" else "")
    return replace(schema, target=target, task=task, form=form)


def rows_with_target(table: Frame, target: str, say: Callable[[str], None]) -> tuple[Frame, Array]:
    """Return the rows whose target is not missing, and their targets."""
    missing = is_missing(table.column(target))
    if missing.all():
        raise InputError(f"column {target!r} of {table.name} must have values: it has none.")
    if missing.any():
        say(f"{int(missing.sum())} rows of {table.name} have no {target!r}: they are left out.")
        table = table.take(~missing)
    return table, table.columns[target]


def parse_target(values: Array, schema: Schema) -> Array:
    """Return targets in the form that estimators expect: class names, or numbers."""
    if schema.task != "number":
        return to_texts(values).astype(str)
    numbers, non_numeric = to_numbers(values, schema.form)
    if non_numeric:
        raise InputError(
            f"column {schema.target!r} must hold numbers: got {non_numeric[0]!r}. Correct the "
            "file, or set task = 'classes' in a schema (addnorm schema FILE -o schema.toml, then "
            "--schema)."
        )
    return numbers


def describe_order(values: Array, target: str) -> list[str]:
    """Return a note if a target of few whole numbers may be ordered, such as marks from 3 to 9."""
    texts = {str(text) for text in to_texts(values) if text is not None}
    try:
        numbers = sorted({float(text) for text in texts})
    except ValueError:
        return []
    span = numbers[-1] - numbers[0] if numbers else 0.0
    if len(numbers) < MIN_LEVELS or span > MAX_SPREAD * (len(numbers) - 1):
        return []
    return [
        f"column {target!r} has {len(numbers)} whole numbers from {numbers[0]:g} to "
        f"{numbers[-1]:g}, which are predicted as classes without an order. If they are ordered, "
        "try --task ordinal; if they are counts or amounts, --task number."
    ]


def parse_known_target(
    values: Array, schema: Schema, classes: Array | None, say: Callable[[str], None]
) -> Array:
    """Return targets to evaluate on: known class names, or numbers.

    Parameters
    ----------
    values : the target column.
    schema : schema of the training rows.
    classes : the classes of the model; None if it predicts numbers.
    say : receives messages.
    """
    targets = parse_target(values, schema)
    if classes is None:
        return targets
    known = {str(label) for label in classes.tolist()}
    unknown = sorted(set(targets.tolist()) - known)
    if unknown and all(label.removesuffix(".") in known for label in unknown):
        say(f"labels such as {unknown[0]!r} are read as {unknown[0].removesuffix('.')!r}.")
        return np.array([label.removesuffix(".") for label in targets.tolist()])
    if unknown:
        raise InputError(
            f"column {schema.target!r} has a class that training did not have: {unknown[0]!r}. "
            f"{nearest(unknown[0], known)}"
        )
    return targets


def join_rows(one: Frame, other: Frame) -> Frame:
    """Return the rows of two tables, with the columns that both have."""
    columns = {}
    for name in (name for name in one.names if name in other.columns):
        column, more = one.columns[name], other.columns[name]
        if column.dtype != more.dtype:
            column, more = to_texts(column), to_texts(more)
        columns[name] = np.concatenate((column, more))
    return Frame(one.name, columns)
