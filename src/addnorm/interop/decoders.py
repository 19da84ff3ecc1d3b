"""Decoders of Hugging Face as ours: GPT-2, OPT, GPT-NeoX, GPT-J, Phi, Llama, Gemma, relatives."""

import math

from addnorm.config import ModelConfig
from addnorm.errors import SavedError
from addnorm.interop.decoder_fields import rotary, rotary_by_kind, ties, windows
from addnorm.interop.mapping import (
    HALVES,
    HEADWISE_QKV,
    QKV,
    TRANSPOSED,
    Architecture,
    ConfigJson,
    Field,
    FieldValues,
    Names,
    Only,
    Row,
    Special,
    blocks,
    refuse,
)
from addnorm.interop.shared_fields import (
    FFN_WIDTH,
    GATED,
    HF_ACTIVATIONS,
    POSITIONS_2048,
    STACK_SIZES,
    VOCAB,
)

MASK_BUFFERS = {"attn.bias": "the causal mask", "attn.masked_bias": "the causal mask"}
ROTARY_BUFFERS = {"rotary_emb.inv_freq": "frequencies are computed"}


# ── GPT-2 and OPT ─────────────────────────────────────────────────────────────────────────────────

_PRE_LAYER = {
    "mode": "decoder",
    "addnorm": "pre",
    "positions": "learned",
    "scale_embedding": False,
    "init": "normal",
}


def _gpt2_rows(c: ModelConfig) -> list[Row]:
    block = (
        Row("sublayers.attention.input", "attn.c_attn", TRANSPOSED),
        Row("sublayers.attention.output", "attn.c_proj", TRANSPOSED),
        Row("sublayers.ffn.input", "mlp.c_fc", TRANSPOSED),
        Row("sublayers.ffn.output", "mlp.c_proj", TRANSPOSED),
        Row("addnorms.attention.norm", "ln_1"),
        Row("addnorms.ffn.norm", "ln_2"),
    )
    return [
        Row("tokens", "transformer.wte"),
        Row("decoder.positions", "transformer.wpe"),
        *blocks("decoder", "transformer.h", block),
        Row("decoder.stack.ends.norm", "transformer.ln_f"),
        Row("head", "lm_head"),
    ]


def _gpt2_inner() -> Special:
    def read(settings: ConfigJson, names: Names) -> FieldValues:
        inner = settings.get("n_inner")
        return {} if inner is None else {"ffn_width": inner}

    return Special(read, lambda c: {"n_inner": c.effective_ffn_width})


_GPT2_SIZES = (
    Field("width", "n_embd"),
    Field("depth", "n_layer"),
    Field("heads", "n_head"),
    _gpt2_inner(),
    Field("norm_eps", "layer_norm_epsilon", 1e-5),
    Field("ffn", "activation_function", "gelu_new", HF_ACTIVATIONS),
)

GPT2 = Architecture(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": "token", "GPT2Model": "none"},
    fixed=_PRE_LAYER,
    fields=(
        VOCAB,
        *_GPT2_SIZES,
        Field("length", "n_positions", 1024),
        Field("dropout", "resid_pdrop", 0.1),
        Field("attention_dropout", "attn_pdrop", 0.1),
        Only("scale_attn_weights", (True,), "addnorm scales by 1/sqrt(head_width)."),
        Only("scale_attn_by_inverse_layer_idx", (False,), "addnorm scales all layers alike."),
        Only("add_cross_attention", (False,), "it is read as a decoder alone.", written=False),
        ties("lm_head.weight"),
    ),
    rows=_gpt2_rows,
    prefix="transformer.",
    tied={"lm_head.weight": "transformer.wte.weight"},
    unused=MASK_BUFFERS,
)


