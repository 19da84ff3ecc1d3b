"""Start or resume a run: read data, resolve, build, train, save the best model, summarise."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from addnorm.config import Config
from addnorm.cpu import is_slow
from addnorm.errors import ConfigError, SavedError
from addnorm.files import HUGGING_FACE, kind_of_directory, make_directory
from addnorm.runs.budget import measure_steps
from addnorm.runs.imported import load_start_directory
from addnorm.runs.lock import locked
from addnorm.runs.request import RunRequest
from addnorm.runs.resolve import StepTimes, resolve
from addnorm.runs.run import RECORD, Run, RunRecord, require_unused, sweep_run
from addnorm.runs.summary import write_summary
from addnorm.tasks import find_task
from addnorm.tasks.base import BEST, Say, Task, TextTask
from addnorm.training import parallel
from addnorm.training.loop import Loop, LoopSettings, Observer, TrainingState
from addnorm.training.optimizer import make_optimizer
from addnorm.training.schedule import make_schedule

Observers = Callable[[Path], Sequence[Observer]]
"""A function from the directory of a run to its observers."""
PATH_FIELDS = {
    "data": ("source", "target", "valid_source", "valid_target"),
    "table": ("schema", "test", "unlabelled", "weights"),
    "run": ("start",),
}
"""By section, the fields of the configuration that are paths."""


@dataclass(frozen=True)
class PlannedRun:
    """A run whose configuration is resolved and whose training has not started."""

    config: Config
    task: Task
    model: Any
    times: StepTimes | None
    """Seconds per step and evaluation, if they were measured."""


@dataclass(frozen=True)
class Outcome:
    """A run after training, finished or stopped, and its state."""

    run: Run
    progress: TrainingState


def plan_run(request: RunRequest, *, measure: bool = False, say: Say = print) -> PlannedRun:
    """Read the data, resolve the configuration and build the model, without writing files.

    `measure` times a few steps to predict the duration of training, even without run.minutes.
    """
    requested = request.over(Config())
    kind = find_task(requested.run.task)
    device = find_device(requested)
    parallel.init_process_group(device)
    start = None if requested.run.start is None else _load_start(requested.run.start, kind)
    data = kind.read(requested, None, start)
    for note in data.notes:
        say(note)
    facts = data.facts()
    config = resolve(request, facts)
    find_precision(config, device)
    task = data.bind(config)
    model = task.make_model(None if start is None else start[0], say).to(device)
    times = None
    if config.run.minutes is not None or measure:
        say("measuring the speed of a few steps.")
        times = measure_steps(model, task, config)
        config = resolve(request, facts, times)
        task = data.bind(config)
    return PlannedRun(config, task, model, times)


def start_run(
    request: RunRequest, out: str | Path, *, observers: Observers, say: Say = print
) -> Outcome:
    """Train a new run.

    Parameters
    ----------
    request : the values that the user set.
    out : directory for the run.
    observers : makes the observers of the run.
    say : receives messages.
    """
    require_unused(out)
    planned = plan_run(request, say=say)
    config, task = with_absolute_paths(planned.config), planned.task
    record = RunRecord(task.name, task.fingerprint(), task.notes, [*task.labels])
    with _lock_run(Path(out), say):
        if parallel.rank() == 0:
            require_unused(out)
            task.save_assets(make_directory(out))
            Run.create(out, config, record)
        parallel.barrier()
        say(describe_plan(planned))
        return _train_loop(Run(out, config, record), task, planned.model, observers, say=say)


def resume_run(path: str | Path, *, observers: Observers, say: Say = print) -> Outcome:
    """Continue a run from its newest checkpoint; the result equals that of an unbroken run."""
    run = Run.open(path)
    if not (run.path / RECORD).is_file():
        raise SavedError(
            f"{str(path)!r} is a saved model, not a run, so it cannot be resumed. Open the run "
            "that it belongs to."
        )
    with _lock_run(run.path, say):
        return _resume_locked(run, observers, say)


@contextmanager
def _lock_run(path: Path, say: Say) -> Iterator[None]:
    """Hold the lock of a run, and delete temporary files of a process that was killed.

    Of several workers, the first one holds it.
    """
    if (parallel.torchrun_ranks() or (0, 0, 1))[0] != 0:
        yield
        return
    with locked(path) as stale:
        if stale is not None:
            say(f"the last use of {path}, by {stale.describe()}, was not ended properly.")
        swept = sweep_run(path)
        if swept:
            say(f"deleted {len(swept)} unfinished file{'s'[: len(swept) != 1]} of that use.")
        yield


def _resume_locked(run: Run, observers: Observers, say: Say) -> Outcome:
    config = run.config
    device = find_device(config)
    parallel.init_process_group(device)
    kind = find_task(run.task)
    data = kind.read(config, kind.load_assets(run.path))
    if data.fingerprint() != run.record.fingerprint:
        raise SavedError(
            f"the training data of {str(run.path)!r} changed since the run started. Restore the "
            "files, or start a new run with --from."
        )
    task = data.bind(config)
    torch.manual_seed(config.run.seed)
    model = task.empty_model().to(device)
    say(f"resuming {run.path}.")
    return _train_loop(run, task, model, observers, resuming=True, say=say)


def _train_loop(
    run: Run,
    task: Task,
    model: Any,
    observers: Observers,
    *,
    resuming: bool = False,
    say: Say = print,
) -> Outcome:
    config = run.config
    # FSDP replaces the parameters, so the model is distributed before the optimizer is made.
    forward = parallel.distribute(model, config.run.parallel)
    loop = Loop(
        model,
        task,
        make_run_optimizer(config, task, model),
        loop_settings(config, next(model.parameters()).device),
        run_directory=run.path,
        observers=[] if parallel.rank() else observers(run.path),
        on_best=partial(save_best, run, task),
        forward=forward,
    )
    torch.manual_seed(config.run.seed * 1000 + parallel.rank())
    if resuming:
        _restore(loop, task, config, say)
    done = loop.state.finished
    run_loop = loop.run if task.needs_training else loop.finish_untrained
    progress = loop.state if done else run_loop()
    if parallel.rank() == 0 and not (done and run.summary):
        write_summary(run, task, progress, model.count(), say)
    return Outcome(run, progress)


def _restore(loop: Loop, task: Task, config: Config, say: Say) -> None:
    """Restore the newest checkpoint, or the initial weights if there is none."""
    if loop.resume():
        state = loop.state
        say("it is already finished." if state.finished else f"resuming after step {state.step:,}.")
        return
    say("there is no checkpoint yet: starting from the beginning.")
    start = None if config.run.start is None else _load_start(config.run.start, type(task))[0]
    initial = task.make_model(start, say).state_dict()
    own = loop.model.state_dict()
    loop.model.load_state_dict(parallel.shard_all_like(initial, own.items()))
    torch.manual_seed(config.run.seed * 1000 + parallel.rank())


def loop_settings(config: Config, device: torch.device) -> LoopSettings:
    """Return the settings of the training loop for a complete configuration."""
    train = config.train
    assert train.steps and train.warmup is not None and train.evaluate_every and train.save_every
    return LoopSettings(
        steps=train.steps,
        schedule=make_schedule(
            train.schedule, warmup=train.warmup, steps=train.steps, floor=train.min_lr_ratio
        ),
        accumulate=train.accumulate,
        clip=train.clip,
        evaluate_every=train.evaluate_every,
        save_every=train.save_every,
        keep_checkpoints=train.keep_checkpoints,
        patience=train.patience,
        average=train.average_checkpoints,
        ema=train.ema,
        max_seconds=60 * (config.run.minutes or 0.0),
        precision=find_precision(config, device),
    )


def with_absolute_paths(config: Config) -> Config:
    """Return a configuration whose paths are absolute."""
    changes = {}
    for section, names in PATH_FIELDS.items():
        values = getattr(config, section)
        paths = {
            name: str(Path(path).absolute())
            for name in names
            if (path := getattr(values, name)) is not None
        }
        changes[section] = values.replace(**paths)
    return config.replace(**changes)


def save_best(run: Run, task: Task, model: nn.Module) -> None:
    """Write the best model so far; all workers gather the weights, and the first writes them."""
    state = parallel.unshard_all(model.state_dict())
    if parallel.rank() == 0:
        task.save_model(model, state, run.path / BEST)


def find_device(config: Config) -> torch.device:
    """Return the device of a configuration; for auto, a GPU if there is one."""
    name = config.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("run.device=cuda needs a GPU that torch can use. Try run.device=cpu.")
        return torch.device("cuda", (parallel.torchrun_ranks() or (0, 0, 1))[1])
    return torch.device(name)


def find_precision(config: Config, device: torch.device) -> torch.dtype:
    """Return the data type of matrix products; for auto, bfloat16 on GPUs that support it."""
    name = config.run.precision
    if name == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if name == "bfloat16" and is_slow(device.type, name):
        raise ConfigError(
            "run.precision=bfloat16 is many times slower than float32 on this CPU, which has no "
            "instructions for it. Try run.precision=float32."
        )
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def describe_plan(planned: PlannedRun) -> str:
    """Return two lines on the model and the training plan."""
    task, train = planned.task, planned.config.train
    if not task.needs_training:
        return f"{task.describe_model(planned.model.count())}\nit needs no training."
    parts = len(task.epoch(0))
    epochs = (train.steps or 0) * train.accumulate / max(parts, 1)
    return (
        f"{task.describe_model(planned.model.count())}\n"
        f"{train.steps:,} step{'s'[: train.steps != 1]} of {train.batch:,} {task.unit} "
        f"({epochs:.1f} epochs), "
        f"{train.optimizer}, rate {train.lr:g}, {train.schedule} after {train.warmup} steps."
    )


def make_run_optimizer(config: Config, task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a configuration, for the parameter groups of the task."""
    train = config.train
    assert train.lr is not None
    if config.run.parallel == "fsdp" and parallel.world_size() > 1:
        if train.optimizer not in ("adam", "adamw"):
            raise ConfigError(
                f"run.parallel=fsdp needs train.optimizer adam or adamw: got {train.optimizer}. "
                "Try run.parallel=ddp."
            )
        if task.name == "table":
            raise ConfigError(
                "run.parallel=fsdp is for text models: got a table. Try run.parallel=ddp."
            )
    return make_optimizer(
        model,
        train.optimizer,
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        groups=task.parameter_groups(model, train.weight_decay),
    )


def _load_start(path: str, kind: type[Task]) -> tuple[nn.Module, Any]:
    """Return the model that training starts from, and its assets."""
    if (Path(path) / RECORD).is_file():
        run = Run.open(path)
        task = find_task(run.task)
        if issubclass(task, TextTask) != issubclass(kind, TextTask):
            raise ConfigError(
                f"{path!r} was trained for {run.task}, so {kind.name} cannot start from it. "
                "A text task needs a text run, and a table needs a table run."
            )
        return task.load_start(run.path)
    if kind_of_directory(path) == HUGGING_FACE:
        return load_start_directory(path, kind)
    raise SavedError(f"there is no run in {path!r} to start from. Check the path.")
