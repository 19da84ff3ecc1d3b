"""Gradients by parameter: what the model does not list, does not use, or does not reach."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from addnorm.clinic import ClinicBatch, examine
from tests.clinic.test_causes import VOCAB, WIDTH, Decoder, ids, look


class Listed(nn.Module):
    """A decoder whose blocks are in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        inner = Decoder()
        self.tokens, self.positions = inner.tokens, inner.positions
        self.norm, self.head, self.blocks = inner.norm, inner.head, list(inner.blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def with_body(body: Any) -> nn.Module:
    """Return a decoder whose blocks are called by a function of the model and the stream."""

    def forward(self: Decoder, ids: Tensor) -> Tensor:
        x = body(self, self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        return self.head(self.norm(x))

    return type("Decoder", (Decoder,), {"forward": forward})()


def test_modules_in_a_plain_list_are_not_registered() -> None:
    found = look(Listed())
    assert "weights not registered" in found.names()
    every = sum(p.numel() for block in Decoder().blocks for p in block.parameters())
    assert found.evidence.unregistered == every
    assert look(Decoder()).evidence.unregistered == 0


def test_a_block_that_is_never_called_is_named() -> None:
    def all_but_last(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return x

    assert look(with_body(all_but_last)).evidence.unused_blocks == ("blocks.3",)


def test_an_unused_expert_is_no_unused_block() -> None:
    model = Decoder()
    for block in model.blocks:
        block.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    assert look(model).names() == []


def test_an_unused_head_is_no_unused_block() -> None:
    model = Decoder()
    model.heads = nn.ModuleList(nn.Linear(VOCAB, VOCAB) for _ in range(3))
    model.register_forward_hook(lambda m, _, x: m.heads[1](x))
    assert look(model).names() == []


def test_a_gradient_that_shrinks_along_the_shortcut_is_found() -> None:
    model = Decoder(between=lambda _, x: 0.01 * x + 0.99 * x.detach())
    found = look(model)
    assert "gradient shrinks" in found.names()
    assert look(Decoder(between=lambda _, x: 0.5 * x + 0.5 * x)).evidence.shrunk_gradients == ()


def test_equal_logits_are_idle_only_if_queries_and_keys_have_no_gradient() -> None:
    both, queries = Decoder(), Decoder()
    with torch.no_grad():
        for block in both.blocks:
            block.qkv.weight[: 2 * WIDTH] = block.qkv.bias[: 2 * WIDTH, None] = 0
            block.qkv.bias[: 2 * WIDTH] = 0
        for block in queries.blocks:
            block.qkv.weight[:WIDTH] = 0
            block.qkv.bias[:WIDTH] = 0
    assert "attention without queries and keys" in look(both).names()
    assert "attention without queries and keys" not in look(queries).names()


def test_a_large_epsilon_is_found() -> None:
    model = Decoder()
    model.blocks[1].norms[0].eps = 1e5
    assert look(model).evidence.large_epsilons == ("blocks.1.norms.0",)


def test_reentrant_checkpointing_behind_frozen_embeddings_passes_no_gradient() -> None:
    def checkpointed(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    model = with_body(checkpointed)
    assert look(model).names() == []
    model.tokens.requires_grad_(False)
    model.positions.requires_grad_(False)
    names = look(model).names()
    assert {"gradient cut", "loss without gradient", "no gradient in training mode"} & set(names)


def test_a_loss_of_no_label_is_not_finite() -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    batch = ClinicBatch(ids(), torch.full((5, 10), -100))
    assert look(Decoder(), batch, loss).names() == ["loss not finite"]


def test_sizes_before_any_training_that_are_far_too_large() -> None:
    head, tokens = Decoder(), Decoder()
    with torch.no_grad():
        head.head.weight.mul_(500)
        tokens.tokens.weight.mul_(1000)
    assert "initial logits far too large" in look(head).names()
    assert "embeddings drown the branches" in look(tokens).names()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=1.0), "momentum out of range"),
        (
            lambda m: torch.optim.Adam(
                [{"params": m.head.parameters()}, {"params": m.blocks.parameters(), "lr": 0.0},
                 {"params": [*m.tokens.parameters(), *m.positions.parameters(),
                             *m.norm.parameters()]}], lr=1e-3),
            "group of rate zero",
        ),
        (lambda m: torch.optim.AdamW(m.bfloat16().parameters(), lr=1e-6), "steps lost in 16 bits"),
        (lambda m: torch.optim.AdamW(m.bfloat16().parameters(), lr=1e-3), ""),
        (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-6), ""),
    ],
)  # fmt: skip
def test_settings_of_the_optimizer(make: Any, name: str) -> None:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = make(model)
    found = examine(model, ids(), causal=True, sharpness=False, optimizer=optimizer)
    assert found.names() == ([name] if name else [])
