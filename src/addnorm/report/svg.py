"""Pictures as text: the few marks that the charts are made of, with everything written escaped.

Colours are classes, and the page says what they are in light and in dark.
"""

import html
import unicodedata

WIDTH = 680
"""Of a picture that fills the page's column."""
BOLD = 13.2
"""The size to reckon with for the bold names of series, which are 12 pixels high."""
COLOURS = 6
"""Series are c0 to c5; further ones are the same again, dashed."""
CONTROLS = {code: 0x2400 + code for code in range(32)} | {0x7F: 0x2421}
"""Characters without a picture, to the signs that stand for them."""


class Svg(str):
    """Markup made here, in which all text is escaped: the only markup a page takes as it is."""

    __slots__ = ()


def escape(text: object) -> str:
    """Text that is safe in markup, inside an element and inside quotes.

    >>> escape('<b class="x">')
    '&lt;b class=&quot;x&quot;&gt;'
    """
    words = str(text).encode("utf-8", "replace").decode("utf-8")
    return html.escape(words.translate(CONTROLS))


def text_width(text: str, size: float = 12) -> float:
    """About how wide a text is when drawn; ideographs are as wide as they are high."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return size * (wide + 0.6 * (len(text) - wide))


def shorten(text: str, width: float, size: float = 12) -> str:
    """The beginning of a text that fits into a width, with an ellipsis if something is left off."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel.

    >>> number(12.04), number(3.26)
    ('12', '3.3')
    """
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def colour(index: int) -> str:
    """The classes of a series: its colour, and dashed when the colours come round again."""
    return f"c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")


class Picture:
    """A drawing in the making: marks are added in order, then it is closed."""

    def __init__(self, width: float, height: float, title: str, about: str = "") -> None:
        self.width, self.height = width, height
        self.title, self.about = title, about
        self.parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.path(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", kind)

    def path(self, steps: str, kind: str, tip: str = "", opacity: float | None = None) -> None:
        see = "" if opacity is None else f' opacity="{opacity:.2f}"'
        self._add(f'<path class="{kind}"{see} d="{steps}"', "path", tip)

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
        see = "" if opacity is None else f' fill-opacity="{opacity:.2f}"'
        corner = f' rx="{number(round_by)}"' if round_by else ""
        sizes = f'width="{number(width)}" height="{number(height)}"'
        place = f'x="{number(x)}" y="{number(y)}"'
        self._add(f'<rect class="{kind}" {place} {sizes}{corner}{see}', "rect", tip)

    def dot(self, x: float, y: float, radius: float, kind: str, tip: str = "") -> None:
        place = f'cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
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
        """Words with their baseline at y; `turn` in degrees, clockwise, around that point."""
        at = f'x="{number(x)}" y="{number(y)}"'
        hold = "" if anchor == "start" else f' text-anchor="{anchor}"'
        if turn:
            hold += f' transform="rotate({number(turn)} {number(x)} {number(y)})"'
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self.parts.append(f'<text class="{kind}" {at}{hold}>{inside}{escape(words)}</text>')

    def clip(self, x: float, y: float, width: float, height: float) -> None:
        """What follows, until `unclip`, is drawn with its origin at (x, y) and cut at the edges."""
        sizes = f'width="{number(width)}" height="{number(height)}"'
        self.parts.append(f'<svg x="{number(x)}" y="{number(y)}" {sizes} overflow="hidden">')

    def unclip(self) -> None:
        self.parts.append("</svg>")

    def close(self) -> Svg:
        """The picture, with a title and a description for those who cannot see it."""
        width, height = number(self.width), number(self.height)
        about = f"<desc>{escape(self.about)}</desc>" if self.about else ""
        return Svg(
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" style="min-width:{number(0.78 * self.width)}px">'
            f"<title>{escape(self.title)}</title>{about}{''.join(self.parts)}</svg>"
        )

    def _add(self, start: str, name: str, tip: str) -> None:
        end = f"><title>{escape(tip)}</title></{name}>" if tip else "/>"
        self.parts.append(start + end)


def nothing(title: str, words: str = "nothing to show") -> Svg:
    """The picture of no data."""
    picture = Picture(WIDTH, 90, title, words)
    picture.rect(0.5, 0.5, WIDTH - 1, 89, "frame", round_by=6)
    picture.text(WIDTH / 2, 50, words, "label", "middle")
    return picture.close()
