"""A run directory: configuration, digest of the data, history, and the best model.

config.toml        the complete configuration
run.json           kind, format version, task, notes on the data, their digest, labels, extensions
tokenizer/         or tokenizer-source/ and tokenizer-target/; for a table columns.json, schema.toml
best/              the best model so far, which `addnorm.load` reads
checkpoints/       the states to resume from
metrics.jsonl      lines for steps, evaluations and messages
summary.json, summary.html
"""

import html
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from addnorm import __version__
from addnorm.config import SECTIONS, Config
from addnorm.errors import ConfigError, InputError, SavedError
from addnorm.files import (
    HUGGING_FACE,
    JOURNAL_LIMIT,
    RUN,
    TABLE_MODEL,
    TEXT_MODEL,
    kind_of_directory,
    make_directory,
    parse_typed,
    read_document,
    read_json,
    read_text,
    require_path,
    require_regular,
    require_writable,
    sweep_temporaries,
    write_document,
    write_whole,
)
from addnorm.models.drawing import draw
from addnorm.models.saved import read_config
from addnorm.report.page import picture_html
from addnorm.report.svg import Svg
from addnorm.runs.inputs import INPUTS
from addnorm.runs.lock import LOCK_FILE, stale_lock
from addnorm.section import write_value
from addnorm.tasks import TASKS, find_task, tasks_with, text_task_of
from addnorm.tasks.base import BEST, Say, Trained, say_nothing
from addnorm.training.pace import Extension

RECORD, CONFIG_FILE = "run.json", "config.toml"
METRICS_FILE, SUMMARY_FILE = "metrics.jsonl", "summary.json"
TRIALS = "tune"
"""Folder of a run with the trials of the search for its settings."""


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
    config: str = ""
    """The text of config.toml, which must not change; empty in runs of addnorm 0.1."""
    requested: dict[str, int] = field(default_factory=dict)
    """Those of train.steps, evaluate_every and save_every that the user set."""
    extensions: list[Extension] = field(default_factory=list)
    """Further training, in order."""


class Run:
    """A trained run: its directory, its model, and the verbs of its task as methods.

    The verbs are `translate`, `generate`, `classify`, `label`, `predict`, `predict_proba`,
    `embed`, `classify_by_examples` and `explain`.

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

    Examples
    --------
    >>> from addnorm import train
    >>> small = {"train.steps": 2, "model.width": 16, "model.depth": 1, "model.heads": 2}
    >>> run = train("language", text=["once upon a time"] * 40, progress=False, set=small)
    >>> run.task, run.summary["steps"], len(run.generate("once", tokens=5)) > 0
    ('language', 2, True)
    """

    def __init__(
        self, path: str | Path, config: Config, record: RunRecord, *, int8: bool = False
    ) -> None:
        self.path, self.config, self.record, self.int8 = Path(path), config, record, int8

    @staticmethod
    def open(path: str | Path, *, int8: bool = False) -> "Run":
        """Return the run in a directory; any other model there is a run without a history.

        >>> Run.open("runs/none")
        Traceback (most recent call last):
        addnorm.errors.SavedError: there is no run in 'runs/none'. Check the path.
        """
        path = require_path(path)
        kind = kind_of_directory(path)
        if kind == TEXT_MODEL.kind:
            return Run(path, config := read_config(path), _record_of_model(config), int8=int8)
        if kind == TABLE_MODEL.kind:
            run = Run(path, Config(), RunRecord("table", fingerprint=""), int8=int8)
            run.record.labels = run.trained.class_names
            return run
        if kind == HUGGING_FACE:
            from addnorm.runs.imported import open_directory

            return open_directory(path, int8=int8)
        if not (path / RECORD).is_file():
            if (path / RECORD).exists():
                require_regular(path / RECORD)
            raise SavedError(f"there is no run in {str(path)!r}. {_describe_directory(path, kind)}")
        record = read_run_record(path / RECORD)
        return Run(path, _read_run_config(path, record), record, int8=int8)

    @staticmethod
    def create(path: str | Path, config: Config, record: RunRecord) -> "Run":
        """Write a new run; run.json is written last, so a directory that has it is complete."""
        run = Run(make_directory(path), config, record)
        run.write()
        return run

    def write(self) -> None:
        """Write config.toml, then run.json, which holds the same text."""
        self.record.config = self.config.dump()
        write_whole(self.path / CONFIG_FILE, self.record.config.encode())
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
        trained = task.trained(task, self.path, self.config, self.labels, int8=self.int8)
        trained.find_engine = self._find_engine
        return trained

    def _find_engine(self, name: str | None, decoding: Any) -> Any:
        """Return an engine for translation by its name, or the fastest one; None for torch."""
        from addnorm.runs.engines import engine_for_translation

        return engine_for_translation(self, name, decoding, say_nothing)

    def preload(self, model: Any, assets: Any) -> None:
        """Use a model and its tokenizers or scales in memory: those of an imported directory."""
        task = find_task(self.task)
        trained: Any = task.trained(task, self.path, self.config, self.labels, int8=self.int8)
        trained.preload(model, assets)
        trained.find_engine = self._find_engine
        self.__dict__["trained"] = trained

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
        to : huggingface, peft (the adapters of a run trained with train.lora), ctranslate2, onnx
            or torch.
        architecture : a model_type, such as llama; the first that can express it by default.
        precision : of the weights for CTranslate2: float32, int8, ...
        """
        from addnorm.runs.imported import export_run

        options = {"to": to, "precision": precision}
        return export_run(self, directory, architecture=architecture, **options)

    @property
    def history(self) -> list[dict[str, Any]]:
        path = self.path / METRICS_FILE
        rows = []
        for line in read_text(path, JOURNAL_LIMIT).split("\n") if path.exists() else ():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # truncated when the process was killed
            rows += [row] if isinstance(row, dict) else []
        return rows

    @property
    def summary(self) -> dict[str, Any]:
        path = self.path / SUMMARY_FILE
        if not path.exists():
            return {}
        summary = read_json(path)
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
        return f"<table>{rows}</table>{picture_html(self.drawing())}"

    def drawing(self, length: int | None = None) -> Svg:
        """Return a drawing of the model; see `addnorm draw`. A table's has columns once trained."""
        has_model = (self.path / BEST).is_dir() or not (self.path / RECORD).is_file()
        model = self.model if self.task == "table" and has_model else None
        return draw(self.config, length, model)

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
    record: RunRecord = parse_typed(RunRecord, content, repr(str(path)))
    if record.task not in TASKS:
        raise SavedError(
            f"{str(path)!r} is damaged: task must be one of {', '.join(TASKS)}. Use a backup."
        )
    return record


