"""One output of a model with its log-probabilities, and the scores by which outputs are ranked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from addnorm.errors import InputError, choose


@dataclass(frozen=True)
class Hypothesis:
    """A sequence of tokens that a model may answer with."""

    tokens: tuple[int, ...]
    """Without the begin and end tokens."""
    score: float
    """The log-probability divided by the length penalty; greater is better."""
    log_probability: float
    """The sum of the log-probabilities."""
    log_probabilities: tuple[float, ...]
    """Of each token under the model's own distribution, the end token included if it came."""
    finished: bool
    """False if the limit of the length cut it short."""


Penalty = Callable[[float, float], float]
"""What the log-probability of so many tokens is divided by, given the exponent alpha."""


def by_length(length: float, alpha: float) -> float:
    """lengthᵅ: with alpha = 1 the score is the mean log-probability of a token (fairseq)."""
    return length**alpha


def by_gnmt(length: float, alpha: float) -> float:
    """((5 + length) / 6)ᵅ. Wu et al. 2016 (1609.08144), eq. 14; Vaswani et al. 2017 use alpha 0.6.

    It is 1 for a single token, and milder than lengthᵅ.
    """
    return ((5 + length) / 6) ** alpha


def by_nothing(length: float, alpha: float) -> float:
    """1: the score is the log-probability itself, which favours short outputs."""
    return 1.0


PENALTIES: dict[str, Penalty] = {"length": by_length, "gnmt": by_gnmt, "none": by_nothing}


def penalties(name: str, alpha: float, longest: int) -> Tensor:
    """The penalty of every length up to the longest, by length; the end token counts.

    >>> penalties("gnmt", 1.0, 7).tolist()[1::6]
    [1.0, 2.0]
    """
    penalty = choose("penalty", name, PENALTIES)
    if not 0 <= alpha < float("inf"):
        raise InputError(f"alpha must be 0 or more: got {alpha}. Try 1.0, or 0.6 with gnmt.")
    values = [1.0, *(penalty(length, alpha) for length in range(1, longest + 1))]
    return torch.tensor(values, dtype=torch.float64)
