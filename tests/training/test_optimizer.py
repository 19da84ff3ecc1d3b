"""Optimizers and schedules against their formulas, step by step."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm import build, presets
from addnorm.errors import ConfigError
from addnorm.training.optimizer import (
    OPTIMIZERS,
    hidden_matrices,
    layer_groups,
    make_optimizer,
    orthogonal,
    set_rate,
)
from addnorm.training.schedule import SCHEDULES, make_schedule


def steps(name: str, count: int, **settings: Any) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return a layer after some steps with random gradients, and those gradients."""
    torch.manual_seed(3)
    layer = nn.Linear(5, 3).double()
    optimizer = make_optimizer(layer, name, lr=0.05, **settings)
    gradients = []
    for _ in range(count):
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
        gradients.append({name: p.grad.clone() for name, p in layer.named_parameters()})  # type: ignore[union-attr]
        optimizer.step()
    return layer, gradients


def start() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: p.detach().clone() for name, p in nn.Linear(5, 3).double().named_parameters()}


@pytest.mark.trains
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_equals_its_formula_and_does_not_decay_vectors(decay: float) -> None:
    layer, gradients = steps("adamw", 4, betas=(0.8, 0.9), eps=1e-3, weight_decay=decay)
    for name, w in start().items():
        m = v = torch.zeros_like(w)
        for t, grads in enumerate(gradients, start=1):
            g = grads[name]
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            w = w - 0.05 * (decay if w.ndim == 2 else 0.0) * w
            w = w - 0.05 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        torch.testing.assert_close(layer.get_parameter(name).detach(), w)


@pytest.mark.trains
def test_adafactor_equals_its_formula() -> None:
    layer, gradients = steps("adafactor", 4)

    def rms(x: Tensor) -> float:
        return float(x.square().mean().sqrt())

    for name, w in start().items():
        rows = columns = square = None
        for t, grads in enumerate(gradients, start=1):
            g, b = grads[name], 1 - t**-0.8
            s = g * g + 1e-30
            if g.ndim == 2:
                rows = (1 - b) * s.mean(1) + b * (0 if rows is None else rows)
                columns = (1 - b) * s.mean(0) + b * (0 if columns is None else columns)
                second = torch.outer(rows, columns) / rows.mean()
            else:
                square = (1 - b) * s + b * (0 if square is None else square)
                second = square
            u = g / second.sqrt()
            u = u / max(1.0, rms(u))
            w = w - 0.05 * max(1e-3, rms(w)) * u
        torch.testing.assert_close(layer.get_parameter(name).detach(), w)


def test_orthogonal_has_singular_values_near_one() -> None:
    for shape in ((16, 16), (8, 40), (40, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert float(values.min()) > 0.4 and float(values.max()) < 1.6


@pytest.mark.trains
def test_muon_orthogonalises_queries_keys_and_values_separately() -> None:
    model = build(presets.llama(vocab=16, width=16, depth=1, heads=2, kv_heads=1, ffn_width=24))
    optimizer = make_optimizer(model, "muon", lr=1e-3)
    attention = model.decoder.stack.blocks[0].sublayers["attention"]
    before = {name: matrix.clone() for name, matrix in attention.matrices().items()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradient = attention.input.weight.grad.clone()
    optimizer.step()
    gradients = dict(zip(("query", "key", "value"), gradient.split(attention.sizes), strict=True))
    for name, g in gradients.items():
        # The first step: m = 0.05 g, u = lerp(g, m, 0.95), the direction of g itself.
        tall = max(1.0, g.shape[0] / g.shape[1]) ** 0.5
        expected = before[name] - 66 * 1e-3 * tall * orthogonal(g)
        torch.testing.assert_close(attention.matrices()[name], expected, rtol=1e-4, atol=1e-5)


def test_muon_leaves_embeddings_and_vectors_to_adamw() -> None:
    model = build(presets.gpt2(vocab=16, width=16, depth=2, heads=2))
    optimizer = make_optimizer(model, "muon", lr=1e-3)
    hidden = {id(p) for p in hidden_matrices(model)}
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == hidden
    assert id(model.tokens.weight) not in hidden and len(hidden) == 2 * 4
    every = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(every) == len({id(p) for p in every}) == len(list(model.parameters()))


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x = torch.randn(64, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    optimizer = make_optimizer(model, name, lr=0.05)
    losses = []
    for _ in range(200):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 50


def test_unknown_names_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer has no choice 'adamW'\. Did you mean"):
        make_optimizer(nn.Linear(1, 1), "adamW", lr=1.0)
    with pytest.raises(ConfigError, match=r"train\.schedule has no choice 'cosin'\. Did you mean"):
        make_schedule("cosin", warmup=1, steps=2)


def test_noam_equals_the_rate_of_the_paper() -> None:
    rate = make_schedule("noam", warmup=4000, steps=100_000)
    peak = 512**-0.5 * 4000**-0.5
    for step in (1, 100, 4000, 50_000):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert peak * rate(step) == pytest.approx(expected)
    assert peak * rate(4000) == pytest.approx(6.988e-4, rel=1e-3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_to_one(name: str) -> None:
    rate = make_schedule(name, warmup=10, steps=100)
    assert [rate(step) for step in range(1, 11)] == pytest.approx([s / 10 for s in range(1, 11)])
    assert all(0 <= rate(step) <= 1 for step in range(1, 130))


def test_cosine_and_linear_end_at_the_floor() -> None:
    for name, half in (("cosine", 0.5), ("linear", 0.5)):
        rate = make_schedule(name, warmup=0, steps=100, floor=0.2)
        assert rate(100) == pytest.approx(0.2) and rate(150) == pytest.approx(0.2)
        assert rate(50) == pytest.approx(0.2 + 0.8 * half)
    quarter = make_schedule("cosine", warmup=0, steps=100)(25)
    assert quarter == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_rates_fall_from_the_head_to_the_embeddings() -> None:
    model = build(presets.bert(vocab=11, width=8, depth=2, heads=2, head="class", outputs=3))
    groups = layer_groups(model, 0.1, 1.0, 0.5)
    rates = {id(part): group["lr"] for group in groups for part in group["params"]}
    wanted = {"head.output.weight": 1.0, "tokens.weight": 0.125, "encoder.norm.bias": 0.125}
    wanted |= {f"encoder.stack.blocks.{n}.addnorms.ffn.norm.weight": 0.25 * 2**n for n in (0, 1)}
    named = dict(model.named_parameters())
    assert {name: rates[id(named[name])] for name in wanted} == wanted
    assert len(rates) == len(named), "every parameter is in one group"
    assert all((p.ndim >= 2) == (g["weight_decay"] > 0) for g in groups for p in g["params"])
    made = make_optimizer(model, "adamw", lr=1.0, groups=groups)
    assert set_rate(made, 0.1) == pytest.approx(0.1)
    assert sorted({group["lr"] for group in made.param_groups}) == pytest.approx(
        [0.0125, 0.025, 0.05, 0.1]
    )
