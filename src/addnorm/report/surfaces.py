"""Predicted probabilities over a plane: one panel for each table and model."""

from collections.abc import Sequence
from dataclasses import dataclass

from addnorm.errors import InputError
from addnorm.report.maps import _draw_shades, _Shade
from addnorm.report.svg import WIDTH, Picture, Svg, shorten

PANEL_GAP, PANEL_TOP, PANEL_LEFT = 10, 46, 20
RADIUS = 2.2
"""Of a training point."""


@dataclass(frozen=True)
class Surface:
    """One panel.

    Parameters
    ----------
    chances
        Probabilities of the second class, row by row, the top row first.
    points
        Training points as (x, y, class), x and y from 0 (left, top) to 1.
    note
        A few words in the corner, such as a score.
    """

    chances: Sequence[Sequence[float]]
    points: Sequence[tuple[float, float, int]] = ()
    note: str = ""


def surface_chart(
    panels: Sequence[Sequence[Surface]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
) -> Svg:
    """Return panels in rows and columns; the shade of a place is |2p − 1|, the colour its class.

    Parameters
    ----------
    panels
        The panels, row by row.
    rows, columns
        Names of the rows and of the columns.
    title
        Title of the picture.

    >>> panel = Surface([[0.1, 0.9], [0.2, 0.8]], [(0.5, 0.5, 1)])
    >>> surface_chart([[panel]], ["moons"], ["forest"], title="Two classes").count("<circle")
    1
    """
    if len(panels) != len(rows) or any(len(row) != len(columns) for row in panels) or not columns:
        raise InputError(
            "there must be one panel for each row and column: "
            f"got {[len(row) for row in panels]} for {len(rows)} rows, {len(columns)} columns."
        )
    side = (WIDTH - PANEL_LEFT - PANEL_GAP * (len(columns) - 1)) / len(columns)
    height = PANEL_TOP + len(rows) * (side + PANEL_GAP)
    about = f"Rows: {', '.join(rows)}. Columns: {', '.join(columns)}."
    picture = Picture(WIDTH, height, title, about)
    picture.text(0, 16, title, "title")
    for c, name in enumerate(columns):
        centre = PANEL_LEFT + c * (side + PANEL_GAP) + side / 2
        picture.text(centre, PANEL_TOP - 8, shorten(name, side), "label", "middle")
    for r, (row, name) in enumerate(zip(panels, rows, strict=True)):
        y = PANEL_TOP + r * (side + PANEL_GAP)
        picture.text(12, y + side / 2, name, "label", "middle", turn=-90)
        for c, panel in enumerate(row):
            _draw_panel(picture, panel, PANEL_LEFT + c * (side + PANEL_GAP), y, side)
    return picture.close()


def _draw_panel(picture: Picture, panel: Surface, x: float, y: float, side: float) -> None:
    cells = [[2 * chance - 1 for chance in row] for row in panel.chances]
    if not cells or len({len(row) for row in cells}) != 1:
        raise InputError("the rows of a surface must have one length. Give a rectangular grid.")
    across, down = side / len(cells[0]), side / len(cells)
    _draw_shades(picture, cells, _Shade(0.0, 1.3), (x, y, across, down))
    for at, below, label in panel.points:
        kind = "dot c0" if label else "dot c1"
        picture.dot(x + at * side, y + below * side, RADIUS, kind)
    picture.rect(x, y, side, side, "frame")
    if panel.note:
        picture.text(x + side - 4, y + side - 5, panel.note, "ink tick", "end")
