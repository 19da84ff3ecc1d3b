"""What a person left open is decided here: the network's parts, the batch, the epochs."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from addnorm.config import ModelConfig
from addnorm.data.table.bins import make_edges
from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Array
from addnorm.errors import ConfigError
from addnorm.models.tabular import TabularConfig, trunk_of
from addnorm.tabular.fitting import Plan

if TYPE_CHECKING:
    from addnorm.tabular.base import TableEstimator

TRUNK = (
    *("width", "depth", "heads", "ffn_width", "addnorm", "addnorm_options", "norm"),
    *("dropout", "attention_dropout", "ffn_dropout"),
)
"""Parameters that are fields of the trunk's configuration."""


WHOLE, MANY = (int, np.integer), (int, float, np.integer, np.floating)
RANGES: dict[str, tuple[tuple[type[Any], ...], float, float]] = {
    **{name: (WHOLE, 1, math.inf) for name in ("width", "depth", "heads", "ffn_width", "members")},
    **{name: (WHOLE, 1, math.inf) for name in ("rare", "batch_size", "epochs")},
    "patience": (WHOLE, 0, math.inf),
    **{name: (MANY, 0, 1) for name in ("dropout", "attention_dropout", "ffn_dropout", "warmup")},
    **{name: (MANY, 0, 1) for name in ("drop_cells", "swap_cells", "ema", "valid")},
    **{name: (MANY, 0, math.inf) for name in ("learning_rate", "weight_decay", "minutes")},
}
"""Parameters that are numbers: of which types, and from where to where."""


def need_ranges(asked: "TableEstimator") -> None:
    """Raise ConfigError where a parameter is no number, or one that cannot be."""
    for name, (types, low, high) in RANGES.items():
        value: Any = getattr(asked, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:
            what = "a whole number, " if types is WHOLE else ""
            ends = f"{low:g} or more" if math.isinf(high) else f"between {low:g} and {high:g}"
            raise ConfigError(f"{name} must be {what}{ends}: got {value!r}. Leave it out.")
    for name in ("embedding_options", "addnorm_options"):
        if not isinstance(value := getattr(asked, name, None), dict | None):
            raise ConfigError(
                f"{name} must be a table of names and values: got {value!r}. Leave it out."
            )


def choose_network(
    asked: "TableEstimator",
    table: EncodedTable,
    target: Array,
    bins: str,
    classes: int,
    trunk: ModelConfig | None = None,
) -> TabularConfig:
    """Return the network for rows like these; edges of bins are learnt from them."""
    options = dict(asked.embedding_options or {})
    embedding = asked.embedding or asked.number_embedding
    if embedding == "piecewise" and table.numbers.shape[1]:
        options["edges"] = make_edges(
            table.numbers.numpy(),
            target,
            kind=bins,
            classes=bool(classes),
            bins=options.pop("bins", 48),
            seed=asked.seed_,
        )
    return TabularConfig(
        kind=asked.kind,
        numbers=table.numbers.shape[1],
        categories=asked.encoder_.sizes,
        outputs=classes if classes > 2 else 1,
        trunk=trunk or _trunk(asked),
        embedding=embedding,
        embedding_options=options,
        members=asked.members,
    )


def _trunk(asked: "TableEstimator") -> ModelConfig:
    """The published trunk, with the parameters that were given."""
    given = {name: getattr(asked, name) for name in TRUNK if getattr(asked, name) is not None}
    if asked.kind == "ft" and asked.width is not None:
        given.setdefault("ffn_width", round(asked.width * 4 / 3))
    return trunk_of(asked.kind, **given)


def choose_batch(rows: int) -> int:
    """Return the rows of a batch for a table of so many rows."""
    sizes = ((2_000, 32), (10_000, 128), (50_000, 256), (10**18, 512))
    return next(size for most, size in sizes if rows <= most)


def choose_epochs(rows: int, batch: int, held_out: bool) -> int:
    """Return the largest number of passes over a table; early stopping ends most before."""
    return int(np.clip(20_000 // -(-rows // batch), 10, 100 if held_out else 30))


def choose_plan(asked: "TableEstimator", rows: int, held_out: bool) -> Plan:
    """Return how to train: batch and epochs from the number of rows, where they are not set."""
    batch = asked.batch_size or choose_batch(rows)
    epochs = asked.epochs or choose_epochs(rows, batch, held_out)
    return Plan(
        batch=batch,
        epochs=epochs,
        rate=asked.rate if asked.learning_rate is None else asked.learning_rate,
        weight_decay=asked.weight_decay,
        schedule=asked.schedule,
        warmup=asked.warmup,
        patience=asked.patience,
        drop_cells=asked.drop_cells,
        swap_cells=asked.swap_cells,
        ema=asked.ema,
        minutes=asked.minutes,
        seed=asked.seed_,
    )
