"""Tables of numbers as shades: dependency maps, gradient profiles, who attends to whom."""

import math
from collections.abc import Sequence
from itertools import groupby

from addnorm.errors import InputError
from addnorm.report.axes import say
from addnorm.report.svg import WIDTH, Picture, Svg, nothing, number, shorten, text_width

Matrix = Sequence[Sequence[float]]
MOST = 80
"""Cells along a side; larger tables are shown as means of blocks."""
TIPS = 400
"""So many cells have a tip each; the cells of larger maps are drawn together, by shade."""
SHADES = 24
NAMES = 130
"""The widest names of rows and columns."""
VALUES = 144
"""So many cells may have their value written into them."""
LEAST, LARGEST = 5.0, 44.0
"""The side of a cell."""
TALL, TALLEST = 34.0, 560.0
"""The height of a row, and of all rows where they can be so low."""
SIZE = 11
"""Of the names."""


def heat_map(
    matrix: Matrix,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    x: str = "",
    y: str = "",
    low: float | None = None,
    high: float | None = None,
) -> Svg:
    """A shade for each number: pale is `low`, strong is `high`, in two colours around zero.

    What is not a number has no shade but a cross. Values are written in where they have room.

    >>> heat_map([[0.1, 0.9]], ["first"], ["a", "b"], title="Weights")[:4]
    '<svg'
    """
    cells = [[float(value) for value in row] for row in matrix]
    _check(cells, rows, columns)
    if not cells or not cells[0]:
        return nothing(title)
    down, along = (math.ceil(len(names) / MOST) for names in (rows, columns))
    if down > 1 or along > 1:
        cells, rows, columns = _blocks(cells, down, along), rows[::down], columns[::along]
    finite = [value for row in cells for value in row if math.isfinite(value)]
    bottom = min([*finite, 0.0]) if low is None else low
    top = max(finite, default=1.0) if high is None else high
    strongest = max(abs(bottom), abs(top)) if bottom < 0 else top
    shade = _Shade(bottom if bottom > 0 else 0.0, strongest or 1.0)
    told = f"Each cell is the mean of {down} × {along}. " if down * along > 1 else ""
    told += f"{len(rows)} rows and {len(columns)} columns, from {say(bottom)} to {say(top)}."
    return _draw(cells, list(rows), list(columns), shade, title, told, x, y, bottom < 0)


def attention(
    weights: Matrix, source: Sequence[str], target: Sequence[str], *, title: str = "Attention"
) -> Svg:
    """Where each target token (a row) looks among the source tokens (columns)."""
    return heat_map(weights, target, source, title=title, x="source", y="target", low=0.0)


