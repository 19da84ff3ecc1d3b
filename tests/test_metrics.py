"""Metrics against values computed by hand, naive loops and scikit-learn."""

import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sk

from addnorm.errors import InputError
from addnorm.metrics import (
    accuracy,
    auc,
    bleu,
    brier_score,
    calibration_error,
    chrf,
    class_table,
    classification_metrics,
    find_spans,
    interval_metrics,
    log_loss,
    macro_f1,
    ordinal_metrics,
    pinball_loss,
    regression_metrics,
    reliability_bins,
    rouge,
    span_metrics,
)

RNG = np.random.default_rng(0)
TWO = RNG.dirichlet((1, 2), 300)
TWO_TRUE = (RNG.random(300) < TWO[:, 1]).astype(int)
FOUR = RNG.dirichlet((1, 2, 1, 1), 300)
FOUR_TRUE = np.array([RNG.choice(4, p=p) for p in FOUR])
both_data = pytest.mark.parametrize(
    ("p", "y"), [(TWO, TWO_TRUE), (FOUR, FOUR_TRUE)], ids=["two classes", "four classes"]
)

# ── Translations ──────────────────────────────────────────────────────────────────────────────────


def test_bleu_by_hand() -> None:
    """Precisions 4/5, 2/4, 1/3 and 1/(2·2) (no 4-gram, smoothed); no brevity penalty."""
    result = bleu(["the cat sat on mats"], ["the cat sat in mats"])
    assert result["score"] == pytest.approx(100 * (4 / 5 * 2 / 4 * 1 / 3 * 1 / 4) ** 0.25, abs=1e-4)
    assert result["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    short = bleu(["a b c d e"], ["a b c d e f g"])["score"]
    assert short == pytest.approx(100 * math.exp(1 - 7 / 5), abs=1e-4)


def test_lower_case_is_part_of_the_signature() -> None:
    hypotheses, references = ["The Cat sat On mats"], ["the cat sat on mats"]
    assert bleu(hypotheses, references)["score"] < 50
    lower = bleu(hypotheses, references, lowercase=True)
    assert lower["score"] == pytest.approx(100) and "case:lc" in lower["signature"]


def test_chrf_by_hand() -> None:
    """2 of 3 characters match, 1 of 2 bigrams and no trigram: F2 = precision = recall."""
    result = chrf(["abc"], ["abd"])
    assert result["score"] == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3, abs=1e-4)
    assert result["signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")
    assert chrf(["equal"], ["equal"])["score"] == 100


@pytest.mark.parametrize(("predictions", "references"), [(0, 0), (1, 2)])
def test_each_prediction_needs_a_reference(predictions: int, references: int) -> None:
    message = f"got {predictions} predictions and {references} references"
    for metric in (bleu, chrf):
        with pytest.raises(InputError, match=message):
            metric(["a"] * predictions, ["a"] * references)
    with pytest.raises(InputError, match=r"each prediction needs one reference.*at least one"):
        classification_metrics([[1.0]] * predictions, [0] * references)
    with pytest.raises(InputError, match=message):
        regression_metrics([1.0] * predictions, [1.0] * references)


# ── Classes ───────────────────────────────────────────────────────────────────────────────────────


def test_classes_by_hand() -> None:
    rows = [[0.9, 0.1, 0.0], [0.6, 0.4, 0.0], [0.2, 0.7, 0.1], [0.1, 0.8, 0.1]]
    labels = [0, 1, 1, 1]
    result = classification_metrics(rows, labels)
    assert result["accuracy"] == 0.75
    assert result["f1"] == pytest.approx((2 / 3 + 4 / 5) / 2)  # the third class never occurs
    logs = [math.log(p) for p in (0.9, 0.4, 0.7, 0.8)]
    assert result["log_loss"] == pytest.approx(-sum(logs) / 4)
    squares = [0.01 + 0.01, 0.36 + 0.36, 0.04 + 0.09 + 0.01, 0.01 + 0.04 + 0.01]
    assert result["brier"] == pytest.approx(sum(squares) / 4)
    assert result["auc"] == 1.0
    # Bins: {0.9, 0.8} both right, 1.7 of 2; {0.7, 0.6} one right, 1.3 of 2.
    ece = calibration_error(np.array(rows), np.array(labels), bins=5)
    assert ece == pytest.approx((abs(2 - 1.7) + abs(1 - 1.3)) / 4)


