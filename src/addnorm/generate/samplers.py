"""From logits to the next token: the likeliest, or one sampled from all or the likeliest tokens.

A token is sampled from one uniform number u by inverting the distribution function: it is the first
at which p_1 + ... + p_i > u. Each sequence has its own uniform numbers, from its own seed, so its
tokens do not depend on the batch that it is decoded in.

Shapes: logits (rows, vocab); u (rows,); tokens (rows,).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from addnorm.errors import InputError

NUCLEUS = 256
"""Tokens that are sorted first to find a nucleus; all are sorted only if these are too few."""
BLOCK = 128
"""Values of a long row that are represented by their maximum while the greatest are searched."""


def top_values(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the greatest values of each row and their indices, greatest first, ties by index.

    torch.topk does not specify which of equal values it returns, nor their order. It is also slow
    in a long row: the greatest k values lie in the k blocks with the greatest maxima, so only those
    blocks are searched.

    >>> top_values(torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]]), 3)[1].tolist()
    [[1, 3, 2]]
    """
    if values.shape[1] > 4 * BLOCK * count:
        candidates, indices = _top_blocks(values, count)
        top, inner = top_values(candidates, count)
        return top, indices.gather(1, inner)
    top, indices = values.topk(min(count + 1, values.shape[1]), dim=1)
    if count < top.shape[1] and bool((top[:, count - 1] == top[:, count]).any()):
        # Equal values on both sides of the cut: rare, so the whole row may be sorted.
        top, indices = values.sort(dim=1, descending=True, stable=True)
    top, indices = top[:, :count], indices[:, :count]
    if bool((top[:, :-1] > top[:, 1:]).all()):
        return top, indices
    indices, order = indices.sort(dim=1)
    top, order = top.gather(1, order).sort(dim=1, descending=True, stable=True)
    return top, indices.gather(1, order)


def _top_blocks(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the values of the blocks with the greatest maxima, and their indices, in order."""
    size = values.shape[1]
    whole = size - size % BLOCK
    maxima = values[:, :whole].view(len(values), -1, BLOCK).amax(dim=2)
    if whole < size:
        maxima = torch.cat((maxima, values[:, whole:].amax(dim=1, keepdim=True)), dim=1)
    blocks = top_values(maxima, count)[1].sort(dim=1).values
    indices = blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=values.device)
    indices = indices.flatten(1)
    candidates = values.gather(1, indices.clamp(max=size - 1))
    if whole < size:
        candidates = candidates.masked_fill(indices >= size, float("-inf"))
    return candidates, indices.clamp(max=size - 1)


def top_k_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the logits and ids of the k likeliest tokens, likeliest first.

    Fan, Lewis, Dauphin 2018 (1805.04833), §5.
    """
    return top_values(logits, min(k, logits.shape[-1]))


def top_p_tokens(logits: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return the nucleus: the fewest likeliest tokens whose probabilities add up to p or more.

    Holtzman et al. 2020 (1904.09751), §3.1. Logits and ids, likeliest first; logits outside the
    nucleus of a row are −∞.
    """
    size = logits.shape[-1]
    log_total = logits.double().logsumexp(dim=-1, keepdim=True)
    for count in (min(NUCLEUS, size), size):
        top, tokens = top_values(logits, count)
        cumulative = (top.double() - log_total).exp().cumsum(dim=-1)
        if bool((cumulative[:, -1] >= p).all()):
            break
    # A token is in the nucleus if the sum of those before it is below p.
    inside = torch.nn.functional.pad(cumulative[:, :-1], (1, 0)) < p
    return top.masked_fill(~inside, float("-inf")), tokens


def sample_index(logits: Tensor, uniform: Tensor) -> Tensor:
    """Return an index of each row, sampled with probability softmax(logits)."""
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not carry u past the last token with a probability above 0.
    threshold = torch.minimum(uniform[:, None] * total, total.nextafter(total.new_zeros(())))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-6, 1e6
"""Between these, logits divided by the temperature stay finite, and −∞ stays −∞, in float32."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Samples from softmax(logits / temperature), cut to the top k of it and the nucleus of that.

    Called with logits and uniform numbers; returns the token of each row.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise InputError(
                f"temperature must be above 0 and finite: got {self.temperature}. "
                "For the likeliest token use sampler='greedy'."
            )
        if self.temperature < LOWEST_TEMPERATURE:
            raise InputError(
                f"temperature must be {LOWEST_TEMPERATURE:g} or more, so that logits stay finite: "
                f"got {self.temperature:g}. For the likeliest token use sampler='greedy' "
                "(--temperature 0)."
            )
        if self.temperature > HIGHEST_TEMPERATURE:
            raise InputError(
                f"temperature must be at most {HIGHEST_TEMPERATURE:g}: got {self.temperature:g}. "
                "At 10 most tokens are already about equally likely."
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be 1 or more: got {self.top_k}. Try 40.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1: got {self.top_p}. Try 0.9.")

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the tokens to sample from, and their ids, or None for all."""
        logits, tokens = logits / self.temperature, None
        if self.top_k is not None:
            logits, tokens = top_k_tokens(logits, self.top_k)
        if self.top_p is not None:
            logits, inner = top_p_tokens(logits, self.top_p)
            tokens = inner if tokens is None else tokens.gather(-1, inner)
        return logits, tokens

    def __call__(self, logits: Tensor, uniform: Tensor) -> Tensor:
        candidates, tokens = self.candidates(logits)
        index = sample_index(candidates, uniform)
        return index if tokens is None else tokens.gather(-1, index[:, None]).squeeze(1)


class Greedy(Sampler):
    """Takes the likeliest token; the first of equally likely ones."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p"):
            value, default = getattr(self, name), getattr(Sampler, name)
            if value != default:
                raise InputError(
                    f"{name} has no effect with sampler='greedy': got {value}. "
                    "Try sampler='sample'."
                )

    def __call__(self, logits: Tensor, uniform: Tensor) -> Tensor:
        return top_values(logits, 1)[1].squeeze(1)


SAMPLERS: dict[str, Callable[..., Sampler]] = {"greedy": Greedy, "sample": Sampler}


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Return `count` numbers in [0, 1) for each sequence, from its own seed: (sequences, count)."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(count, generator=generator, dtype=torch.float64))
    return torch.stack(rows)
