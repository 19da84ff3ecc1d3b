"""The translation model that the Transformer replaced: recurrent, with additive attention.

Bahdanau, Cho, Bengio 2015 (1409.0473), §3 and appendix A. x source, y target, E embedding:

    →h_j = GRU(E x_j, →h_(j−1)),   ←h_j = GRU(E x_j, ←h_(j+1)),   h_j = [→h_j, ←h_j]
    s_0  = tanh(W_s ←h_1)
    α_ij = softmax_j(v · tanh(W_a s_(i−1) + U_a h_j)),   c_i = Σ_j α_ij h_j
    s_i  = GRU([E y_(i−1), c_i], s_(i−1))
    t_i  = maxout(U_o s_i + V_o E y_(i−1) + C_o c_i),    pairs of 2 · width;   logits = E t_i

Departures: every direction of the encoder has half the width, so that h_j has the model's; the
readout reads s_i instead of s_(i−1); torch's GRU applies its reset gate after the matrix product;
with depth > 1 the GRUs are stacked, attention staying with the first of the decoder. A signal
between positions n apart passes n steps; in self-attention it passes one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError, InputError
from addnorm.layers.cache import Cache
from addnorm.layers.dropout import Dropout
from addnorm.layers.embeddings import Tokens
from addnorm.layers.heads import TokenHead
from addnorm.layers.masks import Mask, require_padding_only
from addnorm.models.transformer import EncoderDecoder, Maps, Side, check_cache, check_decode


class RecurrentEncoder(nn.Module):
    """Annotations h_j of every position, (batch, length, width), by GRUs in both directions."""

    def __init__(self, width: int, depth: int, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout
        self.gru = nn.GRU(width, width // 2, depth, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Return the annotations; `real` marks what is not padding, which must be at the end."""
        x = self.dropout(x)
        if real is None:
            return self.gru(x)[0]
        if bool((real[:, 1:] & ~real[:, :-1]).any()):
            raise InputError(
                "a recurrent encoder needs padding after the text: got padding before or inside it."
            )
        packed = pack_padded_sequence(
            x, real.sum(dim=1).clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        return pad_packed_sequence(self.gru(packed)[0], True, total_length=x.shape[1])[0]


class RecurrentDecoder(nn.Module):
    """States s_i, contexts c_i and the readout t_i; see above.

    Parameters
    ----------
    width
        Width of embeddings, annotations, states and readout.
    depth
        Stacked GRUs.
    dropout
        Module applied to embeddings and readout.
    """

    def __init__(self, width: int, depth: int, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout
        self.start = nn.Linear(width // 2, depth * width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width)
        self.vector = nn.Parameter(torch.empty(width).normal_(std=width**-0.5))
        self.cells = nn.ModuleList(
            nn.GRUCell(2 * width if number == 0 else width, width) for number in range(depth)
        )
        self.readout = nn.Linear(3 * width, 2 * width)

    def first_states(self, memory: Tensor) -> Tensor:
        """Return s_0 of every GRU, (depth, batch, width), from the annotation ←h_1."""
        backward = memory[:, 0, memory.shape[2] // 2 :]
        states: Tensor = torch.tanh(self.start(backward))
        return states.view(memory.shape[0], len(self.cells), -1).transpose(0, 1)

    def attend(
        self, state: Tensor, keys: Tensor, memory: Tensor, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the context c_i, (batch, width), and the weights α_ij, (batch, source).

        One row of keys and memory may serve several consecutive rows of the state.
        """
        query = self.query(state).unflatten(0, (memory.shape[0], -1))  # (rows, shared, width)
        scores = torch.tanh(query[:, :, None] + keys[:, None]) @ self.vector
        if real is not None:
            scores = scores.masked_fill(~real[:, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)  # (rows, shared, source)
        return (weights @ memory).flatten(0, 1), weights.flatten(0, 1)

    def forward(
        self,
        inputs: Tensor,
        states: Tensor,
        keys: Tensor,
        memory: Tensor,
        real: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the readouts t_i, the last states and the attention weights.

        Parameters
        ----------
        inputs
            Embeddings of the target's tokens, shifted right, (batch, target, width).
        states
            Those before the first of them, (depth, batch, width).
        keys, memory
            U_a h_j and h_j, (rows, source, width).
        real
            Which annotations are not padding, (rows, source).
        """
        inputs = self.dropout(inputs)
        outputs, maps, state = [], [], list(states)
        for y in inputs.unbind(dim=1):
            context, weights = self.attend(state[0], keys, memory, real)
            x = torch.cat((y, context), dim=-1)
            for number, cell in enumerate(self.cells):
                x = state[number] = cell(x, state[number])
            outputs.append(torch.cat((x, y, context), dim=-1))
            maps.append(weights)
        pairs = self.readout(torch.stack(outputs, dim=1)).unflatten(-1, (-1, 2))
        return self.dropout(pairs.amax(dim=-1)), torch.stack(state), torch.stack(maps, dim=1)


class RecurrentEncoderDecoder(EncoderDecoder):
    """A recurrent encoder-decoder with additive attention, with the interface of the Transformer's.

    Its cache holds the states of the decoder in place of keys and values: one position.
    """

    encoder: RecurrentEncoder  # type: ignore[assignment]
    decoder: RecurrentDecoder  # type: ignore[assignment]

    def __init__(
        self,
        config: ModelConfig,
        source_tokens: Tokens | None,
        tokens: Tokens,
        head: TokenHead,
    ) -> None:
        depths = config.depths
        if config.width % 2 or config.depth < 1:
            raise ConfigError(
                "mixing=recurrent needs an even width, half of it for each direction, and a depth "
                f"of 1 or more: got width={config.width}, depth={config.depth}. Try 256 and 1."
            )
        drop = Dropout(config.dropout)
        encoder = RecurrentEncoder(config.width, depths["encoder"], drop)
        decoder = RecurrentDecoder(config.width, depths["decoder"], Dropout(config.dropout))
        super().__init__(config, source_tokens, tokens, encoder, decoder, head)  # type: ignore[arg-type]

    def sides(self) -> Iterator[tuple[Side, nn.Module]]:
        """Yield nothing: there is no stack of blocks."""
        yield from ()

    def cache(self, batch: int, length: int | None = None) -> Cache:
        """Return an empty cache for decoding a batch of targets; of any length, it is one state."""
        return Cache(
            depth=len(self.decoder.cells),
            batch=batch,
            heads=1,
            length=1,
            head_width=self.config.width,
            dtype=self.tokens.weight.dtype,  # type: ignore[arg-type]
            device=self.tokens.weight.device,  # type: ignore[arg-type]
            owner=self.cache_key,
        )

    def encode(
        self, source: Tensor, *, mask: Mask | None = None, maps: Maps | None = None
    ) -> Tensor:
        """Return the annotations, (batch, source, width)."""
        real = require_padding_only(self.input_mask(source, mask), "a recurrent encoder")
        return self.encoder((self.source_tokens or self.tokens)(source), real)

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
        """Return the readouts of the decoder, (batch, target, width).

        Parameters
        ----------
        target, memory, mask, memory_mask, cache, maps
            As for the Transformer's. The mask of the target changes nothing: padding at its end is
            read last.
        """
        check_decode(target, memory, memory_mask)
        check_cache(cache, self, len(self.decoder.cells))
        if cache is not None and 0 in cache.memory:
            keys, memory = cache.memory[0]
        else:
            keys = self.decoder.key(memory)
        if cache is None or not cache.used:
            states = self.decoder.first_states(memory)
            states = states.repeat_interleave(target.shape[0] // memory.shape[0], dim=1)
        else:
            states = cache.store[:, 0, :, 0, 0]
        real = require_padding_only(memory_mask, "a recurrent decoder")
        hidden, states, weights = self.decoder(self.tokens(target), states, keys, memory, real)
        if cache is not None:
            cache.memory[0] = keys, memory
            cache.store[:, 0, :, 0, 0], cache.used = states, 1
        if maps is not None:
            maps["decoder.0.memory"] = weights.detach()[:, None]
        return hidden
