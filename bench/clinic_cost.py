"""Cost of the training monitor: its time relative to the rest of the training.

    python -m bench.clinic_cost [--rounds 3] [--every 100]

A decoder of width 256 and depth 4, batches of 16 × 128 tokens; each round trains for the number of
steps between two measurements. About half a minute for each round on one core.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from addnorm import ModelConfig, build, keep_memory
from addnorm.clinic.training_monitor import SIGNAL_STEPS, TrainingMonitor
from addnorm.training.loop import Loop, LoopSettings
from addnorm.training.optimizer import make_optimizer
from bench.clinic_task import RandomTask


def noise(generator: torch.Generator) -> Tensor:
    """Return random tokens."""
    return torch.randint(1000, (16, 129), generator=generator)


class TimedMonitor(TrainingMonitor):
    """A training monitor that measures its own time."""

    spent = 0.0

    def on_gradients(self, loop: Any, step: int) -> None:
        start = time.perf_counter()
        super().on_gradients(loop, step)
        self.spent += time.perf_counter() - start

    def on_step(self, loop: Any, step: Any) -> None:
        start = time.perf_counter()
        super().on_step(loop, step)
        self.spent += time.perf_counter() - start


def measure(every: int) -> tuple[float, float]:
    """Return the seconds of a step without the monitor, and the relative time that it adds."""
    torch.manual_seed(0)
    model = build(ModelConfig(mode="decoder", vocab=1000, width=256, depth=4, addnorm="pre"))
    optimizer = make_optimizer(model, "adamw", lr=1e-3)
    settings = LoopSettings(steps=every, schedule=lambda step: 1.0)
    monitor = TimedMonitor(every=every)
    loop = Loop(model, RandomTask(noise), optimizer, settings, observers=[monitor])
    start = time.perf_counter()
    loop.run()
    rest = time.perf_counter() - start - monitor.spent
    return rest / every, monitor.spent / rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=SIGNAL_STEPS)
    args = parser.parse_args()
    keep_memory()
    shares = []
    for number in range(args.rounds):
        step, added = measure(args.every)
        shares.append(added)
        print(
            f"round {number + 1}: {step:.3f} s per step, the monitor adds {added:.2%}", flush=True
        )
    print(f"median {statistics.median(shares):.2%}")


if __name__ == "__main__":
    main()
