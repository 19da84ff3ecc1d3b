"""Phrases of the demo: correct by independent rules, reproducible, split without leaks."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from decimal import Decimal
from functools import cache

import pytest

from addnorm.demo import phrases as module
from addnorm.demo.cldr import PHRASE_KINDS, Cldr
from addnorm.demo.phrases import (
    MAX_WORDS,
    MIN_OCCURRENCES,
    Phrase,
    Phrases,
    make_phrases,
    normalise,
    words_and_signs,
)
from addnorm.errors import ConfigError, ExtraError, InputError

pytest.importorskip("babel")
pytest.importorskip("num2words")

LANGUAGES = ("de", "fr", "es", "ja")
COUNT, HELD = 4000, 200


@cache
def phrases_for(to: str) -> Phrases:
    return make_phrases(to, COUNT, held_out=HELD)


def all_of(to: str, kind: str) -> list[Phrase]:
    return [p for p in phrases_for(to).train + phrases_for(to).held_out if p.kind == kind]


# ── Right ─────────────────────────────────────────────────────────────────────────────────────────

MONTHS = (
    ("January", "Januar"),
    ("February", "Februar"),
    ("March", "März"),
    ("April", "April"),
    ("May", "Mai"),
    ("June", "Juni"),
    ("July", "Juli"),
    ("August", "August"),
    ("September", "September"),
    ("October", "Oktober"),
    ("November", "November"),
    ("December", "Dezember"),
)
DAYS = dict(
    Monday="Montag",
    Tuesday="Dienstag",
    Wednesday="Mittwoch",
    Thursday="Donnerstag",
    Friday="Freitag",
    Saturday="Samstag",
    Sunday="Sonntag",
)
ONES = "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf".split()  # noqa: SIM905
TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()  # noqa: SIM905


def in_german(number: int) -> str:
    """Return a number below 10,000 in German words."""
    if number >= 1000:
        return in_german_ein(number // 1000) + "tausend" + in_german_rest(number % 1000)
    if number >= 100:
        return ONES[number // 100] + "hundert" + in_german_rest(number % 100)
    if number < 13:
        return "eins" if number == 1 else ONES[number]
    if number < 20:
        return {16: "sech", 17: "sieb"}.get(number, ONES[number - 10]) + "zehn"
    tens = TENS[number // 10 - 2]
    return f"{ONES[number % 10]}und{tens}" if number % 10 else tens


def in_german_ein(number: int) -> str:
    return ONES[number]


def in_german_rest(number: int) -> str:
    return in_german(number) if number else ""


def from_english(words: str) -> int:
    """Return the value of a number in English words."""
    small = (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen"
    )
    tens = "twenty thirty forty fifty sixty seventy eighty ninety"
    values = {word: n for n, word in enumerate(small.split())}
    values |= {word: 10 * n for n, word in enumerate(tens.split(), 2)}
    total = part = 0
    for word in re.findall(r"[a-z]+", words):
        if word == "thousand":
            total, part = 1000 * part, 0
        elif word == "hundred":
            part *= 100
        elif word != "and":
            part += values[word]
    return total + part


def clock(text: str) -> str:
    hour, minute, half = re.fullmatch(r"(\d+):(\d\d) ([AP]M)", text).groups()  # type: ignore[union-attr]
    return f"{int(hour) % 12 + 12 * (half == 'PM'):02}:{minute}"


def swapped(number: str) -> str:
    """1,234.5 as 1.234,5."""
    return number.translate(str.maketrans(",.", ".,"))


def german(phrase: Phrase) -> str | None:
    """Return the German phrase, for wordings that simple rules cover; else None."""
    text, months = phrase.english, dict(MONTHS)
    if phrase.kind == "time":
        return clock(text)
    if phrase.kind == "spelled":
        return in_german(from_english(text))
    if phrase.kind == "percent":
        return swapped(text[:-1]) + " %"
    if phrase.kind == "number" and re.fullmatch(r"[\d,.]+", text):
        return swapped(text)
    if phrase.kind == "money" and text[0] == "€":
        return swapped(text[1:]) + " €"
    if phrase.kind in ("date", "moment"):
        match = re.fullmatch(r"(?:(\w+day), )?(\w+) (\d+), (\d{4})(?:, (.*))?", text)
        if match and match[2] in months:
            day = f"{match[3]}. {months[match[2]]} {match[4]}"
            day = f"{DAYS[match[1]]}, {day}" if match[1] else day
            return f"{day}, {clock(match[5])}" if match[5] else day
        short = re.fullmatch(r"(\d+)/(\d+)/(\d\d)", text)
        if short:
            return f"{int(short[2]):02}.{int(short[1]):02}.{short[3]}"
    if phrase.kind == "relative" and "day" in text:
        count = int(re.findall(r"\d+", text)[0])
        word = "Tag" if count == 1 else "Tagen"
        return f"vor {count} {word}" if text.endswith("ago") else f"in {count} {word}"
    if phrase.kind == "choice":
        for one, two in (*MONTHS, *DAYS.items(), ("or", "oder"), ("and", "und")):
            text = re.sub(rf"\b{one}\b", two, text)
        return text
    return None


def test_german_is_what_the_rules_of_german_say() -> None:
    checked = Counter[str]()
    for phrase in phrases_for("de").train + phrases_for("de").held_out:
        expected = german(phrase)
        if expected is not None:
            checked[phrase.kind] += 1
            assert phrase.foreign == expected, phrase
    kinds = (
        "choice",
        "time",
        "spelled",
        "percent",
        "number",
        "money",
        "date",
        "moment",
        "relative",
    )
    assert set(checked) == set(kinds)
    assert checked.total() > COUNT / 3


def test_samples_in_other_languages() -> None:
    cldr = {to: Cldr(to) for to in LANGUAGES}
    span = {to: normalise(each.relative(-2, "week")(each.foreign)) for to, each in cldr.items()}
    assert span["de"] == "vor 2 Wochen" and span["fr"] == "il y a 2 semaines"
    assert span["es"] == "hace 2 semanas" and span["ja"] == "2 週間前"
    fr = cldr["fr"]
    assert normalise(fr.money(Decimal("1234.5"), "EUR", "standard")(fr.foreign)) == "1 234,50 €"
    assert normalise(fr.unit(Decimal("3.5"), "length-kilometer")(fr.foreign)) == "3,5 kilomètres"


@pytest.mark.parametrize("to", LANGUAGES)
def test_phrases_are_short_unambiguous_and_normalised(to: str) -> None:
    meanings = defaultdict(set)
    for phrase in phrases_for(to).train + phrases_for(to).held_out:
        meanings[phrase.english].add(phrase.foreign)
        for side in phrase[:2]:
            assert 0 < len(side.split()) <= MAX_WORDS and side == " ".join(side.split())
            assert not re.search(r"[a-z]-(second|day|month|meter|watt|liter)\b", side)
            assert not re.search("[\u00a0\u202f\u2009\u200e\u200f]", side)
    assert all(len(each) == 1 for each in meanings.values())
    assert len(meanings) == len(phrases_for(to).train) + len(phrases_for(to).held_out)


def test_spanish_conjunctions_follow_the_sound() -> None:
    """CLDR writes "y" before every word; before i it is "e", so such lists are left out."""
    texts = [p.foreign for p in all_of("es", "list") + all_of("es", "choice")]
    assert len(texts) > 200
    pairs = [re.split(r" (y|o) ", text)[-2:] for text in texts]
    assert {joint for joint, _ in pairs} == {"y", "o"}
    sounds = {"y": r"[ií]|hi", "o": r"h?[oó]"}
    assert not [last for joint, last in pairs if re.match(sounds[joint], last.lower())]
    assert ["y", "octubre"] in pairs
    first = [re.split(r",| (?:y|o) ", text)[0].lower() for text in texts]
    assert any(word.startswith("i") for word in first)


# ── New, but guessable ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("to", LANGUAGES)
def test_held_out_topics_are_not_in_training(to: str) -> None:
    rows, _ = module._collect(Cldr(to), round(1.1 * COUNT) + 2 * HELD, 0)
    about = defaultdict(set)
    for row in rows:
        about[row.phrase].add((row.phrase.kind, row.about))
    train = set().union(*(about[phrase] for phrase in phrases_for(to).train))
    held = set().union(*(about[phrase] for phrase in phrases_for(to).held_out))
    assert len(held) > 80 and not train & held
    assert not {p.english for p in phrases_for(to).train} & {
        p.english for p in phrases_for(to).held_out
    }


@pytest.mark.parametrize("to", LANGUAGES)
def test_no_held_out_phrase_is_part_of_a_longer_one(to: str) -> None:
    train = "\n".join(f" {p.english.replace(',', '')} " for p in phrases_for(to).train)
    held = [p.english.replace(",", "") for p in phrases_for(to).held_out if " " in p.english]
    assert len(held) > 100
    assert [english for english in held if f" {english} " in train] == []


def test_no_wording_of_a_held_out_day_is_in_training() -> None:
    def day(phrase: Phrase) -> str | None:
        long = re.fullmatch(r"(?:\w+, )?([A-Z][a-z]{2})\w* (\d+), (\d{4})", phrase.english)
        short = re.fullmatch(r"(\d+)/(\d+)/(\d\d)", phrase.english)
        if long:
            names = [english[:3] for english, _ in MONTHS]
            return f"20{long[3][2:]}-{names.index(long[1]) + 1}-{long[2]}"
        return f"20{short[3]}-{short[1]}-{short[2]}" if short else None

    train = {day(p) for p in phrases_for("de").train if p.kind == "date"} - {None}
    held = {day(p) for p in phrases_for("de").held_out if p.kind == "date"} - {None}
    assert len(held) > 5 and not train & held


@pytest.mark.parametrize("to", LANGUAGES)
def test_every_part_of_a_held_out_phrase_is_in_training(to: str) -> None:
    counts: Counter[tuple[int, str]] = Counter()
    for phrase in phrases_for(to).train:
        for side in (0, 1):
            counts.update({(side, part) for part in words_and_signs(phrase[side])})
    for phrase in phrases_for(to).held_out:
        for side in (0,) if phrase.kind == "spelled" else (0, 1):
            assert all(
                counts[side, part] >= MIN_OCCURRENCES for part in words_and_signs(phrase[side])
            ), phrase


def test_names_are_trained_and_never_held_out() -> None:
    counts = phrases_for("de").counts()
    assert counts["name"] == (127, 0)
    assert ("Germany", "Deutschland", "name") in phrases_for("de").train


def test_kinds_have_their_shares() -> None:
    counts = phrases_for("de").counts()
    assert list(counts) == list(PHRASE_KINDS)
    assert (
        abs(len(phrases_for("de").train) - COUNT) < 100
        and len(phrases_for("de").held_out) >= HELD / 2
    )
    total = sum(kind.weight for kind in PHRASE_KINDS.values())
    for name in ("date", "money", "measure", "span", "spelled", "moment"):
        assert counts[name][0] == pytest.approx(COUNT * PHRASE_KINDS[name].weight / total, rel=0.3)
        assert counts[name][1] >= 3


def row(english: str, foreign: str = "x", kind: str = "date", about: str = "") -> module._Row:
    return module._Row(about, Phrase(english, foreign, kind))


def test_a_phrase_of_two_meanings_is_left_out_and_a_repeated_one_kept_once() -> None:
    rows = [
        row("May 1", "1. Mai"),
        row("May 1", "01.05."),
        row("June", "Juni"),
        row("June", "Juni"),
    ]
    assert module._unambiguous(rows) == [row("June", "Juni")]


def test_unknown_words_move_to_training_with_their_topic() -> None:
    train = [row("in 2 days", "in 2 Tagen", about=str(n)) for n in range(MIN_OCCURRENCES)]
    known, odd = row("2 days", "2 Tagen", about="a"), row("1 day", "1 Tag", about="b")
    same = row("in days", "in Tagen", about="b")
    kept, held = module._move_unknown(train, [known, odd, same])
    assert held == [known.phrase]
    assert kept == [each.phrase for each in (*train, odd, same)]
    assert module._move_unknown(train[1:], [known])[1] == []


def test_invalid_phrases() -> None:
    long = " ".join("a" * (MAX_WORDS + 1))
    good = {
        Phrase("May", "Mai", "name"): True,
        Phrase("May", "", "name"): False,
        Phrase(long, "Mai", "name"): False,
        Phrase("May", long, "name"): False,
        Phrase(long[2:], long[2:], "name"): True,
        Phrase("May", "M05", "name"): False,
        Phrase("2.4 months", "2.4 duration-month", "measure"): False,
        Phrase("3.2 million", "3,2 Millionen", "number"): True,
        Phrase("3.2 million", "320万", "number"): False,
        Phrase("3:04 PM", "15:04", "time"): True,
    }
    assert {phrase: module._is_good(phrase, "de") for phrase in good} == good


def test_parts() -> None:
    assert words_and_signs("5.–8. Jan. 2007") == [*"5.–8.", "jan", ".", *"2007"]
    assert words_and_signs("独逸と日本") == list("独逸と日本")


# ── The same everywhere ───────────────────────────────────────────────────────────────────────────

PRINT = """
import hashlib
from addnorm.demo.phrases import make_phrases
made = make_phrases("fr", 400, held_out=30, seed=3)
print(hashlib.sha256(repr((made.train, made.held_out)).encode()).hexdigest())
"""


@pytest.mark.process
def test_phrases_do_not_depend_on_clock_locale_or_hashing() -> None:
    here = make_phrases("fr", 400, held_out=30, seed=3)
    digest = hashlib.sha256(repr((here.train, here.held_out)).encode()).hexdigest()
    setting = {"TZ": "Pacific/Kiritimati", "LANG": "ja_JP.UTF-8", "LC_ALL": "ja_JP.UTF-8"}
    there = os.environ | setting | {"LANGUAGE": "ja", "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", PRINT], env=there, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == digest, done.stderr


def test_other_seeds_give_other_phrases() -> None:
    one, two = (make_phrases("de", 300, held_out=20, seed=seed) for seed in (0, 1))
    assert one.train != two.train and one.held_out != two.held_out


# ── What a language lacks ─────────────────────────────────────────────────────────────────────────


def test_omitted_kinds_have_a_note() -> None:
    assert phrases_for("de").notes == ()
    note = "no phrases of kind 'duration': no reliable wording is known in ja."
    assert phrases_for("ja").notes == (note,)
    swahili = make_phrases("sw", 300, held_out=20)
    assert [note.split("'")[1] for note in swahili.notes] == ["duration", "spelled"]
    assert "spelled" not in swahili.counts()


def test_placeholders_are_not_phrases() -> None:
    thin = make_phrases("dyo", 300, held_out=10)
    assert any("relative" in note for note in thin.notes)
    assert not any(re.match(r"[+-]\d", p.foreign) for p in thin.train)


@pytest.mark.parametrize("to", ("pt_BR", "pt-br", "zh_Hant"))
def test_language_codes_are_normalised(to: str) -> None:
    assert make_phrases(to, 200, held_out=5).to.casefold() == to.replace("-", "_").casefold()


@pytest.mark.parametrize(
    ("to", "hint"),
    (
        ("german", r"got 'german'. Try '"),
        ("dd", r"got 'dd'. Try '"),
        ("en", r"other than English: got 'en'. Try '"),
        ("en_US", "other than English: got 'en_US'"),
        ("", r"got ''. Try 'de', 'fr', 'es' or 'ja'."),
    ),
)
def test_unknown_languages(to: str, hint: str) -> None:
    with pytest.raises(InputError, match=r"must be a code of CLDR other than English") as caught:
        make_phrases(to)
    assert re.search(hint, str(caught.value))


def test_languages_without_words() -> None:
    with pytest.raises(InputError, match=r"20 phrases or more: CLDR has \d+ for 'quc'. Try a"):
        make_phrases("quc", 20, held_out=1)


def test_counts_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="count must be 1 or more: got 0"):
        make_phrases("de", 0)
    with pytest.raises(ConfigError, match="held_out must be 1 or more: got -1"):
        make_phrases("de", held_out=-1)


@pytest.mark.parametrize("package", ("babel", "num2words"))
def test_without_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraError, match=r"pip install 'addnorm\[demo\]'"):
        make_phrases("de", 20)
