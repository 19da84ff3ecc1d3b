"""Save and load fitted estimators: one complete safetensors file, and two files to read.

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
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from addnorm.config import Config
from addnorm.data.table.encode import DATE_PARTS, NumberRule, TableEncoder
from addnorm.data.table.frame import Array
from addnorm.data.table.scaling import SCALINGS
from addnorm.data.table.schema import Schema, check_form
from addnorm.data.table.text import TextRule
from addnorm.errors import AddnormError, SavedError
from addnorm.files import (
    TABLE_MODEL,
    make_directory,
    nonfinite_to_null,
    read_text,
    to_json,
    write_whole,
)
from addnorm.models.instant_table import InstantPredictor
from addnorm.models.saved import (
    WEIGHTS,
    read_tensors,
    require_matching_tensors,
    require_plausible_depth,
    write_tensors,
)
from addnorm.models.tabular import TabularConfig, TabularModel, build_tabular
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.conformal import is_calibration, is_widening
from addnorm.tabular.estimators import TableClassifier, TableRegressor
from addnorm.tabular.instant import ALL_ESTIMATORS

SCHEMA_FILE, REPORT_FILE = "schema.toml", "report.json"


def _is_finite_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_finite_number(value) and value > 0


def _are_edges(value: Any) -> bool:
    """Whether a value is edges of bins: none, or ascending numbers that are not all equal."""
    if not isinstance(value, list | tuple) or not all(map(_is_finite_number, value)):
        return False
    return not value or (_are_ascending(value) and value[0] < value[-1])


def _are_ascending(values: Sequence[float]) -> bool:
    return all(a <= b for a, b in pairwise(values))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_share(value: Any) -> bool:
    return _is_finite_number(value) and 0 < value < 1


def _is_proportion(value: Any) -> bool:
    return _is_finite_number(value) and 0 <= value <= 1


FITTED_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mean_": (_is_finite_number, "a finite number"),
    "scale_": (_is_positive, "a finite number above 0"),
    "edges_": (_are_edges, "finite numbers in ascending order"),
    "temperature_": (_is_positive, "a finite number above 0"),
    "threshold_": (_is_share, "a number between 0 and 1"),
    "n_features_in_": (_is_count, "a whole number above 0"),
    "n_iter_": (_is_count, "a whole number above 0"),
    "batch_": (_is_count, "a whole number above 0"),
    "seed_": (lambda value: type(value) is int, "a whole number"),
}
"""Numbers that `fit` sets: the test that each must pass, and its description."""
CLASS_DTYPES = "bifuUOM"
"""Kinds of numpy dtype that classes may have."""


def save_estimator(estimator: TableEstimator, directory: str | Path) -> None:
    """Write a fitted estimator to a directory; `load_estimator` reads it."""
    if not hasattr(estimator, "model_"):
        raise SavedError("only a fitted estimator can be saved. Call fit first.")
    directory = make_directory(directory)
    state = estimator.model_.state_dict()
    write_tensors(directory / WEIGHTS, state, *TABLE_MODEL, _content(estimator))
    write_whole(directory / SCHEMA_FILE, estimator.encoder_.schema.dump().encode())
    write_whole(directory / REPORT_FILE, to_json(estimator.report_).encode())


def load_estimator(directory: str | Path) -> TableEstimator:
    """Return the fitted estimator that `save_estimator` wrote.

    >>> load_estimator("nowhere")
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
        require_plausible_depth(config.trunk, tensors, directory)
        with torch.device("meta"):
            blank = _build(config)
    except KeyError as error:
        raise SavedError(f"{str(directory)!r} cannot be loaded: it has no {error}.") from None
    except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise SavedError(f"{str(directory)!r} cannot be loaded: {reason}") from None
    require_matching_tensors(blank, tensors, directory, any_float=False)
    with torch.random.fork_rng(devices=[]):
        estimator.model_ = _build(config).eval()
    estimator.model_.load_state_dict(tensors)
    _require_unedited(directory, estimator)
    return estimator


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────


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
        # Without durations, so that equal runs write equal bytes; report.json has them.
        "report": _without_durations(nonfinite_to_null(estimator.report_)),
    }


def _without_durations(value: Any) -> Any:
    """Return plain values without the fields of dicts that are durations, or threads."""
    if isinstance(value, dict):
        kept = {n: part for n, part in value.items() if not n.endswith(("seconds", "threads"))}
        return {name: _without_durations(part) for name, part in kept.items()}
    return [_without_durations(part) for part in value] if isinstance(value, list) else value


def _plain_classes(classes: Array) -> list[Any]:
    """Return classes as JSON values; dates as texts, which numpy parses."""
    return list((classes.astype(str) if classes.dtype.kind == "M" else classes).tolist())


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


# ── Reading and checking ──────────────────────────────────────────────────────────────────────────


