"""Instant estimators: nothing is trained when they are fitted; rows are predicted from rows.

A network trained once on synthetic tables (prior.py, instant_training.py) reads the training rows
with their targets, and predicts any row in one forward pass; see models/instant.py. `fit` encodes
and stores rows. Its weights are a file of the package, loaded when first needed.
"""

import time
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.data.table.column_arrays import is_missing
from addnorm.data.table.encode import EncodedTable, TableEncoder, fit_encoder
from addnorm.data.table.frame import Array, Frame
from addnorm.data.table.schema import Schema
from addnorm.data.table.text import FittedText
from addnorm.errors import ConfigError
from addnorm.metrics import classification_metrics, regression_metrics
from addnorm.models.instant import InstantModel, read_instant
from addnorm.models.instant_table import InstantPredictor, content_order, make_predictor
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.distribution import NumberDistribution
from addnorm.tabular.estimators import ESTIMATORS, TableClassifier, TableRegressor
from addnorm.tabular.fitting import SplitRows, predict_outputs
from addnorm.training.calibration import fit_temperature, probabilities_of

PACKAGE_WEIGHTS = Path(__file__).parent / "instant.safetensors"
MAX_KNOWN_ROWS, MAX_COLUMNS = 2000, 60
LEVELS = 8
"""Intervals into which columns and targets are cut to rank columns."""
CROSS_ROWS = 400
"""Most rows that are predicted from one another to fit a temperature."""
CROSS_KNOWN = 750
"""Most rows that they are predicted from."""
TRUST, TRUST_ROWS = 0.6, 10
"""Weight of the Gaussian process before rows are seen, and how many rows this is worth."""
PREDICT_CELLS = 100_000
"""Cells of unknown rows that are predicted at once."""


@lru_cache(maxsize=2)
def _load(path: str, changed: int) -> InstantModel:
    return read_instant(Path(path))


def load_network(weights: str | Path | None = None) -> InstantModel:
    """Return the trained network: that of the package, or of a file; read once."""
    path = PACKAGE_WEIGHTS if weights is None else Path(weights)
    if weights is None and not path.exists():
        raise ConfigError(
            "this installation has no weights for instant models. Train some with "
            "'python -m addnorm.tabular.instant_training DIR', and pass weights=PATH (on the "
            "command line --set table.weights=PATH)."
        )
    return _load(str(path), path.stat().st_mtime_ns if path.exists() else 0)


