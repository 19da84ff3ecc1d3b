"""Heat maps: dependency maps, gradient profiles, attention weights."""

import math
from collections.abc import Sequence
from itertools import groupby

from addnorm.errors import InputError
from addnorm.report.axes import format_number
from addnorm.report.svg import WIDTH, Picture, Svg, empty_picture, pixels, shorten, text_width

Matrix = Sequence[Sequence[float]]
MAX_CELLS_PER_SIDE = 80
"""Larger tables are shown as means of blocks."""
MAX_CELL_TIPS = 400
"""Maps with more cells have no tips; their cells are drawn together, by shade."""
SHADE_COUNT = 24
NAME_WIDTH = 130
"""Longer names of rows and columns are shortened."""
MAX_WRITTEN_VALUES = 144
"""Maps with more cells do not show the values in them."""
MIN_CELL_SIZE, MAX_CELL_SIZE = 5.0, 44.0
"""Limits of the side of a cell, in pixels."""
MAX_CELL_HEIGHT, MAX_MAP_HEIGHT = 34.0, 560.0
"""Limits of the height of a row and of the whole map, in pixels; a row is at least 5 high."""
FONT_SIZE = 11


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
    """Return a picture with one shaded cell for each number; negative ones have another colour.

    Cells that are not finite have a stroke instead of a shade. Values are shown if they fit.

    Parameters
    ----------
    matrix : numbers, (rows, columns)
    rows, columns : their names
    title : title of the picture
    x, y : labels of the columns and rows
    low, high : values of the palest and strongest shade; by default from 0 to the largest

    >>> heat_map([[0.1, 0.9]], ["first"], ["a", "b"], title="Weights")[:4]
    '<svg'
    """
    cells = [[float(value) for value in row] for row in matrix]
    _check_names(cells, rows, columns)
    if not cells or not cells[0]:
        return empty_picture(title)
    down, along = (math.ceil(len(names) / MAX_CELLS_PER_SIDE) for names in (rows, columns))
    if down > 1 or along > 1:
        cells, rows, columns = _block_means(cells, down, along), rows[::down], columns[::along]
    finite = [value for row in cells for value in row if math.isfinite(value)]
    bottom = min([*finite, 0.0]) if low is None else low
    top = max(finite, default=1.0) if high is None else high
    strongest = max(abs(bottom), abs(top)) if bottom < 0 else top
    shade = _Shade(bottom if bottom > 0 else 0.0, strongest or 1.0)
    about = f"Each cell is the mean of {down} × {along}. " if down * along > 1 else ""
    span = f"from {format_number(bottom)} to {format_number(top)}"
    about += f"{len(rows)} rows and {len(columns)} columns, {span}."
    return _draw_map(cells, list(rows), list(columns), shade, title, about, x, y, bottom < 0)


def attention_map(
    weights: Matrix, source: Sequence[str], target: Sequence[str], *, title: str = "Attention"
) -> Svg:
    """Return a heat map of attention weights.

    Parameters
    ----------
    weights : attention weights, (target, source)
    source, target : the tokens; those of the target are rows
    title : title of the picture
    """
    return heat_map(weights, target, source, title=title, x="source", y="target", low=0.0)


