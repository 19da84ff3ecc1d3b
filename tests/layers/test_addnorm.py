"""Every arrangement against its formula, written out as a plain loop over blocks and boxes."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError
from addnorm.layers.addnorm import ADDNORMS, Place
from addnorm.layers.norms import NORMS, LayerNorm
from addnorm.models.build import Model, build
from tests import naive
from tests.conftest import slow_off_diagonal
from tests.naive import Stack, randomise_

MODES = ("encoder", "decoder", "encoder-decoder")
CLOSES = {
    "pre",
    "res-post",
    "sandwich",
    "peri",
    "dlcl",
    "layerscale",
    "normformer",
    "sub-ln",
    "dual",
    "mix",
    "lns",
    "parallel",
    "hyper",
    "scaled",
}
"""Arrangements that end with a norm."""


# ── The formulas ──────────────────────────────────────────────────────────────────────────────────


def post(x: Tensor, stack: Stack, input_gain: bool = False) -> Tensor:
    if input_gain:
        x = stack.ends.w["gain"] * x
    for block in stack.blocks:
        for box in block:
            x = box.norm(x + box.f(x))
    return x


def pre(x: Tensor, stack: Stack, shrink: bool = False, bare_start: bool = False) -> Tensor:
    for block in stack.blocks:
        for box in block:
            is_bare = bare_start and box is stack.blocks[0][0]
            x = x + box.f(x if is_bare else box.norm(x))
    return stack.ends.norm(x)


def res_post(x: Tensor, stack: Stack, start: float = 1.0) -> Tensor:
    for block in stack.blocks:
        for box in block:
            x = x + box.norm(box.f(x))
    return stack.ends.norm(x)


def sandwich(x: Tensor, stack: Stack) -> Tensor:
    for block in stack.blocks:
        for box in block:
            x = x + box.norm(box.f(box.norm(x)), "outer")
    return stack.ends.norm(x)


def peri(x: Tensor, stack: Stack) -> Tensor:
    return sandwich(stack.ends.norm(x, "first"), stack)


def admin(x: Tensor, stack: Stack, growth: str = "measured") -> Tensor:
    for block in stack.blocks:
        for box in block:
            x = box.norm(box.w["omega"] * x + box.f(x))
    return x


def b2t(x: Tensor, stack: Stack) -> Tensor:
    for block in stack.blocks:
        bottom = x
        *inner, last = block
        for box in inner:
            x = box.norm(x + box.f(x))
        x = last.norm(bottom + x + last.f(x))
    return x


def dlcl(x: Tensor, stack: Stack) -> Tensor:
    normed = [x]
    for layer, block in enumerate(stack.blocks):
        if layer:
            normed.append(block[0].norm(x, "mix.norm"))
        weight = block[0].w["mix.weight"]
        x = sum(weight[k] * normed[k] for k in range(layer + 1))
        for box in block:
            x = x + box.f(box.norm(x))
    normed.append(stack.ends.norm(x, "mix.norm"))
    weight = stack.ends.w["mix.weight"]
    return stack.ends.norm(sum(weight[k] * normed[k] for k in range(stack.depth + 1)))


def alpha_of(stack: Stack) -> float:
    n, m = stack.depth, stack.peer_depth
    if not m:
        return (2 * n) ** (1 / 4)
    if stack.side == "encoder":
        return 0.81 * (n * n * n * n * m) ** (1 / 16)
    return (3 * n) ** (1 / 4)


def deepnorm(x: Tensor, stack: Stack) -> Tensor:
    for block in stack.blocks:
        for box in block:
            x = box.norm(alpha_of(stack) * x + box.f(x))
    return x


def rezero(x: Tensor, stack: Stack) -> Tensor:
    for block in stack.blocks:
        a = block[0].w["a"]
        for box in block:
            x = x + a * box.f(x)
    return x


def layerscale(x: Tensor, stack: Stack, start: float = 0.1) -> Tensor:
    for block in stack.blocks:
        for box in block:
            x = x + torch.diag(box.w["scale"]).matmul(box.f(box.norm(x))[..., None])[..., 0]
    return stack.ends.norm(x)


def t_fixup(x: Tensor, stack: Stack) -> Tensor:
    for block in stack.blocks:
        for box in block:
            x = x + box.f(x)
    return x


def fixup(x: Tensor, stack: Stack) -> Tensor:
    for block in stack.blocks:
        for box in block:
            branch = box.f(x + box.w["bias_before"])
            x = x + box.w["multiplier"] * branch + box.w["bias_after"]
    return x


def scaled(x: Tensor, stack: Stack, shortcut: float = 0.5, learned: bool = False) -> Tensor:
    for block in stack.blocks:
        for box in block:
            x = (box.w["shortcut"] if learned else shortcut) * x + box.f(box.norm(x))
    return stack.ends.norm(x)


def none(x: Tensor, stack: Stack) -> Tensor:
    for block in stack.blocks:
        for box in block:
            x = box.norm(box.f(x))
    return x


def normformer(x: Tensor, stack: Stack, residual_gain: bool = False) -> Tensor:
    for block in stack.blocks:
        for box in block[:-1]:
            x = x + box.norm(box.f(box.norm(x)), "outer")
        ffn = block[-1]
        shortcut = ffn.w["gain"] * x if residual_gain else x
        x = shortcut + ffn.f(ffn.norm(x))
    return stack.ends.norm(x)


def sub_ln(x: Tensor, stack: Stack) -> Tensor:
    return pre(x, stack)


def dual(x: Tensor, stack: Stack) -> Tensor:
    d = x
    for block in stack.blocks:
        for box in block:
            branch = box.f(x)
            x = box.norm(x + branch)
            d = d + branch
    return x + stack.ends.norm(d)


def mix(x: Tensor, stack: Stack, share: float = 0.25) -> Tensor:
    for layer, block in enumerate(stack.blocks, start=1):
        for box in block:
            is_post = layer <= share * stack.depth
            x = box.norm(x + box.f(x)) if is_post else x + box.f(box.norm(x))
    return stack.ends.norm(x)


def lns(x: Tensor, stack: Stack) -> Tensor:
    for layer, block in enumerate(stack.blocks, start=1):
        for box in block:
            x = x + box.f(box.norm(x) / math.sqrt(layer))
    return stack.ends.norm(x)


def parallel(x: Tensor, stack: Stack) -> Tensor:
    for block in stack.blocks:
        x = x + sum(box.f(box.norm(x)) for box in block)
    return stack.ends.norm(x)


def hyper(x: Tensor, stack: Stack, streams: int = 4) -> Tensor:
    n = streams
    h = [x for _ in range(n)]
    for block in stack.blocks:
        for box in block:
            fixed, strength = box.w["fixed"], box.w["strength"]
            moved = [torch.tanh(box.norm(part, "stream_norm") @ box.w["moving"]) for part in h]

            def weight(i: int, column: int, fixed=fixed, strength=strength, moved=moved) -> Tensor:
                s = strength[1] if column == n + 1 else strength[0]
                return fixed[i, column] + s * moved[i][..., column : column + 1]

            branch = box.f(box.norm(sum(weight(i, 0) * h[i] for i in range(n))))
            h = [
                sum(weight(i, 1 + j) * h[i] for i in range(n)) + weight(j, n + 1) * branch
                for j in range(n)
            ]
    return stack.ends.norm(sum(h))


FORMULAS = {
    "post": post,
    "pre": pre,
    "res-post": res_post,
    "sandwich": sandwich,
    "peri": peri,
    "admin": admin,
    "b2t": b2t,
    "dlcl": dlcl,
    "deepnorm": deepnorm,
    "rezero": rezero,
    "layerscale": layerscale,
    "t-fixup": t_fixup,
    "fixup": fixup,
    "scaled": scaled,
    "none": none,
    "normformer": normformer,
    "sub-ln": sub_ln,
    "dual": dual,
    "mix": mix,
    "lns": lns,
    "parallel": parallel,
    "hyper": hyper,
}
INSIDE = {
    "normformer": ("head-gain", "ffn-norm"),
    "sub-ln": ("attention-norm", "ffn-norm"),
}
OPTIONS = [
    ("post", {"input_gain": True}),
    ("pre", {"shrink": True}),
    ("pre", {"bare_start": True}),
    ("res-post", {"start": 0.0}),
    ("admin", {"growth": "log"}),
    ("layerscale", {"start": 1e-4}),
    ("normformer", {"residual_gain": True}),
    ("mix", {"share": 0.5}),
    ("scaled", {"shortcut": 2.0}),
    ("scaled", {"shortcut": 0.8, "learned": True}),
    ("hyper", {"streams": 2}),
    ("hyper", {"streams": 1}),
]
"""Every option of every arrangement."""


def config(mode: str, addnorm: str, **changes: object) -> ModelConfig:
    settings = dict(
        mode=mode,
        addnorm=addnorm,
        vocab=11,
        pad=0,
        width=8,
        depth=4,
        decoder_depth=3 if mode == "encoder-decoder" else None,
        heads=2,
        ffn_width=12,
        positions="none",
        head="none",
        dropout=0.0,
    )
    return ModelConfig(**(settings | changes))


def make(mode: str, addnorm: str, **changes: object) -> Model:
    torch.manual_seed(0)
    return build(config(mode, addnorm, **changes))


def ids_for(mode: str, padded: bool = True) -> list[Tensor]:
    """Return the token ids for a model of this mode: one tensor, or source and target."""
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 4) if mode == "encoder-decoder" else (5,)
    ids = [torch.randint(1, 11, (2, length), generator=generator) for length in lengths]
    if padded:
        for rows in ids:
            rows[0, -1] = 0
    return ids


def block_of(model: Model, layer: int, side: str = "encoder") -> torch.nn.Module:
    return getattr(model, side).stack.blocks[layer]


# ── Formula ───────────────────────────────────────────────────────────────────────────────────────


def test_every_arrangement_has_a_formula() -> None:
    assert set(FORMULAS) == set(ADDNORMS)
    assert {name for name, kind in ADDNORMS.items() if kind.inside} == set(INSIDE)


@pytest.mark.parametrize(
    ("mode", "norm"), [*((mode, "layer") for mode in MODES), ("encoder-decoder", "rms")]
)
@pytest.mark.parametrize(
    ("addnorm", "options"), [(name, {}) for name in FORMULAS] + OPTIONS, ids=str
)
def test_arrangement_equals_its_formula(addnorm: str, options: dict, mode: str, norm: str) -> None:
    model = make(mode, addnorm, addnorm_options=options, norm=norm)
    model = randomise_(model.double())
    ids = ids_for(mode)
    with torch.no_grad():  # a stream without norms must not grow beyond what a plain exp can take
        for name, parameter in model.named_parameters():
            parameter.mul_(0.1 if name.endswith("multiplier") else 1)

    def formula(x: Tensor, stack: Stack) -> Tensor:
        return FORMULAS[addnorm](x, stack, **options)

    expected, read = naive.run(model, formula, INSIDE.get(addnorm, ()), *ids)
    assert read == set(model.state_dict())
    torch.testing.assert_close(model.hidden(*ids), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("depth", "kinds"), [(2, "00"), (4, "1000"), (7, "1000000"), (8, "11000000")]
)
def test_mix_is_post_in_the_first_quarter(depth: int, kinds: str) -> None:
    model = randomise_(make("encoder", "mix", depth=depth).double())
    ids = ids_for("encoder")

    def formula(x: Tensor, stack: Stack) -> Tensor:
        for kind, block in zip(kinds, stack.blocks, strict=True):
            for box in block:
                x = box.norm(x + box.f(x)) if kind == "1" else x + box.f(box.norm(x))
        return stack.ends.norm(x)

    expected, _ = naive.run(model, formula, (), *ids)
    torch.testing.assert_close(model.hidden(*ids), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("encoder", "decoder"), [("post", "pre"), ("dual", "admin")])
def test_each_side_may_have_its_own_arrangement(encoder: str, decoder: str) -> None:
    model = make("encoder-decoder", encoder, decoder_addnorm=decoder)
    model = randomise_(model.double())
    ids = ids_for("encoder-decoder")

    def formula(x: Tensor, stack: Stack) -> Tensor:
        return FORMULAS[encoder if stack.side == "encoder" else decoder](x, stack)

    wanted, read = naive.run(model, formula, (), *ids)
    assert read == set(model.state_dict())
    torch.testing.assert_close(model.hidden(*ids), wanted, rtol=0, atol=1e-10)


def test_the_decoder_has_options_of_its_own() -> None:
    own = {"decoder_addnorm": "scaled", "decoder_addnorm_options": {"shortcut": 3.0}}
    model = make("encoder-decoder", "layerscale", addnorm_options={"start": 0.25}, **own)
    assert block_of(model, 0).addnorms["ffn"].scale.tolist() == [0.25] * 8
    assert block_of(model, 0, "decoder").addnorms["ffn"].shortcut == 3.0
    changed = model.config.replace(decoder_addnorm="pre")
    assert changed.decoder_addnorm_options == {} and changed.addnorm_options == {"start": 0.25}
    for changes, message in (
        ({"mode": "decoder", "decoder_addnorm": "pre"}, "decoder_addnorm needs mode=encoder-dec"),
        (
            {"decoder_addnorm_options": {"start": 1.0}},
            "_options needs decoder_addnorm",
        ),
        ({"decoder_addnorm": "prae"}, "model.decoder_addnorm has no choice 'prae'"),
        ({"decoder_addnorm": "pre", "decoder_addnorm_options": {"a": 1}}, "has no 'a'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            make(**({"mode": "encoder-decoder", "addnorm": "post"} | changes))


@pytest.mark.parametrize("shortcut", [0.5, 2.0])
def test_the_gradient_of_a_scaled_shortcut_is_the_product_of_its_factors(shortcut: float) -> None:
    """∏λ: with branches of 0 the input's gradient is λ^boxes times that of the output."""
    place = Place(width=8, layer=0, depth=6, role="ffn", step=0, steps=12, side="encoder")
    box = ADDNORMS["scaled"](place, lambda width: LayerNorm(width, 1e-5, True), shortcut=shortcut)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    y = x
    for _ in range(12):
        y = box.double()(y, lambda inner: 0 * inner)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, shortcut**12))


