"""Properties that must hold for every model, whatever its options."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from addnorm import Mask, ModelConfig, build, token_loss
from addnorm.layers.addnorm import ADDNORMS
from tests.conftest import (
    ARRANGEMENTS,
    MODES,
    PAD,
    POSITIONS,
    VARIANTS,
    close,
    draw,
    inputs,
    make,
    other,
    pad_rows,
    slow_off_diagonal,
)

every_mode = pytest.mark.parametrize("mode", MODES)
every_position = pytest.mark.parametrize("positions", POSITIONS)
positions_and_arrangements = pytest.mark.parametrize(
    ("positions", "addnorm"), slow_off_diagonal(POSITIONS, ARRANGEMENTS)
)
causal_modes = pytest.mark.parametrize("mode", ("decoder", "encoder-decoder"))
some_sides = pytest.mark.parametrize("side", ("right", "left"))


# ── Padding changes nothing ───────────────────────────────────────────────────────────────────────


def check_padding(model: Any, mode: str, side: str) -> None:
    """Assert that a padded batch gives the result of each sequence alone."""
    rows, sources = [draw(n) for n in (5, 3, 1, 4)], [draw(n) for n in (2, 6, 4, 1)]
    batch = pad_rows(rows, side)
    has_source = mode == "encoder-decoder"
    together = model(pad_rows(sources, side), batch) if has_source else model(batch)
    for output, ids, row, source in zip(together, batch, rows, sources, strict=True):
        alone = model(source[None], row[None]) if has_source else model(row[None])
        close(output[ids != PAD], alone[0])


@every_mode
@positions_and_arrangements
def test_padding_changes_nothing(mode: str, positions: str, addnorm: str) -> None:
    model = make(mode, positions=positions, addnorm=addnorm)
    check_padding(model, mode, "right")
    check_padding(model, mode, "left")


@pytest.mark.parametrize(
    ("variant", "mode", "side"),
    slow_off_diagonal(list(VARIANTS), MODES, ("right", "left")),
)
def test_padding_changes_nothing_in_any_variant(mode: str, variant: str, side: str) -> None:
    check_padding(make(mode, **VARIANTS[variant]), mode, side)


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_padding_changes_nothing_in_any_arrangement(addnorm: str) -> None:
    check_padding(make("encoder-decoder", addnorm=addnorm), "encoder-decoder", "left")


@pytest.mark.parametrize("pool", ("first", "mean", "last"))
@pytest.mark.parametrize(
    "mode",
    (
        "encoder",
        "decoder",
        pytest.param("encoder-decoder"),
    ),
)
def test_padding_does_not_reach_a_pooled_head(mode: str, pool: str) -> None:
    model = make(mode, head="class", outputs=3, pool=pool)
    rows, source = [draw(5), draw(3)], draw(2, 4)
    has_source = mode == "encoder-decoder"
    for side in ("right", "left"):
        batch = pad_rows(rows, side)
        together = model(source, batch) if has_source else model(batch)
        for i, row in enumerate(rows):
            alone = model(source[i : i + 1], row[None]) if has_source else model(row[None])
            close(together[i : i + 1], alone)


@some_sides
def test_padding_works_with_a_summary_token(side: str) -> None:
    model = make("encoder", summary=True, head="class", outputs=3)
    rows = [draw(5), draw(3)]
    together = model(pad_rows(rows, side))
    for i, row in enumerate(rows):
        close(together[i : i + 1], model(row[None]))


@pytest.mark.parametrize(
    "value",
    (
        1e9,
        1e15,
        pytest.param(1e30),
    ),
)
@pytest.mark.parametrize("addnorm", ("post", "pre"))
def test_the_content_of_padding_does_not_matter(value: float, addnorm: str) -> None:
    model = make("encoder", input="vectors", head="none", addnorm=addnorm).float()
    vectors, real = torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)
    real[0, 3:] = False
    before = model(vectors, mask=Mask.padding(real))
    vectors[0, 3:] = value
    after = model(vectors, mask=Mask.padding(real))
    assert torch.equal(after[real], before[real])


def test_an_explicit_padding_mask_equals_the_one_from_the_ids() -> None:
    ids = pad_rows([draw(5), draw(3)], "right")
    for mode in ("encoder", "decoder"):
        model = make(mode)
        assert torch.equal(model(ids), model(ids, mask=Mask.padding(ids != PAD)))


@pytest.mark.parametrize("variant", ("plain", "cap", "additive", "grouped heads", "window"))
@every_position
def test_a_sequence_of_only_padding_does_not_affect_the_others(
    variant: str, positions: str
) -> None:
    for mode in MODES:
        model = make(mode, positions=positions, **VARIANTS[variant]).train()
        ids = pad_rows([draw(4), torch.full((4,), PAD)], "right")
        output = model(ids, ids) if mode == "encoder-decoder" else model(ids)
        assert output.isfinite().all()
        output.square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


# ── No position sees the future ───────────────────────────────────────────────────────────────────


def check_future(run: Callable[[Tensor], Tensor], length: int = 7) -> None:
    """Assert that tokens after p change no bit up to p, and that the token at p changes p."""
    ids = draw(2, length)
    before = run(ids)
    for p in range(length - 1):
        changed = torch.cat((ids[:, : p + 1], other(ids[:, p + 1 :])), dim=1)
        after = run(changed)
        assert torch.equal(before[:, : p + 1], after[:, : p + 1]), f"{p} sees the future"
        assert (before[:, p + 1] != after[:, p + 1]).any(dim=-1).all(), f"{p + 1} sees nothing"


def runner(model: Any, mode: str, **masks: Mask) -> Callable[[Tensor], Tensor]:
    """Return the model as a function of the decoder's input."""
    if mode == "decoder":
        return lambda ids: model(ids, **masks)
    source = draw(2, 5)
    named = {"target_mask" if name == "mask" else name: mask for name, mask in masks.items()}
    return lambda ids: model(source, ids, **named)


