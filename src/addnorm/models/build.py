"""Build a network from a configuration: the only place where a Config becomes modules."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.config import Config, ModelConfig
from addnorm.errors import ConfigError, choose, nearest
from addnorm.layers.addnorm import ADDNORMS, AddNorm, Ends, Place
from addnorm.layers.attention import (
    AcrossHeads,
    HeadGain,
    MemoryAttention,
    SelfAttention,
)
from addnorm.layers.attention_kernels import AdditiveScore, DotScore, Score
from addnorm.layers.convolution import Convolution
from addnorm.layers.dropout import Dropout
from addnorm.layers.embeddings import Patches, Summary, Tokens, Vectors
from addnorm.layers.feedforward import FEEDFORWARDS, FeedForward
from addnorm.layers.heads import MaskedHead, PooledHead, TokenHead
from addnorm.layers.init import INITS, init_stack_
from addnorm.layers.key_value import PersistentVectors, ProductKeyMemory
from addnorm.layers.norms import NORMS, Norm
from addnorm.layers.positions import POSITIONS, Positions
from addnorm.layers.span import AdaptiveSpan
from addnorm.layers.stack import AnySublayer, Block, LastBlock, Stack
from addnorm.models.recurrent import RecurrentEncoderDecoder
from addnorm.models.transformer import Decoder, Encoder, EncoderDecoder, Side
from addnorm.presets import find
from addnorm.section import Options, describe_type, fits

Model = Encoder | Decoder | EncoderDecoder
MakeSublayer = Callable[[ModelConfig, Place, tuple[str, ...], Positions], AnySublayer]
"""Makes the sublayer at a place, with the modules that the arrangement adds inside it."""


def build(config: Config | ModelConfig | str | Path) -> Model:
    """Return the network that a configuration describes, with newly initialised weights.

    Parameters
    ----------
    config : a configuration, the name of a preset, a TOML file or the directory of a saved model

    Examples
    --------
    >>> from addnorm import presets
    >>> model = build(presets.gpt2(vocab=100, width=32, depth=1, heads=4))
    >>> model.count(), model(torch.tensor([[1, 2, 3]])).shape
    (48736, torch.Size([1, 3, 100]))
    """
    config = model_config(config)
    if config.mixing == "recurrent" and config.mode != "encoder-decoder":
        raise ConfigError(
            f"model.mixing=recurrent needs mode=encoder-decoder: got mode={config.mode}. Try "
            "mixing=convolution."
        )
    builders: dict[str, Callable[[ModelConfig], Model]] = {
        "encoder": _build_encoder,
        "decoder": _build_decoder,
        "encoder-decoder": _build_encoder_decoder,
    }
    model = builders[config.mode](config)
    if config.segment_memory:
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"model.segment_memory needs mode=decoder: got mode={config.mode}. Leave it out."
            )
        model.segments()  # refuses positions that are counted from the start of a segment
    init_(model, config)
    return model


def model_config(config: Config | ModelConfig | str | Path) -> ModelConfig:
    """Return the configuration of a model, given as such, in a run's, or by the name of a preset.

    >>> model_config("gpt2").width
    768
    """
    if isinstance(config, str | Path):
        config = find(config)
    return config.model if isinstance(config, Config) else config


def _build_encoder(c: ModelConfig) -> Encoder:
    embed_width = c.effective_embed_width
    return Encoder(
        config=c,
        tokens=make_input(c),
        segments=Tokens(c.segments, embed_width, scaled=False) if c.segments else None,
        summary=Summary(embed_width) if c.summary else None,
        encoder=make_side(c, "encoder"),
        head=make_head(c),
    )


def _build_decoder(c: ModelConfig) -> Decoder:
    tokens = Tokens(c.vocab, c.width, c.scale_embedding)
    return Decoder(config=c, tokens=tokens, decoder=make_side(c, "decoder"), head=make_head(c))


def _build_encoder_decoder(c: ModelConfig) -> EncoderDecoder:
    if c.mixing == "recurrent":
        return _build_recurrent(c)
    return EncoderDecoder(
        config=c,
        source_tokens=None if c.ties_source else make_input(c),
        tokens=Tokens(c.output_vocab, c.width, c.scale_embedding),
        encoder=make_side(c, "encoder"),
        decoder=make_side(c, "decoder"),
        head=make_head(c),
    )


def _build_recurrent(c: ModelConfig) -> RecurrentEncoderDecoder:
    head = make_head(c)
    if not isinstance(head, TokenHead) or c.input != "tokens":
        raise ConfigError(
            f"model.mixing=recurrent translates tokens: got input={c.input}, head={c.head}. Try "
            "input=tokens and head=token."
        )
    source = None if c.ties_source else Tokens(c.vocab, c.width, c.scale_embedding)
    tokens = Tokens(c.output_vocab, c.width, c.scale_embedding)
    return RecurrentEncoderDecoder(c, source, tokens, head)


def make_norm(c: ModelConfig) -> Norm:
    """Return a factory of the configured norm."""
    kind = choose("model.norm", c.norm, NORMS)
    if getattr(kind, "along_sequence", False) and c.mode != "encoder":
        raise ConfigError(
            f"model.norm={c.norm} averages over the sequence, so a decoder would see the future: "
            f"mode={c.mode}. Try norm=layer."
        )
    return partial(kind, eps=c.norm_eps, bias=c.norm_bias)


def make_input(c: ModelConfig) -> Tokens | Patches | Vectors:
    """Return the embedding of the (source) input."""
    if c.input == "patches":
        return Patches(c.image, c.patch, c.channels, c.width)
    if c.input == "vectors":
        return Vectors(c.width)
    return Tokens(c.vocab, c.effective_embed_width, c.scale_embedding)


def make_head(c: ModelConfig) -> TokenHead | PooledHead | None:
    """Return the output head; None for head=none."""
    vocab = c.output_vocab
    if c.head == "token":
        return TokenHead(
            c.width,
            vocab,
            tied=c.ties_output,
            bias=c.unembed_bias,
            scaled=c.scale_output,
            cap=c.logit_cap,
        )
    if c.head == "masked":
        return MaskedHead(
            c.width,
            vocab,
            make_norm(c),
            tied=c.ties_output,
            embed_width=c.embed_width,
            activation=FEEDFORWARDS[c.head_activation][1],
        )
    if c.head in ("class", "number"):
        drop = Dropout(c.dropout)
        return PooledHead(c.width, c.outputs, pool=c.pool, pooler=c.pooler, dropout=drop)
    return None


def make_side(c: ModelConfig, side: str) -> Side:
    """Return the encoder or the decoder: a stack with its positions."""
    positions = make_positions(c, side)
    width = c.effective_embed_width
    return Side(
        positions=positions,
        norm=make_norm(c)(width) if c.embed_norm else nn.Identity(),
        dropout=Dropout(c.dropout),
        stack=make_stack(c, side, positions),
        project=nn.Linear(width, c.width) if c.embed_width else None,
    )


def make_positions(c: ModelConfig, side: str) -> Positions:
    """Return the position scheme of one side."""
    kind = choose("model.positions", c.positions, POSITIONS)
    options = pick_options("model.position_options", c.position_options, [kind])[0]
    head_width, length = c.effective_head_width, c.lengths[side]
    sizes = (c.effective_embed_width, c.heads, head_width, length, side == "decoder")
    return kind(*sizes, **options)


def make_stack(
    c: ModelConfig,
    side: str,
    positions: Positions,
    roles: Sequence[str] | None = None,
    make: MakeSublayer | None = None,
) -> Stack:
    """Return the blocks of one side, between the ends of the arrangement.

    Parameters
    ----------
    c
        The configuration.
    side
        encoder or decoder.
    positions
        The position scheme of this side.
    roles, make
        Roles of the sublayers of a block, and what makes them, where they are not the usual ones
        (SAINT).
    """
    kind, box_options, ends_options = arrangement_of(c, side)
    ends_kind: type[Ends] = kind.ends
    norm = make_norm(c)
    make_box = partial(kind, norm=norm, **box_options)
    blocks = [
        make_block(c, places, make_box, kind.inside, positions, make or make_sublayer)
        for places in places_of(c, side, roles)
    ]
    ends = ends_kind(c.width, c.depths[side], norm, **ends_options)
    if c.final_norm and ends.closes_with_norm:
        raise ConfigError(
            "model.final_norm adds a norm where the arrangement has none, but "
            f"addnorm={c.arrangements[side][0]} ends with one. Leave final_norm out."
        )
    return Stack(blocks, ends, norm(c.width) if c.final_norm else nn.Identity())


def arrangement_of(
    c: ModelConfig, side: str
) -> tuple[type[AddNorm], dict[str, Any], dict[str, Any]]:
    """Return the class of a side's Add & Norm boxes, and the options of boxes and ends."""
    field = "addnorm" if side == "encoder" or c.decoder_addnorm is None else "decoder_addnorm"
    name, options = c.arrangements[side]
    kind = choose(f"model.{field}", name, ADDNORMS)
    box_options, ends_options = pick_options(f"model.{field}_options", options, [kind, kind.ends])
    return kind, box_options, ends_options


