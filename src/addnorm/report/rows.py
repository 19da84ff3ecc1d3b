"""Charts of named rows: a bar for each, or a mean with its spread."""

import math
from collections.abc import Sequence

from addnorm.report.axes import Axis, axis, say
from addnorm.report.svg import WIDTH, Picture, Svg, nothing, number, shorten, text_width

ROW = 26
NAMES = 220
"""The widest column of names."""


def bars(
    values: Sequence[tuple[str, float]], *, title: str, unit: str = "", strong: str = ""
) -> Svg:
    """A bar for each name, from zero, with its value beside it.

    `strong` is the name of a bar to stand out; the others are then quiet.

    >>> bars([("speed", 3.0), ("size", -1.5)], title="Gains")[:4]
    '<svg'
    """
    if not values:
        return nothing(title)
    told = "; ".join(f"{name}: {say(value)} {unit}".rstrip() for name, value in values)
    picture = Picture(WIDTH, ROW * len(values) + 12, title, told)
    finite = [float(value) for _, value in values if math.isfinite(value)]
    span = Axis(min([0.0, *finite]), max([0.0, *finite]) or float(not any(finite)), ())
    texts = [f"{say(value)} {unit * math.isfinite(value)}".rstrip() for _, value in values]
    room = max(text_width(text) for text in texts) + 10
    left = _names_width([name for name, _ in values]) + (room if span.low < 0 else 0)
    width = WIDTH - left - room
    zero = left + width * span.place(0)
    for index, ((name, value), text) in enumerate(zip(values, texts, strict=True)):
        y = 6 + ROW * index
        _name(picture, name, y)
        if not math.isfinite(value):
            picture.text(zero + 8, y + 17, text, "label")
            continue
        end = left + width * span.place(value)
        kind = "bar" if not strong or name == strong else "bar quiet"
        low, high = min(zero, end), max(zero, end)
        picture.rect(low, y + 4, max(high - low, 1), ROW - 8, kind, f"{name}: {text}", round_by=2)
        anchor = "end" if value < 0 else "start"
        picture.text(end + (-7 if value < 0 else 7), y + 17, text, "value", anchor)
    picture.line(zero, 4, zero, picture.height - 4, "axis")
    return picture.close()


def intervals(
    rows: Sequence[tuple[str, float, float]],
    *,
    title: str,
    x: str = "",
    log: bool = False,
    guide: float | None = None,
) -> Svg:
    """For each (name, mean, sd): a dot at the mean, and a bar from mean − sd to mean + sd.

    `guide` is a value to compare with: a line from top to bottom.
    """
    ends = [(name, mean, mean - sd, mean + sd) for name, mean, sd in rows]
    seen = [end for _, *each in ends for end in each] + ([] if guide is None else [guide])
    across = axis(seen, log=log)
    if not any(across.shows(mean) for _, mean, *_ in ends):
        return nothing(title)
    told = "; ".join(f"{name}: {say(mean)} ± {say(sd)}" for name, mean, sd in rows)
    picture = Picture(WIDTH, ROW * len(rows) + 52, title, told)
    left = _names_width([name for name, *_ in rows]) + 8
    texts = [say(mean, 4) + f" ± {say(sd, 2)}" * math.isfinite(sd) for _, mean, sd in rows]
    width = WIDTH - left - max(map(text_width, texts)) - 22
    bottom = ROW * len(rows) + 10

    def place(value: float) -> float:
        return left + width * max(0.0, min(1.0, across.place(value)))

    for tick, label in zip(across.ticks, across.labels(), strict=True):
        picture.line(place(tick), 6, place(tick), bottom, "grid")
        picture.text(place(tick), bottom + 16, label, "tick", "middle")
    picture.text(left + width, bottom + 36, x + (" (log)" if log else ""), "label", "end")
    if guide is not None and across.shows(guide):
        picture.line(place(guide), 6, place(guide), bottom, "guide")
    for index, ((name, mean, low, high), text) in enumerate(zip(ends, texts, strict=True)):
        y = 6 + ROW * index + ROW / 2
        _name(picture, name, y - ROW / 2)
        picture.text(WIDTH - 2, y + 4, text, "value", "end")
        if not across.shows(mean):
            continue
        if math.isfinite(high):
            least = low if across.shows(low) else across.low
            steps = f"M{number(place(least))} {number(y)}H{number(place(high))}"
            picture.path(steps, "whisker thick c0", f"{name}: {text}")
        picture.dot(place(mean), y, 4.5, "dot c0", f"{name}: {text}")
    return picture.close()


def _names_width(names: Sequence[str]) -> float:
    return min(NAMES, max(map(text_width, names))) + 12


def _name(picture: Picture, name: str, y: float) -> None:
    short = shorten(name, NAMES)
    picture.text(0, y + 17, short, "label ink", tip=name if short != name else "")
