"""Pages about a model for tables: its results, and explanations of its predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

from addnorm.data.table.schema import Schema
from addnorm.lens.explanation import SequenceExplanation
from addnorm.lens.page import page_data
from addnorm.lens.page_script import PAGE_SCRIPT, PAGE_STYLE
from addnorm.report import (
    NARROW,
    Page,
    bar_chart,
    fan_chart,
    heat_map,
    interval_chart,
    reliability_chart,
)
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.explain import Explanation, RowExplanation

MAX_FIGURES = 6
"""Columns of a table of figures: more would be cut off on a page of 1,100 pixels."""


SHOWN_CLASSES, SHOWN_COLUMNS = 20, 30
"""Classes and columns that are shown."""


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
    words = ("model", "on", "version", "settings")
    names = dict.fromkeys(
        name
        for row in results
        for name in row
        if name not in words and not name.startswith(("coverage_", "width_"))
    )
    for part in divide_figures(list(names)):
        page.table(
            ["", *(name.replace("_seconds", " s").replace("_", " ") for name in part)],
            [
                [
                    " · ".join(row[name] for name in ("model", "on") if name in row),
                    *(_figure(row, name) for name in part),
                ]
                for row in results
            ],
        )
    others = [row for row in results if "settings" in row]
    if others:
        page.text(
            "The other models were fitted to the same training rows; those that stop early did so "
            "on the same held-out rows."
        )
        page.table(
            ["model", "version", "settings"],
            [[row["model"], row["version"], row["settings"]] for row in others],
        )
    if "coverage" in figures:
        _add_intervals(page, figures, results, str(schema.target))
    elif "temperature" in figures:
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
    if "classes" in figures and labels:
        _add_classes(page, figures["classes"], labels)
    if "importance" in figures:
        _add_importance(page, figures["importance"])
    page.section("Columns")
    page.table(["column", "kind", "note"], [[c.name, c.kind, c.note] for c in schema.columns])


def _add_classes(page: Page, classes: Mapping[str, Any], labels: Sequence[str]) -> None:
    """Add base rate, mean probability, precision and recall of each class, and the confusion."""
    page.section("Classes")
    where = f"{classes['rows']:,} rows ({classes.get('on', 'held out')})"
    names = ("base_rate", "mean_probability", "precision", "recall")
    page.table(
        ["class", "base rate", "mean probability", "precision", "recall"],
        [
            [label, *(classes[name][k] for name in names)]
            for k, label in enumerate(labels[:SHOWN_CLASSES])
        ],
        f"On {where}. The base rate is the share of a class: a model that knows nothing predicts "
        "it for every row.",
    )
    counts = [row[:SHOWN_CLASSES] for row in classes["counts"][:SHOWN_CLASSES]]
    shown = [str(label) for label in labels[:SHOWN_CLASSES]]
    part = f" The first {SHOWN_CLASSES} of {len(labels)} classes." * (len(labels) > SHOWN_CLASSES)
    page.figure(
        heat_map(counts, shown, shown, title="Confusion", x="predicted", y="class", low=0.0),
        f"Number of rows of each class by predicted class: {where}.{part}",
    )


def _add_importance(page: Page, importance: Mapping[str, Any]) -> None:
    """Add the permutation importance of the columns, with error bars."""
    columns: Sequence[Mapping[str, Any]] = importance["columns"]
    page.section("Which columns matter")
    bars = [(each["column"], each["importance"], each["error"]) for each in columns[:SHOWN_COLUMNS]]
    part = f" The first {SHOWN_COLUMNS} of {len(columns)} columns." * (len(columns) > SHOWN_COLUMNS)
    title = "Increase of the loss when a column is shuffled"
    page.figure(
        interval_chart(bars, title=title, x="increase of the loss", guide=0.0),
        f"On {importance['on']}; the bars are ± one standard error over rows. Columns with the "
        f"same information share it.{part} addnorm explain shows more.",
    )


def _add_intervals(
    page: Page, figures: Mapping[str, Any], results: Sequence[Mapping[str, Any]], target: str
) -> None:
    """Add coverage and width of intervals, a fan chart and residuals."""
    page.section("Intervals")
    page.text(
        f"The predicted distribution of {target} is over {figures.get('target', 'bins')}; its mean "
        f"is the prediction. {figures['held_out']:,} rows were held out for early stopping and "
        "calibration. Rows of a test file were used for neither."
    )
    measured = [row for row in results if "coverage_90" in row]
    kinds = [name for name in (measured[0] if measured else ()) if name.startswith("coverage_")]
    page.table(
        ["", "interval", "targets inside", "mean width"],
        [
            [
                " · ".join(row[name] for name in ("model", "on") if name in row),
                f"{kind.removeprefix('coverage_')} %",
                f"{100 * row[kind]:.1f} %",
                row[kind.replace("coverage", "width")],
            ]
            for row in measured
            for kind in kinds
        ],
    )
    title = "Stated level of an interval, and share of targets inside"
    page.figure(
        reliability_chart(figures.get("coverage", {}), title=title, x="stated level"),
        "Points on the diagonal are calibrated: an interval of 80 % holds 80 % of the targets. On "
        "the held-out rows before and after calibration, and on the test file if there is one.",
    )
    groups: Sequence[Mapping[str, Any]] = figures.get("fan") or ()
    if groups:
        fans = [(g["predicted"][2], g["predicted"], g["observed"], g["rows"]) for g in groups]
        rows = "test rows" if "test" in figures.get("coverage", {}) else "held-out rows"
        page.figure(
            fan_chart(fans, title="Predicted and observed", x="predicted median", y=target),
            f"Groups of {rows} by their predicted median: the bands hold 90 % and 50 % of what is "
            "predicted, the bars 90 % of what is observed.",
        )
        flat = [0.0] * 5
        residuals = [(g["predicted"][2], flat, g["residual"], g["rows"]) for g in groups]
        page.figure(
            fan_chart(residuals, title="Residuals", x="predicted median", y="target − prediction"),
            "Of the same groups: the median residual and 90 % of the residuals. Medians off the "
            "line are a bias.",
        )


def _figure(row: Mapping[str, Any], name: str) -> float | None:
    """Return a figure, seconds with three digits."""
    value = row.get(name)
    return float(f"{value:.3g}") if value is not None and name.endswith("_seconds") else value


def divide_figures(names: Sequence[str]) -> list[list[str]]:
    """Return the names of figures by table; times have one of their own if there are many others.

    >>> divide_figures(["auc", "fit_seconds"])
    [['auc', 'fit_seconds']]
    """
    if len(names) <= MAX_FIGURES:
        return [list(names)]
    scores = [name for name in names if not name.endswith("_seconds")]
    times = [name for name in names if name.endswith("_seconds")]
    parts = [scores[i : i + MAX_FIGURES] for i in range(0, len(scores), MAX_FIGURES)]
    return [*parts, *([times] if times else [])]


def explanation_page(explanation: Explanation, estimator: TableEstimator | None = None) -> Page:
    """Return a page with the three measures of which columns matter, and their attention map."""
    page = Page(explanation.title, "" if estimator is None else type(estimator).__name__)
    page.section("Which columns matter")
    measures: dict[str, Sequence[float] | None] = {
        "Increase of the loss when the column is shuffled": explanation.permutation,
        "Mean absolute contribution of the column, by integrated gradients": explanation.gradient,
        "Attention of the summary to the column": explanation.attention,
        "Mean absolute SHAP value of the column, to compare": explanation.shap,
    }
    for title, values in measures.items():
        if values is not None:
            pairs = zip(explanation.columns, values, strict=True)
            ranked = sorted(pairs, key=lambda pair: -pair[1])
            page.figure(bar_chart(ranked, title=title, size=NARROW), f"{title}.")
    page.text(
        "Attention shows what the model reads, not what its prediction depends on. Where the "
        "measures disagree, trust the shuffling."
    )
    page.table(["measures", "rank correlation"], list(explanation.agreement.items()))
    if explanation.interactions:
        page.section("Interactions")
        effects = explanation.interactions
        bars = [(f"{one} and {other}", size) for one, other, size, _ in effects]
        title = "Joint effect of two columns beyond the sum of their single effects"
        page.figure(bar_chart(bars, title=title, size=NARROW), f"{title}: its root mean square.")
        compared = explanation.shap_interactions
        page.table(
            ["columns", "strength", "H", *(["SHAP"] if compared is not None else [])],
            [
                [f"{one} and {other}", size, h, *(compared[i : i + 1] if compared else ())]
                for i, (one, other, size, h) in enumerate(effects)
            ],
            "Strength in units of the output, and relative to the joint effect (Friedman's H); "
            "beside it the Shapley interaction, if the package shap is installed.",
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


def row_page(explanation: RowExplanation, estimator: TableEstimator | None = None) -> Page:
    """Return a page with the contribution of each column for one row."""
    page = Page(explanation.title, "" if estimator is None else type(estimator).__name__)
    facts = [(explanation.output_name, explanation.output)]
    if explanation.probability is not None:
        facts.append(("its probability", explanation.probability))
    baseline = f"baseline (mean of {explanation.baseline_name})"
    page.facts([*facts, (baseline, explanation.baseline)])
    page.section("Contribution of each column")
    bars = [(f"{name} = {value}", part) for name, value, part in explanation.ranked()]
    title = "Contribution to the difference from the baseline"
    page.figure(bar_chart(bars, title=title, size=NARROW), f"{title}; the sum is the difference.")
    if explanation.interactions:
        page.section("Interactions")
        effects = [(f"{one} and {other}", value) for one, other, value in explanation.interactions]
        title = "Joint effect of two columns beyond the sum of their single effects"
        page.figure(bar_chart(effects, title=title, size=NARROW), f"{title}, for this row.")
    if explanation.network is not None:
        _add_network(page, explanation.network)
    if explanation.shap is not None and explanation.shap_interactions is not None:
        page.section("Beside SHAP")
        rows = zip(explanation.columns, explanation.contributions, explanation.shap, strict=True)
        page.table(
            ["column", "contribution", "SHAP"],
            [list(row) for row in sorted(rows, key=lambda row: -abs(row[1]))],
            "Expected gradients and Shapley values, from the same background rows.",
        )
        pairs = zip(explanation.interactions, explanation.shap_interactions, strict=True)
        page.table(
            ["columns", "joint effect", "SHAP"],
            [[f"{one} and {other}", value, effect] for (one, other, value), effect in pairs],
            "By partial dependence, and by the Shapley-Taylor index.",
        )
    return page


def _add_network(page: Page, network: SequenceExplanation) -> None:
    """Add attention by layer and head, and of classes the pieces and layers of the output."""
    page.section("Layers and heads")
    text = "Columns are shaded by their contribution; point at one for the attention to it."
    if network.pieces[0]:
        text += (
            f" The bars show the pieces that the {network.kind} is the exact sum of, and the table "
            "what the model would have said after each layer."
        )
    page.text(
        f"{text} Below, choose a layer and a head and point at a cell. Attention is what was read, "
        "not what mattered; in the last block only the summary reads."
    )
    data, averaged = page_data(network)
    page.widget(PAGE_SCRIPT, data, PAGE_STYLE)
    if averaged:
        page.remark(f"The maps are large: the mean over {averaged} is shown.", "note")
