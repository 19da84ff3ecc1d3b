"""Hugging Face directories: read as models of ours, and written from them, verified equal.

    read_model(directory)           config.json + safetensors -> a model of ours
    write_model(model, directory)   the inverse, by the same table of names

Nothing of `transformers` is imported.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.errors import AddnormError, ConfigError, SavedError, nearest
from addnorm.files import make_directory, to_json, whole, write_whole
from addnorm.interop.decoders import DECODERS
from addnorm.interop.directory import (
    DTYPES,
    HF_CONFIG,
    HF_WEIGHTS,
    TensorEntry,
    Weights,
    read_json_object,
)
from addnorm.interop.encoder_decoders import ENCODER_DECODERS
from addnorm.interop.encoders import ENCODERS
from addnorm.interop.mapping import Architecture, ConfigJson, TensorMap, expand
from addnorm.models.build import Model, build

ARCHITECTURES: dict[str, Architecture] = {
    known.model_type: known for known in (*ENCODERS, *DECODERS, *ENCODER_DECODERS)
}
"""Every architecture that is read and written, by its model_type."""
FORMER_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Endings of names in the first BERT checkpoints, and what they are called since."""
_EXPERTS = "feed-forwards of several experts"
NOT_EXPRESSED = {
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), _EXPERTS),
    **dict.fromkeys(("deberta", "deberta-v2"), "attention with separate scores of positions"),
    **dict.fromkeys(("longformer", "big_bird"), "attention with global tokens"),
    **dict.fromkeys(("mamba", "mamba2"), "state-space layers"),
    "albert": "blocks that share their weights",
    "phi3": "rotary positions stretched as longrope",
    "xlnet": "two-stream attention",
}
"""What addnorm has no form of, for some architectures that it does not read."""


