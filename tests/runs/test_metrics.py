"""Figures of merit against values worked out by hand."""

import math

import pytest

from addnorm.errors import InputError
from addnorm.runs.metrics import bleu, chrf, classes


def test_bleu_by_hand() -> None:
    """Precisions 4/5, 2/4, 1/3 and 1 over 2·2 (no 4-gram, smoothed); nothing is too short."""
    found = bleu(["the cat sat on mats"], ["the cat sat in mats"])
    assert found["score"] == pytest.approx(100 * (4 / 5 * 2 / 4 * 1 / 3 * 1 / 4) ** 0.25, abs=1e-4)
    assert found["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    short = bleu(["a b c d e"], ["a b c d e f g"])["score"]
    assert short == pytest.approx(100 * math.exp(1 - 7 / 5), abs=1e-4)


def test_lower_case_is_another_figure_and_says_so() -> None:
    said, wanted = ["The Cat sat On mats"], ["the cat sat on mats"]
    assert bleu(said, wanted)["score"] < 50
    lower = bleu(said, wanted, lower=True)
    assert lower["score"] == pytest.approx(100) and "case:lc" in lower["signature"]


def test_chrf_by_hand() -> None:
    """Two letters of three are right, one pair of two, no triple: F2 = precision = recall."""
    found = chrf(["abc"], ["abd"])
    assert found["score"] == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3, abs=1e-4)
    assert found["signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    assert chrf(["equal"], ["equal"])["score"] == 100


def test_classes_by_hand() -> None:
    rows = [[0.9, 0.1, 0.0], [0.6, 0.4, 0.0], [0.2, 0.7, 0.1], [0.1, 0.8, 0.1]]
    found = classes(rows, [0, 1, 1, 1], bins=5)
    assert found["accuracy"] == 0.75
    assert found["f1"] == pytest.approx((2 / 3 + 4 / 5) / 2)  # the third class is never there
    logs = [math.log(p) for p in (0.9, 0.4, 0.7, 0.8)]
    assert found["log_loss"] == pytest.approx(-sum(logs) / 4)
    squares = [0.01 + 0.01, 0.36 + 0.36, 0.04 + 0.09 + 0.01, 0.01 + 0.04 + 0.01]
    assert found["brier"] == pytest.approx(sum(squares) / 4)
    # Bins: {0.9, 0.8} both right, 1.7 of 2; {0.7, 0.6} one right, 1.3 of 2.
    assert found["ece"] == pytest.approx((abs(2 - 1.7) + abs(1 - 1.3)) / 4)


def test_a_class_that_is_only_guessed_counts() -> None:
    """F1 of the three: 2/3, 1, and 0 for the one that never is there."""
    rows = [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    assert classes(rows, [0, 0, 1])["f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_certainty_is_no_error() -> None:
    assert classes([[1.0, 0.0]], [0]) == {
        "accuracy": 1.0,
        "f1": 1.0,
        "log_loss": 0.0,
        "brier": 0.0,
        "ece": 0.0,
    }
    assert classes([[1.0, 0.0]], [1])["log_loss"] == pytest.approx(-math.log(1e-15))


def test_the_best_of_equals_is_the_first() -> None:
    assert classes([[0.5, 0.5]], [0])["accuracy"] == 1.0


@pytest.mark.parametrize(("said", "wanted"), [([], []), (["a"], ["a", "b"])])
def test_answers_and_references_must_match(said: list[str], wanted: list[str]) -> None:
    for metric in (bleu, chrf):
        with pytest.raises(InputError, match=f"got {len(said)} answers and {len(wanted)} ref"):
            metric(said, wanted)
    with pytest.raises(InputError, match="there must be a reference for each answer"):
        classes([[1.0]] * len(said), [0] * len(wanted))
