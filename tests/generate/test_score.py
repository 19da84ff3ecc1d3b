"""`score` equals the log-probabilities of decoding, and those of a naive loop for any target."""

from typing import Any

import pytest
import torch

from addnorm.errors import InputError
from addnorm.generate import Decoding, score, translate
from addnorm.generate.search import log_total
from tests.conftest import PAD, VOCAB, make
from tests.generate import naive
from tests.generate.naive import BEGIN, END
from tests.generate.test_decode import sharpen, some


@pytest.mark.parametrize("beam", (1, 4))
@pytest.mark.parametrize("penalty", ("length", "gnmt"))
def test_score_equals_the_log_probabilities_of_decoding(beam: int, penalty: str) -> None:
    model = sharpen(make("encoder-decoder"))
    sources = some(5, 2, 8)
    decoding = Decoding(
        beam=beam, nbest=min(2, beam), max_tokens=(1.0, 4), penalty=penalty, alpha=0.8
    )
    results = list(translate(model, sources, decoding, begin=BEGIN, end=END))
    pairs = [(s, h) for s, hs in zip(sources, results, strict=True) for h in hs]
    scored = score(model, [s for s, _ in pairs], [h.tokens for _, h in pairs], begin=BEGIN, end=END)
    for (_, hypothesis), expected in zip(pairs, scored, strict=True):
        assert hypothesis.log_probabilities == pytest.approx(expected, abs=1e-10)
        total, length = sum(expected), len(expected)
        assert hypothesis.log_probability == pytest.approx(total, abs=1e-10)
        divisor = naive.divisor(length, penalty, 0.8)
        assert hypothesis.score == pytest.approx(total / divisor, abs=1e-10)


@pytest.mark.parametrize("end", (END, None))
@pytest.mark.parametrize("size", (4096, 12))
def test_a_translation_is_scored_token_by_token(end: int | None, size: int) -> None:
    model = make("encoder-decoder")
    sources, targets = some(3, 6, 1), some(4, 1, 7)
    settings: dict[str, Any] = {"begin": BEGIN, "end": end, "batch_tokens": size}
    for source, target, scores in zip(
        sources, targets, score(model, sources, targets, **settings), strict=True
    ):
        next_log_probs = naive.translation_log_probs(model, source)
        whole = [*target, *([] if end is None else [end])]
        expected = [float(next_log_probs(whole[:i])[token]) for i, token in enumerate(whole)]
        assert scores == pytest.approx(expected, abs=1e-10)


def test_a_continuation_is_scored_after_its_prompt() -> None:
    model = make("decoder")
    prompts, targets = some(3, 1, 5), [*some(4, 2), []]
    for prompt, target, scores in zip(
        prompts, targets, score(model, prompts, targets, end=END), strict=True
    ):
        next_log_probs = naive.continuation_log_probs(model, prompt)
        whole = [*target, END]
        expected = [float(next_log_probs(whole[:i])[token]) for i, token in enumerate(whole)]
        assert scores == pytest.approx(expected, abs=1e-10)


def test_the_padding_token_in_a_target_is_scored() -> None:
    model = make("encoder-decoder")
    ((scores),) = score(model, [[3, 4]], [[5, PAD, 6]], begin=BEGIN)
    plain = make("encoder-decoder", pad=None)
    plain.load_state_dict(model.state_dict())
    next_log_probs = naive.translation_log_probs(plain, [3, 4])
    expected = [
        float(next_log_probs([5, PAD, 6][:i])[token]) for i, token in enumerate([5, PAD, 6])
    ]
    assert scores == pytest.approx(expected, abs=1e-10)


def test_logits_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("encoder-decoder")
    sources, targets = some(3, 4), some(9, 8)
    whole = list(score(model, sources, targets, begin=BEGIN))
    monkeypatch.setattr("addnorm.generate.decode.SCORED_TOKENS", 4)
    shapes: list[torch.Size] = []
    model.head.register_forward_hook(lambda _, inputs, out: shapes.append(out.shape))
    for one, other in zip(whole, score(model, sources, targets, begin=BEGIN), strict=True):
        assert one == pytest.approx(other, abs=1e-12)
    assert max(shape[1] for shape in shapes) == 4 and shapes[0][2] == VOCAB


def test_invalid_pairs_are_refused() -> None:
    both, decoder = make("encoder-decoder"), make("decoder")
    message = (
        r"^an encoder-decoder needs a begin token and a decoder takes none: got begin={} "
        r"for mode={}\.$"
    )
    with pytest.raises(InputError, match=message.format("None", "encoder-decoder")):
        score(both, [], [])
    with pytest.raises(InputError, match=message.format("1", "decoder")):
        score(decoder, [], [], begin=1)
    message = (
        r"^a pair must have a source, and a target or an end token: pair 1 \(counting from 0\) has "
        r"{} source and {} target tokens\.$"
    )
    with pytest.raises(InputError, match=message.format(0, 2)):
        list(score(decoder, [[3], []], [[4], [5, 6]]))
    with pytest.raises(InputError, match=message.format(1, 0)):
        list(score(decoder, [[3], [4]], [[4], []]))
    message = r"^there must be as many targets as sources: got only 1 {}\.$"
    with pytest.raises(InputError, match=message.format("targets")):
        list(score(decoder, [[3], [4]], [[4]]))
    with pytest.raises(InputError, match=message.format("sources")):
        list(score(decoder, [[3]], [[4], [4]]))
    with pytest.raises(InputError, match=r"^score needs a model in evaluation mode"):
        score(decoder.train(), [], [])


def test_log_totals_are_those_of_torch() -> None:
    logits = torch.randn(11, 300, generator=torch.Generator().manual_seed(0)) * 20
    logits[3, :299] = float("-inf")
    logits[5] += 1e4
    expected = logits.double().logsumexp(dim=1, keepdim=True)
    torch.testing.assert_close(log_total(logits).double(), expected, rtol=1e-6, atol=1e-6)
    for value in ("nan", "inf"):
        damaged = logits.clone()
        damaged[7, 1] = float(value)
        with pytest.raises(InputError, match="finite logits"):
            log_total(damaged)
