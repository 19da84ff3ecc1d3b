"""The cost formulas against torch's FLOP counter and the built module."""

import json

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from addnorm import build, cost, presets, token_loss
from addnorm.config import Config
from addnorm.errors import InputError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.models.size import Cost, LayerCost
from tests.conftest import MODES, slow_except

SMALL = dict(vocab=60, width=32, depth=2, heads=4)
LENGTH, BATCH = 24, 3

VARIANTS: dict[str, Config] = {
    **{
        f"{mode} {name}": presets.base(**SMALL, mode=mode, addnorm=name)
        for mode in MODES
        for name in ADDNORMS
    },
    "gpt2": presets.gpt2(**SMALL),
    "bert": presets.bert(**SMALL),
    "t5": presets.t5(**SMALL, head_width=8, ffn_width=64),
    "t5 v1.1": presets.t5("v1.1-small", **SMALL, head_width=8, ffn_width=64),
    "llama": presets.llama(**SMALL, kv_heads=2, ffn_width=64),
    "marian": presets.marian(**SMALL, decoder_depth=3),
    "bart": presets.bart(**SMALL),
    "separate vocabularies": presets.base(**SMALL, target_vocab=40, tie_embeddings="none"),
    "additive": presets.gpt2(**SMALL, attention="additive"),
    "linear bias": presets.gpt2(**SMALL, positions="linear-bias", qk_norm="head"),
    "cap, qk-norm over the width": presets.gpt2(**SMALL, attention_cap=5.0, qk_norm="width"),
    "scale norm, qk-norm": presets.gpt2(**SMALL, norm="scale", qk_norm="head"),
    "class": presets.bert(**SMALL, head="class", outputs=3, pooler="tanh"),
    "pooler of DistilBERT": presets.bert(**SMALL, head="class", outputs=3, pooler="dense-relu"),
    "narrow embeddings": presets.bert(**SMALL, embed_width=12),
    "narrow embeddings, class": presets.bert(
        **SMALL, embed_width=12, head="class", outputs=3, pooler="dense-gelu"
    ),
    "offset gains": presets.gpt2(**SMALL, norm="rms-offset"),
    "alternating windows": presets.llama(**SMALL, ffn_width=64, window=3, full_every=2),
    "all-attention": presets.gpt2(**SMALL, ffn="all-attention", ffn_width=40),
    "all-attention, rotary": presets.llama(**SMALL, ffn="all-attention", ffn_width=40, kv_heads=2),
    "all-attention encoder-decoder": presets.base(**SMALL, ffn="all-attention", ffn_width=40),
    "product-key": presets.gpt2(
        **SMALL,
        ffn="product-key",
        ffn_options={"subkeys": 16, "best": 8, "heads": 2, "key_width": 24},
    ),
    "product-key, no batch norm, normformer": presets.gpt2(
        **SMALL,
        addnorm="normformer",
        ffn="product-key",
        ffn_options={"subkeys": 16, "best": 4, "key_width": 8, "batch_norm": False},
    ),
    "no feed-forward": presets.gpt2(**SMALL, ffn="none"),
    "convolution": presets.gpt2(**SMALL, mixing="convolution", kernel=4),
    "convolution, sub-ln": presets.base(**SMALL, mixing="convolution", addnorm="sub-ln"),
    "adaptive span": presets.gpt2(**SMALL, span=10, span_ramp=4),
    "biases of qkv": presets.gpt2(
        **SMALL, attention_bias="qkv", unembed_bias=True, tie_embeddings="none"
    ),
    "final norm": presets.base(**SMALL, final_norm=True, embed_norm=True),
}
GRID = [f"{mode} {name}" for name in ADDNORMS for mode in MODES]
"""Every arrangement in every mode."""
FAST = {*VARIANTS} - {*GRID} | {
    f"{MODES[i % len(MODES)]} {name}" for i, name in enumerate(ADDNORMS)
}
"""Variants of the fast tests: every arrangement in one mode, and all others."""


def inputs(config: Config) -> tuple[torch.Tensor, ...]:
    vocabs = [config.model.vocab]
    if config.model.mode == "encoder-decoder":
        vocabs.append(config.model.target_vocab or config.model.vocab)
    return tuple(torch.randint(vocab, (BATCH, LENGTH)) for vocab in vocabs)


@pytest.mark.parametrize("name", slow_except(FAST, VARIANTS))
def test_parameters_and_operations_are_those_of_the_built_model(name: str) -> None:
    config = VARIANTS[name]
    model, formula = build(config), cost(config, LENGTH, BATCH)
    assert formula.parameters == model.count()
    # The counter sees the matrix products of the math kernel, but not those of the fused one.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            out = model(*inputs(config))
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    assert formula.forward == forward.get_total_flops()
    assert formula.backward == backward.get_total_flops()


