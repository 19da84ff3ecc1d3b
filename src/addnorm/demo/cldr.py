"""Random dates, amounts, names and numbers, each with its wording in any language of CLDR.

The wordings are those of the Unicode Common Locale Data Repository (CLDR), as in the package babel:
the same call with another locale gives the same phrase in another language. Phrases are only
composed with CLDR's own patterns for lists, dates with times, and names of locales, so that their
grammar is as reliable as CLDR's.
"""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from random import Random
from typing import Any

from addnorm.errors import InputError, require

Wording = Callable[[Any], str]
"""A function from a locale to a phrase in its language."""
Topic = tuple[str, Wording]
"""What a phrase is about, the same in all its wordings, and its wording."""

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
"""Lengths of the units as babel defines them."""
DURATIONS = (
    ("year", 30, "month", 11),
    ("week", 30, "day", 6),
    ("day", 60, "hour", 23),
    ("hour", 48, "minute", 59),
    ("minute", 99, "second", 59),
)
"""A large unit and a small one, each with its largest count."""
SKELETONS = ("yMMMM", "MMMMd", "yMMMEd", "yQQQQ")
DATES = ("short", "medium", "long", "long", "full", "full", *SKELETONS)
FIRST_DAY, DAYS = datetime.date(2000, 1, 1), 40 * 365
"""Dates are within forty years, so that each year is frequent."""


class Cldr:
    """The locale data of English and another language, and wordings in both."""

    def __init__(self, to: str) -> None:
        self.Locale = require("babel", "demo").Locale
        self.dates, self.numbers = require("babel.dates", "demo"), require("babel.numbers", "demo")
        self.units, self.lists = require("babel.units", "demo"), require("babel.lists", "demo")
        self.num2words = require("num2words", "demo")
        self.known: list[str] = require("babel.localedata", "demo").locale_identifiers()
        self.english, self.foreign = self.Locale("en", "US"), self._find_locale(to)
        self.number_languages = self._number_languages()

    def _find_locale(self, to: str) -> Any:
        codes = {code.casefold(): code for code in self.known if code.split("_")[0] != "en"}
        code = to.replace("-", "_").casefold()
        if code not in codes:
            close = get_close_matches(code, sorted(codes), n=3, cutoff=0.5)
            hint = ", ".join(repr(codes[each]) for each in close) or "'de', 'fr', 'es' or 'ja'"
            raise InputError(
                f"the language must be a code of CLDR other than English: got {to!r}. Try {hint}."
            )
        return self.Locale.parse(codes[code])

    def _number_languages(self) -> dict[str, str]:
        """Return the codes of both languages in num2words; empty if it lacks one of them."""
        both = {}
        for locale in (self.english, self.foreign):
            for code in (locale.language, f"{locale.language}_{locale.territory}"):
                if code in self.num2words.CONVERTER_CLASSES:
                    both[str(locale)] = code
        return both if len(both) == 2 else {}

    def list_of(self, wordings: list[Wording], style: str = "standard") -> Wording:
        return lambda to: self.lists.format_list([wording(to) for wording in wordings], style, to)

    def unit(self, value: Decimal, name: str) -> Wording:
        return lambda to: self.units.format_unit(value, name, "long", locale=to)

    def money(self, value: Decimal, currency: str, form: str) -> Wording:
        return lambda to: self.numbers.format_currency(value, currency, None, to, True, form)

    def percent(self, value: Decimal) -> Wording:
        return lambda to: self.numbers.format_percent(value, None, to, decimal_quantization=False)

    def decimal(self, value: Decimal) -> Wording:
        return lambda to: self.numbers.format_decimal(value, locale=to)

    def compact(self, value: int) -> Wording:
        return lambda to: self.numbers.format_compact_decimal(
            value, format_type="long", locale=to, fraction_digits=1
        )

    def spell(self, value: int) -> Wording:
        return lambda to: self.num2words.num2words(value, lang=self.number_languages[str(to)])

    def date(self, day: datetime.date, pattern: str) -> Wording:
        if pattern in SKELETONS:
            return lambda to: self.dates.format_skeleton(pattern, day, fuzzy=False, locale=to)
        return lambda to: self.dates.format_date(day, pattern, locale=to)

    def time(self, time: datetime.time) -> Wording:
        return lambda to: self.dates.format_time(time, "short", self.dates.UTC, to)

    def moment(self, day: Wording, time: Wording) -> Wording:
        return lambda to: to.datetime_formats["medium"].format(time(to), day(to))

    def span(self, first: datetime.date, last: datetime.date, pattern: str) -> Wording:
        return lambda to: self.dates.format_interval(first, last, pattern, fuzzy=False, locale=to)

    def relative(self, count: int, unit: str) -> Wording:
        span = datetime.timedelta(seconds=count * SECONDS[unit])
        return lambda to: self.dates.format_timedelta(span, unit, 1e9, True, "long", to)


