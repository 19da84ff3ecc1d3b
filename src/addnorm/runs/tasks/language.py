"""Language modelling: a long text, a decoder that says the next token."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from addnorm.config import Config
from addnorm.data.files import read_document
from addnorm.data.special import IGNORE
from addnorm.data.split import split_document
from addnorm.data.windows import Windows, collate_windows
from addnorm.errors import InputError
from addnorm.models.transformer import Decoder
from addnorm.runs.tasks.base import (
    TextTask,
    Tokenizers,
    make_tokenizer,
    need_source,
    suit_vocab,
)
from addnorm.train.loop import Batch
from addnorm.train.loss import token_loss

SMALL = 5_000_000
"""Characters below which a text is learnt character by character, unless told."""


class Language(TextTask):
    """Learn to say the next token of a text."""

    name, mode, head = "language", "decoder", "token"

    def __init__(
        self, tokenizers: Tokenizers, train: Tensor, valid: Tensor, text: str, notes: list[str]
    ) -> None:
        """`text` is what is validated with: bits per byte are of its bytes."""
        self.tokenizers, self.train, self.valid, self.notes = tokenizers, train, valid, notes
        self.bytes_per_token = len(text.encode()) / max(len(valid), 1)
        self.rows = self.size = len(train)

    @classmethod
    def read(cls, config: Config, known: Tokenizers | None = None) -> Self:
        data = config.data
        text = read(config, need_source(config, "a text to learn from"))
        notes = [f"{data.source}: {len(text):,} characters read."]
        if data.valid_source is None:
            text, held = split_document(text, data.valid_share)
            notes.append(f"the last {len(held):,} characters are held out to validate with.")
        else:
            held = read(config, data.valid_source)
            notes.append(f"{data.valid_source}: {len(held):,} characters to validate with.")
        kind = "characters" if len(text) < SMALL else "bpe"
        if known is None:
            size = 512 if (data.tokenizer or kind) == "characters" else suit_vocab(len(text))
            known = {"text": make_tokenizer(text.splitlines(keepends=True), config, kind, size)}
        tokenizer = known["text"]
        notes += tokenizer.notes
        train, valid = (_encode(tokenizer.encode_many, part) for part in (text, held))
        if min(len(train), len(valid)) < 2:
            raise InputError(
                f"there must be 2 tokens or more to learn from and to validate with: got "
                f"{len(train)} and {len(valid)}. Give a longer text."
            )
        return cls(known, train, valid, held, notes)

    def prepare(self, config: Config) -> None:
        super().prepare(config)
        assert config.train.batch is not None
        self.length = min(config.data.longest or config.model.length, len(self.train) - 1)
        rows = max(1, config.train.batch // self.length)
        self.windows = Windows(len(self.train), self.length, rows, seed=config.run.seed)
        held = min(len(self.valid), self.most_held_out)
        self.held = Windows(held, self.length, rows, order="straight").epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[Any]]:
        return self.windows.epoch(number)

    def reach(self) -> int:
        return self.length

    def held_out(self) -> Sequence[Sequence[Any]]:
        return self.held

    def collate(self, part: Sequence[Any], *, train: bool) -> Batch:
        inputs, targets = collate_windows(self.train if train else self.valid, part)
        return {"inputs": inputs, "targets": targets}

    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        assert isinstance(model, Decoder)
        hidden = model.hidden(batch["inputs"])
        return token_loss(model, hidden, batch["targets"], smoothing=smoothing, total=total)

    def figures(self, model: nn.Module, loss: float) -> dict[str, float]:
        bits = loss / math.log(2) / self.bytes_per_token
        return super().figures(model, loss) | {"bits_per_byte": bits}

    def tokens(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def contents(self) -> Iterable[object]:
        yield from (self.train.tolist(), self.valid.tolist())


def read(config: Config, path: str) -> str:
    """A file as one text, or as many of its lines as the configuration wants."""
    text = read_document(path)
    limit = config.data.limit
    return text if limit is None else "".join(text.splitlines(keepends=True)[:limit])


def _encode(encode_many: Any, text: str) -> Tensor:
    """A long text as one stream of ids, (tokens,), encoded line by line."""
    rows = encode_many(text.splitlines(keepends=True))
    return torch.tensor([token for row in rows for token in row], dtype=torch.int32)
