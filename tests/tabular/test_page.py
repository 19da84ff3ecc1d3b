"""Pages about models for tables: sections, charts, and the order of their bars."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from addnorm.data.table.schema import Column, Schema
from addnorm.report import Page
from addnorm.tabular.explain import Explanation, RowExplanation
from addnorm.tabular.page import add_results, explanation_page, row_page

SCHEMA = Schema(
    columns=(
        Column(name="age", kind="number", note="7 values"),
        Column(name="code", kind="ignore", note="constant: always 'x'"),
    ),
    target="paid",
    task="classes",
)


def model() -> Any:
    """Return the part of a fitted estimator that a page uses."""
    return SimpleNamespace(report_={}, encoder_=SimpleNamespace(schema=SCHEMA))


def sections(page: Page) -> list[str]:
    return re.findall(r"<h2[^>]*>(.*?)</h2>", page.html())


def order_of(page: Page, title: str, names: tuple[str, ...]) -> list[str]:
    """Return the names in the order in which the chart of that title describes them."""
    (description,) = re.findall(
        rf"<title[^>]*>{title}</title>\s*<desc[^>]*>(.*?)</desc>", page.html()
    )
    return sorted(names, key=lambda name: description.index(f"{name}: "))


BINS = {"as trained": [(0.1, 0.2, 30), (0.9, 0.8, 30)], "calibrated": [(0.2, 0.2, 60)]}


def test_results_have_metrics_reliability_and_columns() -> None:
    results = [
        {"model": "OurModel", "on": "test.csv", "log_loss": 0.5},
        {"model": "boosting", "fit_seconds": 3.0, "version": "x 1.2", "settings": "defaults"},
    ]
    figures = {"held_out": 2345, "temperature": 1.2345, "reliability": BINS, "results": results}
    add_results(page := Page("Run"), figures, SCHEMA)
    assert sections(page) == ["Figures", "Reliability", "Columns"]
    html = page.html()
    for text in ("2,345 rows were held out", "1.234"):
        assert text in html
    heads = re.findall(r"<th [^>]*>(.*?)</th>", html)
    assert heads[:6] == ["", "log loss", "fit s", "model", "version", "settings"]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in html.split("<tr>")[2:4]]
    assert rows == [["OurModel · test.csv", "0.5", "–"], ["boosting", "–", "3"]]
    assert ">x 1.2<" in html and ">defaults<" in html
    assert "Predicted probability and frequency" in html
    assert "The probability is that of the predicted class, on" in html
    for cell in ("age", "number", "7 values", "code", "ignore"):
        assert f">{cell}<" in html


def test_figures_are_divided_so_that_none_is_cut_off() -> None:
    """With log loss, Brier score, ECE and both times, the last of eight columns was cut off."""
    metrics = ("accuracy", "f1", "auc", "log_loss", "brier", "ece", "fit_seconds")
    row = {"model": "LightGBM", **dict.fromkeys((*metrics, "predict_seconds"), 0.5)}
    add_results(page := Page("Run"), {"results": [row]}, SCHEMA)
    heads = re.findall(r"<th [^>]*>(.*?)</th>", page.html())
    assert heads[:7] == ["", "accuracy", "f1", "auc", "log loss", "brier", "ece"]
    assert heads[7:10] == ["", "fit s", "predict s"]
    assert ">LightGBM<" in page.html(), "the name of a library is not divided"


def test_the_reliability_of_two_classes_is_that_of_the_second() -> None:
    add_results(page := Page("Run"), {"reliability": BINS}, SCHEMA, ["no", "yes"])
    assert "The probability is that of class &#x27;yes&#x27;, on" in page.html()


def test_results_without_held_out_rows_have_no_calibration() -> None:
    """There is no temperature and no reliability diagram."""
    add_results(page := Page("Run"), {"results": [{"rmse": 1.0}]}, SCHEMA)
    assert sections(page) == ["Figures", "Columns"]
    assert "held out" not in page.html() and "temperature" not in page.html()


def explanation(**changes: Any) -> Explanation:
    settings: dict[str, Any] = {
        "columns": ("age", "job", "town"),
        "permutation": (0.1, 0.3, 0.2),
        "gradient": (5.0, 6.0, 7.0),
        "attention": (0.5, 0.1, 0.2),
        "column_attention": np.array([[0.25, 0.75], [0.5, 0.5]]),
        "attention_columns": ("age", "job"),
        "agreement": {"permutation and gradient": 0.125},
    }
    return Explanation(**settings | changes)


@pytest.mark.parametrize(
    ("title", "order"),
    (
        ("Increase of the loss when the column is shuffled", ["job", "town", "age"]),
        (
            "Mean absolute contribution of the column, by integrated gradients",
            ["town", "job", "age"],
        ),
        ("Attention of the summary to the column", ["age", "town", "job"]),
    ),
)
def test_each_measure_shows_the_largest_value_first(title: str, order: list[str]) -> None:
    page = explanation_page(explanation(), model())
    assert order_of(page, title, ("age", "job", "town")) == order


def test_measures_that_a_model_does_not_have_are_not_shown() -> None:
    whole = explanation_page(explanation(), model())
    assert sections(whole) == ["Which columns matter", "Attention between columns"]
    assert "permutation and gradient" in whole.html() and "0.125" in whole.html()
    assert whole.html().count("<svg") == whole.html().count("<figcaption>") == 4
    less = explanation_page(
        explanation(attention=None, attention_columns=(), column_attention=np.zeros((0, 0))),
        model(),
    )
    assert sections(less) == ["Which columns matter"]
    assert "Attention of the summary" not in less.html() and less.html().count("<svg") == 2


def test_a_row_page_shows_the_largest_contribution_first() -> None:
    one = RowExplanation(
        columns=("age", "job", "town"),
        values=("31", "cook", "missing"),
        contributions=(0.5, -2.0, 1.0),
        output=1.5,
        baseline=-0.25,
        output_name="the log-odds of yes",
        probability=0.817,
        title="Why paid: row 17",
    )
    page = row_page(one, model())
    html = page.html()
    assert sections(page) == ["Contribution of each column"]
    for text in ("Why paid: row 17", "the log-odds of yes", "1.5", "baseline", "−0.25"):
        assert text in html
    shown = ("age = 31", "job = cook", "town = missing")
    title = "Contribution to the difference from the baseline"
    assert order_of(page, title, shown) == ["job = cook", "town = missing", "age = 31"]
    assert one._repr_html_().startswith("<iframe") and "Why paid: row 17" in one._repr_html_()


def test_shap_stands_beside_our_numbers() -> None:
    one = RowExplanation(
        columns=("age", "job"),
        values=("31", "cook"),
        contributions=(0.5, -2.0),
        output=1.5,
        baseline=3.0,
        output_name="the predicted number",
        interactions=(("age", "job", 0.25),),
        shap=(0.375, -1.875),
        shap_interactions=(0.3125,),
    )
    page = row_page(one)
    assert sections(page) == ["Contribution of each column", "Interactions", "Beside SHAP"]
    for text in ("−1.875", "0.3125", "0.375"):
        assert text in page.html()
    pairs = {"interactions": (("age", "job", 0.25, 0.9),), "shap_interactions": (0.3125,)}
    whole = explanation(**pairs, shap=(1.5, 2.5, 0.5))
    page = explanation_page(whole)
    title = "Mean absolute SHAP value of the column, to compare"
    assert order_of(page, title, ("age", "job", "town")) == ["job", "age", "town"]
    assert ">SHAP<" in page.html() and "0.3125" in page.html()
    assert ">SHAP<" not in explanation_page(explanation()).html()
    assert whole._repr_html_().startswith("<iframe")


def test_intervals_of_numbers_are_shown() -> None:
    metrics = {"rmse": 1.5, "crps": 0.7, "coverage_80": 0.815, "width_80": 4.25}
    metrics |= {"coverage_90": 0.9, "width_90": 5.0}
    fan = {"predicted": [0, 1, 2, 3, 4], "observed": [1, 1, 2, 3, 3], "residual": [-1, 0, 0, 0, 1]}
    figures = {
        "held_out": 300,
        "target": "64 bins from 0 to 9",
        "results": [{"model": "OurModel", "on": "test.csv", **metrics}, {"model": "boosting"}],
        "coverage": {"as trained": [(0.8, 0.9, 300)], "test": [(0.8, 0.815, 400)]},
        "fan": [{**fan, "rows": 12}, {**fan, "predicted": [1, 2, 3, 4, 5], "rows": 13}],
    }
    add_results(page := Page("Run"), figures, SCHEMA)
    assert sections(page) == ["Figures", "Intervals", "Columns"]
    html = page.html()
    heads = re.findall(r"<th [^>]*>(.*?)</th>", html)
    assert heads[:7] == ["", "rmse", "crps", "", "interval", "targets inside", "mean width"]
    for text in ("over 64 bins from 0 to 9", "81.5 %", ">4.25<", "Groups of test rows", "13 rows"):
        assert text in html
    for title in ("Predicted and observed", "Residuals", "Stated level of an interval"):
        assert f"<title>{title}" in html


def test_many_figures_are_several_tables() -> None:
    results = [{"model": "OurModel", **{f"f{i}": float(i) for i in range(11)}}]
    add_results(page := Page("Run"), {"results": results}, SCHEMA)
    heads = re.findall(r"<th [^>]*>(.*?)</th>", page.html())
    assert heads[:13] == ["", *(f"f{i}" for i in range(6)), "", *(f"f{i}" for i in range(6, 11))]
