"""Graphs of models that are not stacks for texts or images: tables, and the recurrent baseline.

They are drawn as those of box_graph are.
"""

import torch

from addnorm.config import ModelConfig
from addnorm.layers.stack import Block, Stack
from addnorm.models.box_graph import (
    Graph,
    SideGraph,
    Symbol,
    count_parameters,
    describe_sublayer,
    short_number,
    trace_stack,
)
from addnorm.models.instant import InstantConfig, InstantModel
from addnorm.models.instant_table import InstantPredictor, make_predictor
from addnorm.models.size import Cost, LayerCost, cost
from addnorm.models.tabular import (
    FoldModel,
    FTTransformerModel,
    TabTransformerModel,
    TabularConfig,
    TabularModel,
    build_tabular,
)

TABLE_TITLES = {
    "ft": "FT-Transformer",
    "tab": "TabTransformer",
    "saint": "SAINT",
    "instant": "instant model",
}
"""How drawings call the kinds of models for tables."""


def table_model_of(c: ModelConfig, kind: str) -> TabularModel:
    """Return a model with one number and one category, to draw one whose table is not known."""
    if kind == "instant":
        no_rows = torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.int64)
        network = InstantModel(InstantConfig(trunk=c))
        kept, target = torch.arange(2), torch.zeros(0, dtype=torch.int64)
        return make_predictor(network, *no_rows, target, categories=(3,), classes=2, kept=kept)
    return build_tabular(TabularConfig(kind=kind, numbers=1, categories=(3,), outputs=1, trunk=c))


def trace_table(model: TabularModel, is_known: bool = True) -> SideGraph:
    """Return the graph of a model for tables: columns, stack and head.

    Parameters
    ----------
    model
        The model; of several for folds, the first is drawn.
    is_known
        Whether its columns are those of a table: otherwise their number is left out.
    """
    if isinstance(model, FoldModel):
        model = model.parts()[0]
    graph = Graph()
    if isinstance(model, TabTransformerModel):
        return _trace_tab(graph, model, is_known)
    c, config = model.config.trunk, model.config
    text = f"{_columns_text(config.numbers, len(config.categories), is_known)} → {c.width}"
    if isinstance(model, InstantPredictor):
        known = "known rows, and those to predict"
        known = f"{model.sizes.known:,} {known}" if is_known else known
        start = graph.add("input", text, [], detail=known)
        length = 1 + model.sizes.columns if is_known else None
        out, groups = _trace_trunk(graph, start, c, model.network.stack, length)
        what = f"{model.sizes.classes} classes" if model.sizes.classes else "Bins of a number"
        what = what if is_known else "Classes, or bins of a number"
        graph.add("output", what, [out.node], detail="known rows vote · a matrix")
        return SideGraph(graph, groups)
    assert isinstance(model, FTTransformerModel)
    detail = f"{config.embedding} · and a summary token"
    if is_known:
        size = count_parameters(model.columns) + model.summary.numel()
        detail = f"{short_number(size, 'parameters')}\n{detail}"
    start = graph.add("input", text, [], detail=detail)
    length = 1 + config.columns if is_known else None
    out, groups = _trace_trunk(graph, start, c, model.side.stack, length)
    _add_head(graph, model, [out], is_known)
    return SideGraph(graph, groups)


def _trace_tab(graph: Graph, model: TabTransformerModel, is_known: bool) -> SideGraph:
    """Trace a TabTransformer, in which only categories pass the stack."""
    config, c = model.config, model.config.trunk
    groups: dict[int, str] = {}
    read: list[Symbol] = []
    if config.categories:
        text = f"{_columns_text(0, len(config.categories), is_known)} → {c.width}"
        size = short_number(count_parameters(model.columns), "parameters") if is_known else ""
        start = graph.add("input", text, [], detail=size)
        length = len(config.categories) if is_known else None
        out, groups = _trace_trunk(graph, start, c, model.side.stack, length)
        read.append(out)
    if config.numbers:
        text = _columns_text(config.numbers, 0, is_known)
        normed = "normed" if config.numbers > 2 or not is_known else "as they are"
        read.append(graph.add("input", text, [], detail=normed, column=int(bool(read))))
    _add_head(graph, model, read, is_known)
    return SideGraph(graph, groups)


