"""Shared by several test files: a small table, and verbs run as from the command line."""

import importlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from addnorm.cli.main import parse

QUICK = ("train.epochs=1", "model.width=8", "model.depth=1", "model.heads=1", "model.ffn_width=8")


def run(*arguments: object) -> None:
    """Run a verb as the command line does; errors are raised."""
    args = parse([str(argument) for argument in arguments])
    module, _, function = args.action.partition(":")
    getattr(importlib.import_module(module), function)(args)


def train(path: Path, *more: object, target: str = "y") -> None:
    """Train a small model for a table, in the folder `run` next to it."""
    settings = [part for setting in QUICK for part in ("--set", setting)]
    shutil.rmtree(path.parent / "run", ignore_errors=True)
    words = ("--target", target, "--out", path.parent / "run", *settings, *more)
    run("train", "table", path, *words)


def rows(count: int = 60, *, unseen: str = "") -> str:
    """Return a table in which age determines yes or no, and job is irrelevant."""
    draw = random.Random(0)
    lines = ["age,job,y"]
    for i in range(count):
        age = draw.randint(18, 80)
        lines.append(f"{age},{unseen or 'ab'[i % 2]},{'yes' if age > 40 else 'no'}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def trained_table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of a table; the run that was trained on it is in the same folder."""
    pytest.importorskip("sklearn")
    path = tmp_path_factory.mktemp("tables") / "t.csv"
    path.write_text(rows())
    train(path)
    yield path
