"""From the final vector to outputs: direct logit attribution and the logit lens.

A head that is linear gives every piece of the final vector its own logit; the logits of the pieces
sum to the model's. Where a head has an activation, its gate is frozen as the scale of a norm is:
σ(u) = g ⊙ u with the measured g = σ(u) / u, so the sum stays exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.errors import InputError
from addnorm.layers.addnorm import Stream
from addnorm.layers.heads import POOLS, MaskedHead, PooledHead, TokenHead
from addnorm.lens.frozen import FrozenNorm, measure
from addnorm.lens.look import Look, look
from addnorm.lens.places import ModelInputs, find_sides, find_sublayers, is_model_norm, require_eval
from addnorm.lens.stream import Decomposition
from addnorm.models.tabular import FTTransformerModel, MemberHead
from addnorm.models.transformer import Base


@dataclass(frozen=True, kw_only=True)
class LogitAttribution:
    """What each piece adds to one output.

    Parameters
    ----------
    names
        Those of the decomposition, and `head.bias`.
    values
        (pieces, batch, positions), or (pieces, batch) where the head pools positions; they sum to
        `total`.
    total
        The model's own output: a logit, or the difference of two.
    outputs
        Which output this is, at each position.
    """

    names: tuple[str, ...]
    values: Tensor
    total: Tensor
    outputs: Tensor

    @property
    def error(self) -> float:
        """Largest difference between the sum of the values and the model's own output."""
        return float((self.values.sum(dim=0) - self.total).abs().max())

    def ranked(self, row: int = 0, position: int = -1) -> list[tuple[str, float]]:
        """Return (name, value) of one position, the largest absolute value first."""
        values = self.values[:, row]
        values = values if values.ndim == 1 else values[:, position]
        pairs = zip(self.names, values.tolist(), strict=True)
        return sorted(pairs, key=lambda pair: -abs(pair[1]))


def attribute_logits(
    parts: Decomposition,
    outputs: int | Tensor | None = None,
    against: int | Tensor | Literal["others"] | None = None,
) -> LogitAttribution:
    """Return how much every piece of a decomposition adds to an output of the model.

    Parameters
    ----------
    parts
        The final vector, taken apart; for a head that pools by the mean, at all positions.
    outputs
        Token, class or output number: one for all, or one for each position (batch, positions).
        By default the largest at each position.
    against
        Subtract this output: the attribution of a difference of logits. `others` subtracts the mean
        of all other outputs; with two classes that is the log-odds.
    """
    capture = parts.capture
    if parts.side != list(find_sides(capture.model))[-1]:
        raise InputError(
            f"the head reads the other side: {parts.side!r} was taken apart. Leave out side=."
        )
    with torch.no_grad():
        features, weight, bias = _prepare(parts)
        ends = capture.output
        if ends.ndim == 3 and features.ndim == 4:
            ends = ends[:, list(parts.positions)]
        if isinstance(getattr(capture.model, "head", None), MemberHead):
            ends = ends.mean(dim=1)
        if outputs is None:
            outputs = ends.argmax(dim=-1)
        chosen = torch.as_tensor(outputs).expand(features.shape[1:-1])
        gates = _cap_gates(parts, weight, bias, ends)
        direction, offset = _row_of(weight, bias, chosen, gates)
        total = ends.gather(-1, chosen[..., None])[..., 0]
        if isinstance(against, str):
            count = _count_outputs(against, weight)
            means = _mean_row(weight, bias, gates)
            direction, offset = (
                (part - mean) * (count / (count - 1))
                for part, mean in zip((direction, offset), means, strict=True)
            )
            total = (total - ends.mean(dim=-1)) * (count / (count - 1))
        elif against is not None:
            other = torch.as_tensor(against).expand(chosen.shape)
            minus, minus_offset = _row_of(weight, bias, other, gates)
            direction, offset = direction - minus, offset - minus_offset
            total = total - ends.gather(-1, other[..., None])[..., 0]
        # Members of an ensemble have a row of features each; their mean is the output.
        values = (features * direction).sum(dim=-1)
    return LogitAttribution(
        names=(*parts.names, "head.bias"),
        values=torch.cat((values, offset[None])) if len(values) == len(parts.names) else values,
        total=total,
        outputs=chosen,
    )


def _cap_gates(parts: Decomposition, weight: Tensor, bias: Tensor, ends: Tensor) -> Tensor | None:
    """Return c tanh(z / c) / z of every logit z under a soft cap c, or None without one."""
    head = getattr(parts.capture.model, "head", None)
    if not isinstance(head, TokenHead) or head.cap is None:
        return None
    return _gate(F.linear(head.prepare(parts.total), weight, bias), ends)


