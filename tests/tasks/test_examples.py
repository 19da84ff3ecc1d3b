"""The linear classifier of text vectors against scikit-learn's."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from addnorm.tasks.examples import EXAMPLE_WEIGHT, ExampleClassifier


@pytest.mark.trains
@pytest.mark.parity
@pytest.mark.parametrize("classes", [2, 4])
def test_it_is_logistic_regression(classes: int) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40, 12)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    labels = [f"label {n}" for n in rng.integers(classes, size=40)]
    ours = ExampleClassifier(vectors, labels)
    # Of two classes scikit-learn has one vector, W_1 − W_0, which is penalised half as much here.
    weight = EXAMPLE_WEIGHT * (2 if classes == 2 else 1)
    theirs = LogisticRegression(C=weight, max_iter=5000, tol=1e-10)
    theirs.fit(vectors.astype(float), labels)
    expected = theirs.predict_proba(vectors.astype(float))
    assert np.abs(ours.probabilities(vectors) - expected).max() < 2e-4
