"""Check the parameters of an estimator, and resolve those that are None.

The defaults of FT-Transformer were chosen on held-out rows of nine tables (docs/results/tables.md):
a small network, whose numbers are embedded by bins (and by waves, for classes of many rows and
mostly numbers), trained with a cosine schedule over a number of epochs that falls with the rows.
TabTransformer and SAINT are as published.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.cpu import count_processors
from addnorm.data.table.bins import make_edges
from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Array
from addnorm.errors import ConfigError, choose
from addnorm.models.tabular import TabularConfig, trunk_of
from addnorm.tabular.fitting import CLASS_METRICS, NUMBER_METRICS, FitSettings

if TYPE_CHECKING:
    from addnorm.tabular.base import TableEstimator

TRUNK_PARAMETERS = (
    *("width", "depth", "heads", "ffn_width", "addnorm", "addnorm_options", "norm"),
    *("dropout", "attention_dropout", "ffn_dropout"),
)
"""Parameters that are fields of the trunk's configuration."""


@dataclass(frozen=True)
class Effort:
    """How much time a fit may take.

    Parameters
    ----------
    epochs : factor on the default number of epochs.
    folds : number of models, each trained without one fold; 1 for one model and held-out rows.
    """

    epochs: float = 1.0
    folds: int = 1


EFFORTS = {
    "low": Effort(epochs=0.35),
    "normal": Effort(),
    "high": Effort(epochs=1.5, folds=5),
    "published": Effort(),
}
"""By name; "published" also takes network and training from the publication."""
RECOMMENDED_COMMON: dict[str, Any] = {
    **{"width": 64, "depth": 2, "heads": 4, "ffn_width": 128, "embedding": "piecewise"},
    **{"members": 1, "dropout": 0.0, "attention_dropout": 0.0},
    **{"learning_rate": 2e-3, "weight_decay": 1e-4, "schedule": "cosine", "warmup": 0.05},
    **{"ema": 0.0, "patience": 0},
}
RECOMMENDED: dict[str, dict[str, Any]] = {
    "classes": {
        **RECOMMENDED_COMMON,
        **{"ffn_dropout": 0.1, "drop_cells": 0.02, "swap_cells": 0.1},
    },
    "number": {**RECOMMENDED_COMMON, "ffn_dropout": 0.0, "drop_cells": 0.0, "swap_cells": 0.02},
}
"""Parameters of FT-Transformer that do not depend on the rows, by what is predicted. Attention has
no dropout: torch's fast kernels have none."""
PUBLISHED: dict[str, Any] = {
    **{"members": 1, "drop_cells": 0.02, "swap_cells": 0.0},
    **{"weight_decay": 1e-5, "schedule": "constant", "warmup": 0.0, "ema": 0.0, "patience": 16},
}
"""Training as published; network, embedding and rate are those of the kind of model."""


def is_recommended(kind: str, effort: str) -> bool:
    """Return whether addnorm has settings of its own for a kind of model and an effort."""
    return kind == "ft" and effort != "published"


SMALL_TABLE, LARGE_TABLE = 2_000, 10_000
"""Rows up to which classes are learnt at half the rate, with a teacher (teacher.py) and with twice
as many swapped cells, and from which on numbers have one member: what is needed against overfitting
falls with the rows."""
MEMBERS: dict[str, Any] = {"members": 4, "width": 32, "ffn_width": 64}
"""Of more than SMALL_TABLE rows with classes, and of numbers below LARGE_TABLE rows: four members
of half the width take a third more time than one of the whole width, and are better together."""


def default_parameters(kind: str, effort: str, classes: bool, rows: int = 0) -> dict[str, Any]:
    """Return the parameters that replace None, except batch size and epochs.

    Parameters
    ----------
    kind : kind of model.
    effort : name of the effort.
    classes : whether classes are predicted, or numbers.
    rows : number of training rows; 0 if it is not known.

    >>> default_parameters("ft", "normal", classes=True)["schedule"]
    'cosine'
    """
    choose("effort", effort, EFFORTS)
    if not is_recommended(kind, effort):
        return PUBLISHED
    settings = RECOMMENDED["classes" if classes else "number"]
    if classes and 0 < rows <= SMALL_TABLE:
        return settings | {"learning_rate": settings["learning_rate"] / 2}
    if classes and rows:
        return settings | MEMBERS | {"swap_cells": settings["swap_cells"] / 2}
    if 0 < rows < LARGE_TABLE:
        return settings | MEMBERS
    return settings