class _Shade:
    """Maps a value to the opacity of its cell, 0 to 1."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        if self.high <= self.low:
            return 1.0
        return max(0.0, min(1.0, (abs(value) - self.low) / (self.high - self.low)))


def _draw_map(
    cells: list[list[float]],
    rows: list[str],
    columns: list[str],
    shade: _Shade,
    title: str,
    about: str,
    x: str,
    y: str,
    signed: bool,
) -> Svg:
    left = (
        min(NAME_WIDTH, max(text_width(name, FONT_SIZE) for name in rows)) + 12 + (16 if y else 0)
    )
    longest = min(NAME_WIDTH, max(text_width(name, FONT_SIZE) for name in columns))
    size = min(MAX_CELL_SIZE, max(MIN_CELL_SIZE, (WIDTH - left - 60) / len(columns)))
    writes = _values_fit(cells, size)
    level = longest + 4 <= size
    names_height = FONT_SIZE + 8.0 if level else longest * 0.78 + 14
    top = names_height + (18 if x else 0)
    lean = 0 if level else longest * 0.64
    width = max(left + size * len(columns) + max(lean, 14), left + 200)
    tall = min(size, MAX_CELL_HEIGHT, max(MIN_CELL_SIZE, MAX_MAP_HEIGHT / len(rows)))
    height = top + tall * len(rows) + 44
    picture = Picture(width, height, title, about)
    if x:
        picture.text(left + size * len(columns) / 2, 12, x, "label", "middle")
    if y:
        picture.text(11, top + tall * len(rows) / 2, y, "label", "middle", -90)
    for index, name in list(enumerate(columns))[:: _name_interval(size)]:
        middle, short = left + size * (index + 0.5), shorten(name, NAME_WIDTH, FONT_SIZE)
        tip = name if short != name else ""
        if level:
            picture.text(middle, top - 7, short, "tick ink", "middle", tip=tip)
        else:
            picture.text(middle + 3, top - 6, short, "tick ink", turn=-50, tip=tip)
    for index, name in list(enumerate(rows))[:: _name_interval(tall)]:
        short = shorten(name, NAME_WIDTH, FONT_SIZE)
        tip = name if short != name else ""
        at = top + tall * (index + 0.5) + 4
        picture.text(left - 7, at, short, "tick ink", "end", tip=tip)
    if len(rows) * len(columns) <= MAX_CELL_TIPS:
        _draw_cells(picture, cells, rows, columns, shade, (left, top, size, tall), writes)
    else:
        _draw_shades(picture, cells, shade, (left, top, size, tall))
    picture.rect(left, top, size * len(columns), tall * len(rows), "frame")
    _draw_scale(picture, left, height - 26, shade, signed)
    return picture.close()


def _draw_cells(
    picture: Picture,
    cells: list[list[float]],
    rows: list[str],
    columns: list[str],
    shade: _Shade,
    place: tuple[float, float, float, float],
    writes: bool,
) -> None:
    """Draw every cell by itself, with a tip, and with its value if values fit."""
    left, top, size, tall = place
    for r, (row, name) in enumerate(zip(cells, rows, strict=True)):
        for c, (value, column) in enumerate(zip(row, columns, strict=True)):
            x, y = left + size * c, top + tall * r
            tip = f"{name} · {column}: {format_number(value)}"
            if not math.isfinite(value):
                steps = f"M{pixels(x)} {pixels(y)}l{pixels(size)} {pixels(tall)}"
                picture.rect(x, y, size, tall, "missing", tip)
                picture.path(steps, "leader")
                continue
            strength = shade(value)
            picture.rect(x, y, size, tall, "minus" if value < 0 else "plus", tip, strength)
            if writes:
                kind = "cell strong" if strength > 0.55 else "cell"
                words = _cell_text(value)
                picture.text(x + size / 2, y + tall / 2 + 3.5, words, kind, "middle")


def _draw_shades(
    picture: Picture,
    cells: list[list[float]],
    shade: _Shade,
    place: tuple[float, float, float, float],
) -> None:
    """Draw all cells of one shade as one path, so that a large map has few kilobytes."""
    left, top, size, tall = place
    sheets: dict[tuple[str, int], list[str]] = {}
    for r, row in enumerate(cells):
        styles = []
        for value in row:
            known = math.isfinite(value)
            strength = round(SHADE_COUNT * shade(value)) if known else SHADE_COUNT
            styles.append(("missing" if not known else "minus" if value < 0 else "plus", strength))
        c = 0
        for style, cells_alike in groupby(styles):
            count = len(list(cells_alike))
            sheets.setdefault(style, []).append(f"M{c} {r}h{count}")
            c += count
    transform = f"translate({pixels(left)} {pixels(top + tall / 2)}) scale({size:.3f} {tall:.3f})"
    picture.parts.append(f'<g transform="{transform}" shape-rendering="crispEdges">')
    for (kind, strength), steps in sorted(sheets.items()):
        if strength:
            picture.path("".join(steps), f"sheet {kind}", opacity=strength / SHADE_COUNT)
    picture.parts.append("</g>")


def _draw_scale(picture: Picture, x: float, y: float, shade: _Shade, signed: bool) -> None:
    """Draw the colour scale."""
    steps = 16
    low = -shade.high if signed else shade.low
    words = format_number(low)
    picture.text(x, y + 14, words, "tick")
    x += text_width(words, FONT_SIZE) + 7
    for step in range(steps):
        value = low + (shade.high - low) * (step + 0.5) / steps
        kind = "minus" if value < 0 else "plus"
        picture.rect(x + 6 * step, y + 4, 6, 11, kind, opacity=shade(value))
    picture.text(x + 6 * steps + 7, y + 14, format_number(shade.high), "tick")


def _name_interval(side: float) -> int:
    """Return every how many cells a name is shown, so that names do not overlap."""
    return next(n for n in (1, 2, 5, 10, 20) if n * side > FONT_SIZE)


def _values_fit(cells: list[list[float]], size: float) -> bool:
    count = len(cells) * len(cells[0])
    longest = max(text_width(_cell_text(value), 10) for row in cells for value in row)
    return count <= MAX_WRITTEN_VALUES and longest + 4 <= size


def _cell_text(value: float) -> str:
    """Return a value as short text: two digits, no zero before the decimal point."""
    text = format_number(value, 2)
    return text.replace("0.", ".", 1) if text.startswith(("0.", "−0.")) else text


def _block_means(cells: list[list[float]], down: int, along: int) -> list[list[float]]:
    """Return the means of the finite numbers in each block of cells."""
    result = []
    for r in range(0, len(cells), down):
        row = []
        for c in range(0, len(cells[0]), along):
            each = [v for line in cells[r : r + down] for v in line[c : c + along]]
            finite = [value for value in each if math.isfinite(value)]
            row.append(sum(finite) / len(finite) if finite else math.nan)
        result.append(row)
    return result


def _check_names(cells: list[list[float]], rows: Sequence[str], columns: Sequence[str]) -> None:
    lengths = {len(row) for row in cells}
    if len(cells) != len(rows) or lengths - {len(columns)}:
        shape = f"{len(cells)} × {'/'.join(map(str, sorted(lengths))) or 0}"
        raise InputError(
            f"a heat map needs one name for each row and column: the table is {shape}, "
            f"the names are {len(rows)} × {len(columns)}. Try the names in the order of the table."
        )
