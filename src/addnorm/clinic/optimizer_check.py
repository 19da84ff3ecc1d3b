"""What an optimizer trains, and with which settings."""

from dataclasses import dataclass

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
    """

    kind: str
    missing: tuple[str, ...] = ()
    foreign: int = 0
    weight_decay: float = 0.0
    decoupled: bool = False
    beta2: float | None = None
    lr: float = 0.0
    eps: float = 0.0


def read_optimizer(model: nn.Module, optimizer: Optimizer) -> OptimizerFacts:
    """Return the facts about an optimizer and the model that it trains."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {id(p) for p in model.parameters()}
    groups = optimizer.param_groups
    betas = [group["betas"][1] for group in groups if len(group.get("betas", ())) > 1]
    return OptimizerFacts(
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