def territory(code: str) -> Wording:
    return lambda to: to.territories[code]


def language(code: str) -> Wording:
    return lambda to: to.languages[code]


def weekday(day: int) -> Wording:
    return lambda to: to.days["stand-alone"]["wide"][day]


def month(number: int) -> Wording:
    return lambda to: to.months["stand-alone"]["wide"][number]


NAME_GROUPS: tuple[tuple[Callable[[Any], Wording], Any], ...] = (
    (territory, TERRITORIES.split()),
    (language, LANGUAGES.split()),
    (weekday, range(7)),
    (month, range(1, 13)),
)


def draw_day(random: Random) -> datetime.date:
    return FIRST_DAY + datetime.timedelta(days=random.randrange(DAYS))


def draw_time(random: Random) -> datetime.time:
    return datetime.time(random.randrange(24), random.randrange(60))


def draw_number(random: Random, digits: int, decimals: int) -> Decimal:
    """Return a number with at most `digits` digits and `decimals` decimal places.

    All lengths are equally frequent.
    """
    size, places = random.randint(1, digits), random.randint(0, decimals)
    whole = random.randrange(10 ** (size - 1), 10**size)
    return Decimal(whole * 10**places + random.randrange(10**places)).scaleb(-places)


# ── The kinds ─────────────────────────────────────────────────────────────────────────────────────


