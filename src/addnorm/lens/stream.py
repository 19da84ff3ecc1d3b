"""The final vector as a sum: what each embedding, sublayer, head and offset contributed to it.

    out = Σ pieces,   exactly, for every arrangement

A branch joins the stream, and later norms rescale what it wrote. In the forward pass each norm
divided by one measured scale; with those scales kept, everything between a branch and the output is
linear, and the branch's share of the output is what it wrote, carried through these linear maps.
Deleting a branch with the scales frozen changes the output by exactly its piece. Elhage et al. 2021
do this for pre-norm stacks; `frozen.py` says why it needs no formula for the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.layers.attention import Attention
from addnorm.layers.context import Context
from addnorm.layers.positions import Concatenated
from addnorm.lens.frozen import (
    Constant,
    FrozenNorm,
    ReadOnly,
    WithBranch,
    box_offset,
    mixing_norms,
    replace_modules,
    split_output,
)
from addnorm.lens.look import LIMIT, Look, format_size, look, side_lengths, state_size
from addnorm.lens.places import (
    ModelInputs,
    NamedSublayer,
    as_tensors,
    check_positions,
    count_members,
    find_norms,
    find_sides,
    find_sublayers,
    require_eval,
)
from addnorm.models.tabular import FTTransformerModel
from addnorm.models.transformer import Encoder


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """The output of a side as a sum of named pieces.

    Parameters
    ----------
    names
        `tokens`, `positions`, places (`decoder.0.ffn`), heads (`decoder.0.attention.3`) and
        offsets (`decoder.0.attention.bias`, `decoder.0.ffn.norm.bias`).
    pieces
        (pieces, batch, positions, width)
    total
        What the model computed, (batch, positions, width).
    positions
        Which positions these are.
    capture
        The forward pass.
    side
        The side that was taken apart.
    """

    names: tuple[str, ...]
    pieces: Tensor
    total: Tensor
    positions: tuple[int, ...]
    capture: Look
    side: str

    @property
    def error(self) -> float:
        """Largest difference between the sum of the pieces and the model's own output."""
        return float((self.pieces.sum(dim=0) - self.total).abs().max())

    def piece(self, name: str) -> Tensor:
        """Return one piece, or the sum of those whose names start with it, (batch, ..., width)."""
        chosen = [i for i, n in enumerate(self.names) if n == name or n.startswith(f"{name}.")]
        if not chosen:
            raise InputError(f"there is no piece {name!r}. Known: {', '.join(self.names)}.")
        return self.pieces[chosen].sum(dim=0)

    def shares(self) -> Tensor:
        """Return each piece's share of the output, (pieces, batch, positions); they sum to 1.

        share = piece · out / ‖out‖²
        """
        square = self.total.square().sum(dim=-1).clamp(min=torch.finfo(self.total.dtype).tiny)
        return (self.pieces * self.total).sum(dim=-1) / square


def decompose(
    model: nn.Module,
    inputs: ModelInputs,
    *,
    side: str | None = None,
    heads: bool = True,
    positions: Sequence[int] | None = None,
    limit: int | None = None,
) -> Decomposition:
    """Return the output of a stack as the exact sum of what its parts wrote.

    Parameters
    ----------
    model
        A model of addnorm in evaluation mode.
    inputs
        What it is called with; see `look`.
    side
        encoder or decoder; by default the last, whose output the head reads.
    heads
        Take every attention apart into its heads.
    positions
        Positions to take apart; all by default.
    limit
        Bytes above which the computation is refused, with its size; None as for `look`.

    >>> from addnorm import ModelConfig, build
    >>> config = ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=1, addnorm="post")
    >>> parts = decompose(build(config).eval(), torch.tensor([[3, 1, 4]]), positions=[2])
    >>> len(parts.names), parts.error < 1e-5
    (5, True)
    """
    require_eval(model, "decompose")
    sides = find_sides(model)
    side = list(sides)[-1] if side is None else side
    if side not in sides:
        raise InputError(f"this model has no side {side!r}. Known: {', '.join(sides)}.")
    steps = [step for step in find_sublayers(model) if step.side == side]
    most = LIMIT if limit is None else limit
    size = _check_size(model, inputs, steps, heads, positions, most)
    if limit is None:
        state_size("this decomposition", size)
    prefix = f"{side}." if side else ""
    want = [f"branches:{prefix}*", "norms"]
    if heads:
        want += [f"heads:{step.name}" for step in steps if step.heads]
    capture = look(model, inputs, want, limit=most)
    return _replay_pieces(capture, side, steps, heads, positions)


