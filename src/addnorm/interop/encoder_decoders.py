"""Encoder-decoders of Hugging Face as ours: T5, mT5, Marian, BART, mBART."""

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError
from addnorm.interop.mapping import (
    HALVES,
    QKV,
    Architecture,
    ConfigJson,
    Field,
    FieldValues,
    Names,
    Row,
    Special,
    blocks,
    leading,
    refuse,
)
from addnorm.interop.shared_fields import GATED, HF_ACTIVATIONS, VOCAB

# ── BART, mBART, Marian ───────────────────────────────────────────────────────────────────────────

_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
_ENCODER_BLOCK = (
    Row("sublayers.attention.input", _QKV, QKV),
    Row("sublayers.attention.output", "self_attn.out_proj"),
    Row("addnorms.attention.norm", "self_attn_layer_norm"),
    Row("sublayers.ffn.input", "fc1"),
    Row("sublayers.ffn.output", "fc2"),
    Row("addnorms.ffn.norm", "final_layer_norm"),
)
_DECODER_BLOCK = (
    *_ENCODER_BLOCK,
    Row("sublayers.memory.input", "encoder_attn.q_proj"),
    Row("sublayers.memory.memory", ("encoder_attn.k_proj", "encoder_attn.v_proj"), HALVES),
    Row("sublayers.memory.output", "encoder_attn.out_proj"),
    Row("addnorms.memory.norm", "encoder_attn_layer_norm"),
)


def _bart_rows(c: ModelConfig) -> list[Row]:
    rows = [
        Row("tokens", "model.shared" if c.ties_source else "model.decoder.embed_tokens"),
        Row("source_tokens", "model.encoder.embed_tokens"),
        Row("head.bias", "final_logits_bias", leading(1), whole=True),
        Row("head.weight", "lm_head.weight", whole=True),
    ]
    for side, block in (("encoder", _ENCODER_BLOCK), ("decoder", _DECODER_BLOCK)):
        rows += [
            Row(f"{side}.positions", f"model.{side}.embed_positions"),
            Row(f"{side}.norm", f"model.{side}.layernorm_embedding"),
            Row(f"{side}.stack.ends.norm", f"model.{side}.layer_norm"),
            *blocks(side, f"model.{side}.layers", block),
        ]
    return rows


def _depths(encoder: str, decoder: str) -> Special:
    """Return the field of the depths; without one of the decoder, it is that of the encoder."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        depth, other = settings.get(encoder), settings.get(decoder)
        return {"depth": depth, "decoder_depth": depth if other is None else other}

    return Special(read, lambda c: {encoder: c.depth, decoder: c.depths["decoder"]})


def _both_sides(ours: str, theirs: str) -> Special:
    """Return the field of a size that must be the same in encoder and decoder."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        one, other = (settings.get(f"{side}_{theirs}") for side in ("encoder", "decoder"))
        if one != other:
            missing = f"addnorm has one model.{ours} for both sides (encoder: {one!r})."
            raise refuse(f"decoder_{theirs}", other, missing)
        return {ours: one}

    def write(c: ModelConfig) -> FieldValues:
        value = getattr(c, f"effective_{ours}", getattr(c, ours))
        return {f"{side}_{theirs}": value for side in ("encoder", "decoder")}

    return Special(read, write)


def _bart_output() -> Special:
    """Return the field of the bias on the logits, which checkpoints may lack."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        return {"unembed_bias": "final_logits_bias" in set(names)}

    return Special(read, lambda c: {})


_BART_FIELDS = (
    VOCAB,
    Field("width", "d_model"),
    _depths("encoder_layers", "decoder_layers"),
    _both_sides("heads", "attention_heads"),
    _both_sides("ffn_width", "ffn_dim"),
    Field("length", "max_position_embeddings", 1024),
    Field("scale_embedding", "scale_embedding", False),
    Field("dropout", "dropout", 0.1),
    Field("attention_dropout", "attention_dropout", 0.0),
    Field("ffn_dropout", "activation_dropout", 0.0),
    Field("ffn", "activation_function", "gelu", HF_ACTIVATIONS),
    _bart_output(),
)
_BART_TIED = {
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
}
_BART_UNUSED = {"model.shared.weight": "each side has its own embedding"}


def _shared_shape(c: ModelConfig) -> tuple[int, int] | None:
    """Return the shape of `model.shared`, which nothing reads if the sides are not tied."""
    return (c.vocab, c.width) if c.tie_embeddings == "none" and not c.target_vocab else None


_BART_ZEROS = {
    "final_logits_bias": lambda c: (1, c.output_vocab),
    "model.shared.weight": _shared_shape,
}


def _is_apart(settings: ConfigJson) -> bool:
    return settings.get("tie_word_embeddings", True) is False


def _bart_ties() -> Special:
    """Return the field of one matrix for both embeddings and the output, or three."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        return {"tie_embeddings": "none" if _is_apart(settings) else "all"}

    return Special(read, lambda c: {"tie_word_embeddings": c.ties_output})