def _fitted(content: dict[str, Any]) -> TableEstimator:
    """Return an estimator with everything that fitting sets, except the network."""
    name = content["estimator"]
    known = ", ".join(ALL_ESTIMATORS)
    _require_field(name in ALL_ESTIMATORS, "estimator", f"one of {known}", name)
    estimator = ALL_ESTIMATORS[name](**content["params"])
    estimator.encoder_ = TableEncoder.parse(content["encoder"])
    estimator.report_ = dict(content["report"])
    for field, value in content["fitted"].items():
        _require_field(field in FITTED_VALUES, "fitted", f"of {', '.join(FITTED_VALUES)}", field)
        test, condition = FITTED_VALUES[field]
        _require_field(test(value), f"fitted.{field}", condition, value)
        setattr(estimator, field, tuple(value) if isinstance(value, list) else value)
    needed = {"n_features_in_", "n_iter_", "batch_", "seed_", "temperature_"}
    needed |= set() if isinstance(estimator, TableClassifier) else {"mean_", "scale_"}
    missing = sorted(needed - content["fitted"].keys())
    _require_field(not missing, "fitted", f"complete, with {', '.join(sorted(needed))}", missing)
    names, features = content["feature_names"], estimator.n_features_in_
    if names is not None:
        is_complete = len(names) == features and all(isinstance(name, str) for name in names)
        _require_field(is_complete, "feature_names", f"{features} texts", names)
        estimator.feature_names_in_ = np.array(names, dtype=object)
    if content["classes"] is not None:
        values, dtype = content["classes"]
        _require_field(np.dtype(dtype).kind in CLASS_DTYPES, "classes", "texts or numbers", dtype)
        estimator.classes_ = np.array(values, dtype=dtype)
    return estimator


def _network(values: dict[str, Any]) -> TabularConfig:
    trunk, sizes = Config.parse(values["trunk"]).model, tuple(values["categories"])
    pairs = tuple(tuple(pair) for pair in values.get("calibration", ()))
    levels = tuple(tuple(pair) for pair in values.get("widening", ()))
    head = {"edges": tuple(values.get("edges", ())), "calibration": pairs, "widening": levels}
    return TabularConfig(**{**values, "trunk": trunk, "categories": sizes, **head})


def _build(config: TabularConfig) -> TabularModel:
    return InstantPredictor(config) if config.kind == "instant" else build_tabular(config)


def _check_encoder(encoder: TableEncoder, config: TabularConfig) -> None:
    """Raise SavedError if the encoder is invalid or does not match the network."""
    kinds = encoder.schema.kinds()
    for i, text in enumerate(encoder.texts):
        _check_text_rule(text, kinds, f"encoder.texts[{i}]")
    scores = {text.column: text.parts for text in encoder.texts}
    for i, rule in enumerate(encoder.numbers):
        _check_number(rule, kinds, scores, f"encoder.numbers[{i}]")
    read = {(rule.column, rule.part) for rule in encoder.numbers}
    are_read = all((column, part) in read for column, parts in scores.items() for part in parts)
    _require_field(are_read, "encoder.numbers", "complete, with every score of a text", read)
    for i, category in enumerate(encoder.categories):
        where, values = f"encoder.categories[{i}]", category.values
        is_category = kinds.get(category.column) == "category"
        _require_field(is_category, f"{where}.column", "a category of the schema", category.column)
        are_texts = all(isinstance(value, str) for value in values)
        is_distinct = are_texts and len(set(values)) == len(values)
        _require_field(is_distinct, f"{where}.values", "different texts", values)
        shares, size = category.shares, category.size
        is_complete = len(shares) == size and all(map(_is_proportion, shares)) and sum(shares) > 0
        condition = f"empty, or {size} numbers from 0 to 1"
        _require_field(not shares or is_complete, f"{where}.shares", condition, shares)
    count = len(encoder.numbers)
    _require_field(
        config.numbers == count, "network.numbers", f"{count}, as in encoder", config.numbers
    )
    sizes = encoder.sizes
    is_same = config.categories == sizes
    _require_field(is_same, "network.categories", f"{sizes}, as in encoder", config.categories)


def _check_text_rule(rule: TextRule, kinds: dict[str, str], where: str) -> None:
    """Raise SavedError if the words and weights of a text do not match."""
    is_text = kinds.get(rule.column) == "text"
    _require_field(is_text, f"{where}.column", "a text of the schema", rule.column)
    are_numbers = all(type(word) is int for word in rule.words)
    is_sorted = are_numbers and all(a < b for a, b in pairwise(rule.words))
    _require_field(is_sorted and len(rule.words) > 0, f"{where}.words", "ascending", rule.words)
    for name, values in (("idf", (rule.idf,)), ("weights", rule.weights)):
        matches = len(values) > 0 and all(
            len(part) == len(rule.words) and all(map(_is_finite_number, part)) for part in values
        )
        _require_field(matches, f"{where}.{name}", "finite numbers, one for each word", values)


