"""Watching a run changes nothing; a step that breaks leaves a case that can be replayed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm import Config, ModelConfig, build
from addnorm.clinic.case import is_spike, replay
from addnorm.clinic.observer import Clinic, by_block, updates, warnings_of
from addnorm.errors import SavedError
from addnorm.train.loop import Loop, Settings
from addnorm.train.loss import token_loss
from addnorm.train.optimizer import make_optimizer

CONFIG = ModelConfig(mode="decoder", vocab=19, width=16, depth=2, heads=2, addnorm="pre")


class Copying:
    """A task of random tokens; one part may be made bad."""

    metric, higher_is_better = "loss", False

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def plan(self, epoch: int) -> list[int]:
        return list(range(30))

    def batch(self, part: int) -> dict[str, Tensor]:
        ids = torch.randint(19, (4, 9), generator=torch.Generator().manual_seed(part))
        return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "number": torch.tensor(part)}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return batch["targets"].numel()

    def loss(self, model: Any, batch: dict[str, Tensor], total: int) -> Tensor:
        if int(batch["number"]) == self.bad:
            with torch.no_grad():
                model.decoder.stack.blocks[1].sublayers["ffn"].inward.bias.fill_(3e38)
        hidden = model.hidden(batch["inputs"])
        return token_loss(model, hidden, batch["targets"], total=total)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 0.0}


def run(path: Path | None, observers: list[Any], bad: int | None = None) -> Loop:
    torch.manual_seed(0)
    model = build(CONFIG)
    settings = Settings(steps=25, schedule=lambda step: 1.0)
    optimizer = make_optimizer(model, "adam", lr=1e-3)
    loop = Loop(model, Copying(bad), optimizer, settings, run=path, observers=observers)
    if path is not None:
        path.mkdir(exist_ok=True)
        (path / "config.toml").write_text(Config(model=CONFIG).dump())
    loop.run()
    return loop


def test_a_watched_run_is_the_run_unwatched(tmp_path: Path) -> None:
    clinic = Clinic(every=5)
    watched, alone = run(tmp_path / "run", [clinic]), run(None, [])
    for one, two in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert [row["step"] for row in clinic.signals] == [5, 10, 15, 20, 25]
    lines = (tmp_path / "run" / "clinic.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == clinic.signals
    first = clinic.signals[0]
    assert 0 < first["entropy"] <= 1 and 0 < first["dependency"] < 1
    assert set(first["blocks"]) == {
        "tokens",
        "decoder.stack.blocks.0",
        "decoder.stack.blocks.1",
    } | ({"decoder"} & set(first["blocks"]))


class Said(Clinic):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.heard: list[str] = []

    def said(self, loop: Any, text: str) -> None:
        self.heard.append(text)


def test_a_step_that_is_not_finite_is_a_case_that_replays(tmp_path: Path) -> None:
    clinic = Said(every=100)
    with pytest.raises(ArithmeticError, match="in a row were not finite"):
        run(tmp_path / "run", [clinic], bad=3)
    folder = tmp_path / "run" / "cases" / "step-00000004"
    facts = json.loads((folder / "case.json").read_text())
    assert (facts["step"], facts["kind"]) == (4, "not finite")
    where = "decoder.stack.blocks.1.sublayers.ffn"
    assert facts["seen"]["first_bad"].split(" in ")[1].startswith(where)
    again = replay(folder)
    assert again.first_bad == facts["seen"]["first_bad"]
    assert "not finite" in again.text() and where in again.text()
    assert sum("addnorm clinic replay" in text for text in clinic.heard) == 3  # of 20 bad steps


def test_replaying_what_is_no_case_says_so(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"there is no case in .* Try the folder of a step"):
        replay(tmp_path)


def test_update_ratio_is_adams_step() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    for _ in range(3):
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.randn(5, 6)
        layer.bias.grad = torch.randn(5)
        optimizer.step()
    change = (layer.weight.detach() - before).norm()
    expected = float(change / layer.weight.detach().norm())
    assert updates(optimizer)["update"] == pytest.approx(expected, rel=1e-4)
    assert updates(optimizer)["starved"] == 0
    optimizer.param_groups[0]["eps"] = 1e9
    assert updates(optimizer)["starved"] == 1


def test_gradients_by_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    assert by_block(model) == pytest.approx({"0": (6 * 4) ** 0.5, "1": (6 * 4) ** 0.5})


def test_spikes() -> None:
    calm = [1.0 + 0.01 * (i % 3) for i in range(50)]
    assert is_spike(2.0, calm) and not is_spike(1.2, calm)
    assert not is_spike(2.0, calm[:10]) and not is_spike(float("nan"), calm)


def test_warnings() -> None:
    assert warnings_of({"update": 0.001, "entropy": 0.9, "distinct": 0.5}) == {}
    bad = {"update": 0.5, "starved": 0.9, "entropy": 0.01, "logit": 99.0, "distinct": 0.01}
    assert set(warnings_of(bad)) == set(bad)
    assert "50%" in warnings_of(bad)["update"]
