"""What becomes of a vector between the place that writes it and the one that reads it.

    g = what arrives of ones,   so a reader W sees W diag(g) of what was written

The boxes of the arrangement are called themselves, with norms that only multiply, N(x) = γ ⊙ x, and
other branches that write nothing: the direct path. Scales and centring of norms depend on the input
and are left out. Where paths of different scale meet (B2T, ResiDual, DLCL, hyper-connections), they
are added as if all scales were 1.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from addnorm.layers.addnorm import Ends, Stream
from addnorm.layers.norms import OffsetRMSNorm
from addnorm.lens.frozen import mixing_norms, replace_modules
from addnorm.lens.places import (
    NamedSublayer,
    find_sides,
    find_step,
    find_sublayers,
    is_model_norm,
)


class _Gain(nn.Module):
    """A norm without its scale: x → γ ⊙ x."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        parameters = dict(norm.named_parameters())
        gain = parameters.get("weight", parameters.get("gain"))
        self.gain = 1.0 + gain if gain is not None and isinstance(norm, OffsetRMSNorm) else gain

    def forward(self, x: Tensor) -> Tensor:
        return x if self.gain is None else x * self.gain


class _Read(Exception):
    """Ends a box's forward once its branch was given its input."""


class _Zero(nn.Module):
    """Returns zeros, so that weights computed from a norm keep their static part only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def with_gains(module: nn.Module, gains: Collection[nn.Module] | None = None) -> nn.Module:
    """Return a copy of a module in which norms only multiply: all, or some, and others do nothing.

    Weights that are computed from a norm keep their static part only.
    """
    others: dict[nn.Module, nn.Module] = {
        norm: _Gain(norm) if gains is None or norm in gains else nn.Identity()
        for norm in module.modules()
        if is_model_norm(norm)
    }
    for box in module.modules():
        others |= {norm: _Zero() for norm in mixing_norms(box)}
    return replace_modules(module, others)


@dataclass(frozen=True)
class _Path:
    """What arrives of a vector of ones: at every sublayer of a side, and at its output."""

    reads: dict[str, Tensor]
    output: Tensor


def _trace_path(
    model: nn.Module,
    side: str,
    writer: str | None = None,
    gains: Collection[nn.Module] | None = None,
) -> _Path:
    """Carry ones from a writer, or from the input of the side, past branches that write nothing.

    Every box's own forward is called, with norms that only multiply (all, or those of `gains`). It
    is linear in what was written; the difference to zeros has no offset, such as Fixup's bias.
    """
    steps = [step for step in find_sublayers(model) if step.side == side]
    stack = find_sides(model)[side].stack
    ends, norm = with_gains(stack.ends, gains), with_gains(stack.norm, gains)
    assert isinstance(ends, Ends)
    boxes = [with_gains(step.box, gains) for step in steps]
    dtype = next(model.parameters()).dtype
    found = []
    for value in (1.0, 0.0):
        start = torch.full((1, 1, steps[0].box.place.width), value, dtype=dtype)
        nothing = torch.zeros_like(start)
        reads: dict[str, Tensor] = {}
        with torch.no_grad():
            stream: Stream = ends.open(start if writer is None else nothing)
            for step, box in zip(steps, boxes, strict=True):
                write = start if step.name == writer else nothing
                stream = box(stream, partial(_read_and_write, reads, step.name, write))
            reads[""] = norm(ends.close(stream))[0, 0]
        found.append(reads)
    reads = {name: found[0][name] - found[1][name] for name in found[0]}
    return _Path(reads, reads.pop(""))


def _read_and_write(reads: dict[str, Tensor], name: str, write: Tensor, x: Tensor) -> Tensor:
    reads[name] = x[0, 0]
    return write


def path_gain(model: nn.Module, writer: str | None, reader: str | None) -> Tensor:
    """Return g, (width,): what arrives at a reader of ones that a writer wrote, on the direct path.

    Parameters
    ----------
    model
        A model of addnorm.
    writer
        A place; None is the input of the reader's stack.
    reader
        A place; None is the output of the writer's stack, which the head reads. It is 0 if the
        reader is on another side, which only encoder-decoder attention reads: see `memory_gain`.
    """
    one = None if writer is None else find_step(model, writer)
    other = None if reader is None else find_step(model, reader)
    side = one.side if one else other.side if other else list(find_sides(model))[-1]
    path = _trace_path(model, side, writer)
    if other is None:
        return path.output
    return path.reads.get(other.name, torch.zeros_like(path.output))


def memory_gain(model: nn.Module, writer: str | None) -> Tensor:
    """Return what arrives at the memory, the encoder's output, of ones that a writer wrote."""
    if writer is not None and find_step(model, writer).side != "encoder":
        return torch.zeros_like(path_gain(model, writer, None))
    return _trace_path(model, "encoder", writer).output


def read_gain(model: nn.Module, step: NamedSublayer) -> Tensor:
    """Return the gain of what a sublayer reads, (width,): γ of the norm that it reads through.

    That is the norm of its own box if it stands before the branch, and else the norm that ends the
    box before, through which the whole stream has passed (post-norm); 1 if there is none.
    """
    steps = [each for each in find_sublayers(model) if each.side == step.side]
    names = [each.name for each in steps]
    index = names.index(step.name)
    own = _own_gain(model, step)
    if not index:
        return own
    gained, plain = (
        _trace_path(model, step.side, gains=gains).reads[step.name]
        for gains in ([steps[index - 1].box.norm], [])
    )
    return own * _ratio(gained, plain)


def closing_gain(model: nn.Module, side: str) -> Tensor:
    """Return the gain of a side's output, (width,): γ of the final norm, or of the last box's.

    Where the output is a sum of both (ResiDual), their mean.
    """
    stack = find_sides(model)[side].stack
    last = [step.box.norm for step in find_sublayers(model) if step.side == side][-1:]
    norms = [*last, stack.norm, getattr(stack.ends, "norm", nn.Identity())]
    gained, plain = (_trace_path(model, side, gains=gains).output for gains in (norms, []))
    return _ratio(gained, plain)


def _ratio(gained: Tensor, plain: Tensor) -> Tensor:
    """Return the quotient; 1 where nothing arrives, without a shortcut."""
    one = torch.ones_like(plain)
    return torch.where(plain == 0, one, gained / torch.where(plain == 0, one, plain))


def _own_gain(model: nn.Module, step: NamedSublayer) -> Tensor:
    """Return what a branch reads of a stream of ones that enters its box."""
    box = with_gains(step.box, [step.box.norm])
    ends = with_gains(find_sides(model)[step.side].stack.ends, [])
    assert isinstance(ends, Ends)
    dtype = next(model.parameters()).dtype
    read: list[Tensor] = []

    def branch(x: Tensor) -> Tensor:
        read.append(x[0, 0])
        raise _Read  # what the box would do with the result does not matter

    for value in (1, 0):  # their difference has no offset, such as the bias of Fixup
        ones = torch.full((1, 1, step.box.place.width), value, dtype=dtype)
        opened = ends.open(ones)
        is_plain = isinstance(opened, Tensor) and opened.shape == ones.shape
        with torch.no_grad(), suppress(_Read):
            box(ones if is_plain else opened, branch)
    return (read[0] - read[1]).detach()
