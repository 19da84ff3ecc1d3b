"""From numbers to places on a picture: round ticks, logarithms, numbers as people write them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

LARGEST = 1e150
"""Values beyond are drawn here, so that no difference of two overflows."""
SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """A range of numbers, where each stands in it from 0 to 1, and its round ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; values beyond stand beyond.

        >>> Axis(0, 10, ()).place(5), Axis(1, 100, (), log=True).place(10)
        (0.5, 0.5)
        """
        low, high, value = self.low, self.high, clamp(value)
        if self.log:
            low, high, value = (math.log(max(each, 1e-300)) for each in (low, high, value))
        return (value - low) / (high - low)

    def shows(self, value: float) -> bool:
        """Whether there is a place for it: finite, and positive if the axis is logarithmic."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def labels(self) -> list[str]:
        """The ticks as people write them, all with the same number of decimals."""
        if self.log or len(self.ticks) < 2:
            return [say(tick) for tick in self.ticks]
        step = self.ticks[1] - self.ticks[0]
        largest = max(abs(tick) for tick in self.ticks)
        if largest >= 1e15 or step < 1e-5:
            return [say(tick) for tick in self.ticks]
        size, suffix = _suffix(largest if step >= 1e3 else 0)
        decimals = max(0, -math.floor(math.log10(step / size) + 1e-9))
        texts = (f"{tick / size:.{decimals}f}" for tick in self.ticks)
        return [
            _minus(text) + suffix * (tick != 0)
            for text, tick in zip(texts, self.ticks, strict=True)
        ]


def axis(values: Iterable[float], *, log: bool = False, count: int = 6, snug: bool = False) -> Axis:
    """An axis for these values, with about `count` ticks at 1, 2 or 5 times a power of ten.

    A linear axis ends on ticks unless it is `snug`; values it cannot show are passed over.

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
    step = _step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(n * step, 12) if step > 1e-9 else n * step for n in range(first, last + 1)]
    if snug:
        slack = 1e-9 * (high - low)
        return Axis(low, high, tuple(t for t in ticks if low - slack <= t <= high + slack))
    return Axis(ticks[0], ticks[-1], tuple(ticks))


def say(value: float, digits: int = 3) -> str:
    """A number in so many digits, as a person would write it.

    >>> [say(number) for number in (0.12345, 1234.5, 40000, -2e-7, 1e-3, float("nan"))]
    ['0.123', '1234', '40k', '−2×10⁻⁷', '0.001', 'not a number']
    """
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "−∞" if value < 0 else "∞"
    rounded = float(f"{value:.{digits - 1}e}")
    size = abs(rounded)
    if size and (size < 1e-3 or size >= 1e15):
        factor, _, power = f"{value:.{digits - 1}e}".partition("e")
        factor = factor.rstrip("0").rstrip(".") if "." in factor else factor
        ten = f"10{str(int(power)).translate(RAISED)}"
        return _minus(ten if factor == "1" else f"{factor}×{ten}")
    if size >= 1e3 and abs(value) < 9999.5:
        return _minus(f"{value:.0f}")
    scale, suffix = _suffix(size)
    size = size / scale
    decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size else 0
    text = f"{rounded / scale:.{decimals}f}"
    return _minus(text.rstrip("0").rstrip(".") if "." in text else text) + suffix


def clamp(value: float) -> float:
    """A finite number that two of can be subtracted."""
    return max(-LARGEST, min(LARGEST, float(value)))


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


def _step(least: float) -> float:
    """The least of 1, 2 or 5 times a power of ten that is not below."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least * (1 - 1e-9))


def _suffix(largest: float) -> tuple[float, str]:
    return next(((size, name) for size, name in SUFFIXES if largest >= size), (1.0, ""))


def _minus(text: str) -> str:
    return text.replace("-", "−")
