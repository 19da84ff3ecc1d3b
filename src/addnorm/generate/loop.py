"""The token loop: each sequence takes one token at a time until it ends or reaches its limit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.generate.hypothesis import Hypothesis, penalties
from addnorm.generate.samplers import Sampler
from addnorm.generate.steps import Steps

SPARE = 8
"""Rows that are over are removed once they are one in so many: moving the others costs too."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a sequence ends, what it may not hold, and how its score is made."""

    end: int | None = None
    """The token that ends a sequence, if there is one."""
    banned: tuple[int, ...] = ()
    """Tokens that are never taken, whatever probability the model gives them."""
    closed: bool = True
    """Whether a sequence must end at its limit: then the end token is its last, likely or not."""
    penalty: str = "length"
    alpha: float = 1.0

    def __post_init__(self) -> None:
        penalties(self.penalty, self.alpha, 1)

    @property
    def forced(self) -> bool:
        return self.closed and self.end is not None


def log_total(logits: Tensor) -> Tensor:
    """log Σ exp of the logits of each row: (rows, 1). A log-probability is a logit less this."""
    # A few rows at a time, which stay in the processor's cache from one pass to the next.
    parts = [rows.logsumexp(dim=1, keepdim=True) for rows in torch.split(logits, 4)]
    total = torch.cat(parts)
    if not bool(total.isfinite().all()):
        row = int((~total.isfinite()).nonzero()[0, 0])
        raise InputError(
            f"a model must give finite logits to decode with: got a total of {float(total[row])}. "
            "Check its weights for NaN: training may have diverged."
        )
    return total


def ban_(logits: Tensor, tokens: tuple[int, ...]) -> None:
    """Make it impossible to take these tokens; the log-probabilities of the others stay."""
    for token in tokens:
        logits[:, token] = float("-inf")


@torch.inference_mode()
def follow(
    steps: Steps, newest: Tensor, limits: list[int], rules: Rules, sampler: Sampler, draws: Tensor
) -> list[Hypothesis]:
    """One hypothesis for each sequence, its tokens picked by the sampler.

    `newest` are the tokens that each begins with, (sequences, 1 or more); `limits` the most tokens
    that each may get, its end token included; `draws` numbers in [0, 1) to pick by, (sequences,
    tokens).
    """
    progress = Progress(limits, newest.device)
    while len(progress.rows):
        logits = steps.step(newest)
        total = log_total(logits)
        ban_(logits, rules.banned)
        picked = sampler(logits, draws[progress.rows, progress.length])
        taken = picked
        if rules.forced:
            taken = torch.where(progress.at_limit(), rules.end or 0, picked)
        progress.add(taken, logits.gather(1, taken[:, None]) - total, picked == _id(rules.end))
        left = progress.remove()
        if left is not None and len(left):
            steps.reorder(left, left)
            taken = taken.index_select(0, left)
        newest = taken[:, None]
    return progress.hypotheses(rules)


def _id(token: int | None) -> int:
    """A token id to compare with; no token has −1."""
    return -1 if token is None else token


class Progress:
    """What each sequence has taken so far; `rows` are the sequences still at work."""

    def __init__(self, limits: list[int], device: torch.device) -> None:
        count, longest = len(limits), max(limits)
        self.length = 0
        self.rows = torch.arange(count, device=device)
        self.over = torch.zeros(count, dtype=torch.bool, device=device)
        self.limits = torch.tensor(limits, device=device)
        self.lengths = self.limits.clone()
        self.finished = self.over.clone()
        self.tokens = torch.zeros(count, longest, dtype=torch.long, device=device)
        self.gains = torch.zeros(count, longest, dtype=torch.float64, device=device)

    def at_limit(self) -> Tensor:
        """Whether the next token is a sequence's last: (rows,)."""
        return self.limits[self.rows] <= self.length + 1

    def add(self, taken: Tensor, gain: Tensor, ends: Tensor) -> None:
        """One more token of every row, its log-probability, and whether the sequence ends by it."""
        stops = (ends | self.at_limit()) & ~self.over
        stopped = self.rows[stops]
        self.tokens[self.rows, self.length] = taken
        self.gains[self.rows, self.length] = gain.squeeze(1).double().clamp(max=0)
        self.length += 1
        self.lengths[stopped] = self.length
        self.finished[stopped] = ends[stops]
        self.over = self.over | stops

    def remove(self) -> Tensor | None:
        """Leave out the rows that are over, if they are many: the rows that are left, or None."""
        if int(self.over.sum()) * SPARE < len(self.over):
            return None
        left = (~self.over).nonzero().squeeze(1)
        self.rows, self.over = self.rows[left], self.over[left]
        return left

    def hypotheses(self, rules: Rules) -> list[Hypothesis]:
        divisors = penalties(rules.penalty, rules.alpha, self.tokens.shape[1]).tolist()
        made = []
        for tokens, gains, length, finished in zip(
            self.tokens.tolist(),
            self.gains.tolist(),
            self.lengths.tolist(),
            self.finished.tolist(),
            strict=True,
        ):
            ended = finished or rules.forced
            total = sum(gains[:length])
            made.append(
                Hypothesis(
                    tokens=tuple(tokens[: length - 1 if ended else length]),
                    score=total / divisors[length],
                    log_probability=total,
                    log_probabilities=tuple(gains[:length]),
                    finished=finished,
                )
            )
        return made
