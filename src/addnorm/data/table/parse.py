"""Numbers and dates in the formats that people use in the cells of a table.

    3.5   1e-3                    a number, as programs write it
    1,234.5   $1,234.5            of the form "1,234.5" or "$1,234.5"
    1.234,5   1 234,5 €   12,5 %  of the form "1.234,5", "1.234,5 €", "1.234,5 %"
    (623.79)   ($1,234.5)         negative, as accountants write it
    2024-05-31   2024-05-31 13:30+02:00   a date, ISO 8601; with an offset it is converted to UTC
    31 May 2024   May 31, 2024    a date
    5/31/2024   5/31/24 1:30 PM   a date of the form "month/day/year"
    31.05.2024   31/5/2024        a date of the form "day/month/year"

1,234 is a thousand in one country and little more than one in another, and 03/04 is March or April.
The form therefore belongs to the whole column: it is detected once and stored in the schema, not
guessed for each cell.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from addnorm.data.table.frame import MISSING_CELLS, Array
from addnorm.errors import ConfigError

MISSING_MARKERS = frozenset(text.casefold() for text in MISSING_CELLS) | {
    *("-", "--", "–", "—", ".", "..", "...", "nil", "n.a.", "n. a.", "missing", "unknown"),
    *("#div/0!", "#value!", "#ref!", "#name?", "#num!", "#null!"),
}
"""Texts, in lower case, that mark a missing value in a column of numbers or dates."""
MAX_NON_NUMERIC = 0.02
"""Share of texts that a column of numbers may have; they are treated as missing."""
_TIME = (
    r"(?:(?:T| +)(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:\.\d+)?)?"
    r"(?: ?(?P<half>[AaPp])\.?[Mm]\.?)?(?:Z|(?P<offset>[+-]\d{2}):?(?P<minutes>\d{2}))?)?"
)
YEAR_FIRST = re.compile(
    r"(?P<year>\d{4})(?P<mark>[-/.])(?P<month>\d{1,2})(?P=mark)(?P<day>\d{1,2})" + _TIME
)
NAMED_MONTH = re.compile(
    r"(?:(?P<day>\d{1,2})[-/. ]*(?P<name>[A-Za-z]{3,9})"
    r"|(?P<name2>[A-Za-z]{3,9})\.? +(?P<day2>\d{1,2}))"
    r"[-/., ]+(?P<year>\d{4})" + _TIME
)
YEAR_LAST = re.compile(
    r"(?P<first>\d{1,2})(?P<mark>[-/.])(?P<second_part>\d{1,2})(?P=mark)(?P<year>\d{4}|\d{2})"
    + _TIME
)
"""Dates with the year last; the form of the column decides whether the day or month is first."""
MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
MONTH_FIRST, DAY_FIRST = "month/day/year", "day/month/year"
DATE_FORMS = (MONTH_FIRST, DAY_FIRST)
"""Date forms besides ISO 8601 and names of months; the separator may also be a dot or a hyphen."""
TWO_DIGIT_YEAR = 69
"""Two digits from this number on are a year of the 20th century, below it one of the 21st."""
POINT, COMMA = "1,234.5", "1.234,5"
NUMBER_FORMS = {
    POINT: re.compile(r"([-+]?)([1-9]\d{0,2}(?:[,'’ \u00a0\u202f]\d{3})+|\d*)(?:\.(\d+))?"),
    COMMA: re.compile(r"([-+]?)([1-9]\d{0,2}(?:[.'’ \u00a0\u202f]\d{3})+|\d*)(?:,(\d+))?"),
}
"""Number forms besides that of programs; each may have a currency or percent sign."""


def to_numbers(column: Array, form: str = "") -> tuple[Array, list[str]]:
    """Return a column as numbers, NaN where missing or not numeric, and the non-numeric texts.

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
    if not form and (all_numbers := _parse_all(column)) is not None:
        return all_numbers, []
    numbers, non_numeric = np.full(len(column), np.nan), []
    for row, text in enumerate(column.tolist()):
        if text is not None:
            number = _parse_with_form(text, form) if form else _parse_number(text)
            if number is None:
                non_numeric.append(text)
            else:
                numbers[row] = number
    return numbers, non_numeric


