"""Configurations: plain values, checked at construction; dump and parse are inverse."""

import dataclasses
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from addnorm import Config, ModelConfig, build, presets
from addnorm.config import SCHEMA, SECTIONS
from addnorm.errors import AddnormError, ConfigError, SavedError
from addnorm.section import Options, describe

FIELDS = [item.name for item in dataclasses.fields(ModelConfig)]

words = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)
plain = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), numbers, words)
options = st.dictionaries(words, plain, max_size=3).map(Options)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def model_configs(draw: st.DrawFn) -> ModelConfig:
    """Return any valid configuration."""
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    mode = draw(st.sampled_from(("encoder", "decoder", "encoder-decoder")))
    both = mode == "encoder-decoder"
    patch = draw(st.integers(1, 16))
    target_vocab = draw(maybe(st.integers(1, 999))) if both else None
    attention = draw(st.just("dot") | words)
    rates = st.floats(0, 1, exclude_max=True)
    above = st.floats(0, exclude_min=True, allow_infinity=False)
    return ModelConfig(
        mode=mode,
        input=draw(st.sampled_from(("tokens", "patches", "vectors"))) if both else "tokens",
        vocab=draw(st.integers(10, 10**9)),
        target_vocab=target_vocab,
        tie_embeddings=draw(
            st.sampled_from(("output", "none") if target_vocab else ("all", "source"))
        ),
        pad=draw(maybe(st.integers(0, 9))),
        segments=draw(st.integers(0, 3)) if mode == "encoder" else 0,
        patch=patch,
        image=patch * draw(st.integers(1, 20)),
        summary=draw(st.booleans()) and mode == "encoder",
        width=heads * draw(st.integers(1, 64)),
        depth=draw(st.integers(0, 99)),
        decoder_depth=draw(maybe(st.integers(1, 99))) if both else None,
        heads=heads,
        kv_heads=draw(st.sampled_from((None, kv_heads))),
        head_width=draw(maybe(st.integers(1, 64))),
        ffn=draw(words),
        ffn_width=draw(maybe(st.integers(1, 999))),
        attention=attention,
        attention_scale=draw(maybe(above)) if attention == "dot" else None,
        attention_cap=draw(maybe(above)) if attention == "dot" else None,
        qk_norm=draw(st.sampled_from(("none", "head", "width"))),
        window=draw(maybe(st.integers(1, 99))),
        norm=draw(words),
        norm_eps=draw(above),
        addnorm=draw(words),
        addnorm_options=draw(options),
        attention_bias=draw(st.sampled_from(("all", "qkv", "none"))),
        positions=draw(words),
        position_options=draw(options),
        dropout=draw(rates),
        attention_dropout=draw(rates),
        head=draw(st.sampled_from(("token", "none"))),
        pool=draw(st.sampled_from(("first", "mean", "last"))),
        init_std=draw(above),
        scale_embedding=draw(st.booleans()),
    )


# ── Written and read back ─────────────────────────────────────────────────────────────────────────


@given(model=model_configs())
@settings(max_examples=100)
def test_a_dump_reads_back_equal(model: ModelConfig) -> None:
    config = Config(model=model)
    again = Config.parse(config.dump())
    assert again == config and hash(again) == hash(config)
    for name in FIELDS:
        assert type(getattr(again.model, name)) is type(getattr(model, name)), name
    assert again.dump() == config.dump()


@pytest.mark.parametrize(
    "word",
    (
        'a "quoted" word',
        "back\\slash",
        "two\nlines",
        "tab\t",
        "\x00\x01\x1f\x7f",
        "\r\n",
        "é∑ı",
        "",
    ),
)
def test_any_string_reads_back_equal(word: str) -> None:
    config = Config().replace(norm=word, addnorm_options={word: word, "n": 1})
    assert Config.parse(config.dump()) == config


def test_every_preset_reads_back_equal() -> None:
    for name in presets.names():
        config = presets.find(name)
        assert Config.parse(config.dump()) == config, name


def test_a_dump_is_toml_with_its_schema() -> None:
    table = tomllib.loads(Config().dump())
    assert table.pop("schema") == SCHEMA
    assert set(table) == {"model"}, "untouched sections are left out"
    changed = Config().override(
        "train.lr=1e-3", "data.lowercase=true", "run.seed=1", "table.bins=quantile"
    )
    assert set(tomllib.loads(changed.dump())) == {"schema", *SECTIONS}
    assert Config.parse(changed.dump()) == changed


