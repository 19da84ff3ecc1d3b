"""Saved estimators: everything is restored, and damaged files are refused."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from addnorm import build
from addnorm.config import ModelConfig
from addnorm.data.table.infer import infer
from addnorm.errors import SavedError
from addnorm.files import METADATA_KEY, TABLE_MODEL, TEXT_MODEL, kind_of
from addnorm.models.saved import read_tensors, write_tensors
from addnorm.tabular import (
    FTTransformerClassifier,
    FTTransformerRegressor,
    load_estimator,
    save_estimator,
)
from addnorm.tabular.saved import FITTED_VALUES
from tests.tabular.data import QUICK, people

X, Y = people(60)


@pytest.mark.trains
def test_everything_fitted_is_restored(tmp_path: Path) -> None:
    model = FTTransformerClassifier(**QUICK | {"epochs": 2}).fit(X, Y)
    save_estimator(model, tmp_path / "new" / "m")
    torch.manual_seed(4)
    state = torch.get_rng_state()
    again: Any = load_estimator(tmp_path / "new" / "m")
    assert torch.equal(torch.get_rng_state(), state), "loading draws nothing"
    for name in FITTED_VALUES:
        assert getattr(again, name, None) == getattr(model, name, None), name
    assert again.report_["history"] == model.report_["history"] and not again.model_.training
    assert again.encoder_ == model.encoder_ and again.model_.config == model.model_.config
    assert list(again.feature_names_in_) == list(model.feature_names_in_)
    assert again.classes_.dtype == model.classes_.dtype
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))
    again.fit(X, Y)
    assert again.n_features_in_ == 4, "it can be fitted again"


@pytest.mark.trains
def test_unnamed_columns_stay_unnamed(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 3))
    model = FTTransformerRegressor(**QUICK | {"epochs": 1}).fit(rows, rows[:, 0])
    save_estimator(model, tmp_path)
    again: Any = load_estimator(str(tmp_path))
    assert not hasattr(again, "feature_names_in_") and not hasattr(again, "classes_")
    assert again.n_features_in_ == 3 and again.mean_ == model.mean_
    assert np.array_equal(again.predict(rows), model.predict(rows))


@pytest.mark.trains
def test_parameters_that_json_cannot_hold_get_their_defaults(tmp_path: Path) -> None:
    parameters = QUICK | {"epochs": 1, "random_state": np.random.RandomState(0), "schema": infer(X)}
    model = FTTransformerClassifier(**parameters).fit(X, Y)
    save_estimator(model, tmp_path)
    params = load_estimator(tmp_path).get_params()
    assert params["random_state"] is None and params["schema"] is None
    assert params["width"] == 16 and params["epochs"] == 1


@pytest.mark.trains
def test_saving_again_overwrites_all_files(tmp_path: Path) -> None:
    first = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, Y)
    second = FTTransformerClassifier(**QUICK | {"epochs": 1, "width": 24}).fit(X, Y)
    for model in (first, second):
        save_estimator(model, tmp_path)
    assert np.array_equal(load_estimator(tmp_path).predict_proba(X), second.predict_proba(X))  # type: ignore[attr-defined]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.safetensors", "schema.toml", "report.json"}


@pytest.mark.trains
def test_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, Y)
    (tmp_path / "file").write_text("")
    with pytest.raises(SavedError, match=r"file/m' cannot be created: Not a directory"):
        save_estimator(model, tmp_path / "file" / "m")


# ── Damaged, of another kind or version, or not consistent ────────────────────────────────────────


@pytest.fixture(scope="module")
def fitted() -> FTTransformerClassifier:
    return FTTransformerClassifier(**QUICK | {"epochs": 1, "embedding": "piecewise"}).fit(X, Y)


@pytest.fixture
def path(fitted: FTTransformerClassifier, tmp_path: Path) -> Path:
    save_estimator(fitted, tmp_path)
    return tmp_path / "model.safetensors"


def refuse(path: Path, message: str) -> None:
    with pytest.raises(SavedError, match=message):
        load_estimator(path.parent)


@pytest.mark.trains
def test_a_bit_flipped_anywhere_is_refused(path: Path) -> None:
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = {*range(0, 8 * header, 8 * header // 200), *range(64)}
    places |= set(range(0, 8 * len(content), 8 * len(content) // 200))
    for place in sorted(places):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(bytes(changed))
        with pytest.raises(SavedError):
            load_estimator(path.parent)
    path.write_bytes(content)
    load_estimator(path.parent)


@pytest.mark.trains
@pytest.mark.parametrize("share", (0.0, 0.001, 0.3, 0.9999))
def test_a_truncated_file(share: float, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refuse(path, r"model\.safetensors' is damaged or not a safetensors file: .+\.$")


@pytest.mark.trains
def test_files_that_are_not_regular(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    refuse(path, r"model\.safetensors' is not a regular file\. Check the path\.$")
    path.unlink()
    path.symlink_to("/dev/zero")
    refuse(path, r"model\.safetensors' is not a regular file\. Check the path\.$")


@pytest.mark.trains
def test_files_of_another_kind_are_refused(path: Path) -> None:
    assert kind_of(path) == "table-model"
    with pytest.raises(SavedError, match=r"must be a text model: it is a table model\. Check the "):
        read_tensors(path, *TEXT_MODEL)
    build(ModelConfig(mode="decoder", vocab=5, width=8, depth=1, heads=1)).save(path.parent)
    refuse(path, r"must be a table model: it is a text model\. Check the path\.$")


@pytest.mark.trains
def test_other_formats_are_refused(path: Path) -> None:
    tensors, content = read_tensors(path, *TABLE_MODEL)
    write_tensors(path, tensors, "table-model", 9, content)
    refuse(
        path, r"is a table model of format 9; this addnorm reads format 2\. Train it again, or us"
    )
    old = {"format": "addnorm", "version": "1", "kind": "table", "table_version": "1"}
    save_file(tensors, path, old)
    refuse(
        path, r"is a table model of format 1; this addnorm reads format 2\. Train it again, or us"
    )
    save_file(tensors, path, {METADATA_KEY: "[" * 100_000})
    refuse(path, r"is damaged: it is nested too deeply\. Use a backup\.$")


@pytest.mark.trains
def test_equal_estimators_give_equal_bytes(
    fitted: FTTransformerClassifier, path: Path, tmp_path: Path
) -> None:
    save_estimator(fitted, tmp_path / "again")
    assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    save_estimator(load_estimator(tmp_path), tmp_path / "loaded")
    assert (tmp_path / "loaded" / path.name).read_bytes() == path.read_bytes()


def test_only_a_fitted_estimator_is_saved(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match="only a fitted estimator can be saved"):
        save_estimator(FTTransformerClassifier(), tmp_path)


@pytest.mark.trains
@pytest.mark.parametrize(
    "field",
    ("estimator", "params", "network", "encoder", "fitted", "feature_names", "classes", "report"),
)
def test_a_field_that_is_missing(path: Path, field: str) -> None:
    tensors, content = read_tensors(path, *TABLE_MODEL)
    del content[field]
    write_tensors(path, tensors, *TABLE_MODEL, content)
    refuse(path, f"cannot be loaded: it has no '{field}'")


@pytest.mark.trains
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_temperature_that_is_not_finite_is_not_written(
    fitted: FTTransformerClassifier, tmp_path: Path, value: float
) -> None:
    broken = copy.copy(fitted)
    broken.temperature_ = value
    message = f"cannot be written: fitted.temperature_ must be finite: got {value}"
    with pytest.raises(SavedError, match=message):
        save_estimator(broken, tmp_path)
    assert not any(tmp_path.iterdir())


NUMBER, CATEGORY, FITTED = "encoder.numbers.0.", "encoder.categories.0.", "fitted."


@pytest.mark.trains
@pytest.mark.parametrize(
    ("field", "value", "message"),
    (
        ("estimator", "Pickle", r"estimator must be one of FTTransformerClassifier, .* 'Pickle'"),
        ("estimator", "FTTransformerRegressor", r"fitted must be complete, .*'mean_', 'scale_'"),
        ("estimator", "SAINTClassifier", r"network\.kind must be 'saint' .*: got 'ft'"),
        ("params.wdth", 5, "unexpected keyword argument 'wdth'"),
        (FITTED + "temperature_", 0.0, "temperature_ must be a finite number above 0: got 0.0"),
        (FITTED + "temperature_", -1.0, "temperature_ must be a finite number above 0: got -1"),
        (FITTED + "temperature_", None, "temperature_ must be a finite number above 0: got None"),
        (FITTED + "temperature_", "1", "temperature_ must be a finite number above 0: got '1'"),
        (FITTED + "temperature_", True, "temperature_ must be a finite number above 0: got True"),
        (FITTED + "batch_", 0, "batch_ must be a whole number above 0: got 0"),
        (FITTED + "seed_", 0.5, "seed_ must be a whole number: got 0.5"),
        (FITTED + "more_", 1, "fitted must be of mean_, .*: got 'more_'"),
        ("feature_names", ["age"], r"feature_names must be 4 texts: got \['age'\]"),
        ("classes", None, "classes must be two or more different values: got "),
        ("classes", [["no"], "<U3"], r"classes must be two or more different values: got \['no'\]"),
        ("classes", [["no", "no"], "<U3"], "classes must be two or more different values: got "),
        ("classes", [["a", "b", "c"], "<U3"], "network.outputs must be 3 for 3 classes: got 1"),
        ("classes", [["a", "b"], "V3"], "classes must be texts or numbers: got 'V3'"),
        ("network.outputs", 2, "network.outputs must be 1 for 2 classes: got 2"),
        ("network.numbers", 2, "network.numbers must be 6, as in encoder: got 2"),
        (
            "network.categories",
            [9],
            r"network\.categories must be \(5,\), as in encoder: got \(9,\)",
        ),
        ("network.embedding", "none", "embedding has no choice 'none'"),
        ("network.trunk", "[model]\ndepth = -1", "model.depth must not be negative: got -1"),
        (NUMBER + "knots", [], r"\[0\].knots must be two or more numbers in ascending order: got"),
        (NUMBER + "knots", [2.0, 1.0], r"\[0\].knots must be two or more numbers in ascending or"),
        (NUMBER + "knots", [0.0, None], r"\[0\].knots must be finite numbers: got \(0.0, None\)"),
        (NUMBER + "scaling", "log", r"\[0\].scaling must be one of quantile, .*: got 'log'"),
        (NUMBER + "scaling", "robust", r"\[0\].knots must be a centre and a scale above 0: got"),
        (NUMBER + "scaling", "standard", r"\[0\].knots must be a centre and a scale above 0: got"),
        (NUMBER + "scaling", "none", r"\[0\].knots must be empty for scaling none: got"),
        (NUMBER + "low", None, r"\[0\].low must be a finite number: got None"),
        (
            NUMBER + "high",
            -1e9,
            r"\[0\].high must be a finite number of .* or more: got -1000000000",
        ),
        (NUMBER + "fill", "0", r"\[0\].fill must be null or a finite number: got '0'"),
        (NUMBER + "column", "job", r"\[0\].column must be a number of the schema: got 'job'"),
        (NUMBER + "form", "x", "the form of a number must be "),
        (NUMBER + "missing", 2, r"\[0\].missing must be null or a number from 0 to 1: got 2"),
        (NUMBER + "quantiles", [1.0], r"\[0\].quantiles must be empty, or two or more numbers"),
        (NUMBER + "quantiles", [1.0, 0.0], r"\[0\].quantiles must be empty, or two or more"),
        (CATEGORY + "shares", [1.0], r"\[0\].shares must be empty, or 5 numbers from 0 to 1"),
        (CATEGORY + "shares", [0.0] * 5, r"\[0\].shares must be empty, or 5 numbers from 0"),
        (NUMBER + "extra", 1, "the saved encoder is damaged: .*'extra'"),
        (
            "encoder.numbers.2.part",
            "year",
            r"\[2\].part must be null or one of '', 'day'.*: got 'yea",
        ),
        (CATEGORY + "column", "age", r"\[0\].column must be a category of the schema: got 'age'"),
        (
            CATEGORY + "values",
            ["a", "a"],
            r"\[0\].values must be different texts: got \('a', 'a'\)",
        ),
        (CATEGORY + "values", [1, 2, 3], r"\[0\].values must be different texts: got \(1, 2, 3\)"),
    ),
)
def test_a_field_that_does_not_fit(path: Path, field: str, value: Any, message: str) -> None:
    tensors, content = read_tensors(path, *TABLE_MODEL)
    *parents, last = field.split(".")
    part: Any = content
    for name in parents:
        part = part[int(name)] if isinstance(part, list) else part[name]
    part[last] = value
    write_tensors(path, tensors, *TABLE_MODEL, content)
    refuse(path, f"^'.*' cannot be loaded: .*{message}")


@pytest.mark.trains
@pytest.mark.parametrize(
    ("change", "got"),
    (
        (lambda tensor: tensor.double(), r"float64 \(1, 1, 16\)"),
        (lambda tensor: tensor.int(), r"int32 \(1, 1, 16\)"),
        (lambda tensor: tensor[..., :15].clone(), r"float32 \(1, 1, 15\)"),
        (None, "nothing"),
    ),
)
def test_tensors_that_do_not_fit(
    path: Path, change: Callable[[Tensor], Tensor] | None, got: str
) -> None:
    tensors, content = read_tensors(path, *TABLE_MODEL)
    weight = tensors.pop("head.weight")
    if change is not None:
        tensors["head.weight"] = change(weight)
    write_tensors(path, tensors, *TABLE_MODEL, content)
    refuse(path, rf"configuration: head\.weight must be float32 \(1, 1, 16\): got {got}\.$")


@pytest.mark.trains
def test_a_size_that_is_not_in_the_weights_is_not_allocated(path: Path) -> None:
    tensors, content = read_tensors(path, *TABLE_MODEL)
    trunk = content["network"]["trunk"]
    content["network"]["trunk"] = trunk.replace("width = 16\n", "width = 16000000\n", 1)
    assert content["network"]["trunk"] != trunk
    write_tensors(path, tensors, *TABLE_MODEL, content)
    refuse(path, r"does not match its own configuration: .* must be float32 \(.*16000000\)")


@pytest.mark.trains
def test_values_that_are_not_finite_are_null_in_the_report(
    fitted: FTTransformerClassifier, tmp_path: Path
) -> None:
    reported = copy.copy(fitted)
    reported.report_ = {"loss": float("nan"), "valid": {"nll": float("inf")}}
    reported.minutes = float("inf")
    save_estimator(reported, tmp_path)
    again = load_estimator(tmp_path)
    assert again.report_ == {"loss": None, "valid": {"nll": None}}
    assert json.loads((tmp_path / "report.json").read_text()) == again.report_
    assert again.minutes is None, "as for every parameter that JSON does not have"
