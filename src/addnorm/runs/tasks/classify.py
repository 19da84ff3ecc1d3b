"""Classification: texts with labels, an encoder that gives each label a probability."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from addnorm.config import Config
from addnorm.data.batches import Batches
from addnorm.data.collate import collate_labelled, text_lengths
from addnorm.data.labelled import Labelled, read_table
from addnorm.data.special import IGNORE
from addnorm.data.split import overlap, split_by_source
from addnorm.data.text import limit_tokens
from addnorm.models.transformer import Encoder
from addnorm.runs.metrics import classes
from addnorm.runs.tasks.base import TextTask, Tokenizers, make_tokenizer, need_source, suit_vocab
from addnorm.train.loop import Batch

LONGEST = 256
"""Tokens of a text that are read, unless told."""


class Classify(TextTask):
    """Learn the label of a text."""

    name, mode, head = "classify", "encoder", "class"
    metrics = ("loss", "accuracy")
    longest = LONGEST

    def __init__(
        self,
        tokenizers: Tokenizers,
        train: tuple[list[list[int]], Labelled],
        valid: tuple[list[list[int]], Labelled],
        notes: list[str],
    ) -> None:
        self.tokenizers, self.notes = tokenizers, notes
        self.train, self.valid = train, valid
        self.names = train[1].names
        self.targets = {True: train[1].targets, False: valid[1].targets}
        self.rows = len(train[0])
        self.size = sum(text_lengths(train[0])[0])

    @classmethod
    def read(cls, config: Config, known: Tokenizers | None = None) -> Self:
        data = config.data
        rows = read(config, need_source(config, "a table of texts and labels"))
        notes = rows.report.lines()
        if data.valid_source is None:
            split = split_by_source(
                rows.texts, data.valid_share, labels=rows.labels, most=2000, seed=config.run.seed
            )
            notes.append(split.note)
            rows, held = rows.take(split.train), rows.take(split.valid)
        else:
            held = read(config, data.valid_source, rows.names)
            notes += held.report.lines()
            if shared := overlap(rows.texts, held.texts):
                notes.append(f"{len(shared)} of the texts to validate with are also learnt from.")
        if known is None:
            size = suit_vocab(sum(map(len, rows.texts)), most=16000)
            known = {"text": make_tokenizer(rows.texts, config, "bpe", size)}
        notes += known["text"].notes
        shares = [f"{name} {rows.labels.count(name)}" for name in rows.names]
        notes.append(f"{len(rows.names)} labels: {', '.join(shares[:12])}.")
        parts = [encode(config, part, known) for part in (rows, held)]
        for _, found in parts:
            notes += found
        return cls(known, (parts[0][0], rows), (parts[1][0], held), notes)

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"outputs": len(self.names)}

    def prepare(self, config: Config) -> None:
        super().prepare(config)
        assert config.train.batch is not None
        lengths = text_lengths(self.train[0])
        self.batches = Batches(lengths, config.train.batch, seed=config.run.seed)
        self.held = Batches(text_lengths(self.valid[0]), config.train.batch).epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[int]]:
        return self.batches.epoch(number)

    def reach(self) -> int:
        return max(*text_lengths(self.train[0])[0], *text_lengths(self.valid[0])[0])

    def held_out(self) -> Sequence[Sequence[int]]:
        return self.held

    def collate(self, part: Sequence[int], *, train: bool) -> Batch:
        ids = (self.train if train else self.valid)[0]
        labels = self.targets[train]
        inputs, targets = collate_labelled([ids[i] for i in part], [labels[i] for i in part])
        return {"inputs": inputs, "targets": targets}

    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        logits = model(batch["inputs"])
        loss = functional.cross_entropy(
            logits,
            batch["targets"],
            reduction="sum",
            label_smoothing=smoothing,
            ignore_index=IGNORE,
        )
        return loss / total

    def figures(self, model: nn.Module, loss: float) -> dict[str, float]:
        assert isinstance(model, Encoder)
        found = classes(probabilities(model, self.valid[0]), self.targets[False])
        return {name: found[name] for name in ("accuracy", "f1", "ece")}

    def contents(self) -> Iterable[object]:
        yield from (self.train[0], self.train[1].labels, self.valid[0], self.valid[1].labels)


def read(config: Config, path: str, names: Sequence[str] | None = None) -> Labelled:
    """Texts and labels of a file, as the configuration wants them."""
    data = config.data
    return read_table(
        path,
        data.text,
        data.label,
        names=names,
        empty=data.empty,
        repeated=data.repeated,
        rare=data.rare,
        limit=data.limit,
    )


def encode(
    config: Config, rows: Labelled, tokenizers: Tokenizers
) -> tuple[list[list[int]], list[str]]:
    """Texts as ids, held to the longest that is allowed, and what was found."""
    # A text that is too long is cut, never left out: its label must stay beside it.
    (ids,), _, found = limit_tokens(
        [tokenizers["text"].encode_many(rows.texts)],
        (config.data.longest or LONGEST) - 2,
        long="keep" if config.data.long == "keep" else "cut",
        lines=rows.lines,
    )
    return ids, [found.say("text")] if found.count else []


@torch.no_grad()
def probabilities(
    model: Encoder, rows: Sequence[Sequence[int]], batch: int = 8192
) -> list[list[float]]:
    """The probability of each label for each text, in their order."""
    found: dict[int, list[float]] = {}
    device = next(model.parameters()).device
    for part in Batches(text_lengths(rows), batch).epoch(0):
        inputs = collate_labelled([rows[i] for i in part], [0] * len(part)).inputs.to(device)
        for place, row in zip(part, model(inputs).softmax(dim=-1).tolist(), strict=True):
            found[place] = row
    return [found[place] for place in range(len(rows))]
