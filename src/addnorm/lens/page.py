"""The page of an explanation: one HTML file in which to choose a word, a layer and a head."""

import base64
import math
from typing import Any

import torch
from torch import Tensor

from addnorm.lens.attention import STATISTICS
from addnorm.lens.explanation import SequenceExplanation
from addnorm.lens.page_script import PAGE_SCRIPT, PAGE_STYLE
from addnorm.report import Page, heat_map

MAX_MAP_BYTES = 500_000
"""Maps beyond this size are shown as the mean of their heads, then of their layers."""
MAX_PAGE_TOKENS = 256
"""Tokens of a side that the page shows: the first of an encoder, the last of a decoder."""
MAX_PICTURE_TOKENS = 48
"""Longest axis of the picture that needs no scripts."""
SHOWN_PIECES = 14
"""Pieces of a logit that are listed; the rest are summed."""


def sequence_page(explanation: SequenceExplanation) -> Page:
    """Return the page of an explanation."""
    page = Page("Why this output", explanation.title)
    for note in (*explanation.notes, *_window_notes(explanation)):
        page.remark(note)
    page.section("Words, layers and heads" if explanation.image is None else "Patches and layers")
    page.text(_introduction(explanation))
    data, averaged = page_data(explanation)
    page.widget(PAGE_SCRIPT, data, PAGE_STYLE)
    if averaged and data["maps"]:
        page.remark(f"The maps are large: the mean over {averaged} is shown.", "note")
    elif averaged:
        page.remark("The maps are too large for a page. Ask lens.look for some of them.", "note")
    alignment = explanation.alignment()
    if alignment:
        page.section("Alignment")
        page.table(
            ["output", "rests on", "contribution", "attends to", "weight"],
            [
                [each.output, each.source, each.contribution, each.attended, each.weight]
                for each in alignment
            ],
            "For each output, the source token that contributes most to its logit, and the one "
            "with the largest attention weight (mean over heads and layers).",
        )
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
        f"The contributions of the input words sum to the difference of each {explanation.kind} "
        f"from its mean over {explanation.baseline}; completeness: their sum is off by "
        f"{explanation.completeness:+.2g} at most."
        if explanation.image is None
        else f"The contributions of the patches sum to the difference of the {explanation.kind} "
        f"from that of {explanation.baseline}; completeness: their sum is off by "
        f"{explanation.completeness:+.2g}."
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
    if not explanation.maps:
        return page
    last = list(explanation.maps)[-1]
    rows, columns = axes_of(explanation, last)
    if max(len(rows), len(columns)) > MAX_PICTURE_TOKENS:
        return page
    page.section("Attention, without scripts")
    picture = heat_map(
        explanation.maps[last].mean(dim=0).tolist(), rows, columns, title=f"Mean of {last}", low=0.0
    )
    page.figure(picture, f"The mean over the heads of {last}: from each row to each column.")
    return page


def _introduction(explanation: SequenceExplanation) -> str:
    """Return what the page shows and how to use it."""
    kind, is_image = explanation.kind, explanation.image is not None
    parts = [
        "The patches of the image are"
        if is_image
        else "Choose an output word: the input words are",
        f"shaded by their contribution to its {kind} (integrated gradients)",
    ]
    text = " ".join(parts)
    if explanation.pieces[0]:
        text += (
            f", the bars show the pieces that the {kind} is the exact sum of, and the table what "
            "the model would predict after each layer"
        )
    one = "a patch" if is_image else "an input word"
    text += f". Point at {one} for its contribution and for the attention to it."
    if explanation.maps:
        text += " Below, choose a layer and a head and point at a cell."
    return text


def axes_of(explanation: SequenceExplanation, place: str) -> tuple[list[str], list[str]]:
    """Return the tokens of the queries and of the keys of a map.

    Queries of encoder-decoder attention are named by what is written there.
    """
    side = place.split(".")[0]
    queries = keys = explanation.tokens.get(side) or next(iter(explanation.tokens.values()))
    if place.endswith(".memory"):
        keys = explanation.tokens["encoder"]
        before = explanation.tokens["decoder"][1 : explanation.first + 1]
        queries = [f"→ {output}" for output in (*before, *explanation.outputs)]
    count = explanation.maps[place].shape
    return queries[: count[1]], keys[: count[2]]


def _window(explanation: SequenceExplanation, side: str) -> slice:
    """Return the positions of a side that the page shows."""
    count = len(explanation.tokens[side])
    if explanation.image is not None:  # a picture is shown whole
        return slice(0, count)
    return (
        slice(0, MAX_PAGE_TOKENS)
        if side == "encoder"
        else slice(max(0, count - MAX_PAGE_TOKENS), count)
    )


