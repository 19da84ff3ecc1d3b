"""A fitted estimator on disk: all that it knew is known again, and nothing else is touched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.data.guess import infer
from addnorm.errors import SavedError
from addnorm.tabular import FTTransformerClassifier, FTTransformerRegressor, load, save
from addnorm.tabular.saved import LEARNT
from tests.tabular.data import QUICK, people

X, Y = people(60)


@pytest.mark.trains
def test_what_was_learnt_and_found_is_known_again(tmp_path: Path) -> None:
    model = FTTransformerClassifier(**QUICK | {"epochs": 2}).fit(X, Y)
    save(model, tmp_path / "new" / "m")
    torch.manual_seed(4)
    state = torch.get_rng_state()
    again: Any = load(tmp_path / "new" / "m")
    assert torch.equal(torch.get_rng_state(), state), "loading draws nothing"
    for name in LEARNT:
        assert getattr(again, name, None) == getattr(model, name, None), name
    assert again.report_["history"] == model.report_["history"] and not again.model_.training
    assert again.recipe_ == model.recipe_ and again.model_.config == model.model_.config
    assert list(again.feature_names_in_) == list(model.feature_names_in_)
    assert again.classes_.dtype == model.classes_.dtype
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))
    again.fit(X, Y)
    assert again.n_features_in_ == 4, "and it can be fitted anew"


@pytest.mark.trains
def test_columns_without_names_have_none_later(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 3))
    model = FTTransformerRegressor(**QUICK | {"epochs": 1}).fit(rows, rows[:, 0])
    save(model, tmp_path)
    again: Any = load(str(tmp_path))
    assert not hasattr(again, "feature_names_in_") and not hasattr(again, "classes_")
    assert again.n_features_in_ == 3 and again.mean_ == model.mean_
    assert np.array_equal(again.predict(rows), model.predict(rows))


@pytest.mark.trains
def test_parameters_that_are_no_plain_values_are_left_to_their_defaults(tmp_path: Path) -> None:
    given = QUICK | {"epochs": 1, "random_state": np.random.RandomState(0), "schema": infer(X)}
    model = FTTransformerClassifier(**given).fit(X, Y)
    save(model, tmp_path)
    params = load(tmp_path).get_params()
    assert params["random_state"] is None and params["schema"] is None
    assert params["width"] == 16 and params["epochs"] == 1


@pytest.mark.trains
def test_a_model_is_written_over_whole(tmp_path: Path) -> None:
    first = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, Y)
    second = FTTransformerClassifier(**QUICK | {"epochs": 1, "width": 24}).fit(X, Y)
    for model in (first, second):
        save(model, tmp_path)
    assert np.array_equal(load(tmp_path).predict_proba(X), second.predict_proba(X))  # type: ignore[attr-defined]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.safetensors", "schema.toml", "report.json"}


@pytest.mark.trains
def test_a_directory_must_be_possible(tmp_path: Path) -> None:
    model = FTTransformerClassifier(**QUICK | {"epochs": 1}).fit(X, Y)
    (tmp_path / "file").write_text("")
    with pytest.raises(SavedError, match=r"file/m' cannot be made: Not a directory"):
        save(model, tmp_path / "file" / "m")
