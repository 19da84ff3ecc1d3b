"""Attention maps: what heads do, and how attention flows through the layers.

A map is (batch, heads, query, key); rows sum to 1 over the visible keys. Attention says what was
read, not what mattered: see stream.py, attribution.py and patching.py for that. The learned keys of
all-attention are columns after those of the positions; what a head reads there is of no input, so
statistics and rollouts are of the other columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from addnorm.errors import InputError, nearest
from addnorm.layers.attention import Attention, MemoryAttention
from addnorm.lens.look import Look, look
from addnorm.lens.places import (
    ModelInputs,
    NamedSublayer,
    as_tensors,
    call,
    find_sublayers,
    require_eval,
    select,
)

Metric = Callable[[Tensor], Tensor]
"""From a model's output to one number: a loss, or a chosen logit."""

STATISTICS = {
    "own": "mean weight on the query's own position",
    "previous": "mean weight on the position before the query",
    "first": "mean weight on the first position",
    "duplicate": "weight on earlier copies of the query's token, where there are any",
    "induction": "weight on tokens that followed earlier copies of the query's token",
    "positional": "share of the map's variance that the offset key − query explains",
    "entropy": "mean entropy of a row, in nats",
}
"""The head statistics of self-attention; all but entropy are from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class HeadStatistics:
    """Statistics of every head, by place.

    Parameters
    ----------
    values
        Of each place, a tensor (heads, statistics).
    names
        Names of the statistics, as in `STATISTICS`.
    """

    values: dict[str, Tensor]
    names: tuple[str, ...]

    def of(self, place: str, head: int) -> dict[str, float]:
        """Return the statistics of one head."""
        return dict(zip(self.names, self.values[place][head].tolist(), strict=True))

    def ranked(self, name: str) -> list[tuple[str, float]]:
        """Return (head, value) of one statistic over all heads, the largest first."""
        column = self.names.index(name)
        pairs = [
            (f"{place}.{head}", float(value))
            for place, table in self.values.items()
            for head, value in enumerate(table[:, column])
        ]
        return sorted((pair for pair in pairs if pair[1] == pair[1]), key=lambda pair: -pair[1])


def head_statistics(
    maps: Mapping[str, Tensor] | Look, ids: Tensor, *, real: Tensor | None = None
) -> HeadStatistics:
    """Return what every self-attention head attends to; see `STATISTICS`.

    Olsson et al. 2022 (2209.11895), appendix; Elhage et al. 2021. A statistic that no position
    allows (no token occurs twice) is NaN.

    Parameters
    ----------
    maps
        Maps by place, or a look that has them; encoder-decoder maps are left out.
    ids
        Token ids of the sequences, (batch, length).
    real
        Which positions are tokens and not padding, (batch, length); all by default.
    """
    if isinstance(maps, Look):
        maps = maps.maps
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    length = ids.shape[1]
    own = {n: m for n, m in maps.items() if not n.endswith(".memory")}
    square = {n: m[..., :length] for n, m in own.items() if m.shape[-2] == length <= m.shape[-1]}
    return HeadStatistics(
        values={name: _statistics(each, ids, real) for name, each in square.items()},
        names=tuple(STATISTICS),
    )


def _statistics(weights: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Return the statistics of one map, (heads, statistics)."""
    length = ids.shape[1]
    place = torch.arange(length, device=ids.device)
    offset = place[None, :] - place[:, None]  # key − query
    rows = real[:, :, None]  # (batch, query, 1)
    later = rows & (place > 0)[None, :, None]
    same = (ids[:, :, None] == ids[:, None, :]) & real[:, None, :]
    earlier = same & (offset < 0)
    # The key follows an earlier copy: the token before the key is the query's.
    after = torch.zeros_like(earlier)
    after[:, :, 1:] = earlier[:, :, :-1]
    after = after & (offset < 0)
    scores = [
        _mass(weights, (offset == 0).expand_as(same), rows),
        _mass(weights, (offset == -1).expand_as(same), later),
        _mass(weights, (place == 0).expand_as(same), later),
        _mass(weights, earlier, rows & earlier.any(dim=-1, keepdim=True)),
        _mass(weights, after, rows & after.any(dim=-1, keepdim=True)),
        _explained_by_offset(weights, offset, real),
        _entropy(weights, rows),
    ]
    return torch.stack(scores, dim=1)


