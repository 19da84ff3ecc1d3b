"""A model directory: what is loaded is what was saved, or an error that says why not."""

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from addnorm import Config, fold, presets
from addnorm.errors import SavedError
from addnorm.files import METADATA_KEY, TABLE_MODEL, TEXT_MODEL, dump_document, kind_of
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.norms import NORMS
from addnorm.models import saved
from addnorm.models.build import Model
from addnorm.models.saved import load_model
from tests.conftest import MODES, POSITIONS, draw, inputs, make

FILES = {"config.toml", "model.safetensors"}


def small(mode: str = "decoder", **changes: Any) -> Model:
    return make(mode, **changes).float()


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def same(one: Model, two: Model) -> bool:
    """Whether two models have the same configuration, the same tensors and no others."""
    parts, others = dict(one.state_dict()), dict(two.state_dict())
    parts |= dict(one.named_buffers())
    others |= dict(two.named_buffers())
    return (
        one.config == two.config
        and list(parts) == list(others)
        and all(
            parts[name].dtype == others[name].dtype and torch.equal(parts[name], others[name])
            for name in parts
        )
    )


def check_round_trip(model: Model, args: tuple[Tensor, ...], directory: Path) -> None:
    model.save(directory)
    again = load_model(directory)
    assert files(directory) == FILES
    assert type(again) is type(model) and same(again, model)
    assert not any(module.training for module in again.modules())
    assert all(parameter.requires_grad for parameter in again.parameters())
    with torch.no_grad():
        assert torch.equal(again(*args), model.eval()(*args))


# ── Saved and loaded ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_model_loads_as_it_was_saved(mode: str, positions: str, tmp_path: Path) -> None:
    check_round_trip(small(mode, positions=positions), inputs(mode), tmp_path)


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_every_arrangement_loads_as_it_was_saved(addnorm: str, tmp_path: Path) -> None:
    check_round_trip(small(addnorm=addnorm), (draw(2, 5),), tmp_path)


@pytest.mark.parametrize("tie", ("all", "output", "source", "none"))
@pytest.mark.parametrize("mode", MODES)
def test_tied_matrices_stay_tied(mode: str, tie: str, tmp_path: Path) -> None:
    model = small(mode, tie_embeddings=tie)
    check_round_trip(model, inputs(mode), tmp_path)
    again = load_model(tmp_path)
    assert again.count() == model.count()
    tied = tie in ("all", "output")
    assert (again.head.weight is None) == tied  # type: ignore[union-attr]


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_loads_with_its_statistics(norm: str, tmp_path: Path) -> None:
    model = small("encoder", norm=norm, qk_norm="head" if norm != "instance" else "none")
    model.train()
    for _ in range(3):
        model(draw(4, 5))
    check_round_trip(model.eval(), (draw(2, 5),), tmp_path)
    if norm == "batch":
        counted = [n for n in model.state_dict() if n.endswith("num_batches_tracked")]
        assert counted and all(model.state_dict()[name] == 3 for name in counted)


@pytest.mark.parametrize(
    ("mode", "changes"),
    (
        ("encoder", {"head": "masked", "segments": 2, "embed_norm": True}),
        ("encoder", {"head": "class", "outputs": 3, "pooler": "tanh", "summary": True}),
        ("encoder", {"head": "none", "attention": "additive"}),
        ("decoder", {"unembed_bias": True, "kv_heads": 2, "head_width": 6, "ffn": "swiglu"}),
        ("encoder-decoder", {"target_vocab": 23, "tie_embeddings": "output", "decoder_depth": 1}),
        ("decoder", {"depth": 0}),
        ("decoder", {"addnorm": "layerscale", "addnorm_options": {"start": 1e-4}}),
    ),
)
def test_other_parts_load_as_they_were_saved(mode: str, changes: Any, tmp_path: Path) -> None:
    check_round_trip(small(mode, **changes), inputs(mode), tmp_path)


