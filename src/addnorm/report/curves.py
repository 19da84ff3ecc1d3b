"""Charts of points: lines over steps, clouds, and how well stated probabilities hold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from addnorm.errors import InputError
from addnorm.report.axes import Axis, axis, say
from addnorm.report.frame import Frame, draw_frame, point_tip, spread
from addnorm.report.svg import (
    BOLD,
    COLOURS,
    WIDTH,
    Picture,
    Svg,
    colour,
    nothing,
    number,
    shorten,
    text_width,
)

Point = tuple[float, float]
HEIGHT = 320
BUCKETS = 200
"""A line is drawn by at most four points in each of so many parts of the picture's width."""
DOTS = 40
"""Lines of so few points show each of them."""
TIPS, LAYERS = 150, 4
"""So many points have a tip each; the points of larger clouds are drawn together, in layers."""
LABEL = 190
"""The widest label beside a line."""
CAME_TRUE = "came true"
"""The label of an observed frequency: short, as the key stands beside it."""
MARKS = ("best", "bad", "note")


@dataclass(frozen=True)
class Mark:
    """A point worth a word: the best step, or where training went wrong."""

    x: float
    y: float
    """If this is not a number, the mark stands at the top."""
    text: str
    kind: str = "note"

    def __post_init__(self) -> None:
        if self.kind not in MARKS:
            raise InputError(
                f"a mark must be one of {', '.join(MARKS)}: got {self.kind!r}. Try 'note'."
            )


def lines(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: str = "step",
    y: str = "loss",
    log_x: bool = False,
    log_y: bool = False,
    most: float | None = None,
    marks: Sequence[Mark] = (),
) -> Svg:
    """Curves by name, each a sequence of (x, y), with its name at its end.

    What is not a finite number is a gap; a curve that ends in one has a cross where it was last
    seen. `most` is the highest y that is shown: what rises beyond leaves the picture at the top.

    >>> lines({"post": [(0, 9.2), (1, 5.1)]}, title="Loss")[:4]
    '<svg'
    """
    kept = {name: sorted(((float(a), float(b)) for a, b in points), key=lambda p: p[0])
            for name, points in series.items()}  # fmt: skip
    seen = [p for points in kept.values() for p in points if _finite(p, log_x, log_y)]
    if not seen:
        return nothing(title)
    heights = [b for _, b in seen if most is None or b <= most]
    across = axis([a for a, _ in seen], log=log_x, snug=True)
    up = axis(heights + ([] if most is None else [most]), log=log_y)
    names = [name for name in kept if len(kept) > 1]
    right = 16 + max((min(LABEL, text_width(name, BOLD)) + 12 for name in names), default=0)
    picture = Picture(WIDTH, HEIGHT, title, _about(kept, x, y))
    frame = draw_frame(picture, across, up, x, y, right)
    picture.clip(0, frame.top - 6, WIDTH, frame.height + 12)
    picture.parts.append(f'<g transform="translate(0 {number(6 - frame.top)})">')
    for index, (name, points) in enumerate(kept.items()):
        _curve(picture, frame, points, name, index, x, y)
    picture.parts.append("</g>")
    picture.unclip()
    _end_labels(picture, frame, {n: p for n, p in kept.items() if n in names}, list(kept))
    for mark in marks:
        _mark(picture, frame, mark)
    return picture.close()


def scatter(
    groups: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    diagonal: bool = False,
) -> Svg:
    """Clouds of points by name; points that would cover each other are drawn once."""
    kept = {name: [(float(a), float(b)) for a, b in points] for name, points in groups.items()}
    seen = [p for points in kept.values() for p in points if _finite(p, log_x, log_y)]
    if not seen:
        return nothing(title)
    picture = Picture(WIDTH, HEIGHT + 60, title, _about(kept, x, y))
    across = axis([a for a, _ in seen], log=log_x)
    frame = draw_frame(picture, across, axis([b for _, b in seen], log=log_y), x, y)
    if diagonal:
        low, high = max(across.low, frame.up.low), min(across.high, frame.up.high)
        if low < high:
            picture.line(frame.x(low), frame.y(low), frame.x(high), frame.y(high), "guide")
    for index, (name, points) in enumerate(kept.items()):
        drawn: dict[tuple[int, int], Point] = {}
        for point in points:
            if frame.shows(*point):
                place = 2 * round(frame.x(point[0]) / 2), 2 * round(frame.y(point[1]) / 2)
                drawn.setdefault(place, point)
        if len(drawn) <= TIPS:
            for a, b in drawn.values():
                tip = point_tip(name, x, y, (a, b))
                picture.dot(frame.x(a), frame.y(b), 3, f"point c{index % COLOURS}", tip)
        else:
            _cloud(picture, list(drawn), index)
    _key(picture, frame, list(kept), y)
    return picture.close()


