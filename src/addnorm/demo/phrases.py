"""Phrases in English and another language, to train a translation model on within minutes.

Dates, times, amounts, names and numbers in words: a small domain with real grammar, in which every
held-out phrase is new, but composed of words that occur in training.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import NamedTuple

from addnorm.data.text.reading_report import check_positive
from addnorm.data.text.split import split_by_source
from addnorm.demo.cldr import PHRASE_KINDS, UNITS, Cldr, PhraseKind, Topic
from addnorm.errors import InputError, require

MAX_WORDS = 12
"""Words that a phrase may have, on either side."""
MIN_OCCURRENCES = 5
"""Training phrases that contain each word of a held-out phrase, at least."""
MARGIN = 1.1
"""Factor of phrases to draw per training phrase, as some are left out."""
MIN_PHRASES = 20
"""A kind with fewer phrases is left out."""
MAX_DRAWS = 8
"""Draws per requested phrase, after which a kind counts as exhausted."""
INVISIBLE_CHARACTERS = dict.fromkeys(map(ord, "\u200e\u200f\u061c\u00ad"))
"""Direction marks and the soft hyphen."""
PLACEHOLDER = re.compile(r"^[+-]\d|\bM\d\d\b|[{}¤]|" + "|".join(UNITS.split()))
"""Placeholders for words that CLDR lacks: "+3 d", "M05", "2.4 duration-month"."""
EUPHONY = {"es": re.compile(r" y (?=[ií]|hi(?!e))| o (?=h?[oó])", re.IGNORECASE)}
"""Where "and" and "or" change before a vowel, but not in CLDR's patterns: e Italia, u octubre."""
EUPHONY_KINDS = ("list", "choice")
MISSING_DATA_ERRORS = (LookupError, ValueError, TypeError, AttributeError, NotImplementedError)
"""What babel and num2words raise if a language lacks data."""
WORD_OR_SIGN = re.compile(r"[^\W\d_\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\ud7af]+|\S")
"""A word, or a single sign: a digit, a comma, a letter of a script without spaces."""


class Phrase(NamedTuple):
    """A sentence pair and its kind."""

    english: str
    foreign: str
    kind: str


