"""Monitoring does not change a run; a step that fails is saved as a case and can be replayed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm import Config, ModelConfig, build
from addnorm.clinic.failed_step import is_spike, replay
from addnorm.clinic.training_monitor import (
    TrainingMonitor,
    early_warnings,
    gradient_norms,
    update_signals,
)
from addnorm.errors import ConfigError, SavedError
from addnorm.files import FAILED_STEP, read_document
from addnorm.training.loop import Loop, LoopSettings
from addnorm.training.loss import token_loss
from addnorm.training.optimizer import make_optimizer

CONFIG = ModelConfig(mode="decoder", vocab=19, width=16, depth=2, heads=2, addnorm="pre")


class Copying:
    """A task of random tokens; one batch may be bad, or differ from the others, which are equal."""

    metric, higher_is_better = "loss", False
    config: Config

    def __init__(self, bad: int | None = None, odd: range | None = None) -> None:
        self.bad, self.odd = bad, odd

    def plan(self, epoch: int) -> list[int]:
        return list(range(60))

    def batch(self, part: int) -> dict[str, Tensor]:
        ids = torch.randint(19, (4, 9), generator=torch.Generator().manual_seed(part))
        if self.odd is not None and part not in self.odd:
            ids[:] = 3
        return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "number": torch.tensor(part)}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return batch["targets"].numel()

    def loss(self, model: Any, batch: dict[str, Tensor], total: int) -> Tensor:
        if int(batch["number"]) == self.bad:
            with torch.no_grad():
                model.decoder.stack.blocks[1].sublayers["ffn"].input.bias.fill_(3e38)
        hidden = model.hidden(batch["inputs"])
        smoothing = self.config.train.label_smoothing
        return token_loss(model, hidden, batch["targets"], total=total, smoothing=smoothing)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 0.0}


def run(
    path: Path | None,
    observers: list[Any],
    bad: int | None = None,
    odd: range | None = None,
    accumulate: int = 1,
    smoothing: float = 0.0,
) -> Loop:
    torch.manual_seed(0)
    model = build(CONFIG)
    whole = Config(model=CONFIG).override(f"train.label_smoothing={smoothing}")
    settings = LoopSettings(steps=25, schedule=lambda step: 1.0, accumulate=accumulate)
    optimizer = make_optimizer(model, "adam", lr=1e-3 if odd is None else 1e-2)
    task = Copying(bad, odd)
    task.config = whole
    loop = Loop(model, task, optimizer, settings, run_directory=path, observers=observers)
    if path is not None:
        path.mkdir(exist_ok=True)
        (path / "config.toml").write_text(whole.dump())
    loop.run()
    return loop


@pytest.mark.trains
def test_a_monitored_run_equals_one_that_is_not(tmp_path: Path) -> None:
    clinic = TrainingMonitor(every=5)
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


class Said(TrainingMonitor):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.heard: list[str] = []

    def on_message(self, loop: Any, text: str) -> None:
        self.heard.append(text)


@pytest.mark.trains
def test_a_step_that_is_not_finite_can_be_replayed(tmp_path: Path) -> None:
    clinic = Said(every=100)
    with pytest.raises(ArithmeticError, match="in a row were not finite"):
        run(tmp_path / "run", [clinic], bad=3)
    folder = tmp_path / "run" / "cases" / "step-00000004"
    facts = read_document(folder / "case.json", *FAILED_STEP)
    assert (facts["step"], facts["kind"]) == (4, "not finite")
    where = "decoder.stack.blocks.1.sublayers.ffn"
    assert facts["report"]["first_non_finite"].split(" in ")[1].startswith(where)
    again = replay(folder)
    assert again.report.first_non_finite == facts["report"]["first_non_finite"]
    assert again.text().startswith("step 4: not finite; its loss was not finite. Replayed:")
    assert where in again.text()
    assert sum("addnorm clinic replay" in text for text in clinic.heard) == 3  # of 20 bad steps


@pytest.mark.trains
@pytest.mark.parametrize("accumulate", (1, 2))
def test_a_replayed_spike_has_the_same_loss(tmp_path: Path, accumulate: int) -> None:
    clinic, step = Said(every=100), 23
    odd = range(accumulate * (step - 1), accumulate * step)
    run(tmp_path / "run", [clinic], odd=odd, accumulate=accumulate, smoothing=0.1)
    folder = tmp_path / "run" / "cases" / f"step-{step:08d}"
    facts = read_document(folder / "case.json", *FAILED_STEP)
    assert (facts["step"], facts["kind"]) == (step, "spike") and facts["update"] > 0
    assert len(list(folder.glob("batch-*.safetensors"))) == accumulate
    again = replay(folder)
    assert (again.step, again.kind) == (step, "spike")
    # With dropout, and with the weights as they were: the very loss of the step.
    assert again.report.loss == pytest.approx(again.loss, rel=1e-5)
    assert json.loads(again.json())["report"]["first_non_finite"] is None
    assert f"clinic, step {step}: spike" in clinic.heard[-1]


@pytest.mark.trains
def test_a_run_with_a_case_equals_one_without_monitor(tmp_path: Path) -> None:
    watched, alone = (
        run(tmp_path / "run", [TrainingMonitor(every=5)], odd=range(22, 23)),
        run(None, [], odd=range(22, 23)),
    )
    assert (tmp_path / "run" / "cases").is_dir()
    for one, two in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.trains
def test_signals_of_repeated_steps_are_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    kept = '{"step": 0}\n'
    (folder / "clinic.jsonl").write_text(kept + '{"step": 5}\n{"st')
    run(folder, [TrainingMonitor(every=25)])
    lines = (folder / "clinic.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 10, 25]


def test_a_sharded_model_is_refused() -> None:
    class Part:
        full_tensor = None

    class Model:
        def parameters(self) -> list[Part]:
            return [Part()]

    class Parts:
        model = Model()

    with pytest.raises(
        ConfigError, match=r"in each worker: got run.parallel=fsdp. Try run.parallel"
    ):
        TrainingMonitor().on_begin(Parts())


@pytest.mark.trains
def test_a_damaged_case_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", [TrainingMonitor()], odd=range(22, 23))
    folder = tmp_path / "run" / "cases" / "step-00000023"
    (folder / "random.safetensors").unlink()
    assert replay(folder).step == 23  # without dice, without dropout
    (folder / "case.json").write_text("[1")
    with pytest.raises(SavedError, match=r"case.json' is damaged: it is not JSON"):
        replay(folder)
    (folder / "case.json").unlink()
    assert replay(folder).text().startswith("unknown step: not finite; its loss was not finite.")
    (folder / "batch-0.safetensors").unlink()
    with pytest.raises(SavedError, match="has no batch file"):
        replay(folder)
    other = Config(model=CONFIG.replace(depth=1)).dump()
    (tmp_path / "run" / "config.toml").write_text(other)
    with pytest.raises(SavedError, match=r"do not fit the run's config.toml: "):
        replay(folder)


def test_replaying_a_directory_without_a_case(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"there is no case in .* Try the folder of a step"):
        replay(tmp_path)


@pytest.mark.trains
def test_the_update_ratio_equals_the_step_of_adam() -> None:
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
    assert update_signals(optimizer)["update"] == pytest.approx(expected, rel=1e-4)
    assert update_signals(optimizer)["starved"] == 0
    optimizer.param_groups[0]["eps"] = 1e9
    assert update_signals(optimizer)["starved"] == 1
    optimizer.state[layer.weight]["exp_avg_sq"].zero_()  # never met a gradient
    assert update_signals(optimizer)["starved"] == 0


def test_gradient_norms() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    assert gradient_norms(model) == pytest.approx({"0": (6 * 4) ** 0.5, "1": (6 * 4) ** 0.5})


def test_spikes() -> None:
    calm = [1.0 + 0.01 * (i % 3) for i in range(50)]
    assert is_spike(2.0, calm) and not is_spike(1.2, calm)
    assert not is_spike(2.0, calm[:10]) and not is_spike(float("nan"), calm)


def test_warnings() -> None:
    assert early_warnings({"update": 0.001, "entropy": 0.9, "position_variance": 0.5}) == {}
    bad = {
        "update": 0.5,
        "starved": 0.9,
        "entropy": 0.01,
        "logit": 99.0,
        "position_variance": 0.001,
    }
    assert set(early_warnings(bad)) == set(bad)
    assert "50%" in early_warnings(bad)["update"]
