"""Initial weights: one common rule for every matrix, then what the arrangement adds to it.

The order is fixed: the rule fills each matrix of each sublayer by itself (queries apart from keys,
gates apart from values), then each Add & Norm box adjusts its own branch, then the ends adjust the
embedding. Nothing is found by the name of a parameter.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.errors import ConfigError
from addnorm.layers.addnorm import Admin
from addnorm.layers.stack import Stack

Fill = Callable[[Tensor], object]


def torch_linear_(weight: Tensor) -> Tensor:
    """U(−1/√fan_in, 1/√fan_in), as nn.Linear has it."""
    return nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


INITS: dict[str, Callable[[Tensor, float], object]] = {
    "xavier": lambda weight, std: nn.init.xavier_uniform_(weight),
    "normal": lambda weight, std: nn.init.normal_(weight, std=std),
    "torch": lambda weight, std: torch_linear_(weight),
}
"""Glorot, Bengio 2010; N(0, std²); torch's own."""


@torch.no_grad()
def init_stack_(stack: Stack, fill: Fill) -> None:
    """Fill every sublayer of a stack, then let each Add & Norm box adjust its own."""
    for sublayer, box in stack.steps():
        for weight in sublayer.matrices().values():
            fill(weight)
        for part in sublayer.modules():
            if isinstance(part, nn.Linear) and part.bias is not None:
                part.bias.zero_()
        box.init_(sublayer)


def measure_(model: nn.Module, run: Callable[[], object]) -> dict[str, list[float]]:
    """Admin's measuring pass: `run` the model once on real data, and set every ω from what it sees.

    In each stack r starts at 1; each box in turn sets ω ← r, then r ← √(Var[ω ⊙ x] + Var[F(x)]),
    the variances over all elements of the batch. Liu et al. 2020, §4.2, as the authors coded it: in
    training mode. Returns the ω of each stack.
    """
    stacks = {
        name: stack
        for name, stack in model.named_modules()
        if isinstance(stack, Stack) and any(isinstance(box, Admin) for _, box in stack.steps())
    }
    if not stacks:
        raise ConfigError("only addnorm=admin has a measuring pass. Build with addnorm=admin.")
    found: dict[str, list[float]] = {name: [] for name in stacks}
    modes = {module: module.training for module in model.modules()}
    hooks = []
    for name, stack in stacks.items():
        hook = _measurer(found[name])
        hooks += [box.register_forward_pre_hook(hook) for _, box in stack.steps()]
    try:
        model.train()
        with torch.no_grad():
            run()
    finally:
        for hook_handle in hooks:
            hook_handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return found


def _measurer(found: list[float]) -> Callable[[nn.Module, Any], Any]:
    """A hook that sets the ω of the box about to run, and watches its branch for the next one."""
    ratio, seen = 1.0, set()

    def hook(box: nn.Module, given: Any) -> Any:
        assert isinstance(box, Admin)
        if box in seen:
            raise ConfigError("the measuring pass runs the model once: it was run again.")
        seen.add(box)
        x, f = given
        box.omega.fill_(ratio)
        found.append(ratio)

        def watched(inner: Tensor) -> Tensor:
            nonlocal ratio
            branch: Tensor = f(inner)
            ratio = float((box.omega * x).var() + branch.var()) ** 0.5
            return branch

        return x, watched

    return hook