def test_first_and_last_box_of_a_block() -> None:
    places = [
        Place(width=4, layer=step // 3, depth=2, role="ffn", step=step, steps=6, side="decoder")
        for step in range(6)
    ]
    assert [place.first for place in places] == [True, False, False] * 2
    assert [place.last for place in places] == [False, False, True] * 2


# ── Gradients, shapes, training ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("addnorm", "options"), [(name, {}) for name in ADDNORMS] + OPTIONS, ids=str
)
def test_every_parameter_gets_a_gradient(addnorm: str, options: dict, mode: str) -> None:
    model = randomise_(
        make(mode, addnorm, addnorm_options=options, head="token", tie_embeddings="none")
    )
    logits = model(*ids_for(mode))
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    ("addnorm", "norm", "mode"), slow_off_diagonal(list(ADDNORMS), list(NORMS), MODES)
)
def test_every_arrangement_works_with_every_norm(addnorm: str, norm: str, mode: str) -> None:
    changes = dict(norm=norm, head="token", depth=2)
    if norm == "instance" and mode != "encoder":
        with pytest.raises(ConfigError, match=f"norm=instance averages over .* mode={mode}"):
            make(mode, addnorm, **changes)
        return
    model = make(mode, addnorm, **changes)
    ids = ids_for(mode, padded=norm != "instance")
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            logits = model(*ids)
        assert logits.shape == (*ids[-1].shape, 11)
        assert logits.isfinite().all()
    with torch.no_grad():
        assert model.hidden(*ids).shape == (*ids[-1].shape, 8)


