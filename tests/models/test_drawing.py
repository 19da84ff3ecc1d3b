"""Drawings show what the boxes compute: traced operations against each arrangement's formula."""

import base64
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from addnorm import presets
from addnorm.cli.main import main
from addnorm.config import Config, ModelConfig
from addnorm.layers.addnorm import ADDNORMS
from addnorm.models.box_graph import Graph, Node, SideGraph, trace_side
from addnorm.models.build import build
from addnorm.models.drawing import draw
from addnorm.models.size import cost
from addnorm.models.tabular import TabularConfig, build_tabular, trunk_of

# What one block and the ends are, from the bottom to the top: N norm, F branch, + sum, × factor.
EXPECTED = {
    "post": "F+N F+N",
    "pre": "NF+ NF+ N",
    "res-post": "FN+ FN+ N",
    "sandwich": "NFN+ NFN+ N",
    "peri": "N NFN+ NFN+ N",
    "admin": "×F+N ×F+N",
    "b2t": "F+N F+N",
    "dlcl": "mNF+ NF+ mN",
    "deepnorm": "×F+N ×F+N",
    "rezero": "F×+ F×+",
    "layerscale": "NF×+ NF×+ N",
    "t-fixup": "F+ F+",
    "fixup": "×F×+× ×F×+×",
    "scaled": "×NF+ ×NF+ N",
    "none": "FN FN",
    "normformer": "NFN+ NF+ N",
    "sub-ln": "NF+ NF+ N",
    "dual": "F+N+ F+N+ N+",
    "mix": "F+NF+N NF+NF+ N",
    "lns": "N×F+ N×F+ N",
    "parallel": "NF NF+ N",
    "hyper": "m mNFm mNFm mN",
}
LETTERS = {"norm": "N", "branch": "F", "add": "+", "factor": "×", "mix": "m"}


def trace(addnorm: str, **changes: Any) -> SideGraph:
    settings = {"mode": "decoder", "vocab": 50, "width": 16, "depth": 4, "heads": 2}
    c = ModelConfig(**(settings | {"addnorm": addnorm} | changes))
    with torch.device("meta"):
        stack = build(c).decoder.stack
    return trace_side(c, "decoder", stack, cost(c, 8), "")


def test_every_arrangement_is_expected() -> None:
    assert set(EXPECTED) == set(ADDNORMS)


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_the_operations_are_those_of_the_formula(addnorm: str) -> None:
    graph = trace(addnorm).graph
    letters = "".join(LETTERS[node.kind] for node in graph.nodes if node.kind in LETTERS)
    assert letters == EXPECTED[addnorm].replace(" ", "")


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_every_node_is_read_and_nothing_lies_on_another(addnorm: str) -> None:
    draw(ModelConfig(mode="decoder", vocab=50, width=16, heads=2, addnorm=addnorm))
    graph = trace(addnorm).graph
    from addnorm.models.drawing import _height, _place

    _place(graph)
    for node in graph.nodes[:-1]:
        assert any(node in other.inputs for other in graph.nodes), node.label
    for number, node in enumerate(graph.nodes):
        for other in graph.nodes[:number]:
            if node.column == other.column and not node.aside and not other.aside:
                low, high = sorted((node, other), key=lambda each: each.row)
                assert low.row + _height(low) < high.row
        assert all(source.row < node.row or node.aside for source in node.inputs)


def sum_of(graph: Graph, number: int) -> Node:
    return [node for node in graph.nodes if node.kind == "add"][number]


def test_sums_have_the_right_arrows() -> None:
    bottom = trace("b2t", depth=1).graph
    source, last = bottom.nodes[0], sum_of(bottom, 1)
    assert len(last.inputs) == 3 and source in last.inputs  # the block's input, x and the branch
    joined = sum_of(trace("parallel", depth=1).graph, 0)
    assert [node.kind for node in joined.inputs] == ["input", "branch", "branch"]
    dual = trace("dual", depth=1).graph
    assert [node.column for node in dual.nodes if node.kind == "add"] == [0, 1, 0, 1, 0]


def test_factors_have_their_symbols_and_values() -> None:
    labels = {
        name: [n.label for n in trace(name).graph.nodes] for name in ("admin", "lns", "fixup")
    }
    assert "× ω" in labels["admin"] and "÷ 1 … 2" in labels["lns"]
    assert {"+ b", "× a", "+ c"} <= set(labels["fixup"])
    assert f"× {(2 * 4) ** 0.25:.3g}" in [n.label for n in trace("deepnorm").graph.nodes]
    assert [n.aside for n in trace("deepnorm").graph.nodes if n.kind == "factor"] == [True, True]
    assert [n.aside for n in trace("layerscale").graph.nodes if n.kind == "factor"] == [False] * 2


