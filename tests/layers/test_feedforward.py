"""Each feed-forward against its formula, element by element."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from addnorm.layers.context import Context
from addnorm.layers.feedforward import FEEDFORWARDS, FeedForward, GatedFeedForward
from addnorm.layers.norms import LayerNorm
from tests.naive import randomise_

WIDTH, INNER = 6, 10
Scalar = Callable[[float], float]


def relu(z: float) -> float:
    return max(z, 0.0)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def silu(z: float) -> float:
    return z / (1 + math.exp(-z))


def gelu(z: float) -> float:
    return z * (1 + math.erf(z / math.sqrt(2))) / 2


def gelu_tanh(z: float) -> float:
    return 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


PLAIN = {"relu": relu, "gelu": gelu, "gelu-tanh": gelu_tanh, "silu": silu}
GATED = {
    "glu": sigmoid,
    "reglu": relu,
    "geglu": gelu,
    "geglu-tanh": gelu_tanh,
    "swiglu": silu,
}


def each(function: Scalar, x: Tensor) -> Tensor:
    return torch.tensor([function(z) for z in x.flatten().tolist()]).view(x.shape)


def make(name: str, **settings: object) -> FeedForward:
    kind, activation = FEEDFORWARDS[name]
    return randomise_(kind(WIDTH, INNER, activation, **settings).double())


def draw() -> Tensor:
    return 2 * torch.randn(2, 3, WIDTH, dtype=torch.float64)


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_every_feed_forward_has_a_formula() -> None:
    assert set(PLAIN) | set(GATED) == set(FEEDFORWARDS)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", FEEDFORWARDS)
@torch.no_grad()
def test_feed_forward_equals_its_formula(name: str, bias: bool) -> None:
    ffn, x = make(name, bias=bias), draw()
    projected = x @ ffn.input.weight.T + (ffn.input.bias if bias else 0)
    if name in GATED:
        middle = each(GATED[name], projected[..., :INNER]) * projected[..., INNER:]
    else:
        middle = each(PLAIN[name], projected)
    expected = middle @ ffn.output.weight.T + (ffn.output.bias if bias else 0)
    assert sum(p.numel() for p in ffn.parameters() if p.ndim == 1) == bias * (
        WIDTH + INNER * (1 + (name in GATED))
    )
    torch.testing.assert_close(ffn(x, Context()), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["relu", "swiglu"])
@torch.no_grad()
def test_inner_follows_the_activation(name: str) -> None:
    inner = LayerNorm(INNER, 1e-5, True)
    ffn, x = make(name, inner=inner), draw()
    middle = ffn.activate(x @ ffn.input.weight.T + ffn.input.bias)
    centred = middle - middle.mean(-1, keepdim=True)
    middle = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    middle = middle * inner.weight + inner.bias
    expected = middle @ ffn.output.weight.T + ffn.output.bias
    torch.testing.assert_close(ffn(x, Context()), expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_dropout_precedes_the_output_projection() -> None:
    ffn, x = make("relu", dropout=0.5), draw()
    ffn.output.weight.copy_(torch.eye(WIDTH, INNER))
    ffn.output.bias.zero_()
    ffn.input.weight.zero_()
    ffn.input.bias.fill_(1.0)
    assert set(ffn(x, Context()).flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(ffn.eval()(x, Context()), torch.ones_like(x))


@pytest.mark.parametrize("name", FEEDFORWARDS)
def test_the_gate_is_not_scaled(name: str) -> None:
    ffn = make(name)
    before = {key: weight.clone() for key, weight in ffn.matrices().items()}
    biases = ffn.input.bias.clone(), ffn.output.bias.clone()
    ffn.scale_(0.5)
    assert set(before) == {"input", "output"} | ({"gate"} if name in GATED else set())
    for key, weight in ffn.matrices().items():
        assert torch.equal(weight, before[key] * (1 if key == "gate" else 0.5))
    assert torch.equal(ffn.input.bias, biases[0])
    assert torch.equal(ffn.output.bias, biases[1])


@pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])
@torch.no_grad()
def test_matrices_are_views(kind: type[FeedForward]) -> None:
    ffn = kind(WIDTH, INNER, nn.functional.relu)
    for weight in ffn.matrices().values():
        weight.fill_(3.0)
    assert torch.equal(ffn.input.weight, torch.full_like(ffn.input.weight, 3.0))
    assert torch.equal(ffn.output.weight, torch.full_like(ffn.output.weight, 3.0))