def default_embedding(
    kind: str, effort: str, classes: bool, rows: int, numbers: int, categories: int
) -> str | None:
    """Return the embedding of numbers that replaces None; None is that of the publication.

    Waves beside the bins help where numbers decide: with classes of many rows, if at least half of
    the columns are numbers.

    Parameters
    ----------
    kind : kind of model.
    effort : name of the effort.
    classes : whether classes are predicted, or numbers.
    rows : number of training rows.
    numbers, categories : numbers of columns.

    >>> default_embedding("ft", "normal", True, rows=5_000, numbers=8, categories=2)
    'mixed'
    """
    if is_recommended(kind, effort) and classes and rows > SMALL_TABLE and numbers >= categories:
        return "mixed"
    embedding: str | None = default_parameters(kind, effort, classes, rows).get("embedding")
    return embedding


def parameter_of(estimator: "TableEstimator", name: str, rows: int = 0) -> Any:
    """Return a parameter of an estimator, or its default for a number of rows if it is None."""
    value = getattr(estimator, name)
    if value is not None:
        return value
    classes = hasattr(estimator, "predict_proba")
    return default_parameters(estimator.kind, estimator.effort, classes, rows).get(name)


def count_folds(estimator: "TableEstimator") -> int:
    """Return the number of folds: 1 for one model with held-out rows."""
    folds: int | None = getattr(estimator, "folds", 1)
    return EFFORTS[estimator.effort].folds if folds is None else folds


def threads_of(estimator: "TableEstimator") -> int | None:
    """Return the number of threads that `n_jobs` asks for, -1 being all processors; else None."""
    jobs: int | None = getattr(estimator, "n_jobs", None)
    return count_processors() if jobs == -1 else jobs


INTEGER_TYPES: tuple[type[Any], ...] = (int, np.integer)
NUMBER_TYPES: tuple[type[Any], ...] = (int, float, np.integer, np.floating)
PARAMETER_RANGES: dict[str, tuple[tuple[type[Any], ...], float, float]] = {
    **{
        name: (INTEGER_TYPES, 1, math.inf)
        for name in ("width", "depth", "heads", "ffn_width", "members")
    },
    **{name: (INTEGER_TYPES, 1, math.inf) for name in ("rare", "batch_size", "epochs", "folds")},
    "patience": (INTEGER_TYPES, 0, math.inf),
    **{
        name: (NUMBER_TYPES, 0, 1)
        for name in ("dropout", "attention_dropout", "ffn_dropout", "warmup")
    },
    **{name: (NUMBER_TYPES, 0, 1) for name in ("drop_cells", "swap_cells", "ema", "valid")},
    **{name: (NUMBER_TYPES, 0, math.inf) for name in ("learning_rate", "weight_decay", "minutes")},
}
"""Numeric parameters: their types, and the smallest and largest value."""


