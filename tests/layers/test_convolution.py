"""The convolution in place of self-attention, against loops, in every mode and arrangement."""

from typing import Any

import pytest
import torch
from torch import Tensor

from addnorm import Mask, ModelConfig, build
from addnorm.errors import ConfigError, InputError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.context import Context
from addnorm.layers.convolution import Convolution
from tests.conftest import PAD, draw, make, slow_except

ARRANGEMENTS = slow_except(["post", "pre", "normformer", "sub-ln", "hyper"], ADDNORMS)


def naive(layer: Convolution, x: Tensor, real: Tensor) -> Tensor:
    """Return the formula of the docstring, position by position and matrix by matrix."""
    width, k = x.shape[2], layer.kernel
    before = k - 1 if layer.causal else k // 2
    result = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            both = layer.input.bias.clone()
            for j in range(k):
                s = t + j - before
                if 0 <= s < x.shape[1] and real[row, s]:
                    both = both + layer.input.weight[:, j * width : (j + 1) * width] @ x[row, s]
            value, gate = both[:width], both[width:]
            gated = value / (1 + torch.exp(-gate))
            result[row, t] = layer.output.weight @ gated + layer.output.bias
    return result


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_it_equals_its_formula(kernel: int, causal: bool) -> None:
    layer = Convolution(6, kernel, 0, causal=causal, heads=2).double()
    x, real = torch.randn(3, 7, 6).double(), torch.ones(3, 7, dtype=torch.bool)
    assert torch.allclose(layer(x, Context()), naive(layer, x, real))
    real[1, 4:] = real[2, :2] = False
    found = layer(x, Context(mask=Mask.padding(real)))
    assert torch.allclose(found[real], naive(layer, x, real)[real])


@pytest.mark.parametrize("addnorm", ARRANGEMENTS)
def test_a_cache_changes_nothing(addnorm: str) -> None:
    model, ids = make("decoder", mixing="convolution", addnorm=addnorm), draw(2, 9)
    cache = model.cache(2, 12)
    parts = [model(part, cache=cache) for part in ids.split([3, 1, 1, 4], dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), model(ids))
    segments = make("decoder", mixing="convolution", addnorm=addnorm, positions="rotary")
    memory = segments.segments(length=9)
    parts = [segments(part, segments=memory) for part in ids.split(3, dim=1)]
    assert torch.allclose(torch.cat(parts, dim=1), segments(ids))


def test_a_decoder_hides_the_future_and_reaches_only_so_far() -> None:
    model, ids = make("decoder", mixing="convolution", kernel=3), draw(1, 12)
    x = model.tokens(ids).detach().requires_grad_()
    context = Context(mask=Mask.causal())
    out = model.decoder(x, context)
    reached = torch.autograd.grad(out[0, 8].sum(), x)[0][0].abs().sum(dim=-1) > 0
    # Two blocks of width 3: four positions before the last one that is read.
    assert reached.tolist() == [4 <= position <= 8 for position in range(12)]


@pytest.mark.parametrize("mode", ["encoder", "decoder", "encoder-decoder"])
def test_padding_changes_nothing(mode: str) -> None:
    model, ids = make(mode, mixing="convolution"), draw(2, 8)
    ids[1, 5:] = PAD
    more = (draw(2, 4),) if mode == "encoder-decoder" else ()
    whole, alone = model(ids, *more), model(ids[1:, :5], *(part[1:] for part in more))
    assert torch.allclose(whole[1:, : alone.shape[1]], alone)


@pytest.mark.parametrize("addnorm", ARRANGEMENTS)
def test_every_parameter_has_a_gradient(addnorm: str) -> None:
    model = make("encoder-decoder", mixing="convolution", addnorm=addnorm)
    model(draw(2, 6), draw(2, 5)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_masks_that_it_cannot_follow_are_refused() -> None:
    model = make("decoder", mixing="convolution")
    with pytest.raises(InputError, match="a convolution hides padding only: got a mask with"):
        model(draw(1, 6), mask=Mask.causal() & Mask.window(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"span": 4}, "mixing=convolution has no self-attention, so it cannot have model.span"),
        ({"ffn": "all-attention"}, "it cannot have model.ffn=all-attention"),
        ({"window": 4}, "it cannot have model.window"),
        ({"kv_heads": 2}, r"needs heads × head_width = width for its cache: got 2 × 4, width=16"),
        ({"kernel": 0}, "model.kernel must be positive"),
        ({"mixing": "convolutions"}, "model.mixing"),
    ],
)
def test_mistakes_are_explained(changes: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"vocab": 9, "width": 16, "depth": 1, "heads": 4}
    with pytest.raises(ConfigError, match=message):
        build(ModelConfig(**(sizes | {"mode": "decoder", "mixing": "convolution"} | changes)))
    with pytest.raises(ConfigError, match="heads that divide width: width=6, heads=4"):
        Convolution(6, 3, 0, causal=True, heads=4)
