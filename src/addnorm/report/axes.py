"""Axes: positions of numbers, linear or logarithmic, round ticks and their labels."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_VALUE = 1e150
"""Larger values are drawn here, so that the difference of two never overflows."""
NUMBER_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """A range of numbers with its ticks; maps each number to a position from 0 to 1.

    Parameters
    ----------
    low : number at position 0
    high : number at position 1
    ticks : the ticks
    log : logarithmic instead of linear
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end, also beyond them.

        >>> Axis(0, 10, ()).place(5), Axis(1, 100, (), log=True).place(10)
        (0.5, 0.5)
        """
        low, high, value = self.low, self.high, clamp(value)
        if self.log:
            low, high, value = (math.log(max(each, 1e-300)) for each in (low, high, value))
        return (value - low) / (high - low)

    def shows(self, value: float) -> bool:
        """Return whether a value has a position: finite, and positive on a logarithmic axis."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def labels(self) -> list[str]:
        """Return the labels of the ticks, all with the same number of decimals."""
        if self.log or len(self.ticks) < 2:
            return [format_number(tick) for tick in self.ticks]
        step = self.ticks[1] - self.ticks[0]
        largest = max(abs(tick) for tick in self.ticks)
        if largest >= 1e15 or step < 1e-5:
            return [format_number(tick) for tick in self.ticks]
        size, suffix = _suffix(largest if step >= 1e3 else 0)
        decimals = max(0, -math.floor(math.log10(step / size) + 1e-9))
        texts = (f"{tick / size:.{decimals}f}" for tick in self.ticks)
        return [
            _with_minus_sign(text) + suffix * (tick != 0)
            for text, tick in zip(texts, self.ticks, strict=True)
        ]


def axis(values: Iterable[float], *, log: bool = False, count: int = 6, snug: bool = False) -> Axis:
    """Return an axis for these values, with about `count` ticks at 1, 2 or 5 times a power of ten.

    Parameters
    ----------
    values : the numbers to show; those that the axis cannot show are ignored
    log : logarithmic instead of linear
    count : approximate number of ticks
    snug : end at the smallest and largest value, instead of at ticks

    >>> axis([0.3, 9.2]).ticks
    (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)
    >>> axis([1, 2000], log=True).labels()
    ['1', '10', '100', '1000']
    """
    shown = [clamp(value) for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(shown), max(shown)) if shown else (1.0, 10.0) if log else (0.0, 1.0)
    if log:
        return _log_axis(low, high, count, snug)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(low) / 10 or 1.0
        low, high = low - margin, high + margin
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(n * step, 12) if step > 1e-9 else n * step for n in range(first, last + 1)]
    if snug:
        slack = 1e-9 * (high - low)
        return Axis(low, high, tuple(t for t in ticks if low - slack <= t <= high + slack))
    return Axis(ticks[0], ticks[-1], tuple(ticks))


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with this many significant digits, in a readable form.

    >>> [format_number(number) for number in (0.12345, 1234.5, 40000, -2e-7, 1e-3, float("nan"))]
    ['0.123', '1234', '40k', '−2×10⁻⁷', '0.001', 'not a number']
    """
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "−∞" if value < 0 else "∞"
    rounded = float(f"{value:.{digits - 1}e}")
    size = abs(rounded)
    if size and (size < 1e-3 or size >= 1e15):
        factor, _, power = f"{value:.{digits - 1}e}".partition("e")
        factor = factor.rstrip("0").rstrip(".") if "." in factor else factor
        ten = f"10{str(int(power)).translate(SUPERSCRIPTS)}"
        return _with_minus_sign(ten if factor == "1" else f"{factor}×{ten}")
    if size >= 1e3 and abs(value) < 9999.5:
        return _with_minus_sign(f"{value:.0f}")
    scale, suffix = _suffix(size)
    size = size / scale
    decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size else 0
    text = f"{rounded / scale:.{decimals}f}"
    return _with_minus_sign(text.rstrip("0").rstrip(".") if "." in text else text) + suffix


def clamp(value: float) -> float:
    """Return the nearest number that can be drawn."""
    return max(-MAX_VALUE, min(MAX_VALUE, float(value)))


def _log_axis(low: float, high: float, count: int, snug: bool) -> Axis:
    if high <= low * (1 + 1e-9):
        low, high = low / 3, high * 3
    elif not snug:
        margin = (high / low) ** 0.04
        low, high = low / margin, high * margin
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [factor * 10.0**n for n in decades for factor in factors]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) >= 3:
            break
    else:
        ticks = list(axis([low, high], count=count, snug=True).ticks)
    return Axis(low, high, tuple(ticks[:: max(1, math.ceil(len(ticks) / (count + 2)))]), log=True)


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least * (1 - 1e-9))


def _suffix(largest: float) -> tuple[float, str]:
    return next(((size, name) for size, name in NUMBER_SUFFIXES if largest >= size), (1.0, ""))


def _with_minus_sign(text: str) -> str:
    return text.replace("-", "−")
