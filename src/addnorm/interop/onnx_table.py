"""Models for tables as ONNX, with the whole preprocessing in the graph.

    inputs     one for each column, by its name: float64 (NaN where missing) for a number, text
               ("" where missing) for a category, each of shape (batch,)
    output     probabilities (batch, classes), calibrated, or numbers (batch,)

A number is scaled as in data/table/scaling.py, a category looked up by the operator LabelEncoder;
a value that training did not have has the code of rare values, as in addnorm. Dates, attention
over rows (SAINT) and instant models are refused. Φ⁻¹ is not an operator of ONNX: it is computed by
P. J. Acklam's rational approximation (2003), whose relative error is below 1.2e-9.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from addnorm.data.table.encode import MISSING, OTHER, NumberRule, TableEncoder
from addnorm.errors import ConfigError, SavedError, require
from addnorm.files import new_directory, require_empty, to_json, write_whole
from addnorm.interop.graphs import MAX_BATCH, quiet_exporter
from addnorm.interop.onnx import ONNX_TOLERANCE
from addnorm.models.instant_table import InstantPredictor
from addnorm.models.tabular import TabularModel

RawColumns = Mapping[str, Any]
MIDDLE_TOP = (
    *(-39.69683028665376, 220.9460984245205, -275.9285104469687),
    *(138.3577518672690, -30.66479806614716, 2.506628277459239),
)
MIDDLE_BOTTOM = (
    *(-54.47609879822406, 161.5858368580409, -155.6989798598866),
    *(66.80131188771972, -13.28068155288572, 1.0),
)
TAIL_TOP = (
    *(-0.007784894002430293, -0.3223964580411365, -2.400758277161838),
    *(-2.549732539343734, 4.374664141464968, 2.938163982698783),
)
TAIL_BOTTOM = (
    *(0.007784695709041462, 0.3224671290700398, 2.445134137142996),
    *(3.754408661907416, 1.0),
)
"""Coefficients of Φ⁻¹: a polynomial over another, in the middle and in the tails."""
TAIL = 0.02425


def within(x: Tensor, low: float, high: float) -> Tensor:
    """Return x, limited to a range, in float64: the exporter writes the bounds of clamp as float32.

    >>> float(1 - within(torch.ones(1, dtype=torch.float64), 1e-7, 1 - 1e-7)) < 1.001e-7
    True
    """
    lowest, highest = (torch.tensor(end, dtype=torch.float64) for end in (low, high))
    return torch.minimum(torch.maximum(x, lowest), highest)


def polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return c_0 x^n + … + c_n, by Horner's rule."""
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def normal_quantile(p: Tensor) -> Tensor:
    """Return Φ⁻¹(p), for p between 0 and 1.

    >>> normal_quantile(torch.tensor([0.5, 0.975], dtype=torch.float64))[1].item() > 1.9599
    True
    """
    q = p - 0.5
    r = q * q
    middle = q * polynomial(r, MIDDLE_TOP) / polynomial(r, MIDDLE_BOTTOM)
    small = within(torch.minimum(p, 1 - p), 1e-300, TAIL)
    s = (-2 * small.log()).sqrt()
    tail = polynomial(s, TAIL_TOP) / polynomial(s, TAIL_BOTTOM)
    return torch.where(q.abs() <= 0.5 - TAIL, middle, torch.where(q < 0, tail, -tail))


def interpolate(x: Tensor, grid: Tensor, values: Tensor) -> Tensor:
    """Return the piecewise linear function through (grid, values) at x, as np.interp does."""
    place = ((grid <= x[:, None]).sum(dim=1) - 1).clamp(0, len(grid) - 2)
    low, high = grid[place], grid[place + 1]
    gap = torch.where(high > low, high - low, 1.0)
    share = torch.where(high > low, (x - low) / gap, 0.0)
    y = values[place] + share * (values[place + 1] - values[place])
    y = torch.where(x >= grid[-1], values[-1], torch.where(x < grid[0], values[0], y))
    return torch.where(x.isnan(), x, y)


