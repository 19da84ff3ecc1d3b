"""Evaluation metrics, the same for text and tables.

BLEU, chrF and ROUGE of texts; precision, recall and F1 of labelled spans; accuracy, macro F1, AUC,
log loss, Brier score and expected calibration error (ECE) of class probabilities; RMSE, MAE and R²
of numeric predictions, pinball loss of quantiles, coverage and width of intervals.
Probabilities have the shape (rows, classes); labels are class indices, shape (rows,).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from addnorm.errors import InputError, require

MIN_PROBABILITY = 1e-15
"""Log loss clips probabilities below this, so that one impossible row leaves the mean finite."""
CALIBRATION_BINS = 15
_WORDS = re.compile(r"[^\W_]+")


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> dict[str, Any]:
    """Return corpus BLEU (Papineni et al. 2002) from sacrebleu (Post 2018), with its signature.

    >>> bleu(["a small cat sat down"], ["a small cat sat down"])["score"]
    100.0
    """
    sacrebleu = require("sacrebleu", "text")
    return _corpus_score(sacrebleu.metrics.BLEU(lowercase=lowercase), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return chrF (Popović 2015), the F2 of character n-grams up to 6, from sacrebleu."""
    return _corpus_score(require("sacrebleu", "text").metrics.CHRF(), hypotheses, references)


def sentence_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return the chrF of each hypothesis by itself, from 0 to 100.

    >>> sentence_chrf(["a cat"], ["a cat"])
    [100.0]
    """
    _require_equal_counts(len(hypotheses), len(references))
    metric = require("sacrebleu", "text").metrics.CHRF()
    pairs = zip(hypotheses, references, strict=True)
    return [metric.sentence_score(text, [reference]).score for text, reference in pairs]


def rouge(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L, each the mean F1 over texts, from 0 to 100.

        ROUGE-n   overlap of n-grams, each counted as often as both have it
        ROUGE-L   longest common subsequence of words, over the whole text

    Lin 2004, "ROUGE: a package for automatic evaluation of summaries". Words are lower-cased runs
    of letters and digits, without stemming: for English as in the package rouge-score.

    >>> rouge(["the cat sat"], ["the cat slept"])["rouge1"]
    66.666667
    """
    _require_equal_counts(len(hypotheses), len(references))
    totals = dict.fromkeys(("rouge1", "rouge2", "rougeL"), 0.0)
    for text, reference in zip(hypotheses, references, strict=True):
        ours, theirs = (_WORDS.findall(part.lower()) for part in (text, reference))
        for size in (1, 2):
            one, other = (
                Counter(zip(*(words[i:] for i in range(size)), strict=False))
                for words in (ours, theirs)
            )
            totals[f"rouge{size}"] += _f1((one & other).total(), one.total(), other.total())
        totals["rougeL"] += _f1(_common_subsequence(ours, theirs), len(ours), len(theirs))
    return {name: round(100 * total / len(hypotheses), 6) for name, total in totals.items()}


