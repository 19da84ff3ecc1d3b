"""A drawing of any model: its blocks with the Add & Norm boxes where they really are.

The graph of operations (box_graph) is laid out from the bottom to the top, as in the figure of
Vaswani et al. 2017. Blocks with the same graph are drawn once, with their number.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from addnorm.config import Config, ModelConfig
from addnorm.models.box_graph import Graph, Node, SideGraph, short_number, trace_side
from addnorm.models.build import build, model_config
from addnorm.models.part_graphs import (
    TABLE_TITLES,
    table_model_of,
    trace_recurrent,
    trace_table,
)
from addnorm.models.size import cost
from addnorm.models.tabular import TabularModel
from addnorm.presets import find
from addnorm.report.svg import Picture, Svg, shorten

NODE_WIDTH, NODE_HEIGHT, CORNER, ROW_GAP = 212, 40, 10, 16
COLUMN, PICTURE_MARGIN, LANE, ASIDE = 268, 24, 15, 66
"""Sizes in pixels: of nodes; distance of two streams, margin, distance of two shortcuts, width of a
factor on a shortcut."""
SPLIT, FRAME_BELOW = 11, 15
"""How far below the first node of a block its shortcuts leave the stream, and its frame ends."""


def _height(node: Node) -> float:
    sizes = {"add": 2 * CORNER, "factor": 22, "norm": 24, "mix": 26}
    return sizes.get(node.kind, 26 + 14 * len(node.detail.splitlines()))


def _place(graph: Graph) -> float:
    """Give every node its distance from the bottom; return the height of the column."""
    bottom = 0.0
    group = 0
    waiting: list[Node] = []  # factors on a shortcut, which stand beside the next branch
    for node in graph.nodes:
        if node.aside:
            waiting.append(node)
            continue
        if node.group != group:
            bottom += 20  # room for the frame of a group
            group = node.group
        node.row = round(bottom)
        for factor in waiting if node.kind == "branch" else ():
            factor.row = round(bottom + (_height(node) - _height(factor)) / 2)
        waiting = [] if node.kind == "branch" else waiting
        bottom += _height(node) + ROW_GAP
    return bottom


def draw(
    config: Config | ModelConfig | str | Path,
    length: int | None = None,
    model: nn.Module | None = None,
) -> Svg:
    """Return a drawing of a model: blocks, Add & Norm boxes, shapes, parameters, operations.

    Parameters
    ----------
    config
        A configuration, the name of a preset, a TOML file or the directory of a model or run.
    length
        Positions for the operations; the configured length by default. A table's are its columns.
    model
        The model of the configuration, if there is one; otherwise it is built without weights. The
        columns of a table are drawn from its model only.

    >>> picture = draw("gpt2")
    >>> "Masked self-attention 12 × 64" in picture, "× 12" in picture
    (True, True)
    """
    if isinstance(config, str | Path):
        config = find(config)
    c = model_config(config)
    if isinstance(model, TabularModel):
        return _draw_table(model)
    if isinstance(config, Config) and config.run.task == "table":
        return _draw_table_kind(c, config.table.model)
    costs = cost(c, length)
    about = [
        f"{costs.parameters:,} parameters · {short_number(costs.forward, 'FLOP')} forward",
        f"stream (batch, {costs.length}, {c.width})",
    ]
    if c.mixing == "recurrent":
        about[1] = f"states (batch, {c.width}), annotations (batch, {costs.length}, {c.width})"
        return _draw_sides("encoder-decoder, recurrent", about, trace_recurrent(c, costs))
    if model is None:
        with torch.device("meta"):
            model = build(c)
    heads = {
        "token": f"Logits of {c.output_vocab:,} tokens",
        "masked": f"Logits of {c.output_vocab:,} tokens",
        "class": f"{c.outputs} classes",
        "number": f"{c.outputs} numbers",
        "none": "",
    }
    sides = []
    for name in c.sides:
        side = getattr(model, name)
        is_last = name == c.sides[-1]
        sides.append(
            (name, trace_side(c, name, side.stack, costs, heads[c.head] if is_last else ""))
        )
    arrangement = " / ".join(dict.fromkeys(c.arrangements[name][0] for name, _ in sides))
    return _draw_sides(f"{c.mode}, {arrangement}", about, sides)


def _draw_table(model: TabularModel) -> Svg:
    config = model.config
    title = f"{TABLE_TITLES[config.kind]}, {config.trunk.addnorm}"
    each = f" in {config.folds} models, one of which is drawn" if config.folds > 1 else ""
    stream = f"stream (rows, {config.columns} columns, {config.trunk.width})"
    about = [f"{model.count():,} parameters{each}", stream]
    return _draw_sides(title, about, [("encoder", trace_table(model))])


def _draw_table_kind(c: ModelConfig, kind: str) -> Svg:
    """Return the drawing of a kind of model for tables, without a table."""
    with torch.device("meta"):
        model = table_model_of(c, kind)
    about = ["parameters depend on the table", f"stream (rows, columns, {c.width})"]
    graph = trace_table(model, is_known=False)
    return _draw_sides(f"{TABLE_TITLES[kind]}, {c.addnorm}", about, [("encoder", graph)])


def _draw_sides(title: str, about: Sequence[str], sides: list[tuple[str, SideGraph]]) -> Svg:
    """Return the picture of graphs side by side, under a title and lines about the model."""
    heights = [_place(side.graph) for _, side in sides]
    widths = [
        (1 + max(node.column for node in side.graph.nodes)) * COLUMN + LANE + _left_of(side)
        for _, side in sides
    ]
    top = 76
    height, width = (
        max(heights) + top + PICTURE_MARGIN,
        sum(widths) + PICTURE_MARGIN + 60 * (len(sides) - 1),
    )
    picture = Picture(max(width, 300), height, title, about[0])
    picture.text(PICTURE_MARGIN, 26, title, "name")
    for number, line in enumerate(about):
        picture.text(PICTURE_MARGIN, 44 + 16 * number, line, "tick")
    left = float(PICTURE_MARGIN)
    ends: dict[str, tuple[float, float]] = {}
    for (name, side), span in zip(sides, widths, strict=True):
        x = left + _left_of(side) + NODE_WIDTH / 2
        _draw_side(picture, side, x, height - PICTURE_MARGIN, ends.get("encoder"))
        last = side.graph.nodes[-1]
        ends[name] = (x + last.column * COLUMN, height - PICTURE_MARGIN - last.row - _height(last))
        left += span + 60
    return picture.close()


def _left_of(side: SideGraph) -> float:
    """Return the room for shortcuts at the left of the first stream, with factors if it has any."""
    return 3 * LANE + (ASIDE if any(node.aside for node in side.graph.nodes) else 0)


def _draw_side(
    picture: Picture,
    side: SideGraph,
    x: float,
    floor: float,
    memory: tuple[float, float] | None,
) -> None:
    """Draw one side with its bottom at `floor` and its first stream at x."""
    nodes = side.graph.nodes
    for group, text in side.groups.items():
        inside = [node for node in nodes if node.group == group]
        if not inside:
            continue
        high = floor - max(node.row + _height(node) for node in inside) - 10
        low = floor - min(node.row for node in inside) + FRAME_BELOW
        edge = x - NODE_WIDTH / 2 - _left_of(side)
        wide = max(node.column for node in inside) * COLUMN + NODE_WIDTH + _left_of(side) + LANE
        picture.rect(edge, high, wide, low - high, "frame", round_by=8)
        picture.text(edge + 6, high + 14, text, "mark")
    lanes = _lanes(nodes)
    for number, node in enumerate(nodes):
        for source in node.inputs:
            _draw_edge(picture, nodes, number, source, x, floor, lanes)
        if node.role == "memory" and memory is not None:
            y = floor - node.row - _height(node) / 2
            edge = x + node.column * COLUMN - NODE_WIDTH / 2
            bend = x - NODE_WIDTH / 2 - _left_of(side) - 1.2 * LANE
            start = f"M{memory[0]:.1f} {memory[1]:.1f}V{memory[1] - 14:.1f}"
            path = f"{start}H{bend:.1f}V{y:.1f}H{edge:.1f}"
            picture.path(path, "curve c4", "the output of the encoder")
            _arrow(picture, edge, y, "right", "c4")
    for node in nodes:
        _draw_node(picture, node, _centre(node, x), floor - node.row)


def _lanes(nodes: Sequence[Node]) -> dict[Node, int]:
    """Return the lane of each node's shortcut, so that no two at the same height share one."""
    spans = {
        source: (
            source.row,
            max(
                (n.row for n in nodes if source in n.inputs and n.column == source.column),
                default=source.row,
            ),
        )
        for source in nodes
    }
    lanes: dict[Node, int] = {}
    for source, (low, high) in spans.items():
        others = {
            lane
            for other, lane in lanes.items()
            if spans[other][0] < high and low < spans[other][1] and _bypasses(nodes, other)
        }
        lanes[source] = next(n for n in range(len(nodes)) if n not in others)
    return lanes


