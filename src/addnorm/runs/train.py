"""Start or resume a run: read data, resolve, build, train, save the best model, summarise."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from addnorm.config import Config, ModelConfig
from addnorm.cpu import is_slow, require_bfloat16, thread_candidates, use_threads
from addnorm.errors import ConfigError, SavedError
from addnorm.files import HUGGING_FACE, kind_of_directory, make_directory
from addnorm.runs.budget import measure_steps
from addnorm.runs.imported import load_start_directory
from addnorm.runs.lock import locked
from addnorm.runs.request import RunRequest
from addnorm.runs.resolve import (
    StepTimes,
    make_extension,
    resolve,
    steps_between_evaluations,
    with_defaults,
)
from addnorm.runs.run import RECORD, Run, RunRecord, require_unused, sweep_run
from addnorm.runs.summary import write_summary
from addnorm.tasks import find_task
from addnorm.tasks.base import BEST, Say, Task, TextTask
from addnorm.training import parallel
from addnorm.training.checkpoint import newest
from addnorm.training.loop import Loop, LoopSettings, Observer, TrainingState
from addnorm.training.optimizer import make_optimizer
from addnorm.training.schedule import make_schedule
from addnorm.training.threads import ThreadTuner, make_tuner

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
    tuner: ThreadTuner | None = None
    """Chooses the number of threads, unless the user did."""
    requested: dict[str, int] = field(default_factory=dict)
    """Those of train.steps, evaluate_every and save_every that the user set."""


@dataclass(frozen=True)
class Outcome:
    """A run after training, finished or stopped, and its state."""

    run: Run
    progress: TrainingState


def plan_run(
    request: RunRequest,
    *,
    measure: bool = False,
    train: bool = False,
    began: float | None = None,
    say: Say = print,
) -> PlannedRun:
    """Read the data, resolve the configuration and build the model, without writing files.

    Parameters
    ----------
    request : the values that the user set.
    measure : time a few steps to predict the duration of training, even without run.minutes.
    train : the run is trained next: choose its number of threads.
    began : when run.minutes began, as for `start_run`.
    say : receives messages.
    """
    began = time.perf_counter() if began is None else began
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
    times, timed = None, config.run.minutes is not None or measure
    if train and timed and parallel.rank() == 0:
        data = data.prepare(config, say)
    task = data.bind(config)
    model = task.make_model(None if start is None else start[0], say).to(device)
    tuner = choose_threads(config, task, model, say) if timed or train else None
    if timed:
        say("measuring the speed of a few steps.")
        with use_threads(None if tuner is None else tuner.chosen):
            times = measure_steps(model, task, config)
        (elapsed,) = parallel.sum_over_workers(time.perf_counter() - began)
        times = replace(times, elapsed=elapsed / parallel.world_size())
        config = resolve(request, facts, times)
        task = data.bind(config)
    asked = with_defaults(request, facts).train
    values = {name: getattr(asked, name) for name in ("steps", "evaluate_every", "save_every")}
    fixed = {name: value for name, value in values.items() if value is not None}
    return PlannedRun(config, task, model, times, tuner, fixed)


def make_run_tuner(config: Config, task: Task, model: nn.Module) -> ThreadTuner | None:
    """Return what chooses the number of threads; None if the user or torchrun did.

    A number in run.threads is the only candidate.
    """
    device = next(model.parameters()).device
    candidates = thread_candidates(config.run.threads)
    if device.type != "cpu" or parallel.world_size() > 1:
        return None
    if config.run.threads is None and len(candidates) == 1:
        return None
    return make_tuner(candidates, model, task, config.train.accumulate)


def choose_threads(config: Config, task: Task, model: nn.Module, say: Say) -> ThreadTuner | None:
    """Return what chooses the number of threads, after its first choice."""
    tuner = make_run_tuner(config, task, model)
    if tuner is not None and len(tuner.candidates) > 1:
        gradients = (config.train.steps or 0) * config.train.accumulate
        chosen = tuner.choose(gradients=gradients, seconds=60 * (config.run.minutes or 0.0))
        if chosen < max(tuner.candidates):
            say(f"using {chosen} of {max(tuner.candidates)} threads: measured to be faster now.")
    return tuner


def start_run(
    request: RunRequest,
    out: str | Path,
    *,
    observers: Observers,
    began: float | None = None,
    say: Say = print,
) -> Outcome:
    """Train a new run.

    Parameters
    ----------
    request : the values that the user set.
    out : directory for the run.
    observers : makes the observers of the run.
    began : `time.perf_counter()` when run.minutes began; now if None.
    say : receives messages.
    """
    began = time.perf_counter() if began is None else began
    require_unused(out)
    planned = plan_run(request, train=True, began=began, say=say)
    config, task = with_absolute_paths(planned.config), planned.task
    record = RunRecord(task.name, task.fingerprint(), task.notes, [*task.labels])
    record.requested = planned.requested
    with lock_run(Path(out), say):
        if parallel.rank() == 0:
            require_unused(out)
            task.save_assets(make_directory(out))
            Run.create(out, config, record)
        parallel.barrier()
        say(describe_plan(planned))
        run = Run(out, config, record)
        return _train_loop(
            run, task, planned.model, observers, began=began, planned=planned, say=say
        )


def resume_run(
    path: str | Path,
    *,
    observers: Observers,
    minutes: float | str | None = None,
    steps: int | str | None = None,
    began: float | None = None,
    say: Say = print,
) -> Outcome:
    """Continue a run from its newest checkpoint; the result equals that of an unbroken run.

    Parameters
    ----------
    path : directory of the run.
    observers : makes the observers of the run.
    minutes, steps : further time such as "+10", or further steps such as "+500": the run, finished
        or stopped, is extended from where it is, with a schedule that is warmed up again.
    began : when the time of this process began, as for `start_run`.
    say : receives messages.
    """
    began = time.perf_counter() if began is None else began
    further = parse_extension(path, minutes, steps)
    run = Run.open(path)
    if not (run.path / RECORD).is_file():
        raise SavedError(
            f"{str(path)!r} is a saved model, not a run, so it cannot be resumed. Open the run "
            "that it belongs to."
        )
    _ = run.summary  # a damaged one is refused before the work, not after it
    with lock_run(run.path, say):
        return _resume_locked(run, observers, further, began, say)


@contextmanager
def lock_run(path: Path, say: Say) -> Iterator[None]:
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


def _resume_locked(
    run: Run, observers: Observers, further: tuple[float, int] | None, began: float, say: Say
) -> Outcome:
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
    if further is not None:
        apart = steps_between_evaluations(config, data.facts())
        _extend(run, *further, apart=apart, say=say)
    return _train_loop(run, task, model, observers, began=began, say=say)


def parse_extension(
    path: str | Path, minutes: float | str | None, steps: int | str | None
) -> tuple[float, int] | None:
    """Return the further minutes and steps of an extension, one of them 0; None for none.

    >>> parse_extension("runs/ende", "+2.5", None), parse_extension("runs/ende", None, "+100")
    ((2.5, 0), (0.0, 100))
    >>> parse_extension("runs/ende", None, 100)
    Traceback (most recent call last):
    addnorm.errors.ConfigError: with --resume, --steps must be a number of further steps, such as \
