"""An explanation of one sequence: everything the lens shows, with tokens as text.

For every output position: its probabilities, the pieces that its logit is the sum of, what the
model would predict after each layer, and the contribution of every input token; and all attention
maps.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from addnorm.config import ModelConfig
from addnorm.errors import InputError
from addnorm.layers.heads import PooledHead
from addnorm.lens.attention import head_statistics
from addnorm.lens.attribution import integrated_gradients, token_embedding
from addnorm.lens.look import LIMIT, look, side_lengths
from addnorm.lens.places import (
    ModelInputs,
    as_tensors,
    find_sides,
    find_sublayers,
    require_eval,
)
from addnorm.lens.readout import LensTable, LogitAttribution, attribute_logits, logit_lens
from addnorm.lens.stream import decompose

if TYPE_CHECKING:
    from addnorm.report import Page

MOST_PROBABLE = -1
"""As a target: the most probable output of the position."""
TOP = 5
"""Outputs that are listed for each position."""
MAX_OUTPUTS = 64
"""Of more output positions, this many of the last are explained."""
LARGE = 2**28
"""Bytes from which an explanation states its memory before it runs."""
STEPS, MAX_NODES = 4, 64
"""Nodes of the integrated gradients: at first, and at most, if the contributions do not sum up."""
MIN_BASELINES, MAX_BASELINES, WORK = 4, 24, 10**11
"""Random texts that a text is compared with; WORK is about the multiplications to spend on it."""
TOLERANCE = 0.02
"""The contributions may miss their sum by this share of it, or by this many logits."""
CHUNK_BYTES = 2**28
"""Memory of one pass of the integrated gradients."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What one token of a translation rests on.

    Parameters
    ----------
    output
        The token.
    source, position, contribution
        The source token that contributes most to its logit, its position, and that contribution.
    attended, weight
        The source token with the largest attention weight, and that weight: the mean over all heads
        and layers. Attention is what was read, not what mattered.
    """

    output: str
    source: str
    position: int
    contribution: float
    attended: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class SequenceExplanation:
    """Why a model gives its output for one sequence.

    Parameters
    ----------
    title
        What was explained.
    tokens
        Of each side, the input tokens as text.
    outputs
        The output that is explained at each output position, as text.
    kind
        What is taken apart: the `logit` of an output; of a class, its `log-odds` against the other
        class, or its `margin`: the logit minus the mean of the other classes'.
    probabilities
        Its probability.
    candidates
        The most probable outputs of each position: (text, probability).
    maps
        Attention maps by place, (heads, query, key).
    statistics
        Of each self-attention head, what it attends to; see `lens.attention.STATISTICS`.
    pieces
        The pieces of each output's logit; they sum to it.
    layers
        The most probable outputs after each box: places, then of each place and position
        (text, probability) lists.
    contributions
        Of each side, that of input token i to the logit at position p, (positions, tokens).
    completeness
        Sum of the contributions minus its known value, at the position where it is largest.
    baseline
        What the contributions start from: their sum is the logit minus its mean there.
    first
        The position of the first output: above 0 if there are too many to explain all.
    """

    title: str
    tokens: dict[str, list[str]]
    outputs: list[str]
    probabilities: list[float]
    candidates: list[list[tuple[str, float]]]
    maps: dict[str, Tensor]
    statistics: dict[str, dict[str, float]]
    pieces: tuple[list[str], Tensor]
    layers: tuple[list[str], list[list[list[tuple[str, float]]]]]
    contributions: dict[str, Tensor]
    completeness: float
    baseline: str = ""
    kind: str = "logit"
    first: int = 0
    notes: list[str] = field(default_factory=list)

    def top_pieces(self, position: int = -1, count: int = 8) -> list[tuple[str, float]]:
        """Return the pieces that add or subtract most at a position: (name, logits)."""
        names, values = self.pieces
        pairs = zip(names, values[:, position].tolist(), strict=True)
        return sorted(pairs, key=lambda pair: -abs(pair[1]))[:count]

    def top_inputs(self, position: int = -1, count: int = 8) -> list[tuple[str, str, float]]:
        """Return the inputs that contribute most at a position: (side, token, contribution)."""
        rows = [
            (side, token, float(value))
            for side, table in self.contributions.items()
            for token, value in zip(self.tokens[side], table[position], strict=True)
        ]
        return sorted(rows, key=lambda row: -abs(row[2]))[:count]

    def alignment(self) -> list[Alignment]:
        """Return for each output of a translation the source tokens that it rests on most."""
        maps = [each for place, each in self.maps.items() if place.endswith(".memory")]
        if not maps:
            return []
        attention = torch.stack([each.mean(dim=0) for each in maps]).mean(dim=0)[self.first :]
        contributions, source = self.contributions["encoder"], self.tokens["encoder"]
        best, most = contributions.argmax(dim=1).tolist(), attention.argmax(dim=1).tolist()
        return [
            Alignment(
                output=output,
                source=source[best[p]],
                position=best[p],
                contribution=float(contributions[p, best[p]]),
                attended=source[most[p]],
                weight=float(attention[p, most[p]]),
            )
            for p, output in enumerate(self.outputs)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the maps as plain values, for JSON."""
        names, values = self.pieces
        places, table = self.layers
        return {
            "title": self.title,
            "tokens": self.tokens,
            "kind": self.kind,
            "first": self.first,
            "outputs": [
                {
                    "output": output,
                    "probability": self.probabilities[p],
                    "candidates": self.candidates[p],
                    "inputs": {side: each[p].tolist() for side, each in self.contributions.items()},
                    "pieces": dict(zip(names, values[:, p].tolist(), strict=True)),
                    "layers": {place: row[p] for place, row in zip(places, table, strict=True)},
                }
                for p, output in enumerate(self.outputs)
            ],
            "alignment": [vars(each) for each in self.alignment()],
            "heads": self.statistics,
            "completeness": self.completeness,
            "baseline": self.baseline,
            "notes": self.notes,
        }

    def page(self) -> "Page":
        """Return an interactive HTML page."""
        from addnorm.lens.page import sequence_page

        return sequence_page(self)

    def _repr_html_(self) -> str:
        return self.page()._repr_html_()

    def __str__(self) -> str:
        lines = [self.title, *self.notes]
        for p, (output, probability) in enumerate(
            zip(self.outputs, self.probabilities, strict=True)
        ):
            inputs = ", ".join(f"{token} {value:+.2f}" for _, token, value in self.top_inputs(p, 3))
            pieces = ", ".join(f"{name} {value:+.2f}" for name, value in self.top_pieces(p, 2))
            lines.append(f"{output:<12} {probability:6.1%}  from {inputs}; by {pieces}")
        lines.append(
            f"contributions to the {self.kind}, compared with {self.baseline}; completeness: their "
            f"sum is off by {self.completeness:+.2g} at most"
        )
        return "\n".join(lines)


