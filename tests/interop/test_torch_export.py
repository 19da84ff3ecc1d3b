"""Programs of torch.export: the same outputs for other batches and lengths."""

from pathlib import Path
from typing import Any

import pytest
import torch

from addnorm import Mask, build
from addnorm.errors import ConfigError, SavedError
from addnorm.interop import torch_export
from addnorm.interop.torch_export import export_torch
from tests.conftest import make
from tests.interop.test_onnx import MODELS, TOKENIZER
from tests.parity.common import randomise_


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "marian"])
def test_a_program_computes_the_same(name: str, tmp_path: Path) -> None:
    model: Any = randomise_(build(MODELS[name])).eval()
    notes = export_torch(model, {"text": TOKENIZER}, tmp_path / "out", labels=["x", "y"])
    assert "outputs differ by up to" in notes[1]
    again = torch.export.load(tmp_path / "out/model.pt2").module()
    ids = torch.randint(5, TOKENIZER.size, (4, 11))
    real = torch.arange(11) < torch.tensor([[11], [3], [7], [1]])
    with torch.no_grad():
        if name in ("gpt2", "llama"):
            expected, found = model(ids), again(ids)
        else:
            expected, found = model(ids, mask=Mask.padding(real)), again(ids, real)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.pt2",
        "model.json",
        "tokenizer",
    }


@pytest.mark.slow
def test_what_is_refused_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors: Any = make("encoder", input="vectors", vocab=0, pad=None, head="class", outputs=2)
    with pytest.raises(ConfigError, match="only models of tokens and images are written so"):
        export_torch(vectors, {}, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"encoder-decoders are not written so\. Try --to onnx"):
        export_torch(build(MODELS["marian"]), {}, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    model: Any = build(MODELS["gpt2"]).eval()
    with pytest.raises(SavedError, match="is not empty"):
        export_torch(model, {"text": TOKENIZER}, tmp_path / "full")
    monkeypatch.setattr(torch_export, "TORCH_TOLERANCE", -1.0)
    with pytest.raises(SavedError, match="does not compute what the model does"):
        export_torch(model, {"text": TOKENIZER}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
