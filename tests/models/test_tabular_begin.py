"""How networks for tables begin, and the ends of what may be asked of them."""

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
    made = trunk_of(kind, **sizes | (trunk or {}))
    return build_tabular(TabularConfig(kind=kind, trunk=made, **settings | changes)).eval()


def spread(values: Tensor, end: float) -> None:
    """Drawn evenly between ± end: none beyond, some near it, in the middle on average."""
    given = values.detach().flatten()
    assert float(given.abs().max()) <= end and float(given.abs().max()) > 0.9 * end
    assert float(given.mean()) == pytest.approx(0, abs=0.2 * end)
    assert float(given.std()) == pytest.approx(end / math.sqrt(3), rel=0.15)


def test_the_feature_tokenizer_is_initialised_as_published() -> None:
    """Even between ±1/√width: weights, biases, categories, the summary; missing values too."""
    model = network()
    columns = model.columns
    for values in (columns.numbers.weight, columns.numbers.bias, columns.categories.weight):
        spread(values, 1 / 8)
    spread(torch.cat((columns.missing, columns.categories.bias, model.summary)), 1 / 8)
    assert columns.categories.weight.shape == (90, 64) and columns.missing.shape == (3, 64)


def test_heads_of_members_are_initialised_like_linear_layers() -> None:
    model = network(members=5)
    assert model.head.weight.shape == (5, 2, 64) and model.head.bias.shape == (5, 2)
    for member in model.head.weight:
        spread(member, 1 / 8)
    assert not bool(model.head.bias.any())
    assert len({tuple(member.flatten().tolist()) for member in model.head.weight}) == 5


def test_embeddings_of_numbers_are_initialised_as_published() -> None:
    periodic = PeriodicNumbers(20, 8)
    assert periodic.frequency.shape == (20, 48)
    assert float(periodic.frequency.detach().std()) == pytest.approx(0.05, rel=0.1)
    wide = PeriodicNumbers(20, 8, sigma=2.0)
    assert float(wide.frequency.detach().std()) == pytest.approx(2.0, rel=0.1)
    spread(periodic.project.weight, 1 / math.sqrt(96))
    hidden = HiddenNumbers(20, 8)
    assert hidden.weight.shape == (20, 100)
    spread(hidden.weight, 1.0)
    spread(hidden.project.weight, 1 / 10)


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
    found = embed(torch.tensor([[0, 0, 0], [2, 1, 3]]))
    for row, places in enumerate(((0, 3, 5), (2, 4, 8))):
        for j, place in enumerate(places):
            close(found[row, j], embed.weight[place] + embed.bias[j])
    assert embed(torch.zeros(0, 3).long()).shape == (0, 3, 8)
    for code, said in (([3, 0, 0], "column 0 must be 0 to 2"), ([0, 2, 0], "column 1 must be 0 t")):
        with pytest.raises(InputError, match=said):
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
    wanted = [(inputs, 4 * inputs), (4 * inputs, 2 * inputs), (2 * inputs, 6)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == wanted
    assert model.missing is not None and not bool(model.missing.any())
    found = model(torch.randn(4, 3), torch.zeros(4, 2).long())
    assert found.shape == (4, 3, 2)


def test_parameters_without_weight_decay_in_every_model() -> None:
    """Two groups that have every parameter once; of TabTransformer the tables of categories too."""
    for kind in ("ft", "tab", "saint"):
        for changes in ({}, {"categories": ()}, {"numbers": 0}):
            model = network(kind, **changes)
            decayed, spared = (part["params"] for part in model.parameter_groups(0.5))
            every = sorted(id(p) for p in (*decayed, *spared))
            assert every == sorted(id(p) for p in model.parameters())
            names = {id(p): name for name, p in model.named_parameters()}
            for parameter in decayed:
                name = names[id(parameter)]
                assert parameter.ndim >= 2 and not name.startswith("columns."), name
