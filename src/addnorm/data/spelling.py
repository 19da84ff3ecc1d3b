"""The four ways to spell a text in numbers: BPE, unigram, characters, bytes.

A spelling knows nothing of lower case, files or checks: `Tokenizer` does that for all of them.
"""

import io
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import sentencepiece

from addnorm.data.special import BEGIN, END, FIRST, MASK, NAMES, PAD, UNKNOWN
from addnorm.errors import ConfigError, InputError

SPACE = "▁"
"""How a space is written in a picture, and by sentencepiece inside a piece."""
LOST = "\N{REPLACEMENT CHARACTER}"
"""What is shown for an unknown character, and for bytes that make none."""
RESERVED = "▁▅"
"""Characters with a meaning of their own in sentencepiece, which learns nothing from them."""
LONGEST_LINE = 2000
"""Characters that sentencepiece learns from at a time; a longer line comes in parts."""
SMALLEST = FIRST + 256 + 1
"""Ids that a vocabulary of pieces cannot do without: special ones, bytes, and one piece."""


class Spelling(ABC):
    """One way to turn text into ids and back."""

    size: int
    """Number of ids, the special ones among them."""
    model: bytes | None = None
    """What belongs into a file of its own."""

    @classmethod
    @abstractmethod
    def train(cls, lines: list[str], size: int) -> tuple[Self, list[str]]:
        """Learn at most `size` ids from lines; also returns what was decided otherwise than asked.

        None of the lines holds a line end, and at least one holds a character.
        """

    @classmethod
    @abstractmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        """The spelling with these settings and this model; ValueError if there can be none."""

    @property
    def settings(self) -> dict[str, object]:
        """What `restore` needs besides the model."""
        return {}

    @abstractmethod
    def spell(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""

    @abstractmethod
    def join(self, ids: list[int]) -> str:
        """The text of some ids; special ones are skipped, unknown ones shown."""

    @abstractmethod
    def name(self, number: int) -> str:
        """How an ordinary id is written in a picture."""


class Pieces(Spelling):
    """Pieces of words, by sentencepiece; a character without a piece is spelled in bytes.

    Every line that is not empty is given a space before its first character, and loses it again
    when decoded, so that a word is spelled alike wherever it stands. Sentencepiece's own prefix
    would know only the first line of a text.
    """

    kind: str

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = self.processor.vocab_size()

    @classmethod
    def train(cls, lines: list[str], size: int) -> tuple[Self, list[str]]:
        if size < SMALLEST:
            raise ConfigError(
                f"a {cls.kind} vocabulary must have {SMALLEST} ids or more ({FIRST} special, 256 "
                f"bytes, 1 piece): got {size}. Try 8000, or the bytes tokenizer."
            )
        lines = [_indent(part) for line in lines for part in _parts(line)]
        lines, notes = _leave_rare(lines, size - SMALLEST + 1)
        spelling = cls(_train_sentencepiece(lines, cls.kind, size))
        return spelling, notes + _say_smaller(spelling.size, size, "pieces")

    @classmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        if settings or model is None:
            raise ValueError("it needs a model file and no settings")
        try:
            spelling = cls(model)
        except RuntimeError:
            raise ValueError("its model file is not sentencepiece's") from None
        names = tuple(spelling.processor.id_to_piece(number) for number in range(FIRST))
        if names != NAMES or spelling.processor.id_to_piece(FIRST) != "<0x00>":
            raise ValueError("its model file has other special ids")
        return spelling

    def spell(self, texts: list[str]) -> list[list[int]]:
        texts = [_indent(text) for text in texts]
        ids: list[list[int]] = self.processor.encode(texts, num_threads=-1)
        for row, text in enumerate(texts):
            if SPACE in text:
                ids[row] = self._spell_around(text)
        return ids

    def _spell_around(self, text: str) -> list[int]:
        """The ids of a text that holds ▁ itself, which sentencepiece would take for a space."""
        first, *rest = self.processor.encode(text.split(SPACE))
        ids: list[int] = list(first)
        for part in rest:
            ids += [FIRST + byte for byte in SPACE.encode()]
            ids += part
        return ids

    def join(self, ids: list[int]) -> str:
        text: str = self.processor.decode(ids)
        return re.sub("^ ", "", text, flags=re.MULTILINE)

    def name(self, number: int) -> str:
        return self.processor.id_to_piece(number)


class BPE(Pieces):
    """Byte-pair encoding: the most frequent neighbours are joined, again and again.

    Sennrich, Haddow and Birch (2016), §3.2, as sentencepiece does it (Kudo and Richardson, 2018).
    """

    kind = "bpe"


class Unigram(Pieces):
    """Of all ways to cut a text, the most probable, each piece having its own probability.

    Kudo (2018), §3.2. Slower to train than BPE, and faster to encode.
    """

    kind = "unigram"


class Characters(Spelling):
    """One id for each character seen in training, and for the line end; any other is unknown."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.size = FIRST + len(characters)
        self.numbers = {character: FIRST + n for n, character in enumerate(characters)}
        self.shown = ["", "", "", LOST, "", *characters]

    @classmethod
    def train(cls, lines: list[str], size: int) -> tuple[Self, list[str]]:
        if size <= FIRST:
            raise ConfigError(
                f"a characters vocabulary must have {FIRST + 1} ids or more ({FIRST} special, "
                f"1 character): got {size}. Try 1000."
            )
        counts = Counter("\n".join(lines) + "\n")
        kept = [character for character, _ in _by_frequency(counts)][: size - FIRST]
        spelling = cls("".join(sorted(kept)))
        if len(kept) == len(counts):
            return spelling, _say_smaller(spelling.size, size, "characters")
        return spelling, [
            f"{len(counts) - len(kept)} of the {len(counts)} different characters have no id and "
            f"will be unknown: there was room for {len(kept)}."
        ]

    @classmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        characters = settings.get("characters")
        if set(settings) != {"characters"} or not isinstance(characters, str) or model is not None:
            raise ValueError("it needs its characters and no model file")
        if len(set(characters)) != len(characters):
            raise ValueError("its characters are not all different")
        return cls(characters)

    @property
    def settings(self) -> dict[str, object]:
        return {"characters": self.characters}

    def spell(self, texts: list[str]) -> list[list[int]]:
        numbers = self.numbers
        return [[numbers.get(character, UNKNOWN) for character in text] for text in texts]

    def join(self, ids: list[int]) -> str:
        return "".join([self.shown[number] for number in ids])

    def name(self, number: int) -> str:
        character = self.shown[number]
        if character == " ":
            return SPACE
        return character if character.isprintable() else f"<U+{ord(character):04X}>"


class Bytes(Spelling):
    """One id for each byte of UTF-8: nothing is learnt and nothing unknown (Xue et al., 2022)."""

    size = FIRST + 256

    @classmethod
    def train(cls, lines: list[str], size: int) -> tuple[Self, list[str]]:
        note = f"the vocabulary has {cls.size} ids, not {size}: there are 256 bytes."
        return cls(), [] if size == cls.size else [note]

    @classmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        if settings or model is not None:
            raise ValueError("it needs neither settings nor a model file")
        return cls()

    def spell(self, texts: list[str]) -> list[list[int]]:
        return [[FIRST + byte for byte in text.encode()] for text in texts]

    def join(self, ids: list[int]) -> str:
        lost = [FIRST + byte for byte in LOST.encode()]
        spelled = (lost if number == UNKNOWN else (number,) for number in ids)
        numbers = [number - FIRST for part in spelled for number in part if number >= FIRST]
        return bytes(numbers).decode(errors="replace")

    def name(self, number: int) -> str:
        character = chr(number - FIRST)
        if character == " ":
            return SPACE
        seen = character.isascii() and character.isprintable()
        return character if seen else f"<0x{number - FIRST:02X}>"


def _indent(text: str) -> str:
    """A space before the first character of every line that has one."""
    if "\n" not in text:
        return " " + text if text else ""
    return re.sub("^(?=[^\n])", " ", text, flags=re.MULTILINE)


def _parts(line: str) -> Iterator[str]:
    """A line in parts that sentencepiece will not leave out for being too long."""
    for start in range(0, len(line), LONGEST_LINE):
        yield line[start : start + LONGEST_LINE]


def _by_frequency(counts: Counter[str]) -> Sequence[tuple[str, int]]:
    """Characters and their counts, the most frequent first, and in a fixed order among equals."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _leave_rare(lines: list[str], room: int) -> tuple[list[str], list[str]]:
    """The lines cut at their rarest characters, if those are too many, and a note that says so.

    At most half of the room goes to single characters, or writing that has thousands of them would
    leave none for words. Those left out are spelled in bytes. (Sentencepiece has an option for it,
    but refuses to leave out more than one character in fifty.)
    """
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    total, notes = counts.total(), []
    kept = _by_frequency(Counter({c: n for c, n in counts.items() if c not in f" {RESERVED}"}))
    rare = [character for character, _ in kept[max(0, room // 2 - 1) :]]  # a space is kept, too
    if rare:
        share = sum(counts[character] for character in rare) / total
        notes = [
            f"{len(rare)} of the {len(counts)} different characters are spelled in bytes: "
            f"they are the rarest, {share:.2%} of the text."
        ]
    table = str.maketrans(dict.fromkeys([*RESERVED, *rare], "\n"))
    parts = (part for line in lines for part in line.translate(table).split("\n"))
    return [part for part in parts if part], notes


def _train_sentencepiece(lines: list[str], kind: str, size: int) -> bytes:
    """A sentencepiece model that changes no character and knows our special ids."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=kind,
            vocab_size=size,
            hard_vocab_limit=False,  # a small text gives as many pieces as it has
            character_coverage=1.0,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,  # see Pieces
            max_sentence_length=4 * LONGEST_LINE + 4,  # in bytes
            num_threads=4,  # the sums of unigram depend on it: the same on every machine
            minloglevel=2,
            unk_surface=LOST,
            pad_id=PAD,
            bos_id=BEGIN,
            eos_id=END,
            unk_id=UNKNOWN,
            pad_piece=NAMES[PAD],
            bos_piece=NAMES[BEGIN],
            eos_piece=NAMES[END],
            unk_piece=NAMES[UNKNOWN],
            control_symbols=[NAMES[MASK]],
        )
    except RuntimeError as error:
        raise InputError(f"sentencepiece cannot learn from this text: {error}") from None
    return model.getvalue()


def _say_smaller(size: int, asked: int, things: str) -> list[str]:
    if size == asked:
        return []
    return [f"the vocabulary has {size} ids, not {asked}: the text holds no more {things}."]
