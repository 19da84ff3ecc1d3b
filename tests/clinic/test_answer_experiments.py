"""What the answers read: all tokens, their own label, the places of an image."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic import ClinicBatch
from tests.clinic.test_causes import VOCAB, WIDTH, Decoder, ids, look


class Classes(Decoder):
    """One answer for each row, read at one position or from the mean."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.read, self.classes = read, nn.Linear(VOCAB, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.classes(self.read(super().forward(ids)))


def labelled() -> ClinicBatch:
    return ClinicBatch(ids(), torch.arange(5) % 3)


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda x: x[:, 0], ["one token read"]),
        (lambda x: x[:, -1], []),
        (lambda x: x.mean(1), []),
    ],
)
def test_an_answer_that_reads_one_token(read: Any, found: list[str]) -> None:
    assert look(Classes(read), labelled(), F.cross_entropy).names() == found


def test_branches_that_start_at_zero_hide_nothing() -> None:
    model = Classes(lambda x: x[:, -1])
    for block in model.blocks:
        nn.init.zeros_(block.out.weight)
        nn.init.zeros_(block.out.bias)
    found = look(model, labelled(), F.cross_entropy)
    assert found.evidence.experiments.only_token_read == ""


class Pair(nn.Module):
    """A decoder that reads its labels, shifted or not; the source is added to the stream."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.inner, self.shift, self.source = Decoder(), shift, nn.Embedding(VOCAB, WIDTH)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        read = F.pad(labels[:, :-1], (1, 0)) if self.shift else labels
        logits = self.inner(read) + self.source(input_ids).mean((1, 2))[:, None, None]
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("shift", [True, False])
def test_a_decoder_that_reads_its_labels_unshifted(shift: bool) -> None:
    batch = {"input_ids": ids(5, 7), "labels": ids(5, 9)}
    found = look(Pair(shift), batch, None)
    assert ("answer reads its label" in found.names()) is not shift


class Patches(nn.Module):
    """Patches of images with or without positions, the mean as the answer."""

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 4, 4)
        self.places = nn.Parameter(torch.randn(16, WIDTH) * 0.1) if positions else None
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = x if self.places is None else x + self.places
        return self.head(self.stack(x).mean(1))


@pytest.mark.parametrize("positions", [True, False])
def test_patches_without_positions(positions: bool) -> None:
    batch = ClinicBatch(torch.randn(5, 1, 16, 16), torch.arange(5) % 3)
    names = look(Patches(positions), batch, F.cross_entropy).names()
    assert names == ([] if positions else ["patch positions not distinguished"])