def explain_sequence(
    model: nn.Module,
    inputs: ModelInputs,
    *,
    tokens: Mapping[str, Sequence[str]],
    name_of: Callable[[int], str],
    targets: Sequence[int] | None = None,
    title: str = "",
    steps: int = STEPS,
    temperature: float = 1.0,
    max_outputs: int = MAX_OUTPUTS,
    limit: int = LIMIT,
    special: Mapping[str, Collection[int]] | None = None,
    notes: Sequence[str] = (),
) -> SequenceExplanation:
    """Return why a model gives its output for one sequence.

    Parameters
    ----------
    model
        A model of addnorm that reads token ids, in evaluation mode.
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
    steps
        Nodes of the integrated gradients; doubled, up to MAX_NODES, where completeness needs it.
    temperature
        Divisor of all logits, as of a calibrated classifier.
    max_outputs
        Of more output positions, this many of the last are explained.
    limit
        Bytes above which the explanation is refused, with its size.
    special
        Of each side, token ids that are the same in every text, such as those of the ends: they are
        not replaced in the random texts that contributions start from.
    notes
        Remarks to show with the explanation.
    """
    require_eval(model, "explain_sequence")
    if len(as_tensors(inputs)[0]) != 1:
        raise InputError("one sequence is explained at a time: pass a batch of one row.")
    size = explanation_bytes(model, inputs, max_outputs)
    if size > limit:
        raise InputError(
            f"this explanation needs about {size / 2**20:,.0f} MB, more than the limit of "
            f"{limit / 2**20:,.0f} MB. Explain a shorter text, or raise the limit: limit={size} in "
            f"Python, --memory {math.ceil(size / 2**20)} on the command line."
        )
    capture = look(model, inputs, limit=limit)
    pooled = capture.output.ndim == 2
    logits = capture.output if pooled else capture.output[0]  # (positions, outputs)
    logits = logits / temperature
    chosen = logits.argmax(dim=-1)
    first = 0 if pooled else max(0, len(chosen) - max_outputs)
    positions = None if pooled or not first else range(first, len(chosen))
    if targets is not None:
        target_ids = torch.tensor(list(targets))
        if target_ids.shape != chosen.shape:
            raise InputError(
                f"there must be {len(chosen)} targets, one a position: got {len(target_ids)}."
            )
        chosen = torch.where(target_ids == MOST_PROBABLE, chosen, target_ids)
    logits, chosen = logits[first:], chosen[first:]
    parts = decompose(model, inputs, positions=positions, limit=limit)
    contrast = pooled and logits.shape[-1] > 1
    kind = ("log-odds" if logits.shape[-1] == 2 else "margin") if contrast else "logit"
    pieces = attribute_logits(
        parts, chosen if pooled else chosen[None], "others" if contrast else None
    )
    layers = logit_lens(model, inputs, positions=positions)
    metric = _Metric(chosen, first, pooled)
    contributions, missing, draws = _input_contributions(
        model, inputs, metric, steps, special or {}
    )
    probabilities = logits.softmax(dim=-1)
    ids = as_tensors(inputs)[-1]
    square = {n: m for n, m in capture.maps.items() if m.shape[-1] == ids.shape[1]}
    side = list(find_sides(model))[-1]
    maps_of_side = {n: m for n, m in square.items() if n.startswith(side)}
    heads = head_statistics(maps_of_side, ids) if ids.ndim == 2 else None
    summary: dict[str, dict[str, float]] = {}
    if heads is not None:
        for place, table in heads.values.items():
            summary |= {f"{place}.{h}": heads.of(place, h) for h in range(len(table))}
    return SequenceExplanation(
        title=title,
        tokens={name: list(each) for name, each in tokens.items()},
        outputs=[name_of(int(i)) for i in chosen],
        probabilities=probabilities.gather(1, chosen[:, None])[:, 0].tolist(),
        candidates=_names(probabilities, name_of),
        maps={name: each[0] for name, each in capture.maps.items()},
        statistics=summary,
        pieces=_pieces(pieces, pooled, temperature),
        layers=_layers(layers, pooled, name_of, temperature),
        contributions={side: each / temperature for side, each in contributions.items()},
        completeness=missing / temperature,
        baseline=f"{draws} texts of random tokens",
        kind=kind,
        first=first,
        notes=[*notes, *_first_note(first, len(chosen))],
    )


