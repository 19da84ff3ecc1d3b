"""Wrong arguments to a model are one clear error; torch.func and meta work."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from addnorm import Cache, Mask, ModelConfig, build
from addnorm.errors import InputError
from tests.conftest import make

IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
VISIBLE = torch.ones(2, 3, dtype=torch.bool)
OTHER_CACHE = (
    r"the cache is of another model: only the model that created it, and copies of that model, can "
    r"use it\. Create it with the model's own cache\(\)\."
)


def empty_cache(heads: int) -> Cache:
    """Return a cache that no model has created."""
    shape = {"depth": 2, "batch": 2, "heads": heads, "length": 8, "head_width": 16 // heads}
    return Cache(**shape, dtype=torch.float64, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda m: m(IDS, mask=VISIBLE), r"a mask must be an addnorm\.Mask: got Tensor\. Try Mask"),
        (lambda m: m([[1, 2]]), r"the input of a model must be a tensor: got list\. Try torch"),
        (lambda m: m(None), "must be a tensor: got NoneType"),
        (lambda m: m(IDS.float()), "token ids must be integers of shape .*: got torch.float32"),
        (lambda m: m(IDS.cfloat()), "token ids must be integers of shape .*: got torch.complex64"),
        (lambda m: m(IDS.to("meta")), r"on the device of the model, cpu: got meta\. Try .to\('cpu"),
        (lambda m: m(IDS, cache=3), r"a cache must be what model\.cache\(batch\) returns: got int"),
        (
            lambda m: m(IDS, cache=make("decoder", depth=3).cache(2)),
            r"the cache is of another model: it has 3 layers, this model has 2\. Create it with",
        ),
        (lambda m: m(IDS, cache=make("decoder").cache(2)), OTHER_CACHE),
        (lambda m: m(IDS, cache=make("encoder-decoder").cache(2)), OTHER_CACHE),
        (
            lambda m: m(IDS, cache=empty_cache(heads=2)),
            r"of another model: it has 2 layers with 2 heads of width 8; layer 0 here has 4 heads",
        ),
        (lambda m: Mask.causal(-1), r"a prefix must be 0 or more: got -1\. Try 0\."),
        (lambda m: Mask.causal(torch.tensor([2, -3])), "a prefix must be 0 or more: got -3"),
        (
            lambda m: m.cache(2).reorder(torch.tensor([0, 2])),
            r"the rows of this cache are 0 to 1: got 2\. Check the indices\.",
        ),
        (lambda m: Mask.causal("2"), r"a prefix must be a tensor: got str\. Try Mask\.causal\(3\)"),
        (lambda m: Mask.window(1.5), r"a window must span at least 1 position: got 1\.5\. Try"),
        (
            lambda m: Mask.padding([[True]]),
            r"a padding mask must be a tensor: got list\. Try token",
        ),
        (lambda m: Mask.pattern(None), "a mask pattern must be a tensor: got NoneType"),
        (lambda m: Mask.grouped([[1]]), "groups must be a tensor: got list"),
        (lambda m: Mask.causal() & VISIBLE, r"combined with another addnorm\.Mask: got Tensor"),
        (
            lambda m: m(IDS, mask=Mask.padding(VISIBLE.to("meta"))),
            r"a mask must be on the device of the input, cpu: got meta\. Make it of",
        ),
        (
            lambda m: m(IDS.to_sparse()),
            r"must be dense: got torch.sparse_coo\. Try \.to_dense\(\)",
        ),
        (lambda m: m.cache(2, 8.5), r"the length of a cache must be a whole number above 0: got 8"),
        (lambda m: m.cache(-1), r"the batch of a cache must be a whole number above 0: got -1\."),
        (
            lambda m: m.cache(2).reorder(torch.tensor([0, 1], device="meta")),
            r"the indices must be on the device of the cache, cpu: got meta\. Try \.to\('cpu'\)",
        ),
        (lambda m: m.cache(2).reorder(torch.tensor([-1, 0])), "are 0 to 1: got -1"),
        (lambda m: m.cache(2).reorder([0, 1]), r"reordered by integers of shape \(rows,\): got \["),
        (lambda m: m.cache(2).reorder(torch.tensor(1)), "got torch.int64 of shape"),
    ),
)
def test_misuse_of_a_decoder(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(make("decoder"))


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda m: m(IDS, None), "the target must be a tensor: got NoneType"),
        (lambda m: m(IDS, IDS, source_mask=VISIBLE), "a mask must be an addnorm.Mask: got Tensor"),
        (lambda m: m(IDS, IDS, target_mask=VISIBLE), "a mask must be an addnorm.Mask: got Tensor"),
        (lambda m: m.decode(IDS, None), r"the memory must be a tensor: .* Try model\.encode"),
        (lambda m: m.decode(IDS, m.encode(IDS), memory_mask=VISIBLE), "a mask must be an addnorm"),
        (lambda m: m.decode(IDS, m.encode(IDS), cache=make("decoder").cache(2)), OTHER_CACHE),
    ),
)
def test_misuse_of_an_encoder_decoder(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(make("encoder-decoder"))


@pytest.mark.parametrize("mixing", ("attention", "recurrent"))
def test_the_cache_of_another_encoder_decoder(mixing: str) -> None:
    model, other = (make("encoder-decoder", mixing=mixing) for _ in range(2))
    cache, memory = model.cache(2), model.encode(IDS)
    with pytest.raises(InputError, match=OTHER_CACHE):
        other.decode(IDS, memory, cache=cache)
    assert cache.used == 0
    model.decode(IDS[:, :1], memory, cache=cache)
    with pytest.raises(InputError, match=OTHER_CACHE):
        other.decode(IDS[:, 1:], memory, cache=cache)


@torch.no_grad()
def test_a_cache_belongs_to_the_model_that_uses_it_first_and_to_its_copies() -> None:
    model, cache = make("decoder"), empty_cache(heads=4)
    model(IDS[:, :1], cache=cache)
    with pytest.raises(InputError, match=OTHER_CACHE):
        make("decoder")(IDS[:, 1:], cache=cache)
    other, copied = deepcopy((model, cache))
    assert torch.equal(other(IDS[:, 1:], cache=copied), model(IDS[:, 1:], cache=cache))
    assert torch.equal(other(IDS[:, 1:], cache=cache), model(IDS[:, 1:], cache=copied))


def loss(model: Any, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = functional_call(model, weights, (ids[None],))
    return logits.logsumexp(-1).sum()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sequence_by_vmap() -> None:
    model, ids = make("decoder"), torch.tensor([[1, 2, 3], [4, 5, 6]])
    weights = {name: p.detach() for name, p in model.named_parameters()}
    together = vmap(grad(lambda w, x: loss(model, w, x)), (None, 0))(weights, ids)
    for row in range(2):
        alone = grad(lambda w: loss(model, w, ids[row]))(weights)  # noqa: B023
        for name in weights:
            torch.testing.assert_close(together[name][row], alone[name])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_a_model_in_training_mode_by_vmap() -> None:
    """With dropout, which vmap draws anew for each sequence."""
    model = make("decoder", dropout=0.5).train()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    gradient = grad(lambda w, x: loss(model, w, x))
    each = vmap(gradient, (None, 0), randomness="different")(weights, IDS[:1].repeat(2, 1))
    assert not torch.equal(*each["tokens.weight"])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_differentiation_equals_backward_mode() -> None:
    model, ids = make("decoder"), torch.tensor([1, 2, 3])
    weights = {name: p.detach() for name, p in model.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in weights.items()}
    _, forward = jvp(lambda w: loss(model, w, ids), (weights,), (tangents,))
    gradients = grad(lambda w: loss(model, w, ids))(weights)
    backward = sum((gradients[name] * tangents[name]).sum() for name in weights)
    torch.testing.assert_close(forward, backward)


def test_a_forward_pass_on_meta_gives_the_shape() -> None:
    with torch.device("meta"):
        model = build(ModelConfig(mode="decoder", vocab=9, width=8, depth=1, heads=2, pad=0))
        assert model(torch.ones(2, 3, dtype=torch.long)).shape == (2, 3, 9)
