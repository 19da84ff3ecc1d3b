"""Language modelling: a long text, a decoder that predicts the next token."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from addnorm.config import Config
from addnorm.data.text.files import read_document
from addnorm.data.text.special_tokens import IGNORE, OURS
from addnorm.data.text.split import split_document
from addnorm.data.text.windows import Windows, collate_windows
from addnorm.errors import InputError
from addnorm.generate import Decoding, generate
from addnorm.models.transformer import Decoder
from addnorm.tasks.answer import Answer, make_answer
from addnorm.tasks.base import (
    Fields,
    Figures,
    Say,
    TextTask,
    Tokenizers,
    TrainedText,
    choose_vocab,
    make_tokenizer,
    require_source,
    say_nothing,
)
from addnorm.training.loop import Batch
from addnorm.training.loss import token_loss

SMALL = 5_000_000
"""Characters below which a text is learnt character by character, unless configured."""


def _size(width: int, depth: int, heads: int, ffn_width: int, length: int, **more: Any) -> Fields:
    shape = {"width": width, "depth": depth, "heads": heads, "ffn_width": ffn_width}
    kind = {"addnorm": "pre", "norm": "rms", "ffn": "swiglu", "positions": "rotary"}
    plain = {"scale_embedding": False, "attention_bias": "none", "ffn_bias": False}
    return {**shape, "length": length, **kind, **plain, "init": "normal", **more}


class TrainedLanguageModel(TrainedText):
    """A trained decoder: continues a prompt."""

    def generate(
        self,
        prompt: str,
        *,
        tokens: int = 300,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Answer:
        """Return what the model writes after a prompt.

        Parameters
        ----------
        prompt : text to continue.
        tokens : tokens to add.
        temperature : divides the logits; 0 always takes the most probable token.
        top_k : sample only from the k most probable tokens.
        top_p : sample only from the most probable tokens that together have this probability.
        seed : random seed; the same seed gives the same text.
        """
        model, tokenizer = self.decoder, self.tokenizer
        assert isinstance(model, Decoder)
        if not isinstance(prompt, str):
            raise InputError(f"a prompt must be a str: got {type(prompt).__name__}.")
        ids = [*tokenizer.special.opening, *tokenizer.encode(prompt)]
        if not ids:
            raise InputError("a prompt must have one character or more: got none. Try 'The'.")
        if tokenizer.unknown is not None and tokenizer.unknown in ids:
            unknown = next((c for c in prompt if tokenizer.unknown in tokenizer.encode(c)), prompt)
            raise InputError(
                f"the prompt has a character that the model never saw: {unknown!r}. Leave it out."
            )
        room = model.config.length
        if len(ids) > room:
            raise InputError(
                f"a prompt must fit the context of {room} tokens: got {len(ids)}. Shorten it, "
                "or give only its end."
            )
        decoding = Decoding(
            max_tokens=tokens,
            sampler="greedy" if temperature == 0 else "sample",
            temperature=temperature or 1.0,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        end = None if tokenizer.special == OURS else tokenizer.end  # ours never ends a text
        ((hypothesis,),) = generate(model, [ids], decoding, end=end, slide=True)
        return make_answer(hypothesis, tokenizer)

    def evaluate_files(self, source: str, *, say: Say = say_nothing, **options: Any) -> Figures:
        task = self._held_out(source)
        for note in task.notes[:1]:
            say(note)
        return self._loss(task) | {"tokens": len(task.valid)}


class Language(TextTask):
    """Learn to predict the next token of a text."""

    name, mode, head = "language", "decoder", "token"
    trained = TrainedLanguageModel
    epochs = 10
    train_defaults: ClassVar[Fields] = {
        "weight_decay": 0.1,
        "beta2": 0.99,
        "eps": 1e-8,
        "batch": 1024,
    }
    sizes: ClassVar[dict[str, Fields]] = {
        "tiny": _size(128, 4, 4, 352, 128, dropout=0.0),
        "small": _size(384, 6, 6, 1024, 256),
        "base": _size(768, 12, 12, 2048, 1024),
        "big": _size(1024, 24, 16, 2752, 1024),
    }
    size_limits = ((20_000_000, "tiny"), (300_000_000, "small"))

    def __init__(
        self, tokenizers: Tokenizers, train: Tensor, valid: Tensor, text: str, notes: list[str]
    ) -> None:
        """`text` is what is validated with: bits per byte are of its bytes."""
        self.tokenizers, self.train, self.valid, self.notes = tokenizers, train, valid, notes
        self.bytes_per_token = len(text.encode()) / max(len(valid), 1)
        self.size = len(train)

    @classmethod
    def read_files(cls, config: Config, tokenizers: Tokenizers | None) -> Self:
        data = config.data
        text = read_text_of(config, require_source(config, "a text to learn from"))
        notes = [f"{data.source}: {len(text):,} characters read."]
        if data.valid_source is None:
            assert data.valid_fraction is not None
            text, held = split_document(text, data.valid_fraction)
            notes.append(f"the last {len(held):,} characters are held out to validate with.")
        else:
            held = read_text_of(config, data.valid_source)
            notes.append(f"{data.valid_source}: {len(held):,} characters to validate with.")
        kind = "characters" if len(text) < SMALL else "bpe"
        if tokenizers is None:
            size = 512 if (data.tokenizer or kind) == "characters" else choose_vocab(len(text))
            lines = text.splitlines(keepends=True)
            tokenizers = {"text": make_tokenizer(lines, config, kind, size)}
        tokenizer = tokenizers["text"]
        notes += tokenizer.notes
        train, valid = (_encode(tokenizer.encode_many, part) for part in (text, held))
        if min(len(train), len(valid)) < 2:
            raise InputError(
                f"there must be 2 tokens or more to learn from and to validate with: got "
                f"{len(train)} and {len(valid)}. Give a longer text."
            )
        return cls(tokenizers, train, valid, held, notes)

    def _bind(self, config: Config) -> None:
        assert config.train.batch is not None
        length = self.positions_needed(config)
        rows = max(1, config.train.batch // length)
        self.windows = Windows(len(self.train), length, rows, seed=config.run.seed)
        held = min(len(self.valid), self.max_held_out)
        self.held = Windows(held, length, rows, order="straight").epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[Any]]:
        return self.windows.epoch(number)

    def positions_needed(self, config: Config) -> int:
        return min(config.data.max_length or config.model.length, len(self.train) - 1)

    def held_out(self) -> Sequence[Sequence[Any]]:
        return self.held

    def collate(self, part: Sequence[Any], *, train: bool) -> Batch:
        stream, pad = self.train if train else self.valid, self.tokenizers["text"].pad
        inputs, targets = collate_windows(stream, part, pad)
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


TrainedLanguageModel.task = Language


def read_text_of(config: Config, path: str) -> str:
    """Return a file as one text, limited to the configured number of lines."""
    text = read_document(path)
    limit = config.data.max_rows
    return text if limit is None else "".join(text.splitlines(keepends=True)[:limit])


def _encode(encode_many: Any, text: str) -> Tensor:
    """Return a long text as one stream of ids, (tokens,), encoded line by line."""
    rows = encode_many(text.splitlines(keepends=True))
    return torch.tensor([token for row in rows for token in row], dtype=torch.int32)
