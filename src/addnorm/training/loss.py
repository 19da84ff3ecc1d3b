"""Cross-entropy over a vocabulary from hidden states, without storing all the logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm.data.text.special_tokens import IGNORE
from addnorm.errors import InputError
from addnorm.layers.heads import TokenHead
from addnorm.models.build import Model

LOSS_CHUNK = 512
"""Tokens whose logits are stored at a time."""


def token_loss(
    model: Model,
    hidden: Tensor,
    targets: Tensor,
    *,
    smoothing: float = 0.0,
    ignore: int = IGNORE,
    total: int | Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy of a model's token head, from its hidden states.

    Parameters
    ----------
    model : a model with a token head
    hidden : hidden states, (..., width)
    targets : token ids, (...)
    smoothing, ignore, total : as for `linear_cross_entropy`

    Examples
    --------
    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=11, width=8, depth=1, heads=2))
    >>> ids = torch.tensor([[1, 2, 3, 4]])
    >>> token_loss(model, model.hidden(ids[:, :-1]), ids[:, 1:]).shape
    torch.Size([])
    """
    if not isinstance(model.head, TokenHead):
        raise InputError(f"the model must have a token head: got head={model.config.head}.")
    if model.head.cap is not None:
        return _capped_loss(
            model.head, hidden, model.embedding(), targets, smoothing, ignore, total
        )
    return linear_cross_entropy(
        model.head.prepare(hidden),
        model.head.matrix(model.embedding()),
        targets,
        bias=model.head.bias,
        smoothing=smoothing,
        ignore=ignore,
        total=total,
    )


def _capped_loss(
    head: TokenHead,
    hidden: Tensor,
    embedding: Tensor,
    targets: Tensor,
    smoothing: float,
    ignore: int,
    total: int | Tensor | None,
) -> Tensor:
    """Return the same for a head with a soft cap, chunk by chunk, recomputed for the backward."""
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    _check_targets(targets[targets != ignore], embedding.shape[0], ignore)

    def sum_of(part: Tensor, matrix: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(
            head(part, matrix),
            wanted,
            reduction="sum",
            ignore_index=ignore,
            label_smoothing=smoothing,
        )

    both = (torch.split(side, LOSS_CHUNK) for side in (hidden, targets))
    parts = zip(*both, strict=True)
    losses = [
        checkpoint(sum_of, part, embedding, wanted, use_reentrant=False) for part, wanted in parts
    ]
    count = max(int((targets != ignore).sum()), 1)
    return torch.stack(losses).sum() / (total or count)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    ignore: int = IGNORE,
    total: int | Tensor | None = None,
    chunk: int = LOSS_CHUNK,
) -> Tensor:
    """Return −(1/total) Σ_t Σ_v q_v log softmax(W h_t + b)_v over positions with a target.

    q is 1 − smoothing on the target plus smoothing / vocab on every token (Szegedy et al. 2016,
    §7).

    Parameters
    ----------
    hidden : h, (..., width)
    weight : W, (vocab, width)
    targets : token ids, (...)
    bias : b, (vocab,)
    smoothing : label smoothing, at least 0 and below 1
    ignore : target of positions that have none
    total : divisor; by default the number of positions with a target. The losses of the parts of a
        batch, each with the whole batch's total, add up to exactly the whole batch's loss.
    chunk : tokens whose logits are stored at a time
    """
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if hidden.shape[0] != targets.shape[0]:
        raise InputError(
            f"each position needs one target: {hidden.shape[0]} positions, "
            f"{targets.shape[0]} targets."
        )
    if targets.is_floating_point():
        raise InputError(f"targets must be token ids of an integer type: got {targets.dtype}.")
    if not 0 <= smoothing < 1:
        raise InputError(f"smoothing must be at least 0 and below 1: got {smoothing}. Try 0.1.")
    with_target = (targets != ignore).nonzero().squeeze(1)
    if with_target.shape[0] < targets.shape[0]:
        hidden, targets = hidden.index_select(0, with_target), targets.index_select(0, with_target)
    _check_targets(targets, weight.shape[0], ignore)
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    summed: Any = _ChunkedLoss.apply
    return summed(hidden, weight, bias, targets, smoothing, chunk) / (total or max(len(targets), 1))


