"""A baseline for text classification: logistic regression on TF-IDF weights of words.

Every word and every pair of neighbouring words is a feature, with the weight
(1 + log count) · log(texts / texts that have it), normalised per text (scikit-learn's defaults with
sublinear counts). It takes seconds, and is hard to beat with few labelled texts.
"""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from addnorm.data.text.labelled import LabelledTexts
from addnorm.errors import ExtraError, require
from addnorm.metrics import classification_metrics

BASELINE = "TF-IDF + logistic regression"
MAX_WORK = 4_000_000
"""Largest number of training characters times labels: above it, a sample of the texts is used."""
MAX_FEATURES = 100_000
INVERSE_REGULARISATION = 10.0
"""C of scikit-learn. 10 was better than 1 on the held-out texts of TREC and SST-2."""


def fit_baseline(
    train: LabelledTexts, valid: LabelledTexts, seed: int, say: Any
) -> list[dict[str, Any]]:
    """Return a row with the metrics of the baseline on the held-out texts; none if it fails.

    Parameters
    ----------
    train, valid : texts to fit and to evaluate it on.
    seed : random seed of the sample.
    say : receives a message if there is no baseline.
    """
    try:
        text = require("sklearn.feature_extraction.text", "tables")
        linear_model = require("sklearn.linear_model", "tables")
        limits = require("threadpoolctl", "tables").threadpool_limits
    except ExtraError:
        say(
            f"no baseline ({BASELINE}): scikit-learn is not installed. "
            "Try: pip install 'addnorm[tables]'."
        )
        return []
    start = time.perf_counter()
    rows = sample_rows(train, seed)
    try:
        # Several threads gain nothing here, and wait for each other on a busy machine.
        with limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an optimum that is not reached exactly
            vectors = text.TfidfVectorizer(
                ngram_range=(1, 2), sublinear_tf=True, max_features=MAX_FEATURES
            )
            model = linear_model.LogisticRegression(C=INVERSE_REGULARISATION, max_iter=200)
            model.fit(vectors.fit_transform(rows.texts), rows.targets)
            predicted = model.predict_proba(vectors.transform(valid.texts))
    except (ValueError, MemoryError, FloatingPointError) as error:
        say(f"no baseline ({BASELINE}): {str(error).splitlines()[0]}")
        return []
    probabilities = np.zeros((len(valid), len(train.names)))
    probabilities[:, model.classes_] = predicted  # a sample may lack a label
    whole = len(rows) == len(train)
    return [
        {
            "model": BASELINE,
            "on": "held-out texts" if whole else f"fitted to {len(rows):,} texts",
            **classification_metrics(probabilities, valid.targets),
            "fit_seconds": time.perf_counter() - start,
        }
    ]


def sample_rows(train: LabelledTexts, seed: int) -> LabelledTexts:
    """Return the training texts, or as many random ones as can be fitted in seconds."""
    characters = sum(map(len, train.texts)) * len(train.names)
    if characters <= MAX_WORK:
        return train
    count = max(2, int(len(train) * MAX_WORK / characters))
    rows = np.random.default_rng(seed).permutation(len(train))[:count]
    return train.take(sorted(rows.tolist()))


def baseline_hint(results: Sequence[dict[str, Any]]) -> str:
    """Return advice if the baseline has the higher accuracy, else an empty text."""
    ours = max((row["accuracy"] for row in results if row["model"] != BASELINE), default=1.0)
    theirs = max((row["accuracy"] for row in results if row["model"] == BASELINE), default=0.0)
    if theirs <= ours:
        return ""
    return (
        f"{BASELINE} is ahead on the held-out texts: {theirs:.1%} against {ours:.1%}. With so few "
        "labelled texts, try --from a run of `addnorm train masked` on much more text of the same "
        "kind, label more texts, or use the baseline."
    )
