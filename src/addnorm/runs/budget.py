"""Durations of a training step and an evaluation, measured on a copy of the model."""

import copy
import statistics
import time

import torch
from torch import nn

from addnorm.config import Config
from addnorm.runs.resolve import StepTimes
from addnorm.tasks.base import Task
from addnorm.training import parallel
from addnorm.training.optimizer import make_optimizer

MAX_SECONDS = 8.0
"""Seconds after which no further step is measured."""
MAX_BUDGET_SHARE = 0.05
"""Share of run.minutes after which no further step is measured."""
MAX_STEPS = 24
"""Steps to measure at most."""


def measure_steps(model: nn.Module, task: Task, config: Config) -> StepTimes:
    """Return the median seconds of real steps of a copy; weights and RNG state do not change."""
    train = config.train
    limit = min(MAX_SECONDS, MAX_BUDGET_SHARE * 60 * (config.run.minutes or MAX_SECONDS))
    state = torch.get_rng_state()
    copied = copy.deepcopy(model).train()
    device = next(copied.parameters()).device
    optimizer = make_optimizer(copied, train.optimizer, lr=1e-9)
    parts = task.plan(0)
    times: list[float] = []
    for number in range(min(MAX_STEPS, max(3, len(parts)))):
        start = time.perf_counter()
        for micro_step in range(train.accumulate):
            part = parts[(number * train.accumulate + micro_step) % len(parts)]
            batch = {k: v.to(device) for k, v in task.batch(part).items()}
            torch.autograd.backward(task.loss(copied, batch, max(task.tokens(batch), 1)))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        if sum(times) > limit and number >= 2:
            break
    # Only the loss: an untrained model takes far longer to decode than a trained one.
    loss_only = task.bind(config.replace(train=train.replace(metric="loss")))
    with torch.no_grad():
        evaluation = loss_only.time_evaluation(copied.eval(), limit)
    torch.set_rng_state(state)
    # The first step also allocates memory that later ones reuse.
    values = parallel.sum_over_workers(statistics.median(times[1:]), evaluation)
    return StepTimes(*(value / parallel.world_size() for value in values))
