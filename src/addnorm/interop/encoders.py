"""Encoders of Hugging Face as ours: BERT, RoBERTa, DistilBERT, ELECTRA, ViT."""

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError
from addnorm.interop.mapping import (
    LABEL_HEAD,
    PATCH_KERNEL,
    QKV,
    Architecture,
    ConfigJson,
    Field,
    FieldValues,
    Names,
    Only,
    Row,
    Special,
    blocks,
    leading,
    refuse,
)
from addnorm.interop.shared_fields import FFN_WIDTH, HF_ACTIVATIONS, STACK_SIZES, VOCAB

PLAIN_POSITIONS = Only(
    "position_embedding_type",
    ("absolute", None),
    "addnorm has no relative positions of this kind.",
    written=False,
)
NOT_A_DECODER = Only("is_decoder", (False,), "it is read as an encoder.", written=False)


def _segments() -> Special:
    """Return the field of segment embeddings, of which there is one at least."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        return {"segments": settings.get("type_vocab_size", 2)}

    def write(c: ModelConfig) -> FieldValues:
        if not c.segments:
            raise ConfigError("model.segments=0 has no type_vocab_size there: it must be positive.")
        return {"type_vocab_size": c.segments}

    return Special(read, write)


_BERT_LIKE = {
    "mode": "encoder",
    "addnorm": "post",
    "embed_norm": True,
    "positions": "learned",
    "scale_embedding": False,
    "init": "normal",
}
_BERT_SIZES = (
    VOCAB,
    *STACK_SIZES,
    FFN_WIDTH,
    _segments(),
    Field("norm_eps", "layer_norm_eps", 1e-12),
    Field("dropout", "hidden_dropout_prob", 0.1),
    Field("attention_dropout", "attention_probs_dropout_prob", 0.1),
    Field("ffn", "hidden_act", "gelu", HF_ACTIVATIONS),
    PLAIN_POSITIONS,
    NOT_A_DECODER,
)
_BERT_BLOCK = (
    Row(
        "sublayers.attention.input",
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        QKV,
    ),
    Row("sublayers.attention.output", "attention.output.dense"),
    Row("addnorms.attention.norm", "attention.output.LayerNorm"),
    Row("sublayers.ffn.input", "intermediate.dense"),
    Row("sublayers.ffn.output", "output.dense"),
    Row("addnorms.ffn.norm", "output.LayerNorm"),
)
POSITION_IDS = {"embeddings.position_ids": "positions are counted, not stored"}


def _bert_body(prefix: str) -> list[Row]:
    return [
        Row("tokens", f"{prefix}.embeddings.word_embeddings"),
        Row("segments", f"{prefix}.embeddings.token_type_embeddings"),
        Row("encoder.positions", f"{prefix}.embeddings.position_embeddings"),
        Row("encoder.norm", f"{prefix}.embeddings.LayerNorm"),
        *blocks("encoder", f"{prefix}.encoder.layer", _BERT_BLOCK),
    ]


def _pooler(kind: str) -> Special:
    """Return the field of the layer between pooled vector and classes, which is always this."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        classes = settings.get("architectures") or [""]
        return {"pooler": kind} if "SequenceClassification" in str(classes[0]) else {}

    return Special(read, lambda c: {})


def _tie_setting(output: str) -> Special:
    """Return the field of an output matrix: untied if it is stored and config.json says so."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        apart = settings.get("tie_word_embeddings", True) is False and output in set(names)
        return {"tie_embeddings": "none" if apart else "all"}

    def write(c: ModelConfig) -> FieldValues:
        return {"tie_word_embeddings": c.ties_output or c.head not in ("token", "masked")}

    return Special(read, write)


def _position_setting(offset: int) -> Special:
    """Return the field of a table of positions whose first rows are unused."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        length = settings.get("max_position_embeddings", 512)
        options = {"position_options": {"offset": offset}} if offset else {}
        return {"length": length - offset if isinstance(length, int) else length, **options}

    return Special(read, lambda c: {"max_position_embeddings": c.length + offset})


