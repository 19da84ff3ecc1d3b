"""A drawing of any model: its blocks with the Add & Norm boxes where they really are.

No arrangement is drawn by hand. Each box's own `forward` is called with symbols in place of
tensors; a symbol records what is done with it (a norm, a branch, an addition, a factor), and the
recorded graph is laid out from the bottom to the top, as in the figure of Vaswani et al. 2017.
Blocks with the same graph are drawn once, with their number.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.config import Config, ModelConfig
from addnorm.errors import ConfigError
from addnorm.layers.addnorm import AddNorm, Combination, Ends, HyperConnections
from addnorm.layers.stack import Block, Stack
from addnorm.models.build import build, model_config
from addnorm.models.size import Cost, cost
from addnorm.presets import find
from addnorm.report.svg import Picture, Svg, shorten

NODE_WIDTH, NODE_HEIGHT, CORNER, ROW_GAP = 212, 40, 10, 16
COLUMN, PICTURE_MARGIN, LANE, ASIDE = 268, 24, 15, 66
"""Sizes in pixels: of nodes; distance of two streams, margin, distance of two shortcuts, width of a
factor on a shortcut."""
PARAMETER_SYMBOLS = {
    "omega": "ω",
    "scale": "s",
    "a": "a",
    "gain": "γ",
    "shortcut": "λ",
    "multiplier": "a",
    "bias_before": "b",
    "bias_after": "c",
}
"""What the formulas call the parameters of boxes."""
NORM_TITLES = {
    "layer": "LayerNorm",
    "rms": "RMSNorm",
    "rms-offset": "RMSNorm",
    "scale": "ScaleNorm",
}


@dataclass(eq=False)
class Node:
    """One operation: its kind, its text, and the nodes that it reads."""

    kind: str
    """input, branch, norm, add, factor, mix or output."""
    label: str
    inputs: list["Node"]
    detail: str = ""
    group: int = 0
    column: int = 0
    row: int = 0
    role: str = ""
    aside: bool = False
    """Whether it is drawn on the shortcut, at the left of the branch."""


@dataclass
class Graph:
    """The operations of one side in the order in which they happen."""

    nodes: list[Node] = field(default_factory=list)
    group: int = 0
    parameters: list[tuple[Tensor, str]] = field(default_factory=list)
    """Parameters of boxes, with their symbols."""

    def name_of(self, value: Any) -> str:
        """Return how a factor is written: a symbol for a parameter, or its number."""
        if isinstance(value, Tensor):
            return next((name for known, name in self.parameters if known is value), "w")
        return f"{value:.3g}"

    def add(self, kind: str, label: str, inputs: Sequence[Node], **more: Any) -> "Symbol":
        """Append an operation, and return its result."""
        node = Node(kind, label, list(inputs), group=self.group, **more)
        self.nodes.append(node)
        return Symbol(self, node)


class Symbol:
    """Stands for a tensor: what is computed with it is added to the graph."""

    shape = ()

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    def __add__(self, other: Any) -> "Symbol":
        if isinstance(other, Symbol):
            return self._sum(other)
        return self.graph.add("factor", f"+ {self.graph.name_of(other)}", [self.node])

    def _sum(self, other: "Symbol") -> "Symbol":
        # A sum of three is one circle with three arrows.
        if self.node.kind == "add" and self.node is self.graph.nodes[-1]:
            self.node.inputs.append(other.node)
            return self
        last = self.graph.nodes[-1]
        is_inner = self.node.kind == "add" and other.node is last and last.kind == "branch"
        if is_inner and self.node.inputs and not _readers(self.graph, self.node):
            self.graph.nodes.remove(self.node)
            self.graph.nodes.append(self.node)
            self.node.inputs.append(other.node)
            return self
        return self.graph.add("add", "+", [self.node, other.node])

    def __mul__(self, other: Any) -> "Symbol":
        return self.graph.add("factor", f"× {self.graph.name_of(other)}", [self.node])

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Any) -> "Symbol":
        return self.graph.add("factor", f"÷ {self.graph.name_of(other)}", [self.node])

    def expand(self, count: int, *shape: int) -> "Symbol":
        """Return copies, as the streams of hyper-connections start."""
        return self.graph.add("mix", f"{count} copies", [self.node])

    def sum(self, dim: int) -> "Symbol":
        """Return the sum of several streams."""
        return self.graph.add("mix", "sum of the streams", [self.node])


def _readers(graph: Graph, node: Node) -> list[Node]:
    return [other for other in graph.nodes if node in other.inputs]


class _Recorder(nn.Module):
    """Stands for a module of a box: adds an operation and returns its result."""

    def __init__(self, graph: Graph, original: nn.Module, title: str) -> None:
        super().__init__()
        self.graph, self.original, self.title = graph, original, title

    def forward(self, x: Any, *more: Any) -> Any:
        if isinstance(self.original, Combination):
            return self.graph.add("mix", "Σ w N(y), all blocks", [x.node]), more[0]
        if isinstance(self.original, nn.Identity):
            return x
        size = _count_parameters(self.original)
        detail = f"{size:,} parameters" if size else ""
        return self.graph.add("norm", self.title, [x.node], detail=detail)


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def with_recorders(module: nn.Module, graph: Graph, title: str) -> Any:
    """Return a copy of a box or of ends whose modules record themselves."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {
        name: None if child is None else _Recorder(graph, child, title)
        for name, child in module._modules.items()
    }
    for name, parameter in module.named_parameters(recurse=False):
        graph.parameters.append((parameter, PARAMETER_SYMBOLS.get(name, name)))
    return twin


