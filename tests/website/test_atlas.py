"""The atlas: a page for every variant, whose text is what the docstrings and measurements say."""

import json
import re
from pathlib import Path

import pytest
from website.atlas import (
    FOLDER,
    MEASURED,
    SIZE,
    UNFOLLOWED,
    index_page,
    page_of,
    settings_of,
    variants,
    with_arxiv_links,
)
from website.atlas_measure import DEPTHS, profile
from website.atlas_notes import KINDS

from addnorm import ModelConfig
from addnorm.models.drawing import draw
from addnorm.report import write_picture
from tests.test_docs import ROOT

PAGES = [(kind, name) for kind in KINDS for name in variants(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_has_a_page_and_a_note(kind: str) -> None:
    """If this fails for a new variant: a note in website/atlas_notes.py, then `make atlas`."""
    names = sorted(variants(kind))
    assert sorted(KINDS[kind][2]) == names
    assert sorted(page.stem for page in (FOLDER / kind).glob("*.md")) == names


def test_the_text_of_every_page_is_up_to_date() -> None:
    """If this fails after a change of a docstring: python -m website.atlas --text."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    stale = [
        f"{kind}/{name}"
        for kind, name in PAGES
        if (FOLDER / kind / f"{name}.md").read_text(encoding="utf-8")
        != page_of(kind, name, measured)
    ]
    assert stale == []
    assert (FOLDER / "index.md").read_text(encoding="utf-8") == index_page()


def test_drawings_are_up_to_date(tmp_path: Path) -> None:
    for name in ("post", "dual"):
        picture = draw(ModelConfig(**SIZE | settings_of("arrangements", name)))
        new = write_picture(picture, tmp_path / f"{name}.svg").read_bytes()
        assert (FOLDER / f"pictures/arrangements-{name}-box.svg").read_bytes() == new


def test_pages_have_what_a_reader_looks_for() -> None:
    for kind, name in PAGES:
        text = (FOLDER / kind / f"{name}.md").read_text(encoding="utf-8")
        for part in ("## Where it is", "by depth", "## What it costs", "## Use it", "```python"):
            assert part in text, (kind, name, part)
        pictures = re.findall(r"\]\((\.\./pictures/.+?\.svg)\)", text)
        assert len(pictures) >= 3
        assert all((FOLDER / kind / path).resolve().is_file() for path in pictures)


def test_every_arrangement_names_its_source() -> None:
    pages = (FOLDER / "arrangements").glob("*.md")
    texts = {page.stem: page.read_text(encoding="utf-8") for page in pages}
    assert [
        name for name, text in texts.items() if not re.search(r"20[12]\d \(|20[12]\d,", text)
    ] == []


def test_the_atlas_stays_small() -> None:
    size = sum(path.stat().st_size for path in (ROOT / "docs/atlas").rglob("*") if path.is_file())
    assert size < 3_000_000


def test_arxiv_numbers_become_links() -> None:
    assert with_arxiv_links("Xiong et al. 2020 (2002.04745); 0.81") == (
        "Xiong et al. 2020 ([arXiv:2002.04745](https://arxiv.org/abs/2002.04745)); 0.81"
    )


def test_measurements_of_a_shallow_model() -> None:
    small = profile(2, mode="decoder", addnorm="pre")
    assert len(small.gradients) == 2 and all(value > 0 for value in small.gradients)
    assert [len(row) for row in small.shares] == [3, 3] and small.is_followed
    assert 0.9 < sum(small.shares[-1]) < 1.1  # independent branches: their variances add
    assert small.shares[0][2] == 0  # the second block has not written yet
    assert not profile(2, mode="decoder", addnorm="none").shares
    assert DEPTHS == (6, 18, 64)


def test_pages_say_where_the_trace_could_not_follow_the_stream() -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    lost = {
        name
        for kind, name in PAGES
        if measured[kind][name]["depth"]["64"]["input"] is None and name != "none"
    }
    assert lost == set(UNFOLLOWED)
