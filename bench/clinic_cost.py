"""What watching costs: the same steps with and without the clinic, taking turns.

    python -m bench.clinic_cost [--rounds 5] [--every 100]

A decoder of width 256 and depth 4, batches of 16 × 128 tokens; each round trains as many steps as
there are from one look to the next, with the clinic and without. A minute or so a round on a core.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from addnorm import ModelConfig, build, keep_memory, token_loss
from addnorm.clinic.observer import EVERY, Clinic
from addnorm.train.loop import Loop, Settings
from addnorm.train.optimizer import make_optimizer


class Noise:
    """Random tokens."""

    metric, higher_is_better = "loss", False

    def plan(self, epoch: int) -> list[int]:
        return list(range(1000))

    def batch(self, part: int) -> dict[str, Tensor]:
        ids = torch.randint(1000, (16, 129), generator=torch.Generator().manual_seed(part))
        return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return batch["targets"].numel()

    def loss(self, model: Any, batch: dict[str, Tensor], total: int) -> Tensor:
        return token_loss(model, model.hidden(batch["inputs"]), batch["targets"], total=total)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 0.0}


def seconds(observers: list[Any], steps: int) -> float:
    torch.manual_seed(0)
    model = build(ModelConfig(mode="decoder", vocab=1000, width=256, depth=4, addnorm="pre"))
    optimizer = make_optimizer(model, "adamw", lr=1e-3)
    settings = Settings(steps=steps, schedule=lambda step: 1.0)
    loop = Loop(model, Noise(), optimizer, settings, observers=observers)
    began = time.perf_counter()
    loop.run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=EVERY)
    args = parser.parse_args()
    keep_memory()
    ratios = []
    for number in range(args.rounds):
        pair = {True: 0.0, False: 0.0}
        for watched in (True, False) if number % 2 else (False, True):
            observers = [Clinic(every=args.every)] if watched else []
            pair[watched] = seconds(observers, args.every)
        ratios.append(pair[True] / pair[False] - 1)
        step = pair[False] / args.every
        print(f"round {number + 1}: {step:.3f} s a step, {ratios[-1]:+.2%} watched", flush=True)
    print(f"median {statistics.median(ratios):+.2%}")


if __name__ == "__main__":
    main()
