"""A fitted estimator on disk: one safetensors file that is complete, and two files for people.

    model.safetensors   weights; in its metadata one document (files.py) with parameters, network,
                        encoder, fitted values, classes and report
    schema.toml         the columns, as `addnorm schema` shows them
    report.json         the training report

Nothing that is read is executed. No training row is written, except by instant estimators: the
rows that they predict from are part of the model, encoded as numbers and codes.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from addnorm.config import Config
from addnorm.data.table.encode import DATE_PARTS, NumberRule, TableEncoder
from addnorm.data.table.frame import Array
from addnorm.data.table.parse import parse_form
from addnorm.data.table.scaling import SCALINGS
from addnorm.data.table.schema import Schema
from addnorm.errors import AddnormError, SavedError
from addnorm.files import (
    TABLE_MODEL,
    make_directory,
    nonfinite_to_null,
    read_text,
    to_json,
    write_whole,
)
from addnorm.models.instant import InstantPredictor
from addnorm.models.saved import (
    WEIGHTS,
    read_tensors,
    require_matching_tensors,
    write_tensors,
)
from addnorm.models.tabular import TabularConfig, TabularModel, build_tabular
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.estimators import TableClassifier
from addnorm.tabular.instant import ALL_ESTIMATORS

SCHEMA, REPORT = "schema.toml", "report.json"


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_finite(value) and value > 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


FITTED_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mean_": (_is_finite, "a finite number"),
    "scale_": (_is_positive, "a finite number above 0"),
    "temperature_": (_is_positive, "a finite number above 0"),
    "n_features_in_": (_is_count, "a whole number above 0"),
    "n_iter_": (_is_count, "a whole number above 0"),
    "batch_": (_is_count, "a whole number above 0"),
    "seed_": (lambda value: type(value) is int, "a whole number"),
}
"""Plain numbers that `fit` sets: the test that each must pass, and the test in words."""
CLASS_DTYPES = "bifuUOM"
"""Kinds of numpy dtype that classes may have."""


def save(estimator: TableEstimator, directory: str | Path) -> None:
    """Write a fitted estimator to a directory that `load` reads."""
    if not hasattr(estimator, "model_"):
        raise SavedError("only a fitted estimator can be saved. Call fit first.")
    directory = Path(directory)
    make_directory(directory)
    state = estimator.model_.state_dict()
    write_tensors(directory / WEIGHTS, state, *TABLE_MODEL, _content(estimator))
    write_whole(directory / SCHEMA, estimator.encoder_.schema.dump().encode())
    write_whole(directory / REPORT, to_json(estimator.report_).encode())


def load(directory: str | Path) -> TableEstimator:
    """Return the fitted estimator that `save` wrote.

    >>> load("nowhere")
    Traceback (most recent call last):
    addnorm.errors.SavedError: there is no file 'nowhere/model.safetensors'. Check the path.
    """
    directory = Path(directory)
    tensors, content = read_tensors(directory / WEIGHTS, *TABLE_MODEL)
    try:
        estimator = _fitted(content)
        config = _network(content["network"])
        _check_encoder(estimator.encoder_, config)
        _check_outputs(estimator, config)
        with torch.device("meta"):
            blank = _build(config)
    except KeyError as error:
        raise SavedError(f"{str(directory)!r} cannot be loaded: it has no {error}.") from None
    except (TypeError, ValueError, RuntimeError, AttributeError, AddnormError) as error:
        reason = str(error).splitlines()[0]
        raise SavedError(f"{str(directory)!r} cannot be loaded: {reason}") from None
    require_matching_tensors(blank, tensors, directory, any_float=False)
    with torch.random.fork_rng(devices=[]):
        estimator.model_ = _build(config).eval()
    estimator.model_.load_state_dict(tensors)
    _require_unedited(directory, estimator)
    return estimator


# ── What is written ───────────────────────────────────────────────────────────────────────────────


def _content(estimator: TableEstimator) -> dict[str, Any]:
    model = estimator.model_.config
    network = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name != "trunk"
    }
    names = getattr(estimator, "feature_names_in_", None)
    classes = getattr(estimator, "classes_", None)
    return {
        "estimator": type(estimator).__name__,
        "params": {name: v for name, v in estimator.get_params().items() if _is_plain(v)},
        "network": {**network, "trunk": Config(model=model.trunk).dump()},
        "encoder": estimator.encoder_.dump(),
        "fitted": {n: getattr(estimator, n) for n in FITTED_VALUES if hasattr(estimator, n)},
        "feature_names": None if names is None else list(names),
        "classes": None if classes is None else [_plain_classes(classes), classes.dtype.str],
        "report": nonfinite_to_null(estimator.report_),
    }


def _plain_classes(classes: Array) -> list[Any]:
    """Return classes as JSON has them; dates as texts, which numpy parses."""
    return list((classes.astype(str) if classes.dtype.kind == "M" else classes).tolist())


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


# ── What is read, and must fit together ───────────────────────────────────────────────────────────


def _fitted(content: dict[str, Any]) -> TableEstimator:
    """Return an estimator with everything that fitting sets, except the network."""
    name = content["estimator"]
    known = ", ".join(ALL_ESTIMATORS)
    _require(name in ALL_ESTIMATORS, "estimator", f"one of {known}", name)
    estimator = ALL_ESTIMATORS[name](**content["params"])
    estimator.encoder_ = TableEncoder.parse(content["encoder"])
    estimator.report_ = dict(content["report"])
    for field, value in content["fitted"].items():
        _require(field in FITTED_VALUES, "fitted", f"of {', '.join(FITTED_VALUES)}", field)
        test, condition = FITTED_VALUES[field]
        _require(test(value), f"fitted.{field}", condition, value)
        setattr(estimator, field, value)
    needed = {"n_features_in_", "n_iter_", "batch_", "seed_", "temperature_"}
    needed |= set() if isinstance(estimator, TableClassifier) else {"mean_", "scale_"}
    missing = sorted(needed - content["fitted"].keys())
    _require(not missing, "fitted", f"complete, with {', '.join(sorted(needed))}", missing)
    names, features = content["feature_names"], estimator.n_features_in_
    if names is not None:
        is_complete = len(names) == features and all(isinstance(name, str) for name in names)
        _require(is_complete, "feature_names", f"{features} texts", names)
        estimator.feature_names_in_ = np.array(names, dtype=object)
    if content["classes"] is not None:
        values, dtype = content["classes"]
        _require(np.dtype(dtype).kind in CLASS_DTYPES, "classes", "texts or numbers", dtype)
        estimator.classes_ = np.array(values, dtype=dtype)
    return estimator


def _network(values: dict[str, Any]) -> TabularConfig:
    trunk, sizes = Config.parse(values["trunk"]).model, tuple(values["categories"])
    return TabularConfig(**{**values, "trunk": trunk, "categories": sizes})


def _build(config: TabularConfig) -> TabularModel:
    return InstantPredictor(config) if config.kind == "instant" else build_tabular(config)


def _check_encoder(encoder: TableEncoder, config: TabularConfig) -> None:
    """Raise SavedError where the encoder cannot encode a row, or not for this network."""
    kinds = encoder.schema.kinds()
    for i, rule in enumerate(encoder.numbers):
        _check_number(rule, kinds, f"encoder.numbers[{i}]")
    for i, category in enumerate(encoder.categories):
        where, values = f"encoder.categories[{i}]", category.values
        is_category = kinds.get(category.column) == "category"
        _require(is_category, f"{where}.column", "a category of the schema", category.column)
        are_texts = all(isinstance(value, str) for value in values)
        is_distinct = are_texts and len(set(values)) == len(values)
        _require(is_distinct, f"{where}.values", "different texts", values)
    count = len(encoder.numbers)
    _require(config.numbers == count, "network.numbers", f"{count}, as in encoder", config.numbers)
    sizes = encoder.sizes
    is_same = config.categories == sizes
    _require(is_same, "network.categories", f"{sizes}, as in encoder", config.categories)


def _check_number(rule: NumberRule, kinds: dict[str, str], where: str) -> None:
    kind = "number" if rule.part is None else "date"
    is_column = kinds.get(rule.column) == kind
    _require(is_column, f"{where}.column", f"a {kind} of the schema", rule.column)
    is_part = rule.part is None or rule.part in DATE_PARTS
    _require(
        is_part, f"{where}.part", f"null or one of {', '.join(map(repr, DATE_PARTS))}", rule.part
    )
    is_scaling = rule.scaling in SCALINGS
    _require(is_scaling, f"{where}.scaling", f"one of {', '.join(SCALINGS)}", rule.scaling)
    _require(_is_finite(rule.low), f"{where}.low", "a finite number", rule.low)
    is_high = _is_finite(rule.high) and rule.high >= rule.low
    _require(is_high, f"{where}.high", f"a finite number of {rule.low} or more", rule.high)
    is_fill = rule.fill is None or _is_finite(rule.fill)
    _require(is_fill, f"{where}.fill", "null or a finite number", rule.fill)
    if rule.form:
        parse_form(rule.form)
    _check_knots(rule, f"{where}.knots")


def _check_knots(rule: NumberRule, where: str) -> None:
    """Raise SavedError where the knots are not those of the scaling."""
    knots = rule.knots
    _require(all(map(_is_finite, knots)), where, "finite numbers", knots)
    if rule.scaling == "none":
        _require(not knots, where, "empty for scaling none", knots)
    elif rule.scaling == "quantile":
        is_sorted = len(knots) > 1 and all(a <= b for a, b in pairwise(knots))
        _require(is_sorted, where, "two or more numbers in ascending order", knots)
    else:
        is_pair = len(knots) == 2 and knots[1] > 0
        _require(is_pair, where, "a centre and a scale above 0", knots)


def _check_outputs(estimator: TableEstimator, config: TabularConfig) -> None:
    """Raise SavedError where the network's outputs are not the classes, or not one number."""
    kind, outputs = estimator.kind, config.outputs
    _require(config.kind == kind, "network.kind", f"{kind!r} for the estimator", config.kind)
    classes = getattr(estimator, "classes_", None)
    if not isinstance(estimator, TableClassifier):
        _require(classes is None, "classes", "null for a regressor", classes)
        _require(outputs == 1, "network.outputs", "1 for a regressor", outputs)
        return
    labels = [] if classes is None else classes.tolist()
    is_distinct = len(set(labels)) == len(labels) > 1
    _require(is_distinct, "classes", "two or more different values", labels)
    expected = 1 if len(labels) == 2 else len(labels)
    condition = f"{expected} for {len(labels)} classes"
    _require(outputs == expected, "network.outputs", condition, outputs)


def _require_unedited(directory: Path, estimator: TableEstimator) -> None:
    """Raise SavedError where a file for people exists and differs from the weights file."""
    tests: dict[str, Callable[[str], bool]] = {
        SCHEMA: lambda text: Schema.parse(text) == estimator.encoder_.schema,
        REPORT: lambda text: isinstance(json.loads(text), dict),
    }
    for name, is_same in tests.items():
        path = directory / name
        if path.exists():
            try:
                same = is_same(read_text(path))
            except (AddnormError, ValueError, RecursionError):
                same = False
            if not same:
                raise SavedError(
                    f"{str(path)!r} differs from what {WEIGHTS} holds (it was edited, or damaged). "
                    f"Delete it to use what is inside {WEIGHTS}; to change a column, train with "
                    "--schema."
                )


def _require(holds: bool, field: str, condition: str, value: Any) -> None:
    if not holds:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        raise SavedError(f"{field} must be {condition}: got {shown}.")
