"""Convert the arguments of an estimator to the form that fitting uses, and check them.

Some messages use scikit-learn's wording, because its estimator checks look for it.
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

MAX_TARGET = 1e150
"""The variance of larger targets would overflow float64."""


def as_frame(X: Any, estimator: Any = None, min_rows: int = 1) -> Frame:
    """Return X as a frame with at least `min_rows` rows; arrays are checked by scikit-learn."""
    if isinstance(X, Frame | str | Path | Mapping) or hasattr(X, "collect") or _is_frame(X):
        frame = to_frame(X, "X")
        if len(frame) < min_rows:
            raise InputError("X must have a row: found array with 0 sample(s).")
        return frame
    array = check_array(
        X,
        dtype=None,
        ensure_all_finite=False,
        ensure_min_samples=min_rows,
        estimator=estimator,
        input_name="X",
    )
    if array.dtype.kind == "O":
        _require_scalars(array)
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


def _require_scalars(array: Array) -> None:
    for value in array.ravel():
        if isinstance(value, dict | list | tuple | set):
            raise TypeError(
                f"argument must be a string or a number: got {type(value).__name__} in X."
            )


def to_labels(y: Any) -> Array:
    """Return class labels as an array of texts, numbers or booleans without missing values."""
    if y is None:
        raise InputError("y must be given: requires y to be passed, but the target y is None.")
    y = column_or_1d(np.asarray(y), warn=True)
    if y.dtype.kind == "O":
        if missing := sum(is_missing_value(value) for value in y):
            raise InputError(f"Input y contains NaN or None: {missing} targets are missing.")
        kinds = {type(value) for value in y.tolist()}
        if not any(kinds <= allowed for allowed in ({bool}, {int, float}, {str})):
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise InputError(
                f"classes must all be texts, all numbers or all booleans: y has {names}. "
                "Convert them to texts."
            )
        y = np.array(y.tolist())
    elif y.dtype.kind == "f" and not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity: every row must have a class.")
    return y


def to_targets(y: Any) -> Array:
    """Return numeric targets as finite float64."""
    if y is None:
        raise InputError("y must be given: requires y to be passed, but the target y is None.")
    y = column_or_1d(np.asarray(y), warn=True)
    if y.dtype.kind in "mM":
        raise InputError(f"y must be numbers: got {y.dtype}. Convert it to a unit, such as days.")
    try:
        incomplete = y.dtype.kind == "O" and any(is_missing_value(value) for value in y)
        y = np.full(len(y), np.nan) if incomplete else y.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(f"y must be numbers: got {y.dtype}. Try the classifier.") from None
    if not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity: every row must have a number.")
    if (np.abs(y) > MAX_TARGET).any():
        raise InputError(
            f"y must be between ±{MAX_TARGET:g}: got {y[np.abs(y).argmax()]:g}. Use a larger unit."
        )
    return y


def to_groups(groups: Any, rows: int) -> Array | None:
    """Return the group of each row as text: 1 and "1" are the same group."""
    if groups is None:
        return None
    values = to_frame({"groups": groups}).columns["groups"]
    if len(values) != rows:
        raise InputError(f"groups must have one value for each of {rows} rows: got {len(values)}.")
    if missing := int(is_missing(values).sum()):
        raise InputError(
            f"every row must have a group: {missing} {'has' if missing == 1 else 'have'} none. "
            "Leave the row out, or assign it a group of its own."
        )
    return to_texts(values).astype(str)


def to_pair(eval_set: Any) -> tuple[Any, Any]:
    """Return X and y of an eval_set, which may also be a list of one pair."""
    pairs = isinstance(eval_set, list) and all(isinstance(pair, tuple) for pair in eval_set)
    pair = eval_set[0] if pairs and len(eval_set) == 1 else eval_set
    if not isinstance(pair, Sequence) or len(pair) != 2 or (pairs and len(eval_set) > 1):
        raise InputError("eval_set must be a pair (X, y), or a list of one such pair.")
    return pair[0], pair[1]


def normalise_weights(weight: Array) -> Tensor:
    """Return the weights divided by their mean."""
    return torch.from_numpy(weight / weight.mean() if weight.any() else weight).float()


def to_seed(random_state: Any) -> int:
    """Return a random state as a seed; None and generators draw one."""
    if isinstance(random_state, int | np.integer):
        if random_state < 0:
            raise ConfigError(f"random_state must be 0 or more: got {random_state}.")
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def describe_columns(schema: Schema) -> list[str]:
    """Return sentences about columns that are ignored, or that have a remark."""
    sentences = []
    for column in schema.columns:
        remark = column.note.partition("; ")[2]
        if column.kind == "ignore":
            sentences.append(
                f"column {column.name!r} is left out: {column.note or 'as requested'}."
            )
        elif remark:
            sentences.append(f"column {column.name!r}: {remark}.")
    return sentences


def describe_unlearnt(classes: Sequence[Any] | Array, target: Array) -> list[str]:
    """Return sentences about classes that no training row has."""
    return [
        f"no training row has the class {str(classes[index])!r}: all of its rows are held out."
        for index in np.setdiff1d(np.arange(len(classes)), target)
    ]
