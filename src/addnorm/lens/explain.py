"""Explain the output of a model for one sequence or one image: all views of the lens at once."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.config import ModelConfig
from addnorm.errors import InputError
from addnorm.layers.embeddings import Patches
from addnorm.layers.heads import PooledHead
from addnorm.lens.attention import head_statistics
from addnorm.lens.explanation import Background, SequenceExplanation
from addnorm.lens.image import ImageView, PatchGrid
from addnorm.lens.input_contributions import (
    CHUNK_BYTES,
    MAX_BASELINES,
    OutputMetric,
    input_contributions,
    random_texts,
    row_bytes,
)
from addnorm.lens.look import LIMIT, format_size, look, side_lengths
from addnorm.lens.places import (
    ModelInputs,
    as_tensors,
    call_with_maps,
    find_entries,
    find_sublayers,
    is_recurrent,
    require_eval,
)
from addnorm.lens.readout import LensTable, LogitAttribution, attribute_logits, logit_lens
from addnorm.lens.stream import decompose

MOST_PROBABLE = -1
"""As a target: the most probable output of the position."""
TOP = 5
"""Outputs that are listed for each position."""
MAX_OUTPUTS = 64
"""Of more output positions, this many of the last are explained."""
SUMMARY = "[summary]"
"""The learned token that stands before the input of some encoders."""
RECURRENT_NOTE = (
    "A recurrent model has no residual stream: its logits are not taken apart by layers. Its "
    "attention and the contributions of its inputs are shown."
)


def explain_sequence(
    model: nn.Module,
    inputs: ModelInputs,
    *,
    tokens: Mapping[str, Sequence[str]],
    name_of: Callable[[int], str],
    targets: Sequence[int] | None = None,
    title: str = "",
    temperature: float = 1.0,
    max_outputs: int = MAX_OUTPUTS,
    limit: int = LIMIT,
    special: Mapping[str, Collection[int]] | None = None,
    background: Background | None = None,
    notes: Sequence[str] = (),
) -> SequenceExplanation:
    """Return why a model gives its output for one sequence.

    Parameters
    ----------
    model
        A model of addnorm that reads token ids or images, in evaluation mode.
    inputs
        One row: what the model is called with.
    tokens
        Of each side (encoder, decoder), the input tokens as text.
    name_of
        The text of an output: a token or a class.
    targets
        The output to explain at each position, or MOST_PROBABLE, which is the default.
    title
        What is explained.
    temperature
        Divisor of all logits, as of a calibrated classifier.
    max_outputs
        Of more output positions, this many of the last are explained.
    limit
        Bytes above which the explanation is refused, with its size.
    special
        Of each side, token ids that are the same in every text, such as those of the ends: they are
        not replaced in the random texts that contributions start from.
    background
        What contributions start from, in place of random texts.
    notes
        Remarks to show with the explanation.
    """
    require_eval(model, "explain_sequence")
    if getattr(model, "head", None) is None:
        raise InputError(
            "this model has no head: its outputs are vectors, not tokens or classes, so there is "
            "no logit to explain. Try a model with a head, or lens.look and lens.decompose."
        )
    if len(as_tensors(inputs)[0]) != 1:
        raise InputError("one sequence is explained at a time: pass a batch of one row.")
    size = explanation_bytes(model, inputs, max_outputs)
    if size > limit:
        raise InputError(
            f"this explanation needs about {format_size(size)}, more than the limit of "
            f"{format_size(limit)}. Explain a shorter input, or raise the limit: limit={size} "
            f"in Python, --memory {math.ceil(size / 2**20)} on the command line."
        )
    output, maps = _output_and_maps(model, inputs, limit)
    pooled = output.ndim == 2
    logits = output if pooled else output[0]  # (positions, outputs)
    logits = logits / temperature
    chosen = _chosen(logits, targets)
    first = 0 if pooled else max(0, len(chosen) - max_outputs)
    logits, chosen = logits[first:], chosen[first:]
    contrast = isinstance(getattr(model, "head", None), PooledHead) and logits.shape[-1] > 1
    metric = OutputMetric(chosen, first, pooled, contrast)
    if background is None:
        texts = random_texts(model, inputs, special or {}, outputs=len(chosen))
        count = len(next(iter(texts.values())))
        background = Background(inputs=texts, name=f"{count} texts of random tokens")
    contributions = input_contributions(model, inputs, metric, background.inputs)
    probabilities = logits.softmax(dim=-1)
    return SequenceExplanation(
        title=title,
        tokens=_token_names(model, tokens),
        outputs=[name_of(int(i)) for i in chosen],
        probabilities=probabilities.gather(1, chosen[:, None])[:, 0].tolist(),
        candidates=_names(probabilities, name_of),
        maps={name: each[0] for name, each in maps.items()},
        statistics=_head_summary(model, inputs, maps),
        **_stream_views(model, inputs, metric, name_of, temperature, limit),
        contributions={side: each / temperature for side, each in contributions.values.items()},
        completeness=contributions.error / temperature,
        baseline=background.name,
        kind=_kind(contrast, logits.shape[-1]),
        first=first,
        notes=[*notes, *_notes_on(model, first, len(chosen))],
    )


def _output_and_maps(
    model: nn.Module, inputs: ModelInputs, limit: int
) -> tuple[Tensor, dict[str, Tensor]]:
    if is_recurrent(model):
        return call_with_maps(model, inputs)
    has_maps = any(step.heads for step in find_sublayers(model))
    capture = look(model, inputs, ("maps",) if has_maps else (), limit=limit)
    return capture.output, capture.maps


def _chosen(logits: Tensor, targets: Sequence[int] | None) -> Tensor:
    """Return the output to explain at each position."""
    best = logits.argmax(dim=-1)
    if targets is None:
        return best
    target_ids = torch.tensor(list(targets))
    if target_ids.shape != best.shape:
        raise InputError(
            f"there must be {len(best)} targets, one a position: got {len(target_ids)}."
        )
    return torch.where(target_ids == MOST_PROBABLE, best, target_ids)


def _kind(contrast: bool, outputs: int) -> str:
    """Return what is taken apart."""
    if not contrast:
        return "logit"
    return "log-odds" if outputs == 2 else "margin"


def _token_names(model: nn.Module, tokens: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the tokens of each side, with that of the summary if there is one."""
    before = [SUMMARY] if getattr(model, "summary", None) is not None else []
    return {name: [*before, *each] for name, each in tokens.items()}


