"""Beam search: equal to brute force with a wide beam, exact early stop, never below greedy."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.generate import Decoding, Hypothesis, translate
from addnorm.generate.search import TokenRules, beam_search, place_by_parent, search
from tests.conftest import PAD, make
from tests.generate import naive
from tests.generate.naive import BEGIN, END, Expected, Oracle

penalised = pytest.mark.parametrize(
    ("penalty", "alpha"),
    (
        ("length", 1.0),
        ("length", 0.6),
        ("length", 0.0),
        ("gnmt", 0.6),
        ("gnmt", 1.8),
        ("none", 1.0),
    ),
)
START = torch.tensor([[BEGIN]])


def same(hypotheses: list[Hypothesis], expected: list[Expected]) -> None:
    """The same sequences in the same order, with the same scores."""
    assert [h.tokens for h in hypotheses] == [a.tokens for a in expected]
    for hypothesis, item in zip(hypotheses, expected, strict=True):
        assert hypothesis.score == pytest.approx(item.score, abs=1e-10)
        assert hypothesis.log_probabilities == pytest.approx(item.steps, abs=1e-10)
        assert hypothesis.log_probability == pytest.approx(sum(item.steps), abs=1e-10)


ENDS = TokenRules(end=END)


def run_beam(
    oracle: Oracle, limit: int, rules: TokenRules = ENDS, **settings: Any
) -> list[Hypothesis]:
    (hypotheses,) = beam_search(oracle, START, [limit], rules, Decoding(**settings))
    return hypotheses


def greedy_path(oracle: Oracle, limit: int) -> Hypothesis:
    ((hypothesis,),) = search(oracle, START, [limit], ENDS, Decoding(), seeds=[0])
    return hypothesis


# ── Equal to brute force ──────────────────────────────────────────────────────────────────────────


@penalised
@pytest.mark.parametrize("closed", (True, False))
@pytest.mark.parametrize("early", (True, False))
def test_a_wide_beam_finds_the_best_outputs(
    penalty: str, alpha: float, closed: bool, early: bool
) -> None:
    # 4 of the 5 tokens are not the end: all 4 · 4 · 4 prefixes of 3 tokens fit in the beam.
    kinds: dict[str, Any] = {"penalty": penalty, "alpha": alpha}
    rules = TokenRules(end=END, end_at_limit=closed)
    settings = {"stop_early": early, "keep_greedy": False, **kinds}
    for seed in range(6):
        oracle = Oracle(seed, vocab=5)
        expected = naive.all_outputs(oracle.log_probs, 5, 4, closed=closed, **kinds)
        hypotheses = run_beam(oracle, 4, rules, beam=256, nbest=60, **settings)
        same(hypotheses, expected[:60])
        if not closed:
            ended = [len(item.steps) > len(item.tokens) for item in expected[:60]]
            assert [hypothesis.finished for hypothesis in hypotheses] == ended


@penalised
def test_beam_search_of_a_model_equals_brute_force(penalty: str, alpha: float) -> None:
    torch.manual_seed(int(alpha * 10))
    model = make("encoder-decoder", vocab=7)
    sources = [[3, 4, 5], [6], [3, 3]]
    kinds: dict[str, Any] = {"penalty": penalty, "alpha": alpha}
    decoding = Decoding(beam=64, nbest=15, max_tokens=(1.0, 1), **kinds)
    results = translate(model, sources, decoding, begin=BEGIN, end=END)
    for source, hypotheses in zip(sources, results, strict=True):
        next_log_probs = naive.translation_log_probs(model, source)
        expected = naive.all_outputs(
            next_log_probs, 7, len(source) + 1, banned=(PAD, BEGIN), **kinds
        )
        same(hypotheses, expected[: min(15, len(expected))])


def test_banned_tokens_are_never_taken_but_keep_their_probability() -> None:
    oracle = Oracle(3, vocab=6, peak=4)
    rules = TokenRules(end=END, banned=(4, 0))
    hypotheses = run_beam(oracle, 4, rules, beam=64, nbest=10)
    same(hypotheses, naive.all_outputs(oracle.log_probs, 6, 4, banned=(4, 0))[:10])
    assert all(4 not in h.tokens and 0 not in h.tokens for h in hypotheses)


def test_without_an_end_token_all_reach_the_limit() -> None:
    oracle = Oracle(3, vocab=4)
    hypotheses = run_beam(oracle, 3, TokenRules(end=None), beam=64, nbest=9)
    same(hypotheses, naive.all_outputs(oracle.log_probs, 4, 3, end=None)[:9])
    assert not any(h.finished for h in hypotheses)


def test_there_may_be_fewer_hypotheses_than_nbest() -> None:
    hypotheses = run_beam(Oracle(0, vocab=3), 2, beam=9, nbest=9)
    assert [len(h.tokens) for h in sorted(hypotheses, key=lambda h: len(h.tokens))] == [0, 1, 1]


# ── A narrow beam equals textbook beam search ─────────────────────────────────────────────────────


def textbook_search(
    oracle: Oracle, limit: int, beam: int, nbest: int, alpha: float, keep: bool
) -> list[Expected]:
    """Beam search in plain lists, without early stopping; the greedy path takes the last place."""
    live: list[tuple[tuple[int, ...], tuple[float, ...]]] = [((), ())]
    greedy: tuple[int, ...] | None = () if keep else None
    ended: list[Expected] = []
    for length in range(1, limit + 1):
        longer = []
        for tokens, steps in live:
            log_probs = oracle.log_probs(tokens).tolist()
            parts = (*steps, log_probs[END])
            ended.append(Expected(tokens, parts, sum(parts) / length**alpha))
            others = [token for token in range(oracle.vocab) if token != END]
            longer += [((*tokens, token), (*steps, log_probs[token])) for token in others]
        live = sorted(longer, key=lambda each: -sum(each[1]))[:beam]
        if greedy is not None:
            likeliest = int(oracle.log_probs(greedy).argmax())
            greedy = None if likeliest == END else (*greedy, likeliest)
        if greedy is not None and greedy not in [tokens for tokens, _ in live]:
            live[-1] = next(each for each in longer if each[0] == greedy)
    return sorted(ended, key=lambda item: -item.score)[:nbest]


@pytest.mark.parametrize("beam", (2, 3, 5))
@pytest.mark.parametrize("alpha", (0.0, 1.0))
@pytest.mark.parametrize("keep", (True, False), ids=("greedy kept", "plain"))
def test_a_narrow_beam_equals_textbook_beam_search(beam: int, alpha: float, keep: bool) -> None:
    for seed in range(20):  # with even seeds the greedy path ends soon
        oracle = Oracle(seed, vocab=9, sharp=1.0, peak=None if seed % 2 else END)
        hypotheses = run_beam(oracle, 7, beam=beam, nbest=beam, alpha=alpha, keep_greedy=keep)
        same(hypotheses, textbook_search(oracle, 7, beam, beam, alpha, keep))


# ── Stopping early changes nothing ────────────────────────────────────────────────────────────────


@penalised
@pytest.mark.slow
def test_stopping_early_changes_nothing(penalty: str, alpha: float) -> None:
    saved = 0
    for seed in range(25):
        results, steps = [], []
        for early in (True, False):
            oracle = Oracle(seed, vocab=8, sharp=2.5, peak=END)
            kinds: dict[str, Any] = {"penalty": penalty, "alpha": alpha, "stop_early": early}
            results.append(run_beam(oracle, 12, beam=3, nbest=1 + seed % 3, **kinds))
            steps.append(len(oracle.step_rows))
        assert results[0] == results[1]
        assert steps[0] <= steps[1] == 12
        saved += steps[1] - steps[0]
    assert saved > 25


def test_search_does_not_stop_at_the_first_complete_hypothesis() -> None:
    """A later hypothesis may score higher: stopping once `beam` are complete is not exact."""
    better = 0
    for seed in range(40):
        hypotheses = run_beam(Oracle(seed, vocab=6, sharp=2.0), 10, beam=2, alpha=1.0)
        short = run_beam(Oracle(seed, vocab=6, sharp=2.0), 4, beam=2, alpha=1.0)
        better += (
            hypotheses[0].finished and short[0].finished and hypotheses[0].score > short[0].score
        )
    assert better > 5


# ── Beam and greedy ───────────────────────────────────────────────────────────────────────────────

MODELS, INPUTS = 40, 5


@pytest.mark.slow
def test_beam_and_greedy_on_200_models_and_inputs() -> None:
    """Beam 5 scored at least as high as greedy on 198 of 200; on all if it keeps the greedy path.

    The logits are four times those of initial weights, for which it would be all 200.
    """
    counts = {False: 0, True: 0}
    for number in range(MODELS):
        torch.manual_seed(number)
        model = make("encoder-decoder", vocab=23, depth=1)
        with torch.no_grad():
            model.tokens.weight.mul_(4.0)
        sources = torch.randint(3, 23, (INPUTS, 5)).tolist()
        plain = Decoding(max_tokens=(1.0, 7))
        greedy = [h[0].score for h in translate(model, sources, plain, begin=BEGIN, end=END)]
        for keep in counts:
            wide = replace(plain, beam=5, keep_greedy=keep)
            results = translate(model, sources, wide, begin=BEGIN, end=END)
            pairs = zip(results, greedy, strict=True)
            counts[keep] += sum(h[0].score >= score - 1e-12 for h, score in pairs)
    assert counts[False] >= 195
    assert counts[True] == MODELS * INPUTS


@pytest.mark.slow
def test_the_greedy_path_is_kept_where_beam_search_would_lose_it() -> None:
    lost = 0
    for seed in range(150):
        greedy = greedy_path(Oracle(seed, 12), 8)
        (with_greedy,) = run_beam(Oracle(seed, 12), 8, beam=2, keep_greedy=True)
        (plain,) = run_beam(Oracle(seed, 12), 8, beam=2, keep_greedy=False)
        assert with_greedy.score >= greedy.score
        lost += plain.score < greedy.score
    assert lost > 3  # without keep_greedy the path is sometimes lost


# ── Batches, ties, endings ────────────────────────────────────────────────────────────────────────


class Several:
    """Sentences of one batch, each with its own oracle; finished ones are dropped."""

    def __init__(self, oracles: list[Oracle]) -> None:
        self.oracles = oracles
        self.ids = torch.zeros(0, 0, dtype=torch.long)
        self.rows: list[int] = []
        self.indices: list[Tensor] = []

    def step(self, newest: Tensor) -> Tensor:
        self.ids = torch.cat((self.ids, newest), dim=1) if self.ids.numel() else newest
        self.rows.append(len(newest))
        width = len(newest) // len(self.oracles)
        rows = enumerate(self.ids.tolist())
        return torch.stack([self.oracles[i // width].logits(row[1:]) for i, row in rows])

    def reorder(self, index: Tensor, groups: Tensor | None) -> None:
        self.ids = self.ids.index_select(0, index)
        if groups is None:
            self.indices.append(index)
        else:
            self.oracles = [self.oracles[i] for i in groups.tolist()]


@pytest.mark.parametrize("keep_greedy", (True, False))
def test_sentences_of_a_batch_are_independent(keep_greedy: bool) -> None:
    decoding = Decoding(beam=3, nbest=2, keep_greedy=keep_greedy)
    limits = [3 + seed % 7 for seed in range(24)]
    several = Several([Oracle(seed, 9, 2.0) for seed in range(24)])
    together = beam_search(several, START.expand(24, 1), limits, ENDS, decoding)
    for seed, hypotheses in enumerate(together):
        oracle = Oracle(seed, 9, 2.0)
        assert hypotheses == beam_search(oracle, START, [limits[seed]], ENDS, decoding)[0]
    assert several.rows[:2] == [24, 72] and several.rows[-1] < 24  # finished ones were removed
    # Once there are as many rows as beams, no row that is copied is overwritten.
    assert all(torch.equal(index[index], index) for index in several.indices[1:])
    assert len(several.indices) > 1


def test_equal_scores_come_in_a_fixed_order() -> None:
    class Level(Oracle):
        def logits(self, tokens: Any) -> Tensor:
            return torch.zeros(self.vocab, dtype=torch.float64)

    hypotheses = run_beam(Level(0, vocab=700), 3, beam=4, nbest=4, penalty="none")
    assert [h.tokens for h in hypotheses] == [(), (0,), (1,), (3,)]  # shorter first, then by id


@pytest.mark.parametrize(("low", "finished"), ((0, False), (END, True)))
def test_ties_with_the_end_token_go_to_the_lower_id(low: int, finished: bool) -> None:
    """At the limit an output is finished if its likeliest token is the end, as in greedy."""

    class Level(Oracle):
        def logits(self, tokens: Any) -> Tensor:
            return (torch.arange(self.vocab) >= low).double()

    (hypothesis,) = run_beam(Level(0, vocab=6), 1, beam=3)
    assert hypothesis == greedy_path(Level(0, vocab=6), 1) and hypothesis.finished == finished


@pytest.mark.parametrize("beam", (1, 2, 5))
def test_an_immediate_end_token_is_an_empty_output(beam: int) -> None:
    class Silent(Oracle):
        def logits(self, tokens: Any) -> Tensor:
            return torch.zeros(self.vocab, dtype=torch.float64).index_fill(
                0, torch.tensor([END]), 50.0
            )

    oracle = Silent(0, vocab=6)
    hypotheses = run_beam(oracle, 30, beam=beam)
    assert hypotheses[0].tokens == () and hypotheses[0].finished
    assert len(hypotheses[0].log_probabilities) == 1 and len(oracle.step_rows) <= 2


@pytest.mark.parametrize("beam", (2, 5))
def test_outputs_that_reach_the_limit_are_ended_there(beam: int) -> None:
    class Endless(Oracle):
        def logits(self, tokens: Any) -> Tensor:
            return super().logits(tokens).index_fill(0, torch.tensor([END]), -50.0)

    oracle = Endless(0, vocab=6)
    (hypothesis,) = run_beam(oracle, 6, beam=beam)
    assert len(hypothesis.tokens) == 5 and not hypothesis.finished
    assert hypothesis.log_probabilities[-1] == pytest.approx(
        float(oracle.log_probs(hypothesis.tokens)[END]), abs=1e-12
    )


def test_a_beam_takes_the_place_of_its_parent() -> None:
    parents = torch.tensor([[0, 0, 0], [2, 1, 0], [1, 2, 1], [2, 2, 0]])
    order = place_by_parent(parents)
    assert order.sort(dim=1).values.tolist() == [[0, 1, 2]] * 4
    index = parents.gather(1, order)
    assert torch.equal(index.gather(1, index), index)  # no row that is copied is overwritten
    assert index.tolist() == [[0, 0, 0], [0, 1, 2], [1, 1, 2], [0, 2, 2]]


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


def test_logits_must_be_finite() -> None:
    class Broken(Oracle):
        def logits(self, tokens: Any) -> Tensor:
            return super().logits(tokens) * float("nan")

    message = r"finite logits: got log Σ exp\(logits\) = nan\. Check its weights for NaN"
    with pytest.raises(InputError, match=message):
        run_beam(Broken(0, vocab=6), 4, beam=5)
