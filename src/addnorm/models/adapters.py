"""Low-rank adapters over any linear layer, chosen by role: LoRA and DoRA.

    LoRA   y = (W + s B A) x + b       s = alpha / rank, A (rank, in), B (out, rank), B = 0 at first
    DoRA   y = m ⊙ (V / ‖V‖) x + b     V = W + s B A, ‖·‖ of each row, m = ‖W‖ at first

Hu et al. 2021 (2106.09685), eq. 3; Liu et al. 2024 (2402.09353), eq. 5, with ‖V‖ constant in the
backward pass (§4.3). W is not trained. A matrix that holds several (queries, keys and values) has
an adapter for each of those chosen, so adapters are interchangeable with libraries that hold them
apart.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.errors import ConfigError, SavedError, nearest
from addnorm.files import ADAPTER
from addnorm.layers.attention import MemoryAttention, SelfAttention
from addnorm.layers.feedforward import FeedForward, GatedFeedForward
from addnorm.layers.stack import Block
from addnorm.models.build import Model
from addnorm.models.saved import read_tensors, write_tensors

ROLES = {
    "attention": ("query", "key", "value", "output"),
    "memory": ("query", "key", "value", "output"),
    "ffn": ("gate", "input", "output"),
}
"""Sublayers by role, and their matrices."""
RowRanges = dict[str, tuple[int, int]]
"""Matrices that one linear layer holds: the first row of each, and the one after its last."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Which matrices get an adapter, and of what kind.

    Parameters
    ----------
    roles : such as "attention,ffn", or "attention.query,attention.value".
    rank : rank of the update.
    alpha : the update is multiplied by alpha / rank; 2 · rank if None.
    dora : DoRA in place of LoRA.
    dropout : dropout on the input of the update.
    """

    roles: str = "attention"
    rank: int = 8
    alpha: float | None = None
    dora: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"the rank of an adapter must be 1 or more: got {self.rank}. Try 8.")
        if self.dora and self.dropout:
            raise ConfigError("DoRA has no dropout on its update. Try dropout=0.")
        self.chosen  # noqa: B018 (checks the names)

    @property
    def scale(self) -> float:
        """Factor on the update."""
        return (2.0 * self.rank if self.alpha is None else self.alpha) / self.rank

    @property
    def chosen(self) -> dict[str, tuple[str, ...]]:
        """The matrices that get an adapter, by role.

        >>> Adapter(roles="ffn,attention.query").chosen
        {'ffn': ('gate', 'input', 'output'), 'attention': ('query',)}
        """
        matrices: dict[str, tuple[str, ...]] = {}
        known = [*ROLES, *(f"{role}.{part}" for role, parts in ROLES.items() for part in parts)]
        for name in self.roles.split(","):
            if name not in known:
                raise ConfigError(f"an adapter has no role {name!r}. {nearest(name, known)}")
            role, _, part = name.partition(".")
            matrices[role] = matrices.get(role, ()) + ((part,) if part else ROLES[role])
        return matrices


class LowRank(nn.Module):
    """B A, of a given rank; 0 at first. A is filled as a new linear layer is."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, inputs))
        self.B = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def product(self) -> Tensor:
        """Return B A, (out, in)."""
        return self.B @ self.A

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.A), self.B)


