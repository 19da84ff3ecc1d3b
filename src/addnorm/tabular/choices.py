"""Check the parameters of an estimator, and resolve those that are None."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from addnorm.config import ModelConfig
from addnorm.data.table.bins import make_edges
from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Array
from addnorm.errors import ConfigError
from addnorm.models.tabular import TabularConfig, trunk_of
from addnorm.tabular.fitting import FitSettings

if TYPE_CHECKING:
    from addnorm.tabular.base import TableEstimator

TRUNK_PARAMETERS = (
    *("width", "depth", "heads", "ffn_width", "addnorm", "addnorm_options", "norm"),
    *("dropout", "attention_dropout", "ffn_dropout"),
)
"""Parameters that are fields of the trunk's configuration."""

INTEGER_TYPES: tuple[type[Any], ...] = (int, np.integer)
NUMBER_TYPES: tuple[type[Any], ...] = (int, float, np.integer, np.floating)
PARAMETER_RANGES: dict[str, tuple[tuple[type[Any], ...], float, float]] = {
    **{
        name: (INTEGER_TYPES, 1, math.inf)
        for name in ("width", "depth", "heads", "ffn_width", "members")
    },
    **{name: (INTEGER_TYPES, 1, math.inf) for name in ("rare", "batch_size", "epochs")},
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
    """
    options = dict(estimator.embedding_options or {})
    embedding = estimator.embedding or estimator.number_embedding
    if embedding == "piecewise" and table.numbers.shape[1]:
        options["edges"] = make_edges(
            table.numbers.numpy(),
            target,
            kind=bins,
            classes=bool(classes),
            bins=options.pop("bins", 48),
            seed=estimator.seed_,
        )
    return TabularConfig(
        kind=estimator.kind,
        numbers=table.numbers.shape[1],
        categories=estimator.encoder_.sizes,
        outputs=classes if classes > 2 else 1,
        trunk=trunk or _trunk(estimator),
        embedding=embedding,
        embedding_options=options,
        members=estimator.members,
    )


def _trunk(estimator: "TableEstimator") -> ModelConfig:
    """Return the published trunk, with the parameters that are not None."""
    values = {name: getattr(estimator, name) for name in TRUNK_PARAMETERS}
    changes = {name: value for name, value in values.items() if value is not None}
    if estimator.kind == "ft" and estimator.width is not None:
        changes.setdefault("ffn_width", round(estimator.width * 4 / 3))
    return trunk_of(estimator.kind, **changes)


def choose_batch(rows: int) -> int:
    """Return the default batch size for a number of rows."""
    sizes = ((2_000, 32), (10_000, 128), (50_000, 256), (10**18, 512))
    return next(size for most, size in sizes if rows <= most)


def choose_epochs(rows: int, batch: int, held_out: bool) -> int:
    """Return the default number of epochs: at most 20,000 steps, but at least 10 epochs."""
    return int(np.clip(20_000 // -(-rows // batch), 10, 100 if held_out else 30))


def choose_settings(estimator: "TableEstimator", rows: int, held_out: bool) -> FitSettings:
    """Return the training settings; batch size and epochs depend on the number of rows."""
    batch = estimator.batch_size or choose_batch(rows)
    epochs = estimator.epochs or choose_epochs(rows, batch, held_out)
    return FitSettings(
        batch=batch,
        epochs=epochs,
        rate=estimator.rate if estimator.learning_rate is None else estimator.learning_rate,
        weight_decay=estimator.weight_decay,
        schedule=estimator.schedule,
        warmup=estimator.warmup,
        patience=estimator.patience,
        drop_cells=estimator.drop_cells,
        swap_cells=estimator.swap_cells,
        ema=estimator.ema,
        minutes=estimator.minutes,
        seed=estimator.seed_,
    )
