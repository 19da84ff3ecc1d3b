"""Models for tables against loops over the equations of their papers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from addnorm.errors import ConfigError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.models.tabular import (
    FTTransformerModel,
    SaintModel,
    TabTransformerModel,
    TabularConfig,
    TabularModel,
    build_tabular,
    trunk_of,
)
from tests.conftest import close, slow_off_diagonal
from tests.naive import Weights, attention, layer_norm, linear, randomise_, relu

SMALL: dict[str, Any] = {"width": 16, "depth": 2, "heads": 4, "dropout": 0.0}


def make(kind: str, *, trunk: dict[str, Any] | None = None, **changes: Any) -> TabularModel:
    extra = {"ft": {"attention_dropout": 0.0, "ffn_dropout": 0.0, "ffn_width": 8}}.get(kind, {})
    settings: dict[str, Any] = {"numbers": 2, "categories": (3, 4), "outputs": 2}
    config = TabularConfig(
        kind=kind, trunk=trunk_of(kind, **(SMALL | extra | (trunk or {}))), **(settings | changes)
    )
    with torch.no_grad():
        model = randomise_(build_tabular(config), std=0.2)
    assert isinstance(model, TabularModel)
    return model.double().eval()


def draw(rows: int = 3) -> tuple[Tensor, Tensor]:
    codes = torch.stack((torch.randint(3, (rows,)), torch.randint(4, (rows,))), dim=1)
    return torch.randn(rows, 2).double(), codes


def weights(model: TabularModel) -> Weights:
    return Weights(dict(model.state_dict()))


def every(row: int, query: int, key: int) -> bool:
    return True


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def test_tab_transformer() -> None:
    """MLP([post-norm blocks over [column; value]; N(numbers)])."""
    model = make("tab", numbers=3)
    assert isinstance(model, TabTransformerModel)
    codes, x = draw()[1], torch.randn(3, 3).double()
    w = weights(model)
    c = w.under("columns.categories")
    starts = (0, 3)
    tokens = torch.stack(
        [
            torch.stack(
                [
                    torch.cat((c["bias"][j], c["weight"][starts[j] + int(codes[r, j])]))
                    for j in range(2)
                ]
            )
            for r in range(3)
        ]
    )
    for layer in range(2):
        b = w.under(f"side.stack.blocks.{layer}")
        mixed, _ = attention(tokens, tokens, b.under("sublayers.attention"), 4, every)
        tokens = layer_norm(tokens + mixed, b.under("addnorms.attention.norm"))
        f = b.under("sublayers.ffn")
        inner = linear(gelu(linear(tokens, f.under("input"))), f.under("output"))
        tokens = layer_norm(tokens + inner, b.under("addnorms.ffn.norm"))
    joined = torch.cat((tokens.flatten(1), layer_norm(x, w.under("norm"))), dim=1)
    assert w["head.0.weight"].shape == (4 * 35, 35) and w["head.2.weight"].shape == (2 * 35, 4 * 35)
    for number in (0, 2):
        joined = relu(linear(joined, w.under(f"head.{number}")))
    close(model(x, codes)[:, 0], linear(joined, w.under("head.4")), 1e-9)


def test_saint() -> None:
    """z ← z + N(F(z)) for attention, FFN, row attention, row FFN: the paper's eq. 1–4.

    The last norm is that of our res-post, which the paper does not mention.
    """
    model = make("saint", trunk={"addnorm": "res-post", "ffn": "gelu", "ffn_width": 24})
    assert isinstance(model, SaintModel)
    x, codes = draw()
    w = weights(model)
    z = torch.cat((w["summary"].expand(3, 1, -1), model.tokens(x, codes)), dim=1)
    for layer in range(2):
        b = w.under(f"side.stack.blocks.{layer}")
        for role in ("attention", "ffn", "row_attention", "row_ffn"):
            f = b.under(f"sublayers.{role}")
            stream = torch.stack([row.reshape(-1) for row in z])[None] if "row" in role else z
            if "attention" in role:
                branch, _ = attention(stream, stream, f, 4, every)
            else:
                branch = linear(gelu(linear(stream, f.under("input"))), f.under("output"))
            if "row" in role:
                branch = torch.stack([row.reshape(5, 16) for row in branch[0]])
            z = z + layer_norm(branch, b.under(f"addnorms.{role}.norm"))
    z = layer_norm(z, w.under("side.stack.ends.norm"))[:, 0]
    close(model(x, codes)[:, 0], relu(z) @ w["head.weight"][0].T + w["head.bias"][0], 1e-9)


def test_only_saint_depends_on_the_other_rows() -> None:
    x, codes = draw()
    for kind in ("ft", "tab", "saint"):
        model = make(kind)
        alone = model(x[:1], codes[:1])
        together = model(x, codes)[:1]
        assert torch.allclose(alone, together, atol=1e-9) is not (kind == "saint")
        assert model.along_rows is (kind == "saint")


@pytest.mark.parametrize(
    ("addnorm", "kind"), slow_off_diagonal(list(ADDNORMS), ("ft", "tab", "saint"))
)
def test_every_arrangement_works_for_tables(kind: str, addnorm: str) -> None:
    model = make(kind, trunk={"addnorm": addnorm})
    x, codes = draw()
    outputs = model(x, codes)
    assert outputs.shape == (3, 1, 2) and bool(outputs.isfinite().all())
    outputs.sum().backward()


@pytest.mark.parametrize("norm", ("rms", "scale", "batch", "instance", "none"))
def test_every_norm_works_for_tables(norm: str) -> None:
    model = make("ft", trunk={"norm": norm})
    x, codes = draw()
    maps: dict[str, Tensor] = {}
    close(model(x, codes), model(x, codes, maps=maps))


@pytest.mark.parametrize("embedding", ("linear", "periodic", "piecewise", "mixed", "hidden"))
def test_every_embedding_works_for_tables(embedding: str) -> None:
    options: dict[str, Any] = (
        {"edges": [[0.0, 1.0], [0.0, 2.0]]} if embedding in ("piecewise", "mixed") else {}
    )
    model = make("ft", embedding=embedding, embedding_options=options)
    x, codes = draw()
    x[0, 0] = float("nan")
    assert bool(model(x, codes).isfinite().all())


def test_each_member_has_its_own_scale_and_head() -> None:
    """Each equals a model of one member whose tokens are multiplied by the member's scale."""
    model, alone = make("ft", members=3), make("ft")
    assert isinstance(model, FTTransformerModel) and isinstance(alone, FTTransformerModel)
    assert model.scale is not None and alone.scale is None
    own = ("head.", "scale")
    shared = {n: w for n, w in model.state_dict().items() if not n.startswith(own)}
    assert not alone.load_state_dict(shared, strict=False).unexpected_keys
    x, codes = draw()
    outputs = model(x, codes)
    assert outputs.shape == (3, 3, 2)
    for m in range(3):
        summary = alone.hidden(alone.tokens(x, codes) * model.scale[m])[:, 0]
        close(outputs[:, m], relu(summary) @ model.head.weight[m].T + model.head.bias[m])
    columns = [alone.states(alone.tokens(x, codes) * scale) for scale in model.scale]
    close(model.states(model.tokens(x, codes)), sum(columns) / 3)