def _trace_hyper(box: Any, stream: Symbol, f: Callable[[Any], Any]) -> Symbol:
    """Trace H ← Aᵀ H + b F(N(aᵀ H))ᵀ, whose sums are products of matrices."""
    graph = stream.graph
    read = graph.add("mix", "aᵀ H: one of the streams", [stream.node])
    branch = f(box.norm(read))
    return graph.add("mix", "Aᵀ H + b ⊗ branch", [stream.node, branch.node])


TRACES: dict[type[AddNorm], Callable[..., Any]] = {HyperConnections: _trace_hyper}
"""Boxes whose forward computes with more than sums and factors."""


def trace_box(graph: Graph, box: AddNorm, stream: Any, branch: tuple[str, str], title: str) -> Any:
    """Add the operations of one box to a graph, and return the stream after it.

    Parameters
    ----------
    graph
        Where the operations are added.
    box
        The Add & Norm box.
    stream
        Symbols, as the box expects its stream.
    branch
        Label and detail of its sublayer.
    title
        How a norm is called.
    """
    start = len(graph.nodes)

    def f(x: Symbol) -> Symbol:
        role = box.place.role
        return graph.add("branch", branch[0], [x.node], detail=branch[1], role=role)

    twin = with_recorders(box, graph, title)
    trace = next((t for kind, t in TRACES.items() if isinstance(box, kind)), None)
    result = twin.forward(stream, f) if trace is None else trace(twin, stream, f)
    parts = result if isinstance(result, tuple) else (result,)
    if parts[0].node.kind == "add":
        parts[0].node.column = 0
    own = graph.nodes[start:]
    for node in own:
        before = any(other.kind == "branch" for other in _ancestors(node) if other in own)
        after = any(node in _ancestors(other) for other in own if other.kind == "branch")
        node.aside = node.kind == "factor" and not before and not after
    first = _ancestors(parts[0].node)
    for column, part in enumerate(parts):
        if isinstance(part, Symbol) and part.node not in first and part.node in graph.nodes[start:]:
            part.node.column = column
    return result


def _ancestors(node: Node) -> set[Node]:
    seen, waiting = set(), [node]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += each.inputs
    return seen


def _start_of(ends: Ends, graph: Graph, x: Symbol, title: str) -> Any:
    return with_recorders(ends, graph, title).open(x)


# ── One side of a model ───────────────────────────────────────────────────────────────────────────


@dataclass
class SideGraph:
    """The graph of one side, and how often each group of blocks is repeated."""

    graph: Graph
    groups: dict[int, str]
    """Text of each group of blocks, by its number."""


