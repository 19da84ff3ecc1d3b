"""Position schemes: tables, properties and formulas."""

import math

import pytest
import torch
from torch import Tensor

from addnorm.config import ModelConfig
from addnorm.errors import ConfigError, InputError
from addnorm.layers.attention import SelfAttention
from addnorm.layers.context import Context
from addnorm.layers.masks import Mask
from addnorm.layers.positions import (
    POSITIONS,
    Buckets,
    Learned,
    LinearBias,
    NoPositions,
    Relative,
    Rotary,
    Sinusoidal,
    sinusoids,
)
from addnorm.models.build import Model, build
from tests import naive
from tests.naive import Weights, randomise_

LAYOUTS = ("interleaved", "halves", "tensor2tensor")


def make(positions: str, mode: str = "encoder", **changes: object) -> Model:
    settings = dict(
        mode=mode, vocab=11, width=8, heads=2, depth=1, dropout=0.0, positions=positions
    )
    return build(ModelConfig(**(settings | changes)))


# ── Sinusoidal ────────────────────────────────────────────────────────────────────────────────────


def frequency(i: int, width: int, base: float, layout: str) -> float:
    exponent = i / (width / 2 - 1) if layout == "tensor2tensor" else 2 * i / width
    return 1 / base**exponent


def entry(p: int, column: int, width: int, base: float, layout: str) -> float:
    half = width // 2
    i = column // 2 if layout == "interleaved" else column % half
    is_sine = column % 2 == 0 if layout == "interleaved" else column < half
    angle = p * frequency(i, width, base, layout)
    return math.sin(angle) if is_sine else math.cos(angle)


def test_the_table_of_base_100_and_width_4() -> None:
    expected = [
        [0.0, 1.0, 0.0, 1.0],
        [0.8415, 0.5403, 0.0998, 0.9950],
        [0.9093, -0.4161, 0.1987, 0.9801],
        [0.1411, -0.9900, 0.2955, 0.9553],
    ]
    table = sinusoids(torch.arange(4), 4, 100.0, "interleaved")
    torch.testing.assert_close(
        table, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-5
    )


@pytest.mark.parametrize("base", [100.0, 10000.0])
@pytest.mark.parametrize("width", [4, 10])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinusoids_equal_their_formula(layout: str, width: int, base: float) -> None:
    table = sinusoids(torch.arange(30), width, base, layout)
    expected = [[entry(p, c, width, base, layout) for c in range(width)] for p in range(30)]
    torch.testing.assert_close(
        table, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_the_three_layouts_differ() -> None:
    tables = [sinusoids(torch.arange(5), 8, 100.0, layout) for layout in LAYOUTS]
    for one in range(3):
        for two in range(one):
            assert not torch.allclose(tables[one], tables[two])
    permuted = tables[0][:, [0, 2, 4, 6, 1, 3, 5, 7]]
    torch.testing.assert_close(permuted, tables[1])


def test_the_longest_wavelength_of_tensor2tensor_is_exactly_the_base() -> None:
    base = 50.0
    table = sinusoids(
        torch.tensor([0.0, 2 * math.pi * base], dtype=torch.float64), 8, base, "tensor2tensor"
    )
    torch.testing.assert_close(table[1, [3, 7]], table[0, [3, 7]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_bounded_unique_and_of_one_length(layout: str) -> None:
    width = 16
    table = sinusoids(torch.arange(2000), width, 10000.0, layout)
    assert float(table.abs().max()) <= 1
    torch.testing.assert_close(table.pow(2).sum(-1), torch.full((2000,), width / 2).double())
    nearest = torch.cdist(table, table).fill_diagonal_(math.inf).min()
    assert float(nearest) > 1e-3


@pytest.mark.parametrize("k", [1, 3, 17])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shift_is_the_same_rotation_at_every_position(layout: str, k: int) -> None:
    """PE(p + k) = R_k PE(p)."""
    width, half = 8, 4
    rotation = torch.zeros(width, width).double()
    for i in range(half):
        sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, half + i)
        turn = k * frequency(i, width, 10000.0, layout)
        rotation[sine, sine] = rotation[cosine, cosine] = math.cos(turn)
        rotation[sine, cosine], rotation[cosine, sine] = math.sin(turn), -math.sin(turn)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(width).double())
    table = sinusoids(torch.arange(100 + k), width, 10000.0, layout)
    torch.testing.assert_close(table[k:], table[:100] @ rotation.T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dot_products_depend_only_on_the_offset(layout: str) -> None:
    table = sinusoids(torch.arange(40), 8, 10000.0, layout)
    products = table @ table.T
    for p in range(40):
        for q in range(40):
            expected = sum(math.cos((p - q) * frequency(i, 8, 10000.0, layout)) for i in range(4))
            assert float(products[p, q]) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinusoidal_adds_the_rows_of_the_positions(layout: str) -> None:
    positions = Sinusoidal(8, 2, 4, 16, False, base=100.0, layout=layout)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2], [5, 100_000, 0]])
    expected = [
        [[entry(p, c, 8, 100.0, layout) for c in range(8)] for p in row] for row in places.tolist()
    ]
    added = positions.embed(x, places) - x
    torch.testing.assert_close(
        added, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9
    )
    assert positions.embed(x.float(), places).dtype == torch.float32