class AdaptedLinear(nn.Module):
    """A frozen linear layer, and trained low-rank updates of some of the matrices in it.

    Parameters
    ----------
    base : the layer.
    rows : the matrices that get an update, by name, as rows of the weight.
    adapter : rank, scale and kind.
    """

    def __init__(self, base: nn.Linear, rows: RowRanges, adapter: Adapter) -> None:
        super().__init__()
        self.base, self.rows, self.scale = base, rows, adapter.scale
        self.in_features, self.out_features = base.in_features, base.out_features
        base.requires_grad_(False)
        like = base.weight
        self.updates = nn.ModuleDict(
            {
                name: LowRank(base.in_features, stop - start, adapter.rank).to(like)
                for name, (start, stop) in rows.items()
            }
        )
        self.dropout = nn.Dropout(adapter.dropout) if adapter.dropout else nn.Identity()
        norms = {
            name: nn.Parameter(like[start:stop].detach().norm(dim=1))
            for name, (start, stop) in rows.items()
        }
        self.magnitudes = nn.ParameterDict(norms) if adapter.dora else None

    @property
    def weight(self) -> Tensor:
        """The weight with its updates, (out, in)."""
        return adapted_weight(self.base.weight, self.rows, self.scale, self._parts())

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def update(self, name: str) -> LowRank:
        """Return the update of one matrix."""
        update = self.updates[name]
        assert isinstance(update, LowRank)
        return update

    def _parts(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def forward(self, x: Tensor) -> Tensor:
        if self.magnitudes is not None:
            return F.linear(x, self.weight, self.base.bias)
        y = self.base(x)
        inner = self.dropout(x)
        parts, place = [], 0
        for name, (start, stop) in self.rows.items():
            parts += [y[..., place:start]] if start > place else []
            parts.append(y[..., start:stop] + self.scale * self.updates[name](inner))
            place = stop
        parts += [y[..., place:]] if place < y.shape[-1] else []
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, of {', '.join(self.rows)}"


def adapted_weight(
    base: Tensor, rows: RowRanges, scale: float, parts: Mapping[str, Tensor], prefix: str = ""
) -> Tensor:
    """Return a weight with its updates, from tensors by name: `updates.query.A`, ...

    Parameters
    ----------
    base : W, (out, in).
    rows, scale : as of AdaptedLinear.
    parts : tensors by name.
    prefix : what precedes the names.
    """
    pieces, place = [], 0
    for name, (start, stop) in rows.items():
        update = parts[f"{prefix}updates.{name}.B"] @ parts[f"{prefix}updates.{name}.A"]
        part = base[start:stop] + scale * update
        magnitude = parts.get(f"{prefix}magnitudes.{name}")
        if magnitude is not None:
            part = part * (magnitude / part.detach().norm(dim=1))[:, None]
        pieces += [base[place:start], part]
        place = stop
    return torch.cat([*pieces, base[place:]])


def adapt_(model: Model, adapter: Adapter) -> list[str]:
    """Freeze a model and put adapters over the chosen matrices; return the names of the layers.

    Heads for classes and numbers are trained as a whole, as they are new in most cases.

    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=1, heads=2))
    >>> adapt_(model, Adapter(roles="attention.query,attention.value", rank=2))
    ['decoder.stack.blocks.0.sublayers.attention.input']
    >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
    128
    """
    model.requires_grad_(False)
    if model.config.head in ("class", "number") and model.head is not None:
        model.head.requires_grad_(True)
    chosen, names = adapter.chosen, []
    for path, block in model.named_modules():
        if not isinstance(block, Block):
            continue
        for role, sublayer in block.sublayers.items():
            for attribute, rows in matrices_of(sublayer).items():
                wanted = {
                    part: place for part, place in rows.items() if part in chosen.get(role, ())
                }
                if wanted:
                    base = getattr(sublayer, attribute)
                    setattr(sublayer, attribute, AdaptedLinear(base, wanted, adapter))
                    names.append(f"{path}.sublayers.{role}.{attribute}")
    if not names:
        raise ConfigError(
            f"there is no layer for an adapter of {adapter.roles!r} in a model of "
            f"mode={model.config.mode}. Try attention."
        )
    return names


def freeze_(model: Model, blocks: int) -> None:
    """Freeze the embeddings and the first blocks of each side; the rest is trained.

    A tied output matrix is an embedding. With as many blocks as there are, only the head and final
    norms are trained.
    """
    for name, part in model.named_parameters():
        layer = block_number(name)
        in_head = name.startswith("head.") or ".stack.ends." in name or ".stack.norm." in name
        frozen = layer < blocks if layer is not None else not in_head
        part.requires_grad_(not frozen)
    if not any(part.requires_grad for part in model.parameters()):
        raise ConfigError(
            f"train.freeze={blocks} leaves nothing to train: the model has {model.config.depth} "
            "blocks, and its output is its embedding."
        )


def block_number(name: str) -> int | None:
    """Return the block that a parameter belongs to, from 0; None for embeddings and heads.

    >>> block_number("encoder.stack.blocks.3.sublayers.ffn.input.weight")
    3
    """
    number = name.partition(".blocks.")[2].partition(".")[0]
    return int(number) if number else None


def matrices_of(sublayer: nn.Module) -> dict[str, RowRanges]:
    """Return the linear layers of a sublayer and the matrices that each holds, by rows."""
    if isinstance(sublayer, SelfAttention):
        whole = {"input": _rows(("query", "key", "value"), sublayer.sizes)}
        return whole | {"output": _rows(("output",), [sublayer.output.out_features])}
    if isinstance(sublayer, MemoryAttention):
        return {
            "input": _rows(("query",), sublayer.sizes[:1]),
            "memory": _rows(("key", "value"), sublayer.sizes[1:]),
            "output": _rows(("output",), [sublayer.output.out_features]),
        }
    if isinstance(sublayer, FeedForward):
        inner, width = sublayer.output.in_features, sublayer.output.out_features
        names = ("gate", "input") if isinstance(sublayer, GatedFeedForward) else ("input",)
        first = _rows(names, [inner] * len(names))
        return {"input": first, "output": _rows(("output",), [width])}
    return {}


def _rows(names: tuple[str, ...], sizes: list[int]) -> RowRanges:
    rows, place = {}, 0
    for name, size in zip(names, sizes, strict=True):
        rows[name] = (place, place + size)
        place += size
    return rows


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers of a model that have adapters, by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)
    }


