"""The fan chart: predicted quantiles as bands, with the observed ones on top."""

from collections.abc import Sequence

from addnorm.report.axes import axis, format_number
from addnorm.report.chart_frame import draw_frame
from addnorm.report.svg import WIDTH, Picture, Svg, empty_picture, pixels

FAN_HEIGHT = 340
Fan = tuple[float, Sequence[float], Sequence[float], int]
"""Place on the x axis, predicted quantiles (5, 25, 50, 75, 95 %), observed ones, and rows."""


def fan_chart(fans: Sequence[Fan], *, title: str, x: str, y: str) -> Svg:
    """Return a fan chart of groups of rows.

    The bands hold 90 % and 50 % of what is predicted, the line is the median. A dot is the observed
    median of a group, its bar goes from the 5 % to the 95 % quantile.

    Parameters
    ----------
    fans : the groups, in ascending order of their place
    title : title of the picture
    x, y : labels of the axes

    >>> fan_chart([(0, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 9)], title="Fan", x="row", y="price")[:4]
    '<svg'
    """
    if not fans:
        return empty_picture(title)
    heights = [value for _, *both, _ in fans for values in both for value in values]
    about = "Bars within the wide band: intervals are right."
    picture = Picture(WIDTH, FAN_HEIGHT, title, about)
    across = axis([place for place, *_ in fans], snug=True)
    frame = draw_frame(picture, across, axis(heights), x, y)

    def point(place: float, height: float) -> str:
        return f"{pixels(frame.x(place))} {pixels(frame.y(height))}"

    for low, high, opacity in ((0, 4, 0.4), (1, 3, 0.8)):
        upper = [point(place, predicted[high]) for place, predicted, _, _ in fans]
        lower = [point(place, predicted[low]) for place, predicted, _, _ in reversed(fans)]
        picture.path(f"M{'L'.join([*upper, *lower])}Z", "quiet", opacity=opacity)
    middle = "L".join(point(place, predicted[2]) for place, predicted, _, _ in fans)
    picture.path(f"M{middle}", "curve c0", "predicted median")
    for place, _, observed, rows in fans:
        at = frame.x(place)
        picture.line(at, frame.y(observed[0]), at, frame.y(observed[4]), "whisker c1")
        ends = f"{format_number(observed[0])} to {format_number(observed[4])}"
        tip = f"observed median {format_number(observed[2])}, 90 % from {ends}, {rows} rows"
        picture.dot(at, frame.y(observed[2]), 3.5, "dot c1", tip)
    picture.text(frame.right, 14, "observed", "name c1", "end")
    picture.text(frame.right - 74, 14, "predicted", "name c0", "end")
    return picture.close()
