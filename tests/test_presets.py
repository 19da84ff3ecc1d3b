"""Presets: published numbers of parameters, names, and the order of overrides."""

from pathlib import Path

import pytest
import torch

import addnorm
from addnorm import Config, presets
from addnorm.errors import ConfigError, SavedError

PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "llama-stories260k": 260_032,
    "llama-1b": 1_100_048_384,
    "llama-7b": 6_738_415_616,
    "vit-tiny": 5_717_416,
    "vit-small": 22_050_664,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
}
"""Parameters of the released models; BERT with the head for masked tokens only."""


def count(config: Config) -> int:
    """Return the number of parameters, without allocating them."""
    with torch.device("meta"):
        return addnorm.build(config).count()


# ── Parameter counts ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_count_as_published(name: str) -> None:
    assert count(presets.find(name)) == PUBLISHED[name]


def linear(inward: int, outward: int, bias: bool = True) -> int:
    return inward * outward + bias * outward


def attention(width: int, bias: bool = True) -> int:
    return 4 * linear(width, width, bias)


def feedforward(width: int, inner: int, parts: int = 1) -> int:
    return linear(width, parts * inner) + linear(inner, width)


def layer_norms(number: int, width: int) -> int:
    return number * 2 * width


def pair(vocab: int, width: int, inner: int, depth: int, bias: bool) -> int:
    """Count Vaswani et al. 2017 with one matrix for source, target and output; no positions."""
    ffn = feedforward(width, inner)
    encoder = attention(width, bias) + ffn + layer_norms(2, width)
    decoder = 2 * attention(width, bias) + ffn + layer_norms(3, width)
    return vocab * width + depth * (encoder + decoder)


def test_count_of_the_original() -> None:
    assert pair(37_000, 512, 2048, 6, bias=False) == 63_045_632
    assert count(presets.base()) == 63_045_632
    assert pair(37_000, 1024, 4096, 6, bias=False) == 214_171_648
    assert count(presets.big()) == 214_171_648


def test_count_of_marian() -> None:
    """The biases of the logits are not trained, and not part of the preset."""
    assert count(presets.marian()) == pair(58_101, 512, 2048, 6, bias=True)


def test_count_of_ft_transformer() -> None:
    """894,913 for the 8 numeric columns of California housing, each with a weight and a bias."""
    width, inner = 192, 256
    block = attention(width) + feedforward(width, inner, parts=2) + layer_norms(2, width)
    unused = layer_norms(1, width)  # the first norm is omitted
    trunk = width + 3 * block - unused + layer_norms(1, width) + linear(width, 1)
    assert count(presets.ft_transformer(head="number", outputs=1)) == trunk
    assert trunk + 8 * 2 * width == 894_913


def test_count_of_tab_transformer() -> None:
    width = 32
    block = attention(width) + feedforward(width, 4 * width) + layer_norms(2, width)
    assert count(presets.tab_transformer()) == 6 * block


def test_count_of_saint() -> None:
    width = 32
    block = attention(width) + feedforward(width, 4 * width, parts=2) + layer_norms(2, width)
    assert count(presets.saint()) == width + 6 * block + layer_norms(1, width) + linear(width, 2)


def test_every_preset_and_size_is_counted() -> None:
    by_formula = {"base", "big", "marian", "ft_transformer", "tab_transformer", "saint"}
    sizes = {f"{name}-{size}" for name, table in presets.SIZES.items() for size in table}
    assert sizes == PUBLISHED.keys()
    assert presets.PRESETS.keys() == by_formula | presets.SIZES.keys()


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_can_be_found_and_reloads_equal(name: str) -> None:
    config = presets.find(name)
    assert Config.parse(config.dump()) == config
    assert presets.find(name) == config


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_has_a_summary(name: str) -> None:
    assert presets.summary(name)
    assert "\n" not in presets.summary(name)


def test_a_name_without_size_has_the_default_size() -> None:
    assert presets.find("gpt2") == presets.gpt2() == presets.gpt2("small")
    assert presets.find("t5-v1.1-base") == presets.t5("v1.1-base") != presets.t5("base")


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"no preset or file 'gpt2-medum'. Did you mean 'gpt2-med"
    ):
        presets.find("gpt2-medum")
    with pytest.raises(ConfigError, match=r"no preset or file 'zzz'. Known: bart, bart-base, "):
        presets.find("zzz")
    with pytest.raises(ConfigError, match=r"gpt2 has no size 'smal'. Did you mean 'small'\?"):
        presets.gpt2("smal")
    with pytest.raises(ConfigError, match=r"model has no field 'detph'. Did you mean 'depth'\?"):
        presets.gpt2(detph=2)
    with pytest.raises(ConfigError, match=r"model has no field 'wdth'. Did you mean 'width'\?"):
        presets.find("gpt2", ["model.wdth=8"])
    with pytest.raises(ConfigError, match=r"there is no section 'modle'. Did you mean 'model'\?"):
        presets.find("gpt2", ["modle.width=8"])


@pytest.mark.parametrize("name", sorted(presets.SIZES))
def test_every_unknown_size_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} has no size 'huge'. Known: "):
        presets.PRESETS[name]("huge")


def test_a_missing_path_is_not_mistaken_for_a_preset() -> None:
    with pytest.raises(SavedError, match=r"no file or directory 'runs/none'. Check the path."):
        presets.find("runs/none")
    with pytest.raises(SavedError, match=r"there is no file 'none.toml'. Check the path."):
        presets.find("none.toml")


# ── Overrides ─────────────────────────────────────────────────────────────────────────────────────


def test_changes_override_the_preset() -> None:
    model = presets.gpt2("medium", depth=2, norm="rms", addnorm_options={}).model
    assert (model.width, model.heads) == (1024, 16)
    assert (model.depth, model.norm, dict(model.addnorm_options)) == (2, "rms", {})
    assert presets.big(width=512).model.width == 512
    assert presets.t5("v1.1-small", tie_embeddings="all").model.tie_embeddings == "all"


def test_settings_override_the_preset_and_earlier_settings() -> None:
    model = presets.find("gpt2", ["model.depth=2", "model.norm=rms", "model.depth=3"]).model
    assert (model.depth, model.norm, model.width) == (3, "rms", 768)


def test_defaults_then_preset_then_file_then_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "gpt2-medium"\n[model]\ndepth = 6\ndropout = 0.2\n')
    model = presets.find(file, ["model.dropout=0.3"]).model
    assert model.norm_eps == 1e-5  # the default
    assert (model.width, model.heads, model.ffn) == (1024, 16, "gelu-tanh")  # the preset's
    assert model.depth == 6  # the file's, not the preset's 24
    assert model.dropout == 0.3  # the setting's, not the file's
    assert presets.find(file).model.dropout == 0.2
    assert presets.find(str(file)) == presets.gpt2("medium", depth=6, dropout=0.2)


def test_a_file_without_preset_starts_from_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\ndepth = 2\n")
    assert presets.find(file) == Config().replace(depth=2)


def test_a_directory_stands_for_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(presets.bert("large", depth=1).dump())
    assert presets.find(tmp_path) == presets.bert("large", depth=1)


def test_a_file_with_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "gpt2-medum"\n')
    with pytest.raises(ConfigError, match=r"no choice 'gpt2-medum'. Did you mean 'gpt2-medium'\?"):
        presets.find(file)


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("preset = gpt2\n")
    with pytest.raises(ConfigError, match=r"run.toml is not TOML: "):
        presets.find(file)