def _row_of(
    weight: Tensor, bias: Tensor, chosen: Tensor, gates: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the rows of the output matrix, (batch, positions, width), and of its offset."""
    if gates is None:
        return weight[chosen], bias[chosen]
    gate = gates.gather(-1, chosen[..., None])
    return weight[chosen] * gate, bias[chosen] * gate[..., 0]


def _mean_row(weight: Tensor, bias: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean row of the output matrix, and the mean offset."""
    if gates is None:
        return weight.mean(dim=0), bias.mean()
    return gates @ weight / len(weight), gates @ bias / len(weight)


def _count_outputs(against: str, weight: Tensor) -> int:
    """Return the number of outputs, or raise InputError if there are no others to compare with."""
    if against != "others" or len(weight) < 2:
        raise InputError(
            "against must be an output, or 'others' where there are two outputs or more: got "
            f"{against!r} and {len(weight)} outputs."
        )
    return len(weight)


def _prepare(parts: Decomposition) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the output matrix is applied to, in pieces; the matrix; and its offset.

    If the head adds an offset before its matrix, there is one piece more than `parts` has: the
    offsets of the head, to which its last offset is then added.
    """
    model, pieces = parts.capture.model, parts.pieces
    head = getattr(model, "head", None)
    if isinstance(head, MemberHead):
        return _members(parts, head)
    if isinstance(head, TokenHead):
        assert isinstance(model, Base)
        weight = head.matrix(model.embedding())
        bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias
        if isinstance(head, MaskedHead):
            return _masked(parts, head), *_with_bias(weight, bias)
        return pieces * head.scale, weight, bias
    if isinstance(head, PooledHead):
        return _pooled(parts, head), *_with_bias(head.output.weight, head.output.bias)
    if head is None:
        width = pieces.shape[-1]
        return pieces, torch.eye(width, dtype=pieces.dtype), pieces.new_zeros(width)
    raise InputError(
        f"logits cannot be attributed through a head of type {type(head).__name__}. "
        "Use integrated_gradients."
    )


def _with_bias(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix with its offset as one column more: features then end with 0 or 1."""
    return torch.cat((weight, bias[:, None]), dim=1), bias


def _with_one(pieces: Tensor) -> Tensor:
    """Return pieces with a last feature that is 1 in the last piece and 0 in the others."""
    pieces = F.pad(pieces, (0, 1))
    pieces[-1, ..., -1] = 1
    return pieces


def _through(linear: nn.Linear, pieces: Tensor, gate: Tensor) -> Tensor:
    """Return σ(V p + c) by pieces, with σ's gate frozen; the offset c is one piece more."""
    own = pieces @ linear.weight.T * gate
    offset = pieces.new_zeros(linear.out_features) if linear.bias is None else linear.bias
    return torch.cat((own, (offset * gate).expand(1, *own.shape[1:])))


def _gate(u: Tensor, y: Tensor) -> Tensor:
    """Return y / u, and 1 where u is 0 (the pieces of such a u sum to 0)."""
    return torch.where(u == 0, torch.ones_like(u), y / torch.where(u == 0, torch.ones_like(u), u))


def _masked(parts: Decomposition, head: MaskedHead) -> Tensor:
    u = head.transform(parts.total)
    pieces = _through(head.transform, parts.pieces, _gate(u, head.activation(u)))
    if is_model_norm(head.norm):
        count = len(pieces)
        norm = FrozenNorm(measure(head.norm, head.activation(u)), len(u), count - 1)
        pieces = norm(pieces.flatten(0, 1)).unflatten(0, (count, -1))
    return _with_one(pieces)


def _pooled(parts: Decomposition, head: PooledHead) -> Tensor:
    """Return the pooled pieces, after the pooler; (pieces + 1, batch, width + 1)."""
    real = parts.capture.head_inputs[1]
    hidden = parts.capture.hidden[parts.side]
    if parts.positions != tuple(range(hidden.shape[1])):
        raise InputError("this head pools positions: take all of them apart (positions=None).")
    pool = POOLS[head.pool]
    pieces = torch.stack([pool(piece, real) for piece in parts.pieces])
    pooled = pool(hidden, real)
    if isinstance(head.pooler, nn.Sequential):
        linear, activation = head.pooler
        assert isinstance(linear, nn.Linear)
        u = linear(pooled)
        return _with_one(_through(linear, pieces, _gate(u, activation(u))))
    if isinstance(head.pooler, nn.ReLU):
        pieces = pieces * (pooled > 0)
    return _with_one(torch.cat((pieces, torch.zeros_like(pieces[:1]))))


def _members(parts: Decomposition, head: MemberHead) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summary of all members side by side; the matrix divides by their number."""
    model = parts.capture.model
    assert isinstance(model, FTTransformerModel)
    members = model.config.members
    place = parts.positions.index(0) if 0 in parts.positions else -1
    if place < 0:
        raise InputError("the head reads the summary: position 0 must be among positions.")
    gate = (parts.total[:, place] > 0).to(parts.pieces.dtype)
    pieces = parts.pieces[:, :, place] * gate  # (pieces, rows · members, width)
    pieces = torch.unflatten(pieces, 1, (-1, members)).flatten(2)
    weight = head.weight.transpose(0, 1).flatten(1) / members
    return pieces, weight, head.bias.mean(dim=0)


# ── The logit lens ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class LensTable:
    """What the model would predict if it ended after each box.

    Parameters
    ----------
    names
        Places, in order; the first is the input of the stack, the last the model's own output.
    logits
        (places, batch, positions, outputs), or without positions where the head pools them.
    """

    names: tuple[str, ...]
    logits: Tensor

    def top(self, count: int = 5) -> tuple[Tensor, Tensor]:
        """Return the most probable outputs and their probabilities, (places, ..., count)."""
        largest = self.logits.softmax(dim=-1).topk(min(count, self.logits.shape[-1]), dim=-1)
        return largest.indices, largest.values

    def divergence(self) -> Tensor:
        """Return KL(final ‖ here) of each place, in nats, (places, ...)."""
        here, final = self.logits.log_softmax(dim=-1), self.logits[-1].log_softmax(dim=-1)
        return (final.exp() * (final - here)).sum(dim=-1)


def logit_lens(
    model: nn.Module,
    inputs: ModelInputs,
    *,
    side: str | None = None,
    positions: Sequence[int] | None = None,
) -> LensTable:
    """Return the head's output for the stream after every box (nostalgebraist 2020).

    The stream is closed by the arrangement's own ends (final norm, second stream, history so far),
    then the head reads it, so this works for every arrangement; the last row is the model's output.

    Parameters
    ----------
    model, inputs
        What is called, with what.
    side
        encoder or decoder; by default the last.
    positions
        Positions to read, for a head that reads each position alone; all by default.

    >>> from addnorm import ModelConfig, build
    >>> model = build(ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=1)).eval()
    >>> table = logit_lens(model, torch.tensor([[3, 1, 4]]))
    >>> table.names, tuple(table.logits.shape)
    (('input', 'decoder.0.attention', 'decoder.0.ffn'), (3, 1, 3, 9))
    """
    require_eval(model, "logit_lens")
    name = list(find_sides(model))[-1] if side is None else side
    prefix = f"{name}." if name else ""
    capture = look(model, inputs, f"stream:{prefix}*")
    streams = streams_of(capture, name)
    chosen = None if positions is None else torch.tensor(list(positions))
    if chosen is not None and not isinstance(getattr(model, "head", None), TokenHead):
        raise InputError("this head pools positions: leave out positions=.")
    with torch.no_grad():
        logits = [read_out(capture, name, stream, chosen) for stream in streams.values()]
    return LensTable(names=tuple(streams), logits=torch.stack(logits))


def streams_of(capture: Look, side: str) -> dict[str, Stream]:
    """Return the stream before the first box, as `input`, and after every box of a side."""
    names = [step.name for step in find_sublayers(capture.model) if step.side == side]
    first = capture.stream[f"{side}.input".lstrip(".")]
    return {"input": first, **{name: capture.stream[name] for name in names}}


def close_stream(capture: Look, side: str, stream: Stream) -> Tensor:
    """Return what the stack would return if it ended with this stream."""
    stack = find_sides(capture.model)[side].stack
    closed: Tensor = stack.norm(stack.ends.close(stream))
    return closed


def read_out(capture: Look, side: str, stream: Stream, positions: Tensor | None = None) -> Tensor:
    """Return the model's output if its stack ended with this stream, at all or some positions."""
    hidden = close_stream(capture, side, stream)
    return apply_head(capture, hidden if positions is None else hidden[:, positions])


def apply_head(capture: Look, hidden: Tensor) -> Tensor:
    """Return the output of the model's head for another output of its stack."""
    model = capture.model
    if isinstance(model, FTTransformerModel):
        summary = torch.unflatten(hidden[:, 0], 0, (-1, model.config.members))
        return model.head(summary).mean(dim=1)
    if isinstance(model, Base):
        if model.head is None:
            return hidden
        return model.head(hidden, *capture.head_inputs[1:])
    raise InputError(f"the lens cannot read out a {type(model).__name__}.")


def top_outputs(logits: Tensor, names: Sequence[str] | None, count: int = 5) -> list[str]:
    """Return the most probable outputs as text: name and probability."""
    largest = logits.softmax(dim=-1).topk(min(count, logits.shape[-1]))
    pairs = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
    return [f"{i if names is None else names[i]} {p:.0%}" for i, p in pairs]