def test_images_load_as_they_were_saved(tmp_path: Path) -> None:
    config = {"input": "patches", "image": 8, "patch": 4, "head": "class", "outputs": 2}
    check_round_trip(small("encoder", **config), (torch.randn(2, 3, 8, 8),), tmp_path)


def test_a_folded_model_loads_as_it_was_saved(tmp_path: Path) -> None:
    check_round_trip(fold(small(addnorm="admin")), (draw(2, 5),), tmp_path)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_the_precision_of_the_weights_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make("decoder").to(dtype)
    model.save(tmp_path)
    assert same(load_model(tmp_path), model)


@pytest.mark.parametrize(
    "positions",
    (
        "sinusoidal",
        "learned",
        pytest.param("linear-bias"),
    ),
)
def test_loading_uses_no_random_numbers(positions: str, tmp_path: Path) -> None:
    small(positions=positions).save(tmp_path)
    before = torch.get_rng_state()
    load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_directory_is_created_with_its_parents(tmp_path: Path) -> None:
    model = small()
    model.save(tmp_path / "runs" / "first")
    model.save(str(tmp_path / "runs" / "first"))
    assert same(load_model(str(tmp_path / "runs" / "first")), model)


def test_config_toml_is_the_configuration_of_the_model(tmp_path: Path) -> None:
    model = small(addnorm="pre")
    model.save(tmp_path)
    assert Config.load(tmp_path / "config.toml").model == model.config
    assert presets.find(tmp_path).model == model.config


def test_a_model_loads_without_config_toml(tmp_path: Path) -> None:
    model = small()
    model.save(tmp_path)
    (tmp_path / "config.toml").unlink()
    assert same(load_model(tmp_path), model)


def test_other_line_ends_do_not_count_as_an_edit(tmp_path: Path) -> None:
    model = small()
    model.save(tmp_path)
    path = tmp_path / "config.toml"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert same(load_model(tmp_path), model)


def test_saving_changes_nothing_in_the_model(tmp_path: Path) -> None:
    model = small("encoder", norm="batch").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save(tmp_path)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# ── Damaged, foreign or from another version ──────────────────────────────────────────────────────


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    small().save(tmp_path)
    return tmp_path


