"""Text to token ids and back: one interface to four spellings, trained once and saved.

What is decoded is what was encoded, character for character, line ends and odd spaces too. The
exceptions: text in lower case, if that was asked for, and characters that `characters` never saw.
"""

import json
import random
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from addnorm.data.pieces import BPE, Unigram
from addnorm.data.record import Record, read_record, sha256, write_record
from addnorm.data.special import BEGIN, END, FIRST, MASK, NAMES, PAD, UNKNOWN
from addnorm.data.spelling import Bytes, Characters, Spelling
from addnorm.errors import InputError, SavedError, choose

TOKENIZERS: dict[str, type[Spelling]] = {
    "bpe": BPE,
    "unigram": Unigram,
    "characters": Characters,
    "bytes": Bytes,
}

MOST_LINES = 1_000_000
"""Lines to learn from; more make training slow, and the pieces no better."""


class Tokenizer:
    """Text to token ids and back; ids below 5 are special and never come from text.

    >>> tokenizer = train_tokenizer(["to be", "or not to be"], "characters", size=100)
    >>> tokenizer.encode("bee"), tokenizer.decode([1, 7, 8, 2, 0])
    ([7, 8, 8], 'be')
    >>> tokenizer.notes
    ['the vocabulary has 13 ids, not 100: the text holds no more characters.']
    """

    pad, begin, end, unknown, mask = PAD, BEGIN, END, UNKNOWN, MASK

    def __init__(
        self, kind: str, spelling: Spelling, *, lower: bool = False, notes: Iterable[str] = ()
    ) -> None:
        self.kind = kind
        self.spelling = spelling
        self.lower = lower
        """Whether text is put into lower case before it is encoded."""
        self.notes = list(notes)
        """What training decided otherwise than asked, in sentences."""

    @property
    def size(self) -> int:
        """Number of ids, the special ones among them."""
        return self.spelling.size

    def encode(self, text: str) -> list[int]:
        """The ids of a text, none of them special: `<pad>` in a text is five characters."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of many texts, faster than one by one."""
        checked = [_need_text(text) for text in texts]
        return self.spelling.spell([text.lower() for text in checked] if self.lower else checked)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; special ones are skipped, an unknown character is shown as �."""
        return self.spelling.join(self._need_ids(ids))

    def piece(self, number: int) -> str:
        """How an id is written in a picture: a space as ▁, what cannot be seen by its code."""
        (number,) = self._need_ids((number,))
        return NAMES[number] if number < FIRST else self.spelling.name(number)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 of all that decides the ids: two tokenizers with the same digest are equal."""
        facts = [self.kind, self.lower, self.spelling.settings, sha256(self.spelling.model or b"")]
        return sha256(json.dumps(facts).encode())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<{self.kind} tokenizer of {self.size} ids, {self.digest[:8]}>"

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json`, and `tokenizer.model` for sentencepiece, each of them whole."""
        model = self.spelling.model
        record = Record(
            kind=self.kind,
            lower=self.lower,
            notes=self.notes,
            settings=self.spelling.settings,
            model="" if model is None else sha256(model),
            digest=self.digest,
        )
        write_record(Path(directory), record, model)

    @staticmethod
    def load(directory: str | Path) -> "Tokenizer":
        """The tokenizer that `save` wrote; nothing that is read is executed.

        >>> Tokenizer.load("runs/none")
        Traceback (most recent call last):
        addnorm.errors.SavedError: there is no file 'runs/none/tokenizer.json'. Check the path.
        """
        record, model = read_record(Path(directory))
        where = f"the tokenizer in {str(directory)!r}"
        if record.kind not in TOKENIZERS:
            raise SavedError(f"{where} is of no known kind: {record.kind!r}. Update addnorm.")
        try:
            spelling = TOKENIZERS[record.kind].restore(record.settings, model)
        except ValueError as error:
            raise SavedError(f"{where} is no {record.kind} tokenizer: {error}.") from None
        tokenizer = Tokenizer(record.kind, spelling, lower=record.lower, notes=record.notes)
        if tokenizer.digest != record.digest:
            raise SavedError(f"{where} is not what was saved: its digest differs. Use a backup.")
        return tokenizer

    def _need_ids(self, ids: Iterable[int]) -> list[int]:
        numbers = [int(number) for number in ids]
        low, high = min(numbers, default=0), max(numbers, default=0)
        if low < 0 or high >= self.size:
            wrong = low if low < 0 else high
            raise InputError(f"a token id must be 0 to {self.size - 1}: got {wrong}.")
        return numbers


def train_tokenizer(
    lines: Iterable[str],
    kind: str = "bpe",
    size: int = 8000,
    *,
    lower: bool = False,
    seed: int = 0,
    most: int = MOST_LINES,
) -> Tokenizer:
    """Learn a vocabulary from lines of text; for a joint one, give the lines of both sides.

    A text too small for the size asked gives as many ids as it can, and `notes` says so. Of more
    than `most` lines, so many are drawn by the seed. The result is the same on every run.

    >>> tokenizer = train_tokenizer(["the old man", "the old boat"], "bpe", size=300)
    >>> [tokenizer.piece(number) for number in tokenizer.encode("the boat man")]
    ['▁the', '▁boat', '▁man']
    """
    train = choose("the tokenizer", kind, TOKENIZERS).train
    drawn, count = _draw(lines, most, seed)
    drawn = [part for line in drawn for part in line.split("\n") if part]
    if not drawn:
        raise InputError("a tokenizer must have text to learn from: all lines are empty.")
    spelling, notes = train([line.lower() for line in drawn] if lower else drawn, size)
    if count > most:
        notes = [f"the vocabulary was learnt from {most} of the {count} lines.", *notes]
    return Tokenizer(kind, spelling, lower=lower, notes=notes)


def _draw(lines: Iterable[str], most: int, seed: int) -> tuple[list[str], int]:
    """At most so many of the lines, each as likely as any other, and how many there were.

    Algorithm R (Vitter, 1985): the lines are read once and never all held.
    """
    generator, count = random.Random(seed), 0
    drawn: list[str] = []
    for line in lines:
        count += 1
        if len(drawn) < most:
            drawn.append(_need_text(line))
        elif (place := generator.randrange(count)) < most:
            drawn[place] = _need_text(line)
    return drawn, count


def _need_text(text: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"text must be a string: got {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text must be Unicode: character {error.start + 1} is half of a surrogate pair. "
            "Read the file as UTF-8."
        ) from None
    return text
