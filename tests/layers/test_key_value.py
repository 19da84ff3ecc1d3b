"""All-attention, adaptive spans and product keys against loops and brute force."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm import load, presets
from addnorm.config import ModelConfig
from addnorm.errors import ConfigError
from addnorm.layers import attention_kernels
from addnorm.layers.attention import SelfAttention
from addnorm.layers.attention_kernels import AdditiveScore, DotScore
from addnorm.layers.context import Context
from addnorm.layers.key_value import PersistentVectors, ProductKeyMemory
from addnorm.layers.masks import Mask
from addnorm.layers.positions import POSITIONS
from addnorm.layers.span import AdaptiveSpan, mean_span
from addnorm.models.build import build
from addnorm.models.tabular import TabularConfig, build_tabular, trunk_of
from tests import naive
from tests.conftest import MODES, close, draw, inputs, slow_off_diagonal
from tests.conftest import make as make_model
from tests.layers.test_addnorm import FORMULAS, INSIDE, config, ids_for
from tests.naive import Stack, randomise_

WIDTH, HEADS, KV, INNER, COUNT, LENGTH = 8, 4, 2, 6, 5, 9
REAL = torch.tensor([[1] * 7 + [0] * 2, [0] * 3 + [1] * 6]) == 1


def make(positions: str = "none", score: str = "dot", **parts: Any) -> tuple[SelfAttention, Any]:
    scheme = randomise_(POSITIONS[positions](WIDTH, HEADS, INNER, 32, True).double())
    scores = {
        "dot": DotScore(INNER**-0.5),
        "cap": DotScore(INNER**-0.5, 0.7),
        "additive": AdditiveScore(HEADS, INNER),
    }
    attention = SelfAttention(
        WIDTH,
        HEADS,
        KV,
        INNER,
        0,
        score=scores[score],
        local=scheme.local(WIDTH, HEADS, INNER),
        **parts,
    )
    return randomise_(attention.double()), scheme


def persistent() -> PersistentVectors:
    return PersistentVectors(KV, INNER, COUNT)


def span() -> AdaptiveSpan:
    return AdaptiveSpan(HEADS, 5, 3)


@torch.no_grad()
def loop(attention: SelfAttention, scheme: Any, x: Tensor, seen: naive.IsVisible) -> Tensor:
    """Return the output, one query of one head at a time."""
    q, k, v = attention.input(x).split(attention.sizes, dim=-1)
    q, k, v = naive.split(q, HEADS), naive.split(k, KV), naive.split(v, KV)
    places = torch.arange(x.shape[1])
    turned_q, turned_k = scheme.rotate(q, places), scheme.rotate(k, places)
    bias = scheme.bias(
        scheme.shift_queries(q, attention.local), places, places, attention.local, INNER**-0.5
    )
    shifted = scheme.shift_queries(turned_q, attention.local)
    out = torch.zeros(*x.shape[:2], HEADS * INNER, dtype=x.dtype)
    for b in range(len(x)):
        for i in range(x.shape[1]):
            for h in range(HEADS):
                group, scores, values = h * KV // HEADS, [], []
                for j in range(x.shape[1]):
                    if not seen(b, i, j):
                        continue
                    score = one_score(attention, shifted[b, h, i], turned_k[b, group, j], h)
                    if bias is not None:
                        score = score + bias[b % len(bias), h, i, j]
                    factor = 1.0
                    if attention.span is not None:
                        z = 5 * min(max(float(attention.span.size[h]), 0.0), 1.0)
                        factor = min(max((3 + z - abs(i - j)) / 3, 0.0), 1.0)
                    scores.append(factor * math.exp(score))
                    values.append(v[b, group, j])
                if attention.persistent is not None:
                    plain = q[b, h, i] + (attention.local.u[h] if bias_has_u(attention) else 0)
                    for n in range(COUNT):
                        key = attention.persistent.key[group, n] * math.sqrt(INNER)
                        scores.append(math.exp(one_score(attention, plain, key, h)))
                        values.append(attention.persistent.value[group, n] * math.sqrt(COUNT))
                for score, value in zip(scores, values, strict=True):
                    out[b, i, h * INNER : (h + 1) * INNER] += score / sum(scores) * value
    return attention.output(out)


def bias_has_u(attention: SelfAttention) -> bool:
    return hasattr(attention.local, "u")


def one_score(attention: SelfAttention, q: Tensor, k: Tensor, head: int) -> Tensor:
    if isinstance(attention.score, AdditiveScore):
        return (attention.score.vector[head] * torch.tanh(q + k)).sum()
    score = (q * k).sum() / math.sqrt(INNER)
    cap = attention.score.cap
    return score if cap is None else cap * torch.tanh(score / cap)


PLACES = ("none", "rotary", "linear-bias", "buckets", "relative")
CASES = [
    *((place, "dot", parts) for place in PLACES for parts in ("persistent", "span", "both")),
    *(("none", score, parts) for score in ("cap", "additive") for parts in ("persistent", "span")),
]


def parts_of(name: str) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {}
    if name != "span":
        made["persistent"] = persistent()
    if name != "persistent":
        made["span"] = span()
    return made


@pytest.mark.parametrize("mask", ("visible", "causal", "padded"))
@pytest.mark.parametrize(("place", "score", "parts"), CASES)
def test_attention_equals_the_loop(place: str, score: str, parts: str, mask: str) -> None:
    attention, scheme = make(place, score, **parts_of(parts))
    x = torch.randn(2, LENGTH, WIDTH).double()
    masks = {
        "visible": (Mask(), lambda b, i, j: True),
        "causal": (Mask.causal(), lambda b, i, j: j <= i),
        "padded": (
            Mask.causal() & Mask.padding(REAL),
            lambda b, i, j: j <= i and bool(REAL[b, j]),
        ),
    }
    allowed, seen = masks[mask]
    if mask == "padded" and parts == "span":  # a query that sees no key at all is 0
        seen_row = seen
        seen = lambda b, i, j: seen_row(b, i, j) or (i < 3 and b == 1)  # noqa: E731
    context = Context(mask=allowed, positions=scheme)
    output = attention(x, context)
    expected = loop(attention, scheme, x, seen)
    real = REAL if mask == "padded" else torch.ones_like(REAL)
    close(output[real], expected[real])
    first = attention.attend_from_first(x, Context(mask=allowed, positions=scheme), 4)
    close(first[real[:, :4]], expected[:, :4][real[:, :4]])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("parts", ("persistent", "span", "both"))
def test_chunks_of_queries_change_nothing(
    place: str, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, scheme = make(place, **parts_of(parts))
    x = torch.randn(2, LENGTH, WIDTH).double()
    results = []
    for limit in (2**22, 0):
        monkeypatch.setattr(attention_kernels, "MAX_TABLE_ENTRIES", limit)
        monkeypatch.setattr(attention_kernels, "CHUNK_QUERIES", 2)
        inputs = x.clone().requires_grad_()
        out = attention(inputs, Context(mask=Mask.causal(), positions=scheme))
        attention.zero_grad()
        out.square().sum().backward()
        grads = [p.grad.clone() for p in attention.parameters() if p.grad is not None]
        results.append([out.detach(), inputs.grad, *grads])
    for one, two in zip(*results, strict=True):
        close(one, two)


# ── In every mode and arrangement ─────────────────────────────────────────────────────────────────


def normformer(x: Tensor, stack: Stack) -> Tensor:
    """Every box is one of attention, so every branch has its second norm."""
    return FORMULAS["sandwich"](x, stack)


@pytest.mark.parametrize(("addnorm", "mode"), slow_off_diagonal(list(FORMULAS), MODES))
@torch.no_grad()
def test_all_attention_equals_the_formula_in_every_arrangement(addnorm: str, mode: str) -> None:
    changes = {"ffn": "all-attention", "ffn_width": 5, "depth": 2, "decoder_depth": None}
    model = randomise_(build(config(mode, addnorm, **changes))).double().eval()
    ids = ids_for(mode)
    formula = normformer if addnorm == "normformer" else FORMULAS[addnorm]
    expected, read = naive.run(model, formula, INSIDE.get(addnorm, ()), *ids)
    real = ids[-1] != 0
    close(model(*ids)[real], expected[real], 1e-9)
    assert read == set(model.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_without_a_feed_forward_only_attention_is_left(mode: str) -> None:
    model = make_model(mode, ffn="none")
    roles = {name.split(".")[-1] for name, _ in model.named_modules() if "sublayers." in name}
    assert not any("ffn" in name for name, _ in model.named_modules()) and roles
    assert model(*inputs(mode)).isfinite().all()


def test_all_attention_has_the_weights_of_a_feed_forward() -> None:
    sizes = {"vocab": 60, "width": 32, "depth": 2, "heads": 4, "ffn_bias": False}
    usual = build(presets.gpt2(**sizes, addnorm="none", norm="none"))
    other = build(presets.gpt2(**sizes, addnorm="none", norm="none", ffn="all-attention"))
    assert usual.count() == other.count()


@pytest.mark.parametrize("changes", [{"ffn": "all-attention", "ffn_width": 4}, {"span": 6}])
@pytest.mark.parametrize("positions", ("rotary", "relative"))
def test_saved_models_are_equal(changes: dict[str, Any], positions: str, tmp_path: Any) -> None:
    model = make_model("decoder", positions=positions, **changes).float()
    model.save(tmp_path)
    ids = draw(2, 8)
    assert torch.equal(load(tmp_path).eval()(ids), model(ids))


@pytest.mark.parametrize("positions", ("rotary", "relative", "buckets"))
def test_decoding_with_a_cache_equals_the_whole_pass(positions: str) -> None:
    model = make_model(
        "decoder", ffn="all-attention", ffn_width=3, span=4, span_ramp=2, positions=positions
    )
    ids, cache = draw(2, 9), model.cache(2, 16)
    parts = [model(part, cache=cache) for part in ids.split([4, 1, 3, 1], dim=1)]
    close(torch.cat(parts, dim=1), model(ids))


# ── Learned keys and values ───────────────────────────────────────────────────────────────────────


def test_persistent_vectors_start_with_unit_variance() -> None:
    keys, values = (part.detach() for part in PersistentVectors(4, 32, 512)(1))
    assert float(keys.var()) == pytest.approx(1, rel=0.05)
    assert float(values.var()) == pytest.approx(1, rel=0.05)


def test_arrangements_scale_the_learned_values_too() -> None:
    attention, _ = make(persistent=persistent())
    key, value = attention.persistent.key.clone(), attention.persistent.value.clone()
    attention.scale_(0.5)
    assert torch.equal(attention.persistent.key, key)
    assert torch.equal(attention.persistent.value, value * 0.5)


def test_additive_scores_cannot_meet_rotated_queries() -> None:
    settings = {"ffn": "all-attention", "attention": "additive", "positions": "rotary"}
    with pytest.raises(ConfigError, match=r"needs attention=dot: got attention=additive"):
        build(ModelConfig(mode="decoder", vocab=9, **settings))


# ── Spans ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_span_of_0_still_sees_the_ramp() -> None:
    bias = AdaptiveSpan(1, 10, 4).bias(torch.arange(8), torch.arange(8))[0, 0]
    assert bias.exp()[7].tolist() == pytest.approx([0, 0, 0, 0, 0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("size", (0.0, 0.3, 1.0))
def test_gradients_of_a_span_are_finite_and_point_outwards(size: float) -> None:
    attention, scheme = make(span=span())
    nn.init.constant_(attention.span.size, size)
    x = torch.randn(2, LENGTH, WIDTH).double()
    with torch.no_grad():  # the last position should read the first: 8 positions away
        goal = torch.randn(2, LENGTH, WIDTH).double()
    loss = (attention(x, Context(mask=Mask.causal(), positions=scheme)) * goal).sum()
    loss.backward()
    assert attention.span.size.grad.isfinite().all()
    exact = attention.span.size.grad.clone()
    if 0 < size < 1:  # by finite differences
        moved = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                attention.span.size[1] = size + step
                out = attention(x, Context(mask=Mask.causal(), positions=scheme))
                moved.append(float((out * goal).sum()))
        assert (moved[0] - moved[1]) / 2e-6 == pytest.approx(float(exact[1]), rel=1e-4, abs=1e-6)


def test_training_clamps_spans() -> None:
    attention, scheme = make(span=span())
    nn.init.constant_(attention.span.size, 1.7)
    attention.eval()(torch.randn(1, 4, WIDTH).double(), Context(positions=scheme))
    assert attention.span.size.tolist() == [1.7] * HEADS
    attention.train()(torch.randn(1, 4, WIDTH).double(), Context(positions=scheme))
    assert attention.span.size.tolist() == [1.0] * HEADS


def test_the_mean_span_is_over_all_heads_of_all_layers() -> None:
    model = make_model("decoder", span=8)
    with torch.no_grad():
        for number, part in enumerate(m for m in model.modules() if isinstance(m, AdaptiveSpan)):
            part.size.copy_(torch.tensor([0.0, 0.25, 0.5, 0.25 + number]))
    assert mean_span(model).item() == pytest.approx(8 * (1.0 + 0.75 + 1.0) / 8)
    assert mean_span(make_model("decoder")).item() == 0


@pytest.mark.parametrize(("name", "value"), [("span", 0), ("span_ramp", 0)])
def test_impossible_spans_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{name} must be positive"):
        ModelConfig(vocab=9, **{name: value})


# ── Product keys ──────────────────────────────────────────────────────────────────────────────────


def memory(**options: Any) -> ProductKeyMemory:
    sizes = {"subkeys": 7, "best": 4, "heads": 3, "key_width": 6} | options
    return randomise_(ProductKeyMemory(WIDTH, **sizes).double())


@torch.no_grad()
def brute_force(layer: ProductKeyMemory, x: Tensor) -> Tensor:
    """Score every one of the n² keys, and read the best."""
    heads, _, n, half = layer.key.shape
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for i in range(x.shape[1]):
            query = x[b, i] @ layer.input.weight.T
            if layer.input.bias is not None:
                query = query + layer.input.bias
            if isinstance(layer.norm, nn.BatchNorm1d):
                norm = layer.norm
                query = (query - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
                query = query * norm.weight + norm.bias
            for h in range(heads):
                q = query[h * 2 * half : (h + 1) * 2 * half]
                scores = torch.tensor(
                    [
                        float((q * torch.cat((layer.key[h, 0, r], layer.key[h, 1, s]))).sum())
                        for r in range(n)
                        for s in range(n)
                    ],
                    dtype=x.dtype,
                )
                order = sorted(range(n * n), key=lambda c: -float(scores[c]))[: layer.best]
                weights = scores[order].softmax(dim=0)
                for weight, number in zip(weights, order, strict=True):
                    out[b, i] += weight * layer.output.weight[number]
    return out


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"batch_norm": False}, {"best": 1}, {"best": 7}, {"heads": 1}],
    ids=str,
)
def test_product_keys_equal_a_search_over_all_keys(options: dict[str, Any]) -> None:
    layer, x = memory(**options).eval(), torch.randn(2, 4, WIDTH).double()
    close(layer(x, Context()), brute_force(layer, x))


@pytest.mark.parametrize(("addnorm", "mode"), slow_off_diagonal(list(FORMULAS), MODES))
@torch.no_grad()
def test_product_keys_in_every_arrangement(addnorm: str, mode: str, monkeypatch: Any) -> None:
    options = {"subkeys": 4, "best": 2, "heads": 2, "key_width": 4, "batch_norm": False}
    changes = {"ffn": "product-key", "ffn_options": options, "depth": 2, "decoder_depth": None}
    model = randomise_(build(config(mode, addnorm, **changes))).double().eval()
    layers = {id(m.output.weight): m for m in model.modules() if isinstance(m, ProductKeyMemory)}
    by_address = {m.output.weight.data_ptr(): m for m in layers.values()}

    def read(x: Tensor, w: naive.Weights, inner: Any) -> Tensor:
        names = ("key", "input.weight", "input.bias", "output.weight")
        values = [w[name] for name in names][-1]
        return brute_force(by_address[values.data_ptr()], x)

    monkeypatch.setattr(naive, "feedforward", read)
    ids = ids_for(mode)
    expected, used = naive.run(model, FORMULAS[addnorm], INSIDE.get(addnorm, ()), *ids)
    real = ids[-1] != 0
    close(model(*ids)[real], expected[real], 1e-9)
    assert used == set(model.state_dict())


def test_every_sub_key_and_value_that_is_read_has_a_gradient() -> None:
    layer = memory(best=7).train()
    layer(torch.randn(4, 30, WIDTH).double(), Context()).square().sum().backward()
    assert bool(layer.key.grad.abs().sum(dim=-1).all()) and bool(layer.input.weight.grad.any())
    numbers = layer.choose(torch.randn(4, 30, WIDTH).double())[1]
    assert (
        int(numbers.max()) < 49 and layer.output.weight.grad.abs().sum(dim=-1).count_nonzero() > 9
    )


def test_values_are_scaled_as_two_matrices() -> None:
    layer = memory()
    before = {name: weight.clone() for name, weight in layer.state_dict().items()}
    layer.scale_(0.5)
    for name, weight in layer.state_dict().items():
        assert torch.equal(weight, before[name] * (0.25 if name == "output.weight" else 1)), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best": 200}, r"ffn_options\.best must be from 1 to subkeys=128: got 200"),
        ({"key_width": 5}, r"ffn_options\.key_width must be an even number above 0: got 5"),
        ({"heads": 0}, r"ffn_options\.heads must be 1 or more: got 0"),
        ({"subkey": 4}, r"ffn_options has no 'subkey'\. Did you mean 'subkeys'\?"),
    ],
)
def test_impossible_memories_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ModelConfig(mode="decoder", vocab=9, ffn="product-key", ffn_options=options))


def test_options_belong_to_product_keys() -> None:
    with pytest.raises(ConfigError, match=r"model\.ffn_options needs ffn=product-key"):
        ModelConfig(vocab=9, ffn_options={"subkeys": 4})
    with pytest.raises(ConfigError, match=r"model\.ffn has no choice 'product-keys'.*product-key"):
        build(ModelConfig(mode="decoder", vocab=9, ffn="product-keys"))
    config = ModelConfig(vocab=9, ffn="product-key", ffn_options={"subkeys": 4})
    assert config.replace(ffn="relu").ffn_options == {}


@pytest.mark.parametrize("ffn", ("all-attention", "none", "product-key"))
def test_attention_over_rows_needs_a_feed_forward(ffn: str) -> None:
    trunk = trunk_of("saint", width=16, depth=1, heads=4, ffn=ffn)
    with pytest.raises(ConfigError, match=rf"SAINT needs a feed-forward network .* got ffn={ffn}"):
        build_tabular(TabularConfig(kind="saint", numbers=2, categories=(), outputs=2, trunk=trunk))


@pytest.mark.parametrize("ffn", ("all-attention", "none", "product-key"))
def test_tables_take_every_kind(ffn: str) -> None:
    options = {"subkeys": 4, "best": 2, "key_width": 4} if ffn == "product-key" else {}
    sizes = {"width": 16, "depth": 2, "heads": 4, "ffn_width": 8, "dropout": 0.0}
    trunk = trunk_of("ft", **sizes, ffn=ffn, ffn_options=options)
    config = TabularConfig(kind="ft", numbers=2, categories=(3,), outputs=2, trunk=trunk)
    model = build_tabular(config).eval()
    assert model(torch.randn(5, 2), torch.zeros(5, 1, dtype=torch.long)).isfinite().all()
