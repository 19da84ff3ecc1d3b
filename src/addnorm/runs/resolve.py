"""From a request and facts about the data to a whole configuration, in one pure step.

Later layers win: the defaults of task and size, a preset if one is named, the user's file, the
user's settings. What is still unset is then computed from the data.
"""

from dataclasses import dataclass

from addnorm.config import Config
from addnorm.errors import ConfigError
from addnorm.runs.request import RunRequest
from addnorm.tasks import find_task
from addnorm.tasks.base import DataFacts

MAX_TOKENS = 300_000_000
"""Tokens after which larger data are not read again."""
RESERVE = 0.95
"""Share of the time that is planned for: the rest is for checkpoints and other small things."""
MAX_EVALUATING = 0.1
"""Share of the time for evaluations; a third, if fewer than four would fit."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step and of an evaluation."""

    step: float
    evaluation: float

    def total(self, config: Config) -> float:
        """Return the seconds that a whole configuration will take."""
        train = config.train
        assert train.steps and train.evaluate_every
        return train.steps * self.step + train.steps / train.evaluate_every * self.evaluation


def resolve(request: RunRequest, facts: DataFacts, times: StepTimes | None = None) -> Config:
    """Return the whole configuration.

    Parameters
    ----------
    request : what the user set.
    facts : what the data decide.
    times : seconds of a step and of an evaluation, where the run is fitted to a time.
    """
    asked = request.over(Config())
    task = find_task(asked.run.task)
    config = request.over(task.defaults(asked, facts, request.preset))
    for name, value in facts.model.items():
        if getattr(config.model, name) != value:
            raise ConfigError(
                f"model.{name} must be {value!r}, which the task and its data decide: "
                f"got {getattr(config.model, name)!r}. Leave it out."
            )
    needed = facts.longest(config)
    if config.model.positions == "learned" and needed > config.model.length:
        room = config.model.length - getattr(task, "ends", 0)
        raise ConfigError(
            f"model.length must hold the longest text, of {needed} tokens: "
            f"got {config.model.length}. Try data.max_length={room}."
        )
    if times is not None and config.run.minutes is not None:
        return schedule_within(config.run.minutes, config, times)
    return with_steps(config, config.train.steps or _count_steps(config, task.epochs, facts))


def _count_steps(config: Config, usual: float, facts: DataFacts) -> int:
    train = config.train
    epochs = train.epochs or min(usual, max(1.0, MAX_TOKENS / max(facts.size, 1)))
    return max(1, round(epochs * facts.batches(config) / train.accumulate))


def with_steps(config: Config, steps: int) -> Config:
    """Return a configuration with what depends on the steps: warm-up, evaluations, checkpoints."""
    train = config.train
    warmup = train.warmup
    if warmup is None:
        warmup = min(4000 if train.schedule in ("noam", "inverse-sqrt") else 1000, steps // 10)
    evaluate = train.evaluate_every or max(1, steps // 40)
    return config.replace(
        train=train.replace(
            steps=steps,
            lr=train.lr or default_learning_rate(config.model.width),
            warmup=warmup,
            evaluate_every=evaluate,
            save_every=train.save_every or evaluate,
        )
    )


def schedule_within(minutes: float, config: Config, times: StepTimes) -> Config:
    """Return a configuration with as many steps as a time allows, and not more than it has.

    A tenth of the time is for evaluations, or a third if fewer than four would fit.
    """
    seconds = RESERVE * 60 * minutes
    evaluations = 40.0
    if times.evaluation > 0:
        four = min(4 * times.evaluation, seconds / 3)
        share = max(MAX_EVALUATING * seconds, four)
        evaluations = max(1.0, min(40.0, share / times.evaluation))
    left = max(seconds / 2, seconds - evaluations * times.evaluation)
    steps = max(1, int(left / times.step))
    if config.train.steps is not None:
        steps = min(steps, config.train.steps)
    evaluate = config.train.evaluate_every or max(1, int(steps / evaluations))
    return with_steps(config.replace(train=config.train.replace(evaluate_every=evaluate)), steps)


def default_learning_rate(width: int) -> float:
    """Return a peak rate for Adam: 1e-3 at width 256, falling with the root of the width.

    >>> default_learning_rate(256), round(default_learning_rate(512), 6)
    (0.001, 0.000707)
    """
    return float(f"{1e-3 * (256 / width) ** 0.5:.3g}")
