"""Norms as linear maps: each with the scale that it had in one forward pass.

    layer   N(x) = γ ⊙ (x − mean x) / σ + β     with σ measured: linear in x, and an offset β
    rms     N(x) = γ ⊙ x / r                    scale   N(x) = g x / ‖x‖
    batch   N(x) = γ ⊙ x / σ + (β − γ ⊙ μ / σ), μ and σ the running statistics
    instance as layer, with mean and σ over the sequence

With the scales frozen, every Add & Norm box is an affine map of its stream and its branch. So its
own `forward` carries the pieces of a sum: the pieces are folded into the batch, the frozen norms
treat each alone, and an offset goes to a piece of its own. No arrangement needs a second formula.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.layers.addnorm import Fixup, HyperConnections
from addnorm.layers.norms import BatchNorm, InstanceNorm, OffsetRMSNorm, RMSNorm, ScaleNorm


@dataclass(frozen=True)
class Measured:
    """The affine map that a norm was in one forward pass: x → gain ⊙ (x − mean x) / scale + offset.

    Parameters
    ----------
    gain
        γ, of shape (width,) or ().
    scale
        σ, broadcast against (batch, length, width).
    centre
        Dimension over which the mean is subtracted; None for no centring.
    offset
        β, or None.
    output
        What the norm returned; only stored where `measure` was asked to.
    """

    gain: Tensor
    scale: Tensor
    centre: int | None
    offset: Tensor | None
    output: Tensor | None = None

    def take(self, positions: Tensor) -> "Measured":
        """Return the map at some positions only."""
        scale, output = self.scale, self.output
        if scale.ndim >= 3 and scale.shape[-2] > 1:
            scale = scale.index_select(-2, positions)
        if output is not None:
            output = output.index_select(-2, positions)
        return Measured(self.gain, scale, self.centre, self.offset, output)


def _layer(norm: nn.Module, x: Tensor) -> Measured:
    assert isinstance(norm, nn.LayerNorm)
    scale = (x.var(dim=-1, keepdim=True, correction=0) + norm.eps).sqrt()
    gain = norm.weight if norm.weight is not None else x.new_ones(())
    return Measured(gain, scale, -1, norm.bias)


def _rms_scale(norm: nn.Module, x: Tensor) -> Measured:
    assert isinstance(norm, RMSNorm)
    scale = (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
    gain = 1.0 + norm.weight if isinstance(norm, OffsetRMSNorm) else norm.weight
    return Measured(gain, scale, None, None)


def _scale(norm: nn.Module, x: Tensor) -> Measured:
    assert isinstance(norm, ScaleNorm)
    return Measured(norm.gain, x.norm(dim=-1, keepdim=True).clamp(min=norm.eps), None, None)


def _batch(norm: nn.Module, x: Tensor) -> Measured:
    assert isinstance(norm, BatchNorm)
    assert norm.running_mean is not None and norm.running_var is not None
    scale = (norm.running_var + norm.eps).sqrt()
    offset = norm.bias - norm.weight * norm.running_mean / scale
    return Measured(norm.weight, scale, None, offset)


def _instance(norm: nn.Module, x: Tensor) -> Measured:
    assert isinstance(norm, InstanceNorm)
    scale = (x.var(dim=-2, keepdim=True, correction=0) + norm.eps).sqrt()
    return Measured(norm.weight, scale, -2, norm.bias)


MEASURES: dict[type[nn.Module], Callable[[nn.Module, Tensor], Measured]] = {
    nn.LayerNorm: _layer,
    RMSNorm: _rms_scale,
    ScaleNorm: _scale,
    BatchNorm: _batch,
    InstanceNorm: _instance,
}


def measure(norm: nn.Module, x: Tensor) -> Measured:
    """Return the affine map that a norm is for one input, (batch, length, width)."""
    for kind, function in MEASURES.items():
        if isinstance(norm, kind):
            return function(norm, x)
    raise InputError(f"the lens cannot freeze a norm of type {type(norm).__name__}.")


class FrozenNorm(nn.Module):
    """A measured norm that is applied to every piece: (pieces · batch, length, width).

    The offset is added to piece number `slot` alone.
    """

    def __init__(self, measured: Measured, batch: int, slot: int) -> None:
        super().__init__()
        self.measured, self.batch, self.slot = measured, batch, slot

    def forward(self, x: Tensor) -> Tensor:
        m = self.measured
        x = torch.unflatten(x, -3, (-1, self.batch))
        if m.centre is not None:
            x = x - x.mean(dim=m.centre, keepdim=True)
        x = x / m.scale * m.gain
        if m.offset is not None:
            x.select(-4, self.slot).add_(m.offset)
        return x.flatten(-4, -3)


class Constant(nn.Module):
    """Returns what a norm returned in the forward pass, once for each piece.

    For a norm whose output decides mixing weights and does not itself flow on.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        times = [1] * self.output.ndim
        times[-3] = x.shape[-3] // self.output.shape[-3]
        return self.output.repeat(times)


