"""Base class of the estimators for tables: parameters, fitting, pre-training, prediction.

The constructor only stores its arguments; `fit` resolves those that are None and stores what it
learns in attributes that end in an underscore. X may be an array, a data frame of any library that
narwhals supports, or a path. Columns of data frames are matched by name in prediction, so their
order does not matter.
"""

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    _check_sample_weight,
    check_is_fitted,
)
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.cpu import thread_candidates, use_threads
from addnorm.data.table.encode import EncodedTable, TableEncoder, fit_encoder
from addnorm.data.table.frame import Array, Frame
from addnorm.data.table.infer import infer
from addnorm.data.table.schema import Column, Schema
from addnorm.data.table.text import (
    TEXT_ROWS,
    FittedText,
    fit_texts,
    target_scores,
    without_texts,
)
from addnorm.errors import ConfigError, InputError
from addnorm.models.tabular import TabularModel, build_tabular
from addnorm.tabular.choices import (
    check_parameters,
    choose_network,
    choose_settings,
    count_folds,
    threads_of,
)
from addnorm.tabular.fitting import (
    ROW_MULTIPLE,
    FitResult,
    Rows,
    SplitRows,
    fit_network,
    held_out_outputs,
    predict_outputs,
)
from addnorm.tabular.holdout import (
    MIN_ROWS_TO_SPLIT,
    describe_groups,
    hold_out,
    make_folds,
)
from addnorm.tabular.inputs import (
    as_frame,
    describe_columns,
    describe_unlearnt,
    normalise_weights,
    to_groups,
    to_pair,
    to_seed,
)
from addnorm.tabular.pretrain import pretrain
from addnorm.training.threads import LoadProbe

PREDICT_BATCH = 1024
"""Rows in a batch of prediction."""
TEXT_FOLDS = 5
"""Folds from which the scores of free texts are computed for one another's rows."""
PROBED_BATCHES = 2
"""Batches of prediction after which the number of threads is chosen again."""
LOAD_PROBE = LoadProbe()
"""Chooses the number of threads of predictions, for all estimators of the process."""
TEACHER_NOTE = (
    "a small table: predictions of the instant model are targets of the training, too; "
    "effort='low' leaves them out."
)


@dataclass(frozen=True)
class Pretrained:
    """The result of pre-training: the column encoder, and the network without a trained head."""

    encoder: TableEncoder
    body: TabularModel
    history: list[dict[str, float]]

    def make_model(self, classes: int, head: dict[str, Any] | None = None) -> TabularModel:
        """Return a model with the pre-trained weights and a new head."""
        head = head or {"outputs": outputs_for(classes)}
        model = build_tabular(replace(self.body.config, **head))
        weights = {n: t for n, t in self.body.state_dict().items() if not n.startswith("head.")}
        model.load_state_dict(weights, strict=False)
        return model


def outputs_for(classes: int) -> int:
    """Return the number of outputs for classes: one for two of them, and for a single number."""
    return classes if classes > 2 else 1


def with_parameters(text: str, constructor: str) -> str:
    """Return the docstring of a class with the parameters of its constructor, before examples.

    >>> print(with_parameters("A class.", "Store.\\n\\nParameters\\n----------\\nx : int"))
    A class.
    <BLANKLINE>
    Parameters
    ----------
    x : int
    """
    parameters = inspect.cleandoc(constructor).partition("\n\n")[2]
    about, heading, examples = inspect.cleandoc(text).partition("Examples\n--------\n")
    return f"{about.rstrip()}\n\n{parameters}\n\n{heading}{examples}".rstrip()


class TableEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """Base class of the estimators for tables; its constructor documents their parameters."""

    kind = "ft"
    rate = 1e-4
    number_embedding = "linear"
    ordered = False
    """Whether the classes have an order."""

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
        members: int | None = None,
        scaling: str = "quantile",
        impute: str = "none",
        rare: int | None = None,
        drop_cells: float | None = None,
        swap_cells: float | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        schedule: str | None = None,
        warmup: float | None = None,
        ema: float | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        patience: int | None = None,
        minutes: float | None = None,
        effort: str = "normal",
        folds: int | None = None,
        metric: str = "loss",
        class_weight: Any = None,
        valid: float | None = None,
        split: str = "random",
        schema: Any = None,
        device: str | None = None,
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        """Store the parameters; `fit` checks them.

        Parameters
        ----------
        width : int, default=None
            Width of the tokens. Parameters that are None are those that addnorm recommends for
            FT-Transformer, and those of the publication for the others or with
            effort="published".
        depth : int, default=None
            Number of blocks.
        heads : int, default=None
            Attention heads; must divide the width.
        ffn_width : int, default=None
            Inner width of the feed-forward layers. None is twice the width for FT-Transformer, 4
            times the width for the others.
        addnorm : str, default=None
            Arrangement of the residual connections and norms, such as "pre" or "post".
        addnorm_options : dict, default=None
            Options of the arrangement.
        norm : str, default=None
            Norm: "layer", "rms", "scale", "batch", "instance" or "none".
        dropout : float, default=None
            Dropout of each sublayer's output.
        attention_dropout : float, default=None
            Dropout of the attention weights.
        ffn_dropout : float, default=None
            Dropout inside the feed-forward layers.
        embedding : {"linear", "periodic", "piecewise", "mixed", "hidden"}, default=None
            How a number becomes a token. None is "piecewise" for FT-Transformer, "mixed" for
            classes of more than 2,000 rows of which at least half the columns are numbers, and
            otherwise the published embedding.
        embedding_options : dict, default=None
            Options of the embedding: `frequencies` and `sigma` of "periodic", `bins` (their
            number, 48 by default) of "piecewise", all three of "mixed", `units` of "hidden".
        bins : {"target", "quantile"}, default="target"
            Where the bin edges are placed: at the thresholds of a decision tree for
            the target, or at quantiles.
        members : int, default=None
            Predictors that share the trunk, as in TabM; their predictions are averaged. None is 1
            as published; for FT-Transformer 4, but 1 up to 2,000 rows with classes and from 10,000
            rows with numbers on.
        scaling : {"quantile", "robust", "standard", "none"}, default="quantile"
            Scaling of numbers.
        impute : {"none", "median", "mean"}, default="none"
            What replaces a missing number; "none" is a learned vector.
        rare : int, default=None
            Rows in which a category must occur to have its own code. None is 1, or 5 from 1,000
            rows on.
        drop_cells : float, default=None
            Fraction of cells hidden at random in each training batch. None is 0.02, or 0 for
            FT-Transformer and numbers.
        swap_cells : float, default=None
            Fraction of cells replaced by another row's value in each training batch. None is 0
            as published; for FT-Transformer 0.1 for classes, 0.05 of more than 2,000 rows, and
            0.02 for numbers.
        learning_rate : float, default=None
            Peak learning rate of AdamW. None is that of the publication.
        weight_decay : float, default=None
            Weight decay of the matrices; embeddings, norms and biases have none.
        schedule : {"constant", "linear", "cosine", "inverse-sqrt", "noam"}, default=None
            Learning rate after the warm-up. None is "cosine" for FT-Transformer, which ends at 0,
            otherwise "constant".
        warmup : float, default=None
            Fraction of the steps over which the learning rate rises linearly.
        ema : float, default=None
            Decay of an exponential moving average of the weights; 0 for none.
        batch_size : int, default=None
            Rows of a batch. None is 32 to 512, by the number of rows.
        epochs : int, default=None
            Largest number of passes over the rows. None depends on the number of rows and on the
            effort.
        patience : int, default=None
            Epochs without improvement on the held-out rows after which training stops; 0 for no
            early stopping. In any case the weights that were best on the held-out rows are kept.
        minutes : float, default=None
            Time limit of training: if the epochs do not fit, the schedule is shortened so that it
            ends with the time. None is no limit.
        effort : {"low", "normal", "high", "published"}, default="normal"
            Time for a better model: "low" trains for fewer epochs, "high" for more and with
            `folds`=5. "published" sets network and training as in the publication. With 300 to
            2,000 rows of classes, "normal" and "high" have the instant model as a teacher, and
            "high" has no folds.
        folds : int, default=None
            Number of models, each trained without one fold of the rows; their outputs are
            averaged, and calibration uses out-of-fold predictions of all rows. 1 is one model
            with held-out rows; None is 1, or 5 for effort="high".
        metric : str, default="loss"
            What decides on the held-out rows which weights are best: "loss" (or "logloss"),
            "accuracy", "auc" or "f1" for classes; "loss" (or "rmse") or "mae" for numbers. With
            "f1" and two classes, the threshold of `predict` is also chosen.
        class_weight : dict or "balanced", default=None
            Weight of each class in the loss, for classifiers; "balanced" is inversely
            proportional to its rows.
        valid : float, default=None
            Fraction of the rows to hold out for early stopping and calibration. None is 0 below 30
            rows, 0.2 below 500 rows with classes or 10,000 with numbers, and 0.1 from there on.
        split : {"random", "time"}, default="random"
            Which rows are held out: random ones, or the last ones.
        schema : Schema, path or dict, default=None
            Kind of each column: a schema, the path of a schema file, or a dictionary from column
            to kind that overrides what is inferred. None infers all kinds from the rows.
        device : str, default=None
            Where to train and predict, such as "cuda". None is the CPU.
        n_jobs : int, default=None
            Threads of torch while training and predicting; -1 is all processors. None chooses
            between one and all of them by short measurements, unless OMP_NUM_THREADS or
            torch.set_num_threads has set another number than torch's default. Afterwards torch
            has as many threads as before.
        random_state : int, RandomState instance or None, default=None
            Seed of the split, the initial weights and the training; an int makes `fit`
            reproducible, bit for bit with a fixed number of threads (`n_jobs`).
        verbose : bool, default=False
            Whether to print each evaluation to stderr.
        """
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
        self.swap_cells = swap_cells
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.warmup = warmup
        self.ema = ema
        self.batch_size = batch_size
        self.epochs = epochs
        self.patience = patience
        self.minutes = minutes
        self.effort = effort
        self.folds = folds
        self.metric = metric
        self.class_weight = class_weight
        self.valid = valid
        self.split = split
        self.schema = schema
        self.device = device
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    def __init_subclass__(cls, **options: Any) -> None:
        """Add the parameters of the constructor to the docstring of each estimator."""
        super().__init_subclass__(**options)
        if cls.__init__ is TableEstimator.__init__ and cls.__doc__ and cls.__init__.__doc__:
            cls.__doc__ = with_parameters(cls.__doc__, cls.__init__.__doc__)

    @classmethod
    def published(cls, **parameters: Any) -> Self:
        """Return an estimator with network and training of the publication."""
        return cls(effort="published", **parameters)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        tags.non_deterministic = False
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether there is a trained model; pre-training alone does not make one."""
        return hasattr(self, "model_")

    # ── Rows and columns ──────────────────────────────────────────────────────────────────────────

    def _frame(self, X: Any, *, fitting: bool) -> Frame:
        """Return X as a frame; after fitting, with the columns of the training rows."""
        frame = as_frame(X, self, min_rows=int(fitting))
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
            names = [f"x{i}" for i in range(self.n_features_in_)] if names is None else names
            columns = dict(zip(names, frame.columns.values(), strict=True))
            return Frame(frame.name, columns, frame.notes, frame.named)
        return frame

    def _schema(self, frame: Frame) -> Schema:
        """Return the schema that was passed in, or else one inferred from the training rows."""
        if isinstance(self.schema, Schema):
            return self.schema
        if isinstance(self.schema, str | Path):
            return Schema.load(self.schema)
        if self.schema is not None and not isinstance(self.schema, dict):
            raise ConfigError(
                "schema must be a Schema, a path, or a dictionary from column to kind: "
                f"got {type(self.schema).__name__}."
            )
        if not frame.named and all(c.dtype.kind == "f" for c in frame.columns.values()):
            # In a matrix of floats every column is a number: none is taken for an identifier.
            schema = Schema(columns=tuple(Column(name=n, kind="number") for n in frame.columns))
        else:
            schema = infer(frame)
        return schema.change(self.schema) if self.schema else schema

    # ── Fitting ───────────────────────────────────────────────────────────────────────────────────

    def _fit(
        self,
        X: Any,
        target: Array,
        classes: int,
        sample_weight: Any,
        eval_set: Any,
        groups: Any,
    ) -> Self:
        start = time.perf_counter()
        frame = self.check_rows(X, target)
        weight = np.ones(len(frame))
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, target, dtype=np.float64)
            if not (weight >= 0).all():
                raise InputError(f"sample_weight must be 0 or more: got {weight.min():g}.")
        weight = weight * self.class_weights(target)
        rng_state = torch.get_rng_state()
        try:
            torch.manual_seed(self.seed_)
            self._train(frame, target, classes, weight, eval_set, groups)
        finally:
            torch.set_rng_state(rng_state)
        self.report_["seconds"] = time.perf_counter() - start
        return self

    def check_rows(self, X: Any, target: Array) -> Frame:
        """Check parameters, X and target, and return X as a frame of training rows."""
        check_parameters(self)
        frame = self._frame(X, fitting=True)
        if len(frame) < 2:
            raise InputError(f"there must be at least two training rows: got {len(frame)} sample.")
        if len(target) != len(frame):
            raise InputError(
                f"X and y must have the same number of rows: got {len(frame)} and {len(target)}."
            )
        self.seed_ = to_seed(self.random_state)
        return frame

    @abstractmethod
    def learn_target(self, y: Any) -> tuple[Array, int]:
        """Return the targets as training uses them, and the number of classes (regression: 0)."""

    def _train(
        self,
        frame: Frame,
        target: Array,
        classes: int,
        weight: Array,
        eval_set: Any,
        groups: Any,
    ) -> None:
        split = self.split_rows(frame, target, classes, weight, eval_set, groups)
        self.model_ = self.make_model(split, classes).to(torch.device(self.device or "cpu"))
        settings = choose_settings(self, len(split.rows), split.valid is not None)
        fitted = fit_network(
            self.model_, split.rows, split.valid, settings, classes, verbose=self.verbose
        )
        self.batch_ = settings.batch
        with use_threads(fitted.threads):
            self.finish(split, fitted)
        self.report_["threads"] = fitted.progress.threads

    def class_weights(self, target: Array) -> Array:
        """Return the weight of each row that its class has; 1 for regression."""
        return np.ones(len(target))

    def split_rows(
        self,
        frame: Frame,
        target: Array,
        classes: int,
        weight: Array,
        eval_set: Any = None,
        groups: Any = None,
        encoder: TableEncoder | None = None,
    ) -> SplitRows:
        """Return encoded training rows and held-out rows.

        Parameters
        ----------
        frame : the rows.
        target : the target of each row, as `learn_target` returns it.
        classes : number of classes; 0 for regression.
        weight : weight of each row.
        eval_set : a pair (X, y) to hold out instead of a part of the rows.
        groups : the group of each row; rows of one group stay on the same side of the split.
        encoder : a fitted column encoder; by default one is fitted on the training rows.
        """
        folds = self._folds(len(frame), eval_set is not None)
        if taught := groups is None and self._is_taught(target, classes, weight, folds):
            folds = 1
        share = 0.0 if eval_set is not None or folds > 1 else self.valid
        labels = target if classes else None
        group_names = to_groups(groups, len(frame))
        inside, held = hold_out(
            len(frame), share, classes=labels, groups=group_names, order=self.split, seed=self.seed_
        )
        part = frame.take(inside)
        pretrained = getattr(self, "pretrained_", None)
        if encoder is None and pretrained is not None:
            encoder = pretrained.encoder
        fold = None
        if folds > 1:
            fold = torch.from_numpy(
                make_folds(len(frame), folds, classes=labels, groups=group_names, seed=self.seed_)
            )
        groups_inside = None if group_names is None else group_names[inside]
        schema, texts = self._fit_texts(
            part,
            self._schema(part) if encoder is None else encoder.schema,
            target_scores(target[inside], classes, self.ordered),
            groups_inside,
        )
        self.encoder_ = self._encoder(part, schema, texts) if encoder is None else encoder
        table = self.encoder_.encode(part, {name: t.out_of_fold for name, t in texts.items()})
        self._learn_scale(target[inside], weight[inside])
        head: dict[str, Any] = {"edges": self._edges(), "ordered": self.ordered}
        weights = normalise_weights(weight[inside])
        own = target[inside]
        rows = Rows(table, self._targets(own), weights, fold=fold, given=own, **head)
        if taught:
            rows = self._teach(part, rows, classes)
        valid = rows if fold is not None else None
        if eval_set is not None:
            valid = self._rows(*to_pair(eval_set))
        elif len(held):
            other = self.encoder_.encode(frame.take(held))
            if weight[held].any():
                held_weight = normalise_weights(weight[held])
                own = target[held]
                valid = Rows(other, self._targets(own), held_weight, given=own, **head)
        notes = [
            *frame.notes,
            *describe_columns(self.encoder_.schema),
            *(describe_groups(group_names, held, eval_set is not None) if folds < 2 else []),
            *describe_unlearnt(getattr(self, "classes_", ()), target[inside]),
            *([] if rows.lesson is None else [TEACHER_NOTE]),
        ]
        return SplitRows(rows, valid, target[inside], notes)

    def _fit_texts(
        self, frame: Frame, schema: Schema, scores: Array, groups: Array | None
    ) -> tuple[Schema, dict[str, FittedText]]:
        """Return the schema and the columns of free text that help, fitted to training rows."""
        if not any(column.kind == "text" for column in schema.columns):
            return schema, {}
        if (groups is not None and len(np.unique(groups)) < TEXT_FOLDS) or len(frame) < TEXT_ROWS:
            return without_texts(schema), {}
        fold = make_folds(len(frame), TEXT_FOLDS, groups=groups, seed=self.seed_)
        return fit_texts(frame, schema, scores, fold)

    def _is_taught(self, target: Array, classes: int, weight: Array, folds: int) -> bool:
        """Return whether the instant model teaches, in place of folds that nobody asked for."""
        from addnorm.tabular.teacher import wants_teacher  # its estimator is a subclass of this

        asked = self.folds is not None and folds > 1
        return not asked and wants_teacher(self, target, classes, weight)

    def _teach(self, frame: Frame, rows: Rows, classes: int) -> Rows:
        """Return the training rows with the lesson of the instant model."""
        from addnorm.tabular.teacher import teach

        assert rows.given is not None
        return replace(rows, lesson=teach(frame, rows.given, classes, self.encoder_, self.seed_))

    def _folds(self, rows: int, eval_set: bool) -> int:
        """Return the number of folds; 1 if there are none, or too few rows for the default."""
        folds = count_folds(self)
        if folds < 2 or (self.folds is None and (eval_set or rows < MIN_ROWS_TO_SPLIT)):
            return 1
        if eval_set:
            raise ConfigError("folds and eval_set exclude one another: pass one of them.")
        if self.split == "time":
            if self.folds is None:
                return 1
            raise ConfigError("folds are random: they exclude split='time'. Leave one out.")
        if getattr(self, "pretrained_", None) is not None:
            raise ConfigError("folds cannot start from pre-trained weights. Leave one out.")
        return folds

    def make_model(
        self, split: SplitRows, classes: int, trunk: ModelConfig | None = None
    ) -> TabularModel:
        """Return an untrained model for these rows, or the pre-trained one with a new head."""
        pretrained = getattr(self, "pretrained_", None)
        head = self._head(classes)
        if pretrained is not None:
            return pretrained.make_model(classes, head)
        network = choose_network(
            self, split.rows.table, split.target, self.bins, classes, trunk, split.rows.fold
        )
        return build_tabular(replace(network, **head))

    def _head(self, classes: int) -> dict[str, Any]:
        """Return the fields of the network's configuration that depend on the target."""
        return {"outputs": outputs_for(classes)}

    def finish(self, split: SplitRows, fitted: FitResult) -> None:
        """Calibrate on the held-out rows, and set the training report."""
        state, rows = fitted.progress, len(split.rows)
        self.n_iter_ = max(1, -(-state.step // -(-rows // self.batch_)))
        self.temperature_ = 1.0
        self.report_: dict[str, Any] = {
            "rows": rows,
            "held_out": 0 if split.valid is None else len(split.valid),
            "folds": self.model_.config.folds,
            "epochs": self.n_iter_,
            "steps": state.step,
            "best_step": state.best_step,
            "parameters": self.model_.count(),
            "stopped": fitted.stopped,
            "notes": [*split.notes, *fitted.notes],
            "history": state.history,
        }
        if split.valid is not None:
            outputs = held_out_outputs(self.model_, split.valid, self._predict_batch())
            self._calibrate(split.valid, outputs)

    def _encoder(
        self, frame: Frame, schema: Schema, texts: Mapping[str, FittedText] | None = None
    ) -> TableEncoder:
        return fit_encoder(
            frame, schema, scaling=self.scaling, rare=self.rare, impute=self.impute, texts=texts
        )

    def pretrain(self, X: Any, *, method: str = "masked", epochs: int | None = None) -> Self:
        """Pre-train on unlabelled rows; `fit` then starts from these weights.

        Scaling and categories are learnt from these rows, so they should include those of `fit`.
        The bins of piecewise embeddings are at quantiles, because there is no target.

        Parameters
        ----------
        X : array, data frame or path
            Rows without a target.
        method : {"masked", "replaced", "contrastive"}, default="masked"
            Objective: predict hidden cells, detect replaced cells, or identify rows of which some
            cells were replaced.
        epochs : int, default=None
            Passes over the rows. None is as for `fit`.

        Returns
        -------
        self : the estimator
        """
        check_parameters(self)
        frame = self._frame(X, fitting=True)
        self.seed_ = to_seed(self.random_state)
        return self.pretrain_frame(frame, method, epochs)

    def pretraining_split(self, frame: Frame) -> tuple[TableEncoder, Frame, Frame]:
        """Return a column encoder fitted for pre-training, the training rows, the held-out rows."""
        inside, held = hold_out(len(frame), self.valid, order=self.split, seed=self.seed_)
        part = frame.take(inside)
        return self._encoder(part, self._schema(part)), part, frame.take(held)

    def pretrain_frame(
        self,
        frame: Frame,
        method: str,
        epochs: int | None = None,
        trunk: ModelConfig | None = None,
    ) -> Self:
        """Pre-train on a frame.

        Parameters
        ----------
        frame : unlabelled rows, with the columns of `fit`.
        method : masked, replaced or contrastive.
        epochs : passes over the rows; by default as for `fit`.
        trunk : configuration of the trunk; by default from the estimator's parameters.
        """
        encoder, part, held = self.pretraining_split(frame)
        self.encoder_ = encoder
        table, rng_state = encoder.encode(part), torch.get_rng_state()
        try:
            torch.manual_seed(self.seed_)
            body = build_tabular(
                choose_network(self, table, np.zeros(len(part)), "quantile", 0, trunk)
            )
            settings = replace(
                choose_settings(self, len(part), bool(len(held))), drop_cells=0.0, swap_cells=0.0
            )
            settings = settings if epochs is None else replace(settings, epochs=epochs)
            valid = encoder.encode(held) if len(held) else None
            fitted = pretrain(body, table, valid, settings, method, verbose=self.verbose)
        finally:
            torch.set_rng_state(rng_state)
        self.pretrained_ = Pretrained(encoder, body, fitted.progress.history)
        return self

    def rows(self, X: Any, y: Any) -> Rows:
        """Return encoded rows with their targets: class indices, or standardised numbers."""
        check_is_fitted(self)
        return self._rows(X, y)

    def _rows(self, X: Any, y: Any) -> Rows:
        table = self.encoder_.encode(self._frame(X, fitting=False))
        given = self._encode_target(y)
        target = self._targets(given)
        if len(target) != len(table):
            raise InputError(
                f"X and y must have the same number of rows: got {len(table)} and {len(target)}."
            )
        weight = torch.ones(len(table))
        head: dict[str, Any] = {"edges": self._edges(), "ordered": self.ordered}
        return Rows(table, target, weight, given=given, **head)

    @abstractmethod
    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        """Return the metrics of metrics.py on labelled rows."""

    @abstractmethod
    def _encode_target(self, y: Any) -> Array:
        """Return targets as training used them: indices of known classes, or numbers."""

    def _learn_scale(self, target: Array, weight: Array) -> None:
        """Set mean and scale of a numeric target from the training rows."""

    def _edges(self) -> Tensor | None:
        """Return the edges of the bins of a standardised number, if the network predicts bins."""
        return None

    def _targets(self, target: Array) -> Tensor:
        """Return targets as the loss takes them."""
        return torch.from_numpy(np.ascontiguousarray(target)).long()

    def labelled(self, rows: Rows) -> tuple[EncodedTable, Array]:
        """Return encoded rows and their targets: class indices, or numbers as they were given."""
        return rows.table, rows.target.numpy()

    @abstractmethod
    def _calibrate(self, valid: Rows, outputs: Tensor) -> None:
        """Set temperature and metrics from the held-out rows and the outputs for them."""

    # ── Predicting ────────────────────────────────────────────────────────────────────────────────

    def _predict(self, X: Any) -> Tensor:
        """Return the mean output of the members, or the number they predict, (rows, outputs)."""
        check_is_fitted(self)
        return self._predict_encoded(self.encoder_.encode(self._frame(X, fitting=False)))

    def _predict_encoded(self, table: EncodedTable) -> Tensor:
        return self.model_.answers(self._outputs(table))

    def _outputs(self, table: EncodedTable) -> Tensor:
        """Return the outputs of every member, (rows, members, outputs)."""
        batch = self._predict_batch()
        parts = [table]
        if len(table) > PROBED_BATCHES * batch:
            indices = torch.split(torch.arange(len(table)), PROBED_BATCHES * batch)
            parts = [table.take(rows) for rows in indices]
        outputs = []
        for part in parts:
            with use_threads(self._threads(len(table))):
                outputs.append(predict_outputs(self.model_, part, batch))
        return torch.cat(outputs)

    def _threads(self, rows: int) -> int:
        """Return the number of threads with which to predict some rows."""
        candidates = thread_candidates(threads_of(self))
        return min(candidates) if rows <= ROW_MULTIPLE else LOAD_PROBE.choose(candidates)

    def _predict_batch(self) -> int:
        return self.batch_ if self.model_.along_rows else PREDICT_BATCH
