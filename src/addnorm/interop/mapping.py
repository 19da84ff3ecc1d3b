"""The language of the mapping tables: rows of names and fields, each readable in both directions.

    Row("tokens", "bert.embeddings.word_embeddings")           our module ↔ theirs
    Row("….attention.input", ("….q", "….k", "….v"), QKV)       one of ours ↔ several of theirs
    Field("width", "hidden_size")                              our field ↔ a key of config.json

A star stands for the number of a block. A row holds for the weight and the bias of a module, or,
with `whole=True`, for one tensor. Transforms only rename, turn, cut and join, so the way back
restores every bit.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError, SavedError, choose
from addnorm.layers.positions import POSITIONS

ConfigJson = Mapping[str, Any]
"""The content of a config.json."""
FieldValues = dict[str, Any]
Names = Iterable[str]
LABEL_HEAD = "label"
"""A head with one class at each position: head=class and pool=none in ours."""
_UNSET = object()


# ── Tensors ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Transform:
    """How one tensor of ours is made of theirs, and back; shapes alone suffice (meta tensors)."""

    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    split: Callable[[Tensor, ModelConfig], Sequence[Tensor]]


def _qkv_sizes(c: ModelConfig) -> list[int]:
    return [c.query_width, c.kv_width, c.kv_width]


def _interleave(x: Tensor, c: ModelConfig) -> Tensor:
    """Rows q, k, v of each head in turn -> all q, all k, all v."""
    parts = x.reshape(c.heads, 3, c.effective_head_width, *x.shape[1:])
    return parts.transpose(0, 1).flatten(0, 2)


def _deinterleave(x: Tensor, c: ModelConfig) -> Tensor:
    parts = x.reshape(3, c.heads, c.effective_head_width, *x.shape[1:])
    return parts.transpose(0, 1).flatten(0, 2)


SAME = Transform(lambda parts, c: parts[0], lambda x, c: [x])
QKV = Transform(lambda parts, c: torch.cat(list(parts)), lambda x, c: torch.split(x, _qkv_sizes(c)))
"""Queries, keys and values, whose rows follow one another in ours."""
HALVES = Transform(lambda parts, c: torch.cat(list(parts)), lambda x, c: x.chunk(2))
"""Two of one size: keys and values of the memory, gate and value of a gated feed-forward."""
TRANSPOSED = Transform(
    lambda parts, c: parts[0].T if parts[0].ndim == 2 else parts[0],
    lambda x, c: [x.T if x.ndim == 2 else x],
)
"""Matrices stored (in, out)."""
HEADWISE_QKV = Transform(
    lambda parts, c: _interleave(parts[0], c), lambda x, c: [_deinterleave(x, c)]
)
"""Queries, keys and values of head 0, then of head 1, ... in one matrix (GPT-NeoX)."""


def leading(count: int) -> Transform:
    """Return the transform of tensors that have `count` more leading dimensions of size 1."""

    def join(parts: Sequence[Tensor], c: ModelConfig) -> Tensor:
        return parts[0].flatten(0, count)

    def split(x: Tensor, c: ModelConfig) -> Sequence[Tensor]:
        return [x.reshape(*[1] * count, *x.shape)]

    return Transform(join, split)


PATCH_KERNEL = Transform(
    lambda parts, c: parts[0].flatten(1) if parts[0].ndim == 4 else parts[0],
    lambda x, c: [x.reshape(-1, c.channels, c.patch, c.patch) if x.ndim == 2 else x],
)
"""The kernel of a convolution over patches, (width, channels, patch, patch)."""


@dataclass(frozen=True)
class Row:
    """One row: the name of our module, the names of theirs, and how one becomes the other.

    Parameters
    ----------
    ours, theirs
        Names of modules, with a star for the number of a block.
    transform
        How their tensors become ours.
    whole
        The names are those of tensors, not of modules that have a weight and maybe a bias.
    """

    ours: str
    theirs: str | tuple[str, ...]
    transform: Transform = SAME
    whole: bool = False


@dataclass(frozen=True)
class TensorMap:
    """One tensor of ours, the names of theirs that it is made of, and how."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform


