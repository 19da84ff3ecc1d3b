"""What is given to an estimator, in the one form that fitting takes; what is wrong is refused.

What scikit-learn refuses is refused in its words, which its own checks look for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    check_array,
    check_random_state,
    column_or_1d,
)
from torch import Tensor

from addnorm.data.table.column_arrays import is_missing, is_missing_value
from addnorm.data.table.frame import Array, Frame, to_frame, to_texts
from addnorm.data.table.schema import Schema
from addnorm.errors import ConfigError, InputError

LARGEST = 1e150
"""Targets beyond this have no variance that float64 can hold."""


def as_frame(X: Any, estimator: Any = None) -> Frame:
    """X as a frame; what scikit-learn refuses is refused in its words."""
    if isinstance(X, Frame | str | Path | Mapping) or hasattr(X, "collect") or _is_frame(X):
        frame = to_frame(X, "X")
        if not len(frame):
            raise InputError("X must have a row: found array with 0 sample(s).")
        return frame
    array = check_array(X, dtype=None, ensure_all_finite=False, estimator=estimator, input_name="X")
    if array.dtype.kind == "O":
        _need_plain(array)
    return to_frame(array, "X")


def _is_frame(X: Any) -> bool:
    import narwhals

    if isinstance(X, list) and X and all(isinstance(row, Mapping) for row in X):
        return True
    try:
        narwhals.from_native(X, eager_only=True)
    except TypeError:
        return False
    except narwhals.exceptions.DuplicateError:
        return True
    return True


def _need_plain(array: Array) -> None:
    for value in array.ravel():
        if isinstance(value, dict | list | tuple | set):
            raise TypeError(
                f"argument must be a string or a number: got {type(value).__name__} in X."
            )


def to_labels(y: Any) -> Array:
    if y is None:
        raise InputError("y must be given: requires y to be passed, but the target y is None.")
    y = column_or_1d(np.asarray(y), warn=True)
    if y.dtype.kind == "O":
        if lost := sum(is_missing_value(value) for value in y):
            raise InputError(f"Input y contains NaN or None: {lost} targets are missing.")
        kinds = {type(value) for value in y.tolist()}
        if not any(kinds <= alike for alike in ({bool}, {int, float}, {str})):
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise InputError(
                f"classes must all be texts, numbers or booleans: y has {names}. Make them texts."
            )
        y = np.array(y.tolist())
    elif y.dtype.kind == "f" and not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity: every row must have a class.")
    return y


def to_targets(y: Any) -> Array:
    if y is None:
        raise InputError("y must be given: requires y to be passed, but the target y is None.")
    y = column_or_1d(np.asarray(y), warn=True)
    if y.dtype.kind in "mM":
        raise InputError(f"y must be numbers: got {y.dtype}. Say in which unit: seconds, days, ...")
    try:
        lost = y.dtype.kind == "O" and any(is_missing_value(value) for value in y)
        y = np.full(len(y), np.nan) if lost else y.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(f"y must be numbers: got {y.dtype}. Try the classifier.") from None
    if not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity: every row must have a number.")
    if (np.abs(y) > LARGEST).any():
        raise InputError(
            f"y must be between ±{LARGEST:g}: got {y[np.abs(y).argmax()]:g}. Use a larger unit."
        )
    return y


def to_groups(groups: Any, rows: int) -> Array | None:
    """Which rows belong together, as texts: 1 and "1" are one group."""
    if groups is None:
        return None
    named = to_frame({"groups": groups}).columns["groups"]
    if len(named) != rows:
        raise InputError(f"groups must be as many as the rows: got {len(named)} for {rows}.")
    if lost := int(is_missing(named).sum()):
        raise InputError(
            f"every row must have a group: {lost} {'has' if lost == 1 else 'have'} none. "
            "Leave the row out, or give it a group of its own."
        )
    return to_texts(named).astype(str)


def pair_of(eval_set: Any) -> tuple[Any, Any]:
    pairs = isinstance(eval_set, list) and all(isinstance(pair, tuple) for pair in eval_set)
    pair = eval_set[0] if pairs and len(eval_set) == 1 else eval_set
    if not isinstance(pair, Sequence) or len(pair) != 2 or (pairs and len(eval_set) > 1):
        raise InputError("eval_set must be a pair (X, y), or a list of one such pair.")
    return pair[0], pair[1]


def normal(weight: Array) -> Tensor:
    """Weights that are 1 on average."""
    return torch.from_numpy(weight / weight.mean() if weight.any() else weight).float()


def seed_of(random_state: Any) -> int:
    if isinstance(random_state, int | np.integer):
        if random_state < 0:
            raise ConfigError(f"random_state must be 0 or more: got {random_state}.")
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def left_out(schema: Schema) -> list[str]:
    """Sentences on columns that are not used, or not taken as they stand, or to be looked at."""
    said = []
    for column in schema.columns:
        remark = column.note.partition("; ")[2]
        if column.kind == "ignore":
            said.append(f"column {column.name!r} is left out: {column.note or 'as requested'}.")
        elif remark:
            said.append(f"column {column.name!r}: {remark}.")
    return said


def say_unlearnt(classes: Sequence[Any] | Array, target: Array) -> list[str]:
    """Sentences on classes that no row to learn from has."""
    return [
        f"no row of class {str(classes[place])!r} is learnt from: all are held out."
        for place in np.setdiff1d(np.arange(len(classes)), target)
    ]