@dataclass(frozen=True)
class Phrases:
    """Training and held-out phrases, and notes on what was left out."""

    to: str
    train: list[Phrase]
    held_out: list[Phrase]
    notes: tuple[str, ...] = ()

    @property
    def language(self) -> str:
        """The English name of the language, such as German."""
        return str(require("babel", "demo").Locale.parse(self.to).get_display_name("en"))

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the number of phrases of each kind: training, held out."""
        train, held_out = (Counter(p.kind for p in part) for part in (self.train, self.held_out))
        return {kind: (train[kind], held_out[kind]) for kind in PHRASE_KINDS if train[kind]}


class _Row(NamedTuple):
    about: str
    phrase: Phrase


def make_phrases(
    to: str = "de", count: int = 30_000, *, held_out: int = 1_000, seed: int = 0
) -> Phrases:
    """Return about `count` training phrases and `held_out` new ones; needs the extra `demo`.

    Phrases of one kind about the same date, amount or names are on one side of the split, in all
    their wordings, and a held-out phrase of two words or more is not part of a longer training
    phrase; but each of its words and signs occurs in training. An English phrase has one
    translation: those with several are left out.

    Parameters
    ----------
    to
        A language code, such as de, fr, ja or pt_BR.
    count
        Training phrases.
    held_out
        Held-out phrases.
    seed
        Decides which phrases are drawn; the result is the same for the same arguments.
    """
    check_positive("count", count)
    check_positive("held_out", held_out)
    cldr = Cldr(to)
    rows, notes = _collect(cldr, round(MARGIN * count) + 2 * held_out, seed)
    rows = _unambiguous(rows)
    fixed = [row for row in rows if not PHRASE_KINDS[row.phrase.kind].new]
    free = [row for row in rows if PHRASE_KINDS[row.phrase.kind].new]
    if len(free) < MIN_PHRASES:
        raise InputError(
            f"there must be {MIN_PHRASES} phrases or more: CLDR has {len(free)} for {to!r}. "
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
    held_out_texts = {row.phrase.english for row in valid if " " in row.phrase.english}
    train = [free[n] for n in split.train if not _contains(free[n].phrase.english, held_out_texts)]
    random = Random(f"{seed} order")
    random.shuffle(train)
    kept, held = _move_unknown(fixed + train[: max(0, count - len(fixed))], valid)
    random.shuffle(kept)
    random.shuffle(held)
    return Phrases(str(cldr.foreign), kept, held[:held_out], tuple(notes))


def words_and_signs(text: str) -> list[str]:
    """Return the words and signs of a text, in lower case.

    >>> words_and_signs("In 12 Tagen")
    ['in', '1', '2', 'tagen']
    """
    return WORD_OR_SIGN.findall(text.lower())


def normalise(text: str) -> str:
    """Return a text with ordinary spaces, no invisible marks, and in Unicode's form C.

    >>> normalise("3:04\\u202fPM")
    '3:04 PM'
    """
    return " ".join(unicodedata.normalize("NFC", text).translate(INVISIBLE_CHARACTERS).split())


def _collect(cldr: Cldr, count: int, seed: int) -> tuple[list[_Row], list[str]]:
    """Return `count` distinct phrases, of each kind its share as far as it has enough."""
    rows: list[_Row] = []
    notes, to = [], cldr.foreign
    weights = {name: kind.weight for name, kind in PHRASE_KINDS.items()}
    for name, kind in PHRASE_KINDS.items():
        share = weights[name] / sum(weights.values())
        quota = round((count - len(rows)) * share)
        del weights[name]
        drawn = _draw_kind(cldr, name, kind, quota if kind.new else count, seed)
        if len(drawn) < min(MIN_PHRASES, quota):
            notes.append(f"no phrases of kind {name!r}: no reliable wording is known in {to}.")
            continue
        rows += drawn
    return rows, notes


def _draw_kind(cldr: Cldr, name: str, kind: PhraseKind, count: int, seed: int) -> list[_Row]:
    rows: dict[tuple[str, str], _Row] = {}
    topics = kind.draw(cldr, Random(f"{seed} {name}"))
    for row in _word_topics(cldr, name, islice(topics, MAX_DRAWS * count)):
        rows.setdefault((row.phrase.english, row.phrase.foreign), row)
        if len(rows) >= count:
            break
    return list(rows.values())


def _word_topics(cldr: Cldr, kind: str, topics: Iterator[Topic]) -> Iterator[_Row]:
    """Yield the topics that have a good wording in both languages."""
    for about, wording in topics:
        try:
            english, foreign = (
                normalise(wording(locale) or "") for locale in (cldr.english, cldr.foreign)
            )
        except MISSING_DATA_ERRORS:
            continue
        phrase = Phrase(english, foreign, kind)
        if _is_good(phrase, cldr.foreign.language):
            yield _Row(about, phrase)


def _is_good(phrase: Phrase, language: str) -> bool:
    """Return whether a phrase is short and complete, and its grammar is within CLDR's."""
    sides = phrase[:2]
    if not all(0 < len(side.split()) <= MAX_WORDS for side in sides):
        return False
    if PLACEHOLDER.search(sides[1]):
        return False
    if phrase.kind in EUPHONY_KINDS and language in EUPHONY and EUPHONY[language].search(sides[1]):
        return False
    digits = [sorted(filter(str.isdecimal, side)) for side in sides]
    return phrase.kind != "number" or digits[0] == digits[1]


def _unambiguous(rows: list[_Row]) -> list[_Row]:
    """Return each English phrase once, without those that have several translations."""
    translations: dict[str, dict[str, _Row]] = defaultdict(dict)
    for row in rows:
        translations[row.phrase.english].setdefault(row.phrase.foreign, row)
    return [next(iter(each.values())) for each in translations.values() if len(each) == 1]


def _contains(english: str, others: set[str]) -> bool:
    """Return whether a phrase contains another: "May 14, 2026, 3:04 PM" contains "3:04 PM"."""
    words = english.split()
    ends = range(2, len(words) + 1)
    return any(" ".join(words[a:b]).rstrip(",") in others for b in ends for a in range(b - 1))


def _move_unknown(train: list[_Row], held: list[_Row]) -> tuple[list[Phrase], list[Phrase]]:
    """Move held-out phrases with words rare in training into it, with all on the same topic."""
    counts = Counter(part for row in train for part in set(_required_parts(row.phrase)))
    unknown = {
        (row.phrase.kind, row.about)
        for row in held
        if any(counts[part] < MIN_OCCURRENCES for part in _required_parts(row.phrase))
    }
    moved = [row for row in held if (row.phrase.kind, row.about) in unknown]
    kept = [row.phrase for row in held if (row.phrase.kind, row.about) not in unknown]
    return [row.phrase for row in train + moved], kept


def _required_parts(phrase: Phrase) -> list[tuple[str, str]]:
    """Return the parts of both sides.

    Of a number in words only the English: in the other language it may be one new word.
    """
    parts = [("english", part) for part in words_and_signs(phrase.english)]
    if phrase.kind != "spelled":
        parts += [("foreign", part) for part in words_and_signs(phrase.foreign)]
    return parts
