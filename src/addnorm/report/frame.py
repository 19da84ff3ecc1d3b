"""The frame of a chart with two axes: grid, ticks, and where a point stands."""

from dataclasses import dataclass

from addnorm.report.axes import Axis, say
from addnorm.report.svg import Picture, text_width

TOP, BOTTOM = 30, 46


@dataclass(frozen=True)
class Frame:
    """Two axes and the rectangle of the picture they span."""

    across: Axis
    up: Axis
    left: float
    top: float
    width: float
    height: float

    def x(self, value: float) -> float:
        return self.left + self.width * self.across.place(value)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - self.up.place(value))

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def shows(self, x: float, y: float) -> bool:
        """Whether a point has a place on both axes."""
        return self.across.shows(x) and self.up.shows(y)


def draw_frame(
    picture: Picture, across: Axis, up: Axis, x: str, y: str, right: float = 16
) -> Frame:
    """Draw axes into a picture, with the name of each, and `right` pixels left free beside them."""
    names = up.labels()
    left = 14 + max([text_width(name, 11) for name in names], default=0)
    width, height = picture.width - left - right, picture.height - TOP - BOTTOM
    frame = Frame(across, up, left, TOP, width, height)
    for tick, name in zip(up.ticks, names, strict=True):
        place = frame.y(tick)
        picture.line(left, place, frame.right, place, "grid")
        picture.text(left - 8, place + 4, name, "tick", "end")
    past = -1e9
    for tick, name in zip(across.ticks, across.labels(), strict=True):
        place, half = frame.x(tick), text_width(name, 11) / 2
        picture.line(place, frame.bottom, place, frame.bottom + 4, "axis")
        if place - half > past:
            picture.text(place, frame.bottom + 18, name, "tick", "middle")
            past = place + half + 6
    picture.line(left, frame.bottom, frame.right, frame.bottom, "axis")
    picture.text(left, 14, y + (" (log)" if up.log else ""), "label")
    picture.text(
        frame.right, picture.height - 8, x + (" (log)" if across.log else ""), "label", "end"
    )
    return frame


def spread(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Places moved as little as needed to stand `gap` apart, inside low to high where they fit.

    >>> spread([10, 12, 50], 14, 0, 100)
    [4.0, 18.0, 50.0]
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    groups: list[list[float]] = []  # the middle of a run of labels, and how many it has
    for index in order:
        groups.append([places[index], 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * _reach(groups):
            (one, few), (two, many) = groups[-2], groups[-1]
            groups[-2:] = [[(one * few + two * many) / (few + many), few + many]]
    result = [0.0] * len(places)
    rank = 0
    for middle, count in groups:
        for step in range(int(count)):
            place = middle + gap * (step - (count - 1) / 2)
            least, most = low + gap * rank, high - gap * (len(places) - 1 - rank)
            result[order[rank]] = float(max(least, min(most, place)))
            rank += 1
    return result


def _reach(groups: list[list[float]]) -> float:
    """How far apart the middles of the last two groups must be, in gaps."""
    return (groups[-2][1] + groups[-1][1]) / 2


def point_tip(name: str, x: str, y: str, at: tuple[float, float]) -> str:
    """What is shown when the pointer rests on a point."""
    return f"{name}: {x} {say(at[0], 4)}, {y} {say(at[1], 4)}"
