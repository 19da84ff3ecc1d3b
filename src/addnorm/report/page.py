"""Self-contained HTML pages: no network, no fonts; light, dark and print styles.

A page has no script unless a widget is added, and then only that one may run.
"""

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from pathlib import Path

from addnorm.errors import InputError, nearest
from addnorm.files import to_json, write_whole
from addnorm.report.axes import format_number
from addnorm.report.style import PICTURE_STYLE, STYLE
from addnorm.report.svg import Svg, escape

Cell = str | int | float | None
REMARK_TONES = {"note": "Note", "good": "Good", "warning": "Warning", "bad": "Problem"}
"""Tones of a remark, and the word that is shown with each, besides its colour."""
LONG_CELL = 40
"""Characters from which on a cell is a text that needs room on a phone."""
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content Security Policy: a browser fetches nothing, and runs nothing but widgets, by digest."""


class Page:
    """An HTML page: parts are added in order, then it is written to a file.

    All text is escaped; the only markup accepted is a picture made by this package.

    >>> page = Page("Training", "6 + 6 blocks, post-norm")
    >>> page.section("Loss")
    >>> page.table(["step", "loss"], [[1000, 4.213], [2000, 3.504]])
    >>> page.write("training.html").name
    'training.html'
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self._sections: list[str] = []
        self._parts: list[str] = []
        self._scripts: list[str] = []

    def section(self, title: str) -> None:
        """Add a heading; a page with three or more has a table of contents."""
        self._sections.append(title)
        self._parts.append(f'<h2 id="s{len(self._sections)}">{escape(title)}</h2>')

    def text(self, text: str) -> None:
        """Add paragraphs, which empty lines separate."""
        for paragraph in text.split("\n\n"):
            if paragraph.strip():
                self._parts.append(f'<p dir="auto">{escape(" ".join(paragraph.split()))}</p>')

    def remark(self, text: str, tone: str = "note", more: Sequence[str] = ()) -> None:
        """Add a highlighted sentence, and optionally a list of evidence and advice.

        Parameters
        ----------
        text : the sentence
        tone : note, good, warning or bad
        more : lines of the list
        """
        if tone not in REMARK_TONES:
            known = ", ".join(REMARK_TONES)
            hint = nearest(tone, REMARK_TONES)
            raise InputError(f"a remark's tone must be one of {known}: got {tone!r}. {hint}")
        rest = "".join(f"<li>{escape(line)}</li>" for line in more)
        word = REMARK_TONES[tone]
        self._parts.append(
            f'<aside class="remark {tone}"><p><strong>{word}</strong> {escape(text)}</p>'
            + (f"<ul>{rest}</ul>" if rest else "")
            + "</aside>"
        )

    def facts(self, facts: Sequence[tuple[str, Cell]]) -> None:
        """Add a few values in large type, each with its name."""
        each = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{_cell(value)}</dd></div>" for name, value in facts
        )
        self._parts.append(f'<dl class="facts">{each}</dl>')

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = ""
    ) -> None:
        """Add a table; numeric columns are aligned to the right, None is shown as a dash."""
        for row in rows:
            if len(row) != len(header):
                raise InputError(
                    f"a row needs one cell for each column: {len(header)} columns, "
                    f"{len(row)} cells in {list(row)!r}. Try None for an empty cell."
                )
        kinds = [
            ' class="number"'
            if rows and all(_is_numeric_cell(row[n]) for row in rows)
            else ' dir="auto" class="long"'
            if any(len(str(row[n])) > LONG_CELL for row in rows)
            else ' dir="auto"'
            for n in range(len(header))
        ]
        tops = "".join(
            f'<th scope="col"{kind}>{escape(name)}</th>'
            for name, kind in zip(header, kinds, strict=True)
        )
        lines = "".join(
            "<tr>"
            + "".join(
                f"<td{kind}>{_cell(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)
            )
            + "</tr>\n"
            for row in rows
        )
        # The caption stands outside of what scrolls, so that it wraps on a narrow screen.
        above = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        self._parts.append(
            f'<figure class="table">{above}<div class="wide" tabindex="0"><table><thead>'
            f"<tr>{tops}</tr></thead><tbody>{lines}</tbody></table></div></figure>"
        )

    def figure(self, picture: Svg, caption: str = "") -> None:
        """Add a picture over the width of the page."""
        self._parts.append(_figure_html(picture, caption))

    def gallery(self, pictures: Sequence[tuple[Svg, str]]) -> None:
        """Add several small pictures with captions, as many in a row as fit."""
        each = "".join(_figure_html(picture, caption) for picture, caption in pictures)
        self._parts.append(f'<div class="gallery">{each}</div>')

    def code(self, text: str) -> None:
        """Add commands or output in a monospaced font."""
        escaped = "\n".join(escape(line) for line in text.expandtabs(4).splitlines())
        self._parts.append(f"<pre><code>{escaped}</code></pre>")

    def widget(self, script: str, data: object, style: str = "") -> None:
        """Add an interactive part: a JavaScript function of an element and of data.

        Parameters
        ----------
        script : source of `function (root, data) {...}`, which fills the element `root`. It is
            part of the program, never made from data.
        data : plain values, passed as JSON.
        style : rules of a style sheet for the element.
        """
        name = f"w{len(self._scripts)}"
        content = to_json(data, indent=None).replace("<", "\\u003c")
        self._parts.append(
            f"<style>{style}</style>"
            f'<div class="widget" id="{name}"></div>'
            f'<script type="application/json" id="{name}-data">{content}</script>'
        )
        self._scripts.append(
            f'({script.strip()})(document.getElementById("{name}"),'
            f'JSON.parse(document.getElementById("{name}-data").textContent));'
        )

    def html(self) -> str:
        """Return the whole page."""
        links = "".join(
            f'<li><a href="#s{number}">{escape(title)}</a></li>'
            for number, title in enumerate(self._sections, 1)
        )
        contents = (
            f'<nav aria-label="Contents"><ol>{links}</ol></nav>' if len(self._sections) > 2 else ""
        )
        below = f'<p class="subtitle">{escape(self.subtitle)}</p>' if self.subtitle else ""
        parts = "\n".join(self._parts)
        digests = [hashlib.sha256(each.encode()).digest() for each in self._scripts]
        allowed = "".join(f" 'sha256-{base64.b64encode(each).decode()}'" for each in digests)
        policy = CONTENT_POLICY + (f"; script-src{allowed}" if allowed else "")
        scripts = "".join(f"<script>{each}</script>\n" for each in self._scripts)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"<header><h1>{escape(self.title)}</h1>{below}</header>\n{contents}\n{parts}\n"
            f"</main>\n{scripts}</body>\n</html>\n"
        )

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, as a notebook shows it."""
        style = "width:100%;height:40rem;border:0"
        return f'<iframe srcdoc="{html.escape(self.html())}" style="{style}"></iframe>'

    def write(self, path: str | Path) -> Path:
        """Write the page to a file atomically; return its path."""
        write_whole(Path(path), self.html().encode())
        return Path(path)


def write_picture(picture: Svg, path: str | Path) -> Path:
    """Write a picture to an SVG file with light and dark styles; return its path."""
    write_whole(Path(path), f"{_with_style(picture)}\n".encode())
    return Path(path)


def picture_html(picture: Svg) -> str:
    """Return a picture as an image element that brings its own styles, for notebooks."""
    content = base64.b64encode(_with_style(picture).encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{content}" style="max-width:100%" alt="">'


def _with_style(picture: Svg) -> str:
    _check_picture(picture)
    start, title = picture.split("<title>", 1)
    return f"{start}<style>{PICTURE_STYLE}</style><title>{title}"


def _check_picture(picture: Svg) -> None:
    if not isinstance(picture, Svg):
        raise InputError(
            "a figure must be a picture made by addnorm.report: "
            f"got {type(picture).__name__}. Try line_chart(...)."
        )


def _figure_html(picture: Svg, caption: str) -> str:
    _check_picture(picture)
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><div class="wide">{picture}</div>{below}</figure>'


def _is_numeric_cell(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))


def _cell(cell: Cell) -> str:
    """Return a cell as text: 12 345 with thin spaces, floats with four digits, yes and no."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}".replace(",", "\u202f").replace("-", "−")
    if isinstance(cell, float):
        whole = math.isfinite(cell) and 1e4 <= abs(cell) < 1e9
        return _cell(round(cell)) if whole else format_number(cell, 4)
    return escape(cell)