+100: got '100'. Try: addnorm train --resume runs/ende --steps +100
    """
    if minutes is None and steps is None:
        return None
    if minutes is not None and steps is not None:
        raise ConfigError("a run is extended by --minutes or by --steps: got both. Leave one out.")
    name, value = ("minutes", minutes) if steps is None else ("steps", steps)
    text, number = str(value).strip(), 0.0
    with suppress(ValueError):  # reported below
        number = float(text) if steps is None else int(text)
    if not text.startswith("+") or not 0 < number < math.inf:
        example = f"+{number:g}" if 0 < number < math.inf else "+10"
        raise ConfigError(
            f"with --resume, --{name} must be a number of further {name}, such as {example}: got "
            f"{text!r}. Try: addnorm train --resume {path} --{name} {example}"
        )
    return (number, 0) if steps is None else (0.0, int(number))


def _extend(run: Run, minutes: float, steps: int, *, apart: int, say: Say) -> None:
    """Record an extension in run.json; the loop begins it at the step of the newest checkpoint.

    `apart` is the fewest steps between its evaluations.
    """
    saved = newest(run.path, [])
    if saved is None:
        raise SavedError(
            f"the run in {str(run.path)!r} has no checkpoint to extend. Resume it first: "
            f"addnorm train --resume {run.path}"
        )
    state = TrainingState.parse(saved.plain.get("state"), saved)
    if minutes:
        pace = state.pace.step or state.training_seconds / state.step
        steps = max(1, int(60 * minutes / max(pace, 1e-9)))
    extension = make_extension(run.config, state.step, steps=steps, minutes=minutes, apart=apart)
    run.record.extensions = [*run.record.extensions[: state.extensions], extension]
    if parallel.rank() == 0:
        run.write()
    parallel.barrier()
    amount = f"{minutes:g} minutes" if minutes else f"{steps:,} step{'s'[: steps != 1]}"
    say(f"extending it after step {state.step:,} by {amount}, with a new warm-up.")


def _train_loop(
    run: Run,
    task: Task,
    model: Any,
    observers: Observers,
    *,
    began: float,
    planned: PlannedRun | None = None,
    say: Say = print,
) -> Outcome:
    """Train a planned run, or one that is resumed, and write its summary."""
    config = run.config
    tuner = make_run_tuner(config, task, model) if planned is None else planned.tuner
    # FSDP replaces the parameters, so the model is distributed before the optimizer is made.
    forward = parallel.distribute(model, config.run.parallel)
    loop = Loop(
        model,
        task,
        make_run_optimizer(config, task, model),
        replace(
            loop_settings(config, next(model.parameters()).device, run.record),
            part_limit=task.page_limit if task.has_limited_page else math.inf,
        ),
        run_directory=run.path,
        observers=[] if parallel.rank() else observers(run.path),
        on_best=partial(save_best, run, task),
        forward=forward,
        tuner=tuner,
        cpu_clock=time.process_time,
        began=began,
    )
    torch.manual_seed(config.run.seed * 1000 + parallel.rank())
    if planned is None:
        _restore(loop, task, config, say)
    elif planned.times is not None:
        loop.state.pace.add("steps", planned.times.step)
        loop.state.pace.add_evaluation(planned.times.evaluation)
    done = loop.state.finished
    run_loop = loop.run if task.needs_training else loop.finish_untrained
    progress = loop.state if done else run_loop()
    written = run.summary.get("finished") and run.summary["steps"] == progress.step
    if parallel.rank() == 0 and not (done and written):
        if config.run.minutes is not None and planned is not None:
            task = task.until(began + 60 * config.run.minutes)
        with use_threads(None if tuner is None else tuner.chosen):
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


def loop_settings(
    config: Config, device: torch.device, record: RunRecord | None = None
) -> LoopSettings:
    """Return the settings of the training loop for a complete configuration.

    Parameters
    ----------
    config : the complete configuration.
    device : where the model is.
    record : the content of run.json: which values were requested, and extensions.
    """
    train = config.train
    requested = {} if record is None else record.requested
    schedule = partial(make_schedule, train.schedule, floor=train.min_lr_ratio)
    extensions = [] if record is None else record.extensions
    follows_clock = config.run.minutes is not None and "save_every" not in requested
    assert train.steps and train.warmup is not None and train.evaluate_every and train.save_every
    return LoopSettings(
        steps=train.steps,
        schedule=schedule(warmup=train.warmup, steps=train.steps),
        accumulate=train.accumulate,
        clip=train.clip,
        evaluate_every=train.evaluate_every,
        save_every=None if follows_clock else train.save_every,
        keep_checkpoints=train.keep_checkpoints,
        patience=train.patience,
        average=train.average_checkpoints,
        ema=train.ema,
        max_seconds=60 * (config.run.minutes or 0.0),
        refit=True,
        max_steps=requested.get("steps"),
        fixed_evaluations="evaluate_every" in requested,
        extensions=tuple(
            (each, schedule(warmup=each.warmup, steps=each.steps)) for each in extensions
        ),
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
    require_bfloat16(device.type, name)
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def describe_plan(planned: PlannedRun) -> str:
    """Return two lines on the model and the training plan, and one on the time budget."""
    task, train, minutes = planned.task, planned.config.train, planned.config.run.minutes
    if not task.needs_training:
        return f"{task.describe_model(planned.model.count())}\nit needs no training."
    parts = len(task.epoch(0))
    epochs = (train.steps or 0) * train.accumulate / max(parts, 1)
    return (
        f"{task.describe_model(planned.model.count())}\n"
        f"{train.steps:,} step{'s'[: train.steps != 1]} of {train.batch:,} {task.unit} "
        f"({epochs:.1f} epochs), "
        f"{train.optimizer}, rate {train.lr:g}, {train.schedule} after {train.warmup} steps."
        + ("" if minutes is None else f"\n{_describe_budget(minutes, planned.times)}")
    )


def _describe_budget(minutes: float, times: StepTimes | None) -> str:
    """Return what the time budget covers, and what is left of it."""
    elapsed = 0.0 if times is None else times.elapsed
    if elapsed > 60 * minutes:
        return (
            f"run.minutes={minutes:g} is over after reading the data and measuring ({elapsed:.0f} "
            "s): only one step is trained. Try more minutes."
        )
    return (
        f"{minutes:g} minutes are for all of the run, its summary included; {elapsed:.0f} s are "
        "over. The number of steps follows the measured pace."
    )


def make_run_optimizer(config: Config, task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a configuration, for the parameter groups of the task."""
    train = config.train
    assert train.lr is not None
    if train.unfreeze and parallel.world_size() > 1:
        raise ConfigError("train.unfreeze needs a single process. Try train.layer_decay=0.9.")
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
        start = task.load_start(run.path)
    elif kind_of_directory(path) == HUGGING_FACE:
        start = load_start_directory(path, kind)
    else:
        raise SavedError(f"there is no run in {path!r} to start from. Check the path.")
    if issubclass(kind, TextTask):
        config: Any = start[0].config
        _require_side(kind, config, path)
    return start


def _require_side(kind: type[TextTask], start: ModelConfig, path: str) -> None:
    """Raise ConfigError if a model has no stack that a task could start from."""
    if not set(start.sides) & set(kind.mode.split("-")):
        tasks = {"encoder": "masked, classify or label", "decoder": "language"}
        raise ConfigError(
            f"{kind.name} must start from a model of mode={kind.mode}: {path!r} has "
            f"mode={start.mode}, and no block of it fits. Start {tasks[start.mode]} from it."
        )
