"""One decoding step of a model with its cache: newest tokens in, logits of the next tokens out.

Memory, cache and padding, which differ between translation and continuation, are handled here, so
that the search does not depend on the kind of model. Rows come in groups: the beams of a sentence.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from addnorm.layers.masks import Mask
from addnorm.layers.positions import Learned
from addnorm.models.transformer import Decoder, EncoderDecoder

Ids = Sequence[int]


class Steps(Protocol):
    """The interface of a model that the search uses."""

    def step(self, newest: Tensor) -> Tensor:
        """Return the logits after the newest tokens, (rows, 1 or more) -> (rows, vocab)."""

    def reorder(self, index: Tensor, groups: Tensor | None) -> None:
        """Make row i a copy of row index[i]; drop all groups of rows but `groups`, unless None."""


class TranslationSteps:
    """Steps of an encoder-decoder: sources are encoded once, and beams share the memory."""

    def __init__(self, model: EncoderDecoder, sources: Sequence[Ids], longest: int) -> None:
        ids, real = pad_ids(sources, "right", model.embedding().device)
        self.model = model
        self.mask = Mask() if real is None else Mask.padding(real)
        self.memory = model.encode(ids, mask=self.mask)
        self.cache = model.cache(len(sources), longest)

    def step(self, newest: Tensor) -> Tensor:
        # An explicit mask, because the begin token of some models is also their padding token.
        hidden = self.model.decode(
            newest, self.memory, mask=Mask(), memory_mask=self.mask, cache=self.cache
        )
        return self.model.apply_head(hidden[:, -1:])[:, 0]

    def reorder(self, index: Tensor, groups: Tensor | None) -> None:
        self.cache.reorder(index)
        if groups is not None:
            self.cache.select_memory(groups)
            # Only the shape still matters: the keys and values of the memory are in the cache.
            self.memory = self.memory[: len(groups)]
            if self.mask.real is not None:
                self.mask = Mask.padding(self.mask.real.index_select(0, groups))


class ContinuationSteps:
    """Steps of a decoder that continues prompts, which are padded on the left.

    Parameters
    ----------
    model : The decoder.
    prompts : Token ids of each prompt.
    longest : Positions to allocate in the cache.
    context : If not None, the most tokens that the model reads: when they are reached, the older
        half is dropped and the newer half is read again from position 0.
    """

    def __init__(
        self, model: Decoder, prompts: Sequence[Ids], longest: int, context: int | None = None
    ) -> None:
        self.model, self.context = model, context
        self.ids, self.real = pad_ids(prompts, "left", model.embedding().device)
        self.cache = model.cache(len(prompts), longest if context is None else context)

    def step(self, newest: Tensor) -> Tensor:
        mask = Mask()
        if self.cache.used == 0 and self.real is not None:
            mask = Mask.padding(self.real)
        elif self.cache.used and self.context is not None:
            newest = self.slide(newest, self.context)
        hidden = self.model.hidden(newest, mask=mask, cache=self.cache)
        return self.model.apply_head(hidden[:, -1:])[:, 0]

    def slide(self, newest: Tensor, context: int) -> Tensor:
        """Return the tokens to read: the newest, or the newer half if the context is full."""
        self.ids = torch.cat((self.ids, newest), dim=1)
        if self.cache.used < context:
            return newest
        self.cache = self.model.cache(newest.shape[0], context)
        self.ids = self.ids[:, -max(1, context // 2) :]
        return self.ids

    def reorder(self, index: Tensor, groups: Tensor | None) -> None:
        self.cache.reorder(index)
        if self.context is not None:
            self.ids = self.ids.index_select(0, index)


def pad_ids(rows: Sequence[Ids], side: str, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return sequences as one batch, and which of its tokens are real (None if all are).

    >>> pad_ids([[5, 6], [7]], "left", torch.device("cpu"))[0].tolist()
    [[5, 6], [0, 7]]
    """
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[i, place] = torch.tensor(row, dtype=torch.long)
        real[i, place] = True
    ragged = any(len(row) < longest for row in rows)
    return ids.to(device), real.to(device) if ragged else None


def max_positions(side: nn.Module) -> int | None:
    """Return the number of learned positions of a side, or None if positions have no limit."""
    positions = getattr(side, "positions", None)  # a recurrent side has none
    return positions.length if isinstance(positions, Learned) else None
