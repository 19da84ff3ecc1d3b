"""scikit-learn estimators for tables: classifiers with calibrated probabilities, regressors."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from torch import Tensor

from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Array
from addnorm.errors import InputError, nearest
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
                "y must have at least two classes: the target has one class, "
                f"{str(self.classes_[0])!r}."
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

    def _calibrate(self, valid: Rows) -> None:
        outputs, target = self._predict_encoded(valid.table), valid.target.numpy()
        self.temperature_ = fit_temperature(outputs, valid.target, valid.weight)
        before = probabilities_of(outputs, 1.0).numpy()
        after = probabilities_of(outputs, self.temperature_).numpy()
        self.report_["temperature"] = self.temperature_
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
        likeliest = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[likeliest])


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

    def _calibrate(self, valid: Rows) -> None:
        outputs = self._predict_encoded(valid.table)[:, 0].double().numpy()
        target = valid.target.double().numpy()
        self.report_["valid"] = regression_metrics(outputs * self.scale_, target * self.scale_)

    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        """Return the regression metrics of metrics.py on labelled rows."""
        return regression_metrics(self.predict(X), self._encode_target(y))

    def predict(self, X: Any) -> Array:
        """Return the predicted number of each row."""
        return self._predict(X)[:, 0].double().numpy() * self.scale_ + self.mean_


class FTTransformerClassifier(TableClassifier):
    """FT-Transformer for classification; the defaults are those of the paper.

    Every column is a token, and a summary token attends to all of them. Gorishniy et al. 2021
    (2106.11959). `RECOMMENDED["classes"]` holds the parameters that addnorm recommends.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(64, 2))
    >>> model = FTTransformerClassifier(width=8, depth=1, epochs=3, random_state=0)
    >>> model.fit(X, X[:, 0] > 0).predict_proba(X[:3]).shape
    (3, 2)
    """


class FTTransformerRegressor(TableRegressor):
    """FT-Transformer for regression; the defaults are those of the paper.

    Gorishniy et al. 2021 (2106.11959). `RECOMMENDED["number"]` holds the parameters that addnorm
    recommends.
    """


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


RECOMMENDED_COMMON: dict[str, Any] = {
    **{"width": 64, "depth": 2, "heads": 4, "ffn_width": 128},
    **{"embedding": "piecewise", "learning_rate": 1e-3, "weight_decay": 1e-4},
}
RECOMMENDED: dict[str, dict[str, Any]] = {
    "classes": {**RECOMMENDED_COMMON, "swap_cells": 0.03, "patience": 8},
    "number": {
        **RECOMMENDED_COMMON,
        **{"members": 4, "drop_cells": 0.0, "swap_cells": 0.02},
        **{"ema": 0.997, "epochs": 90},
    },
}
"""Recommended parameters of FT-Transformer, by task; docs/results/tables.md has its results."""
