"""What to minimise where nothing is said: made for the shape of what comes out."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.clinic.call import Batch, Loss, Objective, answer_of, ids_of, is_causal, is_table, run
from addnorm.clinic.intervene import sees_future


def objective(model: nn.Module, batch: Batch, loss: Loss | None) -> Objective:
    """The user's loss, or the model's own, or one made for the shape of its answer."""
    if loss is not None:
        return Objective(loss, getattr(loss, "said", "the loss given"))
    with torch.no_grad():
        output = run(model, batch)
    if isinstance(getattr(output, "loss", None), Tensor):
        return Objective(lambda output, batch: output.loss, "the model's own loss")
    answer, ids = answer_of(output), [] if is_table(model) else list(ids_of(batch).values())
    beside = answer.ndim == 3 and bool(ids) and ids[-1].shape == answer.shape[:2]
    if beside and int(ids[-1].max()) < answer.shape[-1] and _answers_tokens(model, answer):
        return _tokens(model, batch)
    if answer.ndim == 2 and answer.shape[1] > 1:
        return Objective(_classes, "cross-entropy against classes drawn at random", made_up=True)
    return Objective(_noise, "half the mean square distance from noise", made_up=True)


def _classes(output: Any, batch: Batch) -> Tensor:
    answer, dice = answer_of(output), torch.Generator().manual_seed(0)
    classes = torch.randint(answer.shape[1], answer.shape[:1], generator=dice)
    return F.cross_entropy(answer.float(), classes)


def _noise(output: Any, batch: Batch) -> Tensor:
    answer, dice = answer_of(output), torch.Generator().manual_seed(0)
    return (answer.float() - torch.randn(answer.shape, generator=dice)).pow(2).mean() / 2


def _answers_tokens(model: nn.Module, answer: Tensor) -> bool:
    config = getattr(model, "config", None)
    width = getattr(config, "width", getattr(config, "hidden_size", None))
    return answer.shape[-1] != width or getattr(config, "head", "") in ("token", "masked")


def _tokens(model: nn.Module, batch: Batch) -> Objective:
    """Next tokens where the future is hidden, the tokens themselves where it is not."""
    config = getattr(model, "config", None)
    pad = getattr(config, "pad", getattr(config, "pad_token_id", None))
    if sees_future(model, batch) and not is_causal(model):
        return Objective(
            lambda output, batch: _entropy(answer_of(output), _last_ids(batch), pad),
            "cross-entropy of the tokens themselves",
        )
    return Objective(
        lambda output, batch: _entropy(answer_of(output)[:, :-1], _last_ids(batch)[:, 1:], pad),
        "cross-entropy of the next token",
    )


def _last_ids(batch: Batch) -> Tensor:
    return list(ids_of(batch).values())[-1]


def _entropy(logits: Tensor, ids: Tensor, pad: int | None) -> Tensor:
    """The mean over what is not padding."""
    ignore = -100 if pad is None else pad
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten().long(), ignore_index=ignore)
