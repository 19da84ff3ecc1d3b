"""Random inputs for a model, where the user passes none: token ids, images, vectors or rows.

Token sequences have something to learn in them: with probability 0.9 a token is the successor of
the previous one in a fixed random order of part of the vocabulary.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import Inputs
from addnorm.config import ModelConfig
from addnorm.errors import InputError
from addnorm.models.tabular import TabularConfig

RANDOM_ROWS, RANDOM_LENGTH = 8, 32
RANDOM_TABLE_ROWS = 64
SOUND_ROWS, SOUND_SAMPLES, SOUND_TOKENS = 4, 4000, 16
USED_TOKENS, SUCCESSOR_PROBABILITY = 64, 0.9
"""How many tokens of the vocabulary occur, and how often one is the successor of the last."""

DrawInputs = Callable[[], Inputs]


def draw_batch(
    model: nn.Module, rows: int = RANDOM_ROWS, length: int = RANDOM_LENGTH
) -> tuple[Inputs, str]:
    """Return random inputs for a model of addnorm or Hugging Face, and their description."""
    batches, description = draw_batches(model, 1, rows, length)
    return batches[0], description


def draw_batches(
    model: nn.Module, count: int, rows: int = RANDOM_ROWS, length: int = RANDOM_LENGTH
) -> tuple[list[Inputs], str]:
    """Return several random inputs of one form, and their description.

    Parameters
    ----------
    model : a model whose configuration says what it is called with
    count : number of batches
    rows, length : sequences in a batch, and positions in a sequence
    """
    generator = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    if isinstance(config, TabularConfig):
        draw, description = _table_rows(config, RANDOM_TABLE_ROWS, generator)
    elif isinstance(config, ModelConfig):
        draw, description = _addnorm_inputs(config, rows, length, generator)
    else:
        draw, description = _huggingface_inputs(model, config, rows, length, generator)
    return [draw() for _ in range(count)], f"the batch was drawn at random: {description}"


def _addnorm_inputs(
    config: ModelConfig, rows: int, length: int, generator: torch.Generator
) -> tuple[DrawInputs, str]:
    if config.input == "patches":
        shape = (rows, config.channels, config.image, config.image)
        return lambda: torch.randn(shape, generator=generator), f"{rows} images"
    length = min(length, config.length)
    if config.input == "vectors":
        vectors = (rows, length, config.width)
        return lambda: torch.randn(vectors, generator=generator), f"{rows} × {length} vectors"
    source = _token_source(config.vocab, config.pad, rows, length, generator)
    target = _token_source(config.output_vocab, config.pad, rows, length, generator)

    def draw() -> Inputs:
        ids = source()
        if config.pad is not None:
            ids[-1, length - length // 4 :] = config.pad
        return (ids, target()) if config.mode == "encoder-decoder" else ids

    return draw, f"{rows} × {length} tokens of {config.vocab:,}"


def _table_rows(
    config: TabularConfig, rows: int, generator: torch.Generator
) -> tuple[DrawInputs, str]:
    """Return a source of table rows: standardised numbers, and codes of each category."""
    sizes = torch.tensor(config.categories, dtype=torch.float64)

    def draw() -> Inputs:
        numbers = torch.randn(rows, config.numbers, generator=generator)
        share = torch.rand(rows, len(sizes), generator=generator, dtype=torch.float64)
        return numbers, (share * sizes).long()

    return draw, f"{rows} rows of {config.numbers} numbers and {len(sizes)} categories"


def _huggingface_inputs(
    model: nn.Module, config: Any, rows: int, length: int, generator: torch.Generator
) -> tuple[DrawInputs, str]:
    main = getattr(model, "main_input_name", "input_ids")
    if main in ("input_features", "input_values"):
        return _sound(config, main, generator)
    if getattr(config, "image_size", None) is not None:
        size = config.image_size
        shape = (rows, getattr(config, "num_channels", 3), size, size)
        return lambda: {"pixel_values": torch.randn(shape, generator=generator)}, f"{rows} images"
    pairs = "return_loss" in inspect.signature(model.forward).parameters  # of texts and images
    image = getattr(getattr(config, "vision_config", None), "image_size", None) if pairs else None
    config = getattr(config, "text_config", None) or config
    vocab = getattr(config, "vocab_size", None)
    if vocab is None or (pairs and image is None):
        raise InputError(
            "a random batch needs a model whose configuration, or the text_config and vision_config"
            f" in it, has a vocabulary size and an image size: got {type(model).__name__}. Pass a "
            "batch."
        )
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    pad = getattr(config, "pad_token_id", None)
    ids = _token_source(vocab, pad, rows, length, generator, lowest=3)

    def draw() -> Inputs:
        inputs: dict[str, Any] = {"input_ids": ids()}
        if image is not None:
            images = torch.randn(rows, 3, image, image, generator=generator)
            return {**inputs, "pixel_values": images, "return_loss": True}
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids()
        return inputs

    also = "" if image is None else f", {rows} images"
    return draw, f"{rows} × {length} tokens of {vocab:,}{also}"


def _sound(config: Any, main: str, generator: torch.Generator) -> tuple[DrawInputs, str]:
    """Return a source of sound: a waveform, or the features that the model reads."""
    bins: int | None = getattr(
        config, "num_mel_bins", getattr(config, "input_feat_per_channel", None)
    )
    shape: tuple[int, ...] = (SOUND_ROWS, SOUND_SAMPLES)
    if main == "input_features" and bins is not None:
        positions = 2 * getattr(config, "max_source_positions", 50)
        by_bin = getattr(config, "model_type", "") == "whisper"
        shape = (SOUND_ROWS, bins, positions) if by_bin else (SOUND_ROWS, 100, bins)
    elif bins is not None:
        shape = (SOUND_ROWS, getattr(config, "max_length", 100), bins)
    decodes = getattr(config, "is_encoder_decoder", False)
    vocab, pad = getattr(config, "vocab_size", 2), getattr(config, "pad_token_id", None)
    ids = _token_source(vocab, pad, SOUND_ROWS, SOUND_TOKENS, generator, lowest=3)

    def draw() -> Inputs:
        inputs = {main: torch.randn(shape, generator=generator)}
        return {**inputs, "decoder_input_ids": ids()} if decodes else inputs

    return draw, f"{SOUND_ROWS} × {' × '.join(map(str, shape[1:]))} numbers as sound"


def _token_source(
    vocab: int,
    pad: int | None,
    rows: int,
    length: int,
    generator: torch.Generator,
    lowest: int = 1,
) -> Callable[[], Tensor]:
    """Return a source of (rows, length) token ids without padding, mostly successors."""
    known = torch.arange(lowest if vocab > lowest + 1 else 0, vocab)
    known = known[known != pad] if pad is not None and len(known) > 1 else known
    used = known[torch.randperm(len(known), generator=generator)[:USED_TOKENS]]

    def draw() -> Tensor:
        indices = torch.randint(len(used), (rows, length), generator=generator)
        for t in range(length - 1):
            follows = torch.rand(rows, generator=generator) < SUCCESSOR_PROBABILITY
            indices[:, t + 1] = torch.where(
                follows, (indices[:, t] + 1) % len(used), indices[:, t + 1]
            )
        return used[indices]

    return draw
