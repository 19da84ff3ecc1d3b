"""Initial weights: the common rule and that of each arrangement; measuring and folding Admin."""

import math

import pytest
import torch
from torch import Tensor, nn

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError
from addnorm.layers.addnorm import ADDNORMS, Place
from addnorm.layers.init import measure_
from addnorm.layers.norms import LayerNorm
from addnorm.models.build import Model, build
from addnorm.models.fold_admin import fold
from tests import naive
from tests.naive import Stack, randomise_

MODES = ("encoder", "decoder", "encoder-decoder")
DEPTH, DECODER_DEPTH = 3, 2


def make(mode: str, addnorm: str, **changes: object) -> Model:
    """Return a model; every arrangement gets the same random numbers."""
    settings = dict(
        mode=mode,
        addnorm=addnorm,
        vocab=13,
        pad=0,
        width=8,
        depth=DEPTH,
        decoder_depth=DECODER_DEPTH if mode == "encoder-decoder" else None,
        heads=2,
        ffn_width=16,
        positions="none",
        head="none",
        dropout=0.0,
    )
    torch.manual_seed(0)
    return build(ModelConfig(**(settings | changes)))


def ids_for(mode: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = (7, 5) if mode == "encoder-decoder" else (7,)
    ids = [torch.randint(1, 13, (3, length), generator=generator) for length in lengths]
    ids[0][0, -2:] = 0
    return ids


def matrices(model: Model) -> dict[tuple[str, int, str, str], Tensor]:
    """Every matrix by side, block, role and kind."""
    return {
        (name, layer, role, kind): weight.detach().clone()
        for name in ("encoder", "decoder")
        if hasattr(model, name)
        for layer, block in enumerate(getattr(model, name).stack.blocks)
        for role, sublayer in block.sublayers.items()
        for kind, weight in sublayer.matrices().items()
    }


def ratios(model: Model, start: Model) -> dict[tuple[str, str, str], float]:
    """Return the factor between the matrices of two models, equal in all blocks."""
    factors: dict[tuple[str, str, str], float] = {}
    others = matrices(start)
    for (side, _, role, kind), weight in matrices(model).items():
        ratio = weight / others[side, _, role, kind]
        first = factors.setdefault((side, role, kind), float(ratio.flatten()[0]))
        torch.testing.assert_close(ratio, torch.full_like(ratio, first))
    return factors


# ── Factors set by the arrangement ────────────────────────────────────────────────────────────────


def deepnorm_beta(side: str, role: str, both: bool) -> float:
    if not both:
        return (8 * DEPTH) ** -0.25
    if side == "encoder":
        return 0.87 * (DEPTH**4 * DECODER_DEPTH) ** (-1 / 16)
    return (12 * DECODER_DEPTH) ** -0.25


def sub_ln_gain(side: str, role: str, both: bool) -> float:
    if role == "memory":
        return 1.0
    if not both:
        return math.sqrt(math.log(2 * DEPTH))
    if side == "encoder":
        return math.sqrt(math.log(3 * DECODER_DEPTH) * math.log(2 * DEPTH) / 3)
    return math.sqrt(math.log(3 * DECODER_DEPTH))


def t_fixup_scale(side: str, role: str, both: bool) -> float:
    if side == "decoder" and both:
        return (9 * DECODER_DEPTH) ** -0.25
    return 0.67 * DEPTH**-0.25


RULES = {"deepnorm": deepnorm_beta, "sub-ln": sub_ln_gain, "t-fixup": t_fixup_scale}


@pytest.mark.parametrize("init", ["xavier", "normal", "torch"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("addnorm", RULES)
def test_values_outputs_and_feed_forwards_are_scaled(addnorm: str, mode: str, init: str) -> None:
    """Queries and keys are not scaled."""
    factors = ratios(make(mode, addnorm, init=init), make(mode, "post", init=init))
    assert {kind for _, _, kind in factors} == {"query", "key", "value", "output", "input"}
    for (side, role, kind), ratio in factors.items():
        scaled = kind in ("value", "output", "input")
        expected = RULES[addnorm](side, role, mode == "encoder-decoder") if scaled else 1.0
        assert ratio == pytest.approx(expected, rel=1e-5), (side, role, kind)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("addnorm", RULES)
def test_a_gate_is_not_scaled(addnorm: str, mode: str) -> None:
    factors = ratios(make(mode, addnorm, ffn="swiglu"), make(mode, "post", ffn="swiglu"))
    for (side, role, kind), ratio in factors.items():
        if role == "ffn":
            factor = RULES[addnorm](side, role, mode == "encoder-decoder")
            assert ratio == pytest.approx(1.0 if kind == "gate" else factor, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_shrinking_divides_the_outputs_by_root_steps(mode: str) -> None:
    """1/√(2L), and 1/√(3L) where a block attends to a memory as well."""
    shrunk = make(mode, "pre", addnorm_options={"shrink": True})
    for (side, _, kind), ratio in ratios(shrunk, make(mode, "pre")).items():
        both = side == "decoder" and mode == "encoder-decoder"
        steps = 3 * DECODER_DEPTH if both else 2 * DEPTH
        assert ratio == pytest.approx(steps**-0.5 if kind == "output" else 1.0, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_fixup_starts_as_the_identity(mode: str) -> None:
    """Weights of the first layer of a branch by 1/√n, of the last by 0; n branches in the stack."""
    for (side, _, kind), ratio in ratios(make(mode, "fixup"), make(mode, "post")).items():
        both = side == "decoder" and mode == "encoder-decoder"
        steps = 3 * DECODER_DEPTH if both else 2 * DEPTH
        wanted = {"output": 0.0, "value": steps**-0.5, "input": steps**-0.5}.get(kind, 1.0)
        assert ratio == pytest.approx(wanted, rel=1e-5), (side, kind)
    model = make(mode, "fixup")
    for side, _ in model.sides():
        x = torch.randn(2, 3, model.config.width)
        for _, box in side.stack.steps():
            assert torch.equal(box(x, torch.zeros_like), x)


@pytest.mark.parametrize("addnorm", sorted(set(ADDNORMS) - {*RULES, "fixup"}))
def test_other_arrangements_keep_the_common_initialisation(addnorm: str) -> None:
    factors = ratios(make("encoder-decoder", addnorm), make("encoder-decoder", "post"))
    assert set(factors.values()) == {1.0}


@pytest.mark.parametrize(
    ("mode", "depth", "alpha", "beta"),
    [
        ("encoder", 12, 2.2134, 0.3195),
        ("decoder", 12, 2.2134, 0.3195),
        ("encoder", 18, 2.4495, 0.2887),
        ("encoder", 100, 3.7606, 0.1880),
    ],
)
def test_deepnorm_constants_of_one_stack(mode: str, depth: int, alpha: float, beta: float) -> None:
    box = deepnorm_box(side=mode, depth=depth, peer_depth=0)
    assert (box.alpha, box.beta) == pytest.approx((alpha, beta), abs=5e-5)


@pytest.mark.parametrize(
    ("depth", "encoder", "decoder"),
    [(6, (1.4179, 0.4970), (2.0598, 0.3433)), (18, (1.9987, 0.3526), (2.7108, 0.2608))],
)
def test_deepnorm_constants_of_two_stacks(depth: int, encoder: tuple, decoder: tuple) -> None:
    for side, expected in (("encoder", encoder), ("decoder", decoder)):
        box = deepnorm_box(side=side, depth=depth, peer_depth=depth)
        assert (box.alpha, box.beta) == pytest.approx(expected, abs=5e-5)


def deepnorm_box(side: str, depth: int, peer_depth: int) -> nn.Module:
    place = Place(
        width=4,
        layer=0,
        depth=depth,
        role="ffn",
        step=1,
        steps=2 * depth,
        side=side,
        peer_depth=peer_depth,
    )
    return ADDNORMS["deepnorm"](place, lambda width: LayerNorm(width, 1e-5, True))


@pytest.mark.parametrize(
    ("mode", "tie", "depths"),
    [
        ("encoder", "all", {"tokens": DEPTH}),
        ("decoder", "all", {"tokens": DEPTH}),
        ("encoder-decoder", "all", {"tokens": DEPTH}),
        ("encoder-decoder", "none", {"source_tokens": DEPTH, "tokens": DECODER_DEPTH}),
    ],
)
def test_t_fixup_scales_the_embedding(mode: str, tie: str, depths: dict[str, int]) -> None:
    """std = width^-1/2 (9L)^-1/4, within five standard deviations of its estimate."""
    vocab = 4000
    model = make(mode, "t-fixup", tie_embeddings=tie, vocab=vocab)
    for name, depth in depths.items():
        weight = getattr(model, name).weight.detach()
        expected = 8**-0.5 * (9 * depth) ** -0.25
        assert float(weight.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * vocab * 8))
        assert abs(float(weight.mean())) < 5 * expected / math.sqrt(vocab * 8)


@pytest.mark.parametrize("init", ["xavier", "normal", "torch"])
def test_each_matrix_is_filled_separately(init: str) -> None:
    """Xavier's bound is that of query, key and value separately, not of the stacked matrix."""
    width, ffn_width = 64, 96
    model = make("encoder", "post", init=init, init_std=0.03, width=width, ffn_width=ffn_width)
    for (_, _, role, kind), weight in matrices(model).items():
        fan_in = ffn_width if (role, kind) == ("ffn", "output") else width
        fan_out = ffn_width if (role, kind) == ("ffn", "input") else width
        assert weight.shape == (fan_out, fan_in)
        bound = math.sqrt(6 / (fan_in + fan_out)) if init == "xavier" else fan_in**-0.5
        if init == "normal":
            assert float(weight.std()) == pytest.approx(0.03, rel=5 / math.sqrt(2 * weight.numel()))
        else:
            assert 0.99 * bound < float(weight.abs().max()) <= bound


def test_biases_start_at_zero() -> None:
    for name, parameter in make("encoder-decoder", "pre").named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name


# ── Admin's measuring pass ────────────────────────────────────────────────────────────────────────


def measured(model: Model, *ids: Tensor) -> dict[str, list[float]]:
    """The ω of each stack by a plain loop: r ← √(Var[ω x] + Var[F(x)]), ω the r before."""
    omegas_by_stack: dict[str, list[float]] = {}

    def formula(x: Tensor, stack: Stack) -> Tensor:
        omegas = omegas_by_stack.setdefault(f"{stack.side}.stack", [])
        ratio = 1.0
        for block in stack.blocks:
            for box in block:
                omegas.append(ratio)
                branch = box.f(x)
                both = ratio * x
                ratio = math.sqrt(variance(both) + variance(branch))
                x = box.norm(both + branch)
        return x

    naive.run(model, formula, (), *ids)
    return omegas_by_stack


def variance(x: Tensor) -> float:
    numbers = x.flatten()
    mean = numbers.sum() / len(numbers)
    return float(((numbers - mean) ** 2).sum() / (len(numbers) - 1))


@pytest.mark.parametrize("mode", MODES)
def test_measuring_equals_the_plain_loop(mode: str) -> None:
    model = randomise_(make(mode, "admin").double())
    ids = ids_for(mode)
    expected = measured(model, *ids)
    omegas_by_stack = measure_(model, lambda: model(*ids))
    assert set(omegas_by_stack) == set(expected)
    for stack, omegas in expected.items():
        assert omegas[0] == 1
        assert omegas_by_stack[stack] == pytest.approx(omegas, rel=1e-9)
        assert len(set(omegas)) == len(omegas)
        blocks = model.get_submodule(stack).blocks
        boxes = [box for block in blocks for box in block.addnorms.values()]
        for box, omega in zip(boxes, omegas, strict=True):
            torch.testing.assert_close(box.omega, torch.full_like(box.omega, omega))


def test_measuring_twice_gives_the_same_omegas() -> None:
    model = make("encoder-decoder", "admin").double()
    ids = ids_for("encoder-decoder")
    first = measure_(model, lambda: model(*ids))
    assert measure_(model, lambda: model(*ids)) == first


@torch.no_grad()
def test_omega_grows_with_the_variance_of_the_branches() -> None:
    """ω²ᵢ = 1 + Σ Var Fⱼ, since the output of a norm has variance 1."""
    model = make("encoder", "admin", input="vectors", width=32, depth=6, pad=None)
    x = torch.randn(4, 64, 32)
    x = (x - x.mean()) / x.std()
    (omegas,) = measure_(model, lambda: model(x)).values()
    variances: list[float] = []
    for block in model.encoder.stack.blocks:
        for sublayer in block.sublayers.values():
            sublayer.register_forward_hook(
                lambda *arguments: variances.append(variance(arguments[2]))
            )
    model(x)
    assert len(omegas) == 12
    assert omegas == sorted(omegas)
    for i, omega in enumerate(omegas):
        assert omega**2 == pytest.approx(1 + sum(variances[:i]), rel=0.01)


def test_measuring_changes_only_omega() -> None:
    model = make("encoder", "admin", dropout=0.2)
    model.eval()
    block = model.encoder.stack.blocks[1]
    block.train()
    before = {name: part.training for name, part in model.named_modules()}
    weights = {name: part.clone() for name, part in model.named_parameters()}
    modes = []

    def run() -> None:
        modes.append((all(part.training for part in model.modules()), torch.is_grad_enabled()))
        model(*ids_for("encoder"))

    measure_(model, run)
    assert modes == [(True, False)]
    assert {name: part.training for name, part in model.named_modules()} == before
    for name, part in model.named_parameters():
        assert part.requires_grad
        assert name.endswith("omega") or torch.equal(part, weights[name])
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_failed_measuring_restores_modes_and_hooks() -> None:
    model = make("encoder", "admin").eval()

    def run() -> None:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        measure_(model, run)
    assert not any(part.training for part in model.modules())
    assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("addnorm", sorted(set(ADDNORMS) - {"admin"}))
def test_only_admin_is_measured(addnorm: str) -> None:
    model = make("encoder", addnorm)
    with pytest.raises(ConfigError, match="only addnorm=admin has a measuring pass"):
        measure_(model, lambda: model(*ids_for("encoder")))


# ── Folding Admin ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tie", ["all", "none"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_folded_admin_computes_the_same(mode: str, norm: str, tie: str) -> None:
    changes = dict(
        norm=norm, tie_embeddings=tie, head="token", positions="sinusoidal", ffn="swiglu"
    )
    model = randomise_(make(mode, "admin", **changes).double())
    folded, ids = fold(model), ids_for(mode)
    assert folded.config.addnorm == "post"
    assert not any(name.endswith("omega") for name in folded.state_dict())
    torch.testing.assert_close(folded(*ids), model(*ids), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        dict(kv_heads=1, qk_norm="head"),
        dict(positions="relative"),
        dict(attention="additive"),
        dict(attention_bias="none", ffn_bias=False, norm_bias=False),
        dict(embed_norm=True, final_norm=True),
        dict(depth=1, decoder_depth=1),
    ],
    ids=str,
)
@torch.no_grad()
def test_folding_works_with_other_options(changes: dict) -> None:
    model = randomise_(make("encoder-decoder", "admin", **changes).double())
    ids = ids_for("encoder-decoder")
    torch.testing.assert_close(fold(model)(*ids), model(*ids), rtol=0, atol=1e-10)


def test_folding_does_not_change_the_model() -> None:
    model = randomise_(make("encoder", "admin")).eval()
    before = {name: part.clone() for name, part in model.state_dict().items()}
    folded = fold(model)
    assert not folded.training
    for name, part in model.state_dict().items():
        assert torch.equal(part, before[name])
    addresses = {part.data_ptr() for part in model.parameters()}
    assert not addresses & {part.data_ptr() for part in folded.parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_folding_keeps_the_type_of_the_weights(dtype: torch.dtype) -> None:
    model = make("encoder", "admin").to(dtype)
    assert {part.dtype for part in fold(model).parameters()} == {dtype}


def test_folding_a_stack_without_blocks() -> None:
    model = make("encoder", "admin", depth=0)
    ids = ids_for("encoder")
    assert torch.equal(fold(model)(*ids), model(*ids))


@pytest.mark.parametrize("norm", ["scale", "batch", "none", "instance"])
def test_folding_needs_a_gain_for_each_channel(norm: str) -> None:
    with pytest.raises(ConfigError, match=f"gain for each channel: norm={norm}. It works with"):
        fold(make("encoder", "admin", norm=norm))


@pytest.mark.parametrize("addnorm", sorted(set(ADDNORMS) - {"admin"}))
def test_only_admin_is_folded(addnorm: str) -> None:
    with pytest.raises(ConfigError, match=f"only addnorm=admin can be folded: got '{addnorm}'"):
        fold(make("encoder", addnorm))


def test_an_omega_of_zero_cannot_be_folded() -> None:
    model = make("encoder", "admin")
    with torch.no_grad():
        model.encoder.stack.blocks[1].addnorms["ffn"].omega[3] = 0
    with pytest.raises(ConfigError, match="an ω of exactly 0 cannot be folded"):
        fold(model)