def test_relative_positions_cost_a_little_less_backward() -> None:
    # The sinusoids they project need no gradient.
    config = presets.gpt2(**SMALL, positions="relative")
    model, formula = build(config), cost(config, LENGTH, BATCH)
    assert formula.parameters == model.count()
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            out = model(*inputs(config))
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    assert formula.forward == forward.get_total_flops()
    assert 0.97 < backward.get_total_flops() / formula.backward < 1


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_images_are_counted(size: str) -> None:
    config = presets.vit(size, depth=1, image=32)
    model, formula = build(config), cost(config, batch=BATCH)
    assert formula.parameters == model.count()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        model(torch.randn(BATCH, 3, 32, 32))
    assert formula.forward == forward.get_total_flops()


@pytest.mark.parametrize("name", slow_except(FAST, VARIANTS))
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_activations_are_what_autograd_saves(name: str, dropout: float) -> None:
    config = VARIANTS[name].replace(dropout=dropout)
    model, formula = build(config).train(), cost(config, LENGTH, BATCH)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # A reference to the tensor prevents its address from being reused.
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    arguments = inputs(config)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if config.model.head in ("token", "masked"):
            loss = token_loss(model, model.hidden(*arguments), arguments[-1])
        else:
            loss = model(*arguments).sum()
    assert loss.isfinite()
    measured = sum(size for size, _ in saved.values())
    assert measured / formula.activations == pytest.approx(1, abs=0.2)
    if config.model.norm == "layer" and name not in ("additive", "linear bias", "class"):
        assert measured / formula.activations == pytest.approx(1, abs=0.06)


def test_cache_is_what_the_model_allocates() -> None:
    config = presets.marian(**SMALL, kv_heads=2, decoder_depth=3)
    model, formula = build(config), cost(config, LENGTH, BATCH)
    cache = model.cache(BATCH, LENGTH)
    ids = torch.randint(60, (BATCH, LENGTH))
    model.decode(ids, model.encode(ids), cache=cache)
    memory = sum(k.nbytes + v.nbytes for k, v in cache.memory.values())
    assert formula.cache == cache.store.nbytes + memory


@pytest.mark.parametrize(
    "config", [presets.base(), presets.gpt2(), presets.bert(width=256, heads=4), presets.llama()]
)
def test_scores_overtake_the_rest_at_the_stated_length(config: Config) -> None:
    at = cost(config).attention_overtakes_at
    assert at is not None
    for length, more in ((at - 1, False), (at, True)):
        total = cost(config, length)
        scores = sum(part.forward for part in total.parts if part.name.endswith("scores"))
        assert (scores >= total.forward - scores) is more


def test_without_a_head_scores_overtake_at_six_widths() -> None:
    # Projections 8 d² and feed-forward 16 d² against 4 n d: n = 6 d.
    assert cost(presets.bert(width=64, heads=4, head="none")).attention_overtakes_at == 6 * 64


def test_scores_of_a_window_never_overtake() -> None:
    assert cost(presets.gpt2(window=128)).attention_overtakes_at is None


def test_json_has_every_number() -> None:
    table = json.loads(json.dumps(cost(presets.gpt2(), 128, 4).to_dict()))
    for name in ("parameters", "forward", "activations", "cache"):
        assert table[name] == sum(part[name] for part in table["parts"])
    assert table["backward"] == 2 * table["forward"]


@pytest.mark.parametrize(("length", "batch"), [(0, 1), (8, 0), (-1, 1)])
def test_impossible_sizes_are_refused(length: int, batch: int) -> None:
    with pytest.raises(InputError, match=r"length and batch must be positive: got .* Try 128, 1\."):
        cost(presets.gpt2(), length, batch)


def test_shared_weights_count_once() -> None:
    tied, untied = build(presets.gpt2(**SMALL)), build(presets.gpt2(**SMALL, tie_embeddings="none"))
    assert untied.count() - tied.count() == 60 * 32
    assert isinstance(tied, nn.Module)


def test_a_cost_is_shown_as_a_table() -> None:
    gpt2 = cost(presets.gpt2(), 128, 4)
    text = repr(gpt2)
    assert text.startswith("Cost of 4 × 128 positions, float32\n")
    assert f"{gpt2.parameters:,}" in text and "decoder ffn" in text
    assert "scores cost more than all the rest from length" in text
    assert "never cost more" in repr(cost(presets.gpt2(window=128)))
    html = gpt2._repr_html_()
    shown = [part.name for part in gpt2.parts if part.name in text]
    assert html.count("<tr>") == len(shown) + 2 == len(gpt2.parts) + 2
    assert "<td>decoder ffn</td>" in html and f"<td>{gpt2.parameters:,}</td>" in html
    assert "<td>decoder add &amp; norm</td>" in html


def test_the_html_of_a_cost_escapes_names() -> None:
    part = LayerCost(name="<script>", parameters=1)
    table = Cost(batch=1, length=2, parts=(part,), attention_overtakes_at=None)
    assert "&lt;script&gt;" in table._repr_html_() and "<script>" not in table._repr_html_()
