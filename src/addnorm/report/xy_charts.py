"""Charts with an x and a y axis: curves, scatter plots, reliability diagrams."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from addnorm.errors import InputError
from addnorm.report.axes import Axis, axis, format_number
from addnorm.report.chart_frame import ChartFrame, draw_frame, point_tip, spread_labels
from addnorm.report.svg import (
    BOLD,
    COLOURS,
    WIDTH,
    Picture,
    Svg,
    colour,
    empty_picture,
    pixels,
    shorten,
    text_width,
)

Point = tuple[float, float]
CHART_HEIGHT = 320
LINE_BUCKETS = 200
"""A curve is drawn with at most four points in each of this many parts of its width."""
MAX_DOTS = 40
"""Curves with more points show no dots."""
MAX_POINT_TIPS, CLOUD_LAYERS = 150, 4
"""Groups with more points have no tips; their points are drawn together, in this many layers."""
LABEL_WIDTH = 190
"""Longer labels of curves are shortened."""
OBSERVED = "observed"
"""Axis label of observed frequencies: short, because the legend is next to it."""
MARK_KINDS = ("best", "bad", "note")


@dataclass(frozen=True)
class Mark:
    """A labelled point: the best step, or where training diverged.

    Parameters
    ----------
    x, y : position of the point; if y is NaN, the mark is at the top.
    text : the label.
    kind : best, bad or note.
    """

    x: float
    y: float
    text: str
    kind: str = "note"

    def __post_init__(self) -> None:
        if self.kind not in MARK_KINDS:
            raise InputError(
                f"a mark's kind must be one of {', '.join(MARK_KINDS)}: got {self.kind!r}. "
                "Try 'note'."
            )


def line_chart(
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
    """Return a chart of curves, each with its name at its end.

    Points that are not finite are gaps; a curve that ends in one has a cross at its last point.

    Parameters
    ----------
    series : (x, y) of the points of each curve, by its name
    title : title of the picture
    x, y : labels of the axes
    log_x, log_y : logarithmic axes
    most : highest y to show; curves above it leave the picture at the top
    marks : labelled points

    >>> line_chart({"post": [(0, 9.2), (1, 5.1)]}, title="Loss")[:4]
    '<svg'
    """
    curves = {name: sorted(((float(a), float(b)) for a, b in points), key=lambda p: p[0])
            for name, points in series.items()}  # fmt: skip
    drawable = [p for points in curves.values() for p in points if _is_drawable(p, log_x, log_y)]
    if not drawable:
        return empty_picture(title)
    heights = [b for _, b in drawable if most is None or b <= most]
    across = axis([a for a, _ in drawable], log=log_x, snug=True)
    up = axis(heights + ([] if most is None else [most]), log=log_y)
    names = [name for name in curves if len(curves) > 1]
    right = 16 + max((min(LABEL_WIDTH, text_width(name, BOLD)) + 12 for name in names), default=0)
    picture = Picture(WIDTH, CHART_HEIGHT, title, _describe_series(curves, x, y))
    frame = draw_frame(picture, across, up, x, y, right)
    picture.clip(0, frame.top - 6, WIDTH, frame.height + 12)
    picture.parts.append(f'<g transform="translate(0 {pixels(6 - frame.top)})">')
    for index, (name, points) in enumerate(curves.items()):
        _draw_curve(picture, frame, points, name, index, x, y)
    picture.parts.append("</g>")
    picture.unclip()
    _draw_end_labels(picture, frame, {n: p for n, p in curves.items() if n in names}, list(curves))
    for mark in marks:
        _draw_mark(picture, frame, mark)
    return picture.close()


def scatter_chart(
    groups: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    diagonal: bool = False,
) -> Svg:
    """Return a scatter plot; points that would cover each other are drawn once.

    Parameters
    ----------
    groups : (x, y) of the points of each group, by its name
    title : title of the picture
    x, y : labels of the axes
    log_x, log_y : logarithmic axes
    diagonal : draw the line y = x
    """
    clouds = {name: [(float(a), float(b)) for a, b in points] for name, points in groups.items()}
    drawable = [p for points in clouds.values() for p in points if _is_drawable(p, log_x, log_y)]
    if not drawable:
        return empty_picture(title)
    picture = Picture(WIDTH, CHART_HEIGHT + 60, title, _describe_series(clouds, x, y))
    across = axis([a for a, _ in drawable], log=log_x)
    frame = draw_frame(picture, across, axis([b for _, b in drawable], log=log_y), x, y)
    if diagonal:
        low, high = max(across.low, frame.up.low), min(across.high, frame.up.high)
        if low < high:
            picture.line(frame.x(low), frame.y(low), frame.x(high), frame.y(high), "guide")
    for index, (name, points) in enumerate(clouds.items()):
        drawn: dict[tuple[int, int], Point] = {}
        for point in points:
            if frame.shows(*point):
                place = 2 * round(frame.x(point[0]) / 2), 2 * round(frame.y(point[1]) / 2)
                drawn.setdefault(place, point)
        if len(drawn) <= MAX_POINT_TIPS:
            for a, b in drawn.values():
                tip = point_tip(name, x, y, (a, b))
                picture.dot(frame.x(a), frame.y(b), 3, f"point c{index % COLOURS}", tip)
        else:
            _draw_cloud(picture, list(drawn), index)
    _draw_legend(picture, frame, list(clouds), y)
    return picture.close()


def reliability_chart(
    bins: Mapping[str, Sequence[tuple[float, float, int]]],
    *,
    title: str,
    x: str = "predicted probability",
) -> Svg:
    """Return a reliability diagram: predicted probability against observed frequency.

    Points on the diagonal are calibrated. A bin is (mean predicted probability, observed frequency,
    rows), as `metrics.reliability_bins` returns it. The bars are 95 % intervals of the frequency
    (Wilson 1927); a larger dot has a larger share of the rows.
    """
    models = {name: [b for b in filled if b[2] > 0] for name, filled in bins.items()}
    if not any(models.values()):
        return empty_picture(title)
    side = Axis(0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1))
    picture = Picture(
        440, 440, title, "Dots above the line: events are more frequent than predicted."
    )
    frame = draw_frame(picture, side, side, x, OBSERVED)
    picture.line(frame.x(0), frame.y(0), frame.x(1), frame.y(1), "guide")
    for index, (name, filled) in enumerate(models.items()):
        total = sum(count for *_, count in filled)
        path = "".join(
            f"{'L' if n else 'M'}{pixels(frame.x(p))} {pixels(frame.y(f))}"
            for n, (p, f, _) in enumerate(filled)
        )
        picture.path(path, f"curve thin {colour(index)}")
        for p, f, count in filled:
            low, high = wilson_interval(f, count)
            picture.line(
                frame.x(p), frame.y(low), frame.x(p), frame.y(high), f"whisker c{index % COLOURS}"
            )
            tip = f"{name}: predicted {format_number(p)}, observed {format_number(f)}, {count} rows"
            radius = 2.5 + 7 * math.sqrt(count / total)
            picture.dot(frame.x(p), frame.y(f), radius, f"dot c{index % COLOURS}", tip)
    _draw_legend(picture, frame, list(models), OBSERVED)
    return picture.close()


def _draw_cloud(picture: Picture, places: Sequence[tuple[int, int]], index: int) -> None:
    """Draw many points in a few layers: small files, and darker where points are dense."""
    for layer in range(CLOUD_LAYERS):
        steps = "".join(f"M{across} {down}h0" for across, down in places[layer::CLOUD_LAYERS])
        picture.path(steps, f"cloud c{index % COLOURS}")


def wilson_interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n), a confidence interval of p.

    Wilson 1927, "Probable inference, the law of succession, and statistical inference".

    >>> [round(end, 3) for end in wilson_interval(0.5, 100)]
    [0.404, 0.596]
    """
    middle = share + z * z / (2 * count)
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return (middle - reach) / scale, (middle + reach) / scale


