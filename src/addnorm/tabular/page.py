"""Pages on a model for tables: how training went, and why it answers as it does."""

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
    """Add figures, reliability and columns of a trained model to the page of its run.

    Parameters
    ----------
    page : page to add to.
    figures : those of the summary; `results` has a mapping for each model and the rows that it
        was evaluated on.
    schema : what each column is.
    labels : the classes, if it predicts classes.
    """
    results: Sequence[Mapping[str, Any]] = figures.get("results", ())
    page.section("Figures")
    who = ("model", "on")
    heads = [" · ".join(in_words(row[name]) for name in who if name in row) for row in results]
    names = dict.fromkeys(name for row in results for name in row if name not in who)
    page.table(
        ["", *heads],
        [
            [
                name.replace("_seconds", " s").replace("_", " "),
                *(_short(row, name) for row in results),
            ]
            for name in names
        ],
    )
    if "temperature" in figures:
        page.text(
            f"{figures['held_out']:,} rows were held out. They decided when to stop, and on them "
            f"one temperature was learnt, {figures['temperature']:.3f}, by which all logits are "
            "divided; rows of a test file had no part in either."
        )
    if "reliability" in figures:
        page.section("Reliability")
        which = f"class {labels[1]!r}" if len(labels) == 2 else "the predicted class"
        page.figure(
            reliability_chart(figures["reliability"], title="Predicted probability and frequency"),
            "Points on the diagonal are calibrated: of rows with probability 0.8, 80 % come true. "
            f"The probability is that of {which}, on the held-out rows before and after "
            "calibration, and on the test file if there is one.",
        )
    page.section("Columns")
    page.table(["column", "kind", "note"], [[c.name, c.kind, c.note] for c in schema.columns])


def _short(row: Mapping[str, Any], name: str) -> float | None:
    """A figure, or seconds in three digits."""
    value = row.get(name)
    return float(f"{value:.3g}") if value is not None and name.endswith("_seconds") else value


def in_words(name: str) -> str:
    """A name that can be parted into lines.

    >>> in_words("HistGradientBoosting")
    'Hist Gradient Boosting'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)


def explanation_page(found: Explanation, estimator: TableEstimator) -> Page:
    """Which columns matter, in three views, and which look at which."""
    page = Page(f"Why {estimator.encoder_.schema.target}", type(estimator).__name__)
    page.section("Which columns matter")
    views: dict[str, Sequence[float] | None] = {
        "Rise of the loss when the column is shuffled": found.permutation,
        "Mean size of the column's share of the answer, by integrated gradients": found.gradient,
        "Attention of the summary to the column": found.attention,
    }
    for title, view in views.items():
        if view is not None:
            pairs = sorted(zip(found.columns, view, strict=True), key=lambda pair: -pair[1])
            page.figure(bar_chart(pairs, title=title), f"{title}.")
    page.text("Attention is what was looked at. Where the views differ, believe the shuffling.")
    page.table(["views", "rank correlation"], [list(pair) for pair in found.agreement.items()])
    if found.interactions:
        page.section("Interactions")
        page.table(
            ["columns", "strength", "H"],
            [[f"{one} and {other}", size, h] for one, other, size, h in found.interactions],
            "What two columns do beyond the sum of their single effects: its mean size in the "
            "unit of the answer, and as a share of their joint effect (Friedman's H).",
        )
    if found.looking:
        page.section("Which columns look at which")
        names = list(found.looking)
        page.figure(
            heat_map(found.looks.tolist(), names, names, title="Attention", low=0.0),
            "Mean attention of the column on the left to the column above, over blocks and heads.",
        )
    return page


def row_page(one: RowExplanation, row: int, estimator: TableEstimator) -> Page:
    """What each column adds to the answer for one row, counted from 1."""
    page = Page(f"Why {estimator.encoder_.schema.target}: row {row}", type(estimator).__name__)
    sure = [] if one.probability is None else [("its probability", one.probability)]
    page.facts([(one.about, one.answer), *sure, (f"baseline: mean of {one.baseline}", one.typical)])
    page.section("What each column adds")
    shares = [(f"{name} = {value}", share) for name, value, share in one.ranked()]
    title = "Share of the difference from the baseline"
    page.figure(bar_chart(shares, title=title), f"{title}; they add up to it.")
    if one.interactions:
        page.section("Which columns act together")
        pairs = [(f"{a} and {b}", value) for a, b, value in one.interactions]
        title = "Effect of two columns beyond the sum of their single effects"
        page.figure(bar_chart(pairs, title=title), f"{title}, for this row.")
    return page
