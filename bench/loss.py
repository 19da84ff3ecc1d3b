"""The output matrix and cross-entropy alone, forward and backward, at a vocabulary of 10,000."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.gpt import Step
from bench.harness import Contender, race, show

TOKENS, VOCAB = 2048, 10_000


def run(rounds: int, peak: float) -> list[dict[str, Any]]:
    tables = []
    for width in (128, 256):
        rows = [
            Contender("addnorm, chunks of 512", "bench.loss:chunked", {"width": width}, ours=True),
            Contender(
                "addnorm, chunks of 256", "bench.loss:chunked", {"width": width, "chunk": 256}
            ),
            Contender("F.linear + F.cross_entropy", "bench.loss:two_steps", {"width": width}),
            *[
                Contender(
                    f"F.linear_cross_entropy, {chunk or 'auto'}",
                    "bench.loss:torch_fused",
                    {"width": width, "chunk": chunk},
                )
                for chunk in (512, 256, None)
            ],
        ]
        results = race(rows, rounds, steps=5)
        title = f"Output and loss, width {width}, vocabulary {VOCAB:,}: tokens per second"
        tables.append(show(title, results, TOKENS, 3 * 2 * TOKENS * width * VOCAB, peak))
    return tables


def _step(width: int, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    hidden = torch.randn(TOKENS, width, requires_grad=True)
    weight = (torch.randn(VOCAB, width) * width**-0.5).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,))

    def step() -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, targets).backward()

    return step


def chunked(width: int, chunk: int = 512) -> Step:
    from addnorm.training.loss import linear_cross_entropy

    return _step(width, lambda h, w, t: linear_cross_entropy(h, w, t, chunk=chunk))


def two_steps(width: int) -> Step:
    return _step(width, lambda h, w, t: F.cross_entropy(F.linear(h, w), t))


def torch_fused(width: int, chunk: int | None) -> Step:
    options = torch.nn.LinearCrossEntropyOptions(
        **({} if chunk is None else {"batch_chunk_size": chunk})
    )
    return _step(width, lambda h, w, t: F.linear_cross_entropy(h, w, t, options=options))
