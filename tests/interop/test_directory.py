"""Damaged and hostile directories are refused, each with an error that says what is wrong."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from addnorm import presets
from addnorm.cli.main import main
from addnorm.errors import SavedError
from addnorm.files import HUGGING_FACE, kind_of_directory
from addnorm.interop.directory import HF_CONFIG, HF_INDEX, HF_WEIGHTS, Weights
from addnorm.interop.huggingface import read_model, write_model
from addnorm.models.build import build

SMALL = {"vocab": 61, "width": 32, "depth": 2, "heads": 4, "ffn_width": 48, "length": 24}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    write_model(build(presets.gpt2(**SMALL)), tmp_path / "model")
    return tmp_path / "model"


def change(directory: Path, **settings: Any) -> None:
    """Change keys of config.json; None removes one."""
    content = json.loads((directory / HF_CONFIG).read_text()) | settings
    (directory / HF_CONFIG).write_text(
        json.dumps({k: v for k, v in content.items() if v is not None})
    )


def shard(directory: Path) -> dict[str, str]:
    """Cut the weights into two files with an index; return its table."""
    tensors = load_file(directory / HF_WEIGHTS)
    (directory / HF_WEIGHTS).unlink()
    names = sorted(tensors)
    half = len(names) // 2
    table = {}
    for file, part in (("one.safetensors", names[:half]), ("two.safetensors", names[half:])):
        save_file({name: tensors[name] for name in part}, directory / file)
        table |= dict.fromkeys(part, file)
    write_index(directory, table)
    return table


def write_index(directory: Path, table: Any) -> None:
    (directory / HF_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))


def rewrite(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / HF_WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / HF_WEIGHTS)


def refused(directory: Path, message: str) -> None:
    with pytest.raises(SavedError, match=message):
        read_model(directory)


# ── Directories ───────────────────────────────────────────────────────────────────────────────────


def test_what_is_a_directory_of_hugging_face(directory: Path, tmp_path: Path) -> None:
    assert kind_of_directory(directory) == HUGGING_FACE
    assert kind_of_directory(tmp_path) is None
    for content in ("[]", "{}", "{", "[" * 100_000):
        (tmp_path / HF_CONFIG).write_text(content)
        assert kind_of_directory(tmp_path) is None


def test_headers_are_known_before_weights(directory: Path) -> None:
    with Weights(directory) as weights:
        assert weights["transformer.wte.weight"].shape == (61, 32)
        assert weights["transformer.wte.weight"].dtype == "F32"


def test_shards_are_one_model(directory: Path) -> None:
    expected = read_model(directory).model.state_dict()
    shard(directory)
    found = read_model(directory).model.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_link_out_of_the_directory(directory: Path, tmp_path: Path) -> None:
    for name in (HF_WEIGHTS, HF_CONFIG):
        os.rename(directory / name, tmp_path / name)
        (directory / name).symlink_to(tmp_path / name)
        refused(directory, r"must be a file of that directory: it is a link.*cp -rL")
        (directory / name).unlink()
        os.rename(tmp_path / name, directory / name)


@pytest.mark.parametrize("name", ["one.safetensors", HF_INDEX])
def test_a_part_that_is_a_link_out_of_the_directory(
    directory: Path, tmp_path: Path, name: str
) -> None:
    shard(directory)
    os.rename(directory / name, tmp_path / name)
    (directory / name).symlink_to(tmp_path / name)
    refused(directory, r"must be a file of that directory: it is a link.*cp -rL")
    (directory / name).unlink()
    (directory / name).symlink_to(directory / name)  # a link to itself
    refused(directory, "cannot be read|there is no")


@pytest.mark.parametrize("name", [HF_WEIGHTS, HF_CONFIG, "one.safetensors"])
def test_what_is_not_a_file(directory: Path, name: str) -> None:
    if name == "one.safetensors":
        shard(directory)
    (directory / name).unlink()
    (directory / name).mkdir()
    refused(directory, "is not a regular file")
    (directory / name).rmdir()
    os.mkfifo(directory / name)  # reading one waits for ever
    refused(directory, "is not a regular file")


def test_a_link_inside_of_the_directory(directory: Path) -> None:
    os.rename(directory / HF_WEIGHTS, directory / "real.safetensors")
    (directory / HF_WEIGHTS).symlink_to("real.safetensors")
    assert read_model(directory).notes == []


@pytest.mark.parametrize(
    "name",
    [
        "../two.safetensors",
        "/tmp/two.safetensors",
        "a/two.safetensors",
        ".two.safetensors",
        "two.bin",
        "two.safetensors\x00",
        "",
        7,
        None,
    ],
)
def test_an_index_that_names_other_files(directory: Path, name: object) -> None:
    table: dict[str, Any] = shard(directory)
    write_index(directory, table | {"transformer.wte.weight": name})
    refused(directory, "may name only .safetensors files in its directory")


def test_an_index_that_disagrees(directory: Path) -> None:
    table = shard(directory)
    write_index(directory, table | {"transformer.wte.weight": "one.safetensors"})
    refused(directory, "'transformer.wte.weight' is in 'one.safetensors', but it is in 'two")
    write_index(directory, table | {"more": "one.safetensors"})
    refused(directory, "'more' is in 'one.safetensors', but it is in 'no file'")
    write_index(directory, {k: v for k, v in table.items() if not k.endswith("wte.weight")})
    refused(directory, "is in 'no file', but it is in 'two.safetensors'")
    for nothing in ([], {}, None, "one.safetensors"):
        write_index(directory, nothing)
        refused(directory, "must have a weight_map")
    for text in ("", "[]", "[" * 100_000):
        (directory / HF_INDEX).write_text(text)
        refused(directory, "is not JSON|must hold a JSON object")


def test_an_index_of_a_file_that_is_absent(directory: Path) -> None:
    shard(directory)
    (directory / "two.safetensors").unlink()
    refused(directory, "there is no file .*two.safetensors")


def test_a_tensor_in_two_files(directory: Path) -> None:
    table = shard(directory)
    one = load_file(directory / "one.safetensors")
    save_file(one | {"transformer.wte.weight": torch.zeros(61, 32)}, directory / "one.safetensors")
    write_index(directory, table)
    refused(directory, "each tensor must be in one file: 'transformer.wte.weight'")


# ── Damaged files ─────────────────────────────────────────────────────────────────────────────────


def test_truncated_weights(directory: Path) -> None:
    content = (directory / HF_WEIGHTS).read_bytes()
    for size in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        (directory / HF_WEIGHTS).write_bytes(content[:size])
        refused(directory, "is damaged or not a safetensors file")


@pytest.mark.parametrize("size", (2**60, 2**63 - 1, 2**64 - 1, 10**9))
def test_a_header_of_impossible_size(directory: Path, size: int) -> None:
    content = (directory / HF_WEIGHTS).read_bytes()
    (directory / HF_WEIGHTS).write_bytes(struct.pack("<Q", size) + content[8:])
    refused(directory, "is damaged or not a safetensors file")
    (directory / HF_WEIGHTS).write_bytes(content)
    shard(directory)
    content = (directory / "two.safetensors").read_bytes()
    (directory / "two.safetensors").write_bytes(struct.pack("<Q", size) + content[8:])
    refused(directory, "two.safetensors' is damaged or not a safetensors file")


@pytest.mark.parametrize(
    ("shape", "offsets"),
    (([2**60], [0, 4]), ([2**40, 2**40], [0, 4]), ([-1], [0, 4]), ([1], [0, 2**60]), ([1], [4, 0])),
)
def test_a_tensor_of_impossible_size(directory: Path, shape: list[int], offsets: list[int]) -> None:
    header = {"transformer.wte.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
    text = json.dumps(header).encode()
    (directory / HF_WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    refused(directory, "is damaged or not a safetensors file")


@pytest.mark.parametrize("text", ("", "{", "[1]", "[" * 100_000, '"a"', "\xff"))
def test_a_damaged_config(directory: Path, text: str) -> None:
    (directory / HF_CONFIG).write_bytes(text.encode("latin-1"))
    refused(directory, "is not JSON|must hold a JSON object")


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        ({"n_embd": 64}, r"must have shape \(61, 64\) by its config.json: got \(61, 32\)"),
        ({"n_embd": 2**40}, r"describes no model|must have shape"),
        ({"n_embd": "32"}, "describes no model that can be built: model.width must be"),
        ({"n_embd": -32}, "model.width must be positive"),
        ({"n_layer": 10_000}, "says 10,000 blocks, but there are only 28 tensors"),
        ({"n_layer": 3}, "must have the tensor 'transformer.h.2.*it is missing"),
        ({"n_layer": 1}, r"'transformer.h.1.* has no place in gpt2 with head=token"),
        ({"n_head": 5}, "model.heads must divide width"),
        ({"vocab_size": 10**15}, "must have shape|describes no model"),
        ({"vocab_size": None}, "config.json must have vocab_size: it has none"),
        ({"model_type": "gpt3"}, "model_type='gpt3', which addnorm does not read. It reads bart"),
        ({"model_type": 7}, "model_type=7, which addnorm does not read"),
        ({"architectures": ["GPT2ForTokenClassification"]}, "must name one of GPT2LMHeadModel"),
        ({"architectures": "GPT2LMHeadModel"}, "must name one of GPT2LMHeadModel"),
        ({"activation_function": "mish"}, "activation_function='mish': addnorm reads gelu"),
        ({"activation_function": ["gelu"]}, "addnorm reads gelu"),
        ({"scale_attn_by_inverse_layer_idx": True}, "addnorm scales all layers alike"),
        ({"quantization_config": {"bits": 4}}, "has quantised weights"),
    ),
)
def test_a_config_that_does_not_fit(
    directory: Path, settings: dict[str, Any], message: str
) -> None:
    change(directory, **settings)
    refused(directory, message)


def test_a_tensor_that_is_missing_or_unused(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.__delitem__("transformer.h.1.ln_2.bias"))
    refused(directory, r"must have the tensor 'transformer.h.1.ln_2.bias' of shape \(32,\)")
    rewrite(directory, lambda t: t.update({"transformer.h.1.ln_2.bias": torch.zeros(32)}))
    read_model(directory)
    rewrite(directory, lambda t: t.update({"transformer.h.1.ln_9.bias": torch.zeros(32)}))
    refused(directory, "'transformer.h.1.ln_9.bias' in .* has no place in gpt2")


def test_integers_are_not_weights(directory: Path) -> None:
    ids = torch.zeros(61, 32, dtype=torch.int8)
    rewrite(directory, lambda tensors: tensors.update({"transformer.wte.weight": ids}))
    refused(directory, "must be of floating point .*: got I8")


def test_a_tied_copy_must_be_equal(directory: Path) -> None:
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    read_model(directory)
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1.0}))
    refused(directory, "'lm_head.weight' and 'transformer.wte.weight' must be equal")
    change(directory, tie_word_embeddings=False)
    assert read_model(directory).model.config.tie_embeddings == "none"


def test_names_without_the_prefix_of_the_class(directory: Path) -> None:
    """The published GPT-2 is stored like this, with the buffers of its masks."""
    expected = read_model(directory).model.state_dict()
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(directory / HF_WEIGHTS).items()
    }
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24) for layer in range(2)}
    save_file(tensors | masks, directory / HF_WEIGHTS)
    imported = read_model(directory)
    found = imported.model.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert imported.notes == ["2 tensors are not used: the causal mask."]


# ── Pickles ───────────────────────────────────────────────────────────────────────────────────────


class Payload:
    """Makes a directory where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "a.ckpt", "weights.pkl"]
)
def test_pickled_weights_are_never_read(directory: Path, tmp_path: Path, name: str) -> None:
    (directory / HF_WEIGHTS).unlink()
    refused(directory, "there is no model.safetensors")
    mark = tmp_path / "unpickled"
    (directory / name).write_bytes(pickle.dumps(Payload(mark)))
    refused(
        directory,
        rf"only as {name}, which can hold code and is never read\. Convert it where "
        r"you trust it: python -c 'import transformers as t; t\.GPT2LMHeadModel",
    )
    os.rename(directory / name, directory / HF_WEIGHTS)
    refused(directory, "is damaged or not a safetensors file")
    assert not mark.exists()
    pickle.loads((directory / HF_WEIGHTS).read_bytes())
    assert mark.is_dir(), "the payload works, if it is read"


def test_a_pickle_beside_safetensors_is_not_opened(directory: Path, tmp_path: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "unpickled")))
    read_model(directory)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("verb", ["import", "embed", "generate", "train"])
def test_every_verb_refuses_with_one_line(
    directory: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / HF_WEIGHTS).write_bytes(struct.pack("<Q", 2**60) + b"{}")
    (tmp_path / "texts.txt").write_text("a b\nc d\n" * 20)
    text, out = str(tmp_path / "texts.txt"), str(tmp_path / "out")
    words = {
        "import": [str(directory), out],
        "embed": [str(directory), text, "-o", f"{out}.npy"],
        "generate": [str(directory), "--prompt", "a"],
        "train": ["language", text, "--from", str(directory), "--out", out],
    }
    assert main([verb, *words[verb]]) == 2
    output = capsys.readouterr()
    assert "is damaged or not a safetensors file" in output.err.splitlines()[-1]
    assert not output.out and not [*tmp_path.glob("out*")]


def test_a_pickle_named_as_safetensors(directory: Path) -> None:
    torch.save({"a": torch.zeros(2)}, directory / HF_WEIGHTS)
    refused(directory, "is damaged or not a safetensors file")
