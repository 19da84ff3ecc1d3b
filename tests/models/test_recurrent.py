"""The recurrent encoder-decoder with additive attention, against a loop over its formulas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import addnorm
from addnorm import Mask, ModelConfig, build, cost
from addnorm.errors import ConfigError, InputError
from addnorm.generate import Decoding, score, translate
from addnorm.lens.places import find_sides
from tests.conftest import PAD, VOCAB, draw, make
from tests.naive import Weights


def gru(x: Tensor, h: Tensor, w: Weights, suffix: str = "") -> Tensor:
    """Return one step of torch's GRU: r, z, n = σ(·), σ(·), tanh(· + r ⊙ ·); (1 − z) n + z h."""
    own = w[f"weight_ih{suffix}"] @ x + w[f"bias_ih{suffix}"]
    back = w[f"weight_hh{suffix}"] @ h + w[f"bias_hh{suffix}"]
    (xr, xz, xn), (hr, hz, hn) = own.chunk(3), back.chunk(3)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    return (1 - z) * torch.tanh(xn + r * hn) + z * h


def naive(model: Any, source: Tensor, target: Tensor) -> Tensor:
    """Return the logits of one pair without padding, by the formulas of models/recurrent.py."""
    w, width, depth = Weights(model.state_dict()), model.config.width, model.config.depth
    embedding = w["tokens.weight"]
    factor = width**0.5 if model.config.scale_embedding else 1.0
    x = [factor * embedding[i] for i in source]
    encoder = w.under("encoder", "gru")
    for layer in range(depth):
        forward, backward = [], []
        h = g = torch.zeros(width // 2, dtype=embedding.dtype)
        for each, mirrored in zip(x, x[::-1], strict=True):
            h, g = (
                gru(each, h, encoder, f"_l{layer}"),
                gru(mirrored, g, encoder, f"_l{layer}_reverse"),
            )
            forward.append(h)
            backward.insert(0, g)
        x = [torch.cat(pair) for pair in zip(forward, backward, strict=True)]
    d = w.under("decoder")
    start = torch.tanh(d["start.weight"] @ x[0][width // 2 :] + d["start.bias"])
    states = list(start.view(depth, width))
    logits = []
    for token in target:
        y = factor * embedding[token]
        query = d["query.weight"] @ states[0]
        keys = [d["key.weight"] @ h + d["key.bias"] for h in x]
        scores = torch.stack([d["vector"] @ torch.tanh(query + key) for key in keys])
        weights = scores.exp() / scores.exp().sum()
        context = sum(a * h for a, h in zip(weights, x, strict=True))
        state = torch.cat((y, context))
        for layer in range(depth):
            state = states[layer] = gru(state, states[layer], d.under("cells", layer))
        pairs = d["readout.weight"] @ torch.cat((state, y, context)) + d["readout.bias"]
        readout = torch.maximum(pairs[0::2], pairs[1::2])
        logits.append(embedding @ readout)
    assert w.read == set(model.state_dict())
    return torch.stack(logits)


@pytest.mark.parametrize("depth", [1, 2])
def test_it_equals_its_formulas(depth: int) -> None:
    model = make("encoder-decoder", mixing="recurrent", depth=depth)
    source, target = draw(2, 6), draw(2, 5)
    source[1, 4:] = PAD
    logits, maps = model(source, target), {}
    assert torch.allclose(logits[0], naive(model, source[0], target[0]))
    assert torch.allclose(logits[1], naive(model, source[1, :4], target[1]))
    assert torch.equal(model(source, target, maps=maps), logits)
    weights = maps["decoder.0.memory"]
    assert weights.shape == (2, 1, 5, 6) and torch.allclose(
        weights.sum(-1), torch.ones(()).double()
    )
    assert not weights[1, :, :, 4:].any()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cache_and_beams_change_nothing(depth: int) -> None:
    model = make("encoder-decoder", mixing="recurrent", depth=depth)
    source, target = draw(2, 6), draw(4, 5)
    source[1, 3:] = PAD
    mask = Mask.padding(source != PAD)
    memory, cache = model.encode(source), model.cache(4, 8)
    parts = [
        model.decode(part, memory, memory_mask=mask, cache=cache)
        for part in target.split([2, 1, 2], dim=1)
    ]
    whole = model.decode(target, memory, memory_mask=mask)
    assert torch.allclose(torch.cat(parts, dim=1), whole)
    cache.reorder(torch.tensor([1, 1, 2, 3]))
    after = model.decode(target[:, :1], memory, memory_mask=mask, cache=cache)
    longer = torch.cat((target, target[:, :1]), dim=1)
    longer[0, :5] = target[1]
    assert torch.allclose(after, model.decode(longer, memory, memory_mask=mask)[:, -1:])


def test_hypotheses_have_the_scores_of_the_model() -> None:
    model, sources = make("encoder-decoder", mixing="recurrent"), [[5, 6, 7, 8], [9], [4, 4]]
    settings = Decoding(beam=3, nbest=2, max_tokens=6, penalty="none")
    found = list(translate(model, sources, settings, begin=1, end=2))
    best = [hypotheses[0] for hypotheses in found]
    again = score(model, sources, [list(h.tokens) for h in best], begin=1, end=2)
    for hypothesis, scored in zip(best, again, strict=True):
        if hypothesis.finished:
            assert hypothesis.score == pytest.approx(sum(scored))


def test_every_parameter_has_a_gradient_and_is_counted(tmp_path: Path) -> None:
    model = make("encoder-decoder", mixing="recurrent", depth=2, decoder_depth=1)
    model(draw(2, 6), draw(2, 5)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    assert cost(model.config, length=6).parameters == model.count()
    model.float().save(tmp_path / "model")
    again, ids = addnorm.load(tmp_path / "model"), draw(2, 5)
    assert torch.allclose(again(ids, ids), model(ids, ids), atol=1e-5)


def test_what_it_cannot_do_is_explained() -> None:
    sizes: dict[str, Any] = {
        "vocab": VOCAB,
        "width": 16,
        "heads": 4,
        "depth": 1,
        "mixing": "recurrent",
    }
    with pytest.raises(ConfigError, match="needs mode=encoder-decoder: got mode=decoder"):
        build(ModelConfig(**sizes, mode="decoder"))
    with pytest.raises(ConfigError, match=r"an even width, .*got width=15, depth=1"):
        build(ModelConfig(**(sizes | {"width": 15, "heads": 5})))
    with pytest.raises(ConfigError, match="translates tokens: got input=tokens, head=none"):
        build(ModelConfig(**sizes, head="none"))
    model = build(ModelConfig(**sizes))
    with pytest.raises(InputError, match="mixing=recurrent has no stack of blocks to take apart"):
        find_sides(model)
    with pytest.raises(InputError, match="padding after the text"):
        model.encode(draw(1, 4), mask=Mask.padding(torch.tensor([[False, True, True, True]])))
    with pytest.raises(InputError, match="a recurrent encoder hides padding only"):
        model.encode(draw(1, 4), mask=Mask.window(2))
    with pytest.raises(InputError, match="2 rows of memory, 3 targets"):
        model.decode(draw(3, 2), model.encode(draw(2, 4)))


@pytest.mark.parametrize("mixing", ["attention", "recurrent"])
def test_targets_that_do_not_fit_the_memory_are_refused_with_one_message(mixing: str) -> None:
    model = make("encoder-decoder", mixing=mixing)
    memory = torch.zeros(2, 3, model.config.width)
    with pytest.raises(InputError, match="2 rows of memory, 3 targets"):
        model.decode(torch.ones(3, 1, dtype=torch.int64), memory)
    with pytest.raises(InputError, match="the memory must be a tensor"):
        model.decode(torch.ones(3, 1, dtype=torch.int64), None)
    with pytest.raises(InputError, match="mask"):
        model.decode(torch.ones(2, 1, dtype=torch.int64), memory, memory_mask=torch.ones(2, 3))
