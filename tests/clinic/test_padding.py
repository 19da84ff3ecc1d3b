"""Padding: which answers read it, and whether the loss counts it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import addnorm
from addnorm.clinic import ClinicBatch, Examination
from addnorm.clinic.call_model import MIN_CHANGE, NotExamined
from addnorm.clinic.padding_experiments import padding_change
from tests import theirs

PAD, VOCAB, WIDTH, LENGTH = 0, 32, 16, 10


class Encoder(nn.Module):
    """Two blocks of torch's attention, which returns its weights, without a mask by default."""

    def __init__(self, answers: str = "tokens", *, masked: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.norm, self.answers, self.masked = nn.LayerNorm(WIDTH), answers, masked
        sizes = {"tokens": VOCAB, "numbers": 1, "classes": LENGTH}
        self.head = nn.Linear(WIDTH, sizes[answers])

    def attend(self, layer: nn.Module, y: Tensor, hidden: Tensor | None) -> Tensor:
        out: Tensor = layer(y, y, y, key_padding_mask=hidden)[0]
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for layer, norm in zip(self.attention, self.norms, strict=True):
            h = h + self.attend(layer, norm(h), x == PAD if self.masked else None)
        h = self.norm(h)
        out: Tensor = self.head(h.mean(dim=1) if self.answers == "classes" else h)
        return out.squeeze(-1) if self.answers == "numbers" else out


class HeadsFirst(Encoder):
    """Weights of (heads · rows, query, key): another order than torch's."""

    def attend(self, layer: nn.Module, y: Tensor, hidden: Tensor | None) -> Tensor:
        parts = torch.cat(y.chunk(4, dim=-1))
        scores = parts @ parts.transpose(-1, -2)
        if hidden is not None:
            scores = scores.masked_fill(hidden.repeat(4, 1)[:, None], -1e9)
        return torch.cat((scores.softmax(dim=-1) @ parts).chunk(4), dim=-1) @ layer.out_proj.weight


class Unseen(Encoder):
    """Attention without a softmax that could be seen."""

    def attend(self, layer: nn.Module, y: Tensor, hidden: Tensor | None) -> Tensor:
        weights = (y @ y.transpose(-1, -2)).exp()
        return (weights / weights.sum(dim=-1, keepdim=True)) @ y @ layer.out_proj.weight


class Neighbours(Encoder):
    """A convolution reads the padding; attention does not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.pad(x.float(), (0, 1), value=VOCAB)[:, 1:, None]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def padded(rows: int = 4) -> Tensor:
    x = torch.randint(1, VOCAB, (rows, LENGTH))
    x[0, 7:] = x[2, 5:] = PAD
    return x


def change(model: nn.Module) -> float:
    with torch.no_grad():
        return padding_change(model.eval(), ClinicBatch(padded()), PAD)


def quick(model: nn.Module, batch: object, **options: object) -> Examination:
    return addnorm.examine(model, batch, sharpness=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Encoder, HeadsFirst])
def test_attention_whose_weights_have_heads_and_rows_on_one_axis(kind: type[Encoder]) -> None:
    assert change(kind()) > 0.01
    assert change(kind(masked=True)) < MIN_CHANGE


def test_weights_that_were_not_seen_rule_nothing_out() -> None:
    with pytest.raises(NotExamined, match="no attention weights were seen"):
        change(Unseen())
    result = quick(Unseen(), padded(), pad=PAD, causal=False)
    assert {c.name: c.outcome for c in result.checks}["padding"] == "not examined"


def test_the_order_of_rows_and_heads_may_leave_open_who_reads_the_padding() -> None:
    with pytest.raises(NotExamined, match="which weights are a row's is unclear"):
        change(Neighbours(masked=True))


@pytest.mark.parametrize("answers", ["numbers", "classes"])
def test_one_number_for_each_token_or_one_class_for_each_row(answers: str) -> None:
    if answers == "classes":  # the mean over all positions reads the padding
        assert change(Encoder(answers, masked=True)) > 0.01
        return
    assert change(Encoder(answers)) > 0.01
    assert change(Encoder(answers, masked=True)) < MIN_CHANGE


def test_the_default_loss_does_not_count_the_padding_passed_in() -> None:
    result = quick(Encoder(masked=True), padded(), pad=PAD, causal=False)
    assert result.names() == []


def test_padded_targets_are_counted_although_the_source_is_padded() -> None:
    model = theirs.bart()
    pad = model.config.pad_token_id
    source, labels = torch.randint(3, VOCAB, (4, 9)), torch.randint(3, VOCAB, (4, 8))
    source[0, 6:] = pad
    batch = {"input_ids": source, "attention_mask": (source != pad).long()}
    labels[1, 4:] = labels[2, 5:] = -100
    assert "padding in the loss" not in quick(model, {**batch, "labels": labels}).names()
    labels = labels.where(labels >= 0, pad)
    assert quick(model, {**batch, "labels": labels}).names() == ["padding in the loss"]
