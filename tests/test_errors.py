"""Every error message says what must hold, what was given and what to try."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from addnorm import fold, measure_, token_loss
from addnorm.errors import (
    AddnormError,
    ConfigError,
    ExtraError,
    InputError,
    SavedError,
    choose,
    nearest,
    require,
)
from tests.conftest import VOCAB, draw, make

MODES = ("encoder", "decoder", "encoder-decoder")


def refuse(message: str, run: Callable[[], object], kind: type[AddnormError] = InputError) -> None:
    with pytest.raises(kind, match=message):
        run()


# ── Kinds and helpers ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "built_in"),
    (
        (ConfigError, ValueError),
        (InputError, ValueError),
        (SavedError, OSError),
        (ExtraError, ImportError),
    ),
)
def test_errors_are_also_builtin_exceptions(kind: type[AddnormError], built_in: type) -> None:
    assert issubclass(kind, AddnormError) and issubclass(kind, built_in)
    assert str(kind("heads must divide width.")) == "heads must divide width."


def test_the_nearest_name_or_all_of_them() -> None:
    assert nearest("pots", ["post", "pre"]) == "Did you mean 'post'?"
    assert nearest("zzz", ["post", "pre", "dual"]) == "Known: dual, post, pre."
    assert choose("model.norm", "rms", {"rms": 1}) == 1
    refuse(
        r"^model\.norm has no choice 'rmss'\. Did you mean 'rms'\?$",
        lambda: choose("model.norm", "rmss", {"rms": 1}),
        ConfigError,
    )


# ── Tokens ────────────────────────────────────────────────────────────────────────────────────────


def with_id(value: int) -> Tensor:
    ids = draw(2, 4)
    ids[1, 2] = value
    return ids


@pytest.mark.parametrize("value", (-1, -100, VOCAB, 10**6))
@pytest.mark.parametrize("mode", MODES)
def test_token_ids_out_of_range(mode: str, value: int) -> None:
    model = make(mode)
    message = (
        rf"^token ids must be 0 to {VOCAB - 1}: got {value}\. "
        r"Check that the tokenizer belongs to this model\.$"
    )
    if mode == "encoder-decoder":
        refuse(message, lambda: model(with_id(value), draw(2, 3)))
        refuse(message, lambda: model(draw(2, 3), with_id(value)))
    else:
        refuse(message, lambda: model(with_id(value)))


def test_source_and_target_have_their_own_range() -> None:
    model = make("encoder-decoder", target_vocab=7, tie_embeddings="output")
    model(draw(1, 4), torch.full((1, 3), 6))
    refuse(r"token ids must be 0 to 6: got 7\.", lambda: model(draw(1, 4), torch.full((1, 3), 7)))


@pytest.mark.parametrize(
    ("ids", "message"),
    (
        (torch.ones(2, 3), r"got torch\.float32 of shape \(2, 3\)"),
        (torch.ones(2, 3, dtype=torch.bool), r"got torch\.bool of shape \(2, 3\)"),
        (torch.ones(3).long(), r"got torch\.int64 of shape \(3,\)"),
        (torch.ones(1, 2, 3).long(), r"got torch\.int64 of shape \(1, 2, 3\)"),
        (torch.tensor(3), r"got torch\.int64 of shape \(\)"),
    ),
)
@pytest.mark.parametrize("mode", ("encoder", "decoder"))
@pytest.mark.parametrize("pad", (None, 0))
def test_token_ids_of_another_type_or_shape(
    mode: str, ids: Tensor, message: str, pad: int | None
) -> None:
    refuse(
        rf"^token ids must be integers of shape \(batch, length\): {message}\.$",
        lambda: make(mode, pad=pad)(ids),
    )


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int16, torch.int8))
def test_small_integer_types_are_accepted_or_refused(dtype: torch.dtype) -> None:
    model, ids = make("decoder"), draw(2, 3)
    try:
        output = model(ids.to(dtype))
    except InputError:
        return
    assert torch.equal(output, model(ids))


def test_token_ids_may_have_32_bits() -> None:
    model, ids = make("decoder"), draw(2, 3)
    assert torch.equal(model(ids.int()), model(ids))


@pytest.mark.parametrize("shape", ((2, 0), (0, 3)))
@pytest.mark.parametrize("mode", ("encoder", "decoder"))
def test_empty_input_gives_an_empty_output_or_is_refused(mode: str, shape: Any) -> None:
    try:
        output = make(mode)(torch.zeros(shape).long())
    except InputError:
        return
    assert output.shape == (*shape, VOCAB)


@pytest.mark.parametrize("mode", ("encoder", "decoder"))
def test_a_sequence_past_the_learned_positions(mode: str) -> None:
    model = make(mode, positions="learned", length=5)
    assert model(draw(2, 5)).shape == (2, 5, VOCAB)
    refuse(
        r"^learned positions hold 5 positions: got a sequence of 7\. "
        r"Shorten it, or build with length=7\.$",
        lambda: model(draw(2, 7)),
    )


def test_a_cached_sequence_past_the_learned_positions() -> None:
    model = make("decoder", positions="learned", length=5)
    cache = model.cache(1, 10)
    model(draw(1, 4), cache=cache)
    refuse(
        r"learned positions hold 5 positions: got a sequence of 6\.",
        lambda: model(draw(1, 2), cache=cache),
    )


def test_an_image_does_not_set_the_length_of_the_target() -> None:
    options = {"input": "patches", "image": 8, "patch": 4, "length": 24, "positions": "learned"}
    model = make("encoder-decoder", **options)
    assert model(torch.randn(1, 3, 8, 8).double(), draw(1, 9)).shape == (1, 9, VOCAB)


# ── Vectors, patches, segments ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
def test_vectors_must_be_finite(value: float) -> None:
    model = make("encoder", input="vectors", head="none")
    vectors = torch.randn(2, 3, 16).double()
    assert model(vectors).isfinite().all()
    vectors[1, 2, 5] = value
    refuse(
        rf"^vectors must be finite: got {value} at \(1, 2, 5\)\. Fill or drop such values first\.$",
        lambda: model(vectors),
    )


@pytest.mark.parametrize("shape", ((2, 16), (2, 3, 15), (2, 3, 4, 16)))
def test_vectors_of_another_shape(shape: tuple[int, ...]) -> None:
    model = make("encoder", input="vectors", head="none")
    sizes = ", ".join(map(str, shape))
    refuse(
        rf"^vectors must have shape \(batch, length, 16\): got \({sizes}\)\.$",
        lambda: model(torch.zeros(shape).double()),
    )


def image_model() -> Any:
    return make("encoder", input="patches", image=8, patch=4, head="class", outputs=2)


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_images_must_be_finite(value: float) -> None:
    images = torch.randn(2, 3, 8, 8).double()
    assert image_model()(images).shape == (2, 2)
    images[0, 1, 2, 3] = value
    refuse(
        rf"^images must be finite: got {value} at \(0, 1, 2, 3\)\. Fill or drop such values first",
        lambda: image_model()(images),
    )


@pytest.mark.parametrize("shape", ((2, 1, 8, 8), (2, 3, 8, 9), (3, 8, 8), (2, 8, 8, 3)))
def test_images_of_another_shape(shape: tuple[int, ...]) -> None:
    sizes = ", ".join(map(str, shape))
    refuse(
        rf"^images must have shape \(batch, 3, 8, 8\): got \({sizes}\)\.$",
        lambda: image_model()(torch.zeros(shape).double()),
    )


def test_segments_without_segment_embeddings() -> None:
    refuse(
        r"^this model has no segments\. Build it with segments=2\.$",
        lambda: make("encoder")(draw(2, 3), segments=torch.zeros(2, 3).long()),
    )
    model = make("encoder", segments=2)
    ids = draw(2, 3)
    assert torch.equal(model(ids), model(ids, segments=torch.zeros_like(ids)))
    refuse(
        r"token ids must be 0 to 1: got 2\.",
        lambda: model(ids, segments=torch.full_like(ids, 2)),
    )


def test_rows_of_memory_that_do_not_divide_the_targets() -> None:
    model = make("encoder-decoder")
    memory = model.encode(draw(2, 4))
    refuse(
        r"^each row of the memory must serve the same number of targets: "
        r"2 rows of memory, 3 targets\.$",
        lambda: model.decode(draw(3, 4), memory),
    )
    refuse(r"2 rows of memory, 1 targets", lambda: model.decode(draw(1, 4), memory))


def test_padding_under_a_norm_along_the_sequence() -> None:
    model = make("encoder", norm="instance")
    ids = draw(2, 3)
    assert model(ids).isfinite().all()
    ids[0, 2] = 0
    refuse(
        r"norm=instance averages over the sequence and cannot ignore padding\. "
        r"Pass sequences of one length, or build with norm=layer\.",
        lambda: model(ids),
    )


# ── Names of variants ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("field", "name", "near"),
    (
        ("addnorm", "pree", "pre"),
        ("addnorm", "sandwitch", "sandwich"),
        ("norm", "layr", "layer"),
        ("positions", "rotory", "rotary"),
        ("positions", "alibi", None),
        ("ffn", "swigluu", "swiglu"),
        ("attention", "dott", "dot"),
    ),
)
@pytest.mark.parametrize("mode", MODES)
def test_an_unknown_variant(mode: str, field: str, name: str, near: str | None) -> None:
    advice = r"Known: buckets, concatenated, index, learned, .*\." if near is None else near
    refuse(
        rf"^model\.{field} has no choice '{name}'\. (Did you mean '{advice}'\?|{advice})$",
        lambda: make(mode, **{field: name}),
        ConfigError,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        (
            {"addnorm": "layerscale", "addnorm_options": {"strat": 1.0}},
            r"^model\.addnorm_options has no 'strat'\. Did you mean 'start'\?$",
        ),
        (
            {"addnorm": "deepnorm", "addnorm_options": {"alpha": 1.0}},
            r"^model\.addnorm_options has no 'alpha'\. It has no options\.$",
        ),
        (
            {"positions": "rotary", "position_options": {"bse": 1.0}},
            r"^model\.position_options has no 'bse'\. Did you mean 'base'\?$",
        ),
        (
            {"positions": "rotary", "position_options": {"layout": "half"}},
            r"^model\.position_options\.layout must be one of interleaved, halves: got 'half'\.$",
        ),
        (
            {"positions": "sinusoidal", "position_options": {"layout": "half"}},
            r"must be one of interleaved, halves, tensor2tensor: got 'half'\.$",
        ),
        (
            {"positions": "sinusoidal", "width": 15, "heads": 3},
            r"^sinusoidal positions need an even width: width=15\. Try 16\.$",
        ),
        (
            {"positions": "relative", "width": 15, "heads": 3},
            r"^relative positions need an even width: width=15\. Try 16\.$",
        ),
        (
            {"positions": "rotary", "head_width": 5},
            r"^rotary positions rotate pairs, so head_width must be even: head_width=5\. Try 6\.$",
        ),
        (
            {"norm": "instance"},
            r"^model\.norm=instance averages over the sequence, so a decoder would see the future: "
            r"mode=decoder\. Try norm=layer\.$",
        ),
        (
            {"addnorm": "pre", "final_norm": True},
            r"^model\.final_norm adds a norm where the arrangement has none, but addnorm=pre ends "
            r"with one\. Leave final_norm out\.$",
        ),
    ),
)
def test_variants_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    refuse(message, lambda: make("decoder", **changes), ConfigError)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        (
            {"addnorm": "admin", "addnorm_options": {"growth": "logg"}},
            r"^model\.addnorm_options\.growth must be measured or log: got 'logg'\.$",
        ),
        (
            {"addnorm": "layerscale", "addnorm_options": {"start": "abc"}},
            r"^model\.addnorm_options\.start must be a number, or left out: got 'abc'\.$",
        ),
        (
            {"addnorm": "pre", "addnorm_options": {"shrink": "no"}},
            r"^model\.addnorm_options\.shrink must be true or false: got 'no'\.$",
        ),
        (
            {"addnorm": "hyper", "addnorm_options": {"streams": 0}},
            r"^model\.addnorm_options\.streams must be 1 or more: got 0\.$",
        ),
        (
            {"addnorm": "mix", "addnorm_options": {"share": 1.5}},
            r"^model\.addnorm_options\.share must be from 0 to 1: got 1\.5\.$",
        ),
        (
            {"positions": "rotary", "position_options": {"base": "big"}},
            r"^model\.position_options\.base must be a number: got 'big'\.$",
        ),
        (
            {"positions": "buckets", "position_options": {"buckets": 0}},
            r"^model\.position_options\.buckets must be at least 2, or 4 in an encoder: got 0",
        ),
        (
            {"positions": "buckets", "position_options": {"furthest": 4}},
            r"^model\.position_options\.furthest must be more than the 16 nearest: got 4\.$",
        ),
    ),
    ids=str,
)
def test_options_of_another_type_or_range(changes: dict[str, Any], message: str) -> None:
    refuse(message, lambda: make("decoder", **changes), ConfigError)


def test_t_fixup_without_blocks_is_a_model_or_refused() -> None:
    try:
        model = make("decoder", addnorm="t-fixup", depth=0)
    except ConfigError:
        return
    assert model(draw(2, 3)).shape == (2, 3, VOCAB)


# ── Losses, folding, measuring ────────────────────────────────────────────────────────────────────


def test_a_token_loss_needs_tokens() -> None:
    for head in ("class", "number"):
        model = make("encoder", head=head, outputs=2)
        refuse(
            rf"^the model must have a token head: got head={head}\.",
            lambda model=model: token_loss(model, model.hidden(draw(2, 3)), draw(2, 3)),
        )
    model = make("encoder", head="none")
    refuse(
        r"^the model must have a token head: got head=none\.",
        lambda: token_loss(model, model(draw(2, 3)), draw(2, 3)),
    )


@pytest.mark.parametrize("value", (-1, VOCAB, 999))
def test_targets_out_of_range(value: int) -> None:
    model = make("decoder")
    ids = draw(2, 4)
    refuse(
        rf"^targets must be token ids 0 to {VOCAB - 1}, or -100 for none: got {value}\.$",
        lambda: token_loss(model, model.hidden(ids), with_id(value)),
    )


def test_a_wrong_number_of_targets() -> None:
    model = make("decoder")
    refuse(
        r"^each position needs one target: 8 positions, 6 targets\.$",
        lambda: token_loss(model, model.hidden(draw(2, 4)), draw(2, 3)),
    )


def test_only_admin_can_be_folded_or_measured() -> None:
    model = make("decoder")
    refuse(r"^only addnorm=admin can be folded: got 'post'\.$", lambda: fold(model), ConfigError)
    refuse(
        r"^only addnorm=admin has a measuring pass\. Build with addnorm=admin\.$",
        lambda: measure_(model, lambda: model(draw(2, 3))),
        ConfigError,
    )
    refuse(
        r"^folding needs a norm with a gain for each channel: norm=scale\. It works with layer",
        lambda: fold(make("decoder", addnorm="admin", norm="scale")),
        ConfigError,
    )
    admin = make("decoder", addnorm="admin")
    with torch.no_grad():
        admin.decoder.stack.blocks[0].addnorms["ffn"].omega[3] = 0
    refuse(r"^an ω of exactly 0 cannot be folded", lambda: fold(admin), ConfigError)


def test_an_unknown_public_name() -> None:
    import addnorm

    with pytest.raises(AttributeError, match="module 'addnorm' has no attribute 'biuld'"):
        addnorm.biuld  # noqa: B018 (the attribute is the test)


# ── Extras ────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(
        ExtraError,
        match=r"this needs the package nowhere_to_be_found\.at_all, which is not installed\. "
        r"Try: pip install 'addnorm\[tables\]'\.",
    ):
        require("nowhere_to_be_found.at_all", "tables")


def test_a_missing_dependency_of_a_package_is_not_an_extra_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfway_there.py").write_text("import something_it_lacks")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_it_lacks") as caught:
        require("halfway_there", "text")
    assert not isinstance(caught.value, ExtraError)
