"""Low-rank adapters: the formula, nothing changed at first, merging, what is trained."""

import copy

import pytest
import torch
from torch import nn

from addnorm import build, presets
from addnorm.errors import ConfigError
from addnorm.models.adapters import (
    Adapter,
    adapt_,
    adapted_layers,
    adapter_state,
    load_adapter_,
    merge_,
    merged_state,
)

SMALL = {"vocab": 17, "width": 16, "depth": 2, "heads": 4, "ffn_width": 24, "length": 16}
MODELS = {
    "gpt2": presets.gpt2(**SMALL),
    "llama": presets.llama(**SMALL, kv_heads=2),
    "bert": presets.bert(**SMALL, head="class", outputs=3, pooler="tanh", init="xavier"),
    "t5": presets.t5(**SMALL, head_width=6),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build(MODELS[name]).eval()


def run(name: str, model: nn.Module) -> torch.Tensor:
    ids = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(1))
    return model(ids, ids) if name == "t5" else model(ids)


@torch.no_grad()
def move_(model: nn.Module) -> None:
    """Move adapters away from where they start, so that they do something."""
    generator = torch.Generator().manual_seed(2)
    for name, part in model.named_parameters():
        if "updates" in name:
            part.copy_(0.3 * torch.randn(part.shape, generator=generator))
        elif "magnitudes" in name:
            part.mul_(1 + 0.2 * torch.randn(part.shape, generator=generator))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_from_nothing_to_merged(name: str, dora: bool) -> None:
    model = make(name)
    before = run(name, model)
    adapt_(model, Adapter(roles="attention,ffn", rank=2, dora=dora))
    torch.testing.assert_close(run(name, model), before, rtol=0, atol=1e-5)
    move_(model)
    adapted = run(name, model)
    assert (adapted - before).abs().max() > 1e-2
    plain = build(MODELS[name]).eval()
    plain.load_state_dict(merged_state(model))
    torch.testing.assert_close(run(name, plain), adapted, rtol=0, atol=2e-5)
    merge_(model)
    assert not adapted_layers(model) and model.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(run(name, model), adapted, rtol=0, atol=2e-5)
    assert all(part.requires_grad for part in model.parameters())


@torch.no_grad()
def test_the_weight_is_the_formula() -> None:
    """Row by row: queries and values of one fused matrix have updates, keys do not."""
    for dora in (False, True):
        model = make("llama")
        kept = copy.deepcopy(model)
        roles = "attention.query,attention.value"
        adapt_(model, Adapter(roles=roles, rank=3, alpha=6.0, dora=dora))
        move_(model)
        path = "decoder.stack.blocks.1.sublayers.attention.input"
        layer, old = model.get_submodule(path), kept.get_submodule(path).weight
        spans = {"query": range(16), "value": range(24, 32)}
        for row in range(32):
            part = next((name for name, span in spans.items() if row in span), None)
            wanted = old[row].clone()
            if part is not None:
                update = layer.updates[part]
                for k in range(3):
                    wanted += 2.0 * update.B[row - spans[part].start, k] * update.A[k]
                if dora:
                    size = layer.magnitudes[part][row - spans[part].start]
                    wanted = size * wanted / (wanted**2).sum().sqrt()
            torch.testing.assert_close(layer.weight[row], wanted, rtol=1e-5, atol=1e-6)


def test_only_adapters_and_new_heads_get_gradients() -> None:
    model = make("bert")
    names = adapt_(model, Adapter(roles="attention", rank=2))
    assert len(names) == 4
    run("bert", model).sum().backward()
    moved = {name for name, part in model.named_parameters() if part.grad is not None}
    assert moved == set(adapter_state(model))
    assert all("updates" in name or name.startswith("head.") for name in moved)
    share = sum(t.numel() for t in adapter_state(model).values()) / model.count()
    assert share < 0.5


def test_an_adapter_is_restored_from_its_small_state() -> None:
    model = make("gpt2")
    adapt_(model, Adapter(rank=2))
    move_(model)
    again = make("gpt2")
    adapt_(again, Adapter(rank=2))
    load_adapter_(again, adapter_state(model))
    assert torch.equal(run("gpt2", again), run("gpt2", model))
    other = make("gpt2")
    adapt_(other, Adapter(rank=3))
    with pytest.raises(ConfigError, match=r"does not belong to this model: .* must have shape"):
        load_adapter_(other, adapter_state(model))


def test_dropout_is_on_the_update_alone() -> None:
    model = make("gpt2")
    adapt_(model, Adapter(rank=2, dropout=0.5))
    plain = run("gpt2", model)
    for part in model.modules():
        part.training = type(part) is nn.Dropout
    assert torch.equal(run("gpt2", model), plain), "an update of 0 stays 0"
    move_(model)
    assert not torch.equal(run("gpt2", model), run("gpt2", model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": "attn"}, "an adapter has no role 'attn'"),
        ({"roles": "attention.gate"}, "an adapter has no role 'attention.gate'"),
        ({"rank": 0}, "the rank of an adapter must be 1 or more: got 0"),
        ({"dora": True, "dropout": 0.1}, "DoRA has no dropout"),
    ],
)
def test_what_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Adapter(**options)  # type: ignore[arg-type]


def test_roles_that_a_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match="there is no layer for an adapter of 'memory'"):
        adapt_(make("gpt2"), Adapter(roles="memory"))