class ReadOnly(nn.Module):
    """Stands for a norm that only its branch reads, whose output is known: it computes nothing.

    What it returns is no tensor, so a box that did use it otherwise would fail.
    """

    def forward(self, x: Tensor) -> object:
        return None


MIXING_NORMS = {HyperConnections: ("stream_norm",)}
"""Norms from which a box computes weights of its streams: they are frozen whole."""


def mixing_norms(box: nn.Module) -> set[nn.Module]:
    """Return the norms of a box that decide its mixing weights."""
    names = next((v for kind, v in MIXING_NORMS.items() if isinstance(box, kind)), ())
    return {getattr(box, name) for name in names}


OFFSET_BOXES = {Fixup: "bias_after"}
"""Boxes that add an offset of their own to the stream, with the name of its parameter."""


def box_offset(box: nn.Module) -> str | None:
    """Return the name of the offset that a box adds, or None."""
    return next((name for kind, name in OFFSET_BOXES.items() if isinstance(box, kind)), None)


def replace_modules(module: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return a copy of a module in which some submodules are replaced; the module is unchanged.

    Parameters are shared, and so is every submodule that contains nothing to replace.
    """
    if module in others:
        return others[module]
    children = {
        name: None if child is None else replace_modules(child, others)
        for name, child in module._modules.items()
    }
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    twin = copy.copy(module)
    twin.__dict__["_modules"] = children
    return twin


class WithBranch(nn.Module):
    """A box whose branch is already known: pieces that stand for the output of its sublayer.

    Before the box, every tensor of the stream grows by the branch's pieces and by those of the
    offsets that its norms add; so early boxes carry few pieces.

    Parameters
    ----------
    box
        The Add & Norm box, with frozen norms.
    branch
        The branch's own pieces, (own, batch, length, width).
    offsets
        Number of pieces that follow them.
    has_offset
        Whether the box adds an offset of its own: it is the last of these pieces.
    """

    def __init__(self, box: nn.Module, branch: Tensor, offsets: int, has_offset: bool) -> None:
        super().__init__()
        self.box, self.branch, self.offsets = box, branch, offsets
        self.has_offset = has_offset

    def forward(self, stream: object, f: object) -> object:
        own, batch, _, _ = self.branch.shape
        grown = grow(stream, (own + self.offsets) * batch)

        def branch(x: object) -> Tensor:
            first = first_tensor(stream).shape[-3]
            last = self.offsets * batch
            return nn.functional.pad(self.branch.flatten(0, 1), (0, 0, 0, 0, first, last))

        joined = self.box(grown, branch)
        if not self.has_offset:
            return joined
        # The box added its offset to every piece; the last piece, 0 before, is the offset alone.
        others, offset = joined[:-batch], joined[-batch:]
        return torch.cat((others - offset.repeat(len(others) // batch, 1, 1), offset))


def grow(stream: Any, rows: int) -> Any:
    """Return a stream whose tensors have more pieces, of zeros, after the others."""
    if isinstance(stream, tuple):
        return tuple(grow(part, rows) for part in stream)
    if isinstance(stream, Tensor) and stream.ndim > 2:
        return nn.functional.pad(stream, (0, 0, 0, 0, 0, rows))
    return stream


def first_tensor(stream: Any) -> Tensor:
    """Return the tensor of a stream that the next sublayer reads first."""
    return stream[0] if isinstance(stream, tuple) else stream


def split_output(
    projection: nn.Linear, inner: nn.Module, measured: Measured | None, x: Tensor, groups: int
) -> Tensor:
    """Return W inner(x) + b as the sum of its groups of inputs, and of its offsets as the last.

    Parameters
    ----------
    projection
        W and b.
    inner
        What is applied to x first: the identity, gains, or a norm.
    measured
        The norm as it was, if `inner` is one.
    x
        Input of `inner`, (batch, length, groups · size): the mixed values of heads.
    groups
        Number of groups; the result is (groups + 1, batch, length, width).
    """
    if measured is None:
        gain = inner(torch.ones_like(x[:1, :1]))  # the identity, or a gain for each head
        parts = (x * gain).unflatten(-1, (groups, -1))
        weight = torch.unflatten(projection.weight, 1, (groups, -1))
        pieces = torch.einsum("blgs,wgs->gblw", parts, weight)
        offset = pieces.new_zeros(pieces.shape[-1])
    else:
        mask = torch.eye(groups, dtype=x.dtype, device=x.device)
        mask = mask.repeat_interleave(x.shape[-1] // groups, dim=1)[:, None, None]
        parts = x * mask  # (groups, batch, length, groups · size)
        if measured.centre is not None:
            parts = parts - parts.mean(dim=measured.centre, keepdim=True)
        pieces = (parts / measured.scale * measured.gain) @ projection.weight.T
        offset = pieces.new_zeros(pieces.shape[-1])
        if measured.offset is not None:
            offset = projection.weight @ measured.offset
    if projection.bias is not None:
        offset = offset + projection.bias
    return torch.cat((pieces, offset.expand(1, *pieces.shape[1:])))
