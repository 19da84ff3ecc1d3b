"""A time budget: a few steps are rehearsed on a copy, and the schedule is fitted to the clock."""

import copy
import time
from dataclasses import dataclass

import torch

from addnorm.config import Config
from addnorm.models.build import Model
from addnorm.runs.recipe import fit
from addnorm.runs.tasks.base import TextTask
from addnorm.train import parallel
from addnorm.train.optimizer import make_optimizer

LONGEST = 8.0
"""Seconds of rehearsal, besides an evaluation."""
STEPS = 24
RESERVE = 0.95
"""Share of the time that is planned for: the rest is for checkpoints and other small things."""
MOST_EVALUATING = 0.1
"""Share of the time that may go into evaluations; a third, if fewer than four fit into it."""


@dataclass(frozen=True)
class Pace:
    """Seconds that a step and an evaluation take."""

    step: float
    evaluation: float

    def total(self, config: Config) -> float:
        """Seconds that a whole configuration will take."""
        train = config.train
        assert train.steps and train.evaluate
        return train.steps * self.step + train.steps / train.evaluate * self.evaluation


def rehearse(model: Model, task: TextTask, config: Config) -> Pace:
    """Take real steps with a copy of the model, and forget them: weights, random state, all."""
    train = config.train
    state = torch.get_rng_state()
    actor = copy.deepcopy(model).train()
    optimizer = make_optimizer(actor, train.optimizer, lr=1e-9)
    parts = task.plan(0)
    times: list[float] = []
    for number in range(min(STEPS, max(3, len(parts)))):
        began = time.perf_counter()
        for place in range(train.accumulate):
            part = parts[(number * train.accumulate + place) % len(parts)]
            batch = {k: v.to(next(actor.parameters()).device) for k, v in task.batch(part).items()}
            torch.autograd.backward(task.loss(actor, batch, max(task.tokens(batch), 1)))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        if sum(times) > LONGEST and number >= 2:
            break
    began = time.perf_counter()
    actor.eval()
    # Only the loss: an untrained model takes far longer than a trained one to say something.
    metric, task.metric = task.metric, "loss"
    with torch.no_grad():
        task.evaluate(actor)
    task.metric = metric
    evaluation = time.perf_counter() - began
    torch.set_rng_state(state)
    steady = times[1:]  # the first step also makes what later ones reuse
    mean = sum(steady) / len(steady)
    if parallel.world() > 1:
        both = parallel.add_up(mean, evaluation)
        mean, evaluation = (value / parallel.world() for value in both)
    return Pace(mean, evaluation)


def fit_to_time(wish: Config, config: Config, pace: Pace) -> Config:
    """As many steps as the time allows, with evaluations in a tenth of it, or four in a third.

    What the user asked for by name (`wish`) stays: a warm-up, evaluations every so many steps.
    """
    assert config.run.minutes is not None
    seconds = RESERVE * 60 * config.run.minutes
    evaluations = 40.0
    if pace.evaluation > 0:
        four = min(4 * pace.evaluation, seconds / 3)
        share = max(MOST_EVALUATING * seconds, four)
        evaluations = max(1.0, min(40.0, share / pace.evaluation))
    left = max(seconds / 2, seconds - evaluations * pace.evaluation)
    steps = max(1, int(left / pace.step))
    if wish.train.steps is not None:
        steps = min(steps, wish.train.steps)
    asked = wish.train
    train = config.train.replace(
        warmup=asked.warmup,
        evaluate=asked.evaluate or max(1, int(steps / evaluations)),
        save=asked.save,
    )
    return fit(config.replace(train=train), steps)
