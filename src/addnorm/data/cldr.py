"""Things that every language has words for, drawn by chance, each with a way to say it.

The words are those of the Unicode Common Locale Data Repository (CLDR), as the package babel has
them: the same call with another locale says the same in another language. Phrases are joined by
CLDR's own patterns for lists, dates with times, and names of locales, and in no other way, so that
their grammar is as certain as CLDR's.
"""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from random import Random
from typing import Any

from addnorm.errors import InputError, require

Say = Callable[[Any], str]
"""From a locale to a phrase in its language."""
Drawn = tuple[str, Say]
"""What a phrase is about, the same in all its wordings, and how to say it."""

TERRITORIES = (
    "AR AT AU BE BG BO BR CA CH CL CN CO CU CZ DE DK EC EE EG ES FI FR GB GE GH GR HR HU ID IE IL "
    "IN IS IT JM JP KE KR LT LU LV MA MX MY NG NL NO NP NZ PE PH PK PL PT RO RS RU SA SE SI SK TH "
    "TN TR UA US UY VN ZA"
)
LANGUAGES = (
    "ar bg cs da de el en es et fa fi fr he hi hr hu id is it ja ko lt lv nb nl pl pt ro ru sk sl "
    "sr sv sw th tr uk vi zh"
)
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "AUD", "CNY", "INR", "SEK", "PLN", "BRL")
UNITS = (
    "length-kilometer length-meter length-centimeter length-mile length-foot length-inch "
    "mass-kilogram mass-gram mass-pound volume-liter area-square-meter temperature-celsius "
    "speed-kilometer-per-hour digital-megabyte digital-gigabyte power-watt energy-kilowatt-hour "
    "duration-second duration-minute duration-hour duration-day duration-week duration-month "
    "duration-year"
)
SECONDS = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 86400,
    "week": 604800,
    "month": 2592000,
    "year": 31536000,
}
"""As babel reckons them."""
DURATIONS = (
    ("year", 30, "month", 11),
    ("week", 30, "day", 6),
    ("day", 60, "hour", 23),
    ("hour", 48, "minute", 59),
    ("minute", 99, "second", 59),
)
"""A large unit, how many at most, and a small one."""
SKELETONS = ("yMMMM", "MMMMd", "yMMMEd", "yQQQQ")
DATES = ("short", "medium", "long", "long", "full", "full", *SKELETONS)
FIRST, DAYS = datetime.date(2000, 1, 1), 40 * 365
"""Dates are of forty years, so that each year is met often."""


class Cldr:
    """English and another language, and the ways to say a thing in either."""

    def __init__(self, to: str) -> None:
        self.Locale = require("babel", "demo").Locale
        self.dates, self.numbers = require("babel.dates", "demo"), require("babel.numbers", "demo")
        self.units, self.lists = require("babel.units", "demo"), require("babel.lists", "demo")
        self.words = require("num2words", "demo")
        self.known: list[str] = require("babel.localedata", "demo").locale_identifiers()
        self.english, self.foreign = self.Locale("en", "US"), self._find(to)
        self.spells = self._spelling()

    def _find(self, to: str) -> Any:
        codes = {code.casefold(): code for code in self.known if code.split("_")[0] != "en"}
        code = to.replace("-", "_").casefold()
        if code not in codes:
            close = get_close_matches(code, sorted(codes), n=3, cutoff=0.5)
            hint = ", ".join(repr(codes[each]) for each in close) or "'de', 'fr', 'es' or 'ja'"
            raise InputError(
                f"the language must be a code of CLDR other than English: got {to!r}. Try {hint}."
            )
        return self.Locale.parse(codes[code])

    def _spelling(self) -> dict[str, str]:
        """The codes that num2words has for both languages, or none if it lacks one of them."""
        both = {}
        for locale in (self.english, self.foreign):
            for code in (locale.language, f"{locale.language}_{locale.territory}"):
                if code in self.words.CONVERTER_CLASSES:
                    both[str(locale)] = code
        return both if len(both) == 2 else {}

    def list_of(self, says: list[Say], style: str = "standard") -> Say:
        return lambda to: self.lists.format_list([say(to) for say in says], style, to)

    def unit(self, value: Decimal, name: str) -> Say:
        return lambda to: self.units.format_unit(value, name, "long", locale=to)

    def money(self, value: Decimal, currency: str, form: str) -> Say:
        return lambda to: self.numbers.format_currency(value, currency, None, to, True, form)

    def percent(self, value: Decimal) -> Say:
        return lambda to: self.numbers.format_percent(value, None, to, decimal_quantization=False)

    def decimal(self, value: Decimal) -> Say:
        return lambda to: self.numbers.format_decimal(value, locale=to)

    def compact(self, value: int) -> Say:
        return lambda to: self.numbers.format_compact_decimal(
            value, format_type="long", locale=to, fraction_digits=1
        )

    def spell(self, value: int) -> Say:
        return lambda to: self.words.num2words(value, lang=self.spells[str(to)])

    def date(self, day: datetime.date, pattern: str) -> Say:
        if pattern in SKELETONS:
            return lambda to: self.dates.format_skeleton(pattern, day, fuzzy=False, locale=to)
        return lambda to: self.dates.format_date(day, pattern, locale=to)

    def time(self, time: datetime.time) -> Say:
        return lambda to: self.dates.format_time(time, "short", self.dates.UTC, to)

    def moment(self, day: Say, time: Say) -> Say:
        return lambda to: to.datetime_formats["medium"].format(time(to), day(to))

    def span(self, first: datetime.date, last: datetime.date, pattern: str) -> Say:
        return lambda to: self.dates.format_interval(first, last, pattern, fuzzy=False, locale=to)

    def relative(self, count: int, unit: str) -> Say:
        span = datetime.timedelta(seconds=count * SECONDS[unit])
        return lambda to: self.dates.format_timedelta(span, unit, 1e9, True, "long", to)


