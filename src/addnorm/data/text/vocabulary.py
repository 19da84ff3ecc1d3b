"""Vocabularies that turn text into ids: their common interface, characters, and bytes.

Lower-casing, files and checks are the task of `Tokenizer`, which has a vocabulary.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

from addnorm.data.text.special_tokens import FIRST, OURS, UNKNOWN, SpecialIds
from addnorm.errors import ConfigError

SPACE = "▁"
"""How a space is displayed, also by sentencepiece inside a piece."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Displayed for an unknown character, and for bytes that are not valid UTF-8."""


class Vocabulary(ABC):
    """The interface of all vocabularies: text into ids and back."""

    size: int
    """Number of ids, including the special ones."""
    model: bytes | None = None
    """The content of a separate file, if the vocabulary needs one."""
    special: SpecialIds = OURS
    """The ids of special tokens."""

    @classmethod
    @abstractmethod
    def train(cls, lines: list[str], size: int) -> tuple[Self, list[str]]:
        """Return a vocabulary of at most `size` ids trained on lines, and notes on deviations.

        No line contains a line end, and at least one line is not empty.
        """

    @classmethod
    @abstractmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        """Return the vocabulary with these settings and model; ValueError if they are invalid."""

    @property
    def settings(self) -> dict[str, object]:
        """What `restore` needs besides the model."""
        return {}

    @abstractmethod
    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; special ids are skipped, unknown ones displayed."""

    @abstractmethod
    def name(self, number: int) -> str:
        """Return how an ordinary id is displayed."""


class Characters(Vocabulary):
    """One id for each character of the training text and for the line end; others are unknown."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.size = FIRST + len(characters)
        self.ids = {character: FIRST + n for n, character in enumerate(characters)}
        self.texts = ["", "", "", REPLACEMENT, "", *characters]

    @classmethod
    def train(cls, lines: list[str], size: int) -> tuple[Self, list[str]]:
        if size <= FIRST:
            raise ConfigError(
                f"a characters vocabulary must have {FIRST + 1} ids or more ({FIRST} special, "
                f"1 character): got {size}. Try 1000."
            )
        counts = Counter("\n".join(lines) + "\n")
        kept = [character for character, _ in by_frequency(counts)][: size - FIRST]
        vocabulary = cls("".join(sorted(kept)))
        if len(kept) == len(counts):
            return vocabulary, size_note(vocabulary.size, size, "characters")
        return vocabulary, [
            f"{len(counts) - len(kept)} of the {len(counts)} distinct characters have no id and "
            f"are unknown: the vocabulary has room for {len(kept)}."
        ]

    @classmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        characters = settings.get("characters")
        if set(settings) != {"characters"} or not isinstance(characters, str) or model is not None:
            raise ValueError("it must have characters and no model file")
        if len(set(characters)) != len(characters):
            raise ValueError("its characters are not distinct")
        return cls(characters)

    @property
    def settings(self) -> dict[str, object]:
        return {"characters": self.characters}

    def encode(self, texts: list[str]) -> list[list[int]]:
        ids = self.ids
        return [[ids.get(character, UNKNOWN) for character in text] for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join([self.texts[number] for number in ids])

    def name(self, number: int) -> str:
        character = self.texts[number]
        if character == " ":
            return SPACE
        return character if character.isprintable() else f"<U+{ord(character):04X}>"


class Bytes(Vocabulary):
    """One id for each byte of UTF-8: nothing to learn, nothing unknown (Xue et al., 2022)."""

    size = FIRST + 256

    @classmethod
    def train(cls, lines: list[str], size: int) -> tuple[Self, list[str]]:
        note = f"the vocabulary has {cls.size} ids, not {size}: there are 256 bytes."
        return cls(), [] if size == cls.size else [note]

    @classmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        if settings or model is not None:
            raise ValueError("it must have neither settings nor a model file")
        return cls()

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[FIRST + byte for byte in text.encode()] for text in texts]

    def decode(self, ids: list[int]) -> str:
        unknown = [FIRST + byte for byte in REPLACEMENT.encode()]
        known = (unknown if number == UNKNOWN else (number,) for number in ids)
        values = [number - FIRST for part in known for number in part if number >= FIRST]
        return bytes(values).decode(errors="replace")

    def name(self, number: int) -> str:
        character = chr(number - FIRST)
        if character == " ":
            return SPACE
        is_visible = character.isascii() and character.isprintable()
        return character if is_visible else f"<0x{number - FIRST:02X}>"


def by_frequency(counts: Counter[str]) -> Sequence[tuple[str, int]]:
    """Return characters and counts, the most frequent first; equal counts by character."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def size_note(size: int, requested: int, units: str) -> list[str]:
    """Return a note if a vocabulary is smaller than requested."""
    if size == requested:
        return []
    return [f"the vocabulary has {size} ids, not {requested}: the text has no more {units}."]