def reliability(bins: Mapping[str, Sequence[tuple[float, float, int]]], *, title: str) -> Svg:
    """Stated probability against observed frequency, per model: on the diagonal is calibrated.

    A bin is (mean stated probability, observed frequency, count). The bars are 95 % intervals of
    the frequency (Wilson 1927); the area of a dot is the share of rows in its bin.
    """
    kept = {name: [b for b in each if b[2] > 0] for name, each in bins.items()}
    if not any(kept.values()):
        return nothing(title)
    side = Axis(0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1))
    picture = Picture(440, 440, title, "Dots above the line: events are more frequent than stated.")
    frame = draw_frame(picture, side, side, "stated probability", CAME_TRUE)
    picture.line(frame.x(0), frame.y(0), frame.x(1), frame.y(1), "guide")
    for index, (name, each) in enumerate(kept.items()):
        total = sum(count for *_, count in each)
        path = "".join(
            f"{'L' if n else 'M'}{number(frame.x(p))} {number(frame.y(f))}"
            for n, (p, f, _) in enumerate(each)
        )
        picture.path(path, f"curve thin {colour(index)}")
        for p, f, count in each:
            low, high = wilson(f, count)
            picture.line(
                frame.x(p), frame.y(low), frame.x(p), frame.y(high), f"whisker c{index % COLOURS}"
            )
            tip = f"{name}: stated {say(p)}, observed {say(f)}, {count} rows"
            radius = 2.5 + 7 * math.sqrt(count / total)
            picture.dot(frame.x(p), frame.y(f), radius, f"dot c{index % COLOURS}", tip)
    _key(picture, frame, list(kept), CAME_TRUE)
    return picture.close()


def _cloud(picture: Picture, places: Sequence[tuple[int, int]], index: int) -> None:
    """Many points in a few layers: small to store, and darker where they are dense."""
    for layer in range(LAYERS):
        steps = "".join(f"M{across} {down}h0" for across, down in places[layer::LAYERS])
        picture.path(steps, f"cloud c{index % COLOURS}")


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """(p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n): where a frequency may truly lie.

    Wilson 1927, "Probable inference, the law of succession, and statistical inference".

    >>> [round(end, 3) for end in wilson(0.5, 100)]
    [0.404, 0.596]
    """
    middle = share + z * z / (2 * count)
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return (middle - reach) / scale, (middle + reach) / scale


def runs(points: Sequence[Point], log_x: bool, log_y: bool) -> list[list[Point]]:
    """The stretches of a curve that can be drawn, parted where it is not a number."""
    parts = groupby(points, key=lambda point: _finite(point, log_x, log_y))
    return [list(part) for shown, part in parts if shown]


def thin(points: Sequence[Point], place: Sequence[float]) -> list[Point]:
    """First, lowest, highest and last of each bucket: what a picture can show of a long curve.

    `place` has the place of each point from 0 to 1, rising.
    """
    if len(points) <= 4 * BUCKETS:
        return list(points)
    kept: list[Point] = []
    indices = range(len(points))
    for _, bucket in groupby(indices, key=lambda index: int(place[index] * BUCKETS)):
        each = list(bucket)
        low = min(each, key=lambda index: points[index][1])
        high = max(each, key=lambda index: points[index][1])
        kept += [points[index] for index in sorted({each[0], low, high, each[-1]})]
    return kept