def without_missing(texts: Sequence[str]) -> list[str]:
    """Return the texts that are not markers of a missing value."""
    return [text for text in texts if text.casefold() not in MISSING_MARKERS]


def parse_form(form: str) -> tuple[str, str]:
    """Return the pattern name and the sign of a form; ConfigError if it is not a valid form."""
    name = next((name for name in NUMBER_FORMS if name in form), None)
    sign = "" if name is None else form.replace(name, "", 1).strip()
    if name is None or len(sign) > 1 or sign.isalnum():
        raise ConfigError(
            f"the form of a number must be {' or '.join(NUMBER_FORMS)}, optionally with a sign "
            f"such as $ or %: got {form!r}."
        )
    return name, sign


def detect_form(texts: Sequence[str]) -> str:
    """Return the form in which most of the texts are numbers; "" if there is none, or no need.

    >>> detect_form(["$1,200.00", "$999"]), detect_form(["1,5", "2,25"]), detect_form(["red"])
    ('$1,234.5', '1.234,5', '')
    """
    signs = Counter(_signs(text) for text in texts)
    if not signs or all(_parse_number(text) is not None for text in texts):
        return ""
    sign = signs.most_common(1)[0][0]
    if len(sign) > 1:
        return ""
    is_prefix = sum(text.startswith(sign) for text in texts) * 2 > len(texts)
    forms = [f"{sign}{name}" if is_prefix else f"{name} {sign}".strip() for name in NUMBER_FORMS]
    counts = [sum(_parse_with_form(text, form) is not None for text in texts) for form in forms]
    best = max(counts)
    return forms[counts.index(best)] if best * 2 > len(texts) else ""


def _signs(text: str) -> str:
    """Return the percent and currency signs of a text."""
    return "".join(c for c in text if c == "%" or unicodedata.category(c) == "Sc")


def _parse_number(text: str) -> float | None:
    """Return a number as programs write it; not 1_000, which is a number only in Python."""
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


def _parse_all(column: Array) -> Array | None:
    """Return a column as numbers in one step, if every text is a number or missing."""
    present = np.array([text is not None for text in column.tolist()], dtype=bool)
    numbers = np.full(len(column), np.nan)
    try:
        numbers[present] = column[present].astype(np.float64)
    except (ValueError, TypeError):
        return None
    return None if "_" in "".join(column[present].tolist()) else numbers


@lru_cache(maxsize=256)
def _compile_form(form: str) -> tuple["re.Pattern[str]", str]:
    name, sign = parse_form(form)
    return NUMBER_FORMS[name], sign


def _parse_with_form(text: str, form: str) -> float | None:
    """Return the number that a text of some form stands for, or None."""
    pattern, sign = _compile_form(form)
    if form == POINT and (number := _parse_number(text)) is not None:
        return number
    if text.startswith("(") and text.endswith(")"):  # a negative number of accounting
        positive = _parse_with_form(text[1:-1].strip(), form)
        return None if positive is None or positive < 0 else -positive
    bare = text.replace("−", "-")
    if sign:
        before, separator, after = (part.strip() for part in bare.partition(sign))
        if not separator or (before not in ("", "-", "+") and after):
            return None
        bare = before + after
    match = pattern.fullmatch(bare.strip())
    if match is None or not (match[2] or match[3]):
        return None
    digits = "".join(c for c in match[2] if c.isdecimal())
    return float(f"{match[1]}{digits or 0}.{match[3] or 0}")


def to_dates(column: Array, form: str = "") -> Array | None:
    """Return a column as dates; None if some text is neither a date nor a missing marker.

    >>> to_dates(np.array(["31.01.2011"], dtype=object), "day/month/year").tolist()
    [datetime.datetime(2011, 1, 31, 0, 0)]
    """
    if column.dtype.kind == "M":
        return column
    if column.dtype != object:
        return None
    dates = np.full(len(column), np.datetime64("NaT"), dtype="datetime64[s]")
    for row, text in enumerate(column.tolist()):
        if text is None or text.casefold() in MISSING_MARKERS:
            continue
        date = _parse_date(text, form)
        if date is None:
            return None
        dates[row] = date
    return dates


