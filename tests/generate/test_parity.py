"""Against the decoding of Hugging Face transformers, weights copied over, in float64."""

from typing import Any

import pytest
import torch

from addnorm.generate import Decoding, generate, translate

pytest.importorskip("transformers", minversion="5.0")

from tests.parity.test_huggingface import CASES, VOCAB, copied, prepare

pytestmark = pytest.mark.parity

PAD, END, NEW = 0, 2, 9


def both(name: str) -> tuple[Any, Any]:
    theirs = prepare(CASES[name].theirs, torch.float64)
    return theirs, copied(CASES[name], theirs)


def prompts(count: int, length: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(3)
    return torch.randint(4, VOCAB, (count, length), generator=drawn).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ("gpt2", "llama"))
@pytest.mark.parametrize("beam", (1, 4))
@torch.no_grad()
def test_continuations_of_one_length(name: str, beam: int) -> None:
    """Without an end token, all implementations of beam search agree."""
    theirs, ours = both(name)
    ids = torch.tensor(prompts(3, 5))
    expected = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=beam,
        num_return_sequences=beam,
        do_sample=False,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        pad_token_id=PAD,
    )
    decoding = Decoding(beam=beam, nbest=beam, max_tokens=NEW, keep_greedy=False)
    results = list(generate(ours, ids.tolist(), decoding, pad=END))
    tokens = [h.tokens for each in results for h in each]
    assert tokens == [tuple(row) for row in expected[:, 5:].tolist()]


@torch.no_grad()
@pytest.mark.slow
def test_left_padded_prompts() -> None:
    theirs, ours = both("gpt2")
    rows = [row[: 2 + i] for i, row in enumerate(prompts(4, 6))]
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    expected = theirs.generate(
        ids,
        attention_mask=real,
        do_sample=False,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        pad_token_id=PAD,
    )
    results = generate(ours, rows, Decoding(max_tokens=NEW), pad=END)
    assert [h.tokens for (h,) in results] == [tuple(row) for row in expected[:, longest:].tolist()]


@pytest.mark.parametrize("name", ("marian", "bart"))
@pytest.mark.parametrize("beam", (1, 4))
@torch.no_grad()
def test_translations_of_one_length(name: str, beam: int) -> None:
    theirs, ours = both(name)
    rows = [row[: 3 + i] for i, row in enumerate(prompts(4, 6))]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    lengths = {"min_new_tokens": NEW, "max_new_tokens": NEW}
    expected = theirs.generate(
        ids,
        attention_mask=(ids != PAD).long(),
        num_beams=beam,
        num_return_sequences=beam,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
        suppress_tokens=[PAD],  # addnorm never chooses it; transformers does
        **lengths,
    )
    decoding = Decoding(beam=beam, nbest=beam, max_tokens=NEW, keep_greedy=False)
    results = translate(ours, rows, decoding, begin=PAD, end=None, pad=END)
    tokens = [h.tokens for each in results for h in each]
    assert tokens == [tuple(row) for row in expected[:, 1:].tolist()]
