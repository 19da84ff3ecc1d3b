"""One mask type, one convention: True where a key is visible."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from addnorm import Mask
from addnorm.errors import InputError
from addnorm.layers.attention_kernels import AdditiveScore, DotScore, attention_weights, mix_values
from addnorm.layers.context import Context
from addnorm.layers.masks import AttentionTable
from tests.conftest import MODES, PAD, close, draw, make, pad_rows

IsVisible = Callable[[int, int, int], bool]
"""Whether a key is visible: (row of the batch, query counted from the offset, key)."""

KINDS = ("visible", "causal", "prefix", "prefixes", "window", "padding", "grouped", "pattern")


class Sizes(NamedTuple):
    batch: int
    query: int
    key: int
    offset: int


def kind_of_mask(kind: str, sizes: Sizes, seed: int) -> tuple[Mask, IsVisible]:
    """Return a mask of a kind, and the same rule as a plain function."""
    batch, query, key, offset = sizes
    random = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=random)

    if kind == "causal":
        return Mask.causal(), lambda b, i, j: j <= offset + i
    if kind == "prefix":
        prefix = seed % (key + 2)
        return Mask.causal(prefix), lambda b, i, j: j <= offset + i or j < prefix
    if kind == "prefixes":
        prefixes = whole(key + 2, batch)
        return Mask.causal(prefixes), lambda b, i, j: j <= offset + i or j < int(prefixes[b])
    if kind == "window":
        reach = 1 + seed % (key + 1)
        return Mask.window(reach), lambda b, i, j: abs(offset + i - j) < reach
    if kind == "padding":
        real = whole(2, batch, key) == 1
        return Mask.padding(real), lambda b, i, j: bool(real[b, j])
    if kind == "grouped":
        of_query, of_key = whole(3, batch, query), whole(3, batch, key)
        return Mask.grouped(of_query, of_key), lambda b, i, j: bool(of_query[b, i] == of_key[b, j])
    if kind == "pattern":
        rows = batch if seed % 2 else 1
        visible = whole(2, rows, query, key) == 1
        return Mask.pattern(visible), lambda b, i, j: bool(visible[b % rows, i, j])
    return Mask.visible(), lambda b, i, j: True


def loop(sees: IsVisible, sizes: Sizes) -> Tensor:
    """Return the rule applied to every pair, (batch, 1, query, key)."""
    rows = [
        [[sees(b, i, j) for j in range(sizes.key)] for i in range(sizes.query)]
        for b in range(sizes.batch)
    ]
    return torch.tensor(rows)[:, None]


all_sizes = st.builds(
    lambda batch, query, offset, more: Sizes(batch, query, offset + query + more, offset),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(0, 2),
)
seeds = st.integers(0, 1000)


# ── Dense masks ───────────────────────────────────────────────────────────────────────────────────


@given(sizes=all_sizes, seed=seeds)
@settings(max_examples=15)
@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_mask_equals_its_rule(kind: str, sizes: Sizes, seed: int) -> None:
    mask, sees = kind_of_mask(kind, sizes, seed)
    mask.check(sizes.batch, sizes.query, sizes.key)
    dense = mask.dense(sizes.query, sizes.key, sizes.offset)
    expected = loop(sees, sizes)
    assert dense.dtype == torch.bool
    assert dense.shape[0] in (1, sizes.batch) and dense.shape[1:] == expected.shape[1:]
    assert torch.equal(dense.expand_as(expected), expected)


@given(sizes=all_sizes, seed=seeds, more=seeds)
@settings(max_examples=6)
@pytest.mark.parametrize(
    ("one", "two"),
    # An intersection is symmetric: which of the two comes first is tested for all, but slowly.
    [
        pytest.param(one, two, marks=[pytest.mark.slow] * (first > second))
        for first, one in enumerate(KINDS)
        for second, two in enumerate(KINDS)
    ],
)
def test_combined_masks_are_their_intersection(
    one: str, two: str, sizes: Sizes, seed: int, more: int
) -> None:
    (left, left_sees), (right, right_sees) = (
        kind_of_mask(one, sizes, seed),
        kind_of_mask(two, sizes, more),
    )
    if one == two == "grouped":
        with pytest.raises(InputError, match=r"two grouped masks cannot be combined\. Number the"):
            left & right
        return
    expected = loop(lambda b, i, j: left_sees(b, i, j) and right_sees(b, i, j), sizes)
    for both in (left & right, right & left):
        both.check(sizes.batch, sizes.query, sizes.key)
        dense = both.dense(sizes.query, sizes.key, sizes.offset)
        assert torch.equal(dense.expand_as(expected), expected)


@given(sizes=all_sizes, seed=seeds, data=st.data())
@settings(max_examples=12)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_equals_that_part_of_the_whole(
    kind: str, sizes: Sizes, seed: int, data: st.DataObject
) -> None:
    mask, _ = kind_of_mask(kind, sizes, seed)
    start = data.draw(st.integers(0, sizes.query - 1))
    stop = data.draw(st.integers(start + 1, sizes.query))
    first = data.draw(st.integers(0, sizes.key - 1))
    last = data.draw(st.integers(first + 1, sizes.key))
    whole = mask.dense(sizes.query, sizes.key, sizes.offset)
    part = mask.dense(sizes.query, sizes.key, sizes.offset, (start, stop), (first, last))
    assert torch.equal(part, whole[:, :, start:stop, first:last])


@given(sizes=all_sizes, seed=seeds, more=seeds, data=st.data())
@settings(max_examples=10)
@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("two", ("visible", "causal", "prefixes", "window"))
def test_the_range_of_keys_includes_every_visible_key(
    one: str, two: str, sizes: Sizes, seed: int, more: int, data: st.DataObject
) -> None:
    mask = kind_of_mask(one, sizes, seed)[0] & kind_of_mask(two, sizes, more)[0]
    start = data.draw(st.integers(0, sizes.query - 1))
    stop = data.draw(st.integers(start + 1, sizes.query))
    first, last = mask.reachable_keys(start, stop, sizes.offset, sizes.key)
    assert 0 <= first <= last <= sizes.key
    visible = mask.dense(sizes.query, sizes.key, sizes.offset)[:, :, start:stop]
    assert not visible[..., :first].any()
    assert not visible[..., last:].any()


def test_the_range_of_keys_is_as_narrow_as_possible() -> None:
    assert Mask.causal().reachable_keys(2, 4, 0, 10) == (0, 4)
    assert Mask.causal().reachable_keys(2, 4, 5, 10) == (0, 9)
    assert Mask.causal(prefix=3).reachable_keys(2, 4, 0, 10) == (0, 10)
    assert Mask.window(2).reachable_keys(4, 6, 0, 10) == (3, 7)
    assert (Mask.causal() & Mask.window(2)).reachable_keys(4, 6, 0, 10) == (3, 6)
    assert Mask.visible().reachable_keys(4, 6, 0, 10) == (0, 10)


def test_a_prefix_is_seen_by_all_and_the_rest_is_causal() -> None:
    assert Mask.causal(prefix=2).dense(4, 4)[0, 0].int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]
    per_row = Mask.causal(prefix=torch.tensor([0, 3])).dense(3, 3)
    assert per_row[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert per_row[1, 0].int().tolist() == [[1, 1, 1]] * 3


def test_a_window_looks_both_ways_unless_it_is_causal() -> None:
    assert Mask.window(2).dense(4, 4)[0, 0].int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 1, 1, 1],
        [0, 0, 1, 1],
    ]
    assert (Mask.window(2) & Mask.causal()).dense(4, 4)[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert Mask.window(1).dense(3, 3)[0, 0].int().tolist() == torch.eye(3).int().tolist()


def test_the_queries_of_a_cache_are_the_last_positions() -> None:
    assert Mask.causal().dense(2, 5, offset=3)[0, 0].int().tolist() == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_a_summary_token_shifts_padding_by_one() -> None:
    real = torch.tensor([[True, False], [False, True]])
    moved = Mask.padding(real).with_summary()
    assert moved.real is not None
    assert moved.real.tolist() == [[True, True, False], [True, False, True]]
    assert Mask.visible().with_summary().dense(2, 2).all()
    for mask in (Mask.window(2), Mask.grouped(torch.zeros(1, 2).int()), Mask.pattern(real)):
        with pytest.raises(
            InputError, match="a summary token can be combined with padding masks only"
        ):
            mask.with_summary()


# ── Positions ─────────────────────────────────────────────────────────────────────────────────────

CPU = torch.device("cpu")


def test_positions_count_real_tokens_only() -> None:
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 1]])
    places = Mask.padding(real == 1).position_ids(5, 0, CPU)
    assert places[0, 2:].tolist() == [0, 1, 2]  # padding on the left
    assert places[1, :3].tolist() == [0, 1, 2]  # padding on the right
    assert places[2].tolist() == [0, 1, 2, 3, 4]
    assert places[3, [1, 3, 4]].tolist() == [0, 1, 2]  # padding within
    assert (places >= 0).all()


def test_positions_continue_after_a_cache() -> None:
    assert Mask.causal().position_ids(3, 4, CPU).tolist() == [4, 5, 6]
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]) == 1
    places = Mask.padding(real).position_ids(2, 3, CPU)
    assert places.tolist() == [[1, 2], [3, 4]]


def test_positions_start_again_in_each_group() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2], [5, 5, 3, 3, 3, 3]])
    places = Mask.grouped(numbers).position_ids(6, 0, CPU)
    assert places.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]


def test_positions_of_a_group_continue_after_a_cache() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1]])
    mask = Mask.grouped(numbers[:, 2:], numbers)
    assert mask.position_ids(4, 2, CPU).tolist() == [[2, 0, 1, 2]]


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), offset=st.integers(0, 3))
@settings(max_examples=20)
def test_padding_on_either_side_does_not_change_positions(lengths: list[int], offset: int) -> None:
    rows = [draw(n) for n in lengths]
    for side in ("left", "right"):
        real = pad_rows(rows, side) != PAD
        longest = real.shape[1]
        start = min(offset, longest - 1)
        places = Mask.padding(real).position_ids(longest - start, start, CPU)
        for row, of_row in zip(real, places, strict=True):
            counted = [int(row[:slot].sum()) for slot in range(start, longest) if row[slot]]
            assert of_row[row[start:]].tolist() == counted


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.int64, torch.uint8))
def test_a_mask_of_numbers_is_refused(dtype: torch.dtype) -> None:
    numbers = torch.tensor([[1, 1, 0]], dtype=dtype)
    message = (
        rf"a padding mask must be boolean, True where a key is visible: got {dtype}\. "
        r"Try tokens != pad\."
    )
    with pytest.raises(InputError, match=message):
        Mask.padding(numbers)
    message = (
        rf"a mask pattern must be boolean, True where a key is visible: got {dtype}\. "
        r"Try pairs == 1\."
    )
    with pytest.raises(InputError, match=message):
        Mask.pattern(numbers)


def test_a_mask_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(InputError, match=r"a padding mask must have shape \(batch, key\): got"):
        Mask.padding(torch.ones(3, dtype=torch.bool))
    with pytest.raises(InputError, match=r"pattern must have shape \(query, key\) or \(batch, "):
        Mask.pattern(torch.ones(1, 1, 2, 2, dtype=torch.bool))


@pytest.mark.parametrize("size", (0, -1))
def test_a_window_of_nothing_is_refused(size: int) -> None:
    message = rf"a window must span at least 1 position: got {size}\. Try 128\."
    with pytest.raises(InputError, match=message):
        Mask.window(size)


@pytest.mark.parametrize("prefix", (2.0, torch.tensor([1.0, 2.0]), torch.ones(2, 2).int()))
def test_a_prefix_must_be_integers(prefix: Any) -> None:
    message = r"a prefix must be integers of shape \(batch,\): got torch\.\w+ of shape"
    with pytest.raises(InputError, match=message):
        Mask.causal(prefix)


@pytest.mark.parametrize("groups", (torch.zeros(1, 3), torch.zeros(3).int()))
def test_groups_must_be_integers(groups: Tensor) -> None:
    message = r"groups must be integers of shape \(batch, length\): got torch\.\w+ of shape"
    with pytest.raises(InputError, match=message):
        Mask.grouped(groups)
    with pytest.raises(InputError, match=message):
        Mask.grouped(torch.zeros(1, 3).int(), groups)


def true(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "message"),
    (
        (Mask.padding(true(2, 5)), r"a padding mask must have shape \(2, 6\) here: got \(2, 5\)"),
        (Mask.padding(true(3, 6)), r"a padding mask must have shape \(2, 6\) here: got \(3, 6\)"),
        (Mask.padding(true(1, 6)), r"a padding mask must have shape \(2, 6\) here: got \(1, 6\)"),
        (Mask.causal(torch.ones(3).int()), r"a prefix must have shape \(2,\) here: got \(3,\)"),
        (
            Mask.grouped(true(2, 5).int(), true(2, 6).int()),
            r"the groups of the queries must have shape \(2, 4\) here: got \(2, 5\)",
        ),
        (
            Mask.grouped(true(2, 4).int()),
            r"the groups of the keys must have shape \(2, 6\) here: got \(2, 4\)",
        ),
        (Mask.pattern(true(4, 5)), r"a mask pattern must have shape \(1, 4, 6\) here: got"),
        (Mask.pattern(true(3, 4, 6)), r"a mask pattern must have shape \(2, 4, 6\) here: got"),
    ),
)
def test_a_mask_that_does_not_fit_is_refused_when_used(mask: Mask, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mask.check(2, 4, 6)
    with pytest.raises(InputError, match=message):
        attend(mask, 4, 6)


@pytest.mark.parametrize(
    ("positions", "mask"),
    (
        ("none", Mask.padding(true(2, 5))),
        ("none", Mask.padding(true(3, 6))),
        ("sinusoidal", Mask.padding(true(1, 6))),
        ("sinusoidal", Mask.grouped(true(1, 6).int())),
        ("sinusoidal", Mask.pattern(true(5, 6))),
        ("sinusoidal", Mask.padding(true(2, 5))),
        ("sinusoidal", Mask.padding(true(3, 6))),
        ("learned", Mask.padding(true(2, 7))),
        ("none", Mask.grouped(true(2, 5).int())),
        ("none", Mask.grouped(true(3, 6).int())),
    ),
)
@pytest.mark.parametrize("mode", ("encoder", "decoder"))
def test_a_model_refuses_a_mask_that_does_not_fit(mode: str, positions: str, mask: Mask) -> None:
    with pytest.raises(InputError, match=r"must have shape \(.*\) here: got \(.*\)"):
        make(mode, positions=positions)(draw(2, 6), mask=mask)


def test_a_memory_mask_that_does_not_fit_is_refused() -> None:
    model = make("encoder-decoder")
    memory = model.encode(draw(2, 5))
    with pytest.raises(InputError, match=r"a padding mask must have shape \(2, 5\) here: got"):
        model.decode(draw(2, 3), memory, memory_mask=Mask.padding(true(2, 4)))


# ── A query that sees nothing ─────────────────────────────────────────────────────────────────────


def attend(mask: Mask, query: int, key: int, score: Any = None) -> tuple[Tensor, Tensor]:
    """Return mixed values and weights of random queries, keys and values."""
    shapes = ((2, 4, query, 6), (2, 2, key, 6), (2, 2, key, 6))
    q, k, v = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    table, local = AttentionTable(mask, query, key), torch.nn.Identity()
    mixed = mix_values(q, k, v, score or DotScore(0.4), table, local, 0.0)
    mixed.square().sum().backward()
    assert all(part.grad is not None and part.grad.isfinite().all() for part in (q, k, v))
    weights = attention_weights(q, k, score or DotScore(0.4), table, local)
    # Heads 0 and 1 read the first head of values, 2 and 3 the second.
    close(mixed, weights @ v[:, [0, 0, 1, 1]])
    return mixed, weights


@pytest.mark.parametrize("way", ("row", "table", "cap", "additive", "chunks"))
def test_a_query_that_sees_nothing_gets_zeros(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "chunks":
        monkeypatch.setattr("addnorm.layers.attention_kernels.MAX_TABLE_ENTRIES", 4)
        monkeypatch.setattr("addnorm.layers.attention_kernels.CHUNK_QUERIES", 2)
    score = {"cap": DotScore(0.4, 3.0), "additive": AdditiveScore(4, 6).double()}.get(way)
    real = torch.tensor([[True, False, True, True, False], [False] * 5])
    mask = Mask.padding(real)
    mixed, weights = attend(mask if way == "row" else mask & Mask.pattern(true(5, 5)), 5, 5, score)
    assert not mixed[1].any() and not weights[1].any()
    assert mixed[0].all() and torch.equal(weights[0] != 0, real[0].expand(4, 5, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_and_the_written_out_formula_agree(kind: str) -> None:
    mask, _ = kind_of_mask(kind, Sizes(2, 5, 5, 0), seed=3)
    torch.manual_seed(1)
    fused, weights = attend(mask, 5, 5, DotScore(0.4))
    torch.manual_seed(1)
    # Such a high cap changes no value, but the fused kernel is not used.
    written_out, others = attend(mask, 5, 5, DotScore(0.4, 1e8))
    close(fused, written_out)
    close(weights, others)


def test_a_query_that_sees_nothing_gets_zeros_also_with_a_bias() -> None:
    model = make("encoder", positions="linear-bias", depth=1)
    maps: dict[str, Tensor] = {}
    visible = true(4, 4)
    visible[2] = False
    output = model(draw(1, 4), mask=Mask.pattern(visible), maps=maps)
    assert output.isfinite().all()
    assert not maps["encoder.0.attention"][:, :, 2].any()


# ── No table if the kernel needs none ─────────────────────────────────────────────────────────────


class Spy:
    """Wraps torch's kernel and `Mask.dense`, and records their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        self.tables = 0
        kernel, dense = F.scaled_dot_product_attention, Mask.dense

        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            self.calls.append(kwargs)
            return kernel(*args, **kwargs)

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            self.tables += 1
            return dense(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
        monkeypatch.setattr(Mask, "dense", counted)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.mark.parametrize("positions", ("sinusoidal", "learned", "rotary", "none"))
def test_a_causal_stack_uses_the_causal_flag(positions: str, spy: Spy) -> None:
    make("decoder", positions=positions)(draw(2, 6))
    assert spy.tables == 0 and len(spy.calls) == 2
    assert all(call["is_causal"] is True and call["attn_mask"] is None for call in spy.calls)


@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_with_the_causal_flag_is_one_row(side: str, spy: Spy) -> None:
    ids = pad_rows([draw(6), draw(4)], side)
    make("decoder")(ids)
    assert spy.tables == 0
    for call in spy.calls:
        assert call["is_causal"] is True
        assert torch.equal(call["attn_mask"], (ids != PAD)[:, None, None, :])


def test_padding_alone_is_one_row(spy: Spy) -> None:
    ids = pad_rows([draw(6), draw(4)], "right")
    make("encoder")(ids)
    assert spy.tables == 0
    for call in spy.calls:
        assert call["is_causal"] is False
        assert torch.equal(call["attn_mask"], (ids != PAD)[:, None, None, :])


def test_without_hidden_keys_there_is_no_mask(spy: Spy) -> None:
    make("encoder")(draw(2, 6))
    assert spy.tables == 0
    assert all(call["is_causal"] is False and call["attn_mask"] is None for call in spy.calls)


def test_attention_to_a_memory_needs_no_table(spy: Spy) -> None:
    source = pad_rows([draw(6), draw(4)], "right")
    make("encoder-decoder")(source, draw(2, 3))
    assert spy.tables == 0 and len(spy.calls) == 6
    own, across = spy.calls[2::2], spy.calls[3::2]
    assert all(call["is_causal"] is True and call["attn_mask"] is None for call in own)
    for call in across:
        assert call["is_causal"] is False
        assert torch.equal(call["attn_mask"], (source != PAD)[:, None, None, :])


def test_the_newest_position_of_a_cache_needs_no_table(spy: Spy) -> None:
    model = make("decoder")
    cache = model.cache(2)
    model(pad_rows([draw(3), draw(2)], "left"), cache=cache)
    spy.calls.clear()
    model(draw(2, 1), cache=cache)
    assert spy.tables == 0
    for call in spy.calls:
        assert call["is_causal"] is False
        assert call["attn_mask"].tolist() == [[[[True] * 4]], [[[False, True, True, True]]]]


@pytest.mark.parametrize(
    "changes",
    ({"window": 3}, {"positions": "linear-bias"}, {"positions": "buckets"}),
    ids=("window", "linear-bias", "buckets"),
)
def test_one_table_serves_all_layers(changes: dict[str, Any], spy: Spy) -> None:
    make("decoder", depth=3, **changes)(draw(2, 6))
    assert spy.tables == 1 and len(spy.calls) == 3
    assert all(call["is_causal"] is False for call in spy.calls)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ("left", "right"))