def blocks(ours: str, theirs: str, rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the blocks of one stack, written without what precedes the block."""
    return [
        Row(
            f"{ours}.stack.blocks.*.{row.ours}",
            tuple(f"{theirs}.*.{part}" for part in _all(row.theirs)),
            row.transform,
            row.whole,
        )
        for row in rows
    ]


def expand(rows: Iterable[Row], names: Names) -> list[TensorMap]:
    """Return how each of our tensors is made of theirs; ConfigError if a row is missing."""
    exact = {row.ours: row for row in rows if row.whole}
    modules = {row.ours: row for row in rows if not row.whole}
    maps = []
    for name in names:
        starred, number = _star(name)
        module, _, kind = starred.rpartition(".")
        if starred in exact:
            row, suffix = exact[starred], ""
        elif module in modules:
            row, suffix = modules[module], f".{kind}"
        else:
            raise ConfigError(f"no name is known for the tensor {name!r} of this model.")
        theirs = tuple(part.replace("*", number) + suffix for part in _all(row.theirs))
        maps.append(TensorMap(name, theirs, row.transform))
    return maps


def _star(name: str) -> tuple[str, str]:
    """Return a name with a star for the number of its block, and that number."""
    before, separator, after = name.partition(".blocks.")
    number, _, rest = after.partition(".")
    return (f"{before}{separator}*.{rest}", number) if separator else (name, "")


def _all(parts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (parts,) if isinstance(parts, str) else parts


# ── Configurations ────────────────────────────────────────────────────────────────────────────────


def refuse(key: str, value: object, missing: str) -> SavedError:
    """Return the error about a key of config.json that addnorm's network cannot express."""
    return SavedError(f"config.json has {key}={value!r}: {missing}")


@dataclass(frozen=True)
class Field:
    """One field of ours and one key of theirs.

    Parameters
    ----------
    ours, theirs
        The names.
    default
        What they mean if the key is absent; without one, it must be there.
    values
        Their values and ours, where they are written differently.
    """

    ours: str
    theirs: str
    default: Any = _UNSET
    values: Mapping[Any, Any] | None = None

    @property
    def required(self) -> bool:
        """Whether config.json must have the key."""
        return self.default is _UNSET

    def read(self, settings: ConfigJson, names: Names) -> FieldValues:
        value = settings.get(self.theirs, self.default)
        if value is _UNSET:
            raise SavedError(f"config.json must have {self.theirs}: it has none.")
        if self.values is not None:
            if not isinstance(value, str | bool | int) or value not in self.values:
                known = ", ".join(map(str, self.values))
                raise refuse(self.theirs, value, f"addnorm reads {known}.")
            value = self.values[value]
        return {self.ours: value}

    def write(self, c: ModelConfig) -> FieldValues:
        value = getattr(c, f"effective_{self.ours}", getattr(c, self.ours))
        if self.values is not None:
            back = {ours: theirs for theirs, ours in reversed([*self.values.items()])}
            if value not in back:
                raise ConfigError(f"model.{self.ours}={value} has no {self.theirs} there.")
            value = back[value]
        return {self.theirs: value}


@dataclass(frozen=True)
class Only:
    """A key of theirs that must have one of some values; the first is written."""

    theirs: str
    values: tuple[Any, ...]
    missing: str
    """What addnorm would need for other values."""
    written: bool = True

    def read(self, settings: ConfigJson, names: Names) -> FieldValues:
        value = settings.get(self.theirs, self.values[0])
        if value not in self.values:
            raise refuse(self.theirs, value, self.missing)
        return {}

    def write(self, c: ModelConfig) -> FieldValues:
        return {self.theirs: self.values[0]} if self.written else {}


@dataclass(frozen=True)
class Special:
    """Fields that are read and written by functions."""

    read: Callable[[ConfigJson, Names], FieldValues]
    write: Callable[[ModelConfig], FieldValues]


@dataclass(frozen=True)
class Architecture:
    """One architecture of theirs as one of ours, in both directions.

    Parameters
    ----------
    model_type
        Its name in config.json.
    classes
        Their classes and the head of ours that each is, `label` for one class at each position; the
        first of a head is written.
    fixed
        Fields of ours that are the same in every model of it.
    fields
        How the other fields are read and written.
    rows
        The rows of the weights of a configuration.
    prefix
        What precedes the names of the body in classes with a head; checkpoints may lack it.
    tied
        Copies that may be stored as well: their name and the name of what they must equal.
    untied
        Tensors that are read in place of others if the output is not tied: the name of the table
        and the name that is read then, if it is stored. Both are written.
    unused
        Endings of names that are not needed, and why.
    zeros
        Tensors of theirs that are zeros if ours has none, and their shapes; None for no tensor.
    """

    model_type: str
    classes: Mapping[str, str]
    fixed: FieldValues
    fields: Sequence[Field | Only | Special]
    rows: Callable[[ModelConfig], list[Row]]
    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    untied: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    zeros: Mapping[str, Callable[[ModelConfig], tuple[int, ...] | None]] = field(
        default_factory=dict
    )

    def class_of(self, c: ModelConfig) -> str:
        """Return the class of theirs that has the head of a configuration of ours."""
        labels = c.head == "class" and c.pool == "none"
        for name, known in self.classes.items():
            if known == (LABEL_HEAD if labels else c.head):
                return name
        kind = f"head={c.head}" + (" and pool=none" if labels else "")
        raise ConfigError(f"{self.model_type} has no class with {kind}.")

    def read(self, settings: ConfigJson, names: Names) -> ModelConfig:
        """Return our configuration of their settings; `names` are those of the tensors."""
        names = set(names)
        fields: FieldValues = {**self.fixed, **self._read_head(settings)}
        for item in self.fields:
            fields |= item.read(settings, names)
        try:
            return ModelConfig(**fields, pad=_read_pad(settings, fields))
        except ConfigError as error:
            raise SavedError(f"config.json describes no model that can be built: {error}") from None

    def _read_head(self, settings: ConfigJson) -> FieldValues:
        classes = settings.get("architectures")
        name = str(classes[0]) if isinstance(classes, list) and classes else ""
        if name not in self.classes:
            raise SavedError(
                f"config.json must name one of {', '.join(self.classes)} in architectures: "
                f"got {name!r}. Other heads cannot be expressed."
            )
        head = self.classes[name]
        if head not in ("class", LABEL_HEAD):
            return {"head": head}
        labels = settings.get("id2label")
        count = settings.get("num_labels") or (len(labels) if isinstance(labels, dict) else 2)
        each = {"pool": "none"} if head == LABEL_HEAD else {}
        return {"head": "class", "outputs": count, **each}

    def write(self, c: ModelConfig) -> FieldValues:
        """Return their settings of our configuration; ConfigError says what cannot be expressed."""
        settings: FieldValues = {
            "model_type": self.model_type,
            "architectures": [self.class_of(c)],
        }
        if c.head == "class":
            settings["num_labels"] = c.outputs
        settings["pad_token_id"] = c.pad
        for item in self.fields:
            settings |= item.write(c)
        names = [part for row in self.rows(c) for part in _all(row.theirs)]
        tied = c.ties_output or c.head not in ("token", "masked")
        held = [name for name in names if not (tied and name in self.outputs)]
        again = self.read(settings, [f"{name}.weight" for name in held] + held)
        for name in _differences(c, again, self.zeros):
            raise ConfigError(
                f"{self.model_type} cannot express model.{name}={getattr(c, name)!r}: "
                f"it has {getattr(again, name)!r}."
            )
        return settings

    @property
    def outputs(self) -> set[str]:
        """Modules that are copies of the embedding in a tied model."""
        return {name.removesuffix(".weight") for name in self.tied}


def _read_pad(settings: ConfigJson, fields: FieldValues) -> int | None:
    """Return the id of padding, None if the same id has another use and must not be hidden."""
    pad, mode = settings.get("pad_token_id"), fields["mode"]
    others = [settings.get("bos_token_id"), settings.get("eos_token_id")]
    if mode == "encoder-decoder":  # the decoder starts with padding, unless stated otherwise
        others.append(settings.get("decoder_start_token_id", pad))
    vocab = fields.get("vocab", 0)
    known = isinstance(pad, int) and isinstance(vocab, int) and 0 <= pad < vocab
    return pad if known and pad not in others else None


NEUTRAL = {"dropout", "attention_dropout", "ffn_dropout", "init", "init_std", "pad", "length"}
"""Fields that do not change what a trained model computes."""
_INITIAL = {"shrink", "start"}
"""Options of arrangements that decide initial weights only."""


def _differences(one: ModelConfig, other: ModelConfig, zeros: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields in which two configurations describe different functions."""
    a, b = explicit(one), explicit(other)
    for name, value in vars(a).items():
        if name in NEUTRAL or value == getattr(b, name):
            continue
        if name == "unembed_bias" and not value and zeros:
            continue  # a bias of zeros
        yield name


def explicit(c: ModelConfig) -> ModelConfig:
    """Return the configuration with the values that were left out, and without neutral options."""
    options = {name: value for name, value in c.addnorm_options.items() if name not in _INITIAL}
    both = c.mode == "encoder-decoder"
    return c.replace(
        kv_heads=c.effective_kv_heads,
        head_width=c.effective_head_width,
        ffn_width=c.effective_ffn_width,
        embed_width=c.embed_width if c.embed_width != c.width else None,
        attention_scale=c.effective_attention_scale if c.attention == "dot" else None,
        decoder_depth=c.depths["decoder"] if both else None,
        tie_embeddings=_ties(c),
        addnorm_options=options,
        norm_bias=c.norm_bias if c.norm in ("layer", "instance") else True,
        outputs=c.outputs if c.head in ("class", "number") else 0,
        pool=c.pool if c.head in ("class", "number") else "first",
        pooler=c.pooler if c.head in ("class", "number") else "none",
        head_activation=c.head_activation if c.head == "masked" else "gelu",
        image=c.image if c.input == "patches" else 224,
        patch=c.patch if c.input == "patches" else 16,
        channels=c.channels if c.input == "patches" else 3,
        scale_embedding=c.scale_embedding if c.input == "tokens" else False,
        position_options=_positions(c),
    )


def _ties(c: ModelConfig) -> str:
    if c.mode == "encoder-decoder":
        return c.tie_embeddings
    return "all" if c.ties_output or c.head not in ("token", "masked") else "none"


def _positions(c: ModelConfig) -> dict[str, Any]:
    """Return the options of the position scheme, with the default of those that are left out."""
    kind = choose("model.positions", c.positions, POSITIONS)
    options = {
        option.name: option.default
        for option in inspect.signature(kind).parameters.values()
        if option.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return {**options, **c.position_options}
