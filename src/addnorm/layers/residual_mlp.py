"""Residual connections as such: a deep MLP whose blocks differ only in their shortcut.

h is the input of a block, F(h) = V σ(U h + a) + b its two layers, σ the activation:

    none                     h ← σ(F(h))             the plain network
    add, before              h ← σ(h + F(h))         joined before the activation
    add, after               h ← h + σ(F(h))         joined after it: the shortcut is the identity
    concatenate, before      h ← σ([h, F(h)])        wider by `growth` in each block
    concatenate, after       h ← [h, σ(F(h))]

Transformers use addition after everything else (layers/addnorm.py); this is the smallest network in
which the difference can be seen.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.errors import ConfigError, nearest

Join = Callable[[Tensor, Tensor], Tensor]


def _keep_branch(h: Tensor, branch: Tensor) -> Tensor:
    return branch


def _concatenate(h: Tensor, branch: Tensor) -> Tensor:
    return torch.cat((h, branch), dim=-1)


JOINS: dict[str, Join] = {"none": _keep_branch, "add": torch.add, "concatenate": _concatenate}
"""Shortcuts: from the input of a block and its branch to the output of the block."""


class ResidualBlock(nn.Module):
    """Two layers and a shortcut that joins their input to their output; see above.

    He et al. 2015 (1512.03385), eq. 1 and fig. 2: add, before. He et al. 2016 (1603.05027), fig. 4:
    after the activation, nothing is left on the shortcut. Huang et al. 2017 (1608.06993), eq. 2:
    concatenate.

    Parameters
    ----------
    width
        Width of the input.
    hidden
        Width between the two layers.
    join
        none, add or concatenate.
    before
        Join before the last activation; by default after it.
    growth
        Width of the branch for join=concatenate; the others have `width`.
    activation
        σ.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        join: str = "add",
        *,
        before: bool = False,
        growth: int = 8,
        activation: Callable[[Tensor], Tensor] = F.relu,
    ) -> None:
        super().__init__()
        if join not in JOINS:
            raise ConfigError(f"join has no choice {join!r}. {nearest(join, JOINS)}")
        for name, size in (("width", width), ("hidden", hidden), ("growth", growth)):
            if size < 1:
                raise ConfigError(f"{name} must be positive: got {size}. Try 8.")
        self.join, self.before, self.activation = join, before, activation
        branch = growth if join == "concatenate" else width
        self.output_width = width + growth if join == "concatenate" else width
        self.input, self.output = nn.Linear(width, hidden), nn.Linear(hidden, branch)

    def forward(self, h: Tensor) -> Tensor:
        """Return (..., output_width) for (..., width)."""
        branch = self.output(self.activation(self.input(h)))
        join = JOINS[self.join]
        if self.before:
            return self.activation(join(h, branch))
        return join(h, self.activation(branch))

    def extra_repr(self) -> str:
        return f"{self.join}, {'before' if self.before else 'after'} the activation"


class ResidualMLP(nn.Module):
    """A linear layer to `width`, `depth` blocks, and a linear layer to `outputs`.

    Weights start as He et al. 2015 (1502.01852), eq. 10: N(0, 2 / fan_in), biases 0. With addition
    the branches, whose mean is positive after a ReLU, would add up from block to block; there is no
    norm here that would undo it, so V starts `depth` times smaller.

    Parameters
    ----------
    inputs, outputs
        Widths of input and output.
    width
        Width of the first block, and between the two layers of each block.
    depth
        Number of blocks.
    join, before, growth, activation
        As for `ResidualBlock`.

    Examples
    --------
    >>> mlp = ResidualMLP(3, 1, width=16, depth=4, join="concatenate", growth=2)
    >>> mlp(torch.zeros(5, 3)).shape, [block.output_width for block in mlp.blocks]
    (torch.Size([5, 1]), [18, 20, 22, 24])
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        width: int,
        depth: int,
        join: str = "add",
        before: bool = False,
        growth: int = 8,
        activation: Callable[[Tensor], Tensor] = F.relu,
    ) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, width)
        blocks, last = [], width
        for _ in range(depth):
            block = ResidualBlock(
                last, width, join, before=before, growth=growth, activation=activation
            )
            blocks.append(block)
            last = block.output_width
        self.blocks = nn.ModuleList(blocks)
        self.output = nn.Linear(last, outputs)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            for block in blocks if join == "add" else ():
                block.output.weight.mul_(1 / depth)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., outputs) for (..., inputs)."""
        h = self.input(x)
        for block in self.blocks:
            h = block(h)
        return self.output(h)