def _check_number(
    rule: NumberRule, kinds: dict[str, str], scores: dict[str, list[str]], where: str
) -> None:
    allowed = scores.get(rule.column, [*DATE_PARTS])
    kind = "text" if rule.column in scores else "number" if rule.part is None else "date"
    is_column = kinds.get(rule.column) == kind
    _require_field(is_column, f"{where}.column", f"a {kind} of the schema", rule.column)
    is_part = rule.part in allowed or (rule.part is None and kind == "number")
    _require_field(
        is_part, f"{where}.part", f"null or one of {', '.join(map(repr, allowed))}", rule.part
    )
    is_scaling = rule.scaling in SCALINGS
    _require_field(is_scaling, f"{where}.scaling", f"one of {', '.join(SCALINGS)}", rule.scaling)
    _require_field(_is_finite_number(rule.low), f"{where}.low", "a finite number", rule.low)
    is_high = _is_finite_number(rule.high) and rule.high >= rule.low
    _require_field(is_high, f"{where}.high", f"a finite number of {rule.low} or more", rule.high)
    is_fill = rule.fill is None or _is_finite_number(rule.fill)
    _require_field(is_fill, f"{where}.fill", "null or a finite number", rule.fill)
    is_missing = rule.missing is None or _is_proportion(rule.missing)
    _require_field(is_missing, f"{where}.missing", "null or a number from 0 to 1", rule.missing)
    quantiles = rule.quantiles
    is_sorted = all(map(_is_finite_number, quantiles)) and _are_ascending(quantiles)
    _require_field(
        not quantiles or (is_sorted and len(quantiles) > 1),
        f"{where}.quantiles",
        "empty, or two or more numbers in ascending order",
        quantiles,
    )
    if rule.form:
        check_form(rule.form, "number" if rule.part is None else "date")
    _check_knots(rule, f"{where}.knots")


def _check_knots(rule: NumberRule, where: str) -> None:
    """Raise SavedError if the knots do not match the scaling."""
    knots = rule.knots
    _require_field(all(map(_is_finite_number, knots)), where, "finite numbers", knots)
    if rule.scaling == "none":
        _require_field(not knots, where, "empty for scaling none", knots)
    elif rule.scaling == "quantile":
        is_sorted = len(knots) > 1 and _are_ascending(knots)
        _require_field(is_sorted, where, "two or more numbers in ascending order", knots)
    elif rule.scaling == "standard" and len(knots) == 4:
        is_bounded = knots[1] > 0 and _are_ascending(knots[2:])
        _require_field(is_bounded, where, "a centre, a scale above 0, and ordered bounds", knots)
    else:
        is_pair = len(knots) == 2 and knots[1] > 0
        _require_field(is_pair, where, "a centre and a scale above 0", knots)


def _check_outputs(estimator: TableEstimator, config: TabularConfig) -> None:
    """Raise SavedError if the number of outputs does not match the estimator."""
    kind, outputs = estimator.kind, config.outputs
    _require_field(config.kind == kind, "network.kind", f"{kind!r} for the estimator", config.kind)
    classes = getattr(estimator, "classes_", None)
    if isinstance(estimator, TableRegressor):
        _require_field(classes is None, "classes", "null for a regressor", classes)
        _check_bins(estimator, config)
        return
    _require_field(not config.edges, "network.edges", "empty for a classifier", config.edges)
    labels = [] if classes is None else classes.tolist()
    is_distinct = len(set(labels)) == len(labels) > 1
    _require_field(is_distinct, "classes", "two or more different values", labels)
    expected = 1 if len(labels) == 2 else len(labels)
    condition = f"{expected} for {len(labels)} classes"
    _require_field(outputs == expected, "network.outputs", condition, outputs)


def _check_bins(estimator: TableRegressor, config: TabularConfig) -> None:
    """Raise SavedError if the bins of a regressor, or their calibration, do not match."""
    edges, outputs = config.edges, config.outputs
    is_same = edges == estimator.standardised_edges()
    _require_field(is_same, "network.edges", "the standardised edges of fitted.edges_", edges)
    count = max(len(edges) - 1, 1)
    condition = f"{count} for a regressor with {len(edges)} edges"
    _require_field(outputs == count, "network.outputs", condition, outputs)
    holds = is_calibration(config.calibration) and bool(edges or not config.calibration)
    _require_field(
        holds, "network.calibration", "pairs that ascend from 0 to 1", config.calibration
    )
    holds = is_widening(config.widening) and bool(edges or not config.widening)
    _require_field(holds, "network.widening", "pairs that ascend from 0 to 1", config.widening)


def _require_unedited(directory: Path, estimator: TableEstimator) -> None:
    """Raise SavedError if schema.toml or report.json exists and differs from the weights file."""
    tests: dict[str, Callable[[str], bool]] = {
        SCHEMA_FILE: lambda text: Schema.parse(text) == estimator.encoder_.schema,
        REPORT_FILE: lambda text: isinstance(json.loads(text), dict),
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


def _require_field(holds: bool, field: str, condition: str, value: Any) -> None:
    if not holds:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        raise SavedError(f"{field} must be {condition}: got {shown}.")
