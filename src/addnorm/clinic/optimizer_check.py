"""What an optimizer trains, and with which settings."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerFacts:
    """The settings of an optimizer that are often wrong.

    Parameters
    ----------
    kind : class name of the optimizer
    missing : trained parameters of the model that no group of the optimizer holds
    foreign : number of its parameters that are not of the model, as after a model was copied
    weight_decay : largest weight decay of a group
    decoupled : whether weight decay is decoupled from the gradient, as in AdamW
    beta2 : β₂ of Adam
    lr : largest learning rate of a group
    eps : largest ε of a group
    idle : number of parameters in groups of rate 0, while other groups have another
    momentum : largest momentum of a group, or β₁ of Adam
    lost : rate over the smallest step that changes a typical weight in its own precision, where
        Adam's steps are added to weights of 16 bits; None otherwise
    maximize : whether a group follows the gradient upwards
    """

    kind: str
    missing: tuple[str, ...] = ()
    foreign: int = 0
    weight_decay: float = 0.0
    decoupled: bool = False
    beta2: float | None = None
    lr: float = 0.0
    eps: float = 0.0
    idle: int = 0
    momentum: float = 0.0
    lost: float | None = None
    maximize: bool = False


def read_optimizer(model: nn.Module, optimizer: Optimizer) -> OptimizerFacts:
    """Return the facts about an optimizer and the model that it trains."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {id(p) for p in model.parameters()}
    groups = optimizer.param_groups
    betas = [group["betas"][1] for group in groups if len(group.get("betas", ())) > 1]
    rates = [float(group.get("lr", 0.0)) for group in groups]
    still = [group for group, rate in zip(groups, rates, strict=True) if not rate and any(rates)]
    first = [group["betas"][0] for group in groups if group.get("betas")]
    return OptimizerFacts(
        idle=sum(len(group["params"]) for group in still),
        momentum=max(
            [float(group.get("momentum") or 0.0) for group in groups] + first, default=0.0
        ),
        lost=_lost_updates(optimizer) if betas else None,
        maximize=any(bool(group.get("maximize")) for group in groups),
        kind=type(optimizer).__name__,
        missing=tuple(
            name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held
        ),
        foreign=len(held - own),
        weight_decay=max((float(group.get("weight_decay", 0.0)) for group in groups), default=0.0),
        decoupled=any(bool(group.get("decoupled_weight_decay")) for group in groups)
        or type(optimizer).__name__ not in ("Adam", "SGD", "RMSprop", "Adagrad", "NAdam"),
        beta2=float(betas[0]) if betas else None,
        lr=max((float(group.get("lr", 0.0)) for group in groups), default=0.0),
        eps=max((float(group.get("eps") or 0.0) for group in groups), default=0.0),
    )


def _lost_updates(optimizer: Optimizer) -> float | None:
    """Return lr / (ε/2 · median |w|) of weights of 16 bits: below 1 a step of size lr is lost.

    Half of the distance between neighbours, ε |w| with ε = 2⁻⁷ in bfloat16, is the least that
    rounds to another value. Optimizers of other libraries may keep what is lost.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    ratios = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.dtype in (torch.bfloat16, torch.float16) and p.ndim > 1:
                size = float(p.detach().float().abs().median())
                step = torch.finfo(p.dtype).eps / 2 * size
                ratios.append(float(group.get("lr", 0.0)) / step if step else math.inf)
    return sorted(ratios)[len(ratios) // 2] if ratios else None
