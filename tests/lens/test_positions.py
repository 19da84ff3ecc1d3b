"""Positions: rotations, offsets, components, and what a probe can and cannot tell."""

import pytest
import torch

from addnorm import ModelConfig, build
from addnorm.errors import InputError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.context import Context
from addnorm.layers.positions import POSITIONS, Rotary, sinusoids
from addnorm.lens.look import look
from addnorm.lens.places import find_sublayers
from addnorm.lens.positions import (
    by_offset,
    index_vectors,
    offset_dependence,
    position_vectors,
    positions_page,
    principal_components,
    probe,
    probe_states,
    rotary_matrix,
    rotary_scores,
    rotation,
    score_bias,
    without_positions,
    without_shortcuts,
)
from tests.conftest import Model, close, inputs, make
from tests.lens.test_look import table_model


@pytest.mark.parametrize("offset", (0, 1, 7, -3))
def test_a_rotation_moves_every_position_alike(offset: int) -> None:
    model = make("encoder", width=16)
    table = position_vectors(model.encoder.positions, 24, 16).double()
    turned = table @ rotation(offset, 16).T
    own, other = (slice(max(0, -offset), 24 - max(0, offset)), slice(max(0, offset), None))
    close(turned[own], table[other][: len(turned[own])], 1e-6)
    matrix = rotation(offset, 16)
    close(matrix @ matrix.T, torch.eye(16).double())


def test_offsets_explain_sinusoids_and_not_indices() -> None:
    model = make("encoder", width=16)
    vectors = position_vectors(model.encoder.positions, 40, 16)
    products = vectors @ vectors.T
    assert offset_dependence(products) == pytest.approx(1.0, abs=1e-5)
    plain = index_vectors(40, 16)
    assert offset_dependence(plain @ plain.T) < 0.5
    curve = by_offset(products)
    assert float(curve[0]) == pytest.approx(8.0, rel=1e-4) and bool((curve[1:] < curve[0]).all())


def test_rotary_scores_depend_on_the_offset_alone() -> None:
    scores = rotary_scores(Rotary(16, 2, 8, 24, True), 20)
    assert offset_dependence(scores) == pytest.approx(1.0, abs=1e-4)
    assert float(scores[0, 0]) == pytest.approx(1.0)


def test_components_of_a_line() -> None:
    table = torch.arange(9.0)[:, None] * torch.tensor([[3.0, 4.0]])
    points, shares = principal_components(table)
    assert shares.tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    assert points[:, 0].diff().abs().tolist() == pytest.approx([5.0] * 8)


def test_a_probe_tells_what_is_there() -> None:
    features = torch.randn(200, 8)
    assert probe(features, features @ torch.randn(8)) > 0.99
    assert probe(features, torch.randn(200)) < 0.2
    classes = (features[:, 0] > 0).long()
    assert probe(features, classes) > 0.85 > probe(features, torch.randint(0, 2, (200,)))
    with pytest.raises(InputError, match="as many targets as features"):
        probe(features, classes[:3])


