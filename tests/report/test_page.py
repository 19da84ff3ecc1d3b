"""Pages: safe, self-contained HTML files."""

import base64
import hashlib
import html
import html.parser
import json
import re
from pathlib import Path

import pytest

from addnorm.errors import InputError, SavedError
from addnorm.report import (
    Mark,
    Page,
    attention_map,
    bar_chart,
    heat_map,
    interval_chart,
    line_chart,
    reliability_chart,
    write_picture,
)
from addnorm.report.style import DARK_COLOURS, LIGHT_COLOURS, STYLE

EVIL = "<script>alert('x')</script>\"&"
PLAIN = "x" * len(EVIL)


class Reader(html.parser.HTMLParser):
    """Checks that tags are nested correctly, and collects the text between them."""

    EMPTY = frozenset({"meta", "path", "rect", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(page: Page) -> Reader:
    reader = Reader()
    reader.feed(page.html())
    reader.close()
    assert reader.open == []
    return reader


def full(text: str) -> Page:
    """Return a page with every part, all of one text."""
    page = Page(text, text)
    for _ in range(3):
        page.section(text)
    page.text(text + "\n\n" + text)
    page.remark(text, "bad", [text])
    page.facts([(text, text), (text, 3)])
    page.table([text, text], [[text, None], [text, 1.5]], text)
    page.figure(bar_chart([(text, 1)], title=text, unit=text), text)
    page.gallery([(attention_map([[1.0]], [text], [text], title=text), text)])
    page.code(text)
    return page


def test_all_text_is_escaped() -> None:
    evil, plain = read(full(EVIL)), read(full(PLAIN))
    assert evil.tags == plain.tags and "script" not in evil.tags
    assert len(evil.attributes) == len(plain.attributes)
    assert "<script" not in full(EVIL).html()
    assert "".join(evil.words).count(EVIL) == "".join(plain.words).count(PLAIN) > 20


def test_only_pictures_are_inserted_as_markup() -> None:
    with pytest.raises(InputError, match=r"made by addnorm.report: got str. Try line_chart"):
        Page("t").figure("<svg onload='x'></svg>")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"made by addnorm\.report"):
        Page("t").gallery([("<svg/>", "")])  # type: ignore[list-item]


def test_a_page_is_self_contained() -> None:
    page = full("words")
    text = page.html()
    for reach in ("src=", "url(", "@import", "<link", "<script", "javascript:"):
        assert reach not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src &#x27;none&#x27;" in text
    hrefs = [value for name, value in read(page).attributes if name == "href"]
    assert hrefs == ["#s1", "#s2", "#s3"]
    ids = [value for name, value in read(page).attributes if name == "id"]
    assert ids == ["s1", "s2", "s3"]


def test_a_widget_may_run_only_its_own_script() -> None:
    page = Page("t")
    code = "function (root, data) { root.textContent = data.text; }"
    page.widget(code, {"text": EVIL, "nothing": float("nan")}, ".w{color:red}")
    text = page.html()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert code in script and text.count("<script") == 2
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert html.escape(f"script-src 'sha256-{digest}'") in text
    (data,) = re.findall(r'<script type="application/json" id="w0-data">(.*?)</script>', text)
    assert json.loads(data) == {"text": EVIL, "nothing": None} and "<" not in data


def test_only_pages_with_several_sections_have_contents() -> None:
    page = Page("t")
    page.section("one")
    page.section("two")
    assert "<nav" not in page.html()


def test_light_dark_print_and_narrow_styles() -> None:
    # `(not print)` is no condition that a browser knows: it would never be dark.
    assert "@media screen and (prefers-color-scheme:dark){" in STYLE and "@media print" in STYLE
    assert "max-width:34rem" in STYLE
    names = [set(re.findall(r"--\w+(?=:)", colours)) for colours in (LIGHT_COLOURS, DARK_COLOURS)]
    used = set(re.findall(r"var\((--\w+)\)", STYLE))
    assert names[0] == names[1] == used
    assert STYLE.count("{") == STYLE.count("}")


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    total = 0.0
    for place, weight in ((1, 0.2126), (3, 0.7152), (5, 0.0722)):
        part = int(colour[place : place + 2], 16) / 255
        total += weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    return total


@pytest.mark.parametrize("colours", (LIGHT_COLOURS, DARK_COLOURS), ids=("light", "dark"))
def test_text_colours_have_enough_contrast(colours: str) -> None:
    """WCAG 2.2 (1.4.3) requires a contrast of 4.5 with the background."""
    table = dict(re.findall(r"--(\w+):(#\w{6})", colours))
    for ground in ("ground", "raised"):
        for name in ("ink", "soft", "c0", "c1", "c2", "c3", "c4", "c5", "good", "warning", "bad"):
            light, dark = sorted((luminance(table[name]), luminance(table[ground])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, ground)


def test_tables() -> None:
    page = Page("t")
    rows = [["post", 12345, 0.123456, True], ["pre", -1, None, False]]
    page.table(["run", "steps", "loss", "fine"], rows, "All runs")
    text = page.html()
    assert '<th scope="col" class="number">steps</th>' in text
    assert '<td class="number">12\u202f345</td><td class="number">0.1235</td>' in text
    assert '<td class="number">−1</td><td class="number">–</td>' in text
    assert ">yes</td>" in text and ">no</td>" in text and "<figcaption>All runs" in text
    page.table(["text", "label"], [["a long text " * 4, "x"], ["short", "y"]])
    assert '<td dir="auto" class="long">short</td><td dir="auto">y</td>' in page.html()
    assert "td.long{min-width:12rem;" in STYLE
    with pytest.raises(InputError, match=r"2 columns, 1 cells in \[1\]. Try None for an empty"):
        page.table(["a", "b"], [[1]])


def test_large_numbers_keep_their_digits() -> None:
    page = Page("t")
    page.facts([("a", 36_512_000), ("b", 12345.6), ("c", float("inf")), ("d", 1e12)])
    text = page.html()
    for shown in ("36\u202f512\u202f000", "12\u202f346", "∞", "1T"):
        assert f"<dd>{shown}</dd>" in text


def test_tones() -> None:
    page = Page("t")
    page.remark("fine", "good")
    assert "<strong>Good</strong> fine" in page.html()
    with pytest.raises(InputError, match=r"one of note, good, warning, bad: got 'goood'. Did you"):
        page.remark("x", "goood")


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    page = full("Größe 日本 \ud800")
    path = page.write(tmp_path / "page.html")
    assert path.read_bytes().decode() == page.html()
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(SavedError, match="cannot be written"):
        page.write(tmp_path / "missing" / "page.html")


def test_a_notebook_shows_the_page_in_an_iframe() -> None:
    page = Page("Loss & <more>", "a\nb")
    page.code("one\ntwo")
    frame = page._repr_html_()
    (inside,) = re.findall(r'^<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>$', frame)
    assert "<" not in inside and html.unescape(inside) == page.html()


def test_pages_are_reproducible() -> None:
    assert full("x").html() == full("x").html()


def test_six_pictures_are_small() -> None:
    steps = range(0, 100_000, 5)
    names = [str(n) for n in range(40)]
    page = Page("t")
    series = {n: [(s, (s * 7919 % 1000) / 1000 + int(n)) for s in steps] for n in "123"}
    page.figure(line_chart(series, title="Loss", marks=[Mark(5, 1, "best", "best")]))
    page.figure(heat_map([[r * c for c in range(40)] for r in range(40)], names, names, title="M"))
    page.figure(attention_map([[1 / 12] * 12] * 12, names[:12], names[:12]))
    page.figure(bar_chart([(n, float(n)) for n in names], title="B"))
    page.figure(interval_chart([(n, float(n), 1) for n in names], title="I"))
    page.figure(reliability_chart({"m": [(n / 10, n / 10, 9) for n in range(10)]}, title="R"))
    assert len(page.html().encode()) < 200_000


def test_a_picture_file_is_complete(tmp_path: Path) -> None:
    """It is well-formed, and defines every class and colour that it uses."""
    import xml.etree.ElementTree as tree

    picture = line_chart({"a & b": [(0, 1.0), (1, 2.0)], "c": [(0, 2.0)]}, title=EVIL)
    path = write_picture(picture, tmp_path / "one.svg")
    root = tree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert root.findtext(f"{space}title") == EVIL
    style = root.findtext(f"{space}style") or ""
    assert "prefers-color-scheme:dark" in style
    used = set(re.findall(r"var\((--\w+)\)", style))
    assert used and all(f"{name}:" in style for name in used)
    kinds = {kind for part in root.iter() for kind in part.get("class", "").split()}
    assert {"c0", "c1", "curve"} <= kinds
    assert all(f".{kind}" in style for kind in kinds & {"c0", "c1", "curve", "grid", "axis"})


def test_only_pictures_are_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be a picture made by addnorm.report: got str"):
        write_picture("<svg></svg>", tmp_path / "one.svg")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