def _bypasses(nodes: Sequence[Node], source: Node) -> bool:
    """Return whether something of its column lies between a node and one that reads it."""
    return any(
        source.row < other.row < node.row and other.column == source.column and not other.aside
        for node in nodes
        if source in node.inputs
        for other in nodes
    )


def _centre(node: Node, x: float) -> float:
    """Return the middle of a node, where the first stream is at x."""
    if node.aside:
        return x - NODE_WIDTH / 2 - LANE - ASIDE / 2
    return x + node.column * COLUMN


def _draw_edge(
    picture: Picture,
    nodes: Sequence[Node],
    number: int,
    source: Node,
    x: float,
    floor: float,
    lanes: dict[Node, int],
) -> None:
    """Draw an arrow: straight to the next node, else around those between, in a lane of its own."""
    node = nodes[number]
    start = (_centre(source, x), floor - source.row - _height(source))
    end = (_centre(node, x), floor - node.row)
    turn = start[1] - 5
    if source.group != node.group and node.group:  # the stream splits inside the block
        first = min(other.row for other in nodes if other.group == node.group and not other.aside)
        turn = floor - first + SPLIT
    if node.aside:  # from the stream to the factor on its shortcut
        path = f"M{start[0]:.1f} {start[1]:.1f}V{turn:.1f}H{end[0]:.1f}V{end[1]:.1f}"
        picture.path(path, "curve c0", "shortcut")
        _arrow(picture, end[0], end[1], "up", "c0")
        return
    if source.aside:  # and from there to the sum
        middle = end[1] - _height(node) / 2
        path = f"M{start[0]:.1f} {start[1]:.1f}V{middle:.1f}H{end[0] - CORNER:.1f}"
        picture.path(path, "curve c0", "shortcut")
        _arrow(picture, end[0] - CORNER, middle, "right", "c0")
        return
    between = [
        other
        for other in nodes
        if source.row < other.row < node.row and other.column == source.column and not other.aside
    ]
    if source.column == node.column and not between:
        picture.path(f"M{start[0]:.1f} {start[1]:.1f}V{end[1]:.1f}", "curve c5")
        _arrow(picture, end[0], end[1], "up", "c5")
        return
    middle = end[1] - _height(node) / 2
    half = CORNER if node.kind == "add" else NODE_WIDTH / 2
    if source.column == node.column:
        side = start[0] - NODE_WIDTH / 2 - (0.8 + min(lanes[source], 2)) * LANE
        path = (
            f"M{start[0]:.1f} {start[1]:.1f}V{turn:.1f}H{side:.1f}V{middle:.1f}H{end[0] - half:.1f}"
        )
        picture.path(path, "curve c0", "shortcut")
        _arrow(picture, end[0] - half, middle, "right", "c0")
        return
    to_right = node.column > source.column
    edge = end[0] - half if to_right else end[0] + half
    beside = NODE_WIDTH / 2 + (10 if source.kind == "branch" else 20)
    side = start[0] + beside if to_right and between else start[0]
    path = f"M{start[0]:.1f} {start[1]:.1f}V{turn:.1f}H{side:.1f}V{middle:.1f}H{edge:.1f}"
    picture.path(path, "curve c2", "second stream")
    _arrow(picture, edge, middle, "right" if to_right else "left", "c2")


