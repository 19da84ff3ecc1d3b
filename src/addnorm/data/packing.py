"""Several sequences in one row, instead of padding; `Mask.grouped` keeps them apart."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from addnorm.data.collate import Rows, pad
from addnorm.data.special import BEGIN, END, IGNORE, PAD
from addnorm.errors import InputError

Members = list[list[int]]
"""For each packed row, the numbers of the sequences in it, in their order."""


class Packed(NamedTuple):
    """Sequences packed into rows."""

    ids: Tensor
    """(rows, length)"""
    groups: Tensor
    """(rows, length): 1 for a row's first sequence, 2 for the next, ...; 0 for padding."""
    members: Members


class PackedPairs(NamedTuple):
    """Pairs packed into rows: a row of targets holds the same pairs as its row of sources."""

    source: Tensor
    """(rows, source length)"""
    source_groups: Tensor
    """(rows, source length)"""
    target_in: Tensor
    """(rows, target length)"""
    target: Tensor
    """(rows, target length): IGNORE where there is nothing to say."""
    target_groups: Tensor
    """(rows, target length)"""
    members: Members


def pack(rows: Rows, length: int) -> Packed:
    """Put sequences into as few rows of at most `length` tokens as first fit decreasing finds.

    Self-attention under `Mask.grouped(groups)` sees each sequence alone, at its own positions.

    >>> pack([[5, 6, 7], [8, 9], [5]], length=3).ids.tolist()
    [[5, 6, 7], [8, 9, 5]]
    """
    members = fit([[len(row) for row in rows]], length)
    return Packed(lay(rows, members), number(rows, members), members)


def pack_pairs(sources: Rows, targets: Rows, length: int) -> PackedPairs:
    """Put pairs into rows of at most `length` tokens on either side, shifted as for a decoder.

    The decoder looks at the memory under `Mask.grouped(target_groups, source_groups)`.
    """
    source = [[*row, END] for row in sources]
    target_in, target = [[BEGIN, *row] for row in targets], [[*row, END] for row in targets]
    members = fit([[len(row) for row in side] for side in (source, target)], length)
    return PackedPairs(
        lay(source, members),
        number(source, members),
        lay(target_in, members),
        lay(target, members, IGNORE),
        number(target, members),
        members,
    )


def fit(lengths: Sequence[Sequence[int]], room: int) -> Members:
    """Which sequences share a row, if each side of a row has so much room.

    First fit decreasing: from the longest down, each goes into the first row that has room for it
    on every side; at most 11/9 of the fewest rows, for one side (Johnson, 1973). Meant for a batch
    or some ten thousand sequences: the time grows with their number times that of the rows.
    """
    table = np.array(lengths).T  # (sequence, side)
    if table.size and table.max() > room:
        worst = int(table.max(axis=1).argmax())
        raise InputError(
            f"a sequence must fit into a row of {room} tokens: number {worst} has "
            f"{table[worst].max()}. Cut it, or make the rows longer."
        )
    free = np.full_like(table, room)  # (row, side)
    members: Members = []
    for place in np.argsort(-table.sum(axis=1), kind="stable").tolist():
        fits = (free[: len(members) + 1] >= table[place]).all(axis=1)
        row = int(fits.argmax())
        if row == len(members):
            members.append([])
        members[row].append(place)
        free[row] -= table[place]
    return members


def lay(rows: Rows, members: Members, value: int = PAD) -> Tensor:
    """Sequences one after another in their packed rows, (rows, length), padded with a value."""
    return pad([[token for place in row for token in rows[place]] for row in members], value)


def number(rows: Rows, members: Members) -> Tensor:
    """The group of each token of packed rows, counted from 1 in each row; 0 for padding."""
    return pad(
        [[group + 1 for group, place in enumerate(row) for _ in rows[place]] for row in members], 0
    )
