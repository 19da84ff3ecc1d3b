"""With an output length the last block computes the first positions only: the same results."""

import pytest
import torch
from torch import nn

from addnorm.config import ModelConfig
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.attention import SelfAttention
from addnorm.layers.context import Context
from addnorm.layers.feedforward import FeedForward
from addnorm.layers.masks import Mask
from addnorm.models.build import make_side
from addnorm.models.transformer import Side
from tests.conftest import close
from tests.naive import randomise_


def side(**changes: object) -> Side:
    settings = {"vocab": 9, "width": 16, "depth": 2, "heads": 4, "dropout": 0.0}
    c = ModelConfig(mode="encoder", **(settings | changes))  # type: ignore[arg-type]
    with torch.no_grad():
        model = randomise_(make_side(c, "encoder"), std=0.2)
    assert isinstance(model, Side)
    return model.double().eval()


@pytest.mark.parametrize("length", (1, 3))
@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_the_first_positions_are_the_same(addnorm: str, length: int) -> None:
    model, x = side(addnorm=addnorm), torch.randn(2, 5, 16).double()
    part = model(x, Context(output_length=length))
    assert part.shape == (2, length, 16)
    close(part, model(x, Context())[:, :length])


@pytest.mark.parametrize("positions", ("rotary", "buckets", "relative", "linear-bias", "learned"))
def test_every_position_scheme_works(positions: str) -> None:
    model, x = side(positions=positions), torch.randn(2, 5, 16).double()
    close(model(x, Context(output_length=2)), model(x, Context())[:, :2])


@pytest.mark.parametrize(
    "changes",
    (
        {"kv_heads": 2},
        {"qk_norm": "head"},
        {"attention_bias": "none"},
        {"attention": "additive"},
        {"norm": "rms", "final_norm": True},
        {"depth": 0},
        {"depth": 1},
    ),
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_other_settings_work(changes: dict[str, object]) -> None:
    model, x = side(**changes), torch.randn(2, 5, 16).double()
    close(model(x, Context(output_length=2)), model(x, Context())[:, :2])


def test_padding_stays_hidden() -> None:
    model, x = side(), torch.randn(2, 5, 16).double()
    mask = Mask.padding(torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    part = model(x, Context(mask=mask, output_length=1))
    close(part, model(x, Context(mask=mask))[:, :1])


def test_the_map_has_a_row_for_each_query() -> None:
    model, x = side(), torch.randn(2, 5, 16).double()
    whole, part = Context(maps={}), Context(maps={}, output_length=2)
    model(x, whole), model(x, part)
    assert whole.maps is not None and part.maps is not None
    first, last = part.maps
    close(part.maps[first], whole.maps[first])
    close(part.maps[last], whole.maps[last][:, :, :2])


def test_gradients_are_the_same() -> None:
    model, x = side(addnorm="pre"), torch.randn(2, 5, 16).double()
    grads = []
    for length in (None, 1):
        model.zero_grad()
        model(x, Context(output_length=length))[:, :1].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*grads, strict=True):
        close(one, other)


def test_only_the_last_block_computes_fewer_positions() -> None:
    model, x = side(), torch.randn(2, 5, 16).double()
    lengths: dict[str, int] = {}

    def note(name: str) -> object:
        def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            lengths[name] = output.shape[1]

        return hook

    for name, module in model.named_modules():
        if isinstance(module, FeedForward):
            module.register_forward_hook(note(name))  # type: ignore[arg-type]
        if isinstance(module, SelfAttention):
            module.output.register_forward_hook(note(name))  # type: ignore[arg-type]
    model(x, Context(output_length=1))
    assert list(lengths.values()) == [5, 5, 1, 1]
