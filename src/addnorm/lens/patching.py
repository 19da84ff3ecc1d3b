"""What happens if a part says something else: ablation and activation patching.

An edit replaces what one head, or one whole sublayer, wrote at some positions: by zero, by its mean
over reference inputs, or by what it wrote for another input. The effect is the change of a metric:
a loss, or a chosen logit. Unlike a piece of stream.py, it includes everything that later layers do
in answer: indirect effects, and repair by other heads (McGrath et al. 2023, 2307.15771).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.errors import InputError
from addnorm.lens.attention import Metric
from addnorm.lens.look import look
from addnorm.lens.places import (
    ModelInputs,
    NamedSublayer,
    as_tensors,
    call,
    check_positions,
    find_step,
    find_sublayers,
    require_eval,
    select,
    split_head,
)

ABLATION_METHODS = ("zero", "mean", "resample")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Another value for what a place writes.

    Parameters
    ----------
    place
        A sublayer (`decoder.0.ffn`) or a head (`decoder.0.attention.3`).
    value
        What it writes instead: broadcast against (batch, length, width), or for a head against
        its mixed values (batch, length, head_width). None is zero.
    positions
        Positions where it is replaced; all by default.
    """

    place: str
    value: Tensor | None = None
    positions: tuple[int, ...] | None = None


@contextmanager
def edited(model: nn.Module, edits: Sequence[Edit]) -> Iterator[nn.Module]:
    """Apply edits to every call of the model within the block; the model itself is unchanged.

    >>> from addnorm import ModelConfig, build
    >>> model = build(ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=1)).eval()
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> with edited(model, [Edit(place="decoder.0.attention.1")]):
    ...     without_head = model(ids)
    >>> bool((without_head != model(ids)).any())
    True
    """
    handles: list[Any] = []
    try:
        for edit in edits:
            place, head = split_head(edit.place)
            step = find_step(model, place)
            if head is None:
                hook = _edit_branch(edit)
                handles.append(step.box.register_forward_pre_hook(hook))
            else:
                select([step], edit.place)  # raises if there is no such head
                hook = _edit_head(edit, head, step.head_width)
                handles.append(step.sublayer.inner.register_forward_pre_hook(hook))
        yield model
    finally:
        for handle in handles:
            handle.remove()


