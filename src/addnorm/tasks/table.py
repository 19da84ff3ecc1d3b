"""Tables: predict one column from the others, as class probabilities or as numbers."""

import copy
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from addnorm import presets
from addnorm.config import Config, ModelConfig
from addnorm.data.table.column_arrays import is_missing
from addnorm.data.table.encode import TableEncoder
from addnorm.data.table.frame import Array, Frame, read_frame, to_frame
from addnorm.data.table.reader import read_parts
from addnorm.data.table.schema import Schema
from addnorm.data.table.target import (
    describe_order,
    join_rows,
    parse_known_target,
    parse_target,
    resolve_schema,
    rows_with_target,
)
from addnorm.errors import ConfigError, InputError
from addnorm.files import COLUMNS, read_document, write_document
from addnorm.metrics import class_table, reliability_bins
from addnorm.models.size import cost
from addnorm.models.tabular import TabularModel, trunk_of
from addnorm.report import Page
from addnorm.tabular import load_estimator, save_estimator
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.choices import (
    TRUNK_PARAMETERS,
    choose_batch,
    choose_epochs,
    default_embedding,
    default_parameters,
)
from addnorm.tabular.compare import compare
from addnorm.tabular.distribution import (
    NumberDistribution,
    check_levels,
    coverage_curve,
    fan_groups,
    number_metrics,
)
from addnorm.tabular.explain import Explanation, RowExplanation, explain_row, explain_table
from addnorm.tabular.fitting import FitResult, FitSettings, SplitRows, TableTraining
from addnorm.tabular.holdout import hold_out, require_one_split
from addnorm.tabular.importance import MAX_PREDICTED, MIN_SHUFFLED, measure_importance
from addnorm.tabular.inputs import to_groups
from addnorm.tabular.instant import (
    ALL_ESTIMATORS,
    InstantEstimator,
    InstantRegressor,
    compare_instant,
    load_network,
)
from addnorm.tabular.page import add_results
from addnorm.tasks.base import (
    BEST,
    DataFacts,
    Metrics,
    Say,
    Task,
    Trained,
    load_matching_weights_,
    require_source,
    say_nothing,
)
from addnorm.training import parallel
from addnorm.training.loop import Batch, TrainingState

ESTIMATOR_NAMES = {
    "ft": "FTTransformer",
    "tab": "TabTransformer",
    "saint": "SAINT",
    "instant": "Instant",
}
"""By table.model, the name of the estimators without Classifier or Regressor."""
ENCODER_FILE = "columns.json"
NOT_NUMERIC = "column .* are not numeric"
"""The warning of a column encoder, which is reported as a note instead."""
TRAINING_FIELDS = ("weight_decay", "schedule", "patience", "ema")
"""Parameters of the estimators that are fields of the same name in the section train."""
ROWS_PER_CHUNK = 20_000
"""Rows that are predicted at a time."""


class UnknownValues:
    """Notes on a file that is read in parts, and counts of values that training did not have."""

    def __init__(self, encoder: TableEncoder) -> None:
        self.encoder = encoder
        self.notes: list[str] = []
        self.counts: dict[str, tuple[int, list[str]]] = {}
        self.empty = {column.name for column in encoder.schema.used}

    def update(self, part: Frame) -> None:
        """Add the notes and the unknown values of some rows."""
        self.notes += [note for note in part.notes if note not in self.notes]
        for name, (rows, values) in self.encoder.unknown_values(part).items():
            before, shown = self.counts.get(name, (0, []))
            self.counts[name] = before + rows, list(dict.fromkeys([*shown, *values]))[:3]
        self.empty -= {name for name in self.empty if not is_missing(part.columns[name]).all()}

    def describe(self) -> list[str]:
        """Return the notes, and sentences on unknown values and on columns without any value."""
        return [
            *self.notes,
            *self.encoder.describe_unknown(self.counts),
            *(f"{name}: all values are missing." for name in sorted(self.empty)),
        ]