def places_of(c: ModelConfig, side: str, roles: Sequence[str] | None = None) -> list[list[Place]]:
    """Return the places of the Add & Norm boxes of one side, one list for each block."""
    has_memory = side == "decoder" and c.mode == "encoder-decoder"
    usual = ["attention", *(["memory"] if has_memory else []), *(["ffn"] if c.has_ffn else [])]
    roles = roles or usual
    depth = c.depths[side]
    other = c.depths["encoder" if side == "decoder" else "decoder"]
    return [
        [
            Place(
                width=c.width,
                layer=layer,
                depth=depth,
                role=role,
                step=layer * len(roles) + number,
                steps=depth * len(roles),
                side=side,
                peer_depth=other if c.mode == "encoder-decoder" else 0,
            )
            for number, role in enumerate(roles)
        ]
        for layer in range(depth)
    ]


def make_block(
    c: ModelConfig,
    places: Sequence[Place],
    make_box: Callable[[Place], AddNorm],
    inside: tuple[str, ...],
    positions: Positions,
    make: MakeSublayer,
) -> Block:
    """Return one block.

    Parameters
    ----------
    c
        The configuration.
    places
        The places of its Add & Norm boxes.
    make_box, make
        Make the box, and the sublayer, of a place.
    inside
        Modules that the arrangement adds inside the sublayers.
    positions
        The position scheme of this side.
    """
    kind = LastBlock if places[-1].layer + 1 == places[-1].depth else Block
    return kind(
        {place.role: make(c, place, inside, positions) for place in places},
        {place.role: make_box(place) for place in places},
        Dropout(c.dropout),
    )


