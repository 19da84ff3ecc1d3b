"""A batch drawn at random, where none is given: tokens of the right vocabulary, or noise."""

from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.call import Batch
from addnorm.config import ModelConfig
from addnorm.errors import InputError

ROWS, LENGTH = 8, 32
SAID = "the batch was drawn at random: {what}"


def draw_batch(model: nn.Module, rows: int = ROWS, length: int = LENGTH) -> tuple[Batch, str]:
    """What a model may be called with, and in words; of our models, or Hugging Face's."""
    generator = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    if isinstance(config, ModelConfig):
        return _ours(config, rows, length, generator)
    if getattr(config, "image_size", None) is not None:
        return _images(config, rows, generator)
    vocab = getattr(config, "vocab_size", None)
    if vocab is None:
        raise InputError(
            "a batch can only be drawn for a model whose configuration says its vocabulary: "
            f"got {type(model).__name__}. Pass one."
        )
    most = getattr(config, "max_position_embeddings", None) or length
    ids = torch.randint(3, vocab, (rows, min(length, most)), generator=generator)
    batch = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids.flip(0).clone()
    return batch, SAID.format(what=f"{rows} × {ids.shape[1]} tokens of {vocab:,}")


def _ours(
    config: ModelConfig, rows: int, length: int, generator: torch.Generator
) -> tuple[Batch, str]:
    if config.input == "patches":
        shape = (rows, config.channels, config.image, config.image)
        return torch.randn(shape, generator=generator), SAID.format(what=f"{rows} images")
    length = min(length, config.length)
    if config.input == "vectors":
        vectors = torch.randn(rows, length, config.width, generator=generator)
        return vectors, SAID.format(what=f"{rows} × {length} vectors")

    def ids(vocab: int) -> Tensor:
        low = 1 if vocab > 2 else 0
        drawn = torch.randint(low, vocab, (rows, length), generator=generator)
        if config.pad is not None:
            drawn[drawn == config.pad] = vocab - 1 if config.pad != vocab - 1 else low
        return drawn

    source = ids(config.vocab)
    if config.pad is not None:
        source[-1, length - length // 4 :] = config.pad
    what = SAID.format(what=f"{rows} × {length} tokens of {config.vocab:,}")
    if config.mode == "encoder-decoder":
        return (source, ids(config.target_vocab or config.vocab)), what
    return source, what


def _images(config: Any, rows: int, generator: torch.Generator) -> tuple[Batch, str]:
    size = config.image_size
    shape = (rows, getattr(config, "num_channels", 3), size, size)
    return (
        {"pixel_values": torch.randn(shape, generator=generator)},
        SAID.format(what=f"{rows} images"),
    )
