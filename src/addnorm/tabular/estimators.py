"""scikit-learn estimators for tables: classifiers with calibrated probabilities, regressors."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.class_weight import compute_sample_weight  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from torch import Tensor

from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Array
from addnorm.errors import ConfigError, InputError, nearest
from addnorm.metrics import classification_metrics, regression_metrics, reliability_bins
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.fitting import Rows
from addnorm.tabular.inputs import to_labels, to_targets
from addnorm.training.calibration import fit_temperature, probabilities_of


class TableClassifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """Base class of the classifiers; probabilities are calibrated on held-out rows."""

    classes_: Array

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, eval_set: Any = None, groups: Any = None
    ) -> Self:
        """Fit the estimator to labelled rows.

        Parameters
        ----------
        X : array, data frame or path
            Training rows. Missing values are allowed.
        y : array of shape (n_rows,)
            The class of each row.
        sample_weight : array of shape (n_rows,), default=None
            Weight of each row in the loss. None weights all rows equally.
        eval_set : tuple (X, y), default=None
            Rows for early stopping and calibration, in place of a part of X.
        groups : array of shape (n_rows,), default=None
            Group of each row. Rows of one group are held out together.

        Returns
        -------
        self : the fitted estimator
        """
        return self._fit(X, *self.learn_target(y), sample_weight, eval_set, groups)

    def learn_target(self, y: Any) -> tuple[Array, int]:
        """Set `classes_`; return the class index of each row, and the number of classes."""
        y = to_labels(y)
        check_classification_targets(y)
        self.classes_, target = np.unique(y, return_inverse=True)
        count = len(self.classes_)
        if count == 1:
            raise InputError(
                f"y must have at least two classes: the target has one class, {self.classes_[0]!r}."
            )
        return target, count

    def _encode_target(self, y: Any) -> Array:
        labels = [str(label) for label in to_labels(y)]
        index = {str(label): i for i, label in enumerate(self.classes_)}
        unknown = sorted(set(labels) - set(index))
        if unknown:
            raise InputError(
                f"y must have only classes of the training data: got {unknown[0]!r}. "
                f"{nearest(unknown[0], index)}"
            )
        return np.array([index[label] for label in labels], dtype=np.int64)

    def _class_weights(self, target: Array) -> Array:
        if self.class_weight is None:
            return np.ones(len(target))
        if not isinstance(self.class_weight, dict) and self.class_weight != "balanced":
            raise ConfigError(
                "class_weight must be a dictionary from class to weight, or 'balanced': "
                f"got {self.class_weight!r}."
            )
        return np.asarray(compute_sample_weight(self.class_weight, self.classes_[target]))

    def _calibrate(self, valid: Rows, outputs: Tensor) -> None:
        target = valid.target.numpy()
        self.temperature_ = fit_temperature(outputs, valid.target, valid.weight)
        before = probabilities_of(outputs, 1.0).numpy()
        after = probabilities_of(outputs, self.temperature_).numpy()
        self.report_["temperature"] = self.temperature_
        if self.metric == "f1" and len(self.classes_) == 2:
            self.threshold_ = self.report_["threshold"] = best_threshold(after[:, 1], target)
        self.report_["uncalibrated"] = classification_metrics(before, target)
        self.report_["valid"] = classification_metrics(after, target)
        self.report_["reliability"] = {
            "as trained": reliability_bins(before, target),
            "calibrated": reliability_bins(after, target),
        }

    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        """Return the classification metrics of metrics.py on labelled rows."""
        return classification_metrics(self.predict_proba(X), self._encode_target(y))

    def predict_proba(self, X: Any) -> Array:
        """Return the calibrated probability of each class of `classes_`, (rows, classes)."""
        return np.asarray(probabilities_of(self._predict(X), self.temperature_).numpy())

    def predict(self, X: Any) -> Array:
        """Return the most likely class of each row."""
        return np.asarray(self.classes_[self._decide(self.predict_proba(X))])

    def _decide(self, probabilities: Array) -> Array:
        """Return the class index of each row: the likeliest, or by the threshold if there is one."""
        threshold = getattr(self, "threshold_", None)
        if threshold is None:
            return np.asarray(probabilities.argmax(axis=1))
        return (probabilities[:, 1] >= threshold).astype(np.int64)


def best_threshold(probability: Array, target: Array) -> float:
    """Return the probability of the second class from which on predicting it has the highest F1.

        F1 = 2 · true positives / (positives + predicted positives)

    The threshold is halfway between two probabilities that occur.

    >>> best_threshold(np.array([0.1, 0.2, 0.4]), np.array([0, 1, 1]))
    0.15000000000000002
    """
    order = np.argsort(-probability, kind="stable")
    sorted_p, hits = probability[order], np.cumsum(target[order])
    scores = 2 * hits / (target.sum() + np.arange(1, len(target) + 1))
    last = np.append(sorted_p[1:] != sorted_p[:-1], True)  # equal ones are decided alike
    best = int(np.where(last, scores, -1.0).argmax())
    below = sorted_p[best + 1] if best + 1 < len(sorted_p) else 0.0
    return float(np.clip((sorted_p[best] + below) / 2, 1e-6, 1 - 1e-6))


class TableRegressor(RegressorMixin, TableEstimator):  # type: ignore[misc]
    """Base class of the regressors."""

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, eval_set: Any = None, groups: Any = None
    ) -> Self:
        """Fit the estimator to labelled rows.

        Parameters
        ----------
        X : array, data frame or path
            Training rows. Missing values are allowed.
        y : array of shape (n_rows,)
            The number of each row.
        sample_weight : array of shape (n_rows,), default=None
            Weight of each row in the loss. None weights all rows equally.
        eval_set : tuple (X, y), default=None
            Rows for early stopping, in place of a part of X.
        groups : array of shape (n_rows,), default=None
            Group of each row. Rows of one group are held out together.

        Returns
        -------
        self : the fitted estimator
        """
        return self._fit(X, *self.learn_target(y), sample_weight, eval_set, groups)

    def learn_target(self, y: Any) -> tuple[Array, int]:
        """Return the targets as float64, and 0 for regression."""
        return to_targets(y), 0

    def _encode_target(self, y: Any) -> Array:
        return to_targets(y)

    def _learn_scale(self, target: Array, weight: Array) -> None:
        self.mean_ = float(np.average(target, weights=weight if weight.any() else None))
        variance = np.average((target - self.mean_) ** 2, weights=weight if weight.any() else None)
        self.scale_ = float(variance**0.5) or 1.0

    def _targets(self, target: Array) -> Tensor:
        return torch.from_numpy((target - self.mean_) / self.scale_).float()

    def labelled(self, rows: Rows) -> tuple[EncodedTable, Array]:
        """Return encoded rows and their targets, not standardised."""
        return rows.table, rows.target.double().numpy() * self.scale_ + self.mean_

    def _calibrate(self, valid: Rows, outputs: Tensor) -> None:
        means = outputs[:, 0].double().numpy()
        target = valid.target.double().numpy()
        self.report_["valid"] = regression_metrics(means * self.scale_, target * self.scale_)

    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        """Return the regression metrics of metrics.py on labelled rows."""
        return regression_metrics(self.predict(X), self._encode_target(y))

    def predict(self, X: Any) -> Array:
        """Return the predicted number of each row."""
        return self._predict(X)[:, 0].double().numpy() * self.scale_ + self.mean_


class FTTransformerClassifier(TableClassifier):
    """FT-Transformer for classification; `published()` has the defaults of the paper.

    Every column is a token, and a summary token attends to all of them. Gorishniy et al. 2021
    (2106.11959). The default is a smaller network with piecewise-linear embeddings (Gorishniy et
    al. 2022, 2203.05556) and a cosine schedule, chosen on held-out rows of nine tables.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(64, 2))
    >>> model = FTTransformerClassifier(width=8, depth=1, epochs=3, random_state=0)
    >>> model.fit(X, X[:, 0] > 0).predict_proba(X[:3]).shape
    (3, 2)
    """


class FTTransformerRegressor(TableRegressor):
    """FT-Transformer for regression; see FTTransformerClassifier."""


class TabTransformerClassifier(TableClassifier):
    """TabTransformer for classification: only categories pass through attention.

    Numbers join the contextual embeddings of the categories in a final MLP. Huang et al. 2020
    (2012.06678).
    """

    kind = "tab"
    rate = 1e-3


class TabTransformerRegressor(TableRegressor):
    """TabTransformer for regression; see TabTransformerClassifier."""

    kind = "tab"
    rate = 1e-3


class SAINTClassifier(TableClassifier):
    """SAINT for classification: attention over the columns, then over the rows of a batch.

    Somepalli et al. 2021 (2106.01342). As published, the prediction for a row depends on the other
    rows of its batch.
    """

    kind = "saint"
    number_embedding = "hidden"


class SAINTRegressor(TableRegressor):
    """SAINT for regression; see SAINTClassifier."""

    kind = "saint"
    number_embedding = "hidden"


ESTIMATORS: dict[str, type[TableClassifier] | type[TableRegressor]] = {
    kind.__name__: kind
    for kind in (
        FTTransformerClassifier,
        FTTransformerRegressor,
        TabTransformerClassifier,
        TabTransformerRegressor,
        SAINTClassifier,
        SAINTRegressor,
    )
}
