"""Vocabularies that came with imported models, with the special ids of their own.

`huggingface` is a `tokenizer.json` of the tokenizers library; `sentencepiece` is a model file of
sentencepiece, with the ids that a model's code adds to its pieces. Neither can be trained here.
Special tokens that stand in a text are ordinary characters, as in all our vocabularies.
"""

from collections.abc import Mapping
from typing import Any, Self

import sentencepiece

from addnorm.data.text.special_tokens import SpecialIds
from addnorm.data.text.vocabulary import Vocabulary
from addnorm.errors import ConfigError, require

SPACES = " ▁"
"""A space, and the character that sentencepiece writes for it."""
NOT_TRAINED = "a {} vocabulary comes with an imported model and is not trained. Try bpe."


class ImportedVocabulary(Vocabulary):
    """What both kinds share: a file, the number of ids of the model, and special ids."""

    kind: str
    model: bytes

    def __init__(self, model: bytes, size: int, special: SpecialIds) -> None:
        self.model, self.size, self.special = model, size, special

    @classmethod
    def train(cls, lines: list[str], size: int) -> tuple[Self, list[str]]:
        raise ConfigError(NOT_TRAINED.format(cls.kind))

    @property
    def settings(self) -> dict[str, object]:
        special = {**vars(self.special), "opening": list(self.special.opening)}
        return {"size": self.size, "special": special}


class TokenizerFile(ImportedVocabulary):
    """A `tokenizer.json` of the tokenizers library: WordPiece, BPE of bytes, unigram, ..."""

    kind = "huggingface"

    def __init__(self, model: bytes, size: int, special: SpecialIds) -> None:
        super().__init__(model, size, special)
        self.processor = load_tokenizer_json(model)
        if self.processor.get_vocab_size(with_added_tokens=True) > size:
            largest = max(self.processor.get_vocab(with_added_tokens=True).values())
            if largest >= size:
                raise ValueError(f"it has the id {largest}, and the model only {size}")

    @classmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        if model is None:
            raise ValueError("it must have a model file")
        return cls(model, *read_settings(settings))

    def encode(self, texts: list[str]) -> list[list[int]]:
        rows = self.processor.encode_batch(texts, add_special_tokens=False)
        return [list(row.ids) for row in rows]

    def decode(self, ids: list[int]) -> str:
        return str(self.processor.decode(ids, skip_special_tokens=True))

    def name(self, number: int) -> str:
        return self.processor.id_to_token(number) or f"<{number}>"


class SentencePieceFile(ImportedVocabulary):
    """A model file of sentencepiece.

    Parameters
    ----------
    model, size, special : as for all imported vocabularies.
    names : other numbers of the pieces, where the model's code has them.
    prefix : whether a text that begins without a space is given one, which decoding removes, as
        the code of Llama does whatever the file says; None for what the file says.
    """

    kind = "sentencepiece"

    def __init__(
        self,
        model: bytes,
        size: int,
        special: SpecialIds,
        names: Mapping[str, int] | None = None,
        *,
        prefix: bool | None = None,
    ) -> None:
        super().__init__(model, size, special)
        self.prefix = prefix
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ValueError("its model file is not one of sentencepiece") from None
        if prefix is not None:
            self.processor.override_normalizer_spec(add_dummy_prefix="false")
        self.names = dict(names) if names else None
        pieces = self.processor.vocab_size()
        if self.names is None and pieces > size:
            raise ValueError(f"it has {pieces} pieces, and the model only {size} ids")
        unknown = special.unknown or 0
        self._to_ours = [
            number if self.names is None else self.names.get(self._piece(number), unknown)
            for number in range(pieces)
        ]
        self._to_piece = {ours: number for number, ours in reversed([*enumerate(self._to_ours)])}

    def _piece(self, number: int) -> str:
        return str(self.processor.id_to_piece(number))

    @classmethod
    def restore(cls, settings: Mapping[str, object], model: bytes | None) -> Self:
        if model is None:
            raise ValueError("it must have a model file")
        names, prefix = settings.get("names"), settings.get("prefix")
        if names is not None and not isinstance(names, dict):
            raise ValueError("its names must be a table")
        if prefix is not None and not isinstance(prefix, bool):
            raise ValueError("its prefix must be true or false")
        own = ("names", "prefix")
        rest = {name: value for name, value in settings.items() if name not in own}
        return cls(model, *read_settings(rest), names=names, prefix=prefix)

    @property
    def settings(self) -> dict[str, object]:
        own = {"names": self.names, "prefix": self.prefix}
        return super().settings | {key: value for key, value in own.items() if value is not None}

    def encode(self, texts: list[str]) -> list[list[int]]:
        if self.prefix:
            texts = [f" {text}" if text and text[0] not in SPACES else text for text in texts]
        rows: list[list[int]] = self.processor.encode(texts)
        return [[self._to_ours[number] for number in row] for row in rows]

    def decode(self, ids: list[int]) -> str:
        s = self.special
        skipped = {s.pad, s.begin, s.end, s.mask, s.unknown, *s.opening}
        known = (number for number in ids if number not in skipped)
        pieces = [self._to_piece[number] for number in known if number in self._to_piece]
        text = str(self.processor.decode(pieces))
        return text.removeprefix(" ") if self.prefix else text

    def name(self, number: int) -> str:
        piece = self._to_piece.get(number)
        return f"<{number}>" if piece is None else self._piece(piece)


def load_tokenizer_json(model: bytes) -> Any:
    """Return a tokenizer of the tokenizers library; ValueError if the file is not one."""
    tokenizers = require("tokenizers", "huggingface")
    try:
        processor = tokenizers.Tokenizer.from_buffer(model)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"its file is not a tokenizer.json: {str(error)[:200]}") from None
    processor.no_padding()
    processor.no_truncation()
    processor.encode_special_tokens = True  # which makes them ordinary text
    return processor


def read_settings(settings: Mapping[str, object]) -> tuple[int, SpecialIds]:
    """Return size and special ids of the settings of an imported vocabulary."""
    size, special = settings.get("size"), settings.get("special")
    if set(settings) != {"size", "special"} or not isinstance(special, dict):
        raise ValueError("it must have size and special ids")
    if set(special) != set(vars(SpecialIds())) or not isinstance(special["opening"], list):
        raise ValueError("its special ids are not complete")
    numbers = [size, special["pad"], special["begin"], special["end"], *special["opening"]]
    numbers += [special[name] for name in ("unknown", "mask") if special[name] is not None]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError("its special ids must be numbers")
    assert isinstance(size, int)
    ids = SpecialIds(**{**special, "opening": tuple(special["opening"])})
    if max(numbers[1:]) >= size:
        raise ValueError("its special ids must be below its size")
    return size, ids