def _stream_views(
    model: nn.Module,
    inputs: ModelInputs,
    metric: OutputMetric,
    name_of: Callable[[int], str],
    temperature: float,
    limit: int,
) -> dict[str, Any]:
    """Return the pieces of every logit, and what the model would have said after each layer."""
    chosen, pooled = metric.chosen, metric.pooled
    if is_recurrent(model):
        return {"pieces": ([], torch.zeros(0, len(chosen))), "layers": ([], [])}
    positions = range(metric.first, metric.first + len(chosen)) if metric.first else None
    parts = decompose(model, inputs, positions=positions, limit=limit)
    pieces = attribute_logits(
        parts, chosen if pooled else chosen[None], "others" if metric.contrast else None
    )
    layers = logit_lens(model, inputs, positions=positions)
    return {
        "pieces": _pieces(pieces, pooled, temperature),
        "layers": _layers(layers, pooled, name_of, temperature),
    }


def _head_summary(
    model: nn.Module, inputs: ModelInputs, maps: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    """Return the statistics of every self-attention head of the sides that read tokens."""
    rows: dict[str, dict[str, float]] = {}
    for side, ids in zip(find_entries(model), as_tensors(inputs), strict=False):
        if ids.ndim != 2:
            continue
        own = {
            name: each
            for name, each in maps.items()
            if name.startswith(side) and each.shape[-1] == ids.shape[1]
        }
        heads = head_statistics(own, ids)
        rows |= {
            f"{place}.{head}": heads.of(place, head)
            for place, table in heads.values.items()
            for head in range(len(table))
        }
    return rows


def _notes_on(model: nn.Module, first: int, count: int) -> list[str]:
    notes = [f"The last {count} of {first + count} outputs are explained."] if first else []
    return [*notes, *([RECURRENT_NOTE] if is_recurrent(model) else [])]


def explanation_bytes(model: nn.Module, inputs: ModelInputs, max_outputs: int = MAX_OUTPUTS) -> int:
    """Return about how much memory `explain_sequence` needs, before it runs."""
    lengths, row = side_lengths(model, inputs), row_bytes(model, inputs)
    gradients = max(row, min(CHUNK_BYTES, MAX_BASELINES * row))
    if is_recurrent(model):
        return gradients
    steps, side = find_sublayers(model), list(find_entries(model))[-1]
    last = [step for step in steps if step.side == side]
    width, item = last[0].box.place.width, next(model.parameters()).element_size()
    pooled = isinstance(getattr(model, "head", None), PooledHead)
    outputs = 1 if pooled else min(lengths[side], max_outputs)
    config = model.config
    vocab = config.output_vocab if isinstance(config, ModelConfig) and not pooled else 1
    maps = sum(
        step.heads
        * lengths[step.side]
        * (lengths.get("encoder", 0) if step.role == "memory" else lengths[step.side])
        for step in steps
    )
    pieces = sum(step.heads + 2 for step in last) * width
    pieces *= lengths[side] if pooled else outputs
    read = (len(last) + 1) * outputs * vocab
    return item * (maps + 3 * pieces + 2 * read) + gradients


def _names(
    probabilities: Tensor, name_of: Callable[[int], str], count: int = TOP
) -> list[list[tuple[str, float]]]:
    largest = probabilities.topk(min(count, probabilities.shape[-1]), dim=-1)
    return [
        [(name_of(i), p) for i, p in zip(ids, values, strict=True)]
        for ids, values in zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
    ]


def _pieces(
    attribution: LogitAttribution, pooled: bool, temperature: float
) -> tuple[list[str], Tensor]:
    values = attribution.values if pooled else attribution.values[:, 0]
    return list(attribution.names), values.reshape(len(attribution.names), -1) / temperature


def _layers(
    table: LensTable, pooled: bool, name_of: Callable[[int], str], temperature: float
) -> tuple[list[str], list[list[list[tuple[str, float]]]]]:
    logits = (table.logits if pooled else table.logits[:, 0]) / temperature
    return list(table.names), [_names(each.softmax(dim=-1), name_of, 3) for each in logits]


def explain_image(
    model: nn.Module,
    image: Tensor,
    background: Background,
    *,
    pixels: Any,
    **options: Any,
) -> SequenceExplanation:
    """Return why a model gives its output for one image: its patches are the tokens.

    Parameters
    ----------
    model
        An encoder over patches, in evaluation mode.
    image
        What it is called with, (1, channels, side, side).
    background
        What contributions start from, such as the mean image.
    pixels
        The image as it is shown, (side, side, channels), from 0 to 255.
    options
        As for `explain_sequence`: name_of, title, limit, notes ...
    """
    patches = getattr(model, "tokens", None)
    if not isinstance(patches, Patches):
        raise InputError(
            f"explain_image needs a model that reads patches of images: got {type(model).__name__}."
        )
    count = patches.image // patches.patch
    grid = PatchGrid(
        rows=count,
        columns=count,
        patch=patches.patch,
        first=int(getattr(model, "summary", None) is not None),
    )
    explanation = explain_sequence(
        model, image, tokens={"encoder": grid.names()}, background=background, **options
    )
    return replace(explanation, image=ImageView(grid, pixels))
