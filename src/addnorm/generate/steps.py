"""A model one step further: from the newest token of each row to the logits of the next.

What the two modes need besides the tokens (memory, cache, padding) is kept here, so that the token
loop and beam search know neither. Rows come in groups: the beams of one sentence.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from addnorm.layers.context import Mask
from addnorm.layers.positions import Learned
from addnorm.models.transformer import Decoder, EncoderDecoder, Side

Ids = Sequence[int]


class Steps(Protocol):
    """What the token loop and beam search ask of a model."""

    def step(self, newest: Tensor) -> Tensor:
        """Logits after the newest tokens, (rows, 1 or more) -> (rows, vocab)."""

    def reorder(self, index: Tensor, groups: Tensor | None) -> None:
        """Make row i a copy of row index[i]; if given, only these groups of rows are left."""


class TranslationSteps:
    """An encoder-decoder: the sources are encoded once, and their beams share the memory."""

    def __init__(self, model: EncoderDecoder, sources: Sequence[Ids], longest: int) -> None:
        ids, real = pad_ids(sources, "right", model.embedding().device)
        self.model = model
        self.mask = Mask() if real is None else Mask.padding(real)
        self.memory = model.encode(ids, mask=self.mask)
        self.cache = model.cache(len(sources), longest)

    def step(self, newest: Tensor) -> Tensor:
        # A mask of its own, because the begin token of some models is also their padding.
        hidden = self.model.decode(
            newest, self.memory, mask=Mask(), memory_mask=self.mask, cache=self.cache
        )
        return self.model.answer(hidden[:, -1:])[:, 0]

    def reorder(self, index: Tensor, groups: Tensor | None) -> None:
        self.cache.reorder(index)
        if groups is not None:
            self.cache.keep_memory_of(groups)
            self.memory = self.memory[: len(groups)]  # its keys and values are in the cache by now
            if self.mask.real is not None:
                self.mask = Mask.padding(self.mask.real.index_select(0, groups))


class ContinuationSteps:
    """A decoder that goes on from prompts, which are padded on the left.

    With a `context`, the model never sees more than so many tokens: once they are reached, the
    older half is forgotten and the newer half is read again from position 0.
    """

    def __init__(
        self, model: Decoder, prompts: Sequence[Ids], longest: int, context: int | None = None
    ) -> None:
        self.model, self.context = model, context
        self.ids, self.real = pad_ids(prompts, "left", model.embedding().device)
        self.room = longest if context is None else context
        self.cache = model.cache(len(prompts), self.room)

    def step(self, newest: Tensor) -> Tensor:
        mask = Mask()
        if self.cache.used == 0 and self.real is not None:
            mask = Mask.padding(self.real)
        elif self.cache.used and self.context is not None:
            newest = self.slide(newest, self.context)
        hidden = self.model.hidden(newest, mask=mask, cache=self.cache)
        return self.model.answer(hidden[:, -1:])[:, 0]

    def slide(self, newest: Tensor, context: int) -> Tensor:
        """What to read: the newest token, or if the context is full, the newer half of all."""
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
    """Sequences as one batch, and which of it is real if they are not of one length.

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


def positions_of(side: Side) -> int | None:
    """Positions that a side can take, or None if there is no limit."""
    return side.positions.length if isinstance(side.positions, Learned) else None