def merged_state(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state of the model without adapters that computes the same.

    Parameters
    ----------
    model : a model with adapters.
    state : its state, if it is not the present one: an average, or gathered from processes.
    """
    given = dict(model.state_dict() if state is None else state)
    layers = adapted_layers(model)
    merged: dict[str, Tensor] = {}
    for name, tensor in given.items():
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if owner is None:
            merged[name] = tensor
        elif name == f"{owner}.base.weight":
            layer = layers[owner]
            whole = adapted_weight(tensor, layer.rows, layer.scale, given, f"{owner}.")
            merged[f"{owner}.weight"] = whole
        elif name == f"{owner}.base.bias":
            merged[f"{owner}.bias"] = tensor
    return merged


@torch.no_grad()
def merge_(model: Model) -> Model:
    """Put the updates into the weights, in place: a plain model that computes the same."""
    for name, layer in adapted_layers(model).items():
        parent, _, attribute = name.rpartition(".")
        weight = layer.weight.detach().clone()
        layer.base.weight.copy_(weight)
        setattr(model.get_submodule(parent), attribute, layer.base)
    model.requires_grad_(True)
    return model


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what is trained of a model with adapters, by name: small, and enough to restore it."""
    trained = {name for name, part in model.named_parameters() if part.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name in trained}


def save_adapter(
    model: nn.Module, adapter: Adapter, path: Path, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write what is trained of a model with adapters: a small file.

    Parameters
    ----------
    model : a model with adapters.
    adapter : what `adapt_` was given.
    path : the file.
    state : the model's state, if it is not the present one.
    """
    own = adapter_state(model)
    tensors = own if state is None else {name: state[name] for name in own}
    write_tensors(path, tensors, *ADAPTER, {"adapter": asdict(adapter)})


def read_adapter(path: str | Path) -> tuple[Adapter, dict[str, Tensor]]:
    """Return the settings and tensors of a file that `save_adapter` wrote."""
    tensors, content = read_tensors(Path(path), *ADAPTER)
    try:
        return Adapter(**content["adapter"]), tensors
    except (KeyError, TypeError, ConfigError) as error:
        raise SavedError(f"{str(path)!r} is damaged: {error}.") from None


def load_adapter_(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Set what `adapter_state` returned; ConfigError if names or shapes differ."""
    own: dict[str, Any] = adapter_state(model)
    for name in sorted(own.keys() | tensors.keys()):
        one, other = own.get(name), tensors.get(name)
        if one is None or other is None or one.shape != other.shape:
            shapes = [None if part is None else tuple(part.shape) for part in (one, other)]
            raise ConfigError(
                f"the adapter does not belong to this model: {name} must have shape {shapes[0]}, "
                f"got {shapes[1]}."
            )
    model.load_state_dict(dict(tensors), strict=False)
