"""Decoding one batch: greedy and sampled tokens, and beam search.

    total(y) = Σ_t log p(y_t | y_<t)          score(y) = total(y) / penalty(length of y)

**Beam search.** A step extends every live beam of a sentence by every token. An extension by the
end token is complete: it leaves the beam, and the `nbest` complete hypotheses with the greatest
scores are kept. Of the other extensions the `beam` with the greatest totals stay live. (Commonly an
extension by the end token counts only if it ranks among the extensions that stay live; here each
one counts, so the best score can only be higher.)

Shapes: totals (sentences, beams); logits (rows, vocab), where rows are sentences · beams.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.generate.samplers import top_values, uniforms
from addnorm.generate.settings import Decoding
from addnorm.generate.steps import Steps

UNKNOWN_SCORE = float("nan")
"""Score of an output whose log-probabilities are not computed."""
DROP_SHARE = 8
"""Rows that are done are dropped once they are one in this many: moving the others has a cost."""


@dataclass(frozen=True)
class Hypothesis:
    """One output of a model, with its log-probabilities.

    Parameters
    ----------
    tokens : Token ids, without the begin and end tokens.
    score : The log-probability divided by the length penalty; greater is better.
    log_probability : The sum of the log-probabilities.
    log_probabilities : Of each token under the model's own distribution, and of the end token if
        there is one.
    finished : False if the output was cut at its length limit.

    Without `Decoding.scores`, both scores may be NaN, and log_probabilities is empty.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float
    log_probabilities: tuple[float, ...]
    finished: bool


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Which token ends an output, and which tokens are never taken."""

    end: int | None = None
    """The token that ends an output, if there is one."""
    banned: tuple[int, ...] = ()
    """Tokens that are never taken, whatever their probability."""
    end_at_limit: bool = True
    """Whether the last token of an output that reaches its limit must be the end token."""

    @property
    def forces_end(self) -> bool:
        return self.end_at_limit and self.end is not None


def search(
    steps: Steps,
    newest: Tensor,
    limits: list[int],
    rules: TokenRules,
    decoding: Decoding,
    seeds: list[int],
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each sequence, best first: by beam search, or one by the sampler.

    Parameters
    ----------
    steps : The model and its cache.
    newest : The tokens that each sequence starts with, (sequences, 1 or more).
    limits : Most tokens of each output, its end token included.
    rules : The end token and the banned tokens.
    decoding : Settings of the search.
    seeds : Random seed of each sequence.
    """
    if decoding.beam > 1:
        return beam_search(steps, newest, limits, rules, decoding)
    uniform = uniforms(seeds, max(limits)).to(newest.device)
    hypotheses = take_tokens(steps, newest, limits, rules, decoding, uniform)
    return [[hypothesis] for hypothesis in hypotheses]


def log_total(logits: Tensor) -> Tensor:
    """Return log Σ exp(logits) of each row, (rows, 1); a log-probability is a logit minus this."""
    # max x − max log softmax(x): two thirds of the time of torch.logsumexp, and as exact. A few
    # rows at a time, which stay in the processor's cache from one pass to the next.
    parts = [
        rows.amax(dim=1, keepdim=True) - rows.log_softmax(dim=1).amax(dim=1, keepdim=True)
        for rows in torch.split(logits, 4)
    ]
    total = torch.cat(parts)
    require_finite(total, "log Σ exp(logits)")
    return total


def require_finite(values: Tensor, name: str) -> None:
    """Raise InputError if a value that logits decide, (rows, 1), is not finite."""
    if not bool(values.isfinite().all()):
        row = int((~values.isfinite()).nonzero()[0, 0])
        raise InputError(
            f"decoding needs a model with finite logits: got {name} = {float(values[row])}. Check "
            "its weights for NaN: training may have diverged."
        )


def ban_(logits: Tensor, tokens: tuple[int, ...]) -> None:
    """Set the logits of these tokens to −∞; the log-probabilities of the others do not change."""
    for token in tokens:
        logits[:, token] = float("-inf")


# ── Greedy decoding and sampling ──────────────────────────────────────────────────────────────────