@dataclass(frozen=True)
class NumberColumns:
    """The columns that are written for a predicted number.

    Parameters
    ----------
    point : mean or median of the distribution.
    intervals : levels of intervals, of which both ends are written.
    quantiles : levels of quantiles.
    """

    point: str = "mean"
    intervals: tuple[float, ...] = ()
    quantiles: tuple[float, ...] = ()

    def score(self, name: str, distribution: NumberDistribution) -> dict[str, Array]:
        """Return the columns of some rows, by their names."""
        point = distribution.mean if self.point == "mean" else distribution.median
        scored = {f"{name} (predicted)": point}
        for level in sorted(set(self.intervals)):
            low, high = distribution.interval(level).T
            scored[f"{name} ({100 * level:.6g} % low)"] = low
            scored[f"{name} ({100 * level:.6g} % high)"] = high
        for level in sorted(set(self.quantiles)):
            scored[f"{name} ({100 * level:.6g} %)"] = distribution.quantile(level)
        return scored


class TrainedTable(Trained):
    """A trained model for tables."""

    @cached_property
    def estimator(self) -> Any:
        """The fitted scikit-learn estimator of this run."""
        if self.int8:
            raise ConfigError("int8 is for text models: this run is for a table. Leave it out.")
        return load_estimator(self.model_path)

    @property
    def class_names(self) -> list[str]:
        return [str(label) for label in getattr(self.estimator, "classes_", ())]

    @property
    def model(self) -> TabularModel:
        model: TabularModel = self.estimator.model_
        return model

    @property
    def schema(self) -> Schema:
        """The kind of each column."""
        schema: Schema = self.estimator.encoder_.schema
        return schema

    def predict(self, data: Any) -> Array:
        """Return the predicted class or number of each row.

        Parameters
        ----------
        data : a file (.csv, .tsv, .parquet, .feather) or a data frame with the columns of the
            training data; the target column is ignored if it is present.
        """
        rows = self._rows(data)
        if self.engine is None:
            return np.asarray(self.estimator.predict(rows))
        outputs, classes = self._outputs(rows), getattr(self.estimator, "classes_", None)
        return outputs if classes is None else np.asarray(classes)[outputs.argmax(axis=1)]

    def predict_interval(self, data: Any, level: float = 0.9) -> Array:
        """Return low and high ends, (rows, 2), between which a share `level` of targets falls."""
        return self.predict_distribution(data, "predict_interval").interval(level)

    def predict_quantiles(self, data: Any, levels: Any = (0.05, 0.5, 0.95)) -> Array:
        """Return quantiles of the predicted distribution of each row, (rows, levels)."""
        return self.predict_distribution(data, "predict_quantiles").quantile(check_levels(levels))

    def predict_distribution(
        self, data: Any, what: str = "predict_distribution"
    ) -> NumberDistribution:
        """Return the predicted distribution of each row: mean, quantiles, cdf, crps, samples.

        Parameters
        ----------
        data : as for `predict`.
        what : what needs it, for the error of a model that predicts classes.
        """
        self.require_distribution(what)
        distribution: NumberDistribution = self.estimator.predict_distribution(self._rows(data))
        return distribution

    def require_distribution(self, what: str) -> None:
        """Raise ConfigError if the model predicts classes, or numbers without a distribution."""
        if hasattr(self.estimator, "classes_"):
            raise ConfigError(
                f"{what} needs a model that predicts numbers: this one predicts classes. Try "
                "predict_proba (on the command line --proba)."
            )
        if not self.estimator.predicts_distribution:
            raise ConfigError(
                f"{what} needs a model that predicts a distribution: this one was saved before "
                "addnorm predicted any. Train it again."
            )

    def predict_proba(self, data: Any) -> Array:
        """Return the probability of each class of `labels` for each row, (rows, classes)."""
        self.require_classes("predict_proba")
        return self._outputs(self._rows(data))

    def _outputs(self, rows: Frame) -> Array:
        """Return probabilities, (rows, classes), or numbers, (rows,), by torch or an engine."""
        if self.engine is not None:
            return np.asarray(self.engine.predict(self.estimator.encoder_.parse_columns(rows)))
        is_classifier = hasattr(self.estimator, "classes_")
        predict = self.estimator.predict_proba if is_classifier else self.estimator.predict
        return np.asarray(predict(rows))

    def require_classes(self, what: str) -> None:
        """Raise ConfigError if the model predicts numbers."""
        if not hasattr(self.estimator, "classes_"):
            raise ConfigError(
                f"{what} needs a model that predicts classes: this one predicts numbers."
            )

    def explain(
        self, data: Any, row: int | None = None, *, say: Say = say_nothing
    ) -> Explanation | RowExplanation:
        """Return the importance of each column for all rows, or its contribution for one row.

        Parameters
        ----------
        data : a file or data frame; it must have the target column, unless `row` is set.
        row : the row to explain, counted from 1; None for all rows.
        say : receives messages about the rows.
        """
        if row is None:
            rows, targets = self.read_targets(data, say)
            with without_warnings():
                return explain_table(self.estimator, rows, targets)
        table = self.schema.select(to_frame(data))
        for note in [*table.notes, *self.estimator.encoder_.unknown_notes(table)]:
            say(note)
        if not 1 <= row <= len(table):
            raise InputError(f"row must be 1 to {len(table)}: got {row}.")
        with without_warnings():
            return explain_row(self.estimator, table, row - 1)

    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> Metrics:
        source = data[0] if data else options.get("source")
        if source is None:
            raise ConfigError(
                "a run for a table does not store its rows, so evaluation needs a file. "
                f"Try: addnorm evaluate {self.path} test.csv."
            )
        rows, targets = self.read_targets(source, say)
        with without_warnings():
            return {**self.estimator.evaluate(rows, targets), "rows": len(rows)}

    def iter_predictions(
        self,
        path: str,
        *,
        proba: bool,
        unknown: UnknownValues,
        on_read: Any = None,
        extras: "NumberColumns | None" = None,
    ) -> Iterator[tuple[Frame, dict[str, Array]]]:
        """Yield the rows of a file in parts, each with the columns that are added to it.

        An instant regressor adds the ends of 90 % intervals, too, if no others are asked for.

        Parameters
        ----------
        path : the file.
        proba : whether to add the probability of each class.
        unknown : counts the unknown values.
        extras : columns of a predicted number to add.
        on_read : called with the share of the file that has been read.
        """
        name = self.schema.target or "target"
        for part in read_parts(path, ROWS_PER_CHUNK, on_read, keep_original=True):
            rows = self.schema.select(part)
            rows = rows.without(name) if name in rows.columns else rows
            classes = getattr(self.estimator, "classes_", None)
            with without_warnings():
                if classes is None:
                    scored = self._score_numbers(name, rows, extras or NumberColumns())
                else:
                    probabilities = self._outputs(rows)
                    best = np.array(classes, dtype=object)[probabilities.argmax(axis=1)]
                    scored = {f"{name} (predicted)": best}
                    if proba:
                        scored |= {f"p({c})": probabilities[:, i] for i, c in enumerate(classes)}
            unknown.update(rows)
            yield part, scored

    def _score_numbers(self, name: str, rows: Frame, extras: "NumberColumns") -> dict[str, Array]:
        if isinstance(self.estimator, InstantRegressor) and extras == NumberColumns(extras.point):
            extras = NumberColumns(extras.point, quantiles=(0.05, 0.95))
        if extras == NumberColumns():
            return {f"{name} (predicted)": self._outputs(rows)}
        if self.engine is not None:
            raise ConfigError(
                f"{self.engine.name} predicts means only: quantiles, intervals and medians need "
                "--engine torch."
            )
        return extras.score(name, self.estimator.predict_distribution(rows))

    def read_targets(self, data: Any, say: Say) -> tuple[Frame, Array]:
        """Return the rows that have a target, and their targets; `say` receives messages."""
        return read_known_rows(self.estimator, data, say)

    def _rows(self, data: Any) -> Frame:
        table = self.schema.select(to_frame(data))
        target = self.schema.target
        return table.without(target) if target in table.columns else table


