"""Ways to spell a text in numbers: what they share, characters, and bytes.

A spelling knows nothing of lower case, files or checks: `Tokenizer` does that for all of them.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

from addnorm.data.special import FIRST, UNKNOWN
from addnorm.errors import ConfigError

SPACE = "▁"
"""How a space is written in a picture, and by sentencepiece inside a piece."""
LOST = "\N{REPLACEMENT CHARACTER}"
"""What is shown for an unknown character, and for bytes that make none."""


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
        kept = [character for character, _ in by_frequency(counts)][: size - FIRST]
        spelling = cls("".join(sorted(kept)))
        if len(kept) == len(counts):
            return spelling, say_smaller(spelling.size, size, "characters")
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


def by_frequency(counts: Counter[str]) -> Sequence[tuple[str, int]]:
    """Characters and their counts, the most frequent first, and in a fixed order among equals."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def say_smaller(size: int, asked: int, things: str) -> list[str]:
    if size == asked:
        return []
    return [f"the vocabulary has {size} ids, not {asked}: the text holds no more {things}."]