# ── Learned ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_adds_the_row_of_each_position(offset: int) -> None:
    positions = Learned(8, 2, 4, 5, False, offset=offset)
    assert positions.weight.shape == (5 + offset, 8)
    x, places = torch.randn(1, 3, 8), torch.tensor([4, 0, 2])
    expected = torch.stack(
        [x[0, n] + positions.weight[p + offset] for n, p in enumerate((4, 0, 2))]
    )
    assert torch.equal(positions.embed(x, places), expected[None])


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_refuses_a_sequence_that_is_too_long(offset: int) -> None:
    model = make("learned", length=4, position_options={"offset": offset})
    model(torch.ones(1, 4).long())
    message = r"hold 4 positions: got a sequence of 6\. Shorten it, or build with length=6\."
    with pytest.raises(InputError, match=message):
        model(torch.ones(1, 6).long())


def test_learned_positions_do_not_count_padding() -> None:
    model = make("learned", length=4, pad=0)
    model(torch.tensor([[0, 0, 1, 2], [1, 2, 3, 4]]))
    with pytest.raises(InputError, match="hold 4 positions"):
        model.encoder.positions.embed(torch.zeros(1, 1, 8), torch.tensor([[4]]))


# ── Rotary ────────────────────────────────────────────────────────────────────────────────────────


def pairs_of(width: int, layout: str) -> list[tuple[int, int]]:
    half = width // 2
    return [(2 * i, 2 * i + 1) if layout == "interleaved" else (i, half + i) for i in range(half)]


@pytest.mark.parametrize("base", [100.0, 10000.0])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_rotary_rotates_complex_numbers(layout: str, base: float) -> None:
    width = 6
    x = torch.randn(2, 3, 5, width, dtype=torch.float64)
    indices = torch.tensor([0, 1, 2, 7, 1000])
    rotated = Rotary(12, 2, width, 16, False, base=base, layout=layout).rotate(x, indices)
    expected = torch.empty_like(x)
    for i, (real, imaginary) in enumerate(pairs_of(width, layout)):
        angle = indices.double() * base ** (-2 * i / width)
        number = torch.complex(x[..., real], x[..., imaginary]) * torch.exp(1j * angle)
        expected[..., real], expected[..., imaginary] = number.real, number.imag
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_rotary_scores_depend_only_on_the_difference(layout: str) -> None:
    rotary = Rotary(12, 2, 6, 16, False, layout=layout)
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        rotated = rotary.rotate(q, torch.tensor([i])) * rotary.rotate(k, torch.tensor([j]))
        return float(rotated.sum())

    for difference in (-3, 0, 1, 5):
        scores = [score(i + 3, i + 3 - difference) for i in (0, 4, 900)]
        assert scores == pytest.approx([scores[0]] * 3, abs=1e-10)
    assert abs(score(5, 0) - score(0, 5)) > 1e-3


