"""Parity with small random models of Hugging Face transformers, with copied weights.

In float32 their models run unchanged. In float64 `sharpen_` first replaces what they round to
float32 in any case; without it, T5, Llama, ViT and Marian would agree to 1e-5 only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import addnorm
from addnorm import Config, Mask, presets
from addnorm.interop.huggingface import ARCHITECTURES, our_tensors
from tests.parity.common import LIMITS, gap, padded, randomise_
from tests.theirs import (
    DECODER_DEPTH,
    DEPTH,
    FFN,
    HEADS,
    LENGTH,
    VOCAB,
    WIDTH,
    bart,
    bert,
    bert_class,
    gpt2,
    hf,
    llama,
    marian,
    t5,
    t5_gated,
    vit,
)

pytestmark = pytest.mark.parity

OUR_SIZES = dict(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS, ffn_width=FFN, length=LENGTH)
OUR_PAIR = OUR_SIZES | dict(decoder_depth=DECODER_DEPTH)


@torch.no_grad()
def prepare(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Return their model with random weights and unfused attention."""
    model = randomise_(make()).to(dtype).eval()
    model.set_attn_implementation("eager")
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.normal_(generator=torch.Generator().manual_seed(5))
    if dtype == torch.float64:
        sharpen_(model)
    return model