@torch.inference_mode()
def take_tokens(
    steps: Steps,
    newest: Tensor,
    limits: list[int],
    rules: TokenRules,
    decoding: Decoding,
    uniform: Tensor,
) -> list[Hypothesis]:
    """Return one hypothesis for each sequence, its tokens picked by the sampler.

    Parameters
    ----------
    steps, newest, limits, rules, decoding : As for `search`.
    uniform : Numbers in [0, 1) to sample with, (sequences, tokens).
    """
    sampler, end = decoding.make_sampler(), -1 if rules.end is None else rules.end
    outputs = Outputs(limits, newest.device)
    quick = not decoding.scores and decoding.sampler == "greedy"
    while len(outputs.rows):
        logits = steps.step(newest)
        total = UNKNOWN_SCORE if quick else log_total(logits)
        ban_(logits, rules.banned)
        picked = sampler(logits, uniform[outputs.rows, outputs.length])
        taken = torch.where(outputs.at_limit(), end, picked) if rules.forces_end else picked
        if quick:
            require_finite(logits.gather(1, picked[:, None]), "a logit")
        outputs.add(taken, logits.gather(1, taken[:, None]) - total, picked == end)
        kept = outputs.drop_done()
        if kept is not None and len(kept):
            steps.reorder(kept, kept)
            taken = taken.index_select(0, kept)
        newest = taken[:, None]
    return outputs.hypotheses(rules, decoding)