def states(positions: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model = make("encoder", positions=positions, depth=1, width=32, scale_embedding=False)
    ids = torch.randint(1, 19, (60, 12))
    place = torch.arange(12.0).expand(60, -1)
    return look(model, ids, ()).hidden["encoder"].flatten(0, 1), place.flatten(), ids.flatten()


def test_without_positions_no_position_can_be_told() -> None:
    with_them, place, _ = states("sinusoidal")
    without, _, _ = states("none")
    assert probe(with_them, place) > 0.5
    assert probe(without, place) < 0.1


@pytest.mark.parametrize("positions", sorted({*POSITIONS} - {"none"}))
def test_an_encoder_without_positions_reads_a_set(positions: str) -> None:
    """Its outputs are permuted as the tokens are, and differ from those with positions."""
    model, (ids,) = make("encoder", positions=positions), inputs("encoder")
    before, scheme = look(model, ids, ()).hidden["encoder"], model.encoder.positions
    with without_positions(model):
        one = look(model, ids, ()).hidden["encoder"]
        close(look(model, ids.flip(1), ()).hidden["encoder"].flip(1), one, 1e-9)
    assert model.encoder.positions is scheme
    assert float((one - before).detach().abs().max()) > 1e-6


def test_the_rotation_of_rotary_positions_turns_queries_and_keys() -> None:
    scheme = Rotary(16, 2, 8, 24, True)
    x = torch.randn(1, 1, 1, scheme.rotated)
    close(scheme.rotate(x, torch.tensor([3]))[0, 0, 0], rotary_matrix(scheme, 3) @ x[0, 0, 0], 1e-5)


@pytest.mark.parametrize("positions", ("sinusoidal", "rotary", "learned"))
def test_the_page_shows_the_rotation(positions: str) -> None:
    text = positions_page(make("decoder", positions=positions), 16).html()
    assert ("The rotation R_k" in text) == (positions != "learned")


@pytest.mark.parametrize("addnorm", ["none", "pre"])
def test_without_shortcuts_positions_are_lost(addnorm: str) -> None:
    """The arrangement `none` leaves a linear probe no more than chance, 1 of 16."""
    torch.manual_seed(0)
    sizes = {"vocab": 19, "width": 32, "heads": 4, "depth": 3, "dropout": 0.0}
    model = build(ModelConfig(mode="encoder", addnorm=addnorm, positions="sinusoidal", **sizes))
    ids = torch.randint(1, 19, (100, 16))
    told = probe(
        look(model.eval(), ids, ()).hidden["encoder"].flatten(0, 1), torch.arange(16).repeat(100)
    )
    assert told < 0.1 if addnorm == "none" else told > 0.2


def test_without_shortcuts_tokens_grow_alike() -> None:
    """Deep at initialisation, a linear map no longer tells which token stands at a position."""
    torch.manual_seed(0)
    config = ModelConfig(mode="encoder", vocab=19, width=32, heads=4, depth=6, dropout=0.0)
    model, ids = build(config).eval(), torch.randint(1, 19, (60, 12))
    own = probe(look(model, ids, ()).hidden["encoder"].flatten(0, 1), ids.flatten())
    with without_shortcuts(model):
        alike = look(model, ids, ()).hidden["encoder"]
        lost = probe(alike.flatten(0, 1), ids.flatten())
    assert own > 0.7 and lost < 0.5 * own


def final_states(model: Model, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return list(look(model, args, ()).hidden.values())[-1]


@pytest.mark.parametrize("mode", ("encoder", "decoder", "encoder-decoder"))
@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_shortcuts_are_removed_from_every_arrangement(addnorm: str, mode: str) -> None:
    """Nothing arrives but through the branches: with those of the first block 0, no token does."""
    model, args = make(mode, addnorm=addnorm), inputs(mode)
    before = final_states(model, args)
    with without_shortcuts(model):
        shortest = final_states(model, args)
        assert bool(shortest.isfinite().all())
        assert torch.equal(shortest, before) == (addnorm == "none")
        handles = [
            step.sublayer.register_forward_hook(lambda _, args, output: torch.zeros_like(output))
            for step in find_sublayers(model)
            if step.layer == 0
        ]
        blank = final_states(model, args)
        for handle in handles:
            handle.remove()
    close(blank, blank[:1, :1].expand_as(blank), 1e-9)
    assert torch.equal(final_states(model, args), before)  # the model is as it was


def test_pre_norm_without_shortcuts_is_its_formula() -> None:
    """x ← F(N(x)), and of the parallel arrangement x ← Σᵢ Fᵢ(Nᵢ(x))."""
    for addnorm in ("pre", "parallel"):
        model, (ids,) = make("encoder", addnorm=addnorm), inputs("encoder")
        seen = look(model, ids, "stream")
        with without_shortcuts(model):
            got = look(model, ids, "branches")
        attention = got.branches["encoder.0.attention"]
        ffn = got.branches["encoder.0.ffn"]
        block = model.encoder.stack.blocks[0]
        read = attention if addnorm == "pre" else seen.stream["encoder.input"][0]
        own = block.sublayers["ffn"](block.addnorms["ffn"].norm(read), Context())
        close(ffn, own, 1e-9)


@pytest.mark.parametrize("positions", POSITIONS)
def test_every_scheme_has_a_page(positions: str) -> None:
    text = positions_page(make("decoder", positions=positions), 16).html()
    assert ("<svg" in text) == (positions != "none")
    assert ("acts on scores" in text) == (positions in ("linear-bias", "buckets", "relative"))
    assert ("no positions" in text) == (positions == "none")
    assert "What the states still tell" in text
    assert ("without positions" in text) == (positions != "none")


def test_score_biases_are_those_of_the_scheme() -> None:
    model = make("decoder", positions="linear-bias")
    step = find_sublayers(model)[0]
    bias = score_bias(model.decoder.positions, step.sublayer, 5)
    assert float(bias[1, 4, 1]) == pytest.approx(-3 / 2**4)
    model = make("decoder", positions="relative")
    attention, scheme = find_sublayers(model)[0].sublayer, model.decoder.positions
    table = sinusoids(torch.arange(5), 16, 1e4, "halves").double()
    r = attention.local.project(table).view(5, 4, 4)
    by_hand = torch.einsum("hs,khs->hk", attention.local.v, r) / 2
    close(score_bias(scheme, attention, 5)[:, 4].flip(1), by_hand.detach(), 1e-9)


def test_a_probe_of_states_tells_what_is_lost() -> None:
    torch.manual_seed(0)
    sizes = {"vocab": 19, "width": 32, "heads": 4, "depth": 6, "dropout": 0.0, "addnorm": "pre"}
    told = probe_states(build(ModelConfig(mode="encoder", **sizes)).eval())
    assert told is not None and told.chance == (1 / 16, 1 / 8)
    assert told.position > 0.3 and told.without["positions"][0] < 0.15
    assert told.token > 0.9 and told.without["shortcuts"][0] < 0.15
    assert told.without["shortcuts"][1] < 0.5 * told.token
    bare = probe_states(build(ModelConfig(mode="encoder", positions="none", **sizes)).eval())
    assert bare is not None and bare.position < 0.15 and list(bare.without) == ["shortcuts"]
    assert probe_states(table_model("ft").eval()) is None
    with pytest.raises(InputError, match="evaluation mode"):
        probe_states(build(ModelConfig(mode="encoder", **sizes)).train())


def test_a_page_has_no_more_positions_than_a_table() -> None:
    model = make("decoder", positions="learned", length=9)
    assert "9 positions" in positions_page(model).html()


def test_hyper_connections_without_shortcuts_keep_their_weights() -> None:
    """What a box writes into its streams, b F(x), has the b that it measures from all of them."""
    model, (ids,) = make("encoder", addnorm="hyper"), inputs("encoder")
    stream = look(model, ids, "stream").stream["encoder.input"]
    with without_shortcuts(model):
        seen = look(model, ids, ("stream", "branches"))
    box, branch = find_sublayers(model)[0].box, seen.branches["encoder.0.attention"]
    whole, shortcut = (box(stream, lambda x, y=y: y) for y in (branch, torch.zeros_like(branch)))
    close(seen.stream["encoder.0.attention"], whole - shortcut, 1e-9)


def test_relative_positions_leave_what_all_queries_have() -> None:
    """Without positions a score is (q + u)·k, as if r, the sinusoids of distances, were 0."""
    model, (ids,) = make("decoder", positions="relative"), inputs("decoder")
    with without_positions(model):
        found = look(model, ids, "maps")
    with torch.no_grad():
        for step in find_sublayers(model):
            if step.heads:
                step.sublayer.local.project.weight.zero_()
    for place, each in look(model, ids, "maps").maps.items():
        close(found.maps[place], each, 1e-9)
