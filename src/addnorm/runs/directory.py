"""A run on disk: what it was asked, what it read, how it went, and the best model it found.

config.toml        the whole configuration, nothing left out
run.json           format, task, notes on the data and their fingerprint, labels
tokenizer/         or tokenizer-source/ and tokenizer-target/
best/              the best model so far, as `addnorm.load` reads it
checkpoints/       the state to go on from
metrics.jsonl      one line a step or evaluation
summary.json, summary.html
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from addnorm import __version__
from addnorm.config import Config
from addnorm.data.tokenizer import Tokenizer
from addnorm.disk import read_text, write_whole
from addnorm.errors import SavedError
from addnorm.models.build import Model
from addnorm.models.saved import load

VERSION = 1
BEST, METRICS, FACTS, CONFIG = "best", "metrics.jsonl", "run.json", "config.toml"


@dataclass
class Facts:
    """What a run must remember besides its configuration."""

    task: str
    fingerprint: str
    notes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    version: int = VERSION
    addnorm: str = __version__


@dataclass(frozen=True)
class Run:
    """A run directory."""

    path: Path
    config: Config
    facts: Facts

    @staticmethod
    def open(path: str | Path) -> "Run":
        """The run in a directory, read strictly.

        >>> Run.open("runs/none")
        Traceback (most recent call last):
        addnorm.errors.SavedError: there is no run in 'runs/none'. Check the path.
        """
        path = Path(path)
        if not (path / FACTS).is_file():
            if (path / "model.safetensors").is_file() and not list(path.glob("config.*")):
                raise SavedError(
                    f"{str(path)!r} holds a model for tables. Try addnorm predict {path} FILE."
                )
            raise SavedError(f"there is no run in {str(path)!r}. Check the path.")
        try:
            table = json.loads(read_text(path / FACTS))
        except ValueError as error:
            raise SavedError(f"{str(path / FACTS)!r} is damaged: {error}.") from None
        if not isinstance(table, dict) or table.get("version") != VERSION:
            given = table.get("version") if isinstance(table, dict) else None
            raise SavedError(
                f"{str(path)!r} is a run of format {given}; this addnorm reads {VERSION}. "
                "Update addnorm to open it."
            )
        try:
            facts = Facts(**table)
        except TypeError as error:
            raise SavedError(f"{str(path / FACTS)!r} is damaged: {error}.") from None
        return Run(path, Config.load(path / CONFIG), facts)

    @staticmethod
    def create(
        path: str | Path, config: Config, facts: Facts, tokenizers: dict[str, Tokenizer]
    ) -> "Run":
        """A new run; run.json is written last, so a directory that has it is whole."""
        path = free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SavedError(f"{str(path)!r} cannot be made: {error.strerror}.") from None
        for side, tokenizer in tokenizers.items():
            tokenizer.save(path / _folder(side))
        run = Run(path, config, facts)
        run.keep()
        return run

    def keep(self) -> None:
        """Write configuration and facts."""
        write_whole(self.path / CONFIG, self.config.dump().encode())
        text = json.dumps(asdict(self.facts), indent=1, ensure_ascii=False)
        write_whole(self.path / FACTS, text.encode() + b"\n")

    def tokenizers(self) -> dict[str, Tokenizer]:
        """The tokenizers it was trained with, by side."""
        sides = [
            side for side in ("text", "source", "target") if (self.path / _folder(side)).is_dir()
        ]
        if not sides:
            raise SavedError(f"the run in {str(self.path)!r} has lost its tokenizer.")
        return {side: Tokenizer.load(self.path / _folder(side)) for side in sides}

    def model(self, device: str | torch.device = "cpu") -> Model:
        """The best model so far."""
        if not (self.path / BEST).is_dir():
            raise SavedError(
                f"the run in {str(self.path)!r} has no model yet: it was stopped before its first "
                f"evaluation. Go on with: addnorm train --resume {self.path}"
            )
        return load(self.path / BEST, device)

    def metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl that is whole."""
        path = self.path / METRICS
        rows = []
        for line in read_text(path).splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # cut off by a kill
        return rows

    def summary(self) -> dict[str, Any]:
        """How it ended, or how far it is."""
        path = self.path / "summary.json"
        if not path.exists():
            return {}
        try:
            found = json.loads(read_text(path))
        except ValueError as error:
            raise SavedError(f"{str(path)!r} is damaged: {error}.") from None
        if not isinstance(found, dict):
            raise SavedError(f"{str(path)!r} is damaged: it must hold one object.")
        return found


def free(path: str | Path) -> Path:
    """A path that a new run may use: nothing is there, or an empty directory."""
    path = Path(path)
    if (path / FACTS).exists():
        raise SavedError(
            f"{str(path)!r} holds a run already. Choose another --out, or go on with it: "
            f"addnorm train --resume {path}"
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SavedError(f"{str(path)!r} is not empty. Choose another --out.")
    return path


def runs_in(folder: str | Path) -> list[Path]:
    """The runs in a folder, by name."""
    return [facts.parent for facts in sorted(Path(folder).glob(f"**/{FACTS}"))]


def _folder(side: str) -> str:
    return "tokenizer" if side == "text" else f"tokenizer-{side}"
