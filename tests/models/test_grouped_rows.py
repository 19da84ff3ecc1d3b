"""Several sequences in one row, separated by `Mask.grouped`, give the same as each alone."""

import pytest
import torch
from torch import Tensor

from addnorm import Mask
from addnorm.data.text.collate import collate_pairs, pad
from addnorm.data.text.special_tokens import BEGIN, END, FIRST
from tests.conftest import VOCAB, close, make

MEMBERS = ([4, 3], [0, 1], [2])
"""For each row, the numbers of the sequences in it."""


def random_rows(*lengths: int) -> list[list[int]]:
    return [torch.randint(FIRST, VOCAB, (length,)).tolist() for length in lengths]


def join(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the ids and group numbers of all rows, (rows, length); 0 for padding."""
    ids = [[token for number in row for token in sequences[number]] for row in MEMBERS]
    groups = [[n for n, number in enumerate(row, 1) for _ in sequences[number]] for row in MEMBERS]
    return pad(ids), pad(groups)


@pytest.mark.parametrize("mode", ("encoder", "decoder"))
def test_sequences_packed_in_one_row_do_not_see_each_other(mode: str) -> None:
    model = make(mode)
    sequences = random_rows(7, 5, 4, 3, 9)
    ids, groups = join(sequences)
    out = model(ids, mask=Mask.grouped(groups))
    for row, members in enumerate(MEMBERS):
        for group, number in enumerate(members, start=1):
            alone = model(torch.tensor([sequences[number]]))[0]
            close(out[row][groups[row] == group], alone)


def test_pairs_packed_in_one_row_see_only_their_own_source() -> None:
    model = make("encoder-decoder")
    sources, targets = random_rows(6, 5, 4, 3, 8), random_rows(3, 7, 4, 2, 6)
    source, source_groups = join([[*row, END] for row in sources])
    target_in, target_groups = join([[BEGIN, *row] for row in targets])
    memory = model.encode(source, mask=Mask.grouped(source_groups))  # type: ignore[operator]
    masks = {
        "mask": Mask.grouped(target_groups),
        "memory_mask": Mask.grouped(target_groups, source_groups),
    }
    out = model.apply_head(model.decode(target_in, memory, **masks))  # type: ignore[operator]
    for row, members in enumerate(MEMBERS):
        for group, number in enumerate(members, start=1):
            one_source, one_target, _ = collate_pairs([sources[number]], [targets[number]])
            close(out[row][target_groups[row] == group], model(one_source, one_target)[0])