@both_data
def test_class_metrics_equal_those_of_scikit_learn(p: np.ndarray, y: np.ndarray) -> None:
    result = classification_metrics(p, y)
    predicted = p.argmax(axis=1)
    score = p[:, 1] if p.shape[1] == 2 else p
    assert result["accuracy"] == sk.accuracy_score(y, predicted)
    assert result["f1"] == pytest.approx(sk.f1_score(y, predicted, average="macro"))
    assert result["auc"] == pytest.approx(sk.roc_auc_score(y, score, multi_class="ovr"))
    assert result["log_loss"] == pytest.approx(sk.log_loss(y, p))
    assert result["brier"] == pytest.approx(sk.brier_score_loss(y, score))
    assert list(result) == ["accuracy", "f1", "auc", "log_loss", "brier", "ece"]


@both_data
def test_lists_and_arrays_have_the_same_metrics(p: np.ndarray, y: np.ndarray) -> None:
    """Text tasks pass lists, tables pass arrays."""
    assert classification_metrics(p.tolist(), y.tolist()) == classification_metrics(p, y)


def test_brier_score_by_loop() -> None:
    """Over all classes; for two classes half of that, the squared error of the second alone."""
    for p, y in ((TWO, TWO_TRUE), (FOUR, FOUR_TRUE)):
        total = 0.0
        for row, label in zip(p, y, strict=True):
            total += sum((row[k] - (k == label)) ** 2 for k in range(len(row)))
        assert brier_score(p, y) == pytest.approx(total / 300 / (2 if p is TWO else 1))
    second = np.mean((TWO[:, 1] - TWO_TRUE) ** 2)
    assert brier_score(TWO, TWO_TRUE) == pytest.approx(second)


@both_data
@pytest.mark.parametrize("bins", (10, 15))
def test_calibration_error_is_about_the_predicted_class(
    p: np.ndarray, y: np.ndarray, bins: int
) -> None:
    """Bins of equal width over the probability of the predicted class, correct or not."""
    total = 0.0
    for b in range(bins):
        rows = [i for i in range(300) if b / bins <= max(p[i]) < (b + 1) / bins]
        confidence = sum(max(p[i]) for i in rows)
        right = sum(int(np.argmax(p[i])) == y[i] for i in rows)
        total += abs(confidence - right) / 300
    assert calibration_error(p, y, bins) == pytest.approx(total)
    if bins == 15:
        assert classification_metrics(p, y)["ece"] == pytest.approx(total)


def test_calibration_error_does_not_depend_on_the_order_of_two_classes() -> None:
    assert calibration_error(TWO, TWO_TRUE) == calibration_error(TWO[:, ::-1], 1 - TWO_TRUE)
    undecided = np.array([[0.5, 0.5], [0.5, 0.5]])
    assert calibration_error(undecided, np.array([0, 1])) == 0.0


def test_the_last_bin_includes_certainty() -> None:
    certain = np.array([[0.0, 1.0]] * 3 + [[1.0, 0.0]])
    labels = np.array([1, 1, 0, 0])
    assert reliability_bins(certain, labels) == [(0.0, 0.0, 1), (1.0, pytest.approx(2 / 3), 3)]
    assert calibration_error(certain, labels) == pytest.approx(1 / 4)


def test_certain_and_correct_predictions_have_no_loss() -> None:
    result = classification_metrics([[1.0, 0.0]], [0])
    assert math.isnan(result.pop("auc"))
    assert result == {"accuracy": 1.0, "f1": 1.0, "log_loss": 0.0, "brier": 0.0, "ece": 0.0}
    assert math.copysign(1, result["log_loss"]) == 1, "not −0.0"


def test_certain_and_wrong_predictions_have_a_finite_loss() -> None:
    """A row of probability 0 has the loss −log 1e-15, so that the mean stays finite."""
    p = np.array([[1.0, 0.0], [0.5, 0.5]])
    assert log_loss(p, np.array([1, 0])) == pytest.approx((15 * math.log(10) + math.log(2)) / 2)
    assert log_loss(p[:1], np.array([1])) == pytest.approx(-math.log(1e-15))