def _f1(right: int, found: int, real: int) -> float:
    return 2 * right / (found + real) if right else 0.0


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence: L_ij = L_i-1,j-1 + 1, or the larger."""
    row = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, their_word in enumerate(other, start=1):
            above = row[place]
            row[place] = before + 1 if word == their_word else max(above, row[place - 1])
            before = above
    return row[-1]


def _corpus_score(
    metric: Any, hypotheses: Sequence[str], references: Sequence[str]
) -> dict[str, Any]:
    _require_equal_counts(len(hypotheses), len(references))
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return {"score": round(score.score, 6), "signature": str(metric.get_signature())}


Span = tuple[str, int, int]
"""Type, first word, and the word after the last."""
SPAN_PREFIXES = ("B-", "I-", "E-", "S-")


def has_spans(tags: Iterable[str]) -> bool:
    """Return whether tags mark spans: each is O, or begins with B-, I-, E- or S-.

    >>> has_spans(["O", "B-PER", "I-PER"]), has_spans(["NOUN", "VERB"])
    (True, False)
    """
    marked = {tag for tag in tags if tag != "O"}
    return bool(marked) and all(tag[:2] in SPAN_PREFIXES and tag[2:] for tag in marked)


def find_spans(tags: Sequence[str]) -> list[Span]:
    """Return the spans of a sentence in any of the schemes IOB1, IOB2 (BIO), IOE and IOBES.

    A tag starts a span if its prefix is B or S, or if it is I or E after O, after E or S, or after
    a tag of another type; the next tag that is O or starts a span ends it. This is the rule of
    conlleval (Tjong Kim Sang, Buchholz 2000) and of seqeval's default mode.

    >>> find_spans(["B-PER", "I-PER", "O", "I-ORG", "B-ORG"])
    [('PER', 0, 2), ('ORG', 3, 4), ('ORG', 4, 5)]
    """
    spans: list[Span] = []
    first: int | None = None
    previous = "O"
    for place, tag in enumerate([*tags, "O"]):
        prefix, kind = tag[:1], tag[2:]
        starts = tag != "O" and (
            prefix in "BS" or previous == "O" or previous[:1] in "ES" or previous[2:] != kind
        )
        if first is not None and (starts or tag == "O"):
            spans.append((previous[2:], first, place))
            first = None
        first = place if starts else first
        previous = tag
    return spans


def span_metrics(
    predicted: Sequence[Sequence[str]], tags: Sequence[Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and number of spans, by type and of all types ("").

    A predicted span counts if type, first and last word are right. Ratios without a denominator
    are 0, as in seqeval.

    >>> span_metrics([["B-PER", "O"]], [["B-PER", "B-ORG"]])[""]["recall"]
    0.5
    """
    _require_equal_counts(len(predicted), len(tags))
    found, real = (
        {(number, *span) for number, row in enumerate(rows) for span in find_spans(row)}
        for rows in (predicted, tags)
    )
    kinds = ["", *sorted({span[1] for span in found | real})]
    scores = {}
    for kind in kinds:
        ours, theirs = (
            {span for span in spans if kind in ("", span[1])} for spans in (found, real)
        )
        right = len(ours & theirs)
        precision, recall = right / max(len(ours), 1), right / max(len(theirs), 1)
        f1 = 2 * precision * recall / (precision + recall) if right else 0.0
        scores[kind] = {
            "precision": precision,
            "recall": recall,
            "f1": f1,
            "spans": float(len(theirs)),
        }
    return scores


def classification_metrics(probabilities: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Return accuracy, macro F1, AUC, log loss, Brier score and ECE by name.

    >>> classification_metrics([[0.9, 0.1], [0.2, 0.8]], [0, 0])["accuracy"]
    0.5
    """
    p, y = np.asarray(probabilities, dtype=float), np.asarray(labels)
    _require_equal_counts(len(p), len(y))
    return {
        "accuracy": accuracy(p, y),
        "f1": macro_f1(p, y),
        "auc": mean_auc(p, y),
        "log_loss": log_loss(p, y),
        "brier": brier_score(p, y),
        "ece": calibration_error(p, y),
    }


def accuracy(probabilities: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the share of rows whose most probable class (the first, if tied) is their label."""
    return float((probabilities.argmax(axis=1) == labels).mean())


def macro_f1(probabilities: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the mean F1 over the classes that occur among the labels or the predictions."""
    predicted = probabilities.argmax(axis=1)
    scores = [
        2
        * ((predicted == k) & (labels == k)).sum()
        / ((predicted == k).sum() + (labels == k).sum())
        for k in np.union1d(predicted, labels)
    ]
    return float(np.mean(scores))


def log_loss(probabilities: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return −mean log p_y."""
    of_label = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.clip(of_label, MIN_PROBABILITY, 1.0)).mean() + 0.0)


