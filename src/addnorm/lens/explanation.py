"""An explanation of one sequence or image: everything the lens shows, with tokens as text.

For every output position: its probabilities, the pieces that its logit is the sum of, what the
model would predict after each layer, and the contribution of every input token; and all attention
maps. A recurrent model has no pieces and no layers to read; a convolution has no maps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from addnorm.lens.image import ImageView

if TYPE_CHECKING:
    from addnorm.report import Page


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
class Background:
    """What contributions start from, in place of random texts.

    Parameters
    ----------
    inputs
        Of each side, inputs of the shape of the one explained, (backgrounds, ...).
    name
        What they are, such as "the mean image".
    """

    inputs: Mapping[str, Tensor]
    name: str


@dataclass(frozen=True, kw_only=True)
class SequenceExplanation:
    """Why a model gives its output for one sequence or image.

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
    image
        What was read, if it was an image: its patches are the tokens.
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
    image: ImageView | None = None

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
            **({} if self.image is None else {"patches": vars(self.image.grid)}),
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
            by = f"; by {pieces}" if pieces else ""
            lines.append(f"{output:<12} {probability:6.1%}  from {inputs}{by}")
        lines.append(
            f"contributions to the {self.kind}, compared with {self.baseline}; completeness: their "
            f"sum is off by {self.completeness:+.2g} at most"
        )
        return "\n".join(lines)
