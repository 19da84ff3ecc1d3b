"""Every measurement against its definition, computed in the test."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic.call_model import (
    ClinicBatch,
    Objective,
    choose_objective,
    step_operations,
    unchanged,
)
from addnorm.clinic.forward_stats import activation_stats, attention_stats
from addnorm.clinic.measure import (
    SiteMeasurement,
    dependency_map,
    measure_sites,
    outlier,
    position_variance,
)
from addnorm.clinic.residual_trace import trace_stream
from addnorm.clinic.sharpness import largest_eigenvalue, measure_sharpness
from addnorm.clinic.stream_records import Trace
from addnorm.clinic.weight_perturbation import amplification, fit_growth
from tests.conftest import draw, make


def look(model: nn.Module, batch: Any, objective: Objective) -> tuple[Trace, list[SiteMeasurement]]:
    trace = trace_stream(model, ClinicBatch(batch))
    return trace, measure_sites(model, trace, objective.value(trace.output, ClinicBatch(batch)))[0]


@torch.no_grad()
def states(model: Any, ids: Tensor, kind: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return (shortcut, branch, sum) of each box of a decoder, by the paper's formula in a loop."""
    from addnorm.layers.context import Context
    from addnorm.layers.masks import Mask

    side = model.decoder
    context = Context(mask=Mask.causal(), positions=side.positions, tables={})
    x = side.positions.embed(model.tokens(ids), torch.arange(ids.shape[1])[None])
    result = []
    for sublayer, box in side.stack.steps():
        if kind == "post":
            f = sublayer(x, context)
            result.append((x, f, x + f))
            x = box.norm(x + f)
        elif kind == "admin":
            f = sublayer(x, context)
            result.append((box.omega * x, f, box.omega * x + f))
            x = box.norm(box.omega * x + f)
        else:
            f = sublayer(box.norm(x), context)
            result.append((x, f, x + f))
            x = x + f
    return result


@pytest.mark.parametrize("kind", ("post", "pre", "admin"))
def test_scales_and_dependency_equal_their_definitions(kind: str) -> None:
    model, ids = make("decoder", addnorm=kind, depth=3), draw(3, 7)
    _, sites = look(model, ids, choose_objective(model, ClinicBatch(ids), None))
    expected = states(model, ids, kind)
    assert len(sites) == len(expected) == 6
    for site, (x, f, total) in zip(sites, expected, strict=True):
        assert site.shortcut == pytest.approx(float((x**2).mean() ** 0.5), rel=1e-5)
        assert site.branch == pytest.approx(float((f**2).mean() ** 0.5), rel=1e-5)
        assert site.total == pytest.approx(float((total**2).mean() ** 0.5), rel=1e-5)
        assert site.dependency == pytest.approx(float(f.var() / total.var()), rel=1e-5)


@pytest.mark.parametrize("kind", ("post", "pre", "admin"))
def test_the_dependency_map_follows_branches_through_norms(kind: str) -> None:
    model, ids = make("decoder", addnorm=kind, depth=3).requires_grad_(False), draw(3, 7)
    trace, _ = look(model, ids, choose_objective(model, ClinicBatch(ids), None))
    rows = dependency_map(trace)
    parts: list[Tensor] = []
    boxes = [box for _, box in model.decoder.stack.steps()]
    for row, box, (x, f, total) in zip(rows, boxes, states(model, ids, kind), strict=True):
        if not parts:
            parts = [x]
        elif kind == "admin":
            parts = [box.omega * part for part in parts]
        parts = [*parts, f]
        shares = [float(part.var() / total.var()) for part in parts]
        assert list(row.values()) == pytest.approx(shares, rel=1e-4)
        if kind != "pre":  # each part through N, with the divisor of the whole and without β
            deviation = (total.var(dim=-1, correction=0, keepdim=True) + 1e-5).sqrt()
            gain = box.norm.weight
            parts = [gain * (p - p.mean(dim=-1, keepdim=True)) / deviation for p in parts]
    assert next(iter(rows[-1])) == "input" and len(rows[-1]) == 7


def test_dependency_rows_of_untrained_pre_norm_sum_to_one() -> None:
    """Independent branches: Var of the sum is the sum of the variances."""
    from addnorm import ModelConfig, build

    torch.manual_seed(0)
    model = build(ModelConfig(mode="decoder", vocab=99, width=128, depth=4, addnorm="pre")).eval()
    ids = torch.randint(99, (4, 16))
    trace, _ = look(model, ids, choose_objective(model, ClinicBatch(ids), None))
    sums = [sum(row.values()) for row in dependency_map(trace)]
    assert sums == pytest.approx([1.0] * 8, abs=0.15)
    diagonal = [list(row.values())[-1] for row in dependency_map(trace)]
    assert diagonal[-1] < diagonal[1]  # β²ᵢᵢ falls like 1/i


