"""Sizes, fields that are computed from the data, and the precedence of settings."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from addnorm import ModelConfig, build, presets
from addnorm.config import Config
from addnorm.errors import ConfigError
from addnorm.runs.request import RunRequest
from addnorm.runs.resolve import resolve, with_steps
from addnorm.tasks import find_task
from addnorm.tasks.base import TextTask, choose_vocab
from tests.runs.common import SMALL, TASKS, lines, request_for


def text_task(name: str | None) -> type[TextTask]:
    kind = find_task(name)
    assert issubclass(kind, TextTask)
    return kind


def resolved(request: RunRequest, start: ModelConfig | None = None) -> Config:
    task = text_task(request.task).read(request.over(Config()))
    task.start = start
    return resolve(request, task.facts())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("size", ["tiny", "small", "base", "big"])
def test_every_size_of_every_task_can_be_built(task: str, size: str) -> None:
    import torch

    kind = text_task(task)
    fields = {"mode": kind.mode, "head": kind.head, "pad": 0}
    fields |= {"outputs": 2} if task == "classify" else {}
    config = ModelConfig(vocab=100).replace(**kind.sizes[size], **fields)
    with torch.device("meta"):
        model = build(config)
    assert model.config == config
    sizes = list(kind.sizes.values())
    assert [row["width"] for row in sizes] == sorted(row["width"] for row in sizes)


@pytest.mark.parametrize("task", TASKS)
def test_the_size_follows_the_data(task: str) -> None:
    kind = text_task(task)
    (small, _), (medium, _) = kind.size_limits
    sizes = [kind.choose_size(n) for n in (1, small, small + 1, medium, medium + 1)]
    assert sizes == ["tiny", "tiny", "small", "small", "base"]


def test_the_size_is_that_of_the_option_or_of_the_data(data: Path) -> None:
    request = request_for("translate", data)
    table = {name: value for name, value in request.table.items() if name != "model"}
    config = resolved(RunRequest(table))
    assert (
        config.run.size == "tiny" and config.model.width == 128 and config.model.addnorm == "post"
    )
    config = resolved(RunRequest(table, ["run.size=small"]))
    assert config.run.size == "small" and config.model.width == 256 and config.model.depth == 6


def test_later_values_override_earlier_ones(data: Path) -> None:
    """Defaults, then preset, then file, then settings."""
    table = dict(request_for("language", data).table) | {"preset": "gpt2", "model": {"depth": 2}}
    plain = resolved(RunRequest(table))
    assert plain.model.width == 768 == presets.gpt2().model.width and plain.model.norm == "layer"
    assert plain.model.depth == 2 and plain.train.weight_decay == 0.1
    over = resolved(RunRequest(table, ["model.depth=1", "train.weight_decay=0"]))
    assert over.model.depth == 1 and over.train.weight_decay == 0


def test_unset_fields_are_computed_from_the_data(data: Path) -> None:
    request = request_for("translate", data)
    train = {"batch": 512}
    config = resolved(RunRequest({**request.table, "train": train}))
    task = text_task("translate").read(config).bind(config)
    steps = task.epochs * len(task.epoch(0))
    assert config.train.steps == steps and config.train.warmup == steps // 10
    assert config.train.evaluate_every == config.train.save_every == steps // 40
    assert config.train.lr == 0.004 and config.train.label_smoothing == 0.1
    train |= {"accumulate": 2}
    assert resolved(RunRequest({**request.table, "train": train})).train.steps == round(steps / 2)


@pytest.mark.parametrize("task", [*TASKS, "table"])
@pytest.mark.parametrize("epochs", [0.5, 1, 20])
def test_evaluations_cost_at_most_a_fifth_of_the_steps(
    task: str, epochs: float, data: Path
) -> None:
    """Counted in forward passes: a step has three, and a held-out batch one."""
    table = request_for(task, data).table
    train = {"batch": table["train"]["batch"], "epochs": epochs}
    request = RunRequest({**table, "train": train})
    read: Any = find_task(task).read(request.over(Config()))
    config = resolve(request, read.facts())
    steps, every = config.train.steps or 0, config.train.evaluate_every or 1
    if task == "table":
        passes = len(read.split.valid) / train["batch"]
    else:
        passes = len(read.bind(config).held_out())
    assert every == steps or steps // every * passes <= 0.2 * 3 * steps
    assert steps // every <= 40 + 39, "40 at most, but for rounding"
    request = RunRequest({**table, "train": {**train, "evaluate_every": 1}})
    assert resolve(request, read.facts()).train.evaluate_every == 1, "as requested"


@pytest.mark.parametrize(
    ("steps", "schedule", "warmup"),
    [(100, "cosine", 10), (50_000, "cosine", 1000), (100_000, "noam", 4000), (5, "linear", 0)],
)
def test_the_warm_up_follows_the_steps(steps: int, schedule: str, warmup: int) -> None:
    config = Config().override(f"train.schedule={schedule}")
    assert with_steps(config, steps).train.warmup == warmup
    assert with_steps(config.override("train.warmup=3"), steps).train.warmup == 3


def test_with_steps_keeps_requested_values() -> None:
    config = with_steps(Config().override("train.evaluate_every=7", "train.lr=0.5"), 1000)
    assert (config.train.evaluate_every, config.train.save_every, config.train.lr) == (7, 7, 0.5)
    assert with_steps(Config().override("train.save_every=9"), 1000).train.save_every == 9
    assert with_steps(Config(), 3).train.evaluate_every == 1


def test_the_data_decide_the_vocabulary(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab must be \d+, as the task and its data"):
        resolved(request_for("translate", data, "model.vocab=9"))
    with pytest.raises(ConfigError, match=r"model.mode must be 'decoder'.*got 'encoder'"):
        resolved(request_for("language", data, "model.mode=encoder"))


def test_text_must_fit_the_positions_that_are_learned(data: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"at least that of the longest text, \d+ tokens: got 8. Try data"
    ):
        resolved(request_for("classify", data, "model.length=8"))
    assert (
        resolved(request_for("classify", data, "model.length=8", "data.max_length=8")).model.length
        == 8
    )
    longest = max(map(len, lines(120))) + 2
    for length, fits in ((longest, True), (longest - 1, False)):
        request = request_for("classify", data, f"model.length={length}")
        with (
            nullcontext() if fits else pytest.raises(ConfigError, match="that of the longest text")
        ):
            resolved(request)
    with pytest.raises(ConfigError, match=r"got 10. Try data.max_length=8\."):
        resolved(request_for("masked", data, "model.length=10"))
    assert (
        resolved(
            request_for("masked", data, "model.length=10", "data.max_length=8")
        ).data.max_length
        == 8
    )
    assert resolved(request_for("translate", data, "model.length=8")).model.length == 8, (
        "sinusoidal"
    )


def test_a_starting_model_limits_the_length() -> None:
    start_config = ModelConfig(vocab=9, mode="encoder", positions="learned", length=50)
    classify, masked, language = (text_task(name) for name in ("classify", "masked", "language"))
    empty = Config()
    assert classify.complete_data(empty, None).max_length == 256
    assert classify.complete_data(empty, start_config).max_length == 50
    assert masked.complete_data(empty, start_config).max_length == 48
    assert masked.complete_data(empty, start_config.replace(positions="rotary")).max_length == 128
    assert masked.complete_data(empty.override("data.max_length=70"), start_config).max_length == 70
    assert language.complete_data(empty, start_config).max_length is None


def test_a_starting_model_determines_the_sizes(data: Path) -> None:
    start_config = ModelConfig(
        vocab=9, mode="encoder", head="masked", positions="learned", norm="rms", **SMALL
    )
    table = {**request_for("classify", data).table, "model": {}}
    config = resolved(RunRequest(table), start_config)
    assert config.model.width == 16 and config.model.norm == "rms"
    assert config.model.head == "class" and config.model.dropout == 0.3


def test_a_file_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "gpt2"\n[train]\nsteps = 3\n')
    request = RunRequest.load(path, ["train.steps=4"])
    assert request.preset == "gpt2" and request.over(Config()).train.steps == 4
    path.write_text("schema = 99\n")
    with pytest.raises(ConfigError, match=r"run.toml has schema 99; this version reads schema 2"):
        RunRequest.load(path)
    path.write_text("steps = = 3\n")
    with pytest.raises(ConfigError, match=r"run.toml is not TOML: "):
        RunRequest.load(path)


def test_the_vocabulary_size_follows_the_text() -> None:
    assert [choose_vocab(n) for n in (0, 250_000, 375_000, 10**8)] == [500, 1000, 1500, 32000]
    assert choose_vocab(10**8, most=16000) == 16000