def _trace_trunk(
    graph: Graph, start: Symbol, c: ModelConfig, stack: Stack, length: int | None
) -> tuple[Symbol, dict[int, str]]:
    """Trace the stack of a table; without a length, what depends on the columns is left out."""
    blocks = [block for block in stack.blocks if isinstance(block, Block)]
    costs = cost(c, length or 1)
    labels = {}
    for role, sublayer in blocks[0].sublayers.items() if blocks else ():
        over_rows = role.startswith("row_")
        label, detail = describe_sublayer(c, "encoder", role.removeprefix("row_"), stack, costs)
        if over_rows:
            label = "Attention over rows" if role == "row_attention" else "Feed-forward over rows"
        size = short_number(count_parameters(sublayer), "parameters")
        operations = detail.partition("\n")[0].rpartition(" · ")[2]
        if over_rows:
            detail = size if length else ""
        else:
            detail = f"{size} · {operations}" if length else size
        labels[role] = (label, detail)
    return trace_stack(c, graph, start, stack, labels)


def _columns_text(numbers: int, categories: int, is_known: bool) -> str:
    parts = [
        (f"{count} " if is_known else "") + (one if is_known and count == 1 else many)
        for count, one, many in (
            (numbers, "number", "numbers"),
            (categories, "category", "categories"),
        )
        if count
    ]
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def _add_head(
    graph: Graph,
    model: FTTransformerModel | TabTransformerModel,
    read: list[Symbol],
    is_known: bool,
) -> None:
    config = model.config
    kind = "MLP" if isinstance(model, TabTransformerModel) else "ReLU, matrix"
    what = f"Bins of a number: {config.outputs}" if config.edges else "1 output"
    if config.outputs > 1 and not config.edges:
        what = f"{config.outputs} classes"
    members = f" · {config.members} members" if config.members > 1 else ""
    size = short_number(count_parameters(model.head), "parameters")
    label = f"{kind} → {what}" if is_known else f"{kind} → outputs"
    detail = f"{size}{members}" if is_known else ""
    graph.add("output", label, [symbol.node for symbol in read], detail=detail)


def trace_recurrent(c: ModelConfig, costs: Cost) -> list[tuple[str, SideGraph]]:
    """Return the graphs of the recurrent encoder-decoder: its GRUs, attention and readout."""
    parts = {part.name: part for part in costs.parts}
    encoder, decoder = Graph(), Graph()
    tokens = encoder.add("input", f"{c.vocab:,} tokens → {c.width}", [])
    encoder.add(
        "branch",
        f"GRU in both directions 2 × {c.width // 2}",
        [tokens.node],
        detail=_recurrence_text(parts["encoder recurrence"], c.depths["encoder"]),
    )
    shifted = decoder.add("input", f"{c.output_vocab:,} tokens → {c.width}", [])
    size = _size_text(parts["memory attention"], parts["memory scores"])
    context = decoder.add(
        "branch",
        "Additive attention",
        [],
        detail=f"{size}\nits query is the state before",
        role="memory",
    )
    state = decoder.add(
        "branch",
        f"GRU {c.width}",
        [context.node, shifted.node],
        detail=_recurrence_text(parts["decoder recurrence"], c.depths["decoder"]),
    )
    readout = decoder.add(
        "branch",
        "Readout: largest of each pair",
        [state.node, context.node, shifted.node],
        detail=_size_text(parts["readout"]),
    )
    label = f"Logits of {c.output_vocab:,} tokens"
    decoder.add("output", label, [readout.node], detail=_size_text(parts["head"]))
    return [("encoder", SideGraph(encoder, {})), ("decoder", SideGraph(decoder, {}))]


def _recurrence_text(part: LayerCost, depth: int) -> str:
    return _size_text(part) + (f"\n{depth} layers" if depth > 1 else "")


def _size_text(*parts: LayerCost) -> str:
    parameters = short_number(sum(part.parameters for part in parts), "parameters")
    operations = short_number(sum(part.forward for part in parts), "FLOP")
    return f"{parameters or 'shared weights'} · {operations}"
