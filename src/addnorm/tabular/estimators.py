"""Estimators for scikit-learn: probabilities and numbers from tables, with fit and predict."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from torch import Tensor

from addnorm.data.table.frame import Array
from addnorm.errors import InputError, nearest
from addnorm.metrics import classification_metrics, regression_metrics, reliability_bins
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.calibration import fit_temperature, probabilities_of
from addnorm.tabular.fitting import Rows
from addnorm.tabular.inputs import to_labels, to_targets


class TableClassifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """Class probabilities from tables; calibrated on held-out rows."""

    classes_: Array

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, eval_set: Any = None, groups: Any = None
    ) -> Self:
        """Learn from rows X and their classes y.

        `eval_set` is a pair (X, y) to stop early and calibrate with, in place of a part of X;
        `groups` are held out whole.
        """
        return self._fit(X, *self.learn_target(y), sample_weight, eval_set, groups)

    def learn_target(self, y: Any) -> tuple[Array, int]:
        y = to_labels(y)
        check_classification_targets(y)
        self.classes_, target = np.unique(y, return_inverse=True)
        count = len(self.classes_)
        if count == 1:
            raise InputError(
                "there must be two classes or more to tell apart: the target has one class, "
                f"{self.classes_[0]!r}."
            )
        return target, count

    def _known(self, y: Any) -> Array:
        labels = [str(label) for label in to_labels(y)]
        place = {str(label): i for i, label in enumerate(self.classes_)}
        strange = sorted(set(labels) - set(place))
        if strange:
            raise InputError(
                f"y must have no other classes than training had: got {strange[0]!r}. "
                f"{nearest(strange[0], place)}"
            )
        return np.array([place[label] for label in labels], dtype=np.int64)

    def _calibrate(self, valid: Rows) -> None:
        answers, target = self._answer(valid.table), valid.target.numpy()
        self.temperature_ = fit_temperature(answers, valid.target, valid.weight)
        before = probabilities_of(answers, 1.0).numpy()
        after = probabilities_of(answers, self.temperature_).numpy()
        self.report_["temperature"] = self.temperature_
        self.report_["uncalibrated"] = classification_metrics(before, target)
        self.report_["valid"] = classification_metrics(after, target)
        self.report_["reliability"] = {
            "as trained": reliability_bins(before, target),
            "calibrated": reliability_bins(after, target),
        }

    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        return classification_metrics(self.predict_proba(X), self._known(y))

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class of `classes_`, (rows, classes)."""
        answers = self._answers(X)
        return np.asarray(probabilities_of(answers, self.temperature_).numpy())

    def predict(self, X: Any) -> Array:
        """The likeliest class of each row."""
        likeliest = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[likeliest])


class TableRegressor(RegressorMixin, TableEstimator):  # type: ignore[misc]
    """Numbers from tables."""

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, eval_set: Any = None, groups: Any = None
    ) -> Self:
        """Learn from rows X and their numbers y; see TableClassifier.fit for the rest."""
        return self._fit(X, *self.learn_target(y), sample_weight, eval_set, groups)

    def learn_target(self, y: Any) -> tuple[Array, int]:
        return to_targets(y), 0

    def _known(self, y: Any) -> Array:
        return to_targets(y)

    def _learn_scale(self, target: Array, weight: Array) -> None:
        self.mean_ = float(np.average(target, weights=weight if weight.any() else None))
        spread = np.average((target - self.mean_) ** 2, weights=weight if weight.any() else None)
        self.scale_ = float(spread**0.5) or 1.0

    def _targets(self, target: Array) -> Tensor:
        return torch.from_numpy((target - self.mean_) / self.scale_).float()

    def _calibrate(self, valid: Rows) -> None:
        answers = self._answer(valid.table)[:, 0].double().numpy()
        target = valid.target.double().numpy()
        figures = regression_metrics(answers * self.scale_, target * self.scale_)
        self.report_["valid"] = figures

    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        return regression_metrics(self.predict(X), self._known(y))

    def predict(self, X: Any) -> Array:
        """The number of each row."""
        return self._answers(X)[:, 0].double().numpy() * self.scale_ + self.mean_


class FTTransformerClassifier(TableClassifier):
    """FT-Transformer (Gorishniy et al. 2021) for classes; the defaults are the paper's.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(64, 2))
    >>> model = FTTransformerClassifier(width=8, depth=1, epochs=3, random_state=0)
    >>> model.fit(X, X[:, 0] > 0).predict_proba(X[:3]).shape
    (3, 2)
    """


class FTTransformerRegressor(TableRegressor):
    """FT-Transformer (Gorishniy et al. 2021) for numbers; the defaults are the paper's."""


class TabTransformerClassifier(TableClassifier):
    """TabTransformer (Huang et al. 2020) for classes: categories in context, numbers beside."""

    kind = "tab"
    rate = 1e-3


class TabTransformerRegressor(TableRegressor):
    """TabTransformer (Huang et al. 2020) for numbers."""

    kind = "tab"
    rate = 1e-3


class SAINTClassifier(TableClassifier):
    """SAINT (Somepalli et al. 2021) for classes: attention over columns, then over rows.

    What is predicted for a row depends, as published, on the rows that are predicted with it.
    """

    kind = "saint"
    number_embedding = "hidden"


class SAINTRegressor(TableRegressor):
    """SAINT (Somepalli et al. 2021) for numbers."""

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


COMMON: dict[str, Any] = {
    **{"width": 64, "depth": 2, "heads": 4, "ffn_width": 128},
    **{"embedding": "piecewise", "learning_rate": 1e-3, "weight_decay": 1e-4},
}
RECOMMENDED: dict[str, dict[str, Any]] = {
    "classes": {**COMMON, "swap_cells": 0.03, "patience": 8},
    "number": {
        **COMMON,
        **{"members": 4, "drop_cells": 0.0, "swap_cells": 0.02},
        **{"ema": 0.997, "epochs": 90},
    },
}
"""Settings of FT-Transformer, by task; docs/results/tables.md says what they reach."""
