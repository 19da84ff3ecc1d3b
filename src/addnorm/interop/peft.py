"""Adapters in the file layout of PEFT: adapter_config.json and adapter_model.safetensors.

    ours    ….sublayers.attention.input   updates.query.A, updates.query.B
    theirs  base_model.model.….attention.self.query.lora_A.weight, .lora_B.weight

The names of the modules are those of the architecture's table. Where they hold queries, keys and
values in one module and we adapt each, theirs is one adapter of the sum of the ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError, SavedError
from addnorm.files import make_directory, to_json, whole, write_whole
from addnorm.interop.directory import inside, read_json_object
from addnorm.interop.huggingface import choose_architecture
from addnorm.interop.mapping import HEADWISE_QKV, Architecture, TensorMap, expand
from addnorm.models.adapters import (
    AdaptedLinear,
    Adapter,
    RowRanges,
    adapt_,
    adapted_layers,
    matrices_of,
)
from addnorm.models.build import Model

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED_ADAPTER = "adapter_model.bin"
PREFIX = "base_model.model."
TASK_TYPES = {"class": "SEQ_CLS", "decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}


@dataclass(frozen=True)
class _Module:
    """A linear layer of ours, the matrices in it, and their modules that it is made of."""

    path: str
    role: str
    rows: RowRanges
    theirs: tuple[str, ...]
    entry: TensorMap

    @property
    def fused(self) -> bool:
        """Whether one module of theirs holds several matrices of ours."""
        return len(self.theirs) < len(self.rows)


def write_peft(
    model: Model, adapter: Adapter, directory: str | Path, *, base: str | None = None
) -> list[str]:
    """Write the adapters of a model as PEFT does; return notes.

    Parameters
    ----------
    model : a model with adapters.
    adapter : what `adapt_` was given.
    directory : where to write.
    base : path or name of the base model, for adapter_config.json.
    """
    architecture, notes = _choose_for_adapters(model.config)
    layers = adapted_layers(model)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module in _modules(model, architecture):
        if module.path not in layers:
            continue
        layer = layers[module.path]
        for name, parts in _split(module, layer, model.config).items():
            tensors |= {f"{PREFIX}{name}.{key}": part for key, part in parts.items()}
            ranks[name] = parts["lora_A.weight"].shape[0]
    saved = _trained_rest(model, architecture)
    tensors |= {f"{PREFIX}{name}": part for name, part in saved.items()}
    patterns = {name: rank for name, rank in ranks.items() if rank != adapter.rank}
    content = {
        "peft_type": "LORA",
        "task_type": _task_type(model.config),
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.scale * adapter.rank,
        "lora_dropout": adapter.dropout,
        "use_dora": adapter.dora,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": architecture.model_type == "gpt2",
        "inference_mode": True,
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}) or None,
        "rank_pattern": patterns,
        "alpha_pattern": {name: adapter.scale * rank for name, rank in patterns.items()},
    }
    directory = make_directory(directory)
    plain = {name: part.detach().cpu().contiguous().clone() for name, part in tensors.items()}
    with whole(directory / ADAPTER_WEIGHTS) as temporary:
        save_file(plain, temporary, metadata={"format": "pt"})
    write_whole(directory / ADAPTER_CONFIG, f"{to_json(content)}\n".encode())
    return notes


def _choose_for_adapters(c: ModelConfig) -> tuple[Architecture, list[str]]:
    """Return an architecture that has the layers of a model, and notes on its head.

    Adapters are parts of the body: a classifier that pools otherwise than theirs has them, too.
    """
    if c.head != "class" or c.pool == "none":
        return choose_architecture(c), []
    try:
        return choose_architecture(c), []
    except ConfigError:
        body = choose_architecture(c.replace(head="none"))
    note = (
        f"{body.class_of(c.replace(pool='first'))} does not pool as this model does "
        f"(pool={c.pool}, pooler={c.pooler}): apply the saved classifier to vectors pooled so."
    )
    return body, [note]


def _task_type(c: ModelConfig) -> str | None:
    if c.head == "class" and c.pool == "none":
        return "TOKEN_CLS"
    return TASK_TYPES.get(c.head) or TASK_TYPES.get(c.mode)


def read_peft_(model: Model, directory: str | Path) -> Adapter:
    """Put the adapters of a PEFT directory over a model; return what they are.

    Ranks and scales may differ from module to module: smaller ranks are filled up with zeros, and
    another scale is multiplied into B.
    """
    directory = Path(directory)
    content = read_json_object(directory, ADAPTER_CONFIG)
    _check_settings(content, directory)
    tensors = _read_tensors(directory)
    architecture, _ = _choose_for_adapters(model.config)
    modules = {name: module for module in _modules(model, architecture) for name in module.theirs}
    groups, rest = _group(tensors, modules, directory)
    rank = max(parts["lora_A.weight"].shape[0] for parts in groups.values())
    base_scale = _adapter_scale(content, next(iter(groups)), rank)
    roles = {
        f"{modules[name].role}.{part}" for name in groups for part in _parts_of(modules[name], name)
    }
    dora = bool(content.get("use_dora"))
    adapter = Adapter(roles=",".join(sorted(roles)), rank=rank, alpha=base_scale * rank, dora=dora)
    adapt_(model, adapter)
    layers = adapted_layers(model)
    with torch.no_grad():
        for name, parts in groups.items():
            module = modules[name]
            own = parts["lora_A.weight"].shape[0]
            ratio = _adapter_scale(content, name, own) / adapter.scale
            try:
                _set(module, name, layers[module.path], parts, ratio, model.config)
            except (RuntimeError, KeyError) as error:
                raise SavedError(
                    f"{name!r} in {str(directory)!r} does not fit this model: {error}."
                ) from None
        _set_rest(model, architecture, rest, directory)
    return adapter


# ── Names ─────────────────────────────────────────────────────────────────────────────────────────


def _modules(model: Model, architecture: Architecture) -> list[_Module]:
    """Return every linear layer of the blocks that can have adapters."""
    modules = []
    rows = architecture.rows(model.config)
    for path, sublayer in model.named_modules():
        for attribute, matrices in matrices_of(sublayer).items():
            (entry,) = expand(rows, [f"{path}.{attribute}.weight"])
            theirs = tuple(name.removesuffix(".weight") for name in entry.theirs)
            role = path.rpartition(".")[2]
            modules.append(_Module(f"{path}.{attribute}", role, matrices, theirs, entry))
    return modules


def _parts_of(module: _Module, name: str) -> list[str]:
    """Return the matrices of ours that one module of theirs is."""
    parts = list(module.rows)
    return parts if module.fused else [parts[module.theirs.index(name)]]


def _trained_rest(model: Model, architecture: Architecture) -> dict[str, Tensor]:
    """Return what is trained besides adapters, by the names of the architecture."""
    names = [
        name
        for name, part in model.named_parameters()
        if part.requires_grad and ".updates." not in name and ".magnitudes." not in name
    ]
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for entry in expand(architecture.rows(model.config), names):
        parts = entry.transform.split(state[entry.ours], model.config)
        tensors.update(zip(entry.theirs, parts, strict=True))
    return tensors


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────


def _split(module: _Module, layer: AdaptedLinear, c: ModelConfig) -> dict[str, dict[str, Tensor]]:
    """Return the adapters of one layer by the names of their modules."""
    if not module.fused:
        by_module: dict[str, dict[str, Tensor]] = {}
        for name, part in zip(module.theirs, module.rows, strict=True):
            if part in layer.rows:
                update = layer.update(part)
                by_module[name] = {"lora_A.weight": update.A.data, "lora_B.weight": update.B.data}
                if layer.magnitudes is not None:
                    by_module[name]["lora_magnitude_vector"] = layer.magnitudes[part]
        return by_module
    total = sum(stop - start for start, stop in module.rows.values())
    first = [layer.update(part).A.detach() for part in layer.rows]
    b = torch.zeros(total, sum(len(part) for part in first)).to(first[0])
    size = layer.base.weight.detach().norm(dim=1)
    place = 0
    for part, (start, stop) in layer.rows.items():
        rank = len(layer.update(part).A)
        b[start:stop, place : place + rank] = layer.update(part).B.detach()
        place += rank
        if layer.magnitudes is not None:
            size[start:stop] = layer.magnitudes[part].detach()
    parts = {"lora_A.weight": torch.cat(first), "lora_B.weight": _turn(module, b, c, split=True)}
    if layer.magnitudes is not None:
        parts["lora_magnitude_vector"] = _turn(module, size, c, split=True)
    return {module.theirs[0]: parts}


def _turn(module: _Module, x: Tensor, c: ModelConfig, *, split: bool) -> Tensor:
    """Return rows in their order (split), or in ours; columns are not those of the table."""
    transform = module.entry.transform
    if transform is not HEADWISE_QKV:
        return x
    return transform.split(x, c)[0] if split else transform.join([x], c)


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


def _check_settings(content: Mapping[str, Any], directory: Path) -> None:
    where = str(directory / ADAPTER_CONFIG)
    if content.get("peft_type") != "LORA":
        raise SavedError(f"{where!r} must have peft_type=LORA: got {content.get('peft_type')!r}.")
    for key in ("r", "lora_alpha"):
        value = content.get(key)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise SavedError(f"{where!r} must have a positive {key}: got {value!r}.")
    if content.get("bias", "none") != "none":
        raise SavedError(f"{where!r} has bias={content['bias']!r}: only none can be read.")


def _finite_number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SavedError(f"alpha_pattern must have a number for {key!r}: got {value!r:.80}.")
    return float(value)


def _adapter_scale(content: Mapping[str, Any], name: str, rank: int) -> float:
    """Return the factor on the update of one module, by the patterns of PEFT: ends of names."""

    def find(table: object, default: float) -> float:
        table = table if isinstance(table, dict) else {}
        for key, value in table.items():
            if name == key or name.endswith(f".{key}"):
                return _finite_number(value, key)
        return float(default)

    alpha = find(content.get("alpha_pattern"), content["lora_alpha"])
    return alpha / (math.sqrt(rank) if content.get("use_rslora") else rank)


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    pickled = directory / PICKLED_ADAPTER
    if pickled.exists() and not (directory / ADAPTER_WEIGHTS).exists():
        raise SavedError(
            f"{str(directory)!r} has adapters only as {PICKLED_ADAPTER}, which can hold code and "
            "is never read. Convert it where you trust it: python -c 'import torch as t; from "
            f'safetensors.torch import save_file; save_file(t.load("{pickled}", '
            f'weights_only=True), "{directory / ADAPTER_WEIGHTS}")\''
        )
    path = inside(directory, ADAPTER_WEIGHTS)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).float() for name in list(file.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise SavedError(f"{str(path)!r} is damaged or not a safetensors file: {error}.") from None


def _group(
    tensors: Mapping[str, Tensor], modules: Mapping[str, _Module], directory: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Return the tensors of each adapter by module, and the other tensors."""
    groups: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = full.removeprefix(PREFIX)
        module, separator, key = name.partition(".lora_")
        if not separator:
            rest[name] = tensor
        elif module not in modules or f"lora_{key}" not in _KEYS:
            raise SavedError(f"{full!r} in {str(directory)!r} has no place in this model.")
        else:
            groups.setdefault(module, {})[f"lora_{key}"] = tensor
    for name, parts in groups.items():
        if not {"lora_A.weight", "lora_B.weight"} <= parts.keys():
            raise SavedError(f"{name!r} in {str(directory)!r} must have lora_A and lora_B.")
        a, b = parts["lora_A.weight"].shape, parts["lora_B.weight"].shape
        # A rank beyond both sides adds nothing, and every adapter gets the memory of the largest.
        if len(a) != 2 or len(b) != 2 or not 1 <= a[0] == b[1] <= max(a[1], b[0]):
            raise SavedError(
                f"{name!r} in {str(directory)!r} must have lora_A of shape (rank, inputs) and "
                f"lora_B of shape (outputs, rank), of a rank that is smaller: got {tuple(a)} and "
                f"{tuple(b)}."
            )
    if not groups:
        raise SavedError(f"there are no adapters in {str(directory / ADAPTER_WEIGHTS)!r}.")
    return groups, rest