def trace_side(c: ModelConfig, side: str, stack: Stack, costs: Cost, head: str) -> SideGraph:
    """Return the graph of one side: input, blocks, ends and head.

    Parameters
    ----------
    c
        The configuration.
    side
        encoder or decoder.
    stack
        Its blocks.
    costs
        The cost of the model, of which each sublayer shows its share.
    head
        Text of the node after the stack; empty if nothing follows.
    """
    title = NORM_TITLES.get(c.norm, f"{c.norm} norm")
    labels = {
        role: _describe_sublayer(c, side, role, stack, costs)
        for role in ("attention", "memory", "ffn")
    }
    blocks = [block for block in stack.blocks if isinstance(block, Block)]
    scratch = Graph()
    stream = _start_of(stack.ends, scratch, scratch.add("input", "", []), title)
    signatures, factors = [], []
    for block in blocks:
        before = len(scratch.nodes)
        stream = _trace_block(scratch, block, stream, labels, title)
        signatures.append(_signature(scratch, before))
        factors.append([node.label for node in scratch.nodes[before:]])
    graph = Graph()
    text, detail = _describe_input(c, side, costs)
    stream = _start_of(stack.ends, graph, graph.add("input", text, [], detail=detail), title)
    groups: dict[int, str] = {}
    layer = 0
    while layer < len(blocks):
        last = layer
        while last + 1 < len(blocks) and signatures[last + 1] == signatures[layer]:
            last += 1
        graph.group = len(groups) + 1
        count, before = last - layer + 1, len(graph.nodes)
        groups[graph.group] = f"× {count}"
        stream = _trace_block(graph, blocks[layer], stream, labels, title)
        for node, one, other in zip(
            graph.nodes[before:], factors[layer], factors[last], strict=True
        ):
            if one != other:
                node.label = f"{one} … {other.split(' ')[-1]}"
        layer = last + 1
    graph.group = 0
    out = with_recorders(stack.ends, graph, title).close(stream)
    out = _Recorder(graph, stack.norm, title)(out)
    if head:
        part = next(part for part in costs.parts if part.name == "head")
        size = _short(part.parameters, "parameters") or "shared weights"
        graph.add("output", head, [out.node], detail=f"{size} · {_short(part.forward, 'FLOP')}")
    return SideGraph(graph, groups)


def _trace_block(
    graph: Graph, block: Block, stream: Any, labels: dict[str, tuple[str, str]], title: str
) -> Any:
    for role in block.sublayers:
        box = block.addnorms[role]
        assert isinstance(box, AddNorm)
        stream = trace_box(graph, box, stream, labels[role], title)
    return stream


def _signature(graph: Graph, start: int) -> list[Any]:
    """Return the operations of a block, with what they read relative to its start."""
    place = {id(node): number for number, node in enumerate(graph.nodes)}
    return [
        (
            node.kind,
            node.kind == "factor" or node.label,
            [place[id(n)] - start for n in node.inputs if place[id(n)] >= start],
        )
        for node in graph.nodes[start:]
    ]


