"""Phrases in English and another language, to train a translator on while one waits.

Dates, times, amounts, names and numbers in words: a small world with real grammar, in which what
is held out is new as a whole and known in its parts.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import NamedTuple

from addnorm.data.cldr import KINDS, UNITS, Cldr, Kind, Say
from addnorm.data.report import need_positive
from addnorm.data.split import split_by_source
from addnorm.errors import InputError

WORDS = 12
"""Longer phrases are left out, on either side."""
SEEN = 5
"""Every part of a held-out phrase stands in so many training phrases or more."""
MARGIN = 1.1
"""How many more to draw than to train on, for those that are left out."""
FEW = 20
"""A kind with fewer phrases is left out."""
PATIENCE = 8
"""How often to draw, for each phrase that is wanted, before a kind counts as exhausted."""
MARKS = dict.fromkeys(map(ord, "\u200e\u200f\u061c\u00ad"))
"""Signs that show nothing: direction of writing, soft hyphen."""
PLACEHOLDER = re.compile(r"^[+-]\d|\bM\d\d\b|[{}¤]|" + "|".join(UNITS.split()))
"""What stands for a word that CLDR does not have: "+3 d", "M05", "2.4 duration-month"."""
EUPHONY = {"es": re.compile(r" y (?=[ií]|hi(?!e))| o (?=h?[oó])", re.IGNORECASE)}
"""Where "and" and "or" change before a sound, and CLDR's patterns do not: e Italia, u octubre."""
EUPHONY_KINDS = ("list", "choice")
LACKS = (LookupError, ValueError, TypeError, AttributeError, NotImplementedError)
"""What babel and num2words raise where a language lacks something."""
PART = re.compile(r"[^\W\d_\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\ud7af]+|\S")
"""A word, or a single sign: a digit, a comma, a letter of a script without spaces."""


class Phrase(NamedTuple):
    """A pair, and what kind of thing it says."""

    english: str
    foreign: str
    kind: str


@dataclass(frozen=True)
class Phrases:
    """What to train on and what to hold out, and what was left out, in sentences."""

    to: str
    train: list[Phrase]
    held_out: list[Phrase]
    notes: tuple[str, ...] = ()

    def counts(self) -> dict[str, tuple[int, int]]:
        """How many phrases of each kind: to train on, held out."""
        train, held_out = (Counter(p.kind for p in part) for part in (self.train, self.held_out))
        return {kind: (train[kind], held_out[kind]) for kind in KINDS if train[kind]}


class _Row(NamedTuple):
    about: str
    phrase: Phrase


def phrases(
    to: str = "de", count: int = 30_000, *, held_out: int = 1_000, seed: int = 0
) -> Phrases:
    """About `count` phrases to train on and `held_out` new ones, the same for the same arguments.

    `to` is a language code, such as de, fr, ja or pt_BR. Phrases of one kind about the same date,
    amount or names stand on one side, in whatever wording, and a held-out phrase of two words or
    more stands in no longer one of the training part; but every word and sign of it has been seen
    there. An English phrase has one translation: those with several are left out. Needs the extra
    `demo`.
    """
    need_positive("count", count)
    need_positive("held_out", held_out)
    cldr = Cldr(to)
    rows, notes = _collect(cldr, round(MARGIN * count) + 2 * held_out, seed)
    rows = _unambiguous(rows)
    fixed = [row for row in rows if not KINDS[row.phrase.kind].new]
    free = [row for row in rows if KINDS[row.phrase.kind].new]
    if len(free) < FEW:
        raise InputError(
            f"there must be {FEW} phrases or more: CLDR has {len(free)} for {to!r}. "
            "Try a language with more speakers, such as 'de'."
        )
    share = min(0.5, 1.5 * held_out / len(free))
    split = split_by_source(
        [f"{row.phrase.kind} {row.about}" for row in free],
        share,
        labels=[row.phrase.kind for row in free],
        seed=seed,
    )
    valid = [free[n] for n in split.valid]
    new = {row.phrase.english for row in valid if " " in row.phrase.english}
    train = [free[n] for n in split.train if not _holds(free[n].phrase.english, new)]
    draw = Random(f"{seed} order")
    draw.shuffle(train)
    kept, held = _settle(fixed + train[: max(0, count - len(fixed))], valid)
    draw.shuffle(kept)
    draw.shuffle(held)
    return Phrases(str(cldr.foreign), kept, held[:held_out], tuple(notes))