def check_parameters(estimator: "TableEstimator") -> None:
    """Raise ConfigError if a parameter has the wrong type or is out of range."""
    for name, (types, low, high) in PARAMETER_RANGES.items():
        value: Any = getattr(estimator, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:
            what = "a whole number, " if types is INTEGER_TYPES else ""
            ends = f"{low:g} or more" if math.isinf(high) else f"between {low:g} and {high:g}"
            raise ConfigError(f"{name} must be {what}{ends}: got {value!r}. Leave it out.")
    jobs: Any = getattr(estimator, "n_jobs", None)
    whole = isinstance(jobs, INTEGER_TYPES) and not isinstance(jobs, bool)
    if jobs is not None and not (whole and (jobs == -1 or jobs >= 1)):
        raise ConfigError(
            f"n_jobs must be a number of threads, or -1 for all processors: got {jobs!r}. "
            "Leave it out to have the number chosen by measurement."
        )
    choose("effort", getattr(estimator, "effort", "normal"), EFFORTS)
    metrics = CLASS_METRICS if hasattr(estimator, "predict_proba") else NUMBER_METRICS
    choose("metric", getattr(estimator, "metric", "loss"), metrics)
    if getattr(estimator, "class_weight", None) is not None and metrics is NUMBER_METRICS:
        raise ConfigError("class_weight is for classifiers: this is a regressor. Leave it out.")
    for name in ("embedding_options", "addnorm_options"):
        if not isinstance(value := getattr(estimator, name, None), dict | None):
            raise ConfigError(f"{name} must be a dictionary: got {value!r}. Leave it out.")


def choose_network(
    estimator: "TableEstimator",
    table: EncodedTable,
    target: Array,
    bins: str,
    classes: int,
    trunk: ModelConfig | None = None,
    folds: Tensor | None = None,
) -> TabularConfig:
    """Return the configuration of the network for these rows.

    Parameters
    ----------
    estimator : the estimator, with its encoder fitted.
    table : the encoded training rows, from which bin edges are computed.
    target : their targets.
    bins : placement of the bin edges: target or quantile.
    classes : number of classes; 0 for regression.
    trunk : configuration of the trunk; by default from the estimator's parameters.
    folds : fold of each row, if there are several models; each has edges of its own.
    """
    options = dict(estimator.embedding_options or {})
    embedding = (
        estimator.embedding
        or default_embedding(
            estimator.kind,
            estimator.effort,
            hasattr(estimator, "predict_proba"),
            len(table),
            table.numbers.shape[1],
            table.codes.shape[1],
        )
        or estimator.number_embedding
    )
    count = 1 if folds is None else int(folds.max()) + 1
    if embedding in ("piecewise", "mixed") and table.numbers.shape[1]:
        numbers, number_of_bins = table.numbers.numpy(), options.pop("bins", 48)
        edges = []
        for fold in range(count):
            inside = slice(None) if folds is None else (folds != fold).numpy()
            edges.append(
                make_edges(
                    numbers[inside],
                    target[inside],
                    kind=bins,
                    classes=bool(classes),
                    bins=number_of_bins,
                    seed=estimator.seed_,
                )
            )
        options["edges"] = edges[0] if folds is None else edges
    return TabularConfig(
        kind=estimator.kind,
        numbers=table.numbers.shape[1],
        categories=estimator.encoder_.sizes,
        outputs=classes if classes > 2 else 1,
        trunk=trunk or _trunk(estimator, len(table)),
        embedding=embedding,
        embedding_options=options,
        members=parameter_of(estimator, "members", len(table)),
        folds=count,
    )


def _trunk(estimator: "TableEstimator", rows: int) -> ModelConfig:
    """Return the trunk: the published one, with recommended and explicit parameters."""
    values = {name: parameter_of(estimator, name, rows) for name in TRUNK_PARAMETERS}
    changes = {name: value for name, value in values.items() if value is not None}
    if estimator.width is not None and estimator.kind == "ft":
        recommended = is_recommended(estimator.kind, estimator.effort)
        if estimator.ffn_width is None:
            changes["ffn_width"] = round(estimator.width * (2 if recommended else 4 / 3))
        if estimator.heads is None and recommended:
            changes["heads"] = math.gcd(estimator.width, changes["heads"])
    return trunk_of(estimator.kind, **changes)


def choose_batch(rows: int, kind: str, effort: str) -> int:
    """Return the default batch size for a number of rows, a kind of model and an effort."""
    largest = (2_000, 10_000, 50_000, 10**18)
    sizes = (32, 64, 128, 256) if is_recommended(kind, effort) else (32, 128, 256, 512)
    return next(size for most, size in zip(largest, sizes, strict=True) if rows <= most)


MIN_EPOCHS, MAX_EPOCHS = 15, 25
"""Fewest and most epochs of the recommended settings, before the factor of the effort."""
ROWS_SEEN = 225_000
"""Rows times epochs of the recommended settings, within those limits."""


def choose_epochs(rows: int, batch: int, held_out: bool, kind: str, effort: str) -> int:
    """Return the default number of epochs.

    Parameters
    ----------
    rows, batch : number of training rows, and of those in a batch.
    held_out : whether there are held-out rows for early stopping, as published models need.
    kind : kind of model; only that of FT-Transformer has recommended settings.
    effort : name of the effort.
    """
    if is_recommended(kind, effort):
        epochs = np.clip(ROWS_SEEN / max(rows, 1), MIN_EPOCHS, MAX_EPOCHS)
        return max(1, round(float(epochs) * EFFORTS[effort].epochs))
    return int(np.clip(20_000 // -(-rows // batch), 10, 100 if held_out else 30))


def choose_settings(estimator: "TableEstimator", rows: int, held_out: bool) -> FitSettings:
    """Return the training settings; batch size and epochs depend on the number of rows."""
    batch = estimator.batch_size or choose_batch(rows, estimator.kind, estimator.effort)
    epochs = estimator.epochs or choose_epochs(
        rows, batch, held_out, estimator.kind, estimator.effort
    )
    rate = parameter_of(estimator, "learning_rate", rows)
    return FitSettings(
        batch=batch,
        epochs=epochs,
        rate=estimator.rate if rate is None else rate,
        weight_decay=parameter_of(estimator, "weight_decay"),
        schedule=parameter_of(estimator, "schedule"),
        warmup=parameter_of(estimator, "warmup"),
        patience=parameter_of(estimator, "patience"),
        drop_cells=parameter_of(estimator, "drop_cells"),
        swap_cells=parameter_of(estimator, "swap_cells", rows),
        ema=parameter_of(estimator, "ema"),
        minutes=estimator.minutes,
        seed=estimator.seed_,
        metric=estimator.metric,
        threads=threads_of(estimator),
    )