def _opt_rows(c: ModelConfig) -> list[Row]:
    block = (
        Row(
            "sublayers.attention.input",
            tuple(f"self_attn.{part}_proj" for part in "qkv"),
            QKV,
        ),
        Row("sublayers.attention.output", "self_attn.out_proj"),
        Row("sublayers.ffn.input", "fc1"),
        Row("sublayers.ffn.output", "fc2"),
        Row("addnorms.attention.norm", "self_attn_layer_norm"),
        Row("addnorms.ffn.norm", "final_layer_norm"),
    )
    return [
        Row("tokens", "model.decoder.embed_tokens"),
        Row("decoder.positions", "model.decoder.embed_positions"),
        *blocks("decoder", "model.decoder.layers", block),
        Row("decoder.stack.ends.norm", "model.decoder.final_layer_norm"),
        Row("head", "lm_head"),
    ]


def _opt_fixed() -> Special:
    def read(settings: ConfigJson, names: Names) -> FieldValues:
        inner = settings.get("word_embed_proj_dim", settings.get("hidden_size"))
        if inner != settings.get("hidden_size"):
            missing = "addnorm's decoders have embeddings of the stream's width."
            raise refuse("word_embed_proj_dim", inner, missing)
        biases = settings.get("enable_bias", True) is not False
        return {
            "position_options": {"offset": 2},
            "attention_bias": "all" if biases else "none",
            "ffn_bias": biases,
        }

    def write(c: ModelConfig) -> FieldValues:
        return {"word_embed_proj_dim": c.width, "enable_bias": c.ffn_bias}

    return Special(read, write)