def make_sublayer(
    c: ModelConfig, place: Place, inside: tuple[str, ...], positions: Positions
) -> AnySublayer:
    """Return the sublayer at one place.

    Parameters
    ----------
    c
        The configuration.
    place
        Where the sublayer is.
    inside
        Modules that the arrangement adds inside the sublayer.
    positions
        The position scheme of this side.
    """
    if place.role == "ffn":
        return make_ffn(c, inside)
    inner: nn.Module | None = None
    if "head-gain" in inside:
        inner = HeadGain(c.heads)
    if "attention-norm" in inside:
        inner = make_norm(c)(c.query_width)
    is_self = place.role == "attention"
    if is_self and c.mixing == "convolution":
        return make_convolution(c, place, inner)
    local = positions.local(c.width, c.heads, c.effective_head_width) if is_self else None
    return (SelfAttention if is_self else MemoryAttention)(
        c.width,
        c.heads,
        c.effective_kv_heads,
        c.effective_head_width,
        place.layer,
        bias=c.attention_bias,
        dropout=c.attention_dropout,
        score=make_score(c),
        query_norm=make_qk_norm(c, c.query_width),
        key_norm=make_qk_norm(c, c.kv_width),
        inner=inner,
        local=local,
        window=c.window_of(place.layer) if is_self else None,
        persistent=make_persistent(c, positions) if is_self else None,
        span=AdaptiveSpan(c.heads, c.span, c.span_ramp) if is_self and c.span else None,
    )


def make_convolution(c: ModelConfig, place: Place, inner: nn.Module | None) -> Convolution:
    """Return the convolution in place of self-attention; raise for what it cannot have."""
    unsupported = {
        "model.ffn=all-attention": bool(c.persistent),
        "model.span": c.span is not None,
        "model.window": c.window is not None,
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"model.mixing=convolution has no self-attention, so it cannot have {name}. "
                "Leave one out."
            )
    if c.kv_width != c.width:
        raise ConfigError(
            "model.mixing=convolution needs heads × head_width = width for its cache: got "
            f"{c.effective_kv_heads} × {c.effective_head_width}, width={c.width}. "
            "Leave head_width and kv_heads out."
        )
    causal, bias = place.side == "decoder", c.attention_bias != "none"
    return Convolution(
        c.width, c.kernel, place.layer, causal=causal, heads=c.heads, bias=bias, inner=inner
    )


