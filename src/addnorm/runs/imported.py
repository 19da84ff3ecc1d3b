"""Runs that begin as Hugging Face directories: opened in memory, or written as a run."""

from pathlib import Path
from typing import Any

from addnorm.errors import InputError
from addnorm.files import make_directory
from addnorm.interop.imported import ImportedDirectory, read_directory
from addnorm.runs.run import Run, RunRecord, require_unused
from addnorm.tasks import find_task
from addnorm.tasks.base import BEST, Say, TextTask, TrainedText, save_tokenizers, say_nothing


def open_directory(path: str | Path, *, int8: bool = False) -> Run:
    """Return a run over a Hugging Face directory; nothing is written."""
    found = read_directory(path)
    run = Run(found.path, found.config, _record(found), int8=int8)
    run.preload(found.model, found.tokenizers)
    return run


def import_model(directory: str | Path, out: str | Path, *, say: Say = say_nothing) -> Run:
    """Write a Hugging Face directory as a run, and return it.

    Parameters
    ----------
    directory : local directory with config.json, safetensors and a tokenizer.
    out : directory for the run; it must not exist, or be empty.
    say : receives sentences about what was read.
    """
    require_unused(out)
    found = read_directory(directory)
    for note in found.notes:
        say(note)
    folder = make_directory(out)
    save_tokenizers(folder, found.tokenizers)
    found.model.save(folder / BEST)
    return Run.create(folder, found.config, _record(found))


def load_start_directory(path: str | Path, kind: Any) -> tuple[Any, Any]:
    """Return model and tokenizers of a directory to start a text task from."""
    if not issubclass(kind, TextTask):
        raise InputError(f"{kind.name} cannot start from the text model in {str(path)!r}.")
    found = read_directory(path)
    return found.model, found.tokenizers


def export_run(run: Run, directory: str | Path, *, architecture: str | None = None) -> list[str]:
    """Write the model and tokenizer of a run as a Hugging Face directory; return what to say.

    Parameters
    ----------
    run : a run of a text task.
    directory : where to write; it must not exist, or be empty.
    architecture : a model_type of Hugging Face; the first that can express the model by default.
    """
    from addnorm.interop.export import export_huggingface

    trained = run.trained
    if not isinstance(trained, TrainedText):
        raise InputError(f"a run trained for {run.task} has no form in Hugging Face.")
    return export_huggingface(
        trained.model,
        trained.tokenizers,
        directory,
        task=run.task,
        labels=run.labels,
        architecture=architecture,
    )


def _record(found: ImportedDirectory) -> RunRecord:
    find_task(found.task)
    return RunRecord(found.task, "imported", found.notes, [*found.labels])