def brier_score(probabilities: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return mean Σ_k (p_k − [k = y])², and half of it for two classes.

    Brier 1950, "Verification of forecasts expressed in terms of probability". The half is the
    squared error of the second class's probability. This is scikit-learn's `brier_score_loss` with
    its default `scale_by_half="auto"`: from 0 to 1 for two classes, from 0 to 2 for more.
    """
    classes = probabilities.shape[1]
    squares = (probabilities - np.eye(classes)[labels]) ** 2
    return float(squares.sum(axis=1).mean() / (2 if classes == 2 else 1))


def ordinal_metrics(
    probabilities: ArrayLike, labels: ArrayLike, numbers: ArrayLike
) -> dict[str, float]:
    """Return what ordered classes add: MAE, quadratic-weighted kappa, ranked probability score.

        MAE    mean distance of the likeliest class from the label, in units of the classes
        kappa  1 − Σ (i − j)² observed_ij / Σ (i − j)² expected_ij   (Cohen 1968)
        RPS    mean Σ_k (F_k − [y ≤ k])² / (K − 1)                   (Epstein 1969)

    Parameters
    ----------
    probabilities : (rows, classes), the classes in their order.
    labels : class indices.
    numbers : the number that each class stands for.

    >>> ordinal_metrics([[0.5, 0.5, 0.0]], [1], [3, 4, 5])["rps"]
    0.125
    """
    p, y = np.asarray(probabilities, dtype=float), np.asarray(labels)
    _require_equal_counts(len(p), len(y))
    predicted, value, count = p.argmax(axis=1), np.asarray(numbers, dtype=float), p.shape[1]
    steps = np.arange(count)
    distance = (predicted - y) ** 2
    shares = (np.bincount(part, minlength=count) / len(y) for part in (predicted, y))
    by_chance = float(np.outer(*shares).ravel() @ ((steps[:, None] - steps) ** 2).ravel())
    misses = np.cumsum(p, axis=1)[:, :-1] - (y[:, None] <= steps[:-1])
    return {
        "mae": float(np.abs(value[predicted] - value[y]).mean()),
        "kappa": 1 - float(distance.mean()) / by_chance if by_chance else float("nan"),
        "rps": float((misses**2).sum(axis=1).mean() / max(count - 1, 1)),
    }


def class_table(
    probabilities: NDArray[Any], decided: NDArray[Any], labels: NDArray[Any]
) -> dict[str, Any]:
    """Return how often each class occurs, is predicted with which mean probability, and is found.

    Parameters
    ----------
    probabilities : (rows, classes).
    decided : index of the predicted class of each row.
    labels : index of the class of each row.

    Returns
    -------
    rows : number of rows.
    counts : (classes, classes): rows of a class that are predicted as each class.
    base_rate : share of the rows that are of each class.
    mean_probability : mean predicted probability of each class.
    precision, recall : None where no row is predicted as, or is of, the class.
    """
    classes = probabilities.shape[1]
    counts = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(counts, (labels, decided), 1)
    right, found, real = np.diag(counts), counts.sum(axis=0), counts.sum(axis=1)
    return {
        "rows": len(labels),
        "counts": counts.tolist(),
        "base_rate": (real / len(labels)).tolist(),
        "mean_probability": probabilities.mean(axis=0).tolist(),
        "precision": [int(r) / int(n) if n else None for r, n in zip(right, found, strict=True)],
        "recall": [int(r) / int(n) if n else None for r, n in zip(right, real, strict=True)],
    }


def auc(scores: NDArray[Any], positive: NDArray[Any]) -> float:
    """Return the probability that a positive row scores above a negative one; ties count half.

    NaN if there are no positive rows, no negative rows, or scores that are NaN.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    positive = positive.astype(bool)
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives or np.isnan(scores).any():
        return float("nan")
    _, index, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[index]
    above = ranks[positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def mean_auc(probabilities: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the AUC of two classes, or the mean AUC of each class against the rest.

    Classes that no label has are left out of the mean; it is NaN if there is none left.
    """
    classes = range(1, 2) if probabilities.shape[1] == 2 else range(probabilities.shape[1])
    values = np.array([auc(probabilities[:, k], labels == k) for k in classes])
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def calibration_error(
    probabilities: NDArray[Any], labels: NDArray[Any], bins: int = CALIBRATION_BINS
) -> float:
    """Return the expected calibration error of the predicted class.

        ECE = Σ_b (rows in bin b / rows) · |accuracy in b − mean confidence in b|

    The confidence of a row is the probability of its predicted class, whatever the number of
    classes, in bins of equal width. Guo et al. 2017 (1706.04599), eq. 3, with their 15 bins.
    """
    correct = probabilities.argmax(axis=1) == labels
    confidence, observed, rows = _binned(probabilities.max(axis=1), correct, bins)
    return float((np.abs(confidence - observed) * rows).sum() / rows.sum())


def reliability_bins(
    probabilities: NDArray[Any], labels: NDArray[Any]
) -> list[tuple[float, float, int]]:
    """Return (mean probability, observed frequency, rows) of each bin of a reliability diagram.

    The probabilities are those of the second of two classes, and of the predicted class of more.
    There is one bin of equal width for every 40 rows, but 4 to 15; empty bins are left out.
    """
    if probabilities.shape[1] == 2:
        stated, happened = probabilities[:, 1], labels == 1
    else:
        stated, happened = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bins = int(np.clip(len(labels) // 40, 4, CALIBRATION_BINS))
    columns = (column.tolist() for column in _binned(stated, happened, bins))
    return [(mean, observed, rows) for mean, observed, rows in zip(*columns, strict=True) if rows]


def _binned(
    stated: NDArray[Any], happened: NDArray[Any], bins: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Mean probability, observed frequency and rows of each bin; zeros for an empty bin."""
    index = np.clip((np.nan_to_num(stated) * bins).astype(int), 0, bins - 1)
    rows = np.bincount(index, minlength=bins)
    divisor = np.maximum(rows, 1)
    mean = np.bincount(index, weights=stated, minlength=bins) / divisor
    return mean, np.bincount(index, weights=happened, minlength=bins) / divisor, rows


def regression_metrics(predictions: ArrayLike, targets: ArrayLike) -> dict[str, float]:
    """Return RMSE, MAE and R² by name; R² is NaN if all targets are equal."""
    predicted, actual = np.asarray(predictions, dtype=float), np.asarray(targets, dtype=float)
    _require_equal_counts(len(predicted), len(actual))
    error = predicted - actual
    square = float((error**2).mean())
    variance = float(((actual - actual.mean()) ** 2).mean())
    return {
        "rmse": square**0.5,
        "mae": float(np.abs(error).mean()),
        "r2": 1 - square / variance if variance else float("nan"),
    }


def pinball_loss(quantiles: ArrayLike, levels: ArrayLike, targets: ArrayLike) -> float:
    """Return the mean over rows and levels of max(q (y − ŷ), (q − 1)(y − ŷ)).

    Koenker, Bassett 1978. Its mean over all levels is half the CRPS.

    >>> pinball_loss([[1.0]], [0.9], [3.0])
    1.8
    """
    predicted, level = np.asarray(quantiles, dtype=float), np.asarray(levels, dtype=float)
    actual = np.asarray(targets, dtype=float)
    _require_equal_counts(len(predicted), len(actual))
    error = actual[:, None] - predicted
    return float(np.maximum(level * error, (level - 1) * error).mean())


def interval_metrics(intervals: ArrayLike, targets: ArrayLike) -> tuple[float, float]:
    """Return the share of targets within intervals (rows, 2), ends included; and the mean width."""
    ends, actual = np.asarray(intervals, dtype=float), np.asarray(targets, dtype=float)
    _require_equal_counts(len(ends), len(actual))
    inside = (ends[:, 0] <= actual) & (actual <= ends[:, 1])
    return float(inside.mean()), float((ends[:, 1] - ends[:, 0]).mean())


def _require_equal_counts(predictions: int, references: int) -> None:
    if predictions != references or not predictions:
        raise InputError(
            "each prediction needs one reference, and there must be at least one: "
            f"got {predictions} predictions and {references} references."
        )
