"""Naive decoding: no cache, no batch, no beam; every sequence is computed in full."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

BEGIN, END = 1, 2
LogProbs = Callable[[Sequence[int]], Tensor]
"""From the tokens so far to the log-probabilities of the next, (vocab,)."""


def translation_log_probs(model: Any, source: Sequence[int], begin: int = BEGIN) -> LogProbs:
    """Return the next-token log-probabilities of an encoder-decoder, computed in full each time."""

    @torch.inference_mode()
    def run(tokens: Sequence[int]) -> Tensor:
        logits = model(torch.tensor([list(source)]), torch.tensor([[begin, *tokens]]))
        return logits[0, -1].log_softmax(dim=-1)

    return run


def continuation_log_probs(model: Any, prompt: Sequence[int]) -> LogProbs:
    @torch.inference_mode()
    def run(tokens: Sequence[int]) -> Tensor:
        return model(torch.tensor([[*prompt, *tokens]]))[0, -1].log_softmax(dim=-1)

    return run


def divisor(length: int, penalty: str, alpha: float) -> float:
    return {"length": length**alpha, "gnmt": ((5 + length) / 6) ** alpha, "none": 1.0}[penalty]


@dataclass(frozen=True)
class Expected:
    tokens: tuple[int, ...]
    steps: tuple[float, ...]
    score: float


def greedy(
    next_log_probs: LogProbs,
    limit: int,
    end: int | None = END,
    banned: Sequence[int] = (),
    closed: bool = True,
    penalty: str = "length",
    alpha: float = 1.0,
) -> tuple[Expected, bool]:
    """Return the likeliest token at every step; with `closed`, the end token at the limit."""
    tokens: list[int] = []
    steps: list[float] = []
    for length in range(1, limit + 1):
        log_probs = next_log_probs(tokens)
        allowed = log_probs.clone()
        allowed[list(banned)] = float("-inf")
        likeliest = int(allowed.argmax())
        token = end if closed and length == limit and end is not None else likeliest
        steps.append(float(log_probs[token]))
        if token == end:
            break
        tokens.append(token)
    score = sum(steps) / divisor(len(steps), penalty, alpha)
    return Expected(tuple(tokens), tuple(steps), score), end is not None and likeliest == end


def all_outputs(
    next_log_probs: LogProbs,
    vocab: int,
    limit: int,
    end: int | None = END,
    banned: Sequence[int] = (),
    closed: bool = True,
    penalty: str = "length",
    alpha: float = 1.0,
) -> list[Expected]:
    """Return all possible outputs, best first."""
    inner = [token for token in range(vocab) if token not in (*banned, end)]
    cached_log_probs: dict[tuple[int, ...], Tensor] = {}

    def log_probs_after(tokens: tuple[int, ...]) -> Tensor:
        if tokens not in cached_log_probs:
            cached_log_probs[tokens] = next_log_probs(tokens)
        return cached_log_probs[tokens]

    def steps(whole: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(float(log_probs_after(whole[:i])[token]) for i, token in enumerate(whole))

    expected = []
    for whole in _complete_outputs(inner, limit, end, closed):
        parts = steps(whole)
        tokens = whole[:-1] if whole[-1] == end else whole
        expected.append(Expected(tokens, parts, sum(parts) / divisor(len(parts), penalty, alpha)))
    return sorted(expected, key=lambda item: -item.score)


def _complete_outputs(
    inner: list[int], limit: int, end: int | None, closed: bool
) -> Iterator[tuple[int, ...]]:
    if end is not None:
        for length in range(limit):
            for tokens in product(inner, repeat=length):
                yield (*tokens, end)
    if end is None or not closed:
        yield from product(inner, repeat=limit)


class Oracle:
    """A random language: its logits are a fixed random function of the tokens so far.

    It replaces the model in the tests of the search; `step_rows` has the rows of each step.
    """

    def __init__(self, seed: int, vocab: int, sharp: float = 1.5, peak: int | None = None) -> None:
        self.seed, self.vocab, self.sharp, self.peak = seed, vocab, sharp, peak
        self.ids = torch.zeros(0, 0, dtype=torch.long)
        self.step_rows: list[int] = []

    def logits(self, tokens: Sequence[int]) -> Tensor:
        key = hash((self.seed, *tokens)) % 2**31
        drawn = torch.randn(
            self.vocab, generator=torch.Generator().manual_seed(key), dtype=torch.float64
        )
        drawn = drawn * self.sharp
        if self.peak is not None:
            drawn[self.peak] += 2.0
        return drawn

    def log_probs(self, tokens: Sequence[int]) -> Tensor:
        return self.logits(tokens).log_softmax(dim=-1)

    def step(self, newest: Tensor) -> Tensor:
        self.ids = torch.cat((self.ids, newest), dim=1) if self.ids.numel() else newest
        self.step_rows.append(len(newest))
        return torch.stack([self.logits(row[1:]) for row in self.ids.tolist()])

    def reorder(self, index: Tensor, groups: Tensor | None) -> None:
        self.ids = self.ids.index_select(0, index)
