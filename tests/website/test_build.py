"""The sources of the site: every page has its place, every public name is in the reference."""

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest
import website.numpydoc
from website.build import as_toml, configuration
from website.navigation import SECTIONS, navigation, title_of
from website.reference import MODULES, PACKAGES, write_reference

from tests.test_docs import ROOT

GENERATED = ("reference/", "contributing.md", "changelog.md")


def paths(items: object) -> list[str]:
    """Return the pages of a navigation."""
    if isinstance(items, str):
        return [items]
    if isinstance(items, dict):
        return [path for value in items.values() for path in paths(value)]
    assert isinstance(items, list)
    return [path for item in items for path in paths(item)]


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    shown = paths(navigation(docs))
    assert sorted(shown) == sorted(str(p.relative_to(docs)) for p in docs.rglob("*.md"))


def test_the_sections_are_those_that_readers_look_for() -> None:
    shown = ", ".join(SECTIONS)
    assert shown.startswith("Start, Translate, Language, Classify, Tables, Diagnose, Explain, ")
    assert shown.endswith("Import and export, Scale, Atlas, Reference, Results")


def test_new_pages_are_placed_or_refused(tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured/warmup.md").write_text("# Warm-up: post against pre\n")
    (tmp_path / "index.md").write_text("# Start\n")
    assert navigation(tmp_path) == [{"Start": "index.md"}, {"Results": "measured/warmup.md"}]
    (tmp_path / "stray.md").write_text("# Stray\n")
    with pytest.raises(ValueError, match=r"stray.md is in none"):
        navigation(tmp_path)


def test_a_page_without_a_heading_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("text\n")
    with pytest.raises(ValueError, match=r"must start with a heading"):
        title_of(tmp_path / "page.md")


def test_the_reference_has_every_public_name(tmp_path: Path) -> None:
    write_reference(tmp_path)
    text = "".join(page.read_text(encoding="utf-8") for page in tmp_path.glob("*.md"))
    shown = set(re.findall(r"^::: (.+)$", text, re.M))
    for package in PACKAGES:
        assert shown >= {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    assert shown >= set(MODULES)
    assert "## addnorm train translate" in text and "--nbest NBEST" in text


def test_every_package_with_public_names_is_in_the_reference() -> None:
    source = ROOT / "src/addnorm"
    public = {
        f"addnorm.{init.parent.name}" if init.parent != source else "addnorm"
        for init in [source / "__init__.py", *source.glob("*/__init__.py")]
        if "__all__ = [" in init.read_text(encoding="utf-8")
    }
    assert public == set(PACKAGES)


def test_settings_survive_as_toml() -> None:
    settings = configuration([{"Start": ["index.md", {"A & B: `c`": "a.md"}]}])
    assert tomllib.loads(f"settings = {as_toml(settings)}")["settings"] == settings


def test_docstrings_become_numpydoc() -> None:
    assert doctest.testmod(website.numpydoc).failed == 0
    assert doctest.testmod(website.numpydoc).attempted > 0
