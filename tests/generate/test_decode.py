"""`translate` and `generate` equal a naive loop, in any batch, with any padding, in order."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from addnorm import ModelConfig, build
from addnorm.errors import InputError
from addnorm.generate import Decoding, Hypothesis, generate, score, translate
from addnorm.generate.decode import split_batches, thread_pool
from addnorm.generate.samplers import uniforms
from addnorm.layers.attention import MemoryAttention
from tests.conftest import PAD, POSITIONS, VARIANTS, VOCAB, draw, make, slow_except
from tests.generate import naive
from tests.generate.naive import BEGIN, END, Oracle

ENDS: dict[str, Any] = {"begin": BEGIN, "end": END}
BANNED = (PAD, BEGIN)


def some(*lengths: int) -> list[list[int]]:
    """Sequences of random tokens, none of them special."""
    return [torch.randint(3, VOCAB, (length,)).tolist() for length in lengths]


def sampled(max_tokens: int, **settings: Any) -> Decoding:
    return Decoding(sampler="sample", max_tokens=max_tokens, **settings)


def near(one: Hypothesis, other: Hypothesis) -> None:
    """The same tokens, and numbers equal up to the rounding of float64."""
    assert one.tokens == other.tokens and one.finished == other.finished
    assert one.score == pytest.approx(other.score, abs=1e-10)
    assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-10)


def sharpen(model: Any, gain: float = 3.0) -> Any:
    """Scale the logits, so that outputs end and beams diverge."""
    with torch.no_grad():
        model.tokens.weight.mul_(gain)
    return model


# ── Greedy equals the naive loop ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("positions", POSITIONS)
def test_greedy_translation_equals_the_naive_loop(positions: str) -> None:
    model = sharpen(make("encoder-decoder", positions=positions))
    sources = some(5, 2, 7, 1, 4)
    results = translate(model, sources, Decoding(max_tokens=(2.0, 1), alpha=0.7), **ENDS)
    for source, (hypothesis,) in zip(sources, results, strict=True):
        next_log_probs = naive.translation_log_probs(model, source)
        limit = 2 * len(source) + 1
        expected, finished = naive.greedy(next_log_probs, limit, banned=BANNED, alpha=0.7)
        assert hypothesis.tokens == expected.tokens and hypothesis.finished == finished
        assert hypothesis.log_probabilities == pytest.approx(expected.steps, abs=1e-10)
        assert hypothesis.score == pytest.approx(expected.score, abs=1e-10)


@pytest.mark.parametrize("positions", POSITIONS)
def test_greedy_continuation_equals_the_naive_loop_for_prompts_of_any_length(
    positions: str,
) -> None:
    model = sharpen(make("decoder", positions=positions))
    prompts = some(6, 1, 4, 2)
    results = generate(model, prompts, Decoding(max_tokens=7), end=END)
    for prompt, (hypothesis,) in zip(prompts, results, strict=True):
        next_log_probs = naive.continuation_log_probs(model, prompt)
        expected, finished = naive.greedy(next_log_probs, 7, banned=(PAD,), closed=False)
        assert hypothesis.tokens == expected.tokens and hypothesis.finished == finished
        assert hypothesis.log_probabilities == pytest.approx(expected.steps, abs=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_the_naive_loop_in_any_variant(variant: str) -> None:
    model = make("encoder-decoder", **VARIANTS[variant])
    (source,) = some(4)
    ((hypothesis,),) = translate(model, [source], Decoding(max_tokens=(1.0, 3)), **ENDS)
    expected, _ = naive.greedy(naive.translation_log_probs(model, source), 7, banned=BANNED)
    assert hypothesis.tokens == expected.tokens
    assert hypothesis.log_probabilities == pytest.approx(expected.steps, abs=1e-10)


def test_the_begin_token_may_be_padding_or_the_end() -> None:
    model = make("encoder-decoder", pad=None)
    padded = make("encoder-decoder")
    padded.load_state_dict(model.state_dict())
    (source,) = some(5)
    for begin in (PAD, END):
        next_log_probs = naive.translation_log_probs(model, source, begin)
        expected, _ = naive.greedy(next_log_probs, 8, banned=(PAD,))
        for beam in (1, 4):
            decoding = Decoding(beam=beam, max_tokens=(0, 8))
            results = translate(padded, [source], decoding, begin=begin, end=END)
            ((best,),) = results
            assert PAD not in best.tokens
            assert best.score >= expected.score - 1e-12
            if beam == 1:
                assert best.tokens == expected.tokens
                assert best.log_probabilities == pytest.approx(expected.steps, abs=1e-10)


# ── A batch gives the result of each sequence alone ───────────────────────────────────────────────


@pytest.mark.parametrize("beam", (1, 4))
@pytest.mark.parametrize(
    "positions", slow_except(("rotary",), ("sinusoidal", "learned", "rotary", "buckets"))
)
def test_a_translation_does_not_depend_on_its_batch(beam: int, positions: str) -> None:
    model = sharpen(make("encoder-decoder", positions=positions))
    sources = some(3, 9, 1, 6, 6, 2, 8, 4, 5, 7)
    decoding = Decoding(beam=beam, nbest=min(2, beam), max_tokens=(1.0, 4))
    alone = [next(translate(model, [source], decoding, **ENDS)) for source in sources]
    for size in (4096, 20 * beam):
        together = translate(model, sources, replace(decoding, batch_tokens=size), **ENDS)
        for hypotheses, expected in zip(together, alone, strict=True):
            for one, other in zip(hypotheses, expected, strict=True):
                near(one, other)


@pytest.mark.parametrize("beam", (1, 3))
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_continuation_does_not_depend_on_its_batch(beam: int, positions: str) -> None:
    model = sharpen(make("decoder", positions=positions))
    prompts = some(3, 9, 1, 6, 2)
    decoding = Decoding(max_tokens=6, beam=beam)
    alone = [next(generate(model, [prompt], decoding, end=END)) for prompt in prompts]
    for hypotheses, expected in zip(
        generate(model, prompts, decoding, end=END), alone, strict=True
    ):
        near(hypotheses[0], expected[0])


def test_beams_of_a_decoder_are_those_of_brute_force() -> None:
    model = make("decoder", vocab=6)
    prompts = [[3, 4, 5], [5]]
    decoding = Decoding(max_tokens=3, beam=64, nbest=12)
    for prompt, hypotheses in zip(
        prompts, generate(model, prompts, decoding, end=END), strict=True
    ):
        next_log_probs = naive.continuation_log_probs(model, prompt)
        expected = naive.all_outputs(next_log_probs, 6, 3, banned=(PAD,), closed=False)[:12]
        assert [h.tokens for h in hypotheses] == [a.tokens for a in expected]
        assert [h.score for h in hypotheses] == pytest.approx(
            [a.score for a in expected], abs=1e-10
        )
        assert [h.finished for h in hypotheses] == [len(a.steps) > len(a.tokens) for a in expected]


# ── Sampling ──────────────────────────────────────────────────────────────────────────────────────


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    model = make("decoder")
    prompts = some(3, 7, 1, 3, 5)
    decoding = sampled(9, temperature=1.3, top_p=0.95, seed=40)
    small = replace(decoding, batch_tokens=30)
    together = [hypotheses[0] for hypotheses in generate(model, prompts, decoding, end=END)]
    again = [hypotheses[0] for hypotheses in generate(model, prompts, small, end=END)]
    for i, prompt in enumerate(prompts):
        ((alone,),) = generate(model, [prompt], replace(decoding, seed=40 + i), end=END)
        near(alone, together[i])
        near(alone, again[i])
    reseeded = generate(model, prompts, replace(decoding, seed=41), end=END)
    other = [hypotheses[0].tokens for hypotheses in reseeded]
    assert other != [hypothesis.tokens for hypothesis in together]


def sample_by_hand(
    next_log_probs: naive.LogProbs, seed: int, limit: int, end: int, banned: Any
) -> list[int]:
    """Sample each token by inverting the distribution function at the next number of the seed."""
    tokens: list[int] = []
    for number in uniforms([seed], limit)[0].tolist():
        shares = next_log_probs(tokens).exp()
        shares[list(banned)] = 0.0
        reached = (shares / shares.sum()).cumsum(dim=0)
        tokens.append(int((reached <= number).sum()))
        if tokens[-1] == end:
            break
    return tokens


def test_sampled_tokens_equal_those_of_the_naive_loop() -> None:
    decoder, prompts = make("decoder"), some(3, 5, 1)
    results = generate(decoder, prompts, sampled(9, seed=7), end=END)
    for number, (prompt, (hypothesis,)) in enumerate(zip(prompts, results, strict=True)):
        expected = sample_by_hand(
            naive.continuation_log_probs(decoder, prompt), 7 + number, 9, END, [PAD]
        )
        assert [*hypothesis.tokens, *([END] if hypothesis.finished else [])] == expected
    both, lengths = make("encoder-decoder"), []
    results = translate(both, prompts, sampled(12, seed=7), **ENDS)
    for number, (source, (hypothesis,)) in enumerate(zip(prompts, results, strict=True)):
        expected = sample_by_hand(
            naive.translation_log_probs(both, source), 7 + number, 12, END, BANNED
        )
        assert hypothesis.finished == (expected[-1] == END)
        # The last token is the end token, also at the limit.
        assert list(hypothesis.tokens) == expected[:-1]
        lengths.append(len(expected))
    assert max(lengths) > 2


def test_a_sampled_translation_does_not_depend_on_its_batch() -> None:
    model = make("encoder-decoder")
    sources = some(3, 7, 1, 3, 5)
    decoding = Decoding(sampler="sample", top_k=8, max_tokens=(1.0, 6), seed=40)
    for size in (4096, 8):
        together = translate(model, sources, replace(decoding, batch_tokens=size), **ENDS)
        for i, (hypothesis,) in enumerate(together):
            ((alone,),) = translate(model, [sources[i]], replace(decoding, seed=40 + i), **ENDS)
            near(alone, hypothesis)


def test_samples_follow_the_model() -> None:
    model = make("decoder", vocab=6)
    prompt, count = [3, 5, 4], 6000
    decoding = sampled(1, read_ahead=count, batch_tokens=10**6)
    results = generate(model, [prompt] * count, decoding, pad=0)
    counts = torch.bincount(torch.tensor([h[0].tokens[0] for h in results]), minlength=6)
    shares = naive.continuation_log_probs(model, prompt)([]).exp()
    shares[PAD] = 0
    expected = shares / shares.sum() * count
    statistic = ((counts - expected) ** 2 / expected)[1:].sum()
    assert counts[PAD] == 0 and statistic < 18.47  # of 4 degrees, once in 1,000


def test_log_probabilities_do_not_depend_on_the_sampler() -> None:
    model = make("decoder")
    prompts = some(3, 5)
    decoding = sampled(6, temperature=0.5, top_k=4)
    for prompt, (hypothesis,) in zip(prompts, generate(model, prompts, decoding), strict=True):
        (expected,) = score(model, [prompt], [hypothesis.tokens])
        assert hypothesis.log_probabilities == pytest.approx(expected, abs=1e-10)


# ── Order, streams, batches, workers ──────────────────────────────────────────────────────────────


def test_batches_are_split_by_size() -> None:
    sizes = [5, 1, 9, 5, 2, 30]
    batches = split_batches(sizes, tokens=12)
    assert sorted(place for batch in batches for place in batch) == list(range(6))
    assert batches == [[5], [2], [0, 3], [4, 1]]
    assert split_batches([4, 4, 4, 4], tokens=100, workers=2) == [[0, 1], [2, 3]]
    assert split_batches([], tokens=5) == []


def test_a_batch_counts_the_tokens_of_all_beams() -> None:
    both, decoder = make("encoder-decoder"), make("decoder")
    rows: list[int] = []
    both.encoder.register_forward_hook(lambda _, inputs, out: rows.append(len(out)))
    decoding = Decoding(beam=2, batch_tokens=12, max_tokens=(0, 2))
    list(translate(both, some(3, 3, 3, 3), decoding, **ENDS))
    assert rows == [2, 2]
    decoder.decoder.register_forward_hook(lambda _, inputs, out: rows.append(inputs[0].shape[0]))
    list(generate(decoder, some(3, 3, 3, 3), Decoding(beam=2, batch_tokens=24, max_tokens=3)))
    assert rows[2:] == [2, 4, 4] * 2


def test_workers_share_the_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for workers, share in ((2, 2), (3, 1), (9, 1)):
            with thread_pool(workers) as pool:
                assert pool is not None and pool.submit(torch.get_num_threads).result() == share
            assert torch.get_num_threads() == 4
        with thread_pool(1) as pool:
            assert pool is None
    finally:
        torch.set_num_threads(threads)


def test_results_are_yielded_before_the_last_source_is_read() -> None:
    model = make("encoder-decoder")
    read: list[int] = []

    def lines() -> Iterator[list[int]]:
        for number, source in enumerate(some(*range(1, 10))):
            read.append(number)
            yield source

    results = translate(model, lines(), Decoding(beam=2, read_ahead=3, max_tokens=3), **ENDS)
    assert read == []
    next(results)
    assert read == [0, 1, 2]
    assert len(list(results)) == 8 and len(read) == 9


def test_two_workers_give_the_results_of_one() -> None:
    model = sharpen(make("encoder-decoder"))
    sources = some(*range(1, 13))
    threads = torch.get_num_threads()
    decoding = Decoding(beam=3, max_tokens=(1.0, 3))
    one = list(translate(model, sources, decoding, **ENDS))
    for size in (4096, 30):
        shared = replace(decoding, workers=2, batch_tokens=size)
        two = translate(model, sources, shared, **ENDS)
        for hypotheses, expected in zip(two, one, strict=True):
            near(hypotheses[0], expected[0])
    assert torch.get_num_threads() == threads


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    model = make("encoder-decoder")
    threads = torch.get_num_threads()
    results = translate(model, [*some(3, 4, 5), [VOCAB]], Decoding(beam=5, workers=2), **ENDS)
    with pytest.raises(InputError, match=rf"^token ids must be 0 to {VOCAB - 1}: got {VOCAB}\."):
        list(results)
    assert torch.get_num_threads() == threads


def test_no_inputs_give_no_outputs() -> None:
    assert list(translate(make("encoder-decoder"), [], **ENDS)) == []
    assert list(generate(make("decoder"), [])) == []


def test_memory_keys_are_computed_once_for_all_beams() -> None:
    model = make("encoder-decoder")
    shapes = []
    for part in model.modules():
        if isinstance(part, MemoryAttention):
            part.memory.register_forward_hook(lambda _, inputs, out: shapes.append(inputs[0].shape))
    list(translate(model, some(4, 4), Decoding(beam=5), **ENDS))
    assert shapes == [(2, 4, 16)] * 2


# ── Limits ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("beam", (1, 3))
def test_the_longest_output_depends_on_the_source(beam: int) -> None:
    model = make("encoder-decoder")
    with torch.no_grad():
        model.tokens.weight[END] = 0.0
    sources = some(4, 2)
    decoding = Decoding(beam=beam, max_tokens=(2.0, 1))
    results = translate(model, sources, replace(decoding, penalty="none"), **ENDS)
    for source, (best, *_) in zip(sources, results, strict=True):
        assert len(best.log_probabilities) <= 2 * len(source) + 1
    endless = translate(model, sources, decoding, begin=BEGIN, end=None)
    assert [len(best.tokens) for best, *_ in endless] == [9, 5]


@pytest.mark.parametrize("beam", (1, 3))
def test_the_longest_continuation_depends_on_the_prompt(beam: int) -> None:
    model = make("decoder", positions="learned", length=8)
    decoding = Decoding(beam=beam, max_tokens=(2.0, 1))
    for slide, prompts in ((False, some(2, 1)), (True, some(4, 10, 2))):
        results = generate(model, prompts, decoding, slide=slide)
        lengths = [len(best.tokens) for best, *_ in results]
        assert lengths == [2 * len(prompt) + 1 for prompt in prompts]


def test_learned_positions_limit_the_output() -> None:
    model = make("encoder-decoder", positions="learned", length=6)
    ((hypothesis,),) = translate(model, some(6), Decoding(beam=2), begin=BEGIN, end=None)
    assert len(hypothesis.tokens) == 6


@pytest.mark.parametrize("beam", (1, 2))
def test_a_sliding_context_drops_its_older_half(beam: int) -> None:
    context = 8
    model = sharpen(make("decoder", positions="learned", length=context))
    prompts = some(3, 8, 5, 12, 3)
    decoding = Decoding(beam=beam, max_tokens=20)
    results = list(generate(model, prompts, decoding, slide=True))
    for prompt, (hypothesis, *_) in zip(prompts, results, strict=True):
        if beam == 1:
            tokens, steps = slide_by_hand(model, prompt[-context:], 20, context)
            assert list(hypothesis.tokens) == tokens
            assert hypothesis.log_probabilities == pytest.approx(steps, abs=1e-10)
        assert len(hypothesis.tokens) == 20
        ((alone, *_),) = generate(model, [prompt], decoding, slide=True)
        near(alone, hypothesis)


@torch.inference_mode()
def slide_by_hand(
    model: Any, visible: list[int], new: int, context: int
) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    steps: list[float] = []
    for _ in range(new):
        log_probs = model(torch.tensor([visible]))[0, -1].log_softmax(dim=-1)
        allowed = log_probs.clone()
        allowed[PAD] = float("-inf")
        tokens.append(int(allowed.argmax()))
        steps.append(float(log_probs[tokens[-1]]))
        visible = [*visible, tokens[-1]]
        if len(visible) > context:
            visible = visible[-(context // 2) :]
    return tokens, steps


def test_sliding_changes_nothing_while_positions_are_left() -> None:
    model = make("decoder", positions="learned")
    prompts = some(3, 6)
    plain, sliding = (
        list(generate(model, prompts, sampled(9), slide=slide)) for slide in (False, True)
    )
    for one, other in zip(plain, sliding, strict=True):
        near(one[0], other[0])


def test_other_positions_have_no_limit() -> None:
    model = make("decoder", positions="rotary", length=8)
    ((hypothesis,),) = generate(model, some(10), sampled(20))
    assert len(hypothesis.tokens) == 20


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


def refuse(message: str, run: Any) -> None:
    with pytest.raises(InputError, match=message):
        run()


def test_an_empty_source_and_an_empty_prompt() -> None:
    message = r"^a source must have 1 token or more: source 1 \(counting from 0\) is empty\. Leave"
    refuse(message, lambda: list(translate(make("encoder-decoder"), [[3], []], **ENDS)))
    message = r"^a prompt must have 1 token or more: prompt 0 \(counting from 0\) is empty\. Start"
    refuse(message, lambda: list(generate(make("decoder"), [[]])))


def test_more_than_the_learned_positions() -> None:
    model = make("encoder-decoder", positions="learned", length=6)
    message = (
        r"^a source must fit the model's 6 learned positions: source 1 \(counting from 0\) has 7 "
        r"tokens\. Shorten or split it\.$"
    )
    refuse(message, lambda: list(translate(model, some(6, 7), **ENDS)))
    model = make("decoder", positions="learned", length=6)
    assert len(next(generate(model, some(4), sampled(3)))[0].tokens) == 3
    message = (
        r"^a prompt and its continuation must fit the model's 6 learned positions: prompt 0 "
        r"\(counting from 0\) has 4 tokens, and max_tokens allows 4 more\. Try max_tokens=3, the "
        r"last 3 tokens of the prompt, or slide=True, which drops the oldest tokens\.$"
    )
    refuse(message, lambda: list(generate(model, some(4), sampled(4))))
    message = r"9 tokens, and max_tokens allows 2 more\. Try the last 5 tokens of the prompt, or"
    refuse(message, lambda: list(generate(model, some(9), sampled(2))))
    message = r"has 9 tokens, and max_tokens allows 9 more\. Try slide=True, which drops the old"
    refuse(message, lambda: list(generate(model, some(9), sampled(9))))


def test_unsuitable_models_are_refused() -> None:
    encoder, both, decoder = (make(mode) for mode in ("encoder", "encoder-decoder", "decoder"))
    message = r"^translate needs a model of mode=encoder-decoder: got Decoder\.$"
    refuse(message, lambda: translate(decoder, [], **ENDS))
    message = r"^generate needs a model of mode=decoder: got EncoderDecoder\.$"
    refuse(message, lambda: generate(both, []))
    refuse("^generate needs a model of mode=decoder: got Encoder", lambda: generate(encoder, []))
    message = r"^generate needs a model in evaluation mode: dropout would change the result\. Call"
    refuse(message, lambda: generate(decoder.train(), []))
    config = ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=1, head="none")
    message = r"^generate needs a model that predicts tokens: got head=none\.$"
    refuse(message, lambda: generate(build(config).eval(), []))
    config = config.replace(mode="encoder-decoder", head="token", input="vectors")
    message = r"^translate needs a model of input=tokens: got vectors\.$"
    refuse(message, lambda: translate(build(config).eval(), [], **ENDS))


@pytest.mark.parametrize("name", ("begin", "end", "pad"))
@pytest.mark.parametrize("token", (-1, VOCAB))
def test_special_tokens_must_be_in_the_vocabulary(name: str, token: int) -> None:
    message = rf"^{name} must be a token id, 0 to {VOCAB - 1}: got {token}\.$"
    special = {**ENDS, name: token}
    refuse(message, lambda: translate(make("encoder-decoder"), [], **special))


def test_a_model_with_nan_weights_is_refused() -> None:
    model = make("encoder-decoder")
    with torch.no_grad():
        model.tokens.weight[5, 0] = float("nan")
    message = r"^decoding needs a model with finite logits: got log Σ exp\(logits\) = nan\."
    for beam in (1, 2):
        with pytest.raises(InputError, match=message):
            list(translate(model, some(3), Decoding(beam=beam), **ENDS))


@pytest.mark.parametrize("settings", [{}, {"sampler": "sample"}, {"beam": 3, "nbest": 2}])
def test_tokens_do_not_depend_on_whether_scores_are_computed(settings: dict[str, Any]) -> None:
    model, sources = sharpen(make("encoder-decoder")), some(5, 2, 7)
    with_scores = list(translate(model, sources, Decoding(**settings), **ENDS))
    without = list(translate(model, sources, Decoding(**settings, scores=False), **ENDS))
    for one, other in zip(with_scores, without, strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in other]
        assert [h.finished for h in one] == [h.finished for h in other]
        if "beam" not in settings:
            assert all(h.log_probabilities == () and math.isnan(h.score) for h in other)
    with torch.no_grad():
        model.tokens.weight.fill_(float("nan"))
    with pytest.raises(InputError, match=r"^decoding needs a model with finite logits"):
        list(translate(model, sources, Decoding(**settings, scores=False), **ENDS))


def test_the_oracle_is_deterministic() -> None:
    """The random language of the beam tests gives equal logits for equal tokens."""
    assert torch.equal(Oracle(1, 5).logits([3, 4]), Oracle(1, 5).logits([3, 4]))
    assert not torch.equal(Oracle(1, 5).logits([3, 4]), Oracle(1, 5).logits([4, 3]))
    assert draw(2, 3).shape == (2, 3)
