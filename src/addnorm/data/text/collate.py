"""Rows of token ids to the tensors of a batch: padded, shifted, and with targets.

A source ends with END, so that it is never empty. A target is read after BEGIN and ends with END.
Imported tokenizers have special ids of their own, given as `special`.
Other texts are enclosed by both. `Batches` must count these tokens: see `pair_lengths` and
`text_lengths`.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from addnorm.data.text.special_tokens import IGNORE, OURS, PAD, SpecialIds
from addnorm.errors import InputError

TokenRows = Sequence[Sequence[int]]


class PairBatch(NamedTuple):
    """A batch for an encoder-decoder."""

    source: Tensor
    """(batch, source length)"""
    target_in: Tensor
    """(batch, target length): the decoder's input, the target shifted right by one."""
    target: Tensor
    """(batch, target length): the tokens to predict; IGNORE for padding."""


class TokenBatch(NamedTuple):
    """A batch for a language model, or for masked pre-training."""

    inputs: Tensor
    """(batch, length)"""
    targets: Tensor
    """(batch, length): the next token, or the masked one; IGNORE where there is none."""


class TextBatch(NamedTuple):
    """A batch for a classifier."""

    inputs: Tensor
    """(batch, length)"""
    labels: Tensor
    """(batch,)"""


def pad(rows: TokenRows, value: int = PAD) -> Tensor:
    """Return rows of several lengths as one tensor, (rows, longest), padded on the right.

    >>> pad([[5, 6, 7], [8]])
    tensor([[5, 6, 7],
            [8, 0, 0]])
    """
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    longest, total = int(lengths.max(initial=0)), int(lengths.sum())
    table = np.full((len(rows), longest), value, dtype=np.int64)
    # One pass over all ids, and one over the table: several times faster than row by row.
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=total)
    table[np.arange(longest) < lengths[:, None]] = ids
    return torch.from_numpy(table)


def pair_lengths(
    sources: TokenRows, targets: TokenRows, special: SpecialIds = OURS
) -> list[list[int]]:
    """Return the lengths of both sides as `collate_pairs` makes them."""
    _check_equal(len(sources), len(targets), "targets")
    more = len(special.opening) + 1
    return [[len(row) + more for row in sources], [len(row) + 1 for row in targets]]


def text_lengths(rows: TokenRows) -> list[list[int]]:
    """Return the lengths of rows enclosed by BEGIN and END, as `collate_labelled` makes them."""
    return [[len(row) + 2 for row in rows]]


def collate_pairs(
    sources: TokenRows,
    targets: TokenRows,
    source_special: SpecialIds = OURS,
    target_special: SpecialIds = OURS,
) -> PairBatch:
    """Return the batch of an encoder-decoder, the decoder's input shifted by one.

    >>> batch = collate_pairs([[5, 6]], [[7, 8, 9]])
    >>> batch.source.tolist(), batch.target_in.tolist(), batch.target.tolist()
    ([[5, 6, 2]], [[1, 7, 8, 9]], [[7, 8, 9, 2]])
    """
    _check_equal(len(sources), len(targets), "targets")
    return PairBatch(
        pad([delimit_source(row, source_special) for row in sources], source_special.pad),
        pad([[target_special.begin, *row] for row in targets], target_special.pad),
        pad([[*row, target_special.end] for row in targets], IGNORE),
    )


def delimit_source(row: Sequence[int], special: SpecialIds = OURS) -> list[int]:
    """Return a source as the encoder of an encoder-decoder reads it.

    >>> delimit_source([5, 6])
    [5, 6, 2]
    """
    return [*special.opening, *row, special.end]


def collate_labelled(
    rows: TokenRows, labels: Sequence[int], special: SpecialIds = OURS
) -> TextBatch:
    """Return texts enclosed by BEGIN and END, and their labels as numbers."""
    _check_equal(len(rows), len(labels), "labels")
    texts = pad([[special.begin, *row, special.end] for row in rows], special.pad)
    return TextBatch(texts, torch.tensor(labels, dtype=torch.long))


def _check_equal(rows: int, others: int, what: str) -> None:
    if rows != others:
        raise InputError(f"there must be as many {what} as rows: got {others} for {rows}.")
