"""Columns of any library as one of three arrays: float64 with NaN, texts with None, or dates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from addnorm.errors import InputError

Array = np.ndarray[Any, Any]
CONVERTED_TYPES = (
    ((timedelta, np.timedelta64), "holds durations: they are converted to seconds"),
    ((time,), "holds times of day: they are converted to seconds since midnight"),
    ((list, tuple, dict, np.ndarray), "holds lists: each is converted to one text"),
)
"""Types of values that are converted to another type, and the note about it."""
COMPLEX_MESSAGE = "complex numbers are not supported. Give two columns of real numbers."


def to_array(values: Any) -> Array:
    """Return any sequence as one of the three kinds of array."""
    array = values if isinstance(values, np.ndarray) else object_array(values)
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    if array.dtype.kind == "M":
        return array.astype("datetime64[s]")
    if array.dtype.kind == "m":
        seconds = array.astype("timedelta64[us]").astype(np.float64) / 1e6
        return np.where(np.isnat(array), np.nan, seconds)
    if array.dtype.kind == "c":
        raise InputError(COMPLEX_MESSAGE)
    simple = [_simplify(value) for value in array.tolist()]
    present = [value for value in simple if value is not None]
    if present and all(isinstance(value, float) for value in present):
        return np.array([math.nan if value is None else value for value in simple])
    return object_array(number_text(v) if isinstance(v, float) else v for v in simple)


def object_array(values: Iterable[Any]) -> Array:
    """Return a one-dimensional array of objects, also of values that are sequences."""
    objects = list(values)
    array = np.empty(len(objects), dtype=object)
    array[:] = objects
    return array


def _simplify(value: Any) -> float | str | None:
    """Return a value as a number or a text; None if it is missing."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | float | Decimal | np.number) and not isinstance(value, complex):
        return _to_float(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, time):
        return value.hour * 3600 + value.minute * 60 + value.second + value.microsecond / 1e6
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace").strip() or None
    if isinstance(value, complex):
        raise InputError(COMPLEX_MESSAGE)
    text = str(value).strip()
    if isinstance(value, set | frozenset) or " at 0x" in text:  # differs in the next process
        raise InputError(
            f"a cell must be a number, a text or a date: got {type(value).__name__}. "
            "Remove its column, or split it into columns."
        )
    return text or None


def _to_float(value: Any) -> float | None:
    """Return a number as the nearest float64; None for NaN."""
    if value.is_nan() if isinstance(value, Decimal) else value != value:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def number_text(value: float) -> str | None:
    """Return a number as a text, an integer without a decimal point; None for NaN."""
    if math.isnan(value):
        return None
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(value)


def conversion_notes(named: Sequence[tuple[str, Any]], columns: Mapping[str, Array]) -> list[str]:
    """Return sentences on columns whose values were converted to another type or rounded."""
    notes = []
    for name, values in named:
        first = next((value for value in values if not is_missing_value(value)), None)
        notes += [
            f"column {name!r} {text}." for kind, text in CONVERTED_TYPES if isinstance(first, kind)
        ]
        if isinstance(first, int | np.integer) and columns[name].dtype.kind == "f":
            finite = columns[name][np.isfinite(columns[name])]
            if len(finite) and np.abs(finite).max() > 2**53:
                notes.append(
                    f"column {name!r} has integers beyond 2^53, which are rounded: give "
                    "identifiers as texts."
                )
    return notes


def is_missing(column: Array) -> Array:
    """Return a boolean array that is true where the value of a column is missing."""
    if column.dtype.kind == "f":
        return np.isnan(column)
    if column.dtype.kind == "M":
        return np.isnat(column)
    return np.array([text is None for text in column], dtype=bool)


def is_missing_value(value: Any) -> bool:
    """Return whether a single value of any library is a missing value."""
    if isinstance(value, float | np.generic):
        return bool(value != value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")
