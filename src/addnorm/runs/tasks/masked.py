"""Masked pre-training: texts, an encoder that guesses what is hidden in them."""

from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from addnorm.config import Config
from addnorm.data.batches import Batches
from addnorm.data.cells import is_table
from addnorm.data.collate import pad, text_lengths
from addnorm.data.files import read_lines
from addnorm.data.labelled import read_texts as read_column
from addnorm.data.masking import mask_tokens
from addnorm.data.report import Report
from addnorm.data.special import BEGIN, END, IGNORE
from addnorm.data.split import split_by_source
from addnorm.data.text import Rules, limit_tokens, sift
from addnorm.errors import InputError
from addnorm.models.transformer import Encoder
from addnorm.runs.tasks.base import (
    TextTask,
    Tokenizers,
    make_tokenizer,
    need_source,
    suit_vocab,
)
from addnorm.train.loop import Batch
from addnorm.train.loss import token_loss

LONGEST = 128
"""Tokens a text may have, unless told."""
HELD_OUT_SEED = 77
"""What is hidden in held-out text is the same at every evaluation."""


class Masked(TextTask):
    """Learn to guess hidden tokens from those around them (Devlin et al. 2019)."""

    name, mode, head = "masked", "encoder", "masked"
    longest, ends = LONGEST, 2

    def __init__(
        self,
        tokenizers: Tokenizers,
        train: list[list[int]],
        valid: list[list[int]],
        notes: list[str],
    ) -> None:
        self.tokenizers, self.train, self.valid, self.notes = tokenizers, train, valid, notes
        self.rows = len(train)
        self.size = sum(text_lengths(train)[0])

    @classmethod
    def read(cls, config: Config, known: Tokenizers | None = None) -> Self:
        data = config.data
        texts, report = read_texts(config, need_source(config, "texts to learn from"))
        notes = report.lines()
        if data.valid_source is None:
            split = split_by_source(texts, data.valid_share, most=2000, seed=config.run.seed)
            notes.append(split.note)
            held = [texts[row] for row in split.valid]
            texts = [texts[row] for row in split.train]
        else:
            held, report = read_texts(config, data.valid_source)
            notes += report.lines()
        if known is None:
            size = suit_vocab(sum(map(len, texts)))
            known = {"text": make_tokenizer(texts, config, "bpe", size)}
        notes += known["text"].notes
        parts = []
        for part in (texts, held):
            (ids,), _, found = limit_tokens(
                [known["text"].encode_many(part)], data.longest or LONGEST, long=data.long
            )
            notes += [found.say("text")] if found.count else []
            parts.append(ids)
        return cls(known, parts[0], parts[1], notes)

    def prepare(self, config: Config) -> None:
        super().prepare(config)
        assert config.train.batch is not None
        lengths = text_lengths(self.train)
        self.batches = Batches(lengths, config.train.batch, seed=config.run.seed)
        held, most = text_lengths(self.valid), 0
        for most, total in enumerate(_running(held[0]), start=1):  # noqa: B007 (the last counts)
            if total > self.most_held_out:
                break
        self.held = Batches([held[0][:most]], config.train.batch).epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[int]]:
        return self.batches.epoch(number)

    def reach(self) -> int:
        return max(*text_lengths(self.train)[0], *text_lengths(self.valid)[0])

    def held_out(self) -> Sequence[Sequence[int]]:
        return self.held

    def collate(self, part: Sequence[int], *, train: bool) -> Batch:
        rows = self.train if train else self.valid
        seed = (self.config.run.seed, self.place[0]) if train else (HELD_OUT_SEED, 0)
        hidden = [self._hide(rows[i], hash((*seed, i))) for i in part]
        inputs, targets = zip(*hidden, strict=True)
        return {"inputs": pad(inputs), "targets": pad(targets, IGNORE)}

    def _hide(self, row: list[int], seed: int) -> tuple[list[int], list[int]]:
        """A text and its targets: what is hidden is its own affair, whatever stands beside it."""
        inputs, targets = mask_tokens(
            torch.tensor([BEGIN, *row, END]),
            vocab=self.tokenizers["text"].size,
            rate=self.config.data.mask,
            generator=torch.Generator().manual_seed(seed % 2**63),
        )
        return inputs.tolist(), targets.tolist()

    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        assert isinstance(model, Encoder)
        hidden = model.hidden(batch["inputs"])
        return token_loss(model, hidden, batch["targets"], smoothing=smoothing, total=total)

    def contents(self) -> Iterable[object]:
        yield from (self.train, self.valid)


def read_texts(config: Config, path: str) -> tuple[list[str], Report]:
    """The texts of a file, one a line, or of a column of a table."""
    data = config.data
    notes: list[str] = []
    if is_table(path):
        texts, lines, notes = read_column(path, data.text, limit=data.limit)
    else:
        texts = list(read_lines(path))[: data.limit]
        lines = list(range(1, len(texts) + 1))
    rows = [(text,) for text in texts]
    kept, findings = sift(rows, lines, Rules(empty=data.empty, repeated=data.repeated), sides=1)
    if not kept:
        raise InputError(f"{path!r} must hold texts to learn from: it has none.")
    report = Report(
        name=path, thing="text", read=len(rows), kept=len(kept), findings=findings, notes=(*notes,)
    )
    return [row[0] for _, row in kept], report


def _running(lengths: Sequence[int]) -> Iterable[int]:
    total = 0
    for length in lengths:
        total += length
        yield total
