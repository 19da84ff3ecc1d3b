"""What all estimators for tables share: parameters, fitting, pre-training, answers.

The constructor only stores; `fit` decides what was left open and keeps it under names that end in
an underscore. X may be an array, a data frame of any kind that narwhals knows, or a path. Columns
of frames are matched by name when predicting, so that their order does not matter.
"""

import time
from abc import ABC, abstractmethod
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
from addnorm.data.table.encode import EncodedTable, TableEncoder, fit_encoder
from addnorm.data.table.frame import Array, Frame
from addnorm.data.table.infer import infer
from addnorm.data.table.schema import Column, Schema
from addnorm.errors import ConfigError, InputError
from addnorm.models.tabular import TabularModel, build_tabular
from addnorm.tabular.choices import choose_network, choose_plan, need_ranges
from addnorm.tabular.fitting import Fitted, Rows, SplitRows, answer, train
from addnorm.tabular.holdout import hold_out, say_groups
from addnorm.tabular.inputs import (
    as_frame,
    left_out,
    normal,
    pair_of,
    say_unlearnt,
    seed_of,
    to_groups,
)
from addnorm.tabular.pretrain import pretrain

PREDICT_BATCH = 1024
"""Rows predicted at once."""


@dataclass(frozen=True)
class Pretrained:
    """What pre-training left: how rows are read, and the body that reads them."""

    encoder: TableEncoder
    body: TabularModel
    history: list[dict[str, float]]

    def begin(self, classes: int) -> TabularModel:
        """A model with the body's weights and a fresh head."""
        model = build_tabular(replace(self.body.config, outputs=classes if classes > 2 else 1))
        kept = {n: t for n, t in self.body.state_dict().items() if not n.startswith("head.")}
        model.load_state_dict(kept, strict=False)
        return model


class TableEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """What all estimators for tables share.

    Parameters of the network that are None are those of its publication (presets.py).

    width, depth, heads, ffn_width, addnorm, addnorm_options, norm, dropout, attention_dropout,
    ffn_dropout: as in the model's configuration. `embedding` of numbers: linear, periodic,
    piecewise, hidden; its options beside it, among them `bins` (how many) of piecewise, whose edges
    are placed by `bins`: target or quantile. `members`: predictors that share the trunk.
    `scaling` of numbers: quantile, robust, standard, none. `impute`: none, median, mean. `rare`:
    how often a value must be met. `drop_cells`, `swap_cells`: shares of cells that are hidden, or
    given another row's value, in training. `batch_size`, `epochs`: from the number of rows.
    `valid`: share of rows held out, `split`: random or time. `schema`: a Schema, a path, or a table
    of column: kind.
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
        swap_cells: float = 0.0,
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
        eval_set: Any,
        groups: Any,
    ) -> Self:
        began = time.perf_counter()
        frame = self.check_rows(X, target)
        weight = np.ones(len(frame))
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, target, dtype=np.float64)
            if not (weight >= 0).all():
                raise InputError(f"sample_weight must be 0 or more: got {weight.min():g}.")
        before = torch.get_rng_state()
        try:
            torch.manual_seed(self.seed_)
            self._train(frame, target, classes, weight, eval_set, groups)
        finally:
            torch.set_rng_state(before)
        self.report_["seconds"] = time.perf_counter() - began
        return self

    def check_rows(self, X: Any, target: Array) -> Frame:
        """Return X as a frame to learn from; raise where parameters, X and target cannot be."""
        need_ranges(self)
        frame = self._frame(X, fitting=True)
        if len(frame) < 2:
            raise InputError(
                f"there must be two rows or more to learn from: got {len(frame)} sample."
            )
        if len(target) != len(frame):
            raise InputError(f"X and y must have as many rows: got {len(frame)} and {len(target)}.")
        self.seed_ = seed_of(self.random_state)
        return frame

    @abstractmethod
    def learn_target(self, y: Any) -> tuple[Array, int]:
        """Return targets as training takes them, and the number of classes (0: numbers)."""

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
        self.model_ = self.make_model(split, classes)
        plan = choose_plan(self, len(split.rows), split.valid is not None)
        fitted = train(self.model_, split.rows, split.valid, plan, classes, verbose=self.verbose)
        self.batch_ = plan.batch
        self.finish(split, fitted)

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
        """Return rows to train on and rows held out, encoded by what the former show.

        `encoder` is used in place of one fitted here.
        """
        share = 0.0 if eval_set is not None else self.valid
        labels = target if classes else None
        together = to_groups(groups, len(frame))
        inside, held = hold_out(
            len(frame), share, classes=labels, groups=together, order=self.split, seed=self.seed_
        )
        part = frame.take(inside)
        before = getattr(self, "pretrained_", None)
        if encoder is None and before is not None:
            encoder = before.encoder
        self.encoder_ = self._encoder(part, self._schema(part)) if encoder is None else encoder
        table = self.encoder_.encode(part)
        self._learn_scale(target[inside], weight[inside])
        rows = Rows(table, self._targets(target[inside]), normal(weight[inside]))
        valid = None
        if eval_set is not None:
            valid = self._rows(*pair_of(eval_set))
        elif len(held):
            other = self.encoder_.encode(frame.take(held))
            if weight[held].any():
                valid = Rows(other, self._targets(target[held]), normal(weight[held]))
        notes = [
            *frame.notes,
            *left_out(self.encoder_.schema),
            *say_groups(together, held, eval_set is not None),
            *say_unlearnt(getattr(self, "classes_", ()), target[inside]),
        ]
        return SplitRows(rows, valid, target[inside], notes)

    def make_model(
        self, split: SplitRows, classes: int, trunk: ModelConfig | None = None
    ) -> TabularModel:
        """Return a model for rows like these, or the pre-trained one with a new head."""
        before = getattr(self, "pretrained_", None)
        if before is not None:
            return before.begin(classes)
        network = choose_network(self, split.rows.table, split.target, self.bins, classes, trunk)
        return build_tabular(network)

    def finish(self, split: SplitRows, fitted: Fitted) -> None:
        """Calibrate on the held-out rows, and report how training went."""
        at, rows = fitted.progress, len(split.rows)
        self.n_iter_ = max(1, -(-at.step // -(-rows // self.batch_)))
        self.temperature_ = 1.0
        self.report_: dict[str, Any] = {
            "rows": rows,
            "held_out": 0 if split.valid is None else len(split.valid),
            "epochs": self.n_iter_,
            "steps": at.step,
            "best_step": at.best_step,
            "parameters": self.model_.count(),
            "stopped": fitted.stopped,
            "notes": [*split.notes, *fitted.notes],
            "history": at.history,
        }
        if split.valid is not None:
            self._calibrate(split.valid)

    def _encoder(self, frame: Frame, schema: Schema) -> TableEncoder:
        return fit_encoder(frame, schema, scaling=self.scaling, rare=self.rare, impute=self.impute)

    def pretrain(self, X: Any, *, method: str = "masked", epochs: int | None = None) -> Self:
        """Learn what rows are like from rows without answers; `fit` then starts from there.

        `method` is masked, replaced or contrastive; see pretrain.py. Quantiles and categories are
        learnt from these rows, so that they should include those of `fit`. Bins of piecewise
        embeddings are by quantiles, as there is no target.
        """
        need_ranges(self)
        frame = self._frame(X, fitting=True)
        self.seed_ = seed_of(self.random_state)
        return self.pretrain_frame(frame, method, epochs)

    def pretraining_split(self, frame: Frame) -> tuple[TableEncoder, Frame, Frame]:
        """Return the column encoder of pre-training, its rows, and rows held out of them."""
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
        """Pre-train on a frame whose columns are known; `trunk` stands for the parameters'."""
        encoder, part, held = self.pretraining_split(frame)
        self.encoder_ = encoder
        table, state = encoder.encode(part), torch.get_rng_state()
        try:
            torch.manual_seed(self.seed_)
            body = build_tabular(
                choose_network(self, table, np.zeros(len(part)), "quantile", 0, trunk)
            )
            plan = replace(
                choose_plan(self, len(part), bool(len(held))), drop_cells=0.0, swap_cells=0.0
            )
            plan = plan if epochs is None else replace(plan, epochs=epochs)
            valid = encoder.encode(held) if len(held) else None
            fitted = pretrain(body, table, valid, plan, method, verbose=self.verbose)
        finally:
            torch.set_rng_state(state)
        self.pretrained_ = Pretrained(encoder, body, fitted.progress.history)
        return self

    def rows(self, X: Any, y: Any) -> Rows:
        """X and its answers y as the network learns from them: encoded, places or standardised."""
        check_is_fitted(self)
        return self._rows(X, y)

    def _rows(self, X: Any, y: Any) -> Rows:
        table = self.encoder_.encode(self._frame(X, fitting=False))
        target = self._targets(self._known(y))
        if len(target) != len(table):
            raise InputError(f"X and y must have as many rows: got {len(table)} and {len(target)}.")
        return Rows(table, target, torch.ones(len(table)))

    @abstractmethod
    def evaluate(self, X: Any, y: Any) -> dict[str, float]:
        """Figures on rows whose answers are known, as metrics.py has them."""

    @abstractmethod
    def _known(self, y: Any) -> Array:
        """Answers as training had them: places of classes it knows, or numbers."""

    def _learn_scale(self, target: Array, weight: Array) -> None:
        """What the target is standardised by, from training rows; nothing of classes."""

    def _targets(self, target: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(target)).long()

    @abstractmethod
    def _calibrate(self, valid: Rows) -> None:
        """Figures on held-out rows."""

    # ── Predicting ────────────────────────────────────────────────────────────────────────────────

    def _answers(self, X: Any) -> Tensor:
        """The mean answer of the members, (rows, outputs)."""
        check_is_fitted(self)
        return self._answer(self.encoder_.encode(self._frame(X, fitting=False)))

    def _answer(self, table: EncodedTable) -> Tensor:
        batch = self.batch_ if self.model_.along_rows else PREDICT_BATCH
        return answer(self.model_, table, batch).mean(dim=1)
