"""Figures of merit: BLEU and chrF of translations; accuracy, F1, log-loss, ECE of classes."""

import math
from collections.abc import Sequence
from typing import Any

from addnorm.errors import InputError, require

Figures = dict[str, Any]


def bleu(said: Sequence[str], references: Sequence[str], *, lower: bool = False) -> Figures:
    """Corpus BLEU (Papineni et al. 2002) as sacrebleu (Post 2018) computes it, with its signature.

    >>> bleu(["a small cat sat down"], ["a small cat sat down"])["score"]
    100.0
    """
    sacrebleu = require("sacrebleu", "text")
    _need_equal(said, references)
    metric = sacrebleu.metrics.BLEU(lowercase=lower)
    score = metric.corpus_score(list(said), [list(references)])
    return {"score": round(score.score, 6), "signature": str(metric.get_signature())}


def chrf(said: Sequence[str], references: Sequence[str]) -> Figures:
    """chrF (Popović 2015): F2 of character n-grams up to 6, as sacrebleu computes it."""
    sacrebleu = require("sacrebleu", "text")
    _need_equal(said, references)
    metric = sacrebleu.metrics.CHRF()
    score = metric.corpus_score(list(said), [list(references)])
    return {"score": round(score.score, 6), "signature": str(metric.get_signature())}


def classes(
    probabilities: Sequence[Sequence[float]], labels: Sequence[int], bins: int = 15
) -> dict[str, float]:
    """Accuracy, mean F1 over the classes, log-loss, Brier score and expected calibration error.

        log-loss = −mean log p_y;   Brier = mean Σ_k (p_k − [k = y])²
        ECE = Σ over bins of confidence of (share of rows) · |accuracy − mean confidence|

    ECE with equally wide bins: Guo et al. 2017 (1706.04599), eq. 3.

    >>> classes([[0.9, 0.1], [0.2, 0.8]], [0, 0])["accuracy"]
    0.5
    """
    _need_equal(probabilities, labels)
    count, width = len(labels), len(probabilities[0])
    guesses = [max(range(width), key=row.__getitem__) for row in probabilities]
    pairs = list(zip(probabilities, labels, strict=True))
    hits = [guess == label for guess, label in zip(guesses, labels, strict=True)]
    return {
        "accuracy": sum(hits) / count,
        "f1": _mean_f1(guesses, labels),
        "log_loss": -sum(math.log(max(row[y], 1e-15)) for row, y in pairs) / count,
        "brier": sum(sum((p - (k == y)) ** 2 for k, p in enumerate(row)) for row, y in pairs)
        / count,
        "ece": _calibration_error([max(row) for row in probabilities], hits, bins),
    }


def _mean_f1(guesses: Sequence[int], labels: Sequence[int]) -> float:
    """F1 of each class that is there or was guessed, and the mean of them."""
    scores = []
    for name in sorted({*guesses, *labels}):
        both = sum(g == name == y for g, y in zip(guesses, labels, strict=True))
        either = sum(g == name for g in guesses) + sum(y == name for y in labels)
        scores.append(2 * both / either)
    return sum(scores) / len(scores)


def _calibration_error(confidences: Sequence[float], hits: Sequence[bool], bins: int) -> float:
    places = [min(int(confidence * bins), bins - 1) for confidence in confidences]
    total = 0.0
    for place in set(places):
        rows = [i for i, other in enumerate(places) if other == place]
        total += abs(sum(hits[i] for i in rows) - sum(confidences[i] for i in rows))
    return total / len(hits)


def _need_equal(said: Sequence[Any], references: Sequence[Any]) -> None:
    if len(said) != len(references) or not said:
        raise InputError(
            f"there must be a reference for each answer, and one or more: got {len(said)} answers "
            f"and {len(references)} references."
        )
