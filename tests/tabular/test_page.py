"""Pages on models for tables: every section, its pictures, and the order in them."""

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
    """What a page asks of a fitted estimator."""
    return SimpleNamespace(report_={}, encoder_=SimpleNamespace(schema=SCHEMA))


def sections(page: Page) -> list[str]:
    return re.findall(r"<h2[^>]*>(.*?)</h2>", page.html())


def order_of(page: Page, title: str, names: tuple[str, ...]) -> list[str]:
    """The names in the order in which the picture of that title describes them."""
    (told,) = re.findall(rf"<title[^>]*>{title}</title>\s*<desc[^>]*>(.*?)</desc>", page.html())
    return sorted(names, key=lambda name: told.index(f"{name}: "))


BINS = {"as trained": [(0.1, 0.2, 30), (0.9, 0.8, 30)], "calibrated": [(0.2, 0.2, 60)]}


def test_a_summary_has_what_was_found() -> None:
    results = [
        {"model": "OurModel", "on": "test.csv", "log_loss": 0.5},
        {"model": "boosting", "fit_seconds": 3.0},
    ]
    figures = {"held_out": 2345, "temperature": 1.2345, "reliability": BINS, "results": results}
    add_results(page := Page("Run"), figures, SCHEMA)
    assert sections(page) == ["Figures", "Reliability", "Columns"]
    html = page.html()
    for said in ("2,345 rows were held out", "1.234"):
        assert said in html
    heads = re.findall(r"<th [^>]*>(.*?)</th>", html)
    assert heads[:3] == ["", "Our Model · test.csv", "boosting"]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in html.split("<tr>")[2:4]]
    assert rows == [["log loss", "0.5", "–"], ["fit s", "–", "3"]]
    assert "Predicted probability and frequency" in html
    assert "The probability is that of the predicted class, on" in html
    for cell in ("age", "number", "7 values", "code", "ignore"):
        assert f">{cell}<" in html


def test_the_reliability_of_two_classes_is_about_the_second() -> None:
    add_results(page := Page("Run"), {"reliability": BINS}, SCHEMA, ["no", "yes"])
    assert "The probability is that of class &#x27;yes&#x27;, on" in page.html()


def test_a_summary_has_no_more_than_was_found() -> None:
    """Nothing was held out: there is no temperature, and no reliability."""
    add_results(page := Page("Run"), {"results": [{"rmse": 1.0}]}, SCHEMA)
    assert sections(page) == ["Figures", "Columns"]
    assert "held out" not in page.html() and "temperature" not in page.html()


def explanation(**changes: Any) -> Explanation:
    settings: dict[str, Any] = {
        "columns": ("age", "job", "town"),
        "permutation": (0.1, 0.3, 0.2),
        "gradient": (5.0, 6.0, 7.0),
        "attention": (0.5, 0.1, 0.2),
        "looks": np.array([[0.25, 0.75], [0.5, 0.5]]),
        "looking": ("age", "job"),
        "agreement": {"permutation and gradient": 0.125},
    }
    return Explanation(**settings | changes)


@pytest.mark.parametrize(
    ("title", "order"),
    (
        ("Rise of the loss when the column is shuffled", ["job", "town", "age"]),
        (
            "Mean size of the column's share of the answer, by integrated gradients",
            ["town", "job", "age"],
        ),
        ("Attention of the summary to the column", ["age", "town", "job"]),
    ),
)
def test_each_view_has_its_greatest_first(title: str, order: list[str]) -> None:
    page = explanation_page(explanation(), model())
    escaped = title.replace("'", "(?:'|&#x27;|&#39;)")
    assert order_of(page, escaped, ("age", "job", "town")) == order


def test_views_that_a_model_does_not_have_are_not_shown() -> None:
    whole = explanation_page(explanation(), model())
    assert sections(whole) == ["Which columns matter", "Which columns look at which"]
    assert "permutation and gradient" in whole.html() and "0.125" in whole.html()
    assert whole.html().count("<svg") == whole.html().count("<figcaption>") == 4
    less = explanation_page(
        explanation(attention=None, looking=(), looks=np.zeros((0, 0))), model()
    )
    assert sections(less) == ["Which columns matter"]
    assert "Attention of the summary" not in less.html() and less.html().count("<svg") == 2


def test_one_row_has_its_strongest_first() -> None:
    one = RowExplanation(
        columns=("age", "job", "town"),
        values=("31", "cook", "missing"),
        shares=(0.5, -2.0, 1.0),
        answer=1.5,
        typical=-0.25,
        about="the log-odds of yes",
        probability=0.817,
    )
    page = row_page(one, 17, model())
    html = page.html()
    assert sections(page) == ["What each column adds"]
    for said in ("Why paid: row 17", "the log-odds of yes", "1.5", "−0.25", "0.817"):
        assert said in html
    shown = ("age = 31", "job = cook", "town = missing")
    title = "Share of the difference from the baseline"
    assert order_of(page, title, shown) == ["job = cook", "town = missing", "age = 31"]
