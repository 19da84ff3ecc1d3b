"""Weight initialisation: one common rule for every matrix, then that of the arrangement.

The order is fixed: the rule fills each matrix of each sublayer separately (queries and keys, gates
and values are separate matrices), then each Add & Norm box adjusts its own branch, then the ends
adjust the embedding. No parameter is selected by its name.
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
    """Fill with U(−1/√fan_in, 1/√fan_in), as nn.Linear does."""
    return nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


INITS: dict[str, Callable[[Tensor, float], object]] = {
    "xavier": lambda weight, std: nn.init.xavier_uniform_(weight),
    "normal": lambda weight, std: nn.init.normal_(weight, std=std),
    "torch": lambda weight, std: torch_linear_(weight),
}
"""Glorot, Bengio 2010; N(0, std²); that of nn.Linear."""


@torch.no_grad()
def init_stack_(stack: Stack, fill: Fill) -> None:
    """Fill the weights of every sublayer of a stack, then let its Add & Norm box adjust them."""
    for sublayer, box in stack.steps():
        for weight in sublayer.matrices().values():
            fill(weight)
        for part in sublayer.modules():
            if isinstance(part, nn.Linear) and part.bias is not None:
                part.bias.zero_()
        box.init_(sublayer)


def measure_(model: nn.Module, run: Callable[[], object]) -> dict[str, list[float]]:
    """Set every ω of an Admin model from one forward pass on real data; return the ω of each stack.

    In each stack r starts at 1; each box in turn sets ω ← r, then r ← √(Var[ω ⊙ x] + Var[F(x)]),
    with variances over all elements of the batch. Liu et al. 2020, §4.2, in training mode as in the
    authors' code.

    Parameters
    ----------
    model : a model of addnorm=admin, changed in place
    run : a function that calls the model once

    Examples
    --------
    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=16, depth=2, heads=2, addnorm="admin"))
    >>> omegas = measure_(model, lambda: model(torch.tensor([[1, 2, 3]])))
    >>> [len(values) for values in omegas.values()]
    [4]
    """
    stacks = {
        name: stack
        for name, stack in model.named_modules()
        if isinstance(stack, Stack) and any(isinstance(box, Admin) for _, box in stack.steps())
    }
    if not stacks:
        raise ConfigError("only addnorm=admin has a measuring pass. Build with addnorm=admin.")
    omegas: dict[str, list[float]] = {name: [] for name in stacks}
    modes = {module: module.training for module in model.modules()}
    handles = []
    for name, stack in stacks.items():
        hook = _measuring_hook(omegas[name])
        handles += [box.register_forward_pre_hook(hook) for _, box in stack.steps()]
    try:
        model.train()
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return omegas


def _measuring_hook(omegas: list[float]) -> Callable[[nn.Module, Any], Any]:
    """Return a hook that sets the ω of the next box and measures its branch for the one after."""
    ratio, measured = 1.0, set()

    def hook(box: nn.Module, inputs: Any) -> Any:
        assert isinstance(box, Admin)
        if box in measured:
            raise ConfigError("the measuring pass must run the model once: it ran more than once.")
        measured.add(box)
        x, f = inputs
        box.omega.fill_(ratio)
        omegas.append(ratio)

        def measured_branch(inner: Tensor) -> Tensor:
            nonlocal ratio
            branch: Tensor = f(inner)
            ratio = float((box.omega * x).var() + branch.var()) ** 0.5
            return branch

        return x, measured_branch

    return hook
