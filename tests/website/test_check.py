"""The check of a built site finds files from the network and links that lead nowhere."""

from pathlib import Path

import pytest
from website.check import problems_of

WHOLE = """<html><head><link rel="stylesheet" href="site.css"><link rel="canonical" href="https://a.b">
</head><body><a href="b/other.html#there">x</a><a href="https://arxiv.org">y</a>
<a href="#here" id="here">z</a><img src="data:image/png;base64,AA"></body></html>"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text(WHOLE)
    (tmp_path / "site.css").write_text("body{background:url(paper.png)}")
    (tmp_path / "b/other.html").write_text("<h1 id='there'>x</h1><a href='../index.html'>back</a>")
    return tmp_path


def test_a_whole_site_has_no_problems(site: Path) -> None:
    assert problems_of(site) == []


@pytest.mark.parametrize(
    "markup",
    [
        '<script src="https://example.com/x.js"></script>',
        '<link rel="stylesheet" href="//example.com/x.css">',
        '<img src="http://example.com/x.png">',
        '<link rel="preconnect" href="https://fonts.example.com">',
    ],
)
def test_files_from_the_network_are_found(site: Path, markup: str) -> None:
    (site / "b/other.html").write_text(f"<h1 id='there'>x</h1>{markup}")
    (problem,) = problems_of(site)
    assert problem.startswith("b/other.html loads ") and "from the network" in problem


@pytest.mark.parametrize("link", ["missing.html", "../index.html#nowhere", "#nowhere", "none.svg"])
def test_links_that_lead_nowhere_are_found(site: Path, link: str) -> None:
    (site / "b/other.html").write_text(f"<h1 id='there'>x</h1><a href='{link}'>y</a>")
    assert problems_of(site) == [f"b/other.html links to {link}, which does not exist."]


def test_styles_from_the_network_are_found(site: Path) -> None:
    (site / "site.css").write_text("@import 'https://example.com/fonts.css';")
    assert problems_of(site) == ["site.css loads https://example.com/fonts.css from the network."]