def _mass(weights: Tensor, cells: Tensor, rows: Tensor) -> Tensor:
    """Return the mean over some rows of the weight in some cells, (heads,)."""
    mass = (weights * cells[:, None]).sum(dim=-1)  # (batch, heads, query)
    chosen = rows[:, None, :, 0].to(mass.dtype)
    return (mass * chosen).sum(dim=(0, 2)) / chosen.sum(dim=(0, 2))


def _entropy(weights: Tensor, rows: Tensor) -> Tensor:
    each = torch.special.entr(weights).sum(dim=-1)
    chosen = rows[:, None, :, 0].to(each.dtype)
    return (each * chosen).sum(dim=(0, 2)) / chosen.sum(dim=(0, 2))


def _explained_by_offset(weights: Tensor, offset: Tensor, real: Tensor) -> Tensor:
    """Return R² of the weights by the mean weight at their offset, over visible cells, (heads,).

    A cell that no head of the map ever gives weight to is taken as hidden.
    """
    length = offset.shape[0]
    cells = (real[:, :, None] & real[:, None, :]) & (weights > 0).any(dim=1)
    index = (offset + length - 1).expand_as(cells)[cells]
    values = weights.transpose(0, 1)[:, cells]  # (heads, cells)
    counts = torch.zeros(2 * length - 1, dtype=values.dtype).index_add_(
        0, index, torch.ones_like(index, dtype=values.dtype)
    )
    sums = values.new_zeros(len(values), 2 * length - 1).index_add_(1, index, values)
    means = (sums / counts.clamp(min=1))[:, index]
    spread = (values - values.mean(dim=1, keepdim=True)).square().sum(dim=1)
    rest = (values - means).square().sum(dim=1)
    return torch.where(spread > 0, 1 - rest / spread.clamp(min=1e-30), torch.zeros_like(spread))


# ── Through the layers ────────────────────────────────────────────────────────────────────────────


def rollout(
    maps: Sequence[Tensor] | Mapping[str, Tensor] | Look,
    *,
    residual: float = 0.5,
    side: str = "",
) -> Tensor:
    """Return how much of each input reaches each position, (batch, length, length).

        R ← (r I + (1 − r) mean_h A) R,   r the share of the residual

    Abnar, Zuidema 2020 (2005.00928), §3.

    Parameters
    ----------
    maps
        Maps of self-attention layers, the first layer first; or maps by place, or a look that has
        them, of which encoder-decoder maps are left out.
    residual
        r: how much of a position passes a layer unchanged.
    side
        Of maps by place, those of the encoder or of the decoder; by default of the last side.
    """
    if isinstance(maps, Look | Mapping):
        maps = _own_maps(maps.maps if isinstance(maps, Look) else maps, side)
    if not maps:
        raise InputError("a rollout needs one map or more: got none. Ask look for maps.")
    first = maps[0]
    # A table of one block has one query, the summary; else there is a query for each position.
    length = first.shape[-1] if first.shape[-2] == 1 else first.shape[-2]
    total = torch.eye(length, dtype=first.dtype).expand(len(first), -1, -1)
    for weights in maps:
        mean = weights.mean(dim=1)[..., : total.shape[-2]]
        if mean.shape[-2] < mean.shape[-1]:  # the last layer of a table: the summary alone
            total = residual * total[:, : mean.shape[-2]] + (1 - residual) * mean @ total
        else:
            total = residual * total + (1 - residual) * mean @ total
    return total


def _own_maps(maps: Mapping[str, Tensor], side: str) -> list[Tensor]:
    """Return the maps of the self-attention of one side, by default the last."""
    sides: dict[str, list[Tensor]] = {}
    for name, each in maps.items():
        block, _, role = name.rpartition(".")
        if role == "attention":
            sides.setdefault(block.rpartition(".")[0], []).append(each)
    if side and side not in sides:
        raise InputError(f"there must be maps of the side: got {side!r}. {nearest(side, sides)}")
    return sides[side or list(sides)[-1]] if sides else []


