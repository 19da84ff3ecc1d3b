"""Pictures of the atlas: gradients by depth, dependency maps, activations, position scores."""

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from addnorm.layers.feedforward import FEEDFORWARDS
from addnorm.layers.positions import POSITIONS, Positions, Rotary
from addnorm.lens.positions import position_vectors, rotary_scores
from addnorm.report import heat_map, line_chart
from addnorm.report.svg import Picture, Svg
from website.atlas_measure import Profile

PANEL, GAP, SHADES = 200, 26, 10
LENGTH, WIDTH, HEADS = 48, 64, 4


def gradient_picture(name: str, profiles: Sequence[Profile]) -> Svg:
    """Return the gradient of each block at each depth, against its place in the stack."""
    series = {
        f"{each.depth} blocks": [
            ((block + 0.5) / each.depth, gradient) for block, gradient in enumerate(each.gradients)
        ]
        for each in profiles
    }
    return line_chart(
        series,
        title=f"{name}: gradient by depth",
        x="place in the stack, 0 the first block, 1 the last",
        y="norm of the gradient",
        log_y=True,
    )


def dependency_picture(name: str, profiles: Sequence[Profile]) -> Svg:
    """Return one map for each depth: rows the stream after a block, columns input and blocks."""
    width = len(profiles) * (PANEL + GAP) + GAP
    picture = Picture(
        width, PANEL + 66, f"{name}: dependency", "Share of each block in the stream."
    )
    for number, each in enumerate(profiles):
        left = GAP + number * (PANEL + GAP)
        picture.text(left, 16, f"{each.depth} blocks", "name")
        first = "input" if each.is_followed else "all before"
        if each.shares and all(math.isfinite(v) for row in each.shares for v in row):
            _draw_shares(picture, each.shares, left, 26)
        else:
            reason = "not finite" if each.shares else "no shortcut"
            picture.text(left + PANEL / 2, 26 + PANEL / 2, reason, "label", "middle")
        picture.rect(left, 26, PANEL, PANEL, "frame")
        picture.text(left, PANEL + 42, f"{first}, then block after block →", "tick")
    picture.text(14, 26 + PANEL / 2, "after each block ↓", "tick", "middle", turn=-90)
    picture.text(
        GAP, PANEL + 58, "strong colour: a large share of the variance (shade: its root)", "tick"
    )
    return picture.close()


def _draw_shares(picture: Picture, shares: list[list[float]], left: float, top: float) -> None:
    across, down = PANEL / len(shares[0]), PANEL / len(shares)
    sheets: dict[int, list[str]] = {}
    for r, row in enumerate(shares):
        c = 0
        shades = [round(SHADES * math.sqrt(min(1.0, max(0.0, value)))) for value in row]
        for shade, alike in groupby(shades):
            count = len(list(alike))
            sheets.setdefault(shade, []).append(f"M{c} {r}h{count}")
            c += count
    transform = f"translate({left:g} {top + down / 2:.2f}) scale({across:.3f} {down:.3f})"
    picture.parts.append(f'<g transform="{transform}" shape-rendering="crispEdges">')
    for shade, steps in sorted(sheets.items()):
        if shade:
            picture.path("".join(steps), "sheet plus", opacity=shade / SHADES)
    picture.parts.append("</g>")


def activation_picture(name: str) -> Svg:
    """Return the activation of a feed-forward network and its derivative."""
    x = torch.linspace(-4, 4, 81, requires_grad=True)
    y = FEEDFORWARDS[name][1](x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    points = x.detach().tolist()
    series = {
        "σ(x)": list(zip(points, y.detach().tolist(), strict=True)),
        "derivative": list(zip(points, slope.tolist(), strict=True)),
    }
    return line_chart(series, title=f"{name}: activation", x="x", y="σ(x)")


def score_picture(name: str) -> Svg | None:
    """Return what a scheme contributes to the scores of all pairs; None if it is nothing.

    Added to the embedding: the dot products of the vectors over the width. Rotations: the score
    of equal queries and keys. Biases: their mean over the heads, with new weights and one random
    query for all positions.
    """
    torch.manual_seed(0)
    options = {"length": LENGTH} if name in ("index", "learned") else {}
    scheme = POSITIONS[name](WIDTH, HEADS, WIDTH // HEADS, options.get("length", 512), False)
    scores = scores_of(scheme)
    if scores is None or not scores.abs().max():
        return None
    names = [str(position) if position % 6 == 0 else "" for position in range(LENGTH)]
    return heat_map(
        scores.tolist(), names, names, title=f"{name}: scores", x="key position", y="query position"
    )


@torch.no_grad()
def scores_of(scheme: Positions) -> Tensor | None:
    """Return what a scheme contributes to the scores, (query, key)."""
    if isinstance(scheme, Rotary):
        return rotary_scores(scheme, LENGTH)
    if scheme.has_bias:
        places = torch.arange(LENGTH)
        queries = torch.randn(1, HEADS, 1, WIDTH // HEADS).expand(-1, -1, LENGTH, -1)
        local = scheme.local(WIDTH, HEADS, WIDTH // HEADS)
        bias = scheme.bias(queries, places, places, local, (WIDTH // HEADS) ** -0.5)
        return None if bias is None else bias.mean((0, 1))
    vectors = position_vectors(scheme, LENGTH, WIDTH)
    return vectors @ vectors.T / WIDTH
