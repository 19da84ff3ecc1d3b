"""Optimizers and their parameter groups.

Weight decay applies to matrices, not to vectors and scalars such as norm gains and biases.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from addnorm.errors import choose
from addnorm.layers.attention import Attention
from addnorm.layers.feedforward import FeedForward
from addnorm.models.adapters import block_number

Group = dict[str, Any]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Return two groups: matrices, with weight decay, and vectors and scalars, without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def layer_groups(model: nn.Module, weight_decay: float, lr: float, decay: float) -> list[Group]:
    """Return the groups of `parameter_groups` for each layer, with rates that fall downwards.

    The head and what follows the last block have the rate lr, block l of L (from 1)
    lr · decay^(L + 1 − l), embeddings lr · decay^(L + 1). Clark et al. 2020 (ELECTRA, 2003.10555),
    appendix B.

    Parameters
    ----------
    model : the model to train
    weight_decay : decay of matrices
    lr : rate of the head
    decay : factor from each layer to the one below
    """
    trained = [(name, part) for name, part in model.named_parameters() if part.requires_grad]
    numbers = {name: block_number(name) for name, _ in trained}
    depth = 1 + max((n for n in numbers.values() if n is not None), default=-1)
    levels: dict[int, list[Tensor]] = {}
    for name, part in trained:
        number = numbers[name]
        top = name.startswith("head.") or ".stack.ends." in name or ".stack.norm." in name
        level = number + 1 if number is not None else depth + 1 if top else 0
        levels.setdefault(level, []).append(part)
    return [
        {"params": chosen, "weight_decay": decays, "lr": lr * decay ** (depth + 1 - level)}
        for level, parts in sorted(levels.items(), reverse=True)
        for chosen, decays in (
            ([p for p in parts if p.ndim >= 2], weight_decay),
            ([p for p in parts if p.ndim < 2], 0.0),
        )
        if chosen
    ]


def make_optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
    weight_decay: float = 0.0,
    groups: list[Group] | None = None,
) -> Optimizer:
    """Return the optimizer of that name over a model's trainable parameters.

    Parameters
    ----------
    model : the model to train
    name : a key of OPTIMIZERS
    lr : peak learning rate, which a schedule multiplies
    betas, eps : Adam's decay rates and ε; Adafactor ignores them
    weight_decay : decay of matrices
    groups : groups of parameters, in place of matrices and vectors

    >>> make_optimizer(nn.Linear(2, 2), "adamw", lr=1e-3).param_groups[1]["weight_decay"]
    0.0
    """
    make = choose("train.optimizer", name, OPTIMIZERS)
    groups = groups or parameter_groups(model, weight_decay)
    optimizer = make(model, groups, lr, betas, eps)
    for group in optimizer.param_groups:
        # Schedules multiply this; it is saved with the optimizer's state.
        group["peak"] = group["lr"]
    return optimizer


def set_rate(optimizer: Optimizer, factor: float) -> float:
    """Set every group's rate to its peak times a factor; return the first group's rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    return float(optimizer.param_groups[0]["lr"])


def _adam(model: nn.Module, parts: list[Group], lr: float, betas: Any, eps: float) -> Optimizer:
    return torch.optim.Adam(parts, lr=lr, betas=betas, eps=eps, fused=True)


def _adamw(model: nn.Module, parts: list[Group], lr: float, betas: Any, eps: float) -> Optimizer:
    return torch.optim.AdamW(parts, lr=lr, betas=betas, eps=eps, fused=True)


def _adafactor(
    model: nn.Module, parts: list[Group], lr: float, betas: Any, eps: float
) -> Optimizer:
    return Adafactor(parts, lr=lr)


def _muon(model: nn.Module, parts: list[Group], lr: float, betas: Any, eps: float) -> Optimizer:
    hidden = {id(p) for p in hidden_matrices(model)}
    rest: list[Group] = [
        {**part, "params": [p for p in part["params"] if id(p) not in hidden]} for part in parts
    ]
    matrices = [p for p in model.parameters() if id(p) in hidden]
    splits = {id(sub.input.weight): _row_splits(sub) for sub in _sublayers(model)}
    return Muon(matrices, rest, lr=lr, betas=betas, eps=eps, row_splits=splits)


OPTIMIZERS: dict[str, Callable[[nn.Module, list[Group], float, Any, float], Optimizer]] = {
    "adam": _adam,
    "adamw": _adamw,
    "adafactor": _adafactor,
    "muon": _muon,
}


