"""Settings of decoding, checked once, and the length penalties that they choose from.

score(y) = log p(y) / penalty(length of y), where the end token counts as one of y.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real

import torch
from torch import Tensor

from addnorm.errors import InputError, choose
from addnorm.generate.samplers import SAMPLERS, Sampler


def by_length(length: float, alpha: float) -> float:
    """lengthᵅ: with alpha = 1 the score is the mean log-probability of a token (fairseq)."""
    return length**alpha


def by_gnmt(length: float, alpha: float) -> float:
    """((5 + length) / 6)ᵅ. Wu et al. 2016 (1609.08144), eq. 14; Vaswani et al. 2017 use alpha 0.6.

    It is 1 for a single token, and grows more slowly than lengthᵅ.
    """
    return ((5 + length) / 6) ** alpha


def no_penalty(length: float, alpha: float) -> float:
    """1: the score is the log-probability, which favours short outputs."""
    return 1.0


PENALTIES: dict[str, Callable[[float, float], float]] = {
    "length": by_length,
    "gnmt": by_gnmt,
    "none": no_penalty,
}
"""Length penalties: functions of the length and the exponent alpha."""

OUTPUT_LIMIT = 1_000_000
"""Most tokens of an output, besides a multiple of its source: some memory is reserved for each."""
MAX_BEAM = 1000
"""Most hypotheses of a sequence: memory and time grow with their number."""
_NUMBERS = (
    (Integral, "an integer", ("beam", "nbest", "seed", "batch_tokens", "read_ahead", "workers")),
    (Integral | None, "an integer or None", ("top_k",)),
    (Real, "a number", ("alpha", "temperature")),
    (Real | None, "a number or None", ("top_p",)),
)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings of `translate` and `generate`; the default is greedy decoding.

    Parameters
    ----------
    beam : Live hypotheses of each sequence; 1 decodes without beam search.
    nbest : Hypotheses that are returned for each sequence, at most `beam`.
    penalty : Length penalty: "length", "gnmt" or "none".
    alpha : Exponent of the length penalty, 0 or more.
    max_tokens : Most tokens of an output, its end token included: a number, or a pair
        (factor, constant) that means factor · length of the source or prompt + constant.
        Vaswani et al. 2017 (§6.1) use the length of the source + 50.
    keep_greedy : Keep the greedy path in the beam, so that no score is below that of greedy.
    stop_early : Stop beam search as soon as the result can no longer change.
    sampler : "greedy" takes the likeliest token, "sample" draws at random (only with beam=1).
    temperature : Divides the logits before sampling.
    top_k : Sample only from the k likeliest tokens.
    top_p : Sample only from the fewest likeliest tokens whose probabilities add up to p or more.
    seed : Random seed. Sequence i uses seed + i, so its tokens do not depend on its batch.
    batch_tokens : Most tokens, times beams, that are decoded in one batch.
    read_ahead : Sequences that are read and sorted by length before they are cut into batches.
    workers : Batches that are decoded at the same time, each by its share of torch's threads.
    scores : Compute the log-probabilities of tokens. Without, a greedy search need not add up the
        exponentials of all logits; its scores are NaN, and its tokens have none.

    >>> Decoding(beam=5, penalty="gnmt", alpha=0.6).limit(10)
    60
    """

    beam: int = 1
    nbest: int = 1
    penalty: str = "length"
    alpha: float = 1.0
    max_tokens: int | tuple[float, int] = (1.0, 50)
    keep_greedy: bool = True
    stop_early: bool = True
    sampler: str = "greedy"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    batch_tokens: int = 4096
    read_ahead: int = 1024
    workers: int = 1
    scores: bool = True

    def __post_init__(self) -> None:
        for kind, description, names in _NUMBERS:
            for name in names:
                if not isinstance(getattr(self, name), kind):
                    raise InputError(f"{name} must be {description}: got {getattr(self, name)!r}.")
        if not 1 <= self.nbest <= self.beam:
            raise InputError(
                f"nbest must be 1 or more, and at most beam: got nbest={self.nbest}, "
                f"beam={self.beam}. Try beam={max(self.nbest, 1)}."
            )
        if self.beam > MAX_BEAM:
            raise InputError(f"beam must be at most {MAX_BEAM:,}: got {self.beam:,}. Try 5.")
        if abs(self.seed) > 2**62:  # sequence i uses seed + i, which must fit into 64 bits
            raise InputError(f"seed must be at most 2**62: got {self.seed}. Try 0.")
        choose("penalty", self.penalty, PENALTIES)
        if not 0 <= self.alpha < inf:
            raise InputError(
                f"alpha must be 0 or more and finite: got {self.alpha}. Try 1.0, or 0.6 with "
                "penalty='gnmt'."
            )
        self._check_max_tokens()
        self.make_sampler()
        if self.beam > 1 and self.sampler != "greedy":
            raise InputError(
                f"beam search needs sampler='greedy': got beam={self.beam}, "
                f"sampler={self.sampler!r}. Try beam=1."
            )
        for name in ("batch_tokens", "read_ahead", "workers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be 1 or more: got {getattr(self, name)}.")

    def _check_max_tokens(self) -> None:
        value = self.max_tokens
        pair = value if isinstance(value, tuple) else (0.0, value)
        valid = len(pair) == 2 and all(map(isinstance, pair, (Real, Integral)))
        if not (valid and 0 <= pair[0] < inf and self.limit(1) >= 1):
            raise InputError(
                "max_tokens must be an integer, or a pair (factor, integer), that allows 1 token "
                f"or more for every source: got {value!r}. Try 100, or (1.0, 50) for the length "
                "of the source and 50 more."
            )

        if pair[1] > OUTPUT_LIMIT:
            raise InputError(
                f"max_tokens must be at most {OUTPUT_LIMIT:,}: got {pair[1]:,}. Generate a long "
                "text in parts: pass the end of each part as the next prompt."
            )

    def limit(self, length: int) -> int:
        """Return the most tokens of an output whose source or prompt has `length` tokens."""
        if isinstance(self.max_tokens, tuple):
            factor, constant = self.max_tokens
            return int(factor * length + constant)
        return self.max_tokens

    def make_sampler(self) -> Sampler:
        """Return the function that picks the next token of each row."""
        kind = choose("sampler", self.sampler, SAMPLERS)
        return kind(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def penalties(self, longest: int) -> Tensor:
        """Return the penalty of every length from 0 to `longest`: (longest + 1,), float64.

        >>> Decoding(penalty="gnmt").penalties(7).tolist()[1::6]
        [1.0, 2.0]
        """
        penalty = PENALTIES[self.penalty]
        values = [1.0, *(penalty(length, self.alpha) for length in range(1, longest + 1))]
        return torch.tensor(values, dtype=torch.float64)


def raise_beam(beam: int, nbest: int) -> int:
    """Return the beam, raised to `nbest` if it is smaller; `Decoding` refuses what is no beam.

    >>> raise_beam(2, 4), raise_beam(5, 4), raise_beam(0, 4)
    (4, 5, 0)
    """
    are_numbers = isinstance(beam, int) and isinstance(nbest, int)
    return max(beam, nbest) if are_numbers and beam > 0 else beam
