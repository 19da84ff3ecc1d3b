"""A Hugging Face directory as what a run is made of: a task, a model, tokenizers, labels."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from addnorm.config import Config
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import SavedError
from addnorm.interop.directory import read_json_object
from addnorm.interop.huggingface import Imported, read_model
from addnorm.interop.tokenizers import read_tokenizers
from addnorm.models.build import Model

TASK_BY_HEAD = {
    ("encoder", "masked"): "masked",
    ("encoder", "none"): "masked",
    ("encoder", "class"): "classify",
    ("decoder", "token"): "language",
    ("encoder-decoder", "token"): "translate",
}
"""The task that a model of some mode and head was trained for."""
PREPROCESSOR = "preprocessor_config.json"
"""How images become the inputs of a model."""


@dataclass(frozen=True)
class ImportedDirectory:
    """What was read from a directory.

    Parameters
    ----------
    path : the directory.
    task : the task that the model was trained for.
    config : a configuration with the model and how texts are read.
    model : the network, in evaluation mode.
    tokenizers : one under "text", or two under "source" and "target"; none for images.
    labels : names of the classes of a classifier.
    notes : what was read and left out, in sentences.
    image_scales : for images, the mean and scale of each channel, of pixels from 0 to 255.
    """

    path: Path
    task: str
    config: Config
    model: Model
    tokenizers: dict[str, Tokenizer]
    labels: tuple[str, ...]
    notes: list[str]
    image_scales: dict[str, list[float]] = field(default_factory=dict)


def read_directory(path: str | Path) -> ImportedDirectory:
    """Return model, tokenizers and labels of a Hugging Face directory."""
    path = Path(path)
    imported = read_model(path)
    c = imported.model.config
    if (c.input, c.mode, c.head) == ("patches", "encoder", "class"):
        return _read_images_directory(path, imported)
    if c.input != "tokens" or (c.mode, c.head) not in TASK_BY_HEAD:
        raise SavedError(
            f"{str(path)!r} has {c.mode}, input={c.input}, head={c.head}, which no task of addnorm "
            "uses. Read the model alone: addnorm.interop.huggingface.read_model."
        )
    require_softmax(imported, path)
    tokenizers = read_tokenizers(path, imported.settings, c.mode, c.vocab, c.target_vocab)
    task = "label" if c.pool == "none" else TASK_BY_HEAD[c.mode, c.head]
    kind = next(iter(tokenizers.values())).kind
    base = Config()
    length = min(512, c.length) if c.positions == "learned" else None
    config = base.replace(
        model=c,
        data=base.data.replace(tokenizer=kind, vocab=c.vocab, max_length=length),
        run=base.run.replace(task=task),
    )
    notes = _notes(path, imported)
    return ImportedDirectory(path, task, config, imported.model, tokenizers, imported.labels, notes)


def _notes(path: Path, imported: Imported) -> list[str]:
    count = f"{imported.model.count():,} parameters"
    return [f"{path}: {imported.architecture.model_type}, {count}.", *imported.notes]


def _read_images_directory(path: Path, imported: Imported) -> ImportedDirectory:
    require_softmax(imported, path)
    base, notes = Config(), _notes(path, imported)
    config = base.replace(model=imported.model.config, run=base.run.replace(task="images"))
    scales = read_image_scales(path, imported.model.config.channels)
    if not (path / PREPROCESSOR).is_file():
        notes.append(f"no {PREPROCESSOR}: pixels are scaled to −1 to 1, as ViTImageProcessor does.")
    return ImportedDirectory(
        path, "images", config, imported.model, {}, imported.labels, notes, scales
    )


def read_image_scales(path: Path, channels: int) -> dict[str, list[float]]:
    """Return the mean and scale of each channel, for pixels from 0 to 255.

    Their processors compute (rescale_factor · pixel − image_mean) / image_std; the defaults are
    those of ViTImageProcessor.
    """
    settings = read_json_object(path, PREPROCESSOR) if (path / PREPROCESSOR).is_file() else {}
    factor = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
    normalises = settings.get("do_normalize", True)
    mean = settings.get("image_mean") or [0.5] * channels
    scale = settings.get("image_std") or [0.5] * channels
    if not normalises:
        mean, scale = [0.0] * channels, [1.0] * channels
    lists = isinstance(mean, list) and isinstance(scale, list)
    numbers = [factor, *mean, *scale] if lists else [None]
    is_number = all(isinstance(each, int | float) and math.isfinite(each) for each in numbers)
    if not is_number or not factor or 0 in scale or {len(mean), len(scale)} != {channels}:
        raise SavedError(
            f"{str(path / PREPROCESSOR)!r} must have rescale_factor, and image_mean and image_std "
            f"with {channels} numbers each: got {factor!r}, {mean!r}, {scale!r}."
        )
    return {
        "mean": [float(each) / factor for each in mean],
        "scale": [float(each) / factor for each in scale],
    }


def require_softmax(imported: Imported, path: Path) -> None:
    """Raise SavedError for classifiers whose classes do not exclude one another."""
    kind = imported.settings.get("problem_type")
    one = imported.model.config.head == "class" and imported.model.config.outputs == 1
    if kind in ("multi_label_classification", "regression") or one:
        raise SavedError(
            f"{str(path)!r} is for {kind or 'regression'}; the task classify gives each text one "
            "of several labels. Read the model alone: addnorm.interop.huggingface.read_model."
        )
