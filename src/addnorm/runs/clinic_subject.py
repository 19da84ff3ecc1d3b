"""What `addnorm clinic TARGET` examines: a run, a configuration with data, or a saved model."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from addnorm.clinic.call_model import ClinicBatch, Objective, answer_of
from addnorm.clinic.rehearsal import REHEARSAL_BATCHES, TrainingPlan
from addnorm.clinic.subject import (
    Subject,
    batch_count,
    plan_from_config,
    subject_from_config,
    subject_from_task,
    subject_from_transformers,
    subject_with_random_batches,
)
from addnorm.config import Config
from addnorm.data.text.files import read_lines
from addnorm.errors import ConfigError
from addnorm.files import HUGGING_FACE, RUN, TABLE_MODEL, kind_of_directory
from addnorm.presets import find
from addnorm.runs.request import RunRequest
from addnorm.runs.run import Run
from addnorm.runs.train import plan_run
from addnorm.tasks import find_task, text_task_of
from addnorm.tasks.base import Say, TextTask, say_nothing
from addnorm.training.optimizer import make_optimizer

TABLE_ROWS = 64
"""Rows of a table in a batch."""


def find_subject(
    target: str,
    data: Sequence[str] = (),
    settings: Sequence[str] = (),
    plan: TrainingPlan | None = None,
    *,
    say: Say = say_nothing,
) -> Subject:
    """Return the model and batches that the clinic examines.

    Parameters
    ----------
    target : a preset, a TOML file, a run, a saved model or a directory of transformers.
    data : files to take batches from; two with parallel lines for translation.
    settings : `section.field=value` changes of the configuration.
    plan : the planned training, if it is to be rehearsed.
    say : receives sentences about what was read.
    """
    path = Path(target)
    kind = kind_of_directory(path)
    if kind == HUGGING_FACE:
        return _subject_from_transformers(path, data, plan)
    if kind == RUN.kind:
        return _subject_from_run(path, data, plan, say)
    if kind == TABLE_MODEL.kind:
        return _subject_from_estimator(Run.open(path).trained, data, plan, say)
    request = find_request(target, data, settings)
    if request is None:
        return subject_from_config(find(target, settings), plan)
    return subject_from_request(request, plan, say=say)


def find_request(
    target: str, data: Sequence[str] = (), settings: Sequence[str] = ()
) -> RunRequest | None:
    """Return the run that a target with data describes; None if it has no data."""
    path = Path(target)
    if kind_of_directory(path) == RUN.kind:
        request = RunRequest.load(path / "config.toml", settings)
    elif path.suffix == ".toml" and path.is_file():
        request = RunRequest.load(path, settings)
    else:
        request = RunRequest({"preset": target}, settings)
    if not data:
        return request if request.task else None
    task = request.task or text_task_of(find(target, settings).model)
    files = {f"data.{name}": value for name, value in _data_fields(data).items()}
    return request.with_values({"run.task": task, **files})


def subject_from_request(
    request: RunRequest, plan: TrainingPlan | None = None, *, say: Say = say_nothing
) -> Subject:
    """Return an untrained model with the data it will be trained on."""
    planned = plan_run(request, say=say)
    config, task = planned.config, planned.task
    batches = [task.batch(part) for part in task.plan(0)[:REHEARSAL_BATCHES]]
    source = f"the batches are the first {len(batches)} of {config.data.source}"
    if plan is not None:  # rate and warm-up; the rest is as configured
        changed = config.train.replace(lr=plan.lr, warmup=plan.warmup)
        config = config.replace(train=changed)
    plan = plan_from_config(config)
    if plan is not None:
        plan = replace(plan, optimizer=partial(_make_optimizer, config=config))
    if isinstance(task, TextTask):
        return subject_from_task(planned.model, batches, source, plan, config)
    rows = [ClinicBatch((b["numbers"], b["codes"]), b["target"]) for b in batches]
    subject = _table_subject(planned.model, rows, source, plan, len(task.labels))
    return replace(subject, config=config)


def _make_optimizer(model: nn.Module, config: Config) -> Optimizer:
    """Return the optimizer that training will use, over parameters that are trained."""
    t = config.train
    assert t.lr is not None
    return make_optimizer(
        model,
        t.optimizer,
        lr=t.lr,
        betas=(t.beta1, t.beta2),
        eps=t.eps,
        weight_decay=t.weight_decay,
    )


def _data_fields(paths: Sequence[str]) -> dict[str, str | None]:
    """Return the fields of the data section that name these files, and no others."""
    if len(paths) > 2:
        raise ConfigError(f"--data takes one file, or two for translation: got {len(paths)}.")
    target = paths[1] if len(paths) > 1 else None
    return {"source": paths[0], "target": target, "valid_source": None, "valid_target": None}


def _subject_from_run(
    path: Path, files: Sequence[str], plan: TrainingPlan | None, say: Say
) -> Subject:
    """Return the best model of a run with its held-out data, or with other data of its kind."""
    run = Run.open(path)
    kind = find_task(run.task)
    if not issubclass(kind, TextTask):
        return _subject_from_estimator(run.trained, files, plan, say)
    config: Config = run.config
    if files:
        config = config.replace(data=config.data.replace(**_data_fields(files)))
    task = kind.read(config, run.tokenizers).bind(config)
    parts = task.held_out()[: batch_count(plan)]
    batches = [task.collate(part, epoch=None) for part in parts]
    source = f"the batches are held out of {config.data.source}"
    return subject_from_task(run.model, batches, source, plan)


def _subject_from_estimator(
    trained: Any, files: Sequence[str], plan: TrainingPlan | None, say: Say
) -> Subject:
    """Return a model of a table with rows of a file and their targets, or random rows."""
    if not files:
        return subject_with_random_batches(trained.model, plan)
    if len(files) > 1:
        raise ConfigError(f"--data takes one file for a table: got {len(files)}.")
    from addnorm.tasks.table import read_known_rows

    estimator = trained.estimator
    rows = estimator.rows(*read_known_rows(estimator, files[0], say, "Leave out --data."))
    whole = ClinicBatch((rows.table.numbers, rows.table.codes), rows.target)
    starts = range(0, min(len(rows), batch_count(plan) * TABLE_ROWS), TABLE_ROWS)
    batches = [whole.rows(start, start + TABLE_ROWS) for start in starts]
    source = f"the batches are the first rows of {files[0]}, {TABLE_ROWS} each"
    return _table_subject(
        trained.model, batches, source, plan, len(getattr(estimator, "classes_", ()))
    )


def _table_subject(
    model: Any,
    batches: Sequence[ClinicBatch],
    source: str,
    plan: TrainingPlan | None,
    classes: int,
) -> Subject:
    from addnorm.tabular.fitting import losses

    loss = Objective(
        lambda output, targets: losses(
            answer_of(output), targets, classes, getattr(model, "edges", None)
        ).mean(),
        "the loss of the table's targets",
        by_rows=False,
    )
    return Subject(model, batches, source, plan, loss)


def _subject_from_transformers(
    path: Path, files: Sequence[str], plan: TrainingPlan | None
) -> Subject:
    """Return a model of transformers with lines of a file, or random batches."""
    if len(files) > 1:
        raise ConfigError(f"--data takes one file for a Hugging Face model: got {len(files)}.")
    if not files:
        return subject_from_transformers(path, plan)
    lines = list(read_lines(files[0]))
    return subject_from_transformers(path, plan, lines=lines, text_name=files[0])
