"""Sections of the page of a text run."""

import math
import time
from pathlib import Path

import numpy as np
import pytest

import addnorm.tasks.page_parts as page_parts
from addnorm.data.text.labelled import LabelledTexts, read_labelled
from addnorm.errors import ExtraError
from addnorm.report import Page
from addnorm.runs.run import Run
from addnorm.tasks.page_parts import (
    add_confusion,
    add_translations,
    position_curve,
    sample_ranks,
    within_seconds,
)
from tests.runs.common import Trained


def test_parts_end_with_the_time() -> None:
    assert list(within_seconds([1, 2, 3])) == [1, 2, 3]
    taken = []
    for part in within_seconds(range(100), 0.02):
        taken.append(part)
        time.sleep(0.015)
    assert 1 <= len(taken) < 5
    assert list(within_seconds([1, 2], -1.0)) == [1]  # one part is always done


def test_translations_are_ranked_by_chrf() -> None:
    page = Page("Run")
    references = [f"the small house number {n}" for n in range(9)]
    outputs = [text[: 3 * n + 1] for n, text in enumerate(references)]
    add_translations(page, [f"das Haus {n}" for n in range(9)], outputs, references)
    html = page.html()
    places = [html.index(f">{name} by sentence chrF<") for name in ("Worst", "Median", "Best")]
    assert places == sorted(places) and places[0] < html.index("das Haus 0") < places[1]
    assert places[2] < html.index("das Haus 8") and "9 held-out pairs" in html
    assert "nrefs:1|case:mixed" in html and "equal to the reference" in html
    assert sample_ranks([3]) == {"Worst": [3]}


def test_bleu_of_texts_that_are_too_short_for_it_is_left_out() -> None:
    page = Page("Run")
    add_translations(page, ["zwei alte Bücher"], ["two old books"], ["two old books"])
    html = page.html()
    assert ">chrF<" in html and ">BLEU<" not in html and "BLEU counts: it is left out" in html
    page = Page("Run")
    add_translations(page, ["ein Haus"], [""], ["a small old house"])  # 0 because it is wrong
    assert ">BLEU<" in page.html() and "left out" not in page.html()


def test_without_sacrebleu_there_are_translations_without_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*texts: object) -> None:
        raise ExtraError("sacrebleu is missing")

    monkeypatch.setattr(page_parts, "bleu", missing)
    page = Page("Run")
    add_translations(page, ["ein Haus"], ["a house"], ["a house"])
    assert "Without the package sacrebleu there are no scores" in page.html()
    assert "ein Haus" in page.html()


@pytest.fixture
def rows(tmp_path: Path) -> LabelledTexts:
    (tmp_path / "a.tsv").write_text("".join(f"text {n}\t{'xyz'[n % 3]}\n" for n in range(12)))
    return read_labelled(tmp_path / "a.tsv")


def test_confusion_and_the_most_confident_errors(rows: LabelledTexts) -> None:
    probabilities = np.full((12, 3), 0.1)
    probabilities[np.arange(12), rows.targets] = 0.8
    probabilities[1] = [0.05, 0.0, 0.95]
    probabilities[5] = [0.6, 0.2, 0.2]
    page = Page("Run")
    add_confusion(page, probabilities, rows)
    html = page.html()
    assert "Number of texts, for 12 held-out texts." in html
    assert html.index(">text 1<") < html.index(">text 5<") and ">text 2<" not in html
    page = Page("Run")
    add_confusion(page, np.eye(3)[rows.targets], rows)
    assert "None of these texts was misclassified." in page.html()


def test_many_labels_are_limited(tmp_path: Path) -> None:
    lines = [f"text {n}\tlabel{n // 2}\n" for n in range(60)]
    (tmp_path / "a.tsv").write_text("".join([*lines, "text\tlabel7\n"]))
    rows = read_labelled(tmp_path / "a.tsv")
    page = Page("Run")
    add_confusion(page, np.full((61, 30), 1 / 30), rows)
    assert "for the 25 most frequent labels of 61 held-out texts." in page.html()


def test_perplexity_by_position() -> None:
    curve = position_curve(np.log(np.arange(1.0, 501.0)), bins=16)
    assert len(curve) <= 16 and curve[0] == (1.0, pytest.approx(1.0))
    assert [place for place, _ in curve] == sorted({place for place, _ in curve})
    assert curve[-1][1] == pytest.approx(math.exp(np.log(np.arange(1, 501))[-160:].mean()), rel=0.1)
    assert position_curve(np.array([1000.0]))[0][1] == math.exp(700)


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize(
    ("task", "titles"),
    [
        ("translate", ("Translations", "Attention")),
        ("classify", ("Figures", "Reliability", "Confusion", "Most confident errors")),
        ("language", ("Perplexity by position", "Samples")),
    ],
)
def test_the_page_of_a_run_shows_what_it_does(
    task: str, titles: tuple[str, ...], trained: Trained
) -> None:
    html = (Run.open(trained[task]).path / "summary.html").read_text(encoding="utf-8")
    assert all(f">{title}</h2>" in html for title in titles)
    assert html.count("<svg") >= 2 and "https://" not in html
