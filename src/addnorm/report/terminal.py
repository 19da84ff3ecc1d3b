"""Curves in a terminal: one line of blocks, or a small plot of dots."""

import math
from collections.abc import Iterator, Mapping, Sequence

from addnorm.errors import InputError
from addnorm.report.axes import axis, say
from addnorm.report.curves import Point, runs

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "×"
"""Where nothing in a part of the curve is a number."""
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The eight dots of a braille sign, by column and row, as bits after U+2800."""
SIGNS = "●▲■◆○△□◇"
"""Several curves are told apart by sign, a cell each."""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of at most `width` signs, each the mean of its part.

    >>> sparkline([1, 2, 3, 4, 5, 6, 7, 8])
    '▁▂▃▄▅▆▇█'
    >>> sparkline([3, float("nan"), 1])
    '█×▁'
    """
    _need(width, 1, "width")
    count = min(width, len(values))
    means = []
    for part in range(count):
        each = values[part * len(values) // count : (part + 1) * len(values) // count]
        finite = [float(value) for value in each if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [mean for mean in means if math.isfinite(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(BLOCKS) - 1)
    return "".join(
        GAP if not math.isfinite(mean) else BLOCKS[round((mean - low) / step) if step else 0]
        for mean in means
    )


def plot_text(
    series: Mapping[str, Sequence[Point]],
    width: int = 72,
    height: int = 12,
    *,
    x: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """A plot for a terminal: braille dots for one curve, a sign each for several.

    >>> print(plot_text({"loss": [(0, 4), (1, 1), (2, 0)]}, 24, 4, x="step"))
    4 ┤⠑⠢⢄⡀
      │   ⠈⠑⠢⢄
    2 ┤       ⠉⠒⠤⣀
    0 ┤           ⠉⠉⠉⠒⠒⠢⠤⠤⢄⣀
      └─────────────────────
       0        step       2
    """
    _need(width, 16, "width")
    _need(height, 3, "height")
    parts = {name: runs(points, log_x, log_y) for name, points in series.items()}
    seen = [point for each in parts.values() for run in each for point in run]
    if not seen:
        return "nothing to show"
    across = axis([a for a, _ in seen], log=log_x, snug=True)
    up = axis([b for _, b in seen], log=log_y, count=max(2, height // 3), snug=True)
    rows = {
        round((height - 1) * (1 - up.place(tick))): name
        for tick, name in zip(up.ticks, up.labels(), strict=True)
    }
    left = max(map(len, rows.values()))
    columns = width - left - 2
    fine = (2, 4) if len(series) == 1 else (1, 1)
    dots: dict[tuple[int, int], str] = {}
    for index, each in enumerate(parts.values()):
        for run in each:
            places = [(across.place(a), up.place(b)) for a, b in run]
            for dot in _trace(places, columns * fine[0] - 1, height * fine[1] - 1):
                dots[dot] = SIGNS[index % len(SIGNS)]
    grid = [[_sign(dots, column, row, fine) for column in range(columns)] for row in range(height)]
    lines = [
        f"{rows.get(index, ''):>{left}} {'┤' if index in rows else '│'}{''.join(cells)}".rstrip()
        for index, cells in enumerate(grid)
    ]
    first, last = say(min(a for a, _ in seen)), say(max(a for a, _ in seen))
    margin = " " * (left + 2)
    lines += [f"{' ' * left} └{'─' * columns}"]
    lines += [f"{margin}{first}{x.center(max(0, columns - len(first) - len(last)))}{last}"]
    if len(series) > 1:
        names = enumerate(series)
        lines += [margin + "   ".join(f"{SIGNS[n % len(SIGNS)]} {name}" for n, name in names)]
    return "\n".join(lines)


def _trace(places: Sequence[Point], right: int, top: int) -> Iterator[tuple[int, int]]:
    """The dots, from the top left, on the straight lines between places from 0 to 1."""
    corners = [(right * a, top * (1 - b)) for a, b in places]
    for (x1, y1), (x2, y2) in zip(corners, corners[1:] or corners, strict=False):
        steps = max(1, math.ceil(max(abs(x2 - x1), abs(y2 - y1))))
        for step in range(steps + 1):
            share = step / steps
            yield round(x1 + share * (x2 - x1)), round(y1 + share * (y2 - y1))


def _sign(dots: Mapping[tuple[int, int], str], column: int, row: int, fine: tuple[int, int]) -> str:
    if fine == (1, 1):
        return dots.get((column, row), " ")
    bits = sum(
        bit
        for across, each in enumerate(DOTS)
        for down, bit in enumerate(each)
        if (2 * column + across, 4 * row + down) in dots
    )
    return chr(0x2800 + bits) if bits else " "


def _need(value: int, least: int, name: str) -> None:
    if value < least:
        raise InputError(f"the {name} must be {least} or more: got {value}. Try {max(least, 40)}.")