def _curve(
    picture: Picture, frame: Frame, points: Sequence[Point], name: str, index: int, x: str, y: str
) -> None:
    drawn = [
        thin(run, [frame.across.place(a) for a, _ in run])
        for run in runs(points, frame.across.log, frame.up.log)
    ]
    few = sum(len(run) for run in drawn) <= DOTS
    for run in drawn:
        steps = [f"{number(frame.x(a))} {number(_bounded(frame.y(b)))}" for a, b in run]
        if len(run) > 1:
            last = point_tip(name, x, y, run[-1])
            picture.path("M" + "L".join(steps), f"curve {colour(index)}", f"{last} (last)")
        if few or len(run) == 1:
            for a, b in run:
                tip = point_tip(name, x, y, (a, b))
                picture.dot(frame.x(a), _bounded(frame.y(b)), 3, f"dot c{index % COLOURS}", tip)
    if drawn and not frame.shows(*points[-1]):
        a, b = drawn[-1][-1]
        across, down, tip = frame.x(a), frame.y(b), f"{name}: not finite after {x} {say(a, 6)}"
        _cross(picture, across, max(frame.top, down), f"cross c{index % COLOURS}", tip)


def _bounded(place: float) -> float:
    """Far outside the picture, but not so far that a renderer loses its digits."""
    return max(-9999.0, min(9999.0, place))


def _end_labels(
    picture: Picture, frame: Frame, named: Mapping[str, Sequence[Point]], order: list[str]
) -> None:
    ends = {
        name: seen[-1]
        for name, points in named.items()
        if (seen := [point for point in points if frame.shows(*point)])
    }
    places = [max(frame.top, min(frame.bottom, frame.y(b))) for _, b in ends.values()]
    moved = spread(places, 15, frame.top, frame.bottom)
    for (name, (a, _)), place, at in zip(ends.items(), places, moved, strict=True):
        kind = f"c{order.index(name) % COLOURS}"
        start = frame.x(a) + 5
        if abs(place - at) > 3 or frame.right - start > 8:
            picture.line(start, place, frame.right + 9, at, f"leader {kind}")
        short = shorten(name, LABEL, BOLD)
        tip = name if short != name else ""
        picture.text(frame.right + 12, at + 4, short, f"name {kind}", tip=tip)


def _mark(picture: Picture, frame: Frame, mark: Mark) -> None:
    if not frame.across.shows(mark.x):
        return
    x = max(frame.left, min(frame.right, frame.x(mark.x)))
    y = frame.y(mark.y) if frame.up.shows(mark.y) else frame.top
    y = max(frame.top, min(frame.bottom, y))
    if mark.kind == "bad":
        picture.line(x, frame.top, x, frame.bottom, "guide bad")
        _cross(picture, x, y, "cross bad", mark.text)
    else:
        picture.dot(x, y, 5.5, f"ring {mark.kind}", mark.text)
    to_left = x + 10 + text_width(mark.text, BOLD) > frame.right
    above = y - 10 if y - 24 > frame.top else y + 20
    anchor = "end" if to_left else "start"
    picture.text(x - 8 if to_left else x + 8, above, mark.text, f"mark {mark.kind}", anchor)


def _cross(picture: Picture, x: float, y: float, kind: str, tip: str) -> None:
    steps = f"M{number(x - 4.5)} {number(y - 4.5)}l9 9m0 -9l-9 9"
    picture.path(steps, kind, tip)


def _key(picture: Picture, frame: Frame, names: list[str], label: str) -> None:
    """Which colour is which, at the top right, in what the label of the axis leaves free."""
    if len(names) < 2:
        return
    right = frame.right
    room = right - frame.left - text_width(label, 12) - 12 - 23 * len(names)
    fits = sum(text_width(name, BOLD) for name in names) <= room
    for index, name in reversed(list(enumerate(names))):
        short = name if fits else shorten(name, min(150, room / len(names)), BOLD)
        picture.text(right, 14, short, f"name c{index % COLOURS}", "end", tip=name)
        right -= text_width(short, BOLD) + 7
        picture.dot(right, 10, 4, f"dot c{index % COLOURS}")
        right -= 16


def _finite(point: Point, log_x: bool, log_y: bool) -> bool:
    a, b = point
    both = math.isfinite(a) and math.isfinite(b)
    return both and (a > 0 or not log_x) and (b > 0 or not log_y)


def _about(series: Mapping[str, Sequence[Point]], x: str, y: str) -> str:
    """What the picture says, in words: where each curve begins and ends."""
    told = []
    for name, points in series.items():
        seen = [point for point in points if all(map(math.isfinite, point))]
        if seen:
            (a, b), (c, d) = seen[0], seen[-1]
            told.append(f"{name}: {y} {say(b)} at {x} {say(a)}, {say(d)} at {x} {say(c)}.")
    return " ".join(told)
