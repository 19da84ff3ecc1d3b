"""The loss of the best constant answer: entropy of the frequencies, or variance."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic import ClinicBatch
from addnorm.clinic.call_model import Objective
from addnorm.clinic.trivial import trivial_losses

pytestmark = pytest.mark.trains  # the constant is fitted with an optimizer


class Shape(nn.Module):
    """Returns noise of a given shape after the batch's own axes."""

    def __init__(self, outputs: int, pack: Any = lambda answer: answer) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs))
        self.pack = pack

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        answer = torch.randn(*x.shape, 1) * self.weight
        return self.pack(answer)


def cross_entropy(output: Any, targets: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    logits = logits[0] if isinstance(logits, tuple) else logits
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100)


def mean(values: list[float] | None) -> float:
    assert values is not None
    return sum(values) / len(values)


SHARES = torch.tensor([0.6, 0.3, 0.1, 0.0])
ENTROPY = -sum(p * math.log(p) for p in SHARES.tolist() if p)


def token_batches(count: int = 40) -> list[ClinicBatch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(SHARES, count * 64, True, generator=generator).view(count, 8, 8)
    ids[:, 0, 0] = -100  # ignored
    return [ClinicBatch(torch.randn(8, 8), each) for each in ids]


@pytest.mark.parametrize(
    "pack",
    (
        lambda answer: answer,
        lambda answer: (answer, "state"),
        lambda answer: SimpleNamespace(logits=answer),
        lambda answer: {"hidden": 0, "logits": answer},
    ),
    ids=("tensor", "tuple", "record", "dictionary"),
)
def test_tokens_have_the_entropy_of_their_frequencies(pack: Any) -> None:
    def loss(output: Any, targets: Tensor) -> Tensor:
        answer = output["logits"] if isinstance(output, dict) else output
        answer = answer[0] if isinstance(answer, tuple) else answer
        return cross_entropy(answer, targets)

    values = trivial_losses(Shape(4, pack), token_batches(), Objective(loss, "tokens"))
    assert mean(values) == pytest.approx(ENTROPY, abs=0.03)
    assert len(values or []) == 40 and len(set(values or [])) > 30


def test_numbers_have_the_variance_of_their_targets() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output.flatten(), targets)

    targets = 5 + 2 * torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    batches = [ClinicBatch(torch.randn(64), each) for each in targets]
    values = trivial_losses(Shape(1), batches, Objective(loss, "numbers"))
    assert mean(values) == pytest.approx(float(targets.var()), rel=0.05)


def test_a_loss_without_targets_is_probed_too() -> None:
    """The next token of the inputs, as `examine` compares by default."""

    def loss(output: Tensor, ids: Tensor) -> Tensor:
        return cross_entropy(output[:, :-1], ids[:, 1:])

    batches = [ClinicBatch(batch.targets.clamp(min=0)) for batch in token_batches()]  # type: ignore[union-attr]
    model = nn.Sequential(nn.Embedding(4, 4))
    values = trivial_losses(model, batches, Objective(loss, "next"))
    assert mean(values) == pytest.approx(ENTROPY, abs=0.05)


@pytest.mark.parametrize("numbers", (False, True))
def test_a_models_own_loss_is_judged_by_its_labels(numbers: bool) -> None:
    labels = [batch.targets for batch in token_batches()]
    if numbers:
        labels = [each.float() for each in labels if each is not None]
    batches = [ClinicBatch({"x": torch.randn(8, 8), "labels": each}) for each in labels]
    model = Shape(4, lambda answer: SimpleNamespace(logits=answer, loss=answer.mean()))
    own = Objective(lambda output, inputs: output.loss, "the model's own loss")
    values = trivial_losses(model, batches, own)
    expected = float(torch.stack(labels).var()) if numbers else ENTROPY  # type: ignore[arg-type]
    assert mean(values) == pytest.approx(expected, rel=0.03)
    without = [ClinicBatch({"x": torch.randn(8, 8)})]
    assert trivial_losses(model, without, own) is None