OPT = Architecture(
    model_type="opt",
    classes={"OPTForCausalLM": "token", "OPTModel": "none"},
    fixed=_PRE_LAYER,
    fields=(
        VOCAB,
        *STACK_SIZES,
        Field("ffn_width", "ffn_dim"),
        POSITIONS_2048,
        Field("dropout", "dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("ffn", "activation_function", "relu", HF_ACTIVATIONS),
        Only("do_layer_norm_before", (True,), "post-norm OPT also projects its embeddings."),
        Only("_remove_final_layer_norm", (False,), "pre-norm ends with a norm."),
        Only("layer_norm_elementwise_affine", (True,), "addnorm's norms have a gain."),
        _opt_fixed(),
        ties("lm_head.weight"),
    ),
    rows=_opt_rows,
    prefix="model.",
    tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
)


# ── GPT-NeoX ──────────────────────────────────────────────────────────────────────────────────────


def _neox_rows(c: ModelConfig) -> list[Row]:
    block = (
        Row("sublayers.attention.input", "attention.query_key_value", HEADWISE_QKV),
        Row("sublayers.attention.output", "attention.dense"),
        Row("sublayers.ffn.input", "mlp.dense_h_to_4h"),
        Row("sublayers.ffn.output", "mlp.dense_4h_to_h"),
        Row("addnorms.attention.norm", "input_layernorm"),
        Row("addnorms.ffn.norm", "post_attention_layernorm"),
    )
    return [
        Row("tokens", "gpt_neox.embed_in"),
        *blocks("decoder", "gpt_neox.layers", block),
        Row("decoder.stack.ends.norm", "gpt_neox.final_layer_norm"),
        Row("head", "embed_out"),
    ]


GPT_NEOX = Architecture(
    model_type="gpt_neox",
    classes={"GPTNeoXForCausalLM": "token", "GPTNeoXModel": "none"},
    fixed={
        "mode": "decoder",
        "positions": "rotary",
        "scale_embedding": False,
        "init": "normal",
    },
    fields=(
        VOCAB,
        *STACK_SIZES,
        FFN_WIDTH,
        POSITIONS_2048,
        Field("norm_eps", "layer_norm_eps", 1e-5),
        Field("dropout", "hidden_dropout", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("ffn", "hidden_act", "gelu", HF_ACTIVATIONS),
        Field("addnorm", "use_parallel_residual", True, {True: "parallel", False: "pre"}),
        Field("attention_bias", "attention_bias", True, {True: "all", False: "none"}),
        rotary(0.25),
        ties("embed_out.weight", False),
    ),
    rows=_neox_rows,
    prefix="gpt_neox.",
    tied={"embed_out.weight": "gpt_neox.embed_in.weight"},
    unused={
        "attention.bias": "the causal mask",
        "attention.masked_bias": "the causal mask",
        **ROTARY_BUFFERS,
    },
)


# ── GPT-J and Phi: one norm for both branches, which ours has twice ──────────────────────────────


_ONE_NORM = {
    "mode": "decoder",
    "addnorm": "parallel",
    "positions": "rotary",
    "scale_embedding": False,
    "unembed_bias": True,
    "init": "normal",
}


def _gptj_rows(c: ModelConfig) -> list[Row]:
    block = (
        Row("sublayers.attention.input", tuple(f"attn.{part}_proj" for part in "qkv"), QKV),
        Row("sublayers.attention.output", "attn.out_proj"),
        Row("sublayers.ffn.input", "mlp.fc_in"),
        Row("sublayers.ffn.output", "mlp.fc_out"),
        Row("addnorms.attention.norm", "ln_1"),
        Row("addnorms.ffn.norm", "ln_1"),
    )
    return [
        Row("tokens", "transformer.wte"),
        *blocks("decoder", "transformer.h", block),
        Row("decoder.stack.ends.norm", "transformer.ln_f"),
        Row("head", "lm_head"),
    ]


def _gptj_rotary() -> Special:
    """Return the field of rotary positions of neighbouring numbers, of part of a head."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        rotated = settings.get("rotary_dim", 64)
        if not isinstance(rotated, int):
            raise refuse("rotary_dim", rotated, "addnorm rotates a stated part of each head.")
        share = rotated * int(settings["n_head"]) / int(settings["n_embd"])
        return {"position_options": {"layout": "interleaved", "share": share}}

    def write(c: ModelConfig) -> FieldValues:
        return {"rotary_dim": int(c.effective_head_width * c.position_options.get("share", 1.0))}

    return Special(read, write)


GPTJ = Architecture(
    model_type="gptj",
    classes={"GPTJForCausalLM": "token", "GPTJModel": "none"},
    fixed=_ONE_NORM | {"attention_bias": "none"},
    fields=(
        VOCAB,
        *_GPT2_SIZES,
        Field("length", "n_positions", 2048),
        Field("dropout", "resid_pdrop", 0.0),
        Field("attention_dropout", "attn_pdrop", 0.0),
        _gptj_rotary(),
        ties("lm_head.weight", False),
    ),
    rows=_gptj_rows,
    prefix="transformer.",
    tied={"lm_head.weight": "transformer.wte.weight"},
    unused=MASK_BUFFERS,
)


def _phi_rows(c: ModelConfig) -> list[Row]:
    block = (
        Row("sublayers.attention.input", tuple(f"self_attn.{part}_proj" for part in "qkv"), QKV),
        Row("sublayers.attention.output", "self_attn.dense"),
        Row("sublayers.ffn.input", "mlp.fc1"),
        Row("sublayers.ffn.output", "mlp.fc2"),
        Row("addnorms.attention.norm", "input_layernorm"),
        Row("addnorms.ffn.norm", "input_layernorm"),
    )
    return [
        Row("tokens", "model.embed_tokens"),
        *blocks("decoder", "model.layers", block),
        Row("decoder.stack.ends.norm", "model.final_layernorm"),
        Row("head", "lm_head"),
    ]


def _kv_heads() -> Special:
    """Return the field of key/value heads, which are as many as heads if none are stated."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        shared = settings.get("num_key_value_heads")
        return {"kv_heads": settings.get("num_attention_heads") if shared is None else shared}

    return Special(read, lambda c: {"num_key_value_heads": c.effective_kv_heads})


PHI = Architecture(
    model_type="phi",
    classes={"PhiForCausalLM": "token", "PhiModel": "none"},
    fixed=_ONE_NORM,
    fields=(
        VOCAB,
        *STACK_SIZES,
        FFN_WIDTH,
        POSITIONS_2048,
        _kv_heads(),
        Field("norm_eps", "layer_norm_eps", 1e-5),
        Field("dropout", "resid_pdrop", 0.0),
        Field("attention_dropout", "attention_dropout", 0.0),
        Field("ffn", "hidden_act", "gelu_new", HF_ACTIVATIONS),
        Only("qk_layernorm", (False,), "addnorm's norms of queries and keys have no bias there."),
        rotary(0.5),
        ties("lm_head.weight", False),
    ),
    rows=_phi_rows,
    prefix="model.",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    unused=ROTARY_BUFFERS,
)


# ── Llama and its relatives ───────────────────────────────────────────────────────────────────────

_LLAMA_LIKE = {
    "mode": "decoder",
    "norm": "rms",
    "positions": "rotary",
    "scale_embedding": False,
    "ffn_bias": False,
    "init": "normal",
}
_LLAMA_SIZES = (
    VOCAB,
    *STACK_SIZES,
    FFN_WIDTH,
    Field("attention_dropout", "attention_dropout", 0.0),
)
_SILU = Field("ffn", "hidden_act", "silu", GATED)
_BIAS = Field("attention_bias", "attention_bias", False, {False: "none", True: "all"})


def _heads() -> Special:
    """Return the fields of key/value heads and of a head's width."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        heads, width = settings.get("num_attention_heads"), settings.get("head_dim")
        shared = settings.get("num_key_value_heads")
        fields: FieldValues = {"dropout": 0.0, "kv_heads": heads if shared is None else shared}
        return fields if width is None else fields | {"head_width": width}

    def write(c: ModelConfig) -> FieldValues:
        return {"num_key_value_heads": c.effective_kv_heads, "head_dim": c.effective_head_width}

    return Special(read, write)


def _llama_block(boxes: tuple[Row, ...], norms: str | None = None) -> tuple[Row, ...]:
    """Return the rows of a block; `norms` ends our name of the norms of queries and keys."""
    names = tuple(f"self_attn.{part}_proj" for part in "qkv")
    qk = () if norms is None else (("query_norm", "q_norm"), ("key_norm", "k_norm"))
    return (
        Row("sublayers.attention.input", names, QKV),
        Row("sublayers.attention.output", "self_attn.o_proj"),
        Row("sublayers.ffn.input", ("mlp.gate_proj", "mlp.up_proj"), HALVES),
        Row("sublayers.ffn.output", "mlp.down_proj"),
        *(Row(f"sublayers.attention.{one}{norms}", f"self_attn.{other}") for one, other in qk),
        *boxes,
    )


_PRE_BOXES = (
    Row("addnorms.attention.norm", "input_layernorm"),
    Row("addnorms.ffn.norm", "post_attention_layernorm"),
)
_SANDWICH_BOXES = (
    Row("addnorms.attention.norm", "input_layernorm"),
    Row("addnorms.attention.outer", "post_attention_layernorm"),
    Row("addnorms.ffn.norm", "pre_feedforward_layernorm"),
    Row("addnorms.ffn.outer", "post_feedforward_layernorm"),
)
_AFTER_BOXES = (
    Row("addnorms.attention.norm", "post_attention_layernorm"),
    Row("addnorms.ffn.norm", "post_feedforward_layernorm"),
)


def _llama_rows(block: tuple[Row, ...]) -> list[Row]:
    return [
        Row("tokens", "model.embed_tokens"),
        *blocks("decoder", "model.layers", block),
        Row("decoder.stack.ends.norm", "model.norm"),
        Row("head", "lm_head"),
    ]


def _llama_like(
    model_type: str,
    name: str,
    fixed: FieldValues,
    fields: tuple[Field | Only | Special, ...],
    block: tuple[Row, ...],
    *,
    length: int,
    tied: bool = False,
    eps: float = 1e-6,
) -> Architecture:
    """Return an architecture whose tensors are named as in Llama.

    Parameters
    ----------
    model_type, name : names in config.json and of the classes.
    fixed, fields : besides those that all relatives share.
    block : rows of a block.
    length, tied, eps : number of positions, whether the output is the embedding, and the epsilon of
        the norms, if config.json does not say.
    """
    sizes = (
        *_LLAMA_SIZES,
        Field("length", "max_position_embeddings", length),
        Field("norm_eps", "rms_norm_eps", eps),
    )
    return Architecture(
        model_type=model_type,
        classes={f"{name}ForCausalLM": "token", f"{name}Model": "none"},
        fixed=_LLAMA_LIKE | fixed,
        fields=(*sizes, _heads(), *fields, ties("lm_head.weight", tied)),
        rows=lambda c: _llama_rows(block),
        prefix="model.",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        unused=ROTARY_BUFFERS,
    )


LLAMA = _llama_like(
    "llama",
    "Llama",
    {"addnorm": "pre"},
    (_SILU, Field("ffn_bias", "mlp_bias", False), _BIAS, rotary()),
    _llama_block(_PRE_BOXES),
    length=2048,
)
MISTRAL = _llama_like(
    "mistral",
    "Mistral",
    {"addnorm": "pre", "attention_bias": "none"},
    (_SILU, rotary(), windows(4096, listed=False)),
    _llama_block(_PRE_BOXES),
    length=131072,
)
QWEN2 = _llama_like(
    "qwen2",
    "Qwen2",
    {"addnorm": "pre", "attention_bias": "qkv"},
    (_SILU, rotary(), windows(4096, opt_in=True)),
    _llama_block(_PRE_BOXES),
    length=32768,
)
QWEN3 = _llama_like(
    "qwen3",
    "Qwen3",
    {"addnorm": "pre", "qk_norm": "head"},
    (_SILU, _BIAS, rotary(), windows(4096, opt_in=True)),
    _llama_block(_PRE_BOXES, norms=""),
    length=32768,
)


OLMO2 = _llama_like(
    "olmo2",
    "Olmo2",
    {"addnorm": "res-post", "qk_norm": "width"},
    (_SILU, _BIAS, rotary()),
    _llama_block(_AFTER_BOXES, norms=".norm"),
    length=2048,
    eps=1e-5,
)


# ── Gemma ─────────────────────────────────────────────────────────────────────────────────────────


def _gemma_scale() -> Special:
    """Return the field of the scale of scores, 1/√query_pre_attn_scalar."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        scalar = settings.get("query_pre_attn_scalar", 256)
        if not isinstance(scalar, int | float) or scalar <= 0:
            raise SavedError(f"config.json must have a query_pre_attn_scalar: got {scalar!r}.")
        return {"attention_scale": scalar**-0.5}

    def write(c: ModelConfig) -> FieldValues:
        scalar = c.effective_attention_scale**-2
        near = round(scalar)
        return {"query_pre_attn_scalar": near if math.isclose(scalar, near) else scalar}

    return Special(read, write)


_GEMMA = {
    "addnorm": "sandwich",
    "norm": "rms-offset",
    "scale_embedding": True,
}
_GEMMA_FIELDS = (
    Field("ffn", "hidden_activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu-tanh"}),
    _BIAS,
    _gemma_scale(),
    Only(
        "use_bidirectional_attention",
        (False, None),
        "it is read as a causal decoder.",
        written=False,
    ),
)
GEMMA2 = _llama_like(
    "gemma2",
    "Gemma2",
    _GEMMA,
    (
        *_GEMMA_FIELDS,
        rotary(),
        Field("attention_cap", "attn_logit_softcapping", 50.0),
        Field("logit_cap", "final_logit_softcapping", 30.0),
        windows(4096, alternate=2),
    ),
    _llama_block(_SANDWICH_BOXES),
    length=8192,
    tied=True,
)
GEMMA3 = _llama_like(
    "gemma3_text",
    "Gemma3",
    _GEMMA | {"qk_norm": "head"},
    (
        *_GEMMA_FIELDS,
        rotary_by_kind(6, "sliding_window_pattern"),
        Field("logit_cap", "final_logit_softcapping", None),
        windows(4096, alternate=6, pattern="sliding_window_pattern"),
    ),
    _llama_block(_SANDWICH_BOXES, norms=""),
    length=131072,
    tied=True,
)

DECODERS = (GPT2, OPT, GPT_NEOX, GPTJ, PHI, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA2, GEMMA3)
