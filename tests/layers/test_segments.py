"""Segment recurrence against one pass over the whole text with the mask that it implies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from addnorm import Mask, ModelConfig, build, cost, load
from addnorm.errors import ConfigError, InputError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.segments import SegmentMemory
from tests.conftest import PAD, close, draw, make

DISTANCES = ("relative", "rotary", "linear-bias", "buckets", "none")


def in_segments(model: Any, ids: Tensor, sizes: list[int], memory: int) -> Tensor:
    segments = model.segments(memory)
    parts = [model(part, segments=segments) for part in ids.split(sizes, dim=1)]
    assert segments.used == min(memory, ids.shape[1])
    return torch.cat(parts, dim=1)


def visible(sizes: list[int], memory: int) -> Tensor:
    """Return which (query, key) pairs segments of these sizes and a memory show."""
    starts = [
        start
        for n, start in enumerate([0, *torch.tensor(sizes).cumsum(0)[:-1].tolist()])
        for _ in range(sizes[n])
    ]
    length = sum(sizes)
    return torch.tensor(
        [[j <= i and j >= starts[i] - memory for j in range(length)] for i in range(length)]
    )


@pytest.mark.parametrize("memory", (0, 1, 3, 4, 20))
@pytest.mark.parametrize("positions", DISTANCES)
def test_segments_equal_a_whole_pass_with_their_mask(positions: str, memory: int) -> None:
    model, ids, sizes = make("decoder", depth=3, positions=positions), draw(2, 12), [4, 3, 1, 4]
    whole = model(ids, mask=Mask.pattern(visible(sizes, memory)))
    close(in_segments(model, ids, sizes, memory), whole)


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_every_arrangement_remembers(addnorm: str) -> None:
    model, ids, sizes = make("decoder", positions="relative", addnorm=addnorm), draw(2, 9), [4, 5]
    whole = model(ids, mask=Mask.pattern(visible(sizes, 2)))
    close(in_segments(model, ids, sizes, 2), whole)
    close(in_segments(model, ids, sizes, 9), model(ids))


@pytest.mark.parametrize(
    "changes",
    (
        {"kv_heads": 2},
        {"window": 3},
        {"qk_norm": "head"},
        {"attention": "additive"},
        {"ffn": "all-attention", "ffn_width": 3},
        {"span": 4, "span_ramp": 2},
    ),
    ids=str,
)
def test_other_settings_remember(changes: dict[str, Any]) -> None:
    model, ids = make("decoder", positions="relative", **changes), draw(2, 9)
    close(in_segments(model, ids, [4, 3, 2], 9), model(ids))


def test_padding_in_the_memory_is_hidden() -> None:
    model, row = make("decoder", positions="relative"), draw(1, 8)
    padded = torch.cat((torch.full((1, 3), PAD), row), dim=1)
    close(in_segments(model, padded, [5, 6], 20)[:, 3:], model(row))


def test_no_gradient_flows_into_the_memory() -> None:
    model = make("decoder", positions="relative").train()
    segments, ids = model.segments(4), draw(1, 8)
    seen: list[Tensor] = []
    handle = model.tokens.register_forward_hook(lambda _, args, out: seen.append(out))
    model(ids[:, :4], segments=segments)
    second = model(ids[:, 4:], segments=segments)
    handle.remove()
    first, own = torch.autograd.grad(second.sum(), seen, allow_unused=True)
    assert first is None and bool(own.any())


def test_keys_of_the_memory_have_gradients_of_their_weights() -> None:
    model = make("decoder", depth=1, positions="relative").train()
    weight = model.decoder.stack.blocks[0].sublayers["attention"].input.weight
    ids, grads = draw(1, 8), []
    for memory in (0, 4):
        segments = model.segments(memory)
        model(ids[:, :4], segments=segments)
        grads.append(torch.autograd.grad(model(ids[:, 4:], segments=segments).sum(), weight)[0])
    assert not torch.allclose(*grads)


def test_maps_have_columns_for_the_memory() -> None:
    model, ids, maps = make("decoder", positions="relative"), draw(2, 7), {}
    segments = model.segments(3)
    model(ids[:, :4], segments=segments)
    model(ids[:, 4:], segments=segments, maps=maps)
    assert maps["decoder.1.attention"].shape == (2, 4, 3, 6)
    close(maps["decoder.1.attention"].sum(dim=-1), torch.ones(2, 4, 3).double())


def test_the_cost_of_a_segment_is_what_torch_counts() -> None:
    sizes = {"vocab": 60, "width": 32, "depth": 2, "heads": 4, "dropout": 0.0}
    config = ModelConfig(mode="decoder", **sizes, positions="rotary", segment_memory=10)
    model = build(config)
    segments = model.segments()
    model(torch.randint(60, (3, 10)), segments=segments)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randint(60, (3, 24)), segments=segments)
    formula = cost(config, 24, 3)
    assert formula.forward == counter.get_total_flops()
    assert formula.parameters == model.count()
    assert formula.activations > cost(config.replace(segment_memory=0), 24, 3).activations


def test_saved_models_remember(tmp_path: Path) -> None:
    model = make("decoder", positions="relative", segment_memory=5).float()
    model.save(tmp_path)
    again = load(tmp_path).eval()
    assert again.segments().length == 5 and again.config == model.config


def test_mistakes_are_explained() -> None:
    model = make("decoder", positions="rotary")
    with pytest.raises(InputError, match=r"0 positions or more: got -1"):
        SegmentMemory(-1)
    with pytest.raises(ConfigError, match=r"positions=learned are counted from the start of a seg"):
        make("decoder", positions="learned").segments(4)
    with pytest.raises(InputError, match="a cache, or a memory of segments: got both"):
        model(draw(1, 3), cache=model.cache(1), segments=model.segments(4))
    segments = model.segments(4)
    model(draw(2, 3), segments=segments)
    with pytest.raises(InputError, match="the memory is of 2 texts: got a batch of 1"):
        model(draw(1, 3), segments=segments)
    with pytest.raises(ConfigError, match=r"segment_memory needs mode=decoder"):
        build(ModelConfig(vocab=9, mode="encoder", segment_memory=4, positions="relative"))
    with pytest.raises(ConfigError, match=r"positions=sinusoidal are counted from the start"):
        build(ModelConfig(vocab=9, mode="decoder", segment_memory=4))


@pytest.mark.slow
@pytest.mark.trains
def test_a_memory_makes_what_lies_before_the_window_predictable() -> None:
    """The text repeats every 12 tokens; windows have 6, so only a memory can show the last copy."""
    losses = {}
    for memory in (0, 4, 12):
        torch.manual_seed(0)
        sizes = {"vocab": 16, "width": 32, "depth": 1, "heads": 2, "dropout": 0.0}
        model = build(ModelConfig(mode="decoder", **sizes, positions="relative", addnorm="pre"))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(200):
            period = torch.randint(16, (32, 12))
            text = torch.cat((period, period), dim=1)
            segments = model.segments(memory)
            with torch.no_grad():
                model(text[:, :12], segments=segments)
            logits = model(text[:, 12:18], segments=segments)
            loss = torch.nn.functional.cross_entropy(logits.mT, text[:, 13:19])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[memory] = loss.item()
    assert losses[0] > 2.5  # log 16 = 2.77: nothing can be known
    assert losses[12] < 0.5 * losses[0]