class _Shade:
    """From a value to how strongly its cell is coloured, 0 to 1."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        if self.high <= self.low:
            return 1.0
        return max(0.0, min(1.0, (abs(value) - self.low) / (self.high - self.low)))


def _draw(
    cells: list[list[float]],
    rows: list[str],
    columns: list[str],
    shade: _Shade,
    title: str,
    told: str,
    x: str,
    y: str,
    signed: bool,
) -> Svg:
    left = min(NAMES, max(text_width(name, SIZE) for name in rows)) + 12 + (16 if y else 0)
    longest = min(NAMES, max(text_width(name, SIZE) for name in columns))
    size = min(LARGEST, max(LEAST, (WIDTH - left - 60) / len(columns)))
    writes = _writes(cells, size)
    level = longest + 4 <= size
    names_height = SIZE + 8.0 if level else longest * 0.78 + 14
    top = names_height + (18 if x else 0)
    lean = 0 if level else longest * 0.64
    width = max(left + size * len(columns) + max(lean, 14), left + 200)
    tall = min(size, TALL, max(LEAST, TALLEST / len(rows)))
    height = top + tall * len(rows) + 44
    picture = Picture(width, height, title, told)
    if x:
        picture.text(left + size * len(columns) / 2, 12, x, "label", "middle")
    if y:
        picture.text(11, top + tall * len(rows) / 2, y, "label", "middle", -90)
    for index, name in list(enumerate(columns))[:: _skip(size)]:
        middle, short = left + size * (index + 0.5), shorten(name, NAMES, SIZE)
        tip = name if short != name else ""
        if level:
            picture.text(middle, top - 7, short, "tick ink", "middle", tip=tip)
        else:
            picture.text(middle + 3, top - 6, short, "tick ink", turn=-50, tip=tip)
    for index, name in list(enumerate(rows))[:: _skip(tall)]:
        short = shorten(name, NAMES, SIZE)
        tip = name if short != name else ""
        at = top + tall * (index + 0.5) + 4
        picture.text(left - 7, at, short, "tick ink", "end", tip=tip)
    if len(rows) * len(columns) <= TIPS:
        _cells(picture, cells, rows, columns, shade, (left, top, size, tall), writes)
    else:
        _sheets(picture, cells, shade, (left, top, size, tall))
    picture.rect(left, top, size * len(columns), tall * len(rows), "frame")
    _scale(picture, left, height - 26, shade, signed)
    return picture.close()


def _cells(
    picture: Picture,
    cells: list[list[float]],
    rows: list[str],
    columns: list[str],
    shade: _Shade,
    place: tuple[float, float, float, float],
    writes: bool,
) -> None:
    """Every cell on its own, with a tip, and its value if there is room."""
    left, top, size, tall = place
    for r, (row, name) in enumerate(zip(cells, rows, strict=True)):
        for c, (value, column) in enumerate(zip(row, columns, strict=True)):
            x, y, tip = left + size * c, top + tall * r, f"{name} · {column}: {say(value)}"
            if not math.isfinite(value):
                steps = f"M{number(x)} {number(y)}l{number(size)} {number(tall)}"
                picture.rect(x, y, size, tall, "missing", tip)
                picture.path(steps, "leader")
                continue
            strength = shade(value)
            picture.rect(x, y, size, tall, "minus" if value < 0 else "plus", tip, strength)
            if writes:
                kind = "cell strong" if strength > 0.55 else "cell"
                words = _short(value)
                picture.text(x + size / 2, y + tall / 2 + 3.5, words, kind, "middle")


def _sheets(
    picture: Picture,
    cells: list[list[float]],
    shade: _Shade,
    place: tuple[float, float, float, float],
) -> None:
    """All cells of one shade as one path: a large map in a few kilobytes."""
    left, top, size, tall = place
    sheets: dict[tuple[str, int], list[str]] = {}
    for r, row in enumerate(cells):
        looks = []
        for value in row:
            known = math.isfinite(value)
            strength = round(SHADES * shade(value)) if known else SHADES
            looks.append(("missing" if not known else "minus" if value < 0 else "plus", strength))
        c = 0
        for look, alike in groupby(looks):
            count = len(list(alike))
            sheets.setdefault(look, []).append(f"M{c} {r}h{count}")
            c += count
    spot = f"translate({number(left)} {number(top + tall / 2)}) scale({size:.3f} {tall:.3f})"
    picture.parts.append(f'<g transform="{spot}" shape-rendering="crispEdges">')
    for (kind, strength), steps in sorted(sheets.items()):
        if strength:
            picture.path("".join(steps), f"sheet {kind}", opacity=strength / SHADES)
    picture.parts.append("</g>")


def _scale(picture: Picture, x: float, y: float, shade: _Shade, signed: bool) -> None:
    """Which shade is which number."""
    steps = 16
    low = -shade.high if signed else shade.low
    words = say(low)
    picture.text(x, y + 14, words, "tick")
    x += text_width(words, SIZE) + 7
    for step in range(steps):
        value = low + (shade.high - low) * (step + 0.5) / steps
        kind = "minus" if value < 0 else "plus"
        picture.rect(x + 6 * step, y + 4, 6, 11, kind, opacity=shade(value))
    picture.text(x + 6 * steps + 7, y + 14, say(shade.high), "tick")


def _skip(side: float) -> int:
    """How many cells share a name so that names do not touch: 1, 2, 5, 10 or 20."""
    return next(n for n in (1, 2, 5, 10, 20) if n * side > SIZE)


def _writes(cells: list[list[float]], size: float) -> bool:
    count = len(cells) * len(cells[0])
    longest = max(text_width(_short(value), 10) for row in cells for value in row)
    return count <= VALUES and longest + 4 <= size


def _short(value: float) -> str:
    """A value as a cell has room for: two digits, no zero before the point."""
    text = say(value, 2)
    return text.replace("0.", ".", 1) if text.startswith(("0.", "−0.")) else text


def _blocks(cells: list[list[float]], down: int, along: int) -> list[list[float]]:
    """Means over blocks of cells; numbers that are not finite are passed over if others are."""
    result = []
    for r in range(0, len(cells), down):
        row = []
        for c in range(0, len(cells[0]), along):
            each = [v for line in cells[r : r + down] for v in line[c : c + along]]
            finite = [value for value in each if math.isfinite(value)]
            row.append(sum(finite) / len(finite) if finite else math.nan)
        result.append(row)
    return result


def _check(cells: list[list[float]], rows: Sequence[str], columns: Sequence[str]) -> None:
    lengths = {len(row) for row in cells}
    if len(cells) != len(rows) or lengths - {len(columns)}:
        shape = f"{len(cells)} × {'/'.join(map(str, sorted(lengths))) or 0}"
        raise InputError(
            f"a heat map must have a name for each row and column: the table is {shape}, "
            f"the names are {len(rows)} × {len(columns)}. Try the names in the order of the table."
        )