def test_whole_numbers_become_floats_in_float_fields() -> None:
    config = Config.parse("[model]\ndropout = 0\nattention_scale = 1\nwidth = 64")
    assert (config.model.dropout, config.model.attention_scale) == (0.0, 1.0)
    assert type(config.model.dropout) is float and type(config.model.width) is int


def test_nothing_derived_is_stored() -> None:
    config = ModelConfig(vocab=20, width=16, depth=1, heads=4)
    left_out = ("target_vocab", "decoder_depth", "kv_heads", "head_width", "ffn_width", "pad")
    before = dataclasses.asdict(config)
    model = build(config)
    assert dataclasses.asdict(config) == before
    assert model.config == config
    for name in (*left_out, "attention_scale", "attention_cap", "window"):
        assert getattr(config, name) is None
        assert f"\n{name} =" not in Config(model=config).dump()


@pytest.mark.parametrize(
    ("fields", "sizes"),
    (
        (
            {},
            {
                "effective_head_width": 8,
                "effective_kv_heads": 4,
                "query_width": 32,
                "kv_width": 32,
                "effective_ffn_width": 128,
                "effective_attention_scale": 8**-0.5,
                "sides": ("encoder", "decoder"),
                "depths": {"encoder": 3, "decoder": 3},
                "lengths": {"encoder": 50, "decoder": 50},
                "input_length": 50,
                "output_vocab": 9,
                "ties_output": True,
                "ties_source": True,
            },
        ),
        (
            {"head_width": 5, "kv_heads": 2, "ffn_width": 7, "attention_scale": 1.0},
            {
                "effective_head_width": 5,
                "effective_kv_heads": 2,
                "query_width": 20,
                "kv_width": 10,
                "effective_ffn_width": 7,
                "effective_attention_scale": 1.0,
            },
        ),
        (
            {"decoder_depth": 2, "target_vocab": 11, "tie_embeddings": "output"},
            {
                "depths": {"encoder": 3, "decoder": 2},
                "output_vocab": 11,
                "ties_output": True,
                "ties_source": False,
            },
        ),
        ({"tie_embeddings": "source"}, {"ties_output": False, "ties_source": True}),
        ({"mode": "decoder"}, {"sides": ("decoder",), "ties_source": False}),
        (
            {
                "mode": "encoder",
                "head": "none",
                "input": "patches",
                "image": 32,
                "patch": 8,
                "summary": True,
            },
            {
                "patches": 16,
                "patch_values": 3 * 8 * 8,
                "input_length": 17,
                "lengths": {"encoder": 17, "decoder": 50},
            },
        ),
    ),
)
def test_derived_sizes(fields: dict[str, Any], sizes: dict[str, Any]) -> None:
    model = ModelConfig(**{"vocab": 9, "width": 32, "depth": 3, "heads": 4, "length": 50} | fields)
    assert {name: getattr(model, name) for name in sizes} == sizes


