"""The tasks that a model can be trained for. A task is one file here and one row in `TASKS`.

The module of a task is imported when the task is used, so that `addnorm --help` stays fast.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from addnorm.errors import ConfigError, nearest

if TYPE_CHECKING:
    from addnorm.config import ModelConfig
    from addnorm.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """One row of `TASKS`: where a task is implemented, its options and its verbs.

    Parameters
    ----------
    home : module and class of the task, as "module:Class".
    help : what it trains, and what for, as a phrase.
    options : options of `addnorm train TASK`, each with the configuration field that it sets;
        `source` is the training data.
    verbs : methods of a trained run.
    examples : commands at the end of the help.
    """

    home: str
    help: str
    options: Mapping[str, str] = field(default_factory=dict)
    verbs: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


_TEXT = {"source": "data.source", "valid_source": "data.valid_source", "text": "data.text"}
_SIZE = {"size": "run.size"}
_ADAPTERS = {"lora": "train.lora", "rank": "train.lora_rank"}

TASKS: dict[str, TaskEntry] = {
    "translate": TaskEntry(
        home="addnorm.tasks.translate:Translate",
        help="train an encoder-decoder on pairs of texts, to translate",
        options={
            **_TEXT,
            "target": "data.target",
            "valid_target": "data.valid_target",
            "label": "data.label",
            **_SIZE,
            **_ADAPTERS,
        },
        verbs=("translate", "explain"),
        examples=(
            "addnorm train translate --source train.en --target train.de --out runs/ende",
            "addnorm train translate pairs.tsv --out runs/pairs --minutes 30",
        ),
    ),
    "language": TaskEntry(
        home="addnorm.tasks.language:Language",
        help="train a decoder on a long text, to continue prompts",
        options={**_TEXT, **_SIZE, **_ADAPTERS},
        verbs=("generate", "explain"),
        examples=("addnorm train language book.txt --out runs/book --minutes 5",),
    ),
    "masked": TaskEntry(
        home="addnorm.tasks.masked:Masked",
        help="pre-train an encoder on texts without labels, for other runs to start from",
        options={**_TEXT, **_SIZE, **_ADAPTERS},
        verbs=("embed", "classify_by_examples", "explain"),
        examples=("addnorm train masked texts.txt --out runs/masked",),
    ),
    "classify": TaskEntry(
        home="addnorm.tasks.classify:Classify",
        help="train an encoder on texts with labels, to classify texts",
        options={**_TEXT, "label": "data.label", **_SIZE, **_ADAPTERS},
        verbs=("classify", "embed", "classify_by_examples", "explain"),
        examples=(
            "addnorm train classify reviews.csv --text review --label stars --out runs/stars",
            "addnorm train classify reviews.csv --from runs/masked --out runs/stars",
            "addnorm train classify reviews.csv --from models/minilm --lora attention --out runs/s",
        ),
    ),
    "label": TaskEntry(
        home="addnorm.tasks.label:Label",
        help="train an encoder on words with labels, to find names or parts of speech",
        options={**_TEXT, "label": "data.label", **_SIZE, **_ADAPTERS},
        verbs=("label", "embed", "classify_by_examples", "explain"),
        examples=(
            "addnorm train label train.conll --valid-source valid.conll --out runs/names",
            "addnorm train label train.jsonl --from models/minilm --out runs/names",
        ),
    ),
    "table": TaskEntry(
        home="addnorm.tasks.table:Table",
        help="train a model on the rows of a table, to predict one column: a class or a number",
        options={
            "source": "data.source",
            **{
                name: f"table.{name}"
                for name in (
                    *("target", "model", "schema", "groups", "split"),
                    *("test", "compare", "unlabelled", "pretrain"),
                    *("effort", "folds", "class_weight"),
                )
            },
            "metric": "train.metric",
            "target_kind": "table.task",
        },
        verbs=(
            *("predict", "predict_proba", "predict_interval", "predict_quantiles"),
            *("predict_distribution", "explain"),
        ),
        examples=(
            "addnorm train table adult.csv --target income --out runs/adult --compare",
            "addnorm train table visits.csv --target readmitted --groups patient --out runs/visits",
        ),
    ),
    "images": TaskEntry(
        home="addnorm.tasks.images:Images",
        help="train an encoder on images with labels, to classify images",
        options={"source": "data.source", "valid_source": "data.valid_source", **_SIZE},
        verbs=("classify", "explain"),
        examples=(
            "addnorm train images digits.npz --out runs/digits",
            "addnorm train images photos/ --out runs/photos --size small",
        ),
    ),
}


def find_task(name: str | None) -> "type[Task]":
    """Return the class of a task.

    >>> find_task("translat")
    Traceback (most recent call last):
    addnorm.errors.ConfigError: there is no task 'translat'. Did you mean 'translate'?
    """
    if name is None:
        raise ConfigError(f"run.task must be one of {', '.join(TASKS)}: got none.")
    if name not in TASKS:
        raise ConfigError(f"there is no task {name!r}. {nearest(name, TASKS)}")
    module, _, kind = TASKS[name].home.partition(":")
    task: type[Task] = getattr(importlib.import_module(module), kind)
    return task


def tasks_with(verb: str) -> list[str]:
    """Return the names of the tasks whose runs have a verb."""
    return [name for name, entry in TASKS.items() if verb in entry.verbs]


def text_task_of(model: "ModelConfig") -> str:
    """Return the text task that a model is for, by its mode and head."""
    if model.mode == "encoder":
        tasks = {"masked": "masked", "class": "label" if model.pool == "none" else "classify"}
        if model.head not in tasks:
            raise ConfigError(
                f"an encoder with head={model.head} has no text task. Leave out the text, or try "
                "model.head=masked."
            )
        return tasks[model.head]
    return "language" if model.mode == "decoder" else "translate"
