"""The three modes: encoder, decoder, encoder-decoder. One stack each, or two, and a head.

          ids ─► tokens ─► positions, norm, dropout ─► stack ─► head
    encoder          fully visible                              masked token, class, number
    decoder          causal, can use a cache                    next token
    encoder-decoder  source ─► encoder ─► memory ─► decoder     next token (target shifted right)

Calling a model returns the output of its head; `hidden` returns the input of its head.
"""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from addnorm.config import ModelConfig
from addnorm.cpu import require_bfloat16, warn_if_slow
from addnorm.errors import ConfigError, InputError
from addnorm.layers.attention import Attention
from addnorm.layers.cache import Cache
from addnorm.layers.context import Context
from addnorm.layers.embeddings import (
    Patches,
    Summary,
    Tokens,
    Vectors,
    check_device,
    check_tensor,
    has_values,
)
from addnorm.layers.heads import PooledHead, TokenHead
from addnorm.layers.masks import Mask
from addnorm.layers.positions import Positions
from addnorm.layers.segments import SegmentMemory
from addnorm.layers.stack import Stack
from addnorm.report.page import picture_html

if TYPE_CHECKING:
    from collections.abc import Iterator

Maps = dict[str, Tensor]
"""Attention weights by place, such as `decoder.3.memory`: (batch, heads, query, key)."""


