"""Attention maps and hidden states against Hugging Face's own, weights copied over."""

import pytest
import torch

from addnorm.lens.look import look
from addnorm.lens.readout import logit_lens
from addnorm.lens.stream import decompose
from tests.parity.common import gap, padded
from tests.parity.test_huggingface import CASES, copied, prepare
from tests.theirs import VOCAB

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", ("gpt2", "bert", "llama"))
@torch.no_grad()
def test_maps_of_one_side(name: str) -> None:
    case = CASES[name]
    theirs = prepare(case.theirs, torch.float64)
    theirs.set_attn_implementation("eager")  # the fused kernels return no maps
    ours, (ids, _) = copied(case, theirs), padded((9,), VOCAB)
    found = look(ours, ids).maps
    expected = theirs(input_ids=ids, output_attentions=True).attentions
    assert len(found) == len(expected) > 1
    for weights, each in zip(found.values(), expected, strict=True):
        assert gap(weights, each.to(weights.dtype)) <= 1e-6


@pytest.mark.parametrize("name", ("t5", "bart", "marian"))
@torch.no_grad()
def test_maps_of_two_sides(name: str) -> None:
    case = CASES[name]
    theirs = prepare(case.theirs, torch.float64)
    ours = copied(case, theirs)
    (source, _), (target, _) = padded((9,), VOCAB), padded((6,), VOCAB, seed=2)
    found = look(ours, (source, target)).maps
    answer = theirs(input_ids=source, decoder_input_ids=target, output_attentions=True)
    views = {
        "encoder.{}.attention": answer.encoder_attentions,
        "decoder.{}.attention": answer.decoder_attentions,
        "decoder.{}.memory": answer.cross_attentions,
    }
    assert len(found) == sum(map(len, views.values()))
    for place, maps in views.items():
        for layer, expected in enumerate(maps):
            assert gap(found[place.format(layer)], expected.to(torch.float64)) <= 1e-6


@torch.no_grad()
def test_streams_logit_lens_and_pieces_of_gpt2() -> None:
    case = CASES["gpt2"]
    theirs = prepare(case.theirs, torch.float64)
    ours, (ids, _) = copied(case, theirs), padded((9,), VOCAB)
    states = theirs(input_ids=ids, output_hidden_states=True).hidden_states
    seen, table = look(ours, ids, "stream"), logit_lens(ours, ids)
    assert gap(seen.stream["decoder.input"], states[0]) <= 1e-10
    for layer, expected in enumerate(states[1:-1]):  # theirs norms the last
        assert gap(seen.stream[f"decoder.{layer}.ffn"], expected) <= 1e-10
        place = table.names.index(f"decoder.{layer}.ffn")
        logits = theirs.lm_head(theirs.transformer.ln_f(expected))
        assert gap(table.logits[place], logits) <= 1e-10
    parts = decompose(ours, ids)
    assert gap(parts.pieces.sum(dim=0), states[-1]) <= 1e-9
