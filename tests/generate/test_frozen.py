"""Copies for inference: every matrix replaced, the original untouched, limits said clearly."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from addnorm import ModelConfig, build
from addnorm.errors import InputError, SavedError
from addnorm.generate import pack, quantise
from addnorm.generate.frozen import Frozen, FrozenHead
from tests.conftest import inputs, make

MODES = ("encoder", "decoder", "encoder-decoder")
kinds = pytest.mark.parametrize("freeze", (pack, quantise), ids=("pack", "quantise"))
Freeze = Callable[[Any], Any]


@kinds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tie", ("all", "none"))
def test_every_matrix_is_replaced(freeze: Freeze, mode: str, tie: str) -> None:
    model = make(mode, tie=tie).float()
    frozen = freeze(model)
    assert not any(type(part) is nn.Linear for part in frozen.modules())
    assert isinstance(frozen.head, FrozenHead) and frozen.head.weight is None
    before = sum(type(part) is nn.Linear for part in model.modules())
    assert sum(isinstance(part, Frozen) for part in frozen.modules()) == before + 1
    assert all(parameter.ndim < 2 for parameter in frozen.head.parameters())


@kinds
def test_the_model_itself_is_left_alone(freeze: Freeze) -> None:
    model = make("encoder-decoder").float().train()
    before = copy.deepcopy(model.state_dict())
    frozen = freeze(model)
    after = model.state_dict()
    assert list(before) == list(after) and model.training and not frozen.training
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name])
    given = inputs("encoder-decoder")
    kept = frozen(*given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(frozen(*given), kept)
    assert all(not parameter.requires_grad for parameter in frozen.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("freeze", "said"),
    (
        (pack, r"^a packed model cannot be saved\. Save the model .* made from, and pack after"),
        (quantise, r"^an int8 model cannot be saved\. Save the model .* from, and quantise after"),
    ),
    ids=("pack", "quantise"),
)
def test_it_cannot_be_saved(freeze: Freeze, said: str, tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=said):
        freeze(make("decoder").float()).save(tmp_path / "run")


@kinds
def test_a_model_elsewhere_than_on_a_cpu(freeze: Freeze) -> None:
    config = ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=1)
    model = build(config).to("meta")
    message = r"^int8 and packed matrices are for models on a CPU: got meta\.$"
    with pytest.raises(InputError, match=message):
        freeze(model)
