"""An explanation of one sequence: everything the lens shows, with tokens as text.

For every output position: its probabilities, the pieces that its logit is the sum of, what the
model would predict after each layer, and the contribution of every input token; and all attention
maps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.lens.attention import head_statistics
from addnorm.lens.attribution import Attribution, integrated_gradients
from addnorm.lens.look import look
from addnorm.lens.places import ModelInputs, as_tensors, find_sides, require_eval
from addnorm.lens.readout import LensTable, LogitAttribution, attribute_logits, logit_lens
from addnorm.lens.stream import decompose

if TYPE_CHECKING:
    from addnorm.report import Page

MOST_PROBABLE = -1
"""As a target: the most probable output of the position."""
TOP = 5
"""Outputs that are listed for each position."""


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
        Sum of the contributions minus its known value, over all positions.
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

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the maps as plain values, for JSON."""
        names, values = self.pieces
        places, table = self.layers
        return {
            "title": self.title,
            "tokens": self.tokens,
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
            "heads": self.statistics,
            "completeness": self.completeness,
            "notes": self.notes,
        }

    def page(self) -> "Page":
        """Return an interactive HTML page."""
        from addnorm.lens.page import sequence_page

        return sequence_page(self)

    def _repr_html_(self) -> str:
        return self.page()._repr_html_()

    def __str__(self) -> str:
        lines = [self.title]
        for p, (output, probability) in enumerate(
            zip(self.outputs, self.probabilities, strict=True)
        ):
            inputs = ", ".join(f"{token} {value:+.2f}" for _, token, value in self.top_inputs(p, 3))
            pieces = ", ".join(f"{name} {value:+.2f}" for name, value in self.top_pieces(p, 2))
            lines.append(f"{output:<12} {probability:6.1%}  from {inputs}; by {pieces}")
        lines.append(f"completeness: the contributions are off by {self.completeness:+.2g} logits")
        return "\n".join(lines)


def explain_sequence(
    model: nn.Module,
    inputs: ModelInputs,
    *,
    tokens: Mapping[str, Sequence[str]],
    name_of: Callable[[int], str],
    targets: Sequence[int] | None = None,
    title: str = "",
    steps: int = 16,
    temperature: float = 1.0,
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
        Nodes of the integrated gradients.
    temperature
        Divisor of all logits, as of a calibrated classifier.
    """
    require_eval(model, "explain_sequence")
    if len(as_tensors(inputs)[0]) != 1:
        raise InputError("one sequence is explained at a time: pass a batch of one row.")
    seen = look(model, inputs)
    parts = decompose(model, inputs)
    logits = seen.output[0] if seen.output.ndim == 3 else seen.output  # (positions, outputs)
    logits = logits / temperature
    pooled = seen.output.ndim == 2
    chosen = logits.argmax(dim=-1)
    if targets is not None:
        target_ids = torch.tensor(list(targets))
        if target_ids.shape != chosen.shape:
            raise InputError(
                f"there must be {len(chosen)} targets, one a position: got {len(target_ids)}."
            )
        chosen = torch.where(target_ids == MOST_PROBABLE, chosen, target_ids)
    pieces = attribute_logits(parts, chosen if pooled else chosen[None])
    layers = logit_lens(model, inputs)
    inputs_of = _input_contributions(model, inputs, chosen, pooled, steps)
    probabilities = logits.softmax(dim=-1)
    ids = as_tensors(inputs)[-1]
    square = {n: m for n, m in seen.maps.items() if m.shape[-1] == ids.shape[1]}
    side = list(find_sides(model))[-1]
    mine = {n: m for n, m in square.items() if n.startswith(side)}
    heads = head_statistics(mine, ids) if ids.ndim == 2 else None
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
        maps={name: each[0] for name, each in seen.maps.items()},
        statistics=summary,
        pieces=_pieces(pieces, pooled, temperature),
        layers=_layers(layers, pooled, name_of, temperature),
        contributions={side: each / temperature for side, each in inputs_of.contributions.items()},
        completeness=inputs_of.completeness / temperature,
    )


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
    model: nn.Module, inputs: ModelInputs, chosen: Tensor, pooled: bool, steps: int
) -> Attribution:
    """Return the contributions to every output position: row p of a batch is about position p."""
    count = len(chosen)
    rows = torch.arange(count)
    if isinstance(inputs, Tensor):
        many: ModelInputs = inputs.expand(count, *inputs.shape[1:])
    elif isinstance(inputs, Mapping):
        many = {name: each.expand(count, *each.shape[1:]) for name, each in inputs.items()}
    else:
        many = [each.expand(count, *each.shape[1:]) for each in inputs]

    def metric(output: Tensor) -> Tensor:
        return output[rows, chosen] if pooled else output[rows, rows, chosen]

    return integrated_gradients(model, many, metric, steps=steps)
