"""Language modelling: a decoder that predicts the next token of a long text."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from addnorm.config import Config
from addnorm.data.text.files import read_text_file
from addnorm.data.text.special_tokens import IGNORE, OURS
from addnorm.data.text.split import split_document
from addnorm.data.text.windows import Windows, collate_history, collate_windows
from addnorm.errors import InputError
from addnorm.generate import Decoding, generate
from addnorm.layers.masks import Mask
from addnorm.layers.segments import SegmentMemory
from addnorm.lens.explain import MOST_PROBABLE
from addnorm.models.transformer import Decoder
from addnorm.report import Page
from addnorm.tasks.answer import Answer, make_answer
from addnorm.tasks.base import (
    Fields,
    Metrics,
    Say,
    TextTask,
    Tokenizers,
    TrainedText,
    choose_vocab,
    make_tokenizer,
    require_source,
    say_nothing,
)
from addnorm.tasks.page_parts import add_perplexity, within_seconds
from addnorm.training.loop import Batch
from addnorm.training.loss import token_loss

SMALL = 5_000_000
"""Texts with fewer characters use the characters tokenizer by default; others use BPE."""
MAX_PAGE_WINDOWS = 64
"""Windows of held-out text for the perplexity by position on the page of a run."""
PROMPT_TOKENS, SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 40, 120, 0.8
"""Length and temperature of the samples on the page of a run."""


def _decoder_size(
    width: int, depth: int, heads: int, ffn_width: int, length: int, **more: Any
) -> Fields:
    shape = {"width": width, "depth": depth, "heads": heads, "ffn_width": ffn_width}
    kind = {"addnorm": "pre", "norm": "rms", "ffn": "swiglu", "positions": "rotary"}
    plain = {"scale_embedding": False, "attention_bias": "none", "ffn_bias": False}
    return {**shape, "length": length, **kind, **plain, "init": "normal", **more}


class TrainedLanguageModel(TrainedText):
    """A trained language model."""

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
        """Return a continuation of a prompt.

        Parameters
        ----------
        prompt : text to continue.
        tokens : tokens to add.
        temperature : divisor of the logits; 0 always takes the most probable token.
        top_k : sample only from the k most probable tokens.
        top_p : sample only from the most probable tokens whose probabilities add up to p.
        seed : random seed; the same seed gives the same text.
        """
        tokenizer = self.tokenizer
        if not isinstance(prompt, str):
            raise InputError(f"a prompt must be a str: got {type(prompt).__name__}.")
        ids = [*tokenizer.special.opening, *tokenizer.encode(prompt)]
        if not ids:
            raise InputError("a prompt must have one character or more: it is empty. Try 'The'.")
        if tokenizer.unknown is not None and tokenizer.unknown in ids:
            unknown = next((c for c in prompt if tokenizer.unknown in tokenizer.encode(c)), prompt)
            raise InputError(
                f"the prompt has a character that is not in the vocabulary: {unknown!r}. Remove it."
            )
        length = self.config.model.length
        if len(ids) > length:
            raise InputError(
                f"a prompt must fit the context of {length} tokens: got {len(ids)}. Shorten it, "
                "or pass only its end."
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
        if self.engine is not None:
            return make_answer(self.engine.generate(ids, decoding, end=end), tokenizer)
        model = self.decoder
        assert isinstance(model, Decoder)
        ((hypothesis,),) = generate(model, [ids], decoding, end=end, slide=True)
        return make_answer(hypothesis, tokenizer)

    def explain_arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments of `explain_sequence`: each next token, and what follows."""
        arguments = super().explain_arguments(text)
        ids: list[int] = arguments["inputs"][0].tolist()
        return arguments | {"targets": [*ids[1:], MOST_PROBABLE]}

    def sample_rows(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Return prompt, continuation by the model, and continuation of a text, with their names.

        `ids` are the tokens of the text, which starts with the prompt.
        """
        model, tokenizer = self.decoder, self.tokenizer
        assert isinstance(model, Decoder)
        count = max(1, min(PROMPT_TOKENS, model.config.length // 2, len(ids) - 1))
        settings = Decoding(
            max_tokens=SAMPLE_TOKENS, sampler="sample", temperature=SAMPLE_TEMPERATURE
        )
        prompt, rest = ids[:count], ids[count : count + SAMPLE_TOKENS]
        ((hypothesis,),) = generate(model, [prompt], settings, slide=True)
        texts = {"prompt": prompt, "model": hypothesis.tokens, "text": rest}
        return [
            (name, tokenizer.decode(tokens).replace("\n", " ↵ ")) for name, tokens in texts.items()
        ]

    def evaluate_files(self, source: str, *, say: Say = say_nothing, **options: Any) -> Metrics:
        task = self._read_held_out(source)
        for note in task.notes[:1]:
            say(note)
        return self._loss(task) | {"tokens": len(task.valid)}


class Language(TextTask):
    """Learn to predict the next token of a text."""

    name, mode, head = "language", "decoder", "token"
    trained = TrainedLanguageModel
    has_limited_page = True
    epochs = 10
    train_defaults: ClassVar[Fields] = {
        "weight_decay": 0.1,
        "beta2": 0.99,
        "eps": 1e-8,
        "batch": 1024,
    }
    sizes: ClassVar[dict[str, Fields]] = {
        "tiny": _decoder_size(128, 4, 4, 352, 128, dropout=0.0),
        "small": _decoder_size(384, 6, 6, 1024, 256),
        "base": _decoder_size(768, 12, 12, 2048, 1024),
        "big": _decoder_size(1024, 24, 16, 2752, 1024),
    }
    size_limits = ((20_000_000, "tiny"), (300_000_000, "small"))

    def __init__(
        self, tokenizers: Tokenizers, train: Tensor, valid: Tensor, text: str, notes: list[str]
    ) -> None:
        """`text` is the held-out text, whose bytes are those of bits_per_byte."""
        self.tokenizers, self.train, self.valid, self.notes = tokenizers, train, valid, notes
        self.bytes_per_token = len(text.encode()) / max(len(valid), 1)
        self.size = len(train)

    @classmethod
    def read_files(cls, config: Config, tokenizers: Tokenizers | None) -> Self:
        data = config.data
        text = read_config_document(config, require_source(config, "a text to train on"))
        notes = [f"{data.source}: {len(text):,} characters read."]
        if data.valid_source is None:
            assert data.valid_fraction is not None
            text, held = split_document(text, data.valid_fraction)
            notes.append(f"the last {len(held):,} characters are held out for validation.")
        else:
            held = read_config_document(config, data.valid_source)
            notes.append(f"{data.valid_source}: {len(held):,} characters read for validation.")
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
                f"training and validation need 2 tokens or more each: got {len(train)} and "
                f"{len(valid)}. Use a longer text."
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

    def collate(self, part: Sequence[Any], *, epoch: int | None) -> Batch:
        stream = self.valid if epoch is None else self.train
        pad = self.tokenizers["text"].pad
        inputs, targets = collate_windows(stream, part, pad)
        batch = {"inputs": inputs, "targets": targets}
        memory = self.config.model.segment_memory
        if memory:
            history, real = collate_history(stream, part, memory, pad)
            batch |= {"history": history, "history_real": real}
        return batch

    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        assert isinstance(model, Decoder)
        hidden = model.hidden(batch["inputs"], segments=read_history(model, batch))
        return token_loss(model, hidden, batch["targets"], smoothing=smoothing, total=total)

    def further_metrics(self, model: nn.Module, loss: float) -> dict[str, float]:
        bits = loss / math.log(2) / self.bytes_per_token
        return super().further_metrics(model, loss) | {"bits_per_byte": bits}

    @torch.no_grad()
    def losses_by_position(self, model: Decoder) -> tuple[NDArray[Any], int]:
        """Return the mean loss at each position of a window, and the number of windows."""
        length = self.positions_needed(self.config)
        windows = Windows(len(self.valid), length, 1, order="straight").epoch(0)[:MAX_PAGE_WINDOWS]
        total, count = torch.zeros(length), torch.zeros(length)
        done = 0
        for part in within_seconds(windows, self.page_seconds):
            batch = self.collate(part, epoch=None)
            targets = batch["targets"]
            logits = model(batch["inputs"], segments=read_history(model, batch))
            losses = functional.cross_entropy(
                logits.float().mT, targets, ignore_index=IGNORE, reduction="none"
            )
            width = targets.shape[1]
            total[:width] += losses.sum(dim=0)
            count[:width] += (targets != IGNORE).sum(dim=0)
            done += 1
        seen = int((count > 0).sum())
        return (total[:seen] / count[:seen]).numpy(), done

    def add_to_page(self, page: Page, summary: Metrics, trained: Any) -> None:
        if trained is None:
            return
        losses, windows = self.losses_by_position(trained.model)
        add_perplexity(page, losses, windows)
        page.section("Samples")
        if not self.page_seconds:
            page.text("No samples: the time was over. `addnorm generate RUN` continues a prompt.")
            return
        page.text(
            f"Continuations of held-out text, with temperature {SAMPLE_TEMPERATURE}: the prompt, "
            "what the model wrote, and the text itself."
        )
        for start in within_seconds(self.sample_starts(), self.page_seconds):
            page.table(["", "text"], trained.sample_rows(self.valid[start:].tolist()))

    def sample_starts(self, count: int = 3) -> list[int]:
        """Return positions of the held-out text where samples start, evenly spaced."""
        room = len(self.valid) - PROMPT_TOKENS - 1
        return sorted({max(0, room * i // count) for i in range(count)})

    def contents(self) -> Iterable[object]:
        yield from (self.train.tolist(), self.valid.tolist())


def read_history(model: Decoder, batch: Batch) -> SegmentMemory | None:
    """Return what the model reads in the tokens before each window; None if it has no memory.

    Transformer-XL (Dai et al. 2019) keeps what it read in the last step, with the weights of that
    step. Here the memory of a window is computed again from the tokens before it, without
    gradients: it has no state, so windows can be shuffled, divided among processes and resumed.
    """
    if "history" not in batch:
        return None
    segments = model.segments()
    with torch.no_grad():
        model.hidden(batch["history"], mask=Mask.padding(batch["history_real"]), segments=segments)
    return segments


def read_config_document(config: Config, path: str) -> str:
    """Return the text of a file, limited to the number of lines of the configuration."""
    text = read_text_file(path)
    limit = config.data.max_rows
    return text if limit is None else "".join(text.splitlines(keepends=True)[:limit])


def _encode(encode_many: Any, text: str) -> Tensor:
    """Return the ids of a long text as one stream, (tokens,), encoded line by line."""
    rows = encode_many(text.splitlines(keepends=True))
    return torch.tensor([token for row in rows for token in row], dtype=torch.int32)
