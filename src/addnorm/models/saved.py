"""A model directory: `model.safetensors` and `config.toml`, written atomically and read strictly.

The weights file is complete by itself: its metadata hold one document (files.py) with the
configuration and a digest of document and tensors. `config.toml` is the same configuration in
readable form; loading requires that the two agree. Nothing that is read is executed.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from addnorm.config import Config, ModelConfig
from addnorm.errors import AddnormError, SavedError
from addnorm.files import (
    METADATA_KEY,
    TEXT_MODEL,
    dump_document,
    make_directory,
    parse_document,
    read_text,
    require_regular,
    unwritable,
    whole,
    write_whole,
)
from addnorm.models.build import Model, build

WEIGHTS, CONFIG = "model.safetensors", "config.toml"


def save(
    model: nn.Module, directory: str | Path, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model's weights and configuration, each file atomically.

    Parameters
    ----------
    model : a model from `build`
    directory : created if it does not exist; `load` reads it
    state : weights to write instead of the model's own, where several processes hold shards of them

    Examples
    --------
    >>> from addnorm import build, load, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=1, heads=2))
    >>> save(model, "small")
    >>> load("small").config == model.config
    True
    """
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise SavedError(f"only a model from addnorm.build can be saved: got {type(model)}.")
    directory = make_directory(directory)
    text = Config(model=config).dump()
    write_tensors(directory / WEIGHTS, state or model.state_dict(), *TEXT_MODEL, {"config": text})
    write_whole(directory / CONFIG, text.encode())


def load_model(directory: str | Path, device: str | torch.device = "cpu") -> Model:
    """Return the model that was saved in a directory, in evaluation mode.

    Parameters
    ----------
    directory : one that a model's `save` or a training run wrote
    device : where to load the weights

    Examples
    --------
    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=1, heads=2))
    >>> model.save("small")
    >>> load_model("small").config == model.config
    True
    >>> load_model("nothing")
    Traceback (most recent call last):
    addnorm.errors.SavedError: there is no file 'nothing/model.safetensors'. Check the path.
    """
    directory = Path(directory)
    config, tensors = _read_model(directory)
    return build_with(config, tensors, directory).to(device).eval()


def build_with(config: Config, tensors: Mapping[str, Tensor], path: Path) -> Model:
    """Return a model that has these tensors as its weights, without allocating others.

    SavedError, which names the `path`, if they do not match the configuration.
    """
    require_plausible_depth(config.model, tensors, path)
    try:
        with torch.device("meta"):
            model = build(config)
    except (AddnormError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise SavedError(f"{str(path)!r} cannot be built: {reason}") from None
    require_matching_tensors(model, tensors, path, any_float=True)
    model.load_state_dict(tensors, assign=True)
    return model


def require_plausible_depth(config: ModelConfig, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise SavedError if there are fewer tensors than blocks: every block has at least one.

    Building blocks takes time and memory even on the `meta` device, where tensors take none.
    """
    depth = max(config.depths.values())
    if depth > len(tensors):
        raise SavedError(
            f"{str(path)!r} does not match its own configuration: it has {len(tensors)} tensors, "
            f"too few for a depth of {depth:,}. Use a backup."
        )


def read_config(directory: str | Path) -> Config:
    """Return the configuration of a model that `save` wrote."""
    return _read_model(Path(directory))[0]


def _read_model(directory: Path) -> tuple[Config, dict[str, Tensor]]:
    tensors, content = read_tensors(directory / WEIGHTS, *TEXT_MODEL)
    text, readable = content.get("config"), directory / CONFIG
    if not isinstance(text, str):
        raise SavedError(f"{str(directory / WEIGHTS)!r} has no configuration. Use a backup.")
    if readable.exists() and read_text(readable) != text:
        raise SavedError(
            f"{str(readable)!r} differs from the configuration inside {WEIGHTS} (it was edited, or "
            "a save was interrupted). Delete it to use the one inside."
        )
    try:
        return Config.parse(text, source=str(readable)), tensors
    except AddnormError as error:
        raise SavedError(f"{str(directory)!r} cannot be built: {error}") from None


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], kind: str, version: int, content: Mapping[str, Any]
) -> None:
    """Write a safetensors file atomically, with a document as its metadata.

    Equal tensors and equal content give equal bytes.

    Parameters
    ----------
    path : the file to write
    tensors : by name; on any device
    kind, version : a FileFormat; `read_tensors` requires the same
    content : plain values; NaN and infinities are refused
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        text = dump_document(kind, version, content, _bytes_of(plain))
        with whole(path) as temporary:
            save_file(plain, temporary, metadata={METADATA_KEY: text})
    except (SafetensorError, ValueError) as error:  # a full disk is a SafetensorError, too
        if code := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(code[1])
            raise unwritable(path, OSError(number, os.strerror(number))) from None
        raise SavedError(f"{str(path)!r} cannot be written: {error}.") from None


def read_tensors(path: Path, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and content of a file that `write_tensors` wrote, unless it was changed."""
    require_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise SavedError(f"{str(path)!r} is damaged or not a safetensors file: {error}.") from None
    if "version" not in metadata and METADATA_KEY not in metadata:
        raise SavedError(
            f"{str(path)!r} was not written by addnorm. Import weights of other libraries."
        )
    text = metadata.get(METADATA_KEY, json.dumps(metadata))  # format 1 had plain metadata
    return tensors, parse_document(text, path, kind, version, _bytes_of(tensors))


def require_matching_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], path: Path, *, any_float: bool
) -> None:
    """Raise SavedError where names, shapes or dtypes differ from those of the model.

    The model may be on the `meta` device, so that a wrong size is detected before allocation.

    Parameters
    ----------
    model : built from the configuration that was saved with the tensors
    tensors : by name
    path : where they were read from, for the message
    any_float : whether floating-point tensors may have another precision than the model's
    """

    def describe(tensor: Tensor) -> str:
        is_any = any_float and tensor.is_floating_point()
        dtype = "float" if is_any else str(tensor.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(tensor.shape)}"

    expected = {name: describe(tensor) for name, tensor in model.state_dict().items()}
    actual = {name: describe(tensor) for name, tensor in tensors.items()}
    for name in sorted(expected | actual):
        if expected.get(name) != actual.get(name):
            raise SavedError(
                f"{str(path)!r} does not match its own configuration: {name} must be "
                f"{expected.get(name, 'absent')}: got {actual.get(name, 'nothing')}."
            )


def _bytes_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield name, dtype, shape and bytes of each tensor, in order of name."""
    for name in sorted(tensors):
        tensor = tensors[name]
        yield json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data