def parts_of(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return saved.read_tensors(directory / "model.safetensors", *TEXT_MODEL)


def rewrite(directory: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
    save_file(tensors, directory / "model.safetensors", metadata=metadata)


def refuse(directory: Path, message: str) -> None:
    with pytest.raises(SavedError, match=message):
        load_model(directory)


def test_a_missing_directory_or_file(tmp_path: Path) -> None:
    refuse(tmp_path / "none", r"^there is no file '.*none/model\.safetensors'\. Check the path\.$")
    refuse(tmp_path, r"^there is no file '.*/model\.safetensors'\. Check the path\.$")


@pytest.mark.parametrize("share", (0.0, 0.001, 0.3, 0.9, 0.9999))
def test_a_file_cut_short(share: float, directory: Path) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refuse(directory, r"model\.safetensors' is damaged or not a safetensors file: .+\.$")


@pytest.mark.parametrize("place", (-1, -1000, -5000))
def test_a_flipped_bit(place: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))
    refuse(directory, r"model\.safetensors' was changed after it was written\. Use a backup\.$")


def test_a_bit_flipped_anywhere_is_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = {*range(0, 8 * header, 8 * header // 400), *range(64)}
    places |= set(range(0, 8 * len(content), 8 * len(content) // 200))
    for place in sorted(places):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(bytes(changed))
        with pytest.raises(SavedError):
            load_model(directory)
    path.write_bytes(content)
    load_model(directory)


@pytest.mark.parametrize("content", ({"x": 1e-5}, {"x": "\x1b é"}))
def test_a_reformatted_header(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "file"
    saved.write_tensors(path, {"a": torch.zeros(1)}, "test", 1, content)
    before = path.read_bytes()
    after = before.replace(b"1e-05", b"1E-05").replace(b"u001b", b"u001B")
    assert before != after
    path.write_bytes(after)
    with pytest.raises(SavedError, match="was changed after it was written"):
        saved.read_tensors(path, "test", 1)


@pytest.mark.parametrize("metadata", (None, {}, {"format": "pt"}))
def test_a_file_of_another_library(metadata: dict[str, str] | None, directory: Path) -> None:
    rewrite(directory, {"weight": torch.zeros(3)}, metadata)
    assert kind_of(directory / "model.safetensors") is None
    refuse(
        directory,
        r"model\.safetensors' was not written by addnorm\. Import weights of other libraries\.$",
    )


def test_another_format_version(directory: Path) -> None:
    tensors, content = parts_of(directory)
    sentence = (
        r"model\.safetensors' is a text model of format {}; this addnorm reads format 2\. Train it "
        r"again, or use the addnorm version that wrote it\.$"
    )
    saved.write_tensors(directory / "model.safetensors", tensors, "text-model", 3, content)
    refuse(directory, sentence.format(3))
    rewrite(directory, tensors, {"format": "addnorm", "version": "1", "digest": "0" * 64})
    refuse(directory, sentence.format(1))


def test_another_kind(directory: Path) -> None:
    tensors, content = parts_of(directory)
    saved.write_tensors(directory / "model.safetensors", tensors, *TABLE_MODEL, content)
    refuse(
        directory,
        r"model\.safetensors' must be a text model: it is a table model\. Check the path\.$",
    )


def test_another_digest(directory: Path) -> None:
    tensors, content = parts_of(directory)
    text = dump_document(*TEXT_MODEL, content)  # without the tensors
    rewrite(directory, tensors, {METADATA_KEY: text})
    refuse(directory, r"was changed after it was written")


@pytest.mark.parametrize("document", ("", "[" * 100_000, "5", "{}"))
def test_metadata_without_a_document(document: str, directory: Path) -> None:
    rewrite(directory, {"weight": torch.zeros(3)}, {METADATA_KEY: document})
    refuse(directory, r"model\.safetensors' (is damaged: it is n|was not written by addnorm\.)")


def test_files_that_are_not_regular(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.unlink()
    path.symlink_to("/dev/zero")
    refuse(directory, r"model\.safetensors' is not a regular file\. Check the path\.$")
    path.unlink()
    os.mkfifo(path)
    assert kind_of(path) is None
    refuse(directory, r"model\.safetensors' is not a regular file\. Check the path\.$")


def test_equal_models_give_equal_bytes(tmp_path: Path) -> None:
    tensors = {f"{i}.{name}": torch.full((i,), 1.5) for i in range(3) for name in "badc"}
    content = {"b": {"y": 1, "x": (2, 3)}, "a": None}
    same_content = {"a": None, "b": {"x": [2, 3], "y": 1}}
    saved.write_tensors(tmp_path / "one", tensors, "test", 1, content)
    reverse = dict(reversed(tensors.items()))
    saved.write_tensors(tmp_path / "two", reverse, "test", 1, same_content)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_content_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(
        SavedError, match=r"file' cannot be written: a\.b\[1\] must be finite: got n"
    ):
        saved.write_tensors(tmp_path / "file", {}, "test", 1, {"a": {"b": [0.0, float("nan")]}})
    assert not (tmp_path / "file").exists()


def test_the_kind_is_in_the_first_bytes(directory: Path) -> None:
    path = directory / "model.safetensors"
    assert kind_of(path) == kind_of(str(path)) == "text-model"
    path.write_bytes(path.read_bytes()[:200])
    assert kind_of(path) == "text-model"
    assert kind_of(directory) is None and kind_of(directory / "config.toml") is None


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("by", ("pickle", "torch"))
def test_a_pickle_is_never_opened(by: str, directory: Path) -> None:
    sprung, path = directory / "sprung", directory / "model.safetensors"
    if by == "pickle":
        path.write_bytes(pickle.dumps(Trap(sprung)))
    else:
        torch.save({"weight": Trap(sprung)}, path)
    refuse(directory, r"model\.safetensors' is damaged or not a safetensors file: ")
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists()  # the trap works


def test_an_edited_configuration(directory: Path) -> None:
    path = directory / "config.toml"
    path.write_text(path.read_text().replace("depth = 2", "depth = 3"))
    refuse(
        directory,
        r"config\.toml' differs from the configuration inside model\.safetensors \(it was edited, "
        r"or a save was interrupted\)\. Delete it to use the one inside\.$",
    )
    path.write_bytes(b"\xff\xfe")
    refuse(directory, r"config\.toml' is not UTF-8 text: ")
    path.unlink()
    assert load_model(directory).config.depth == 2


def write_again(directory: Path, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    """Write a file with a valid digest, whose parts may not match."""
    saved.write_tensors(directory / "model.safetensors", tensors, *TEXT_MODEL, content)


def test_weights_that_do_not_match_the_configuration(directory: Path) -> None:
    tensors, content = parts_of(directory)
    name = "decoder.stack.blocks.0.sublayers.ffn.input.bias"
    does_not_fit = rf"^'.*' does not match its own configuration: {name} must be float \(64,\): "
    missing = {key: tensor for key, tensor in tensors.items() if key != name}
    write_again(directory, missing, content)
    refuse(directory, does_not_fit + r"got nothing\.$")
    write_again(directory, missing | {name: torch.zeros(63)}, content)
    refuse(directory, does_not_fit + r"got float \(63,\)\.$")
    write_again(directory, missing | {name: torch.zeros(64).int()}, content)
    refuse(directory, does_not_fit + r"got int32 \(64,\)\.$")
    write_again(directory, tensors | {"a.renamed": torch.zeros(64)}, content)
    refuse(directory, r"configuration: a\.renamed must be absent: got float \(64,\)\.$")
    write_again(directory, missing | {"zz": tensors[name]}, content)
    refuse(directory, does_not_fit + r"got nothing\.$")


def test_a_size_that_is_not_in_the_weights_is_not_allocated(directory: Path) -> None:
    tensors, content = parts_of(directory)
    (directory / "config.toml").unlink()
    huge = content["config"].replace("vocab = 19", "vocab = 1000000000000")
    assert huge != content["config"]
    write_again(directory, tensors, {"config": huge})
    refuse(directory, r"does not match its own configuration: .* must be float \(1000000000000, ")


@pytest.mark.parametrize("content", ({}, {"config": 5}))
def test_a_header_without_a_configuration(content: dict[str, Any], directory: Path) -> None:
    write_again(directory, parts_of(directory)[0], content)
    refuse(directory, r"model\.safetensors' has no configuration\. Use a backup\.$")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    (
        ("depth = 2", "depth = -2", r"cannot be built: model\.depth must not be negative: got -2"),
        ('norm = "layer"', 'norm = "lay"', r"cannot be built: model\.norm has no choice 'lay'"),
        ("depth = 2", "dept = 2", r"cannot be built: model has no field 'dept'\. Did you mean"),
        (
            "schema = 2",
            "schema = 9",
            r"cannot be built: .* has schema 9; this version reads schema",
        ),
        ("[model]", "[model", r"cannot be built: .*config\.toml is not TOML: "),
    ),
)
def test_a_configuration_that_cannot_be_built(
    old: str, new: str, message: str, directory: Path
) -> None:
    tensors, content = parts_of(directory)
    assert old in content["config"]
    (directory / "config.toml").unlink()
    write_again(directory, tensors, {"config": content["config"].replace(old, new)})
    refuse(directory, message)


def test_only_models_from_build_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"only a model from addnorm\.build can be saved: got "):
        saved.save(torch.nn.Linear(2, 2), tmp_path / "there")
    assert not (tmp_path / "there").exists()


# ── A save that fails ─────────────────────────────────────────────────────────────────────────────


def no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(tensors: Any, path: Path, metadata: Any = None) -> None:
    Path(path).write_bytes(b"half")
    no_space()


@pytest.mark.parametrize(
    ("target", "failure"),
    (
        ("addnorm.models.saved.save_file", no_space),
        ("addnorm.models.saved.save_file", half_written),
        ("addnorm.files.os.fsync", no_space),
        ("pathlib.Path.replace", no_space),
    ),
)
def test_a_failed_save_leaves_the_old_model(
    target: str, failure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = small(addnorm="pre")
    old.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(target, failure)
        message = r"model\.safetensors' cannot be written: No space left on device\. Free"
        with pytest.raises(SavedError, match=message):
            small(addnorm="post", depth=1).save(tmp_path)
    assert files(tmp_path) == FILES
    assert same(load_model(tmp_path), old)


def test_a_failed_save_of_the_configuration_is_reported_by_load_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(addnorm="pre").save(tmp_path)
    new = small(addnorm="post", depth=1)
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_bytes", no_space)
        message = r"config\.toml' cannot be written: No space left on device\. Free"
        with pytest.raises(SavedError, match=message):
            new.save(tmp_path)
    assert files(tmp_path) == FILES
    # The weights are already the new ones, and complete; config.toml is still the old one.
    refuse(tmp_path, r"a save was interrupted\)\. Delete it to use the one inside\.$")
    (tmp_path / "config.toml").unlink()
    assert same(load_model(tmp_path), new)


def test_an_interrupted_save_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    old = small()
    old.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("addnorm.files.os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            small(depth=1).save(tmp_path)
    assert files(tmp_path) == FILES
    assert same(load_model(tmp_path), old)


@pytest.mark.parametrize(
    ("reason", "message"),
    (
        ("No space left on device (os error 28)", r"written: No space left on device\. Free some"),
        ("a disk of the future", "written: Error while serializing: I/O error: a disk of"),
    ),
)
def test_a_full_disk_is_a_saved_error(
    reason: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: {reason}")

    monkeypatch.setattr("addnorm.models.saved.save_file", full)
    with pytest.raises(SavedError, match=rf"model\.safetensors' cannot be {message}"):
        small().save(tmp_path)


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_text("mine")
    with pytest.raises(
        SavedError, match=r"/model' cannot be created: File exists\. Choose another path\.$"
    ):
        small().save(path)
    with pytest.raises(
        SavedError,
        match=r"/model/inner' cannot be created: Not a directory\. Choose another path\.$",
    ):
        small().save(path / "inner")
    assert path.read_text() == "mine"
    refuse(path, r"^there is no file '.*/model/model\.safetensors'\. Check the path\.$")


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(
        SavedError, match=r"model\.safetensors' cannot be written: Is a directory\. Choose"
    ):
        small().save(tmp_path)
    assert files(tmp_path) == {"model.safetensors"}
    refuse(tmp_path, r"^'.*model\.safetensors' is not a regular file\. Check the path\.$")


# ── The digest ────────────────────────────────────────────────────────────────────────────────────


def test_the_digest_covers_content_names_types_shapes_and_values(tmp_path: Path) -> None:
    def document_of(tensors: dict[str, Tensor], content: dict[str, Any]) -> str:
        saved.write_tensors(tmp_path / "file", tensors, "test", 1, content)
        with safe_open(tmp_path / "file", framework="pt") as file:
            assert set(file.metadata()) == {METADATA_KEY}
            return str(file.metadata()[METADATA_KEY])

    one = {"a": torch.zeros(2, 3), "b": torch.zeros(())}
    same_again = {"b": torch.zeros(()), "a": torch.zeros(3, 2).t()}
    assert document_of(one, {}) == document_of(same_again, {})
    others: list[dict[str, Tensor]] = [
        {"c": one["a"], "b": one["b"]},
        {"a": torch.zeros(3, 2), "b": one["b"]},
        {"a": torch.zeros(2, 3).int(), "b": one["b"]},
        {"a": torch.full((2, 3), 1e-30), "b": one["b"]},
        {"a": one["a"]},
        {},
    ]
    documents = {document_of(tensors, {}) for tensors in (one, *others)}
    digests = {json.loads(text)["digest"] for text in (*documents, document_of(one, {"x": 1}))}
    assert len(digests) == 2 + len(others)
