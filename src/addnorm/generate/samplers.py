"""From logits to the next token: greedy, or drawn at random from all or the likeliest of them.

A draw is made from one uniform number u by inverting the distribution function: the token is the
first at which p_1 + ... + p_i > u. Each sequence has numbers of its own, made from its own seed, so
what it draws does not depend on the batch that it is decoded in.

Shapes: logits (rows, vocab); u (rows,); tokens (rows,).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from addnorm.errors import InputError, choose

NUCLEUS = 256
"""Tokens that are sorted first in search of a nucleus; all of them only if these fall short."""
BLOCK = 128
"""Values whose maximum stands for them in the search for the best of many."""


def best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The greatest values of each row and their places, greatest first, equal ones by place.

    torch.topk leaves open which of equal values it takes, and in which order. In a long row it is
    also slow: the greatest k values lie in the k blocks whose maxima are greatest, so only those
    need be looked at.

    >>> best(torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]]), 3)[1].tolist()
    [[1, 3, 2]]
    """
    if values.shape[1] > 4 * BLOCK * count:
        kept, places = _best_blocks(values, count)
        top, inner = best(kept, count)
        return top, places.gather(1, inner)
    top, places = values.topk(min(count + 1, values.shape[1]), dim=1)
    if count < top.shape[1] and bool((top[:, count - 1] == top[:, count]).any()):
        # Equal values on both sides of the cut: rare, so the whole row may be sorted.
        top, places = values.sort(dim=1, descending=True, stable=True)
    top, places = top[:, :count], places[:, :count]
    if bool((top[:, :-1] > top[:, 1:]).all()):
        return top, places
    places, order = places.sort(dim=1)
    top, again = top.gather(1, order).sort(dim=1, descending=True, stable=True)
    return top, places.gather(1, again)


def _best_blocks(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The blocks of each row that hold its greatest values, in order, and their places."""
    size = values.shape[1]
    whole = size - size % BLOCK
    maxima = values[:, :whole].view(len(values), -1, BLOCK).amax(dim=2)
    if whole < size:
        maxima = torch.cat((maxima, values[:, whole:].amax(dim=1, keepdim=True)), dim=1)
    blocks = best(maxima, count)[1].sort(dim=1).values
    places = blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=values.device)
    places = places.flatten(1)
    kept = values.gather(1, places.clamp(max=size - 1))
    if whole < size:
        kept = kept.masked_fill(places >= size, float("-inf"))
    return kept, places.clamp(max=size - 1)


def keep_all(logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """The logits as they are: no places means every place in turn."""
    return logits, None


def keep_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens, likeliest first. Fan, Lewis, Dauphin 2018 (1805.04833), §5."""
    return best(logits, min(k, logits.shape[-1]))


def keep_top_p(logits: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The nucleus: the fewest likeliest tokens whose probabilities add up to p or more.

    Holtzman et al. 2020 (1904.09751), §3.1. Places past a row's nucleus hold −∞.
    """
    size = logits.shape[-1]
    total = logits.double().logsumexp(dim=-1, keepdim=True)
    for count in (min(NUCLEUS, size), size):
        top, places = best(logits, count)
        reached = (top.double() - total).exp().cumsum(dim=-1)
        if bool((reached[:, -1] >= p).all()):
            break
    # A token is in the nucleus if those before it fall short of p.
    short = torch.nn.functional.pad(reached[:, :-1], (1, 0)) < p
    return top.masked_fill(~short, float("-inf")), places


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """A place of each row, drawn with probability softmax(logits)."""
    reached = logits.double().softmax(dim=-1).cumsum(dim=-1)
    whole = reached[:, -1:]
    # Rounding must not carry u past the last token that is possible at all.
    wanted = torch.minimum(uniform[:, None] * whole, whole.nextafter(whole.new_zeros(())))
    return torch.searchsorted(reached, wanted, right=True).squeeze(1)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Draws from softmax(logits / temperature), from the top k of it, or the nucleus of that."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise InputError(
                f"temperature must be above 0: got {self.temperature}. "
                "For the likeliest token use sampler='greedy'."
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be 1 or more: got {self.top_k}. Try 40.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1: got {self.top_p}. Try 0.9.")

    def support(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of the tokens that may be drawn, and which they are: all, if it does not say."""
        kept, places = keep_all(logits / self.temperature)
        if self.top_k is not None:
            kept, places = keep_top_k(kept, self.top_k)
        if self.top_p is not None:
            kept, inner = keep_top_p(kept, self.top_p)
            places = inner if places is None else places.gather(-1, inner)
        return kept, places

    def __call__(self, logits: Tensor, uniform: Tensor) -> Tensor:
        kept, places = self.support(logits)
        drawn = draw(kept, uniform)
        return drawn if places is None else places.gather(-1, drawn[:, None]).squeeze(1)


class Greedy(Sampler):
    """Takes the likeliest token; of equal ones the first."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p"):
            given, default = getattr(self, name), getattr(Sampler, name)
            if given != default:
                raise InputError(
                    f"{name} does nothing with sampler='greedy': got {given}. Try sampler='sample'."
                )

    def __call__(self, logits: Tensor, uniform: Tensor) -> Tensor:
        return best(logits, 1)[1].squeeze(1)


SAMPLERS: dict[str, Callable[..., Sampler]] = {"greedy": Greedy, "sample": Sampler}


def make_sampler(
    name: str, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Sampler:
    """The sampler of this name with its settings; they act in the order in which they stand here.

    >>> make_sampler("sample", top_k=2)(torch.tensor([[0.0, 9.0, 8.0]]), torch.tensor([0.9]))
    tensor([2])
    """
    kind = choose("sampler", name, SAMPLERS)
    return kind(temperature=temperature, top_k=top_k, top_p=top_p)


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """So many numbers in [0, 1) for each sequence, from its own seed: (sequences, count)."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(count, generator=generator, dtype=torch.float64))
    return torch.stack(rows)
