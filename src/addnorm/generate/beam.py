"""Beam search: at every length the likeliest few beginnings, and apart from them what has ended.

    total(y) = Σ_t log p(y_t | y_<t)          score(y) = total(y) / penalty(length of y)

A step extends every live beam of a sentence by every token. What is extended by the end token
leaves the beam and joins the ended, of which the `nbest` with the greatest scores are kept; of all
the others the `beam` with the greatest totals live on. (The common rule lets an ending join only if
it ranks among those that live on; here every one may, so that the best score can only be higher.)

Shapes: totals (sentences, beams); logits (sentences · beams, vocab).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.generate.hypothesis import Hypothesis, penalties
from addnorm.generate.loop import SPARE, Rules, ban_, log_total
from addnorm.generate.samplers import best
from addnorm.generate.steps import Steps

SCORE, TOTAL, LENGTH, BEAM, ENDING, FINISHED = range(6)
"""Columns of the ended. ENDING is the end token's log-probability, NaN where none was taken."""


@dataclass(frozen=True, kw_only=True)
class BeamRules(Rules):
    """What is searched for, and how widely."""

    beam: int = 5
    nbest: int = 1
    keep_greedy: bool = True
    early: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.nbest <= self.beam:
            raise InputError(
                f"nbest must be 1 or more, and at most beam: got nbest={self.nbest}, "
                f"beam={self.beam}. Try beam={max(self.nbest, 1)}."
            )


@torch.inference_mode()
def search(
    steps: Steps, newest: Tensor, limits: list[int], rules: BeamRules
) -> list[list[Hypothesis]]:
    """The best hypotheses of each sentence, best first.

    `newest` are the tokens that each begins with, (sentences, 1 or more); `limits` the most tokens
    that each may get, its end token included.
    """
    beams = Beams(limits, rules, newest.device)
    while len(beams.sentences):
        newest, index, groups = beams.extend(steps.step(newest))
        if len(beams.sentences):
            steps.reorder(index, groups)
    return beams.hypotheses()


