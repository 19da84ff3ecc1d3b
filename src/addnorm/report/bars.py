"""Charts with one named row for each value: bars, and means with standard deviations."""

import math
from collections.abc import Sequence

from addnorm.report.axes import Axis, axis, format_number
from addnorm.report.svg import WIDTH, Picture, Svg, empty_picture, pixels, shorten, text_width

ROW_HEIGHT = 26
ROW_NAME_WIDTH = 220
"""Longer names are shortened."""
NARROW = 460.0
"""Width of a picture whose text stays readable on a phone, where pictures are shown whole."""


def bar_chart(
    values: Sequence[tuple[str, float]],
    *,
    title: str,
    unit: str = "",
    strong: str = "",
    size: float = WIDTH,
) -> Svg:
    """Return a chart with one bar for each (name, value), starting at zero.

    Parameters
    ----------
    values : name and value of each bar
    title : title of the picture
    unit : unit of the values
    strong : name of a bar to emphasise; the others are then muted
    size : width of the picture; NARROW stays readable on a phone

    >>> bar_chart([("speed", 3.0), ("size", -1.5)], title="Gains")[:4]
    '<svg'
    """
    if not values:
        return empty_picture(title)
    about = "; ".join(f"{name}: {format_number(value)} {unit}".rstrip() for name, value in values)
    picture = Picture(size, ROW_HEIGHT * len(values) + 12, title, about)
    finite = [float(value) for _, value in values if math.isfinite(value)]
    span = Axis(min([0.0, *finite]), max([0.0, *finite]) or float(not any(finite)), ())
    texts = [
        f"{format_number(value)} {unit * math.isfinite(value)}".rstrip() for _, value in values
    ]
    value_width = max(text_width(text) for text in texts) + 10
    left = _name_column_width([name for name, _ in values]) + (value_width if span.low < 0 else 0)
    width = size - left - value_width
    zero = left + width * span.place(0)
    for index, ((name, value), text) in enumerate(zip(values, texts, strict=True)):
        y = 6 + ROW_HEIGHT * index
        _draw_name(picture, name, y)
        if not math.isfinite(value):
            picture.text(zero + 8, y + 17, text, "label")
            continue
        end = left + width * span.place(value)
        kind = "bar" if not strong or name == strong else "bar quiet"
        low, high = min(zero, end), max(zero, end)
        picture.rect(
            low, y + 4, max(high - low, 1), ROW_HEIGHT - 8, kind, f"{name}: {text}", round_by=2
        )
        anchor = "end" if value < 0 else "start"
        picture.text(end + (-7 if value < 0 else 7), y + 17, text, "value", anchor)
    picture.line(zero, 4, zero, picture.height - 4, "axis")
    return picture.close()


def interval_chart(
    rows: Sequence[tuple[str, float, float]],
    *,
    title: str,
    x: str = "",
    log: bool = False,
    guide: float | None = None,
) -> Svg:
    """Return a chart with a dot at each mean and a bar from mean − sd to mean + sd.

    Parameters
    ----------
    rows : (name, mean, standard deviation)
    title : title of the picture
    x : label of the axis
    log : logarithmic axis
    guide : value of a vertical line to compare with
    """
    ends = [(name, mean, mean - sd, mean + sd) for name, mean, sd in rows]
    shown = [end for _, *each in ends for end in each] + ([] if guide is None else [guide])
    across = axis(shown, log=log)
    if not any(across.shows(mean) for _, mean, *_ in ends):
        return empty_picture(title)
    about = "; ".join(
        f"{name}: {format_number(mean)} ± {format_number(sd)}" for name, mean, sd in rows
    )
    picture = Picture(WIDTH, ROW_HEIGHT * len(rows) + 52, title, about)
    left = _name_column_width([name for name, *_ in rows]) + 8
    texts = [
        format_number(mean, 4) + f" ± {format_number(sd, 2)}" * math.isfinite(sd)
        for _, mean, sd in rows
    ]
    width = WIDTH - left - max(map(text_width, texts)) - 22
    bottom = ROW_HEIGHT * len(rows) + 10

    def place(value: float) -> float:
        return left + width * max(0.0, min(1.0, across.place(value)))

    for tick, label in zip(across.ticks, across.labels(), strict=True):
        picture.line(place(tick), 6, place(tick), bottom, "grid")
        picture.text(place(tick), bottom + 16, label, "tick", "middle")
    picture.text(left + width, bottom + 36, x + (" (log)" if log else ""), "label", "end")
    if guide is not None and across.shows(guide):
        picture.line(place(guide), 6, place(guide), bottom, "guide")
    for index, ((name, mean, low, high), text) in enumerate(zip(ends, texts, strict=True)):
        y = 6 + ROW_HEIGHT * index + ROW_HEIGHT / 2
        _draw_name(picture, name, y - ROW_HEIGHT / 2)
        picture.text(WIDTH - 2, y + 4, text, "value", "end")
        if not across.shows(mean):
            continue
        if math.isfinite(high):
            least = low if across.shows(low) else across.low
            steps = f"M{pixels(place(least))} {pixels(y)}H{pixels(place(high))}"
            picture.path(steps, "whisker thick c0", f"{name}: {text}")
        picture.dot(place(mean), y, 4.5, "dot c0", f"{name}: {text}")
    return picture.close()


def _name_column_width(names: Sequence[str]) -> float:
    return min(ROW_NAME_WIDTH, max(map(text_width, names))) + 12


def _draw_name(picture: Picture, name: str, y: float) -> None:
    short = shorten(name, ROW_NAME_WIDTH)
    picture.text(0, y + 17, short, "label ink", tip=name if short != name else "")
