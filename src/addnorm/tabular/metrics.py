"""Figures on predictions: how often right, how probable, how honest about it.

Probabilities are (rows, classes), targets the places of the classes.
"""

from dataclasses import dataclass

import numpy as np

from addnorm.data.frame import Array

SMALLEST = 1e-15
BINS = 15


def accuracy(probabilities: Array, target: Array) -> float:
    return float((probabilities.argmax(axis=1) == target).mean())


def log_loss(probabilities: Array, target: Array) -> float:
    """−mean log p of what happened."""
    told = probabilities[np.arange(len(target)), target]
    return float(-np.log(np.clip(told, SMALLEST, 1.0)).mean())


def brier(probabilities: Array, target: Array) -> float:
    """Mean squared distance of the probabilities to what happened; Brier 1950.

    Of two classes the distance of the second alone, as is usual: 0 to 1.
    """
    happened = np.eye(probabilities.shape[1])[target]
    squares = (probabilities - happened) ** 2
    return float(squares[:, 1].mean() if squares.shape[1] == 2 else squares.sum(axis=1).mean())


def auc(score: Array, positive: Array) -> float:
    """The chance that a positive row scores above a negative one, ties counting half.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    positive = positive.astype(bool)
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return float("nan")
    _, place, ties = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def mean_auc(probabilities: Array, target: Array) -> float:
    """Of two classes the AUC; of more the mean of each class against the rest."""
    if probabilities.shape[1] == 2:
        return auc(probabilities[:, 1], target == 1)
    each = [auc(probabilities[:, k], target == k) for k in range(probabilities.shape[1])]
    known = [value for value in each if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


@dataclass(frozen=True)
class Reliability:
    """How often what was given a probability came true, by bins of that probability."""

    said: Array
    """Mean probability of the predicted class in each bin."""
    happened: Array
    """Share of rows of the bin in which it was right."""
    rows: Array

    @property
    def ece(self) -> float:
        """Expected calibration error: mean |said − happened|, by rows; Naeini et al. 2015."""
        total = self.rows.sum()
        return float((np.abs(self.said - self.happened) * self.rows).sum() / max(total, 1))


def reliability(probabilities: Array, target: Array, bins: int = BINS) -> Reliability:
    """Bins of equal width over the probability of the predicted class; of two classes the second's.

    Guo et al. 2017 (1706.04599), §2.
    """
    if probabilities.shape[1] == 2:
        sure, right = probabilities[:, 1], target == 1
    else:
        sure = probabilities.max(axis=1)
        right = probabilities.argmax(axis=1) == target
    place = np.clip((sure * bins).astype(int), 0, bins - 1)
    rows = np.bincount(place, minlength=bins)
    many = np.maximum(rows, 1)
    said = np.bincount(place, weights=sure, minlength=bins) / many
    happened = np.bincount(place, weights=right.astype(float), minlength=bins) / many
    return Reliability(said, happened, rows)


def reliability_bins(probabilities: Array, target: Array) -> list[tuple[float, float, int]]:
    """(said, happened, rows) of bins for a picture: fewer where rows are few, and none empty."""
    found = reliability(probabilities, target, int(np.clip(len(target) // 40, 4, BINS)))
    rows = zip(found.said.tolist(), found.happened.tolist(), found.rows.tolist(), strict=True)
    return [(said, happened, count) for said, happened, count in rows if count]


def class_figures(probabilities: Array, target: Array) -> dict[str, float]:
    """All figures on probabilities."""
    return {
        "accuracy": accuracy(probabilities, target),
        "auc": mean_auc(probabilities, target),
        "log_loss": log_loss(probabilities, target),
        "brier": brier(probabilities, target),
        "ece": reliability(probabilities, target).ece,
    }


def number_figures(predicted: Array, target: Array) -> dict[str, float]:
    """All figures on predicted numbers."""
    error = predicted - target
    spread = float(((target - target.mean()) ** 2).mean())
    square = float((error**2).mean())
    return {
        "rmse": square**0.5,
        "mae": float(np.abs(error).mean()),
        "r2": 1 - square / spread if spread else float("nan"),
    }