def test_gradients_equal_those_of_autograd() -> None:
    model, ids = make("decoder", addnorm="post"), draw(3, 7)
    objective = choose_objective(model, ClinicBatch(ids), None)
    _, sites = look(model, ids, objective)
    totals: list[Tensor] = []
    norms = [box.norm for _, box in model.decoder.stack.steps()]
    hooks = [n.register_forward_pre_hook(lambda m, inputs: totals.append(inputs[0])) for n in norms]
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    for hook in hooks:
        hook.remove()
    streams = torch.autograd.grad(loss, totals, retain_graph=True)
    for site, stream, (sublayer, _) in zip(
        sites, streams, model.decoder.stack.steps(), strict=True
    ):
        weights = torch.autograd.grad(loss, list(sublayer.parameters()), retain_graph=True)
        whole = math.sqrt(sum(float((g**2).sum()) for g in weights))
        assert site.stream_gradient == pytest.approx(float(stream.norm()), rel=1e-5)
        assert site.weight_gradient == pytest.approx(whole, rel=1e-5)


def test_amplification_is_the_variance_of_the_change() -> None:
    model, ids = make("decoder", addnorm="pre"), draw(3, 7)
    trace, _ = look(model, ids, choose_objective(model, ClinicBatch(ids), None))
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        result = amplification(model, ClinicBatch(ids), trace.sites, share=0.05, draws=1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    names = dict.fromkeys(n for site in trace.sites for n in site.weights)
    with torch.no_grad():
        for name in names:
            w = dict(model.named_parameters())[name]
            if w.ndim == 2:
                size = float(w.float().pow(2).mean().sqrt())
                w.add_(0.05 * size * torch.randn(w.shape, generator=generator).to(w))
    moved = states(model, ids, "pre")
    for site, value, (_, _, total) in zip(trace.sites, result, moved, strict=True):
        change = (total - site.total.detach()).var() / site.total.detach().var()
        assert value == pytest.approx(float(change), rel=1e-4)


def test_growth_laws() -> None:
    at = [2, 4, 8, 16, 32, 64]
    linear = fit_growth(at, [3 * n for n in at])
    assert linear.law == "about linear" and linear.exponent == pytest.approx(1)
    log = fit_growth(at, [math.log(n) for n in at])
    assert log.law == "slower than linear" and log.logarithmic == pytest.approx(1)
    assert fit_growth(at, [n**2.0 for n in at]).law == "faster than linear"
    assert fit_growth(at, [5.0] * 6).law == "does not grow"
    assert fit_growth([1, 2], [1, 2]).law == "does not grow"


def test_position_variance_and_outlier() -> None:
    same = torch.randn(2, 1, 8).expand(2, 5, 8)
    assert position_variance(same) == pytest.approx(0, abs=1e-6)
    apart = torch.randn(64, 50, 8)
    assert position_variance(apart) == pytest.approx(49 / 50, abs=0.01)
    x = torch.ones(2, 5, 8)
    x[..., 3] = 40
    assert outlier(x) == pytest.approx(40)


# ── Attention and units ───────────────────────────────────────────────────────────────────────────


def test_entropy_and_logits_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf], [2.0, 0.0, 1.0]])[None, None]
    result = attention_stats("here", logits, logits.softmax(-1))
    first, second = logits[0, 0, 0, :2].softmax(0), logits[0, 0, 1].softmax(0)
    even = [-float((a * a.log()).sum()) / math.log(n) for a, n in ((first, 2), (second, 3))]
    assert result.entropy[0] == pytest.approx(sum(even) / 2, rel=1e-5)
    assert result.largest[0] == pytest.approx(1.0)
    off = torch.tensor([-0.5, 0.5, 1.0, -1.0, 0.0])
    assert result.spread[0] == pytest.approx(float((off**2).mean() ** 0.5), rel=1e-5)


@pytest.mark.parametrize("additive", (False, True), ids=("fused", "plain"))
def test_attention_in_the_fused_kernel_is_measured(additive: bool) -> None:
    changes: dict[str, Any] = {"attention": "additive"} if additive else {}
    model, ids = make("decoder", **changes), draw(2, 6)
    maps: dict[str, Tensor] = {}
    model(ids, maps=maps)
    with unchanged(model):
        trace = trace_stream(model, ClinicBatch(ids))
    assert len(trace.stats.attention) == 2
    for stats, weights in zip(trace.stats.attention, maps.values(), strict=True):
        each = -(weights * weights.clamp(min=1e-30).log()).sum(-1)[:, :, 1:]
        even = each / torch.arange(2, 7).log()
        assert stats.entropy == pytest.approx(even.mean(dim=(0, 2)).tolist(), rel=1e-4)


def test_dead_and_saturated_units() -> None:
    x = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 1.0]])
    result = activation_stats("here", "relu", x)
    assert (result.dead, result.count, result.positions) == (0.5, 4, 2)
    assert activation_stats("here", "tanh", torch.tensor([[0.999, 0.1]])).saturated == 0.5
    assert activation_stats("here", "sigmoid", torch.tensor([[0.999, 0.001]])).saturated == 1.0


# ── Sharpness ─────────────────────────────────────────────────────────────────────────────────────