@causal_modes
@positions_and_arrangements
def test_no_position_sees_the_future(mode: str, positions: str, addnorm: str) -> None:
    model = make(mode, positions=positions, addnorm=addnorm)
    with torch.no_grad():
        check_future(runner(model, mode))


@causal_modes
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_position_sees_the_future_in_any_variant(mode: str, variant: str) -> None:
    check_future(runner(make(mode, **VARIANTS[variant]), mode))


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_no_position_sees_the_future_in_any_arrangement(addnorm: str) -> None:
    check_future(runner(make("decoder", addnorm=addnorm), "decoder"))


@causal_modes
@every_position
def test_no_position_sees_the_future_of_its_own_chunk(mode: str, positions: str) -> None:
    model = make(mode, positions=positions)
    memory = model.encode(draw(2, 5)) if mode == "encoder-decoder" else None

    def run(ids: Tensor) -> Tensor:
        cache = model.cache(2)
        chunks = (ids[:, :3], ids[:, 3:])
        if memory is None:
            return torch.cat([model(chunk, cache=cache) for chunk in chunks], dim=1)
        return torch.cat([model.decode(chunk, memory, cache=cache) for chunk in chunks], dim=1)

    with torch.no_grad():
        check_future(run)


@causal_modes
@pytest.mark.parametrize("prefix", (3, torch.tensor([2, 4])), ids=("one", "per row"))
@every_position
def test_only_the_prefix_sees_the_future_within_it(
    mode: str, prefix: int | Tensor, positions: str
) -> None:
    model = make(mode, positions=positions, depth=1)
    run = runner(model, mode, mask=Mask.causal(prefix))
    ids = draw(2, 6)
    before = run(ids)
    ends = [prefix, prefix] if isinstance(prefix, int) else prefix.tolist()
    for p in range(6):
        changed = ids.clone()
        changed[:, p] = other(ids[:, p])
        moved = (run(changed) != before).any(dim=-1)
        for row, end in enumerate(ends):
            # A token of the prefix is visible to all; a later one to itself and what follows.
            assert moved[row].tolist() == [p < end or i >= p for i in range(6)]