def _short(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return (
                f"{number:.3g} {prefix}{unit}"
                if number and unit == "FLOP"
                else (
                    f"{number:.3g}{prefix.upper() if prefix != 'k' else 'k'} {unit}"
                    if number
                    else ""
                )
            )
        number /= 1000
    return f"{number:.3g} P{unit}"


def _describe_sublayer(
    c: ModelConfig, side: str, role: str, stack: Stack, costs: Cost
) -> tuple[str, str]:
    """Return label and detail of a sublayer: what it is, its parameters and operations."""
    depth = max(len(stack.blocks), 1)
    names = {
        "attention": tuple(
            f"{side} {part}" for part in ("attention", "scores", "learned keys", "convolution")
        ),
        "memory": ("memory attention", "memory scores"),
        "ffn": (f"{side} ffn",),
    }[role]
    parts = [part for part in costs.parts if part.name in names]
    parameters = sum(part.parameters for part in parts) // depth
    operations = sum(part.forward for part in parts) // depth
    heads = f"{c.heads} × {c.effective_head_width}"
    grouped = "" if c.effective_kv_heads == c.heads else f", {c.effective_kv_heads} key heads"
    masked = "Masked self-attention" if side == "decoder" else "Self-attention"
    label = {
        "attention": f"{masked} {heads}{grouped}",
        "memory": f"Encoder attention {heads}",
        "ffn": f"Feed-forward {c.ffn} {c.effective_ffn_width:,}",
    }[role]
    if c.mixing == "convolution" and role == "attention":
        label = f"{'Causal convolution' if side == 'decoder' else 'Convolution'} of {c.kernel}"
    if c.ffn == "product-key" and role == "ffn":
        label = "Product-key memory"
    return label, f"{_short(parameters, 'parameters')} · {_short(operations, 'FLOP')}"


def _describe_input(c: ModelConfig, side: str, costs: Cost) -> tuple[str, str]:
    part = next(part for part in costs.parts if part.name == "embedding")
    kind = {"tokens": f"{c.vocab:,} tokens", "patches": f"Patches of {c.patch} pixels"}
    is_target = c.mode == "encoder-decoder" and side == "decoder"
    label = kind.get(c.input, "Vectors") if not is_target else f"{c.output_vocab:,} tokens"
    detail = f"{_short(part.parameters, 'parameters')} · {c.positions}"
    return f"{label} → {c.width}", detail


# ── Layout ────────────────────────────────────────────────────────────────────────────────────────


def _height(node: Node) -> float:
    sizes = {"add": 2 * CORNER, "factor": 22, "norm": 24, "mix": 26}
    return sizes.get(node.kind, NODE_HEIGHT if node.detail else 26)


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
            bottom += 18  # room for the frame of a group
            group = node.group
        node.row = round(bottom)
        for factor in waiting if node.kind == "branch" else ():
            factor.row = round(bottom + (_height(node) - _height(factor)) / 2)
        waiting = [] if node.kind == "branch" else waiting
        bottom += _height(node) + ROW_GAP
    return bottom


def draw(config: Config | ModelConfig | str | Path, length: int | None = None) -> Svg:
    """Return a drawing of a model: blocks, Add & Norm boxes, shapes, parameters, operations.

    Parameters
    ----------
    config
        A configuration, the name of a preset, a TOML file or the directory of a model or run.
    length
        Positions for the operations; the configured length by default.

    >>> picture = draw("gpt2")
    >>> "Masked self-attention 12 × 64" in picture, "× 12" in picture
    (True, True)
    """
    if isinstance(config, str | Path):
        config = find(config)
    if isinstance(config, Config) and config.run.task == "table":
        raise ConfigError("drawings are of models for texts and images: got a run of task=table.")
    c = model_config(config)
    if c.mixing == "recurrent":
        raise ConfigError("drawings are of stacks of blocks: got mixing=recurrent.")
    with torch.device("meta"):
        model = build(c)
    costs = cost(c, length)
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
    return _draw_sides(c, costs, sides)


def _draw_sides(c: ModelConfig, costs: Cost, sides: list[tuple[str, SideGraph]]) -> Svg:
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
    arrangement = " / ".join(dict.fromkeys(c.arrangements[name][0] for name, _ in sides))
    title = f"{c.mode}, {arrangement}"
    about = f"{costs.parameters:,} parameters"
    picture = Picture(max(width, 300), height, title, about)
    picture.text(PICTURE_MARGIN, 26, title, "name")
    shape = f"(batch, {costs.length}, {c.width})"
    picture.text(PICTURE_MARGIN, 44, f"{about} · {_short(costs.forward, 'FLOP')} forward", "tick")
    picture.text(PICTURE_MARGIN, 60, f"stream {shape}", "tick")
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
        low = floor - min(node.row for node in inside) + 8
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
    if node.aside:  # from the stream to the factor on its shortcut
        path = f"M{start[0]:.1f} {start[1]:.1f}V{start[1] - 5:.1f}H{end[0]:.1f}V{end[1]:.1f}"
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
        turn = start[1] - 5
        path = (
            f"M{start[0]:.1f} {start[1]:.1f}V{turn:.1f}H{side:.1f}V{middle:.1f}H{end[0] - half:.1f}"
        )
        picture.path(path, "curve c0", "shortcut")
        _arrow(picture, end[0] - half, middle, "right", "c0")
        return
    to_right = node.column > source.column
    edge = end[0] - half if to_right else end[0] + half
    turn = start[1] - 5
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
    tip = f"{node.label} {node.detail}".strip()
    left = x - width / 2
    picture.rect(left, top, width, height, "box", round_by=6)
    picture.rect(left, top, width, height, f"curve {CLASSES[node.kind]}", tip, round_by=6)
    two = bool(node.detail) and height >= NODE_HEIGHT
    line = top + (16 if two else height / 2 + 4)
    picture.text(x, line, shorten(node.label, width - 6, 11), "value", "middle")
    if two:
        picture.text(x, top + 31, shorten(node.detail, width - 6, 9.5), "tick", "middle")
