"""The TF-IDF baseline of text classification: its figures, its limits, its messages."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import addnorm.tasks.baseline as baseline
from addnorm.data.text.labelled import LabelledTexts, read_labelled
from addnorm.errors import ExtraError
from addnorm.tasks.baseline import BASELINE, baseline_hint, fit_baseline, sample_rows
from tests.runs.common import quiet


@pytest.fixture
def texts(tmp_path: Path) -> LabelledTexts:
    rows = [f"{word} film number {n}\t{label}" for n in range(20)
            for word, label in (("good", 1), ("bad", 0))]  # fmt: skip
    (tmp_path / "films.tsv").write_text("\n".join(rows) + "\n")
    return read_labelled(tmp_path / "films.tsv")


def test_a_rule_of_one_word_is_learnt(texts: LabelledTexts) -> None:
    train, valid = texts.take(range(30)), texts.take(range(30, 40))
    (row,) = fit_baseline(train, valid, 0, quiet)
    assert (row["model"], row["on"], row["accuracy"]) == (BASELINE, "held-out texts", 1.0)
    assert 0 < row["brier"] < 0.1 and row["fit_seconds"] > 0


def test_many_texts_are_sampled(texts: LabelledTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample_rows(texts, 0) is texts
    monkeypatch.setattr(baseline, "MAX_WORK", sum(map(len, texts.texts)))  # two labels: half of it
    part = sample_rows(texts, 0)
    assert len(part) == 20 and part.lines == sorted(part.lines)
    assert sample_rows(texts, 1).lines != part.lines
    (row,) = fit_baseline(texts, texts, 0, quiet)
    assert row["on"] == "fitted to 20 texts" and row["accuracy"] > 0.9


def test_a_label_that_the_sample_lacks_has_probability_0(texts: LabelledTexts) -> None:
    more = replace(texts, names=("0", "1", "2"))
    (row,) = fit_baseline(more, more, 0, quiet)
    assert row["accuracy"] == 1.0 and np.isfinite(row["log_loss"])


def test_a_baseline_that_fails_does_not_fail_the_run(texts: LabelledTexts) -> None:
    said: list[str] = []
    unreadable = replace(texts, texts=["?"] * len(texts))
    assert fit_baseline(unreadable, texts, 0, said.append) == []
    assert said == [
        "no baseline (TF-IDF + logistic regression): empty vocabulary; perhaps the documents only "
        "contain stop words"
    ]


def test_without_scikit_learn_one_line_says_so(
    texts: LabelledTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str, extra: str) -> None:
        raise ExtraError(f"{package} is missing")

    monkeypatch.setattr(baseline, "require", missing)
    said: list[str] = []
    assert fit_baseline(texts, texts, 0, said.append) == []
    assert said == [
        "no baseline (TF-IDF + logistic regression): scikit-learn is not installed. "
        "Try: pip install 'addnorm[tables]'."
    ]


def test_a_hint_only_if_the_baseline_is_ahead() -> None:
    ours, theirs = {"model": "Transformer"}, {"model": BASELINE}
    rows = [ours | {"accuracy": 0.8}, theirs | {"accuracy": 0.85}]
    assert baseline_hint(rows).startswith(
        "TF-IDF + logistic regression is ahead on the held-out texts: 85.0% against 80.0%. "
    )
    assert not baseline_hint([ours | {"accuracy": 0.85}, theirs | {"accuracy": 0.85}])
    assert not baseline_hint([ours | {"accuracy": 0.2}])
