"""Axes, numbers as text, and curves in a terminal."""

import math
import random

import pytest

from addnorm.errors import InputError
from addnorm.report import plot_text, sparkline
from addnorm.report.axes import axis, format_number


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_round_evenly_spaced_and_enclose_the_values(seed: int) -> None:
    draw = random.Random(seed)
    scale = 10 ** draw.uniform(-8, 12)
    values = [draw.gauss(draw.uniform(-3, 3), 1) * scale for _ in range(9)]
    result = axis(values)
    assert result.low <= min(values) and max(values) <= result.high
    step = result.ticks[1] - result.ticks[0]
    first = f"{step:.6e}"[:4]
    assert first in ("1.00", "2.00", "5.00")
    assert all(
        b - a == pytest.approx(step) for a, b in zip(result.ticks, result.ticks[1:], strict=False)
    )
    assert 3 <= len(result.ticks) <= 9
    labels = result.labels()
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("seed", range(20))
def test_logarithmic_ticks(seed: int) -> None:
    draw = random.Random(seed)
    low = 10 ** draw.uniform(-9, 5)
    high = low * 10 ** draw.uniform(0.05, 12)
    result = axis([low, high, -1, 0, math.nan], log=True)
    assert result.low < low and high < result.high
    assert 2 <= len(result.ticks) <= 9
    assert all(0 <= result.place(tick) <= 1 for tick in result.ticks)
    assert not result.shows(0) and not result.shows(math.inf) and result.shows(low)


@pytest.mark.parametrize(
    "values", ([], [3.0], [0.0], [-5.0, -5.0], [math.nan], [1.7e308, -1.7e308])
)
@pytest.mark.parametrize("log", (False, True))
def test_unusual_values_have_an_axis(values: list[float], log: bool) -> None:
    result = axis(values, log=log)
    assert result.low < result.high and result.ticks
    assert all(math.isfinite(result.place(value)) for value in values if math.isfinite(value))


def test_a_snug_axis_ends_at_the_values() -> None:
    result = axis([0.3, 9.2], snug=True)
    assert (result.low, result.high, result.ticks) == (0.3, 9.2, (2, 4, 6, 8))


def test_labels_have_the_same_decimals_and_suffix() -> None:
    assert axis([0, 1]).labels() == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert axis([0, 30_000]).labels() == ["0", "5k", "10k", "15k", "20k", "25k", "30k"]
    assert axis([-0.2, 0.2]).labels()[0] == "−0.2"
    assert axis([0, 5e-7], count=2).labels() == ["0", "5×10⁻⁷"]


@pytest.mark.parametrize(
    ("value", "text"),
    (
        (0, "0"),
        (0.5, "0.5"),
        (999.9, "1000"),
        (9999.4, "9999"),
        (12_345, "12.3k"),
        (2_500_000, "2.5M"),
        (-0.0123456, "−0.0123"),
        (0.00999999, "0.01"),
        (3e-10, "3×10⁻¹⁰"),
        (1e-5, "10⁻⁵"),
        (1e20, "10²⁰"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ),
)
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text


def test_numbers_can_be_read_back() -> None:
    sizes = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    draw = random.Random(0)
    for _ in range(500):
        value = draw.choice((-1, 1)) * 10 ** draw.uniform(-3, 14)
        text = format_number(value).replace("−", "-")
        read = float(text.rstrip("kMGT")) * sizes.get(text[-1], 1.0)
        assert read == pytest.approx(value, rel=0.006)


# ── Terminals ─────────────────────────────────────────────────────────────────────────────────────


def test_a_sparkline_shows_means_at_its_width() -> None:
    assert sparkline([0, 6, 7, 7, 0, 0], 3) == "▄█▁"
    assert len(sparkline(list(range(1000)), 30)) == 30
    assert sparkline([]) == "" and sparkline([5, 5]) == "▁▁"
    assert sparkline([1, math.inf, math.nan, 2]) == "▁××█"
    assert sparkline([math.nan]) == "×"
    with pytest.raises(InputError, match=r"the width must be at least 1: got 0. Try 40."):
        sparkline([1], 0)


def test_a_plot_has_a_dot_at_each_point() -> None:
    """Decode the braille: the dots of a falling line lie on that line."""
    text = plot_text({"s": [(0, 10), (100, 0)]}, 30, 8)
    bits = {
        1: (0, 0),
        2: (0, 1),
        4: (0, 2),
        8: (1, 0),
        16: (1, 1),
        32: (1, 2),
        64: (0, 3),
        128: (1, 3),
    }
    rows = [line[4:] for line in text.splitlines()[:8]]
    dots = {
        (2 * column + x, 4 * row + y)
        for row, line in enumerate(rows)
        for column, sign in enumerate(line)
        if sign != " "
        for bit, (x, y) in bits.items()
        if ord(sign) - 0x2800 & bit
    }
    right, bottom = 2 * 26 - 1, 4 * 8 - 1
    assert {x for x, _ in dots} == set(range(right + 1))
    assert all(abs(y - bottom * x / right) <= 1 for x, y in dots)


def test_a_plot_of_several_curves_has_symbols_and_a_legend() -> None:
    text = plot_text({"post": [(0, 1), (9, 1)], "pre": [(0, 0), (9, 0)]}, 40, 6, x="step")
    lines = text.splitlines()
    assert set(lines[0][5:]) == {"●"} and "▲▲▲" in lines[5]
    assert lines[-1].strip() == "● post   ▲ pre"
    assert lines[-2].split() == ["0", "step", "9"]
    assert all(len(line) <= 40 for line in lines)


def test_gaps_and_empty_plots() -> None:
    text = plot_text({"a": [(0, 1), (1, math.nan), (2, 1)]}, 40, 4)
    assert sum("\u2800" <= sign <= "\u28ff" for sign in text) == 2
    assert plot_text({}) == plot_text({"a": [(0, math.nan)]}) == "nothing to show"
    assert plot_text({"a": [(1, 0.0)]}, log_y=True) == "nothing to show"
    for size in ((15, 9), (40, 2)):
        with pytest.raises(InputError, match=r"must be at least (16|3): got"):
            plot_text({"a": [(0, 1)]}, *size)
