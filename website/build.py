"""Build the site: `python -m website.build`, or `make docs`.

The pages of docs/ are copied to build/docs, where the reference is generated beside them;
zensical renders them to build/site in strict mode, and the result is checked (website.check).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from website.check import problems_of
from website.navigation import NavItem, navigation, title_of
from website.reference import write_reference

ROOT = Path(__file__).parent.parent
STAGE, SITE = ROOT / "build/docs", ROOT / "build/site"
COPIED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files outside docs/ that are pages of the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def stage() -> None:
    """Copy all pages to build/docs, with links that stay inside the site."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGE)
    for page in STAGE.rglob("*.md"):
        source = ROOT / "docs" / page.relative_to(STAGE)
        page.write_text(_with_inner_links(source, page), encoding="utf-8")
    for name, copied in COPIED.items():
        page = STAGE / copied
        page.write_text(_with_inner_links(ROOT / name, page), encoding="utf-8")
    for picture in STAGE.rglob("*.svg"):  # on the site they stand on the page itself
        text = picture.read_text(encoding="utf-8")
        picture.write_text(text.replace("background:var(--ground);", "", 1), encoding="utf-8")
    write_reference(STAGE / "reference")


def _with_inner_links(source: Path, page: Path) -> str:
    """Return the text of a page; a link to a file that is no part of the site is its text only."""

    def replace(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        if target.startswith(("http:", "https:")):
            return match[0]
        path = (source.parent / target).resolve()
        if path.is_dir() and (path / "README.md").exists():
            path /= "README.md"
        staged = _staged(path)
        if staged is None:
            return str(text)
        if text.endswith(".md"):
            text = title_of(path)
        return f"{picture}[{text}]({_relative(staged, page.parent)}{anchor or ''})"

    return LINK.sub(replace, source.read_text(encoding="utf-8"))


def _staged(path: Path) -> Path | None:
    """Return where a file of the repository is in build/docs; None if it is no page of the site."""
    if path.parent == ROOT and path.name in COPIED:
        return STAGE / COPIED[path.name]
    if path == ROOT / "README.md":
        return STAGE / "index.md"
    docs = ROOT / "docs"
    return STAGE / path.relative_to(docs) if path.is_relative_to(docs) and path.is_file() else None


def _relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


def configuration(nav: list[NavItem]) -> dict[str, object]:
    """Return the settings of zensical: no fonts, scripts or styles from the network."""
    options = {
        "docstring_style": "numpy",
        "docstring_options": {"warnings": False},  # ruff and the tests check docstrings
        "extensions": [str(ROOT / "website/docstrings.py")],
        "show_source": False,
        "show_root_heading": True,
        "show_root_full_path": True,
        "show_signature_annotations": True,
        "separate_signature": True,
        "signature_crossrefs": True,
        "line_length": 88,
        "heading_level": 2,
        "members_order": "source",
        "filters": ["!^_"],
        "show_if_no_docstring": False,
        "docstring_section_style": "list",
        "inherited_members": False,
    }
    schemes = [
        ("(prefers-color-scheme: light)", "default", "dark", "sun"),
        ("(prefers-color-scheme: dark)", "slate", "light", "moon"),
    ]
    palette = [
        {
            "media": media,
            "scheme": scheme,
            "toggle": {"icon": f"lucide/{icon}", "name": f"Switch to {other} mode"},
        }
        for media, scheme, other, icon in schemes
    ]
    return {
        "project": {
            "site_name": "addnorm",
            "site_description": "Build, train, examine and explain Transformers.",
            "docs_dir": "docs",
            "site_dir": "site",
            "use_directory_urls": False,
            "nav": nav,
            "extra_css": ["site.css"],
            "extra": {"generator": False},
            "theme": {
                "font": False,
                "language": "en",
                "palette": palette,
                "features": [
                    "content.code.copy",
                    "navigation.indexes",
                    "navigation.footer",
                    "navigation.top",
                    "search.highlight",
                ],
            },
            "plugins": {
                "search": {},
                "mkdocstrings": {"handlers": {"python": {"paths": ["../src"], "options": options}}},
            },
        }
    }


def as_toml(value: object) -> str:
    """Return a value as inline TOML, whose strings and numbers are written as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Build the site and check it; return the exit code."""
    argparse.ArgumentParser(prog="python -m website.build", description=__doc__).parse_args()
    started = time.monotonic()
    stage()
    settings = configuration(navigation(STAGE))
    lines = [f"{key} = {as_toml(value)}" for key, value in settings["project"].items()]  # type: ignore[attr-defined]
    config = STAGE.parent / "zensical.toml"
    config.write_text("[project]\n" + "\n".join(lines) + "\n", encoding="utf-8")
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    command += ["--config-file", str(config)]
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
    environment = os.environ | {"PYTHONPATH": paths}
    if subprocess.run(command, cwd=STAGE.parent, env=environment, check=False).returncode:
        return 1
    problems = problems_of(SITE)
    for problem in problems:
        print(problem, file=sys.stderr)
    pages = len(list(SITE.rglob("*.html")))
    print(f"{SITE / 'index.html'}: {pages} pages in {time.monotonic() - started:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
