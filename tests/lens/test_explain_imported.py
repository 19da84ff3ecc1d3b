"""Explanations of runs imported from Hugging Face directories."""

from pathlib import Path
from typing import Any

import pytest
import torch

import addnorm
from tests.interop.test_imported import SIZES, classifier, save, write_pairs
from tests.parity.common import randomise_

hf: Any = pytest.importorskip("transformers", minversion="5.0")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

__all__ = ["classifier"]


@pytest.mark.parametrize("kind", ("gpt2", "llama"))
def test_a_language_model(tmp_path: Path, kind: str) -> None:
    vocab = write_pairs(tmp_path, ["<|endoftext|>"])
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, vocab_size=vocab))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, vocab_size=vocab))
    run = addnorm.open(save(randomise_(model).eval(), tmp_path))
    one = run.explain("the old boat")
    logits = run.model(torch.tensor([run.trained.tokenizer.encode("the old boat")])).detach()[0]
    assert one.kind == "logit" and len(one.outputs) == len(one.tokens["decoder"]) == len(logits)
    sums = one.pieces[1].sum(dim=0)
    last = int(logits[-1].argmax())
    assert float(sums[-1]) == pytest.approx(float(logits[-1, last]), abs=1e-4)
    assert "decoder.1.attention.3" in one.pieces[0] and one.to_dict()["heads"]


def test_a_classifier(classifier: Path) -> None:
    run = addnorm.open(classifier)
    one = run.explain("a bad day for the old boat")
    probabilities = run.classify("a bad day for the old boat")[0]
    label = max(probabilities, key=probabilities.__getitem__)
    assert one.kind == "margin" and one.outputs == [label]
    assert one.probabilities[0] == pytest.approx(probabilities[label], abs=1e-5)
    # The ends are in every text: nothing is due to them.
    contributions = one.contributions["encoder"][0]
    assert float(contributions[0]) == float(contributions[-1]) == 0
    assert bool(contributions[1:-1].abs().max() > 0)
    assert len(one.page().html()) < 2_000_000


def test_an_encoder_decoder(tmp_path: Path) -> None:
    vocab = write_pairs(tmp_path, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
    }
    config = hf.BartConfig(**sides, d_model=32, max_position_embeddings=64, vocab_size=vocab)
    torch.manual_seed(0)
    model = randomise_(hf.BartForConditionalGeneration(config)).eval()
    one = addnorm.open(save(model, tmp_path)).explain("a fine day", target="two boats")
    alignment = one.alignment()
    assert [each.output for each in alignment] == one.outputs
    for p, each in enumerate(alignment):
        best = int(one.contributions["encoder"][p].argmax())
        assert (each.position, each.source) == (best, one.tokens["encoder"][best])
    assert "Alignment" in one.page().html()