def hessian(model: nn.Module, batch: Any, objective: Objective) -> Tensor:
    weights = list(model.parameters())
    first = torch.autograd.grad(objective(model, ClinicBatch(batch)), weights, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in first])
    rows = []
    for entry in flat:
        row = torch.autograd.grad(entry, weights, retain_graph=True, allow_unused=True)
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(w) if g is None else g).reshape(-1)
                    for g, w in zip(row, weights, strict=True)
                ]
            )
        )
    return torch.stack(rows)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def test_sharpness_is_the_largest_eigenvalue() -> None:
    model, x = Small().double(), torch.randn(8, 3).double()
    objective = Objective(lambda output, batch: (output - batch[:, :2]).pow(2).mean(), "test")
    result = measure_sharpness(model, ClinicBatch(x), objective, iterations=200, chunks=4)
    exact = hessian(model, x, objective)
    assert result.plain == pytest.approx(float(torch.linalg.eigvalsh(exact)[-1]), rel=1e-4)
    squares = torch.zeros(len(exact)).double()
    for part in x.chunk(4):
        g = torch.autograd.grad(objective(model, ClinicBatch(part)), list(model.parameters()))
        squares += torch.cat([each.reshape(-1) for each in g]) ** 2 / 4
    scale = (squares.sqrt() + 1e-8) ** -0.5
    preconditioned = scale[:, None] * exact * scale[None]
    assert result.adam == pytest.approx(float(torch.linalg.eigvalsh(preconditioned)[-1]), rel=1e-3)
    assert result.plain_rate == pytest.approx(2 / result.plain)
    assert result.adam_rate == pytest.approx(38 / result.adam)


class Once(torch.autograd.Function):
    """The square, which cannot be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Views(nn.Module):
    """Views memory before it is written, writes it, and returns the result."""

    def __init__(self, bad: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.bad = bad

    def forward(self, x: Tensor) -> Tensor:
        room = torch.full_like(x, math.nan)
        room.detach().view(-1)
        torch.mul(x, 2.0, out=room)
        return self.inner(room) / (0.0 if self.bad else 1.0)


def test_a_view_of_unwritten_memory_is_not_reported() -> None:
    x = torch.randn(2, 3)
    for bad in (False, True):
        model = Views(bad)
        with torch.no_grad():
            stats = trace_stream(model, ClinicBatch(x)).stats.non_finite
        assert (stats is not None) is bad
    assert stats is not None and stats.operation == "div"


def test_large_negative_eigenvalues_do_not_matter() -> None:
    diagonal = torch.tensor([-9.0, -1.0, 0.5, 3.0]).double()

    def multiply(vector: list[Tensor]) -> list[Tensor]:
        return [diagonal * vector[0]]

    result = largest_eigenvalue(multiply, [diagonal], 50)
    assert result == pytest.approx(3.0, rel=1e-9)
    mask = [torch.tensor([1.0, 1.0, 1.0, 0.0]).double()]
    assert largest_eigenvalue(multiply, [diagonal], 50, mask) == pytest.approx(0.5, rel=1e-9)
    assert largest_eigenvalue(lambda v: [0 * v[0]], [diagonal], 5) == 0
    assert math.isnan(largest_eigenvalue(lambda v: [v[0] * math.nan], [diagonal], 5))


def test_sharpness_of_a_large_model_is_that_of_the_first_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Small().double(), torch.randn(8, 3).double()
    objective = Objective(lambda output, batch: (output - batch[:, :2]).pow(2).mean(), "test")
    few = measure_sharpness(model, ClinicBatch(x[:2]), objective).plain
    limit = step_operations(model, ClinicBatch(x)) / 4
    monkeypatch.setattr("addnorm.clinic.sharpness.MAX_OPERATIONS", limit)
    assert measure_sharpness(model, ClinicBatch(x), objective).plain == pytest.approx(few, rel=1e-9)

    def knows(output: Tensor, batch: Tensor) -> Tensor:
        return (output - x[:, :2]).pow(2).mean()

    whole = measure_sharpness(model, ClinicBatch(x), Objective(knows, "test", by_rows=False)).plain
    monkeypatch.undo()
    assert whole == pytest.approx(
        measure_sharpness(model, ClinicBatch(x), objective).plain, rel=1e-9
    )


def test_sharpness_without_second_derivatives_uses_differences() -> None:
    model, x = Small().double(), torch.randn(8, 3).double()
    twice = Objective(lambda output, batch: (output - batch[:, :2]).pow(2).mean(), "test")
    once = Objective(lambda output, batch: Once.apply(output - batch[:, :2]).mean(), "test")
    one, two = (
        measure_sharpness(model, ClinicBatch(x), objective, iterations=50).plain
        for objective in (once, twice)
    )
    assert one == pytest.approx(two, rel=1e-2)


def test_a_batch_is_split_by_rows() -> None:
    inputs = {"ids": torch.arange(8).view(4, 2), "flag": True, "bias": torch.zeros(3)}
    parts = ClinicBatch(inputs, torch.arange(4)).split(2)
    ids = [part.arguments["ids"].tolist() for part in parts]
    assert ids == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [part.targets.tolist() for part in parts if part.targets is not None] == [[0, 1], [2, 3]]
    assert all(part.arguments["flag"] and len(part.arguments["bias"]) == 3 for part in parts)
