"""Rules about the settings of the optimizer."""

from addnorm.clinic.evidence import Evidence
from addnorm.clinic.rule import (
    THRESHOLDS,
    Quoted,
    Rule,
    quote_if,
)


def _weight_decay(e: Evidence) -> Quoted:
    if e.optimizer is None:
        return None
    limit = THRESHOLDS["weight decay" if e.optimizer.decoupled else "coupled weight decay"]
    return quote_if(e.optimizer.weight_decay > limit, **vars(e.optimizer))


def _learning_rate(e: Evidence) -> Quoted:
    if e.optimizer is None:
        return None
    limit = THRESHOLDS["other rate" if e.optimizer.beta2 is None else "adam rate"]
    return quote_if(e.optimizer.lr > limit, **vars(e.optimizer))


def _beta2(e: Evidence) -> Quoted:
    if e.optimizer is None or e.optimizer.beta2 is None:
        return None
    return quote_if(not 0.9 <= e.optimizer.beta2 <= 0.9999, **vars(e.optimizer))


OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        "parameters not in the optimizer", "problem",
        lambda e: quote_if(
            e.optimizer is not None and e.optimizer.missing,
            count=0 if e.optimizer is None else len(e.optimizer.missing),
            first="" if e.optimizer is None else (e.optimizer.missing or ("",))[0],
        ),
        "{count} trained parameters are in no group of the optimizer, such as {first}",
        "They get gradients and never change.",
        "Build the optimizer after the model is complete, from model.parameters().",
    ),
    Rule(
        "optimizer of another model", "problem",
        lambda e: quote_if(
            e.optimizer is not None and e.optimizer.foreign,
            count=0 if e.optimizer is None else e.optimizer.foreign,
        ),
        "{count} parameters of the optimizer are not of this model",
        "The model was copied, wrapped or moved after the optimizer was built.",
        "Build the optimizer last.",
    ),
    Rule(
        "weight decay too large", "warning",
        _weight_decay,
        "{kind} has a weight decay of {weight_decay:g}",
        "Decoupled decay multiplies the weights by 1 − lr · decay in every step (Loshchilov, "
        "Hutter 2019, 1711.05101); 0.01 to 0.1 is usual.",
        "weight_decay=0.01 to 0.1 in AdamW; 0 to 1e-4 where it is part of the gradient.",
    ),
    Rule(
        "β₂ out of range", "warning",
        _beta2,
        "{kind} has β₂ = {beta2:g}",
        "Below 0.9 a step follows the last gradients only; above 0.9999 the estimate of the "
        "gradient's size needs tens of thousands of steps.",
        "β₂ between 0.95 and 0.999.",
    ),
    Rule(
        "learning rate out of range", "warning",
        _learning_rate,
        "{kind} has a learning rate of {lr:g}",
        "A step of Adam changes every weight by about the learning rate; 1e-5 to 1e-2 is usual.",
        "Try 1e-3, or 3e-4 for a large model.",
    ),
    Rule(
        "ε out of range", "warning",
        lambda e: quote_if(
            e.optimizer is not None and e.optimizer.eps > THRESHOLDS["epsilon"],
            **({} if e.optimizer is None else vars(e.optimizer)),
        ),
        "{kind} has ε = {eps:g}",
        "Gradients below ε are not scaled up: Adam becomes gradient descent with a tiny rate.",
        "ε between 1e-10 and 1e-6.",
    ),
    Rule(
        "learning rate is zero", "problem",
        lambda e: quote_if(e.optimizer is not None and e.optimizer.lr == 0.0),
        "every group of the optimizer has a learning rate of 0",
        "Nothing is trained; a scheduler may start at 0.",
        "Check the schedule's first value, and that the scheduler is stepped.",
    ),
    Rule(
        "loss is maximised", "problem",
        lambda e: quote_if(
            e.optimizer is not None and e.optimizer.maximize,
            kind="" if e.optimizer is None else e.optimizer.kind,
        ),
        "{kind} has maximize=True",
        "Every step follows the gradient upwards: the loss grows.",
        "Leave maximize out, or minimise −x where x is to be maximised.",
    ),
    Rule(
        "group of rate zero", "warning",
        lambda e: quote_if(
            e.optimizer is not None and e.optimizer.idle,
            **({} if e.optimizer is None else vars(e.optimizer)),
        ),
        "{idle} parameters are in groups of {kind} with a learning rate of 0, others are trained",
        "They get gradients and never change; weight decay does not act on them either.",
        "Give the group a rate, or freeze its parameters with requires_grad_(False).",
    ),
    Rule(
        "momentum out of range", "problem",
        lambda e: quote_if(
            e.optimizer is not None and e.optimizer.momentum >= THRESHOLDS["momentum"],
            **({} if e.optimizer is None else vars(e.optimizer)),
        ),
        "{kind} has a momentum (β₁) of {momentum:g}",
        "Steps are a sum over 1 / (1 − momentum) gradients: at 1 none is ever forgotten.",
        "momentum=0.9.",
    ),
    Rule(
        "steps lost in 16 bits", "warning",
        lambda e: quote_if(
            e.optimizer is not None and (e.optimizer.lost or 1.0) < THRESHOLDS["lost steps"],
            **({} if e.optimizer is None else vars(e.optimizer)),
        ),
        "a step of {kind} at rate {lr:g} is {lost:.2g} of the least that changes a typical weight "
        "in its precision of 16 bits",
        "bfloat16 has 8 bits of fraction: w + lr rounds back to w (Kalamkar et al. 2019, "
        "1905.12322, keep weights in float32).",
        "Keep the weights in float32 and use torch.autocast; or a larger rate.",
    ),
)  # fmt: skip
