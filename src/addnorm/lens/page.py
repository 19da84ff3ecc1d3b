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


def sequence_page(found: SequenceExplanation) -> Page:
    """Return the page of an explanation."""
    page = Page("Why this output", found.title)
    for note in found.notes:
        page.remark(note)
    page.section("Look around")
    page.text(
        "Choose an output word: the input words are shaded by their share in its logit "
        "(integrated gradients), the bars show the pieces that the logit is the exact sum of, and "
        "the table what the model would have said after each layer. Below, choose a layer and a "
        "head and point at a cell."
    )
    data, shortened = page_data(found)
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
                found.outputs, found.probabilities, found.candidates, strict=True
            )
        ],
    )
    page.text(
        f"The shares of the input words add up to each logit's difference from the baseline (the "
        f"mean token embedding); over all outputs they are off by {found.completeness:+.2g} logits."
    )
    if found.statistics:
        page.section("Heads")
        page.table(
            ["head", *STATISTICS],
            [[head, *(row[name] for name in STATISTICS)] for head, row in found.statistics.items()],
        )
        page.text("; ".join(f"{name}: {what}" for name, what in STATISTICS.items()) + ".")
    last = list(found.maps)[-1]
    page.section("Attention, without scripts")
    rows, columns = axes_of(found, last)
    picture = heat_map(
        found.maps[last].mean(dim=0).tolist(), rows, columns, title=f"Mean of {last}", low=0.0
    )
    page.figure(picture, f"The mean over the heads of {last}: from each row to each column.")
    return page


def axes_of(found: SequenceExplanation, place: str) -> tuple[list[str], list[str]]:
    """Return the tokens of the queries and of the keys of a map.

    Queries of encoder-decoder attention are named by what is written there.
    """
    side = place.split(".")[0] if place.split(".")[0] in found.tokens else next(iter(found.tokens))
    queries = found.tokens[side]
    keys = queries
    if place.endswith(".memory"):
        keys = found.tokens["encoder"]
        queries = [f"→ {output}" for output in found.outputs]
    count = found.maps[place].shape
    return queries[: count[1]], keys[: count[2]]


def page_data(found: SequenceExplanation) -> tuple[dict[str, Any], bool]:
    """Return what the page's script reads, and whether heads were averaged to save space."""
    size = sum(each.numel() for each in found.maps.values())
    shortened = size > MAX_MAP_BYTES
    maps = []
    for place, each in found.maps.items():
        table = each.mean(dim=0, keepdim=True) if shortened else each
        rows, columns = axes_of(found, place)
        shape = {"heads": len(table), "rows": rows, "columns": columns}
        maps.append({"name": place, **shape, "data": _encode_weights(table)})
    names, values = found.pieces
    return {
        "tokens": found.tokens,
        "outputs": found.outputs,
        "probabilities": [round(p, 4) for p in found.probabilities],
        "shares": {side: _rounded(each) for side, each in found.shares.items()},
        "pieces": [_strongest(names, values[:, p]) for p in range(len(found.outputs))],
        "layers": {
            "names": found.layers[0],
            "cells": [
                [[[name, round(p, 3)] for name, p in cell] for cell in row]
                for row in found.layers[1]
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