@causal_modes
@every_position
def test_a_window_hides_the_far_past_and_the_future(mode: str, positions: str) -> None:
    model = make(mode, positions=positions, window=3, depth=1)
    run = runner(model, mode)
    check_future(run)
    ids = draw(2, 7)
    before = run(ids)
    for p in range(7):
        changed = ids.clone()
        changed[:, p] = other(ids[:, p])
        moved = (run(changed) != before).any(dim=-1).all(dim=0)
        assert moved.tolist() == [0 <= i - p < 3 for i in range(7)]


# ── Visibility ────────────────────────────────────────────────────────────────────────────────────


def influence(run: Callable[[Tensor], Tensor], ids: Tensor) -> list[list[bool]]:
    """Return whether output i (row) changes with input j (column), for the first sequence."""
    before = run(ids)
    columns = []
    for j in range(ids.shape[1]):
        changed = ids.clone()
        changed[:, j] = other(ids[:, j])
        columns.append((run(changed) != before).any(dim=-1)[0])
    return torch.stack(columns, dim=1).tolist()


@every_position
def test_the_encoder_sees_all(positions: str) -> None:
    model = make("encoder", positions=positions, depth=1)
    assert influence(model.hidden, draw(1, 5)) == [[True] * 5] * 5


@every_position
def test_the_decoder_sees_only_the_past(positions: str) -> None:
    model = make("decoder", positions=positions, depth=1)
    assert influence(model.hidden, draw(1, 5)) == [[j <= i for j in range(5)] for i in range(5)]


@every_position
@some_sides
def test_the_decoder_sees_all_of_the_real_source(positions: str, side: str) -> None:
    model = make("encoder-decoder", positions=positions, depth=1)
    target, real = draw(1, 4), torch.tensor([[True, True, True, False, False]])
    mask = Mask.padding(real if side == "right" else real.flip(1))

    def run(memory_ids: Tensor) -> Tensor:
        # The visibility of the memory to the decoder, without the encoder.
        memory = model.tokens(memory_ids)
        return model.decode(target, memory, memory_mask=mask)

    visible = real[0] if side == "right" else real.flip(1)[0]
    assert influence(run, draw(1, 5)) == [visible.tolist()] * 4

    def run_whole(ids: Tensor) -> Tensor:
        return model(ids, target, source_mask=mask)

    assert influence(run_whole, draw(1, 5)) == [visible.tolist()] * 4


@pytest.mark.parametrize(
    "mask",
    (
        Mask.causal(),
        Mask.window(2),
        Mask.causal() & Mask.window(2),
        Mask.causal(prefix=2),
        Mask.grouped(torch.tensor([[0, 0, 1, 1, 1]])),
        Mask.pattern(torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) > 0.5),
    ),
    ids=("causal", "window", "causal window", "prefix", "grouped", "pattern"),
)
@pytest.mark.parametrize("variant", ("plain", "cap", "additive"))
def test_a_position_sees_itself_and_what_the_mask_makes_visible(mask: Mask, variant: str) -> None:
    model = make("encoder", positions="none", depth=1, **VARIANTS[variant])
    # Through the residual connection every position sees itself, whatever the mask.
    expected = mask.dense(5, 5)[0, 0] | torch.eye(5, dtype=torch.bool)
    assert influence(lambda ids: model(ids, mask=mask), draw(1, 5)) == expected.tolist()