def _window_notes(explanation: SequenceExplanation) -> list[str]:
    return [
        f"The page shows {MAX_PAGE_TOKENS} of the {len(tokens)} tokens of the {side}."
        for side, tokens in explanation.tokens.items()
        if len(tokens) > MAX_PAGE_TOKENS and explanation.image is None
    ]


def page_data(explanation: SequenceExplanation) -> tuple[dict[str, Any], str]:
    """Return what the page's script reads, and what was averaged to save space: heads, layers."""
    windows = {side: _window(explanation, side) for side in explanation.tokens}
    tables, axes = {}, {}
    for place, each in explanation.maps.items():
        side = place.split(".")[0]
        rows = windows.get(side, slice(None))
        columns = windows["encoder"] if place.endswith(".memory") else rows
        tables[place] = each[:, rows, columns]
        queries, keys = axes_of(explanation, place)
        axes[place] = {"rows": queries[rows], "columns": keys[columns], "start": rows.start or 0}
    averaged = ""
    if sum(each.numel() for each in tables.values()) > MAX_MAP_BYTES:
        averaged = "heads"
        tables = {place: each.mean(dim=0, keepdim=True) for place, each in tables.items()}
    if sum(each.numel() for each in tables.values()) > MAX_MAP_BYTES:
        averaged, tables, axes = "heads and layers", *_mean_of_layers(tables, axes)
    if sum(each.numel() for each in tables.values()) > 2 * MAX_MAP_BYTES:
        tables = {}
    maps = [
        {"name": place, "heads": len(table), **axes[place], "data": _encode_weights(table)}
        for place, table in tables.items()
    ]
    names, values = explanation.pieces
    return {
        "kind": explanation.kind,
        "first": explanation.first,
        "pooled": explanation.first + len(explanation.outputs)
        < len(list(explanation.tokens.values())[-1]),
        "tokens": {side: tokens[windows[side]] for side, tokens in explanation.tokens.items()},
        "starts": {side: windows[side].start for side in explanation.tokens},
        "outputs": explanation.outputs,
        "probabilities": [
            None if math.isnan(p) else round(p, 4) for p in explanation.probabilities
        ],
        "contributions": {
            side: _rounded(each[:, windows[side]])
            for side, each in explanation.contributions.items()
        },
        "pieces": [
            _strongest(names, values[:, p], explanation.kind)
            for p in range(len(explanation.outputs))
        ],
        "layers": {
            "names": explanation.layers[0],
            "cells": [
                [[[name, round(p, 3)] for name, p in cell] for cell in row]
                for row in explanation.layers[1]
            ],
        },
        "maps": maps,
        "image": _image_data(explanation),
    }, averaged


def _image_data(explanation: SequenceExplanation) -> dict[str, Any] | None:
    """Return the picture and its grid of patches, or None."""
    view = explanation.image
    if view is None:
        return None
    height, width = view.pixels.shape[:2]
    return {**vars(view.grid), "uri": view.uri(), "width": width, "height": height}


def _mean_of_layers(
    tables: dict[str, Tensor], axes: dict[str, dict[str, Any]]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return one map for each side and role: the mean over the layers."""
    groups: dict[str, list[str]] = {}
    for place in tables:
        side, _, role = place.split(".")
        groups.setdefault(f"{side}.*.{role}", []).append(place)
    means = {
        name: torch.stack([tables[place] for place in places]).mean(dim=0)
        for name, places in groups.items()
    }
    return means, {name: axes[places[0]] for name, places in groups.items()}


def _encode_weights(weights: Tensor) -> str:
    """Return weights from 0 to 1 as bytes from 0 to 255, base64."""
    levels = (weights * 255).round().clamp(0, 255).to(torch.uint8)
    return base64.b64encode(levels.flatten().numpy().tobytes()).decode()


def _rounded(table: Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in table.tolist()]


def _strongest(names: list[str], values: Tensor, kind: str) -> list[tuple[str, float]]:
    """Return the strongest pieces, the sum of the rest, and the sum of all."""
    pairs = zip(names, values.tolist(), strict=True)
    ordered = sorted(pairs, key=lambda pair: -abs(pair[1]))
    shown, rest = ordered[:SHOWN_PIECES], ordered[SHOWN_PIECES:]
    if rest:
        shown.append((f"{len(rest)} others", sum(value for _, value in rest)))
    shown.append((f"sum: the {kind}", float(values.sum())))
    return [(name, round(value, 4)) for name, value in shown]
