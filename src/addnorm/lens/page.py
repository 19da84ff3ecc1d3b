"""The page of an explanation: one HTML file in which to choose a word, a layer and a head."""

import base64
from typing import Any

import torch
from torch import Tensor

from addnorm.lens.attention import STATISTICS
from addnorm.lens.explanation import SequenceExplanation
from addnorm.lens.page_script import PAGE_SCRIPT, PAGE_STYLE
from addnorm.report import Page, heat_map

MAX_MAP_BYTES = 1_000_000
"""Maps beyond this size are shown as the mean of their heads."""
SHOWN_PIECES = 14
"""Pieces of a logit that are listed; the rest are summed."""


def sequence_page(explanation: SequenceExplanation) -> Page:
    """Return the page of an explanation."""
    page = Page("Why this output", explanation.title)
    for note in explanation.notes:
        page.remark(note)
    page.section("Words, layers and heads")
    page.text(
        "Choose an output word: the input words are shaded by their contribution to its logit "
        "(integrated gradients), the bars show the pieces that the logit is the exact sum of, and "
        "the table what the model would predict after each layer. Below, choose a layer and a "
        "head and point at a cell."
    )
    data, shortened = page_data(explanation)
    page.widget(PAGE_SCRIPT, data, PAGE_STYLE)
    if shortened:
        page.remark("The maps are large: the mean over heads is shown.", "note")
    page.section("Outputs")
    page.table(
        ["output", "probability", "other candidates"],
        [
            [
                output,
                p,
                ", ".join(f"{name} {q:.0%}" for name, q in more if name != output and q >= 0.005),
            ]
            for output, p, more in zip(
                explanation.outputs, explanation.probabilities, explanation.candidates, strict=True
            )
        ],
    )
    page.text(
        "The contributions of the input words sum to each logit's difference from the baseline "
        "(the mean token embedding); over all outputs they are off by "
        f"{explanation.completeness:+.2g} logits."
    )
    if explanation.statistics:
        page.section("Heads")
        page.table(
            ["head", *STATISTICS],
            [
                [head, *(row[name] for name in STATISTICS)]
                for head, row in explanation.statistics.items()
            ],
        )
        page.text("; ".join(f"{name}: {what}" for name, what in STATISTICS.items()) + ".")
    last = list(explanation.maps)[-1]
    page.section("Attention, without scripts")
    rows, columns = axes_of(explanation, last)
    picture = heat_map(
        explanation.maps[last].mean(dim=0).tolist(), rows, columns, title=f"Mean of {last}", low=0.0
    )
    page.figure(picture, f"The mean over the heads of {last}: from each row to each column.")
    return page


def axes_of(explanation: SequenceExplanation, place: str) -> tuple[list[str], list[str]]:
    """Return the tokens of the queries and of the keys of a map.

    Queries of encoder-decoder attention are named by what is written there.
    """
    side = (
        place.split(".")[0]
        if place.split(".")[0] in explanation.tokens
        else next(iter(explanation.tokens))
    )
    queries = explanation.tokens[side]
    keys = queries
    if place.endswith(".memory"):
        keys = explanation.tokens["encoder"]
        queries = [f"→ {output}" for output in explanation.outputs]
    count = explanation.maps[place].shape
    return queries[: count[1]], keys[: count[2]]


def page_data(explanation: SequenceExplanation) -> tuple[dict[str, Any], bool]:
    """Return what the page's script reads, and whether heads were averaged to save space."""
    size = sum(each.numel() for each in explanation.maps.values())
    shortened = size > MAX_MAP_BYTES
    maps = []
    for place, each in explanation.maps.items():
        table = each.mean(dim=0, keepdim=True) if shortened else each
        rows, columns = axes_of(explanation, place)
        shape = {"heads": len(table), "rows": rows, "columns": columns}
        maps.append({"name": place, **shape, "data": _encode_weights(table)})
    names, values = explanation.pieces
    return {
        "tokens": explanation.tokens,
        "outputs": explanation.outputs,
        "probabilities": [round(p, 4) for p in explanation.probabilities],
        "contributions": {side: _rounded(each) for side, each in explanation.contributions.items()},
        "pieces": [_strongest(names, values[:, p]) for p in range(len(explanation.outputs))],
        "layers": {
            "names": explanation.layers[0],
            "cells": [
                [[[name, round(p, 3)] for name, p in cell] for cell in row]
                for row in explanation.layers[1]
            ],
        },
        "maps": maps,
    }, shortened


def _encode_weights(weights: Tensor) -> str:
    """Return weights from 0 to 1 as bytes from 0 to 255, base64."""
    levels = (weights * 255).round().clamp(0, 255).to(torch.uint8)
    return base64.b64encode(levels.flatten().numpy().tobytes()).decode()


def _rounded(table: Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in table.tolist()]


def _strongest(names: list[str], values: Tensor) -> list[tuple[str, float]]:
    """Return the strongest pieces, the sum of the rest, and the sum of all."""
    pairs = zip(names, values.tolist(), strict=True)
    ordered = sorted(pairs, key=lambda pair: -abs(pair[1]))
    shown, rest = ordered[:SHOWN_PIECES], ordered[SHOWN_PIECES:]
    if rest:
        shown.append((f"{len(rest)} others", sum(value for _, value in rest)))
    shown.append(("sum: the logit", float(values.sum())))
    return [(name, round(value, 4)) for name, value in shown]
