"""Attention against a loop over rows, heads, queries and keys, on every code path."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.layers import attention_kernels as scores
from addnorm.layers.attention import (
    AcrossHeads,
    Attention,
    HeadGain,
    MemoryAttention,
    SelfAttention,
)
from addnorm.layers.attention_kernels import AdditiveScore, DotScore, Score
from addnorm.layers.cache import Cache
from addnorm.layers.context import Context
from addnorm.layers.masks import AttentionTable, Mask
from addnorm.layers.norms import LayerNorm, RMSNorm
from addnorm.layers.positions import POSITIONS, Positions
from tests import naive
from tests.conftest import slow_off_diagonal
from tests.naive import IsVisible, Weights, randomise_

WIDTH, HEADS, HEAD_WIDTH, LENGTH, BATCH = 8, 4, 6, 7, 2
CAP = 0.7
NEVER = 1e-300
"""A dropout rate above 0 that drops nothing."""

PREFIX = torch.tensor([2, 5])
REAL = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]) == 1
GROUPS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
PAIRS = torch.rand(BATCH, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.4
PAIRS[0, 3] = False

MASKS: dict[str, tuple[Mask, IsVisible]] = {
    "visible": (Mask(), lambda b, i, j: True),
    "causal": (Mask.causal(), lambda b, i, j: j <= i),
    "prefix": (Mask.causal(PREFIX), lambda b, i, j: j <= i or j < PREFIX[b]),
    "window": (Mask.window(2), lambda b, i, j: abs(i - j) < 2),
    "causal window": (Mask.causal() & Mask.window(3), lambda b, i, j: 0 <= i - j < 3),
    "padding": (Mask.padding(REAL), lambda b, i, j: bool(REAL[b, j])),
    "causal padding": (
        Mask.causal() & Mask.padding(REAL),
        lambda b, i, j: j <= i and bool(REAL[b, j]),
    ),
    "window padding": (
        Mask.window(3) & Mask.padding(REAL),
        lambda b, i, j: abs(i - j) < 3 and bool(REAL[b, j]),
    ),
    "groups": (Mask.grouped(GROUPS), lambda b, i, j: bool(GROUPS[b, i] == GROUPS[b, j])),
    "pattern": (Mask.pattern(PAIRS), lambda b, i, j: bool(PAIRS[b, i, j])),
    "window groups": (
        Mask.window(3) & Mask.grouped(GROUPS),
        lambda b, i, j: abs(i - j) < 3 and bool(GROUPS[b, i] == GROUPS[b, j]),
    ),
    "window pattern": (
        Mask.window(3) & Mask.pattern(PAIRS),
        lambda b, i, j: abs(i - j) < 3 and bool(PAIRS[b, i, j]),
    ),
}
SCORES: dict[str, Callable[[], Score]] = {
    "dot": lambda: DotScore(HEAD_WIDTH**-0.5),
    "cap": lambda: DotScore(HEAD_WIDTH**-0.5, CAP),
    "additive": lambda: AdditiveScore(HEADS, HEAD_WIDTH),
}

PLACED = ("none", "rotary", "linear-bias", "buckets", "relative")
"""Position schemes by effect on attention: none, rotation, fixed bias, learned biases."""
combinations = pytest.mark.parametrize(
    ("mask", "score", "positions"), slow_off_diagonal(list(MASKS), list(SCORES), PLACED)
)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ── Against the loop ──────────────────────────────────────────────────────────────────────────────


@dataclass
class Variant:
    """How an attention is built, and what the loop must do to match it."""

    build: Callable[[], dict] = dict
    loop: Callable[[Weights], dict] = field(default=lambda w: {})
    kv_heads: int = HEADS


def capped(w: Weights) -> dict:
    def score(q: Tensor, k: Tensor, h: int, i: int, j: int) -> Tensor:
        return CAP * torch.tanh(naive.dot(q, k, h, i, j) / CAP)

    return {"score": score}


def additive(w: Weights) -> dict:
    def score(q: Tensor, k: Tensor, h: int, i: int, j: int) -> Tensor:
        return sum(w["score.vector"][h, n] * torch.tanh(q[n] + k[n]) for n in range(len(q)))

    return {"score": score}


def normed_by_head(w: Weights) -> dict:
    return {
        "on_query": lambda q: naive.layer_norm(q, w.under("query_norm")),
        "on_key": lambda k: naive.layer_norm(k, w.under("key_norm")),
    }


def normed_across_heads(w: Weights) -> dict:
    def norm(x: Tensor, name: str) -> Tensor:
        joined = naive.rms_norm(naive.join(x), w.under(name, "norm"))
        return naive.split(joined, x.shape[1])

    return {"on_query": lambda q: norm(q, "query_norm"), "on_key": lambda k: norm(k, "key_norm")}


def layer(width: int) -> nn.Module:
    return LayerNorm(width, 1e-5, True)


def rms(width: int) -> nn.Module:
    return RMSNorm(width, 1e-5, True)


def across(kv_heads: int) -> dict:
    return {
        "query_norm": AcrossHeads(HEADS * HEAD_WIDTH, rms),
        "key_norm": AcrossHeads(kv_heads * HEAD_WIDTH, rms),
    }


VARIANTS = {
    "plain": Variant(),
    "two key heads": Variant(kv_heads=2),
    "one key head": Variant(kv_heads=1),
    "no output bias": Variant(lambda: {"bias": "qkv"}),
    "no biases": Variant(lambda: {"bias": "none"}),
    "scale": Variant(
        lambda: {"score": DotScore(1.0)},
        lambda w: {"score": lambda q, k, h, i, j: (q * k).sum()},
    ),
    "cap": Variant(lambda: {"score": DotScore(HEAD_WIDTH**-0.5, CAP)}, capped),
    "grouped cap": Variant(lambda: {"score": DotScore(HEAD_WIDTH**-0.5, CAP)}, capped, kv_heads=2),
    "additive": Variant(lambda: {"score": AdditiveScore(HEADS, HEAD_WIDTH)}, additive),
    "grouped additive": Variant(
        lambda: {"score": AdditiveScore(HEADS, HEAD_WIDTH)}, additive, kv_heads=2
    ),
    "norm by head": Variant(
        lambda: {"query_norm": layer(HEAD_WIDTH), "key_norm": layer(HEAD_WIDTH)}, normed_by_head
    ),
    "norm across heads": Variant(lambda: across(HEADS), normed_across_heads),
    "grouped norm across heads": Variant(lambda: across(2), normed_across_heads, kv_heads=2),
    "head gain": Variant(
        lambda: {"inner": HeadGain(HEADS)},
        lambda w: {"inner": lambda x: naive.head_gain(x, w["inner.gain"])},
    ),
    "inner norm": Variant(
        lambda: {"inner": layer(HEADS * HEAD_WIDTH)},
        lambda w: {"inner": lambda x: naive.layer_norm(x, w.under("inner"))},
    ),
}


def make(kind: type[Attention], variant: Variant, **parts: object) -> Attention:
    sizes = (WIDTH, HEADS, variant.kv_heads, HEAD_WIDTH, 0)
    return randomise_(kind(*sizes, **variant.build(), **parts).double())


def check(
    attention: Attention, variant: Variant, x: Tensor, context: Context, is_visible: IsVisible
) -> None:
    """Assert that output and maps equal those of the loop, which reads every weight."""
    w = Weights(attention.state_dict())
    source = x if context.memory is None else context.memory
    expected, weights = naive.attention(
        x, source, w, HEADS, is_visible, kv_heads=variant.kv_heads, **variant.loop(w)
    )
    context.maps = {}
    output = attention(x, context)
    assert output.shape == x.shape
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(context.maps[attention], weights, rtol=0, atol=1e-10)
    assert w.read == set(attention.state_dict())


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *(("plain", mask) for mask in MASKS),
        *(("grouped additive", mask) for mask in MASKS),
        *((name, mask) for name in VARIANTS for mask in ("visible", "causal padding", "pattern")),
    ],
)
def test_self_attention_equals_the_loop(name: str, mask: str) -> None:
    attention = make(SelfAttention, VARIANTS[name])
    allowed, is_visible = MASKS[mask]
    check(attention, VARIANTS[name], draw(BATCH, LENGTH, WIDTH), Context(mask=allowed), is_visible)


@pytest.mark.parametrize("kind", ["linear-bias", "buckets"])
@pytest.mark.parametrize("name", ["plain", "grouped cap", "grouped additive"])
def test_the_bias_of_positions_is_added_to_the_scores(name: str, kind: str) -> None:
    """The bias is added after scale and cap, to every kind of score."""
    variant, positions = VARIANTS[name], place(kind, causal=True)

    def loop(w: Weights) -> dict:
        score = variant.loop(w).get("score", naive.dot)

        def biased(q: Tensor, k: Tensor, h: int, i: int, j: int) -> Tensor:
            # At these distances, every distance has its own bucket.
            near = positions.weight[i - j, h] if kind == "buckets" else -(4.0 ** -(h + 1)) * (i - j)
            return score(q, k, h, i, j) + near

        return {"score": biased}

    attention = make(SelfAttention, variant)
    allowed, is_visible = MASKS["causal padding"]
    context = Context(mask=allowed, positions=positions)
    x = draw(BATCH, LENGTH, WIDTH)
    check(attention, Variant(loop=loop, kv_heads=variant.kv_heads), x, context, is_visible)


@pytest.mark.parametrize("mask", ["visible", "padding", "pattern"])
@pytest.mark.parametrize("name", VARIANTS)
def test_memory_attention_equals_the_loop(name: str, mask: str) -> None:
    attention = make(MemoryAttention, VARIANTS[name])
    allowed, is_visible = MASKS[mask]
    if mask == "pattern":
        allowed = Mask.pattern(PAIRS[:, :4])
    context = Context(memory=draw(BATCH, LENGTH, WIDTH), memory_mask=allowed, mask=Mask.causal())
    check(attention, VARIANTS[name], draw(BATCH, 4, WIDTH), context, is_visible)


@pytest.mark.parametrize("bias", ["all", "qkv", "none"])
@pytest.mark.parametrize("kind", [SelfAttention, MemoryAttention])
def test_biases_follow_the_configuration(kind: type[Attention], bias: str) -> None:
    attention = make(kind, Variant(), bias=bias)
    biases = {name for name, _ in attention.named_parameters() if name.endswith("bias")}
    inputs = {"input.bias"} | ({"memory.bias"} if kind is MemoryAttention else set())
    expected = {"all": inputs | {"output.bias"}, "qkv": inputs, "none": set()}
    assert biases == expected[bias]


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("score", SCORES)
def test_grouped_heads_are_tiled_heads(score: str, kv_heads: int) -> None:
    few = make(SelfAttention, Variant(kv_heads=kv_heads), score=SCORES[score]())
    many = make(SelfAttention, Variant(), score=SCORES[score]())
    state = few.state_dict()
    for kind in ("weight", "bias"):
        query, key, value = few.input.get_parameter(kind).split(few.sizes)
        tiled = [
            part.unflatten(0, (kv_heads, HEAD_WIDTH))
            .repeat_interleave(HEADS // kv_heads, dim=0)
            .flatten(0, 1)
            for part in (key, value)
        ]
        state[f"input.{kind}"] = torch.cat((query, *tiled))
    many.load_state_dict(state)
    x = draw(BATCH, LENGTH, WIDTH)
    for mask, _ in MASKS.values():
        context = Context(mask=mask)
        torch.testing.assert_close(few(x, context), many(x, context), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [SelfAttention, MemoryAttention])
def test_only_values_and_output_are_scaled(kind: type[Attention]) -> None:
    attention = make(kind, VARIANTS["two key heads"])
    before = {name: part.clone() for name, part in attention.named_parameters()}
    matrices = {name: part.clone() for name, part in attention.matrices().items()}
    rows = {"query": HEADS, "key": 2, "value": 2}
    assert {
        name: len(part) // HEAD_WIDTH for name, part in matrices.items() if name in rows
    } == rows
    attention.scale_(0.5)
    for name, part in attention.matrices().items():
        assert torch.equal(part, matrices[name] * (0.5 if name in ("value", "output") else 1))
    for name, part in attention.named_parameters():
        assert name.endswith("weight") or torch.equal(part, before[name])


def test_memory_attention_needs_a_memory() -> None:
    attention = make(MemoryAttention, Variant())
    with pytest.raises(InputError, match="needs a memory: pass the encoder's output"):
        attention(draw(BATCH, LENGTH, WIDTH), Context())


@pytest.mark.parametrize("cached", [True, False])
def test_rows_of_a_memory_serve_several_rows(cached: bool) -> None:
    attention = make(MemoryAttention, VARIANTS["two key heads"])
    x, memory = draw(3 * BATCH, 4, WIDTH), draw(BATCH, LENGTH, WIDTH)
    cache = None
    if cached:
        cache = Cache(
            depth=1,
            batch=3 * BATCH,
            heads=2,
            length=4,
            head_width=HEAD_WIDTH,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
    context = Context(memory=memory, memory_mask=Mask.padding(REAL), cache=cache)
    repeated = Context(
        memory=memory.repeat_interleave(3, dim=0),
        memory_mask=Mask.padding(REAL.repeat_interleave(3, dim=0)),
    )
    expected = attention(x, repeated)
    torch.testing.assert_close(attention(x, context), expected, rtol=0, atol=1e-12)
    context.memory = None if cached else memory
    torch.testing.assert_close(attention(x, context), expected, rtol=0, atol=1e-12)


def test_maps_of_a_shared_memory_are_those_of_a_repeated_one() -> None:
    attention = make(MemoryAttention, VARIANTS["two key heads"])
    x, memory = draw(3 * BATCH, 4, WIDTH), draw(BATCH, LENGTH, WIDTH)
    shared = Context(memory=memory, maps={})
    repeated = Context(memory=memory.repeat_interleave(3, dim=0), maps={})
    attention(x, shared)
    attention(x, repeated)
    assert shared.maps[attention].shape == (3 * BATCH, HEADS, 4, LENGTH)
    torch.testing.assert_close(shared.maps[attention], repeated.maps[attention])


# ── In chunks ─────────────────────────────────────────────────────────────────────────────────────


def place(name: str, causal: bool) -> Positions:
    positions = POSITIONS[name](WIDTH, HEADS, HEAD_WIDTH, LENGTH, causal)
    return randomise_(positions.double(), 1.0)


def gradients(attention: Attention, positions: Positions, mask: Mask, x: Tensor) -> dict:
    """Return the output and the gradients of all inputs and parameters."""
    x = x.clone().requires_grad_()
    parts = dict(attention.named_parameters()) | {
        f"positions.{name}": part for name, part in positions.named_parameters()
    }
    for part in parts.values():
        part.grad = None
    output = attention(x, Context(mask=mask, positions=positions))
    (output * output.detach().cos()).sum().backward()
    gradients_by_name = {"output": output.detach(), "x": x.grad}
    return gradients_by_name | {name: part.grad for name, part in parts.items()}


@combinations
def test_chunks_equal_the_whole(
    mask: str, score: str, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = place(positions, mask.startswith("causal"))
    local = scheme.local(WIDTH, HEADS, HEAD_WIDTH)
    attention = make(
        SelfAttention,
        VARIANTS["two key heads"],
        score=SCORES[score](),
        local=local,
        dropout=NEVER,
    )
    x = draw(BATCH, LENGTH, WIDTH)
    whole = gradients(attention.eval(), scheme, MASKS[mask][0], x)
    calls, mix_in_chunks = [], scores._mix_in_chunks

    def spy(*arguments: object) -> Tensor:
        calls.append(True)
        return mix_in_chunks(*arguments)

    monkeypatch.setattr(scores, "_mix_in_chunks", spy)
    monkeypatch.setattr(scores, "MAX_TABLE_ENTRIES", 0)
    monkeypatch.setattr(scores, "CHUNK_QUERIES", 3)
    # With dropout, even one that drops nothing, every mask needs its table.
    chunked = gradients(attention.train(), scheme, MASKS[mask][0], x)
    assert calls
    for name, expected in whole.items():
        torch.testing.assert_close(chunked[name], expected, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("score", SCORES)
def test_memory_attention_in_chunks(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = make(MemoryAttention, Variant(), score=SCORES[score](), dropout=NEVER)
    memory, x = draw(BATCH, LENGTH, WIDTH), draw(BATCH, 5, WIDTH)

    def run() -> Tensor:
        return attention(x, Context(memory=memory, memory_mask=Mask.padding(REAL)))

    attention.eval()
    whole = run()
    monkeypatch.setattr(scores, "MAX_TABLE_ENTRIES", 0)
    monkeypatch.setattr(scores, "CHUNK_QUERIES", 3)
    attention.train()
    torch.testing.assert_close(run(), whole, rtol=0, atol=1e-10)


def test_an_implicit_mask_needs_no_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MAX_TABLE_ENTRIES", 0)
    monkeypatch.setattr(scores, "_mix_in_chunks", None)
    attention, x = make(SelfAttention, Variant()), draw(BATCH, LENGTH, WIDTH)
    for name in ("visible", "padding", "causal", "causal padding"):
        attention(x, Context(mask=MASKS[name][0]))


# ── Queries without keys ──────────────────────────────────────────────────────────────────────────

NOTHING = torch.tensor([[False] * LENGTH, [True] * LENGTH])
PATHS = {
    "fused, padding row": (Mask.padding(NOTHING), "dot", "none"),
    "fused, causal and padding": (Mask.causal() & Mask.padding(REAL), "dot", "none"),
    "fused, table": (Mask.pattern(PAIRS), "dot", "none"),
    "fused, bias": (Mask.pattern(PAIRS), "dot", "linear-bias"),
    "fused, bias of the layer": (Mask.padding(NOTHING), "dot", "relative"),
    "plain, cap": (Mask.causal() & Mask.padding(REAL), "cap", "none"),
    "plain, additive": (Mask.padding(NOTHING), "additive", "none"),
    "plain, bias": (Mask.pattern(PAIRS), "additive", "linear-bias"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("path", PATHS)
def test_a_query_that_sees_no_key_gets_zeros(
    path: str, kv_heads: int, whole: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, score, positions = PATHS[path]
    if not whole:
        monkeypatch.setattr(scores, "MAX_TABLE_ENTRIES", 0)
        monkeypatch.setattr(scores, "CHUNK_QUERIES", 3)
    scheme = place(positions, causal=False)
    local = scheme.local(WIDTH, HEADS, HEAD_WIDTH)
    q, k, v = (
        torch.randn(BATCH, heads, LENGTH, HEAD_WIDTH, dtype=dtype, requires_grad=True)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    table = AttentionTable(mask, LENGTH, LENGTH, 0, scheme.to(dtype))
    mixed = scores.mix_values(q, k, v, SCORES[score]().to(dtype), table, local.to(dtype), 0.0)
    blind = ~mask.dense(LENGTH, LENGTH)[:, 0].any(-1)
    assert blind.any()
    assert not blind.all()
    assert not mixed.transpose(1, 2)[blind.expand(BATCH, -1)].any()
    assert mixed.isfinite().all()
    mixed.pow(2).sum().backward()
    for part in (q, k, v):
        assert part.grad.isfinite().all()
        assert part.grad.any()


# ── Maps ──────────────────────────────────────────────────────────────────────────────────────────


@combinations
@torch.no_grad()
def test_maps_are_weights_and_change_no_bit_of_the_result(
    mask: str, score: str, positions: str
) -> None:
    scheme = place(positions, causal=False)
    local = scheme.local(WIDTH, HEADS, HEAD_WIDTH)
    attention = make(SelfAttention, Variant(kv_heads=2), score=SCORES[score](), local=local)
    allowed, is_visible = MASKS[mask]
    x, maps = draw(BATCH, LENGTH, WIDTH), {}
    plain = attention(x, Context(mask=allowed, positions=scheme))
    with_maps = attention(x, Context(mask=allowed, positions=scheme, maps=maps))
    assert torch.equal(plain, with_maps)
    weights = maps[attention]
    assert weights.shape == (BATCH, HEADS, LENGTH, LENGTH)
    assert (weights >= 0).all()
    for b in range(BATCH):
        for i in range(LENGTH):
            visible = [is_visible(b, i, j) for j in range(LENGTH)]
            sums = weights[b, :, i].sum(-1)
            torch.testing.assert_close(sums, torch.full_like(sums, float(any(visible))))
            assert not weights[b, :, i, ~torch.tensor(visible)].any()


@pytest.mark.parametrize("path", ["fused", "plain"])
@pytest.mark.parametrize("positions", PLACED)
def test_maps_change_no_gradient(positions: str, path: str) -> None:
    scheme = place(positions, causal=True)
    local = scheme.local(WIDTH, HEADS, HEAD_WIDTH)
    score = SCORES["dot" if path == "fused" else "cap"]()
    attention = make(SelfAttention, Variant(), score=score, local=local)
    parts = [*attention.parameters(), *scheme.parameters()]
    x = draw(BATCH, LENGTH, WIDTH)
    grads = []
    for maps in (None, {}):
        context = Context(mask=Mask.causal(), positions=scheme, maps=maps)
        loss = attention(x, context).pow(2).sum()
        grads.append(torch.autograd.grad(loss, parts))
    for plain, with_maps in zip(*grads, strict=True):
        assert torch.equal(plain, with_maps)


# ── Dropout on the weights ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mask", ["visible", "causal", "window", "padding", "causal padding"])
@pytest.mark.parametrize("score", SCORES)
def test_dropout_on_the_weights_keeps_the_mean(mask: str, score: str) -> None:
    rows, rate = 1500, 0.3
    allowed = MASKS[mask][0]
    if allowed.real is not None:
        allowed = Mask(real=REAL[:1].expand(rows, -1), hides_future=allowed.hides_future)
    kind = SCORES[score]().double()
    q, k, v = draw(3, 1, HEADS, LENGTH, HEAD_WIDTH).expand(3, rows, -1, -1, -1)
    table = AttentionTable(allowed, LENGTH, LENGTH)
    with torch.no_grad():
        without_dropout = scores.mix_values(q, k, v, kind, table, nn.Identity(), 0.0)
        with_dropout = scores.mix_values(q, k, v, kind, table, nn.Identity(), rate)
    assert not torch.allclose(with_dropout[0], with_dropout[1])
    sigma = with_dropout.std(0) / math.sqrt(rows)
    assert bool(((with_dropout.mean(0) - without_dropout[0]).abs() < 5 * sigma).all())


def test_no_dropout_in_evaluation() -> None:
    attention = make(SelfAttention, Variant(), dropout=0.5)
    x, context = draw(BATCH, LENGTH, WIDTH), Context(mask=Mask.causal())
    assert not torch.equal(attention(x, context), attention(x, context))
    attention.eval()
    assert torch.equal(attention(x, context), attention(x, context))


@pytest.mark.parametrize("padded", (False, True))
def test_few_queries_are_mixed_as_by_the_kernel(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(16, 4, 2, 8, generator=generator)
    k, v = (torch.randn(16, 4, 9, 8, generator=generator) for _ in range(2))
    real = torch.rand(16, 9, generator=generator) < 0.7
    real[3] = False  # sees no key
    mask = Mask.padding(real) if padded else Mask()
    called = []
    kernel = scores.F.scaled_dot_product_attention
    monkeypatch.setattr(
        scores.F,
        "scaled_dot_product_attention",
        lambda *a, **b: called.append(1) or kernel(*a, **b),
    )

    def mix(rows: slice) -> Tensor:
        part = mask if not padded else Mask.padding(real[rows])
        table = AttentionTable(part, 2, 9)
        score = scores.DotScore(0.3)
        return scores.mix_values(q[rows], k[rows], v[rows], score, table, nn.Identity(), 0.0)

    with torch.no_grad():
        short = mix(slice(None))
        assert not called
        by_kernel = torch.cat([mix(slice(i, i + 1)) for i in range(16)])
    assert len(called) == 16
    torch.testing.assert_close(short, by_kernel, rtol=0, atol=1e-6)
    assert mix(slice(None)).shape == short.shape and len(called) == 17  # with gradients
    if padded:
        assert bool((short[3] == 0).all())
