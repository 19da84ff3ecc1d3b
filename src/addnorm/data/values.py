"""Values of any library in one of three arrays: float64 with NaN, texts with None, dates."""

import math
from collections.abc import Mapping, Sequence
from datetime import time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from addnorm.errors import InputError

Array = np.ndarray[Any, Any]
TAKEN = (
    ((timedelta, np.timedelta64), "holds durations: they are taken as seconds"),
    ((time,), "holds times of day: they are taken as seconds since midnight"),
    ((list, tuple, dict, np.ndarray), "holds lists: each is taken as one text"),
)
"""Values that are taken for something else than they are, and what is said of it."""
NO_COMPLEX = "complex numbers cannot be learnt from. Give two columns of real numbers."


def to_array(values: Any) -> Array:
    """Any sequence as one of the three kinds of array."""
    array = values if isinstance(values, np.ndarray) else _as_objects(values)
    if array.dtype.kind in "iuf":
        return array.astype(np.float64)
    if array.dtype.kind == "M":
        return array.astype("datetime64[s]")
    if array.dtype.kind == "m":
        seconds = array.astype("timedelta64[us]").astype(np.float64) / 1e6
        return np.where(np.isnat(array), np.nan, seconds)
    if array.dtype.kind == "c":
        raise InputError(NO_COMPLEX)
    listed = [_plain(value) for value in array.tolist()]
    present = [value for value in listed if value is not None]
    if present and all(isinstance(value, float) for value in present):
        return np.array([math.nan if value is None else value for value in listed])
    column = np.empty(len(listed), dtype=object)
    column[:] = [number_text(v) if isinstance(v, float) else v for v in listed]
    return column


def _as_objects(values: Any) -> Array:
    listed = list(values)
    array = np.empty(len(listed), dtype=object)
    array[:] = listed
    return array


def _plain(value: Any) -> float | str | None:
    """A value as a number or a text; None if it is missing."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | float | Decimal | np.number) and not isinstance(value, complex):
        return _real(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, time):
        return value.hour * 3600 + value.minute * 60 + value.second + value.microsecond / 1e6
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace").strip() or None
    if isinstance(value, complex):
        raise InputError(NO_COMPLEX)
    text = str(value).strip()
    if isinstance(value, set | frozenset) or " at 0x" in text:  # not the same in the next process
        raise InputError(
            f"a cell must be a number, a text or a date: got {type(value).__name__}. "
            "Leave its column out, or take it apart into columns."
        )
    return text or None


def _real(value: Any) -> float | None:
    """A number, as near as float64 comes to it; None for one that is not a number."""
    if value.is_nan() if isinstance(value, Decimal) else value != value:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def number_text(value: float) -> str | None:
    """A number as a text, a whole one without a point; None for NaN."""
    if math.isnan(value):
        return None
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(value)


def say_taken(listed: Sequence[tuple[str, Any]], columns: Mapping[str, Array]) -> list[str]:
    """Sentences on columns whose values are taken for something else than they are."""
    said = []
    for name, values in listed:
        first = next((value for value in values if not is_gone(value)), None)
        said += [f"column {name!r} {words}." for kind, words in TAKEN if isinstance(first, kind)]
        if isinstance(first, int | np.integer) and columns[name].dtype.kind == "f":
            finite = columns[name][np.isfinite(columns[name])]
            if len(finite) and np.abs(finite).max() > 2**53:
                said.append(
                    f"column {name!r} has whole numbers beyond 2^53, which are rounded: give "
                    "identifiers as texts."
                )
    return said


def is_gone(value: Any) -> bool:
    """Whether a value of any library stands for a missing one."""
    if isinstance(value, float | np.generic):
        return bool(value != value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")