def _replay_pieces(
    capture: Look,
    side: str,
    steps: list[NamedSublayer],
    heads: bool,
    positions: Sequence[int] | None,
) -> Decomposition:
    """Send the pieces through the model's own stack, with its norms frozen."""
    module, total = find_sides(capture.model)[side], capture.hidden[side]
    own = {
        norm: name for name, norm in find_norms(capture.model).items() if norm in capture.measured
    }
    mixing = {norm for step in steps for norm in mixing_norms(step.box)}
    side_norms = [child for child in module.modules() if child in own or child in mixing]
    start = _embedding_pieces(capture, side)
    branches = {step.name: _branch_pieces(capture, step, heads) for step in steps}
    owners = _owners_of_offsets(capture, side_norms, steps)
    # Pieces in the order in which they appear: of the input, then of each box.
    names = [*start, *(f"{own[norm]}.bias" for norm in owners["input"])]
    if isinstance(module.project, nn.Linear):  # embeddings that are narrower than the stream
        names.append(f"{side}.input.project.bias")
    first = len(names)
    for step in steps:
        names += [*branches[step.name], *(f"{own[norm]}.bias" for norm in owners[step.name])]
        names += [f"{step.name}.{name}" for name in (box_offset(step.box),) if name]
    # Along a sequence an instance norm mixes positions: then all are kept to the end.
    kept = torch.arange(total.shape[1], device=total.device)
    wanted = kept if positions is None else check_positions(positions, total.shape[1])
    mixes = any(capture.measured[norm].centre == -2 for norm in side_norms)
    kept = kept if mixes else wanted.to(kept.device)
    count, slots = len(names), {name: slot for slot, name in enumerate(names)}
    others = {
        norm: _frozen(capture, norm, kept, norm in mixing, slots.get(f"{own.get(norm)}.bias", 0))
        for norm in side_norms
    }
    boxes: dict[nn.Module, nn.Module] = {}
    for step in steps:
        whole = torch.stack([each.index_select(-2, kept) for each in branches[step.name].values()])
        box = replace_modules(step.box, others)
        has_offset = box_offset(step.box) is not None
        offsets = len(owners[step.name]) + has_offset
        boxes[step.box] = WithBranch(box, whole, offsets, has_offset)
    width = next(iter(start.values())).shape[-1]
    x = total.new_zeros(first, total.shape[0], len(kept), width)
    for name, piece in start.items():
        x[slots[name]] = piece.index_select(-2, kept)
    with torch.no_grad():
        x = replace_modules(module.norm, others)(x.flatten(0, 1))
        if isinstance(module.project, nn.Linear):
            x = x @ module.project.weight.T
            x[-total.shape[0] :] += module.project.bias
        pieces = replace_modules(module.stack, {**others, **boxes})(x, Context())
    pieces = pieces.unflatten(0, (count, -1))
    if mixes:
        pieces = pieces.index_select(-2, wanted)
    alive = [i for i in range(count) if bool(pieces[i].any())]
    return Decomposition(
        names=tuple(names[i] for i in alive),
        pieces=pieces[alive],
        total=total.index_select(1, wanted.to(total.device)),
        positions=tuple(wanted.tolist()),
        capture=capture,
        side=side,
    )


def _frozen(capture: Look, norm: nn.Module, kept: Tensor, mixes: bool, slot: int) -> nn.Module:
    """Return what stands for a norm: a linear map, or what it returned if it decides weights."""
    measured = capture.measured[norm].take(kept)
    if mixes:
        assert measured.output is not None
        return Constant(measured.output)
    if norm in capture.read_only:
        return ReadOnly()
    return FrozenNorm(measured, next(iter(capture.hidden.values())).shape[0], slot)


