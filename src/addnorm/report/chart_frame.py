"""The frame of a chart with two axes: grid, ticks and positions of points."""

from dataclasses import dataclass

from addnorm.report.axes import Axis, format_number
from addnorm.report.svg import Picture, text_width

TOP_MARGIN, BOTTOM_MARGIN = 30, 46


@dataclass(frozen=True)
class ChartFrame:
    """Two axes and the rectangle of the picture that they span, in pixels.

    Parameters
    ----------
    across : horizontal axis
    up : vertical axis
    left : left edge
    top : top edge
    width : width of the rectangle
    height : height of the rectangle
    """

    across: Axis
    up: Axis
    left: float
    top: float
    width: float
    height: float

    def x(self, value: float) -> float:
        """Return the horizontal position of a value in pixels."""
        return self.left + self.width * self.across.place(value)

    def y(self, value: float) -> float:
        """Return the vertical position of a value in pixels."""
        return self.top + self.height * (1 - self.up.place(value))

    @property
    def right(self) -> float:
        """The right edge in pixels."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """The bottom edge in pixels."""
        return self.top + self.height

    def shows(self, x: float, y: float) -> bool:
        """Return whether a point has a position on both axes."""
        return self.across.shows(x) and self.up.shows(y)


def draw_frame(
    picture: Picture, across: Axis, up: Axis, x: str, y: str, right: float = 16
) -> ChartFrame:
    """Draw grid, ticks and axis labels into a picture; return its frame.

    Parameters
    ----------
    picture : the picture to draw into
    across, up : horizontal and vertical axis
    x, y : their labels
    right : pixels to leave free on the right
    """
    names = up.labels()
    left = 14 + max([text_width(name, 11) for name in names], default=0)
    width, height = picture.width - left - right, picture.height - TOP_MARGIN - BOTTOM_MARGIN
    frame = ChartFrame(across, up, left, TOP_MARGIN, width, height)
    for tick, name in zip(up.ticks, names, strict=True):
        place = frame.y(tick)
        picture.line(left, place, frame.right, place, "grid")
        picture.text(left - 8, place + 4, name, "tick", "end")
    label_end = -1e9
    for tick, name in zip(across.ticks, across.labels(), strict=True):
        place, half = frame.x(tick), text_width(name, 11) / 2
        picture.line(place, frame.bottom, place, frame.bottom + 4, "axis")
        if place - half > label_end:
            picture.text(place, frame.bottom + 18, name, "tick", "middle")
            label_end = place + half + 6
    picture.line(left, frame.bottom, frame.right, frame.bottom, "axis")
    picture.text(left, 14, y + (" (log)" if up.log else ""), "label")
    picture.text(
        frame.right, picture.height - 8, x + (" (log)" if across.log else ""), "label", "end"
    )
    return frame


def spread_labels(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions moved as little as needed to be `gap` apart, between low and high.

    Parameters
    ----------
    places : positions in pixels
    gap : smallest distance between two
    low, high : the range, which they leave only if they do not fit

    >>> spread_labels([10, 12, 50], 14, 0, 100)
    [4.0, 18.0, 50.0]
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    groups: list[list[float]] = []  # middle and number of adjacent labels
    for index in order:
        groups.append([places[index], 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * _required_distance(groups):
            (middle, count), (next_middle, next_count) = groups[-2:]
            total = count + next_count
            groups[-2:] = [[(middle * count + next_middle * next_count) / total, total]]
    result = [0.0] * len(places)
    rank = 0
    for middle, count in groups:
        for step in range(int(count)):
            place = middle + gap * (step - (count - 1) / 2)
            least, most = low + gap * rank, high - gap * (len(places) - 1 - rank)
            result[order[rank]] = float(max(least, min(most, place)))
            rank += 1
    return result


def _required_distance(groups: list[list[float]]) -> float:
    """Return the smallest distance between the middles of the last two groups, in gaps."""
    return (groups[-2][1] + groups[-1][1]) / 2


def point_tip(name: str, x: str, y: str, at: tuple[float, float]) -> str:
    """Return the text that is shown when the pointer is over a point.

    Parameters
    ----------
    name : name of the series
    x, y : labels of the axes
    at : the point
    """
    return f"{name}: {x} {format_number(at[0], 4)}, {y} {format_number(at[1], 4)}"
