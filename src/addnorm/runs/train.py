"""Start a run, or go on with one: read, settle, build, train, keep the best, sum up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from addnorm.config import Config
from addnorm.errors import ConfigError, SavedError
from addnorm.layers.init import measure_
from addnorm.machine import is_slow
from addnorm.models.build import Model, build
from addnorm.models.saved import load, save
from addnorm.runs.budget import Pace, fit_to_time, rehearse
from addnorm.runs.directory import BEST, FACTS, Facts, Run, free
from addnorm.runs.recipe import Wish, settle, suit_reading
from addnorm.runs.summary import sum_up
from addnorm.runs.tasks import TASKS
from addnorm.runs.tasks.base import TextTask, Tokenizers
from addnorm.train import parallel
from addnorm.train.loop import Loop, Observer, Progress, Settings
from addnorm.train.optimizer import make_optimizer
from addnorm.train.schedule import make_schedule

Say = Callable[[str], None]
Watch = Callable[[Path], Sequence[Observer]]


@dataclass(frozen=True)
class Plan:
    """A run that is settled and has not begun."""

    config: Config
    task: TextTask
    model: Model
    pace: Pace | None
    """What a step and an evaluation take, if they were measured."""


@dataclass(frozen=True)
class Outcome:
    """A run that ended, and where."""

    run: Run
    progress: Progress


def plan(wish: Wish, *, measure: bool = False, say: Say = print) -> Plan:
    """Read the data and settle everything, writing nothing.

    `measure` rehearses a few steps also where no time is given, to know how long it will take.
    """
    early = wish.over(Config())
    if early.run.task is None:
        raise ConfigError("run.task must say what to train for: translate, language, masked ...")
    device = find_device(early)
    parallel.join(device)
    first, known = None, None
    if early.run.start is not None:
        first, known = _begin_with(early.run.start)
    kind, begun = TASKS[early.run.task], None if first is None else first.config
    task = kind.read(early.replace(data=suit_reading(early.data, kind, begun)), known)
    for note in task.notes:
        say(note)
    config = settle(wish, task, begun)
    find_precision(config, device)
    model = make_model(config, task, first, say).to(device)
    pace = None
    if config.run.minutes is not None or measure:
        say("measuring the speed of a few steps.")
        pace = rehearse(model, task, config)
    if config.run.minutes is not None and pace is not None:
        config = fit_to_time(wish.over(Config()), config, pace)
        task.prepare(config)
    return Plan(config, task, model, pace)


def start(wish: Wish, out: str | Path, *, watch: Watch, say: Say = print) -> Outcome:
    """Train from the beginning, in a directory of its own."""
    free(out)
    settled = plan(wish, say=say)
    config, task = rooted(settled.config), settled.task
    labels = list(getattr(task, "names", ()))
    facts = Facts(config.run.task or "", task.fingerprint(), task.notes, labels)
    if parallel.rank() == 0:
        Run.create(out, config, facts, task.tokenizers)
    parallel.wait()
    say(say_plan(settled))
    return _train(Run(Path(out), config, facts), task, settled.model, watch)


def resume(path: str | Path, *, watch: Watch, say: Say = print) -> Outcome:
    """Go on where a run stopped; it ends as if it had not."""
    run = Run.open(path)
    config = run.config
    device = find_device(config)
    parallel.join(device)
    task = TASKS[run.facts.task].read(config, run.tokenizers())
    if task.fingerprint() != run.facts.fingerprint:
        raise SavedError(
            f"the data of the run in {str(run.path)!r} are not those it began with. Put the files "
            "back as they were, or start a new run with --from."
        )
    task.prepare(config)
    torch.manual_seed(config.run.seed)
    model = build(config).to(device)
    say(f"going on with {run.path}.")
    return _train(run, task, model, watch, again=True, say=say)


def _train(
    run: Run, task: TextTask, model: Model, watch: Watch, *, again: bool = False, say: Say = print
) -> Outcome:
    config = run.config
    forward = parallel.spread(model, config.run.parallel)
    loop = Loop(
        model,
        task,
        _optimizer(config, model),
        settings(config, next(model.parameters()).device),
        run=run.path,
        observers=[] if parallel.rank() else watch(run.path),
        on_best=partial(keep_best, run),
        forward=forward,
    )
    torch.manual_seed(config.run.seed * 1000 + parallel.rank())
    if again:
        _go_back(loop, task, config, say)
    progress = loop.progress if loop.progress.finished else loop.run()
    if parallel.rank() == 0:
        sum_up(run, progress, model.count())
    return Outcome(run, progress)


def _go_back(loop: Loop, task: TextTask, config: Config, say: Say) -> None:
    """Put a run back to its newest checkpoint, or to its beginning, and say which."""
    if loop.resume():
        at = loop.progress
        say("it is finished already." if at.finished else f"going on after step {at.step:,}.")
        return
    say("there is no checkpoint yet: starting from the beginning.")
    drawn = make_model(config, task, _first(config), say).state_dict()
    own = loop.model.state_dict()
    loop.model.load_state_dict(parallel.cut_all_like(drawn, own.items()))
    torch.manual_seed(config.run.seed * 1000 + parallel.rank())


def make_model(config: Config, task: TextTask, first: Model | None, say: Say) -> Model:
    """A model with its initial weights: drawn by the seed, measured, or those of another model."""
    torch.manual_seed(config.run.seed)
    model = build(config)
    if config.model.addnorm == "admin" and first is None:
        batch = task.batch((0, 0, task.epoch(0)[0]))  # whole: all workers measure the same
        measure_(model, lambda: task.loss(model, batch, 1))
    if first is not None:
        say(borrow_(model, first))
    return model


def borrow_(model: nn.Module, other: nn.Module) -> str:
    """Give a model the weights of another wherever names and shapes agree; says which were not."""
    own, given = model.state_dict(), other.state_dict()
    same = {
        name: tensor
        for name, tensor in given.items()
        if name in own and own[name].shape == tensor.shape
    }
    model.load_state_dict(same, strict=False)
    new = sorted({name.split(".")[0] for name in own if name not in same})
    rest = f"; new: {', '.join(new)}" if new else ""
    return f"{len(same)} of {len(own)} tensors begin as those of the given model{rest}."


def settings(config: Config, device: torch.device) -> Settings:
    """What the loop needs to know of a whole configuration."""
    train = config.train
    assert train.steps and train.warmup is not None and train.evaluate and train.save
    return Settings(
        steps=train.steps,
        schedule=make_schedule(
            train.schedule, warmup=train.warmup, steps=train.steps, floor=train.floor
        ),
        accumulate=train.accumulate,
        clip=train.clip,
        evaluate_every=train.evaluate,
        save_every=train.save,
        keep=train.keep,
        patience=train.patience,
        average=train.average,
        ema=train.ema,
        seconds=60 * (config.run.minutes or 0.0),
        precision=find_precision(config, device),
    )


def rooted(config: Config) -> Config:
    """The configuration with whole paths: a run can be gone on with from any folder."""
    files = {
        name: str(Path(path).absolute())
        for name in ("source", "target", "valid_source", "valid_target")
        if (path := getattr(config.data, name)) is not None
    }
    run = config.run
    if run.start is not None:
        run = run.replace(start=str(Path(run.start).absolute()))
    return config.replace(data=config.data.replace(**files), run=run)


def keep_best(run: Run, model: nn.Module) -> None:
    """Write the best model so far; of several workers, all gather and the first writes."""
    state = parallel.gathered(model.state_dict())
    if parallel.rank() == 0:
        save(model, run.path / BEST, state)


def find_device(config: Config) -> torch.device:
    """The device a configuration asks for, or the fastest there is."""
    name = config.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("run.device=cuda needs a GPU that torch can use. Try run.device=cpu.")
        return torch.device("cuda", (parallel.launched() or (0, 0, 1))[1])
    return torch.device(name)


def find_precision(config: Config, device: torch.device) -> torch.dtype:
    """What matrix products are computed in; bfloat16 only where it is fast."""
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


def say_plan(settled: Plan) -> str:
    """What will be trained, in two lines."""
    config, task, train = settled.config, settled.task, settled.config.train
    model = config.model
    sizes = f"width {model.width}, depth {model.depth}, {model.heads} heads, {model.addnorm}-norm"
    first = f"{config.run.size} {model.mode}: {sizes}; {settled.model.count():,} parameters."
    parts = len(task.epoch(0))
    epochs = (train.steps or 0) * train.accumulate / max(parts, 1)
    return (
        f"{first}\n{train.steps:,} step{'s'[: train.steps != 1]} of {train.batch:,} tokens "
        f"({epochs:.1f} epochs), "
        f"{train.optimizer}, rate {train.lr:g}, {train.schedule} after {train.warmup} steps."
    )


def _optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    train = config.train
    assert train.lr is not None
    if config.run.parallel == "fsdp" and parallel.world() > 1:
        whole = train.optimizer in ("adam", "adamw")
        if not whole:
            raise ConfigError(
                f"run.parallel=fsdp goes with adam and adamw: got {train.optimizer}. Try ddp."
            )
    return make_optimizer(
        model,
        train.optimizer,
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
    )


def _begin_with(path: str) -> tuple[Model, Tokenizers | None]:
    """The model to begin with, and its tokenizers if it is a run's."""
    if (Path(path) / FACTS).is_file():
        run = Run.open(path)
        return run.model(), run.tokenizers()
    raise SavedError(f"there is no run in {path!r} to begin with. Check the path.")


def _first(config: Config) -> Model | None:
    return None if config.run.start is None else load(Path(config.run.start) / BEST)
