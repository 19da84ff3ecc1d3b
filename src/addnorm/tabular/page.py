"""Pages about a model for tables: its results, and explanations of its predictions."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from addnorm.data.table.schema import Schema
from addnorm.report import Page, bar_chart, heat_map, reliability_chart
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.explain import Explanation, RowExplanation


def add_results(
    page: Page, figures: Mapping[str, Any], schema: Schema, labels: Sequence[str] = ()
) -> None:
    """Add metrics, reliability diagrams and columns of a trained model to the page of its run.

    Parameters
    ----------
    page : page to add to.
    figures : figures of the run's summary; `results` has the metrics of each model, and the rows
        that it was evaluated on.
    schema : the kind of each column.
    labels : the classes, for a classifier.
    """
    results: Sequence[Mapping[str, Any]] = figures.get("results", ())
    page.section("Figures")
    labelling = ("model", "on")
    heads = [
        " · ".join(split_words(row[name]) for name in labelling if name in row) for row in results
    ]
    names = dict.fromkeys(name for row in results for name in row if name not in labelling)
    page.table(
        ["", *heads],
        [
            [
                name.replace("_seconds", " s").replace("_", " "),
                *(_figure(row, name) for row in results),
            ]
            for name in names
        ],
    )
    if "temperature" in figures:
        page.text(
            f"{figures['held_out']:,} rows were held out for early stopping and calibration: all "
            f"logits are divided by the temperature {figures['temperature']:.3f}. Rows of a test "
            "file were used for neither."
        )
    if "reliability" in figures:
        page.section("Reliability")
        which = f"class {labels[1]!r}" if len(labels) == 2 else "the predicted class"
        page.figure(
            reliability_chart(figures["reliability"], title="Predicted probability and frequency"),
            "Points on the diagonal are calibrated: of rows with probability 0.8, 80 % are of that "
            f"class. The probability is that of {which}, on the held-out rows before and after "
            "calibration, and on the test file if there is one.",
        )
    page.section("Columns")
    page.table(["column", "kind", "note"], [[c.name, c.kind, c.note] for c in schema.columns])


def _figure(row: Mapping[str, Any], name: str) -> float | None:
    """Return a figure, seconds with three digits."""
    value = row.get(name)
    return float(f"{value:.3g}") if value is not None and name.endswith("_seconds") else value


def split_words(name: str) -> str:
    """Return a name with spaces between its words, so that it can be broken into lines.

    >>> split_words("HistGradientBoosting")
    'Hist Gradient Boosting'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)


def explanation_page(explanation: Explanation, estimator: TableEstimator) -> Page:
    """Return a page with the three measures of which columns matter, and their attention map."""
    page = Page(f"Why {estimator.encoder_.schema.target}", type(estimator).__name__)
    page.section("Which columns matter")
    measures: dict[str, Sequence[float] | None] = {
        "Increase of the loss when the column is shuffled": explanation.permutation,
        "Mean absolute contribution of the column, by integrated gradients": explanation.gradient,
        "Attention of the summary to the column": explanation.attention,
    }
    for title, values in measures.items():
        if values is not None:
            pairs = zip(explanation.columns, values, strict=True)
            ranked = sorted(pairs, key=lambda pair: -pair[1])
            page.figure(bar_chart(ranked, title=title), f"{title}.")
    page.text(
        "Attention shows what the model reads, not what its prediction depends on. Where the "
        "measures disagree, trust the shuffling."
    )
    page.table(["measures", "rank correlation"], list(explanation.agreement.items()))
    if explanation.interactions:
        page.section("Interactions")
        page.table(
            ["columns", "strength", "H"],
            [[f"{one} and {other}", size, h] for one, other, size, h in explanation.interactions],
            "Joint effect of two columns beyond the sum of their single effects: its root mean "
            "square in units of the output, and relative to the joint effect (Friedman's H).",
        )
    if explanation.attention_columns:
        page.section("Attention between columns")
        names = list(explanation.attention_columns)
        weights = explanation.column_attention.tolist()
        page.figure(
            heat_map(weights, names, names, title="Attention", low=0.0),
            "Mean attention of the column on the left to the column above, over blocks and heads.",
        )
    return page


def row_page(explanation: RowExplanation, row: int, estimator: TableEstimator) -> Page:
    """Return a page with the contribution of each column for one row, counted from 1."""
    page = Page(f"Why {estimator.encoder_.schema.target}: row {row}", type(estimator).__name__)
    facts = [(explanation.output_name, explanation.output)]
    if explanation.probability is not None:
        facts.append(("its probability", explanation.probability))
    baseline = f"baseline (mean of {explanation.baseline_name})"
    page.facts([*facts, (baseline, explanation.baseline)])
    page.section("Contribution of each column")
    bars = [(f"{name} = {value}", part) for name, value, part in explanation.ranked()]
    title = "Contribution to the difference from the baseline"
    page.figure(bar_chart(bars, title=title), f"{title}; the sum is the difference.")
    if explanation.interactions:
        page.section("Interactions")
        effects = [(f"{one} and {other}", value) for one, other, value in explanation.interactions]
        title = "Joint effect of two columns beyond the sum of their single effects"
        page.figure(bar_chart(effects, title=title), f"{title}, for this row.")
    return page
