"""The sections of the site, and the pages in each: every page of docs/ belongs to one."""

import re
from pathlib import Path

NavItem = str | dict[str, "str | list[NavItem]"]

SECTIONS: dict[str, list[str]] = {
    "Start": ["index.md", "text.md", "python.md"],
    "Translate": ["translate.md"],
    "Language": ["language.md"],
    "Classify": ["classify.md"],
    "Tables": ["tables.md", "instant.md"],
    "Diagnose": ["clinic.md"],
    "Explain": ["lens.md"],
    "Import and export": ["interop.md"],
    "Scale": ["scaling.md"],
    "Atlas": [
        *("atlas/index.md", "atlas/arrangements/*", "atlas/norms/*", "atlas/positions/*"),
        *("atlas/ffns/*", "residuals.md"),
    ],
    "Reference": [
        *("reference/index.md", "reference/command-line.md", "reference/addnorm.md"),
        *("reference/*.md", "network.md", "architecture.md"),
        *("decisions/*", "contributing.md", "changelog.md"),
    ],
    "Results": ["results/*.md", "measured/*.md"],
}
"""Pages of each section, as patterns below docs/; a page belongs to the first that it matches."""
GROUPS = {
    "atlas/arrangements": "Arrangements",
    "atlas/norms": "Norms",
    "atlas/positions": "Positions",
    "atlas/ffns": "Feed-forward networks",
    "decisions": "Design decisions",
}
"""Folders that are a group of their own inside their section."""


def title_of(page: Path) -> str:
    """Return the first heading of a page, without markup and without what follows a colon."""
    match = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.M)
    if not match:
        raise ValueError(f"a page must start with a heading: {page} has none. Try: # Title")
    return match[1].replace("`", "").partition(": ")[0].partition(" — ")[0]


def navigation(docs: Path) -> list[NavItem]:
    """Return the navigation over all pages of a folder, in the order of SECTIONS."""
    placed: set[Path] = set()
    sections: list[NavItem] = []
    for section, patterns in SECTIONS.items():
        pages = []
        for pattern in patterns:
            found = sorted(docs.glob(pattern), key=lambda page: (page.name != "index.md", page))
            pages += [page for page in found if page.suffix == ".md" and page not in placed]
            placed.update(pages)
        if pages:
            sections.append({section: _section(docs, section, pages)})
    missing = sorted(set(docs.rglob("*.md")) - placed)
    if missing:
        names = ", ".join(str(page.relative_to(docs)) for page in missing)
        raise ValueError(f"every page must be in a section of the site: {names} is in none.")
    return sections


def _section(docs: Path, section: str, pages: list[Path]) -> "str | list[NavItem]":
    if len(pages) == 1:
        return str(pages[0].relative_to(docs))
    items: list[NavItem] = []
    groups: dict[str, list[NavItem]] = {}
    for page in pages:
        path = page.relative_to(docs)
        title = "Overview" if page.name == "index.md" and section != "Start" else title_of(page)
        group = GROUPS.get(path.parent.as_posix())
        if group is None:
            items.append({title: str(path)})
        elif group not in groups:
            groups[group] = [{title: str(path)}]
            items.append({group: groups[group]})
        else:
            groups[group].append({title: str(path)})
    return items
