"""Small invented data with a rule to learn, and runs trained on it: reversed and upper-cased lines,
a book of sentences, texts whose label depends on a syllable, a table whose target is one column.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from addnorm.runs.loggers import Journal
from addnorm.runs.request import RunRequest
from addnorm.runs.train import Outcome, resume_run, start_run
from addnorm.training.loop import Observer
from tests.portable import training

SYLLABLES = ["ba", "be", "bi", "da", "de", "di", "ka", "ke", "ki", "la", "le", "li"]
TASKS = ("translate", "language", "masked", "classify")
ALL_TASKS = (*TASKS, "table")
SMALL = {"width": 16, "depth": 1, "heads": 2, "ffn_width": 32}
"""Sizes of a model that takes one or two milliseconds per step."""
STEPS = {"translate": 60, "language": 40, "masked": 40, "classify": 60, "table": 40}


def lines(count: int = 120, seed: int = 0) -> list[str]:
    """Return distinct lines of 2 to 5 invented words."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 3))) for _ in range(30)]
    distinct: dict[str, None] = {}
    while len(distinct) < count:
        distinct[" ".join(draw.choices(words, k=draw.randint(2, 5)))] = None
    return list(distinct)


def answer(line: str) -> str:
    """Return the translation of a line: its words reversed, in upper case."""
    return " ".join(reversed(line.upper().split()))


def label(line: str) -> str:
    return "yes" if "ba" in line else "no"


def _row(line: str) -> str:
    words = line.split()
    return f"{len(words)},{words[0][:2]},{label(line)}"


def write(folder: Path, count: int = 120, seed: int = 0) -> Path:
    """Write files for every task: two of parallel lines, two of text, and two tables."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = lines(count, seed)
    for name, rows in {
        "a.source": texts,
        "a.target": [answer(line) for line in texts],
        "book.txt": [line.capitalize() + "." for line in texts],
        "texts.txt": texts,
        "labelled.csv": ["text,label", *(f"{line},{label(line)}" for line in texts)],
        "table.csv": ["words,first,label", *(_row(line) for line in texts)],
    }.items():
        (folder / name).write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    return folder


def data_of(task: str, folder: Path) -> dict[str, Any]:
    """Return the data section for a task."""
    if task == "table":
        return {"source": str(folder / "table.csv")}
    if task == "translate":
        fields = {"source": str(folder / "a.source"), "target": str(folder / "a.target")}
    else:
        name = {"language": "book.txt", "masked": "texts.txt", "classify": "labelled.csv"}[task]
        fields = {"source": str(folder / name)}
    return fields | {"tokenizer": "characters"}


def request_for(task: str, folder: Path, *settings: str, **train: Any) -> RunRequest:
    """Return the request for a small run of a task."""
    more = {"batch": 512, "steps": 6, "evaluate_every": 3, "lr": 1e-2} | train
    model = SMALL | ({"length": 32} if task == "language" else {})
    if task == "table":
        more = {"batch": 32} | {name: value for name, value in more.items() if name != "batch"}
    table: dict[str, Any] = {
        "data": data_of(task, folder),
        "model": model,
        "train": more,
        "run": {"task": task, "seed": training.seed},
    }
    if task == "table":
        table["table"] = {"target": "label"}
    return RunRequest(table, settings)


class RecordingObserver(Observer):
    """Records the messages of the loop and the losses of its steps."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.losses: list[float] = []
        self.started = False

    def on_begin(self, loop: Any) -> None:
        self.started = True

    def on_step(self, loop: Any, step: Any) -> None:
        self.losses.append(step.loss)

    def on_message(self, loop: Any, text: str) -> None:
        self.messages.append(text)


def default_observers(path: Path) -> Sequence[Observer]:
    return [Journal(path / "metrics.jsonl")]


def quiet(text: str) -> None:
    """Ignore a message."""


def train(request: RunRequest, out: Path, *observers: Observer) -> Outcome:
    return start_run(
        request, out, observers=lambda path: [*default_observers(path), *observers], say=quiet
    )


def resume(out: Path, *observers: Observer) -> Outcome:
    return resume_run(out, observers=lambda path: [*default_observers(path), *observers], say=quiet)


class Trained:
    """Data and runs of every task; a run is trained when it is first used."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, write(folder / "data")

    def __getitem__(self, task: str) -> Path:
        training.note()
        out = self.folder / task
        if not out.exists():
            steps = STEPS[task]
            with torch.enable_grad():  # the first test that uses it may disable gradients
                train(request_for(task, self.data, steps=steps, evaluate_every=steps // 4), out)
        return out


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    yield Trained(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write(tmp_path_factory.mktemp("data"))
