"""SVG pictures: the elements that charts consist of, with all text escaped.

Colours are CSS classes, which the style sheet defines for light and dark.
"""

import html
import unicodedata

WIDTH = 680
"""Width of a picture that fills the page."""
BOLD = 13.2
"""Font size for measuring the bold names of series, which are 12 pixels high but wider."""
COLOURS = 6
"""Series have the classes c0 to c5; further ones reuse these colours, dashed."""
CONTROL_SYMBOLS = {code: 0x2400 + code for code in range(32)} | {0x7F: 0x2421}
"""Control characters, and the symbols that are shown for them."""


class Svg(str):
    """SVG markup in which all text is escaped: the only markup that a page accepts."""

    __slots__ = ()


def escape(text: object) -> str:
    """Return text that is safe in markup, inside an element and inside quotes.

    >>> escape('<b class="x">')
    '&lt;b class=&quot;x&quot;&gt;'
    """
    words = str(text).encode("utf-8", "replace").decode("utf-8")
    return html.escape(words.translate(CONTROL_SYMBOLS))


def text_width(text: str, size: float = 12) -> float:
    """Return the approximate width of a text in pixels; ideographs are as wide as they are high."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return size * (wide + 0.6 * (len(text) - wide))


def shorten(text: str, width: float, size: float = 12) -> str:
    """Return a text, shortened with an ellipsis if it is wider than `width`."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def pixels(value: float) -> str:
    """Return a coordinate as text, to a tenth of a pixel.

    >>> pixels(12.04), pixels(3.26)
    ('12', '3.3')
    """
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def colour(index: int) -> str:
    """Return the CSS classes of a series: its colour, and dashed if the colour is reused."""
    return f"c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")


class Picture:
    """An SVG picture: elements are added in order, then `close` returns its markup.

    Coordinates and sizes are in pixels, from the top left. Every element has a `kind`, its CSS
    classes, and may have a `tip`, the text that is shown when the pointer is over it.

    Parameters
    ----------
    width, height : size in pixels
    title : title for screen readers and as a tip
    about : description for screen readers
    """

    def __init__(self, width: float, height: float, title: str, about: str = "") -> None:
        self.width, self.height = width, height
        self.title, self.about = title, about
        self.parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Add a line.

        Parameters
        ----------
        x1, y1, x2, y2 : its ends
        kind : CSS classes
        """
        self.path(f"M{pixels(x1)} {pixels(y1)}L{pixels(x2)} {pixels(y2)}", kind)

    def path(self, steps: str, kind: str, tip: str = "", opacity: float | None = None) -> None:
        """Add a path.

        Parameters
        ----------
        steps : path data, as in the attribute `d`
        kind : CSS classes
        tip : text that is shown when the pointer is over it
        opacity : opacity, by default that of the style sheet
        """
        style = "" if opacity is None else f' opacity="{opacity:.2f}"'
        self._add(f'<path class="{kind}"{style} d="{steps}"', "path", tip)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        tip: str = "",
        opacity: float | None = None,
        round_by: float = 0,
    ) -> None:
        """Add a rectangle.

        Parameters
        ----------
        x, y : its top left corner
        width, height : its size
        kind : CSS classes
        tip : text that is shown when the pointer is over it
        opacity : opacity of the fill, by default that of the style sheet
        round_by : radius of the corners
        """
        style = "" if opacity is None else f' fill-opacity="{opacity:.2f}"'
        corner = f' rx="{pixels(round_by)}"' if round_by else ""
        sizes = f'width="{pixels(width)}" height="{pixels(height)}"'
        place = f'x="{pixels(x)}" y="{pixels(y)}"'
        self._add(f'<rect class="{kind}" {place} {sizes}{corner}{style}', "rect", tip)

    def dot(self, x: float, y: float, radius: float, kind: str, tip: str = "") -> None:
        """Add a circle.

        Parameters
        ----------
        x, y : its centre
        radius : its radius
        kind : CSS classes
        tip : text that is shown when the pointer is over it
        """
        place = f'cx="{pixels(x)}" cy="{pixels(y)}" r="{pixels(radius)}"'
        self._add(f'<circle class="{kind}" {place}', "circle", tip)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        kind: str = "tick",
        anchor: str = "start",
        turn: float = 0,
        tip: str = "",
    ) -> None:
        """Add text.

        Parameters
        ----------
        x, y : position of the anchor, y at the baseline
        words : the text
        kind : CSS classes
        anchor : start, middle or end of the text
        turn : clockwise rotation around (x, y) in degrees
        tip : text that is shown when the pointer is over it
        """
        at = f'x="{pixels(x)}" y="{pixels(y)}"'
        placement = "" if anchor == "start" else f' text-anchor="{anchor}"'
        if turn:
            placement += f' transform="rotate({pixels(turn)} {pixels(x)} {pixels(y)})"'
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(f'<text class="{kind}" {at}{placement}>{inside}{escape(words)}</text>')

    def clip(self, x: float, y: float, width: float, height: float) -> None:
        """Clip the elements that follow, until `unclip`, to a rectangle.

        Parameters
        ----------
        x, y : its top left corner, the origin of the elements in it
        width, height : its size
        """
        sizes = f'width="{pixels(width)}" height="{pixels(height)}"'
        self.parts.append(f'<svg x="{pixels(x)}" y="{pixels(y)}" {sizes} overflow="hidden">')

    def unclip(self) -> None:
        """End the clipping."""
        self.parts.append("</svg>")

    def close(self) -> Svg:
        """Return the markup, with title and description for screen readers."""
        width, height = pixels(self.width), pixels(self.height)
        about = f"<desc>{escape(self.about)}</desc>" if self.about else ""
        return Svg(
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" style="min-width:{pixels(0.78 * self.width)}px">'
            f"<title>{escape(self.title)}</title>{about}{''.join(self.parts)}</svg>"
        )

    def _add(self, start: str, name: str, tip: str) -> None:
        end = f"><title>{escape(tip)}</title></{name}>" if tip else "/>"
        self.parts.append(start + end)


def empty_picture(title: str, words: str = "nothing to show") -> Svg:
    """Return the picture that is shown if there are no data."""
    picture = Picture(WIDTH, 90, title, words)
    picture.rect(0.5, 0.5, WIDTH - 1, 89, "frame", round_by=6)
    picture.text(WIDTH / 2, 50, words, "label", "middle")
    return picture.close()
