"""A run on disk: its configuration, its data's digest, its history, and the best model.

config.toml        the whole configuration
run.json           kind, format version, task, notes on the data and their digest, labels
tokenizer/         or tokenizer-source/, tokenizer-target/; of tables columns.json, schema.toml
best/              the best model so far, as `addnorm.load` reads it
checkpoints/       the state to resume from
metrics.jsonl      one line a step or evaluation
summary.json, summary.html
"""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from addnorm import __version__
from addnorm.config import Config
from addnorm.errors import InputError, SavedError
from addnorm.files import (
    RUN,
    make_directory,
    read_document,
    read_text,
    write_document,
    write_whole,
)
from addnorm.runs.inputs import INPUTS
from addnorm.tasks import TASKS, find_task, tasks_with
from addnorm.tasks.base import BEST, Say, Trained, say_nothing

METRICS, RECORD, CONFIG, SUMMARY = "metrics.jsonl", "run.json", "config.toml", "summary.json"


class VerbError(InputError, AttributeError):
    """A verb of another task; `hasattr` is False for it."""


@dataclass
class RunRecord:
    """What a run keeps besides its configuration: the content of run.json."""

    task: str
    fingerprint: str
    notes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    addnorm: str = __version__


class Run:
    """A run directory, and what can be done with the model in it.

    The verbs of its task are methods: `translate`, `generate`, `classify`, `predict`.

    Attributes
    ----------
    path : the directory.
    task : what it was trained for.
    config : the whole configuration.
    model : the network with the best weights.
    tokenizer : the tokenizer of a text run.
    labels : the classes, if it predicts classes.
    history : every line of metrics.jsonl: losses of steps, figures of evaluations.
    summary : how training ended, as a dict; empty while it runs.
    """

    def __init__(
        self, path: str | Path, config: Config, record: RunRecord, *, int8: bool = False
    ) -> None:
        self.path, self.config, self.record, self.int8 = Path(path), config, record, int8

    @staticmethod
    def open(path: str | Path, *, int8: bool = False) -> "Run":
        """Return the run in a directory.

        >>> Run.open("runs/none")
        Traceback (most recent call last):
        addnorm.errors.SavedError: there is no run in 'runs/none'. Check the path.
        """
        path = Path(path)
        if not (path / RECORD).is_file():
            raise SavedError(f"there is no run in {str(path)!r}. Check the path.")
        record = read_record(path / RECORD)
        return Run(path, Config.load(path / CONFIG), record, int8=int8)

    @staticmethod
    def create(path: str | Path, config: Config, record: RunRecord) -> "Run":
        """Write a new run; run.json is written last, so a directory that has it is complete."""
        run = Run(make_directory(path), config, record)
        run.write()
        return run

    def write(self) -> None:
        """Write configuration and record."""
        write_whole(self.path / CONFIG, self.config.dump().encode())
        write_document(self.path / RECORD, *RUN, asdict(self.record))

    @property
    def task(self) -> str:
        return self.record.task

    @property
    def labels(self) -> list[str]:
        return self.record.labels

    @cached_property
    def trained(self) -> Trained:
        """The trained model with what it needs to answer."""
        if not (self.path / BEST).is_dir():
            raise SavedError(
                f"the run in {str(self.path)!r} has no model yet: it was stopped before its first "
                f"evaluation. Resume it: addnorm train --resume {self.path}"
            )
        kind = find_task(self.task).trained
        return kind(self.path, self.config, self.labels, int8=self.int8)

    def preload(self, model: Any, tokenizers: Any) -> None:
        """Use a text model and tokenizers that are in memory: those of an imported directory."""
        trained: Any = find_task(self.task).trained(
            self.path, self.config, self.labels, int8=self.int8
        )
        trained.preload(model, tokenizers)
        self.__dict__["trained"] = trained

    @property
    def model(self) -> Any:
        return self.trained.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of a text run (of the source, where the sides have their own)."""
        return self._member("tokenizer")

    @property
    def tokenizers(self) -> Any:
        """The tokenizers of a text run, by side."""
        return self._member("tokenizers")

    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> dict[str, Any]:
        """Return figures on data that the run was not trained on, as a plain dict.

        Parameters
        ----------
        data : a file, or a data frame for tables; the run's own held-out texts if left out.
        source, target : the two files of a translation.
        beam : hypotheses of a translation.
        say : receives sentences about what was read.
        """
        return self.trained.evaluate(*data, say=say, **options)

    def export(
        self,
        directory: str | Path,
        *,
        to: str = "huggingface",
        architecture: str | None = None,
        precision: str = "float32",
    ) -> list[str]:
        """Write model and tokenizer as a Hugging Face directory; return what was verified.

        Parameters
        ----------
        directory : where to write; it must not exist, or be empty.
        to : huggingface, peft (the adapters of a run trained with train.lora), ctranslate2 or onnx.
        architecture : a model_type, such as llama; the first that can express it by default.
        precision : of the weights for CTranslate2: float32, int8, ...
        """
        from addnorm.runs.imported import export_run

        options = {"to": to, "precision": precision}
        return export_run(self, directory, architecture=architecture, **options)

    @property
    def history(self) -> list[dict[str, Any]]:
        path = self.path / METRICS
        rows = []
        for line in read_text(path).splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # cut off by a kill
        return rows

    @property
    def summary(self) -> dict[str, Any]:
        path = self.path / SUMMARY
        if not path.exists():
            return {}
        try:
            summary = json.loads(read_text(path))
        except ValueError as error:
            raise SavedError(f"{str(path)!r} is damaged: {error}.") from None
        if not isinstance(summary, dict):
            raise SavedError(f"{str(path)!r} is damaged: it must hold one object.")
        return summary

    def _member(self, name: str) -> Any:
        value = getattr(self.trained, name, None)
        if value is None:
            raise InputError(f"a run trained for {self.task} has no {name}.")
        return value

    def __getattr__(self, name: str) -> Any:
        """A verb of the task; only asked for names that are nothing else."""
        if name.startswith("_") or name in ("path", "record"):
            raise AttributeError(name)
        if name in TASKS[self.task].verbs:
            return getattr(self.trained, name)
        if others := tasks_with(name):
            able = ", ".join(TASKS[self.task].verbs) or "start other runs"
            raise VerbError(
                f"{str(self.path)!r} was trained for {self.task}: it can {able}, not {name}. "
                f"Train one: addnorm train {others[0]} --help"
            )
        raise AttributeError(f"a run has no attribute {name!r}")

    def __dir__(self) -> Sequence[str]:
        return sorted({*super().__dir__(), *TASKS[self.task].verbs})

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"Run({str(self.path)!r}: {facts})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in {"run": str(self.path), **self._facts()}.items()
        )
        return f"<table>{rows}</table>"

    def _facts(self) -> dict[str, Any]:
        """A few words about the run, for people."""
        summary, model = self.summary, self.config.model
        sizes = f"width {model.width}, depth {model.depth}, {model.addnorm}-norm"
        facts: dict[str, Any] = {"task": self.task, "model": f"{model.mode}, {sizes}"}
        if "parameters" in summary:
            facts["parameters"] = f"{summary['parameters']:,}"
        if summary:
            facts["state"] = "finished" if summary.get("finished") else "stopped"
            for name, value in (summary.get("best") or {}).items():
                if isinstance(value, float):
                    facts[name] = f"{value:.4g}"
        return facts


def read_record(path: Path) -> RunRecord:
    """Return the content of a run.json."""
    content = read_document(path, *RUN)
    try:
        return RunRecord(**content)
    except TypeError as error:
        raise SavedError(f"{str(path)!r} is damaged: {error}.") from None


def require_unused(path: str | Path) -> Path:
    """Return a path that a new run may use: nothing is there, or an empty directory."""
    path = Path(path)
    if (path / RECORD).exists():
        raise SavedError(
            f"{str(path)!r} holds a run already. Choose another --out, or resume it: "
            f"addnorm train --resume {path}"
        )
    if path.exists() and (not path.is_dir() or {entry.name for entry in path.iterdir()} - {INPUTS}):
        raise SavedError(f"{str(path)!r} is not empty. Choose another --out.")
    return path


def runs_in(folder: str | Path) -> list[Path]:
    """Return the runs in a folder, by name."""
    return [record.parent for record in sorted(Path(folder).glob(f"**/{RECORD}"))]


def list_runs(folder: str | Path, on_error: Say = say_nothing) -> list[dict[str, Any]]:
    """Return the task and summary of every run in a folder; unreadable ones go to `on_error`."""
    if not Path(folder).is_dir():
        raise InputError(f"there is no folder {str(folder)!r}. Train something first.")
    rows = []
    for path in runs_in(folder):
        try:
            run = Run.open(path)
            rows.append({"run": str(path), "task": run.task, **run.summary})
        except SavedError as error:
            on_error(str(error))
    return rows