@dataclass(frozen=True)
class Imported:
    """A model that was read, and what else its config.json says.

    Parameters
    ----------
    model : the network, in evaluation mode.
    architecture : what it was read as.
    settings : the content of config.json.
    labels : names of the classes, for a classifier.
    notes : what was left out, in sentences.
    """

    model: Model
    architecture: Architecture
    settings: ConfigJson
    labels: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def read_model(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> Imported:
    """Return the model in a local Hugging Face directory, in evaluation mode.

    Names and shapes are compared with the headers of the files before any weight is read; a tensor
    that is missing, unused or of another shape is an error that names it.

    Parameters
    ----------
    directory : has config.json and model.safetensors, or shards with their index.
    dtype : the weights are converted to it.

    Examples
    --------
    >>> read_model("nothing")
    Traceback (most recent call last):
    addnorm.errors.SavedError: there is no file 'nothing/config.json'. Check the path.
    """
    directory = Path(directory)
    settings = read_json_object(directory, HF_CONFIG)
    architecture = find_architecture(settings, directory)
    with Weights(directory) as weights:
        config = _read_config(architecture, settings, weights, directory)
        model = _build_empty(config, directory)
        stated = _with_prefix(architecture, weights)
        replaced = _replace_untied_(architecture, config, stated)
        maps = _expand_rows(architecture, config, model)
        notes = _check(architecture, config, model, maps, stated, directory) + replaced
        tensors, used = {}, set[str]()
        for entry in maps:
            parts = [weights.tensor(stated[name][0]).to(dtype) for name in entry.theirs]
            tensors[entry.ours] = entry.transform.join(parts, config).contiguous()
            if not used.isdisjoint(entry.theirs):  # what is read twice is the same memory
                tensors[entry.ours] = tensors[entry.ours].clone()
            used.update(entry.theirs)
            if not tensors[entry.ours].isfinite().all():
                notes.append(f"{entry.theirs[0]!r} has values that are NaN or infinite.")
        _check_tied(architecture, config, settings, weights, stated)
    model.load_state_dict(tensors, assign=True)
    labels = _labels(settings, config)
    return Imported(model.eval(), architecture, settings, labels, notes)


def our_tensors(
    architecture: Architecture, config: ModelConfig, theirs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors of theirs by our names; a tensor of ours whose parts are absent is left out.

    The table only renames, turns, cuts and joins, so gradients can be renamed as well as weights.
    """
    with torch.device("meta"):
        names = build(config).state_dict()
    return {
        entry.ours: entry.transform.join([theirs[name] for name in entry.theirs], config)
        for entry in expand(architecture.rows(config), names)
        if all(name in theirs for name in entry.theirs)
    }


def find_architecture(settings: ConfigJson, directory: Path) -> Architecture:
    """Return the architecture that a config.json names; SavedError if it is not known."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        lacking = NOT_EXPRESSED.get(kind) if isinstance(kind, str) else None
        lacking = f" It would need {lacking}." if lacking else ""
        raise SavedError(
            f"{str(directory / HF_CONFIG)!r} has model_type={kind!r}, which addnorm does not read."
            f"{lacking} It reads {', '.join(sorted(ARCHITECTURES))}."
        )
    if settings.get("quantization_config"):
        raise SavedError(
            f"{str(directory)!r} has quantised weights. Save them in float first: "
            "model.dequantize().save_pretrained(DIRECTORY)"
        )
    return ARCHITECTURES[kind]


def _read_config(
    architecture: Architecture, settings: ConfigJson, weights: Weights, directory: Path
) -> ModelConfig:
    prefix = architecture.prefix
    names = {*weights, *(f"{prefix}{name}" for name in weights)}
    try:
        config = architecture.read(settings, names)
    except (TypeError, KeyError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, AddnormError):
            raise
        raise SavedError(
            f"{str(directory / HF_CONFIG)!r} is damaged: {type(error).__name__} {error}."
        ) from None
    if sum(config.depths.values()) > len(weights):  # blocks are built before shapes are compared
        raise SavedError(
            f"{str(directory / HF_CONFIG)!r} says {config.depth:,} blocks, but there are only "
            f"{len(weights):,} tensors."
        )
    return config


def _build_empty(config: ModelConfig, directory: Path) -> Model:
    """Return the model on the meta device: shapes without memory."""
    try:
        with torch.device("meta"):
            return build(config)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise SavedError(
            f"{str(directory / HF_CONFIG)!r} describes no model that can be built: {error}."
        ) from None
    except ConfigError as error:
        raise SavedError(f"{str(directory)!r} cannot be built: {error}") from None


def _with_prefix(
    architecture: Architecture, weights: Mapping[str, TensorEntry]
) -> dict[str, tuple[str, TensorEntry]]:
    """Return each stored tensor by the name that the table uses, with its name in the file.

    A body without a head is stored without the prefix of its class; gain and bias of a layer norm
    had other names in the first checkpoints.
    """
    prefix = architecture.prefix
    bare = prefix and not any(name.startswith(prefix) for name in weights)
    heads = {name.split(".")[0] for name in architecture.tied}
    stored: dict[str, tuple[str, TensorEntry]] = {}
    for name, entry in weights.items():
        usual = name
        for old, new in FORMER_ENDINGS.items():
            usual = f"{name.removesuffix(old)}{new}" if name.endswith(old) else usual
        if bare and usual.split(".")[0] not in heads:
            usual = f"{prefix}{usual}"
        if usual in stored:
            raise SavedError(f"{name!r} and {stored[usual][0]!r} are the same tensor. Keep one.")
        stored[usual] = (name, entry)
    return stored


def _replace_untied_(
    architecture: Architecture, config: ModelConfig, stored: dict[str, tuple[str, TensorEntry]]
) -> list[str]:
    """Put what an untied output has of its own in place of what it would share; return notes."""
    notes = []
    for name, own in architecture.untied.items():
        if config.ties_output or own not in stored:
            continue
        if name in stored:
            notes.append(f"{name!r} is not used: {own!r} is the bias of an untied output.")
        stored[name] = stored[own]
    return notes


def _expand_rows(architecture: Architecture, config: ModelConfig, model: Model) -> list[TensorMap]:
    return expand(architecture.rows(config), model.state_dict())


def _check(
    architecture: Architecture,
    config: ModelConfig,
    model: Model,
    maps: Iterable[TensorMap],
    stored: Mapping[str, tuple[str, TensorEntry]],
    directory: Path,
) -> list[str]:
    """Compare names, shapes and dtypes with the headers; return notes on what is not used."""
    own = model.state_dict()
    needed: set[str] = set()
    for entry in maps:
        for name, part in zip(
            entry.theirs, entry.transform.split(own[entry.ours], config), strict=True
        ):
            needed.add(name)
            expected = tuple(part.shape)
            if name not in stored:
                raise SavedError(
                    f"{str(directory)!r} must have the tensor {name!r} of shape {expected}: "
                    "it is missing."
                )
            actual = stored[name][1]
            if actual.shape != expected:
                raise SavedError(
                    f"{name!r} in {str(directory)!r} must have shape {expected} by its "
                    f"config.json: got {actual.shape}."
                )
            if actual.dtype not in DTYPES:
                raise SavedError(
                    f"{name!r} in {str(directory)!r} must be of floating point "
                    f"({', '.join(DTYPES)}): got {actual.dtype}. Convert quantised weights first."
                )
    notes: dict[str, int] = {}
    for name in sorted(stored.keys() - needed - set(architecture.tied)):
        reason = next(
            (why for end, why in architecture.unused.items() if f".{name}".endswith(f".{end}")),
            None,
        )
        if reason is None:
            raise SavedError(
                f"{stored[name][0]!r} in {str(directory)!r} has no place in "
                f"{architecture.model_type} with head={config.head}. Nothing may be left out."
            )
        notes[reason] = notes.get(reason, 0) + 1
    return [f"{count} tensors are not used: {reason}." for reason, count in notes.items()]


def _check_tied(
    architecture: Architecture,
    config: ModelConfig,
    settings: ConfigJson,
    weights: Weights,
    stored: Mapping[str, tuple[str, TensorEntry]],
) -> None:
    """Raise SavedError if a stored copy of a tied tensor differs from what it is tied to."""
    needed = {name for row in architecture.rows(config) for name in _names_of_row(row.theirs)}
    for copy, original in architecture.tied.items():
        if copy not in stored or original not in stored:
            continue
        own = copy in needed or copy.removesuffix(".weight") in needed
        if own and not config.ties_output:
            continue
        one, other = stored[copy], stored[original]
        same = one[1].shape == other[1].shape
        if not same or not torch.equal(weights.tensor(one[0]), weights.tensor(other[0])):
            tied = settings.get("tie_word_embeddings", True) is not False
            raise SavedError(
                f"{copy!r} and {original!r} must be equal, as config.json ties them: they differ. "
                "Set tie_word_embeddings to false in config.json if they are meant to."
                if tied
                else f"{copy!r} and {original!r} must be equal, as addnorm has one tensor for "
                f"both in {architecture.model_type}: they differ."
            )


def _names_of_row(parts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (parts,) if isinstance(parts, str) else parts


def _labels(settings: ConfigJson, config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the classes, in the order of the outputs."""
    if config.head != "class":
        return ()
    table = settings.get("id2label")
    table = table if isinstance(table, dict) else {}
    return tuple(str(table.get(str(i), i)) for i in range(config.outputs))


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────


def architectures_for(config: ModelConfig) -> tuple[list[Architecture], dict[str, str]]:
    """Return the architectures that can express a configuration, and why the others cannot."""
    able: list[Architecture] = []
    reasons: dict[str, str] = {}
    for name, architecture in ARCHITECTURES.items():
        try:
            architecture.write(config)
        except (ConfigError, SavedError) as error:
            reasons[name] = str(error)
        else:
            able.append(architecture)
    return able, reasons


def write_model(
    model: Model,
    directory: str | Path,
    *,
    architecture: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Architecture:
    """Write a model as a Hugging Face directory: config.json and model.safetensors.

    Returns the architecture it was written as.

    Parameters
    ----------
    model : a model of ours.
    directory : where to write; created if it does not exist.
    architecture : a model_type; the first that can express the model by default.
    settings : more keys of config.json, such as ids of special tokens or names of labels.
    """
    config = model.config
    chosen = choose_architecture(config, architecture)
    content = chosen.write(config) | dict(settings or {})
    tensors = their_tensors(chosen, config, model.state_dict())
    directory = make_directory(directory)
    text = to_json(dict(sorted(content.items())), indent=2)
    try:
        with whole(directory / HF_WEIGHTS) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
    except SafetensorError as error:
        raise SavedError(f"{str(directory / HF_WEIGHTS)!r} cannot be written: {error}.") from None
    write_whole(directory / HF_CONFIG, f"{text}\n".encode())
    return chosen


def choose_architecture(config: ModelConfig, name: str | None = None) -> Architecture:
    """Return an architecture that can express a configuration; ConfigError says why none can."""
    if name is not None:
        if name not in ARCHITECTURES:
            raise ConfigError(f"there is no architecture {name!r}. {nearest(name, ARCHITECTURES)}")
        ARCHITECTURES[name].write(config)
        return ARCHITECTURES[name]
    able, reasons = architectures_for(config)
    if not able:
        nearby = _nearest_reasons(config, reasons)
        raise ConfigError(f"no architecture of Hugging Face expresses this model: {nearby}")
    return able[0]


def _nearest_reasons(config: ModelConfig, reasons: Mapping[str, str]) -> str:
    """Return why the architectures of the same mode cannot express a model."""
    same = [
        reason
        for name, reason in reasons.items()
        if ARCHITECTURES[name].fixed["mode"] == config.mode
        and ARCHITECTURES[name].fixed.get("input", "tokens") == config.input
    ]
    return " ".join(same)


def their_tensors(
    architecture: Architecture, config: ModelConfig, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a state dict by the names of an architecture."""
    tensors: dict[str, Tensor] = {}
    for entry in expand(architecture.rows(config), state):
        parts = entry.transform.split(state[entry.ours].detach().cpu(), config)
        for name, part in zip(entry.theirs, parts, strict=True):
            if name in tensors and not torch.equal(tensors[name], part):
                raise ConfigError(
                    f"{architecture.model_type} cannot express this model: its {name!r} is several "
                    f"tensors here, among them {entry.ours!r}, and they differ."
                )
            tensors[name] = part.contiguous()
    for name, own in architecture.untied.items():
        if name in tensors and not config.ties_output:
            tensors[own] = tensors[name]
    for name, find_shape in architecture.zeros.items():
        shape = find_shape(config)
        if name not in tensors and shape is not None:
            tensors[name] = torch.zeros(shape)
    if config.head == "none" and architecture.prefix:
        tensors = {name.removeprefix(architecture.prefix): part for name, part in tensors.items()}
    return {name: part.clone() for name, part in tensors.items()}
