"""Models written for CTranslate2 and run there: the same tokens as ours."""

from pathlib import Path
from typing import Any

import pytest
import torch

from addnorm import build, presets
from addnorm.config import Config
from addnorm.data.text.tokenizer import train_tokenizer
from addnorm.errors import ConfigError, SavedError
from addnorm.generate import Decoding, generate, translate
from addnorm.interop import ctranslate2 as exporter
from addnorm.interop.ctranslate2 import export_ctranslate2, require_expressible
from tests.parity.common import randomise_

SMALL = {"width": 32, "depth": 2, "heads": 4, "ffn_width": 48, "length": 40}
TOKENIZER = train_tokenizer(["the old man sat in the boat", "a fine day, it was"], "characters")
VOCAB = TOKENIZER.size
PAIRS: dict[str, Config] = {
    "pre": presets.base(**SMALL, vocab=VOCAB, addnorm="pre", decoder_depth=3),
    "post": presets.base(**SMALL, vocab=VOCAB, attention_bias="all"),
    "admin": presets.base(**SMALL, vocab=VOCAB, addnorm="admin"),
    "marian": presets.marian(**SMALL, vocab=VOCAB, unembed_bias=True),
    "bart": presets.bart(**SMALL, vocab=VOCAB),
    "rms, gated": presets.base(**SMALL, vocab=VOCAB, addnorm="pre", norm="rms", ffn="geglu"),
    "rotary": presets.base(**SMALL, vocab=VOCAB, addnorm="pre", positions="rotary"),
    "wide heads": presets.base(**SMALL, vocab=VOCAB, addnorm="pre", attention_scale=0.2),
}
DECODERS: dict[str, Config] = {
    "gpt2": presets.gpt2(**SMALL, vocab=VOCAB),
    "llama": presets.llama(**SMALL, vocab=VOCAB, kv_heads=2),
    "untied": presets.llama(**SMALL, vocab=VOCAB, kv_heads=4, tie_embeddings="none"),
}


def make(config: Config) -> Any:
    torch.manual_seed(0)
    model = randomise_(build(config)).eval()
    with torch.no_grad():
        for name, part in model.named_parameters():
            if name.endswith("omega"):
                part.add_(1.0)
    return model