def _check_targets(targets: Tensor, vocab: int, ignore: int) -> None:
    if targets.device.type != "cpu" or torch.compiler.is_compiling() or not targets.numel():
        return
    low, high = (int(end) for end in targets.aminmax())
    if low < 0 or high >= vocab:
        raise InputError(
            f"targets must be token ids 0 to {vocab - 1}, or {ignore} for none: "
            f"got {low if low < 0 else high}."
        )


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the losses. The forward pass also computes the gradients, chunk by chunk of tokens.

    With z = W h + b, p = softmax z and q the smoothed target: loss = log Σ exp z − q·z, and
    ∂loss/∂z = p − q. Only one chunk of z is stored at a time, and it becomes p in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        chunk: int,
    ) -> Tensor:
        needs_gradient = ctx.needs_input_grad[:3]
        ctx.set_materialize_grads(False)
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        total = total.to(hidden.device)
        gradients = [
            torch.empty_like(hidden) if needs_gradient[0] else None,
            torch.zeros_like(weight) if needs_gradient[1] else None,
            torch.zeros_like(bias) if bias is not None and needs_gradient[2] else None,
        ]
        uniform = smoothing / weight.shape[0]
        logits = hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            h, t = hidden[part], targets[part]
            z = torch.mm(h, weight.t(), out=logits[: h.shape[0]])
            if bias is not None:
                z += bias
            expected = (1 - smoothing) * z.gather(1, t[:, None])
            if smoothing:
                expected += uniform * z.sum(dim=1, keepdim=True)
            top, where = z.max(dim=1, keepdim=True)
            p = torch.softmax(z, dim=1, out=z)
            # log Σ exp z = max z − log p of the most probable token, whose p does not underflow.
            total += (top - expected - p.gather(1, where).log()).sum(dtype=total.dtype)
            if any(needs_gradient):
                _add_gradients(p, h, weight, t, smoothing, uniform, gradients, part)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if g is None else g * grads[0] for g in ctx.saved_tensors)
        return (*scaled, None, None, None)


def _add_gradients(
    p: Tensor,
    h: Tensor,
    weight: Tensor,
    t: Tensor,
    smoothing: float,
    uniform: float,
    gradients: list[Tensor | None],
    part: slice,
) -> None:
    """Turn p into p − q in place, and add it to the gradients of hidden, weight and bias."""
    if smoothing:
        p -= uniform
    p.scatter_add_(1, t[:, None], p.new_full((t.shape[0], 1), smoothing - 1))
    to_hidden, to_weight, to_bias = gradients
    if to_hidden is not None:
        torch.mm(p, weight, out=to_hidden[part])
    if to_weight is not None:
        to_weight.addmm_(p.t(), h)
    if to_bias is not None:
        to_bias += p.sum(dim=0)


def contrast_loss(vectors: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the sum over the rows of a batch of a loss that groups them by label.

        L_i = −1/|P(i)| Σ_{p ∈ P(i)} log ( exp(z_i·z_p / τ) / Σ_{a ≠ i} exp(z_i·z_a / τ) )

    z is a vector of norm 1, P(i) the other rows with the label of row i; a row without any has no
    loss. Khosla et al. 2020 (2004.11362), eq. 2; beside cross-entropy in fine-tuning with few
    labels Gunel et al. 2021 (2011.01403).

    Parameters
    ----------
    vectors : (rows, width).
    labels : (rows,).
    temperature : τ.

    >>> far = torch.eye(2).repeat_interleave(2, dim=0)
    >>> float(contrast_loss(far, torch.tensor([0, 0, 1, 1]))) < 0.01
    True
    """
    z = F.normalize(vectors, dim=-1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    scores = (z @ z.T / temperature).masked_fill(itself, float("-inf"))
    log_share = (scores - scores.logsumexp(dim=1, keepdim=True)).masked_fill(itself, 0.0)
    others = (labels[:, None] == labels) & ~itself
    return -((log_share * others).sum(dim=1) / others.sum(dim=1).clamp(min=1)).sum()
