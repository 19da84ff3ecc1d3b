"""Dropout with shared draws: masks must be distributed as if each element had its own draw.

Statistics must be within five standard deviations: by chance one check in 1.7 million would fail,
and the seed is fixed.
"""

import math

import pytest
import torch
from torch import Tensor

from addnorm.layers.dropout import Dropout

RATES = [0.01, 0.1, 0.25, 0.3, 0.5, 0.9]
ROWS, COLUMNS = 512, 256


def mask_of(p: float, *shape: int) -> Tensor:
    """Return the mask of one call: 1.0 where an element was kept."""
    return (Dropout(p)(torch.ones(*shape)) != 0).double()


def rounded(p: float) -> float:
    """Return the rate rounded to 16 bits."""
    return round(p * 65536) / 65536


def correlation(one: Tensor, two: Tensor, p: float) -> float:
    """Return the correlation of two masks, in standard deviations of that of independent masks."""
    mean, variance = 1 - rounded(p), rounded(p) * (1 - rounded(p))
    products = (one - mean) * (two - mean) / variance
    return float(products.mean()) * math.sqrt(products.numel())


@pytest.mark.parametrize("p", RATES)
def test_the_right_fraction_is_kept(p: float) -> None:
    mask = mask_of(p, ROWS, COLUMNS)
    sigma = math.sqrt(p * (1 - p) / mask.numel())
    assert abs(float(mask.mean()) - (1 - rounded(p))) < 5 * sigma


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_rows_and_columns_are_kept_at_the_same_rate(p: float) -> None:
    mask = mask_of(p, ROWS, COLUMNS)
    for dim in (0, 1):
        means = mask.mean(dim=dim)
        sigma = math.sqrt(p * (1 - p) / mask.shape[dim])
        assert float((means - (1 - rounded(p))).abs().max()) < 6 * sigma


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", RATES)
def test_kept_values_are_divided_by_the_rounded_rate(p: float, dtype: torch.dtype) -> None:
    x = torch.randn(64, 64, dtype=dtype)
    y = Dropout(p)(x)
    assert y.dtype == dtype
    kept = y != 0
    assert kept.any()
    assert not kept.all()
    factor = torch.tensor(65536 / (65536 - round(p * 65536)), dtype=dtype)
    assert torch.equal(y[kept], (x * factor)[kept])


@pytest.mark.parametrize("p", RATES)
def test_the_mean_is_preserved(p: float) -> None:
    y = Dropout(p)(torch.ones(ROWS, COLUMNS, dtype=torch.float64))
    sigma = math.sqrt(p / (1 - p) / y.numel())
    assert abs(float(y.mean()) - 1) < 5 * sigma


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_neighbours_are_independent(p: float, lag: int) -> None:
    mask = mask_of(p, ROWS * COLUMNS)
    assert abs(correlation(mask[lag:], mask[:-lag], p)) < 5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rows_are_independent(p: float) -> None:
    mask = mask_of(p, ROWS, COLUMNS)
    assert abs(correlation(mask[1:], mask[:-1], p)) < 5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_calls_are_independent(p: float) -> None:
    one, two = mask_of(p, ROWS, COLUMNS), mask_of(p, ROWS, COLUMNS)
    assert not torch.equal(one, two)
    assert abs(correlation(one, two, p)) < 5


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_the_four_elements_of_one_draw_are_independent(p: float) -> None:
    """χ² of the 16 patterns of kept and dropped: 15 degrees of freedom, 99.9999 % below 56.5."""
    draws = mask_of(p, 200_000, 4).long()
    counts = torch.bincount(draws @ torch.tensor([8, 4, 2, 1]), minlength=16)
    q = 1 - rounded(p)
    chances = torch.tensor(
        [q ** f"{n:b}".count("1") * (1 - q) ** (4 - f"{n:b}".count("1")) for n in range(16)]
    )
    expected = 200_000 * chances
    assert float(expected.min()) > 5
    assert float(((counts - expected) ** 2 / expected).sum()) < 56.5


def test_the_same_seed_gives_the_same_mask() -> None:
    masks = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        masks.append(mask_of(0.5, 16, 16))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_goes_through_the_same_mask(dtype: torch.dtype) -> None:
    x = torch.randn(33, 17, dtype=dtype, requires_grad=True)
    y = Dropout(0.3)(x)
    upstream = torch.randn_like(y)
    (y * upstream).sum().backward()
    factor = torch.tensor(65536 / (65536 - round(0.3 * 65536)), dtype=dtype)
    assert torch.equal(x.grad, upstream * torch.where(y != 0, factor, 0))


def test_two_calls_keep_their_own_masks_until_the_gradient() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    one, two = Dropout(0.5)(x), Dropout(0.5)(x)
    (first,) = torch.autograd.grad(one.sum(), x)
    (second,) = torch.autograd.grad(two.sum(), x)
    assert torch.equal(first, one.detach())
    assert torch.equal(second, two.detach())


def test_double_backward() -> None:
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    y = Dropout(0.4)(x)
    factor = (y / x).detach()
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(gradient, 3 * factor**3 * x**2)
    torch.testing.assert_close(second, 6 * factor**3 * x)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_nothing_is_dropped_in_evaluation(p: float) -> None:
    x = torch.randn(8, 8)
    assert torch.equal(Dropout(p).eval()(x), x)


def test_rate_zero_drops_nothing_and_draws_nothing() -> None:
    x = torch.randn(8, 8)
    before = torch.get_rng_state()
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (5,), (7, 3), (2, 3, 5), (0,), (4, 0), ()])
def test_any_shape(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, requires_grad=True)
    y = Dropout(0.5)(x)
    assert y.shape == x.shape
    assert set(y.detach().flatten().tolist()) <= {0.0, 2.0}
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_the_last_elements_of_an_odd_size_are_drawn_too() -> None:
    masks = torch.stack([mask_of(0.5, 3) for _ in range(400)])
    assert float((masks.mean(0) - 0.5).abs().max()) < 5 * math.sqrt(0.25 / 400)


def test_a_transposed_input() -> None:
    x = torch.arange(1.0, 13.0).view(3, 4).T
    y = Dropout(0.5)(x)
    assert set((y / x).flatten().tolist()) == {0.0, 2.0}


def test_the_input_is_not_changed() -> None:
    x = torch.ones(32, 32)
    Dropout(0.5)(x)
    assert torch.equal(x, torch.ones(32, 32))


def test_repr_names_the_rate() -> None:
    assert repr(Dropout(0.1)) == "Dropout(p=0.1)"
