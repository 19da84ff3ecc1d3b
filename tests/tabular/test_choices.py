"""Defaults that depend on the data, and explicit parameters."""

from typing import Any

import numpy as np
import pytest

from addnorm.data.table.encode import fit_encoder
from addnorm.data.table.infer import infer
from addnorm.errors import ConfigError
from addnorm.tabular import (
    FTTransformerClassifier,
    FTTransformerRegressor,
    SAINTClassifier,
    TabTransformerClassifier,
)
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.choices import (
    MAX_EPOCHS,
    MIN_EPOCHS,
    ROWS_SEEN,
    choose_network,
    choose_settings,
    default_embedding,
    default_parameters,
)
from addnorm.tabular.fitting import FitSettings
from addnorm.tabular.inputs import as_frame
from tests.tabular.data import QUICK, people


def settings_for(
    rows: int, held_out: bool = True, kind: Any = FTTransformerClassifier, **parameters: Any
) -> FitSettings:
    estimator: TableEstimator = kind(**parameters)
    estimator.seed_ = 5
    return choose_settings(estimator, rows, held_out)


@pytest.mark.parametrize(
    ("rows", "batch", "published"),
    (
        (2, 32, 32),
        (2_000, 32, 32),
        (2_001, 64, 128),
        (10_000, 64, 128),
        (10_001, 128, 256),
        (50_000, 128, 256),
        (50_001, 256, 512),
        (3_000_000, 256, 512),
    ),
)
def test_batch_size_grows_with_the_rows(rows: int, batch: int, published: int) -> None:
    assert settings_for(rows).batch == batch
    assert settings_for(rows, effort="published").batch == published
    assert settings_for(rows, kind=SAINTClassifier).batch == published


@pytest.mark.parametrize(("held_out", "most"), ((True, 100), (False, 30)))
@pytest.mark.parametrize("rows", (40, 6_400, 9_000, 40_000, 200_000, 2_000_000))
def test_published_training_is_20_000_steps_at_most_but_10_epochs_at_least(
    rows: int, held_out: bool, most: int
) -> None:
    """Count the epochs up as long as all their steps fit."""
    settings = settings_for(rows, held_out, effort="published")
    steps = len(range(0, rows, settings.batch))
    epochs = 0
    while epochs < most and (epochs + 1) * steps <= 20_000:
        epochs += 1
    assert settings.epochs == max(epochs, 10)


@pytest.mark.parametrize("rows", (40, 6_400, 14_000, 40_000, 2_000_000))
def test_epochs_fall_with_the_rows_and_rise_with_the_effort(rows: int) -> None:
    low, normal, high = (settings_for(rows, effort=e).epochs for e in ("low", "normal", "high"))
    assert 1 <= low < normal < high
    assert MIN_EPOCHS <= normal <= MAX_EPOCHS
    assert normal == MAX_EPOCHS or normal * rows <= max(ROWS_SEEN * 1.05, MIN_EPOCHS * rows)


@pytest.mark.parametrize(
    ("rows", "rate", "swapped"),
    ((300, 1e-3, 0.1), (2_000, 1e-3, 0.1), (2_001, 2e-3, 0.05), (40_000, 2e-3, 0.05)),
)
def test_classes_of_few_rows_are_learnt_slowly_and_of_many_with_fewer_swapped_cells(
    rows: int, rate: float, swapped: float
) -> None:
    settings = settings_for(rows)
    assert (settings.rate, settings.swap_cells) == (rate, swapped)
    numbers = settings_for(rows, kind=FTTransformerRegressor)
    assert (numbers.rate, numbers.swap_cells, numbers.drop_cells) == (2e-3, 0.02, 0.0)
    explicit = settings_for(rows, learning_rate=1e-4, swap_cells=0.3)
    assert (explicit.rate, explicit.swap_cells) == (1e-4, 0.3)


@pytest.mark.parametrize(
    ("rows", "classes", "columns", "embedding"),
    (
        (2_000, True, (4, 0), "piecewise"),
        (2_001, True, (4, 0), "mixed"),
        (2_001, True, (4, 4), "mixed"),
        (2_001, True, (4, 5), "piecewise"),
        (2_001, False, (4, 0), "piecewise"),
    ),
)
def test_waves_embed_numbers_where_numbers_decide_classes_of_many_rows(
    rows: int, classes: bool, columns: tuple[int, int], embedding: str
) -> None:
    assert default_embedding("ft", "normal", classes, rows, *columns) == embedding
    assert default_embedding("ft", "published", classes, rows, *columns) is None
    assert default_embedding("saint", "normal", classes, rows, *columns) is None


def test_the_network_is_that_of_the_training_rows() -> None:
    X = np.random.default_rng(0).normal(size=(2_001, 1))
    frame = as_frame(X)
    estimator = FTTransformerClassifier()
    estimator.seed_, estimator.encoder_ = 0, fit_encoder(frame, infer(frame))
    table = estimator.encoder_.encode(frame)
    network = choose_network(estimator, table, X[:, 0] > 0, "target", classes=2)
    assert (network.embedding, network.members) == ("mixed", 4)


@pytest.mark.parametrize(
    ("rows", "classes", "members"),
    ((2_000, True, 1), (2_001, True, 4), (40_000, True, 4), (500, False, 4), (10_000, False, 1)),
)
def test_members_are_narrow_and_depend_on_the_rows(rows: int, classes: bool, members: int) -> None:
    chosen = default_parameters("ft", "normal", classes, rows)
    width = 64 if members == 1 else 32
    assert (chosen["members"], chosen["width"], chosen["ffn_width"]) == (members, width, 2 * width)


