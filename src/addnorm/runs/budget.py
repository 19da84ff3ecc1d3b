"""How long a step and an evaluation take: measured on a copy of the model, without a trace."""

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
"""Seconds of measuring, besides an evaluation."""
MAX_STEPS = 24


def measure_steps(model: nn.Module, task: Task, config: Config) -> StepTimes:
    """Return the seconds of real steps of a copy; weights and RNG state are left unchanged."""
    train = config.train
    state = torch.get_rng_state()
    copied = copy.deepcopy(model).train()
    device = next(copied.parameters()).device
    optimizer = make_optimizer(copied, train.optimizer, lr=1e-9)
    parts = task.plan(0)
    times: list[float] = []
    for number in range(min(MAX_STEPS, max(3, len(parts)))):
        began = time.perf_counter()
        for place in range(train.accumulate):
            part = parts[(number * train.accumulate + place) % len(parts)]
            batch = {k: v.to(device) for k, v in task.batch(part).items()}
            torch.autograd.backward(task.loss(copied, batch, max(task.tokens(batch), 1)))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        if sum(times) > MAX_SECONDS and number >= 2:
            break
    # Only the loss: an untrained model takes far longer than a trained one to decode something.
    plain = task.bind(config.replace(train=train.replace(metric="loss")))
    began = time.perf_counter()
    with torch.no_grad():
        plain.evaluate(copied.eval())
    evaluation = time.perf_counter() - began
    torch.set_rng_state(state)
    steady = times[1:]  # the first step also allocates what later ones reuse
    mean = sum(steady) / len(steady)
    if parallel.world_size() > 1:
        both = parallel.sum_over_workers(mean, evaluation)
        mean, evaluation = (value / parallel.world_size() for value in both)
    return StepTimes(mean, evaluation)
