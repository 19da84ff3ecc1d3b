"""Whom the clinic is to examine: the model that a target names, and batches for it."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.cli.tableruns import is_table_run
from addnorm.cli.talk import say
from addnorm.errors import ConfigError, InputError, SavedError, require

if TYPE_CHECKING:
    from torch import Tensor, nn

    from addnorm.clinic import Plan
    from addnorm.clinic.call import Batch
    from addnorm.config import Config, ModelConfig
    from addnorm.runs.recipe import Wish
    from addnorm.runs.tasks.base import TextTask

ROWS = 16
"""Sequences of a batch that are looked at."""
TABLE_ROWS = 64
"""Rows of a table that are looked at."""


@dataclass(frozen=True)
class Patient:
    """A model, batches of which the first is looked at and the others are learnt from, a plan."""

    model: "nn.Module"
    batches: "Sequence[Batch]"
    said: str
    """Where the batches are from."""
    plan: "Plan | None" = None
    loss: "TaskLoss | None" = None
    config: "Config | None" = None
    """The whole configuration, where there is text to learn from."""


class TaskLoss:
    """The loss of the targets that a task gave beside its batches."""

    def __init__(
        self,
        targets: "Mapping[int, Tensor]",
        loss: "Callable[[Tensor, Tensor], Tensor]",
        said: str,
    ) -> None:
        self.targets = targets
        """By the identity of the batch."""
        self.loss, self.said = loss, said

    def __call__(self, output: Any, batch: Any) -> "Tensor":
        from addnorm.clinic.call import answer_of

        targets = self.targets.get(id(batch))
        if targets is None:
            raise ValueError("the targets of this batch are not known")
        return self.loss(answer_of(output), targets)


def find_patient(args: argparse.Namespace) -> Patient:
    """The patient that the flags of `addnorm clinic` name."""
    from addnorm.clinic import Plan

    path = Path(args.target)
    plan = None if args.lr is None else Plan(lr=args.lr, warmup=args.warmup or 0)
    if (path / "config.json").is_file() and not (path / "config.toml").exists():
        return _foreign(path, args.data, plan)
    if (path / "run.json").is_file():
        return _of_run(path, args.data, plan)
    if is_table_run(path):
        return _of_table(path, args.data, plan)
    wish = find_wish(args)
    return _drawn(args, plan) if wish is None else of_wish(wish, plan)


def find_wish(args: argparse.Namespace) -> "Wish | None":
    """What a target with text asks for; None if there is no text."""
    from addnorm.presets import find
    from addnorm.runs.recipe import Wish

    path = Path(args.target)
    if (path / "run.json").is_file():
        wish = Wish.load(path / "config.toml", args.settings)
    elif path.suffix == ".toml" and path.is_file():
        wish = Wish.load(path, args.settings)
    else:
        wish = Wish({"preset": args.target}, args.settings)
    table = dict(wish.table)
    run, data = dict(table.get("run", {})), dict(table.get("data", {}))
    if not args.data:
        return wish if run.get("task") else None
    run.setdefault("task", _task(find(args.target, args.settings).model))
    data |= _files(args.data)
    return Wish(table | {"run": run, "data": data}, wish.settings)


def _files(paths: Sequence[str]) -> dict[str, Any]:
    """The fields of the data section that name the given files, and only those."""
    if len(paths) > 2:
        raise ConfigError(f"--data takes a file, or two to translate: got {len(paths)}.")
    target = paths[1] if len(paths) > 1 else None
    return {"source": paths[0], "target": target, "valid_source": None, "valid_target": None}


def _task(model: "ModelConfig") -> str:
    """What a model is for, by its mode and head."""
    if model.mode == "encoder":
        known = {"masked": "masked", "class": "classify"}
        if model.head not in known:
            raise ConfigError(
                f"an encoder with head={model.head} learns from no text. Leave out --data, or try "
                "--set model.head=masked."
            )
        return known[model.head]
    return "language" if model.mode == "decoder" else "translate"


def _drawn(args: argparse.Namespace, plan: "Plan | None") -> Patient:
    """A model of a configuration, untrained, with batches drawn at random."""
    import torch

    from addnorm.clinic.call import run
    from addnorm.clinic.draw import draw_batches
    from addnorm.layers.init import measure_
    from addnorm.models.build import build
    from addnorm.presets import find

    config = find(args.target, args.settings)
    torch.manual_seed(config.run.seed)
    model = build(config)
    batches, said = draw_batches(model, _count(plan))
    if config.model.addnorm == "admin":
        measure_(model, lambda: run(model, batches[0]))
    return Patient(model, batches, said, plan or plan_of(config))


def of_wish(wish: "Wish", plan: "Plan | None" = None) -> Patient:
    """A model that has not been trained, with the text it will learn from."""
    from addnorm.runs.train import plan as settle

    settled = settle(wish, say=say)
    parts = settled.task.plan(0)
    batches = [settled.task.batch(part) for part in parts[: _count(True)]]
    said = f"the batches are the first {len(batches)} of {settled.config.data.source}"
    return _patient(settled.model, batches, said, plan or plan_of(settled.config), settled.config)


def _of_run(path: Path, files: Sequence[str], plan: "Plan | None") -> Patient:
    """The best model of a run, with its held-out text, or with other text of its kind."""
    from addnorm.runs.directory import Run
    from addnorm.runs.tasks import TASKS

    run = Run.open(path)
    config = run.config
    if files:
        config = config.replace(data=config.data.replace(**_files(files)))
    task: TextTask = TASKS[run.facts.task].read(config, run.tokenizers())
    task.prepare(config)
    parts = task.held_out()[: _count(plan)]
    batches = [task.collate(part, train=False) for part in parts]
    said = f"the batches are held out of {config.data.source}"
    return _patient(run.model(), batches, said, plan)


def _of_table(path: Path, files: Sequence[str], plan: "Plan | None") -> Patient:
    """The model of a table, with rows of a file and their targets, or with rows drawn at random."""
    from addnorm.clinic.draw import draw_batches
    from addnorm.tabular import load

    estimator = load(path)
    if not files:
        return Patient(estimator.model_, *draw_batches(estimator.model_, _count(plan)), plan)
    if len(files) > 1:
        raise ConfigError(f"--data takes one file for a table: got {len(files)}.")
    from addnorm.cli.targets import read_answered
    from addnorm.tabular.fitting import losses

    rows = estimator.rows(*read_answered(estimator, files[0], "Leave out --data."))
    count = len(getattr(estimator, "classes_", ()))
    batches: list[Batch] = []
    targets: dict[int, Tensor] = {}
    for start in range(0, min(len(rows), _count(plan) * TABLE_ROWS), TABLE_ROWS):
        part = slice(start, start + TABLE_ROWS)
        given = (rows.table.numbers[part], rows.table.codes[part])
        batches.append(given)
        targets[id(given)] = rows.target[part]
    loss = TaskLoss(
        targets, lambda a, y: losses(a, y, count).mean(), "the loss of the table's targets"
    )
    said = f"the batches are the first rows of {files[0]}, {TABLE_ROWS} each"
    return Patient(estimator.model_, batches, said, plan, loss)


def _mean_entropy(answer: "Tensor", targets: "Tensor") -> "Tensor":
    from addnorm.clinic.case import cross_entropy

    return cross_entropy(answer, targets) / (targets >= 0).sum()


def _patient(
    model: "nn.Module",
    batches: Sequence[dict[str, Any]],
    said: str,
    plan: "Plan | None",
    config: "Config | None" = None,
) -> Patient:
    """Batches of a task as what the model is called with, and their targets."""
    called: list[Any] = []
    targets: dict[int, Tensor] = {}
    for batch in batches:
        names = ("source", "target_in") if "source" in batch else ("inputs",)
        given = tuple(batch[name][:ROWS] for name in names)
        called.append(given)
        targets[id(given)] = batch["targets"][:ROWS]
    loss = TaskLoss(targets, _mean_entropy, "cross-entropy of the task's targets")
    return Patient(model, called, said, plan, loss, config)


def _count(plan: object) -> int:
    """Batches to take: one to look at, and one for each step of a rehearsal if there is a plan."""
    from addnorm.clinic.rehearsal import STEPS

    return 1 if plan is None else 1 + STEPS


def plan_of(config: "Config") -> "Plan | None":
    """The rate and warm-up of a configuration, if it says them."""
    from addnorm.clinic import Plan

    lr = config.train.lr
    return None if lr is None else Plan(lr=lr, warmup=config.train.warmup or 0)


def _foreign(path: Path, files: Sequence[str], plan: "Plan | None") -> Patient:
    """A local model of transformers, from safetensors only."""
    from addnorm.clinic.draw import draw_batches

    library = require("transformers", "huggingface")
    try:
        name = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        kind = getattr(library, name)
        model: nn.Module = kind.from_pretrained(path, local_files_only=True, use_safetensors=True)
    except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise SavedError(f"{str(path)!r} is no model of transformers: {_first(error)}") from None
    if not files:
        return Patient(model, *draw_batches(model, _count(plan)), plan)
    batches = _encode(library, path, model, files, _count(plan))
    return Patient(model, batches, f"the batches are lines of {files[0]}", plan)


def _encode(
    library: Any, path: Path, model: "nn.Module", files: Sequence[str], count: int
) -> "list[Batch]":
    """Lines of a file as the directory's own tokenizer reads them."""
    from addnorm.data.files import read_lines

    if len(files) > 1:
        raise ConfigError(f"--data takes one file for a model of transformers: got {len(files)}.")
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise SavedError(f"{str(path)!r} has no tokenizer for --data: {_first(error)}") from None
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lines = [line for line in read_lines(files[0]) if line.strip()][: count * ROWS]
    if not lines:
        raise InputError(f"{files[0]!r} must hold lines of text: it has none.")
    batches: list[Batch] = []
    longest = min(getattr(tokenizer, "model_max_length", 128), 128)
    for start in range(0, len(lines), ROWS):
        read = tokenizer(
            lines[start : start + ROWS],
            padding=True,
            truncation=True,
            max_length=longest,
            return_tensors="pt",
            return_token_type_ids=False,
        )
        batch = dict(read)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            batch["decoder_input_ids"] = batch["input_ids"]
        batches.append(batch)
    return batches


def _first(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