def test_equal_blocks_are_drawn_once() -> None:
    assert list(trace("pre").groups.values()) == ["× 4"]
    assert list(trace("mix", depth=8).groups.values()) == ["× 2", "× 6"]


@pytest.mark.parametrize(
    "config",
    [
        presets.base(decoder_addnorm="pre"),
        presets.vit(),
        presets.llama("7b"),
        presets.bert(head="none"),
        presets.gpt2(ffn="all-attention", depth=2, width=64, heads=4),
        presets.gpt2(ffn="product-key", depth=2, width=64, heads=4, ffn_options={"subkeys": 64}),
        ModelConfig(mode="decoder", vocab=9, depth=0),
    ],
    ids=lambda config: getattr(config, "mode", None) or config.model.addnorm,
)
def test_drawings_are_whole_and_name_their_parts(config: Config | ModelConfig) -> None:
    picture = draw(config)
    root = ElementTree.fromstring(picture)
    c = config if isinstance(config, ModelConfig) else config.model
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for part in root.iter():
        if "x" in part.attrib:
            assert 0 <= float(part.attrib["x"]) <= width and 0 <= float(part.attrib["y"]) <= height
    text = " ".join("".join(part.itertext()) for part in root.iter())
    assert f"{cost(config).parameters:,} parameters" in text and f", {c.width})" in text
    if c.depth:
        assert f"{c.heads} × {c.effective_head_width}" in text
    assert ("Encoder attention" in text) == (c.mode == "encoder-decoder")
    assert ("Feed-forward" in text) == (c.has_ffn and c.depth > 0 and c.ffn != "product-key")


def test_the_verb_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.svg"
    assert main(["draw", "gpt2", "--set", "model.addnorm=dual", "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    text = out.read_text()
    assert "decoder, dual" in text and "prefers-color-scheme:dark" in text
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


def test_the_recurrent_model_is_drawn_with_its_own_parts() -> None:
    config = ModelConfig(vocab=50, width=16, heads=4, depth=2, mixing="recurrent")
    text = draw(config, length=8)
    for part in (
        "GRU in both directions 2 × 8",
        "Additive attention",
        "GRU 16",
        "Readout",
        "2 layers",
    ):
        assert part in text
    assert "the output of the encoder" in text and "recurrent" in text


@pytest.mark.parametrize("kind", ("ft", "saint", "tab"))
def test_models_for_tables_are_drawn_with_their_columns(kind: str) -> None:
    trunk = trunk_of(kind, width=16, depth=2, heads=2)
    config = TabularConfig(kind=kind, numbers=3, categories=(4, 5), outputs=3, trunk=trunk)
    model = build_tabular(config)
    text = draw(trunk, model=model)
    assert f"{model.count():,} parameters" in text and "→ 3 classes" in text
    assert ("Attention over rows" in text) == (kind == "saint")
    assert ("3 numbers, 2 categories → 16" in text) == (kind != "tab")
    assert ("2 categories → 16" in text) and ("MLP" in text) == (kind == "tab")
    folds = build_tabular(config.replace(folds=2))
    assert "in 2 models, one of which is drawn" in draw(trunk, model=folds)


@pytest.mark.parametrize("kind", ("ft", "saint", "tab", "instant"))
def test_a_kind_of_model_for_tables_is_drawn_without_a_table(kind: str) -> None:
    config = Config(model=trunk_of("ft", width=16, depth=2, heads=2))
    text = draw(config.override("run.task=table", f"table.model={kind}"))
    assert "parameters depend on the table" in text and "ategories → 16" in text


def test_a_model_is_shown_as_its_drawing_in_a_notebook() -> None:
    model = build(ModelConfig(mode="decoder", vocab=50, width=16, depth=2, heads=2, addnorm="dual"))
    markup = model._repr_html_()
    assert markup.startswith('<img src="data:image/svg+xml;base64,')
    content = base64.b64decode(markup.partition("base64,")[2].partition('"')[0]).decode()
    assert "decoder, dual" in content and "<style>" in content


def test_what_arrangements_add_inside_sublayers_is_written_in_them() -> None:
    details = [node.detail for node in trace("normformer").graph.nodes if node.kind == "branch"]
    assert "a gain for each head" in details[0] and "norm before its output" in details[1]
    plain = [node.detail for node in trace("pre").graph.nodes if node.kind == "branch"]
    assert not any("norm" in detail or "gain" in detail for detail in plain)


def test_shortcuts_leave_the_stream_inside_their_block() -> None:
    picture = draw(ModelConfig(mode="decoder", vocab=50, width=16, depth=2, heads=2))
    frame = re.search(r'<rect class="frame" x="\S+" y="(\S+)" width="\S+" height="(\S+)"', picture)
    assert frame
    low = float(frame[1]) + float(frame[2])
    turns = re.findall(r'class="curve c0" d="M\S+ (\S+)V(\S+)H', picture)
    assert turns and all(float(turn) <= low for _, turn in turns)
