"""The three modes: encoder, decoder, encoder-decoder. One stack each, or two, and a head.

          ids ─► tokens ─► positions, norm, dropout ─► stack ─► head
    encoder          fully visible                              masked token, class, number
    decoder          causal, may use a cache                    next token
    encoder-decoder  source ─► encoder ─► memory ─► decoder of the target, shifted right ─► next
    token

Calling a model gives the head's answer; `hidden` gives what the head is given.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError, InputError
from addnorm.layers.attention import Attention
from addnorm.layers.context import Cache, Context, Mask
from addnorm.layers.heads import PooledHead, TokenHead
from addnorm.layers.positions import Positions
from addnorm.layers.stack import Stack
from addnorm.layers.tokens import Patches, Summary, Tokens, Vectors
from addnorm.machine import warn_if_slow

if TYPE_CHECKING:
    from collections.abc import Iterator

Maps = dict[str, Tensor]
"""Attention weights by place, such as `decoder.3.memory`: (batch, heads, query, key)."""


class Side(nn.Module):
    """Embedding sum and stack of one side: x ← dropout(N(x + positions)), then the blocks.

    With `asking`, only the first so many positions are answered; see Stack.
    """

    def __init__(
        self, positions: Positions, norm: nn.Module, dropout: nn.Module, stack: Stack
    ) -> None:
        super().__init__()
        self.positions, self.norm, self.dropout, self.stack = positions, norm, dropout, stack

    def forward(self, x: Tensor, context: Context, asking: int | None = None) -> Tensor:
        context = replace(context, positions=self.positions, tables={})
        if not torch.compiler.is_compiling():
            _warn_of_half_precision(x)
        batch, length, offset = x.shape[0], x.shape[1], context.offset
        mask = context.mask or Mask()
        mask.check(batch, length, offset + length)
        places = mask.places(batch, length, offset, x.device)
        x = self.positions.embed(x, places)
        x = self.stack(self.dropout(self.norm(x)), context, asking)
        if context.cache is not None:
            context.cache.advance(x.shape[1])
        return x


class Base(nn.Module):
    """What the three modes share."""

    config: ModelConfig
    tokens: nn.Module
    head: TokenHead | PooledHead | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def count(self) -> int:
        """Number of parameters, shared ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save(self, directory: str | Path) -> None:
        """Write weights and configuration to a directory that `addnorm.load` reads."""
        from addnorm.models.saved import save

        save(self, directory)

    def sides(self) -> "Iterator[tuple[Side, nn.Module]]":
        """Each side with the embedding that feeds it; one that both sides share counts once."""
        raise ConfigError("this is only what the modes share: build an encoder or a decoder.")

    def padding(self, ids: Tensor, mask: Mask | None, real: bool = True) -> Mask:
        """The mask given, or the padding that the ids show, with the configured window."""
        if mask is None:
            mask = Mask()
            if self.config.pad is not None and not ids.is_floating_point():
                kept = ids != self.config.pad
                if torch.compiler.is_compiling() or not bool(kept.all()):
                    mask = Mask.padding(kept)
        if self.config.norm == "instance" and mask.real is not None:
            raise InputError(
                "norm=instance averages along the sequence and cannot leave padding out. "
                "Pass sequences of one length, or build with norm=layer."
            )
        return mask if self.config.window is None else mask & Mask.window(self.config.window)

    def answer(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """The head's answer to the hidden (batch, length, width)."""
        if self.head is None:
            return x
        if isinstance(self.head, TokenHead):
            return self.head(x, self.embedding())
        return self.head(x, None if mask is None else mask.real)

    def embedding(self) -> Tensor:
        """The token embedding of what comes out, (vocab, width)."""
        assert isinstance(self.tokens, Tokens)
        return self.tokens.weight

    def name_maps(self, found: dict[nn.Module, Tensor] | None, maps: Maps | None) -> None:
        """Fill `maps` with the weights that the attentions left, under the name of their place."""
        if found and maps is not None:
            for name, module in self.named_modules():
                if isinstance(module, Attention) and module in found:
                    side, _, _, layer, _, role = name.split(".")
                    maps[f"{side}.{layer}.{role}"] = found[module]


class Encoder(Base):
    """Fully visible: every position sees every real one. BERT, ViT, tables."""

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
        mask = self.padding(inputs, mask)
        if isinstance(self.tokens, Vectors) and mask.real is not None:
            # Whatever padding holds, even NaN: 0 times it must be 0.
            mask.check(inputs.shape[0], inputs.shape[1], inputs.shape[1])
            inputs = inputs.masked_fill(~mask.real[..., None], 0.0)
        x = self.tokens(inputs)
        if self.segments is not None:
            given = inputs.new_zeros(inputs.shape) if segments is None else segments
            x = x + self.segments(given)
        elif segments is not None:
            raise InputError("this model has no segments. Build it with segments=2.")
        if self.summary is not None:
            x = self.summary(x)
            mask = mask.after_summary()
        context = Context(mask=mask, maps=None if maps is None else {})
        hidden = self.encoder(x, context)
        self.name_maps(context.maps, maps)
        return hidden, mask

    def hidden(
        self,
        inputs: Tensor,
        *,
        mask: Mask | None = None,
        segments: Tensor | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """The stack's output, (batch, length, width)."""
        return self._run(inputs, mask, segments, maps)[0]

    def forward(
        self,
        inputs: Tensor,
        *,
        mask: Mask | None = None,
        segments: Tensor | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Logits (batch, length, vocab), or (batch, outputs) of a pooled head, or the stream."""
        hidden, mask = self._run(inputs, mask, segments, maps)
        return self.answer(hidden, mask)


class Decoder(Base):
    """Causal: every position sees itself and what came before. GPT."""

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
        """An empty cache for decoding a batch up to a length."""
        return make_cache(self, batch, length)

    def _run(
        self, tokens: Tensor, mask: Mask | None, cache: Cache | None, maps: Maps | None
    ) -> tuple[Tensor, Mask]:
        mask = causal(self.padding(tokens, mask), tokens, cache)
        context = Context(mask=mask, cache=cache, maps=None if maps is None else {})
        hidden = self.decoder(self.tokens(tokens), context)
        self.name_maps(context.maps, maps)
        return hidden, mask

    def hidden(
        self,
        tokens: Tensor,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """The stack's output, (batch, length, width)."""
        return self._run(tokens, mask, cache, maps)[0]

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Logits of the next token at every position, (batch, length, vocab).

        With a cache, `tokens` are only the new ones, and a padding mask speaks of those alone.
        """
        hidden, mask = self._run(tokens, mask, cache, maps)
        return self.answer(hidden, mask)


class EncoderDecoder(Base):
    """The decoder reads the encoder's output. Vaswani et al. 2017, T5, BART, Marian."""

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
        """An empty cache for decoding a batch of targets up to a length."""
        return make_cache(self, batch, length)

    def encode(
        self, source: Tensor, *, mask: Mask | None = None, maps: Maps | None = None
    ) -> Tensor:
        """The memory, (batch, source, width)."""
        context = Context(mask=self.padding(source, mask), maps=None if maps is None else {})
        memory = self.encoder((self.source_tokens or self.tokens)(source), context)
        self.name_maps(context.maps, maps)
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
        """The decoder's output, (batch, target, width), given a memory.

        The memory may have one row for several of the target (the beams of one sentence).
        """
        if target.shape[0] % memory.shape[0]:
            raise InputError(
                f"each row of the memory must serve the same number of targets: "
                f"{memory.shape[0]} rows of memory, {target.shape[0]} targets."
            )
        context = Context(
            mask=causal(self.padding(target, mask), target, cache),
            memory=memory,
            memory_mask=memory_mask,
            cache=cache,
            maps=None if maps is None else {},
        )
        hidden = self.decoder(self.tokens(target), context)
        self.name_maps(context.maps, maps)
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
        """The decoder's output, (batch, target, width)."""
        source_mask = self.padding(source, source_mask)
        memory = self.encode(source, mask=source_mask, maps=maps)
        seen = _seen_memory(source_mask, target_mask)
        return self.decode(target, memory, mask=target_mask, memory_mask=seen, maps=maps)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Mask | None = None,
        target_mask: Mask | None = None,
        maps: Maps | None = None,
    ) -> Tensor:
        """Logits of the next token at every position of the target, (batch, target, vocab).

        `target` is what the decoder is given: the wanted tokens shifted right (`shift_right`).
        """
        masks = {"source_mask": source_mask, "target_mask": target_mask}
        hidden = self.hidden(source, target, maps=maps, **masks)
        return self.answer(hidden, self.padding(target, target_mask))


def _warn_of_half_precision(x: Tensor) -> None:
    """Say so once where autocast, or the weights' own type, would make this CPU crawl."""
    device, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if dtype in (torch.bfloat16, torch.float16):
        warn_if_slow(device, str(dtype).removeprefix("torch."))


def _seen_memory(source: Mask, target: Mask | None) -> Mask:
    """What of the memory each target position may see: what is real, and of its own group."""
    seen = Mask() if source.real is None else Mask.padding(source.real)
    of_target = None if target is None else target.groups
    if source.groups is None and of_target is None:
        return seen
    if source.groups is None or of_target is None:
        raise InputError("packed rows need groups on both sides: pass Mask.grouped for each.")
    return seen & Mask.grouped(of_target[0], source.groups[0])


def causal(mask: Mask, tokens: Tensor, cache: Cache | None) -> Mask:
    """The mask made causal, if it is not, and joined to the padding that a cache remembers."""
    if not mask.hides_future:
        mask = mask & Mask.causal()
    if cache is not None:
        mask = replace(mask, real=cache.remember(mask.real, tokens.shape[0], tokens.shape[1]))
    return mask


def make_cache(model: Decoder | EncoderDecoder, batch: int, length: int | None) -> Cache:
    c = model.config
    return Cache(
        depth=len(model.decoder.stack.blocks),
        batch=batch,
        heads=c.kv_heads or c.heads,
        length=c.length if length is None else length,
        head_width=c.head_width or c.width // c.heads,
        dtype=model.tokens.weight.dtype,  # type: ignore[arg-type]
        device=model.tokens.weight.device,  # type: ignore[arg-type]
    )
