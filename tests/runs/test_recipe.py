"""What the dials stand for, what is worked out from the data, and who wins."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from addnorm import ModelConfig, build, presets
from addnorm.config import Config
from addnorm.errors import ConfigError
from addnorm.runs.recipe import EPOCHS, LIMITS, MODELS, Wish, fit, settle, suit_reading, suit_size
from addnorm.runs.tasks import TASKS as KINDS
from addnorm.runs.tasks.base import suit_vocab
from tests.runs.common import SMALL, TASKS, lines, wish


def settled(asked: Wish, start: ModelConfig | None = None) -> Config:
    task = KINDS[asked.over(Config()).run.task or ""].read(asked.over(Config()))
    return settle(asked, task, start)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("size", ["tiny", "small", "base", "big"])
def test_every_size_of_every_task_can_be_built(task: str, size: str) -> None:
    import torch

    kind = KINDS[task]
    fields = {"mode": kind.mode, "head": kind.head, "pad": 0}
    fields |= {"outputs": 2} if task == "classify" else {}
    config = ModelConfig(vocab=100).replace(**MODELS[task][size], **fields)
    with torch.device("meta"):
        model = build(config)
    assert model.config == config
    sizes = list(MODELS[task].values())
    assert [row["width"] for row in sizes] == sorted(row["width"] for row in sizes)


@pytest.mark.parametrize("task", TASKS)
def test_the_size_follows_the_data(task: str) -> None:
    (small, _), (medium, _) = LIMITS[task]
    found = [suit_size(task, n) for n in (1, small, small + 1, medium, medium + 1)]
    assert found == ["tiny", "tiny", "small", "small", "base"]


def test_the_size_is_that_of_the_dial_or_of_the_data(data: Path) -> None:
    asked = wish("translate", data)
    table = {name: value for name, value in asked.table.items() if name != "model"}
    found = settled(Wish(table))
    assert found.run.size == "tiny" and found.model.width == 128 and found.model.addnorm == "post"
    found = settled(Wish(table, ["run.size=small"]))
    assert found.run.size == "small" and found.model.width == 256 and found.model.depth == 6


def test_the_later_wins(data: Path) -> None:
    """Recipe, then preset, then file, then settings."""
    table = dict(wish("language", data).table) | {"preset": "gpt2", "model": {"depth": 2}}
    plain = settled(Wish(table))
    assert plain.model.width == 768 == presets.gpt2().model.width and plain.model.norm == "layer"
    assert plain.model.depth == 2 and plain.train.weight_decay == 0.1
    over = settled(Wish(table, ["model.depth=1", "train.weight_decay=0"]))
    assert over.model.depth == 1 and over.train.weight_decay == 0


def test_what_is_left_out_is_worked_out_from_the_data(data: Path) -> None:
    asked = wish("translate", data)
    train = {"batch": 512}
    config = settled(Wish({**asked.table, "train": train}))
    task = KINDS["translate"].read(config)
    task.prepare(config)
    steps = EPOCHS["translate"] * len(task.epoch(0))
    assert config.train.steps == steps and config.train.warmup == steps // 10
    assert config.train.evaluate == config.train.save == steps // 40
    assert config.train.lr == 0.004 and config.train.smoothing == 0.1
    train |= {"accumulate": 2}
    assert settled(Wish({**asked.table, "train": train})).train.steps == round(steps / 2)


@pytest.mark.parametrize(
    ("steps", "schedule", "warmup"),
    [(100, "cosine", 10), (50_000, "cosine", 1000), (100_000, "noam", 4000), (5, "linear", 0)],
)
def test_the_warm_up_follows_the_steps(steps: int, schedule: str, warmup: int) -> None:
    config = Config().override(f"train.schedule={schedule}")
    assert fit(config, steps).train.warmup == warmup
    assert fit(config.override("train.warmup=3"), steps).train.warmup == 3


def test_what_depends_on_the_steps_keeps_what_was_asked() -> None:
    config = fit(Config().override("train.evaluate=7", "train.lr=0.5"), 1000)
    assert (config.train.evaluate, config.train.save, config.train.lr) == (7, 7, 0.5)
    assert fit(Config().override("train.save=9"), 1000).train.save == 9
    assert fit(Config(), 3).train.evaluate == 1


def test_the_data_decide_the_vocabulary(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab must be \d+, which the task and its text"):
        settled(wish("translate", data, "model.vocab=9"))
    with pytest.raises(ConfigError, match=r"model.mode must be 'decoder'.*got 'encoder'"):
        settled(wish("language", data, "model.mode=encoder"))


def test_text_must_fit_the_positions_that_are_learned(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"hold the longest text, of \d+ tokens: got 8. Try data"):
        settled(wish("classify", data, "model.length=8"))
    assert settled(wish("classify", data, "model.length=8", "data.longest=8")).model.length == 8
    longest = max(map(len, lines(120))) + 2
    for length, fits in ((longest, True), (longest - 1, False)):
        asked = wish("classify", data, f"model.length={length}")
        with nullcontext() if fits else pytest.raises(ConfigError, match="hold the longest text"):
            settled(asked)
    with pytest.raises(ConfigError, match=r"got 10. Try data.longest=8\."):
        settled(wish("masked", data, "model.length=10"))
    assert settled(wish("masked", data, "model.length=10", "data.longest=8")).data.longest == 8
    assert settled(wish("translate", data, "model.length=8")).model.length == 8, "sinusoidal"


def test_a_model_to_begin_with_decides_how_much_is_read() -> None:
    begun = ModelConfig(vocab=9, mode="encoder", positions="learned", length=50)
    classify, masked, language = (KINDS[name] for name in ("classify", "masked", "language"))
    empty = Config().data
    assert suit_reading(empty, classify).longest == 256
    assert suit_reading(empty, classify, begun).longest == 50
    assert suit_reading(empty, masked, begun).longest == 48
    assert suit_reading(empty, masked, begun.replace(positions="rotary")).longest == 128
    assert suit_reading(empty.replace(longest=70), masked, begun).longest == 70
    assert suit_reading(empty, language, begun).longest is None


def test_a_model_to_begin_with_gives_its_sizes(data: Path) -> None:
    begun = ModelConfig(
        vocab=9, mode="encoder", head="masked", positions="learned", norm="rms", **SMALL
    )
    table = {**wish("classify", data).table, "model": {}}
    config = settled(Wish(table), begun)
    assert config.model.width == 16 and config.model.norm == "rms"
    assert config.model.head == "class" and config.model.dropout == 0.3


def test_a_file_of_wishes(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "gpt2"\n[train]\nsteps = 3\n')
    asked = Wish.load(path, ["train.steps=4"])
    assert asked.preset == "gpt2" and asked.over(Config()).train.steps == 4
    path.write_text("schema = 99\n")
    with pytest.raises(ConfigError, match=r"run.toml has schema 99; this version reads schema 1"):
        Wish.load(path)
    path.write_text("steps = = 3\n")
    with pytest.raises(ConfigError, match=r"run.toml is not TOML: "):
        Wish.load(path)


def test_the_vocabulary_suits_the_text() -> None:
    assert [suit_vocab(n) for n in (0, 250_000, 375_000, 10**8)] == [500, 1000, 1500, 32000]
    assert suit_vocab(10**8, most=16000) == 16000
