"""A run directory: configuration, digest of the data, history, and the best model.

config.toml        the complete configuration
run.json           kind, format version, task, notes on the data, their digest, labels
tokenizer/         or tokenizer-source/ and tokenizer-target/; for a table columns.json, schema.toml
best/              the best model so far, which `addnorm.load` reads
checkpoints/       the states to resume from
metrics.jsonl      lines for steps, evaluations and messages
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
from addnorm.errors import ConfigError, InputError, SavedError
from addnorm.files import (
    RUN,
    TABLE_MODEL,
    TEXT_MODEL,
    kind_of_directory,
    make_directory,
    read_document,
    read_text,
    write_document,
    write_whole,
)
from addnorm.models.saved import read_config
from addnorm.runs.inputs import INPUTS
from addnorm.tasks import TASKS, find_task, tasks_with, text_task_of
from addnorm.tasks.base import BEST, Say, Trained, say_nothing

RECORD, CONFIG_FILE = "run.json", "config.toml"
METRICS_FILE, SUMMARY_FILE = "metrics.jsonl", "summary.json"


class VerbError(InputError, AttributeError):
    """Raised for a verb of another task; an AttributeError, so that `hasattr` is False."""


@dataclass
class RunRecord:
    """The content of run.json: what a run stores in addition to its configuration."""

    task: str
    fingerprint: str
    notes: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    addnorm: str = __version__
    requested: dict[str, int | None] = field(default_factory=dict)
    """Steps and intervals as requested; None for those that follow from the data and the time."""
    threads: int | None = None
    """Number of threads at the start, if it was chosen by measurement."""
    extensions: list[dict[str, Any]] = field(default_factory=list)
    """Further training, in order: the fields of `training.pace.Extension`."""


class Run:
    """A trained run: its directory, its model, and the verbs of its task as methods.

    The verbs are `translate`, `generate`, `classify`, `predict`, `predict_proba` and `explain`.

    Parameters
    ----------
    path : the directory.
    config : the complete configuration.
    record : the content of run.json.
    int8 : whether to hold the weights of a text model as 8-bit integers.

    Attributes
    ----------
    task : name of the task.
    model : the network with the best weights.
    tokenizer : the tokenizer of a text run.
    labels : the classes, if it predicts classes.
    history : the lines of metrics.jsonl: losses of steps, metrics of evaluations.
    summary : the result of training, as a dict; empty while it runs.
    """

    def __init__(
        self, path: str | Path, config: Config, record: RunRecord, *, int8: bool = False
    ) -> None:
        self.path, self.config, self.record, self.int8 = Path(path), config, record, int8

    @staticmethod
    def open(path: str | Path, *, int8: bool = False) -> "Run":
        """Return the run in a directory; a saved model is a run without a history.

        >>> Run.open("runs/none")
        Traceback (most recent call last):
        addnorm.errors.SavedError: there is no run in 'runs/none'. Check the path.
        """
        path = Path(path)
        kind = kind_of_directory(path)
        if kind == TEXT_MODEL.kind:
            return Run(path, config := read_config(path), _record_of_model(config), int8=int8)
        if kind == TABLE_MODEL.kind:
            run = Run(path, Config(), RunRecord("table", fingerprint=""), int8=int8)
            run.record.labels = run.trained.class_names
            return run
        if not (path / RECORD).is_file():
            raise SavedError(f"there is no run in {str(path)!r}. {_describe_directory(path, kind)}")
        record = read_run_record(path / RECORD)
        return Run(path, Config.load(path / CONFIG_FILE), record, int8=int8)

    @staticmethod
    def create(path: str | Path, config: Config, record: RunRecord) -> "Run":
        """Write a new run; run.json is written last, so a directory that has it is complete."""
        run = Run(make_directory(path), config, record)
        run.write()
        return run

    def write(self) -> None:
        """Write config.toml, then run.json."""
        write_whole(self.path / CONFIG_FILE, self.config.dump().encode())
        write_document(self.path / RECORD, *RUN, asdict(self.record))

    @property
    def task(self) -> str:
        return self.record.task

    @property
    def labels(self) -> list[str]:
        return self.record.labels

    @cached_property
    def trained(self) -> Trained:
        """The trained model with everything that prediction needs."""
        if (self.path / RECORD).is_file() and not (self.path / BEST).is_dir():
            raise SavedError(
                f"the run in {str(self.path)!r} has no model yet: it was stopped before its first "
                f"evaluation. Resume it: addnorm train --resume {self.path}"
            )
        task = find_task(self.task)
        return task.trained(task, self.path, self.config, self.labels, int8=self.int8)

    @property
    def model(self) -> Any:
        return self.trained.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of a text run; that of the source, if both sides have their own."""
        return self._member("tokenizer")

    @property
    def tokenizers(self) -> Any:
        """The tokenizers of a text run: under "text", or under "source" and "target"."""
        return self._member("tokenizers")

    def evaluate(self, *data: Any, say: Say = say_nothing, **options: Any) -> dict[str, Any]:
        """Return metrics on data that the run was not trained on, as a plain dict.

        Parameters
        ----------
        data : a file, or a data frame for a table; by default the held-out texts of the run.
        source, target : for translation, the file of sources and that of their translations.
        beam : for translation, hypotheses kept in beam search.
        say : receives messages about the data.
        """
        return self.trained.evaluate(*data, say=say, **options)

    @property
    def history(self) -> list[dict[str, Any]]:
        path = self.path / METRICS_FILE
        rows = []
        for line in read_text(path).splitlines() if path.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # truncated when the process was killed
        return rows

    @property
    def summary(self) -> dict[str, Any]:
        path = self.path / SUMMARY_FILE
        if not path.exists():
            return {}
        try:
            summary = json.loads(read_text(path))
        except ValueError as error:
            raise SavedError(f"{str(path)!r} is damaged: {error}.") from None
        if not isinstance(summary, dict):
            raise SavedError(f"{str(path)!r} is damaged: it must have one object.")
        return summary

    def _member(self, name: str) -> Any:
        value = getattr(self.trained, name, None)
        if value is None:
            raise InputError(f"a run trained for {self.task} has no {name}.")
        return value

    def __getattr__(self, name: str) -> Any:
        """Return a verb of the task; Python calls this for names that are not defined."""
        if name.startswith("_") or name in ("path", "record"):
            raise AttributeError(name)
        if name in TASKS[self.task].verbs:
            return getattr(self.trained, name)
        if others := tasks_with(name):
            available = ", ".join(TASKS[self.task].verbs) or "none (other runs can start from it)"
            raise VerbError(
                f"{str(self.path)!r} was trained for {self.task}: it has no verb {name!r}. Its "
                f"verbs: {available}. Try: addnorm train {others[0]} --help"
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
        """Return what `repr` shows of the run."""
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


def _record_of_model(config: Config) -> RunRecord:
    """Return the record of a saved model, whose task follows from its mode and head."""
    try:
        return RunRecord(text_task_of(config.model), fingerprint="")
    except ConfigError as error:
        raise SavedError(f"a model without a task is no run: {error} Use addnorm.load.") from None


def _describe_directory(path: Path, kind: str | None) -> str:
    """Return what was found where a run was expected, and what to do."""
    if kind is not None:
        return f"It is a {kind.replace('-', ' ')}. Open the run that it belongs to."
    inside = [str(run.relative_to(path)) for run in runs_in(path)] if path.is_dir() else []
    if inside:
        more = ", …" if len(inside) > 5 else ""
        return f"It holds the runs {', '.join(inside[:5])}{more}: open one of them."
    return "Check the path."


def read_run_record(path: Path) -> RunRecord:
    """Return the content of a run.json."""
    content = read_document(path, *RUN)
    try:
        return RunRecord(**content)
    except TypeError as error:
        raise SavedError(f"{str(path)!r} is damaged: {error}.") from None


def require_unused(path: str | Path) -> Path:
    """Return a path for a new run; SavedError unless it is free or an empty directory."""
    path = Path(path)
    if (path / RECORD).exists():
        raise SavedError(
            f"{str(path)!r} already has a run. Choose another --out, or resume it: "
            f"addnorm train --resume {path}"
        )
    if path.exists() and (not path.is_dir() or {entry.name for entry in path.iterdir()} - {INPUTS}):
        raise SavedError(f"{str(path)!r} is not empty. Choose another --out.")
    return path


def runs_in(folder: str | Path) -> list[Path]:
    """Return the directories of the runs in a folder and its subfolders, sorted."""
    return [record.parent for record in sorted(Path(folder).glob(f"**/{RECORD}"))]


def list_runs(folder: str | Path, on_error: Say = say_nothing) -> list[dict[str, Any]]:
    """Return task and summary of every run in a folder; `on_error` receives errors of others."""
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