class Adafactor(Optimizer):
    """Adafactor: second moments of a matrix from its row and column means; no momentum.

        b = 1 − t^−0.8;   R, C ← lerp of row and column means of g² + 1e-30 with weight 1 − b
        u = g / √(R C / mean R);   u ← u / max(1, rms u);   w ← w − lr · max(1e-3, rms w) · u

    Shazeer, Stern 2018 (1804.04235), algorithms 4 and 5. `lr` is the relative step size,
    scheduled like any other; the paper's is min(1e-2, t^−½).
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, w: Tensor, g: Tensor, group: Group) -> None:
        state = self.state[w]
        square = g * g + 1e-30
        if not state:
            state["step"] = torch.zeros(())
            if g.ndim >= 2:
                state["rows"], state["columns"] = (
                    torch.zeros_like(square.mean(-1)),
                    torch.zeros_like(square.mean(-2)),
                )
            else:
                state["square"] = torch.zeros_like(g)
        state["step"] += 1
        weight = float(state["step"]) ** -0.8
        if g.ndim >= 2:
            rows, columns = state["rows"], state["columns"]
            rows.lerp_(square.mean(-1), weight)
            columns.lerp_(square.mean(-2), weight)
            second = rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]
        else:
            second = state["square"].lerp_(square, weight)
        u = g / second.sqrt()
        u /= max(1.0, float(_rms(u)))
        rate = group["lr"] * max(1e-3, float(_rms(w)))
        w.mul_(1 - rate * group["weight_decay"]).sub_(rate * u)


class Muon(Optimizer):
    """Muon: orthogonalised momentum for the matrices in the blocks; AdamW for all other weights.

        m ← lerp(m, g, 0.05);   u = lerp(g, m, 0.95);   w ← w − lr √max(1, rows/columns) ·
        orthogonal(u)

    Jordan et al. 2024. Queries, keys and values are stacked in one weight matrix, and so are the
    gates and values of a gated feed-forward: each is orthogonalised separately.

    Parameters
    ----------
    matrices : weights that Muon updates
    rest : parameter groups that AdamW updates
    lr : AdamW's learning rate
    betas, eps : AdamW's decay rates and ε
    ratio : the matrices' learning rate divided by `lr` (0.02 / 3e-4 in the authors' runs)
    row_splits : by id of a stacked matrix, the rows of each matrix in it
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        rest: list[Group],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ratio: float = 66.0,
        row_splits: dict[int, list[int]] | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": 0.0, "muon": False}
        first = {"params": list(matrices), "lr": ratio * lr, "muon": True}
        super().__init__([first, *rest], defaults)
        self.betas, self.eps = betas, eps
        self.row_splits = row_splits or {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._orthogonal if group["muon"] else self._adamw
                    update(parameter, parameter.grad, group)

    def _orthogonal(self, w: Tensor, g: Tensor, group: Group) -> None:
        state = self.state[w]
        if not state:
            state["momentum"] = torch.zeros_like(g)
        m = state["momentum"].lerp_(g, 0.05)
        u = g.lerp(m, 0.95)
        w.mul_(1 - group["lr"] * group["weight_decay"])
        for part, into in zip(
            u.split(self.row_splits.get(id(w), [len(u)])),  # type: ignore[no-untyped-call]
            w.split(self.row_splits.get(id(w), [len(u)])),  # type: ignore[no-untyped-call]
            strict=True,
        ):
            tall = max(1.0, part.shape[0] / part.shape[1]) ** 0.5
            into.sub_(group["lr"] * tall * orthogonal(part))

    def _adamw(self, w: Tensor, g: Tensor, group: Group) -> None:
        state = self.state[w]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"], state["square"] = torch.zeros_like(g), torch.zeros_like(g)
        state["step"] += 1
        step, (b1, b2) = float(state["step"]), self.betas
        mean = state["mean"].lerp_(g, 1 - b1)
        square = state["square"].lerp_(g * g, 1 - b2)
        w.mul_(1 - group["lr"] * group["weight_decay"])
        bottom = (square / (1 - b2**step)).sqrt() + self.eps
        w.addcdiv_(mean, bottom, value=-group["lr"] / (1 - b1**step))


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return approximately the orthogonal factor of a matrix, by quintic Newton–Schulz iteration.

    Its singular values end between about 0.5 and 1.5, which is sufficient for Muon and cheap.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        y = x @ x.T
        x = a * x + (b * y + c * y @ y) @ x
    return x.T if tall else x


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Return the matrices inside the blocks: neither embeddings nor the output matrix."""
    return [
        parameter
        for sublayer in _sublayers(model)
        for parameter in sublayer.parameters()
        if parameter.ndim == 2 and min(parameter.shape) > 1 and parameter.requires_grad
    ]


def _sublayers(model: nn.Module) -> list[Attention | FeedForward]:
    return [part for part in model.modules() if isinstance(part, Attention | FeedForward)]


def _row_splits(sublayer: Attention | FeedForward) -> list[int]:
    """Return the rows of each matrix that is stacked in a sublayer's input projection."""
    weight = sublayer.input.weight
    return [
        matrix.shape[0]
        for matrix in sublayer.matrices().values()
        if matrix.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    ]


def _rms(x: Tensor) -> Tensor:
    return x.pow(2).mean().sqrt()