def drawable_segments(points: Sequence[Point], log_x: bool, log_y: bool) -> list[list[Point]]:
    """Return the segments of a curve between points that cannot be drawn."""
    parts = groupby(points, key=lambda point: _is_drawable(point, log_x, log_y))
    return [list(part) for shown, part in parts if shown]


def thin_out(points: Sequence[Point], place: Sequence[float]) -> list[Point]:
    """Return the first, lowest, highest and last point of each bucket of a long curve.

    `place` has the position of each point from 0 to 1, in rising order.
    """
    if len(points) <= 4 * LINE_BUCKETS:
        return list(points)
    thinned: list[Point] = []
    indices = range(len(points))
    for _, bucket in groupby(indices, key=lambda index: int(place[index] * LINE_BUCKETS)):
        each = list(bucket)
        low = min(each, key=lambda index: points[index][1])
        high = max(each, key=lambda index: points[index][1])
        thinned += [points[index] for index in sorted({each[0], low, high, each[-1]})]
    return thinned


def _draw_curve(
    picture: Picture,
    frame: ChartFrame,
    points: Sequence[Point],
    name: str,
    index: int,
    x: str,
    y: str,
) -> None:
    drawn = [
        thin_out(run, [frame.across.place(a) for a, _ in run])
        for run in drawable_segments(points, frame.across.log, frame.up.log)
    ]
    few = sum(len(run) for run in drawn) <= MAX_DOTS
    for run in drawn:
        steps = [f"{pixels(frame.x(a))} {pixels(_clamped(frame.y(b)))}" for a, b in run]
        if len(run) > 1:
            last = point_tip(name, x, y, run[-1])
            picture.path("M" + "L".join(steps), f"curve {colour(index)}", f"{last} (last)")
        if few or len(run) == 1:
            for a, b in run:
                tip = point_tip(name, x, y, (a, b))
                picture.dot(frame.x(a), _clamped(frame.y(b)), 3, f"dot c{index % COLOURS}", tip)
    if drawn and not frame.shows(*points[-1]):
        a, b = drawn[-1][-1]
        across, down, tip = (
            frame.x(a),
            frame.y(b),
            f"{name}: not finite after {x} {format_number(a, 6)}",
        )
        _draw_cross(picture, across, max(frame.top, down), f"cross c{index % COLOURS}", tip)


