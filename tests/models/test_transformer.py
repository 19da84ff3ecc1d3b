"""Parts that published models need: windows in some blocks only, caps, narrower embeddings."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from addnorm import ModelConfig, build, presets, token_loss
from addnorm.errors import ConfigError
from addnorm.generate import Decoding, generate
from addnorm.generate.frozen import can_pack, pack

SMALL = {"vocab": 13, "width": 16, "depth": 4, "heads": 2, "ffn_width": 24, "length": 32}


def decoder(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    return build(presets.llama(**SMALL, kv_heads=2, **changes)).eval()


# ── Windows in some blocks ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("every", "full"), [(2, {1, 3}), (3, {2}), (1, {0, 1, 2, 3}), (9, set())])
@torch.no_grad()
def test_every_so_many_blocks_ignore_the_window(every: int, full: set[int]) -> None:
    model, maps = decoder(window=3, full_every=every), {}
    ids = torch.randint(13, (1, 9))
    model(ids, maps=maps)
    far = torch.arange(9)[:, None] - torch.arange(9) >= 3
    for layer in range(4):
        weights = maps[f"decoder.{layer}.attention"][0, 0]
        assert bool((weights[far] > 0).all()) == (layer in full)
        assert bool((weights[far] == 0).all()) == (layer not in full)


@torch.no_grad()
def test_with_no_full_block_it_is_the_plain_window() -> None:
    plain, alternating = decoder(window=3), decoder(window=3, full_every=9)
    alternating.load_state_dict(plain.state_dict())
    ids = torch.randint(13, (2, 9))
    torch.testing.assert_close(alternating(ids), plain(ids), rtol=0, atol=1e-6)


@torch.no_grad()
def test_alternating_windows_with_a_cache() -> None:
    options = {"base": 1e6, "window_base": 100.0}
    model = decoder(window=3, full_every=2, position_options=options)
    ids = torch.randint(13, (2, 9))
    cache = model.cache(2)
    steps = [model(ids[:, i : i + 1], cache=cache) for i in range(9)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids), rtol=0, atol=1e-5)
    prompts = ids[:, :4].tolist()
    found = [h.tokens for (h,) in generate(model, prompts, Decoding(max_tokens=5), pad=0)]
    for prompt, tokens in zip(prompts, found, strict=True):
        for token in tokens:
            logits = model(torch.tensor([prompt]))[0, -1]
            logits[0] = -torch.inf  # padding is never written
            assert int(logits.argmax()) == token
            prompt.append(token)


def test_full_every_needs_a_window() -> None:
    with pytest.raises(ConfigError, match=r"model\.full_every needs a window"):
        ModelConfig(vocab=9, full_every=2)


# ── A cap on the logits ───────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_logits_are_capped_softly() -> None:
    plain, capped = decoder(), decoder(logit_cap=0.5)
    ids = torch.randint(13, (2, 9))
    wanted = 0.5 * torch.tanh(plain(ids) / 0.5)
    torch.testing.assert_close(capped(ids), wanted, rtol=0, atol=1e-7)
    assert capped(ids).abs().max() < 0.5
    if can_pack():
        torch.testing.assert_close(pack(capped)(ids), wanted, rtol=0, atol=1e-5)


def test_the_loss_is_that_of_capped_logits() -> None:
    model = decoder(logit_cap=0.5)
    ids = torch.randint(13, (70, 9))  # more tokens than one chunk of the loss has
    targets = torch.where(torch.rand(70, 9) < 0.1, -100, torch.randint(13, (70, 9)))
    wanted = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    found = token_loss(model, model.hidden(ids), targets, smoothing=0.1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for loss in (wanted, found)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_cap_is_for_tokens() -> None:
    with pytest.raises(ConfigError, match=r"model\.logit_cap needs head=token"):
        ModelConfig(vocab=9, mode="encoder", head="class", outputs=2, logit_cap=3.0)


# ── Narrower embeddings, poolers ──────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_narrow_embeddings_are_projected_after_their_norm() -> None:
    model = build(presets.bert(**SMALL, embed_width=6, head="none")).eval()
    ids = torch.randint(13, (2, 9))
    state = model.state_dict()
    x = state["tokens.weight"][ids] + state["encoder.positions.weight"][:9]
    x = x + state["segments.weight"][0]
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    x = (x - mean) / (variance + 1e-12).sqrt()  # gain 1 and offset 0 at first
    x = x @ state["encoder.project.weight"].T + state["encoder.project.bias"]
    whole = build(presets.bert(**SMALL, head="none", input="vectors", segments=0)).eval()
    from addnorm.layers.context import Context

    whole.encoder.stack.load_state_dict(model.encoder.stack.state_dict())
    wanted = whole.encoder.stack(x, Context())
    torch.testing.assert_close(model(ids), wanted, rtol=0, atol=1e-5)


def test_narrow_embeddings_are_for_encoders() -> None:
    with pytest.raises(ConfigError, match=r"model\.embed_width needs mode=encoder"):
        ModelConfig(vocab=9, mode="decoder", embed_width=6)


@pytest.mark.parametrize(
    ("pooler", "activation"), [("dense-relu", F.relu), ("dense-gelu", F.gelu), ("tanh", torch.tanh)]
)
@torch.no_grad()
def test_poolers(pooler: str, activation: object) -> None:
    model = build(presets.bert(**SMALL, head="class", outputs=3, pooler=pooler)).eval()
    ids = torch.randint(13, (2, 9))
    first = model.hidden(ids)[:, 0]
    state = model.state_dict()
    inner = first @ state["head.pooler.0.weight"].T + state["head.pooler.0.bias"]
    wanted = activation(inner) @ state["head.output.weight"].T  # type: ignore[operator]
    torch.testing.assert_close(model(ids), wanted, rtol=0, atol=1e-6)
