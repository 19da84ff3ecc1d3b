"""Pieces of words, by sentencepiece: BPE and unigram, with our special ids and nothing unknown."""

import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Self

import sentencepiece

from addnorm.data.special import BEGIN, END, FIRST, MASK, NAMES, PAD, UNKNOWN
from addnorm.data.spelling import LOST, SPACE, Spelling, by_frequency, say_smaller
from addnorm.errors import ConfigError, InputError

RESERVED = "▁▅"
"""Characters with a meaning of their own in sentencepiece, which learns nothing from them."""
LONGEST_LINE = 2000
"""Characters that sentencepiece learns from at a time; a longer line comes in parts."""
SMALLEST = FIRST + 256 + 1
"""Ids that a vocabulary of pieces cannot do without: special ones, bytes, and one piece."""


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
        return spelling, notes + say_smaller(spelling.size, size, "pieces")

    @classmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        if settings or model is None:
            raise ValueError("it needs a model file and no settings")
        try:
            spelling = cls(model)
        except RuntimeError:
            raise ValueError("its model file is not sentencepiece's") from None
        first = range(min(spelling.size, FIRST + 1))
        names = [spelling.processor.id_to_piece(number) for number in first]
        if names != [*NAMES, "<0x00>"]:
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


def _indent(text: str) -> str:
    """A space before the first character of every line that has one."""
    if "\n" not in text:
        return " " + text if text else ""
    return re.sub("^(?=[^\n])", " ", text, flags=re.MULTILINE)


def _parts(line: str) -> Iterator[str]:
    """A line in parts that sentencepiece will not leave out for being too long."""
    for start in range(0, len(line), LONGEST_LINE):
        yield line[start : start + LONGEST_LINE]


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
    kept = by_frequency(Counter({c: n for c, n in counts.items() if c not in f" {RESERVED}"}))
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
            split_digits=True,  # 1,234 is spelled as it is read: no piece for every number
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