def _read_run_config(path: Path, record: RunRecord) -> Config:
    """Return the configuration of a run; SavedError if config.toml was changed since."""
    file = path / CONFIG_FILE
    if not record.config:
        return Config.load(file)
    started_with = Config.parse(record.config, source=f"the configuration in {RECORD}")
    if not file.exists():
        return started_with
    try:
        now = Config.load(file)
    except ConfigError as error:
        raise SavedError(
            f"{str(file)!r} was changed since the run started, and cannot be used: {error} To keep "
            f"the old values, delete {CONFIG_FILE}."
        ) from None
    changes = [
        (f"{section}.{item.name}", getattr(before, item.name), getattr(after, item.name))
        for section in SECTIONS
        for before, after in [(getattr(started_with, section), getattr(now, section))]
        for item in fields(before)
        if getattr(before, item.name) != getattr(after, item.name)
    ]
    if not changes:
        return started_with
    shown = "; ".join(
        f"{name}: {_show_value(old)} → {_show_value(new)}" for name, old, new in changes[:5]
    )
    more = f"; and {len(changes) - 5} more" if len(changes) > 5 else ""
    settings = " ".join(f"--set {name}={_show_value(new)}" for name, _, new in changes[:5])
    further = _further_training(started_with, changes)
    extend = f"To train it further: addnorm train --resume {path} {further}. " if further else ""
    raise SavedError(
        f"{str(file)!r} was changed since the run started ({shown}{more}), but a run keeps its "
        f"configuration. {extend}For a new run with the change: addnorm train {record.task} … "
        f"--from {path} {settings}. To keep the old values, delete {CONFIG_FILE}."
    )


def _further_training(config: Config, changes: Sequence[tuple[str, Any, Any]]) -> str:
    """Return the option that extends a run as one changed field asks for; "" if none does."""
    if len(changes) != 1 or None in changes[0]:
        return ""
    name, old, new = changes[0]
    if name == "train.steps" and new > old:
        return f"--steps +{new - old}"
    if name == "train.epochs" and new > old and config.train.steps:
        return f"--steps +{max(1, round(config.train.steps * (new / old - 1)))}"
    if name == "run.minutes" and new > old:
        return f"--minutes +{new - old:g}"
    return ""


def _show_value(value: Any) -> str:
    return "none" if value is None else write_value(value)


TOKENIZER_FOLDERS = ("tokenizer", "tokenizer-source", "tokenizer-target")
ASSETS = (CONFIG_FILE, "columns.json", "schema.toml")
"""Files that are written before run.json, besides the tokenizers."""
_WRITTEN_WHOLE = (
    *(*ASSETS, RECORD, METRICS_FILE, SUMMARY_FILE, "summary.html", "report.json"),
    *("model.safetensors", "tokenizer.json", "tokenizer.model", "signals.jsonl", "race.json"),
)
"""Files of a run that are written under a temporary name."""


def sweep_run(path: Path) -> list[str]:
    """Delete the temporary files that a killed process left in a run; return their names."""
    folders = [path, path / BEST, *(path / name for name in TOKENIZER_FOLDERS)]
    return [name for folder in folders for name in sweep_temporaries(folder, _WRITTEN_WHOLE)]


def sweep_unfinished(path: Path) -> None:
    """Delete the files of a run that was killed before run.json was written.

    Files of other names are left: they are the user's.
    """
    sweep_run(path)
    for name in ASSETS:
        (path / name).unlink(missing_ok=True)
    for name in TOKENIZER_FOLDERS:
        folder = path / name
        for file in ("tokenizer.json", "tokenizer.model"):
            (folder / file).unlink(missing_ok=True)
        with suppress(OSError):  # not there, or with files of the user
            folder.rmdir()


def require_unused(path: str | Path) -> Path:
    """Return a path for a new run; SavedError unless it is free or empty, and can be written to.

    A directory whose run was killed before run.json was written counts as free.
    """
    if path == "":  # an unset variable of a shell; as a Path it would be the working directory
        raise SavedError("--out must name a directory: it is empty. Try runs/mine.")
    path = require_path(path)
    if (path / LOCK_FILE).exists() and not (path / RECORD).exists() and stale_lock(path):
        sweep_unfinished(path)
    if (path / RECORD).exists():
        raise SavedError(
            f"{str(path)!r} already has a run. Choose another --out, or resume it: "
            f"addnorm train --resume {path}"
        )
    if path.exists() and not path.is_dir():
        raise SavedError(f"{str(path)!r} is a file. Choose another --out.")
    expected = {INPUTS, TRIALS, LOCK_FILE}
    others = {entry.name for entry in path.iterdir()} - expected if path.exists() else ()
    if others:
        raise SavedError(
            f"{str(path)!r} is not empty. Choose another --out: it has {sorted(others)[0]!r}."
        )
    return require_writable(path)


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