def make_persistent(c: ModelConfig, positions: Positions) -> PersistentVectors | None:
    """Return the learned keys and values of an attention; None unless ffn=all-attention."""
    if not c.persistent:
        return None
    if positions.rotates and c.attention != "dot":
        raise ConfigError(
            "model.ffn=all-attention with positions that rotate queries needs attention=dot: got "
            f"attention={c.attention}, positions={c.positions}. Try positions=relative."
        )
    return PersistentVectors(c.effective_kv_heads, c.effective_head_width, c.persistent)


def make_ffn(c: ModelConfig, inside: tuple[str, ...]) -> FeedForward | ProductKeyMemory:
    """Return a feed-forward network, with a norm inside if the arrangement has one."""
    if c.ffn == "product-key":
        options = pick_options("model.ffn_options", c.ffn_options, [ProductKeyMemory])[0]
        return ProductKeyMemory(c.width, **({"bias": c.ffn_bias} | options))
    if c.ffn not in FEEDFORWARDS:
        names = (*FEEDFORWARDS, "product-key", "all-attention", "none")
        raise ConfigError(f"model.ffn has no choice {c.ffn!r}. {nearest(c.ffn, names)}")
    kind, activation = FEEDFORWARDS[c.ffn]
    width = c.effective_ffn_width
    inner = make_norm(c)(width) if "ffn-norm" in inside else None
    return kind(c.width, width, activation, bias=c.ffn_bias, dropout=c.ffn_dropout, inner=inner)


def make_score(c: ModelConfig) -> Score:
    """Return the score of a query and a key."""
    scores: dict[str, Callable[[], Score]] = {
        "dot": lambda: DotScore(c.effective_attention_scale, c.attention_cap),
        "additive": lambda: AdditiveScore(c.heads, c.effective_head_width),
    }
    return choose("model.attention", c.attention, scores)()


def make_qk_norm(c: ModelConfig, width: int) -> nn.Module | None:
    """Return the norm of queries, or of keys, of this width; None for qk_norm=none."""
    kinds: dict[str, Callable[[], nn.Module | None]] = {
        "none": lambda: None,
        "head": lambda: make_norm(c)(c.effective_head_width),
        "width": lambda: AcrossHeads(width, make_norm(c)),
    }
    return kinds[c.qk_norm]()


@torch.no_grad()
def init_(model: Model, c: ModelConfig) -> None:
    """Initialise the weights by the configured rule, then by the arrangement: layers/init.py."""
    rule = INITS[c.init]

    def fill(weight: Tensor) -> object:
        return rule(weight, c.init_std)

    std = c.init_std if c.init == "normal" else c.width**-0.5
    for module in model.modules():
        if isinstance(module, Tokens):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, TokenHead | PooledHead | Patches):
            for name, parameter in module.named_parameters():
                if parameter.ndim == 2:
                    fill(parameter)
                elif name.endswith("bias"):
                    parameter.zero_()
        elif isinstance(module, Stack):
            init_stack_(module, fill)
        elif isinstance(module, Side) and isinstance(module.project, nn.Linear):
            fill(module.project.weight)
            nn.init.zeros_(module.project.bias)
    for side, tokens in model.sides():
        if isinstance(tokens, Tokens):
            side.stack.ends.init_(tokens.weight)


def pick_options(
    name: str, options: Options, functions: Sequence[Callable[..., Any]]
) -> list[dict[str, Any]]:
    """Return the options that each function accepts as keywords; raise if none accepts one.

    `name` is the field of the configuration that holds the options.
    """
    accepted = [
        {
            parameter.name: parameter.annotation
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        for function in functions
    ]
    hints = {option: hint for table in accepted for option, hint in table.items()}
    for option, value in options.items():
        if option not in hints:
            advice = nearest(option, hints) if hints else "It has no options."
            raise ConfigError(f"{name} has no {option!r}. {advice}")
        if not fits(value, hints[option]):
            raise ConfigError(
                f"{name}.{option} must be {describe_type(hints[option])}: got {value!r}."
            )
    return [{key: options[key] for key in options if key in table} for table in accepted]
