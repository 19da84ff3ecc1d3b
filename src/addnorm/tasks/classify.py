"""Classification: an encoder that predicts the probability of each label of a text."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from addnorm.config import Config
from addnorm.data.text.batches import Batches
from addnorm.data.text.collate import collate_labelled, text_lengths
from addnorm.data.text.labelled import LabelledTexts, read_labelled
from addnorm.data.text.pairs import limit_tokens
from addnorm.data.text.special_tokens import IGNORE, OURS, SpecialIds
from addnorm.data.text.split import overlap, split_by_source
from addnorm.metrics import classification_metrics
from addnorm.models.transformer import Encoder
from addnorm.tasks.base import (
    Fields,
    Metrics,
    Say,
    TextTask,
    Tokenizers,
    choose_vocab,
    list_of_texts,
    make_tokenizer,
    require_source,
    require_text,
    say_nothing,
)
from addnorm.tasks.masked import TrainedEncoder, encoder_size
from addnorm.training.loop import Batch

MAX_CLASSIFY_LENGTH = 256
"""Default of data.max_length, with the two special tokens: longer texts are cut."""
TEXTS_PER_CHUNK = 512
"""Texts that are classified at a time."""


class TrainedClassifier(TrainedEncoder):
    """A trained text classifier."""

    def iter_labels(self, texts: Iterable[str]) -> Iterator[dict[str, float]]:
        """Yield the probability of every label for each text, in order."""
        model = self.model
        assert isinstance(model, Encoder)
        max_tokens = (self.config.data.max_length or MAX_CLASSIFY_LENGTH) - 2
        places = iter(enumerate(texts, 1))
        while part := list(islice(places, TEXTS_PER_CHUNK)):
            checked = [require_text(text, place) for place, text in part]
            ids = [row[:max_tokens] for row in self.tokenizer.encode_many(checked)]
            for row in probabilities(model, ids, self.tokenizer.special):
                yield dict(zip(self.labels, row, strict=True))

    def classify(self, texts: str | Iterable[str]) -> list[dict[str, float]]:
        """Return the probability of every label for each text, the most probable label first.

        Parameters
        ----------
        texts : texts to classify; a single str is one text.
        """
        return [
            dict(sorted(row.items(), key=lambda pair: -pair[1]))
            for row in self.iter_labels(list_of_texts(texts))
        ]

    def evaluate_files(self, source: str, *, say: Say = say_nothing, **options: Any) -> Metrics:
        rows = read_config_texts(self._config_for_all_rows(), source, self.labels)
        ids, cut = encode_texts(self.config, rows, self.tokenizers)
        for note in [*rows.report.lines(), *cut]:
            say(note)
        model = self.model
        assert isinstance(model, Encoder)
        return {
            **classification_metrics(
                probabilities(model, ids, self.tokenizer.special), rows.targets
            ),
            "texts": len(rows),
        }


class Classify(TextTask):
    """Learn to predict the label of a text."""

    name, mode, head = "classify", "encoder", "class"
    trained = TrainedClassifier
    metrics = ("loss", "accuracy")
    max_length = MAX_CLASSIFY_LENGTH
    epochs = 8
    train_defaults: ClassVar[Fields] = {
        "weight_decay": 0.1,
        "eps": 1e-8,
        "batch": 1024,
        "metric": "accuracy",
    }
    sizes: ClassVar[dict[str, Fields]] = {
        "tiny": encoder_size(128, 2, 4, 258, dropout=0.3),
        "small": encoder_size(256, 4, 4, 258, dropout=0.2),
        "base": encoder_size(768, 12, 12, 514, dropout=0.1),
        "big": encoder_size(1024, 24, 16, 514, dropout=0.1),
    }
    size_limits = ((5_000_000, "tiny"), (100_000_000, "small"))

    def __init__(
        self,
        tokenizers: Tokenizers,
        train: tuple[list[list[int]], LabelledTexts],
        valid: tuple[list[list[int]], LabelledTexts],
        notes: list[str],
    ) -> None:
        self.tokenizers, self.notes = tokenizers, notes
        self.train, self.valid = train, valid
        self.labels = train[1].names
        self.train_targets, self.valid_targets = train[1].targets, valid[1].targets
        self.size = sum(text_lengths(train[0])[0])

    @classmethod
    def read_files(cls, config: Config, tokenizers: Tokenizers | None) -> Self:
        data = config.data
        rows = read_config_texts(
            config, require_source(config, "a table with a column of texts and one of labels")
        )
        notes = rows.report.lines()
        if data.valid_source is None:
            assert data.valid_fraction is not None
            split = split_by_source(
                rows.texts, data.valid_fraction, labels=rows.labels, most=2000, seed=config.run.seed
            )
            notes.append(split.note)
            rows, held = rows.take(split.train), rows.take(split.valid)
        else:
            held = read_config_texts(config, data.valid_source, rows.names)
            notes += held.report.lines()
            if shared := overlap(rows.texts, held.texts):
                notes.append(f"{len(shared)} of the validation texts also occur in training.")
        if tokenizers is None:
            size = choose_vocab(sum(map(len, rows.texts)), most=16000)
            tokenizers = {"text": make_tokenizer(rows.texts, config, "bpe", size)}
        notes += tokenizers["text"].notes
        shares = [f"{name} {rows.labels.count(name)}" for name in rows.names]
        notes.append(f"{len(rows.names)} labels: {', '.join(shares[:12])}.")
        parts = [encode_texts(config, part, tokenizers) for part in (rows, held)]
        for _, cut_notes in parts:
            notes += cut_notes
        return cls(tokenizers, (parts[0][0], rows), (parts[1][0], held), notes)

    def model_fields(self) -> Fields:
        return super().model_fields() | {"outputs": len(self.labels)}

    def _bind(self, config: Config) -> None:
        assert config.train.batch is not None
        lengths = text_lengths(self.train[0])
        self.batches = Batches(lengths, config.train.batch, seed=config.run.seed)
        self.held = Batches(text_lengths(self.valid[0]), config.train.batch).epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[int]]:
        return self.batches.epoch(number)

    def positions_needed(self, config: Config) -> int:
        return max(*text_lengths(self.train[0])[0], *text_lengths(self.valid[0])[0])

    def held_out(self) -> Sequence[Sequence[int]]:
        return self.held

    def collate(self, part: Sequence[int], *, epoch: int | None) -> Batch:
        ids = (self.valid if epoch is None else self.train)[0]
        labels = self.valid_targets if epoch is None else self.train_targets
        inputs, targets = collate_labelled(
            [ids[i] for i in part], [labels[i] for i in part], self.tokenizers["text"].special
        )
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

    def further_metrics(self, model: nn.Module, loss: float) -> dict[str, float]:
        assert isinstance(model, Encoder)
        special = self.tokenizers["text"].special
        rows = probabilities(model, self.valid[0], special)
        metrics = classification_metrics(rows, self.valid_targets)
        return {name: metrics[name] for name in ("accuracy", "f1", "ece")}

    def contents(self) -> Iterable[object]:
        yield from (self.train[0], self.train[1].labels, self.valid[0], self.valid[1].labels)


def read_config_texts(
    config: Config, path: str, names: Sequence[str] | None = None
) -> LabelledTexts:
    """Return the texts and labels of a file, read with the settings of a configuration."""
    data = config.data
    return read_labelled(
        path,
        data.text,
        data.label,
        names=names,
        empty=data.on_empty,
        repeated=data.on_duplicate,
        rare=data.on_rare_label,
        limit=data.max_rows,
    )


def encode_texts(
    config: Config, rows: LabelledTexts, tokenizers: Tokenizers
) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of texts, limited in length, and a note on those that were cut."""
    # A text that is too long is cut and never left out, so that texts and labels stay aligned.
    (ids,), _, issue = limit_tokens(
        [tokenizers["text"].encode_many(rows.texts)],
        (config.data.max_length or MAX_CLASSIFY_LENGTH) - 2,
        long="keep" if config.data.on_too_long == "keep" else "cut",
        lines=rows.lines,
    )
    return ids, [issue.describe("text")] if issue.count else []


@torch.no_grad()
def probabilities(
    model: Encoder,
    rows: Sequence[Sequence[int]],
    special: SpecialIds = OURS,
    batch: int = 8192,
) -> list[list[float]]:
    """Return the probability of each label for each row of token ids, in the order of the rows."""
    by_row: dict[int, list[float]] = {}
    device = next(model.parameters()).device
    for part in Batches(text_lengths(rows), batch).epoch(0):
        texts = collate_labelled([rows[i] for i in part], [0] * len(part), special)
        inputs = texts.inputs.to(device)
        for place, row in zip(part, model(inputs).softmax(dim=-1).tolist(), strict=True):
            by_row[place] = row
    return [by_row[place] for place in range(len(rows))]
