"""Decoders of Hugging Face as ours: GPT-2, OPT, GPT-NeoX, Llama and its relatives, Gemma."""

import math
from typing import Any

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError, SavedError
from addnorm.interop.encoders import HF_ACTIVATIONS
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

GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu-tanh"}
GATED |= {"gelu_new": "geglu-tanh", "relu": "reglu"}
"""Their activations and our gated feed-forwards; the first of equals is written."""
MASK_BUFFERS = {"attn.bias": "the causal mask", "attn.masked_bias": "the causal mask"}
ROTARY_BUFFERS = {"rotary_emb.inv_freq": "frequencies are computed"}


def ties(output: str, default: bool = True) -> Special:
    """Return the field of an output matrix that is the embedding, or stored by this name.

    Parameters
    ----------
    output : name of the output matrix.
    default : whether it is tied if config.json does not say.
    """

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        tied = settings.get("tie_word_embeddings", default)
        return {"tie_embeddings": "all" if tied is not False else "none"}

    return Special(read, lambda c: {"tie_word_embeddings": c.ties_output})


def rotary(default_share: float = 1.0) -> Special:
    """Return the field of rotary positions, in the form of transformers 5 and of earlier ones."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise refuse("rope_parameters", rope, "it must be an object.")
        if "full_attention" in rope:
            every, near = rope["full_attention"], rope.get("sliding_attention") or {}
            options = _read_rope(settings, dict(every), 1e6, default_share)
            usual = settings.get("rope_local_base_freq", 10000.0)
            local = float(near.get("rope_theta") or usual)
            if near.get("rope_type", "default") != "default":
                raise refuse("rope_type", near["rope_type"], "windowed layers read default only.")
            same = local == options["base"] and "stretch" not in options
            return {"position_options": options | ({} if same else {"window_base": local})}
        options = _read_rope(settings, rope, 10000.0, default_share)
        if "rope_local_base_freq" in settings:
            options["window_base"] = float(settings["rope_local_base_freq"])
        return {"position_options": options}

    def write(c: ModelConfig) -> FieldValues:
        rope = _write_rope(c.position_options)
        share = c.position_options.get("share", 1.0)
        if share != 1.0 or default_share != 1.0:
            rope["partial_rotary_factor"] = share
        local = c.position_options.get("window_base")
        if c.full_every and local:
            near = {"rope_type": "default", "rope_theta": local}
            return {"rope_parameters": {"full_attention": rope, "sliding_attention": near}}
        return {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}

    return Special(read, write)


def _read_rope(
    settings: ConfigJson, rope: dict[str, Any], base: float, share: float
) -> FieldValues:
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", settings.get("rope_theta", settings.get("rotary_emb_base")))
    options: FieldValues = {"base": float(base if theta is None else theta)}
    part = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    part = settings.get("rotary_pct", share) if part is None else part
    if part != 1.0:
        options["share"] = float(part)
    if kind == "default":
        return options
    if kind == "linear":
        return options | {"stretch": float(rope["factor"])}
    if kind == "llama3":
        length = float(rope["original_max_position_embeddings"])
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        limits = {"stretch_from": length / high, "stretch_full": length / low}
        return options | {"stretch": float(rope["factor"]), **limits}
    raise refuse("rope_type", kind, "addnorm stretches rotary positions as linear or llama3.")


def _write_rope(options: Any) -> FieldValues:
    if options.get("layout", "halves") != "halves":
        raise ConfigError("Hugging Face's rotary positions pair i with i + head_width/2 (halves).")
    rope: FieldValues = {"rope_type": "default", "rope_theta": options.get("base", 10000.0)}
    stretch, full = options.get("stretch", 1.0), options.get("stretch_full", 0.0)
    if stretch != 1.0 and full:
        high = full / options["stretch_from"]
        rope |= {"rope_type": "llama3", "factor": stretch, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": high, "original_max_position_embeddings": round(full)}
    elif stretch != 1.0:
        rope |= {"rope_type": "linear", "factor": stretch}
    return rope


def windows(default: int | None, alternate: int = 0) -> Special:
    """Return the field of sliding windows.

    Parameters
    ----------
    default : window if config.json has none.
    alternate : every n-th block has no window, if config.json does not list the blocks.
    """

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        window = settings.get("sliding_window", default)
        if settings.get("use_sliding_window", True) is False:
            window = None
        depth = settings.get("num_hidden_layers")
        kinds = settings.get("layer_types")
        if not isinstance(kinds, list):
            every = settings.get("sliding_window_pattern", alternate)
            if window is not None and settings.get("use_sliding_window"):
                first = settings.get("max_window_layers", 0)
                kinds = ["full" if i < first else "sliding" for i in range(int(depth or 0))]
                return _alternate(window, kinds)
            return {} if window is None else {"window": window, "full_every": every}
        return _alternate(window, kinds)

    def write(c: ModelConfig) -> FieldValues:
        settings: FieldValues = {"sliding_window": c.window}
        if default is None:
            settings["use_sliding_window"] = c.window is not None
        if alternate:
            kinds = [
                "full_attention" if c.window_of(layer) is None else "sliding_attention"
                for layer in range(c.depth)
            ]
            return settings | {"layer_types": kinds}
        if c.window is not None and c.full_every:
            raise ConfigError(f"model.full_every={c.full_every} cannot be expressed there.")
        return settings | ({} if default is not None else {"max_window_layers": 0})

    return Special(read, write)


def _alternate(window: Any, kinds: list[Any]) -> FieldValues:
    """Return the fields of blocks that see a window or everything."""
    full = [str(kind).startswith("full") for kind in kinds]
    if all(full) or window is None:
        return {}
    if not any(full):
        return {"window": window}
    every = full.index(True) + 1
    if full != [(layer + 1) % every == 0 for layer in range(len(full))]:
        raise refuse("layer_types", kinds[:8], "windows can alternate at equal distances only.")
    return {"window": window, "full_every": every}


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


GPT2 = Architecture(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": "token", "GPT2Model": "none"},
    fixed=_PRE_LAYER,
    fields=(
        Field("vocab", "vocab_size"),
        Field("width", "n_embd"),
        Field("depth", "n_layer"),
        Field("heads", "n_head"),
        _gpt2_inner(),
        Field("length", "n_positions", 1024),
        Field("norm_eps", "layer_norm_epsilon", 1e-5),
        Field("dropout", "resid_pdrop", 0.1),
        Field("attention_dropout", "attn_pdrop", 0.1),
        Field("ffn", "activation_function", "gelu_new", HF_ACTIVATIONS),
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
        Field("vocab", "vocab_size"),
        Field("width", "hidden_size"),
        Field("depth", "num_hidden_layers"),
        Field("heads", "num_attention_heads"),
        Field("ffn_width", "ffn_dim"),
        Field("length", "max_position_embeddings", 2048),
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
        Field("vocab", "vocab_size"),
        Field("width", "hidden_size"),
        Field("depth", "num_hidden_layers"),
        Field("heads", "num_attention_heads"),
        Field("ffn_width", "intermediate_size"),
        Field("length", "max_position_embeddings", 2048),
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
    Field("vocab", "vocab_size"),
    Field("width", "hidden_size"),
    Field("depth", "num_hidden_layers"),
    Field("heads", "num_attention_heads"),
    Field("ffn_width", "intermediate_size"),
    Field("length", "max_position_embeddings", 2048),
    Field("norm_eps", "rms_norm_eps", 1e-6),
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
    tied: bool = False,
) -> Architecture:
    """Return an architecture whose tensors are named as in Llama.

    Parameters
    ----------
    model_type, name : names in config.json and of the classes.
    fixed, fields : besides those that all relatives share.
    block : rows of a block.
    tied : whether the output is the embedding if config.json does not say.
    """
    return Architecture(
        model_type=model_type,
        classes={f"{name}ForCausalLM": "token", f"{name}Model": "none"},
        fixed=_LLAMA_LIKE | fixed,
        fields=(*_LLAMA_SIZES, _heads(), *fields, ties("lm_head.weight", tied)),
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
)
MISTRAL = _llama_like(
    "mistral",
    "Mistral",
    {"addnorm": "pre", "attention_bias": "none"},
    (_SILU, rotary(), windows(4096)),
    _llama_block(_PRE_BOXES),
)
QWEN2 = _llama_like(
    "qwen2",
    "Qwen2",
    {"addnorm": "pre", "attention_bias": "qkv"},
    (_SILU, rotary(), windows(None)),
    _llama_block(_PRE_BOXES),
)
QWEN3 = _llama_like(
    "qwen3",
    "Qwen3",
    {"addnorm": "pre", "qk_norm": "head"},
    (_SILU, _BIAS, rotary(), windows(None)),
    _llama_block(_PRE_BOXES, norms=""),
)


OLMO2 = _llama_like(
    "olmo2",
    "Olmo2",
    {"addnorm": "res-post", "qk_norm": "width"},
    (_SILU, _BIAS, rotary()),
    _llama_block(_AFTER_BOXES, norms=".norm"),
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
    rotary(),
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
        Field("attention_cap", "attn_logit_softcapping", 50.0),
        Field("logit_cap", "final_logit_softcapping", 30.0),
        windows(4096, alternate=2),
    ),
    _llama_block(_SANDWICH_BOXES),
    tied=True,
)
GEMMA3 = _llama_like(
    "gemma3_text",
    "Gemma3",
    _GEMMA | {"qk_norm": "head"},
    (
        *_GEMMA_FIELDS,
        Field("attention_cap", "attn_logit_softcapping", None),
        Field("logit_cap", "final_logit_softcapping", None),
        windows(4096, alternate=6),
    ),
    _llama_block(_SANDWICH_BOXES, norms=""),
    tied=True,
)

DECODERS = (GPT2, OPT, GPT_NEOX, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA2, GEMMA3)
