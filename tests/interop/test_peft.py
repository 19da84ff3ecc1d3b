"""Adapters in PEFT's layout: there and back, and against the library itself if it is installed."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from addnorm import build, presets
from addnorm.errors import SavedError
from addnorm.interop.huggingface import read_model, write_model
from addnorm.interop.peft import read_peft_, write_peft
from addnorm.models.adapters import Adapter, adapt_
from tests.models.test_adapters import move_

SMALL = {"vocab": 61, "width": 32, "depth": 2, "heads": 4, "ffn_width": 48, "length": 24}
MODELS = {
    "gpt2": presets.gpt2(**SMALL),
    "llama": presets.llama(**SMALL, kv_heads=2),
    "bert": presets.bert(**SMALL, head="class", outputs=3, pooler="tanh", init="xavier"),
    "t5": presets.t5(**SMALL, head_width=12),
    "gpt_neox": presets.gpt2(
        **SMALL, addnorm="parallel", positions="rotary", tie_embeddings="none", ffn="gelu"
    ),
}
IDS = torch.randint(5, 61, (2, 9), generator=torch.Generator().manual_seed(1))
KINDS = [(name, dora) for name in MODELS for dora in (False, True)]


def make(name: str) -> Any:
    torch.manual_seed(0)
    return build(MODELS[name]).eval()


def run(name: str, model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, IDS) if name == "t5" else model(IDS)


def adapted(name: str, dora: bool, roles: str = "attention,ffn") -> tuple[Any, Adapter]:
    model, adapter = make(name), Adapter(roles=roles, rank=3, alpha=5.0, dora=dora)
    adapt_(model, adapter)
    move_(model)
    return model, adapter


@pytest.mark.parametrize(
    ("name", "dora"),
    [pytest.param(*kind, marks=[pytest.mark.slow] if kind[1] else []) for kind in KINDS],
)
def test_there_and_back(name: str, dora: bool, tmp_path: Path) -> None:
    model, adapter = adapted(name, dora)
    write_peft(model, adapter, tmp_path)
    again = make(name)
    assert read_peft_(again, tmp_path).dora == dora
    torch.testing.assert_close(run(name, again), run(name, model), rtol=0, atol=2e-5)
    assert (run(name, again) - run(name, make(name))).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_some_matrices_of_a_fused_one(name: str, tmp_path: Path) -> None:
    model, adapter = adapted(name, True, "attention.query,attention.value")
    write_peft(model, adapter, tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert set(content["rank_pattern"].values()) == {6}
    again = make(name)
    read_peft_(again, tmp_path)
    torch.testing.assert_close(run(name, again), run(name, model), rtol=0, atol=2e-5)


@pytest.mark.parity
@pytest.mark.parametrize(("name", "dora"), KINDS)
def test_against_the_library(name: str, dora: bool, tmp_path: Path) -> None:
    """Written by us and read by PEFT; written by PEFT and read by us."""
    peft = pytest.importorskip("peft")
    hf = pytest.importorskip("transformers")
    hf.utils.logging.disable_progress_bar()
    model, adapter = adapted(name, dora)
    expected = run(name, model)
    kind = write_model(make(name), tmp_path / "base", architecture=name)
    write_peft(model, adapter, tmp_path / "adapter", base=str(tmp_path / "base"))
    base = getattr(hf, kind.class_of(model.config)).from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})
    with torch.no_grad():
        torch.testing.assert_close(theirs(**inputs).logits, expected, rtol=0, atol=5e-5)
    theirs.save_pretrained(tmp_path / "again")
    ours = read_model(tmp_path / "base").model
    read_peft_(ours, tmp_path / "again")
    torch.testing.assert_close(run(name, ours), expected, rtol=0, atol=5e-5)


# ── Refused ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model, adapter = adapted("llama", False)
    write_peft(model, adapter, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "must have peft_type=LORA: got 'LOHA'"),
        ({"r": None}, "must have a positive r: got None"),
        ({"lora_alpha": "x"}, "must have a positive lora_alpha: got 'x'"),
        ({"bias": "all"}, "has bias='all': only none can be read"),
        ({"lora_alpha": math.nan}, "must have a positive lora_alpha: got nan"),
        ({"alpha_pattern": {"q_proj": "x"}}, "must have a number for 'q_proj': got 'x'"),
    ],
)
def test_settings_that_cannot_be_read(
    directory: Path, settings: dict[str, Any], message: str
) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(SavedError, match=message):
        read_peft_(make("llama"), directory)


def test_adapters_of_another_model(directory: Path) -> None:
    with pytest.raises(SavedError, match="has no place in this model"):
        read_peft_(make("bert"), directory)
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "q_proj.lora_B" in name)
    save_file(tensors | {name: torch.zeros(5, 3)}, path)
    with pytest.raises(SavedError, match="does not fit this model"):
        read_peft_(make("llama"), directory)
    save_file({k: v for k, v in tensors.items() if k != name}, path)
    with pytest.raises(SavedError, match="must have lora_A and lora_B"):
        read_peft_(make("llama"), directory)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SavedError, match="is damaged or not a safetensors file"):
        read_peft_(make("llama"), directory)


@pytest.mark.parametrize("shape", [(), (3,), (0, 32), (2, 3, 4), (10**4, 1)])
def test_adapters_of_impossible_shapes(directory: Path, shape: tuple[int, ...]) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    save_file(tensors | {name: torch.zeros(shape)}, path)
    with pytest.raises(SavedError, match=r"must have lora_A of shape|does not fit this model"):
        read_peft_(make("llama"), directory)


def test_hostile_adapter_files(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path, elsewhere = directory / "adapter_model.safetensors", tmp_path_factory.mktemp("other")
    content = path.read_bytes()
    for size in (2**60, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", size) + content[8:])
        with pytest.raises(SavedError, match="is damaged or not a safetensors file"):
            read_peft_(make("llama"), directory)
    path.unlink()
    (elsewhere / path.name).write_bytes(content)
    path.symlink_to(elsewhere / path.name)
    with pytest.raises(SavedError, match="it is a link to another place"):
        read_peft_(make("llama"), directory)
    path.unlink()
    (directory / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'exit 1'\ntR.")
    message = r"only as adapter_model.bin.*never read\. Convert it where you trust it: python -c '"
    with pytest.raises(SavedError, match=message):
        read_peft_(make("llama"), directory)


def test_another_scale_by_the_square_root(directory: Path) -> None:
    model, _ = adapted("llama", False)
    path = directory / "adapter_config.json"
    content = json.loads(path.read_text())
    scale = content["lora_alpha"] / content["r"]
    content |= {"use_rslora": True, "lora_alpha": scale * content["r"] ** 0.5}
    path.write_text(json.dumps(content))
    again = make("llama")
    read_peft_(again, directory)
    torch.testing.assert_close(run("llama", again), run("llama", model), rtol=0, atol=2e-5)
