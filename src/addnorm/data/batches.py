"""Which examples stand together, and in which order: by tokens, by length, by seed.

An epoch is a function of the seed and its number alone. To go on where a run stopped, keep the
number of the epoch and how many of its batches were done.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from addnorm.data.report import need_choice
from addnorm.errors import ConfigError, InputError

STEP = 0.08
"""Width of a length bucket, as a share of the length: the best of 0.03 to 0.15, for lines of 15
tokens and documents of 150, in batches of 1024 to 65536 tokens."""

Lengths = Sequence[int] | npt.NDArray[np.integer]


class Batches:
    """Batches of at most `tokens` padded tokens, over all sides together.

    `lengths` holds one sequence for each side: one for texts, two for pairs. In the layout padded,
    examples of about the same length stand together: the lengths are blurred by `noise`, anew in
    each epoch, then sorted and cut, and the batches shuffled. In the layout packed, examples stand
    together at random and only real tokens count: for rows that will be packed.

    With the noise as given, on 29,000 pairs of 15 tokens in batches of 4096, 94 % of the tokens are
    real, and of two examples in a batch one in seven meets the other again in the next epoch.

    >>> batches = Batches([[3, 9, 3, 8]], tokens=18)
    >>> sorted(sorted(batch) for batch in batches.epoch(0))
    [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        lengths: Sequence[Lengths],
        tokens: int,
        *,
        seed: int = 0,
        noise: float = 0.05,
        most: int | None = None,
        layout: str = "padded",
    ) -> None:
        need_choice("layout", layout, ("padded", "packed"))
        _need(tokens >= 1, f"a batch must have room for tokens: got tokens={tokens}. Try 4096.")
        _need(0 <= noise < 1, f"noise must be 0 or more and below 1: got {noise}. Try 0.05.")
        _need(most is None or most >= 1, f"a batch must have examples: got most={most}. Try 64.")
        self.lengths = _as_table(lengths)
        """(example, side)"""
        self.tokens, self.seed, self.noise = tokens, seed, noise
        self.most = len(self.lengths) if most is None else most
        self.layout = layout

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.lengths)

    def epoch(self, number: int) -> list[list[int]]:
        """The batches of an epoch, as numbers of examples; every example stands in exactly one.

        An example that exceeds the budget alone is a batch alone. In a batch, the longest examples
        come first.
        """
        generator = np.random.default_rng([self.seed, number])
        order = generator.permutation(len(self.lengths))
        if self.layout == "padded":
            blurred = self.lengths[order] * (
                1 + self.noise * generator.uniform(-1, 1, self.lengths.shape)
            )
            order = order[_sort(blurred)]
        batches = self._cut(order)
        totals = self.lengths.sum(axis=1)
        for batch in batches:
            batch.sort(key=totals.__getitem__, reverse=True)
        return [batches[place] for place in generator.permutation(len(batches))]

    def padded(self, batch: Sequence[int]) -> int:
        """Tokens of a batch, padding among them."""
        return len(batch) * int(self.lengths[list(batch)].max(axis=0).sum())

    def efficiency(self, number: int = 0) -> float:
        """The share of real tokens among all, padding included, in an epoch."""
        return float(self.lengths.sum() / sum(self.padded(batch) for batch in self.epoch(number)))

    @property
    def over(self) -> list[int]:
        """Examples that exceed the budget alone."""
        numbers: list[int] = np.flatnonzero(self.lengths.sum(axis=1) > self.tokens).tolist()
        return numbers

    def _cut(self, order: npt.NDArray[np.integer]) -> list[list[int]]:
        """Batches of neighbours, each as large as the budget allows."""
        batches: list[list[int]] = []
        top = [0] * self.lengths.shape[1]
        total, is_padded = 0, self.layout == "padded"
        for number, row in zip(order.tolist(), self.lengths[order].tolist(), strict=True):
            top = [max(pair) for pair in zip(top, row, strict=True)]
            total += sum(row)
            size = len(batches[-1]) + 1 if batches else 1
            cost = size * sum(top) if is_padded else total
            if not batches or cost > self.tokens or size > self.most:
                batches.append([])
                top, total = row, sum(row)
            batches[-1].append(number)
        return batches


def shard(batches: Sequence[Sequence[int]], rank: int, world: int) -> list[list[int]]:
    """This worker's part of every batch: examples rank, rank + world, rank + 2 world, ...

    The batches are made without knowing how many workers there are, and each is dealt out like
    cards. So all workers take the same number of steps, step i of all of them together is batch i
    of one worker, and, as the longest examples come first, the parts are of about equal work. A
    batch with fewer examples than workers leaves some without: such a worker must take part in the
    step with no tokens of its own (any example, all its targets IGNORE).

    >>> shard([[4, 2, 7], [1, 0, 3]], rank=1, world=2)
    [[2], [0]]
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank must be 0 to world - 1: got rank={rank}, world={world}.")
    return [list(batch[rank::world]) for batch in batches]


def _sort(lengths: npt.NDArray[np.floating]) -> npt.NDArray[np.integer]:
    """An order in which neighbours are of about the same lengths on all sides.

    By buckets of the last side; inside a bucket by the other sides, up and down by turns, so that
    the end of a bucket is like the beginning of the next.
    """
    buckets = np.floor(np.log(np.maximum(lengths[:, -1], 0.5)) / STEP)
    turn = np.where(buckets % 2 == 0, 1, -1)
    others = [column * turn for column in lengths[:, :-1].T]
    inside = others or [lengths[:, -1]]
    return np.lexsort((*inside, buckets))


def _as_table(lengths: Sequence[Lengths]) -> npt.NDArray[np.int64]:
    """Lengths of one or more sides as a table, (example, side)."""
    sides = [np.asarray(side) for side in lengths]
    counts = {side.shape for side in sides}
    if not sides or len(counts) != 1 or sides[0].ndim != 1 or not sides[0].size:
        given = ", ".join(str(side.shape) for side in sides) or "none"
        raise InputError(
            "lengths must be one sequence for each side, equally long and not empty: "
            f"got shapes {given}. For one side, write [lengths]."
        )
    table = np.stack(sides, axis=1)
    if not np.issubdtype(table.dtype, np.integer) or table.min() < 0:
        raise InputError(f"lengths must be whole numbers, 0 or more: got {table.dtype} ones.")
    return table.astype(np.int64)


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
