"""Estimators for scikit-learn: probabilities and numbers from tables, with fit and predict.

The constructor only stores; `fit` decides what was left open and keeps it under names that end in
an underscore. X may be an array, a data frame of any kind that narwhals knows, or a path. Columns
of frames are matched by name when predicting, so that their order does not matter.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import (  # type: ignore[import-untyped]
    BaseEstimator,
    ClassifierMixin,
    RegressorMixin,
)
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    _check_sample_weight,
    check_array,
    check_is_fitted,
    check_random_state,
    column_or_1d,
)
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.data.bins import make_edges
from addnorm.data.frame import Array, Frame, to_frame
from addnorm.data.recipe import Encoded, Recipe, fit_recipe
from addnorm.data.schema import Column, Schema, infer
from addnorm.errors import ConfigError, InputError
from addnorm.models.tabular import TabularConfig, TabularModel, build_tabular, trunk_of
from addnorm.tabular.calibration import fit_temperature, probabilities_of
from addnorm.tabular.fitting import Plan, Rows, answer, train
from addnorm.tabular.holdout import hold_out
from addnorm.tabular.metrics import class_figures, number_figures
from addnorm.tabular.pretrain import pretrain

PREDICT_BATCH = 1024
"""Rows predicted at once."""
TRUNK = (
    *("width", "depth", "heads", "ffn_width", "addnorm", "addnorm_options", "norm"),
    *("dropout", "attention_dropout", "ffn_dropout"),
)
"""Parameters that are fields of the trunk's configuration."""


@dataclass(frozen=True)
class Pretrained:
    """What pre-training left: how rows are read, and the body that reads them."""

    recipe: Recipe
    body: TabularModel
    history: list[dict[str, float]]

    def begin(self, classes: int) -> TabularModel:
        """A model with the body's weights and a fresh head."""
        model = build_tabular(replace(self.body.config, outputs=classes if classes > 2 else 1))
        kept = {n: t for n, t in self.body.state_dict().items() if not n.startswith("head.")}
        model.load_state_dict(kept, strict=False)
        return model


