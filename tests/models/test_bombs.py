"""Small files that claim huge models are refused at once, before anything is allocated."""

from pathlib import Path
from typing import Any

import numpy
import pytest

from addnorm import Config, ModelConfig, build
from addnorm.data.images import read_npz
from addnorm.data.table.schema import Schema
from addnorm.errors import ConfigError, InputError, SavedError
from addnorm.files import TEXT_MODEL, read_json, read_text
from addnorm.models.saved import load_model, write_tensors
from addnorm.section import parse_toml, read_value

SIZES: dict[str, Any] = {"vocab": 20, "width": 16, "depth": 1, "heads": 2, "length": 8}


@pytest.mark.parametrize("mode", ("decoder", "encoder-decoder"))
@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            {"depth": 10_000},
            r"it has \d+ tensors, too few for a depth of 10,000\. Use",
        ),
        ({"width": 10**6}, "does not match its own configuration"),
        ({"vocab": 10**12}, "does not match its own configuration: tokens.weight must be"),
        ({"ffn_width": 10**12}, "does not match its own configuration"),
        ({"width": 2**62, "heads": 1}, "cannot be built: Storage size calculation overflowed"),
    ),
    ids=("depth", "width", "vocab", "ffn", "overflow"),
)
def test_a_small_file_cannot_claim_a_large_model(
    mode: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    state = build(ModelConfig(mode=mode, **SIZES)).state_dict()
    config = Config(model=ModelConfig(mode=mode, **(SIZES | change)))
    write_tensors(tmp_path / "model.safetensors", state, *TEXT_MODEL, {"config": config.dump()})
    with pytest.raises(SavedError, match=message):
        load_model(tmp_path)


def test_deep_nesting_is_one_clear_error(tmp_path: Path) -> None:
    deep = "[" * 20_000
    with pytest.raises(ConfigError, match=r"run\.toml is nested too deeply\. A configuration has"):
        parse_toml(f"a = {deep}", "run.toml")
    with pytest.raises(ConfigError, match=r"the value \[+… is nested too deeply\. Give a plain"):
        read_value(deep)
    (tmp_path / "a.json").write_text(deep)
    with pytest.raises(SavedError, match=r"a\.json' is damaged: it is nested too deeply\. Use a b"):
        read_json(tmp_path / "a.json")


def test_an_archive_of_images_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy.savez_compressed(tmp_path / "x.npz", images=numpy.zeros((100, 8, 8)))
    monkeypatch.setattr("addnorm.data.images.MAX_IMAGE_BYTES", 10_000)
    with pytest.raises(InputError, match=r"at most 10,000 bytes: its arrays have 51,\d+\."):
        read_npz(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "text",
    (
        f"[{'.'.join('a' * 65)}]",
        f"[[{' . '.join('a' * 65)}]]",
        "x = 1\n  " + ".".join(["a-1", '"b.c"'] * 33) + " = 3",
        f"x = {{y = 1, {'.'.join('a' * 65)} = 3}}",
    ),
)
def test_keys_of_many_parts_are_one_clear_error(text: str) -> None:
    """The time of tomllib is quadratic in them: half a minute for 100 kB."""
    with pytest.raises(ConfigError, match=r"run\.toml is nested too deeply\."):
        parse_toml(text, "run.toml")
    with pytest.raises(ConfigError, match=r"adult\.toml is nested too deeply\."):
        Schema.parse(text, "adult.toml")
    with pytest.raises(ConfigError, match=r"is nested too deeply\. Give a plain value"):
        read_value(f"{{{'.'.join('a' * 65)} = 3}}")


def test_dots_in_values_are_no_keys() -> None:
    text = f"a.b.c = \"{'a.' * 100}\"\n[{'.'.join('a' * 64)}]\nd = [{'1.5, ' * 100}]\ne = '...'"
    assert parse_toml(text, "run.toml")["a"]["b"]["c"] == "a." * 100


def test_texts_must_be_regular_files_below_a_limit(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"'/dev/zero' is not a regular file\. Check the path"):
        read_text("/dev/zero")
    (tmp_path / "long").write_text("12345")
    with pytest.raises(SavedError, match="must have at most 4 bytes: it has more"):
        read_text(tmp_path / "long", limit=4)
