"""The functions of a model that are exported as graphs, with free batch and length.

Each module calls the model with tensors alone: masks and caches are inputs and outputs.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from addnorm.config import ModelConfig
from addnorm.layers.cache import Cache
from addnorm.layers.context import Context
from addnorm.layers.masks import Mask
from addnorm.models.build import Model
from addnorm.models.transformer import Decoder, EncoderDecoder

LONGEST = 2048
"""Most positions: longer sequences would be computed in chunks, which is another graph."""
MAX_BATCH = 4096


class EncodeGraph(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        return self.model(ids, mask=Mask.padding(real))


class PredictGraph(EncodeGraph):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.model(ids, mask=Mask())


class ImageGraph(EncodeGraph):
    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        return self.model(images)


class TranslateGraph(EncodeGraph):
    def forward(  # type: ignore[override]
        self, source: Tensor, real: Tensor, target: Tensor
    ) -> Tensor:
        mask = Mask.padding(real)
        return self.model(source, target, source_mask=mask, target_mask=Mask())


class StepGraph(EncodeGraph):
    def forward(self, ids: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        cache: Any = GrowingCache(past)
        logits = self.model(ids, mask=Mask(), cache=cache)
        return logits[:, -1], torch.stack(cache.present)


class MemoryGraph(EncodeGraph):
    """From a source to the keys and values of its memory in every block of the decoder."""

    def forward(self, source: Tensor, real: Tensor) -> Tensor:
        memory = self.model.encode(source, mask=Mask.padding(real))
        context = Context(memory=memory)
        layers = [block.sublayers["memory"] for block in self.model.decoder.stack.blocks]
        return torch.stack([torch.stack(layer.memory_keys_values(context)) for layer in layers])


class TranslationStepGraph(EncodeGraph):
    def forward(  # type: ignore[override]
        self, ids: Tensor, past: Tensor, memory: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor]:
        cache: Any = GrowingCache(past)
        cache.memory = {layer: (memory[layer, 0], memory[layer, 1]) for layer in range(len(memory))}
        masks = {"mask": Mask(), "memory_mask": Mask.padding(real)}
        hidden = self.model.decode(ids, memory[0, 0], cache=cache, **masks)
        return self.model.apply_head(hidden)[:, -1], torch.stack(cache.present)


class GrowingCache(Cache):
    """A cache whose tensors are inputs and outputs of the graph, one (layer, …) tensor each."""

    def __init__(self, past: Tensor) -> None:
        self.store, self.owner = past, None
        self.past = past
        self.used = past.shape[4]
        self.present: list[Tensor] = []
        self.memory: dict[int, Any] = {}

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        key = torch.cat((self.past[layer, 0], key), dim=2)
        value = torch.cat((self.past[layer, 1], value), dim=2)
        self.present.append(torch.stack((key, value)))
        return key, value

    def extend_padding(self, real: Tensor | None, batch: int, length: int) -> None:
        return None

    def advance(self, length: int) -> None:
        """Nothing to count: the caller passes `present` back as `past`."""


def longest_sequence(model: Model) -> int:
    learned = model.config.positions == "learned"
    return min(model.config.length, LONGEST) if learned else LONGEST


def whole_graph(model: Any) -> tuple[nn.Module, tuple[Tensor, ...], Any, tuple[Tensor, ...]]:
    """Return the function of whole sequences, example inputs, free dimensions, and other inputs.

    The other inputs have another batch and other lengths, to compare the graph with the model.
    """
    c, (batch, length) = model.config, sequence_dims(model)
    if c.input == "patches":
        return ImageGraph(model), (draw_images(c, 2),), ({0: batch},), (draw_images(c, 3),)
    rows = {0: batch, 1: length}
    ids, real = draw_ids(c.vocab, 2, 6)
    if isinstance(model, EncoderDecoder):
        target = draw_ids(c.output_vocab, 2, 5)[0]
        second = {0: batch, 1: Dim("target", min=2, max=longest_sequence(model))}
        more = (*draw_ids(c.vocab, 3, 9), draw_ids(c.output_vocab, 3, 4)[0])
        return TranslateGraph(model), (ids, real, target), (rows, rows, second), more
    if isinstance(model, Decoder):
        return PredictGraph(model), (ids,), (rows,), (draw_ids(c.vocab, 3, 9)[0],)
    return EncodeGraph(model), (ids, real), (rows, rows), draw_ids(c.vocab, 3, 9)


def sequence_dims(model: Model) -> tuple[Any, Any]:
    """Return the free dimensions of a batch of sequences."""
    most = longest_sequence(model)
    return Dim("batch", min=1, max=MAX_BATCH), Dim("length", min=2, max=most)


def draw_ids(vocab: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Return random ids and which of them are real."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(vocab, (batch, length), generator=generator)
    lengths = torch.arange(batch)[:, None].mul(-2).add(length).clamp(min=1)
    return ids, torch.arange(length) < lengths


def draw_images(c: ModelConfig, batch: int) -> Tensor:
    """Return random images as a model reads them, (batch, channels, side, side)."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, c.channels, c.image, c.image, generator=generator)


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Keep the exporter's progress and warnings to itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