def test_the_implicit_mask_and_the_table_agree(
    mode: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(mode)
    ids = pad_rows([draw(6), draw(4), draw(1)], side)
    args = (ids, ids) if mode == "encoder-decoder" else (ids,)
    implicit = model(*args)
    monkeypatch.setattr(AttentionTable, "fits_kernel", lambda *args: False)
    close(implicit, model(*args))


def test_a_table_of_self_attention_is_computed_once() -> None:
    context = Context(mask=Mask.causal())
    assert context.table(3, 3) is context.table(3, 3)
    assert context.memory_table(3, 5) is context.memory_table(3, 5)
    assert context.memory_table(3, 5).mask.only_padding


# ── How a mask is shown ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mask", "text"),
    (
        (Mask.visible(), "Mask(every key is visible)"),
        (Mask.causal(), "Mask(causal)"),
        (Mask.causal(3) & Mask.window(4), "Mask(causal; prefix: 3; window: 4)"),
        (Mask.causal(torch.tensor([1, 2])), "Mask(causal; prefix: [1, 2])"),
        (
            Mask.padding(torch.tensor([[True, False], [True, True]])),
            "Mask(padding: 1 of 4 keys hidden)",
        ),
        (Mask.grouped(torch.tensor([[0, 0, 1]])), "Mask(groups: (1, 3) × (1, 3))"),
        (Mask.pattern(torch.ones(2, 3).tril() == 1), "Mask(pattern: 3 of 6 pairs hidden)"),
    ),
    ids=str,
)
def test_a_mask_shows_its_conditions(mask: Mask, text: str) -> None:
    assert repr(mask) == text
    assert f"<div>{text}</div>" in mask._repr_html_()


