"""Tokenizers: text to token ids and back, over four kinds of vocabulary, trained once and saved.

Two more kinds come with imported models: `huggingface` and `sentencepiece`.

Decoding returns exactly what was encoded, including line ends and unusual spaces. The exceptions:
text that was lower-cased by the option `lower`, and characters unknown to `characters`.
"""

import json
import random
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from addnorm.data.text.pretrained import SentencePieceFile, TokenizerFile
from addnorm.data.text.sentencepiece import BPE, Unigram
from addnorm.data.text.special_tokens import FIRST, OURS, SPECIAL_NAMES, SpecialIds
from addnorm.data.text.tokenizer_file import (
    TokenizerRecord,
    read_tokenizer_record,
    sha256,
    write_tokenizer_record,
)
from addnorm.data.text.vocabulary import Bytes, Characters, Vocabulary
from addnorm.errors import InputError, SavedError, choose

TOKENIZERS: dict[str, type[Vocabulary]] = {
    "bpe": BPE,
    "unigram": Unigram,
    "characters": Characters,
    "bytes": Bytes,
}
"""Kinds that are trained."""
IMPORTED: dict[str, type[Vocabulary]] = {
    "huggingface": TokenizerFile,
    "sentencepiece": SentencePieceFile,
}
"""Kinds that come with imported models."""

MAX_LINES = 1_000_000
"""Lines to train on; more make training slow, and the pieces no better."""


