"""A model directory: `model.safetensors` and `config.toml`, written whole and read strictly.

The weights file is complete by itself: its header holds the configuration, the format version and a
digest of every tensor. `config.toml` is the same configuration for people to read; if the two ever
differ, loading says so. Nothing that is read is ever executed.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from addnorm.config import Config, ModelConfig
from addnorm.disk import read_text, whole, write_whole
from addnorm.errors import AddnormError, SavedError
from addnorm.models.build import Model, build

FORMAT = "1"
WEIGHTS, CONFIG = "model.safetensors", "config.toml"


def save(
    model: nn.Module, directory: str | Path, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model's weights and configuration; what was there stays until the new is whole.

    `state` stands for the model's own weights, where these are held in parts by several workers.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise SavedError(f"only a model made by addnorm.build can be saved: got {type(model)}.")
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SavedError(f"{str(directory)!r} cannot be made: {error.strerror}.") from None
    text = Config(model=config).dump()
    write_tensors(directory / WEIGHTS, state or model.state_dict(), {"config": text})
    write_whole(directory / CONFIG, text.encode())


def load(directory: str | Path, device: str | torch.device = "cpu") -> Model:
    """The model that `save` wrote, in evaluation mode.

    >>> load("nothing")
    Traceback (most recent call last):
    addnorm.errors.SavedError: there is no file 'nothing/model.safetensors'. Check the path.
    """
    directory = Path(directory)
    tensors, facts = read_tensors(directory / WEIGHTS)
    text = facts.get("config")
    if text is None:
        raise SavedError(f"{str(directory / WEIGHTS)!r} holds no configuration: not a saved model.")
    beside = directory / CONFIG
    if beside.exists() and read_text(beside) != text:
        raise SavedError(
            f"{str(beside)!r} is not the configuration the weights were saved with (edited, or a "
            "save was cut short). Delete it to use the one inside the weights."
        )
    try:
        with torch.device("meta"):
            model = build(Config.parse(text, source=str(beside)))
    except AddnormError as error:
        raise SavedError(f"{str(directory)!r} cannot be built: {error}") from None
    _need_same(model, tensors, directory)
    model.load_state_dict(tensors, assign=True)
    return model.to(device).eval()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """A safetensors file with a digest of its contents, written whole."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"format": "addnorm", "version": FORMAT, **facts, "digest": digest(plain)}
    try:
        with whole(path) as temporary:
            save_file(plain, temporary, metadata=header)
    except SafetensorError as error:  # which a full disk is, too
        raise SavedError(f"{str(path)!r} cannot be written: {error}.") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and facts of a file that `write_tensors` wrote, checked against its digest."""
    if not path.is_file():
        raise SavedError(f"there is no file {str(path)!r}. Check the path.")
    try:
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise SavedError(f"{str(path)!r} is damaged or no safetensors file: {error}.") from None
    if facts.get("format") != "addnorm":
        raise SavedError(
            f"{str(path)!r} was not written by addnorm. Weights of other libraries need an import."
        )
    if facts.get("version") != FORMAT:
        raise SavedError(
            f"{str(path)!r} has format version {facts.get('version')}; this addnorm reads "
            f"{FORMAT}. Update addnorm to open it."
        )
    if facts.get("digest") != digest(tensors):
        raise SavedError(f"{str(path)!r} is not what was saved: its digest differs. Use a backup.")
    return tensors, facts


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A SHA-256 over names, types, shapes and bytes, in order of name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _need_same(model: nn.Module, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Raise where the names or shapes of the weights are not those of the model."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in wanted | given if wanted.get(name) != given.get(name))
    if wrong:
        name = wrong[0]
        raise SavedError(
            f"{str(directory)!r} does not fit its own configuration: {name} should be "
            f"{wanted.get(name, 'absent')} and is {given.get(name, 'absent')}."
        )