def test_rotary_layouts_differ_by_a_permutation_of_columns() -> None:
    order = [0, 2, 4, 1, 3, 5]
    x, indices = torch.randn(2, 3, 5, 6, dtype=torch.float64), torch.arange(5)
    neighbours = Rotary(12, 2, 6, 16, False, layout="interleaved").rotate(x, indices)
    halves = Rotary(12, 2, 6, 16, False, layout="halves").rotate(x[..., order], indices)
    torch.testing.assert_close(halves, neighbours[..., order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_rotary_of_a_share_leaves_the_rest(layout: str) -> None:
    x, slots = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.arange(5)
    part = Rotary(12, 2, 8, 16, False, layout=layout, share=0.5).rotate(x, slots)
    alone = Rotary(12, 2, 4, 16, False, layout=layout).rotate(x[..., :4], slots)
    assert torch.equal(part, torch.cat((alone, x[..., 4:]), dim=-1))


@pytest.mark.parametrize(("first", "full"), [(0.0, 0.0), (16.0, 64.0)])
def test_stretched_rotary_frequencies(first: float, full: float) -> None:
    """Linear: all over the factor. Llama 3: by wavelength, with a ramp in the number of turns."""
    base, factor, width = 500.0, 8.0, 32
    options = dict(base=base, stretch=factor, stretch_from=first, stretch_full=full)
    rotary = Rotary(12, 2, width, 16, False, **options)
    kinds = set()
    for i, found in enumerate(rotary.frequencies(torch.device("cpu"), False).tolist()):
        plain = base ** (-2 * i / width)
        wavelength = 2 * math.pi / plain
        if not full or wavelength > full:
            wanted, kind = plain / factor, "stretched"
        elif wavelength < first:
            wanted, kind = plain, "kept"
        else:
            turns, most = full / wavelength, full / first
            ramp = (turns - 1) / (most - 1)
            wanted, kind = ramp * plain + (1 - ramp) * plain / factor, "between"
        kinds.add(kind)
        assert found == pytest.approx(wanted, rel=1e-12)
    assert kinds == ({"stretched", "kept", "between"} if full else {"stretched"})


def test_windowed_layers_have_a_base_of_their_own() -> None:
    x, slots = torch.randn(1, 1, 5, 8, dtype=torch.float64), torch.arange(5)
    rotary = Rotary(12, 2, 8, 16, False, base=1e6, window_base=100.0)
    assert torch.equal(
        rotary.rotate(x, slots), Rotary(12, 2, 8, 16, False, base=1e6).rotate(x, slots)
    )
    near = Rotary(12, 2, 8, 16, False, base=100.0)
    assert torch.equal(rotary.rotate(x, slots, True), near.rotate(x, slots))


# ── Bias by distance ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [1 / 256]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (12, [2.0**-n for n in range(1, 9)] + [0.7071, 0.3536, 0.1768, 0.0884]),
    ],
)
def test_linear_bias_slopes(heads: int, slopes: list[float]) -> None:
    positions = LinearBias(8 * heads, heads, 8, 16, True)
    assert positions.slopes == pytest.approx(slopes, abs=5e-5)


def test_linear_bias_falls_with_distance() -> None:
    positions = LinearBias(32, 4, 8, 16, True)
    q = torch.zeros(1, 4, 3, 8, dtype=torch.float64)
    bias = positions.bias(q, torch.arange(2, 5), torch.arange(6), torch.nn.Identity(), 1.0)
    assert bias.shape == (1, 4, 3, 6)
    for h in range(4):
        for i in range(3):
            for j in range(6):
                assert float(bias[0, h, i, j]) == -(2.0 ** (-2 * (h + 1))) * abs(i + 2 - j)


BIDIRECTIONAL = {
    -128: 15,
    -64: 14,
    -16: 10,
    -8: 8,
    -7: 7,
    0: 0,
    1: 17,
    8: 24,
    16: 26,
    64: 30,
    128: 31,
}
CAUSAL = {-15: 15, -16: 16, -32: 21, -64: 26, -128: 31, -1000: 31, 0: 0, 1: 0, 50: 0}


