"""The pieces of the final vector sum to it, for every arrangement, norm and mode."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm.errors import InputError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.layers.norms import NORMS
from addnorm.layers.positions import POSITIONS
from addnorm.lens.look import look
from addnorm.lens.places import find_norms, find_sublayers
from addnorm.lens.stream import decompose
from tests.conftest import MODES, VARIANTS, close, inputs, make
from tests.lens.test_look import table_model, table_rows

GRID = [
    pytest.param(
        mode,
        addnorm,
        norm,
        marks=[pytest.mark.slow] * (norm != "layer" or (first + second) % 3 != 0),
    )
    for first, mode in enumerate((*MODES, "ft", "saint", "tab"))
    for second, addnorm in enumerate(ADDNORMS)
    for norm in NORMS
    if norm != "instance" or "decoder" not in mode
]
"""Fast are layer norm with each arrangement, in one mode of text and with one model for tables."""
TOLERANCE = 1e-9


def build_and_draw(mode: str, addnorm: str, norm: str) -> tuple[Any, Any]:
    is_table = mode in ("ft", "saint", "tab")
    model = table_model(mode, norm, addnorm) if is_table else make(mode, addnorm=addnorm, norm=norm)
    batch = table_rows() if is_table else inputs(mode)
    if norm == "batch":  # running statistics of its own data, as after training
        model.train()
        for _ in range(10):
            model(*batch)
        model.eval()
    return model, batch


@pytest.mark.parametrize(("mode", "addnorm", "norm"), GRID)
def test_the_pieces_sum_to_the_output(mode: str, addnorm: str, norm: str) -> None:
    model, batch = build_and_draw(mode, addnorm, norm)
    for side in ("encoder", "decoder") if mode == "encoder-decoder" else (None,):
        for heads in (True, False):
            parts = decompose(model, batch, side=side, heads=heads)
            assert parts.error <= TOLERANCE * max(1.0, float(parts.pieces.abs().max()))
            close(parts.shares().sum(dim=0), torch.ones_like(parts.total[..., 0]), 1e-8)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("addnorm", ("pre", "b2t", "dlcl", "hyper", "dual", "sub-ln"))
def test_the_norms_of_two_streams(addnorm: str, norm: str) -> None:
    model, batch = build_and_draw("encoder", addnorm, norm)
    assert decompose(model, batch).error <= TOLERANCE


@pytest.mark.parametrize(
    ("encoder", "decoder"),
    [("post", "pre"), ("pre", "post"), ("dual", "b2t"), ("fixup", "hyper"), ("none", "scaled")],
)
def test_a_decoder_with_its_own_arrangement(encoder: str, decoder: str) -> None:
    model = make("encoder-decoder", addnorm=encoder, decoder_addnorm=decoder)
    for side in ("encoder", "decoder"):
        for heads in (True, False):
            parts = decompose(model, inputs("encoder-decoder"), side=side, heads=heads)
            assert parts.error <= TOLERANCE * max(1.0, float(parts.pieces.abs().max()))


@pytest.mark.parametrize("positions", POSITIONS)
def test_every_kind_of_positions(positions: str) -> None:
    # A layer norm would remove the index, which is the same in every coordinate.
    model, batch = make("decoder", positions=positions, norm="rms"), inputs("decoder")
    parts = decompose(model, batch)
    assert parts.error <= TOLERANCE * max(1.0, float(parts.pieces.abs().max()))
    has_vectors = positions in ("sinusoidal", "learned", "index", "concatenated")
    assert ("positions" in parts.names) == has_vectors


def test_concatenated_positions_and_tokens_have_separate_coordinates() -> None:
    """Pre-norm with RMS norms scales each coordinate of the input, and mixes none."""
    model = make("decoder", positions="concatenated", addnorm="pre", norm="rms")
    columns = model.decoder.positions.columns
    parts = decompose(model, inputs("decoder"))
    assert not parts.piece("tokens")[..., -columns:].any()
    assert not parts.piece("positions")[..., :-columns].any()
    assert parts.piece("positions")[..., -columns:].any()


def test_the_offset_of_a_fixup_box_is_a_piece() -> None:
    model = make("decoder", addnorm="fixup")
    parts = decompose(model, inputs("decoder"))
    for step in find_sublayers(model):
        offset = float(step.box.bias_after.detach())
        piece = parts.pieces[parts.names.index(f"{step.name}.bias_after")]
        close(piece, torch.full_like(piece, offset))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_other_choices_change_nothing(changes: dict[str, Any]) -> None:
    model, batch = make("decoder", **changes), inputs("decoder")
    assert decompose(model, batch).error <= TOLERANCE


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_deleting_a_branch_with_frozen_scales_removes_its_piece(addnorm: str) -> None:
    """The model itself runs again: norms divide by recorded scales, branches are recorded ones."""
    model, batch = make("decoder", addnorm=addnorm), inputs("decoder")
    parts = decompose(model, batch, heads=False)
    seen = look(model, batch, ("branches", "norms"))
    # Without a shortcut only the last branch reaches the output.
    place = "decoder.1.ffn" if addnorm == "none" else "decoder.0.ffn"
    full, without = (run_frozen(model, batch, seen, gone) for gone in (None, place))
    close(full, parts.total)
    close(full - without, parts.pieces[parts.names.index(place)])


def run_frozen(model: nn.Module, batch: Any, seen: Any, gone: str | None) -> Tensor:
    """The output of the stack with recorded branches, one of them 0, and recorded norm scales."""
    handles = []

    def freeze(norm: nn.Module, name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
            if name.endswith("stream_norm"):  # decides mixing weights: as it was
                return seen.measured[norm].output
            x = args[0]
            return module.weight * (x - x.mean(-1, keepdim=True)) / seen.norms[name] + module.bias

        return hook

    for name, norm in find_norms(model).items():
        handles.append(norm.register_forward_hook(freeze(norm, name)))
    for step in find_sublayers(model):
        y = seen.branches[step.name] * (0.0 if step.name == gone else 1.0)
        handles.append(
            step.box.register_forward_pre_hook(lambda _, args, y=y: (args[0], lambda x: y))
        )
    try:
        with torch.no_grad():
            return model.hidden(*batch)  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()


def test_heads_and_offset_sum_to_their_sublayer() -> None:
    model, batch = make("encoder-decoder", addnorm="normformer"), inputs("encoder-decoder")
    heads, whole = (decompose(model, batch, heads=heads) for heads in (True, False))
    for name in whole.names:
        if name.endswith((".attention", ".memory")):
            close(
                heads.piece(name) - _norm_offset(heads, name), whole.pieces[whole.names.index(name)]
            )


def _norm_offset(parts: Any, name: str) -> Any:
    names = [n for n in parts.names if (n.startswith(f"{name}.") and "norm" in n) or "outer" in n]
    names = [n for n in names if n.startswith(f"{name}.")]
    zero = torch.zeros_like(parts.total)
    return sum((parts.pieces[parts.names.index(n)] for n in names), zero)


def test_every_kind_of_piece_has_a_name() -> None:
    model = make("encoder", segments=2, summary=True, addnorm="post", embed_norm=True)
    parts = decompose(model, inputs("encoder"))
    expected = {"tokens", "segments", "summary", "positions", "encoder.input.norm.bias"}
    expected |= {"encoder.1.attention.3", "encoder.1.attention.bias", "encoder.1.ffn"}
    expected |= {"encoder.1.ffn.norm.bias"}
    assert expected <= set(parts.names)
    assert parts.error <= TOLERANCE


@pytest.mark.parametrize("addnorm", ("post", "peri"))
def test_embeddings_narrower_than_the_stream(addnorm: str) -> None:
    """ELECTRA: the projection's offset is a piece of its own."""
    changes = {"embed_width": 8, "embed_norm": True, "segments": 2, "head": "masked"}
    model = make("encoder", addnorm=addnorm, **changes)
    parts = decompose(model, inputs("encoder"))
    assert "encoder.input.project.bias" in parts.names and "segments" in parts.names
    assert parts.error <= TOLERANCE