class Side(nn.Module):
    """The encoder or the decoder: x ← P dropout(N(x + positions)), then the stack.

    Parameters
    ----------
    positions
        The position scheme.
    norm, dropout
        Modules applied to the embedding after positions are added.
    stack
        The blocks.
    project
        P, from the width of the embeddings to that of the stream; the identity by default.
    """

    def __init__(
        self,
        positions: Positions,
        norm: nn.Module,
        dropout: nn.Module,
        stack: Stack,
        project: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.positions, self.norm, self.dropout, self.stack = positions, norm, dropout, stack
        self.project = project or nn.Identity()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return (batch, length, width), or only `context.output_length` leading positions."""
        context = replace(context, positions=self.positions, tables={})
        if not torch.compiler.is_compiling():
            _check_half_precision(x)
        batch, length, offset = x.shape[0], x.shape[1], context.offset
        mask = context.mask or Mask()
        mask.check(batch, length, offset + length)
        x = self.positions.embed(x, mask.position_ids(length, offset, x.device))
        x = self.stack(self.project(self.dropout(self.norm(x))), context)
        for before in (context.cache, context.segments):
            if before is not None:
                before.advance(x.shape[1])
        return x


class Base(nn.Module):
    """Base class of the three modes."""

    config: ModelConfig
    tokens: nn.Module
    head: TokenHead | PooledHead | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.cache_key = secrets.token_hex(8)  # of its caches; copies of the model have the same

    def _repr_html_(self) -> str:
        """Return a drawing of the model, for notebooks."""
        from addnorm.models.drawing import draw  # which builds models, too

        return picture_html(draw(self.config, model=self))

    def count(self) -> int:
        """Return the number of parameters; shared ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save(self, directory: str | Path) -> None:
        """Write weights and configuration to a directory that `addnorm.load` reads."""
        from addnorm.models.saved import save

        save(self, directory)

    def sides(self) -> "Iterator[tuple[Side, nn.Module]]":
        """Yield each side with its token embedding; an embedding that both sides share once."""
        raise ConfigError("this is the base class of the modes: build an encoder or a decoder.")

    def input_mask(self, ids: Tensor, mask: Mask | None) -> Mask:
        """Return `mask`, by default that of the padding in `ids`, with the configured window."""
        check_tensor(ids, "the input of a model", "torch.tensor([[1, 2, 3]])")
        check_mask(mask)
        if mask is not None:
            mask.check_device(ids.device)
        weight = next(self.tokens.parameters(), None)
        if weight is not None:
            check_device(ids, weight, "the input of a model")
        if mask is None:
            mask = Mask()
            if self.config.pad is not None and not ids.is_floating_point():
                real = ids != self.config.pad
                if not has_values(real) or not bool(real.all()):
                    mask = Mask.padding(real)
        if self.config.norm == "instance" and mask.real is not None:
            raise InputError(
                "norm=instance averages over the sequence and cannot ignore padding. "
                "Pass sequences of one length, or build with norm=layer."
            )
        window = None if self.config.full_every else self.config.window  # else by layer
        return mask if window is None else mask & Mask.window(window)

    def apply_head(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """Return the output of the head for `hidden`, (batch, length, width)."""
        if self.head is None:
            return x
        if isinstance(self.head, TokenHead):
            return self.head(x, self.embedding())
        return self.head(x, None if mask is None else mask.real)

    def embedding(self) -> Tensor:
        """Return the embedding of the predicted tokens, (vocab, width)."""
        assert isinstance(self.tokens, Tokens)
        return self.tokens.weight


class Encoder(Base):
    """A model in which every position sees all positions but padding. BERT, ViT.

    Parameters
    ----------
    config
        The configuration it was built from.
    tokens, segments, summary
        Embeddings of the input, of segments, and of the summary token.
    encoder
        The stack with its positions.
    head
        From the stack's output to the model's; None returns the stack's.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: Tokens | Patches | Vectors,
        segments: Tokens | None,
        summary: Summary | None,
        encoder: Side,
        head: TokenHead | PooledHead | None,
    ) -> None:
        super().__init__(config)
        self.tokens, self.segments, self.summary = tokens, segments, summary
        self.encoder, self.head = encoder, head

    def sides(self) -> "Iterator[tuple[Side, nn.Module]]":
        yield self.encoder, self.tokens

    def _run(
        self, inputs: Tensor, mask: Mask | None, segments: Tensor | None, maps: Maps | None
    ) -> tuple[Tensor, Mask]:
        mask = self.input_mask(inputs, mask)
        if isinstance(self.tokens, Vectors) and mask.real is not None:
            # Padding may hold anything, even NaN, which would survive a weight of 0.
            mask.check(inputs.shape[0], inputs.shape[1], inputs.shape[1])
            inputs = inputs.masked_fill(~mask.real[..., None], 0.0)
        x = self.tokens(inputs)
        if self.segments is not None:
            segments = inputs.new_zeros(inputs.shape) if segments is None else segments
            x = x + self.segments(segments)
        elif segments is not None:
            raise InputError("this model has no segments. Build it with segments=2.")
        if self.summary is not None:
            x = self.summary(x)
            mask = mask.with_summary()
        context = Context(mask=mask, maps=None if maps is None else {})
        hidden = self.encoder(x, context)
        name_maps(self, context, maps)
        return hidden, mask

    def hidden(
        self,
        inputs: Tensor,
        *,
        mask: Mask | None = None,
        segments: Tensor | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Return the output of the stack, (batch, length, width).

        Parameters
        ----------
        inputs
            Token ids, (batch, length), images or vectors, as the model was built for.
        mask
            Which keys are visible; by default all but padding.
        segments
            Segment ids, (batch, length); by default all 0.
        maps
            If given, the attention weights are stored here, by place.
        """
        return self._run(inputs, mask, segments, maps)[0]

    def forward(
        self,
        inputs: Tensor,
        *,
        mask: Mask | None = None,
        segments: Tensor | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Return logits (batch, length, vocab), (batch, outputs) of a pooled head, or `hidden`.

        Parameters
        ----------
        inputs, mask, segments, maps
            As for `hidden`.
        """
        hidden, mask = self._run(inputs, mask, segments, maps)
        return self.apply_head(hidden, mask)


class Decoder(Base):
    """A model in which every position sees itself and earlier ones. GPT.

    Parameters
    ----------
    config
        The configuration it was built from.
    tokens
        Embedding of the input.
    decoder
        The stack with its positions.
    head
        From the stack's output to the model's; None returns the stack's.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: Tokens,
        decoder: Side,
        head: TokenHead | PooledHead | None,
    ) -> None:
        super().__init__(config)
        self.tokens, self.decoder, self.head = tokens, decoder, head

    def sides(self) -> "Iterator[tuple[Side, nn.Module]]":
        yield self.decoder, self.tokens

    def cache(self, batch: int, length: int | None = None) -> Cache:
        """Return an empty cache for decoding a batch up to a length."""
        return make_cache(self, batch, length)

    def segments(self, length: int | None = None) -> SegmentMemory:
        """Return an empty memory of earlier segments; its length is the configured one if unset."""
        if self.decoder.positions.on_embedding:
            raise ConfigError(
                f"positions={self.config.positions} are counted from the start of a segment, so "
                "two segments cannot be told apart. Build with positions=relative or rotary."
            )
        return SegmentMemory(self.config.segment_memory if length is None else length)

    def _run(
        self,
        tokens: Tensor,
        mask: Mask | None,
        cache: Cache | None,
        segments: SegmentMemory | None,
        maps: Maps | None,
    ) -> tuple[Tensor, Mask]:
        check_cache(cache, self, len(self.decoder.stack.blocks))
        if cache is not None and segments is not None:
            raise InputError("decoding has a cache, or a memory of segments: got both.")
        mask = make_causal(self.input_mask(tokens, mask), tokens, cache or segments)
        context = Context(
            mask=mask, cache=cache, segments=segments, maps=None if maps is None else {}
        )
        hidden = self.decoder(self.tokens(tokens), context)
        name_maps(self, context, maps)
        return hidden, mask

    def hidden(
        self,
        tokens: Tensor,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        segments: SegmentMemory | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Return the output of the stack, (batch, length, width).

        Parameters
        ----------
        tokens
            Token ids, (batch, length); with a cache, only the new ones.
        mask
            Which of these tokens are visible as keys, in addition to causality; by default all but
            padding.
        cache
            Keys and values of earlier tokens; those of `tokens` are added.
        segments
            What attention read in earlier segments of the same texts; `tokens` are added.
        maps
            If given, the attention weights are stored here, by place.
        """
        return self._run(tokens, mask, cache, segments, maps)[0]

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        segments: SegmentMemory | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Return logits of the next token at every position, (batch, length, vocab).

        Parameters
        ----------
        tokens, mask, cache, segments, maps
            As for `hidden`.
        """
        hidden, mask = self._run(tokens, mask, cache, segments, maps)
        return self.apply_head(hidden, mask)


def check_decode(target: Tensor, memory: Tensor, memory_mask: Mask | None) -> None:
    """Raise InputError unless the target can be decoded over the memory."""
    check_tensor(target, "the target", "torch.tensor([[1, 2, 3]])")
    check_tensor(memory, "the memory", "model.encode(source)")
    check_mask(memory_mask)
    if target.shape[0] % memory.shape[0]:
        raise InputError(
            f"each row of the memory must serve the same number of targets: "
            f"{memory.shape[0]} rows of memory, {target.shape[0]} targets."
        )


class EncoderDecoder(Base):
    """A model whose decoder attends to its encoder. Vaswani et al. 2017, T5, BART, Marian.

    Parameters
    ----------
    config
        The configuration it was built from.
    source_tokens
        Embedding of the source; None if it is that of the target.
    tokens
        Embedding of the target.
    encoder, decoder
        The two stacks with their positions.
    head
        From the decoder's output to the model's; None returns the decoder's.
    """

    def __init__(
        self,
        config: ModelConfig,
        source_tokens: Tokens | Patches | Vectors | None,
        tokens: Tokens,
        encoder: Side,
        decoder: Side,
        head: TokenHead | PooledHead | None,
    ) -> None:
        super().__init__(config)
        self.source_tokens, self.tokens = source_tokens, tokens
        self.encoder, self.decoder, self.head = encoder, decoder, head

    def sides(self) -> "Iterator[tuple[Side, nn.Module]]":
        yield self.encoder, self.source_tokens or self.tokens
        if self.source_tokens is not None:
            yield self.decoder, self.tokens

    def cache(self, batch: int, length: int | None = None) -> Cache:
        """Return an empty cache for decoding a batch of targets up to a length."""
        return make_cache(self, batch, length)

    def encode(
        self, source: Tensor, *, mask: Mask | None = None, maps: Maps | None = None
    ) -> Tensor:
        """Return the memory, (batch, source, width)."""
        context = Context(mask=self.input_mask(source, mask), maps=None if maps is None else {})
        memory = self.encoder((self.source_tokens or self.tokens)(source), context)
        name_maps(self, context, maps)
        return memory

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        cache: Cache | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Return the output of the decoder, (batch, target, width).

        Parameters
        ----------
        target
            Input of the decoder, (batch, target); with a cache, only the new tokens.
        memory
            Output of `encode`. One row may serve several consecutive rows of the target, such as
            the beams of one sentence.
        mask, memory_mask
            Which keys are visible, of the target and of the memory.
        cache
            Keys and values of earlier tokens; those of `target` are added.
        maps
            If given, the attention weights are stored here, by place.
        """
        check_decode(target, memory, memory_mask)
        check_cache(cache, self, len(self.decoder.stack.blocks))
        context = Context(
            mask=make_causal(self.input_mask(target, mask), target, cache),
            memory=memory,
            memory_mask=memory_mask,
            cache=cache,
            maps=None if maps is None else {},
        )
        hidden = self.decoder(self.tokens(target), context)
        name_maps(self, context, maps)
        return hidden

    def hidden(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Mask | None = None,
        target_mask: Mask | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Return the output of the decoder, (batch, target, width).

        Parameters
        ----------
        source
            Token ids of the source, (batch, source).
        target
            Input of the decoder, (batch, target): the tokens to predict, shifted right
            (`shift_right`).
        source_mask, target_mask
            Which keys are visible; by default all but padding.
        maps
            If given, the attention weights are stored here, by place.
        """
        check_mask(target_mask)
        source_mask = self.input_mask(source, source_mask)
        memory = self.encode(source, mask=source_mask, maps=maps)
        memory_mask = _memory_mask(source_mask, target_mask)
        return self.decode(target, memory, mask=target_mask, memory_mask=memory_mask, maps=maps)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Mask | None = None,
        target_mask: Mask | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Return logits of the next token at every target position, (batch, target, vocab).

        Parameters
        ----------
        source, target, source_mask, target_mask, maps
            As for `hidden`.
        """
        masks = {"source_mask": source_mask, "target_mask": target_mask}
        hidden = self.hidden(source, target, maps=maps, **masks)
        return self.apply_head(hidden, self.input_mask(target, target_mask))


def _check_half_precision(x: Tensor) -> None:
    """Check that this CPU can compute with autocast's or the weights' dtype; warn if slowly."""
    device, dtype = x.device.type, x.dtype
    if device == "meta":
        return  # it has no autocast, and computes nothing
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        require_bfloat16(device, name)
        warn_if_slow(device, name)


def name_maps(model: nn.Module, context: Context, maps: Maps | None) -> None:
    """Copy the attention weights of the context to `maps`, named by place: `encoder.2.attention`.

    A model with one unnamed side (a table's) has names such as `2.attention`.
    """
    if maps is None or context.maps is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module in context.maps:
            side, _, _, layer, _, role = name.split(".")
            place = f"{layer}.{role}"
            maps[place if side == "side" else f"{side}.{place}"] = context.maps[module]


def _memory_mask(source: Mask, target: Mask | None) -> Mask:
    """Return the mask of the memory: a target position sees the real positions of its group."""
    mask = Mask() if source.real is None else Mask.padding(source.real)
    target_groups = None if target is None else target.groups
    if source.groups is None and target_groups is None:
        return mask
    if source.groups is None or target_groups is None:
        raise InputError("packed rows need groups on both sides: pass Mask.grouped for each.")
    return mask & Mask.grouped(target_groups[0], source.groups[0])


def check_mask(mask: object) -> None:
    """Raise InputError unless `mask` is a Mask or None."""
    if mask is not None and not isinstance(mask, Mask):
        raise InputError(
            f"a mask must be an addnorm.Mask: got {type(mask).__name__}. Try "
            "Mask.padding(tokens != pad), or Mask.pattern(pairs) for (query, key) pairs."
        )


def check_cache(cache: Cache | None, model: Base, depth: int) -> None:
    """Raise InputError unless the cache is that of this model, whose decoder has `depth` layers."""
    if cache is None:
        return
    if not isinstance(cache, Cache):
        raise InputError(
            f"a cache must be what model.cache(batch) returns: got {type(cache).__name__}."
        )
    cache.require_owner(model.cache_key, depth)


def make_causal(mask: Mask, tokens: Tensor, cache: Cache | SegmentMemory | None) -> Mask:
    """Return the mask with causality, and with the padding that is in the cache or memory."""
    if not mask.hides_future:
        mask = mask & Mask.causal()
    if cache is not None:
        mask = replace(mask, real=cache.extend_padding(mask.real, tokens.shape[0], tokens.shape[1]))
    return mask


def make_cache(model: Decoder | EncoderDecoder, batch: int, length: int | None) -> Cache:
    """Return an empty cache that fits the decoder of a model."""
    c = model.config
    return Cache(
        depth=len(model.decoder.stack.blocks),
        batch=batch,
        heads=c.effective_kv_heads,
        length=c.length if length is None else length,
        head_width=c.effective_head_width,
        dtype=model.tokens.weight.dtype,  # type: ignore[arg-type]
        device=model.tokens.weight.device,  # type: ignore[arg-type]
        owner=model.cache_key,
    )
