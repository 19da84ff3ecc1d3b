"""A Hugging Face directory as what a run is made of: a task, a model, tokenizers, labels."""

from dataclasses import dataclass
from pathlib import Path

from addnorm.config import Config
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import SavedError
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


@dataclass(frozen=True)
class ImportedDirectory:
    """What was read from a directory.

    Parameters
    ----------
    path : the directory.
    task : the task that the model was trained for.
    config : a configuration with the model and how texts are read.
    model : the network, in evaluation mode.
    tokenizers : one under "text", or two under "source" and "target".
    labels : names of the classes of a classifier.
    notes : what was read and left out, in sentences.
    """

    path: Path
    task: str
    config: Config
    model: Model
    tokenizers: dict[str, Tokenizer]
    labels: tuple[str, ...]
    notes: list[str]


def read_directory(path: str | Path) -> ImportedDirectory:
    """Return model, tokenizers and labels of a Hugging Face directory."""
    path = Path(path)
    imported = read_model(path)
    c = imported.model.config
    if c.input != "tokens" or (c.mode, c.head) not in TASK_BY_HEAD:
        raise SavedError(
            f"{str(path)!r} has {c.mode}, input={c.input}, head={c.head}, which no task of addnorm "
            "uses. Read the model alone: addnorm.interop.huggingface.read_model."
        )
    require_softmax(imported, path)
    tokenizers = read_tokenizers(path, imported.settings, c.mode, c.vocab, c.target_vocab)
    task = TASK_BY_HEAD[c.mode, c.head]
    kind = next(iter(tokenizers.values())).kind
    base = Config()
    length = min(512, c.length) if c.positions == "learned" else None
    config = base.replace(
        model=c,
        data=base.data.replace(tokenizer=kind, vocab=c.vocab, max_length=length),
        run=base.run.replace(task=task),
    )
    count = f"{imported.model.count():,} parameters"
    notes = [f"{path}: {imported.architecture.model_type}, {count}.", *imported.notes]
    return ImportedDirectory(path, task, config, imported.model, tokenizers, imported.labels, notes)


def require_softmax(imported: Imported, path: Path) -> None:
    """Raise SavedError for classifiers whose classes do not exclude one another."""
    kind = imported.settings.get("problem_type")
    one = imported.model.config.head == "class" and imported.model.config.outputs == 1
    if kind in ("multi_label_classification", "regression") or one:
        raise SavedError(
            f"{str(path)!r} is for {kind or 'regression'}; the task classify gives each text one "
            "of several labels. Read the model alone: addnorm.interop.huggingface.read_model."
        )
