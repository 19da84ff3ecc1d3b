"""From a request and facts about the data to a complete configuration, in one pure step.

Later values override earlier ones: defaults of task and size, preset, the user's file, the user's
settings. Fields that are still unset are then computed from the data.
"""

import math
from dataclasses import dataclass

from addnorm.config import Config
from addnorm.errors import ConfigError
from addnorm.runs.request import RunRequest
from addnorm.tasks import find_task
from addnorm.tasks.base import DataFacts
from addnorm.training.pace import MAX_EVALUATING, Extension

MAX_TOKENS = 300_000_000
"""Tokens that are trained on by default: data with more are read once."""
RESERVE = 0.95
"""Share of the time for steps and evaluations; the rest is for checkpoints and the summary."""
EVALUATING = 0.1
"""Share of the time for evaluations; up to MAX_EVALUATING if fewer than four would fit."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step and per evaluation."""

    step: float
    evaluation: float
    elapsed: float = 0.0
    """Seconds since the run began, which reading and measuring took."""

    def total(self, config: Config) -> float:
        """Return the expected duration of a complete configuration, in seconds."""
        train = config.train
        assert train.steps and train.evaluate_every
        return train.steps * self.step + train.steps / train.evaluate_every * self.evaluation


def resolve(request: RunRequest, facts: DataFacts, times: StepTimes | None = None) -> Config:
    """Return the complete configuration.

    Parameters
    ----------
    request : the values that the user set.
    facts : what the data decide.
    times : measured seconds per step and evaluation, to fit the run into run.minutes.
    """
    config = with_defaults(request, facts)
    if times is not None and config.run.minutes is not None:
        return schedule_within(config.run.minutes, config, times, facts.evaluations)
    epochs = find_task(config.run.task).epochs
    steps = config.train.steps or _count_steps(config, epochs, facts)
    return with_steps(config, steps, facts.evaluations, steps_between_evaluations(config, facts))


def steps_between_evaluations(config: Config, facts: DataFacts) -> int:
    """Return the fewest steps between evaluations that cost at most a fifth of the steps.

    In steps, not seconds: a run that is given in steps must not depend on the clock.
    """
    return math.ceil(facts.evaluation(config) / config.train.accumulate / MAX_EVALUATING)


def with_defaults(request: RunRequest, facts: DataFacts) -> Config:
    """Return the request over the defaults of its task; fields that follow the steps are unset."""
    requested = request.over(Config())
    task = find_task(requested.run.task)
    config = request.over(task.defaults(requested, facts, request.preset))
    for name, value in facts.model.items():
        if getattr(config.model, name) != value:
            raise ConfigError(
                f"model.{name} must be {value!r}, as the task and its data determine it: "
                f"got {getattr(config.model, name)!r}. Leave it out."
            )
    needed = facts.longest(config)
    if config.model.positions == "learned" and needed > config.model.length:
        max_length = config.model.length - getattr(task, "ends", 0)
        raise ConfigError(
            f"model.length must be at least that of the longest text, {needed} tokens: "
            f"got {config.model.length}. Try data.max_length={max_length}."
        )
    return config


def _count_steps(config: Config, default_epochs: float, facts: DataFacts) -> int:
    train = config.train
    epochs = train.epochs or min(default_epochs, max(1.0, MAX_TOKENS / max(facts.size, 1)))
    return max(1, round(epochs * facts.batches(config) / train.accumulate))


def with_steps(config: Config, steps: int, evaluations: int = 40, apart: int = 1) -> Config:
    """Return a configuration with warm-up, evaluations and checkpoints set from the steps.

    Parameters
    ----------
    config : the configuration; what is set in it stays.
    steps : number of steps.
    evaluations : number of evaluations, if they are cheap.
    apart : fewest steps between evaluations, so that they cost at most a fifth of the steps.
    """
    train = config.train
    warmup = train.warmup
    if warmup is None:
        warmup = min(4000 if train.schedule in ("noam", "inverse-sqrt") else 1000, steps // 10)
    evaluate = train.evaluate_every or min(steps, max(1, apart, steps // evaluations))
    return config.replace(
        train=train.replace(
            steps=steps,
            lr=train.lr or default_learning_rate(config.model.width),
            warmup=warmup,
            evaluate_every=evaluate,
            save_every=train.save_every or evaluate,
        )
    )


def make_extension(
    config: Config, step: int, *, steps: int, minutes: float = 0.0, apart: int = 1
) -> Extension:
    """Return further training from a step on: a new schedule with a short warm-up.

    Parameters
    ----------
    config : the complete configuration of the run.
    step : steps done.
    steps : further steps; with `minutes`, as many as are expected to fit.
    minutes : further time, instead of a number of steps.
    apart : fewest steps between evaluations, unless those of the run are closer to each other.
    """
    warmup = min(1000, max(1, steps // 20))
    usual = config.train.evaluate_every or steps
    every = min(steps, usual, max(1, apart, steps // 10))
    return Extension(step, steps, warmup, every, minutes)


def schedule_within(minutes: float, config: Config, times: StepTimes, most: float = 40.0) -> Config:
    """Return a configuration with as many steps as fit into a time, and at most train.steps.

    A tenth of the time is for evaluations, or up to a fifth if fewer than four would fit.

    Parameters
    ----------
    minutes : the time.
    config : the configuration.
    times : measured seconds per step and evaluation.
    most : evaluations at most.
    """
    seconds = max(RESERVE * 60 * minutes - times.elapsed, times.step)
    evaluations = most
    if times.evaluation > 0:
        four = min(4 * times.evaluation, MAX_EVALUATING * seconds)
        share = max(EVALUATING * seconds, four)
        evaluations = max(1.0, min(most, share / times.evaluation))
    left = max(seconds / 2, seconds - evaluations * times.evaluation)
    steps = max(1, int(left / times.step))
    if config.train.steps is not None:
        steps = min(steps, config.train.steps)
    evaluate = config.train.evaluate_every or max(1, int(steps / evaluations))
    return with_steps(config.replace(train=config.train.replace(evaluate_every=evaluate)), steps)


def default_learning_rate(width: int) -> float:
    """Return a peak learning rate for Adam: 1e-3 · √(256 / width).

    >>> default_learning_rate(256), round(default_learning_rate(512), 6)
    (0.001, 0.000707)
    """
    return float(f"{1e-3 * (256 / width) ** 0.5:.3g}")