def _edit_branch(edit: Edit) -> Callable[..., Any]:
    def hook(box: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        stream, f = args
        return stream, lambda x: _overwrite(f(x), edit, slice(None))

    return hook


def _edit_head(edit: Edit, head: int, size: int) -> Callable[..., Any]:
    def hook(inner: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (_overwrite(args[0], edit, slice(head * size, (head + 1) * size)),)

    return hook


def _overwrite(written: Tensor, edit: Edit, columns: slice) -> Tensor:
    """Return a copy of what was written, with some positions and columns replaced."""
    result = written.clone()
    part = result[..., columns]
    value = torch.zeros_like(part) if edit.value is None else edit.value.expand_as(part)
    if edit.positions is None:
        result[..., columns] = value
    else:
        where = check_positions(edit.positions, written.shape[1])
        result[:, where, columns] = value[:, where]
    return result


@dataclass(frozen=True, kw_only=True)
class Effects:
    """The change of a metric by edits.

    Parameters
    ----------
    names
        What was edited.
    values
        Metric with the edit − metric without it: (places,), or (places, positions).
    base
        The metric of the unchanged model.
    """

    names: tuple[str, ...]
    values: Tensor
    base: float

    def ranked(self) -> list[tuple[str, float]]:
        """Return (place, effect), the largest absolute effect first."""
        values = self.values if self.values.ndim == 1 else self.values.abs().amax(dim=1)
        pairs = zip(self.names, values.tolist(), strict=True)
        return sorted(pairs, key=lambda pair: -abs(pair[1]))


def ablate(
    model: nn.Module,
    inputs: ModelInputs,
    metric: Metric,
    *,
    places: Sequence[str] | None = None,
    method: str = "mean",
    reference: ModelInputs | None = None,
    positions: Sequence[int] | None = None,
) -> Effects:
    """Return how the metric changes when each head, or each sublayer, is ablated by itself.

    Parameters
    ----------
    model, inputs
        What is called, with what.
    metric
        From the output to a number; see `token_loss_metric`, `logit_metric`.
    places
        Sublayers or heads (`decoder.*.attention.*` for all heads of these); by default every head
        and every feed-forward network.
    method
        zero: it writes 0. mean: its mean over the reference (Wang et al. 2022, 2211.00593, §2.1).
        resample: what it writes for another row of the reference (Chan et al. 2022): row i of the
        inputs gets row i − 1 of the reference, which is repeated if it has fewer rows.
    reference
        Inputs for mean and resample; by default `inputs`. To resample, they must have the lengths
        of the inputs, and may have another number of rows.
    positions
        Positions where it is ablated; all by default.
    """
    require_eval(model, "ablate")
    if method not in ABLATION_METHODS:
        raise InputError(f"method must be one of {', '.join(ABLATION_METHODS)}: got {method!r}.")
    names = list_places(model) if places is None else _expand(model, places)
    values = _reference_values(model, inputs, reference, names, method)
    base = _measure_metric(model, inputs, metric)
    where = None if positions is None else tuple(positions)
    effects = []
    for name in names:
        with edited(model, [Edit(place=name, value=values.get(name), positions=where)]):
            effects.append(_measure_metric(model, inputs, metric) - base)
    return Effects(names=tuple(names), values=torch.tensor(effects), base=base)


def patch(
    model: nn.Module,
    clean: ModelInputs,
    corrupted: ModelInputs,
    metric: Metric,
    *,
    places: Sequence[str] | None = None,
    by_position: bool = False,
) -> Effects:
    """Return how much of the clean metric each part restores in a corrupted run, 1 for all of it.

        effect = (metric with the part's clean value − corrupted) / (clean − corrupted)

    Activation patching: Meng et al. 2022 (2202.05262), §2; Zhang, Nanda 2024 (2309.16042).

    Parameters
    ----------
    model
        A model in evaluation mode.
    clean, corrupted
        Two inputs of one shape.
    metric
        From the output to a number.
    places
        Sublayers or heads; by default every head and every feed-forward network.
    by_position
        Patch one position at a time: effects are then (places, positions).
    """
    require_eval(model, "patch")
    pairs = zip(as_tensors(clean), as_tensors(corrupted), strict=True)
    if any(one.shape != other.shape for one, other in pairs):
        raise InputError("clean and corrupted inputs must have the same shapes.")
    names = list_places(model) if places is None else _expand(model, places)
    values = _captured(model, clean, names)
    good, bad = _measure_metric(model, clean, metric), _measure_metric(model, corrupted, metric)
    if good == bad:
        raise InputError(f"clean and corrupted inputs must differ in the metric: both are {good}.")
    rows = []
    for name in names:
        length = values[name].shape[1]
        spots = [(p,) for p in range(length)] if by_position else [None]
        row = []
        for where in spots:
            with edited(model, [Edit(place=name, value=values[name], positions=where)]):
                row.append((_measure_metric(model, corrupted, metric) - bad) / (good - bad))
        rows.append(row if by_position else row[0])
    if by_position:  # sides may differ in length
        width = max(map(len, rows))  # type: ignore[arg-type]
        rows = [[*row, *[float("nan")] * (width - len(row))] for row in rows]  # type: ignore
    return Effects(names=tuple(names), values=torch.tensor(rows), base=bad)


def list_places(model: nn.Module) -> list[str]:
    """Return every head and every feed-forward network of a model."""
    names: list[str] = []
    for step in find_sublayers(model):
        heads = [f"{step.name}.{head}" for head in range(step.heads)]
        names += heads or [step.name]
    return names


def _expand(model: nn.Module, places: Sequence[str]) -> list[str]:
    names = []
    steps = find_sublayers(model)
    for pattern in places:
        if pattern.endswith(".*") and pattern.removesuffix(".*").rpartition(".")[2].isalpha():
            whole = select([s for s in steps if s.heads], pattern.removesuffix(".*"))
            heads = {step.name: step.heads for step in steps}
            names += [f"{name}.{head}" for name in whole for head in range(heads[name])]
            continue
        head = split_head(pattern)[1]
        chosen = select(find_sublayers(model), pattern)
        names += [name if head is None else f"{name}.{head}" for name in chosen]
    return names


def _captured(model: nn.Module, inputs: ModelInputs, names: Sequence[str]) -> dict[str, Tensor]:
    """Return what each place wrote: a branch, or the mixed values of a head."""
    steps = {step.name: step for step in find_sublayers(model)}
    want = []
    for name in names:
        place, head = split_head(name)
        want.append(f"{'branches' if head is None else 'heads'}:{place}")
    capture = look(model, inputs, list(dict.fromkeys(want)))
    return {name: _written(capture.branches, capture.heads, steps, name) for name in names}


def _written(
    branches: dict[str, Tensor],
    heads: dict[str, Tensor],
    steps: dict[str, NamedSublayer],
    name: str,
) -> Tensor:
    place, head = split_head(name)
    if head is None:
        return branches[place]
    size = steps[place].head_width
    return heads[place][..., head * size : (head + 1) * size]


def _reference_values(
    model: nn.Module,
    inputs: ModelInputs,
    reference: ModelInputs | None,
    names: Sequence[str],
    method: str,
) -> dict[str, Tensor]:
    """Return what each place writes instead; nothing for zero."""
    if method == "zero":
        return {}
    if method == "resample":
        return _captured(model, _resampled(inputs, reference), names)
    source = inputs if reference is None else reference
    activations = _captured(model, source, names)
    return {name: each.mean(dim=(0, 1), keepdim=True) for name, each in activations.items()}


def _resampled(inputs: ModelInputs, reference: ModelInputs | None) -> ModelInputs:
    """Return for each row of the inputs another row of the reference."""
    own = as_tensors(inputs)
    others = own if reference is None else as_tensors(reference)
    rows, count = len(own[0]), len(others[0])
    if reference is None and count < 2:
        raise InputError("resampling needs two rows or more: got one. Pass reference=, or mean.")
    shapes = [[tuple(each.shape[1:]) for each in part] for part in (own, others)]
    if shapes[0] != shapes[1] or not count:
        raise InputError(
            "to resample, the rows of the reference must have the shape of those of the inputs: "
            f"got {count} rows of {shapes[1]}, and inputs of {shapes[0]}. Cut both to one length, "
            "or use method='mean'."
        )
    chosen = (torch.arange(rows, device=others[0].device) - 1) % count
    source = inputs if reference is None else reference
    if isinstance(source, Tensor):
        return source[chosen]
    if isinstance(source, Mapping):
        return {n: each[chosen] if isinstance(each, Tensor) else each for n, each in source.items()}
    return [each[chosen] if isinstance(each, Tensor) else each for each in source]


def _measure_metric(model: nn.Module, inputs: ModelInputs, metric: Metric) -> float:
    with torch.no_grad():
        return float(metric(call(model, inputs)).mean())


# ── Metrics ───────────────────────────────────────────────────────────────────────────────────────


def token_loss_metric(targets: Tensor, *, ignore: int = -100) -> Metric:
    """Return a metric: the mean cross-entropy of target tokens, (batch, length)."""

    def metric(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore)

    return metric


def logit_metric(output: int, *, against: int | None = None, position: int = -1) -> Metric:
    """Return a metric: one logit at one position, or its difference to another, (batch,).

    Parameters
    ----------
    output
        Token or class.
    against
        Token or class to subtract.
    position
        Position, where the output has positions.
    """

    def metric(logits: Tensor) -> Tensor:
        row = logits[:, position] if logits.ndim == 3 else logits
        return row[:, output] if against is None else row[:, output] - row[:, against]

    return metric
