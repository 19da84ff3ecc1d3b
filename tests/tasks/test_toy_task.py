"""A new task is one class and one row in TASKS: all else works as for the other tasks."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import addnorm
from addnorm.cli.main import main
from addnorm.config import Config
from addnorm.errors import InputError
from addnorm.tasks import TASKS, TaskEntry
from addnorm.tasks.base import BEST, DataFacts, Metrics, Say, Task, Trained, say_nothing
from addnorm.training.loop import Batch, Loop


class Line(nn.Module):
    """y = a·x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class TrainedToy(Trained):
    @cached_property
    def model(self) -> Line:
        line = Line()
        line.load_state_dict(load_file(self.path / BEST / "model.safetensors"))
        return line

    @torch.no_grad()
    def extend(self, x: float) -> float:
        """Return the y of the line at x."""
        return float(self.model(torch.tensor([[x]])))

    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> Metrics:
        task = Toy.read(self.config).bind(self.config)
        with torch.no_grad():
            return dict(task.evaluate(self.model))


class Toy(Task):
    """Fit a line through points: a file with "x y" on each line."""

    name, trained, unit, epochs = "toy", TrainedToy, "points", 4.0
    train_defaults: ClassVar[dict[str, Any]] = {"lr": 0.1, "batch": 4}

    def __init__(self, points: Tensor) -> None:
        self.points, self.notes = points, [f"{len(points)} points read."]

    @classmethod
    def read(cls, config: Config, assets: Any = None, start: Any = None) -> Self:
        text = Path(str(config.data.source)).read_text()
        return cls(torch.tensor([[float(v) for v in row.split()] for row in text.splitlines()]))

    @classmethod
    def load_assets(cls, path: Path) -> None:
        return None

    def save_assets(self, path: Path) -> None:
        """There are none."""

    def facts(self) -> DataFacts:
        count = len(self.points)
        batches = lambda config: -(-count // config.train.batch)  # noqa: E731
        return DataFacts(count, batches=batches, longest=lambda config: 1)

    @classmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        base = Config()
        return base.replace(train=base.train.replace(**cls.train_defaults))

    def _bind(self, config: Config) -> None:
        self.size = config.train.batch or 1

    def make_model(self, start: nn.Module | None, say: Say) -> Line:
        torch.manual_seed(self.config.run.seed)
        return Line()

    def empty_model(self) -> Line:
        return Line()

    def save_model(self, model: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        save_file(dict(state), directory / "model.safetensors")

    def epoch(self, number: int) -> Sequence[Tensor]:
        draw = torch.Generator().manual_seed(number)
        return torch.randperm(len(self.points), generator=draw).split(self.size)

    plan = epoch

    def batch(self, part: Tensor) -> Batch:
        x, y = self.points[part].split(1, dim=1)
        return {"x": x, "y": y}

    def tokens(self, batch: Batch) -> int:
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().sum() / total

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        batch = self.batch(torch.arange(len(self.points)))
        return {"loss": float(self.loss(model, batch, len(self.points)))}

    def cost(self, model: nn.Module) -> Metrics:
        return {"parameters": 2, "step_flops": 8 * self.size, "activation_bytes": 0}

    def describe_model(self, parameters: int) -> str:
        return f"a line; {parameters} parameters."

    def contents(self) -> Iterable[object]:
        yield self.points.tolist()


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entry = TaskEntry(
        home=f"{__name__}:Toy",
        help="fit a line through points",
        options={"source": "data.source"},
        verbs=("extend",),
        examples=("addnorm train toy points.txt --out runs/line",),
    )
    monkeypatch.setitem(TASKS, "toy", entry)
    path = tmp_path / "points.txt"
    path.write_text("".join(f"{x / 8} {2 * x / 8 + 1}\n" for x in range(16)))
    return path


@pytest.mark.trains
def test_the_toy_task_is_trained_opened_evaluated_and_used(points: Path, tmp_path: Path) -> None:
    run = addnorm.train("toy", points, out=tmp_path / "run", progress=False)
    assert run.summary["finished"] and run.summary["steps"] == 16 and run.summary["epochs"] >= 3
    assert run.record.notes == ["16 points read."]
    opened = addnorm.open(tmp_path / "run")
    assert opened.task == "toy" and opened.extend(0.5) == run.extend(0.5)
    assert opened.evaluate() == pytest.approx(run.summary["best"])
    assert "extend" in dir(opened) and "task toy" in repr(opened)
    assert "points trained on" in (run.path / "summary.html").read_text()
    with pytest.raises(InputError, match=r"toy: it has no verb 'translate'\. Its verbs: extend"):
        opened.translate("a")


class PowerCut(Exception):
    pass


@pytest.mark.trains
def test_the_toy_task_is_resumed(
    points: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addnorm.train("toy", points, out=tmp_path / "whole", progress=False)
    step = Loop._step

    def cut(loop: Loop, parts: list[Any]) -> None:
        if loop.state.step == 9:
            raise PowerCut
        step(loop, parts)

    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(Loop, "_step", cut)
        addnorm.train("toy", points, out=tmp_path / "cut", progress=False)
    run = addnorm.train(resume=tmp_path / "cut", progress=False)
    assert run.summary["steps"] == 16
    ours, theirs = (
        load_file(tmp_path / name / "best/model.safetensors") for name in ("whole", "cut")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.trains
def test_the_toy_task_on_the_command_line(
    points: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "toy", "--help"])
    output = capsys.readouterr().out
    assert stop.value.code == 0 and "Fit a line through points." in output and "--source" in output
    assert "addnorm train toy points.txt --out runs/line" in output and "--target" not in output
    assert main(["train", "toy", str(points), "--dry-run", "--json"]) == 0
    assert '"parameters": 2' in capsys.readouterr().out
    assert main(["train", "toy", str(points), "--out", str(tmp_path / "run")]) == 0
    output = capsys.readouterr()
    assert "a line; 2 parameters." in output.err and "trained after 16 steps" in output.out
    assert "16 points read." in output.err and "points/s" in output.out
    assert main(["evaluate", str(tmp_path / "run")]) == 0 and capsys.readouterr().out
    assert main(["runs", str(tmp_path)]) == 0 and "toy" in capsys.readouterr().out
    assert main(["train", "toy", "--target", "y"]) == 2
    assert "train toy has no option '--target'." in capsys.readouterr().err