def sources(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 12, (count,), generator=generator).tolist()
    return [torch.randint(5, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def translator(model: Any, directory: Path) -> Any:
    ct2 = pytest.importorskip("ctranslate2")
    notes = export_ctranslate2(model, {"text": TOKENIZER}, directory)
    assert "log-probabilities of tokens differ by up to" in notes[1]
    return ct2.Translator(str(directory), device="cpu")


@pytest.mark.parametrize("name", PAIRS)
def test_greedy_translations(name: str, tmp_path: Path) -> None:
    model = make(PAIRS[name])
    ids = [[*row, 2] for row in sources(20)]
    found = translator(model, tmp_path / "out").translate_batch(
        [[TOKENIZER.piece(n) for n in row] for row in ids],
        beam_size=1,
        min_decoding_length=0,
        max_decoding_length=15,
        suppress_sequences=[["<pad>"], ["<begin>"]],
    )
    ours = translate(model, ids, Decoding(max_tokens=16), begin=1, end=2, pad=0)
    expected = [[TOKENIZER.piece(n) for n in best[0].tokens] for best in ours]
    assert [result.hypotheses[0] for result in found] == expected


@pytest.mark.parametrize("name", PAIRS)
def test_beam_search(name: str, tmp_path: Path) -> None:
    """Where nothing ends and nothing is suppressed, it is the same thing to everybody."""
    model = make(PAIRS[name].replace(unembed_bias=True))
    with torch.no_grad():
        model.head.bias[:3] = -50.0
    ids = [[*row, 2] for row in sources(20)]
    found = translator(model, tmp_path / "out").translate_batch(
        [[TOKENIZER.piece(n) for n in row] for row in ids],
        beam_size=4,
        min_decoding_length=9,
        max_decoding_length=9,
    )
    decoding = Decoding(beam=4, max_tokens=9, keep_greedy=False)
    ours = translate(model, ids, decoding, begin=1, end=None, pad=2)
    expected = [[TOKENIZER.piece(n) for n in best[0].tokens] for best in ours]
    assert [result.hypotheses[0] for result in found] == expected


@pytest.mark.parametrize("name", DECODERS)
def test_continuations(name: str, tmp_path: Path) -> None:
    ct2 = pytest.importorskip("ctranslate2")
    model = make(DECODERS[name])
    export_ctranslate2(model, {"text": TOKENIZER}, tmp_path / "out")
    ids = sources(10)
    engine = ct2.Generator(str(tmp_path / "out"), device="cpu")
    found = engine.generate_batch(
        [[TOKENIZER.piece(n) for n in row] for row in ids],
        max_length=12,
        end_token=[],
        include_prompt_in_result=False,
        suppress_sequences=[["<pad>"]],
    )
    ours = generate(model, ids, Decoding(max_tokens=12), pad=0)
    expected = [[TOKENIZER.piece(n) for n in best[0].tokens] for best in ours]
    assert [result.sequences[0] for result in found] == expected


def test_int8_is_smaller_and_near(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    model = make(PAIRS["pre"])
    export_ctranslate2(model, {"text": TOKENIZER}, tmp_path / "float")
    export_ctranslate2(model, {"text": TOKENIZER}, tmp_path / "int8", precision="int8")
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("float", "int8")]
    assert sizes[1] < sizes[0]
    with pytest.raises(SavedError, match="is not empty"):
        export_ctranslate2(model, {"text": TOKENIZER}, tmp_path / "int8")
    with pytest.raises(ConfigError, match="precision must be one of float32, int8"):
        export_ctranslate2(model, {"text": TOKENIZER}, tmp_path / "new", precision="int4")


@pytest.mark.parametrize("name", ["pre", "rotary"])
def test_int8_is_compared_with_the_model_which_does_not_change(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    model = make(PAIRS[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    notes = export_ctranslate2(model, {"text": TOKENIZER}, tmp_path / "int8", precision="int8")
    assert notes[1].endswith(" (random sequences).")
    difference = float(notes[1].partition(" up to ")[2].split()[0])
    assert 0 < difference < exporter.CT2_ROUGH_TOLERANCE
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_an_export_that_computes_something_else_fails(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2")
    model = make(PAIRS["pre"])
    monkeypatch.setattr(exporter, "compare_with_ctranslate2", lambda *_: 7.4e3)
    with pytest.raises(SavedError, match=r"differ by up to 7.4e\+03, above"):
        export_ctranslate2(model, {"text": TOKENIZER}, tmp_path / "new", precision=precision)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (presets.base(**SMALL, vocab=VOCAB, addnorm="deepnorm"), "model.addnorm='deepnorm'"),
        (presets.base(**SMALL, vocab=VOCAB, norm="scale"), "model.norm='scale'"),
        (presets.t5(**SMALL, vocab=VOCAB, head_width=8), "model.positions='buckets'"),
        (presets.gpt2(**SMALL, vocab=VOCAB, qk_norm="head"), "model.qk_norm='head'"),
        (presets.gpt2(**SMALL, vocab=VOCAB, window=3), "model.window=3"),
        (presets.gpt2(**SMALL, vocab=VOCAB, span=3), "model.span=3"),
        (presets.gpt2(**SMALL, vocab=VOCAB, ffn="all-attention"), "model.ffn='all-attention'"),
        (presets.llama(**SMALL, vocab=VOCAB, kv_heads=4, logit_cap=3.0), "model.logit_cap=3.0"),
        (presets.bert(**SMALL, vocab=VOCAB), "needs a model that predicts tokens"),
    ],
)
def test_what_cannot_be_expressed_is_refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_expressible(build(config))