@pytest.mark.parametrize(("causal", "table"), [(False, BIDIRECTIONAL), (True, CAUSAL)])
def test_the_buckets_of_t5(causal: bool, table: dict[int, int]) -> None:
    positions = Buckets(16, 2, 8, 16, causal)
    offsets = torch.tensor(list(table))
    assert positions.bucket(offsets).tolist() == list(table.values())


def bucket(offset: int, causal: bool, buckets: int, furthest: int) -> int:
    """In integer arithmetic: bucket n is the last with (distance/near)^m >= (furthest/near)^n."""
    count = buckets if causal else buckets // 2
    start = 0 if causal or offset <= 0 else count
    distance = max(-offset, 0) if causal else abs(offset)
    near = count // 2
    if distance < near:
        return start + distance
    m = count - near
    n = 0
    while n + 1 < m and distance**m * near ** (n + 1) >= furthest ** (n + 1) * near**m:
        n += 1
    return start + near + n


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (16, 64), (32, 100)])
@pytest.mark.parametrize("causal", [True, False])
def test_every_bucket(causal: bool, buckets: int, furthest: int) -> None:
    positions = Buckets(16, 2, 8, 16, causal, buckets=buckets, furthest=furthest)
    offsets = range(-300, 301)
    expected = [bucket(offset, causal, buckets, furthest) for offset in offsets]
    assert positions.bucket(torch.tensor(list(offsets))).tolist() == expected


def test_bucket_bias_is_the_weight_of_the_bucket() -> None:
    positions = Buckets(16, 2, 8, 16, False)
    q = torch.zeros(1, 2, 3, 8)
    bias = positions.bias(q, torch.arange(4, 7), torch.arange(9), torch.nn.Identity(), 1.0)
    assert bias.shape == (1, 2, 3, 9)
    for h in range(2):
        for i in range(3):
            for j in range(9):
                row = bucket(j - (i + 4), False, 32, 128)
                assert bias[0, h, i, j] == positions.weight[row, h]


def test_buckets_look_ahead_in_an_encoder_only() -> None:
    model = make("buckets", "encoder-decoder")
    assert not model.encoder.positions.causal
    assert model.decoder.positions.causal
    assert model.encoder.positions.weight is not model.decoder.positions.weight


@pytest.mark.parametrize("causal", [True, False])
def test_relative_equals_its_formula_pair_by_pair(causal: bool) -> None:
    """(q_i + u)·k_j + (q_i + v)·W r_(i−j), over √head_width."""
    width, heads, head_width, length = 8, 2, 3, 5
    positions = Relative(width, heads, head_width, 16, causal)
    local = positions.local(width, heads, head_width)
    attention = SelfAttention(width, heads, heads, head_width, 0, local=local)
    attention = randomise_(attention.double(), 0.5)
    w = Weights(attention.state_dict())

    def score(q: Tensor, k: Tensor, h: int, i: int, j: int) -> Tensor:
        sinusoid = [entry(i - j, column, width, 10000.0, "halves") for column in range(width)]
        r = w["local.project.weight"] @ torch.tensor(sinusoid, dtype=torch.float64)
        r = r[h * head_width : (h + 1) * head_width]
        content = sum((q[n] + w["local.u"][h, n]) * k[n] for n in range(head_width))
        position = sum((q[n] + w["local.v"][h, n]) * r[n] for n in range(head_width))
        return (content + position) / math.sqrt(head_width)

    x = torch.randn(2, length, width, dtype=torch.float64)
    expected, _ = naive.attention(x, x, w, heads, lambda b, i, j: j <= i or not causal, score=score)
    mask = Mask.causal() if causal else Mask()
    output = attention(x, Context(mask=mask, positions=positions))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    assert w.read == set(attention.state_dict())


# ── None, and invalid options ─────────────────────────────────────────────────────────────────────


