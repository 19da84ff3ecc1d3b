"""Weights of torch.nn and of small research code under our names.

Those of Hugging Face have their table in addnorm.interop.

A row is `our module: their module`, or several of theirs, which are concatenated in ours. A star is
the number of a block. Rows apply to the weight and the bias of a module; they only rename,
transpose and concatenate, so they apply to gradients as well.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Table = Mapping[str, str | tuple[str, ...]]


def rename(theirs: Weights, table: Table, unused: str = "-") -> dict[str, Tensor]:
    """Return their tensors by our names; others must be tied copies or have the suffix `unused`."""
    homes = {
        part: (ours, slot) for ours, parts in table.items() for slot, part in enumerate(_all(parts))
    }
    parts_by_name: dict[str, dict[int, Tensor]] = {}
    left: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        number = re.search(r"\.(\d+)\.", name)
        starred = re.sub(r"\.\d+\.", ".*.", name, count=1)
        module, _, kind = starred.rpartition(".")
        if module in homes:
            ours, slot = homes[module]
            ours = ours.replace("*", number.group(1)) if number else ours
            parts_by_name.setdefault(f"{ours}.{kind}", {})[slot] = tensor
        elif not name.endswith(unused):
            left[name] = tensor
    renamed = {tensor.data_ptr() for parts in parts_by_name.values() for tensor in parts.values()}
    unmapped = sorted(name for name, tensor in left.items() if tensor.data_ptr() not in renamed)
    assert not unmapped, f"no row maps {unmapped}"
    return {
        name: _join([parts[slot] for slot in sorted(parts)])
        for name, parts in parts_by_name.items()
    }


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _all(parts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (parts,) if isinstance(parts, str) else parts


def blocks(ours: str, theirs: str, rows: Table) -> dict[str, str | tuple[str, ...]]:
    """Return the rows of the blocks of one stack, with the prefixes of both libraries added."""
    return {
        f"{ours}.stack.blocks.*.{row}": tuple(f"{theirs}.*.{part}" for part in _all(parts))
        for row, parts in rows.items()
    }


# ── torch.nn.Transformer ──────────────────────────────────────────────────────────────────────────

_TORCH_ENCODER = {
    "sublayers.attention.input": "self_attn.in_proj",
    "sublayers.attention.output": "self_attn.out_proj",
    "sublayers.ffn.input": "linear1",
    "sublayers.ffn.output": "linear2",
    "addnorms.attention.norm": "norm1",
    "addnorms.ffn.norm": "norm2",
}
_TORCH_DECODER = _TORCH_ENCODER | {
    "sublayers.memory.input": "multihead_attn.query",
    "sublayers.memory.memory": "multihead_attn.key_value",
    "sublayers.memory.output": "multihead_attn.out_proj",
    "addnorms.memory.norm": "norm2",
    "addnorms.ffn.norm": "norm3",
}


def torch_transformer(theirs: Weights, final: str) -> dict[str, Tensor]:
    """`final` is the name of our last norm: `norm` after post-norm blocks, else `ends.norm`."""
    parts = {}
    for name, tensor in theirs.items():
        name = name.replace("in_proj_", "in_proj.")
        if "multihead_attn.in_proj" in name:
            width = len(tensor) // 3
            parts[name.replace("in_proj", "query")] = tensor[:width]
            parts[name.replace("in_proj", "key_value")] = tensor[width:]
        else:
            parts[name] = tensor
    table = {
        **blocks("encoder", "encoder.layers", _TORCH_ENCODER),
        **blocks("decoder", "decoder.layers", _TORCH_DECODER),
        f"encoder.stack.{final}": "encoder.norm",
        f"decoder.stack.{final}": "decoder.norm",
    }
    return rename(parts, table)