class ScaleGraph(nn.Module):
    """One scaled number, as `addnorm.data.table.encode.scale` computes it."""

    grid: Tensor

    def __init__(self, rule: NumberRule) -> None:
        super().__init__()
        self.rule = rule
        self.register_buffer("grid", torch.tensor(rule.knots, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        rule = self.rule
        x = torch.where(x.isinf(), within(x, rule.low, rule.high), x)
        if rule.scaling == "quantile":
            shares = torch.linspace(0, 1, len(self.grid), dtype=torch.float64)
            rise = interpolate(x, self.grid, shares)
            fall = -interpolate(-x, -self.grid.flip(0), -shares.flip(0))
            scaled = normal_quantile(within((rise + fall) / 2, 1e-7, 1 - 1e-7))
        elif rule.scaling == "robust":
            z = within((x - rule.knots[0]) / rule.knots[1], -1e100, 1e100)
            scaled = z / (1 + (z / 3) ** 2).sqrt()
        elif rule.scaling == "standard":
            x = within(x, *rule.knots[2:]) if len(rule.knots) > 2 else x
            scaled = within((x - rule.knots[0]) / rule.knots[1], -1e6, 1e6)
        else:
            scaled = within(x, -1e6, 1e6)
        scaled = torch.where(x.isnan(), x, scaled)
        return scaled if rule.fill is None else torch.where(x.isnan(), rule.fill, scaled)


class TableGraph(nn.Module):
    """From raw numbers and codes to probabilities, or to a number.

    Parameters
    ----------
    model : the network.
    rules : how each number is scaled.
    temperature : divisor of the logits; None for a model that predicts numbers.
    mean, scale : of the numbers that it predicts.
    """

    def __init__(
        self,
        model: TabularModel,
        rules: Sequence[NumberRule],
        *,
        temperature: float | None,
        mean: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval()
        self.knows_missing = bool(model.config.missing)
        columns = getattr(self.model, "columns", None)
        if columns is not None and columns.missing is None and columns.numbers is not None:
            # Trained without missing values; a graph needs a value for both branches.
            columns.missing = nn.Parameter(torch.zeros(len(rules), model.config.trunk.width))
        self.scalings = nn.ModuleList(ScaleGraph(rule) for rule in rules)
        self.temperature, self.mean, self.scale = temperature, mean, scale

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        scaled = [part(numbers[:, i]) for i, part in enumerate(self.scalings)]
        inputs = torch.stack(scaled, dim=1).float() if scaled else numbers.float()
        outputs = self.model.answers(self.model(inputs, codes))
        if self.temperature is None:
            return outputs[:, 0].double() * self.scale + self.mean
        if outputs.shape[1] == 1:  # one logit of two classes
            outputs = torch.cat((torch.zeros_like(outputs), outputs), dim=1)
        return (outputs.double() / self.temperature).softmax(dim=1)


def export_onnx_table(
    graph: TableGraph,
    encoder: TableEncoder,
    directory: str | Path,
    *,
    expected: Callable[[RawColumns], Any],
    classes: Sequence[str] = (),
) -> list[str]:
    """Write a model for tables as ONNX, compare it with the model, and return notes.

    Parameters
    ----------
    graph : the model and its scalings.
    encoder : the fitted encoder of the columns.
    directory : where to write; it must not exist, or be empty.
    expected : from columns to the model's own predictions, to compare with.
    classes : names of the classes, in the order of the output.
    """
    for package in ("onnx", "onnxscript"):
        require(package, "export")
    runtime = require("onnxruntime", "export")
    if graph.model.along_rows:
        raise ConfigError("attention over rows depends on the batch: it is not written as ONNX.")
    if isinstance(graph.model, InstantPredictor):
        raise ConfigError(
            "an instant model reads its training rows for each prediction: it is not written as "
            "ONNX. Train one with table.model=ft."
        )
    if encoder.texts:
        name = encoder.texts[0].column
        raise ConfigError(f"free text is not written as ONNX: {name!r} is one. Leave it out.")
    if dates := [rule.column for rule in encoder.numbers if rule.part is not None]:
        raise ConfigError(f"dates are not written as ONNX: {dates[0]!r} is one. Leave it out.")
    directory = require_empty(directory)
    with new_directory(directory):
        _write_graph(graph, encoder, directory / "model.onnx")
        rows = random_rows(encoder, 64, missing=graph.knows_missing)
        session = runtime.InferenceSession(
            str(directory / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        (found,) = session.run(None, rows)
        size = 1.0 if graph.temperature is not None else abs(graph.scale)
        with torch.no_grad():
            difference = float(np.abs(found - np.asarray(expected(as_columns(rows)))).max() / size)
        if not difference <= ONNX_TOLERANCE:
            raise SavedError(
                f"{str(directory)!r} does not compute what the model does: outputs differ by up to "
                f"{difference:.2g}, above {ONNX_TOLERANCE:g}."
            )
        facts = {
            "numbers": [rule.column for rule in encoder.numbers],
            "categories": [rule.column for rule in encoder.categories],
            "classes": list(classes),
        }
        write_whole(directory / "model.json", f"{to_json(facts)}\n".encode())
    unit = "" if graph.temperature is not None else " standard deviations of the target"
    return [
        f"written as model.onnx: {len(encoder.names)} columns in, preprocessing included.",
        f"run in onnxruntime {runtime.__version__}: outputs of 64 random rows differ by up to "
        f"{difference:.2g}{unit}.",
    ]


def random_rows(encoder: TableEncoder, count: int, *, missing: bool) -> dict[str, Any]:
    """Return inputs of the graph: values inside and outside of the training data, and missing."""
    rng = np.random.default_rng(0)
    rows: dict[str, Any] = {}
    for rule in encoder.numbers:
        width = rule.high - rule.low or 1.0
        values = rng.uniform(rule.low - 0.1 * width, rule.high + 0.1 * width, count)
        knots = np.array(rule.knots or (rule.low,))
        values[::4] = rng.choice(np.clip(knots, rule.low, rule.high), len(values[::4]))
        values[3], values[5] = np.inf, -np.inf
        if missing:
            values[9:13] = np.nan
        rows[rule.column] = values
    for category in encoder.categories:
        values = rng.choice(np.array([*category.values, "a value that is new"], object), count)
        values[7] = ""
        rows[category.column] = values
    return rows


def as_columns(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the graph as columns of a table: None where a text is missing."""
    return {
        name: [value or None for value in values] if values.dtype == object else values
        for name, values in rows.items()
    }


def _write_graph(graph: TableGraph, encoder: TableEncoder, path: Path) -> None:
    onnx: Any = require("onnx", "export")
    compose: Any = require("onnx.compose", "export")
    batch = {0: Dim("batch", min=1, max=MAX_BATCH)}
    inputs: tuple[Tensor, ...] = (
        torch.zeros(3, len(encoder.numbers), dtype=torch.float64),
        torch.zeros(3, len(encoder.categories), dtype=torch.int64),
    )
    function: nn.Module = graph
    if not encoder.numbers or not encoder.categories:
        inputs = tuple(part for part in inputs if part.shape[1])
        function = NumbersGraph(graph) if encoder.numbers else CodesGraph(graph)
    with quiet_exporter(), torch.no_grad():
        shapes = tuple(batch for _ in inputs)
        program = torch.export.export(function, inputs, dynamic_shapes=shapes, strict=False)
        converted = torch.onnx.export(program, dynamo=True)
        assert converted is not None
        body = converted.model_proto
    front = _front(onnx, encoder, body)
    pairs = [(item.name, item.name) for item in front.graph.output]
    whole = compose.merge_models(front, body, io_map=pairs, prefix2="model/")
    onnx.checker.check_model(whole)
    onnx.save(whole, str(path))


class NumbersGraph(nn.Module):
    """A table without categories."""

    def __init__(self, graph: TableGraph) -> None:
        super().__init__()
        self.whole = graph

    def forward(self, numbers: Tensor) -> Tensor:
        return self.whole(numbers, numbers.new_zeros((numbers.shape[0], 0), dtype=torch.int64))


class CodesGraph(NumbersGraph):
    """A table without numbers."""

    def forward(self, codes: Tensor) -> Tensor:
        return self.whole(codes.new_zeros((codes.shape[0], 0), dtype=torch.float64), codes)


def _front(onnx: Any, encoder: TableEncoder, body: Any) -> Any:
    """Return the graph from columns to a matrix of numbers and one of codes."""
    helper, kinds = onnx.helper, onnx.TensorProto
    nodes, inputs = [], []
    outputs = {"numbers": [rule.column for rule in encoder.numbers]}
    outputs["codes"] = [rule.column for rule in encoder.categories]
    for rule in encoder.numbers:
        inputs.append(helper.make_tensor_value_info(rule.column, kinds.DOUBLE, ["batch"]))
    for category in encoder.categories:
        inputs.append(helper.make_tensor_value_info(category.column, kinds.STRING, ["batch"]))
        known = {"": MISSING} | {
            value: OTHER + 1 + number for number, value in enumerate(category.values)
        }
        nodes.append(
            helper.make_node(
                "LabelEncoder",
                [category.column],
                [f"code of {category.column}"],
                domain="ai.onnx.ml",
                keys_strings=list(known),
                values_int64s=list(known.values()),
                default_int64=OTHER,
            )
        )
    axis = helper.make_tensor("second axis", kinds.INT64, [1], [1])
    results = []
    for name, columns in outputs.items():
        if not columns:
            continue
        prefix = "" if name == "numbers" else "code of "
        for column in columns:
            source = [f"{prefix}{column}", "second axis"]
            nodes.append(helper.make_node("Unsqueeze", source, [f"column {name} {column}"]))
        parts = [f"column {name} {column}" for column in columns]
        nodes.append(helper.make_node("Concat", parts, [name], axis=1))
        kind = kinds.DOUBLE if name == "numbers" else kinds.INT64
        results.append(helper.make_tensor_value_info(name, kind, ["batch", len(columns)]))
    graph = helper.make_graph(nodes, "columns", inputs, results, initializer=[axis])
    version = next(item.version for item in body.opset_import if item.domain in ("", "ai.onnx"))
    opsets = [helper.make_opsetid("", version), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=body.ir_version)