@every_mode
@pytest.mark.parametrize("variant", VARIANTS)
def test_maps_are_zero_where_the_mask_hides(mode: str, variant: str) -> None:
    model = make(mode, **VARIANTS[variant])
    maps: dict[str, Tensor] = {}
    ids = pad_rows([draw(6), draw(4)], "left")
    source = pad_rows([draw(3), draw(5)], "right")
    model(*((source, ids) if mode == "encoder-decoder" else (ids,)), maps=maps)
    reach = model.config.window or 100
    own, roles = {"encoder": ids, "decoder": ids}, ("attention",)
    if mode == "encoder-decoder":
        own, roles = {"encoder": source, "decoder": ids}, ("attention", "memory")
    sides = [side for side in own if side in mode]
    assert set(maps) == {
        f"{side}.{layer}.{role}"
        for side in sides
        for layer in range(2)
        for role in (roles if side == "decoder" else ("attention",))
    }
    for name, weights in maps.items():
        side, _, role = name.split(".")
        of_query, of_key = own[side], source if role == "memory" else own[side]
        i = torch.arange(of_query.shape[1])[:, None]
        j = torch.arange(of_key.shape[1])[None, :]
        visible = (of_key != PAD)[:, None, :].expand(-1, of_query.shape[1], -1)
        if role == "attention":
            visible = visible & ((i - j).abs() < reach)
            visible = visible & (j <= i) if side == "decoder" else visible
            visible = F.pad(visible, (0, model.config.persistent), value=True)
        assert weights.shape == (2, 4, *visible.shape[1:])
        nonzero = weights != 0
        if model.config.span:  # each head sees a part of what the mask shows
            assert bool((nonzero <= visible[:, None]).all())
            assert torch.equal(nonzero.any(dim=-1)[:, 0], visible.any(dim=-1))
        else:
            assert torch.equal(nonzero, visible[:, None].expand_as(weights))
        close(weights.sum(dim=-1), visible.any(dim=-1)[:, None].expand(-1, 4, -1).double())


# ── Training, evaluation and no_grad ──────────────────────────────────────────────────────────────


@every_mode
@every_position
def test_training_and_evaluation_agree(mode: str, positions: str) -> None:
    for dtype in (torch.float32, torch.float64):
        model = make(mode, positions=positions).to(dtype)
        args = inputs(mode)
        assert torch.equal(model.train()(*args), model.eval()(*args))


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_training_and_evaluation_agree_in_any_arrangement(addnorm: str) -> None:
    model = make("encoder-decoder", addnorm=addnorm)
    args = inputs("encoder-decoder")
    trained = model.train()(*args)
    assert torch.equal(model.eval()(*args), trained)
    with torch.no_grad():
        assert torch.equal(model(*args), trained)


@every_mode
@pytest.mark.parametrize(
    # With a learned bias that needs a gradient, torch chooses another kernel, which rounds
    # differently.
    "positions",
    [p for p in POSITIONS if p not in ("buckets", "relative")],
)
def test_no_grad_changes_no_bit(mode: str, positions: str) -> None:
    for dtype in (torch.float32, torch.float64):
        model = make(mode, positions=positions).to(dtype)
        args = inputs(mode)
        with_gradient = model.train()(*args)
        with torch.no_grad():
            assert torch.equal(model(*args), with_gradient)
            assert torch.equal(model.eval()(*args), with_gradient)