def test_a_class_that_is_only_predicted_counts() -> None:
    """The F1 scores are 2/3, 1, and 0 for the class that no label has."""
    rows = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    assert macro_f1(rows, np.array([0, 0, 1])) == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_the_first_of_tied_classes_is_predicted() -> None:
    assert accuracy(np.array([[0.5, 0.5]]), np.array([0])) == 1.0


def test_auc_counts_ties_half() -> None:
    score, positive = RNG.integers(0, 5, 60).astype(float), RNG.integers(0, 2, 60)
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, x in zip(score, positive, strict=True)
        for b, y in zip(score, positive, strict=True)
        if x and not y
    ]
    assert auc(score, positive) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(auc(score, np.ones(60)))


def test_a_class_that_no_row_has_does_not_count_for_the_auc() -> None:
    few = FOUR_TRUE.copy()
    few[few == 2] = 1
    each = [sk.roc_auc_score(few == k, FOUR[:, k]) for k in (0, 1, 3)]
    assert classification_metrics(FOUR, few)["auc"] == pytest.approx(sum(each) / 3)
    assert math.isnan(classification_metrics(FOUR, np.zeros(300, dtype=int))["auc"])


@pytest.mark.filterwarnings("error")
def test_probabilities_of_a_diverged_model_have_nan_metrics() -> None:
    result = classification_metrics([[math.nan, math.nan], [0.2, 0.8]], [0, 1])
    assert all(math.isnan(result[name]) for name in ("auc", "log_loss", "brier", "ece"))


# ── Reliability diagram ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("rows", "bins"), ((100, 4), (239, 5), (280, 7), (900, 15)))
def test_a_diagram_has_one_bin_for_forty_rows_from_four_to_fifteen(rows: int, bins: int) -> None:
    second = (np.arange(rows) + 0.5) / rows
    result = reliability_bins(np.column_stack((1 - second, second)), np.arange(rows) % 2)
    assert len(result) == bins


@pytest.mark.parametrize(("rows", "most"), ((20, 4), (300, 7)))
def test_bins_of_two_classes_are_about_the_second(rows: int, most: int) -> None:
    bins = reliability_bins(TWO[:rows], TWO_TRUE[:rows])
    assert 1 < len(bins) <= most and sum(count for *_, count in bins) == rows
    for stated, observed, count in bins:
        low = int(stated * most) / most
        inside = (TWO[:rows, 1] >= low) & (TWO[:rows, 1] < low + 1 / most)
        assert count == inside.sum() and stated == pytest.approx(TWO[:rows, 1][inside].mean())
        assert observed == pytest.approx(TWO_TRUE[:rows][inside].mean())


def test_bins_of_several_classes_are_about_the_predicted_one() -> None:
    bins = reliability_bins(FOUR, FOUR_TRUE)
    correct = FOUR.argmax(axis=1) == FOUR_TRUE
    assert sum(count for *_, count in bins) == 300 and len(bins) < 7, "empty bins are left out"
    assert sum(stated * count for stated, _, count in bins) == pytest.approx(FOUR.max(axis=1).sum())
    assert sum(observed * count for _, observed, count in bins) == pytest.approx(correct.sum())


# ── Numbers ───────────────────────────────────────────────────────────────────────────────────────


def test_regression_metrics_equal_those_of_scikit_learn() -> None:
    predictions, targets = TWO[:, 0], FOUR[:, 0]
    result = regression_metrics(predictions, targets)
    assert result["r2"] == pytest.approx(sk.r2_score(targets, predictions))
    assert result["rmse"] == pytest.approx(sk.root_mean_squared_error(targets, predictions))
    assert result["mae"] == pytest.approx(sk.mean_absolute_error(targets, predictions))


def test_a_constant_target_has_no_r2() -> None:
    result = regression_metrics(np.array([1.0, 4.0]), np.array([2.0, 2.0]))
    assert result["mae"] == 1.5 and result["rmse"] == pytest.approx(math.sqrt(2.5))
    assert math.isnan(result["r2"])


