"""Samplers: their distribution, their support, and reproducibility by seed."""

import pytest
import torch
from torch import Tensor

from addnorm.generate.samplers import (
    BLOCK,
    NUCLEUS,
    Greedy,
    Sampler,
    sample_index,
    top_p_tokens,
    top_values,
    uniforms,
)

DRAWS = 40_000


def sorted_by_hand(values: Tensor, count: int) -> list[list[int]]:
    """Return the indices of each row, greatest value first, ties by index."""
    rows = values.tolist()
    return [sorted(range(len(row)), key=lambda i: (-row[i], i))[:count] for row in rows]


# ── Top values ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", (1, 7, 127, 128, 129, 3000, 3072, 5001))
@pytest.mark.parametrize("count", (1, 2, 5))
@pytest.mark.parametrize("levels", (2, 5, None))
def test_top_values_and_their_order(size: int, count: int, levels: int | None) -> None:
    values = torch.randn(6, size)
    if levels:  # few distinct values, so that most are equal
        values = torch.randint(levels, (6, size)).float()
    values[0] = 1.0
    count = min(count, size)
    top, places = top_values(values, count)
    assert places.tolist() == sorted_by_hand(values, count)
    assert torch.equal(top, values.gather(1, places))


def test_the_last_short_block_counts_too() -> None:
    values = torch.zeros(1, 40 * BLOCK + 3)
    values[0, -1], values[0, -3] = 3.0, 2.0
    assert top_values(values, 3)[1].tolist() == [[40 * BLOCK + 2, 40 * BLOCK, 0]]


def test_indices_are_valid_even_if_no_value_is_finite() -> None:
    values = torch.full((2, 40 * BLOCK + 3), float("-inf"))
    assert int(top_values(values, 5)[1].max()) < values.shape[1]


# ── Distributions ─────────────────────────────────────────────────────────────────────────────────


def chi_square(drawn: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * len(drawn)
    counts = torch.bincount(drawn, minlength=len(probabilities)).double()
    assert bool((counts[expected == 0] == 0).all())
    some = expected > 0
    return float(((counts - expected) ** 2 / expected)[some].sum())


def repeat(logits: Tensor, sampler: Sampler) -> Tensor:
    numbers = uniforms([7], DRAWS)[0]
    return sampler(logits.expand(DRAWS, -1), numbers)


LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -2.0, 0.9, 0.2, -0.4, 1.0], dtype=torch.float64)
# The chi-square statistic of 9 degrees of freedom is above this once in 1,000; fewer, even rarer.
LIMIT = 27.88


@pytest.mark.parametrize("temperature", (0.5, 1.0, 2.0))
def test_samples_follow_the_softmax(temperature: float) -> None:
    drawn = repeat(LOGITS, Sampler(temperature=temperature))
    assert chi_square(drawn, (LOGITS / temperature).softmax(dim=0)) < LIMIT
    assert chi_square(drawn, (LOGITS / (temperature * 1.2)).softmax(dim=0)) > LIMIT


@pytest.mark.parametrize("k", (1, 2, 4, 10, 99))
def test_samples_from_the_top_k_follow_their_softmax(k: int) -> None:
    kept = LOGITS.argsort(descending=True)[:k]
    expected = torch.zeros_like(LOGITS).index_copy(0, kept, LOGITS[kept].softmax(dim=0))
    assert chi_square(repeat(LOGITS, Sampler(top_k=k)), expected) < LIMIT


@pytest.mark.parametrize("p", (0.05, 0.4, 0.7, 0.95, 1.0))
@pytest.mark.parametrize("k", (None, 5))
def test_samples_from_the_nucleus_follow_its_softmax(p: float, k: int | None) -> None:
    order = LOGITS.argsort(descending=True)[: k or 10]
    reached, kept = 0.0, []
    for place, share in zip(order.tolist(), LOGITS[order].softmax(dim=0).tolist(), strict=True):
        if reached < p:
            kept.append(place)
        reached += share
    inside = torch.tensor(kept)
    expected = torch.zeros_like(LOGITS).index_copy(0, inside, LOGITS[inside].softmax(dim=0))
    assert chi_square(repeat(LOGITS, Sampler(top_k=k, top_p=p)), expected) < LIMIT


def test_temperature_comes_before_the_nucleus() -> None:
    flat, sharp = (
        len(set(repeat(LOGITS, Sampler(temperature=t, top_p=0.8)).tolist())) for t in (3.0, 0.3)
    )
    assert sharp == 1 < 5 < flat


@pytest.mark.parametrize("size", (20, NUCLEUS, NUCLEUS + 1, 4000))
@pytest.mark.parametrize("sharp", (0.01, 1.0, 6.0))
def test_a_nucleus_is_the_smallest_that_reaches_p(size: int, sharp: float) -> None:
    logits = torch.randn(8, size, dtype=torch.float64) * sharp
    for p in (0.1, 0.5, 0.9, 0.999):
        kept, places = top_p_tokens(logits, p)
        inside = kept.isfinite()
        shares = logits.softmax(dim=1).gather(1, places)
        reached = (shares * inside).sum(dim=1)
        least = shares.masked_fill(~inside, 2.0).amin(dim=1)
        assert bool((reached >= p - 1e-9).all())
        assert bool((reached - least < p + 1e-9).all())  # without its last token the sum is below p
        assert bool((least >= shares.masked_fill(inside, -1.0).amax(dim=1)).all())


def test_equal_logits_do_not_make_the_support_larger() -> None:
    level = torch.zeros(10, dtype=torch.float64)
    assert set(repeat(level, Sampler(top_k=3)).tolist()) == {0, 1, 2}
    assert set(repeat(level, Sampler(top_p=0.25)).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("uniform", (0.0, 0.5, 1 - 2**-53, 1.0))
def test_impossible_tokens_are_never_sampled(uniform: float) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]], dtype=torch.float32)
    assert int(sample_index(logits, torch.tensor([uniform], dtype=torch.float64))) in (1, 2)


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 1.0, 5.0, 5.0]])
    assert Greedy()(logits, torch.rand(2)).tolist() == [1, 0]
    long = torch.zeros(2, 5000)
    long[1, 4999] = 1.0
    assert Greedy()(long, torch.rand(2)).tolist() == [0, 4999]


# ── Seeds ─────────────────────────────────────────────────────────────────────────────────────────


def test_each_seed_has_its_own_numbers() -> None:
    together = uniforms([5, 6, 5], 9)
    assert torch.equal(together[0], together[2]) and not torch.equal(together[0], together[1])
    assert torch.equal(together[1:2], uniforms([6], 9))
    state = torch.get_rng_state()
    uniforms([1], 3)
    assert torch.equal(state, torch.get_rng_state())


def test_first_numbers_of_consecutive_seeds_are_uniform() -> None:
    first = uniforms(list(range(5000)), 1)[:, 0]
    assert chi_square((first * 10).long(), torch.full((10,), 0.1, dtype=torch.float64)) < LIMIT
