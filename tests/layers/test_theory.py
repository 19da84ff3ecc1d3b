"""Predictions of theory about a network at initialisation.

Xiong et al. 2020 (2002.04745), the setting of theorem 1: one head, every matrix width × width and
drawn from N(0, 1/width), W_Q = W_K = 0 so that attention is uniform, Gaussian inputs, ReLU.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.models.build import Model, build

WIDTH, TOKENS, DEPTH = 256, 64, 12


@torch.no_grad()
def make(addnorm: str, depth: int, seed: int, width: int = WIDTH) -> Model:
    torch.manual_seed(seed)
    model = build(
        ModelConfig(
            mode="encoder",
            input="vectors",
            head="none",
            positions="none",
            width=width,
            ffn_width=width,
            heads=1,
            depth=depth,
            ffn="relu",
            norm="layer",
            addnorm=addnorm,
            dropout=0.0,
        )
    )
    for block in model.encoder.stack.blocks:
        for sublayer in block.sublayers.values():
            for kind, weight in sublayer.matrices().items():
                weight.normal_(std=width**-0.5)
                if kind in ("query", "key"):
                    weight.zero_()
    return model


def size(x: Tensor) -> float:
    """‖x‖² / width, averaged over the tokens."""
    return float(x.detach().pow(2).mean())


@torch.no_grad()
def sizes(addnorm: str, seed: int) -> list[float]:
    """Return ‖x‖² / width of each block's output (pre) or of the input of its last norm (post)."""
    model, values = make(addnorm, DEPTH, seed), []
    for block in model.encoder.stack.blocks:
        if addnorm == "post":
            block.addnorms["ffn"].norm.register_forward_pre_hook(
                lambda norm, inputs: values.append(size(inputs[0]))
            )
        else:
            block.register_forward_hook(lambda block, inputs, x: values.append(size(x)))
    model(torch.randn(1, TOKENS, WIDTH))
    return values


def mean(rows: Iterator[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def test_post_norm_has_the_same_norm_at_every_depth() -> None:
    """Lemma 2: E‖x‖² = 3/2 width before the last norm of every block."""
    means = mean(sizes("post", seed) for seed in range(8))
    assert len(means) == DEPTH
    assert means == pytest.approx([1.5] * DEPTH, abs=0.1)


def test_pre_norm_grows_with_depth() -> None:
    """Lemma 2: (1 + l/2) width ≤ E‖x_l‖² ≤ (1 + 3l/2) width."""
    means = mean(sizes("pre", seed) for seed in range(8))
    assert means == sorted(means)
    for layer, measured in enumerate(means, start=1):
        assert 1 + layer / 2 <= measured + 0.05
        assert measured <= 1 + 3 * layer / 2


def gradient(addnorm: str, depth: int, seed: int) -> float:
    """Norm of the gradient of the last output matrix, for a loss whose derivative is fixed.

    Each token has its own read-out: uniform attention makes tokens more similar with depth, and
    with one read-out for all their gradients would add up, which is not an effect of the norm.
    """
    width = 128
    model = make(addnorm, depth, seed, width)
    matrix = model.encoder.stack.blocks[-1].sublayers["ffn"].output.weight
    output = model(torch.randn(1, TOKENS, width))
    loss = (output * torch.randn_like(output)).sum()
    (grad,) = torch.autograd.grad(loss, matrix)
    return float(grad.norm())


@pytest.mark.slow
@pytest.mark.parametrize(("addnorm", "slope"), [("post", 0.0), ("pre", -0.5)])
def test_gradients_of_the_last_block_against_depth(addnorm: str, slope: float) -> None:
    """Theorem 1: O(1) in depth L for post-norm, O(1/√L) for pre-norm.

    The slope of log gradient over log L; over groups of six seeds it varies by 0.03 and 0.05.
    """
    depths, seeds = (2, 4, 8, 16), range(6)
    xs = [math.log(depth) for depth in depths]
    ys = [
        sum(math.log(gradient(addnorm, depth, seed)) for seed in seeds) / len(seeds)
        for depth in depths
    ]
    x_mean, y_mean = sum(xs) / 4, sum(ys) / 4
    steep = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    assert steep / sum((x - x_mean) ** 2 for x in xs) == pytest.approx(slope, abs=0.1)
