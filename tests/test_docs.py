"""What the docs show works: every Python block runs, every command line is one that works."""

import re
import shlex
from pathlib import Path

import pytest

from addnorm.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.trains
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_python_blocks_run_in_order(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # pages write files and runs to the current directory
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name} block {number + 1}", "exec"), names)
    shown = capsys.readouterr().out
    for promised in re.findall(r"^prints `(.*?)`", page.read_text(encoding="utf-8"), re.M):
        assert promised in shown


@pytest.mark.parametrize(
    "command",
    [
        line[2:]
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("$ addnorm ")
    ],
)
def test_commands_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_the_tree_in_the_docs_is_the_real_tree() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    files = [
        path.relative_to(ROOT / "src/addnorm")
        for path in (ROOT / "src/addnorm").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]
    tree = page.partition("## The tree")[2]
    missing = [str(path) for path in files if f" {path.name} " not in tree]
    assert not missing