def test_a_file_is_read_over_a_base(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\ndepth = 2\nnorm = "rms"\n')
    config = Config.load(path, base=presets.gpt2("medium"))
    assert (config.model.depth, config.model.norm, config.model.width) == (2, "rms", 1024)
    path.write_text('preset = "gpt2-medium"\n[model]\ndepth = 2\n')
    assert presets.find(path, ["model.depth=3"]) == presets.gpt2("medium", depth=3)


# ── Plain, frozen, described ──────────────────────────────────────────────────────────────────────


def test_every_field_has_one_line_of_help() -> None:
    for section in SECTIONS:
        kind = type(getattr(Config(), section))
        lines = describe(kind)
        assert list(lines) == [item.name for item in dataclasses.fields(kind)]
        for name, line in lines.items():
            assert line.endswith(".") and "\n" not in line and 10 < len(line) < 160, name


def test_the_docstring_of_a_section_lists_its_fields() -> None:
    for kind in SECTIONS.values():
        text = inspect.getdoc(kind) or ""
        summary, heading, entries = text.partition("\n\nParameters\n----------\n")
        assert heading and summary.endswith(".") and "\n" not in summary
        lines = [f"{name} : {line}" for name, line in describe(kind).items()]
        assert entries.splitlines()[: len(lines)] == lines
    assert "Examples" in str(ModelConfig.__doc__) and ModelConfig(vocab=9).__doc__ is not None


def test_every_field_holds_a_plain_value() -> None:
    for name in FIELDS:
        value = getattr(Config().model, name)
        assert value is None or isinstance(value, bool | int | float | str | Options), name


def test_a_configuration_cannot_be_changed_in_place() -> None:
    config = Config().replace(addnorm_options={"start": 1.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.depth = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = ModelConfig(vocab=3)  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.model.addnorm_options["start"] = 2.0  # type: ignore[index]
    settings = {"start": 1.0}
    other = Config().replace(addnorm_options=settings)
    settings["start"] = 2.0
    assert other == config


def test_equal_configurations_have_equal_hashes() -> None:
    one = Config().replace(addnorm_options={"a": 1, "b": True}, depth=2)
    two = Config().replace(depth=2, addnorm_options={"b": True, "a": 1})
    assert one == two and len({one, two}) == 1
    assert one != one.replace(depth=3) and one != one.replace(addnorm_options={"a": 1})


def test_fields_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        ModelConfig("encoder")  # type: ignore[misc]


# ── Settings ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    (
        ("model.depth=2", "depth", 2),
        ("model.depth = 2 ", "depth", 2),
        ("model.norm=rms", "norm", "rms"),
        ('model.norm="rms"', "norm", "rms"),
        ("model.norm_eps=1e-6", "norm_eps", 1e-6),
        ("model.dropout=0", "dropout", 0.0),
        ("model.norm_bias=false", "norm_bias", False),
        ("model.kv_heads=4", "kv_heads", 4),
        ("model.kv_heads=none", "kv_heads", None),
        ("model.addnorm_options={start=1e-4}", "addnorm_options", {"start": 1e-4}),
        ('model.addnorm_options={growth="log"}', "addnorm_options", {"growth": "log"}),
        ("model.position_options={}", "position_options", {}),
        ("model.positions=none", "positions", "none"),
        ("model.norm=a=b", "norm", "a=b"),
    ),
)
def test_a_setting_changes_one_field(setting: str, name: str, value: Any) -> None:
    before = presets.gpt2(kv_heads=2)
    after = before.override(setting)
    assert getattr(after.model, name) == value
    for field in FIELDS:
        if field != name:
            assert getattr(after.model, field) == getattr(before.model, field)


def test_a_column_may_be_a_number() -> None:
    config = Config().override("data.text=2", "data.label='3'")
    assert (config.data.text, config.data.label) == ("2", "3")
    assert Config.parse("[data]\ntext = 2\n").data.text == "2"
    with pytest.raises(ConfigError, match=r"data\.text must be a string, or left out: got True"):
        Config().override("data.text=true")


def test_the_later_setting_wins() -> None:
    config = Config().override("model.depth=2", "model.width=64", "model.depth=3")
    assert (config.model.depth, config.model.width) == (3, 64)
    assert Config().override() == Config()


def test_settings_are_checked_together() -> None:
    config = Config().override("model.heads=7", "model.width=14")
    assert (config.model.heads, config.model.width) == (7, 14)


def test_another_variant_resets_its_options() -> None:
    config = presets.gpt2(position_options={"offset": 2})
    assert config.model.addnorm_options == {"shrink": True}
    assert config.override("model.addnorm=post").model.addnorm_options == {}
    assert config.override("model.positions=rotary").model.position_options == {}
    assert config.override("model.addnorm=pre").model.addnorm_options == {"shrink": True}
    changed = config.replace(addnorm="layerscale", addnorm_options={"start": 0.5})
    assert changed.model.addnorm_options == {"start": 0.5}
    assert changed.model.position_options == {"offset": 2}


def test_whole_sections_and_fields_can_be_replaced() -> None:
    model = ModelConfig(vocab=7, depth=1)
    assert Config().replace(model=model) == Config(model=model)
    assert Config().replace(model=model, depth=4).model == model.replace(depth=4)


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


def refuse(message: str, **fields: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**({"vocab": 100} | fields))


@pytest.mark.parametrize("setting", ("depth=2", "model.depth", "model", "=3", ""))
def test_malformed_settings_are_refused(setting: str) -> None:
    message = rf"a setting must read section\.field=value: got '{setting}'\. Try model\.depth=6\."
    with pytest.raises(ConfigError, match=message):
        Config().override(setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    (
        ("modell.depth=2", r"there is no section 'modell'\. Did you mean 'model'\?"),
        ("zzz.depth=2", r"there is no section 'zzz'\. Known: .*model.*\."),
        ("model.dept=2", r"model has no field 'dept'\. Did you mean 'depth'\?"),
        ("model.qqqqq=2", r"model has no field 'qqqqq'\. Known: addnorm, addnorm_options, .*\."),
        ("model.=2", r"model has no field ''\."),
        ("model.addnorm_options.start=2", r"model has no field 'addnorm_options\.start'"),
    ),
)
def test_an_unknown_name_is_refused_with_the_nearest(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config().override(setting)


@pytest.mark.parametrize("text", ("[model]\nself = 1", "model.self=1"))
def test_a_field_called_self_is_unknown_too(text: str) -> None:
    with pytest.raises(ConfigError, match="model has no field 'self'"):
        Config.parse(text) if text.startswith("[") else Config().override(text)


def test_an_unknown_field_in_python_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model has no field 'widht'\. Did you mean 'width'\?"):
        Config().replace(widht=3)
    with pytest.raises(ConfigError, match=r"model has no field 'widht'\. Did you mean 'width'\?"):
        ModelConfig(vocab=3).replace(widht=3)
    with pytest.raises(ConfigError, match=r"model has no field 'widht'\. Did you mean 'width'\?"):
        presets.gpt2(widht=3)


@pytest.mark.parametrize(
    ("name", "value", "must"),
    (
        ("depth", True, "a whole number"),
        ("depth", "8", "a whole number"),
        ("depth", 8.0, "a whole number"),
        ("depth", [8], "a whole number"),
        ("depth", None, "a whole number"),
        ("kv_heads", True, "a whole number, or left out"),
        ("kv_heads", "2", "a whole number, or left out"),
        ("kv_heads", 2.0, "a whole number, or left out"),
        ("dropout", "0.1", "a number"),
        ("dropout", False, "a number"),
        ("dropout", None, "a number"),
        ("attention_cap", "x", "a number, or left out"),
        ("attention_cap", True, "a number, or left out"),
        ("norm", 3, "a string"),
        ("norm", None, "a string"),
        ("norm_bias", 1, "true or false"),
        ("norm_bias", "yes", "true or false"),
        ("addnorm_options", 3, "a table of plain values"),
        ("addnorm_options", {"start": [1]}, "a table of plain values"),
        ("addnorm_options", {"start": {"deep": 1}}, "a table of plain values"),
        ("addnorm_options", {1: 2}, "a table of plain values"),
        ("addnorm_options", None, "a table of plain values"),
        ("position_options", {"call": print}, "a table of plain values"),
    ),
)
def test_a_value_of_another_type_is_refused(name: str, value: Any, must: str) -> None:
    refuse(rf"^model\.{name} must be {must}: got .+\.$", **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    (
        ("mode", "decodr", r"must be one of encoder, decoder, encoder-decoder: got 'decodr'\. Did"),
        ("input", "token", r"must be one of tokens, patches, vectors: got 'token'\. Did you mean"),
        (
            "tie_embeddings",
            "al",
            r"must be one of all, output, source, none: got 'al'\. Did you mean 'all'\?",
        ),
        (
            "qk_norm",
            "heads",
            r"must be one of none, head, width: got 'heads'\. Did you mean 'head'",
        ),
        ("attention_bias", "qk", r"must be one of all, qkv, none: got 'qk'\. Did you mean 'qkv'\?"),
        (
            "head",
            "tokens",
            r"must be one of token, masked, class, number, none: got 'tokens'\. Did",
        ),
        (
            "pool",
            "men",
            r"must be one of first, mean, last, none: got 'men'\. Did you mean 'mean'\?",
        ),
        (
            "pooler",
            "tan",
            r"must be one of none, tanh, relu, .*: got 'tan'\. Did you mean 'tanh'\?",
        ),
        (
            "init",
            "zzz",
            r"must be one of xavier, normal, torch: got 'zzz'\. Known: normal, torch, ",
        ),
        *((n, 0, r"must be positive: got 0\. Try 8") for n in ("width", "heads", "length")),
        *((n, -1, r"must be positive: got -1\. Try 8") for n in ("image", "patch", "channels")),
        ("depth", -1, r"must not be negative: got -1\. Try 0 or more\."),
        ("segments", -1, r"must not be negative: got -1\. Try 0 or more\."),
        ("outputs", -1, r"must not be negative: got -1\. Try 0 or more\."),
        ("vocab", -1, r"must not be negative: got -1\. Try 0 or more\."),
        ("kv_heads", 0, r"must be positive: got 0\. Leave it out, or try 1\."),
        ("head_width", -2, r"must be positive: got -2\. Leave it out, or try 1\."),
        ("ffn_width", 0, r"must be positive: got 0\. Leave it out, or try 1\."),
        ("window", 0, r"must be positive: got 0\. Leave it out, or try 1\."),
        ("target_vocab", 0, r"must be positive: got 0\. Leave it out, or try 1\."),
        ("dropout", 1.0, r"must be at least 0 and below 1: got 1\.0\. Try 0\.1\."),
        ("attention_dropout", -0.1, r"must be at least 0 and below 1: got -0\.1\. Try 0\.1\."),
        ("ffn_dropout", 7, r"must be at least 0 and below 1: got 7\.0\. Try 0\.1\."),
        ("dropout", float("nan"), r"must be at least 0 and below 1: got nan\. Try 0\.1\."),
        ("norm_eps", 0.0, r"must be above 0: got 0\.0\. Try 1e-5 or 0\.02\."),
        ("init_std", -1.0, r"must be above 0: got -1\.0\. Try 1e-5 or 0\.02\."),
        ("vocab", 0, r"must be the number of token ids: got 0\. Try vocab=32000, or input="),
        ("pad", 100, r"must be a token id: got 100\. Try 0 to 99\."),
        ("pad", -1, r"must be a token id: got -1\. Try 0 to 99\."),
    ),
)
def test_values_out_of_range_are_refused(name: str, value: Any, message: str) -> None:
    refuse(rf"^model\.{name} {message}", **{name: value})


def test_heads_must_divide_the_width() -> None:
    refuse(
        r"^model\.heads must divide width: width=512, heads=7\. Try heads=8, or set head_width\.$",
        width=512,
        heads=7,
    )
    refuse(r"width=6, heads=12\. Try heads=6, or set head_width\.", width=6, heads=12)
    assert ModelConfig(vocab=9, width=512, heads=7, head_width=64).head_width == 64


@pytest.mark.parametrize("heads", range(2, 12))
def test_the_advice_about_heads_is_valid(heads: int) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(vocab=9, width=13 * 8 * 3, heads=heads * 5)
    advice = int(str(caught.value).partition("Try heads=")[2].partition(",")[0])
    assert ModelConfig(vocab=9, width=13 * 8 * 3, heads=advice).heads == advice


def test_key_heads_must_divide_the_heads() -> None:
    refuse(
        r"^model\.kv_heads must divide heads: heads=8, kv_heads=6\. Try kv_heads=2\.$",
        heads=8,
        kv_heads=6,
    )
    refuse(r"heads=8, kv_heads=16\. Try kv_heads=8\.", heads=8, kv_heads=16)


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        (
            {"mode": "decoder", "input": "vectors"},
            r"model\.input must be tokens for a decoder and for a head that predicts tokens: got "
            r"'vectors'\. Try mode=encoder with head=class\.",
        ),
        (
            {"mode": "encoder", "input": "patches", "head": "token"},
            r"model\.input must be tokens for a decoder and for a head that predicts tokens: got ",
        ),
        (
            {"mode": "encoder", "head": "class"},
            r"model\.outputs must be positive for head=class: got 0\. Try 2\.",
        ),
        (
            {"mode": "encoder", "head": "number"},
            r"model\.outputs must be positive for head=number: got 0\. Try 2\.",
        ),
        (
            {"mode": "decoder", "head": "masked"},
            r"model\.head masked needs mode=encoder: got 'masked'\. Try head=token\.",
        ),
        (
            {"mode": "decoder", "decoder_depth": 3},
            r"model\.decoder_depth needs mode=encoder-decoder: got 3\. Leave it out\.",
        ),
        (
            {"mode": "encoder", "target_vocab": 3},
            r"model\.target_vocab needs mode=encoder-decoder: got 3\. Leave it out\.",
        ),
        (
            {"target_vocab": 3, "tie_embeddings": "all"},
            r"model\.tie_embeddings must be output or none if target_vocab is set: got 'all'\. Try",
        ),
        (
            {"mode": "encoder", "input": "patches", "head": "none", "patch": 15},
            r"model\.patch must divide image=224: got 15\. Try 16 with image=224\.",
        ),
    ),
)
def test_contradictory_values_are_refused(fields: Any, message: str) -> None:
    refuse(message, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"decoder_depth": -3}, r"decoder_depth must be positive: got -3\. Leave it out, or try 1"),
        ({"attention_cap": 0.0}, r"attention_cap must be positive: got 0\.0\. Leave it out, or"),
        ({"attention_cap": -1.0}, r"attention_cap must be positive: got -1\.0\. Leave it out, or"),
        ({"attention_scale": float("nan")}, r"attention_scale must be positive: got nan\. Leave"),
        ({"mode": "decoder", "summary": True}, r"summary needs mode=encoder: got True\. Leave it"),
        ({"mode": "decoder", "segments": 2}, r"segments needs mode=encoder: got 2\. Leave it out"),
        ({"summary": True}, r"summary needs mode=encoder: got True\. Leave it out\."),
        ({"segments": 2}, r"segments needs mode=encoder: got 2\. Leave it out\."),
        (
            {"attention": "additive", "attention_cap": 5.0},
            r"attention_cap needs attention=dot: got 5\.0\. Leave it out\.",
        ),
        (
            {"attention": "additive", "attention_scale": 5.0},
            r"attention_scale needs attention=dot: got 5\.0\. Leave it out\.",
        ),
    ),
    ids=str,
)
def test_values_without_effect_are_refused(fields: Any, message: str) -> None:
    refuse(rf"^model\.{message}", **fields)


