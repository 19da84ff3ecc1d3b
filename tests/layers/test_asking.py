"""Only the first positions ask in the last block: the same answers, for every arrangement."""

import pytest
import torch

from addnorm.config import ModelConfig
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.context import Context, Mask
from addnorm.models.build import make_side
from addnorm.models.transformer import Side
from tests.conftest import close
from tests.naive import randomise_


def side(**changes: object) -> Side:
    settings = {"vocab": 9, "width": 16, "depth": 2, "heads": 4, "dropout": 0.0}
    c = ModelConfig(mode="encoder", **(settings | changes))  # type: ignore[arg-type]
    with torch.no_grad():
        made = randomise_(make_side(c, "encoder"), std=0.2)
    assert isinstance(made, Side)
    return made.double().eval()


@pytest.mark.parametrize("asking", (1, 3))
@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_the_first_positions_get_the_same(addnorm: str, asking: int) -> None:
    model, x = side(addnorm=addnorm), torch.randn(2, 5, 16).double()
    found = model(x, Context(), asking)
    assert found.shape == (2, asking, 16)
    close(found, model(x, Context())[:, :asking])


@pytest.mark.parametrize("positions", ("rotary", "buckets", "relative", "linear-bias", "learned"))
def test_positions_play_their_part(positions: str) -> None:
    model, x = side(positions=positions), torch.randn(2, 5, 16).double()
    close(model(x, Context(), 2), model(x, Context())[:, :2])


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
def test_other_choices_play_theirs(changes: dict[str, object]) -> None:
    model, x = side(**changes), torch.randn(2, 5, 16).double()
    close(model(x, Context(), 2), model(x, Context())[:, :2])


def test_padding_stays_hidden() -> None:
    model, x = side(), torch.randn(2, 5, 16).double()
    mask = Mask.padding(torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    close(model(x, Context(mask=mask), 1), model(x, Context(mask=mask))[:, :1])


def test_the_map_has_a_row_for_each_that_asks() -> None:
    model, x = side(), torch.randn(2, 5, 16).double()
    whole, part = Context(maps={}), Context(maps={})
    model(x, whole), model(x, part, 2)
    assert whole.maps is not None and part.maps is not None
    first, last = part.maps
    close(part.maps[first], whole.maps[first])
    close(part.maps[last], whole.maps[last][:, :, :2])


def test_gradients_are_the_same() -> None:
    model, x = side(addnorm="pre"), torch.randn(2, 5, 16).double()
    grads = []
    for asking in (None, 1):
        model.zero_grad()
        model(x, Context(), asking)[:, :1].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*grads, strict=True):
        close(one, other)
