"""The number of threads of an estimator: chosen for `fit` and for prediction, and given back."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from addnorm.errors import ConfigError
from addnorm.models.tabular import TabularModel
from addnorm.tabular import FTTransformerClassifier, FTTransformerRegressor, save_estimator
from addnorm.training.threads import LoadProbe
from tests.tabular.data import QUICK, people


class Threads:
    """A machine of two processors, on which two threads are faster unless it is crowded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.crowded = False
        probe = lambda n: 1.0 if n == 2 and self.crowded else 0.1 / n  # noqa: E731
        monkeypatch.setattr("addnorm.tabular.base.LOAD_PROBE", LoadProbe(probe))
        monkeypatch.setattr("addnorm.training.threads.time_matrix_products", probe)
        monkeypatch.setattr("addnorm.training.threads.gradient_timer", lambda *given: self.gradient)
        monkeypatch.setattr("torch.set_num_threads", self.set)
        monkeypatch.setattr("torch.get_num_threads", lambda: self.threads)
        self.threads = 2
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)

    def gradient(self, threads: int) -> float:
        return 1.0 / threads

    def set(self, threads: int) -> None:
        self.threads = threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


@contextmanager
def followed(machine: Threads) -> Iterator[set[int]]:
    """Collect the numbers of threads with which networks compute."""
    used: set[int] = set()

    def note(module: nn.Module, arguments: Any) -> None:
        if isinstance(module, TabularModel):
            used.add(machine.threads)

    handle = register_module_forward_pre_hook(note)
    try:
        yield used
    finally:
        handle.remove()


@pytest.mark.trains
@pytest.mark.parametrize("crowded", [False, True])
def test_fit_takes_the_faster_number_and_gives_it_back(crowded: bool, machine: Threads) -> None:
    machine.crowded = crowded
    X, y = people(60)
    with followed(machine) as used:
        model = FTTransformerClassifier(**QUICK | {"epochs": 30}).fit(X, y)
    chosen = 1 if crowded else 2
    assert used == {chosen} and machine.threads == 2
    assert model.report_["threads"] == [{"step": 0, "threads": chosen}]


@pytest.mark.trains
def test_n_jobs_is_the_number(machine: Threads) -> None:
    X, y = people(60)
    with followed(machine) as used:
        model = FTTransformerClassifier(**QUICK, n_jobs=3).fit(X, y)
        model.predict(X)
    assert used == {3} and machine.threads == 2
    with followed(machine) as used:
        model.set_params(n_jobs=-1).predict(X)
    assert used == {2}


@pytest.mark.trains
def test_predictions_follow_the_load(machine: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = people(60)
    model = FTTransformerClassifier(**QUICK).fit(X, y)
    with followed(machine) as used:
        whole = model.predict_proba(X)
    assert used == {2}
    with followed(machine) as used:
        model.predict(X.take(range(32)))
    assert used == {1}, "a few rows are over before threads have started"
    machine.crowded = True
    monkeypatch.setattr("addnorm.tabular.base.LOAD_PROBE", LoadProbe())
    monkeypatch.setattr("addnorm.tabular.base.PREDICT_BATCH", 3)  # in parts of 6 rows
    with followed(machine) as used:
        assert model.predict_proba(X) == pytest.approx(whole)
    assert used == {1} and machine.threads == 2


@pytest.mark.parametrize("jobs", [0, -2, 1.5, "all", True])
def test_n_jobs_must_be_a_number_of_threads(jobs: Any) -> None:
    X, y = people(60)
    with pytest.raises(ConfigError, match="n_jobs must be a number of threads, or -1 for all proc"):
        FTTransformerRegressor(n_jobs=jobs).fit(X, range(len(y)))


@pytest.mark.slow
@pytest.mark.trains
def test_two_fits_with_a_fixed_number_of_threads_are_equal(tmp_path: Path) -> None:
    X, y = people(60)
    before = torch.get_num_threads()
    changes = [] if before == 2 else [{"step": 0, "threads": 2}]
    for name in "ab":
        model = FTTransformerClassifier(**QUICK, n_jobs=2).fit(X, y)
        assert model.report_["threads"] == changes
        save_estimator(model, tmp_path / name)
    assert torch.get_num_threads() == before
    one, two = (tmp_path / name / "model.safetensors" for name in "ab")
    assert one.read_bytes() == two.read_bytes()
