"""A fitted estimator on disk: one safetensors file that holds all, and two files for people.

    model.safetensors   weights; in its header parameters, network, recipe, classes, figures
    schema.toml         the columns, as `addnorm schema` shows them
    report.json         what was found in training

Nothing that is read is executed, and no training row is kept.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from addnorm.config import Config
from addnorm.data.frame import Array
from addnorm.data.prepare import Recipe
from addnorm.data.schema import Schema
from addnorm.disk import read_text, to_json, write_whole
from addnorm.errors import AddnormError, SavedError
from addnorm.models.saved import read_tensors, write_tensors
from addnorm.models.tabular import TabularConfig, build_tabular
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.estimators import ESTIMATORS

VERSION = 1
WEIGHTS, SCHEMA, REPORT = "model.safetensors", "schema.toml", "report.json"
LEARNT = ("mean_", "scale_", "temperature_", "n_features_in_", "n_iter_", "batch_", "seed_")
"""Plain numbers that fitting leaves."""


def save(estimator: TableEstimator, directory: str | Path) -> None:
    """Write a fitted estimator to a directory that `load` reads."""
    if not hasattr(estimator, "model_"):
        raise SavedError("only a fitted estimator can be saved. Call fit first.")
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SavedError(f"{str(directory)!r} cannot be made: {error.strerror}.") from None
    facts = {
        "kind": "table",
        "table_version": str(VERSION),
        "estimator": type(estimator).__name__,
        "facts": json.dumps(_facts(estimator)),
    }
    write_tensors(directory / WEIGHTS, estimator.model_.state_dict(), facts)
    write_whole(directory / SCHEMA, estimator.recipe_.schema.dump().encode())
    write_whole(directory / REPORT, to_json(estimator.report_).encode())


def load(directory: str | Path) -> TableEstimator:
    """The fitted estimator that `save` wrote.

    >>> load("nowhere")
    Traceback (most recent call last):
    addnorm.errors.SavedError: there is no file 'nowhere/model.safetensors'. Check the path.
    """
    path = Path(directory) / WEIGHTS
    tensors, header = read_tensors(path)
    if header.get("kind") != "table" or header.get("estimator") not in ESTIMATORS:
        raise SavedError(f"{str(directory)!r} does not hold a model for tables.")
    if header.get("table_version") != str(VERSION):
        raise SavedError(
            f"{str(directory)!r} has table version {header.get('table_version')}; this addnorm "
            f"reads {VERSION}. Update addnorm to open it."
        )
    try:
        facts = json.loads(header["facts"])
        estimator = ESTIMATORS[header["estimator"]](**facts["params"])
        config = facts["config"]
        trunk = Config.parse(config.pop("trunk")).model
        config["categories"] = tuple(config["categories"])
        with torch.random.fork_rng(devices=[]):
            model = build_tabular(TabularConfig(trunk=trunk, **config))
        model.load_state_dict(tensors)
        estimator.model_ = model.eval()
        estimator.recipe_ = Recipe.parse(facts["recipe"])
        estimator.report_ = facts["report"]
        for name in LEARNT:
            if name in facts["learnt"]:
                setattr(estimator, name, facts["learnt"][name])
        if facts["names"] is not None:
            estimator.feature_names_in_ = np.array(facts["names"], dtype=object)
        if facts["classes"] is not None:
            values, kind = facts["classes"]
            estimator.classes_ = np.array(values, dtype=kind)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, AddnormError) as error:
        reason = str(error).splitlines()[0]
        raise SavedError(f"{str(directory)!r} cannot be read: {reason}") from None
    _need_same(Path(directory), estimator)
    return estimator


def _need_same(directory: Path, estimator: TableEstimator) -> None:
    """Raise where a file for people is there and is not what the weights were saved with."""
    kept: dict[str, Callable[[str], bool]] = {
        SCHEMA: lambda text: Schema.parse(text) == estimator.recipe_.schema,
        REPORT: lambda text: isinstance(json.loads(text), dict),
    }
    for name, is_same in kept.items():
        path = directory / name
        if path.exists():
            try:
                same = is_same(read_text(path))
            except (AddnormError, ValueError):
                same = False
            if not same:
                raise SavedError(
                    f"{str(path)!r} is not what the model was saved with (edited, or damaged). "
                    "Delete it to use what is inside model.safetensors; to change a column, train "
                    "with --schema."
                )


def _facts(estimator: TableEstimator) -> dict[str, Any]:
    params = {name: value for name, value in estimator.get_params().items() if _is_plain(value)}
    model = estimator.model_.config
    config = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if field.name != "trunk"
    }
    names = getattr(estimator, "feature_names_in_", None)
    classes = getattr(estimator, "classes_", None)
    return {
        "params": params,
        "config": {**config, "trunk": Config(model=model.trunk).dump()},
        "recipe": estimator.recipe_.dump(),
        "learnt": {n: getattr(estimator, n) for n in LEARNT if hasattr(estimator, n)},
        "names": None if names is None else list(names),
        "classes": None if classes is None else [_plain(classes), classes.dtype.str],
        "report": estimator.report_,
    }


def _plain(classes: Array) -> list[Any]:
    """Classes as JSON has them; dates as texts, which numpy reads back."""
    return list((classes.astype(str) if classes.dtype.kind == "M" else classes).tolist())


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