def _clamped(place: float) -> float:
    """Return a coordinate that is not too far outside the picture for renderers."""
    return max(-9999.0, min(9999.0, place))


def _draw_end_labels(
    picture: Picture, frame: ChartFrame, named: Mapping[str, Sequence[Point]], order: list[str]
) -> None:
    ends = {
        name: drawable[-1]
        for name, points in named.items()
        if (drawable := [point for point in points if frame.shows(*point)])
    }
    places = [max(frame.top, min(frame.bottom, frame.y(b))) for _, b in ends.values()]
    moved = spread_labels(places, 15, frame.top, frame.bottom)
    for (name, (a, _)), place, at in zip(ends.items(), places, moved, strict=True):
        kind = f"c{order.index(name) % COLOURS}"
        start = frame.x(a) + 5
        if abs(place - at) > 3 or frame.right - start > 8:
            picture.line(start, place, frame.right + 9, at, f"leader {kind}")
        short = shorten(name, LABEL_WIDTH, BOLD)
        tip = name if short != name else ""
        picture.text(frame.right + 12, at + 4, short, f"name {kind}", tip=tip)


def _draw_mark(picture: Picture, frame: ChartFrame, mark: Mark) -> None:
    if not frame.across.shows(mark.x):
        return
    x = max(frame.left, min(frame.right, frame.x(mark.x)))
    y = frame.y(mark.y) if frame.up.shows(mark.y) else frame.top
    y = max(frame.top, min(frame.bottom, y))
    if mark.kind == "bad":
        picture.line(x, frame.top, x, frame.bottom, "guide bad")
        _draw_cross(picture, x, y, "cross bad", mark.text)
    else:
        picture.dot(x, y, 5.5, f"ring {mark.kind}", mark.text)
    to_left = x + 10 + text_width(mark.text, BOLD) > frame.right
    above = y - 10 if y - 24 > frame.top else y + 20
    anchor = "end" if to_left else "start"
    picture.text(x - 8 if to_left else x + 8, above, mark.text, f"mark {mark.kind}", anchor)


def _draw_cross(picture: Picture, x: float, y: float, kind: str, tip: str) -> None:
    steps = f"M{pixels(x - 4.5)} {pixels(y - 4.5)}l9 9m0 -9l-9 9"
    picture.path(steps, kind, tip)


def _draw_legend(picture: Picture, frame: ChartFrame, names: list[str], label: str) -> None:
    """Draw the legend at the top right, beside the label of the axis."""
    if len(names) < 2:
        return
    right = frame.right
    free_width = right - frame.left - text_width(label, 12) - 12 - 23 * len(names)
    fits = sum(text_width(name, BOLD) for name in names) <= free_width
    for index, name in reversed(list(enumerate(names))):
        short = name if fits else shorten(name, min(150, free_width / len(names)), BOLD)
        picture.text(right, 14, short, f"name c{index % COLOURS}", "end", tip=name)
        right -= text_width(short, BOLD) + 7
        picture.dot(right, 10, 4, f"dot c{index % COLOURS}")
        right -= 16


def _is_drawable(point: Point, log_x: bool, log_y: bool) -> bool:
    a, b = point
    both = math.isfinite(a) and math.isfinite(b)
    return both and (a > 0 or not log_x) and (b > 0 or not log_y)


def _describe_series(series: Mapping[str, Sequence[Point]], x: str, y: str) -> str:
    """Return a description in words: where each curve begins and ends."""
    sentences = []
    for name, points in series.items():
        drawable = [point for point in points if all(map(math.isfinite, point))]
        if drawable:
            (a, b), (c, d) = drawable[0], drawable[-1]
            start = f"{format_number(b)} at {x} {format_number(a)}"
            end = f"{format_number(d)} at {x} {format_number(c)}"
            sentences.append(f"{name}: {y} {start}, {end}.")
    return " ".join(sentences)
