"""Masked pre-training: an encoder that predicts masked tokens of texts."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from addnorm.config import Config
from addnorm.data.delimited import is_delimited
from addnorm.data.text.batches import Batches
from addnorm.data.text.collate import pad, text_lengths
from addnorm.data.text.files import read_lines
from addnorm.data.text.labelled import read_text_column
from addnorm.data.text.masking import mask_tokens
from addnorm.data.text.pairs import RowFilter, filter_rows, limit_tokens
from addnorm.data.text.reading_report import ReadingReport
from addnorm.data.text.special_tokens import IGNORE
from addnorm.data.text.split import split_by_source
from addnorm.errors import InputError
from addnorm.layers.heads import pool_mean
from addnorm.layers.masks import Mask
from addnorm.models.transformer import Encoder
from addnorm.tasks.base import (
    Fields,
    Metrics,
    Say,
    TextTask,
    Tokenizers,
    TrainedText,
    choose_vocab,
    list_of_texts,
    make_tokenizer,
    require_source,
    require_text,
    say_nothing,
)
from addnorm.tasks.examples import ExampleClassifier
from addnorm.training.loop import Batch
from addnorm.training.loss import token_loss

MAX_MASKED_LENGTH = 128
"""Default of data.max_length."""
TOKENS_PER_EMBED_BATCH = 8192
"""Tokens of the texts that become vectors at a time."""
HELD_OUT_SEED = 77
"""Seed of the masks of held-out texts, which are the same in every evaluation."""


def encoder_size(width: int, depth: int, heads: int, length: int, **more: Any) -> Fields:
    """Return the fields of a BERT-like encoder.

    Parameters
    ----------
    width, depth, heads, length : fields of the model.
    more : further fields, by name.
    """
    shape = {"width": width, "depth": depth, "heads": heads, "length": length}
    kind = {"addnorm": "pre", "ffn": "gelu", "positions": "learned", "pool": "mean"}
    return {**shape, **kind, "scale_embedding": False, "init": "normal", **more}


SIZES_WITH_LABELS: dict[str, Fields] = {
    "tiny": encoder_size(128, 2, 4, 258, dropout=0.3),
    "small": encoder_size(256, 4, 4, 258, dropout=0.2),
    "base": encoder_size(768, 12, 12, 514, dropout=0.1),
    "big": encoder_size(1024, 24, 16, 514, dropout=0.1),
}
"""Encoders of the tasks with labels: of few texts, small ones with more dropout."""


class TrainedEncoder(TrainedText):
    """A trained encoder, which turns texts into vectors."""

    def embed(
        self, texts: str | Iterable[str], *, normalise: bool = True, say: Say = say_nothing
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return one vector for each text, (texts, width): the mean over its positions.

        v = mean_i h_i, divided by ‖v‖, so that the cosine of two texts is the dot product of
        their vectors (Reimers, Gurevych 2019, 1908.10084, §3).

        Parameters
        ----------
        texts : texts; one str is one text.
        normalise : divide each vector by its norm.
        say : called with a sentence if texts were cut.
        """
        means = self._block_means(texts, self.model.config.depth - 1, say)[:, 0]
        return (functional.normalize(means, dim=-1) if normalise else means).numpy()

    @torch.no_grad()
    def _block_means(self, texts: str | Iterable[str], first: int, say: Say) -> Tensor:
        """Return the mean over the positions of each text after each block from number `first` on.

        The result is (texts, blocks, width); the last one is the output of the encoder.
        """
        model, special = self.model, self.tokenizer.special
        assert isinstance(model, Encoder)
        checked = [require_text(text, place) for place, text in enumerate(list_of_texts(texts), 1)]
        rows = self.tokenizer.encode_many(checked)
        max_tokens = (self.config.data.max_length or model.config.length) - 2
        if cut := sum(len(row) > max_tokens for row in rows):
            say(f"{cut} of {len(rows)} texts are longer than {max_tokens} tokens and were cut.")
        rows = [row[:max_tokens] for row in rows]
        device = next(model.parameters()).device
        count = model.config.depth - first
        vectors = torch.empty(len(rows), count, model.config.width)
        if not rows:
            return vectors
        outputs: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, stream: Any) -> None:
            outputs.append(stream[0] if isinstance(stream, tuple) else stream)

        inner = list(model.encoder.stack.blocks)[first:-1]
        hooks = [block.register_forward_hook(keep) for block in inner]
        try:
            for part in Batches(text_lengths(rows), TOKENS_PER_EMBED_BATCH).epoch(0):
                delimited = [[special.begin, *rows[i], special.end] for i in part]
                inputs = pad(delimited, special.pad).to(device)
                real = inputs != special.pad
                outputs.clear()
                last = model.hidden(inputs, mask=Mask.padding(real))
                means = [pool_mean(hidden, real) for hidden in (*outputs, last)]
                vectors[list(part)] = torch.stack(means, dim=1).float().cpu()
        finally:
            for hook in hooks:
                hook.remove()
        return vectors

    def _example_vectors(self, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a vector of norm 1 for each text: those of the upper two thirds of the blocks.

        What tells classes apart is often clearer below the last block, which was trained for
        another purpose (docs/interop.md).
        """
        means = self._block_means(texts, self.model.config.depth // 3, say_nothing)
        joined = functional.normalize(means, dim=-1).flatten(1)
        return functional.normalize(joined, dim=-1).numpy()

    def classify_by_examples(
        self, texts: str | Iterable[str], examples: Sequence[str], labels: Sequence[str]
    ) -> list[dict[str, float]]:
        """Return the probability of every label for each text, the most probable label first.

        Nothing is trained: a linear classifier is fitted to the vectors that the upper two thirds
        of the blocks have for the examples.

        Parameters
        ----------
        texts : texts to classify; one str is one text. The result of a blank text is {}.
        examples : some texts whose labels are known, ten of each label or more.
        labels : the label of each example.
        """
        vectors = self._example_vectors(list(examples))
        few = ExampleClassifier(vectors, [str(label) for label in labels])
        rows = [require_text(text, place) for place, text in enumerate(list_of_texts(texts), 1)]
        full = [text for text in rows if text.strip()]
        found = iter(few.probabilities(self._example_vectors(full)).tolist() if full else [])
        pairs = (zip(few.names, next(found), strict=True) if text.strip() else () for text in rows)
        return [dict(sorted(row, key=lambda pair: -pair[1])) for row in pairs]


class TrainedMasked(TrainedEncoder):
    """A trained masked encoder, for vectors of texts and for other runs to start from."""

    def explain_arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments of `explain_sequence`: the prediction for every token."""
        arguments = super().explain_arguments(text)
        ids = [self.tokenizer.begin, *arguments["inputs"][0].tolist(), self.tokenizer.end]
        tokens = {"encoder": [self.tokenizer.piece(i) for i in ids]}
        return arguments | {"inputs": torch.tensor([ids]), "tokens": tokens}

    def evaluate_files(self, source: str, *, say: Say = say_nothing, **options: Any) -> Metrics:
        task = self._read_held_out(source)
        for note in read_texts(self._config_for_all_rows(), source)[1].lines():
            say(note)
        return self._loss(task) | {"texts": len(task.valid)}


class Masked(TextTask):
    """Learn to predict masked tokens from their context (Devlin et al. 2019)."""

    name, mode, head = "masked", "encoder", "masked"
    trained = TrainedMasked
    max_length, ends = MAX_MASKED_LENGTH, 2
    epochs = 40
    train_defaults: ClassVar[Fields] = {"weight_decay": 0.01, "eps": 1e-8, "batch": 4096}
    sizes: ClassVar[dict[str, Fields]] = {
        "tiny": encoder_size(128, 2, 4, 130),
        "small": encoder_size(256, 4, 4, 130),
        "base": encoder_size(768, 12, 12, 514),
        "big": encoder_size(1024, 24, 16, 514),
    }
    size_limits = ((5_000_000, "tiny"), (300_000_000, "small"))

    def __init__(
        self,
        tokenizers: Tokenizers,
        train: list[list[int]],
        valid: list[list[int]],
        notes: list[str],
    ) -> None:
        self.tokenizers, self.train, self.valid, self.notes = tokenizers, train, valid, notes
        self.size = sum(text_lengths(train)[0])

    @classmethod
    def read_files(cls, config: Config, tokenizers: Tokenizers | None) -> Self:
        data = config.data
        texts, report = read_texts(config, require_source(config, "texts to train on"))
        notes = report.lines()
        if data.valid_source is None:
            assert data.valid_fraction is not None
            split = split_by_source(texts, data.valid_fraction, most=2000, seed=config.run.seed)
            notes.append(split.note)
            held = [texts[row] for row in split.valid]
            texts = [texts[row] for row in split.train]
        else:
            held, report = read_texts(config, data.valid_source)
            notes += report.lines()
        if tokenizers is None:
            size = choose_vocab(sum(map(len, texts)))
            tokenizers = {"text": make_tokenizer(texts, config, "bpe", size)}
        notes += tokenizers["text"].notes
        parts = []
        for part in (texts, held):
            (ids,), _, issue = limit_tokens(
                [tokenizers["text"].encode_many(part)],
                data.max_length or MAX_MASKED_LENGTH,
                long=data.on_too_long,
            )
            notes += [issue.describe("text")] if issue.count else []
            parts.append(ids)
        return cls(tokenizers, parts[0], parts[1], notes)

    def _bind(self, config: Config) -> None:
        assert config.train.batch is not None
        lengths = text_lengths(self.train)
        self.batches = Batches(lengths, config.train.batch, seed=config.run.seed)
        held, most = text_lengths(self.valid), 0
        for most, total in enumerate(accumulate(held[0]), start=1):  # noqa: B007 (the last counts)
            if total > self.max_held_out:
                break
        self.held = Batches([held[0][:most]], config.train.batch).epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[int]]:
        return self.batches.epoch(number)

    def positions_needed(self, config: Config) -> int:
        return max(*text_lengths(self.train)[0], *text_lengths(self.valid)[0])

    def held_out(self) -> Sequence[Sequence[int]]:
        return self.held

    def collate(self, part: Sequence[int], *, epoch: int | None) -> Batch:
        rows = self.valid if epoch is None else self.train
        seed = (HELD_OUT_SEED, 0) if epoch is None else (self.config.run.seed, epoch)
        masked = [self._mask(rows[i], hash((*seed, i))) for i in part]
        inputs, targets = zip(*masked, strict=True)
        filler = self.tokenizers["text"].pad
        return {"inputs": pad(inputs, filler), "targets": pad(targets, IGNORE)}

    def _mask(self, row: list[int], seed: int) -> tuple[list[int], list[int]]:
        """Return a text with masked tokens, and its targets; they depend on the seed alone."""
        tokenizer = self.tokenizers["text"]
        inputs, targets = mask_tokens(
            torch.tensor([tokenizer.begin, *row, tokenizer.end]),
            vocab=tokenizer.size,
            rate=self.config.data.mask_rate,
            generator=torch.Generator().manual_seed(seed % 2**63),
            special=tokenizer.special,
        )
        return inputs.tolist(), targets.tolist()

    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        assert isinstance(model, Encoder)
        hidden = model.hidden(batch["inputs"])
        return token_loss(model, hidden, batch["targets"], smoothing=smoothing, total=total)

    def contents(self) -> Iterable[object]:
        yield from (self.train, self.valid)


def read_texts(config: Config, path: str) -> tuple[list[str], ReadingReport]:
    """Return the lines of a text file, or the cells of a column of a table, and the report."""
    data = config.data
    notes: list[str] = []
    if is_delimited(path):
        texts, lines, notes = read_text_column(path, data.text, limit=data.max_rows)
    else:
        texts = list(read_lines(path))[: data.max_rows]
        lines = list(range(1, len(texts) + 1))
    rows = [(text,) for text in texts]
    row_filter = RowFilter(empty=data.on_empty, repeated=data.on_duplicate)
    kept, issues = filter_rows(rows, lines, row_filter, sides=1)
    if not kept:
        raise InputError(f"{path!r} must have texts to train on: it has none.")
    report = ReadingReport(
        name=path, row_name="text", read=len(rows), kept=len(kept), issues=issues, notes=(*notes,)
    )
    return [row[0] for _, row in kept], report
