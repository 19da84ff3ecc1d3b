"""Batches drawn at random, where none is given: tokens of the right vocabulary, or noise.

Tokens are drawn so that there is something to learn from them: nine times in ten a token is the one
that follows the last by a fixed rule over some of the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.call import Batch
from addnorm.config import ModelConfig
from addnorm.errors import InputError
from addnorm.models.tabular import TabularConfig

ROWS, LENGTH = 8, 32
TABLE_ROWS = 64
USED, SURE = 64, 0.9
"""How many tokens of the vocabulary are used, and how often one follows from the last."""
SAID = "the batch was drawn at random: {what}"

Draw = Callable[[], Batch]


def draw_batch(model: nn.Module, rows: int = ROWS, length: int = LENGTH) -> tuple[Batch, str]:
    """What a model may be called with, and in words; of our models, or Hugging Face's."""
    batches, said = draw_batches(model, 1, rows, length)
    return batches[0], said


def draw_batches(
    model: nn.Module, count: int, rows: int = ROWS, length: int = LENGTH
) -> tuple[list[Batch], str]:
    """Several of one kind."""
    generator = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    if isinstance(config, TabularConfig):
        draw, what = _rows(config, TABLE_ROWS, generator)
    elif isinstance(config, ModelConfig):
        draw, what = _ours(config, rows, length, generator)
    else:
        draw, what = _theirs(model, config, rows, length, generator)
    return [draw() for _ in range(count)], SAID.format(what=what)


def _ours(
    config: ModelConfig, rows: int, length: int, generator: torch.Generator
) -> tuple[Draw, str]:
    if config.input == "patches":
        shape = (rows, config.channels, config.image, config.image)
        return lambda: torch.randn(shape, generator=generator), f"{rows} images"
    length = min(length, config.length)
    if config.input == "vectors":
        whole = (rows, length, config.width)
        return lambda: torch.randn(whole, generator=generator), f"{rows} × {length} vectors"
    source = _language(config.vocab, config.pad, rows, length, generator)
    target = _language(config.target_vocab or config.vocab, config.pad, rows, length, generator)

    def draw() -> Batch:
        ids = source()
        if config.pad is not None:
            ids[-1, length - length // 4 :] = config.pad
        return (ids, target()) if config.mode == "encoder-decoder" else ids

    return draw, f"{rows} × {length} tokens of {config.vocab:,}"


def _rows(config: TabularConfig, rows: int, generator: torch.Generator) -> tuple[Draw, str]:
    """Rows of a table: numbers as scaling leaves them, and codes of each category."""
    sizes = torch.tensor(config.categories, dtype=torch.float64)

    def draw() -> Batch:
        numbers = torch.randn(rows, config.numbers, generator=generator)
        share = torch.rand(rows, len(sizes), generator=generator, dtype=torch.float64)
        return numbers, (share * sizes).long()

    return draw, f"{rows} rows of {config.numbers} numbers and {len(sizes)} categories"


def _theirs(
    model: nn.Module, config: Any, rows: int, length: int, generator: torch.Generator
) -> tuple[Draw, str]:
    if getattr(config, "image_size", None) is not None:
        size = config.image_size
        shape = (rows, getattr(config, "num_channels", 3), size, size)
        return lambda: {"pixel_values": torch.randn(shape, generator=generator)}, f"{rows} images"
    vocab = getattr(config, "vocab_size", None)
    if vocab is None:
        raise InputError(
            "a batch can only be drawn for a model whose configuration says its vocabulary: "
            f"got {type(model).__name__}. Pass one."
        )
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    ids = _language(vocab, getattr(config, "pad_token_id", None), rows, length, generator, low=3)

    def draw() -> Batch:
        batch = {"input_ids": ids()}
        if getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = ids()
        return batch

    return draw, f"{rows} × {length} tokens of {vocab:,}"


def _language(
    vocab: int,
    pad: int | None,
    rows: int,
    length: int,
    generator: torch.Generator,
    low: int = 1,
) -> Callable[[], Tensor]:
    """Rows of ids, none of them padding: each follows from the last by a rule, mostly."""
    known = torch.arange(low if vocab > low + 1 else 0, vocab)
    known = known[known != pad] if pad is not None and len(known) > 1 else known
    used = known[torch.randperm(len(known), generator=generator)[:USED]]

    def draw() -> Tensor:
        places = torch.randint(len(used), (rows, length), generator=generator)
        for t in range(length - 1):
            follows = torch.rand(rows, generator=generator) < SURE
            places[:, t + 1] = torch.where(
                follows, (places[:, t] + 1) % len(used), places[:, t + 1]
            )
        return used[places]

    return draw