def test_configuration_errors_are_addnorm_errors_and_value_errors() -> None:
    with pytest.raises(AddnormError) as caught:
        ModelConfig(vocab=-1)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("schema", (SCHEMA + 1, 99, '"new"'))
def test_another_schema_version_is_refused(schema: Any) -> None:
    message = rf"the text has schema .*; this version reads schema {SCHEMA}\. Use the addnorm "
    with pytest.raises(ConfigError, match=message):
        Config.parse(f"schema = {schema}\n[model]\nfuture = 1")


@pytest.mark.parametrize(
    "text", ("[model", "model.depth = ", "depth", "[model]\na = 1\na = 2", "\x00")
)
def test_what_is_not_toml_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the text is not TOML: .+\.$"):
        Config.parse(text)
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.toml is not TOML: .+\.$"):
        Config.load(path)


def test_toml_that_is_not_a_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model must be a section: got 3\. Try \[model\]\."):
        Config.parse("model = 3")
    with pytest.raises(ConfigError, match=r"there is no section 'depth'\. Known: .*model.*\."):
        Config.parse("depth = 3")
    with pytest.raises(ConfigError, match=r"model has no field 'epochs'\."):
        Config.parse("[model]\nepochs = 3")
    with pytest.raises(ConfigError, match=r"model\.depth must be a whole number: got '3'\."):
        Config.parse('[model]\ndepth = "3"')


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"there is no file '.*none\.toml'\. Check the path\."):
        Config.load(tmp_path / "none.toml")
    with pytest.raises(SavedError, match=r"is not a regular file\. Check the path\."):
        Config.load(tmp_path)
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SavedError, match=r"bad\.toml' is not UTF-8 text: .+\."):
        Config.load(tmp_path / "bad.toml")


