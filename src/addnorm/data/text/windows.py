"""Windows of a long stream of tokens, for language models."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from addnorm.data.text.collate import TokenBatch
from addnorm.data.text.reading_report import check_choice
from addnorm.data.text.special_tokens import END, IGNORE, PAD
from addnorm.errors import ConfigError, InputError

Window = tuple[int, int]
"""Index of a window's first input, and the index after its last; the targets are one further."""


def join_texts(rows: Iterable[Sequence[int]]) -> Tensor:
    """Return texts as one stream, (tokens,), each followed by END.

    >>> join_texts([[5, 6], [7]])
    tensor([5, 6, 2, 7, 2])
    """
    ids = chain.from_iterable((*row, END) for row in rows)
    return torch.from_numpy(np.fromiter(ids, dtype=np.int64))


class Windows:
    """Batches of windows of a stream, as a function of seed and epoch.

    Each token but the first is a target exactly once in an epoch, as the short windows at both ends
    are kept.

    Parameters
    ----------
    tokens
        Length of the stream.
    length
        Inputs in a window.
    rows
        Windows in a batch.
    seed
        Decides offset and order, together with the number of the epoch.
    order
        ``shuffled``: adjacent windows that begin at another offset in each epoch, in random order.
        ``straight``: adjacent windows from the start of the stream in its order, for evaluation.

    Examples
    --------
    >>> Windows(8, length=3, rows=2, order="straight").epoch(0)
    [[(0, 3), (3, 6)], [(6, 7)]]
    """

    def __init__(
        self, tokens: int, length: int, rows: int, *, seed: int = 0, order: str = "shuffled"
    ) -> None:
        self._order = ORDERS[check_choice("order", order, tuple(ORDERS))]
        if length < 1 or rows < 1:
            raise ConfigError(
                f"windows must have 1 token and 1 row or more: got length={length}, rows={rows}."
            )
        if tokens < 2:
            raise InputError(
                f"a stream must have a token to read and one to predict: got {tokens} tokens."
            )
        self.tokens, self.length, self.rows = tokens, length, rows
        self.seed = seed

    def epoch(self, number: int) -> list[list[Window]]:
        """Return the batches of an epoch."""
        generator = np.random.default_rng([self.seed, number])
        # The last token is only a target.
        windows = self._order(self.tokens - 1, self.length, generator)
        return [windows[start : start + self.rows] for start in range(0, len(windows), self.rows)]


def collate_windows(stream: Tensor, windows: Sequence[Window], pad: int = PAD) -> TokenBatch:
    """Return the inputs and next tokens of windows of a stream, (tokens,); short ones are padded.

    >>> batch = collate_windows(torch.tensor([5, 6, 7, 8]), [(0, 2), (2, 3)])
    >>> batch.inputs.tolist(), batch.targets.tolist()
    ([[5, 6], [7, 0]], [[6, 7], [8, -100]])
    """
    first, stop = torch.tensor(windows).unbind(dim=1)
    places = first[:, None] + torch.arange(int((stop - first).max()))  # (batch, length)
    real = places < stop[:, None]
    places = torch.where(real, places, 0)
    # Converted first: a stream of small unsigned integers cannot hold IGNORE.
    inputs = torch.where(real, stream[places].long(), pad)
    return TokenBatch(inputs, torch.where(real, stream[places + 1].long(), IGNORE))


def _straight(inputs: int, length: int, generator: np.random.Generator) -> list[Window]:
    return list(pairwise([*range(0, inputs, length), inputs]))


def _shuffled(inputs: int, length: int, generator: np.random.Generator) -> list[Window]:
    offset = int(generator.integers(length))
    windows = list(pairwise([0, *range(offset or length, inputs, length), inputs]))
    return [windows[place] for place in generator.permutation(len(windows))]


ORDERS: dict[str, Callable[[int, int, np.random.Generator], list[Window]]] = {
    "shuffled": _shuffled,
    "straight": _straight,
}