@torch.no_grad()
def sharpen_(model: nn.Module) -> None:
    """Compute in float64 what transformers rounds to float32 in a model of any type.

    That is the norm of T5; norm, rotary table and unfused softmax of Llama; the latter in ViT too;
    the sinusoids of Marian.
    """

    def norm(module: nn.Module, x: Tensor) -> Tensor:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * (x * scale)

    def angles(places: Tensor, width: int) -> Tensor:
        return places[..., None] * 10000.0 ** -(torch.arange(0, width, 2).double() / width)

    def rotary(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        both = angles(position_ids, WIDTH // HEADS).repeat(1, 1, 2)
        return both.cos(), both.sin()

    for module in model.modules():
        kind = type(module).__name__
        if kind in ("T5LayerNorm", "LlamaRMSNorm"):
            module.forward = norm.__get__(module)
        elif kind == "LlamaRotaryEmbedding":
            module.forward = rotary
        elif kind == "MarianSinusoidalPositionalEmbedding":
            table = angles(torch.arange(LENGTH), WIDTH)
            module.weight.copy_(torch.cat((table.sin(), table.cos()), dim=1))
        elif kind in ("LlamaModel", "ViTModel"):
            model.set_attn_implementation("sdpa")


# ── Both, on the same input ───────────────────────────────────────────────────────────────────────

Logits = tuple[Tensor, Tensor]
"""Their logits and ours at the real positions: (positions, vocab) or (batch, outputs)."""


def run_tokens(theirs: nn.Module, ours: nn.Module, side: str) -> Logits:
    ids, real = padded((9, 6, 4), VOCAB, side)
    # With padding on the left, their models need explicit position ids.
    positions = {} if side == "right" else {"position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    expected = theirs(input_ids=ids, attention_mask=real.long(), **positions).logits
    return expected[real], ours(ids, mask=Mask.padding(real))[real]


def run_segments(theirs: nn.Module, ours: nn.Module, side: str) -> Logits:
    ids, real = padded((9, 6, 4), VOCAB, side)
    positions = {} if side == "right" else {"position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    segments = (torch.arange(9) > 3).long().expand(3, 9)
    masks = dict(attention_mask=real.long(), token_type_ids=segments)
    expected = theirs(input_ids=ids, **masks, **positions).logits
    output = ours(ids, mask=Mask.padding(real), segments=segments)
    return (expected[real], output[real]) if expected.ndim == 3 else (expected, output)


def run_pair(theirs: nn.Module, ours: nn.Module, side: str) -> Logits:
    source, source_real = padded((9, 6, 4), VOCAB, side, seed=1)
    target, target_real = padded((5, 7, 3), VOCAB, side, seed=2)
    expected = theirs(
        input_ids=source,
        attention_mask=source_real.long(),
        decoder_input_ids=target,
        decoder_attention_mask=target_real.long(),
    ).logits
    masks = dict(source_mask=Mask.padding(source_real), target_mask=Mask.padding(target_real))
    return expected[target_real], ours(source, target, **masks)[target_real]


def run_images(theirs: nn.Module, ours: nn.Module, side: str) -> Logits:
    images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    images = images.to(ours.summary.weight.dtype)
    return theirs(pixel_values=images).logits, ours(images)


class Case(NamedTuple):
    theirs: Callable[[], nn.Module]
    ours: Config
    kind: str
    """The architecture whose table of names holds."""
    run: Callable[[nn.Module, nn.Module, str], Logits]
    left: bool = True
    """Whether their model supports padding on the left."""


CASES = {
    "bert": Case(bert, presets.bert(**OUR_SIZES), "bert", run_segments),
    "bert-class": Case(
        bert_class,
        presets.bert(**OUR_SIZES, head="class", pooler="tanh", outputs=3),
        "bert",
        run_segments,
        left=False,  # they pool the first position, even if it is padding
    ),
    "gpt2": Case(gpt2, presets.gpt2(**OUR_SIZES), "gpt2", run_tokens),
    "llama": Case(llama, presets.llama(**OUR_SIZES, kv_heads=2), "llama", run_tokens),
    "t5": Case(t5, presets.t5(**OUR_PAIR, head_width=12), "t5", run_pair),
    "t5-v1.1": Case(t5_gated, presets.t5("v1.1-small", **OUR_PAIR, head_width=12), "t5", run_pair),
    "marian": Case(
        marian, presets.marian(**OUR_PAIR, unembed_bias=True), "marian", run_pair, left=False
    ),
    "bart": Case(bart, presets.bart(**OUR_PAIR, unembed_bias=True), "bart", run_pair, left=False),
    "vit": Case(
        vit,
        presets.vit(
            width=WIDTH, depth=DEPTH, heads=HEADS, ffn_width=FFN, image=12, patch=4, outputs=5
        ),
        "vit",
        run_images,
        left=False,
    ),
}


STORED_NAMES = {
    "vit.layers.": "vit.encoder.layer.",
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
"""Parts of names by which transformers 5 holds a ViT, and by which it stores it."""


def renamed(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors, or gradients, by our names."""
    if case.kind == "vit":
        for held, stored in STORED_NAMES.items():
            tensors = {name.replace(held, stored): part for name, part in tensors.items()}
    return our_tensors(ARCHITECTURES[case.kind], case.ours.model, tensors)


def copied(case: Case, theirs: nn.Module, **changes: Any) -> nn.Module:
    """Return our model with their weights."""
    model = addnorm.build(case.ours.replace(**changes)).to(theirs.dtype)
    model.load_state_dict(renamed(case, theirs.state_dict()))
    return model.eval()


# ── Tests ─────────────────────────────────────────────────────────────────────────────────────────

SIDED = [
    pytest.param(name, side, id=f"{name}-{side}")
    for name, case in CASES.items()
    for side in ("right", "left")
    if side == "right" or case.left
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("name", "side"), SIDED)
@torch.no_grad()
def test_logits(name: str, side: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    theirs = prepare(case.theirs, dtype)
    expected, actual = case.run(theirs, copied(case, theirs), side)
    assert gap(expected, actual) <= LIMITS[dtype]
    assert expected.std() > 0.1, "such flat logits would agree whatever the model computes"


WRONG_EPS = {1e-12: 1e-5, 1e-6: 1e-5, 1e-5: 1e-6}
"""A plausible wrong epsilon for each right one."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_wrong_epsilon_is_noticed(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    theirs = prepare(case.theirs, dtype)
    ours = copied(case, theirs, norm_eps=WRONG_EPS[case.ours.model.norm_eps])
    expected, actual = case.run(theirs, ours, "right")
    assert gap(expected, actual) > LIMITS[dtype]


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    """Gradients of a cross-entropy, for every weight that they train."""
    case = CASES[name]
    theirs = prepare(case.theirs, torch.float64)
    ours = copied(case, theirs)
    for logits in case.run(theirs, ours, "right"):
        F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[-1]).backward()
    weights = theirs.state_dict(keep_vars=True)
    expected = renamed(case, {key: w.grad for key, w in weights.items() if w.grad is not None})
    gradients = {key: weight.grad for key, weight in ours.named_parameters()}
    if name in ("marian", "bart"):
        del gradients["head.bias"]  # they do not train it
    assert expected.keys() == gradients.keys()
    for key, grad in expected.items():
        assert gap(grad, gradients[key]) <= 1e-10, key


@torch.no_grad()
def test_far_buckets() -> None:
    """T5's bias over distances that share buckets, and beyond the furthest one."""
    case = CASES["t5"]
    theirs = prepare(case.theirs, torch.float64)
    source, target = (padded((300,), VOCAB, seed=seed)[0] for seed in (1, 2))
    expected = theirs(input_ids=source, decoder_input_ids=target).logits
    assert gap(expected, copied(case, theirs)(source, target)) <= LIMITS[torch.float64]


BART_BASE = dict(d_model=768, encoder_layers=6, decoder_layers=6)
BART_BASE |= dict(encoder_ffn_dim=3072, decoder_ffn_dim=3072)
T5_BASE = dict(d_model=768, num_layers=12, num_heads=12)
GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
TINY_LLAMA = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22)
LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)

RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-small": ("GPT2LMHeadModel", {}),
    "gpt2-medium": ("GPT2LMHeadModel", dict(n_embd=1024, n_layer=24, n_head=16)),
    "gpt2-large": ("GPT2LMHeadModel", dict(n_embd=1280, n_layer=36, n_head=20)),
    "gpt2-xl": ("GPT2LMHeadModel", dict(n_embd=1600, n_layer=48, n_head=25)),
    "bert-base": ("BertForMaskedLM", {}),
    "bert-large": ("BertForMaskedLM", LARGE),
    "t5-small": ("T5ForConditionalGeneration", {}),
    "t5-base": ("T5ForConditionalGeneration", T5_BASE | dict(d_ff=3072)),
    "t5-v1.1-small": (
        "T5ForConditionalGeneration",
        GATED | dict(d_ff=1024, num_layers=8, num_heads=6),
    ),
    "t5-v1.1-base": ("T5ForConditionalGeneration", GATED | T5_BASE | dict(d_ff=2048)),
    "marian": (
        "MarianMTModel",
        BART_BASE | dict(d_model=512, encoder_ffn_dim=2048, decoder_ffn_dim=2048, vocab_size=58101),
    ),
    "bart-base": ("BartForConditionalGeneration", BART_BASE),
    "bart-large": ("BartForConditionalGeneration", {}),
    "llama-1b": ("LlamaForCausalLM", TINY_LLAMA | dict(num_key_value_heads=4)),
    "llama-7b": ("LlamaForCausalLM", {}),
    "vit-base": ("ViTForImageClassification", dict(num_labels=1000)),
    "vit-large": ("ViTForImageClassification", LARGE | dict(num_labels=1000)),
}
"""Presets, with the class and settings of the same model in transformers; defaults otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", RELEASED)
def test_count(preset: str) -> None:
    kind = getattr(hf, RELEASED[preset][0])
    with torch.device("meta"):
        theirs = kind(kind.config_class(**RELEASED[preset][1]))
        ours = addnorm.build(presets.find(preset))
    expected = sum(weight.numel() for weight in theirs.parameters() if weight.requires_grad)
    if "v1.1" in preset:
        expected += ours.head.weight.numel()  # see t5_gated
    assert ours.count() == expected
