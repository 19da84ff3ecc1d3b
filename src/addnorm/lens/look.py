"""One ordinary forward pass, with what was asked for written down.

Nothing in a layer knows of it: hooks are placed from outside and removed afterwards. A map is
computed in addition to the result of the fused kernel, and only in the blocks asked for, so the
output is the same to the bit.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.config import ModelConfig
from addnorm.errors import InputError, nearest
from addnorm.layers.addnorm import Stream
from addnorm.layers.attention import Attention
from addnorm.layers.context import Context
from addnorm.layers.feedforward import FeedForward
from addnorm.lens.frozen import Measured, measure, mixing_norms
from addnorm.lens.places import (
    ModelInputs,
    NamedSublayer,
    as_tensors,
    call,
    count_members,
    find_entries,
    find_norms,
    find_sides,
    find_sublayers,
    is_model_norm,
    select,
)

KINDS = {
    "maps": "attention weights, (batch, heads, query, key)",
    "branches": "what each sublayer added, (batch, length, width)",
    "reads": "what each sublayer read, (batch, length, width)",
    "heads": "mixed values of all heads before the output projection",
    "neurons": "hidden layer of each feed-forward network",
    "stream": "the stream after each box",
    "norms": "the scale of each norm",
}
"""What can be asked for."""
LIMIT = 2**30
"""Bytes above which a capture must be asked for explicitly."""
LARGE_CAPTURE = 2**28
"""Bytes from which a capture states its memory before it runs."""


@dataclass(kw_only=True)
class Look:
    """The captured values of one forward pass; every table is by the name of the place.

    Parameters
    ----------
    model, inputs
        What was called, with what.
    output
        What the model returned.
    maps, branches, reads, heads, neurons
        See `KINDS`.
    stream
        The stream after each box: a tensor, or the tuple of the arrangement. `SIDE.input` is the
        stream before the first box.
    norms
        Scale of each norm: σ, r or ‖x‖ of its formula.
    embeddings
        Of each side: its input, and the same after positions were added.
    hidden
        Output of each side, (batch, length, width).
    """

    model: nn.Module
    inputs: ModelInputs
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    maps: dict[str, Tensor] = field(default_factory=dict)
    branches: dict[str, Tensor] = field(default_factory=dict)
    reads: dict[str, Tensor] = field(default_factory=dict)
    heads: dict[str, Tensor] = field(default_factory=dict)
    neurons: dict[str, Tensor] = field(default_factory=dict)
    stream: dict[str, Stream] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    embeddings: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    hidden: dict[str, Tensor] = field(default_factory=dict)
    measured: dict[nn.Module, Measured] = field(default_factory=dict, repr=False)
    read_only: set[nn.Module] = field(default_factory=set, repr=False)
    """Norms whose output went to the branch of their own box as it was."""
    head_inputs: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        parts = [f"{kind}: {len(getattr(self, kind))}" for kind in KINDS if getattr(self, kind)]
        return f"Look({type(self.model).__name__}, {', '.join(parts) or 'output only'})"


def look(
    model: nn.Module,
    inputs: ModelInputs,
    want: str | Sequence[str] = ("maps",),
    *,
    limit: int | None = None,
) -> Look:
    """Call a model once and return what was asked for; the output is unchanged to the bit.

    Parameters
    ----------
    model
        A model of addnorm.
    inputs
        What it is called with: a tensor, several in order, or a dictionary of arguments.
    want
        Kinds to capture (see `KINDS`), each optionally with places: "maps",
        "maps:decoder.*.memory", "maps:decoder.2.memory.5" (head 5), "branches:*.ffn".
    limit
        Bytes above which the capture is refused, with its size; None is 1 GiB, and from 256 MiB
        on a warning states the size before the model is called.

    >>> from addnorm import ModelConfig, build
    >>> model = build(ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=2)).eval()
    >>> capture = look(model, torch.tensor([[3, 1, 4]]), "maps:decoder.1.attention")
    >>> {name: tuple(each.shape) for name, each in capture.maps.items()}
    {'decoder.1.attention': (1, 2, 3, 3)}
    """
    steps = find_sublayers(model)
    chosen = _parse(steps, [want] if isinstance(want, str) else want)
    size = _capture_bytes(model, inputs, steps, chosen)
    most = LIMIT if limit is None else limit
    if size > most:
        kind, places = next(reversed(chosen.items()))
        fewer = f"want='{kind}:{list(places)[-1]}'"
        raise InputError(
            f"this capture needs {format_size(size)}, more than the limit of {format_size(most)}. "
            f"Ask for fewer places, such as {fewer}, for a shorter input, or pass limit={size}."
        )
    if limit is None:
        state_size("this capture", size)
    capture = Look(model=model, inputs=inputs)
    with torch.no_grad(), _hooks(capture, steps, chosen):
        capture.output = call(model, inputs)
    return capture


def state_size(what: str, size: int) -> None:
    """Warn of how much memory something takes, if that is much."""
    if size >= LARGE_CAPTURE:
        warnings.warn(f"{what} takes about {format_size(size)} of memory.", stacklevel=3)


def format_size(size: int) -> str:
    """Return a number of bytes in MB, or if it is small in kB or bytes.

    >>> format_size(3 * 2**20), format_size(1500), format_size(100)
    ('3 MB', '1.5 kB', '100 bytes')
    """
    if size < 2**10:
        return f"{size} bytes"
    unit, name = (2**20, "MB") if size >= 2**20 else (2**10, "kB")
    value = size / unit
    return f"{value:,.0f} {name}" if value >= 10 else f"{value:.2g} {name}"


Chosen = dict[str, dict[str, tuple[int, ...] | None]]
"""Of each kind, the places asked for and the heads of each (None: all)."""


def _parse(steps: Sequence[NamedSublayer], want: Sequence[str]) -> Chosen:
    chosen: Chosen = {}
    for item in want:
        kind, _, pattern = item.partition(":")
        if kind not in KINDS:
            raise InputError(f"look has no kind {kind!r}. {nearest(kind, KINDS)}")
        places = chosen.setdefault(kind, {})
        able = [step for step in steps if _has(step, kind)]
        if not able:
            raise InputError(f"this model has no {kind}: none of its sublayers has any.")
        for name, heads in select(able, pattern or "*").items():
            before = places.get(name, ())
            places[name] = None if heads is None or before is None else (*before, *heads)
    return chosen


def _has(step: NamedSublayer, kind: str) -> bool:
    """Whether a sublayer has something of a kind."""
    if kind in ("maps", "heads"):
        return step.heads > 0
    return isinstance(step.sublayer, FeedForward) if kind == "neurons" else True


# ── Hooks ─────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _hooks(capture: Look, steps: Sequence[NamedSublayer], chosen: Chosen) -> Iterator[None]:
    """Place the hooks of a capture, and remove them."""
    handles: list[Any] = []
    maps: dict[nn.Module, Tensor] = {}
    for block in {s.block for s in steps if s.name in chosen.get("maps", {})}:
        handles.append(block.register_forward_pre_hook(_with_maps(maps)))
    for step in steps:
        handles += _step_hooks(capture, step, chosen)
    if "norms" in chosen:
        handles += _norm_hooks(capture)
    handles += _side_hooks(capture)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for step in steps:
        if step.sublayer in maps and step.name in chosen["maps"]:
            heads = chosen["maps"][step.name]
            each = maps[step.sublayer]
            capture.maps[step.name] = each if heads is None else each[:, list(heads)]


def _with_maps(maps: dict[nn.Module, Tensor]) -> Callable[..., Any]:
    def hook(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        stream, context = args
        assert isinstance(context, Context)
        return stream, replace(context, maps=maps)

    return hook


def _step_hooks(capture: Look, step: NamedSublayer, chosen: Chosen) -> Iterator[Any]:
    name, own = step.name, {module for module in step.box.modules() if is_model_norm(module)}
    outputs: dict[nn.Module, Tensor] = {}

    def remember(norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        outputs[norm] = output

    def before(box: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        stream, f = args
        if name in chosen.get("stream", {}) and step.layer == 0 and step.box.place.first:
            capture.stream[f"{step.side}.input".lstrip(".")] = stream

        def branch(x: Tensor) -> Tensor:
            capture.read_only |= {norm for norm in own if outputs.get(norm) is x}
            y = f(x)
            if name in chosen.get("reads", {}):
                capture.reads[name] = x
            if name in chosen.get("branches", {}):
                capture.branches[name] = y
            return y

        return stream, branch

    def forget(box: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.clear()

    def after(box: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        capture.stream[name] = output

    def inside(inner: nn.Module, args: tuple[Any, ...]) -> None:
        (capture.heads if step.heads else capture.neurons)[name] = args[0]
        if is_model_norm(inner):
            capture.measured[inner] = measure(inner, args[0])

    if any(name in chosen.get(kind, {}) for kind in ("branches", "reads", "stream")):
        yield step.box.register_forward_pre_hook(before)
        yield step.box.register_forward_hook(forget)
        for norm in own:
            yield norm.register_forward_hook(remember)
    if name in chosen.get("stream", {}):
        yield step.box.register_forward_hook(after)
    if any(name in chosen.get(kind, {}) for kind in ("heads", "neurons")):
        yield step.sublayer.inner.register_forward_pre_hook(inside)


def _norm_hooks(capture: Look) -> Iterator[Any]:
    whole = {norm for step in find_sublayers(capture.model) for norm in mixing_norms(step.box)}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(norm: nn.Module, args: tuple[Any, ...]) -> None:
            capture.measured[norm] = measure(norm, args[0])
            capture.norms[name] = capture.measured[norm].scale

        return hook

    def keep(norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        one = output.new_ones(())
        capture.measured[norm] = Measured(one, one, None, None, output)

    for name, norm in find_norms(capture.model).items():
        if norm not in whole:
            yield norm.register_forward_pre_hook(hook_of(name))
    for norm in whole:
        yield norm.register_forward_hook(keep)


def _side_hooks(capture: Look) -> Iterator[Any]:
    """Hooks that remember only references: what enters each side, and what enters the head."""
    inputs: dict[str, Tensor] = {}

    def enter(name: str) -> Callable[..., None]:
        def hook(side: nn.Module, args: tuple[Any, ...]) -> None:
            inputs[name] = args[0]

        return hook

    def embed(name: str) -> Callable[..., None]:
        def hook(norm: nn.Module, args: tuple[Any, ...]) -> None:
            capture.embeddings[name] = (inputs[name], args[0])

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(side: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            capture.hidden[name] = output

        return hook

    def head(module: nn.Module, args: tuple[Any, ...]) -> None:
        capture.head_inputs = args

    for name, side in find_sides(capture.model).items():
        yield side.register_forward_pre_hook(enter(name))
        yield side.norm.register_forward_pre_hook(embed(name))
        yield side.register_forward_hook(leave(name))
    if isinstance(getattr(capture.model, "head", None), nn.Module):
        yield capture.model.head.register_forward_pre_hook(head)  # type: ignore[union-attr]


# ── Memory ────────────────────────────────────────────────────────────────────────────────────────


def side_lengths(model: nn.Module, inputs: ModelInputs) -> dict[str, int]:
    """Return the number of positions of each side, before the model is called."""
    tensors, sides = as_tensors(inputs), find_entries(model)
    if "" in sides:  # a table: its columns, and at most one summary
        return {"": 1 + sum(each.shape[1] for each in tensors[:2] if each.ndim > 1)}
    lengths = {}
    for name, each in zip(sides, tensors, strict=False):
        config = model.config
        assert isinstance(config, ModelConfig)
        known = each.shape[1] if each.ndim < 4 else config.input_length
        lengths[name] = known + int(getattr(model, "summary", None) is not None)
    return lengths


def _capture_bytes(
    model: nn.Module, inputs: ModelInputs, steps: Sequence[NamedSublayer], chosen: Chosen
) -> int:
    """Return the size of what would be captured."""
    lengths = side_lengths(model, inputs)
    batch = as_tensors(inputs)[0].shape[0] * count_members(model)
    total = 0
    for step in steps:
        length, width = lengths[step.side], step.box.place.width
        keys = lengths.get("encoder", length) if step.role == "memory" else length
        keys += step.sublayer.extra_keys if isinstance(step.sublayer, Attention) else 0
        output = step.sublayer.output
        inner = output.in_features if isinstance(output, nn.Linear) else 0
        each = {"maps": step.heads * keys, "heads": inner, "neurons": inner, "norms": 1}
        for kind, places in chosen.items():
            if step.name in places:
                heads = places[step.name]
                count = each.get(kind, width)
                if kind == "maps" and heads is not None:
                    count = len(heads) * keys
                total += batch * length * count
    return total * next(model.parameters()).element_size()
