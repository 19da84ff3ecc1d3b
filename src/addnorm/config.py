"""Config and its sections: load, override, check, dump.

A section is a frozen record of plain values. What is stored is what was written; a value left out
is None and is worked out where the model is built. The line of text under each field is its help.
"""

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from addnorm.errors import ConfigError, SavedError, nearest

Plain = bool | int | float | str

SCHEMA = 1
"""The version of the configuration format; a new one comes with a function that lifts the old."""


class Options(Mapping[str, Plain]):
    """Settings of one arrangement or position scheme: an unchangeable table of plain values."""

    def __init__(self, values: Mapping[str, Plain] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, key: str) -> Plain:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, kw_only=True)
class Section:
    """The parts that every section shares: types are checked when it is made."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = fit(getattr(self, item.name), hints[item.name])
            if value is _UNFIT:
                raise ConfigError(
                    f"{self.title()}.{item.name} must be {say_type(hints[item.name])}: "
                    f"got {getattr(self, item.name)!r}."
                )
            object.__setattr__(self, item.name, value)
        self.check()

    def check(self) -> None:
        """Raise ConfigError where the values cannot stand together."""

    @classmethod
    def title(cls) -> str:
        return cls.__name__.removesuffix("Config").lower()

    def need(self, holds: bool, name: str, rule: str, advice: str) -> None:
        """One check: the message names the field, the rule, the value given and what to try."""
        if not holds:
            given = getattr(self, name)
            raise ConfigError(f"{self.title()}.{name} {rule}: got {given!r}. {advice}")

    def need_one_of(self, name: str, choices: Sequence[str]) -> None:
        given = getattr(self, name)
        self.need(
            given in choices, name, f"must be one of {', '.join(choices)}", nearest(given, choices)
        )

    def left_out(self) -> list[str]:
        """The fields that were not given and are worked out when the model is built."""
        return [item.name for item in dataclasses.fields(self) if getattr(self, item.name) is None]

    def replace(self, /, **changes: Any) -> Self:
        """A copy with some fields changed; an unknown field is an error."""
        known = [item.name for item in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"{self.title()} has no field {name!r}. {nearest(name, known)}")
        return dataclasses.replace(self, **changes)


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
    tie: str = "all"
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
        self.need_one_of("tie", ("all", "output", "source", "none"))
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
        sizes = ("kv_heads", "head_width", "ffn_width", "window", "target_vocab", "decoder_depth")
        for name in (*sizes, "attention_scale", "attention_cap"):
            value = getattr(self, name)
            positive = value is None or 0 < value < math.inf
            self.need(positive, name, "must be positive", "Leave it out, or try 1.")
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
            own = self.tie in ("output", "none")
            self.need(own, "tie", "must leave the target its own matrix", "Try tie=output.")
        for name in ("summary", "segments"):
            only = self.mode == "encoder" or not getattr(self, name)
            self.need(only, name, "is for mode=encoder", "Leave it out.")
        for name in ("attention_scale", "attention_cap"):
            only = self.attention == "dot" or getattr(self, name) is None
            self.need(only, name, "is for attention=dot", "Leave it out.")
        if self.pad is not None:
            most = max(self.vocab, self.target_vocab or 0)
            self.need(0 <= self.pad < most, "pad", "must be a token id", f"Try 0 to {most - 1}.")
        if self.input == "patches":
            rule = f"must divide image={self.image}"
            self.need(self.image % self.patch == 0, "patch", rule, "Try 16 with image=224.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration: one section for each thing a run needs to know.

    >>> Config(model=ModelConfig(vocab=100)).override("model.depth=2").model.depth
    2
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig(vocab=32000))

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
            table.setdefault(section, {})[name] = _read_value(text.strip())
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
        """The configuration as TOML that `parse` reads back equal."""
        lines = [f"schema = {SCHEMA}"]
        for section in SECTIONS:
            lines += ["", f"[{section}]"]
            record = getattr(self, section)
            for item in dataclasses.fields(record):
                value = getattr(record, item.name)
                if value is not None:
                    lines.append(f"{item.name} = {_write_value(value)}")
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


def read_text(path: str | Path) -> str:
    """A text file, or one clear error about why not."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SavedError(f"there is no file {str(path)!r}. Check the path.") from None
    except UnicodeDecodeError as error:
        raise SavedError(f"{str(path)!r} is not UTF-8 text: {error.reason}.") from None
    except OSError as error:
        raise SavedError(f"{str(path)!r} cannot be read: {error.strerror}.") from None


def describe(section: type[Section]) -> dict[str, str]:
    """The line of help under each field of a section.

    >>> describe(ModelConfig)["width"]
    'Numbers per position in the stream.'
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[before.target.id] = " ".join(text.value.split())
    return found


_UNFIT = object()


def fits(value: Any, hint: Any) -> bool:
    """Whether a field or option of this type can hold the value.

    >>> fits(3, float), fits(3.5, int), fits(True, int)
    (True, False, False)
    """
    return fit(value, hint) is not _UNFIT


def fit(value: Any, hint: Any) -> Any:
    """The value as a field of this type holds it, or _UNFIT."""
    if isinstance(hint, types.UnionType):
        if value is None or value == "none":
            return None
        return fit(value, next(part for part in hint.__args__ if part is not types.NoneType))
    if hint is Options:
        plain = isinstance(value, Mapping) and all(
            isinstance(key, str) and isinstance(item, Plain) for key, item in value.items()
        )
        return Options(value) if plain else _UNFIT
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        return _UNFIT
    return value if isinstance(value, hint) else _UNFIT


def say_type(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "a word",
        bool: "true or false",
        Options: "a table of plain values",
    }
    if isinstance(hint, types.UnionType):
        part = next(part for part in hint.__args__ if part is not types.NoneType)
        return f"{names[part]}, or left out"
    return names[hint]


def _read_value(text: str) -> Any:
    """The value after `=` on the command line: TOML where it is TOML, else a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _write_value(value: Any) -> str:
    """A plain value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = re.sub(r'[\x00-\x1f\x7f"\\]', lambda found: f"\\u{ord(found.group()):04x}", value)
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{_write_value(key)} = {_write_value(item)}" for key, item in value.items()
        )
        return f"{{ {inner} }}" if inner else "{}"
    return repr(value)
