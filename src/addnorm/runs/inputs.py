"""Training data in memory (lists of texts, data frames), written to files of the run.

Training reads only files, so that every run can be resumed.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from addnorm.errors import InputError
from addnorm.files import make_directory, to_json

INPUTS = "inputs"
"""Folder of a run with the files of data that were passed in memory."""

Values = Sequence[Any] | npt.NDArray[Any]
"""One value for each text or row."""
Texts = str | Path | Sequence[str]
"""A file, the name of a column, or the texts themselves."""


class DataFrameLike(Protocol):
    """A data frame of pandas, polars or any library that narwhals knows."""

    @property
    def columns(self) -> Any: ...

    def __len__(self) -> int: ...


TableLike = Mapping[str, Values] | Sequence[Mapping[str, Any]] | npt.NDArray[Any] | DataFrameLike
"""A table in memory: columns by name, rows, an array or a data frame."""


def is_path(value: Any) -> bool:
    """Return whether a value is the path of a file."""
    return isinstance(value, str | Path)


def files_of(task: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options with all data in memory replaced by paths of files in `folder`.

    Parameters
    ----------
    task : name of the task.
    options : options of `addnorm.train`; values may be paths, lists of texts or data frames.
    folder : folder for the files; it is only created if a file is written.
    """
    writers = {"table": _table_files, "language": _document_files, "label": _tagged_files}
    known = {name: value for name, value in options.items() if value is not None}
    if "source" in known and not is_path(known.get("text", "")):
        raise InputError("texts must be passed once: as data, as source or as text.")
    changed = writers.get(task, _text_files)(known, folder)
    return {name: str(v) if isinstance(v, Path) else v for name, v in changed.items()}


def _document_files(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write a list of texts as one text file, with a line for each."""
    for name in ("source", "text", "valid_source"):
        if name in options and not is_path(options[name]):
            lines = _texts(options[name], name)
            path = _file_in(folder, f"{name}.txt")
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            options[name] = path
    return options


def _text_files(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write lists of texts, with translations or labels, as columns of a .csv file."""
    if "source" not in options and "text" in options and not is_path(options["text"]):
        options["source"] = options.pop("text")
    for prefix in ("", "valid_"):
        source, other = options.get(f"{prefix}source"), f"{prefix}target"
        if source is None or is_path(source):
            if other in options and not is_path(options[other]):
                raise InputError(f"{other} is a list: pass {prefix}source as a list, too.")
            continue
        path = _file_in(folder, f"{prefix or 'train_'}data.csv")
        if not _is_list(source):
            _write_frame(path, _frame(source))
        else:
            columns = {"text": _texts(source, f"{prefix}source")}
            if not prefix and "label" in options and is_path(options["label"]):
                raise InputError(
                    f"label must be a list, as the texts are a list: got {options['label']!r}."
                )
            if other in options:
                columns["label"] = _texts(options.pop(other), other)
            elif not is_path(options.get("label", "")):
                columns["label"] = [
                    str(value) for value in _require_list(options.pop("label"), "label")
                ]
            if "label" in columns:
                options["label"] = "label"
            _write_columns(path, columns)
            options["text"] = "text"
        options[f"{prefix}source"] = path
    return options


def _tagged_files(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write lists of words, with lists of labels, as JSON lines."""
    for name in ("source", "text", "valid_source"):
        if name not in options or is_path(options[name]):
            continue
        labels = options.pop("label", None) if name != "valid_source" else None
        if labels is None or is_path(labels):
            raise InputError(
                f"{name} is a list: pass label as a list of lists, and validation in a file."
            )
        if len(_require_list(labels, "label")) != len(_require_list(options[name], name)):
            counts = f"{len(labels)} for {len(options[name])}"
            raise InputError(f"there must be a list of labels for each sentence: got {counts}.")
        path = _file_in(folder, f"{name}.jsonl")
        rows = zip(options.pop(name), labels, strict=True)
        lines = [to_json({"tokens": list(w), "tags": list(t)}, indent=None) for w, t in rows]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        options["source" if name == "text" else name] = path
    return options


def _table_files(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write data frames and arrays as .csv files, and the types they declare as a schema."""
    from addnorm.data.table.frame import to_frame
    from addnorm.data.table.infer import infer

    if "source" in options and not is_path(options["source"]):
        frame, target = _frame(options["source"]), options.get("target")
        if target is not None and not isinstance(target, str):
            column = to_frame({"target": target}).columns["target"]
            if len(column) != len(frame):
                raise InputError(
                    f"target must have a value for each row: got {len(column)} for {len(frame)}."
                )
            name = "target"
            while name in frame.columns:
                name += "_"
            frame = replace(frame, columns={**frame.columns, name: column})
            options["target"] = name
        if frame.declared and "schema" not in options:
            path = _file_in(folder, "schema.toml")
            # Training adds the column of groups to the schema, as one that is ignored.
            infer(frame.without(options.get("groups")), options.get("target")).save(path)
            options["schema"] = path
        options["source"] = _write_frame(_file_in(folder, "train.csv"), frame)
    for name in ("test", "unlabelled"):
        if name in options and not is_path(options[name]):
            options[name] = _write_frame(_file_in(folder, f"{name}.csv"), _frame(options[name]))
    return options


def _frame(data: Any) -> Any:
    from addnorm.data.table.frame import to_frame

    return to_frame(data, "the data")


def _write_frame(path: Path, frame: Any) -> Path:
    """Write a frame as .csv, with integers without a decimal point and dates as ISO 8601."""
    from addnorm.data.table.frame import to_texts
    from addnorm.data.table.reader import open_table_writer

    columns = {name: to_texts(column) for name, column in frame.columns.items()}
    with open_table_writer(path) as writer:
        writer.write(replace(frame, columns=columns))
    return path


def _write_columns(path: Path, columns: Mapping[str, Sequence[str]]) -> None:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        sizes = " and ".join(f"{count} of {name}" for name, count in lengths.items())
        raise InputError(f"there must be one value for each text: got {sizes}.")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _is_list(value: Any) -> bool:
    """Return whether a value is a sequence of texts rather than a table."""
    if isinstance(value, list | tuple):
        return not value or not isinstance(value[0], Mapping)
    return hasattr(value, "tolist") and getattr(value, "ndim", 2) == 1


def _texts(values: Any, name: str) -> list[str]:
    """Return a list of texts; InputError if it is one text or path, or has other items."""
    if is_path(values):
        raise InputError(
            f"{name} must be a list of str, as the source is a list: got {str(values)!r}. "
            "Pass two lists or two files."
        )
    texts = _require_list(values, name)
    for place, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise InputError(
                f"{name} must be a list of str: item {place} is {type(text).__name__}."
            )
    return texts


def _require_list(values: Any, name: str) -> list[Any]:
    """Return values as a list; InputError if they are not several, such as a number."""
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise InputError(
            f"{name} must be a list or the name of a file or column: got {values!r:.60}. Try "
            f"{name}=['one', 'two']."
        )
    return list(values)


def _file_in(folder: Path, name: str) -> Path:
    return make_directory(folder) / name