class InstantEstimator(TableEstimator):
    """What the instant classifier and the instant regressor share."""

    kind = "instant"
    scaling, impute, rare, valid, split = "standard", "none", None, 0.0, "random"
    effort, folds, metric, class_weight = "normal", 1, "loss", None

    def __init__(
        self,
        *,
        members: int = 4,
        max_rows: int = MAX_KNOWN_ROWS,
        max_columns: int = MAX_COLUMNS,
        calibrate: bool = True,
        weights: str | Path | None = None,
        schema: Any = None,
        random_state: Any = 0,
    ) -> None:
        self.members = members
        self.calibrate = calibrate
        self.max_rows = max_rows
        self.max_columns = max_columns
        self.weights = weights
        self.schema = schema
        self.random_state = random_state

    def check_rows(self, X: Any, target: Array) -> Frame:
        for name in ("members", "max_rows", "max_columns"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ConfigError(
                    f"{name} must be a whole number, 1 or more: got {value!r}. Leave it out."
                )
        return super().check_rows(X, target)

    def _fit_rows(self, X: Any, y: Any) -> Self:
        began = time.perf_counter()
        target, classes = self.learn_target(y)
        frame = self.check_rows(X, target)
        split = self.split_rows(frame, target, classes, np.ones(len(frame)))
        self.model_ = self.make_model(split, classes)
        self.batch_, self.temperature_, self.n_iter_ = self._batch(), 1.0, 1
        if classes and self.calibrate:
            self.temperature_ = own_temperature(self.model_)
        self.report_ = {
            "rows": len(split.rows),
            "held_out": 0,
            "known_rows": self.model_.sizes.known,
            "parameters": self.model_.count(),
            "temperature": self.temperature_,
            **({} if classes else {"process": float(self.model_.trust)}),
            "notes": self.notes_of(split),
        }
        for note in self.notes_of(split)[len(split.notes) :]:
            warnings.warn(note, stacklevel=3)
        self.report_["seconds"] = time.perf_counter() - began
        return self

    def make_model(
        self, split: SplitRows, classes: int, trunk: ModelConfig | None = None
    ) -> InstantPredictor:
        """Return the network with the rows of the split as its known rows.

        `trunk` must be that of the network.
        """
        table, target = split.rows.table, split.rows.target
        network = load_network(self.weights)
        if trunk is not None and trunk != network.config.trunk:
            raise ConfigError(
                "the network of an instant model is trained already: its sizes cannot be changed. "
                "Leave options such as --width, --depth and --preset out."
            )
        rows = stratified_sample(target, classes, self.max_rows, self.seed_)
        table, target = table.take(rows), target[rows]
        kept = informative_columns(table, target, classes, self.max_columns)
        model = make_predictor(
            network,
            table.numbers,
            table.codes,
            target,
            categories=self.encoder_.sizes,
            classes=classes,
            kept=kept,
            members=self.members or 1,
            seed=self.seed_ % 2**31,
        )
        if not classes and self.calibrate:
            model.trust.fill_(own_trust(model))
        return model

    def notes_of(self, split: SplitRows) -> list[str]:
        """Return the notes of the split, then sentences on rows and columns that are not used."""
        notes, names = list(split.notes), self.encoder_.names
        assert isinstance(self.model_, InstantPredictor)
        known, columns = self.model_.sizes.known, self.model_.sizes.columns
        if known < len(split.rows):
            notes.append(
                f"{known:,} of {len(split.rows):,} training rows are used, a stratified sample: "
                "instant models are for small tables. Raise max_rows, or try an estimator that "
                "is trained, such as FTTransformerClassifier."
            )
        if columns < len(names):
            notes.append(
                f"{columns} of {len(names)} columns are used, the most informative ones. "
                "Raise max_columns to use more."
            )
        return notes

    def pretrain_frame(
        self,
        frame: Frame,
        method: str,
        epochs: int | None = None,
        trunk: ModelConfig | None = None,
    ) -> Self:
        """Raise: the network is trained already."""
        raise ConfigError(
            "instant models cannot be pre-trained on rows of yours: they are trained already. "
            "Leave --unlabelled out, or choose another model."
        )

    def _batch(self) -> int:
        """Return how many rows are predicted at once."""
        assert isinstance(self.model_, InstantPredictor)
        return max(32, PREDICT_CELLS // (1 + self.model_.sizes.columns))

    def _schema(self, frame: Frame) -> Schema:
        """Return the schema; columns without any value count as numbers if there are no others."""
        schema = super()._schema(frame)
        if schema.used or not all(is_missing(c).all() for c in frame.columns.values()):
            return schema
        return schema.change(dict.fromkeys(schema.kinds(), "number"))

    def _encoder(
        self, frame: Frame, schema: Schema, texts: Mapping[str, FittedText] | None = None
    ) -> TableEncoder:
        return fit_encoder(frame, schema, scaling="standard", rare=self.rare, texts=texts)


class InstantClassifier(InstantEstimator, TableClassifier):
    """Class probabilities without training: a Transformer that reads the rows as its context.

    For up to 2,000 rows and 60 columns (of more, a sample and the most informative are used) and 2
    to 10 classes. docs/instant.md says when to use it.

    Parameters
    ----------
    members
        Answers that are averaged; in each, classes and values of categories are numbered in
        another order. Of tables with more than 8,000 cells, two at most; of the largest, one.
    max_rows, max_columns
        Most rows and columns that are used.
    calibrate
        Whether to divide logits by a temperature that is fitted to the training rows, each
        predicted from others of them.
    weights
        A file of weights; None for those of the package.
    schema
        A Schema, a path, or a table of column: kind; None to infer it.
    random_state
        Of the sample of rows, and the orders of the members.
    """

    def fit(self, X: Any, y: Any) -> Self:  # type: ignore[override] # nothing to weight or stop
        """Store rows X and their classes y, encoded."""
        return self._fit_rows(X, y)


class InstantRegressor(InstantEstimator, TableRegressor):
    """Numbers and their distribution without training; see InstantClassifier.

    Parameters
    ----------
    members, max_rows, max_columns, weights, schema, random_state
        As for InstantClassifier.
    calibrate
        Whether the weight of the Gaussian process in the answer is fitted to the training rows,
        each predicted from others of them; else it is one half.
    """

    has_bins = False

    def fit(self, X: Any, y: Any) -> Self:  # type: ignore[override] # nothing to weight or stop
        """Store rows X and their numbers y, encoded."""
        return self._fit_rows(X, y)

    def _learn_scale(self, target: Array, weight: Array) -> None:
        super()._learn_scale(target, weight)
        if (target == target[0]).all():  # so that every answer is this number, and certain
            self.mean_, self.scale_ = float(target[0]), float(np.finfo(np.float64).tiny)

    def predict_bins(self, X: Any) -> tuple[Array, Array]:
        """Return probabilities of bins, (rows, bins), and the edges of the bins, (bins + 1,)."""
        check_is_fitted(self)
        table = self.encoder_.encode(self._frame(X, fitting=False))
        assert isinstance(self.model_, InstantPredictor)
        parts = [torch.zeros(0, len(self.model_.fine_edges) - 1)]
        with torch.inference_mode():
            for start in range(0, len(table), self.batch_):
                chunk = slice(start, start + self.batch_)
                parts.append(self.model_.outputs(table.numbers[chunk], table.codes[chunk]))
        edges = self.model_.fine_edges.double() * self.scale_ + self.mean_
        return np.asarray(torch.cat(parts).numpy()), np.asarray(edges.numpy())

    predicts_distribution = True  # from the bins of its network

    def predict_distribution(self, X: Any) -> NumberDistribution:
        """Return the predicted distribution of each row: mean, quantiles, cdf, crps, samples."""
        return NumberDistribution(*self.predict_bins(X))


ALL_ESTIMATORS: dict[str, type[TableClassifier] | type[TableRegressor]] = {
    **ESTIMATORS,
    **{kind.__name__: kind for kind in (InstantClassifier, InstantRegressor)},
}
"""Every estimator for tables, by name."""


def compare_instant(
    train: tuple[EncodedTable, Array], test: tuple[EncodedTable, Array], classes: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Return one row like those of `compare`: the instant model on the same encoded rows.

    None if the package has no weights, or there are too many classes.
    """
    if not PACKAGE_WEIGHTS.exists() or classes > load_network().config.classes:
        return []
    began = time.perf_counter()
    table = train[0]
    mean, deviation = (0.0, 1.0) if classes else (float(train[1].mean()), float(train[1].std()))
    deviation = deviation or 1.0
    scaled = torch.from_numpy((train[1] - mean) / deviation)
    target = torch.from_numpy(train[1]).long() if classes else scaled.float()
    rows = stratified_sample(target, classes, MAX_KNOWN_ROWS, seed)
    table, target = table.take(rows), target[rows]
    largest_codes = [int(part.codes.max(dim=0).values[i]) for part in (train[0], test[0])
            for i in range(part.codes.shape[1]) if len(part)]  # fmt: skip
    columns = train[0].codes.shape[1]
    sizes = [max(largest_codes[i::columns]) + 1 for i in range(columns)]
    model = make_predictor(
        load_network(),
        table.numbers,
        table.codes,
        target,
        categories=sizes,
        classes=classes,
        kept=informative_columns(table, target, classes, MAX_COLUMNS),
        seed=seed,
    )
    if not classes:
        model.trust.fill_(own_trust(model))
    fitted = time.perf_counter()
    answers = predict_outputs(model, test[0], max(32, PREDICT_CELLS // (1 + model.sizes.columns)))[
        :, 0
    ]
    if classes:
        probabilities = probabilities_of(answers, own_temperature(model)).numpy()
        figures = classification_metrics(probabilities, test[1])
    else:
        predicted = answers[:, 0].double().numpy() * deviation + mean
        figures = regression_metrics(predicted, test[1])
    times = {"fit_seconds": fitted - began, "predict_seconds": time.perf_counter() - fitted}
    return [{"model": "Instant", **figures, **times}]


# ── Calibration ───────────────────────────────────────────────────────────────────────────────────


def own_temperature(model: InstantPredictor) -> float:
    """Return the temperature at which the known rows of a table are predicted best from others.

    The network is calibrated on tables like those it was trained on; this corrects it on others.
    Few rows say little, so log T is multiplied by n / (n + 50), and T stays between ½ and 2.
    """
    rows, probabilities = predict_known_rows(model)
    if not len(rows):
        return 1.0
    ones, outputs = torch.ones(len(rows)), model.outputs_from_probabilities(probabilities)[:, 0]
    best = fit_temperature(outputs, model.known_target[rows], ones)
    return float(min(max(best ** (len(ones) / (len(ones) + 50)), 0.5), 2.0))


def own_trust(model: InstantPredictor) -> float:
    """Return the weight of the Gaussian process with which known numbers are predicted best.

    The CRPS of a mixture is a quadratic function of the weight t: with a and b the distribution
    functions of process and network minus the step at the target,

        Σ ∫ (t a + (1 − t) b)²   is least at   t = Σ ∫ b (b − a) / Σ ∫ (a − b)²

    The process predicts each row without itself; the network predicts parts of the rows from the
    others. TRUST_ROWS rows are given to t = TRUST beforehand, t stays between 0 and 1.
    """
    process = model.process()
    if process is None:
        return 0.0
    rows, network = predict_known_rows(model)
    if not len(rows):
        return TRUST
    mean, deviation = process.own
    edges, y = model.fine_edges.double(), model.known_target[rows].double()
    own = process.probabilities(mean[rows], deviation[rows], edges).cumsum(dim=1)[:, :-1]
    above = (edges[1:-1] >= y[:, None]).double()
    a, b = own - above, network.double().cumsum(dim=1)[:, :-1] - above
    width = (edges[2:] - edges[:-2]) / 2
    gain, size = ((b * (b - a)) @ width).mean(), ((a - b).square() @ width).mean()
    before = TRUST_ROWS / len(rows)
    least = size.clamp(min=1e-9)
    return float(((gain + before * TRUST * least) / (least * (1 + before))).clamp(0, 1))


def predict_known_rows(model: InstantPredictor) -> tuple[Tensor, Tensor]:
    """Return some known rows, and what the network predicts for them from others, as `outputs`.

    Up to CROSS_ROWS rows are predicted in three parts, each from the other two; of more, a part is
    predicted from the rest, or CROSS_KNOWN of them. The content of the rows decides their parts, so
    their order changes nothing.
    """
    target, count = model.known_target, len(model.known_target)
    order = content_order(model.known_numbers, model.known_codes, target)
    part = torch.empty(count, dtype=torch.int64)
    part[order] = torch.arange(count) % (3 if count <= CROSS_ROWS else 4)
    rows, outputs = [], []
    for number in range(3 if count <= CROSS_ROWS else 1):
        chosen = (part == number).nonzero()[:, 0][:CROSS_ROWS]
        rest = order[part[order] != number]
        if len(rest) > CROSS_KNOWN:
            rest = rest[(torch.arange(CROSS_KNOWN) * len(rest)) // CROSS_KNOWN]
        rest = rest.sort().values
        if not len(chosen) or not len(rest):
            return part[:0], torch.zeros(0)
        part_model = make_predictor(
            model.network,
            model.known_numbers[rest],
            model.known_codes[rest],
            target[rest],
            categories=model.config.categories,
            classes=model.sizes.classes,
            kept=model.kept,
            members=1,
            seed=model.sizes.seed,
        )
        part_model.trust.zero_()
        with torch.inference_mode():
            outputs.append(
                part_model.outputs(model.known_numbers[chosen], model.known_codes[chosen])
            )
        rows.append(chosen)
    return torch.cat(rows), torch.cat(outputs)


# ── Which rows and columns ────────────────────────────────────────────────────────────────────────


def stratified_sample(target: Tensor, classes: int, max_count: int, seed: int) -> Tensor:
    """Return all rows, or a random sample of `max_count` with the classes in their shares.

    Every class keeps at least one row where `max_count` allows it.
    """
    count = len(target)
    if count <= max_count:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    if not classes:
        return order[:max_count].sort().values
    # By place within its class, relative to the size of the class.
    shuffled = target[order]
    sizes = torch.bincount(shuffled, minlength=classes)
    by_class = shuffled.argsort(stable=True)
    place = torch.empty(count)
    starts = sizes.cumsum(0) - sizes
    rank = torch.arange(count) - starts.repeat_interleave(sizes)
    place[by_class] = rank / sizes.repeat_interleave(sizes)
    return order[place.argsort(stable=True)[:max_count]].sort().values


def informative_columns(
    table: EncodedTable, target: Tensor, classes: int, max_count: int
) -> Tensor:
    """Return all columns, or the `max_count` with the largest mutual information with the target.

    Columns and numeric targets are cut into intervals with equal numbers of rows; missing cells are
    a value of their own. The order of the columns is kept.
    """
    count = table.numbers.shape[1] + table.codes.shape[1]
    if count <= max_count:
        return torch.arange(count)
    labels = target if classes else _levels(target)
    columns = [_levels(column) for column in table.numbers.T]
    columns += [column.clamp(max=LEVELS * 4) for column in table.codes.T]
    gains = torch.stack([_mutual_information(column, labels) for column in columns])
    return gains.argsort(descending=True, stable=True)[:max_count].sort().values


def _levels(values: Tensor) -> Tensor:
    """Return the interval of each value, from 1; 0 for NaN."""
    present = values[~values.isnan()]
    if not len(present):
        return torch.zeros(len(values), dtype=torch.int64)
    edges = torch.unique(present.quantile(torch.linspace(0, 1, LEVELS + 1)[1:-1]))
    place = torch.searchsorted(edges, values.nan_to_num(0.0).contiguous(), right=True) + 1
    return place.masked_fill(values.isnan(), 0)


def _mutual_information(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ p(a, b) log(p(a, b) / p(a) p(b))."""
    width = int(b.max()) + 1
    joint = torch.bincount(a * width + b, minlength=(int(a.max()) + 1) * width).double()
    joint = joint.view(-1, width) / len(a)
    apart = joint.sum(dim=1, keepdim=True) * joint.sum(dim=0, keepdim=True)
    return torch.where(joint > 0, joint * (joint / apart.clamp(min=1e-300)).log(), 0.0).sum()
