"""Where things are in a model: its sides, sublayers, boxes and norms, by name.

A place is named `side.layer.role`: `encoder.0.attention`, `decoder.2.memory`; of a model with one
unnamed side (a table's) `0.attention`. A head is a place and a number: `decoder.2.memory.5`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from addnorm.errors import InputError, nearest
from addnorm.layers.addnorm import AddNorm
from addnorm.layers.attention import Attention
from addnorm.layers.stack import AnySublayer, Block
from addnorm.models.transformer import Side

ModelInputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""What a model is called with: one tensor, several in order, or by name."""


@dataclass(frozen=True, eq=False)
class NamedSublayer:
    """One sublayer and its Add & Norm box, with the name of their place."""

    name: str
    side: str
    layer: int
    role: str
    sublayer: AnySublayer
    box: AddNorm
    block: Block

    @property
    def heads(self) -> int:
        """Number of heads; 0 for a feed-forward network and for a convolution."""
        return self.sublayer.heads if isinstance(self.sublayer, Attention) else 0

    @property
    def head_width(self) -> int:
        """Width of a head; 0 for a feed-forward network."""
        return self.sublayer.head_width if isinstance(self.sublayer, Attention) else 0


def find_sides(model: nn.Module) -> dict[str, Side]:
    """Return the sides of a model by name: encoder, decoder; the side of a table model is ''."""
    sides = {
        "" if name == "side" else name: child
        for name, child in model.named_children()
        if isinstance(child, Side)
    }
    if is_recurrent(model):
        raise InputError(
            "a model of mixing=recurrent has no stack of blocks to take apart. Its attention and "
            "the contributions of its inputs are in `addnorm explain` and integrated_gradients."
        )
    if not sides:
        raise InputError(
            f"the lens needs a model of addnorm: got {type(model).__name__}, which has no stack of "
            "blocks. Try addnorm.build(...), addnorm.load(...) or addnorm.open(...).model."
        )
    return sides


def is_recurrent(model: nn.Module) -> bool:
    """Whether a model is the recurrent baseline, which has no stack of blocks."""
    return getattr(getattr(model, "config", None), "mixing", "attention") == "recurrent"


def find_entries(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose first argument is the embedded input, by side."""
    if is_recurrent(model):
        return {name: model.get_submodule(name) for name in ("encoder", "decoder")}
    return dict(find_sides(model))


def find_sublayers(model: nn.Module) -> list[NamedSublayer]:
    """Return every sublayer with its box, in the order of the forward pass.

    >>> from addnorm import ModelConfig, build
    >>> model = build(ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=1))
    >>> [step.name for step in find_sublayers(model)]
    ['decoder.0.attention', 'decoder.0.ffn']
    """
    return [step for side, module in find_sides(model).items() for step in _steps(side, module)]


def _steps(side: str, module: Side) -> Iterator[NamedSublayer]:
    prefix = f"{side}." if side else ""
    for layer, block in enumerate(module.stack.blocks):
        assert isinstance(block, Block)
        for role, sublayer in block.sublayers.items():
            box = block.addnorms[role]
            assert isinstance(sublayer, AnySublayer) and isinstance(box, AddNorm)
            yield NamedSublayer(f"{prefix}{layer}.{role}", side, layer, role, sublayer, box, block)


def find_step(model: nn.Module, name: str) -> NamedSublayer:
    """Return the step of a name, or raise InputError with the nearest name."""
    steps = {step.name: step for step in find_sublayers(model)}
    if name not in steps:
        raise InputError(f"this model has no place {name!r}. {nearest(name, steps)}")
    return steps[name]


def split_head(name: str) -> tuple[str, int | None]:
    """Return the place and the head of a name; the head is None for a whole sublayer.

    >>> split_head("decoder.2.memory.5"), split_head("0.attention")
    (('decoder.2.memory', 5), ('0.attention', None))
    """
    place, _, last = name.rpartition(".")
    return (place, int(last)) if place and last.isdigit() else (name, None)


def select(steps: Sequence[NamedSublayer], pattern: str) -> dict[str, tuple[int, ...] | None]:
    """Return the places that a pattern names, with the heads asked for (None: all).

    A pattern is a name in which * stands for anything: `decoder.*.memory`, `*.attention.3`.
    """
    place, head = split_head(pattern)
    chosen = {step.name: step for step in steps if fnmatchcase(step.name, place)}
    if not chosen:
        names = [step.name for step in steps]
        raise InputError(f"no place of this model is named {pattern!r}. {nearest(place, names)}")
    for step in chosen.values():
        if head is not None and not head < step.heads:
            raise InputError(
                f"{step.name} has {step.heads} heads, numbered from 0: got head {head}."
            )
    return {name: None if head is None else (head,) for name in chosen}


def call(model: nn.Module, inputs: ModelInputs) -> Tensor:
    """Return the output of a model for inputs in any of their three forms."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def as_tensors(inputs: ModelInputs) -> list[Tensor]:
    """Return the tensors of the inputs in order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    return [value for value in values if isinstance(value, Tensor)]


def count_members(model: nn.Module) -> int:
    """Return the members of an ensemble for tables: each row passes the stack that many times."""
    return int(getattr(model.config, "members", 1))


def check_positions(positions: Sequence[int], length: int) -> Tensor:
    """Return positions counted from the start, or raise InputError if there is none such."""
    indices = [p + length if p < 0 else p for p in positions]
    if not indices or min(indices) < 0 or max(indices) >= length:
        raise InputError(
            f"positions must be one or more of 0 to {length - 1}: got {list(positions)}."
        )
    return torch.tensor(indices)


def require_eval(model: nn.Module, what: str) -> None:
    """Raise InputError unless the model is in evaluation mode: dropout would change every pass."""
    if model.training:
        raise InputError(f"{what} needs a model in evaluation mode. Call model.eval() first.")


def is_model_norm(module: nn.Module) -> bool:
    """Whether a module is a norm (not the identity)."""
    from addnorm.layers.norms import NORMS

    kinds = (*NORMS.values(), nn.LayerNorm)
    return isinstance(module, kinds) and not isinstance(module, nn.Identity)


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the norms that the stream passes, by name: `decoder.0.ffn.norm`, `decoder.close.norm`.

    Norms inside a sublayer (of queries and keys, before an output projection) are not among them.
    """
    norms: dict[str, nn.Module] = {}
    for side, module in find_sides(model).items():
        prefix = f"{side}." if side else ""
        parts: dict[str, nn.Module] = {f"{prefix}input.norm": module.norm}
        for step in _steps(side, module):
            parts |= {f"{step.name}.{name}": child for name, child in step.box.named_modules()}
        ends = module.stack.ends
        parts |= {f"{prefix}close.{name}": child for name, child in ends.named_modules()}
        parts[f"{prefix}output.norm"] = module.stack.norm
        norms |= {name: child for name, child in parts.items() if is_model_norm(child)}
    return norms


def no_grad_call(model: nn.Module, inputs: ModelInputs) -> Tensor:
    """Return the output without recording gradients."""
    with torch.no_grad():
        return call(model, inputs)


def call_with_maps(model: nn.Module, inputs: ModelInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output and the attention maps that the model itself reports, by place."""
    maps: dict[str, Tensor] = {}
    with torch.no_grad():
        if isinstance(inputs, Mapping):
            return model(**inputs, maps=maps), maps
        args = [inputs] if isinstance(inputs, Tensor) else inputs
        return model(*args, maps=maps), maps