class Beams:
    """The live beams of the sentences at work, what has ended, and how each beam came about.

    **Why it may stop early.** No log-probability is above 0, so a live beam of total s can only end
    with a total of at most s, at a length of at most its sentence's limit L. The penalty does not
    shrink with the length, and s is not above 0, so the score will be at most s / penalty(L). Once
    `nbest` have ended and the worst of them scores at least that for the greatest live s, no live
    beam can replace it: to go on would change nothing.

    **Greedy.** With `keep_greedy` the path of likeliest tokens has a place in the beam, if need be
    the last one's, until it ends: so the best score is never below that of greedy decoding.
    """

    def __init__(self, limits: list[int], rules: BeamRules, device: torch.device) -> None:
        count = len(limits)
        self.rules, self.length = rules, 0
        self.penalties = penalties(rules.penalty, rules.alpha, max(limits)).to(device)
        self.sentences = torch.arange(count, device=device)
        self.limits = torch.tensor(limits, device=device)
        self.totals = torch.zeros(count, 1, dtype=torch.float64, device=device)
        self.greedy = torch.full((count,), 0 if rules.keep_greedy else -1, device=device)
        self.over = torch.zeros(count, dtype=torch.bool, device=device)
        self.ended = self.totals.new_full((count, rules.nbest, 6), float("-inf"))
        self.results = self.ended.clone()
        self.trace: list[tuple[list[list[int]], list[list[int]], list[list[float]]]] = []

    def extend(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """One token more: the newest tokens, the rows that they continue, the groups that are left.

        Shapes: (rows, 1), (rows,) and (sentences,), or None if every sentence is left.
        """
        self.length += 1
        last, forced = self.limits == self.length, self.rules.forced
        ending, gains, tokens = self.read(logits)
        ends = self.prefers_end(ending, gains[:, :, 0], tokens[:, :, 0])
        finished = ends | ~last[:, None] | (not forced)
        self.collect(self.totals + ending, ending, finished, ~self.over)
        rows = torch.arange(len(last), device=logits.device)[:, None] * gains.shape[1]
        parents, tokens, gains = self.choose(gains, tokens, ends)
        self.record(parents, tokens, gains)
        if not forced and bool(last.any()):
            none = torch.full_like(self.totals, float("nan"))
            self.collect(self.totals, none, none > 0, last)
        self.over = self.over | last
        if self.rules.early:
            self.over = self.over | self.settled()
        left = self.remove()
        if left is not None:
            rows, parents, tokens = rows[left], parents[left], tokens[left]
        return tokens.view(-1, 1), (rows + parents).flatten(), left

    def prefers_end(self, ending: Tensor, top: Tensor, first: Tensor) -> Tensor:
        """Whether the end token is the likeliest of all; of equal ones the first in the vocabulary.

        Shapes: (sentences, beams), for the end, and for the likeliest other and its id.
        """
        if self.rules.end is None:
            return torch.zeros_like(first, dtype=torch.bool)
        return (ending > top) | ((ending == top) & (first > self.rules.end))

    def read(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the end token, and of the likeliest others with their ids.

        The vocabulary is sorted row by row, and only the best of each row meet those of the other
        beams. Shapes: (sentences, beams), (sentences, beams, kept) twice.
        """
        end, banned = self.rules.end, self.rules.banned
        total = log_total(logits)
        ending = torch.full_like(total, float("-inf"))
        if end is not None:
            ending = logits[:, end : end + 1] - total
            banned = (*banned, end)
        ban_(logits, banned)
        kept = max(1, min(self.rules.beam, logits.shape[1] - len(set(banned))))
        values, tokens = best(logits, kept)
        shape = (*self.totals.shape, kept)
        gains = (values - total).double().clamp(max=0)  # rounding may not make it positive
        return ending.double().clamp(max=0).view(shape[:2]), gains.view(shape), tokens.view(shape)

    def collect(self, totals: Tensor, ending: Tensor, finished: Tensor, which: Tensor) -> None:
        """Let the beams of some sentences join the ended, of which the best are kept.

        Shapes: (sentences, beams) thrice, (sentences,). Of equal scores the earlier ended is first.
        """
        scores = (totals / self.penalties[self.length]).masked_fill(~which[:, None], float("-inf"))
        places = torch.arange(totals.shape[1], device=totals.device).expand_as(totals)
        lengths = torch.full_like(totals, self.length)
        columns = (scores, totals, lengths, places.double(), ending, finished.double())
        joined = torch.cat((self.ended, torch.stack(columns, dim=-1)), dim=1)
        order = joined[:, :, SCORE].sort(dim=1, descending=True, stable=True).indices
        order = order[:, : self.rules.nbest, None].expand(-1, -1, 6)
        self.ended = joined.gather(1, order)

    def choose(self, gains: Tensor, tokens: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which extensions live on: their parents, tokens and log-probabilities."""
        width, kept = gains.shape[1:]
        totals = (self.totals[:, :, None] + gains).flatten(1)
        order = best(totals, min(self.rules.beam, width * kept))[1]
        if self.rules.keep_greedy:
            # The greedy beam's likeliest extension is its first, at greedy · kept.
            goes_on = (self.greedy >= 0) & ~ends.gather(1, self.greedy.clamp(min=0)[:, None])[:, 0]
            wanted = self.greedy * kept
            lost = goes_on & ~(order == wanted[:, None]).any(dim=1)
            order[:, -1] = torch.where(lost, wanted, order[:, -1])
        if width == order.shape[1]:
            order = order.gather(1, seat(order // kept))
        if self.rules.keep_greedy:
            found = (order == wanted[:, None]).int().argmax(dim=1)
            self.greedy = torch.where(goes_on, found, -1)
        self.totals = totals.gather(1, order)
        tokens, gains = (part.flatten(1).gather(1, order) for part in (tokens, gains))
        return order // kept, tokens, gains

    def record(self, parents: Tensor, tokens: Tensor, gains: Tensor) -> None:
        """Remember how the beams of this length came about, for every sentence there ever was."""
        count = len(self.results)
        if len(self.sentences) < count:
            shape = (count, parents.shape[1])
            parents, tokens, gains = (
                part.new_zeros(shape).index_copy_(0, self.sentences, part)
                for part in (parents, tokens, gains)
            )
        self.trace.append((parents.tolist(), tokens.tolist(), gains.tolist()))

    def settled(self) -> Tensor:
        """Whether no live beam of a sentence can replace one of its ended: see the class."""
        most = self.totals.amax(dim=1) / self.penalties[self.limits]
        return self.ended[:, -1, SCORE] >= most

    def remove(self) -> Tensor | None:
        """Remove the sentences that are over, if they are many: those that are left, or None."""
        if int(self.over.sum()) * SPARE < len(self.over):
            return None
        self.results[self.sentences[self.over]] = self.ended[self.over]
        left = (~self.over).nonzero().squeeze(1)
        self.sentences, self.limits = self.sentences[left], self.limits[left]
        self.totals, self.greedy = self.totals[left], self.greedy[left]
        self.ended, self.over = self.ended[left], self.over[left]
        return left

    def hypotheses(self) -> list[list[Hypothesis]]:
        """The results of all sentences."""
        return [
            [self.walk(sentence, row) for row in rows if row[SCORE] > float("-inf")]
            for sentence, rows in enumerate(self.results.tolist())
        ]

    def walk(self, sentence: int, row: list[float]) -> Hypothesis:
        """Go back along the beams from an ended one, and gather its tokens."""
        ended = row[ENDING] == row[ENDING]
        place = int(row[BEAM])
        tokens: list[int] = []
        gains = [row[ENDING]] if ended else []
        for step in reversed(range(int(row[LENGTH]) - (1 if ended else 0))):
            parents, taken, gained = self.trace[step]
            tokens.append(taken[sentence][place])
            gains.append(gained[sentence][place])
            place = parents[sentence][place]
        return Hypothesis(
            tokens=tuple(reversed(tokens)),
            score=row[SCORE],
            log_probability=row[TOTAL],
            log_probabilities=tuple(reversed(gains)),
            finished=bool(row[FINISHED]),
        )


def seat(parents: Tensor) -> Tensor:
    """An order in which each beam that lives on stands where its parent stood, if it can.

    The first child of a parent takes its place, and the others those of parents without children:
    then only as many rows of the cache are copied as there are such parents. Both (sentences,
    beams).

    >>> seat(torch.tensor([[2, 0, 2]])).tolist()
    [[1, 2, 0]]
    """
    orders = []
    for row in parents.tolist():
        seats = [-1] * len(row)
        rest = []
        for child, parent in enumerate(row):
            if seats[parent] < 0:
                seats[parent] = child
            else:
                rest.append(child)
        others = iter(rest)
        orders.append([next(others) if child < 0 else child for child in seats])
    return torch.tensor(orders, device=parents.device)
