"""A Config becomes modules: the only place that reads one and makes the other."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.config import Config, ModelConfig
from addnorm.errors import ConfigError, choose, nearest
from addnorm.layers.addnorm import ADDNORMS, AddNorm, Ends, Place
from addnorm.layers.attention import (
    AcrossHeads,
    Attention,
    HeadGain,
    MemoryAttention,
    SelfAttention,
)
from addnorm.layers.dropout import Dropout
from addnorm.layers.feedforward import FEEDFORWARDS, FeedForward
from addnorm.layers.heads import MaskedHead, PooledHead, TokenHead
from addnorm.layers.init import INITS, init_stack_
from addnorm.layers.norms import NORMS, Norm
from addnorm.layers.positions import POSITIONS, Positions
from addnorm.layers.scores import AdditiveScore, DotScore, Score
from addnorm.layers.stack import Block, Stack
from addnorm.layers.tokens import Patches, Summary, Tokens, Vectors
from addnorm.models.transformer import Decoder, Encoder, EncoderDecoder, Side
from addnorm.section import Options, fits, say_type

Model = Encoder | Decoder | EncoderDecoder
Make = Callable[[ModelConfig, Place, tuple[str, ...], Positions], Attention | FeedForward]
"""How the sublayer of a place is made, with the parts that the arrangement asks for inside it."""


def build(config: Config | ModelConfig) -> Model:
    """The network that a configuration describes, with fresh weights.

    >>> from addnorm import presets
    >>> build(presets.base(vocab=100, width=32, depth=1, heads=4)).count()
    32512
    """
    config = config.model if isinstance(config, Config) else config
    makers: dict[str, Callable[[ModelConfig], Model]] = {
        "encoder": _encoder,
        "decoder": _decoder,
        "encoder-decoder": _encoder_decoder,
    }
    model = makers[config.mode](config)
    init_(model, config)
    return model


def _encoder(c: ModelConfig) -> Encoder:
    return Encoder(
        config=c,
        tokens=make_input(c),
        segments=Tokens(c.segments, c.width, scaled=False) if c.segments else None,
        summary=Summary(c.width) if c.summary else None,
        encoder=make_side(c, "encoder"),
        head=make_head(c),
    )


def _decoder(c: ModelConfig) -> Decoder:
    tokens = Tokens(c.vocab, c.width, c.scale_embedding)
    return Decoder(config=c, tokens=tokens, decoder=make_side(c, "decoder"), head=make_head(c))


def _encoder_decoder(c: ModelConfig) -> EncoderDecoder:
    shared = c.tie in ("all", "source") and c.input == "tokens"
    return EncoderDecoder(
        config=c,
        source_tokens=None if shared else make_input(c),
        tokens=Tokens(c.target_vocab or c.vocab, c.width, c.scale_embedding),
        encoder=make_side(c, "encoder"),
        decoder=make_side(c, "decoder"),
        head=make_head(c),
    )


def make_norm(c: ModelConfig) -> Norm:
    """A factory for the configured norm."""
    kind = choose("model.norm", c.norm, NORMS)
    if getattr(kind, "along_sequence", False) and c.mode != "encoder":
        raise ConfigError(
            f"model.norm={c.norm} looks along the sequence, so a decoder would see the future: "
            f"mode={c.mode}. Try norm=layer."
        )
    return partial(kind, eps=c.norm_eps, bias=c.norm_bias)


def make_input(c: ModelConfig) -> Tokens | Patches | Vectors:
    if c.input == "patches":
        return Patches(c.image, c.patch, c.channels, c.width)
    if c.input == "vectors":
        return Vectors(c.width)
    return Tokens(c.vocab, c.width, c.scale_embedding)


def make_head(c: ModelConfig) -> TokenHead | PooledHead | None:
    vocab = c.target_vocab or c.vocab
    if c.head == "token":
        bias, scaled = c.unembed_bias, c.scale_output
        return TokenHead(c.width, vocab, tied=is_tied(c), bias=bias, scaled=scaled)
    if c.head == "masked":
        return MaskedHead(c.width, vocab, make_norm(c), tied=is_tied(c))
    if c.head in ("class", "number"):
        drop = Dropout(c.dropout)
        return PooledHead(c.width, c.outputs, pool=c.pool, pooler=c.pooler, dropout=drop)
    return None


def make_side(c: ModelConfig, side: str) -> Side:
    """One stack with its positions: the encoder's or the decoder's."""
    positions = make_positions(c, side)
    return Side(
        positions=positions,
        norm=make_norm(c)(c.width) if c.embed_norm else nn.Identity(),
        dropout=Dropout(c.dropout),
        stack=make_stack(c, side, positions),
    )


def make_positions(c: ModelConfig, side: str) -> Positions:
    kind = choose("model.positions", c.positions, POSITIONS)
    options = pick_options("model.position_options", c.position_options, [kind])[0]
    length = length_of(c) if side == "encoder" else c.length
    sizes = (c.width, c.heads, head_width_of(c), length, side == "decoder")
    return kind(*sizes, **options)


def make_stack(
    c: ModelConfig,
    side: str,
    positions: Positions,
    roles: Sequence[str] | None = None,
    make: Make | None = None,
) -> Stack:
    """The blocks of one side, between the ends of the arrangement.

    `roles` and `make` are for blocks with other sublayers than the usual ones (SAINT's).
    """
    kind = choose("model.addnorm", c.addnorm, ADDNORMS)
    ends_kind: type[Ends] = kind.ends
    name = "model.addnorm_options"
    box_options, ends_options = pick_options(name, c.addnorm_options, [kind, ends_kind])
    norm = make_norm(c)
    blocks = [
        make_block(c, places, partial(kind, norm=norm, **box_options), kind.inside, positions, make)
        for places in places_of(c, side, roles)
    ]
    ends = ends_kind(c.width, depth_of(c, side), norm, **ends_options)
    if c.final_norm and ends.closes_with_norm:
        raise ConfigError(
            f"model.final_norm adds a norm where the arrangement has none, but addnorm={c.addnorm} "
            "ends with one. Leave final_norm out."
        )
    return Stack(blocks, ends, norm(c.width) if c.final_norm else nn.Identity())


def places_of(c: ModelConfig, side: str, roles: Sequence[str] | None = None) -> list[list[Place]]:
    """Where each Add & Norm box of one side stands, block by block."""
    has_memory = side == "decoder" and c.mode == "encoder-decoder"
    roles = roles or (("attention", "memory", "ffn") if has_memory else ("attention", "ffn"))
    depth = depth_of(c, side)
    other = depth_of(c, "encoder" if side == "decoder" else "decoder")
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
    box: Callable[[Place], AddNorm],
    inside: tuple[str, ...],
    positions: Positions,
    make: Make | None = None,
) -> Block:
    make = make or make_sublayer
    return Block(
        {place.role: make(c, place, inside, positions) for place in places},
        {place.role: box(place) for place in places},
        Dropout(c.dropout),
    )


def make_sublayer(
    c: ModelConfig, place: Place, inside: tuple[str, ...], positions: Positions
) -> Attention | FeedForward:
    """The sublayer of one place, with the parts that the arrangement asks for inside it."""
    if place.role == "ffn":
        return make_ffn(c, inside)
    width, heads, norm = head_width_of(c), c.heads, make_norm(c)
    inner: nn.Module | None = None
    if "head-gain" in inside:
        inner = HeadGain(heads)
    if "attention-norm" in inside:
        inner = norm(heads * width)
    is_self = place.role == "attention"
    return (SelfAttention if is_self else MemoryAttention)(
        c.width,
        heads,
        c.kv_heads or heads,
        width,
        place.layer,
        bias=c.attention_bias,
        dropout=c.attention_dropout,
        score=make_score(c),
        query_norm=make_qk_norm(c, heads),
        key_norm=make_qk_norm(c, c.kv_heads or heads),
        inner=inner,
        local=positions.local(c.width, heads, width) if is_self else None,
    )


def make_ffn(c: ModelConfig, inside: tuple[str, ...]) -> FeedForward:
    kind, activation = choose("model.ffn", c.ffn, FEEDFORWARDS)
    width = ffn_width_of(c)
    inner = make_norm(c)(width) if "ffn-norm" in inside else None
    return kind(c.width, width, activation, bias=c.ffn_bias, dropout=c.ffn_dropout, inner=inner)


def make_score(c: ModelConfig) -> Score:
    width = head_width_of(c)
    scale = width**-0.5 if c.attention_scale is None else c.attention_scale
    scores: dict[str, Callable[[], Score]] = {
        "dot": lambda: DotScore(scale, c.attention_cap),
        "additive": lambda: AdditiveScore(c.heads, width),
    }
    return choose("model.attention", c.attention, scores)()


def make_qk_norm(c: ModelConfig, heads: int) -> nn.Module | None:
    norm, width = make_norm(c), head_width_of(c)
    kinds: dict[str, Callable[[], nn.Module | None]] = {
        "none": lambda: None,
        "head": lambda: norm(width),
        "width": lambda: AcrossHeads(heads * width, norm),
    }
    return kinds[c.qk_norm]()


def is_tied(c: ModelConfig) -> bool:
    """Whether the output matrix is the token embedding."""
    return c.tie in ("all", "output")


def depth_of(c: ModelConfig, side: str) -> int:
    return c.depth if side == "encoder" or c.decoder_depth is None else c.decoder_depth


def head_width_of(c: ModelConfig) -> int:
    return c.head_width or c.width // c.heads


def ffn_width_of(c: ModelConfig) -> int:
    return c.ffn_width or 4 * c.width


def length_of(c: ModelConfig) -> int:
    """Positions that the input can have: those of the patches, or `length`; and the summary."""
    body = (c.image // c.patch) ** 2 if c.input == "patches" else c.length
    return body + int(c.summary)


@torch.no_grad()
def init_(model: Model, c: ModelConfig) -> None:
    """Fresh weights by the configured rule, then by the arrangement. See layers/init.py."""
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
    for side, tokens in model.sides():
        if isinstance(tokens, Tokens):
            side.stack.ends.init_(tokens.weight)


def pick_options(
    name: str, options: Options, takers: Sequence[Callable[..., Any]]
) -> list[dict[str, Any]]:
    """Each taker's share of a table of options; one that nobody takes is an error."""
    known = [
        {
            parameter.name: parameter.annotation
            for parameter in inspect.signature(taker).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        for taker in takers
    ]
    hints = {option: hint for table in known for option, hint in table.items()}
    for option, value in options.items():
        if option not in hints:
            advice = nearest(option, hints) if hints else "It takes none."
            raise ConfigError(f"{name} has no {option!r}. {advice}")
        if not fits(value, hints[option]):
            raise ConfigError(f"{name}.{option} must be {say_type(hints[option])}: got {value!r}.")
    return [{key: options[key] for key in options if key in table} for table in known]