def test_scales_of_members_start_as_random_signs() -> None:
    torch.manual_seed(0)
    trunk = trunk_of("ft", width=16, depth=1, ffn_width=8)
    config = TabularConfig(kind="ft", numbers=2, categories=(3,), outputs=1, trunk=trunk, members=4)
    model = build_tabular(config)
    assert isinstance(model, FTTransformerModel) and model.scale is not None
    assert config.columns == 3
    assert model.scale.shape == (4, 3, 16) and model.scale in model.no_decay()
    assert set(model.scale.flatten().tolist()) == {-1.0, 1.0}
    assert abs(float(model.scale.detach().mean())) < 0.3


def test_maps_change_nothing_and_have_names() -> None:
    model = make("saint")
    x, codes = draw()
    maps: dict[str, Tensor] = {}
    close(model(x, codes, maps=maps), model(x, codes))
    assert set(maps) == {f"{i}.{role}" for i in (0, 1) for role in ("attention", "row_attention")}
    assert maps["1.attention"].shape == (3, 4, 5, 5)
    assert maps["1.row_attention"].shape == (1, 4, 3, 3)


def test_tab_transformer_learns_a_value_for_missing_numbers() -> None:
    model = make("tab")
    assert isinstance(model, TabTransformerModel) and model.missing is not None
    x, codes = draw()
    filled = x.clone()
    x[1, 0], filled[1, 0] = float("nan"), model.missing[0].detach()
    close(model(x, codes), model(filled, codes))


@pytest.mark.parametrize("numbers", (1, 2))
def test_one_or_two_numbers_are_not_normalised(numbers: int) -> None:
    model = make("tab", numbers=numbers)
    x, codes = torch.randn(3, numbers).double(), draw()[1]
    assert not torch.allclose(model(x, codes), model(2 * x + 1, codes))


def test_tab_transformer_works_without_categories() -> None:
    model = make("tab", categories=())
    assert model(torch.randn(3, 2).double(), torch.zeros(3, 0).long()).shape == (3, 1, 2)
    with pytest.raises(ConfigError, match="must have at least one feature column: got none"):
        make("tab", categories=(), numbers=0)


def test_columns_norms_and_biases_have_no_weight_decay() -> None:
    model = make("ft")
    exempt = model.no_decay()
    for name, parameter in model.named_parameters():
        is_matrix = "stack.blocks" in name and parameter.ndim == 2
        assert (parameter in exempt) is not (is_matrix or name == "head.weight"), name
    parts = model.parameter_groups(0.1)
    assert [part["weight_decay"] for part in parts] == [0.1, 0.0]
    assert sum(len(part["params"]) for part in parts) == len(list(model.parameters()))


def test_errors() -> None:
    with pytest.raises(ConfigError, match="model has no choice 'fft'"):
        trunk_of("fft")
    with pytest.raises(ConfigError, match="must be 1 or more: got members=0"):
        make("ft", members=0)
    with pytest.raises(ConfigError, match="embedding has no choice 'linaer'"):
        make("ft", embedding="linaer")
    with pytest.raises(ConfigError, match="embedding_options has no 'sigmo'"):
        make("ft", embedding="periodic", embedding_options={"sigmo": 1.0})