class Tokenizer:
    """Text to token ids and back; special ids (below 5, unless imported) never come from text.

    >>> tokenizer = train_tokenizer(["to be", "or not to be"], "characters", size=100)
    >>> tokenizer.encode("bee"), tokenizer.decode([1, 7, 8, 2, 0])
    ([7, 8, 8], 'be')
    >>> tokenizer.notes
    ['the vocabulary has 13 ids, not 100: the text has no more characters.']
    """

    def __init__(
        self, kind: str, vocabulary: Vocabulary, *, lower: bool = False, notes: Iterable[str] = ()
    ) -> None:
        self.kind = kind
        self.vocabulary = vocabulary
        self.lower = lower
        """Whether text is lower-cased before it is encoded."""
        self.notes = list(notes)
        """How the vocabulary differs from what was requested, in sentences."""

    @property
    def special(self) -> SpecialIds:
        """The ids of special tokens."""
        return self.vocabulary.special

    @property
    def pad(self) -> int:
        """Pads short rows."""
        return self.special.pad

    @property
    def begin(self) -> int:
        """Precedes a text, and is the first input of a decoder."""
        return self.special.begin

    @property
    def end(self) -> int:
        """Ends a sequence."""
        return self.special.end

    @property
    def unknown(self) -> int | None:
        """Replaces what has no id; None if everything has one."""
        return self.special.unknown

    @property
    def mask(self) -> int | None:
        """Replaces a masked token; None if there is none."""
        return self.special.mask

    @property
    def size(self) -> int:
        """Number of ids, including the special ones."""
        return self.vocabulary.size

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, none of them special: `<pad>` in a text is five characters."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the ids of many texts, faster than one by one."""
        _refuse_single_text(texts, "encode_many")
        checked = [_check_text(text) for text in texts]
        return self.vocabulary.encode([text.lower() for text in checked] if self.lower else checked)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special ids are skipped, an unknown character becomes �."""
        return self.vocabulary.decode(self._check_ids(ids))

    def piece(self, number: int) -> str:
        """Return how an id is displayed: a space as ▁, an invisible character by its code."""
        (number,) = self._check_ids((number,))
        named = self.special == OURS and number < FIRST
        return SPECIAL_NAMES[number] if named else self.vocabulary.name(number)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines the ids: equal for equal tokenizers."""
        facts = [
            self.kind,
            self.lower,
            self.vocabulary.settings,
            sha256(self.vocabulary.model or b""),
        ]
        return sha256(json.dumps(facts, sort_keys=True).encode())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<{self.kind} tokenizer of {self.size} ids, {self.digest[:8]}>"

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json`, and `tokenizer.model` for sentencepiece, each atomically."""
        model = self.vocabulary.model
        record = TokenizerRecord(
            kind=self.kind,
            lower=self.lower,
            notes=self.notes,
            settings=self.vocabulary.settings,
            model="" if model is None else sha256(model),
        )
        write_tokenizer_record(Path(directory), record, model)

    @staticmethod
    def load(directory: str | Path) -> "Tokenizer":
        """Return the tokenizer that `save` wrote; nothing that is read is executed.

        >>> Tokenizer.load("runs/none")
        Traceback (most recent call last):
        addnorm.errors.SavedError: there is no file 'runs/none/tokenizer.json'. Check the path.
        """
        record, model = read_tokenizer_record(Path(directory))
        where = f"the tokenizer in {str(directory)!r}"
        kinds = TOKENIZERS | IMPORTED
        if record.kind not in kinds:
            raise SavedError(f"{where} has an unknown kind: {record.kind!r}. Update addnorm.")
        try:
            vocabulary = kinds[record.kind].restore(record.settings, model)
        except ValueError as error:
            raise SavedError(f"{where} is not a valid {record.kind} tokenizer: {error}.") from None
        return Tokenizer(record.kind, vocabulary, lower=record.lower, notes=record.notes)

    def _check_ids(self, ids: Iterable[int]) -> list[int]:
        numbers = [int(number) for number in ids]
        low, high = min(numbers, default=0), max(numbers, default=0)
        if low < 0 or high >= self.size:
            invalid = low if low < 0 else high
            raise InputError(f"a token id must be 0 to {self.size - 1}: got {invalid}.")
        return numbers


def train_tokenizer(
    lines: Iterable[str],
    kind: str = "bpe",
    size: int = 8000,
    *,
    lower: bool = False,
    seed: int = 0,
    most: int = MAX_LINES,
) -> Tokenizer:
    """Return a tokenizer trained on lines of text; for a joint one, pass the lines of both sides.

    The result is the same on every run. If the text is too small for the size, the vocabulary is
    smaller, and `notes` says so.

    Parameters
    ----------
    lines
        The text to train on.
    kind
        ``bpe``, ``unigram``, ``characters`` or ``bytes``.
    size
        Number of ids, including the special ones.
    lower
        Whether text is lower-cased.
    seed
        Decides which lines are sampled.
    most
        Lines to train on; of more lines, as many are sampled.

    Examples
    --------
    >>> tokenizer = train_tokenizer(["the old man", "the old boat"], "bpe", size=300)
    >>> [tokenizer.piece(number) for number in tokenizer.encode("the boat man")]
    ['▁the', '▁boat', '▁man']
    """
    _refuse_single_text(lines, "train_tokenizer")
    train = choose("the tokenizer", kind, TOKENIZERS).train
    sample, count = _sample_lines(lines, most, seed)
    sample = [part for line in sample for part in line.split("\n") if part]
    if not sample:
        raise InputError("a tokenizer must have text to train on: all lines are empty.")
    vocabulary, notes = train([line.lower() for line in sample] if lower else sample, size)
    if count > most:
        notes = [f"the vocabulary was trained on {most} of the {count} lines.", *notes]
    return Tokenizer(kind, vocabulary, lower=lower, notes=notes)


def _sample_lines(lines: Iterable[str], most: int, seed: int) -> tuple[list[str], int]:
    """Return a uniform sample of at most `most` lines, and the number of all lines.

    Algorithm R (Vitter, 1985): the lines are read once and never all kept in memory.
    """
    generator, count = random.Random(seed), 0
    sample: list[str] = []
    for line in lines:
        count += 1
        if len(sample) < most:
            sample.append(_check_text(line))
        elif (place := generator.randrange(count)) < most:
            sample[place] = _check_text(line)
    return sample, count


def _refuse_single_text(texts: object, function: str) -> None:
    """Raise InputError for a str, which would be read character by character."""
    if isinstance(texts, str):
        raise InputError(f"{function} needs a list of texts: got a str. Try [text].")


def _check_text(text: str) -> str:
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
