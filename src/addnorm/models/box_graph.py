"""What every Add & Norm box of a model computes, as a graph of operations.

No arrangement is described by hand. Each box's own `forward` is called with symbols in place of
tensors; a symbol records what is done with it: a norm, a branch, an addition, a factor.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from addnorm.config import ModelConfig
from addnorm.layers.addnorm import AddNorm, Combination, Ends, HyperConnections
from addnorm.layers.stack import Block, Stack
from addnorm.models.size import Cost

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

INSIDE = {
    "head-gain": (("attention", "memory"), "a gain for each head"),
    "attention-norm": (("attention", "memory"), "norm before its output matrix"),
    "ffn-norm": (("ffn",), "norm before its output matrix"),
}
"""Modules that arrangements add inside sublayers: in which, and how the drawing says so."""


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
        size = count_parameters(self.original)
        detail = f"{size:,} parameters" if size else ""
        return self.graph.add("norm", self.title, [x.node], detail=detail)


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
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
    labels = {
        role: describe_sublayer(c, side, role, stack, costs)
        for role in ("attention", "memory", "ffn")
    }
    graph = Graph()
    text, detail = _describe_input(c, side, costs)
    start = graph.add("input", text, [], detail=detail)
    out, groups = trace_stack(c, graph, start, stack, labels)
    if head:
        part = next(part for part in costs.parts if part.name == "head")
        size = short_number(part.parameters, "parameters") or "shared weights"
        graph.add(
            "output", head, [out.node], detail=f"{size} · {short_number(part.forward, 'FLOP')}"
        )
    return SideGraph(graph, groups)


def trace_stack(
    c: ModelConfig, graph: Graph, start: Symbol, stack: Stack, labels: dict[str, tuple[str, str]]
) -> tuple[Symbol, dict[int, str]]:
    """Add blocks, ends and last norm to a graph; return its output, and the text of each group.

    Parameters
    ----------
    c
        The configuration.
    graph, start
        The graph, and what the stack reads.
    stack
        The blocks.
    labels
        Label and detail of the sublayer of each role.
    """
    title = NORM_TITLES.get(c.norm, f"{c.norm} norm")
    blocks = [block for block in stack.blocks if isinstance(block, Block)]
    scratch = Graph()
    stream = _start_of(stack.ends, scratch, scratch.add("input", "", []), title)
    signatures, factors = [], []
    for block in blocks:
        before = len(scratch.nodes)
        stream = _trace_block(scratch, block, stream, labels, title)
        signatures.append(_signature(scratch, before))
        factors.append([node.label for node in scratch.nodes[before:]])
    stream = _start_of(stack.ends, graph, start, title)
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
    return _Recorder(graph, stack.norm, title)(out), groups


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


def short_number(number: float, unit: str) -> str:
    """Return a number with a prefix and its unit, such as 2.1M parameters."""
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


def describe_sublayer(
    c: ModelConfig, side: str, role: str, stack: Stack, costs: Cost
) -> tuple[str, str]:
    """Return label and detail of a sublayer: what it is, its parameters and operations.

    Parameters
    ----------
    c
        The configuration.
    side, role
        encoder or decoder; attention, memory or ffn.
    stack
        Blocks with such sublayers.
    costs
        The cost of the model.
    """
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
    block = next((block for block in stack.blocks if isinstance(block, Block)), None)
    box = block.addnorms[role] if block is not None and role in block.sublayers else None
    inside = [
        text
        for name, (where, text) in INSIDE.items()
        if isinstance(box, AddNorm) and name in box.inside and role in where
    ]
    size = f"{short_number(parameters, 'parameters')} · {short_number(operations, 'FLOP')}"
    return label, "\n".join([size, *inside])


def _describe_input(c: ModelConfig, side: str, costs: Cost) -> tuple[str, str]:
    part = next(part for part in costs.parts if part.name == "embedding")
    kind = {"tokens": f"{c.vocab:,} tokens", "patches": f"Patches of {c.patch} pixels"}
    is_target = c.mode == "encoder-decoder" and side == "decoder"
    label = kind.get(c.input, "Vectors") if not is_target else f"{c.output_vocab:,} tokens"
    detail = f"{short_number(part.parameters, 'parameters')} · {c.positions}"
    return f"{label} → {c.width}", detail