def parts(text: str) -> list[str]:
    """The words and signs of a text, in lower case: what must have been seen to be translated.

    >>> parts("In 12 Tagen")
    ['in', '1', '2', 'tagen']
    """
    return PART.findall(text.lower())


def plain(text: str) -> str:
    """Ordinary spaces and no invisible marks, in composed letters (Unicode's form C).

    >>> plain("3:04\\u202fPM")
    '3:04 PM'
    """
    return " ".join(unicodedata.normalize("NFC", text).translate(MARKS).split())


def _collect(cldr: Cldr, wanted: int, seed: int) -> tuple[list[_Row], list[str]]:
    """So many different phrases, of each kind its share as far as it has them."""
    rows: list[_Row] = []
    notes, to = [], cldr.foreign
    weights = {name: kind.weight for name, kind in KINDS.items()}
    for name, kind in KINDS.items():
        share = weights[name] / sum(weights.values())
        quota = round((wanted - len(rows)) * share)
        del weights[name]
        found = _draw(cldr, name, kind, quota if kind.new else wanted, seed)
        if len(found) < min(FEW, quota):
            notes.append(f"no phrases of kind {name!r}: no sure wording is known in {to}.")
            continue
        rows += found
    return rows, notes


def _draw(cldr: Cldr, name: str, kind: Kind, wanted: int, seed: int) -> list[_Row]:
    found: dict[tuple[str, str], _Row] = {}
    drawn = kind.draw(cldr, Random(f"{seed} {name}"))
    for row in _say(cldr, name, islice(drawn, PATIENCE * wanted)):
        found.setdefault((row.phrase.english, row.phrase.foreign), row)
        if len(found) >= wanted:
            break
    return list(found.values())


def _say(cldr: Cldr, kind: str, drawn: Iterator[tuple[str, Say]]) -> Iterator[_Row]:
    """What both languages have good words for."""
    for about, say in drawn:
        try:
            english, foreign = (plain(say(locale) or "") for locale in (cldr.english, cldr.foreign))
        except LACKS:
            continue
        phrase = Phrase(english, foreign, kind)
        if _is_good(phrase, cldr.foreign.language):
            yield _Row(about, phrase)


def _is_good(phrase: Phrase, language: str) -> bool:
    """Words on both sides, not too many, no placeholders, and no grammar that CLDR leaves out."""
    sides = phrase[:2]
    if not all(0 < len(side.split()) <= WORDS for side in sides) or PLACEHOLDER.search(sides[1]):
        return False
    if phrase.kind in EUPHONY_KINDS and language in EUPHONY and EUPHONY[language].search(sides[1]):
        return False
    digits = [sorted(filter(str.isdecimal, side)) for side in sides]
    return phrase.kind != "number" or digits[0] == digits[1]


def _unambiguous(rows: list[_Row]) -> list[_Row]:
    """Each English phrase once; those that have several translations not at all."""
    meanings: dict[str, dict[str, _Row]] = defaultdict(dict)
    for row in rows:
        meanings[row.phrase.english].setdefault(row.phrase.foreign, row)
    return [next(iter(each.values())) for each in meanings.values() if len(each) == 1]


def _holds(english: str, new: set[str]) -> bool:
    """Whether a phrase has one of the new ones inside: "May 14, 2026, 3:04 PM" has "3:04 PM"."""
    words = english.split()
    ends = range(2, len(words) + 1)
    return any(" ".join(words[a:b]).rstrip(",") in new for b in ends for a in range(b - 1))


def _settle(train: list[_Row], held: list[_Row]) -> tuple[list[Phrase], list[Phrase]]:
    """Move what cannot be known from training into it, with all that is about the same thing."""
    seen = Counter(part for row in train for part in set(_needed(row.phrase)))
    lost = {
        (row.phrase.kind, row.about)
        for row in held
        if any(seen[part] < SEEN for part in _needed(row.phrase))
    }
    moved = [row for row in held if (row.phrase.kind, row.about) in lost]
    stay = [row.phrase for row in held if (row.phrase.kind, row.about) not in lost]
    return [row.phrase for row in train + moved], stay


def _needed(phrase: Phrase) -> list[tuple[str, str]]:
    """The parts on both sides; a number in words may be one new word, so only its English."""
    needed = [("english", part) for part in parts(phrase.english)]
    if phrase.kind != "spelled":
        needed += [("foreign", part) for part in parts(phrase.foreign)]
    return needed