def _head_activation(theirs: str) -> Special:
    """Return the field of the activation of the masked head, which is that of the feed-forward."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        return {
            "head_activation": Field("ffn", theirs, "gelu", HF_ACTIVATIONS).read(settings, names)[
                "ffn"
            ]
        }

    return Special(read, lambda c: {})


# ── BERT ──────────────────────────────────────────────────────────────────────────────────────────


def _bert_rows(c: ModelConfig) -> list[Row]:
    return [
        *_bert_body("bert"),
        Row("head", "cls.predictions"),
        Row("head.weight", "cls.predictions.decoder.weight", whole=True),
        Row("head.transform", "cls.predictions.transform.dense"),
        Row("head.norm", "cls.predictions.transform.LayerNorm"),
        Row("head.pooler.0", "bert.pooler.dense"),
        Row("head.output", "classifier"),
    ]


BERT = Architecture(
    model_type="bert",
    classes={
        "BertForMaskedLM": "masked",
        "BertForPreTraining": "masked",
        "BertForSequenceClassification": "class",
        "BertForTokenClassification": LABEL_HEAD,
        "BertModel": "none",
    },
    fixed=_BERT_LIKE,
    fields=(
        *_BERT_SIZES,
        _position_setting(0),
        _pooler("tanh"),
        _tie_setting("cls.predictions.decoder.weight"),
        _head_activation("hidden_act"),
    ),
    rows=_bert_rows,
    prefix="bert.",
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    untied={"cls.predictions.bias": "cls.predictions.decoder.bias"},
    unused=POSITION_IDS
    | {
        "pooler.dense.weight": "only a classifier has a pooler",
        "pooler.dense.bias": "only a classifier has a pooler",
        "cls.seq_relationship.weight": "next-sentence prediction",
        "cls.seq_relationship.bias": "next-sentence prediction",
    },
)


def _output_of(c: ModelConfig) -> str:
    """Return the name of the last layer, where classes of texts have a layer before it."""
    return "classifier" if c.pool == "none" else "classifier.out_proj"


# ── RoBERTa ───────────────────────────────────────────────────────────────────────────────────────


def _roberta_rows(c: ModelConfig) -> list[Row]:
    return [
        *_bert_body("roberta"),
        Row("head", "lm_head"),
        Row("head.weight", "lm_head.decoder.weight", whole=True),
        Row("head.transform", "lm_head.dense"),
        Row("head.norm", "lm_head.layer_norm"),
        Row("head.pooler.0", "classifier.dense"),
        Row("head.output", _output_of(c)),
    ]


def _roberta_positions() -> Special:
    """Return the field of positions that start after the id of padding."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        pad = settings.get("pad_token_id", 1)
        return _position_setting((pad if isinstance(pad, int) else 1) + 1).read(settings, names)

    def write(c: ModelConfig) -> FieldValues:
        offset = int(c.position_options.get("offset", 0))
        if offset < 1:
            raise ConfigError("roberta needs positions that start after the id of padding.")
        return {"max_position_embeddings": c.length + offset, "pad_token_id": offset - 1}

    return Special(read, write)


ROBERTA = Architecture(
    model_type="roberta",
    classes={
        "RobertaForMaskedLM": "masked",
        "RobertaForSequenceClassification": "class",
        "RobertaForTokenClassification": LABEL_HEAD,
        "RobertaModel": "none",
    },
    fixed=_BERT_LIKE,
    fields=(
        *_BERT_SIZES,
        _roberta_positions(),
        _pooler("tanh"),
        _tie_setting("lm_head.decoder.weight"),
    ),
    rows=_roberta_rows,
    prefix="roberta.",
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    untied={"lm_head.bias": "lm_head.decoder.bias"},
    unused=POSITION_IDS
    | {
        "pooler.dense.weight": "only a classifier has a pooler",
        "pooler.dense.bias": "only a classifier has a pooler",
    },
)


# ── DistilBERT ────────────────────────────────────────────────────────────────────────────────────


def _distilbert_rows(c: ModelConfig) -> list[Row]:
    block = (
        Row(
            "sublayers.attention.input",
            ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            QKV,
        ),
        Row("sublayers.attention.output", "attention.out_lin"),
        Row("addnorms.attention.norm", "sa_layer_norm"),
        Row("sublayers.ffn.input", "ffn.lin1"),
        Row("sublayers.ffn.output", "ffn.lin2"),
        Row("addnorms.ffn.norm", "output_layer_norm"),
    )
    return [
        Row("tokens", "distilbert.embeddings.word_embeddings"),
        Row("encoder.positions", "distilbert.embeddings.position_embeddings"),
        Row("encoder.norm", "distilbert.embeddings.LayerNorm"),
        *blocks("encoder", "distilbert.transformer.layer", block),
        Row("head", "vocab_projector"),
        Row("head.transform", "vocab_transform"),
        Row("head.norm", "vocab_layer_norm"),
        Row("head.pooler.0", "pre_classifier"),
        Row("head.output", "classifier"),
    ]