@pytest.mark.parity
def test_spans_equal_those_of_seqeval() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    entities = pytest.importorskip("seqeval.metrics.sequence_labeling").get_entities
    chance = random.Random(3)
    tags = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "LOC"))]
    for _ in range(300):
        real = [[chance.choice(tags) for _ in range(chance.randrange(1, 9))] for _ in range(4)]
        found = [[chance.choice([tag, chance.choice(tags)]) for tag in row] for row in real]
        for row in real:
            spans = [(kind, first, stop - 1) for kind, first, stop in find_spans(row)]
            assert spans == entities(row)
        ours = span_metrics(found, real)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ratios without a denominator
            theirs = seqeval.classification_report(real, found, output_dict=True)
            expected = {
                "precision": seqeval.precision_score(real, found),
                "recall": seqeval.recall_score(real, found),
                "f1": seqeval.f1_score(real, found),
            }
        assert {name: ours[""][name] for name in expected} == pytest.approx(expected)
        for kind in ("PER", "LOC"):
            if kind in theirs:
                names = {"precision": "precision", "recall": "recall", "f1": "f1-score"}
                row = {name: theirs[kind][other] for name, other in names.items()}
                assert {name: ours[kind][name] for name in names} == pytest.approx(row)
                assert ours[kind]["spans"] == theirs[kind]["support"]


def test_rouge_by_hand() -> None:
    """Unigrams 3 of 4 and 5, bigrams 1 of 3 and 4, subsequence the … cat … (2 of 4 and 5)."""
    scores = rouge(["the Cat, on mats"], ["cat the sat on the"])
    assert scores["rouge1"] == pytest.approx(100 * 2 * 3 / 9, abs=1e-4)
    assert scores["rouge2"] == 0.0
    assert scores["rougeL"] == pytest.approx(100 * 2 * 2 / 9, abs=1e-4)
    assert rouge(["x"], [""]) == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}


@pytest.mark.parity
def test_rouge_equals_that_of_rouge_score() -> None:
    scorer: Any = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer
    chance = random.Random(7)
    words = ["the", "Cat", "sat.", "on", "a", "mat,", "x_y", "3.5", "it's"]
    pairs = [
        [" ".join(chance.choices(words, k=chance.randint(0, 12))) for _ in range(2)]
        for _ in range(200)
    ]
    theirs = scorer(["rouge1", "rouge2", "rougeL"])
    for text, reference in pairs:
        found = theirs.score(reference, text)
        expected = {name: 100 * score.fmeasure for name, score in found.items()}
        assert rouge([text], [reference]) == pytest.approx(expected, abs=1e-4)


# ── Numbers and ordered classes ───────────────────────────────────────────────────────────────────


def test_coverage_counts_the_ends() -> None:
    ends = [[0.0, 1.0], [0.0, 1.0], [2.0, 4.0], [2.0, 4.0]]
    share, width = interval_metrics(ends, [0.0, 1.5, 4.0, 3.0])
    assert (share, width) == (0.75, 1.5)


def test_the_pinball_loss_of_the_median_is_half_the_absolute_error() -> None:
    predicted, targets = [[1.0], [5.0]], [3.0, 1.0]
    assert pinball_loss(predicted, [0.5], targets) == pytest.approx(1.5)


def test_kappa_is_that_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    p, labels = rng.dirichlet(np.ones(5), size=200), rng.integers(0, 5, 200)
    found = ordinal_metrics(p, labels, [3, 4, 5, 6, 9])
    predicted = p.argmax(axis=1)
    kappa = sklearn.cohen_kappa_score(predicted, labels, weights="quadratic")
    assert found["kappa"] == pytest.approx(kappa)
    values = np.array([3, 4, 5, 6, 9])
    assert found["mae"] == pytest.approx(np.abs(values[predicted] - values[labels]).mean())
    total = 0.0
    for row, label in zip(p, labels, strict=True):
        for k in range(4):
            total += (row[: k + 1].sum() - (label <= k)) ** 2
    assert found["rps"] == pytest.approx(total / 4 / 200)


def test_table_of_classes_counts_by_hand() -> None:
    probabilities = np.array([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.4, 0.5, 0.1]])
    found = class_table(probabilities, probabilities.argmax(axis=1), np.array([0, 1, 1, 1]))
    assert found["rows"] == 4
    assert found["counts"] == [[1, 0, 0], [1, 2, 0], [0, 0, 0]]
    assert found["base_rate"] == [0.25, 0.75, 0.0]
    assert found["mean_probability"] == pytest.approx([0.475, 0.375, 0.15])
    assert found["precision"] == [0.5, 1.0, None]
    assert found["recall"] == [1.0, 2 / 3, None]