_KEYS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


def _set(
    module: _Module,
    name: str,
    layer: AdaptedLinear,
    parts: Mapping[str, Tensor],
    ratio: float,
    c: ModelConfig,
) -> None:
    """Set the adapters of one layer from those of one module of theirs."""
    a, b = parts["lora_A.weight"], _turn(module, parts["lora_B.weight"] * ratio, c, split=False)
    size = parts.get("lora_magnitude_vector")
    size = None if size is None else _turn(module, size, c, split=False)
    place = 0
    for part in _parts_of(module, name):
        start, stop = module.rows[part]
        rows = slice(place, place + stop - start)
        update = layer.update(part)
        own = len(a)
        if b.shape != (b.shape[0], own) or b[rows].shape[0] != stop - start:
            raise RuntimeError(f"shapes {tuple(a.shape)} and {tuple(b.shape)}")
        update.A.zero_()
        update.B.zero_()
        update.A[:own] = a
        update.B[:, :own] = b[rows]
        if layer.magnitudes is not None and size is not None:
            layer.magnitudes[part].copy_(size[rows])
        place = rows.stop


def _set_rest(
    model: Model, architecture: Architecture, rest: Mapping[str, Tensor], directory: Path
) -> None:
    """Set tensors of modules that were trained as a whole: heads."""
    names = [name for name in model.state_dict() if ".base." not in name and "updates" not in name]
    names = [name for name in names if "magnitudes" not in name]
    left = dict(rest)
    state = model.state_dict()
    for entry in expand(architecture.rows(model.config), names):
        if all(name in left for name in entry.theirs):
            joined = entry.transform.join([left.pop(name) for name in entry.theirs], model.config)
            if joined.shape != state[entry.ours].shape:
                raise SavedError(f"{entry.theirs[0]!r} in {str(directory)!r} has another shape.")
            state[entry.ours].copy_(joined)
    if left:
        raise SavedError(f"{sorted(left)[0]!r} in {str(directory)!r} has no place in this model.")