def _bart_like(model_type: str, name: str, fixed: FieldValues) -> Architecture:
    both = {
        "mode": "encoder-decoder",
        "positions": "learned",
        "position_options": {"offset": 2},
        "embed_norm": True,
        "init": "normal",
    }
    return Architecture(
        model_type=model_type,
        classes={f"{name}ForConditionalGeneration": "token"},
        fixed=both | fixed,
        fields=(*_BART_FIELDS, _bart_ties()),
        rows=_bart_rows,
        tied=_BART_TIED,
        unused=_BART_UNUSED,
        zeros=_BART_ZEROS,
    )


BART = _bart_like("bart", "Bart", {"addnorm": "post"})
MBART = _bart_like("mbart", "MBart", {"addnorm": "pre"})


def _marian_ties() -> Special:
    """Return the fields of one vocabulary for both languages, or one for each."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        if settings.get("share_encoder_decoder_embeddings", True) is not False:
            return {"tie_embeddings": "none" if _is_apart(settings) else "all"}
        target = settings.get("decoder_vocab_size")
        return {
            "tie_embeddings": "none" if _is_apart(settings) else "output",
            "target_vocab": target,
        }

    def write(c: ModelConfig) -> FieldValues:
        return {
            "share_encoder_decoder_embeddings": c.target_vocab is None,
            "decoder_vocab_size": c.output_vocab,
            "tie_word_embeddings": c.ties_output,
        }

    return Special(read, write)


MARIAN = Architecture(
    model_type="marian",
    classes={"MarianMTModel": "token"},
    fixed={
        "mode": "encoder-decoder",
        "addnorm": "post",
        "positions": "sinusoidal",
        "position_options": {"layout": "halves"},
        "init": "normal",
    },
    fields=(*_BART_FIELDS, _marian_ties()),
    rows=_bart_rows,
    tied=_BART_TIED,
    unused=_BART_UNUSED | {"embed_positions.weight": "sinusoids are computed"},
    zeros=_BART_ZEROS,
)


# ── T5 and mT5 ────────────────────────────────────────────────────────────────────────────────────


def _t5_attention(ours: str, theirs: str, joined: bool) -> tuple[Row, ...]:
    query, key, value = (f"{theirs}.{part}" for part in "qkv")
    if joined:
        return (Row(f"sublayers.{ours}.input", (query, key, value), QKV),)
    return (
        Row(f"sublayers.{ours}.input", query),
        Row(f"sublayers.{ours}.memory", (key, value), HALVES),
    )


def _t5_block(c: ModelConfig, side: str) -> list[Row]:
    parts = [("attention", "SelfAttention")]
    if side == "decoder":
        parts.append(("memory", "EncDecAttention"))
    rows = []
    for number, (ours, theirs) in enumerate(parts):
        name = f"layer.{number}.{theirs}"
        rows += [
            *_t5_attention(ours, name, joined=ours == "attention"),
            Row(f"sublayers.{ours}.output", f"{name}.o"),
            Row(f"addnorms.{ours}.norm", f"layer.{number}.layer_norm"),
        ]
    layer = f"layer.{len(parts)}"
    ffn = f"{layer}.DenseReluDense"
    gated = Row("sublayers.ffn.input", (f"{ffn}.wi_0", f"{ffn}.wi_1"), HALVES)
    return [
        *rows,
        gated if c.ffn in GATED.values() else Row("sublayers.ffn.input", f"{ffn}.wi"),
        Row("sublayers.ffn.output", f"{ffn}.wo"),
        Row("addnorms.ffn.norm", f"{layer}.layer_norm"),
    ]


def _t5_rows(c: ModelConfig) -> list[Row]:
    rows = [Row("tokens", "shared"), Row("head", "lm_head")]
    for side in ("encoder", "decoder"):
        first = f"{side}.block.0.layer.0.SelfAttention"
        rows += [
            Row(f"{side}.positions", f"{first}.relative_attention_bias"),
            *blocks(side, f"{side}.block", _t5_block(c, side)),
            Row(f"{side}.stack.ends.norm", f"{side}.final_layer_norm"),
        ]
    return rows


_T5_FFN = {name: HF_ACTIVATIONS[name] for name in ("relu", "gelu", "silu", "gelu_new")}
_T5_FFN |= {"gated-gelu": "geglu-tanh", "gated-relu": "reglu", "gated-silu": "swiglu"}


def _t5_ends() -> Special:
    """Return the fields of the output: tied and scaled in v1.0, its own matrix in v1.1.

    A stored `lm_head.weight` is the output matrix, whatever the key says: transformers 5 writes
    true in every config.json. Its own key `scale_decoder_outputs` says whether v1.0's scale is on.
    """

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        scaled = settings.get("scale_decoder_outputs")
        if scaled is None:
            scaled = settings.get("tie_word_embeddings", True) is not False
            scaled = scaled and settings.get("model_type") == "t5"
        ties = "source" if "lm_head.weight" in set(names) else "all"
        return {"tie_embeddings": ties, "scale_output": scaled}

    def write(c: ModelConfig) -> FieldValues:
        # transformers reads scale_decoder_outputs from tie_word_embeddings, which it then ignores.
        return {"tie_word_embeddings": c.scale_output}

    return Special(read, write)


def _t5_buckets() -> Special:
    def read(settings: ConfigJson, names: Names) -> FieldValues:
        buckets = settings.get("relative_attention_num_buckets", 32)
        furthest = settings.get("relative_attention_max_distance", 128)
        return {"position_options": {"buckets": buckets, "furthest": furthest}}

    def write(c: ModelConfig) -> FieldValues:
        return {
            "relative_attention_num_buckets": c.position_options.get("buckets", 32),
            "relative_attention_max_distance": c.position_options.get("furthest", 128),
        }

    return Special(read, write)


def _t5_length() -> Special:
    return Special(lambda settings, names: {"length": settings.get("n_positions", 512)}, _no_fields)


def _no_fields(c: ModelConfig) -> FieldValues:
    if c.scale_output and c.tie_embeddings == "source":
        raise ConfigError("model.scale_output=true needs a tied output there.")
    return {}


def _t5_like(model_type: str, name: str, ffn: str) -> Architecture:
    return Architecture(
        model_type=model_type,
        classes={f"{name}ForConditionalGeneration": "token"},
        fixed={
            "mode": "encoder-decoder",
            "addnorm": "pre",
            "norm": "rms",
            "attention_bias": "none",
            "ffn_bias": False,
            "attention_scale": 1.0,
            "positions": "buckets",
            "scale_embedding": False,
        },
        fields=(
            VOCAB,
            Field("width", "d_model"),
            Field("head_width", "d_kv"),
            Field("ffn_width", "d_ff"),
            Field("heads", "num_heads"),
            Field("norm_eps", "layer_norm_epsilon", 1e-6),
            Field("dropout", "dropout_rate", 0.1),
            Field("ffn", "feed_forward_proj", ffn, _T5_FFN),
            _depths("num_layers", "num_decoder_layers"),
            _t5_buckets(),
            _t5_ends(),
            _t5_length(),
        ),
        rows=_t5_rows,
        tied={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            "lm_head.weight": "shared.weight",
        },
        unused={
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": (
                "the memory has no positions"
            )
        },
    )


T5 = _t5_like("t5", "T5", "relu")
MT5 = _t5_like("mt5", "MT5", "gated-gelu")

ENCODER_DECODERS = (T5, MT5, MARIAN, BART, MBART)
