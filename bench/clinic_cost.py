"""What watching costs: the time spent in the clinic, beside the time spent in everything else.

    python -m bench.clinic_cost [--rounds 3] [--every 100]

A decoder of width 256 and depth 4, batches of 16 × 128 tokens; each round trains as many steps as
there are from one look to the next. Half a minute or so a round on a core.
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
from bench.clinic_task import Drawn


def noise(generator: torch.Generator) -> Tensor:
    """Random tokens."""
    return torch.randint(1000, (16, 129), generator=generator)


class Timed(TrainingMonitor):
    """A training monitor that measures its own time."""

    spent = 0.0

    def on_gradients(self, loop: Any, step: int) -> None:
        began = time.perf_counter()
        super().gradients(loop, step)
        self.spent += time.perf_counter() - began

    def on_step(self, loop: Any, step: Any) -> None:
        began = time.perf_counter()
        super().stepped(loop, step)
        self.spent += time.perf_counter() - began


def share(every: int) -> tuple[float, float]:
    """Seconds of a step without the clinic, and what the clinic adds to them, as a share."""
    torch.manual_seed(0)
    model = build(ModelConfig(mode="decoder", vocab=1000, width=256, depth=4, addnorm="pre"))
    optimizer = make_optimizer(model, "adamw", lr=1e-3)
    settings = LoopSettings(steps=every, schedule=lambda step: 1.0)
    clinic = Timed(every=every)
    loop = Loop(model, Drawn(noise), optimizer, settings, observers=[clinic])
    began = time.perf_counter()
    loop.run()
    rest = time.perf_counter() - began - clinic.spent
    return rest / every, clinic.spent / rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=SIGNAL_STEPS)
    args = parser.parse_args()
    keep_memory()
    shares = []
    for number in range(args.rounds):
        step, added = share(args.every)
        shares.append(added)
        print(f"round {number + 1}: {step:.3f} s a step, the clinic adds {added:.2%}", flush=True)
    print(f"median {statistics.median(shares):.2%}")


if __name__ == "__main__":
    main()
