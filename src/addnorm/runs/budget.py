"""Durations of a training step and an evaluation, measured on a copy of the model."""

import copy
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
MAX_STEPS = 24
"""Steps to measure at most."""


def measure_steps(model: nn.Module, task: Task, config: Config) -> StepTimes:
    """Return the seconds of real steps of a copy; weights and RNG state do not change."""
    train = config.train
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
        if sum(times) > MAX_SECONDS and number >= 2:
            break
    # Only the loss: an untrained model takes far longer to decode than a trained one.
    loss_only = task.bind(config.replace(train=train.replace(metric="loss")))
    start = time.perf_counter()
    with torch.no_grad():
        loss_only.evaluate(copied.eval())
    evaluation = time.perf_counter() - start
    torch.set_rng_state(state)
    steady = times[1:]  # the first step also allocates memory that later ones reuse
    mean = sum(steady) / len(steady)
    if parallel.world_size() > 1:
        totals = parallel.sum_over_workers(mean, evaluation)
        mean, evaluation = (total / parallel.world_size() for total in totals)
    return StepTimes(mean, evaluation)