def test_missing_presets_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no preset or file 'gpt3'\. Did you mean 'gpt2'"
    ):
        presets.find("gpt3")
    with pytest.raises(
        SavedError, match=r"there is no file or directory 'runs/x'\. Check the path"
    ):
        presets.find("runs/x")
    with pytest.raises(ConfigError, match=r"gpt2 has no size 'smal'\. Did you mean 'small'\?"):
        presets.gpt2("smal")
    path = tmp_path / "run.toml"
    path.write_text('preset = "bertt"')
    with pytest.raises(ConfigError, match=r"preset has no choice 'bertt'\. Did you mean 'bert'\?"):
        presets.find(path)


@pytest.mark.parametrize(
    ("setting", "message"),
    (
        ("run.seed=-1", r"^run\.seed must be 0 to 4294967295: got -1\. Try 0\.$"),
        ("run.seed=1180591620717411303424", r"^run\.seed must be 0 to 4294967295: got 118"),
        ("run.threads=100000", r"^run\.threads must be 1 to 1024: got 100000\. Try 1\.$"),
        ("run.minutes=1e300", r"^run\.minutes must be at most 525600, a year: got 1e\+300\."),
        ("model.depth=100000000", r"^model\.depth must be at most 10,000: got 100000000\."),
    ),
)
def test_numbers_that_would_hang_or_crash_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(model=ModelConfig(vocab=100)).override(setting)