def test_the_schedule_of_the_default_ends_at_0_and_that_of_the_publication_is_constant() -> None:
    assert settings_for(100).schedule == "cosine"
    for settings in (
        settings_for(100, effort="published"),
        settings_for(100, kind=TabTransformerClassifier),
    ):
        assert (settings.schedule, settings.patience, settings.weight_decay) == (
            "constant",
            16,
            1e-5,
        )
    published = FTTransformerClassifier.published(depth=2)
    assert isinstance(published, FTTransformerClassifier)
    assert (published.effort, published.depth) == ("published", 2)


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    (
        ("effort", "much", "effort"),
        ("metric", "rmse", "metric"),
        ("folds", 0, "folds must be"),
        ("class_weight", "even", "class_weight must be"),
    ),
)
def test_parameters_of_the_fit_are_checked(parameter: str, value: Any, message: str) -> None:
    X, y = people(40)
    with pytest.raises(ConfigError, match=message):
        FTTransformerClassifier(**{parameter: value}).fit(X, y)


def test_class_weight_is_for_classifiers() -> None:
    X, _ = people(40)
    with pytest.raises(ConfigError, match="class_weight is for classifiers"):
        FTTransformerRegressor(class_weight="balanced").fit(X, X.columns["noise"])


def test_parameters_are_used() -> None:
    parameters: dict[str, Any] = {
        "batch_size": 7,
        "epochs": 3,
        "learning_rate": 0.0,
        "weight_decay": 0.2,
        "schedule": "cosine",
        "warmup": 0.25,
        "patience": 4,
        "drop_cells": 0.125,
        "swap_cells": 0.375,
        "ema": 0.5,
        "minutes": 1.5,
    }
    settings = settings_for(10_000, **parameters)
    renamed = {"batch_size": "batch", "learning_rate": "rate"}
    for name, value in parameters.items():
        assert getattr(settings, renamed.get(name, name)) == value, name
    assert settings.seed == 5


@pytest.mark.parametrize(
    ("kind", "rate"),
    (
        (FTTransformerClassifier.published, 1e-4),
        (TabTransformerClassifier, 1e-3),
        (SAINTClassifier, 1e-4),
    ),
)
def test_the_default_learning_rate_is_published(kind: Any, rate: float) -> None:
    assert settings_for(100, kind=kind).rate == rate


@pytest.mark.trains
def test_the_network_has_the_requested_sizes() -> None:
    """Check the sizes of every part of a fitted model."""
    X, _ = people(40)
    parameters: dict[str, Any] = {"width": 24, "depth": 3, "heads": 4, "members": 2}
    model = FTTransformerRegressor(**QUICK | parameters | {"epochs": 1}).fit(X, X.columns["noise"])
    config, trunk = model.model_.config, model.model_.config.trunk
    assert (trunk.width, trunk.depth, trunk.heads) == (24, 3, 4) and config.members == 2
    assert trunk.ffn_width == 48, "twice the width"
    published = FTTransformerRegressor.published(**QUICK | parameters | {"epochs": 1})
    assert published.fit(X, X.columns["noise"]).model_.config.trunk.ffn_width == 32, "4/3"
    assert config.numbers == len(model.encoder_.numbers) and config.outputs == 16
    explicit = FTTransformerRegressor(**QUICK | parameters | {"epochs": 1, "ffn_width": 10})
    assert explicit.fit(X, X.columns["noise"]).model_.config.trunk.ffn_width == 10


@pytest.mark.trains
@pytest.mark.parametrize(("classes", "outputs"), ((2, 1), (3, 3), (4, 4)))
def test_two_classes_have_one_output(classes: int, outputs: int) -> None:
    X, _ = people(40)
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, np.arange(40) % classes)
    assert model.model_.config.outputs == outputs
    assert model.predict_proba(X).shape == (40, classes)


@pytest.mark.trains
def test_piecewise_embeddings_without_numeric_columns() -> None:
    """A table of categories alone has no bin edges, and can be fitted."""
    X, y = people(60)
    jobs = X.without("age", "noise", "start")
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}, embedding="piecewise").fit(jobs, y)
    assert model.model_.config.numbers == 0 and model.predict(jobs).shape == (60,)
    with_bins = FTTransformerClassifier(
        **QUICK | {"epochs": 1}, embedding="piecewise", embedding_options={"bins": 3}
    ).fit(X, y)
    edges = with_bins.model_.config.embedding_options["edges"]
    assert len(edges) == len(with_bins.encoder_.numbers) and all(
        2 <= len(row) <= 4 for row in edges
    )


@pytest.mark.trains
def test_bin_edges_separate_the_classes() -> None:
    """Class indices are not numbers: class 2 may lie between 0 and 1."""
    x = np.linspace(0, 1, 110)
    y = np.array([0] * 10 + [2] * 50 + [1] * 50)
    settings = QUICK | {"epochs": 1, "valid": 0.0, "scaling": "none"}
    model = FTTransformerClassifier(
        **settings, embedding="piecewise", embedding_options={"bins": 2}
    ).fit(x[:, None], y)
    (edges,) = model.model_.config.embedding_options["edges"]
    assert edges == pytest.approx([0.0, (x[59] + x[60]) / 2, 1.0], abs=1e-6)
