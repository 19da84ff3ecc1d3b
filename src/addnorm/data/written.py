"""Numbers and dates as people write them in the cells of a table.

    3.5   1e-3                    a number, as programs write it
    1,234.5   $1,234.5            of the form "1,234.5" or "$1,234.5"
    1.234,5   1 234,5 €   12,5 %  of the form "1.234,5", "1.234,5 €", "1.234,5 %"
    2024-05-31   2024-05-31 13:30+02:00   a date, ISO 8601; with an offset it is taken to UTC

1,234 is a thousand in one country and little more than one in another, so that the form is one of
the whole column, found once and kept with it; no cell is read by itself.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from addnorm.data.frame import MISSING, Array
from addnorm.errors import ConfigError

GAPS = frozenset(text.casefold() for text in MISSING) | {
    *("-", "--", "–", "—", ".", "..", "...", "nil", "n.a.", "n. a.", "missing", "unknown"),
    *("#div/0!", "#value!", "#ref!", "#name?", "#num!", "#null!"),
}
"""Texts, in lower case, that say among numbers or dates that there is none."""
STRAY = 0.02
"""Share of texts in a column of numbers that are taken for mistakes in it."""
DATE = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})"
    r"(?:[T ](\d{1,2}):(\d{2})(?::(\d{2})(?:\.\d+)?)?(?:Z|([+-]\d{2}):?(\d{2}))?)?"
)
"""ISO 8601, with or without a time. Other forms are ambiguous: 03/04 is March in one country."""
LIKE_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}(?:[T ].*)?|\d{1,2}[ -]?[A-Za-z]{3,9}.*\d")
POINT, COMMA = "1,234.5", "1.234,5"
FORMS = {
    POINT: re.compile(r"([-+]?)([1-9]\d{0,2}(?:[,'’ \u00a0\u202f]\d{3})+|\d*)(?:\.(\d+))?"),
    COMMA: re.compile(r"([-+]?)([1-9]\d{0,2}(?:[.'’ \u00a0\u202f]\d{3})+|\d*)(?:,(\d+))?"),
}
"""How a number may be written, besides as programs do; a sign of money or % may stand beside it."""


def to_numbers(column: Array, form: str = "") -> tuple[Array, list[str]]:
    """A column as numbers, NaN where it is missing or none, and the texts that are no numbers.

    >>> to_numbers(np.array(["3", None, "many"], dtype=object))[1]
    ['many']
    >>> to_numbers(np.array(["1.200,50 €"], dtype=object), form="1.234,5 €")[0].tolist()
    [1200.5]
    """
    if column.dtype.kind == "f":
        return column, []
    if column.dtype.kind == "M":
        seconds = column.astype("datetime64[s]").astype(np.float64)
        return np.where(np.isnat(column), np.nan, seconds), []
    found, stray = np.full(len(column), np.nan), []
    if not form and (plain := _all_numbers(column)) is not None:
        return plain, []
    for row, text in enumerate(column.tolist()):
        if text is not None:
            number = _written(text, form) if form else _number(text)
            if number is None:
                stray.append(text)
            else:
                found[row] = number
    return found, stray


def without_gaps(texts: Sequence[str]) -> list[str]:
    """The texts that do not stand for a gap."""
    return [text for text in texts if text.casefold() not in GAPS]


def need_form(form: str) -> tuple[str, str]:
    """What a form is made of, its pattern's name and the sign beside it; or ConfigError."""
    name = next((name for name in FORMS if name in form), None)
    sign = "" if name is None else form.replace(name, "", 1).strip()
    if name is None or len(sign) > 1 or sign.isalnum():
        raise ConfigError(
            f"the form of a number must be {' or '.join(FORMS)}, with a sign such as $ or % beside "
            f"it or none: got {form!r}."
        )
    return name, sign


def find_form(texts: Sequence[str]) -> str:
    """The form in which most of some texts are numbers; "" if few of them are, or none is needed.

    >>> find_form(["$1,200.00", "$999"]), find_form(["1,5", "2,25"]), find_form(["red", "1,5"])
    ('$1,234.5', '1.234,5', '')
    """
    signs = Counter(_signs(text) for text in texts)
    if not signs or all(_number(text) is not None for text in texts):
        return ""
    sign = signs.most_common(1)[0][0]
    if len(sign) > 1:
        return ""
    before = sum(text.startswith(sign) for text in texts) * 2 > len(texts)
    forms = [f"{sign}{name}" if before else f"{name} {sign}".strip() for name in FORMS]
    counts = {form: sum(_written(text, form) is not None for text in texts) for form in forms}
    best = max(forms, key=lambda form: counts[form])
    return best if counts[best] * 2 > len(texts) else ""


def _signs(text: str) -> str:
    return "".join(c for c in text if c == "%" or unicodedata.category(c) == "Sc")


def _number(text: str) -> float | None:
    """As programs write it; 1_000 is a number to Python alone."""
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def _all_numbers(column: Array) -> Array | None:
    """All at once, where every text is a number or missing, as in most columns."""
    here = np.array([text is not None for text in column.tolist()], dtype=bool)
    found = np.full(len(column), np.nan)
    try:
        found[here] = column[here].astype(np.float64)
    except (ValueError, TypeError):
        return None
    return None if "_" in "".join(column[here].tolist()) else found


@lru_cache(maxsize=256)
def _parts(form: str) -> tuple["re.Pattern[str]", str]:
    name, sign = need_form(form)
    return FORMS[name], sign


def _written(text: str, form: str) -> float | None:
    """The number that a text of some form stands for, or None."""
    pattern, sign = _parts(form)
    if form == POINT and (number := _number(text)) is not None:
        return number
    bare = text.replace("−", "-")
    if sign:
        before, found, after = (part.strip() for part in bare.partition(sign))
        if not found or (before not in ("", "-", "+") and after):
            return None
        bare = before + after
    match = pattern.fullmatch(bare.strip())
    if match is None or not (match[2] or match[3]):
        return None
    digits = "".join(c for c in match[2] if c.isdecimal())
    return float(f"{match[1]}{digits or 0}.{match[3] or 0}")


def to_dates(column: Array) -> Array | None:
    """A column as dates, or None if some text in it is no date and does not stand for a gap."""
    if column.dtype.kind == "M":
        return column
    if column.dtype != object:
        return None
    found = np.full(len(column), np.datetime64("NaT"), dtype="datetime64[s]")
    for row, text in enumerate(column.tolist()):
        if text is None or text.casefold() in GAPS:
            continue
        when = _date(text)
        if when is None:
            return None
        found[row] = when
    return found


def _date(text: str) -> np.datetime64 | None:
    match = DATE.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    try:
        when = np.datetime64(
            f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}", "s"
        )
    except ValueError:
        return None
    east, past = match[7] or "+00", int(match[8] or 0)
    minutes = int(east) * 60 + (-past if east.startswith("-") else past)
    return when - np.timedelta64(minutes, "m")


def first_no_date(column: Array) -> str | None:
    """The first text that is no date, nor stands for a gap."""
    texts = without_gaps([text for text in column.tolist() if text is not None])
    return next((text for text in texts if _date(text) is None), None)


def look_like_dates(texts: Sequence[str]) -> bool:
    """Whether all of some texts seem to be dates of a form that is not read."""
    return bool(texts) and all(LIKE_DATE.fullmatch(text) for text in texts)
