"""Watching any loop: the training is unchanged, the signals arrive, trainers are served."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm.clinic import lightning_callback, trainer_callback, watch
from addnorm.clinic.watch import Watch
from addnorm.errors import ConfigError
from tests.clinic.subjects import Language, ids, next_token

CAUSAL = torch.ones(64, 64, dtype=torch.bool).triu(1)


def train(steps: int, watching: bool, **options: Any) -> tuple[nn.Module, Watch | None]:
    torch.manual_seed(0)
    model = Language(CAUSAL)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watcher = watch(model, optimizer, report=None, **options) if watching else None
    for _ in range(steps):
        batch = ids(4, 8)
        loss = next_token(model(batch), batch)
        loss.backward()
        optimizer.step()
        if watcher is not None:
            watcher.step(loss)
        optimizer.zero_grad()
    return model, watcher


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


@pytest.mark.trains
def test_a_watched_training_is_unchanged() -> None:
    writer = Writer()
    plain, _ = train(4, watching=False)
    watched, watcher = train(4, watching=True, every=2, writer=writer)
    for one, two in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, two)
    assert watcher is not None and [row["step"] for row in watcher.signals] == [2, 4]
    last = watcher.signals[-1]
    assert {"loss", "gradient", "update", "dependency", "entropy", "blocks"} <= set(last)
    assert ("clinic/loss", last["loss"], 4) in writer.scalars
    assert any(name == "clinic/gradient/stack.layers.0" for name, _, _ in writer.scalars)
    assert "4 steps, 2 measurements" in repr(watcher) and "<table>" in watcher._repr_html_()
    watcher.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())


def test_losses_that_are_not_finite_are_warned_about() -> None:
    said: list[str] = []
    with watch(Language(CAUSAL), report=said.append) as watching:
        watching.step(float("nan"))
    assert said == ["clinic, step 1: the loss is nan"] == [f"clinic, {watching.warnings[0]}"]
    with pytest.raises(ConfigError, match="every must be at least 1 step: got 0"):
        watch(Language(CAUSAL), every=0)


def test_an_open_run_of_wandb_gets_the_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []

    class Run:
        def log(self, scalars: dict[str, float], commit: bool) -> None:
            logged.append(scalars)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=Run()))  # type: ignore[arg-type]
    with watch(Language(CAUSAL), every=1, report=None) as watching:
        watching.step(2.5)
    assert logged == [{"clinic/gradient": 0.0, "clinic/loss": 2.5}]


def call_back(callback: Any, model: nn.Module, batch: Tensor) -> dict[str, float]:
    """Do what Hugging Face's Trainer does for one step and one log."""
    state = (None, None, None)
    callback.on_train_begin(*state, model=model, optimizer=None)
    loss = next_token(model(batch), batch)
    loss.backward()
    callback.on_pre_optimizer_step(*state, model=model)
    model.zero_grad()
    callback.on_step_end(*state, model=model)
    logs: dict[str, float] = {}
    callback.on_log(*state, logs=logs)
    callback.on_train_end(*state)
    return logs


def test_the_callback_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    callback = trainer_callback(every=1, report=None)
    assert isinstance(callback, transformers.TrainerCallback)
    model = Language(CAUSAL)
    logs = call_back(callback, model, ids(4, 8))
    assert logs["clinic/gradient"] > 0 and logs["clinic/dependency"] > 0
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_the_callback_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the library: a base class, and what a Trainer calls."""
    stand_in = types.ModuleType("lightning.pytorch")
    stand_in.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stand_in)
    logged: list[dict[str, float]] = []
    logger = types.SimpleNamespace(log_metrics=lambda scalars, step: logged.append(scalars))
    trainer = types.SimpleNamespace(optimizers=[], logger=logger, global_step=1)

    class Module(nn.Module):
        """A LightningModule whose forward is never called, only that of its part."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Language(CAUSAL)

    module, batch = Module(), ids(4, 8)
    callback = lightning_callback(every=1, report=None)
    callback.on_train_start(trainer, module)
    loss = next_token(module.net(batch), batch)
    loss.backward()
    callback.on_before_optimizer_step(trainer, module, None)
    callback.on_train_batch_end(trainer, module, {"loss": loss.detach()}, batch, 0)
    callback.on_train_end(trainer, module)
    assert logged[0]["clinic/loss"] == pytest.approx(float(loss.detach()))
    assert logged[0]["clinic/dependency"] > 0
