"""Subword vocabularies of sentencepiece: BPE and unigram, with our special ids and bytes."""

import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Self

import sentencepiece

from addnorm.data.text.special_tokens import BEGIN, END, FIRST, MASK, PAD, SPECIAL_NAMES, UNKNOWN
from addnorm.data.text.vocabulary import REPLACEMENT, SPACE, Vocabulary, by_frequency, size_note
from addnorm.errors import ConfigError, InputError

RESERVED = "▁▅"
"""Characters with a special meaning in sentencepiece, which ignores them in training."""
MAX_LINE_LENGTH = 2000
"""Characters of a line that sentencepiece trains on; a longer line is split."""
MIN_PIECE_SIZE = FIRST + 256 + 1
"""The smallest number of ids: special ones, bytes, and one piece."""


class PieceVocabulary(Vocabulary):
    """Subword pieces of sentencepiece; a character without a piece is encoded as bytes.

    Every line that is not empty gets a space before its first character, which decoding removes,
    so that a word has the same ids wherever it occurs. Sentencepiece's own prefix would only apply
    to the first line of a text.
    """

    kind: str

    def __init__(self, model: bytes) -> None:
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = self.processor.vocab_size()

    @classmethod
    def train(cls, lines: list[str], size: int) -> tuple[Self, list[str]]:
        if size < MIN_PIECE_SIZE:
            raise ConfigError(
                f"a {cls.kind} vocabulary must have {MIN_PIECE_SIZE} ids or more ({FIRST} special, "
                f"256 bytes, 1 piece): got {size}. Try 8000, or the bytes tokenizer."
            )
        lines = [_indent(part) for line in lines for part in _split_line(line)]
        lines, notes = _split_at_rare(lines, size - MIN_PIECE_SIZE + 1)
        vocabulary = cls(_train_sentencepiece(lines, cls.kind, size))
        return vocabulary, notes + size_note(vocabulary.size, size, "pieces")

    @classmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        if settings or model is None:
            raise ValueError("it must have a model file and no settings")
        try:
            vocabulary = cls(model)
        except RuntimeError:
            raise ValueError("its model file is not one of sentencepiece") from None
        first = range(min(vocabulary.size, FIRST + 1))
        names = [vocabulary.processor.id_to_piece(number) for number in first]
        if names != [*SPECIAL_NAMES, "<0x00>"]:
            raise ValueError("its model file has other special ids")
        return vocabulary

    def encode(self, texts: list[str]) -> list[list[int]]:
        texts = [_indent(text) for text in texts]
        ids: list[list[int]] = self.processor.encode(texts, num_threads=-1)
        for row, text in enumerate(texts):
            if SPACE in text:
                ids[row] = self._encode_around(text)
        return ids

    def _encode_around(self, text: str) -> list[int]:
        """Return the ids of a text that contains ▁, which sentencepiece would read as a space."""
        first, *rest = self.processor.encode(text.split(SPACE))
        ids: list[int] = list(first)
        for part in rest:
            ids += [FIRST + byte for byte in SPACE.encode()]
            ids += part
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.processor.decode(ids)
        return re.sub("^ ", "", text, flags=re.MULTILINE)

    def name(self, number: int) -> str:
        return self.processor.id_to_piece(number)


class BPE(PieceVocabulary):
    """Byte-pair encoding: the most frequent pair of neighbours is merged, repeatedly.

    Sennrich, Haddow and Birch (2016), §3.2, as sentencepiece does it (Kudo and Richardson, 2018).
    """

    kind = "bpe"


class Unigram(PieceVocabulary):
    """The most probable segmentation of a text, where each piece has its own probability.

    Kudo (2018), §3.2. Slower to train than BPE, and faster to encode.
    """

    kind = "unigram"


def _indent(text: str) -> str:
    """Return a text with a space before the first character of every line that has one."""
    if "\n" not in text:
        return " " + text if text else ""
    return re.sub("^(?=[^\n])", " ", text, flags=re.MULTILINE)


def _split_line(line: str) -> Iterator[str]:
    """Yield a line in parts that are short enough for sentencepiece."""
    for start in range(0, len(line), MAX_LINE_LENGTH):
        yield line[start : start + MAX_LINE_LENGTH]


def _split_at_rare(lines: list[str], room: int) -> tuple[list[str], list[str]]:
    """Return the lines split at their rarest characters, if there are too many, and a note.

    At most half of the room is for single characters; otherwise a script with thousands of them
    would leave none for words. The others are encoded as bytes. (Sentencepiece has an option for
    this, but refuses to leave out more than one character in fifty.)
    """
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    total, notes = counts.total(), []
    kept = by_frequency(Counter({c: n for c, n in counts.items() if c not in f" {RESERVED}"}))
    rare = [character for character, _ in kept[max(0, room // 2 - 1) :]]  # the space is kept, too
    if rare:
        share = sum(counts[character] for character in rare) / total
        notes = [
            f"{len(rare)} of the {len(counts)} distinct characters are encoded as bytes: "
            f"they are the rarest, {share:.2%} of the text."
        ]
    table = str.maketrans(dict.fromkeys([*RESERVED, *rare], "\n"))
    parts = (part for line in lines for part in line.translate(table).split("\n"))
    return [part for part in parts if part], notes


def _train_sentencepiece(lines: list[str], kind: str, size: int) -> bytes:
    """Return a sentencepiece model that changes no character and has our special ids."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=kind,
            vocab_size=size,
            hard_vocab_limit=False,  # a small text may have fewer pieces
            character_coverage=1.0,
            byte_fallback=True,
            split_digits=True,  # no pieces for whole numbers
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,  # see PieceVocabulary
            max_sentence_length=4 * MAX_LINE_LENGTH + 4,  # in bytes
            num_threads=4,  # fixed, as the sums of unigram depend on it
            minloglevel=2,
            unk_surface=REPLACEMENT,
            pad_id=PAD,
            bos_id=BEGIN,
            eos_id=END,
            unk_id=UNKNOWN,
            pad_piece=SPECIAL_NAMES[PAD],
            bos_piece=SPECIAL_NAMES[BEGIN],
            eos_piece=SPECIAL_NAMES[END],
            unk_piece=SPECIAL_NAMES[UNKNOWN],
            control_symbols=[SPECIAL_NAMES[MASK]],
        )
    except RuntimeError as error:
        raise InputError(f"sentencepiece cannot train on this text: {error}") from None
    return model.getvalue()