@pytest.mark.parametrize("positions", ("sinusoidal", "buckets", "relative"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_grad_changes_no_number(positions: str, variant: str) -> None:
    model = make("encoder-decoder", positions=positions, **VARIANTS[variant])
    args = inputs("encoder-decoder")
    with torch.no_grad():
        without = model(*args)
    close(model(*args), without)


@every_mode
@every_position
def test_maps_change_no_bit(mode: str, positions: str) -> None:
    for dtype in (torch.float32, torch.float64):
        model = make(mode, positions=positions).to(dtype).train()
        args = inputs(mode)
        assert torch.equal(model(*args), model(*args, maps={}))


@every_mode
@every_position
def test_maps_change_no_gradient(mode: str, positions: str) -> None:
    model = make(mode, positions=positions)
    args = inputs(mode)
    model(*args).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(*args, maps={}).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        close(parameter.grad, gradients[name])


@every_mode
@pytest.mark.parametrize("variant", VARIANTS)
def test_maps_change_no_bit_in_any_variant(mode: str, variant: str) -> None:
    model = make(mode, **VARIANTS[variant]).train()
    args = inputs(mode)
    assert torch.equal(model(*args), model(*args, maps={}))


@every_mode
def test_maps_use_no_random_numbers(mode: str) -> None:
    model = make(mode, dropout=0.2, attention_dropout=0.2, ffn_dropout=0.2).train()
    args = inputs(mode)
    torch.manual_seed(1)
    plain = model(*args)
    torch.manual_seed(1)
    assert torch.equal(model(*args, maps={}), plain)
    assert not torch.equal(model(*args), plain)  # dropout is active


@every_mode
def test_attention_dropout_works_with_padding(mode: str) -> None:
    model = make(mode, attention_dropout=0.1).train()
    ids = pad_rows([draw(5), draw(3)], "right")
    output = model(ids, ids) if mode == "encoder-decoder" else model(ids)
    assert output.isfinite().all()


# ── Large tables are computed in chunks ───────────────────────────────────────────────────────────


def check_chunks(mode: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    model = make(mode, **changes)
    args = inputs(mode, length=8)
    whole = model(*args)
    whole.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr("addnorm.layers.attention_kernels.MAX_TABLE_ENTRIES", 8)
    monkeypatch.setattr("addnorm.layers.attention_kernels.CHUNK_QUERIES", 3)
    chunked = model(*args)
    close(chunked, whole)
    chunked.square().sum().backward()
    for name, parameter in model.named_parameters():
        close(parameter.grad, gradients[name])


@every_mode
@every_position
def test_chunks_change_nothing(mode: str, positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_chunks(mode, monkeypatch, positions=positions)


@every_mode
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_change_nothing_in_any_variant(
    mode: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_chunks(mode, monkeypatch, **VARIANTS[variant])


def test_chunks_change_nothing_with_attention_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rate is so small that nothing is dropped, but the fused kernel is not used.
    model = make("decoder", attention_dropout=1e-12).train()
    ids = draw(2, 8)
    whole = model(ids)
    monkeypatch.setattr("addnorm.layers.attention_kernels.MAX_TABLE_ENTRIES", 8)
    monkeypatch.setattr("addnorm.layers.attention_kernels.CHUNK_QUERIES", 3)
    close(model(ids), whole)


# ── Positions ─────────────────────────────────────────────────────────────────────────────────────


@given(order=st.permutations(range(6)))
@settings(max_examples=10)
@pytest.mark.parametrize("addnorm", ARRANGEMENTS)
def test_without_positions_an_encoder_is_equivariant(addnorm: str, order: list[int]) -> None:
    torch.manual_seed(0)
    model = make("encoder", positions="none", addnorm=addnorm)
    ids = draw(2, 6)
    close(model(ids[:, order]), model(ids)[:, order])


@pytest.mark.parametrize("positions", [p for p in POSITIONS if p != "none"])
def test_with_positions_an_encoder_is_not_equivariant(positions: str) -> None:
    model = make("encoder", positions=positions)
    ids, order = draw(2, 6), [3, 1, 5, 0, 2, 4]
    assert (model(ids[:, order]) - model(ids)[:, order]).abs().max() > 1e-3


@pytest.mark.parametrize("positions", ("rotary", "linear-bias", "buckets", "relative"))
def test_relative_positions_depend_only_on_differences(positions: str) -> None:
    model = make("decoder", positions=positions, window=3, depth=1)
    ids = draw(1, 8)
    # Beyond the window, the start of the sequence has no effect.
    close(model(ids)[:, 4:], model(ids[:, 2:])[:, 2:])


# ── Packed rows ───────────────────────────────────────────────────────────────────────────────────


def packed(lengths: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return sequences, all of them in one row, and their group numbers."""
    rows = [draw(n) for n in lengths]
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    return rows, torch.cat(rows)[None], numbers[None]


@pytest.mark.parametrize("mode", ("encoder", "decoder"))
@positions_and_arrangements
def test_packed_rows_are_separate_sequences(mode: str, positions: str, addnorm: str) -> None:
    model = make(mode, positions=positions, addnorm=addnorm)
    rows, row, numbers = packed((3, 1, 4))
    together = model(row, mask=Mask.grouped(numbers))
    close(together, torch.cat([model(one[None]) for one in rows], dim=1))


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
@settings(max_examples=10)
@pytest.mark.parametrize("mode", ("encoder", "decoder"))
def test_packed_rows_of_any_lengths(mode: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make(mode, positions="learned")
    rows, row, numbers = packed(lengths)
    together = model(row, mask=Mask.grouped(numbers))
    close(together, torch.cat([model(one[None]) for one in rows], dim=1))


def test_packed_rows_work_with_padding() -> None:
    model = make("decoder")
    rows, row, numbers = packed((3, 4))
    padded = torch.cat((row, torch.full((1, 2), PAD)), dim=1)
    mask = Mask.grouped(torch.cat((numbers, torch.full((1, 2), -1)), dim=1))
    together = model(padded, mask=mask & Mask.padding(padded != PAD))
    close(together[:, :7], torch.cat([model(one[None]) for one in rows], dim=1))


def packed_pairs(model: Any, whole: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    sources, source, of_source = packed((2, 5, 3))
    targets, target, of_target = packed((4, 1, 3))
    apart = [model.hidden(s[None], t[None]) for s, t in zip(sources, targets, strict=True)]
    close(whole(source, target, of_source, of_target), torch.cat(apart, dim=1))


def test_packed_pairs_are_separate_pairs_with_a_memory_mask() -> None:
    model = make("encoder-decoder")

    def whole(source: Tensor, target: Tensor, of_source: Tensor, of_target: Tensor) -> Tensor:
        memory = model.encode(source, mask=Mask.grouped(of_source))
        across = Mask.grouped(of_target, of_source)
        return model.decode(target, memory, mask=Mask.grouped(of_target), memory_mask=across)

    packed_pairs(model, whole)


def test_packed_pairs_are_separate_pairs() -> None:
    model = make("encoder-decoder")

    def whole(source: Tensor, target: Tensor, of_source: Tensor, of_target: Tensor) -> Tensor:
        masks = {"source_mask": Mask.grouped(of_source), "target_mask": Mask.grouped(of_target)}
        return model.hidden(source, target, **masks)

    packed_pairs(model, whole)


# ── Seeds and batches ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("addnorm", ADDNORMS)
def test_same_seed_same_weights_same_loss(addnorm: str) -> None:
    mode = "encoder-decoder"
    config = ModelConfig(mode=mode, vocab=19, width=16, depth=2, heads=4, addnorm=addnorm)
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        model = build(config).train()
        args = inputs(mode)
        loss = token_loss(model, model.hidden(*args), draw(2, 6))
        loss.backward()
        runs.append([loss, *model.parameters(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert len(runs[0]) == 1 + 2 * len(list(build(config).parameters()))


def test_another_seed_gives_other_weights() -> None:
    torch.manual_seed(1)
    one = make("decoder")
    torch.manual_seed(2)
    assert not torch.equal(one.tokens.weight, make("decoder").tokens.weight)


@every_mode
@every_position
def test_rows_of_a_batch_are_independent(mode: str, positions: str) -> None:
    model = make(mode, positions=positions)
    args = inputs(mode, batch=3)
    together = model(*args)
    for i in range(3):
        close(together[i : i + 1], model(*(ids[i : i + 1] for ids in args)))


@every_mode
def test_every_weight_gets_a_gradient(mode: str) -> None:
    for positions, addnorm in zip(POSITIONS, (*ARRANGEMENTS, "normformer"), strict=True):
        model = make(mode, positions=positions, addnorm=addnorm)
        model(*inputs(mode)).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), name


def test_the_arrangements_differ() -> None:
    ids, results = draw(2, 6), []
    for addnorm in ARRANGEMENTS:
        torch.manual_seed(0)
        results.append(make("encoder", addnorm=addnorm)(ids))
    for one, two in pairwise(results):
        assert (one - two).abs().max() > 1e-3