def draw_names(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """Yield single territories, languages, weekdays and months, which must be memorised."""
    for wording, codes in NAME_GROUPS:
        yield from ((f"{wording.__name__} {code}", wording(code)) for code in codes)


def draw_choices(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """Two weekdays or two months: "Monday or Friday", "May and June"."""
    while True:
        wording, codes = random.choice(NAME_GROUPS[2:])
        two, style = random.sample(codes, 2), random.choice(("standard", "or"))
        about = f"{wording.__name__} {sorted(two)}"
        yield about, cldr.list_of([wording(code) for code in two], style)


def draw_lists(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """Territories or languages in a list: "Germany, France, and Japan"."""
    while True:
        wording, codes = random.choice(NAME_GROUPS[:2])
        some = random.sample(codes, random.choice((2, 2, 3)))
        yield f"{wording.__name__} {sorted(some)}", cldr.list_of([wording(code) for code in some])


def draw_locales(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """A language in a territory: "German (Austria)"."""
    codes = {f"{one}_{two}" for one in LANGUAGES.split() for two in TERRITORIES.split()}
    for code in sorted(codes & set(cldr.known)):
        yield code, cldr.Locale.parse(code).get_display_name


def draw_relative(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """Relative to now: "in 3 days", "2 weeks ago"."""
    while True:
        unit, count, sign = (
            random.choice(list(SECONDS)),
            random.randint(1, 99),
            random.choice((-1, 1)),
        )
        yield f"{unit} {count}", cldr.relative(sign * count, unit)


def draw_times(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """The time of day: "3:04 PM"."""
    while True:
        time = draw_time(random)
        yield f"{time}", cldr.time(time)


def draw_durations(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """Two units of time: "3 hours and 20 minutes"."""
    pattern = cldr.foreign.list_patterns.get("standard", {}).get("2", "、")
    while "、" not in pattern:  # an enumeration comma does not join amounts
        large, most_large, small, most_small = random.choice(DURATIONS)
        parts = [(random.randint(1, most_large), large), (random.randint(1, most_small), small)]
        wordings = [cldr.unit(Decimal(value), f"duration-{unit}") for value, unit in parts]
        yield f"{parts}", cldr.list_of(wordings)


def draw_percents(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """A share: "12.5%"."""
    while True:
        value = draw_number(random, 2, 2) / 100
        yield f"{value}", cldr.percent(value)


def draw_spelled(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """A number in words: "two hundred and five"."""
    while cldr.number_languages:
        value = random.randrange(10 ** random.choice((2, 3, 3, 4, 4, 4, 4, 4)))
        yield f"{value}", cldr.spell(value)


def draw_numbers(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """Digits, or digits and a word: "1,234.5", "3.2 million"."""
    while True:
        if random.random() < 0.7:
            value = draw_number(random, 6, 2)
            yield f"{value}", cldr.decimal(value)
        else:
            large = int(draw_number(random, 3, 1) * random.choice((10**6, 10**9)))
            yield f"{large}", cldr.compact(large)


def draw_moments(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """A date and a time: "May 14, 2026, 3:04 PM"."""
    while True:
        day, time, pattern = draw_day(random), draw_time(random), random.choice(("long", "full"))
        yield f"{day} {time}", cldr.moment(cldr.date(day, pattern), cldr.time(time))


def draw_spans(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """From one day to another: "May 14 – 17, 2026"."""
    while True:
        first, days = (
            draw_day(random),
            random.choice((random.randint(1, 20), random.randint(30, 200))),
        )
        last = first + datetime.timedelta(days=days)
        pattern = random.choice(("yMMMd", "MMMd")) if first.year == last.year else "yMMMd"
        yield f"{first} {last}", cldr.span(first, last, pattern)


def draw_measures(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """A number and its unit: "3.5 kilometers"."""
    units = UNITS.split()
    while True:
        value, unit = draw_number(random, 3, 1), random.choice(units)
        yield f"{value} {unit}", cldr.unit(value, unit)


def draw_amounts(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """Money: "€1,234.50", "1,234.50 euros"."""
    while True:
        value = draw_number(random, 5, 0) + Decimal(random.randrange(100)).scaleb(-2)
        currency, form = random.choice(CURRENCIES), random.choice(("standard", "standard", "name"))
        yield f"{value}", cldr.money(value, currency, form)


def draw_days(cldr: Cldr, random: Random) -> Iterator[Topic]:
    """A date: "Thursday, May 14, 2026", "5/14/26", "May 2026"."""
    while True:
        day, pattern = draw_day(random), random.choice(DATES)
        if pattern == "medium" and day.month == 5:
            pattern = "long"  # "May" is its own abbreviation: the English would be ambiguous
        yield f"{day}", cldr.date(day, pattern)


@dataclass(frozen=True)
class PhraseKind:
    """A kind of phrase, and its weight in the corpus."""

    draw: Callable[[Cldr, Random], Iterator[Topic]]
    weight: float
    new: bool = True
    """Whether a new phrase can be composed of parts of others."""


PHRASE_KINDS: dict[str, PhraseKind] = {
    "name": PhraseKind(draw_names, 1, new=False),
    "choice": PhraseKind(draw_choices, 1),
    "locale": PhraseKind(draw_locales, 1),
    "time": PhraseKind(draw_times, 4),
    "relative": PhraseKind(draw_relative, 4),
    "duration": PhraseKind(draw_durations, 6),
    "percent": PhraseKind(draw_percents, 5),
    "spelled": PhraseKind(draw_spelled, 12),
    "number": PhraseKind(draw_numbers, 7),
    "list": PhraseKind(draw_lists, 9),
    "moment": PhraseKind(draw_moments, 9),
    "span": PhraseKind(draw_spans, 10),
    "measure": PhraseKind(draw_measures, 10),
    "money": PhraseKind(draw_amounts, 10),
    "date": PhraseKind(draw_days, 14),
}
"""Kinds with few phrases come first: the others fill what they cannot."""