def _first_note(first: int, count: int) -> list[str]:
    note = f"The last {count} of {first + count} outputs are explained."
    return [note] if first else []


def explanation_bytes(model: nn.Module, inputs: ModelInputs, max_outputs: int = MAX_OUTPUTS) -> int:
    """Return about how much memory `explain_sequence` needs, before it runs."""
    steps, lengths = find_sublayers(model), side_lengths(model, inputs)
    side = list(find_sides(model))[-1]
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
    row = _row_bytes(model, inputs)
    return item * (maps + 3 * pieces + 2 * read) + max(row, min(CHUNK_BYTES, MAX_BASELINES * row))


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


def _input_contributions(
    model: nn.Module,
    inputs: ModelInputs,
    metric: "_Metric",
    steps: int,
    special: Mapping[str, Collection[int]],
) -> tuple[dict[str, Tensor], float, int]:
    """Return the contributions to every output, by how much they miss their sum, and the draws.

    They are the mean of integrated gradients from several random texts of the same length (expected
    gradients: Erion et al. 2021): a model answers anything for a mean embedding, which it has never
    read. A row of a batch is about one output and one draw. Outputs whose contributions do not sum
    up are integrated again with twice the nodes.
    """
    count, row_bytes = len(metric.chosen), _row_bytes(model, inputs)
    draws = _affordable_draws(model, inputs, count)
    texts = _random_texts(model, inputs, draws, special)
    totals: dict[str, Tensor] = {}
    errors, sizes = (torch.zeros(count, dtype=torch.float64) for _ in range(2))
    outputs = torch.arange(count)
    while True:
        for each in (errors, sizes, *totals.values()):
            each[outputs] = 0
        pairs = torch.cartesian_prod(outputs, torch.arange(draws))
        for part in torch.split(pairs, max(1, CHUNK_BYTES // row_bytes)):
            rows, start = part[:, 0], {side: ids[part[:, 1]] for side, ids in texts.items()}
            many = _repeat(inputs, len(part))
            result = integrated_gradients(model, many, metric.at(rows), baseline=start, steps=steps)
            for side, each in result.contributions.items():
                total = totals.setdefault(side, each.new_zeros(count, each.shape[1]))
                total.index_add_(0, rows, each / draws)
            errors.index_add_(0, rows, result.row_errors() / draws)
            change = (result.values - result.baselines).abs().double()
            sizes.index_add_(0, rows, change / draws)
        doubtful = errors.abs() > TOLERANCE * sizes.clamp(min=1)
        outputs, steps = doubtful.nonzero()[:, 0], 2 * steps
        work = _row_work(model, inputs) * len(outputs) * draws * steps
        if not len(outputs) or steps > MAX_NODES or work > WORK:
            return totals, float(errors[errors.abs().argmax()]), draws


@dataclass(frozen=True)
class _Metric:
    """The number of each output that is taken apart."""

    chosen: Tensor
    first: int
    pooled: bool

    def at(self, outputs: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the metric of a batch whose rows are about these outputs."""
        batch, chosen = torch.arange(len(outputs)), self.chosen[outputs]

        def metric(logits: Tensor) -> Tensor:
            if not self.pooled:
                return logits[batch, self.first + outputs, chosen]
            count, value = logits.shape[-1], logits[batch, chosen]
            if count == 1:
                return value
            return (value - logits.mean(dim=-1)) * (count / (count - 1))  # minus the others' mean

        return metric


def _repeat(inputs: ModelInputs, count: int) -> ModelInputs:
    if isinstance(inputs, Tensor):
        return inputs.expand(count, *inputs.shape[1:])
    if isinstance(inputs, Mapping):
        return {name: each.expand(count, *each.shape[1:]) for name, each in inputs.items()}
    return [each.expand(count, *each.shape[1:]) for each in inputs]


def _random_texts(
    model: nn.Module, inputs: ModelInputs, draws: int, special: Mapping[str, Collection[int]]
) -> dict[str, Tensor]:
    """Return of each side random tokens in place of the inputs', special ones kept, (draws, n)."""
    generator = torch.Generator().manual_seed(0)
    texts = {}
    for side, ids in zip(find_sides(model), as_tensors(inputs), strict=False):
        embedding, fixed = token_embedding(model, side), set(special.get(side, ()))
        if embedding is None:
            raise InputError("an explanation of a sequence needs a model that reads token ids.")
        usual = torch.tensor([i for i in range(embedding.vocab) if i not in fixed] or [0])
        drawn = usual[torch.randint(len(usual), (draws, ids.shape[1]), generator=generator)]
        kept = torch.isin(ids, torch.tensor(sorted(fixed), dtype=ids.dtype))
        texts[side] = torch.where(kept, ids, drawn.to(ids.dtype))
    return texts


def _affordable_draws(model: nn.Module, inputs: ModelInputs, outputs: int) -> int:
    """Return how many random texts to compare with: fewer for large models and many outputs."""
    affordable = WORK // (_row_work(model, inputs) * outputs * STEPS)
    return max(MIN_BASELINES, min(MAX_BASELINES, affordable))


def _row_work(model: nn.Module, inputs: ModelInputs) -> int:
    """Return about how many multiplications one row needs: the weights, and the attention."""
    lengths = side_lengths(model, inputs)
    size, longest = sum(each.numel() for each in model.parameters()), max(lengths.values())
    steps = find_sublayers(model)
    mixing = sum(step.box.place.width * longest for step in steps if step.heads)
    return (size + 2 * mixing) * sum(lengths.values())


def _row_bytes(model: nn.Module, inputs: ModelInputs) -> int:
    """Return about how much memory one row of a pass with gradients needs."""
    lengths, item = side_lengths(model, inputs), next(model.parameters()).element_size()
    row = 0
    for step in find_sublayers(model):
        output = getattr(step.sublayer, "output", None)  # a product-key memory has none
        inner = output.in_features if isinstance(output, nn.Linear) else step.box.place.width
        row += lengths[step.side] * (6 * step.box.place.width + 4 * inner)
    vocab = getattr(model.config, "vocab", 0) or 0
    row += 3 * list(lengths.values())[-1] * int(vocab)
    return item * row
