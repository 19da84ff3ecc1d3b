"""Runs that begin as Hugging Face directories: opened in memory, or written as a run."""

from pathlib import Path
from typing import Any

from addnorm.errors import ConfigError, InputError, nearest
from addnorm.files import make_directory
from addnorm.interop.imported import ImportedDirectory, read_directory
from addnorm.interop.peft import read_peft_, write_peft
from addnorm.interop.real_texts import read_real_texts
from addnorm.models.adapters import adapt_, load_adapter_, merge_, read_adapter
from addnorm.models.build import build
from addnorm.runs.run import Run, RunRecord, require_unused
from addnorm.tasks.base import (
    ADAPTER_FILE,
    BEST,
    Say,
    TextTask,
    TrainedText,
    save_tokenizers,
    say_nothing,
)
from addnorm.tasks.image_classifier import TrainedImages, save_image_assets
from addnorm.tasks.images import Images

FORMS = ("huggingface", "peft", "ctranslate2", "onnx", "torch")
"""What a run can be exported as."""


def open_directory(path: str | Path, *, int8: bool = False) -> Run:
    """Return a run over a Hugging Face directory; nothing is written."""
    imported = read_directory(path)
    run = Run(imported.path, imported.config, _record(imported), int8=int8)
    run.preload(imported.model, imported.image_scales or imported.tokenizers)
    return run


def import_model(
    directory: str | Path,
    out: str | Path,
    *,
    adapter: str | Path | None = None,
    say: Say = say_nothing,
) -> Run:
    """Write a Hugging Face directory as a run, and return it.

    Parameters
    ----------
    directory : local directory with config.json, safetensors and a tokenizer.
    out : directory for the run; it must not exist, or be empty.
    adapter : a directory of PEFT with LoRA or DoRA adapters, which are merged into the weights.
    say : receives sentences about what was read.

    Examples
    --------
    >>> from addnorm import train
    >>> small = {"train.steps": 2, "model.width": 16, "model.depth": 1, "model.heads": 2}
    >>> run = train("language", text=["once upon a time"] * 40, progress=False, set=small)
    >>> notes = run.export("exported")
    >>> import_model("exported", "imported").task
    'language'
    """
    require_unused(out)
    imported = read_directory(directory)
    for note in imported.notes:
        say(note)
    if adapter is not None:
        kind = read_peft_(imported.model, adapter)
        merge_(imported.model)
        imported.notes.append(f"{adapter}: adapters of rank {kind.rank} over {kind.roles}, merged.")
        say(imported.notes[-1])
    folder = make_directory(out)
    if imported.image_scales:
        save_image_assets(folder, imported.image_scales)
    else:
        save_tokenizers(folder, imported.tokenizers)
    imported.model.save(folder / BEST)
    return Run.create(folder, imported.config, _record(imported))


def load_start_directory(path: str | Path, kind: Any) -> tuple[Any, Any]:
    """Return model and tokenizers (or scales of pixels) of a directory to start a task from."""
    imported = read_directory(path)
    if imported.image_scales:
        if not issubclass(kind, Images):
            raise InputError(
                f"{kind.name} cannot start from the model for images in {str(path)!r}."
            )
        return imported.model, imported.image_scales
    if not issubclass(kind, TextTask):
        raise InputError(f"{kind.name} cannot start from the text model in {str(path)!r}.")
    return imported.model, imported.tokenizers


def export_run(
    run: Run,
    directory: str | Path,
    *,
    to: str = "huggingface",
    architecture: str | None = None,
    precision: str = "float32",
) -> list[str]:
    """Write a run in a form that other libraries read; return what to say about it.

    Parameters
    ----------
    run : a run of a text task; one of a table is exported as onnx, one of images as huggingface,
        onnx or torch.
    directory : where to write; it must not exist, or be empty.
    to : huggingface (model and tokenizer), peft (the adapters of a run trained with train.lora),
        ctranslate2, onnx or torch (torch.export).
    architecture : a model_type of Hugging Face; the first that can express the model by default.
    precision : of the weights for CTranslate2: float32, int8, ...
    """
    from addnorm.interop.ctranslate2 import export_ctranslate2
    from addnorm.interop.export import export_huggingface
    from addnorm.interop.onnx import export_onnx
    from addnorm.interop.torch_export import export_torch

    if to not in FORMS:
        raise ConfigError(f"a run is not exported as {to!r}. {nearest(to, FORMS)}")
    trained = run.trained
    if run.task == "table" and to == "onnx":
        return _export_table(trained, directory)
    if isinstance(trained, TrainedImages):
        return _export_images(run, trained, directory, to, architecture)
    if not isinstance(trained, TrainedText):
        raise InputError(f"a run trained for {run.task} is exported as onnx only: got {to}.")
    if to == "peft":
        return _export_adapters(run, Path(directory))
    model, tokenizers = trained.model, trained.tokenizers
    texts = read_real_texts(run.config.data, model.config, tokenizers)
    if to in ("onnx", "torch"):
        export = export_onnx if to == "onnx" else export_torch
        return export(model, tokenizers, directory, labels=run.labels, texts=texts)
    if to == "ctranslate2":
        return export_ctranslate2(model, tokenizers, directory, precision=precision, texts=texts)
    return export_huggingface(
        model,
        tokenizers,
        directory,
        task=run.task,
        labels=run.labels,
        architecture=architecture,
        texts=texts,
    )


def _export_table(trained: Any, directory: str | Path) -> list[str]:
    from addnorm.interop.onnx_table import TableGraph, export_onnx_table

    estimator, classes = trained.estimator, trained.class_names
    graph = TableGraph(
        estimator.model_,
        estimator.encoder_.numbers,
        temperature=estimator.temperature_ if classes else None,
        mean=getattr(estimator, "mean_", 0.0),
        scale=getattr(estimator, "scale_", 1.0),
    )
    expected = estimator.predict_proba if classes else estimator.predict
    return export_onnx_table(
        graph, estimator.encoder_, directory, expected=expected, classes=classes
    )


def _export_images(
    run: Run, trained: TrainedImages, directory: str | Path, to: str, architecture: str | None
) -> list[str]:
    from addnorm.interop.export import export_image_classifier
    from addnorm.interop.onnx import export_onnx
    from addnorm.interop.torch_export import export_torch

    scales = {name: list(trained.assets[name]) for name in ("mean", "scale")}
    if to == "huggingface":
        return export_image_classifier(
            trained.model, scales, directory, labels=run.labels, architecture=architecture
        )
    if to not in ("onnx", "torch"):
        raise InputError(
            f"a run trained for images is exported as huggingface, onnx or torch: got {to}."
        )
    export = export_onnx if to == "onnx" else export_torch
    return export(trained.model, {}, directory, labels=run.labels, scales=scales)


def _export_adapters(run: Run, directory: Path) -> list[str]:
    path = run.path / BEST / ADAPTER_FILE
    if not path.exists():
        raise InputError(
            f"the run in {str(run.path)!r} has no adapters: it was trained without train.lora."
        )
    require_unused(directory)
    adapter, tensors = read_adapter(path)
    model = build(run.config)
    adapt_(model, adapter)
    load_adapter_(model, tensors)
    notes = write_peft(model, adapter, directory, base=run.config.run.start)
    return [
        f"adapters of rank {adapter.rank} over {adapter.roles}, in the layout of PEFT.",
        *notes,
    ]


def _record(imported: ImportedDirectory) -> RunRecord:
    return RunRecord(imported.task, "imported", imported.notes, [*imported.labels])