def test_without_positions_an_encoder_is_equivariant() -> None:
    ids, order = torch.tensor([[3, 1, 4, 5, 9]]), torch.tensor([2, 0, 4, 1, 3])
    for name in POSITIONS:
        model = randomise_(make(name).double())
        moved = model.hidden(ids[:, order])
        assert torch.allclose(moved, model.hidden(ids)[:, order]) == (name == "none")


def test_the_plain_index_is_added_to_every_coordinate() -> None:
    x, places = torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 17])
    for normalised, step in ((True, 1 / 16), (False, 1.0)):
        moved = POSITIONS["index"](8, 2, 4, 16, False, normalised=normalised).embed(x, places)
        for i, place in enumerate(places.tolist()):
            torch.testing.assert_close(moved[:, i], x[:, i] + step * place)


@pytest.mark.parametrize(("share", "columns"), [(0.25, 2), (0.5, 4), (0.01, 2), (0.9, 6)])
def test_concatenated_positions_have_coordinates_of_their_own(share: float, columns: int) -> None:
    x, places = torch.randn(2, 5, 8), torch.arange(5)
    moved = POSITIONS["concatenated"](8, 2, 4, 16, False, share=share).embed(x, places)
    assert torch.equal(moved[..., : 8 - columns], x[..., : 8 - columns])
    table = sinusoids(places, columns, 1e4, "interleaved").float()
    assert torch.equal(moved[..., 8 - columns :], table.expand(2, -1, -1))
    with pytest.raises(ConfigError, match="concatenated positions need a width above 2"):
        POSITIONS["concatenated"](2, 1, 2, 16, False)


def test_no_positions_change_nothing() -> None:
    positions = NoPositions(8, 2, 4, 16, False)
    x = torch.randn(2, 3, 8)
    assert positions.embed(x, torch.arange(3)) is x
    assert positions.rotate(x, torch.arange(3)) is x
    assert positions.shift_queries(x, torch.nn.Identity()) is x
    indices = torch.arange(3)
    assert positions.bias(x, indices, indices, torch.nn.Identity(), 1.0) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(positions="sinusoidal", position_options={"layout": "half"}),
            r"model\.position_options\.layout must be one of interleaved, halves, tensor2tensor: "
            r"got 'half'",
        ),
        (
            dict(positions="rotary", position_options={"layout": "tensor2tensor"}),
            r"layout must be one of interleaved, halves: got 'tensor2tensor'",
        ),
        (
            dict(positions="rotary", position_options={"bas": 1.0}),
            r"model\.position_options has no 'bas'\. Did you mean 'base'\?",
        ),
        (
            dict(positions="linear-bias", position_options={"base": 1.0}),
            r"model\.position_options has no 'base'\. It has no options\.",
        ),
        (
            dict(positions="sinusoid"),
            r"model\.positions has no choice 'sinusoid'\. Did you mean 'sinusoidal'\?",
        ),
        (
            dict(positions="sinusoidal", width=9, heads=3),
            r"sinusoidal positions need an even width: width=9\. Try 10\.",
        ),
        (
            dict(positions="relative", width=9, heads=3),
            r"relative positions need an even width: width=9\. Try 10\.",
        ),
        (
            dict(positions="rotary", width=9, heads=3),
            r"head_width must be even: head_width=3\. Try 4\.",
        ),
    ],
)
def test_impossible_positions_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("positions", "option", "value"),
    [
        ("sinusoidal", "base", 0.0),
        ("rotary", "base", -1.0),
        ("rotary", "share", 0.0),
        ("rotary", "share", 1.5),
        ("rotary", "stretch", 0.0),
        ("rotary", "stretch_from", 3.0),
        ("rotary", "window_base", -1.0),
        ("relative", "base", 0.0),
        ("learned", "offset", -1),
        ("buckets", "buckets", 2),
        ("buckets", "furthest", 8),
    ],
)
def test_impossible_options_are_refused(positions: str, option: str, value: object) -> None:
    """Bases must be positive, offsets not negative, far buckets beyond the near ones."""
    with pytest.raises(ConfigError, match=option):
        make(positions, position_options={option: value})