class TableEstimator(BaseEstimator):  # type: ignore[misc]
    """What all estimators for tables share.

    Parameters of the network that are None are those of its publication (presets.py).

    width, depth, heads, ffn_width, addnorm, addnorm_options, norm, dropout, attention_dropout,
    ffn_dropout: as in the model's configuration. `embedding` of numbers: linear, periodic,
    piecewise, hidden; its options beside it, among them `bins` (how many) of piecewise, whose edges
    are placed by `bins`: target or quantile. `members`: predictors that share the trunk.
    `scaling` of numbers: quantile, robust, standard, none. `impute`: none, median, mean. `rare`:
    how often a value must be met. `drop_cells`: share of cells hidden in training. `batch_size`,
    `epochs`: from the number of rows. `valid`: share of rows held out, `split`: random or time.
    `schema`: a Schema, a path, or a table of column: kind.
    """

    kind = "ft"
    rate = 1e-4
    number_embedding = "linear"

    def __init__(
        self,
        *,
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        ffn_width: int | None = None,
        addnorm: str | None = None,
        addnorm_options: dict[str, Any] | None = None,
        norm: str | None = None,
        dropout: float | None = None,
        attention_dropout: float | None = None,
        ffn_dropout: float | None = None,
        embedding: str | None = None,
        embedding_options: dict[str, Any] | None = None,
        bins: str = "target",
        members: int = 1,
        scaling: str = "quantile",
        impute: str = "none",
        rare: int | None = None,
        drop_cells: float = 0.02,
        learning_rate: float | None = None,
        weight_decay: float = 1e-5,
        schedule: str = "constant",
        warmup: float = 0.0,
        ema: float = 0.0,
        batch_size: int | None = None,
        epochs: int | None = None,
        patience: int = 16,
        minutes: float | None = None,
        valid: float | None = None,
        split: str = "random",
        schema: Any = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.width = width
        self.depth = depth
        self.heads = heads
        self.ffn_width = ffn_width
        self.addnorm = addnorm
        self.addnorm_options = addnorm_options
        self.norm = norm
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.ffn_dropout = ffn_dropout
        self.embedding = embedding
        self.embedding_options = embedding_options
        self.bins = bins
        self.members = members
        self.scaling = scaling
        self.impute = impute
        self.rare = rare
        self.drop_cells = drop_cells
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.warmup = warmup
        self.ema = ema
        self.batch_size = batch_size
        self.epochs = epochs
        self.patience = patience
        self.minutes = minutes
        self.valid = valid
        self.split = split
        self.schema = schema
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        tags.non_deterministic = False
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        """Pre-training alone leaves nothing to predict with."""
        return hasattr(self, "model_")

    # ── What X is ─────────────────────────────────────────────────────────────────────────────────

    def _frame(self, X: Any, *, fitting: bool) -> Frame:
        """X as a frame, checked against the columns of `fit`."""
        frame = as_frame(X, self)
        if fitting:
            self.n_features_in_ = len(frame.columns)
            if frame.named:
                self.feature_names_in_ = np.array(frame.names, dtype=object)
            elif hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
            return frame
        names = getattr(self, "feature_names_in_", None)
        if names is None or not frame.named:
            if len(frame.columns) != self.n_features_in_:
                raise InputError(
                    f"X has {len(frame.columns)} features, but {type(self).__name__} is expecting "
                    f"{self.n_features_in_} features as input."
                )
            known = [f"x{i}" for i in range(self.n_features_in_)] if names is None else names
            columns = dict(zip(known, frame.columns.values(), strict=True))
            return Frame(frame.name, columns, frame.notes, frame.named)
        return frame

    def _schema(self, frame: Frame) -> Schema:
        """The schema given, or guessed from the training rows."""
        if isinstance(self.schema, Schema):
            return self.schema
        if isinstance(self.schema, str | Path):
            return Schema.load(self.schema)
        if self.schema is not None and not isinstance(self.schema, dict):
            raise ConfigError(
                "schema must be a Schema, a path, or a table of column: kind: "
                f"got {type(self.schema).__name__}."
            )
        if not frame.named and all(c.dtype.kind == "f" for c in frame.columns.values()):
            # A plain matrix: nothing in it says that a column is not to be used.
            found = Schema(columns=tuple(Column(name=n, kind="number") for n in frame.columns))
        else:
            found = infer(frame)
        return found.change(self.schema) if self.schema else found

    # ── Fitting ───────────────────────────────────────────────────────────────────────────────────

    def _fit(
        self,
        X: Any,
        target: Array,
        classes: int,
        sample_weight: Any,
        eval_rows: tuple[Any, Array] | None,
        groups: Any,
    ) -> Self:
        began = time.perf_counter()
        frame = self._frame(X, fitting=True)
        rows = len(frame)
        if rows < 2:
            raise InputError(f"there must be two rows or more to learn from: got {rows} sample.")
        if len(target) != rows:
            raise InputError(f"X and y must have as many rows: got {rows} and {len(target)}.")
        weight = np.ones(rows)
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, target, dtype=np.float64)
            if not (weight >= 0).all():
                raise InputError(f"sample_weight must be 0 or more: got {weight.min():g}.")
        self.seed_ = _seed(self.random_state)
        before = torch.get_rng_state()
        try:
            torch.manual_seed(self.seed_)
            self._train(frame, target, classes, weight, eval_rows, groups)
        finally:
            torch.set_rng_state(before)
        self.report_["seconds"] = time.perf_counter() - began
        return self

    def _train(
        self,
        frame: Frame,
        target: Array,
        classes: int,
        weight: Array,
        eval_rows: tuple[Any, Array] | None,
        groups: Any,
    ) -> None:
        share = 0.0 if eval_rows is not None else self.valid
        labels = target if classes else None
        order = None if groups is None else np.asarray(groups)
        inside, held = hold_out(
            len(frame), share, classes=labels, groups=order, order=self.split, seed=self.seed_
        )
        part = frame.take(inside)
        schema = self._schema(part)
        before = getattr(self, "pretrained_", None)
        self.recipe_ = self._recipe(part, schema) if before is None else before.recipe
        table = self.recipe_.encode(part)
        self._learn_scale(target[inside], weight[inside], classes)
        rows = Rows(table, self._targets(target[inside], classes), _normal(weight[inside]))
        valid = None
        if eval_rows is not None:
            other = self.recipe_.encode(self._frame(eval_rows[0], fitting=False))
            ones = torch.ones(len(other))
            valid = Rows(other, self._targets(eval_rows[1], classes), ones)
        elif len(held):
            other = self.recipe_.encode(frame.take(held))
            if weight[held].any():
                valid = Rows(other, self._targets(target[held], classes), _normal(weight[held]))
        if before is None:
            self.model_ = build_tabular(self._config(table, target[inside], self.bins, classes))
        else:
            self.model_ = before.begin(classes)
        plan = self._plan(len(rows), valid is not None)
        self.batch_ = plan.batch
        fitted = train(self.model_, rows, valid, plan, classes, verbose=self.verbose)
        self.n_iter_ = max(1, fitted.progress.epoch)
        self.temperature_ = 1.0
        self.report_: dict[str, Any] = {
            "rows": len(rows),
            "held_out": 0 if valid is None else len(valid),
            "epochs": self.n_iter_,
            "steps": fitted.progress.step,
            "best_step": fitted.progress.best_step,
            "parameters": self.model_.count(),
            "stopped": fitted.stopped,
            "notes": [*frame.notes, *_left_out(schema), *fitted.notes],
            "history": fitted.progress.history,
        }
        if valid is not None:
            self._calibrate(valid, classes)

    def _recipe(self, frame: Frame, schema: Schema) -> Recipe:
        return fit_recipe(frame, schema, scaling=self.scaling, rare=self.rare, impute=self.impute)

    def pretrain(self, X: Any, *, method: str = "masked", epochs: int | None = None) -> Self:
        """Learn what rows are like from rows without answers; `fit` then begins from there.

        `method` is masked, replaced or contrastive; see pretrain.py. Quantiles and categories are
        learnt from these rows, so that they should include those of `fit`. Bins of piecewise
        embeddings are by quantiles, as there is no target.
        """
        frame = self._frame(X, fitting=True)
        self.seed_ = _seed(self.random_state)
        inside, held = hold_out(len(frame), self.valid, order=self.split, seed=self.seed_)
        part = frame.take(inside)
        self.recipe_ = recipe = self._recipe(part, self._schema(part))
        table, state = recipe.encode(part), torch.get_rng_state()
        try:
            torch.manual_seed(self.seed_)
            body = build_tabular(self._config(table, np.zeros(len(part)), "quantile", 0))
            plan = replace(self._plan(len(part), bool(len(held))), drop_cells=0.0)
            plan = plan if epochs is None else replace(plan, epochs=epochs)
            valid = recipe.encode(frame.take(held)) if len(held) else None
            fitted = pretrain(body, table, valid, plan, method, verbose=self.verbose)
        finally:
            torch.set_rng_state(state)
        self.pretrained_ = Pretrained(recipe, body, fitted.progress.history)
        return self

    def _learn_scale(self, target: Array, weight: Array, classes: int) -> None:
        """What the target is standardised by, from training rows; nothing of classes."""

    def _targets(self, target: Array, classes: int) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(target)).long()

    def _calibrate(self, valid: Rows, classes: int) -> None:
        """Figures on held-out rows."""

    def _config(self, table: Encoded, target: Array, bins: str, classes: int) -> TabularConfig:
        options = dict(self.embedding_options or {})
        embedding = self.embedding or self.number_embedding
        if embedding == "piecewise" and table.numbers.shape[1]:
            options["edges"] = make_edges(
                table.numbers.numpy(),
                target,
                kind=bins,
                classes=bool(classes),
                bins=options.pop("bins", 48),
                seed=self.seed_,
            )
        return TabularConfig(
            kind=self.kind,
            numbers=table.numbers.shape[1],
            categories=self.recipe_.sizes,
            outputs=classes if classes > 2 else 1,
            trunk=self._trunk(),
            embedding=embedding,
            embedding_options=options,
            members=self.members,
        )

    def _trunk(self) -> ModelConfig:
        """The published trunk, with the parameters that were given."""
        given = {name: getattr(self, name) for name in TRUNK if getattr(self, name) is not None}
        if self.kind == "ft" and self.width is not None:
            given.setdefault("ffn_width", round(self.width * 4 / 3))
        return trunk_of(self.kind, **given)

    def _plan(self, rows: int, held_out: bool) -> Plan:
        """Batch and epochs from the number of rows, where they were left open."""
        batch = self.batch_size or next(
            size
            for most, size in ((2_000, 32), (10_000, 128), (50_000, 256), (10**18, 512))
            if rows <= most
        )
        per_epoch = -(-rows // batch)
        most = 100 if held_out else 30
        epochs = self.epochs or int(np.clip(20_000 // per_epoch, 10, most))
        for name, value in (("batch_size", batch), ("epochs", epochs)):
            if value < 1:
                raise ConfigError(f"{name} must be 1 or more: got {value}. Leave it out.")
        return Plan(
            batch=batch,
            epochs=epochs,
            rate=self.rate if self.learning_rate is None else self.learning_rate,
            weight_decay=self.weight_decay,
            schedule=self.schedule,
            warmup=self.warmup,
            patience=self.patience,
            drop_cells=self.drop_cells,
            ema=self.ema,
            minutes=self.minutes,
            seed=self.seed_,
        )

    # ── Predicting ────────────────────────────────────────────────────────────────────────────────

    def _answers(self, X: Any) -> Tensor:
        """The mean answer of the members, (rows, outputs)."""
        check_is_fitted(self)
        return self._answer(self.recipe_.encode(self._frame(X, fitting=False)))

    def _answer(self, table: Encoded) -> Tensor:
        batch = self.batch_ if self.model_.along_rows else PREDICT_BATCH
        return answer(self.model_, table, batch).mean(dim=1)


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
        y = _labels(y)
        check_classification_targets(y)
        self.classes_, target = np.unique(y, return_inverse=True)
        count = len(self.classes_)
        if count == 1:
            raise InputError(
                "there must be two classes or more to tell apart: the target has one class, "
                f"{self.classes_[0]!r}."
            )
        held = None
        if eval_set is not None:
            other, answers = _pair(eval_set)
            held = other, self._places(_labels(answers))
        return self._fit(X, target, count, sample_weight, held, groups)

    def _places(self, labels: Array) -> Array:
        strange = sorted({str(label) for label in labels} - {str(c) for c in self.classes_})
        if strange:
            raise InputError(
                f"eval_set must have the classes of the training rows: got {strange[0]!r} too."
            )
        return np.searchsorted(self.classes_, labels)

    def _calibrate(self, valid: Rows, classes: int) -> None:
        answers = self._answer(valid.table)
        target = valid.target.numpy()
        self.report_["uncalibrated"] = class_figures(probabilities_of(answers, 1.0).numpy(), target)
        self.temperature_ = fit_temperature(answers, valid.target, valid.weight)
        probabilities = probabilities_of(answers, self.temperature_).numpy()
        self.report_["temperature"] = self.temperature_
        self.report_["valid"] = class_figures(probabilities, target)

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
        target = _numbers(y)
        held = None
        if eval_set is not None:
            other, answers = _pair(eval_set)
            held = other, _numbers(answers)
        return self._fit(X, target, 0, sample_weight, held, groups)

    def _learn_scale(self, target: Array, weight: Array, classes: int) -> None:
        self.mean_ = float(np.average(target, weights=weight if weight.any() else None))
        spread = np.average((target - self.mean_) ** 2, weights=weight if weight.any() else None)
        self.scale_ = float(spread**0.5) or 1.0

    def _targets(self, target: Array, classes: int) -> Tensor:
        return torch.from_numpy((target - self.mean_) / self.scale_).float()

    def _calibrate(self, valid: Rows, classes: int) -> None:
        answers = self._answer(valid.table)[:, 0].double().numpy()
        target = valid.target.double().numpy()
        figures = number_figures(answers * self.scale_, target * self.scale_)
        self.report_["valid"] = figures

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


ESTIMATORS: dict[str, type[TableEstimator]] = {
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


RECOMMENDED: dict[str, Any] = {
    "width": 64,
    "depth": 2,
    "heads": 4,
    "ffn_width": 128,
    "embedding": "piecewise",
    "learning_rate": 1e-3,
    "weight_decay": 1e-4,
}
"""Settings of FT-Transformer that are better and faster than the published default."""


def as_frame(X: Any, estimator: Any = None) -> Frame:
    """X as a frame; what scikit-learn refuses is refused in its words."""
    if isinstance(X, Frame | str | Path | Mapping):
        return to_frame(X)
    if _is_frame(X):
        frame = to_frame(X, "X")
        if not len(frame):
            raise InputError("X must have a row: found array with 0 sample(s).")
        return frame
    array = check_array(X, dtype=None, ensure_all_finite=False, estimator=estimator, input_name="X")
    if array.dtype.kind == "O":
        _need_plain(array)
    return to_frame(array, "X")


def _is_frame(X: Any) -> bool:
    import narwhals

    try:
        narwhals.from_native(X, eager_only=True)
    except TypeError:
        return False
    return True


def _need_plain(array: Array) -> None:
    for value in array.ravel():
        if isinstance(value, dict | list | tuple | set):
            raise TypeError(
                f"argument must be a string or a number: got {type(value).__name__} in X."
            )


def _labels(y: Any) -> Array:
    if y is None:
        raise InputError("y must be given: requires y to be passed, but the target y is None.")
    y = column_or_1d(np.asarray(y), warn=True)
    if y.dtype.kind == "O":
        gone = [value for value in y if value is None or value != value]
        if gone:
            raise InputError(f"Input y contains NaN or None: {len(gone)} targets are missing.")
        kinds = {type(value) for value in y.tolist()}
        if kinds <= {bool} or kinds <= {int} or kinds <= {str}:
            y = np.array(y.tolist())
    elif y.dtype.kind == "f" and not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity: every row must have a class.")
    return y


def _numbers(y: Any) -> Array:
    if y is None:
        raise InputError("y must be given: requires y to be passed, but the target y is None.")
    y = column_or_1d(np.asarray(y), warn=True)
    try:
        y = y.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(f"y must be numbers: got {y.dtype}. Try the classifier.") from None
    if not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity: every row must have a number.")
    return y


def _pair(eval_set: Any) -> tuple[Any, Any]:
    pair = eval_set[0] if isinstance(eval_set, list) and len(eval_set) == 1 else eval_set
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise InputError("eval_set must be a pair (X, y), or a list of one such pair.")
    return pair[0], pair[1]


def _normal(weight: Array) -> Tensor:
    """Weights that are 1 on average."""
    return torch.from_numpy(weight / weight.mean() if weight.any() else weight).float()


def _seed(random_state: Any) -> int:
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def _left_out(schema: Schema) -> list[str]:
    return [
        f"column {column.name!r} is left out: {column.note or 'as asked for'}."
        for column in schema.columns
        if column.kind == "ignore"
    ]