class Outputs:
    """The tokens taken by each sequence so far; `rows` are the sequences that are not done."""

    def __init__(self, limits: list[int], device: torch.device) -> None:
        count, longest = len(limits), max(limits)
        self.length = 0
        self.rows = torch.arange(count, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)
        self.limits = torch.tensor(limits, device=device)
        self.lengths = self.limits.clone()
        self.finished = self.done.clone()
        self.tokens = torch.zeros(count, longest, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(count, longest, dtype=torch.float64, device=device)

    def at_limit(self) -> Tensor:
        """Return whether the next token is the last of its sequence: (rows,)."""
        return self.limits[self.rows] <= self.length + 1

    def add(self, taken: Tensor, log_prob: Tensor, ends: Tensor) -> None:
        """Add one token of every row, its log-probability, and whether it ends the sequence."""
        stops = (ends | self.at_limit()) & ~self.done
        stopped = self.rows[stops]
        self.tokens[self.rows, self.length] = taken
        self.log_probs[self.rows, self.length] = log_prob.squeeze(1).double().clamp(max=0)
        self.length += 1
        self.lengths[stopped] = self.length
        self.finished[stopped] = ends[stops]
        self.done = self.done | stops

    def drop_done(self) -> Tensor | None:
        """Drop the rows that are done, if there are many; return the rows kept, or None."""
        if int(self.done.sum()) * DROP_SHARE < len(self.done):
            return None
        kept = (~self.done).nonzero().squeeze(1)
        self.rows, self.done = self.rows[kept], self.done[kept]
        return kept

    def hypotheses(self, rules: TokenRules, decoding: Decoding) -> list[Hypothesis]:
        penalties = decoding.penalties(self.tokens.shape[1]).tolist()
        hypotheses = []
        for tokens, log_probs, length, finished in zip(
            self.tokens.tolist(),
            self.log_probs.tolist(),
            self.lengths.tolist(),
            self.finished.tolist(),
            strict=True,
        ):
            has_end = finished or rules.forces_end
            log_probs = log_probs[:length] if decoding.scores else []
            total = sum(log_probs) if decoding.scores else UNKNOWN_SCORE
            hypotheses.append(
                Hypothesis(
                    tokens=tuple(tokens[: length - 1 if has_end else length]),
                    score=total / penalties[length],
                    log_probability=total,
                    log_probabilities=tuple(log_probs),
                    finished=finished,
                )
            )
        return hypotheses


# ── Beam search ───────────────────────────────────────────────────────────────────────────────────

SCORE, TOTAL, LENGTH, BEAM, END_LOG_PROB, FINISHED = range(6)
"""Columns of `Beams.complete`. END_LOG_PROB is NaN if the hypothesis has no end token."""


@torch.inference_mode()
def beam_search(
    steps: Steps, newest: Tensor, limits: list[int], rules: TokenRules, decoding: Decoding
) -> list[list[Hypothesis]]:
    """Return the `nbest` hypotheses of each sentence, best first.

    Parameters
    ----------
    steps, newest, limits, rules, decoding : As for `search`.
    """
    beams = Beams(limits, rules, decoding, newest.device)
    while len(beams.sentences):
        newest, index, groups = beams.extend(steps.step(newest))
        if len(beams.sentences):
            steps.reorder(index, groups)
    return beams.hypotheses()


class Beams:
    """The live beams of each sentence, its complete hypotheses, and the parent of each beam.

    **Why stopping early is safe.** No log-probability is above 0, so a live beam of total s can
    only reach a total of at most s, at a length of at most the limit L of its sentence. The penalty
    does not decrease with the length, and s is at most 0, so the score is at most s / penalty(L).
    Once there are `nbest` complete hypotheses and the worst of them scores at least that for the
    greatest live s, no live beam can replace it: more steps would change nothing.

    **Greedy.** With `keep_greedy` the path of likeliest tokens stays in the beam until it ends, if
    necessary in place of the last beam: the best score is never below that of greedy decoding.

    Parameters
    ----------
    limits, rules, decoding : As for `search`.
    device : Where the tensors are.
    """

    def __init__(
        self, limits: list[int], rules: TokenRules, decoding: Decoding, device: torch.device
    ) -> None:
        count = len(limits)
        self.rules, self.decoding, self.length = rules, decoding, 0
        self.penalties = decoding.penalties(max(limits)).to(device)
        self.sentences = torch.arange(count, device=device)
        self.limits = torch.tensor(limits, device=device)
        self.totals = torch.zeros(count, 1, dtype=torch.float64, device=device)
        self.greedy = torch.full((count,), 0 if decoding.keep_greedy else -1, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)
        self.complete = self.totals.new_full((count, decoding.nbest, 6), float("-inf"))
        self.results = self.complete.clone()
        self.history: list[tuple[list[list[int]], list[list[int]], list[list[float]]]] = []

    def extend(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Extend the beams by a token; return the tokens, the rows they extend, the groups kept.

        Shapes: (rows, 1), (rows,) and (sentences,), or None if no sentence was dropped.
        """
        self.length += 1
        last, forces_end = self.limits == self.length, self.rules.forces_end
        end_log_probs, log_probs, tokens = self.split_end(logits)
        ends = self.prefers_end(end_log_probs, log_probs[:, :, 0], tokens[:, :, 0])
        finished = ends | ~last[:, None] | (not forces_end)
        self.add_complete(self.totals + end_log_probs, end_log_probs, finished, ~self.done)
        rows = torch.arange(len(last), device=logits.device)[:, None] * log_probs.shape[1]
        parents, tokens, log_probs = self.select(log_probs, tokens, ends)
        self.record(parents, tokens, log_probs)
        if not forces_end and bool(last.any()):
            nan = torch.full_like(self.totals, float("nan"))
            self.add_complete(self.totals, nan, nan > 0, last)
        self.done = self.done | last
        if self.decoding.stop_early:
            self.done = self.done | self.is_final()
        kept = self.drop_done()
        if kept is not None:
            rows, parents, tokens = rows[kept], parents[kept], tokens[kept]
        return tokens.view(-1, 1), (rows + parents).flatten(), kept

    def split_end(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of the end token, and of the likeliest others with their ids.

        Only the best tokens of each row are compared with those of the other beams. Shapes:
        (sentences, beams), and twice (sentences, beams, candidates).
        """
        end, banned = self.rules.end, self.rules.banned
        total = log_total(logits)
        end_log_probs = torch.full_like(total, float("-inf"))
        if end is not None:
            end_log_probs = logits[:, end : end + 1] - total
            banned = (*banned, end)
        ban_(logits, banned)
        candidates = max(1, min(self.decoding.beam, logits.shape[1] - len(set(banned))))
        values, tokens = top_values(logits, candidates)
        shape = (*self.totals.shape, candidates)
        end_log_probs = end_log_probs.double().clamp(max=0)  # rounding must not make it positive
        log_probs = (values - total).double().clamp(max=0)
        return end_log_probs.view(shape[:2]), log_probs.view(shape), tokens.view(shape)

    def prefers_end(self, end_log_probs: Tensor, top: Tensor, first: Tensor) -> Tensor:
        """Return whether the end token is the likeliest; ties go to the lower token id.

        Shapes: (sentences, beams), of the end token, and of the likeliest other and its id.
        """
        if self.rules.end is None:
            return torch.zeros_like(first, dtype=torch.bool)
        return (end_log_probs > top) | ((end_log_probs == top) & (first > self.rules.end))

    def add_complete(
        self, totals: Tensor, end_log_probs: Tensor, finished: Tensor, which: Tensor
    ) -> None:
        """Add beams to the complete hypotheses, and keep the best; ties keep the earlier one.

        Parameters
        ----------
        totals, end_log_probs, finished : Of each beam, (sentences, beams).
        which : Sentences whose beams are added, (sentences,).
        """
        scores = (totals / self.penalties[self.length]).masked_fill(~which[:, None], float("-inf"))
        beams = torch.arange(totals.shape[1], device=totals.device).expand_as(totals)
        lengths = torch.full_like(totals, self.length)
        columns = (scores, totals, lengths, beams.double(), end_log_probs, finished.double())
        joined = torch.cat((self.complete, torch.stack(columns, dim=-1)), dim=1)
        order = joined[:, :, SCORE].sort(dim=1, descending=True, stable=True).indices
        order = order[:, : self.decoding.nbest, None].expand(-1, -1, 6)
        self.complete = joined.gather(1, order)

    def select(
        self, log_probs: Tensor, tokens: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Select the extensions that stay live; return their parents, tokens, log-probabilities."""
        beams, candidates = log_probs.shape[1:]
        totals = (self.totals[:, :, None] + log_probs).flatten(1)
        order = top_values(totals, min(self.decoding.beam, beams * candidates))[1]
        if self.decoding.keep_greedy:
            # The likeliest extension of the greedy beam is its first, at greedy · candidates.
            ended = ends.gather(1, self.greedy.clamp(min=0)[:, None])[:, 0]
            continues = (self.greedy >= 0) & ~ended
            extension = self.greedy * candidates
            lost = continues & ~(order == extension[:, None]).any(dim=1)
            order[:, -1] = torch.where(lost, extension, order[:, -1])
        if beams == order.shape[1]:
            order = order.gather(1, place_by_parent(order // candidates))
        if self.decoding.keep_greedy:
            position = (order == extension[:, None]).int().argmax(dim=1)
            self.greedy = torch.where(continues, position, -1)
        self.totals = totals.gather(1, order)
        tokens, log_probs = (part.flatten(1).gather(1, order) for part in (tokens, log_probs))
        return order // candidates, tokens, log_probs

    def record(self, parents: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Add the beams of this length to the history, with zeros for sentences that are done."""
        count = len(self.results)
        if len(self.sentences) < count:
            shape = (count, parents.shape[1])
            parents, tokens, log_probs = (
                part.new_zeros(shape).index_copy_(0, self.sentences, part)
                for part in (parents, tokens, log_probs)
            )
        self.history.append((parents.tolist(), tokens.tolist(), log_probs.tolist()))

    def is_final(self) -> Tensor:
        """Return whether no live beam can replace a complete hypothesis: (sentences,)."""
        best = self.totals.amax(dim=1) / self.penalties[self.limits]
        return self.complete[:, -1, SCORE] >= best

    def drop_done(self) -> Tensor | None:
        """Drop the sentences that are done, if there are many; return those kept, or None."""
        if int(self.done.sum()) * DROP_SHARE < len(self.done):
            return None
        self.results[self.sentences[self.done]] = self.complete[self.done]
        kept = (~self.done).nonzero().squeeze(1)
        self.sentences, self.limits = self.sentences[kept], self.limits[kept]
        self.totals, self.greedy = self.totals[kept], self.greedy[kept]
        self.complete, self.done = self.complete[kept], self.done[kept]
        return kept

    def hypotheses(self) -> list[list[Hypothesis]]:
        return [
            [self.trace_back(sentence, row) for row in rows if row[SCORE] > float("-inf")]
            for sentence, rows in enumerate(self.results.tolist())
        ]

    def trace_back(self, sentence: int, row: list[float]) -> Hypothesis:
        """Return the hypothesis of a row of `results`, its tokens read back from the history."""
        has_end = row[END_LOG_PROB] == row[END_LOG_PROB]
        beam = int(row[BEAM])
        tokens: list[int] = []
        log_probs = [row[END_LOG_PROB]] if has_end else []
        for step in reversed(range(int(row[LENGTH]) - (1 if has_end else 0))):
            parents, step_tokens, step_log_probs = self.history[step]
            tokens.append(step_tokens[sentence][beam])
            log_probs.append(step_log_probs[sentence][beam])
            beam = parents[sentence][beam]
        return Hypothesis(
            tokens=tuple(reversed(tokens)),
            score=row[SCORE],
            log_probability=row[TOTAL],
            log_probabilities=tuple(reversed(log_probs)),
            finished=bool(row[FINISHED]),
        )


def place_by_parent(parents: Tensor) -> Tensor:
    """Return an order of the new beams in which each takes the place of its parent, if possible.

    The first child of a parent takes its place, the others those of parents without children: so
    only as many rows of the cache are copied as there are such parents. Both (sentences, beams).

    >>> place_by_parent(torch.tensor([[2, 0, 2]])).tolist()
    [[1, 2, 0]]
    """
    orders = []
    for row in parents.tolist():
        places = [-1] * len(row)
        rest = []
        for child, parent in enumerate(row):
            if places[parent] < 0:
                places[parent] = child
            else:
                rest.append(child)
        others = iter(rest)
        orders.append([next(others) if child < 0 else child for child in places])
    return torch.tensor(orders, device=parents.device)
