"""Learning from rows without answers: each loss by hand, and what `fit` begins with."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from addnorm.data.prepare import Encoded
from addnorm.errors import ConfigError
from addnorm.models.tabular import TabularConfig, TokenModel, build_tabular, trunk_of
from addnorm.tabular import FTTransformerClassifier, SAINTClassifier, TabTransformerClassifier
from addnorm.tabular.pretrain import METHODS, Guesser, mark, replaced
from tests.tabular.data import QUICK, people

X, Y = people()
TRUNK: dict[str, Any] = {"width": 16, "depth": 1, "heads": 2, "ffn_width": 8}


def guesser(method: str) -> Guesser:
    config = TabularConfig(
        kind="ft", numbers=2, categories=(4, 3), outputs=1, trunk=trunk_of("ft", **TRUNK)
    )
    return Guesser(build_tabular(config), method).eval()


def rows() -> dict[str, Tensor]:
    codes = torch.stack((torch.randint(4, (6,)), torch.randint(3, (6,))), dim=1)
    batch = mark(Encoded(torch.randn(6, 2), codes))
    batch["numbers"][0, 0] = float("nan")
    batch["hide_numbers"][:2, 0] = True
    return batch


@torch.no_grad()
def test_masked_cells_are_told() -> None:
    model, batch = guesser("masked"), rows()
    numbers, codes = batch["numbers"].clone(), batch["codes"].clone()
    numbers[batch["hide_numbers"]], codes[batch["hide_codes"]] = float("nan"), 0
    hidden = model.states(numbers, codes)
    assert model.numbers is not None
    squares = [
        float(
            hidden[r, j] @ model.numbers.weight[j] + model.numbers.bias[j] - batch["numbers"][r, j]
        )
        ** 2
        for r in range(6)
        for j in range(2)
        if batch["hide_numbers"][r, j] and not batch["numbers"][r, j].isnan()
    ]
    wanted = sum(squares) / len(squares)
    for j, head in enumerate(model.categories):
        asked = [r for r in range(6) if batch["hide_codes"][r, j]]
        told = [-float(head(hidden[r, 2 + j]).log_softmax(0)[batch["codes"][r, j]]) for r in asked]
        wanted += sum(told) / max(len(told), 1) / 2
    assert float(model(batch)) == pytest.approx(wanted, rel=1e-4)


@torch.no_grad()
def test_replaced_cells_are_found() -> None:
    model, batch = guesser("replaced"), rows()
    numbers, codes = replaced(batch)
    for r in range(6):
        other = int(batch["order"][r])
        for j in range(2):
            source = other if batch["hide_codes"][r, j] else r
            assert codes[r, j] == batch["codes"][source, j]
    hidden, total = model.states(numbers, codes), 0.0
    for r in range(6):
        for t in range(4):
            now = numbers[r, t] if t < 2 else codes[r, t - 2]
            was = batch["numbers"][r, t] if t < 2 else batch["codes"][r, t - 2]
            same = bool(now == was) or (math.isnan(float(now)) and math.isnan(float(was)))
            p = torch.sigmoid(hidden[r, t] @ model.found.weight[t] + model.found.bias[t])
            total -= math.log(float(1 - p if same else p))
    assert float(model(batch)) == pytest.approx(total / 24, rel=1e-4)


@torch.no_grad()
def test_rows_are_told_apart() -> None:
    model, batch = guesser("contrastive"), rows()
    body = model.body
    assert isinstance(body, TokenModel)
    views = []
    for numbers, codes in ((batch["numbers"], batch["codes"]), replaced(batch)):
        z = model.project(body.hidden(body.tokens(numbers, codes))[:, 0])
        views.append([row / row.norm() for row in z])
    total = 0.0
    for one, other in (views, views[::-1]):
        for i in range(6):
            each = [math.exp(float(one[i] @ other[j]) / 0.7) for j in range(6)]
            total -= math.log(each[i] / sum(each)) / 12
    assert float(model(batch)) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_and_fit_begins_there(method: str) -> None:
    settings = QUICK | {"epochs": 12, "embedding": "piecewise"}
    model = FTTransformerClassifier(**settings).pretrain(X, method=method)
    history = [row["loss"] for row in model.pretrained_.history]
    assert min(history) < history[0]
    begun = model.pretrained_.begin(2).state_dict()
    body = model.pretrained_.body.state_dict()
    assert all(torch.equal(begun[n], body[n]) for n in body if not n.startswith("head."))
    model.set_params(epochs=1).fit(X.take(np.arange(60)), Y[:60])
    assert model.recipe_ == model.pretrained_.recipe and model.predict(X).shape == (240,)


@pytest.mark.parametrize("kind", (SAINTClassifier, TabTransformerClassifier))
@pytest.mark.parametrize("method", ("masked", "replaced"))
def test_the_others_can_be_pretrained(kind: Any, method: str) -> None:
    model = kind(**QUICK | {"epochs": 1}).pretrain(X, method=method).fit(X, Y)
    assert model.predict(X).shape == (240,)


def test_errors() -> None:
    quick = QUICK | {"epochs": 1}
    with pytest.raises(ConfigError, match=r"method has no choice 'maskd'\. Did you mean 'masked'"):
        FTTransformerClassifier(**quick).pretrain(X, method="maskd")
    with pytest.raises(ConfigError, match="TabTransformer is pre-trained on its categories"):
        TabTransformerClassifier(**quick).pretrain(X, method="contrastive")