def territory(code: str) -> Say:
    return lambda to: to.territories[code]


def language(code: str) -> Say:
    return lambda to: to.languages[code]


def weekday(day: int) -> Say:
    return lambda to: to.days["stand-alone"]["wide"][day]


def month(number: int) -> Say:
    return lambda to: to.months["stand-alone"]["wide"][number]


NAMES: tuple[tuple[Callable[[Any], Say], Any], ...] = (
    (territory, TERRITORIES.split()),
    (language, LANGUAGES.split()),
    (weekday, range(7)),
    (month, range(1, 13)),
)


def draw_day(draw: Random) -> datetime.date:
    return FIRST + datetime.timedelta(days=draw.randrange(DAYS))


def draw_time(draw: Random) -> datetime.time:
    return datetime.time(draw.randrange(24), draw.randrange(60))


def draw_number(draw: Random, digits: int, decimals: int) -> Decimal:
    """At most so many digits before the point and behind it, short and long ones equally often."""
    size, places = draw.randint(1, digits), draw.randint(0, decimals)
    whole = draw.randrange(10 ** (size - 1), 10**size)
    return Decimal(whole * 10**places + draw.randrange(10**places)).scaleb(-places)


# ── The kinds ─────────────────────────────────────────────────────────────────────────────────────


def names(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """Territories, languages, weekdays, months, one by one: they cannot be guessed, only known."""
    for say, each in NAMES:
        yield from ((f"{say.__name__} {code}", say(code)) for code in each)


def choices(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """Two weekdays or two months: "Monday or Friday", "May and June"."""
    while True:
        say, each = draw.choice(NAMES[2:])
        two, style = draw.sample(each, 2), draw.choice(("standard", "or"))
        yield f"{say.__name__} {sorted(two)}", cldr.list_of([say(one) for one in two], style)


def lists(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """Territories or languages in a list: "Germany, France, and Japan"."""
    while True:
        say, each = draw.choice(NAMES[:2])
        some = draw.sample(each, draw.choice((2, 2, 3)))
        yield f"{say.__name__} {sorted(some)}", cldr.list_of([say(code) for code in some])


def locales(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """A language as it is in a territory: "German (Austria)"."""
    whole = {f"{one}_{two}" for one in LANGUAGES.split() for two in TERRITORIES.split()}
    for code in sorted(whole & set(cldr.known)):
        yield code, cldr.Locale.parse(code).get_display_name


def relative(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """From now: "in 3 days", "2 weeks ago"."""
    while True:
        unit, count, sign = draw.choice(list(SECONDS)), draw.randint(1, 99), draw.choice((-1, 1))
        yield f"{unit} {count}", cldr.relative(sign * count, unit)


def times(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """The time of day: "3:04 PM"."""
    while True:
        time = draw_time(draw)
        yield f"{time}", cldr.time(time)


def durations(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """Two units of time: "3 hours and 20 minutes"."""
    joint = cldr.foreign.list_patterns.get("standard", {}).get("2", "、")
    while "、" not in joint:  # amounts are not said with an enumeration comma between them
        large, most, small, few = draw.choice(DURATIONS)
        parts = [(draw.randint(1, most), large), (draw.randint(1, few), small)]
        says = [cldr.unit(Decimal(value), f"duration-{unit}") for value, unit in parts]
        yield f"{parts}", cldr.list_of(says)


def percents(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """A share: "12.5%"."""
    while True:
        value = draw_number(draw, 2, 2) / 100
        yield f"{value}", cldr.percent(value)


def spelled(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """A number in words: "two hundred and five"."""
    while cldr.spells:
        value = draw.randrange(10 ** draw.choice((2, 3, 3, 4, 4, 4, 4, 4)))
        yield f"{value}", cldr.spell(value)


def numbers(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """Digits, or digits and a word: "1,234.5", "3.2 million"."""
    while True:
        if draw.random() < 0.7:
            value = draw_number(draw, 6, 2)
            yield f"{value}", cldr.decimal(value)
        else:
            large = int(draw_number(draw, 3, 1) * draw.choice((10**6, 10**9)))
            yield f"{large}", cldr.compact(large)


def moments(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """A date and a time: "May 14, 2026, 3:04 PM"."""
    while True:
        day, time, pattern = draw_day(draw), draw_time(draw), draw.choice(("long", "full"))
        yield f"{day} {time}", cldr.moment(cldr.date(day, pattern), cldr.time(time))


def spans(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """From day to day: "May 14 – 17, 2026"."""
    while True:
        first, days = draw_day(draw), draw.choice((draw.randint(1, 20), draw.randint(30, 200)))
        last = first + datetime.timedelta(days=days)
        pattern = draw.choice(("yMMMd", "MMMd")) if first.year == last.year else "yMMMd"
        yield f"{first} {last}", cldr.span(first, last, pattern)


def measures(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """A number and its unit: "3.5 kilometers"."""
    units = UNITS.split()
    while True:
        value, unit = draw_number(draw, 3, 1), draw.choice(units)
        yield f"{value} {unit}", cldr.unit(value, unit)


def amounts(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """Money: "€1,234.50", "1,234.50 euros"."""
    while True:
        value = draw_number(draw, 5, 0) + Decimal(draw.randrange(100)).scaleb(-2)
        currency, form = draw.choice(CURRENCIES), draw.choice(("standard", "standard", "name"))
        yield f"{value}", cldr.money(value, currency, form)


def days(cldr: Cldr, draw: Random) -> Iterator[Drawn]:
    """A date: "Thursday, May 14, 2026", "5/14/26", "May 2026"."""
    while True:
        day, pattern = draw_day(draw), draw.choice(DATES)
        if pattern == "medium" and day.month == 5:
            pattern = "long"  # May is its own abbreviation: the English would have two meanings
        yield f"{day}", cldr.date(day, pattern)


@dataclass(frozen=True)
class Kind:
    """A sort of phrase, and how much of the whole it is to be."""

    draw: Callable[[Cldr, Random], Iterator[Drawn]]
    weight: float
    new: bool = True
    """Whether a new one can be put together from parts of others."""


KINDS: dict[str, Kind] = {
    "name": Kind(names, 1, new=False),
    "choice": Kind(choices, 1),
    "locale": Kind(locales, 1),
    "time": Kind(times, 4),
    "relative": Kind(relative, 4),
    "duration": Kind(durations, 6),
    "percent": Kind(percents, 5),
    "spelled": Kind(spelled, 12),
    "number": Kind(numbers, 7),
    "list": Kind(lists, 9),
    "moment": Kind(moments, 9),
    "span": Kind(spans, 10),
    "measure": Kind(measures, 10),
    "money": Kind(amounts, 10),
    "date": Kind(days, 14),
}
"""The kinds with few phrases stand first: what they cannot fill is left to the others."""
