"""Initial weights of models for tables, and the limits of their settings."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm.errors import ConfigError, InputError
from addnorm.layers.columns import Categories, HiddenNumbers, PeriodicNumbers, PiecewiseNumbers
from addnorm.models.tabular import (
    FTTransformerModel,
    TabTransformerModel,
    TabularConfig,
    TabularModel,
    build_tabular,
    trunk_of,
)
from tests.conftest import close


def network(kind: str = "ft", *, trunk: dict[str, Any] | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"width": 64, "depth": 1, "heads": 4, "ffn_width": 16}
    settings: dict[str, Any] = {"numbers": 3, "categories": (40, 50), "outputs": 2}
    config = trunk_of(kind, **sizes | (trunk or {}))
    return build_tabular(TabularConfig(kind=kind, trunk=config, **settings | changes)).eval()


def assert_uniform(values: Tensor, end: float) -> None:
    """Assert that values are uniform between ± end: maximum, mean and standard deviation."""
    numbers = values.detach().flatten()
    assert float(numbers.abs().max()) <= end and float(numbers.abs().max()) > 0.9 * end
    assert float(numbers.mean()) == pytest.approx(0, abs=0.2 * end)
    assert float(numbers.std()) == pytest.approx(end / math.sqrt(3), rel=0.15)


def test_the_feature_tokenizer_is_initialised_as_published() -> None:
    """Uniform between ±1/√width: weights, biases, categories, summary and missing values."""
    model = network()
    columns = model.columns
    for values in (columns.numbers.weight, columns.numbers.bias, columns.categories.weight):
        assert_uniform(values, 1 / 8)
    assert_uniform(torch.cat((columns.missing, columns.categories.bias, model.summary)), 1 / 8)
    assert columns.categories.weight.shape == (90, 64) and columns.missing.shape == (3, 64)


def test_heads_of_members_are_initialised_like_linear_layers() -> None:
    model = network(members=5)
    assert model.head.weight.shape == (5, 2, 64) and model.head.bias.shape == (5, 2)
    for member in model.head.weight:
        assert_uniform(member, 1 / 8)
    assert not bool(model.head.bias.any())
    assert len({tuple(member.flatten().tolist()) for member in model.head.weight}) == 5


def test_embeddings_of_numbers_are_initialised_as_published() -> None:
    periodic = PeriodicNumbers(20, 8)
    assert periodic.frequency.shape == (20, 48)
    assert float(periodic.frequency.detach().std()) == pytest.approx(0.05, rel=0.1)
    wide = PeriodicNumbers(20, 8, sigma=2.0)
    assert float(wide.frequency.detach().std()) == pytest.approx(2.0, rel=0.1)
    assert_uniform(periodic.project.weight, 1 / math.sqrt(96))
    hidden = HiddenNumbers(20, 8)
    assert hidden.weight.shape == (20, 100)
    assert_uniform(hidden.weight, 1.0)
    assert_uniform(hidden.project.weight, 1 / 10)


def test_smallest_sizes_of_embeddings() -> None:
    x = torch.tensor([[0.5, -2.0]])
    assert PeriodicNumbers(2, 8, frequencies=1, sigma=1e-3)(x).shape == (1, 2, 8)
    assert HiddenNumbers(2, 8, units=1)(x).shape == (1, 2, 8)
    assert PiecewiseNumbers(2, 8, edges=[[0.0, 1.0]] * 2)(x).shape == (1, 2, 8)
    for frequencies, sigma in ((0, 1.0), (1, 0.0), (1, -1.0)):
        with pytest.raises(ConfigError, match="must have frequencies above 0 and sigma above 0"):
            PeriodicNumbers(2, 8, frequencies=frequencies, sigma=sigma)


def test_first_and_last_codes_are_accepted() -> None:
    embed = Categories((3, 2, 4), 8)
    tokens = embed(torch.tensor([[0, 0, 0], [2, 1, 3]]))
    for row, places in enumerate(((0, 3, 5), (2, 4, 8))):
        for j, place in enumerate(places):
            close(tokens[row, j], embed.weight[place] + embed.bias[j])
    assert embed(torch.zeros(0, 3).long()).shape == (0, 3, 8)
    for code, message in (
        ([3, 0, 0], "column 0 must be 0 to 2"),
        ([0, 2, 0], "column 1 must be 0 t"),
    ):
        with pytest.raises(InputError, match=message):
            embed(torch.tensor([code]))


@pytest.mark.parametrize("kind", ("ft", "saint"))
def test_missing_numbers_are_refused_without_a_vector_for_them(kind: str) -> None:
    model: TabularModel = network(kind, missing=False)
    numbers, codes = torch.zeros(2, 3), torch.zeros(2, 2).long()
    assert model(numbers, codes).shape == (2, 1, 2)
    numbers[1, 2] = float("nan")
    with pytest.raises(InputError, match="built without missing values: got a NaN"):
        model(numbers, codes)
    assert network(kind).columns.missing is not None
    assert network(kind, numbers=0)(torch.zeros(2, 0), codes).shape == (2, 1, 2)


def test_embed_norm_applies_to_the_tokens() -> None:
    plain, normed = network(), network(trunk={"embed_norm": True})
    assert isinstance(plain, FTTransformerModel) and isinstance(plain.side.norm, nn.Identity)
    assert normed.count() == plain.count() + 2 * 64


def test_tab_transformers_head_is_four_and_two_times_its_inputs() -> None:
    model = network("tab", members=3)
    assert isinstance(model, TabTransformerModel)
    inputs = 2 * 64 + 3
    layers = [layer for layer in model.head if isinstance(layer, nn.Linear)]
    expected = [(inputs, 4 * inputs), (4 * inputs, 2 * inputs), (2 * inputs, 6)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == expected
    assert model.missing is not None and not bool(model.missing.any())
    outputs = model(torch.randn(4, 3), torch.zeros(4, 2).long())
    assert outputs.shape == (4, 3, 2)


def test_parameters_without_weight_decay_in_every_model() -> None:
    """The two groups have every parameter once; columns have no decay in any model."""
    for kind in ("ft", "tab", "saint"):
        for changes in ({}, {"categories": ()}, {"numbers": 0}):
            model = network(kind, **changes)
            decayed, exempt = (part["params"] for part in model.parameter_groups(0.5))
            every = sorted(id(p) for p in (*decayed, *exempt))
            assert every == sorted(id(p) for p in model.parameters())
            names = {id(p): name for name, p in model.named_parameters()}
            for parameter in decayed:
                name = names[id(parameter)]
                assert parameter.ndim >= 2 and not name.startswith("columns."), name
