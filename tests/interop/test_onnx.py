"""Text models as ONNX, run in onnxruntime: the same outputs for other batches and lengths."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from addnorm import Mask, build, presets
from addnorm.config import Config
from addnorm.data.text.tokenizer import train_tokenizer
from addnorm.errors import ConfigError
from addnorm.interop.onnx import export_onnx
from tests.conftest import make
from tests.parity.common import randomise_

pytestmark = pytest.mark.slow
TOKENIZER = train_tokenizer(["the old man sat in the boat", "a fine day, it was"], "characters")
SMALL = {"width": 32, "depth": 2, "heads": 4, "ffn_width": 48, "length": 24}
SMALL |= {"vocab": TOKENIZER.size}
MODELS: dict[str, Config] = {
    "bert": presets.bert(**SMALL, head="class", outputs=2, pooler="tanh"),
    "mean": presets.bert(**SMALL, head="class", outputs=2, pool="mean", addnorm="pre"),
    "gpt2": presets.gpt2(**SMALL),
    "llama": presets.llama(**SMALL, kv_heads=2),
    "marian": presets.marian(**SMALL),
}


def runtime() -> Any:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("name", MODELS)
def test_outputs(name: str, tmp_path: Path) -> None:
    library = runtime()
    model: Any = randomise_(build(MODELS[name])).eval()
    notes = export_onnx(model, {"text": TOKENIZER}, tmp_path / "out", labels=["x", "y"])
    assert "outputs differ by up to" in notes[1]
    session = library.InferenceSession(str(tmp_path / "out/model.onnx"))
    ids, target = torch.randint(5, TOKENIZER.size, (2, 4, 11))
    real = torch.arange(11) < torch.tensor([[11], [3], [7], [1]])
    with torch.no_grad():
        if name == "marian":
            mask = Mask.padding(real)
            expected = model(ids, target, source_mask=mask, target_mask=Mask())
            given = {"source": ids, "real": real, "target": target}
        elif name in ("gpt2", "llama"):
            expected, given = model(ids), {"ids": ids}
        else:
            expected, given = model(ids, mask=Mask.padding(real)), {"ids": ids, "real": real}
    (found, *_) = session.run(None, {key: part.numpy() for key, part in given.items()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=2e-5)
    facts = json.loads((tmp_path / "out/model.json").read_text())
    assert facts["labels"] == ["x", "y"] and facts["special_ids"]["text"]["end"] == 2
    assert (tmp_path / "out/step.onnx").exists() == (name in ("gpt2", "llama", "marian"))


def test_vectors_are_refused(tmp_path: Path) -> None:
    runtime()
    model: Any = make("encoder", input="vectors", vocab=0, pad=None, head="class", outputs=2)
    with pytest.raises(ConfigError, match="only models of tokens and images are written as ONNX"):
        export_onnx(model, {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