DISTILBERT = Architecture(
    model_type="distilbert",
    classes={
        "DistilBertForMaskedLM": "masked",
        "DistilBertForSequenceClassification": "class",
        "DistilBertForTokenClassification": LABEL_HEAD,
        "DistilBertModel": "none",
    },
    fixed=_BERT_LIKE | {"norm_eps": 1e-12},
    fields=(
        VOCAB,
        Field("width", "dim"),
        Field("depth", "n_layers"),
        Field("heads", "n_heads"),
        Field("ffn_width", "hidden_dim"),
        Field("dropout", "dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.1),
        Field("ffn", "activation", "gelu", HF_ACTIVATIONS),
        _position_setting(0),
        _pooler("dense-relu"),
        _tie_setting("vocab_projector.weight"),
        _head_activation("activation"),
    ),
    rows=_distilbert_rows,
    prefix="distilbert.",
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    unused=POSITION_IDS,
)


# ── ELECTRA ───────────────────────────────────────────────────────────────────────────────────────


def _electra_rows(c: ModelConfig) -> list[Row]:
    return [
        *_bert_body("electra"),
        Row("encoder.project", "electra.embeddings_project"),
        Row("head", "generator_lm_head"),
        Row("head.transform", "generator_predictions.dense"),
        Row("head.norm", "generator_predictions.LayerNorm"),
        Row("head.pooler.0", "classifier.dense"),
        Row("head.output", _output_of(c)),
    ]


def _embed_width() -> Special:
    def read(settings: ConfigJson, names: Names) -> FieldValues:
        width = settings.get("embedding_size", 128)
        return {} if width == settings.get("hidden_size") else {"embed_width": width}

    return Special(read, lambda c: {"embedding_size": c.effective_embed_width})


_DISCRIMINATOR = "the discriminator's answer for each token"

ELECTRA = Architecture(
    model_type="electra",
    classes={
        "ElectraForMaskedLM": "masked",
        "ElectraForSequenceClassification": "class",
        "ElectraForTokenClassification": LABEL_HEAD,
        "ElectraModel": "none",
        "ElectraForPreTraining": "none",
    },
    fixed=_BERT_LIKE,
    fields=(
        *_BERT_SIZES,
        _position_setting(0),
        _embed_width(),
        _pooler("dense-gelu"),
        _tie_setting("generator_lm_head.weight"),
    ),
    rows=_electra_rows,
    prefix="electra.",
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    unused=POSITION_IDS
    | {
        f"discriminator_predictions.{part}.{kind}": _DISCRIMINATOR
        for part in ("dense", "dense_prediction")
        for kind in ("weight", "bias")
    },
)


# ── ViT ───────────────────────────────────────────────────────────────────────────────────────────


def _square(ours: str, theirs: str) -> Special:
    """Return the field of a height and width that must be equal: one number, or two."""

    def read(settings: ConfigJson, names: Names) -> FieldValues:
        value = settings.get(theirs)
        if isinstance(value, list):
            if len(value) != 2 or value[0] != value[1]:
                raise refuse(theirs, value, "addnorm's images and patches are square.")
            value = value[0]
        return {ours: value}

    return Special(read, lambda c: {theirs: getattr(c, ours)})


def _vit_rows(c: ModelConfig) -> list[Row]:
    block = (
        Row(
            "sublayers.attention.input",
            tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
            QKV,
        ),
        Row("sublayers.attention.output", "attention.output.dense"),
        Row("sublayers.ffn.input", "intermediate.dense"),
        Row("sublayers.ffn.output", "output.dense"),
        Row("addnorms.attention.norm", "layernorm_before"),
        Row("addnorms.ffn.norm", "layernorm_after"),
    )
    embeddings = "vit.embeddings"
    return [
        Row("tokens.project", f"{embeddings}.patch_embeddings.projection", PATCH_KERNEL),
        Row("summary.weight", f"{embeddings}.cls_token", leading(2), whole=True),
        Row(
            "encoder.positions.weight", f"{embeddings}.position_embeddings", leading(1), whole=True
        ),
        *blocks("encoder", "vit.encoder.layer", block),
        Row("encoder.stack.ends.norm", "vit.layernorm"),
        Row("head.output", "classifier"),
    ]


VIT = Architecture(
    model_type="vit",
    classes={"ViTForImageClassification": "class", "ViTModel": "none"},
    fixed={
        "mode": "encoder",
        "input": "patches",
        "summary": True,
        "addnorm": "pre",
        "positions": "learned",
        "init": "normal",
    },
    fields=(
        *STACK_SIZES,
        FFN_WIDTH,
        _square("image", "image_size"),
        _square("patch", "patch_size"),
        Field("channels", "num_channels", 3),
        Field("norm_eps", "layer_norm_eps", 1e-12),
        Field("dropout", "hidden_dropout_prob", 0.0),
        Field("attention_dropout", "attention_probs_dropout_prob", 0.0),
        Field("ffn", "hidden_act", "gelu", HF_ACTIVATIONS),
        Only("qkv_bias", (True,), "addnorm has no projection with a bias at the output only."),
    ),
    rows=_vit_rows,
    prefix="vit.",
    unused={
        "pooler.dense.weight": "the pooler, which no class of ours has",
        "pooler.dense.bias": "the pooler, which no class of ours has",
    },
)

ENCODERS = (BERT, ROBERTA, DISTILBERT, ELECTRA, VIT)
