"""A task for the training loop: next-token prediction on random sequences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from addnorm import token_loss


class RandomTask:
    """Next-token prediction on ids (rows, length + 1) that `draw` returns for a generator."""

    metric, higher_is_better = "loss", False

    def __init__(self, draw: Callable[[torch.Generator], Tensor]) -> None:
        self.draw = draw

    def plan(self, epoch: int) -> list[int]:
        return list(range(1000))

    def batch(self, part: int) -> dict[str, Tensor]:
        ids = self.draw(torch.Generator().manual_seed(part))
        return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return batch["targets"].numel()

    def loss(self, model: Any, batch: dict[str, Tensor], total: int) -> Tensor:
        return token_loss(model, model.hidden(batch["inputs"]), batch["targets"], total=total)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 0.0}