def _arrow(picture: Picture, x: float, y: float, way: str, colour: str) -> None:
    steps = {"up": "m-4 7l4 -7l4 7", "right": "m-7 -4l7 4l-7 4", "left": "m7 -4l-7 4l7 4"}[way]
    picture.path(f"M{x:.1f} {y:.1f}{steps}", f"curve {colour}")


CLASSES = {
    "input": "c5",
    "output": "c5",
    "branch": "c0",
    "norm": "c4",
    "factor": "c3",
    "mix": "c2",
}
"""Colour of each kind of node."""


def _draw_node(picture: Picture, node: Node, x: float, bottom: float) -> None:
    height = _height(node)
    top = bottom - height
    if node.kind == "add":
        picture.dot(x, bottom - CORNER, CORNER, "ring", "addition")
        picture.text(x, bottom - CORNER + 4.5, "+", "name", "middle")
        return
    width = ASIDE if node.aside else 96 if node.kind == "factor" else NODE_WIDTH
    tip = " · ".join([node.label, *node.detail.splitlines()])
    left = x - width / 2
    picture.rect(left, top, width, height, "box", round_by=6)
    picture.rect(left, top, width, height, f"curve {CLASSES[node.kind]}", tip, round_by=6)
    two = bool(node.detail) and height >= NODE_HEIGHT
    line = top + (16 if two else height / 2 + 4)
    picture.text(x, line, shorten(node.label, width - 6, 11), "value", "middle")
    for number, text in enumerate(node.detail.splitlines() if two else ()):
        picture.text(x, top + 31 + 14 * number, shorten(text, width - 6, 9.5), "tick", "middle")
