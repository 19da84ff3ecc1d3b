"""Config and its sections: load, override, check, dump. Long because every field is listed here.

A section is a frozen record of plain values. What is stored is what was written; a value left out
is None and is worked out where the model is built. The line of text under each field is its help.
"""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from addnorm.errors import ConfigError, nearest
from addnorm.files import read_text
from addnorm.section import Options, Section, read_value, write_value

SCHEMA = 2
"""Version of the configuration format."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The network: its mode, its sizes, and which variant stands at each place."""

    mode: str = "encoder-decoder"
    """encoder (fully visible), decoder (causal) or encoder-decoder."""
    input: str = "tokens"
    """What comes in: tokens (ids), patches (of images) or vectors (of this width already)."""
    vocab: int = 0
    """Number of token ids (of the source, when the target has its own)."""
    target_vocab: int | None = None
    """Number of target token ids, when the target does not share the source's."""
    tie_embeddings: str = "all"
    """Which matrices are one: all, output (with the target), source (with the target) or none."""
    pad: int | None = None
    """Token id of padding; positions that hold it are hidden from attention."""
    segments: int = 0
    """Number of segment embeddings added to the tokens (BERT has 2); 0 for none."""
    image: int = 224
    """Height and width of an image, in pixels, for input = patches."""
    patch: int = 16
    """Height and width of a patch, in pixels."""
    channels: int = 3
    """Colour channels of an image."""
    summary: bool = False
    """Put a learned summary token before the first position."""

    width: int = 512
    """Numbers per position in the stream."""
    depth: int = 6
    """Blocks in the stack (in the encoder, when there are two)."""
    decoder_depth: int | None = None
    """Blocks in the decoder of an encoder-decoder; as many as the encoder when left out."""
    heads: int = 8
    """Attention heads; they divide the width among them."""
    kv_heads: int | None = None
    """Key/value heads: fewer than heads is grouped, 1 is multi-query; heads when left out."""
    head_width: int | None = None
    """Numbers per head; width / heads when left out."""
    ffn: str = "relu"
    """Feed-forward: relu, gelu, gelu-tanh, silu; gated: glu, reglu, geglu, geglu-tanh, swiglu."""
    ffn_width: int | None = None
    """Inner width of the feed-forward; 4 x width when left out."""
    attention: str = "dot"
    """Score of a query and a key: dot (scaled dot product) or additive (Bahdanau)."""
    attention_scale: float | None = None
    """Factor on the dot product; 1/sqrt(head_width) when left out, 1.0 for T5."""
    attention_cap: float | None = None
    """Soft cap c on attention logits z: c tanh(z / c); none when left out."""
    qk_norm: str = "none"
    """Norm on queries and keys: none, head (each head) or width (all heads together)."""
    window: int | None = None
    """Each query sees only keys fewer than this many positions away; all when left out."""

    norm: str = "layer"
    """Norm inside Add & Norm: layer, rms, scale, batch, instance or none."""
    norm_eps: float = 1e-5
    """Small number that keeps the norm from dividing by zero."""
    norm_bias: bool = True
    """Whether layer norm has an offset beside its gain."""
    addnorm: str = "post"
    """Arrangement of residual connection and norm; see `addnorm list`."""
    addnorm_options: Options = field(default_factory=Options)
    """Settings of the arrangement, such as { start = 1e-4 } for layerscale."""
    embed_norm: bool = False
    """A norm on the embedding sum, before the first block (BERT, BART)."""
    final_norm: bool = False
    """A norm after the last block where the arrangement itself has none (torch.nn.Transformer)."""
    attention_bias: str = "all"
    """Biases of the attention projections: all, qkv or none."""
    ffn_bias: bool = True
    """Whether the feed-forward projections have biases."""

    positions: str = "sinusoidal"
    """sinusoidal, learned, rotary, linear-bias, buckets, relative (Transformer-XL) or none."""
    position_options: Options = field(default_factory=Options)
    """Settings of the positions, such as { base = 500000.0 } for rotary."""
    length: int = 512
    """Longest sequence that learned positions hold, and the default length of cost and cache."""
    scale_embedding: bool = True
    """Multiply token embeddings by sqrt(width), as Vaswani et al. do."""

    dropout: float = 0.1
    """Dropout on each branch before it is added, and on the embedding sum."""
    attention_dropout: float = 0.0
    """Dropout on attention weights; above 0 it leaves the fused kernel and is slow."""
    ffn_dropout: float = 0.0
    """Dropout after the activation inside the feed-forward."""

    head: str = "token"
    """What comes out: token, masked (BERT), class, number, or none (the stream itself)."""
    outputs: int = 0
    """Classes or numbers that come out, for head = class or number."""
    pool: str = "first"
    """How positions become one vector for head = class or number: first, mean or last."""
    pooler: str = "none"
    """Between the pooled vector and the classes: none, tanh of a layer (BERT), relu (FT)."""
    unembed_bias: bool = False
    """A bias on the logits of the vocabulary."""
    scale_output: bool = False
    """Multiply the stream by 1/sqrt(width) before the tied output matrix (T5 v1.0)."""

    init: str = "xavier"
    """Weight initialisation: xavier, normal (see init_std) or torch (that of nn.Linear)."""
    init_std: float = 0.02
    """Standard deviation for init = normal."""

    def check(self) -> None:
        self.need_one_of("mode", ("encoder", "decoder", "encoder-decoder"))
        self.need_one_of("input", ("tokens", "patches", "vectors"))
        self.need_one_of("tie_embeddings", ("all", "output", "source", "none"))
        self.need_one_of("qk_norm", ("none", "head", "width"))
        self.need_one_of("attention_bias", ("all", "qkv", "none"))
        self.need_one_of("head", ("token", "masked", "class", "number", "none"))
        self.need_one_of("pool", ("first", "mean", "last"))
        self.need_one_of("pooler", ("none", "tanh", "relu"))
        self.need_one_of("init", ("xavier", "normal", "torch"))
        for name in ("width", "heads", "length", "image", "patch", "channels"):
            self.need(getattr(self, name) > 0, name, "must be positive", "Try 8 or more.")
        for name in ("depth", "segments", "outputs", "vocab"):
            self.need(getattr(self, name) >= 0, name, "must not be negative", "Try 0 or more.")
        self.need_positive("kv_heads", "head_width", "ffn_width", "window", "target_vocab")
        self.need_positive("decoder_depth", "attention_scale", "attention_cap")
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            self.need(
                0 <= getattr(self, name) < 1, name, "must be at least 0 and below 1", "Try 0.1."
            )
        for name in ("norm_eps", "init_std"):
            self.need(getattr(self, name) > 0, name, "must be above 0", "Try 1e-5 or 0.02.")
        self._check_heads()
        self._check_ends()

    def replace(self, /, **changes: Any) -> Self:
        """A copy with some fields changed; a new arrangement or position scheme has fresh options.

        >>> ModelConfig(vocab=9, addnorm="admin", addnorm_options={"growth": "log"}).replace(
        ...     addnorm="pre"
        ... ).addnorm_options
        {}
        """
        for choice, options in (("addnorm", "addnorm_options"), ("positions", "position_options")):
            if changes.get(choice, getattr(self, choice)) != getattr(self, choice):
                changes.setdefault(options, Options())
        return super().replace(**changes)

    @property
    def effective_head_width(self) -> int:
        """Width of each head."""
        return self.head_width or self.width // self.heads

    @property
    def effective_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads together."""
        return self.heads * self.effective_head_width

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values, of all key/value heads together."""
        return self.effective_kv_heads * self.effective_head_width

    @property
    def effective_attention_scale(self) -> float:
        """Factor on the dot product of a query and a key."""
        default = self.effective_head_width**-0.5
        return default if self.attention_scale is None else self.attention_scale

    @property
    def effective_ffn_width(self) -> int:
        """Inner width of the feed-forward."""
        return self.ffn_width or 4 * self.width

    @property
    def depths(self) -> dict[str, int]:
        """Number of blocks of each side, encoder and decoder."""
        return {"encoder": self.depth, "decoder": self.decoder_depth or self.depth}

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image // self.patch) ** 2

    @property
    def input_length(self) -> int:
        """Largest number of input positions, with the summary token."""
        return (self.patches if self.input == "patches" else self.length) + int(self.summary)

    @property
    def output_vocab(self) -> int:
        """Number of token ids that the model predicts."""
        return self.target_vocab or self.vocab

    @property
    def ties_output(self) -> bool:
        """Whether the output matrix is the token embedding."""
        return self.tie_embeddings in ("all", "output")

    @property
    def ties_source(self) -> bool:
        """Whether source and target of an encoder-decoder have one token embedding."""
        tied = self.tie_embeddings in ("all", "source") and self.input == "tokens"
        return tied and self.mode == "encoder-decoder"

    def _check_heads(self) -> None:
        if self.head_width is None and self.width % self.heads:
            near = min(
                (n for n in range(1, self.width + 1) if self.width % n == 0),
                key=lambda n: abs(n - self.heads),
            )
            raise ConfigError(
                f"model.heads must divide width: width={self.width}, heads={self.heads}. "
                f"Try heads={near}, or set head_width."
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError(
                f"model.kv_heads must divide heads: heads={self.heads}, kv_heads={self.kv_heads}. "
                f"Try kv_heads={math.gcd(self.heads, self.kv_heads)}."
            )

    def _check_ends(self) -> None:
        if self.input == "tokens" or self.mode != "encoder" or self.head in ("token", "masked"):
            advice = "Try vocab=32000, or input=vectors with head=none."
            self.need(self.vocab > 0, "vocab", "must say how many token ids there are", advice)
        if self.mode != "encoder" or self.head in ("token", "masked"):
            rule = "must be tokens, in a decoder or for a head that answers tokens"
            only = self.input == "tokens" or (self.mode == "encoder-decoder")
            self.need(only, "input", rule, "Try mode=encoder with head=class.")
        if self.head in ("class", "number"):
            self.need(
                self.outputs > 0, "outputs", f"must be positive for head={self.head}", "Try 2."
            )
        if self.head == "masked":
            self.need(
                self.mode == "encoder", "head", "masked needs mode=encoder", "Try head=token."
            )
        if self.decoder_depth is not None or self.target_vocab is not None:
            name = "decoder_depth" if self.decoder_depth is not None else "target_vocab"
            only = self.mode == "encoder-decoder"
            self.need(only, name, "is for mode=encoder-decoder", "Leave it out.")
        if self.target_vocab is not None:
            own = self.tie_embeddings in ("output", "none")
            self.need(
                own,
                "tie_embeddings",
                "must leave the target its own matrix",
                "Try tie_embeddings=output.",
            )
        for name in ("summary", "segments"):
            only = self.mode == "encoder" or not getattr(self, name)
            self.need(only, name, "is for mode=encoder", "Leave it out.")
        for name in ("attention_scale", "attention_cap"):
            only = self.attention == "dot" or getattr(self, name) is None
            self.need(only, name, "is for attention=dot", "Leave it out.")
        if self.pad is not None:
            most = max(self.vocab, self.output_vocab)
            self.need(0 <= self.pad < most, "pad", "must be a token id", f"Try 0 to {most - 1}.")
        if self.input == "patches":
            rule = f"must divide image={self.image}"
            self.need(self.image % self.patch == 0, "patch", rule, "Try 16 with image=224.")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What is read, and how text becomes tokens."""

    source: str | None = None
    """File to learn from: source lines, a book, or a table (.txt, .tsv, .csv, each also .gz)."""
    target: str | None = None
    """File with the translation of each source line; left out for a table of pairs."""
    valid_source: str | None = None
    """File to validate with; a part of the training data is held out when left out."""
    valid_target: str | None = None
    """Translations of the lines to validate with."""
    valid_fraction: float | None = None
    """Fraction held out without a validation file; 0.1 (by the rows, of a table) if unset."""
    text: str | None = None
    """Column of the text (of the source, in a table of pairs), by name or number; else guessed."""
    label: str | None = None
    """Column of the label (of the target, in a table of pairs), by name or number; else guessed."""
    max_rows: int | None = None
    """Rows (lines, of a book) to read of each file; all when left out."""
    tokenizer: str | None = None
    """bpe, unigram, characters or bytes; worked out from the task when left out."""
    vocab: int | None = None
    """Token ids to learn; worked out from the size of the text when left out."""
    shared_vocab: bool = True
    """Whether source and target share one vocabulary."""
    lowercase: bool = False
    """Put text into lower case."""
    max_length: int | None = None
    """Tokens a text may have; worked out from the task when left out."""
    on_too_long: str = "cut"
    """What to do with longer ones: cut, drop or keep."""
    on_empty: str = "drop"
    """What to do with empty ones: drop or keep."""
    on_duplicate: str = "keep"
    """What to do with exact repetitions: drop or keep."""
    on_rare_label: str = "error"
    """What to do with labels seen only once, which cannot be checked: error, drop or keep."""
    mask_rate: float = 0.15
    """Share of the tokens that masked pre-training hides."""

    def __post_init__(self) -> None:
        for name in ("text", "label"):
            value = getattr(self, name)
            if type(value) is int:  # a column may be called by its number
                object.__setattr__(self, name, str(value))
        super().__post_init__()

    def check(self) -> None:
        for name, choices in (
            ("on_too_long", ("cut", "drop", "keep")),
            ("on_empty", ("drop", "keep")),
            ("on_duplicate", ("drop", "keep")),
            ("on_rare_label", ("error", "drop", "keep")),
        ):
            self.need_one_of(name, choices)
        if self.tokenizer is not None:
            self.need_one_of("tokenizer", ("bpe", "unigram", "characters", "bytes"))
        self.need_positive("max_rows", "vocab", "max_length", "mask_rate")
        share = self.valid_fraction
        holds = share is None or 0 <= share < 1
        self.need(holds, "valid_fraction", "must be at least 0 and below 1", "Try 0.1.")
        self.need(self.mask_rate <= 1, "mask_rate", "must be at most 1", "Try 0.15.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """How it is trained."""

    steps: int | None = None
    """Updates of the weights; worked out from the data, or from run.minutes, when left out."""
    epochs: float | None = None
    """Passes over the training data, where the number of steps is not given."""
    batch: int | None = None
    """Tokens in a batch, with padding and both sides; rows, of a table. By the task if unset."""
    accumulate: int = 1
    """Batches whose gradients are added up for one step."""
    optimizer: str = "adamw"
    """adamw, adam, adafactor or muon."""
    lr: float | None = None
    """Highest learning rate; worked out from the task and the width when left out."""
    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    beta2: float = 0.98
    """Decay of the mean of their squares."""
    eps: float = 1e-9
    """Small number in the denominator of Adam."""
    weight_decay: float = 0.0
    """Decay of matrices; vectors are never decayed."""
    schedule: str = "cosine"
    """noam (inverse-sqrt), cosine, linear or constant, after the warm-up."""
    warmup: int | None = None
    """Steps over which the rate rises from 0; worked out from the steps when left out."""
    min_lr_ratio: float = 0.0
    """Share of the highest rate that cosine and linear end at."""
    label_smoothing: float = 0.0
    """Label smoothing."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for any."""
    evaluate_every: int | None = None
    """Steps between evaluations; worked out from the steps when left out."""
    save_every: int | None = None
    """Steps between checkpoints; as evaluate when left out."""
    keep_checkpoints: int = 2
    """Checkpoints to keep."""
    metric: str = "loss"
    """What decides which weights are best: loss; bleu for translate, accuracy for classify."""
    patience: int = 0
    """Evaluations without a better metric before stopping; 0 for never."""
    average_checkpoints: int = 0
    """Mean of the weights at the last so many evaluations; 0 for none."""
    ema: float = 0.0
    """Decay of a running average of the weights; 0 for none."""

    def check(self) -> None:
        self.need_one_of("optimizer", ("adamw", "adam", "adafactor", "muon"))
        self.need_one_of("schedule", ("noam", "inverse-sqrt", "cosine", "linear", "constant"))
        self.need_positive("steps", "epochs", "batch", "accumulate", "lr", "eps")
        self.need_positive("evaluate_every", "save_every", "keep_checkpoints")
        for name in ("beta1", "beta2", "label_smoothing", "ema"):
            value = getattr(self, name)
            self.need(0 <= value < 1, name, "must be at least 0 and below 1", "Try 0.1 or 0.9.")
        for name in (
            "weight_decay",
            "clip",
            "patience",
            "average_checkpoints",
            "warmup",
            "min_lr_ratio",
        ):
            value = getattr(self, name)
            self.need(value is None or value >= 0, name, "must not be negative", "Try 0.")
        self.need(self.min_lr_ratio <= 1, "min_lr_ratio", "must be at most 1", "Try 0.1.")
        self.need(
            not (self.average_checkpoints and self.ema),
            "ema",
            "goes without train.average_checkpoints",
            "Try ema=0.",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """What the run is for, how long it may take, and where it runs."""

    task: str | None = None
    """What to train for: translate, language, masked, classify or table."""
    size: str | None = None
    """tiny, small, base or big; worked out from the size of the data when left out."""
    minutes: float | None = None
    """Time to train; the steps are fitted to it after the first few are measured."""
    start: str | None = None
    """A run or saved model whose weights to begin with."""
    seed: int = 0
    """Decides initial weights, order of the data, dropout."""
    device: str = "auto"
    """cpu, cuda, mps or auto."""
    precision: str = "auto"
    """float32, bfloat16, or auto: bfloat16 where the device is fast at it."""
    parallel: str = "ddp"
    """With several processes: ddp (each holds the model) or fsdp (each holds a part of it)."""

    def check(self) -> None:
        if self.size is not None:
            self.need_one_of("size", ("tiny", "small", "base", "big"))
        self.need_one_of("device", ("auto", "cpu", "cuda", "mps"))
        self.need_one_of("precision", ("auto", "float32", "bfloat16"))
        self.need_one_of("parallel", ("ddp", "fsdp"))
        self.need_positive("minutes")


@dataclass(frozen=True, kw_only=True)
class TableConfig(Section):
    """How a table is read, and how its columns become vectors."""

    model: str = "ft"
    """Kind of model: ft (FT-Transformer), tab (TabTransformer), saint (SAINT) or instant (needs no
    training)."""
    target: str | None = None
    """Column to predict."""
    schema: str | None = None
    """File with the type of each column, as `addnorm schema` writes it; inferred if unset."""
    groups: str | None = None
    """Column whose equal values stay on the same side of the split."""
    split: str = "random"
    """Rows that are held out: random ones, or the last ones (time)."""
    test: str | None = None
    """File with rows to evaluate the trained model on."""
    compare: bool = False
    """Also fit gradient boosting on the same rows, as a baseline."""
    unlabelled: str | None = None
    """File with rows to pre-train on; their target is not needed."""
    pretrain: str | None = None
    """Objective of pre-training on unlabelled rows: masked (if unset), replaced or contrastive."""
    embedding: str | None = None
    """Embedding of numbers: linear, periodic, piecewise or hidden; set by the model if unset."""
    embedding_options: Options = field(default_factory=Options)
    """Options of the embedding, such as { bins = 32 } for piecewise."""
    bins: str = "target"
    """Placement of the edges of piecewise embeddings: target (a tree) or quantile."""
    members: int = 1
    """Predictors that share the trunk (TabM); their predictions are averaged."""
    scaling: str = "quantile"
    """Scaling of numbers: quantile, robust, standard or none."""
    impute: str = "none"
    """Replacement of missing numbers: none (a learned vector), median or mean."""
    min_count: int | None = None
    """Rows in which a category must occur to have its own code; by the number of rows if unset."""
    drop_cells: float = 0.02
    """Fraction of cells hidden at random in training."""
    swap_cells: float = 0.0
    """Fraction of cells replaced by another row's value in training."""
    weights: str | None = None
    """File with the weights of an instant model; those of the package if unset."""

    def check(self) -> None:
        for name, choices in (
            ("model", ("ft", "tab", "saint", "instant")),
            ("split", ("random", "time")),
            ("bins", ("target", "quantile")),
            ("scaling", ("quantile", "robust", "standard", "none")),
            ("impute", ("none", "median", "mean")),
        ):
            self.need_one_of(name, choices)
        if self.embedding is not None:
            self.need_one_of("embedding", ("linear", "periodic", "piecewise", "hidden"))
        if self.pretrain is not None:
            self.need_one_of("pretrain", ("masked", "replaced", "contrastive"))
        self.need_positive("members", "min_count")
        for name in ("drop_cells", "swap_cells"):
            holds = 0 <= getattr(self, name) < 1
            self.need(holds, name, "must be at least 0 and below 1", "Try 0.02.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration: one section for each thing a run needs to know.

    >>> Config(model=ModelConfig(vocab=100)).override("model.depth=2").model.depth
    2
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig(vocab=32000))
    data: DataConfig = field(default_factory=DataConfig)
    table: TableConfig = field(default_factory=TableConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def replace(self, /, **changes: Any) -> "Config":
        """A copy with whole sections, or fields of the model, changed."""
        sections = {name: changes.pop(name) for name in SECTIONS if name in changes}
        whole = dataclasses.replace(self, **sections)
        return dataclasses.replace(whole, model=whole.model.replace(**changes))

    def override(self, *settings: str) -> "Config":
        """A copy after `section.field=value` settings, the later winning."""
        table: dict[str, dict[str, Any]] = {}
        for setting in settings:
            path, equals, text = setting.partition("=")
            section, dot, name = path.strip().partition(".")
            if not equals or not dot:
                raise ConfigError(
                    f"a setting must read section.field=value: got {setting!r}. Try model.depth=6."
                )
            table.setdefault(section, {})[name] = read_value(text.strip())
        return self.updated(table)

    def updated(self, table: Mapping[str, Any]) -> "Config":
        """A copy with the values of a table of sections, as TOML gives it."""
        changes = {}
        for section, values in table.items():
            if section not in SECTIONS:
                raise ConfigError(f"there is no section {section!r}. {nearest(section, SECTIONS)}")
            if not isinstance(values, Mapping):
                raise ConfigError(f"{section} must be a section: got {values!r}. Try [{section}].")
            changes[section] = getattr(self, section).replace(**values)
        return dataclasses.replace(self, **changes)

    def dump(self) -> str:
        """The configuration as TOML that `parse` reads back equal; untouched sections are left out.

        The section of the model is always there.
        """
        lines = [f"schema = {SCHEMA}"]
        untouched = Config()
        for section in SECTIONS:
            record = getattr(self, section)
            if section != "model" and record == getattr(untouched, section):
                continue
            lines += ["", f"[{section}]"]
            for item in dataclasses.fields(record):
                value = getattr(record, item.name)
                if value is not None:
                    lines.append(f"{item.name} = {write_value(value)}")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str, base: "Config | None" = None, source: str = "the text") -> "Config":
        """A configuration from TOML, over a base (a preset) if one is given."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{source} is not TOML: {error}.") from None
        schema = table.pop("schema", SCHEMA)
        if schema != SCHEMA:
            raise ConfigError(
                f"{source} has schema {schema!r}; this version reads schema {SCHEMA}. "
                "Update addnorm to open it."
            )
        table.pop("preset", None)
        return (base or cls()).updated(table)

    @classmethod
    def load(cls, path: str | Path, base: "Config | None" = None) -> "Config":
        """A configuration from a TOML file."""
        return cls.parse(read_text(path), base=base, source=str(path))


SECTIONS = {item.name: item.type for item in dataclasses.fields(Config)}