@pytest.mark.parametrize(("addnorm", "mode"), slow_off_diagonal(list(ADDNORMS), MODES))
def test_a_stack_without_blocks_applies_only_its_ends(addnorm: str, mode: str) -> None:
    model = make(mode, addnorm, depth=0, decoder_depth=None, norm_eps=1e-30).double()
    ids = ids_for(mode)
    x = model.tokens(ids[-1])
    normed = F.layer_norm(x, (8,), eps=1e-30)
    expected = x + normed if addnorm == "dual" else normed if addnorm in CLOSES else x
    torch.testing.assert_close(model.hidden(*ids), expected)


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("addnorm", [name for name in ADDNORMS if name != "none"])
def test_every_arrangement_learns_to_copy(addnorm: str) -> None:
    """Each position predicts the token before it; the loss of guessing is log 8 = 2.08."""
    sizes = dict(width=32, depth=2, heads=4, ffn_width=64, pad=None, vocab=8, dropout=0.1)
    model = make(
        "decoder", addnorm, **sizes, head="token", tie_embeddings="none", positions="sinusoidal"
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for _ in range(60):
        ids = torch.randint(0, 8, (16, 9))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids)[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    start, end = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert start > 2
    assert end < 1.5


# ── Options ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("addnorm", "options", "message"),
    [
        (
            "pre",
            {"shrnk": True},
            r"model\.addnorm_options has no 'shrnk'\. Did you mean 'shrink'\?",
        ),
        ("layerscale", {"begin": 1.0}, r"addnorm_options has no 'begin'\. Known: start\."),
        ("hyper", {"stream": 2}, r"has no 'stream'\. Did you mean 'streams'\?"),
        ("dual", {"start": 1.0}, r"addnorm_options has no 'start'\. It has no options\."),
        ("prelayer", {}, r"model\.addnorm has no choice 'prelayer'\. "),
        ("res_post", {}, r"model\.addnorm has no choice 'res_post'\. Did you mean 'res-post'\?"),
    ],
)
def test_unknown_options_are_refused(addnorm: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("encoder", addnorm, addnorm_options=options)


@pytest.mark.parametrize(
    ("addnorm", "option", "value", "message"),
    [
        ("admin", "growth", "lgo", "growth must be measured or log: got 'lgo'"),
        ("admin", "growth", 3, "growth must be a string: got 3"),
        ("hyper", "streams", 0, "streams must be 1 or more: got 0"),
        ("hyper", "streams", 2.5, "streams must be a whole number: got 2.5"),
        ("layerscale", "start", "small", "start must be a number, or left out: got 'small'"),
        ("mix", "share", "half", "share must be a number: got 'half'"),
        ("mix", "share", 7.0, "share must be from 0 to 1: got 7.0"),
        ("mix", "share", -0.1, "share must be from 0 to 1: got -0.1"),
        ("pre", "shrink", "no", "shrink must be true or false: got 'no'"),
        ("res-post", "start", "one", "start must be a number: got 'one'"),
    ],
)
def test_impossible_options_are_refused(
    addnorm: str, option: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.addnorm_options\.{re.escape(message)}"):
        make("encoder", addnorm, addnorm_options={option: value})


def test_sub_ln_has_no_shrink_option() -> None:
    with pytest.raises(ConfigError, match=r"addnorm_options has no 'shrink'\. It has no options\."):
        make("encoder", "sub-ln", addnorm_options={"shrink": True})


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_final_norm_needs_an_arrangement_without_one(addnorm: str) -> None:
    if addnorm in CLOSES:
        with pytest.raises(ConfigError, match=f"addnorm={addnorm} ends with one"):
            make("encoder", addnorm, final_norm=True)
        return
    bare, closed = make("encoder", addnorm), make("encoder", addnorm, final_norm=True)
    (ids,) = ids_for("encoder")
    expected = F.layer_norm(bare.hidden(ids), (8,))
    torch.testing.assert_close(closed.hidden(ids), expected)


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_hyper_connections_start_as_pre_norm(mode: str, streams: int) -> None:
    """The sum of n equal streams is n times as large; the final norm removes the factor."""
    tiny = dict(norm_eps=1e-30)
    start = make(mode, "pre", **tiny).double()
    model = make(mode, "hyper", addnorm_options={"streams": streams}, **tiny).double()
    ids = ids_for(mode)
    torch.testing.assert_close(model.hidden(*ids), start.hidden(*ids), rtol=0, atol=1e-10)


@pytest.mark.parametrize("streams", [1, 3, 4])
def test_hyper_connections_have_the_configured_number_of_streams(streams: int) -> None:
    model = make("encoder", "hyper", addnorm_options={"streams": streams})
    x = torch.randn(2, 3, 8)
    assert model.encoder.stack.ends.open(x).shape == (streams, 2, 3, 8)
    for step in range(8):
        box = block_of(model, step // 2).addnorms[("attention", "ffn")[step % 2]]
        fixed = box.fixed
        assert fixed[:, 0].tolist() == [float(i == step % streams) for i in range(streams)]
        assert torch.equal(fixed[:, 1:-1], torch.eye(streams))
        assert torch.equal(fixed[:, -1], torch.ones(streams))


def test_bare_start_omits_only_the_first_norm() -> None:
    bare = make("encoder", "pre", addnorm_options={"bare_start": True}).state_dict()
    whole = make("encoder", "pre").state_dict()
    first = "encoder.stack.blocks.0.addnorms.attention.norm"
    assert set(whole) - set(bare) == {f"{first}.weight", f"{first}.bias"}


@pytest.mark.parametrize("mode", MODES)
def test_res_post_that_starts_at_zero_is_the_identity(mode: str) -> None:
    model = make(mode, "res-post", addnorm_options={"start": 0.0})
    ids = ids_for(mode)
    embedded = model.tokens(ids[-1])
    torch.testing.assert_close(model.hidden(*ids), F.layer_norm(embedded, (8,)))
    assert not torch.allclose(make(mode, "res-post").hidden(*ids), F.layer_norm(embedded, (8,)))


@pytest.mark.parametrize(
    ("depth", "options", "start"),
    [
        (18, {}, 0.1),
        (19, {}, 1e-5),
        (24, {}, 1e-5),
        (25, {}, 1e-6),
        (2, {"start": 0.03}, 0.03),
        (2, {"start": 1}, 1.0),
    ],
)
def test_layerscale_starts_by_depth_or_as_configured(
    depth: int, options: dict, start: float
) -> None:
    place = Place(width=4, layer=0, depth=depth, role="ffn", step=0, steps=depth, side="encoder")
    box = ADDNORMS["layerscale"](place, lambda width: LayerNorm(width, 1e-5, True), **options)
    assert torch.equal(box.scale, torch.full((4,), start))


@pytest.mark.parametrize("steps", [12, 24, 36, 200])
def test_admin_growth_log_depends_on_the_depth_only(steps: int) -> None:
    published = {12: 2.017, 24: 2.601, 36: 3.041, 200: 6.075}
    place = Place(
        width=4, layer=0, depth=steps // 2, role="ffn", step=0, steps=steps, side="encoder"
    )
    for growth, omega in (("log", published[steps]), ("measured", 1.0)):
        box = ADDNORMS["admin"](place, lambda width: LayerNorm(width, 1e-5, True), growth=growth)
        torch.testing.assert_close(box.omega, torch.full((4,), omega), rtol=0, atol=5e-4)


@pytest.mark.parametrize(("share", "posts"), [(0.0, 0), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_mix_share_is_the_fraction_of_post_norm_blocks(share: float, posts: int) -> None:
    model = make("encoder", "mix", addnorm_options={"share": share})
    kinds = [block_of(model, layer).addnorms["ffn"].is_post for layer in range(4)]
    assert kinds == [True] * posts + [False] * (4 - posts)


def test_residual_gain_is_only_on_the_feed_forward_shortcut() -> None:
    with_gain = make("encoder-decoder", "normformer", addnorm_options={"residual_gain": True})
    without = make("encoder-decoder", "normformer")
    added = set(with_gain.state_dict()) - set(without.state_dict())
    assert len(added) == 7
    assert all(name.endswith("addnorms.ffn.gain") for name in added)
    box = block_of(with_gain, 0).addnorms["ffn"]
    with torch.no_grad():
        box.gain.copy_(torch.arange(8.0))
    x = torch.randn(2, 3, 8)
    assert torch.equal(box(x, torch.zeros_like), torch.arange(8.0) * x)


def test_rezero_starts_as_the_identity_and_only_its_scalar_has_a_gradient() -> None:
    model = make("encoder", "rezero")
    (ids,) = ids_for("encoder")
    hidden = model.hidden(ids)
    assert torch.equal(hidden, model.tokens(ids))
    hidden.pow(2).sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    scalars = {f"encoder.stack.blocks.{layer}.addnorms.attention.a" for layer in range(4)}
    assert moved == scalars | {"tokens.weight"}


@pytest.mark.parametrize("addnorm", ["rezero", "t-fixup"])
def test_arrangements_without_a_norm_have_none(addnorm: str) -> None:
    assert not [name for name in make("encoder", addnorm).state_dict() if ".norm." in name]


@pytest.mark.parametrize("mode", MODES)
def test_post_output_has_mean_zero_and_norm_root_width(mode: str) -> None:
    """Before γ and β, which start at 1 and 0."""
    hidden = make(mode, "post", norm_eps=1e-30).double().hidden(*ids_for(mode))
    torch.testing.assert_close(hidden.mean(-1), torch.zeros_like(hidden[..., 0]))
    torch.testing.assert_close(hidden.norm(dim=-1), torch.full_like(hidden[..., 0], math.sqrt(8)))
