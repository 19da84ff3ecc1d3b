"""Parity of FT-Transformer with the authors' package, with copied weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm.models.tabular import TabularConfig, TabularModel, build_tabular, trunk_of
from tests.parity.common import gap, randomise_
from tests.parity.mapping import rename

rtdl = pytest.importorskip("rtdl_revisiting_models")
pytestmark = pytest.mark.parity

SIZES = [(8, ()), (6, (9, 16, 7, 15, 6, 5, 2, 42)), (0, (3, 2)), (1, (2,))]
"""Numeric columns and category sizes: California housing, Adult, and two small tables."""


def pair(
    numbers: int, sizes: tuple[int, ...], blocks: int = 3, outputs: int = 1, **changes: Any
) -> tuple[TabularModel, nn.Module]:
    settings = {**rtdl.FTTransformer.get_default_kwargs(blocks), "_is_default": False, **changes}
    theirs = rtdl.FTTransformer(
        n_cont_features=numbers, cat_cardinalities=list(sizes), d_out=outputs, **settings
    )
    randomise_(theirs)
    ffn_width = theirs.backbone.blocks[0]["ffn"].linear2.in_features
    trunk = trunk_of("ft", width=settings["d_block"], depth=blocks, ffn_width=ffn_width)
    ours = build_tabular(
        TabularConfig(
            kind="ft",
            numbers=numbers,
            categories=sizes,
            outputs=outputs,
            trunk=trunk,
            missing=False,
        )
    )
    ours.load_state_dict(by_our_names(theirs))
    return ours.eval(), theirs.eval()


def by_our_names(theirs: nn.Module) -> dict[str, Tensor]:
    table = {
        "side.stack.blocks.*.sublayers.attention.input": tuple(
            f"backbone.blocks.*.attention.W_{part}" for part in "qkv"
        ),
        "side.stack.blocks.*.sublayers.attention.output": "backbone.blocks.*.attention.W_out",
        "side.stack.blocks.*.sublayers.ffn.input": "backbone.blocks.*.ffn.linear1",
        "side.stack.blocks.*.sublayers.ffn.output": "backbone.blocks.*.ffn.linear2",
        "side.stack.blocks.*.addnorms.attention.norm": "backbone.blocks.*.attention_normalization",
        "side.stack.blocks.*.addnorms.ffn.norm": "backbone.blocks.*.ffn_normalization",
        "side.stack.ends.norm": "backbone.output.normalization",
        "head": "backbone.output.linear",
        "columns.numbers": "cont_embeddings",
    }
    state = dict(theirs.state_dict())
    summary = state.pop("cls_embedding.weight")
    tables = [state.pop(name) for name in list(state) if name.startswith("cat_embeddings.embedd")]
    bias = state.pop("cat_embeddings.bias", None)
    renamed = rename(state, table)
    for name in list(renamed):
        if name.endswith("ffn.input.weight") or name.endswith("ffn.input.bias"):
            # Their gate is the second half; ours is the first.
            value, gate = renamed[name].chunk(2)
            renamed[name] = torch.cat((gate, value))
    renamed["summary"] = summary[None]
    renamed["head.weight"], renamed["head.bias"] = (
        renamed["head.weight"][None],
        renamed["head.bias"][None],
    )
    if tables:
        renamed["columns.categories.weight"], renamed["columns.categories.bias"] = (
            torch.cat(tables),
            bias,
        )
    return renamed


def draw(numbers: int, sizes: tuple[int, ...], rows: int = 7) -> tuple[Tensor, Tensor]:
    codes = [torch.randint(size, (rows,)) for size in sizes]
    joined = torch.stack(codes, dim=1) if codes else torch.zeros(rows, 0, dtype=torch.long)
    return torch.randn(rows, numbers), joined


@pytest.mark.parametrize(("numbers", "sizes"), SIZES)
@pytest.mark.parametrize("blocks", (1, 3))
def test_outputs_equal_theirs(numbers: int, sizes: tuple[int, ...], blocks: int) -> None:
    ours, theirs = pair(numbers, sizes, blocks, outputs=3)
    x, codes = draw(numbers, sizes)
    with torch.no_grad():
        expected_output = theirs(x if numbers else None, codes if sizes else None)
        assert gap(ours(x, codes)[:, 0], expected_output) <= 1e-5
        assert float(expected_output.std()) > 0.1


def test_gradients_equal_theirs() -> None:
    ours, theirs = pair(2, (3, 4))
    ours.double(), theirs.double()
    x, codes = draw(2, (3, 4))
    ours(x.double(), codes).square().sum().backward()
    theirs(x.double(), codes).square().sum().backward()
    expected = by_our_names(_gradients(theirs))
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert gap(parameter.grad, expected[name]) <= 1e-9, name


def _gradients(model: nn.Module) -> nn.Module:
    """The model with each weight replaced by its gradient, to be renamed like weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return model


@pytest.mark.parametrize(("numbers", "sizes"), SIZES)
def test_parameter_counts_equal_theirs(numbers: int, sizes: tuple[int, ...]) -> None:
    ours, theirs = pair(numbers, sizes)
    assert ours.count() == sum(p.numel() for p in theirs.parameters())


def test_the_published_count() -> None:
    """The released California runs have 893,179: with a factor of 1.3333 ffn_width is 255."""
    trunk = trunk_of("ft", ffn_width=255)
    shape = {"numbers": 8, "categories": (), "outputs": 1, "missing": False}
    assert build_tabular(TabularConfig(kind="ft", trunk=trunk, **shape)).count() == 893_179
    assert build_tabular(TabularConfig(kind="ft", trunk=trunk_of("ft"), **shape)).count() == 894_913


def test_weight_decay_applies_to_the_same_parameters() -> None:
    """Except for the gain of the last norm, which their code decays."""
    ours, theirs = pair(2, (3, 4))
    exempt = sum(p.numel() for p in theirs.make_parameter_groups()[1]["params"])
    last = theirs.backbone.output.normalization.weight.numel()
    assert sum(p.numel() for p in ours.no_decay()) == exempt + last
