"""scikit-learn estimators for tables: classifiers with calibrated probabilities, regressors."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.class_weight import compute_sample_weight  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]
from torch import Tensor

from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Array
from addnorm.data.table.scaling import deviation
from addnorm.errors import ConfigError, InputError, nearest
from addnorm.metrics import (
    class_table,
    classification_metrics,
    ordinal_metrics,
    regression_metrics,
    reliability_bins,
)
from addnorm.models.bins import recalibrated
from addnorm.tabular.base import PREDICT_BATCH, TableEstimator
from addnorm.tabular.conformal import MIN_CALIBRATION_ROWS, calibration_knots, widening_knots
from addnorm.tabular.distribution import (
    NumberDistribution,
    check_levels,
    coverage_curve,
    fan_groups,
    make_target_bins,
    number_metrics,
)
from addnorm.tabular.fitting import Rows
from addnorm.tabular.inputs import to_labels, to_targets
from addnorm.training.calibration import fit_temperature, probabilities_of

POINTS = ("mean", "median")
"""What `predict` of a regressor may return."""


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

    def class_weights(self, target: Array) -> Array:
        """Return the weight that each row has by its class."""
        if self.class_weight is None:
            return np.ones(len(target))
        if not isinstance(self.class_weight, dict) and self.class_weight != "balanced":
            raise ConfigError(
                "class_weight must be a dictionary from class to weight, or 'balanced': "
                f"got {self.class_weight!r}."
            )
        return np.asarray(compute_sample_weight(self.class_weight, self.classes_[target]))

    def _calibrate(self, valid: Rows, outputs: Tensor) -> None:
        outputs, target = outputs.mean(dim=1), valid.target.numpy()
        self.temperature_ = fit_temperature(outputs, valid.target, valid.weight)
        before = probabilities_of(outputs, 1.0).numpy()
        after = probabilities_of(outputs, self.temperature_).numpy()
        self.report_["temperature"] = self.temperature_
        if self.metric == "f1" and len(self.classes_) == 2:
            self.threshold_ = self.report_["threshold"] = best_threshold(after[:, 1], target)
        self.report_["uncalibrated"] = self.class_metrics(before, target)
        self.report_["valid"] = self.class_metrics(after, target)
        self.report_["reliability"] = {
            "as trained": reliability_bins(before, target),
            "calibrated": reliability_bins(after, target),
        }
        self.report_["classes"] = class_table(after, self._decide(after), target)

    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        """Return the classification metrics of metrics.py on labelled rows."""
        return self.class_metrics(self.predict_proba(X), self._encode_target(y))

    def class_metrics(self, probabilities: Array, target: Array) -> dict[str, float]:
        """Return the metrics of probabilities (rows, classes) for class indices."""
        return classification_metrics(probabilities, target)

    def predict_proba(self, X: Any) -> Array:
        """Return the calibrated probability of each class of `classes_`, (rows, classes)."""
        return np.asarray(probabilities_of(self._predict(X), self.temperature_).numpy())

    def predict(self, X: Any) -> Array:
        """Return the most likely class of each row."""
        check_is_fitted(self)
        return np.asarray(self.classes_[self._decide(self.predict_proba(X))])

    def _decide(self, probabilities: Array) -> Array:
        """Return the class index of each row: the likeliest, or by the threshold if any."""
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
    """Base class of the regressors: a distribution over bins, calibrated on held-out rows."""

    edges_: tuple[float, ...] = ()
    """Edges of the bins, in units of the target; empty if the model predicts one number."""
    has_bins = True

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
            Rows for early stopping and calibration, in place of a part of X.
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
        weights = weight if weight.any() else None
        self.mean_ = float(np.average(target, weights=weights))
        self.scale_ = deviation(target, weights) or 1.0
        if self.has_bins:
            self.target_bins_ = make_target_bins(target, weight)
            self.edges_ = tuple(self.target_bins_.edges.tolist())

    def standardised_edges(self) -> tuple[float, ...]:
        """Return the edges of the bins of a standardised target."""
        return tuple(((np.array(self.edges_) - self.mean_) / self.scale_).tolist())

    def _edges(self) -> Tensor | None:
        return torch.tensor(self.standardised_edges()) if self.edges_ else None

    def _head(self, classes: int) -> dict[str, Any]:
        if not self.edges_:
            return super()._head(classes)
        return {"outputs": len(self.edges_) - 1, "edges": self.standardised_edges()}

    def _targets(self, target: Array) -> Tensor:
        return torch.from_numpy((target - self.mean_) / self.scale_).float()

    def labelled(self, rows: Rows) -> tuple[EncodedTable, Array]:
        """Return encoded rows and their targets, not standardised.

        They are the numbers that were given: a standardised float32 that is scaled back differs in
        the last digits, and a count would no longer be the value that has a bin of its own.
        """
        assert rows.given is not None
        return rows.table, np.asarray(rows.given, dtype=np.float64)

    def _calibrate(self, valid: Rows, outputs: Tensor) -> None:
        target = self.labelled(valid)[1]
        if not self.edges_:
            means = outputs.mean(dim=1)[:, 0].double().numpy()
            self.report_["valid"] = regression_metrics(means * self.scale_ + self.mean_, target)
            return
        self.model_.config = self.model_.config.replace(calibration=(), widening=())
        before = self._distribution(outputs)
        knots = calibration_knots(before.pit(target, self.seed_))
        self.model_.config = self.model_.config.replace(calibration=knots)
        after = self._distribution(outputs)
        if after.has_values:
            widening = widening_knots(after.interval_scores(target))
            self.model_.config = self.model_.config.replace(widening=widening)
            after.widening = widening
        self.report_["target"] = self.target_bins_.describe()
        self.report_["uncalibrated"] = number_metrics(before, target)
        self.report_["valid"] = number_metrics(after, target)
        self.report_["coverage"] = {
            "as trained": coverage_curve(before, target),
            "calibrated": coverage_curve(after, target),
        }
        self.report_["fan"] = fan_groups(after, target)
        if not knots:
            self.report_["notes"].append(
                f"intervals are not calibrated: {len(valid)} rows are held out, and "
                f"{MIN_CALIBRATION_ROWS} are needed."
            )

    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        """Return the regression metrics of metrics.py on labelled rows, and those of intervals."""
        target = self._encode_target(y)
        if not self.predicts_distribution:
            return regression_metrics(self.predict(X), target)
        return number_metrics(self.predict_distribution(X), target)

    def predict(self, X: Any, point: str = "mean") -> Array:
        """Return the predicted number of each row.

        Parameters
        ----------
        X : array, data frame or path
            Rows.
        point : {"mean", "median"}, default="mean"
            Which number of the predicted distribution: its mean has the smallest squared error,
            its median the smallest absolute error.
        """
        if point not in POINTS:
            raise ConfigError(f"point must be mean or median: got {point!r}. Try median.")
        check_is_fitted(self)
        if self.edges_ or point == "median":
            distribution = self.predict_distribution(X)
            return distribution.mean if point == "mean" else distribution.median
        return self._predict(X)[:, 0].double().numpy() * self.scale_ + self.mean_

    @property
    def predicts_distribution(self) -> bool:
        """Whether the fitted model predicts a distribution, not only one number."""
        return bool(self.edges_)

    def predict_distribution(self, X: Any) -> NumberDistribution:
        """Return the predicted distribution of each row: mean, quantiles, cdf, crps, samples."""
        check_is_fitted(self)
        if not self.predicts_distribution:
            raise ConfigError(
                "this model predicts one number for a row: it was saved before distributions were "
                "predicted. Train it again for quantiles and intervals."
            )
        table = self.encoder_.encode(self._frame(X, fitting=False))
        return self._distribution(self._outputs(table))

    def _distribution(self, outputs: Tensor) -> NumberDistribution:
        """Return the distributions that outputs (rows, members, bins) are the logits of."""
        edges = torch.tensor(self.edges_, dtype=torch.float64)
        knots = torch.tensor(self.model_.config.calibration, dtype=torch.float64)
        found, places = [], []
        for part in torch.split(outputs, PREDICT_BATCH):
            p, own = self.model_.bin_probabilities(part.double()), edges
            if len(knots):
                p, own = recalibrated(p, edges, knots[:, 0], knots[:, 1])
                places.append(own)
            found.append(p)
        ends = torch.cat(places) if places else edges
        return NumberDistribution(
            torch.cat(found).numpy(), ends.numpy(), self.model_.config.widening
        )

    def predict_quantiles(self, X: Any, levels: Any = (0.05, 0.5, 0.95)) -> Array:
        """Return quantiles of the predicted distribution of each row, (rows, levels)."""
        several = check_levels(levels)
        return self.predict_distribution(X).quantile(several)

    def predict_interval(self, X: Any, level: float = 0.9) -> Array:
        """Return low and high ends, (rows, 2), between which a share `level` of targets falls."""
        check_levels(level, "level")
        return self.predict_distribution(X).interval(level)


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


class FTTransformerOrdinal(TableClassifier):
    """FT-Transformer for ordered classes, which are numbers: marks, grades, stars.

    Probabilities are those of classes, trained so that a distant class costs more than a near one;
    `classes_` is in the order of the numbers. Of the numbers only the order is used.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(64, 2))
    >>> model = FTTransformerOrdinal(width=8, depth=1, epochs=3, random_state=0)
    >>> model.fit(X, 9 + (X[:, 0] > 0) + (X[:, 0] > 1)).classes_
    array([ 9, 10, 11])
    """

    ordered = True

    def learn_target(self, y: Any) -> tuple[Array, int]:
        """Set `classes_` in ascending order of their numbers; return indices, and their number."""
        target, count = super().learn_target(y)
        try:
            numbers = np.array([float(label) for label in self.classes_])
        except ValueError:
            raise InputError(
                f"an ordinal target must be numbers: got {self.classes_[0]!r}. Number the levels "
                "in their order, or try classes."
            ) from None
        order = np.argsort(numbers, kind="stable")
        self.classes_ = self.classes_[order]
        return np.argsort(order)[target], count

    def class_metrics(self, probabilities: Array, target: Array) -> dict[str, float]:
        """Return the metrics of classes, and those of their order."""
        numbers = np.array([float(label) for label in self.classes_])
        figures = classification_metrics(probabilities, target)
        return figures | ordinal_metrics(probabilities, target, numbers)


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
        FTTransformerOrdinal,
        FTTransformerRegressor,
        TabTransformerClassifier,
        TabTransformerRegressor,
        SAINTClassifier,
        SAINTRegressor,
    )
}
