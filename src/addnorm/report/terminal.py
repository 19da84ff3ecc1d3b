"""Plots for a terminal: sparklines, and curves in braille dots or symbols."""

import math
from collections.abc import Iterator, Mapping, Sequence

from addnorm.errors import InputError
from addnorm.report.axes import axis, format_number
from addnorm.report.xy_charts import Point, drawable_segments

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "×"
"""Shown where no value is finite."""
BRAILLE_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The eight dots of a braille character, by column and row, as bits after U+2800."""
SYMBOLS = "●▲■◆○△□◇"
"""Symbols of the curves, if there are several."""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return a curve as one line of at most `width` characters, each the mean of its part.

    >>> sparkline([1, 2, 3, 4, 5, 6, 7, 8])
    '▁▂▃▄▅▆▇█'
    >>> sparkline([3, float("nan"), 1])
    '█×▁'
    """
    _require_at_least(width, 1, "width")
    count = min(width, len(values))
    means = []
    for part in range(count):
        part_values = values[part * len(values) // count : (part + 1) * len(values) // count]
        finite = [float(value) for value in part_values if math.isfinite(value)]
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
    """Return a plot as lines of text: braille dots for one curve, symbols for several.

    Parameters
    ----------
    series : (x, y) of the points of each curve, by its name
    width, height : size in characters
    x : label of the horizontal axis
    log_x, log_y : logarithmic axes

    >>> print(plot_text({"loss": [(0, 4), (1, 1), (2, 0)]}, 24, 4, x="step"))
    4 ┤⠑⠢⢄⡀
      │   ⠈⠑⠢⢄
    2 ┤       ⠉⠒⠤⣀
    0 ┤           ⠉⠉⠉⠒⠒⠢⠤⠤⢄⣀
      └─────────────────────
       0        step       2
    """
    _require_at_least(width, 16, "width")
    _require_at_least(height, 3, "height")
    parts = {name: drawable_segments(points, log_x, log_y) for name, points in series.items()}
    shown = [point for each in parts.values() for run in each for point in run]
    if not shown:
        return "nothing to show"
    across = axis([a for a, _ in shown], log=log_x, snug=True)
    up = axis([b for _, b in shown], log=log_y, count=max(2, height // 3), snug=True)
    rows = {
        round((height - 1) * (1 - up.place(tick))): name
        for tick, name in zip(up.ticks, up.labels(), strict=True)
    }
    left = max(map(len, rows.values()))
    columns = width - left - 2
    per_cell = (2, 4) if len(series) == 1 else (1, 1)
    dots: dict[tuple[int, int], str] = {}
    for index, each in enumerate(parts.values()):
        for run in each:
            places = [(across.place(a), up.place(b)) for a, b in run]
            for dot in _line_dots(places, columns * per_cell[0] - 1, height * per_cell[1] - 1):
                dots[dot] = SYMBOLS[index % len(SYMBOLS)]
    grid = [
        [_cell_symbol(dots, column, row, per_cell) for column in range(columns)]
        for row in range(height)
    ]
    lines = [
        f"{rows.get(index, ''):>{left}} {'┤' if index in rows else '│'}{''.join(cells)}".rstrip()
        for index, cells in enumerate(grid)
    ]
    first, last = (format_number(min(a for a, _ in shown)), format_number(max(a for a, _ in shown)))
    margin = " " * (left + 2)
    lines += [f"{' ' * left} └{'─' * columns}"]
    lines += [f"{margin}{first}{x.center(max(0, columns - len(first) - len(last)))}{last}"]
    if len(series) > 1:
        names = enumerate(series)
        lines += [margin + "   ".join(f"{SYMBOLS[n % len(SYMBOLS)]} {name}" for n, name in names)]
    return "\n".join(lines)


def _line_dots(places: Sequence[Point], right: int, top: int) -> Iterator[tuple[int, int]]:
    """Yield the dots, from the top left, on the lines between positions from 0 to 1."""
    corners = [(right * a, top * (1 - b)) for a, b in places]
    for (x1, y1), (x2, y2) in zip(corners, corners[1:] or corners, strict=False):
        steps = max(1, math.ceil(max(abs(x2 - x1), abs(y2 - y1))))
        for step in range(steps + 1):
            share = step / steps
            yield round(x1 + share * (x2 - x1)), round(y1 + share * (y2 - y1))


def _cell_symbol(
    dots: Mapping[tuple[int, int], str], column: int, row: int, per_cell: tuple[int, int]
) -> str:
    if per_cell == (1, 1):
        return dots.get((column, row), " ")
    bits = sum(
        bit
        for across, each in enumerate(BRAILLE_BITS)
        for down, bit in enumerate(each)
        if (2 * column + across, 4 * row + down) in dots
    )
    return chr(0x2800 + bits) if bits else " "


def _require_at_least(value: int, least: int, name: str) -> None:
    if value < least:
        raise InputError(f"the {name} must be at least {least}: got {value}. Try {max(least, 40)}.")
