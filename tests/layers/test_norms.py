"""Each norm against its formula, with inputs so small that a wrong ε fails."""

import math

import pytest
import torch
from torch import Tensor, nn

from addnorm.layers.addnorm import ADDNORMS, Place
from addnorm.layers.norms import NORMS
from tests.naive import randomise_

EPS = 1e-5
SHAPE = (3, 5, 8)


def make(name: str, bias: bool = True, eps: float = EPS) -> nn.Module:
    return randomise_(NORMS[name](8, eps, bias).double())


def layer(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    y = torch.empty_like(x)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            row = x[b, i]
            mean = sum(row) / len(row)
            variance = sum((number - mean) ** 2 for number in row) / len(row)
            y[b, i] = (row - mean) / math.sqrt(variance + eps)
    y = norm.weight * y
    return y if norm.bias is None else y + norm.bias


def rms(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    y = torch.empty_like(x)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            row = x[b, i]
            y[b, i] = norm.weight * row / math.sqrt(sum(number**2 for number in row) / 8 + eps)
    return y


def scale(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    y = torch.empty_like(x)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            length = math.sqrt(sum(number**2 for number in x[b, i]))
            y[b, i] = norm.gain * x[b, i] / max(length, eps)
    return y


def batch(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    y = torch.empty_like(x)
    for c in range(x.shape[2]):
        numbers = x[..., c].flatten()
        mean = sum(numbers) / len(numbers)
        variance = sum((number - mean) ** 2 for number in numbers) / len(numbers)
        y[..., c] = norm.weight[c] * (x[..., c] - mean) / math.sqrt(variance + eps) + norm.bias[c]
    return y


def instance(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    y = torch.empty_like(x)
    for b in range(x.shape[0]):
        for c in range(x.shape[2]):
            numbers = x[b, :, c]
            mean = sum(numbers) / len(numbers)
            variance = sum((number - mean) ** 2 for number in numbers) / len(numbers)
            y[b, :, c] = norm.weight[c] * (numbers - mean) / math.sqrt(variance + eps)
    return y if norm.bias is None else y + norm.bias


def none(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    return x


def rms_offset(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    y = torch.empty_like(x)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            row = x[b, i]
            size = math.sqrt(sum(number**2 for number in row) / 8 + eps)
            y[b, i] = (1 + norm.weight) * row / size
    return y


FORMULAS = {
    "layer": layer,
    "rms": rms,
    "rms-offset": rms_offset,
    "scale": scale,
    "batch": batch,
    "instance": instance,
    "none": none,
}


def test_every_norm_has_a_formula() -> None:
    assert set(FORMULAS) == set(NORMS)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NORMS)
@torch.no_grad()
def test_norm_equals_its_formula(name: str, bias: bool, size: float) -> None:
    norm = make(name, bias)
    x = size * (torch.randn(SHAPE, dtype=torch.float64) + 0.5)
    torch.testing.assert_close(norm(x), FORMULAS[name](x, norm, EPS), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", sorted(set(NORMS) - {"none"}))
@torch.no_grad()
def test_another_epsilon_gives_another_result(name: str) -> None:
    """So the test above also checks ε."""
    norm = make(name)
    x = 1e-6 * torch.randn(SHAPE, dtype=torch.float64)
    wrong = FORMULAS[name](x, norm, 1.01 * EPS)
    assert not torch.allclose(norm(x), wrong, rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("name", NORMS)
def test_norm_keeps_shape_and_has_gradients(name: str) -> None:
    norm = make(name)
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    assert norm(x).shape == x.shape
    parameters = (x, *norm.parameters())
    norm(x).pow(3).sum().backward()
    for parameter in parameters:
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any()


@pytest.mark.parametrize(
    ("name", "bias", "parameters"),
    [
        ("layer", True, {"weight": [1.0] * 8, "bias": [0.0] * 8}),
        ("layer", False, {"weight": [1.0] * 8}),
        ("rms", True, {"weight": [1.0] * 8}),
        ("rms", False, {"weight": [1.0] * 8}),
        ("scale", True, {"gain": pytest.approx(math.sqrt(8))}),
        ("batch", True, {"weight": [1.0] * 8, "bias": [0.0] * 8}),
        ("instance", True, {"weight": [1.0] * 8, "bias": [0.0] * 8}),
        ("instance", False, {"weight": [1.0] * 8}),
        ("none", True, {}),
    ],
)
def test_gains_start_at_one_and_offsets_at_zero(name: str, bias: bool, parameters: dict) -> None:
    norm = NORMS[name](8, EPS, bias)
    assert {key: value.tolist() for key, value in norm.named_parameters()} == parameters


@torch.no_grad()
def test_batch_norm_uses_the_statistics_of_training_in_evaluation() -> None:
    norm = make("batch")
    x = torch.randn(SHAPE, dtype=torch.float64) * 2 + 1
    norm(x)
    flat = x.flatten(0, 1)
    mean, variance = 0.1 * flat.mean(0), 0.9 + 0.1 * flat.var(0)
    y = torch.randn(SHAPE, dtype=torch.float64)
    expected = norm.weight * (y - mean) / (variance + EPS).sqrt() + norm.bias
    torch.testing.assert_close(norm.eval()(y), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["layer", "rms", "scale"])
@torch.no_grad()
def test_each_position_is_normalised_separately(name: str) -> None:
    norm = make(name)
    x = torch.randn(SHAPE, dtype=torch.float64)
    changed = x.clone()
    changed[0, 2] = 7.0
    same = torch.ones(SHAPE[:2], dtype=torch.bool)
    same[0, 2] = False
    assert torch.equal(norm(x)[same], norm(changed)[same])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@torch.no_grad()
def test_add_and_norm_has_mean_zero_and_norm_root_width(scale: float) -> None:
    """N(x + F(x)) before γ and β: mean 0 and norm √d, whatever the input."""
    width = 16
    place = Place(width=width, layer=0, depth=1, role="ffn", step=0, steps=1, side="encoder")
    box = ADDNORMS["post"](place, lambda size: NORMS["layer"](size, 1e-30, True)).double()
    x = scale * (torch.randn(2, 5, width, dtype=torch.float64) + 3)
    y = box(x, lambda inner: inner**2)
    torch.testing.assert_close(y.mean(-1), torch.zeros(2, 5).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(y.norm(dim=-1), torch.full((2, 5), math.sqrt(width)).double())
    randomise_(box)
    z = box(x, lambda inner: inner**2)
    torch.testing.assert_close((z - box.norm.bias) / box.norm.weight, y, rtol=0, atol=1e-10)