def detect_date_form(column: Array) -> str | None:
    """Return the form in which all values of a column are dates; None if there is none.

    Where both orders are possible, a part that never varies is the day (monthly data), dots mean
    that the day is first, and otherwise the month is.

    >>> detect_date_form(np.array(["1/31/2011", "2/1/2011"], dtype=object))
    'month/day/year'
    >>> detect_date_form(np.array(["2024-05-31", "red"], dtype=object)) is None
    True
    """
    if column.dtype.kind == "M":
        return ""
    if column.dtype != object:
        return None
    texts = without_missing([text for text in dict.fromkeys(column.tolist()) if text is not None])
    forms = [form for form in ("", *DATE_FORMS) if _are_dates(texts, form)]
    if not forms:
        return None
    if forms != [*DATE_FORMS]:
        return forms[0]
    matches = [match for text in texts if (match := YEAR_LAST.fullmatch(text))]
    first, second = ({match[part] for match in matches} for part in ("first", "second_part"))
    if (len(first) == 1) != (len(second) == 1):
        return DAY_FIRST if len(first) == 1 else MONTH_FIRST
    return DAY_FIRST if all(match["mark"] == "." for match in matches) else MONTH_FIRST


def most_dates(texts: Sequence[str]) -> tuple[str, int, str] | None:
    """Return the form in which most texts are dates, how many, and one that is none ("" if all).

    None if fewer than half are dates.

    >>> most_dates(["2024-05-31", "2024-06-01", "2024-06-31"])
    ('', 2, '2024-06-31')
    """
    values = without_missing(texts)
    best = ("", 0, "")
    for form in ("", *DATE_FORMS):
        others = [text for text in values if _parse_date(text, form) is None]
        if len(values) - len(others) > best[1]:
            best = (form, len(values) - len(others), others[0] if others else "")
    return best if 2 * best[1] >= len(values) and best[1] else None


def is_ambiguous_date(texts: Sequence[str]) -> bool:
    """Return whether dates can be read with the day first as well as with the month first."""
    return all(_are_dates(without_missing(texts), form) for form in DATE_FORMS)


def _are_dates(texts: Sequence[str], form: str) -> bool:
    return all(_parse_date(text, form) is not None for text in texts)


def _parse_date(text: str, form: str) -> np.datetime64 | None:
    for pattern in (YEAR_FIRST, NAMED_MONTH, YEAR_LAST):
        if match := pattern.fullmatch(text):
            parts = _date_parts(match, form)
            return None if parts is None else _make_date(*parts, match)
    return None


def _date_parts(match: "re.Match[str]", form: str) -> tuple[int, int, int] | None:
    """Return year, month and day; None if the form does not decide them."""
    groups = match.groupdict()
    year = int(groups["year"])
    if match.re is YEAR_FIRST:
        return year, int(groups["month"]), int(groups["day"])
    if match.re is NAMED_MONTH:
        name = (groups["name"] or groups["name2"]).casefold()
        month = next((n for n, full in enumerate(MONTHS, 1) if full.startswith(name)), 0)
        month = month or (9 if name == "sept" else 0)
        return year, month, int(groups["day"] or groups["day2"])
    if form not in DATE_FORMS:
        return None
    if len(groups["year"]) == 2:
        if groups["mark"] != "/":  # 10.12.14 is as likely the number of a version
            return None
        year += 1900 if year >= TWO_DIGIT_YEAR else 2000
    first, second = int(groups["first"]), int(groups["second_part"])
    return (year, first, second) if form == MONTH_FIRST else (year, second, first)


def _make_date(year: int, month: int, day: int, match: "re.Match[str]") -> np.datetime64 | None:
    """Return a date with the time of a match, in UTC if it has an offset; None if invalid."""
    hour, minute, second = (int(match[part] or 0) for part in ("hour", "minute", "second"))
    if match["half"]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if match["half"] in "pP" else 0)
    try:
        date = np.datetime64(
            f"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}", "s"
        )
    except ValueError:
        return None
    hours, minutes = match["offset"] or "+00", int(match["minutes"] or 0)
    offset = int(hours) * 60 + (-minutes if hours.startswith("-") else minutes)
    return date - np.timedelta64(offset, "m")


def first_non_date(column: Array, form: str = "") -> str | None:
    """Return the first text that is neither a date nor a missing marker."""
    texts = without_missing([text for text in column.tolist() if text is not None])
    return next((text for text in texts if _parse_date(text, form) is None), None)
