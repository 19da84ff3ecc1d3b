"""Pages on a model for tables: how training went, and why it answers as it does."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from addnorm.report import Page, bars, heat_map, lines, reliability
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.explain import Explanation, RowExplanation


def summary_page(estimator: TableEstimator, rows: Sequence[Mapping[str, Any]]) -> Page:
    """What was found in training: figures, curve, reliability, columns.

    `rows` are the figures, one mapping for each model and data that it was measured on.
    """
    told, kept = estimator.report_, estimator.recipe_.schema
    about = f"{type(estimator).__name__}, {told['rows']:,} rows, {told['parameters']:,} parameters"
    page = Page(str(kept.target), about)
    page.section("Figures")
    who = ("model", "on")
    heads = [" · ".join(in_words(row[name]) for name in who if name in row) for row in rows]
    figures = dict.fromkeys(name for row in rows for name in row if name not in who)
    page.table(
        ["", *heads],
        [
            [name.replace("_seconds", " s").replace("_", " "), *(_short(row, name) for row in rows)]
            for name in figures
        ],
    )
    if "temperature" in told:
        page.text(
            f"{told['held_out']:,} rows were held out. They decided when to stop, and on them one "
            f"temperature was learnt, {told['temperature']:.3f}, by which all logits are divided; "
            "rows of a test file had no part in either."
        )
    history = [(row["step"], row["loss"]) for row in told["history"] if row["loss"]]
    if history:
        page.section("Training")
        page.figure(lines({"held-out loss": history}, title="Held-out loss", x="step", y="loss"))
    if "reliability" in told:
        page.section("Reliability")
        page.figure(
            reliability(told["reliability"], title="What was said, and how often it came true"),
            "On the line, of rows given 0.8 eight in ten came true. Rows held out, as trained and "
            "calibrated, and rows of a test file if there was one.",
        )
    page.section("Columns")
    page.table(["column", "kind", "note"], [[c.name, c.kind, c.note] for c in kept.columns])
    return page


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
    page = Page(f"Why {estimator.recipe_.schema.target}", type(estimator).__name__)
    page.section("Which columns matter")
    views: dict[str, Sequence[float] | None] = {
        "Rise of the loss when the column is shuffled": found.permutation,
        "Mean size of the column's share of the answer, by integrated gradients": found.gradient,
        "Attention of the summary to the column": found.attention,
    }
    for title, view in views.items():
        if view is not None:
            pairs = sorted(zip(found.columns, view, strict=True), key=lambda pair: -pair[1])
            page.figure(bars(pairs, title=title), f"{title}.")
    page.text("Attention is what was looked at. Where the views differ, believe the shuffling.")
    page.table(["views", "rank correlation"], [list(pair) for pair in found.agreement.items()])
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
    page = Page(f"Why {estimator.recipe_.schema.target}: row {row}", type(estimator).__name__)
    sure = [] if one.probability is None else [("its probability", one.probability)]
    page.facts([(one.about, one.answer), *sure, ("of a row with nothing known", one.typical)])
    page.section("What each column adds")
    shares = [(f"{name} = {value}", share) for name, value, share in one.ranked()]
    title = "Share of the difference from a row with nothing known"
    page.figure(bars(shares, title=title), f"{title}; they add up to it.")
    return page