def _owners_of_offsets(
    capture: Look, side_norms: list[nn.Module], steps: list[NamedSublayer]
) -> dict[str, list[nn.Module]]:
    """Return the norms with offsets by where they join; those of the end join with the last box."""
    boxes = {norm: step.name for step in steps for norm in step.box.modules()}
    side = find_sides(capture.model)[steps[0].side]
    early = {side.norm, getattr(side.stack.ends, "first", None)}
    owners: dict[str, list[nn.Module]] = {"input": [], **{step.name: [] for step in steps}}
    for norm in side_norms:
        if capture.measured[norm].offset is not None and norm not in capture.read_only:
            place = "input" if norm in early else boxes.get(norm, steps[-1].name)
            owners[place].append(norm)
    return owners


def _embedding_pieces(capture: Look, side: str) -> dict[str, Tensor]:
    """Return what enters the stack, taken apart: tokens, positions, segments, summary."""
    x, placed = capture.embeddings[side]
    model = capture.model
    pieces = {"tokens": x}
    if isinstance(model, Encoder) and model.segments is not None:
        segment_ids = capture.inputs.get("segments") if isinstance(capture.inputs, dict) else None
        ids = as_tensors(capture.inputs)[0]
        with torch.no_grad():
            part = model.segments(torch.zeros_like(ids) if segment_ids is None else segment_ids)
        more = x.shape[1] - part.shape[1]
        segments = nn.functional.pad(part, (0, 0, more, 0))
        pieces = {"tokens": x - segments, "segments": segments}
    has_summary = getattr(model, "summary", None) is not None
    if has_summary and isinstance(model, Encoder | FTTransformerModel):
        first = torch.zeros_like(x)
        first[:, 0] = x[:, 0]
        tokens = pieces["tokens"].clone()
        tokens[:, 0] = 0
        pieces |= {"tokens": tokens, "summary": first}
    if isinstance(model, FTTransformerModel):
        pieces = {"columns" if name == "tokens" else name: each for name, each in pieces.items()}
    if not torch.equal(x, placed):
        pieces["positions"] = placed - x
    scheme = find_sides(model)[side].positions
    if isinstance(scheme, Concatenated):  # the last coordinates belong to the positions alone
        for name in pieces:
            pieces[name] = pieces[name].clone()
            pieces[name][..., -scheme.columns :] = 0
        pieces["positions"] = placed - sum(pieces[n] for n in pieces if n != "positions")
    return pieces


def _branch_pieces(capture: Look, step: NamedSublayer, heads: bool) -> dict[str, Tensor]:
    """Return what a branch wrote: as a whole, or of each head and of the output's offset."""
    whole = capture.branches[step.name]
    if not heads or not isinstance(step.sublayer, Attention):
        return {step.name: whole}
    sublayer, mixed = step.sublayer, capture.heads[step.name]
    measured = capture.measured.get(sublayer.inner)
    with torch.no_grad():
        parts = split_output(sublayer.output, sublayer.inner, measured, mixed, step.heads)
    if step.role.startswith("row_"):  # (heads, 1, rows, columns · width)
        parts = parts.reshape(len(parts), *whole.shape)
    elif parts.shape[2] < whole.shape[1]:  # the last block computes only the positions it returns
        parts = nn.functional.pad(parts, (0, 0, 0, whole.shape[1] - parts.shape[2]))
    names = [*(f"{step.name}.{head}" for head in range(step.heads)), f"{step.name}.bias"]
    return dict(zip(names, parts, strict=True))


def _check_size(
    model: nn.Module,
    inputs: ModelInputs,
    steps: Sequence[NamedSublayer],
    heads: bool,
    positions: Sequence[int] | None,
    limit: int,
) -> int:
    """Return the bytes that the pieces need; raise InputError if that is more than the limit."""
    parts = sum(step.heads + 1 if heads and step.heads else 1 for step in steps)
    parts += 2 + len(find_norms(model)) + sum(box_offset(step.box) is not None for step in steps)
    tensors = as_tensors(inputs)
    length = side_lengths(model, inputs)[steps[0].side] if positions is None else len(positions)
    rows = tensors[0].shape[0] * length * count_members(model)
    each = next(model.parameters()).element_size() * steps[0].box.place.width
    size = 3 * parts * rows * each  # the pieces, and two intermediate results of a box
    if size > limit:
        raise InputError(
            f"taking {parts} pieces apart at {rows} positions needs about {format_size(size)}, "
            f"more than the limit of {format_size(limit)}. Name some positions=[-1], leave the "
            f"heads together with heads=False, or pass limit={size}."
        )
    return size
