"""Every form of shortcut against a loop over single numbers, and what each does to gradients."""

import pytest
import torch
from torch import Tensor, nn

from addnorm.errors import ConfigError
from addnorm.layers.residual_mlp import JOINS, ResidualBlock, ResidualMLP
from tests.naive import randomise_

FORMS = [(join, before) for join in JOINS for before in (True, False)]


def relu(values: list[float]) -> list[float]:
    return [max(value, 0.0) for value in values]


def linear(values: list[float], layer: nn.Linear) -> list[float]:
    rows, biases = layer.weight.tolist(), layer.bias.tolist()
    return [
        sum(w * v for w, v in zip(row, values, strict=True)) + bias
        for row, bias in zip(rows, biases, strict=True)
    ]


def run_block(h: list[float], block: ResidualBlock, join: str, before: bool) -> list[float]:
    branch = linear(relu(linear(h, block.input)), block.output)
    if join == "none":
        return relu(branch)
    if join == "add":
        if before:
            return relu([a + b for a, b in zip(h, branch, strict=True)])
        return [a + b for a, b in zip(h, relu(branch), strict=True)]
    return relu(h + branch) if before else h + relu(branch)


@pytest.mark.parametrize(("join", "before"), FORMS)
def test_every_form_equals_its_formula(join: str, before: bool) -> None:
    mlp = ResidualMLP(3, 2, width=5, depth=3, join=join, before=before, growth=2).double()
    randomise_(mlp)
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = []
    for row in x.tolist():
        h = linear(row, mlp.input)
        for block in mlp.blocks:
            h = run_block(h, block, join, before)
        expected.append(linear(h, mlp.output))
    torch.testing.assert_close(
        mlp(x), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(("join", "before"), FORMS)
def test_every_parameter_has_a_gradient(join: str, before: bool) -> None:
    mlp = randomise_(ResidualMLP(3, 2, width=16, depth=3, join=join, before=before))
    mlp(torch.randn(64, 3)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in mlp.parameters())


def input_gradient(depth: int, **form: object) -> Tensor:
    torch.manual_seed(0)
    mlp = ResidualMLP(4, 1, width=32, depth=depth, activation=torch.tanh, **form).double()
    for block in mlp.blocks:  # small branches: σ'(0) = 1, so only the shortcut carries a gradient
        nn.init.normal_(block.input.weight, std=0.02)
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    mlp(x).sum().backward()
    return x.grad.norm()


def test_only_a_shortcut_carries_the_gradient_through_many_blocks() -> None:
    plain = input_gradient(40, join="none") / input_gradient(1, join="none")
    added = input_gradient(40, join="add") / input_gradient(1, join="add")
    joined = input_gradient(40, join="concatenate") / input_gradient(1, join="concatenate")
    assert plain < 1e-10
    assert 0.1 < added < 10 and 0.1 < joined < 10


def test_addition_starts_with_a_bounded_variance() -> None:
    for depth in (1, 64):
        mlp = ResidualMLP(16, 1, width=64, depth=depth, join="add")
        h = mlp.input(torch.randn(256, 16))
        before = h.square().mean()
        for block in mlp.blocks:
            h = block(h)
        assert 1 <= h.square().mean() / before < 8


def test_an_identity_shortcut_passes_a_zero_branch_unchanged() -> None:
    block = ResidualBlock(6, 4, "add")
    nn.init.zeros_(block.output.weight)
    nn.init.zeros_(block.output.bias)
    h = torch.randn(3, 6)
    assert torch.equal(block(h), h)
    # Joined before the activation, even a zero branch loses the negative part.
    block.before = True
    assert torch.equal(block(h), h.clamp(min=0))


def test_mistakes_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"join has no choice 'ad'.*add"):
        ResidualBlock(4, 4, "ad")
    with pytest.raises(ConfigError, match=r"growth must be positive: got 0\. Try 8\."):
        ResidualMLP(2, 1, width=4, depth=1, join="concatenate", growth=0)
