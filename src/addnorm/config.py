"""Config and its sections: load, override, check, dump. Long because every field is listed here.

A section is a frozen record of plain values, stored as they were written: an unset value is None,
and properties compute the effective one. The line of text under each field is its help.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from addnorm.errors import ConfigError, nearest
from addnorm.files import read_text
from addnorm.section import Options, Section, SectionDoc, parse_toml, read_value, write_value

SCHEMA = 2
"""Version of the configuration format."""
MAX_DEPTH = 10_000
"""Most blocks of a stack. The deepest published Transformers have 1,000 (DeepNet, 2203.00555)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The network: its mode, its sizes and the variant of each part.

    Examples
    --------
    >>> config = ModelConfig(mode="decoder", vocab=1000, width=64, heads=4)
    >>> config.effective_head_width, config.replace(depth=2).depth
    (16, 2)
    """

    mode: str = "encoder-decoder"
    """encoder (fully visible), decoder (causal) or encoder-decoder."""
    input: str = "tokens"
    """Type of input: tokens (ids), patches (of images) or vectors (of the model's width)."""
    vocab: int = 0
    """Number of token ids (of the source, if target_vocab is set)."""
    target_vocab: int | None = None
    """Number of target token ids; if unset, source and target share one vocabulary."""
    tie_embeddings: str = "all"
    """Matrices shared with the target embedding: all, output, source or none."""
    pad: int | None = None
    """Token id of padding; attention ignores positions with it."""
    segments: int = 0
    """Number of segment embeddings added to the tokens (BERT has 2); 0 for none."""
    image: int = 224
    """Height and width of an image, in pixels, for input=patches."""
    patch: int = 16
    """Height and width of a patch, in pixels."""
    channels: int = 3
    """Colour channels of an image."""
    summary: bool = False
    """Put a learned summary token before the first position."""

    width: int = 512
    """Numbers per position in the stream."""
    embed_width: int | None = None
    """Width of the embeddings of an encoder, then projected to width (ELECTRA); else width."""
    depth: int = 6
    """Blocks in the stack (in the encoder, if there are two stacks)."""
    decoder_depth: int | None = None
    """Blocks in the decoder of an encoder-decoder; as many as in the encoder if unset."""
    heads: int = 8
    """Attention heads; each has width / heads numbers, unless head_width is set."""
    kv_heads: int | None = None
    """Key/value heads: as many as heads if unset; fewer is grouped-query, 1 is multi-query."""
    head_width: int | None = None
    """Numbers per head; width / heads if unset."""
    ffn: str = "relu"
    """relu, gelu, gelu-tanh, silu; gated: glu, reglu, geglu, geglu-tanh, swiglu; in its place
    all-attention, product-key; none."""
    ffn_options: Options = field(default_factory=Options)
    """Options of the feed-forward, such as { subkeys = 512 } for product-key."""
    ffn_width: int | None = None
    """Inner width of the feed-forward (learned vectors of all-attention); 4 x width if unset."""
    mixing: str = "attention"
    """What mixes positions: attention; as baselines, convolution, or recurrent (Bahdanau)."""
    kernel: int = 3
    """Positions that a convolution reads, for mixing=convolution."""
    attention: str = "dot"
    """Score of a query and a key: dot (scaled dot product) or additive (Bahdanau)."""
    attention_scale: float | None = None
    """Factor on the dot product; 1/sqrt(head_width) if unset, 1.0 for T5."""
    attention_cap: float | None = None
    """Soft cap c on attention logits z: c tanh(z / c); none if unset."""
    qk_norm: str = "none"
    """Norm on queries and keys: none, head (each head) or width (all heads together)."""
    window: int | None = None
    """Each query sees only keys fewer than this many positions away; all if unset."""
    full_every: int = 0
    """Blocks n, 2n, 3n … (from 1) ignore the window (Gemma 2: 2, Gemma 3: 6); 0 for no block."""
    span: int | None = None
    """Largest span of adaptive spans, one learned by each head; every key is seen if unset."""
    span_ramp: int = 32
    """Positions over which attention falls to 0 beyond an adaptive span."""

    norm: str = "layer"
    """Norm inside Add & Norm: layer, rms, rms-offset, scale, batch, instance or none."""
    norm_eps: float = 1e-5
    """Small number that keeps the norm from dividing by zero."""
    norm_bias: bool = True
    """Whether layer norm has a bias in addition to its gain."""
    addnorm: str = "post"
    """Arrangement of residual connection and norm; see `addnorm list`."""
    addnorm_options: Options = field(default_factory=Options)
    """Options of the arrangement, such as { start = 1e-4 } for layerscale."""
    decoder_addnorm: str | None = None
    """Arrangement of the decoder of an encoder-decoder; by default that of the encoder."""
    decoder_addnorm_options: Options = field(default_factory=Options)
    """Options of the decoder's own arrangement."""
    embed_norm: bool = False
    """Whether the embedding sum is normalised before the first block (BERT, BART)."""
    final_norm: bool = False
    """Add a norm after the last block if the arrangement has none (torch.nn.Transformer)."""
    attention_bias: str = "all"
    """Biases of the attention projections: all, qkv or none."""
    ffn_bias: bool = True
    """Whether the feed-forward projections have biases."""

    positions: str = "sinusoidal"
    """sinusoidal, learned, rotary, linear-bias, buckets (T5), relative (Transformer-XL), none;
    index and concatenated as baselines."""
    position_options: Options = field(default_factory=Options)
    """Options of the position scheme, such as { base = 500000.0 } for rotary."""
    length: int = 512
    """Number of learned positions, and the default length for cost and cache."""
    scale_embedding: bool = True
    """Multiply token embeddings by sqrt(width), as Vaswani et al. do."""

    segment_memory: int = 0
    """Positions before a text's window that a language model also sees (Transformer-XL)."""

    dropout: float = 0.1
    """Dropout on each branch before it is added, and on the embedding sum."""
    attention_dropout: float = 0.0
    """Dropout on attention weights; above 0 the fused kernel is not used, which is slow."""
    ffn_dropout: float = 0.0
    """Dropout after the activation inside the feed-forward."""

    head: str = "token"
    """Type of output: token, masked (BERT), class, number, or none (the stream itself)."""
    outputs: int = 0
    """Number of classes or of predicted numbers, for head=class or head=number."""
    pool: str = "first"
    """How head=class and head=number pool positions: first, mean, last; none labels each."""
    pooler: str = "none"
    """What follows pooling: none, tanh (BERT), relu (FT-Transformer), dense-relu or dense-gelu."""
    head_activation: str = "gelu"
    """Activation inside head=masked: relu, gelu, gelu-tanh or silu."""
    unembed_bias: bool = False
    """Whether the logits of the vocabulary have a bias."""
    logit_cap: float | None = None
    """Soft cap c on the logits z of head = token: c tanh(z / c); none if unset."""
    scale_output: bool = False
    """Multiply the stream by 1/sqrt(width) before the tied output matrix (T5 v1.0)."""

    init: str = "xavier"
    """Weight initialisation: xavier, normal (see init_std) or torch (as nn.Linear)."""
    init_std: float = 0.02
    """Standard deviation for init=normal."""

    def check(self) -> None:
        self.require_one_of("mode", ("encoder", "decoder", "encoder-decoder"))
        self.require_one_of("input", ("tokens", "patches", "vectors"))
        self.require_one_of("tie_embeddings", ("all", "output", "source", "none"))
        self.require_one_of("mixing", ("attention", "convolution", "recurrent"))
        self.require_one_of("qk_norm", ("none", "head", "width"))
        self.require_one_of("attention_bias", ("all", "qkv", "none"))
        self.require_one_of("head", ("token", "masked", "class", "number", "none"))
        self.require_one_of("pool", ("first", "mean", "last", "none"))
        self.require_one_of("pooler", ("none", "tanh", "relu", "dense-relu", "dense-gelu"))
        self.require_one_of("head_activation", ("relu", "gelu", "gelu-tanh", "silu"))
        self.require_one_of("init", ("xavier", "normal", "torch"))
        for name in (
            "width",
            "heads",
            "length",
            "image",
            "patch",
            "channels",
            "span_ramp",
            "kernel",
        ):
            self.require(getattr(self, name) > 0, name, "must be positive", "Try 8 or more.")
        for name in ("depth", "segments", "outputs", "vocab", "full_every", "segment_memory"):
            self.require(getattr(self, name) >= 0, name, "must not be negative", "Try 0 or more.")
        for name in ("depth", "decoder_depth"):
            few = (getattr(self, name) or 0) <= MAX_DEPTH
            self.require(few, name, f"must be at most {MAX_DEPTH:,}", "Try 6 to 1000.")
        self.require_positive("kv_heads", "head_width", "ffn_width", "window", "target_vocab")
        self.require_positive("decoder_depth", "attention_scale", "attention_cap", "logit_cap")
        self.require_positive("embed_width", "span")
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            self.require(
                0 <= getattr(self, name) < 1, name, "must be at least 0 and below 1", "Try 0.1."
            )
        for name in ("norm_eps", "init_std"):
            self.require(getattr(self, name) > 0, name, "must be above 0", "Try 1e-5 or 0.02.")
        self._check_heads()
        self._check_ends()

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with some fields changed; another arrangement or scheme resets its options.

        >>> ModelConfig(vocab=9, addnorm="admin", addnorm_options={"growth": "log"}).replace(
        ...     addnorm="pre"
        ... ).addnorm_options
        {}
        """
        for choice, options in (
            ("addnorm", "addnorm_options"),
            ("decoder_addnorm", "decoder_addnorm_options"),
            ("positions", "position_options"),
            ("ffn", "ffn_options"),
        ):
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
    def effective_embed_width(self) -> int:
        """Width of the embeddings."""
        return self.embed_width or self.width

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
    def has_ffn(self) -> bool:
        """Whether blocks have a feed-forward sublayer."""
        return self.ffn not in ("all-attention", "none")

    @property
    def persistent(self) -> int:
        """Number of learned keys and values of each head, for ffn=all-attention; else 0."""
        return self.effective_ffn_width if self.ffn == "all-attention" else 0

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the stacks, in order: encoder, decoder or both."""
        return tuple(self.mode.split("-"))

    @property
    def depths(self) -> dict[str, int]:
        """Number of blocks of each side, encoder and decoder."""
        return {"encoder": self.depth, "decoder": self.decoder_depth or self.depth}

    @property
    def arrangements(self) -> dict[str, tuple[str, Options]]:
        """Name and options of the arrangement of each side."""
        own = (self.addnorm, self.addnorm_options)
        if self.decoder_addnorm is None:
            return {"encoder": own, "decoder": own}
        return {"encoder": own, "decoder": (self.decoder_addnorm, self.decoder_addnorm_options)}

    @property
    def has_admin(self) -> bool:
        """Whether a side needs Admin's measuring pass before training."""
        return "admin" in [self.arrangements[side][0] for side in self.sides]

    @property
    def lengths(self) -> dict[str, int]:
        """Number of learned positions of each side, encoder and decoder."""
        return {"encoder": self.input_length, "decoder": self.length}

    @property
    def patch_values(self) -> int:
        """Number of values in a patch."""
        return self.channels * self.patch**2

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

    def window_of(self, layer: int) -> int | None:
        """Return the window of one block, from 0, where windows alternate; else None."""
        return self.window if self.full_every and (layer + 1) % self.full_every else None

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
            closest = min(
                (n for n in range(1, self.width + 1) if self.width % n == 0),
                key=lambda n: abs(n - self.heads),
            )
            raise ConfigError(
                f"model.heads must divide width: width={self.width}, heads={self.heads}. "
                f"Try heads={closest}, or set head_width."
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError(
                f"model.kv_heads must divide heads: heads={self.heads}, kv_heads={self.kv_heads}. "
                f"Try kv_heads={math.gcd(self.heads, self.kv_heads)}."
            )

    def _check_ends(self) -> None:
        if self.input == "tokens" or self.mode != "encoder" or self.head in ("token", "masked"):
            advice = "Try vocab=32000, or input=vectors with head=none."
            self.require(self.vocab > 0, "vocab", "must be the number of token ids", advice)
        if self.mode != "encoder" or self.head in ("token", "masked"):
            rule = "must be tokens for a decoder and for a head that predicts tokens"
            holds = self.input == "tokens" or self.mode == "encoder-decoder"
            self.require(holds, "input", rule, "Try mode=encoder with head=class.")
        if self.head in ("class", "number"):
            self.require(
                self.outputs > 0, "outputs", f"must be positive for head={self.head}", "Try 2."
            )
        if self.head == "masked":
            self.require(
                self.mode == "encoder", "head", "masked needs mode=encoder", "Try head=token."
            )
        for name in ("decoder_depth", "target_vocab", "decoder_addnorm"):
            holds = self.mode == "encoder-decoder" or getattr(self, name) is None
            self.require(holds, name, "needs mode=encoder-decoder", "Leave it out.")
        if self.decoder_addnorm_options:
            holds = self.decoder_addnorm is not None
            rule = "needs decoder_addnorm"
            self.require(holds, "decoder_addnorm_options", rule, "Try addnorm_options.")
        if self.target_vocab is not None:
            holds = self.tie_embeddings in ("output", "none")
            rule = "must be output or none if target_vocab is set"
            self.require(holds, "tie_embeddings", rule, "Try tie_embeddings=output.")
        for name in ("summary", "segments"):
            holds = self.mode == "encoder" or not getattr(self, name)
            self.require(holds, name, "needs mode=encoder", "Leave it out.")
        if self.embed_width is not None:
            holds = self.mode == "encoder" and self.input == "tokens"
            rule = "needs mode=encoder and input=tokens"
            self.require(holds, "embed_width", rule, "Leave it out.")
        if self.full_every:
            rule = "needs a window"
            holds = self.window is not None
            self.require(holds, "full_every", rule, "Leave it out, or set window.")
        if self.ffn_options:
            holds = self.ffn == "product-key"
            self.require(holds, "ffn_options", "needs ffn=product-key", "Leave it out.")
        if self.logit_cap is not None:
            self.require(self.head == "token", "logit_cap", "needs head=token", "Leave it out.")
        for name in ("attention_scale", "attention_cap"):
            holds = self.attention == "dot" or getattr(self, name) is None
            self.require(holds, name, "needs attention=dot", "Leave it out.")
        if self.pad is not None:
            ids = max(self.vocab, self.output_vocab)
            self.require(0 <= self.pad < ids, "pad", "must be a token id", f"Try 0 to {ids - 1}.")
        if self.input == "patches":
            rule = f"must divide image={self.image}"
            self.require(self.image % self.patch == 0, "patch", rule, "Try 16 with image=224.")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The data to train on, and how text becomes tokens."""

    source: str | None = None
    """Training file: source lines, a text, or a table (.txt, .tsv, .csv, each also .gz)."""
    target: str | None = None
    """File with the translation of each source line; unset for a table of pairs."""
    valid_source: str | None = None
    """Validation file; if unset, a part of the training data is held out."""
    valid_target: str | None = None
    """File with the translations of the validation lines."""
    valid_fraction: float | None = None
    """Fraction held out if there is no validation file; if unset 0.1, for a table by its rows."""
    text: str | None = None
    """Column of the text (in a table of pairs, the source), name or number; inferred if unset."""
    label: str | None = None
    """Column of the label (in a table of pairs, the target), name or number; inferred if unset."""
    max_rows: int | None = None
    """Rows or lines to read from each file; all if unset."""
    tokenizer: str | None = None
    """bpe, unigram, characters or bytes (or that of an imported model); by the task if unset."""
    vocab: int | None = None
    """Number of token ids to learn; chosen from the size of the text if unset."""
    shared_vocab: bool = True
    """Whether source and target share one vocabulary."""
    lowercase: bool = False
    """Convert text to lower case."""
    max_length: int | None = None
    """Maximum number of tokens of a text; chosen by the task if unset."""
    on_too_long: str = "cut"
    """What to do with longer texts: cut, drop or keep."""
    on_empty: str = "drop"
    """What to do with empty texts: drop or keep."""
    on_duplicate: str = "keep"
    """What to do with exact duplicates: drop or keep."""
    on_rare_label: str = "error"
    """What to do with labels that occur once and cannot be validated: error, drop or keep."""
    mask_rate: float = 0.15
    """Fraction of the tokens that masked pre-training hides."""
    image_shift: float | None = None
    """Largest random shift of training images, in pixels; a sixteenth of their side if unset."""
    image_rotation: float = 10.0
    """Largest random rotation of training images, in degrees."""
    image_zoom: float = 0.1
    """Largest random change of height and width of training images, as a fraction."""
    token_dropout: float = 0.0
    """Probability that a token of a training text is hidden from a classifier, anew each epoch."""

    def __post_init__(self) -> None:
        for name in ("text", "label"):
            value = getattr(self, name)
            if type(value) is int:  # the number of a column
                object.__setattr__(self, name, str(value))
        super().__post_init__()

    def check(self) -> None:
        for name, choices in (
            ("on_too_long", ("cut", "drop", "keep")),
            ("on_empty", ("drop", "keep")),
            ("on_duplicate", ("drop", "keep")),
            ("on_rare_label", ("error", "drop", "keep")),
        ):
            self.require_one_of(name, choices)
        if self.tokenizer is not None:
            kinds = ("bpe", "unigram", "characters", "bytes", "huggingface", "sentencepiece")
            self.require_one_of("tokenizer", kinds)
        self.require_positive("max_rows", "vocab", "max_length", "mask_rate")
        fraction = self.valid_fraction
        holds = fraction is None or 0 <= fraction < 1
        self.require(holds, "valid_fraction", "must be at least 0 and below 1", "Try 0.1.")
        for name in ("image_shift", "image_rotation", "image_zoom"):
            value = getattr(self, name)
            self.require(value is None or value >= 0, name, "must be 0 or more", "Try 0 for none.")
        self.require(self.mask_rate <= 1, "mask_rate", "must be at most 1", "Try 0.15.")
        hidden = self.token_dropout
        self.require(0 <= hidden < 1, "token_dropout", "must be at least 0 and below 1", "Try 0.1.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Optimizer, schedule, evaluation and checkpoints."""

    steps: int | None = None
    """Optimizer steps; chosen from the data or from run.minutes if unset."""
    epochs: float | None = None
    """Passes over the training data, if steps is unset."""
    batch: int | None = None
    """Tokens in a batch, padding and both sides included; rows of a table; by the task if unset."""
    accumulate: int = 1
    """Batches whose gradients are accumulated for one step."""
    optimizer: str = "adamw"
    """adamw, adam, adafactor or muon."""
    lr: float | None = None
    """Peak learning rate; chosen from the task and the width if unset."""
    beta1: float = 0.9
    """Adam's decay rate of the mean of the gradients."""
    beta2: float = 0.98
    """Adam's decay rate of the mean of the squared gradients."""
    eps: float = 1e-9
    """Small number in Adam's denominator."""
    weight_decay: float = 0.0
    """Weight decay of matrices; vectors have none."""
    schedule: str = "cosine"
    """noam (inverse-sqrt), cosine, linear or constant, after the warm-up."""
    warmup: int | None = None
    """Steps over which the rate rises from 0; chosen from the steps if unset."""
    min_lr_ratio: float = 0.0
    """Fraction of the peak rate at which cosine and linear end."""
    span_penalty: float = 2e-6
    """Added to the loss for each position of the mean adaptive span (model.span)."""
    label_smoothing: float = 0.0
    """Probability that label smoothing spreads over all labels."""
    contrast: float = 0.0
    """Weight of a loss that groups the texts of a batch by label (classify); for few labels."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for no clipping."""
    evaluate_every: int | None = None
    """Steps between evaluations; chosen from the steps if unset."""
    save_every: int | None = None
    """Steps between checkpoints; as evaluate_every if unset."""
    keep_checkpoints: int = 2
    """Number of checkpoints to keep."""
    metric: str = "loss"
    """Metric that selects the best weights: loss, bleu, accuracy, auc, f1 or mae, as the task has
    them."""
    patience: int = 0
    """Evaluations without a better metric before stopping; 0 for never."""
    average_checkpoints: int = 0
    """Number of last evaluations whose weights are averaged; 0 for none."""
    ema: float = 0.0
    """Decay of the exponential moving average of the weights; 0 for none."""
    lora: str | None = None
    """Train low-rank adapters on these roles alone, such as attention,ffn; all weights if unset."""
    lora_rank: int = 8
    """Rank of the adapters."""
    lora_alpha: float | None = None
    """The update of an adapter is multiplied by alpha / rank; 2 x rank if unset."""
    lora_dropout: float = 0.0
    """Dropout on the input of an adapter's update."""
    dora: bool = False
    """Whether adapters learn the norm and the direction of each row separately (DoRA)."""
    freeze: int | None = None
    """Do not train the embeddings and this many of the first blocks; all are trained if unset."""
    unfreeze: float = 0.0
    """Epochs until the next lower block is trained, too, after the head; 0 for all at once."""
    layer_decay: float = 1.0
    """Factor on the learning rate from each block to the one below it (0.9 in ELECTRA)."""

    def check(self) -> None:
        self.require_one_of("optimizer", ("adamw", "adam", "adafactor", "muon"))
        self.require_one_of("schedule", ("noam", "inverse-sqrt", "cosine", "linear", "constant"))
        self.require_positive("steps", "epochs", "batch", "accumulate", "lr", "eps")
        self.require_positive("evaluate_every", "save_every", "keep_checkpoints")
        for name in ("beta1", "beta2", "label_smoothing", "ema"):
            value = getattr(self, name)
            self.require(0 <= value < 1, name, "must be at least 0 and below 1", "Try 0.1 or 0.9.")
        for name in (
            "weight_decay",
            "clip",
            "patience",
            "average_checkpoints",
            "warmup",
            "min_lr_ratio",
            "span_penalty",
            "contrast",
            "unfreeze",
        ):
            value = getattr(self, name)
            self.require(value is None or value >= 0, name, "must not be negative", "Try 0.")
        self.require_positive("lora_rank", "lora_alpha")
        holds = 0 <= self.lora_dropout < 1
        self.require(holds, "lora_dropout", "must be at least 0 and below 1", "Try 0.05.")
        holds = 0 < self.layer_decay <= 1
        self.require(holds, "layer_decay", "must be above 0 and at most 1", "Try 0.9.")
        holds = self.freeze is None or self.freeze >= 0
        self.require(holds, "freeze", "must not be negative", "Try 0.")
        if self.dora:
            self.require(self.lora is not None, "dora", "needs train.lora", "Try lora=attention.")
        if self.lora is not None:
            rule = "cannot be combined with train.freeze: adapters freeze all other weights"
            self.require(self.freeze is None, "lora", rule, "Leave one out.")
        if self.unfreeze:
            rule = "cannot be combined with train.lora and train.freeze"
            holds = self.lora is None and self.freeze is None
            self.require(holds, "unfreeze", rule, "Leave one out.")
        self.require(self.min_lr_ratio <= 1, "min_lr_ratio", "must be at most 1", "Try 0.1.")
        self.require(
            not (self.average_checkpoints and self.ema),
            "ema",
            "must be 0 if train.average_checkpoints is set",
            "Try ema=0.",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Task, size, time limit, seed and device of a run."""

    task: str | None = None
    """Task to train: translate, language, masked, classify, label, table or images."""
    size: str | None = None
    """tiny, small, base or big; chosen from the size of the data if unset."""
    minutes: float | None = None
    """Minutes for all of the run; the number of steps follows from their measured duration."""
    start: str | None = None
    """Run or saved model to take the initial weights from."""
    seed: int = 0
    """Random seed of the initial weights, the order of the data and dropout."""
    device: str = "auto"
    """cpu, cuda, mps or auto."""
    precision: str = "auto"
    """float32, bfloat16, or auto: bfloat16 if the device is fast at it."""
    threads: int | None = None
    """Threads of the CPU; chosen by measurement, and again when the pace drops, if unset."""
    parallel: str = "ddp"
    """With several processes: ddp (each has the whole model) or fsdp (each has a shard of it)."""

    def check(self) -> None:
        if self.size is not None:
            self.require_one_of("size", ("tiny", "small", "base", "big"))
        self.require_one_of("device", ("auto", "cpu", "cuda", "mps"))
        self.require_one_of("precision", ("auto", "float32", "bfloat16"))
        self.require_one_of("parallel", ("ddp", "fsdp"))
        self.require_positive("minutes", "threads")
        # The seeds that NumPy, scikit-learn and torch accept; torch crashes with too many threads.
        for name, least, most in (("seed", 0, 2**32 - 1), ("threads", 1, 1024)):
            value = getattr(self, name)
            holds = value is None or least <= value <= most
            self.require(holds, name, f"must be {least} to {most}", f"Try {least}.")
        holds = self.minutes is None or self.minutes <= 525_600
        self.require(holds, "minutes", "must be at most 525600, a year", "Try 10.")


@dataclass(frozen=True, kw_only=True)
class TableConfig(Section):
    """How a table is read, and how its columns become vectors."""

    model: str = "ft"
    """Kind of model: ft (FT-Transformer), tab (TabTransformer), saint (SAINT) or instant (needs no
    training)."""
    target: str | None = None
    """Column to predict."""
    task: str | None = None
    """What the target is: classes, number, or ordinal (numbers of which only the order counts);
    inferred if unset."""
    schema: str | None = None
    """File with the type of each column, as `addnorm schema` writes it; inferred if unset."""
    groups: str | None = None
    """Column whose equal values stay on the same side of the split."""
    split: str = "random"
    """Rows that are held out: random ones, or the last ones (time)."""
    test: str | None = None
    """File with rows to evaluate the trained model on."""
    compare: str = "none"
    """Other models to fit on the same rows: none, default (boosting, forest, linear) or tuned
    (also CatBoost, tuned for as long as training took)."""
    unlabelled: str | None = None
    """File with rows to pre-train on; their target is not needed."""
    pretrain: str | None = None
    """Objective of pre-training on unlabelled rows: masked (if unset), replaced or contrastive."""
    embedding: str | None = None
    """Embedding of numbers: linear, periodic, piecewise, mixed or hidden; by the model if unset."""
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
    effort: str = "normal"
    """Time for a better model: low (fewer epochs), normal, high (more epochs, 5 folds), or
    published (network and training of the publication)."""
    folds: int | None = None
    """Number of models, each trained without one fold of the rows, whose outputs are averaged; 1
    is one model with held-out rows; set by the effort if unset."""
    class_weight: str | None = None
    """Weights of the classes in the loss: balanced (inversely proportional to their rows); equal
    if unset."""
    weights: str | None = None
    """File with the weights of an instant model; those of the package if unset."""

    def check(self) -> None:
        for name, choices in (
            ("model", ("ft", "tab", "saint", "instant")),
            ("split", ("random", "time")),
            ("compare", ("none", "default", "tuned")),
            ("bins", ("target", "quantile")),
            ("scaling", ("quantile", "robust", "standard", "none")),
            ("impute", ("none", "median", "mean")),
            ("effort", ("low", "normal", "high", "published")),
        ):
            self.require_one_of(name, choices)
        if self.task is not None:
            self.require_one_of("task", ("classes", "number", "ordinal"))
        if self.embedding is not None:
            self.require_one_of("embedding", ("linear", "periodic", "piecewise", "mixed", "hidden"))
        if self.pretrain is not None:
            self.require_one_of("pretrain", ("masked", "replaced", "contrastive"))
        if self.class_weight is not None:
            self.require_one_of("class_weight", ("balanced",))
        self.require_positive("members", "min_count", "folds")
        for name in ("drop_cells", "swap_cells"):
            holds = 0 <= getattr(self, name) < 1
            self.require(holds, name, "must be at least 0 and below 1", "Try 0.02.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run, in sections.

    Parameters
    ----------
    model : the network
    data : the data to train on, and how text becomes tokens
    table : how a table is read, and how its columns become vectors
    train : optimizer, schedule, evaluation and checkpoints
    run : task, size, time limit, seed and device

    Examples
    --------
    >>> config = Config(model=ModelConfig(vocab=100)).override("model.depth=2", "train.lr=1e-3")
    >>> config.model.depth, config.train.lr
    (2, 0.001)
    >>> Config.parse(config.dump()) == config
    True
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig(vocab=32000))
    data: DataConfig = field(default_factory=DataConfig)
    table: TableConfig = field(default_factory=TableConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def replace(self, /, **changes: Any) -> "Config":
        """Return a copy with whole sections, or fields of the model, changed."""
        sections = {name: changes.pop(name) for name in SECTIONS if name in changes}
        whole = dataclasses.replace(self, **sections)
        return dataclasses.replace(whole, model=whole.model.replace(**changes))

    def override(self, *settings: str) -> "Config":
        """Return a copy with `section.field=value` settings applied in order."""
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
        """Return a copy with the values of a table of sections, such as a parsed TOML file."""
        changes = {}
        for section, values in table.items():
            if section not in SECTIONS:
                raise ConfigError(f"there is no section {section!r}. {nearest(section, SECTIONS)}")
            if not isinstance(values, Mapping):
                raise ConfigError(f"{section} must be a section: got {values!r}. Try [{section}].")
            changes[section] = getattr(self, section).replace(**values)
        return dataclasses.replace(self, **changes)

    def dump(self) -> str:
        """Return the configuration as TOML that `parse` reads back equal.

        Sections with default values are omitted, except for the model's.
        """
        lines = [f"schema = {SCHEMA}"]
        defaults = Config()
        for section in SECTIONS:
            record = getattr(self, section)
            if section != "model" and record == getattr(defaults, section):
                continue
            lines += ["", f"[{section}]"]
            for item in dataclasses.fields(record):
                value = getattr(record, item.name)
                if value is not None:
                    lines.append(f"{item.name} = {write_value(value)}")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str, base: "Config | None" = None, source: str = "the text") -> "Config":
        """Return the configuration of a TOML text, applied to a base such as a preset.

        `source` is what messages call the text.
        """
        table = parse_toml(text, source)
        schema = table.pop("schema", SCHEMA)
        if schema != SCHEMA:
            raise ConfigError(
                f"{source} has schema {schema!r}; this version reads schema {SCHEMA}. "
                "Use the addnorm version that wrote it."
            )
        table.pop("preset", None)
        return (base or cls()).updated(table)

    @classmethod
    def load(cls, path: str | Path, base: "Config | None" = None) -> "Config":
        """Return the configuration of a TOML file, applied to a base such as a preset."""
        return cls.parse(read_text(path), base=base, source=str(path))


SECTIONS: dict[str, Any] = {item.name: item.type for item in dataclasses.fields(Config)}
for _section in SECTIONS.values():
    _section.__doc__ = SectionDoc(_section)
