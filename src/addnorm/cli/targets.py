"""The column that is to be predicted, as files have it and as estimators take it."""

from typing import TYPE_CHECKING

from addnorm.cli.talk import say
from addnorm.errors import ConfigError, InputError, nearest

if TYPE_CHECKING:
    from addnorm.data.frame import Array, Frame
    from addnorm.data.schema import Schema
    from addnorm.tabular.base import TableEstimator


def settle_schema(
    table: "Frame", target: str, path: str | None, groups: str | None = None
) -> "Schema":
    """The schema of a file, checked against the table, or one that is guessed.

    The column that names the groups is not learnt from, unless the file says what it is.
    """
    from dataclasses import replace

    from addnorm.data.guess import guess_form, guess_task, infer
    from addnorm.data.schema import Column, Schema

    table.column(target)
    beside = []
    if groups is not None:
        table.column(groups)
        if groups == target:
            raise ConfigError(f"--groups must name another column than the target {target!r}.")
        note = "it says which rows belong together"
        beside = [Column(name=groups, kind="ignore", note=note)]
    if path is None:
        found = infer(table if groups is None else table.without(groups), target)
        return replace(found, columns=(*found.columns, *beside))
    found = Schema.load(path)
    if found.target not in (None, target):
        raise ConfigError(
            f"{path!r} has the target {found.target!r}, not {target!r}. Change it in the file."
        )
    for column in found.columns:
        table.column(column.name)
    if groups in found.kinds():
        beside = []
        if found.kinds()[groups] != "ignore":
            say(f"column {groups!r} is learnt from, too, as {path!r} says it is to be.")
    found = replace(found, columns=(*found.columns, *beside))
    known = {*found.kinds(), target}
    extra = [name for name in table.names if name not in known]
    if extra:
        raise ConfigError(
            f"{path!r} says nothing of column {extra[0]!r}. Add it, with kind = 'ignore'."
        )
    task = found.task or guess_task(table.columns[target])
    form = found.form or (guess_form(table.columns[target]) if task == "number" else "")
    return replace(found, target=target, task=task, form=form)


def with_target(table: "Frame", target: str) -> tuple["Frame", "Array"]:
    """The rows whose target is there, and their targets; how many have none is said."""
    from addnorm.data.schema import gone

    missing = gone(table.column(target))
    if missing.all():
        raise InputError(f"column {target!r} of {table.name} must have values: it has none.")
    if missing.any():
        say(f"{int(missing.sum())} rows of {table.name} have no {target!r}: they are left out.")
        table = table.take(~missing)
    return table, table.columns[target]


def join(one: "Frame", other: "Frame") -> "Frame":
    """The rows of both, by the columns of the first that the other has, too."""
    import numpy as np

    from addnorm.data.frame import Frame, as_text

    columns = {}
    for name in (name for name in one.names if name in other.columns):
        column, more = one.columns[name], other.columns[name]
        if column.dtype != more.dtype:
            column, more = as_text(column), as_text(more)
        columns[name] = np.concatenate((column, more))
    return Frame(one.name, columns)


def to_answers(y: "Array", given: "Schema") -> "Array":
    """Targets as the estimator takes them: texts of classes, or numbers."""
    from addnorm.data.frame import as_text
    from addnorm.data.written import to_numbers

    if given.task != "number":
        return as_text(y).astype(str)
    numbers, stray = to_numbers(y, given.form)
    if stray:
        raise InputError(
            f"column {given.target!r} must hold numbers: got {stray[0]!r}. Mend the file, or write "
            "task = 'classes' in a schema (addnorm schema FILE -o schema.toml, then --schema)."
        )
    return numbers


def known_answers(given: "Schema", classes: "Array | None", y: "Array") -> "Array":
    """Targets of rows to be measured on: some of the classes that were trained, or numbers."""
    answers = to_answers(y, given)
    if classes is None:
        return answers
    known = {str(label) for label in classes.tolist()}
    strange = sorted(set(answers.tolist()) - known)
    if strange and all(label.removesuffix(".") in known for label in strange):
        say(f"labels such as {strange[0]!r} are taken for {strange[0].removesuffix('.')!r}.")
        return _strip_stops(answers)
    if strange:
        raise InputError(
            f"column {given.target!r} has a class that training had not: {strange[0]!r}. "
            f"{nearest(strange[0], known)}"
        )
    return answers


def read_answered(estimator: "TableEstimator", path: str, instead: str) -> "tuple[Frame, Array]":
    """The rows of a file that have a target, and their targets, for a model to be asked about.

    What is strange in them is said. `instead` is what to do with a model that has no target's name.
    """
    from addnorm.data.frame import read_frame

    kept = estimator.recipe_.schema
    if kept.target is None:
        raise ConfigError(f"this model does not know its target's name. {instead}")
    table = read_frame(path)
    kept.check(table)
    for note in [*table.notes, *estimator.recipe_.unseen(table)]:
        say(note)
    table, y = with_target(table, kept.target)
    return table, known_answers(kept, getattr(estimator, "classes_", None), y)


def _strip_stops(labels: "Array") -> "Array":
    import numpy as np

    return np.array([label.removesuffix(".") for label in labels.tolist()])