def gradient_rollout(
    model: nn.Module, inputs: ModelInputs, metric: Metric, side: str = ""
) -> Tensor:
    """Return the rollout of maps weighted by their gradients, (batch, length, length).

        R ← R + mean_h max(0, A ⊙ ∂metric/∂A) R

    Chefer, Gur, Wolf 2021 (2103.15679), eq. 5–6.

    Parameters
    ----------
    model, inputs
        What is called, with what.
    metric
        From the output to the number whose gradient weights the maps.
    side
        encoder or decoder; by default the last.
    """
    steps = [step for step in find_sublayers(model) if isinstance(step.sublayer, Attention)]
    side = side or steps[-1].side
    names = [s.name for s in steps if s.side == side and s.role == "attention"]
    weighted = weigh_maps(model, inputs, metric, names)
    first = next(iter(weighted.values()))
    total = torch.eye(first.shape[-1], dtype=first.dtype).expand(len(first), -1, -1)
    for weights in weighted.values():
        mean = weights.clamp(min=0).mean(dim=1)
        total = (total if mean.shape[-2] == mean.shape[-1] else total[:, :1]) + mean @ total
    return total


def weigh_maps(
    model: nn.Module, inputs: ModelInputs, metric: Metric, places: Sequence[str]
) -> dict[str, Tensor]:
    """Return A ⊙ ∂metric/∂A of some places, (batch, heads, query, key), for keys at a position.

    The gradient is that of the mixed values times the values, ∂/∂A_qk = ∂/∂z_q · v_k, so the fused
    kernel computes both passes and no map enters the graph.
    """
    require_eval(model, "weigh_maps")
    steps = {step.name: step for step in find_sublayers(model)}
    chosen = [steps[n] for place in places for n in select(list(steps.values()), place)]
    mixed: dict[str, Tensor] = {}
    memory: list[Tensor] = []
    handles = [step.sublayer.inner.register_forward_pre_hook(_grab(mixed, step)) for step in chosen]
    for step in chosen:
        if isinstance(step.sublayer, MemoryAttention) and not memory:
            project = step.sublayer.memory
            handles.append(project.register_forward_pre_hook(lambda _, a: memory.append(a[0])))
    try:
        with torch.enable_grad():
            value = metric(call(model, inputs)).sum()
        grads = torch.autograd.grad(value, list(mixed.values()))
    finally:
        for handle in handles:
            handle.remove()
    want = [f"{kind}:{step.name}" for step in chosen for kind in ("maps", "reads")]
    capture = look(model, inputs, want)
    weighted = {}
    for step, grad in zip(chosen, grads, strict=True):
        values = _values(step, memory[0] if step.role == "memory" else capture.reads[step.name])
        split = torch.unflatten(grad, -1, (step.heads, -1)).transpose(1, 2)
        weights = capture.maps[step.name][..., : values.shape[2]]
        weighted[step.name] = weights * (split @ values.transpose(-1, -2))
    return {name: each.detach() for name, each in weighted.items()}


def _grab(mixed: dict[str, Tensor], step: NamedSublayer) -> Callable[..., None]:
    def hook(inner: nn.Module, args: tuple[Tensor, ...]) -> None:
        mixed[step.name] = args[0]

    return hook


def _values(step: NamedSublayer, x: Tensor) -> Tensor:
    """Return the values of every head, (batch, heads, key, head_width)."""
    attention = step.sublayer
    assert isinstance(attention, Attention)
    linear = attention.memory if isinstance(attention, MemoryAttention) else attention.input
    bias = None if linear.bias is None else linear.bias[-attention.sizes[2] :]
    v = attention.split(nn.functional.linear(x, attention.matrices()["value"], bias))
    return v.repeat_interleave(attention.heads // attention.kv_heads, dim=1)


def real_positions(model: nn.Module, inputs: ModelInputs) -> Tensor:
    """Return which positions of the (last) token ids are not padding, (batch, length)."""
    ids = as_tensors(inputs)[-1]
    pad = getattr(model.config, "pad", None)
    return torch.ones_like(ids, dtype=torch.bool) if pad is None else ids != pad