def drawn_cells(html: str) -> set[tuple[int, int]]:
    """The (query, key) pairs that the grid of a mask draws as visible."""
    return {(int(row), int(key)) for key, row in re.findall(r"M(\d+) (\d+)h1v1h-1z", html)}


@pytest.mark.parametrize(
    ("mask", "query", "key"),
    (
        (Mask.causal() & Mask.window(3), 8, 8),
        (Mask.causal(2) & Mask.padding(torch.tensor([[True, True, False, True]])), 4, 4),
        (Mask.grouped(torch.tensor([[0, 1]]), torch.tensor([[0, 0, 1]])), 2, 3),
        (Mask.pattern(torch.rand(2, 3, 5) < 0.5), 3, 5),
    ),
    ids=("no size", "padding", "groups", "pattern"),
)
def test_the_grid_of_a_mask_is_the_mask(mask: Mask, query: int, key: int) -> None:
    html = mask._repr_html_()
    assert drawn_cells(html) == {(i, j) for i, j in mask.dense(query, key)[0, 0].nonzero().tolist()}
    assert f"{query} queries (rows) × {key} keys (columns)" in html
    assert f'viewBox="0 0 {key} {query}"' in html


def test_a_large_mask_is_drawn_in_part() -> None:
    html = Mask.padding(torch.ones(4, 100, dtype=torch.bool))._repr_html_()
    assert "the first 32 × 32; sequence 1 of 4" in html
    assert len(drawn_cells(html)) == 32 * 32 and len(html) < 25_000


def test_a_mask_that_fits_no_batch_is_shown_without_a_grid() -> None:
    mask = Mask.padding(torch.ones(1, 4, dtype=torch.bool)) & Mask.pattern(torch.ones(3, 3) == 1)
    assert "<svg" not in mask._repr_html_() and "pattern: 0 of 9" in mask._repr_html_()