def test_some_positions_are_the_same_as_all() -> None:
    model, batch = make("decoder", addnorm="dual"), inputs("decoder", length=6)
    some, whole = decompose(model, batch, positions=[1, -1]), decompose(model, batch)
    assert some.positions == (1, 5) and some.names == whole.names
    close(some.pieces, whole.pieces[:, :, [1, 5]])


def test_norms_along_the_sequence_keep_all_positions_to_the_end() -> None:
    model, batch = make("encoder", norm="instance"), inputs("encoder")
    some, whole = decompose(model, batch, positions=[1]), decompose(model, batch)
    assert some.error <= TOLERANCE
    close(some.pieces, whole.pieces[:, :, [1]])


def test_the_model_is_not_changed() -> None:
    model, batch = make("decoder", addnorm="hyper"), inputs("decoder")
    before, modules = model(*batch), list(model.modules())
    decompose(model, batch)
    assert torch.equal(model(*batch), before)
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))


def test_mistakes_are_explained() -> None:
    model, batch = make("decoder"), inputs("decoder")
    with pytest.raises(InputError, match="no side 'encoder'"):
        decompose(model, batch, side="encoder")
    with pytest.raises(InputError, match="one or more of 0 to 5: got \\[9\\]"):
        decompose(model, batch, positions=[9])
    with pytest.raises(InputError, match=r"needs about .* [kM]B, more than the limit"):
        decompose(model, batch, limit=1000)
    with pytest.raises(InputError, match="no piece 'x'"):
        decompose(model, batch).piece("x")
    with pytest.raises(InputError, match="evaluation mode"):
        decompose(model.train(), batch)