def read_known_rows(
    estimator: Any,
    data: Any,
    say: Say,
    advice: str = "Use addnorm.tabular.load_estimator(...).evaluate(X, y).",
) -> tuple[Frame, Array]:
    """Return the rows that have a target, and their targets, for a fitted estimator.

    Parameters
    ----------
    estimator : the fitted estimator.
    data : a file or a data frame.
    say : receives messages about the rows.
    advice : what to try if the model was saved without the name of its target.
    """
    schema, encoder = estimator.encoder_.schema, estimator.encoder_
    if schema.target is None:
        raise ConfigError(f"this model was saved without the name of its target. {advice}")
    table = schema.select(to_frame(data))
    for note in [*table.notes, *encoder.unknown_notes(table)]:
        say(note)
    table, values = rows_with_target(table, schema.target, say)
    classes = getattr(estimator, "classes_", None)
    return table, parse_known_target(values, schema, classes, say)


@dataclass(frozen=True)
class TestRows:
    """Rows to evaluate on after training, and a name for their origin."""

    rows: Frame
    targets: Array
    name: str


class Table(Task):
    """Learn to predict a column of a table."""

    name = "table"
    trained = TrainedTable
    metrics = ("loss", "logloss", "accuracy", "auc", "f1", "rmse", "mae")
    unit = "rows"
    epochs = 100.0
    train_defaults: ClassVar[dict[str, Any]] = {
        **{"beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-5},
        **{"schedule": "constant", "warmup": 0, "patience": 16},
    }

    def __init__(
        self,
        estimator: TableEstimator,
        split: SplitRows,
        classes: int,
        notes: list[str],
        *,
        test: TestRows | None,
        unlabelled: Frame | None,
        start: ModelConfig | None,
    ) -> None:
        self.estimator, self.split, self.classes, self.notes = estimator, split, classes, notes
        self.test, self.unlabelled, self.start = test, unlabelled, start
        self.labels = [str(label) for label in getattr(estimator, "classes_", ())]

    @classmethod
    def read(cls, config: Config, assets: Any = None, start: Any = None) -> Self:
        options, notes = config.table, list[str]()
        if options.target is None:
            raise ConfigError("table.target must name the column to predict. Try --target price.")
        require_one_split(options.split, options.groups is not None)
        if options.pretrain is not None and options.unlabelled is None:
            raise ConfigError(
                f"table.pretrain={options.pretrain} needs rows without targets. Add --unlabelled "
                "FILE."
            )
        table = read_frame(require_source(config, "a table to train on"))
        notes += table.notes
        schema = resolve_schema(
            table, options.target, options.schema, options.groups, notes.append, options.task
        )
        table, values = rows_with_target(table, options.target, notes.append)
        targets = parse_target(values, schema)
        if options.task is None and schema.task == "classes":
            notes += describe_order(values, options.target)
        if schema.form:
            notes.append(f"column {options.target!r} is read as numbers like {schema.form}.")
        groups = to_groups(
            None if options.groups is None else table.columns[options.groups], len(table)
        )
        estimator = make_estimator(config, schema)
        rows, test = table.without(options.target), None
        if options.test is not None:
            test = read_test_rows(options.test, schema, targets, notes.append)
        elif options.compare != "none":
            train_rows, test_rows, note = set_aside(rows, targets, groups, schema, estimator)
            notes.append(note)
            test = TestRows(rows.take(test_rows), targets[test_rows], "rows set aside")
            rows, targets = rows.take(train_rows), targets[train_rows]
            groups = None if groups is None else groups[train_rows]
        unlabelled = None
        if options.unlabelled is not None:
            more = schema.select(read_frame(options.unlabelled))
            notes += more.notes
            unlabelled = join_rows(rows, more)
        with warnings_as_notes(notes):
            places, classes = estimator.learn_target(targets)
            frame = estimator.check_rows(rows, places)
            encoder = assets or (None if start is None else start[1])
            if encoder is None and unlabelled is not None:
                encoder = estimator.pretraining_split(unlabelled)[0]
            if encoder is not None:
                encoder.schema.check(frame)
            split = estimator.split_rows(
                frame,
                places,
                classes,
                estimator.class_weights(places),
                groups=groups,
                encoder=encoder,
            )
        notes += [note for note in split.notes if note not in notes]
        return cls(
            estimator,
            split,
            classes,
            notes,
            test=test,
            unlabelled=unlabelled,
            start=None if start is None else start[0].config.trunk,
        )

    @classmethod
    def load_assets(cls, path: Path) -> TableEncoder:
        return TableEncoder.parse(read_document(path / ENCODER_FILE, *COLUMNS))

    def save_assets(self, path: Path) -> None:
        encoder = self.estimator.encoder_
        write_document(path / ENCODER_FILE, *COLUMNS, encoder.dump())
        encoder.schema.save(path / "schema.toml")

    @classmethod
    def load_start(cls, path: Path) -> tuple[nn.Module, TableEncoder]:
        estimator = load_estimator(path / BEST)
        return estimator.model_, estimator.encoder_

    def facts(self) -> DataFacts:
        rows, held_out = len(self.split.rows), self.split.valid is not None
        held_rows = 0 if self.split.valid is None else len(self.split.valid)
        folds = 1 if self.split.rows.fold is None else int(self.split.rows.fold.max()) + 1
        return DataFacts(
            size=rows,
            batches=lambda config: -(-rows // batch_size(config, rows)),
            longest=lambda config: 1,
            evaluation=lambda config: held_rows / (3 * folds * batch_size(config, rows)),
            details={
                "held_out": held_out,
                "classes": self.classes,
                "numbers": self.split.rows.table.numbers.shape[1],
                "categories": self.split.rows.table.codes.shape[1],
            },
            start=self.start,
        )

    @classmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        """Return the defaults of the estimators: see tabular/choices.py."""
        kind, effort = request.table.model, request.table.effort
        settings = default_parameters(kind, effort, bool(facts.details["classes"]), facts.size)
        estimator = ALL_ESTIMATORS[f"{ESTIMATOR_NAMES[kind]}Classifier"]
        fields = {name: settings[name] for name in TRUNK_PARAMETERS if name in settings}
        if issubclass(estimator, InstantEstimator):
            network = load_network(request.table.weights)
            settings, model = {"epochs": 1, "members": 4}, network.config.trunk
        else:
            model = trunk_of(kind, **fields)
        if preset is not None:
            model = presets.find(preset).model.replace(summary=False, head="none")
        if facts.start is not None:
            model = facts.start
        batch = batch_size(request, facts.size)
        per_epoch = -(-facts.size // batch)
        chosen = choose_epochs(facts.size, batch, facts.details["held_out"], kind, effort)
        epochs = request.train.epochs or settings.get("epochs", chosen)
        steps = request.train.steps or max(1, round(epochs * per_epoch))
        evaluate = per_epoch if facts.details["held_out"] else steps
        train = cls.train_defaults | {
            "lr": settings.get("learning_rate", estimator.rate),
            **{name: settings[name] for name in TRAINING_FIELDS if name in settings},
            "warmup": round(settings.get("warmup", 0.0) * steps),
            "batch": batch,
            "steps": steps,
            "evaluate_every": evaluate,
            "save_every": evaluate * max(1, round(steps / 20 / evaluate)),
        }
        cells = {name: settings[name] for name in ("drop_cells", "swap_cells", "members")
                 if name in settings}  # fmt: skip
        columns = facts.details["numbers"], facts.details["categories"]
        classes = bool(facts.details["classes"])
        embedding = default_embedding(kind, effort, classes, facts.size, *columns)
        base = Config(model=model)
        return base.replace(
            train=base.train.replace(**train),
            table=base.table.replace(embedding=embedding or estimator.number_embedding, **cells),
        )

    def _bind(self, config: Config) -> None:
        train, table = config.train, config.table
        assert train.batch is not None and train.lr is not None
        settings = FitSettings(
            batch=train.batch,
            epochs=1,
            rate=train.lr,
            weight_decay=train.weight_decay,
            drop_cells=table.drop_cells,
            swap_cells=table.swap_cells,
            seed=config.run.seed,
            metric=train.metric,
        )
        self.training = TableTraining(self.split.rows, self.split.valid, settings, self.classes)
        self.estimator = set_parameters(copy.copy(self.estimator), config)
        self.estimator.batch_ = train.batch
        self.estimator.report_, self.estimator.temperature_ = {}, 1.0
        self.estimator.n_iter_ = 1

    @property
    def metric(self) -> str:
        return self.training.metric

    @property
    def needs_training(self) -> bool:  # type: ignore[override] # decided by the estimator
        return not isinstance(self.estimator, InstantEstimator)

    def make_model(self, start: nn.Module | None, say: Say) -> TabularModel:
        config, estimator = self.config, copy.copy(self.estimator)
        if self.unlabelled is not None and start is None:
            method = config.table.pretrain or "masked"
            say(f"pre-training ({method}) on {len(self.unlabelled):,} rows, those of both files.")
            estimator.pretrain_frame(self.unlabelled, method, trunk=config.model)
        torch.manual_seed(config.run.seed)
        model = estimator.make_model(self.split, self.classes, config.model)
        if start is not None:
            say(load_matching_weights_(model, start))
        return model

    def empty_model(self) -> TabularModel:
        return self.estimator.make_model(self.split, self.classes, self.config.model)

    def save_model(self, model: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
        assert isinstance(model, TabularModel)
        estimator = copy.copy(self.estimator)
        estimator.model_ = model
        save_estimator(estimator, directory)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        assert isinstance(model, TabularModel)
        return model.parameter_groups(weight_decay)

    def epoch(self, number: int) -> Sequence[Tensor]:
        return self.training.plan(number)

    def plan(self, epoch: int) -> Sequence[Tensor]:
        rank, world = parallel.rank(), parallel.world_size()
        return [part[rank::world] for part in self.training.plan(epoch)]

    def batch(self, part: Tensor) -> Batch:
        if len(part):
            return self.training.batch(part)
        # A worker without rows takes part in the step with a row that does not count.
        batch = self.training.batch(torch.tensor([0]))
        return {**batch, "weight": torch.tensor([-1.0])}

    def tokens(self, batch: Batch) -> int:
        return int((batch["weight"] >= 0).sum())

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        counted = {**batch, "weight": batch["weight"].clamp(min=0.0)}
        return self.training.loss(model, counted, total)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.training.evaluate(model)

    def cost(self, model: nn.Module) -> Metrics:
        config, batch = self.config, self.config.train.batch or 1
        columns = self.split.rows.table
        length = columns.numbers.shape[1] + columns.codes.shape[1] + 1
        trunk = cost(Config(model=config.model), length, batch * config.table.members)
        return {
            "parameters": model.count() if isinstance(model, TabularModel) else 0,
            "step_flops": trunk.forward + trunk.backward,
            "activation_bytes": trunk.activations,
        }

    def describe_model(self, parameters: int) -> str:
        model, table = self.config.model, self.split.rows.table
        columns = f"{table.numbers.shape[1]} numbers, {table.codes.shape[1]} categories"
        sizes = f"width {model.width}, depth {model.depth}, {model.heads} heads"
        if self.split.rows.fold is not None:
            count = int(self.split.rows.fold.max()) + 1
            sizes += f"; {count} models, each trained without one of {count} folds"
        name = type(self.estimator).__name__
        return f"{name}: {columns}; {sizes}, {model.addnorm}-norm; {parameters:,} parameters."

    def finish(self, path: Path, progress: TrainingState, say: Say) -> Metrics:
        """Calibrate the best model on the held-out rows; evaluate it on test rows."""
        if not (path / BEST).is_dir():
            return {}
        estimator: Any = copy.copy(self.estimator)
        estimator.model_ = load_estimator(path / BEST).model_
        notes = estimator.notes_of(self.split) if isinstance(estimator, InstantEstimator) else []
        notes = notes[len(self.split.notes) :]
        for note in notes:
            say(note)
        fitted = FitResult(progress, notes, stopped=not progress.finished)
        with without_warnings():
            estimator.finish(self.split, fitted)
        report = estimator.report_
        report["seconds"] = progress.fit_seconds
        held = {**report.get("valid", {}), "fit_seconds": report["seconds"]}
        report["results"] = [{"model": type(estimator).__name__, "on": "held-out rows", **held}]
        save_estimator(estimator, path / BEST)  # before anything that may fail or take long
        if self.test is not None and progress.finished:
            for note in estimator.encoder_.unknown_notes(self.test.rows):
                say(note)
            with without_warnings():
                report["results"] += self._measure(estimator, self.test, say)
        self._add_importance(estimator, progress.finished)
        save_estimator(estimator, path / BEST)
        kept = {k: v for k, v in report.items() if k not in ("history", "notes", "stopped")}
        best = {
            name: value
            for name, value in report.get("valid", {}).items()
            if not name.startswith(("pinball", "coverage_", "width_"))
        }
        return {**kept, "best": best}

    def _add_importance(self, estimator: Any, finished: bool) -> None:
        """Add the permutation importance of each column, on test rows or else held-out rows."""
        rows, name = self.split.valid, "held-out rows"
        if self.split.rows.fold is not None:
            name = "training rows"  # every row trained all models but one
        if self.test is not None and finished:
            with without_warnings():
                rows, name = estimator.rows(self.test.rows, self.test.targets), self.test.name
        if rows is not None and len(rows) >= MIN_SHUFFLED:
            most = MAX_PREDICTED if self.needs_training else MAX_PREDICTED // 10
            columns = measure_importance(estimator, rows, seed=self.config.run.seed, most=most)
            estimator.report_["importance"] = {"on": name, "columns": columns}

    def _measure(self, estimator: Any, test: TestRows, say: Say) -> list[dict[str, Any]]:
        """Return metrics on test rows: of this model, and of other models with --compare."""
        test_targets = test.targets
        classes = getattr(estimator, "classes_", None)
        if classes is not None:
            test_targets = estimator._encode_target(test_targets)
        start = time.perf_counter()
        if classes is None:
            metrics = measure_numbers(estimator, test.rows, test_targets)
        else:
            probabilities = estimator.predict_proba(test.rows)
            metrics = estimator.class_metrics(probabilities, test_targets)
            reliability = estimator.report_.setdefault("reliability", {})
            reliability["test"] = reliability_bins(probabilities, test_targets)
            decided = estimator._decide(probabilities)
            estimator.report_["classes"] = class_table(probabilities, decided, test_targets)
            estimator.report_["classes"]["on"] = test.name
        seconds = {
            "fit_seconds": estimator.report_["seconds"],
            "predict_seconds": time.perf_counter() - start,
        }
        results = [{"model": type(estimator).__name__, **metrics, **seconds}]
        if self.config.table.compare != "none":
            tuned = self.config.table.compare == "tuned"
            train = (self.split.rows.table, self.split.target)
            other = (estimator.encoder_.encode(test.rows), test_targets)
            count, seed = 0 if classes is None else len(classes), self.config.run.seed
            results += compare(
                train,
                other,
                count,
                seed,
                valid=None if self.split.valid is None else estimator.labelled(self.split.valid),
                tune_seconds=estimator.report_["seconds"] if tuned else 0.0,
                say=say,
            )
            if self.needs_training:
                results += compare_instant(train, other, count, seed)
        return [{"model": row.pop("model"), "on": test.name, **row} for row in results]

    def add_to_page(self, page: Page, summary: Metrics, trained: Any) -> None:
        add_results(page, summary, self.estimator.encoder_.schema, self.labels)

    def contents(self) -> Iterable[object]:
        for rows in (self.split.rows, self.split.valid):
            if rows is not None:
                tensors = (rows.table.numbers, rows.table.codes, rows.target, rows.weight)
                yield from (tensor.numpy().tobytes() for tensor in tensors)


def batch_size(config: Config, rows: int) -> int:
    """Return the rows of a batch: as configured, or chosen from their number."""
    table = config.table
    return config.train.batch or choose_batch(rows, table.model, table.effort)


def measure_numbers(estimator: Any, rows: Frame, targets: Array) -> dict[str, float]:
    """Return metrics on test rows, and add their coverage and their fan to the report."""
    if not estimator.predicts_distribution:
        metrics: dict[str, float] = estimator.evaluate(rows, targets)
        return metrics
    distribution = estimator.predict_distribution(rows)
    coverage = estimator.report_.setdefault("coverage", {})
    coverage["test"] = coverage_curve(distribution, targets)
    estimator.report_["fan"] = fan_groups(distribution, targets)
    return number_metrics(distribution, targets)


def make_estimator(config: Config, schema: Schema) -> TableEstimator:
    """Return the unfitted estimator of a configuration and a schema."""
    ending = {"number": "Regressor", "ordinal": "Ordinal"}.get(str(schema.task), "Classifier")
    name = f"{ESTIMATOR_NAMES[config.table.model]}{ending}"
    if name not in ALL_ESTIMATORS:
        raise ConfigError(
            f"model={config.table.model} has no ordinal targets. Try --task classes, or --model ft."
        )
    kind = ALL_ESTIMATORS[name]
    return set_parameters(kind(), config).set_params(schema=schema)


def set_parameters(estimator: Any, config: Config) -> Any:
    """Return the estimator with the parameters that a configuration sets."""
    parameters, own = parameters_of(config), estimator.get_params()
    if isinstance(estimator, InstantEstimator):
        estimator.valid, estimator.split = parameters["valid"], parameters["split"]
        parameters = {name: value for name, value in parameters.items() if name in own}
        parameters["weights"] = config.table.weights
    return estimator.set_params(**parameters)


def parameters_of(config: Config) -> dict[str, Any]:
    """Return the parameters of an estimator for a configuration."""
    table, train = config.table, config.train
    options = dict(table.embedding_options)
    return {
        **{name: getattr(table, name) for name in ("bins", "members", "scaling", "impute")},
        **{name: getattr(table, name) for name in ("drop_cells", "swap_cells", "split")},
        "embedding": table.embedding,
        "embedding_options": options or None,
        "rare": table.min_count,
        "learning_rate": train.lr,
        "weight_decay": train.weight_decay,
        "ema": train.ema,
        "batch_size": train.batch,
        "patience": train.patience,
        "effort": table.effort,
        "folds": table.folds,
        "metric": train.metric,
        "class_weight": table.class_weight,
        "valid": config.data.valid_fraction,
        "random_state": config.run.seed,
    }


def read_test_rows(path: str, schema: Schema, targets: Array, say: Say) -> TestRows:
    """Return the rows of a test file; InputError if they do not match the training rows.

    Parameters
    ----------
    path : the file.
    schema : schema of the training rows.
    targets : targets of the training rows.
    say : receives messages about the rows.
    """
    target = str(schema.target)
    table = schema.select(read_frame(path))
    for note in table.notes:
        say(note)
    rows, values = rows_with_target(table, target, say)
    classes = None if schema.task == "number" else np.unique(targets)
    known_targets = parse_known_target(values, schema, classes, say)
    return TestRows(rows.without(target), known_targets, path)


def set_aside(
    rows: Frame,
    targets: Array,
    groups: Array | None,
    schema: Schema,
    estimator: TableEstimator,
) -> tuple[Array, Array, str]:
    """Split off a fifth of the rows for testing; return training rows, test rows and a note.

    Parameters
    ----------
    rows, targets : all rows, and their targets.
    groups : the group of each row, none of which is split; None for no groups.
    schema : schema of the rows.
    estimator : supplies the random seed and the order of the split.
    """
    classes = None if schema.task == "number" else targets
    seed, order = estimator.random_state, estimator.split
    train_rows, test_rows = hold_out(
        len(rows), 0.2, classes=classes, groups=groups, order=order, seed=seed
    )
    if not len(test_rows):
        raise InputError(
            f"{rows.name} must have enough rows to set some aside for --compare: got {len(rows)}. "
            "Add --test FILE."
        )
    whole = ""
    if groups is not None:
        whole = f" ({len(set(groups[test_rows]))} of {len(set(groups))} groups)"
    note = (
        f"{len(test_rows):,} rows{whole} are set aside for the comparison; with --test FILE, all "
        "rows are used for training."
    )
    return train_rows, test_rows, note


@contextmanager
def warnings_as_notes(notes: list[str]) -> Iterator[None]:
    """Append the warnings of a column encoder to the notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=NOT_NUMERIC)
        yield
    notes += dict.fromkeys(str(warning.message) for warning in caught)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings of a column encoder, which are reported as notes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NOT_NUMERIC)
        yield
