"""The tasks that a model can be trained for. A task is one file here and one row in `TASKS`.

Nothing is imported until a task is used, so that the command line knows all of them at once.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from addnorm.errors import ConfigError, nearest

if TYPE_CHECKING:
    from addnorm.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """One row: where a task is, what it is for, and which options it has.

    Parameters
    ----------
    home : module and class of the task, as "module:Class".
    help : what it trains, as a phrase.
    options : options of `addnorm train TASK`, each with the field of the configuration that it
        sets; the file or data itself is `source`.
    verbs : what a trained run of this task can do.
    examples : commands for the help.
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
        help="translate lines: pairs of texts, an encoder-decoder",
        options={
            **_TEXT,
            "target": "data.target",
            "valid_target": "data.valid_target",
            "label": "data.label",
            **_SIZE,
            **_ADAPTERS,
        },
        verbs=("translate",),
        examples=(
            "addnorm train translate --source train.en --target train.de --out runs/ende",
            "addnorm train translate pairs.tsv --out runs/pairs --minutes 30",
        ),
    ),
    "language": TaskEntry(
        home="addnorm.tasks.language:Language",
        help="continue a text: a long text, a decoder",
        options={**_TEXT, **_SIZE, **_ADAPTERS},
        verbs=("generate",),
        examples=("addnorm train language book.txt --out runs/book --minutes 5",),
    ),
    "masked": TaskEntry(
        home="addnorm.tasks.masked:Masked",
        help="predict hidden tokens: texts without labels, an encoder to start others from",
        options={**_TEXT, **_SIZE, **_ADAPTERS},
        verbs=("embed",),
        examples=("addnorm train masked texts.txt --out runs/masked",),
    ),
    "classify": TaskEntry(
        home="addnorm.tasks.classify:Classify",
        help="label texts: a table with a column of texts and one of labels, an encoder",
        options={**_TEXT, "label": "data.label", **_SIZE, **_ADAPTERS},
        verbs=("classify", "embed"),
        examples=(
            "addnorm train classify reviews.csv --text review --label stars --out runs/stars",
            "addnorm train classify reviews.csv --from runs/masked --out runs/stars",
            "addnorm train classify reviews.csv --from models/minilm --lora attention --out runs/s",
        ),
    ),
    "table": TaskEntry(
        home="addnorm.tasks.table:Table",
        help="predict a column of a table: classes with probabilities, or numbers",
        options={
            "source": "data.source",
            **{
                name: f"table.{name}"
                for name in (
                    *("target", "model", "schema", "groups", "split"),
                    *("test", "compare", "unlabelled", "pretrain"),
                )
            },
        },
        verbs=("predict", "predict_proba", "explain"),
        examples=(
            "addnorm train table adult.csv --target income --out runs/adult --compare",
            "addnorm train table visits.csv --target readmitted --groups patient --out runs/visits",
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
    """Return the tasks whose runs have a verb."""
    return [name for name, entry in TASKS.items() if verb in entry.verbs]
