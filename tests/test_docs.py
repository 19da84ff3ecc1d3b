"""The docs are correct: every Python block runs, every command works, every link resolves."""

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest

from addnorm.cli.main import main, parse
from addnorm.layers.addnorm import ADDNORMS
from tests.test_architecture import MAY_IMPORT

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


FAST_PAGES = ("README.md", "index.md", "text.md")
"""Pages whose blocks run among the fast tests; the others among the slow ones."""


@pytest.mark.trains
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page.name in FAST_PAGES else pytest.mark.slow)
        for page in PAGES
        if blocks(page, "python")
    ],
    ids=lambda page: page.name,
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


def shell_commands() -> list[str]:
    """Return the command lines of addnorm in shell blocks, without comments and pipes."""
    found = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.match(r"(?:.*\| |torchrun .*-m )?addnorm ([a-z].*)", line):
                    found.append(match[1].partition("  #")[0].strip())
    return sorted({command for command in found if "…" not in command})


@pytest.fixture(scope="module")
def folder_of_a_reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands of the docs read before they check their options."""
    folder = tmp_path_factory.mktemp("commands")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "run.toml").write_text("[run]\ntask = 'translate'\n")
    return folder


@pytest.mark.parametrize("command", shell_commands())
def test_commands_have_options_that_exist(
    command: str, folder_of_a_reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_of_a_reader)
    assert parse(shlex.split(command, comments=True)).action


def test_there_are_commands_of_every_kind() -> None:
    verbs = {command.split()[0] for command in shell_commands()}
    assert verbs >= {"train", "translate", "evaluate", "predict", "clinic", "race"}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


MAP = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src/addnorm"


def tree() -> list[str]:
    """Return the files of the tree in the docs, as paths below src/addnorm."""
    lines = MAP.partition("## The tree")[2].partition("src/addnorm/\n")[2].partition("\ntests/")[0]
    folders: list[str] = []
    files = []
    for line in lines.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2 - 1, line.split()[0]
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        else:
            files.append("".join(folders) + name)
    return files


def test_the_tree_in_the_docs_is_the_real_tree() -> None:
    real = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    shown = tree()
    assert len(shown) == len(set(shown))
    assert set(shown) - {"__init__.py"} == real


def walks() -> dict[str, list[tuple[str, str]]]:
    """Return the file and function of every step of the walks in the docs, by command."""
    part = MAP.partition("## Four walks")[2].partition("\n## ")[0]
    found = {}
    for walk in part.split("\n### ")[1:]:
        steps = re.findall(r"^\d+\. `(.+?):(.+?)` — ", walk, re.M)
        assert len(steps) == len(re.findall(r"^\d+\. ", walk, re.M))
        found[walk.splitlines()[0]] = steps
    return found


def test_the_walks_in_the_docs_name_each_file_once() -> None:
    assert len(walks()) == 4
    for command, steps in walks().items():
        files = [file for file, _ in steps]
        assert len(files) > 10 and len(files) == len(set(files)), command


@pytest.mark.parametrize("file", sorted({f for steps in walks().values() for f, _ in steps}))
def test_the_walks_in_the_docs_name_real_functions(file: str) -> None:
    module = importlib.import_module(
        ".".join(("addnorm", *Path(file).with_suffix("").parts)).removesuffix(".__init__")
    )
    for steps in walks().values():
        for name in (name for step, name in steps if step == file):
            value: object = module
            for part in name.split("."):
                value = getattr(value, part)


def test_the_import_table_in_the_docs_is_the_one_that_is_checked() -> None:
    part = MAP.partition("## Who may import whom")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.*?) ?\|$", part, re.M)[1:]
    shown = {
        package: set(allowed.split(", ")) - {""}
        for packages, allowed in rows
        for package in packages.split(", ")
    }
    assert shown == MAY_IMPORT


def test_the_readme_lists_every_arrangement() -> None:
    rows = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Arrangements")[2]
    cells = re.findall(r"^\| (`.*?) \|", rows.partition("\n## ")[0], re.M)
    assert sorted(name for cell in cells for name in re.findall(r"`(.+?)`", cell)) == sorted(
        ADDNORMS
    )


def test_the_formulas_of_the_readme_are_those_of_the_docstrings() -> None:
    rows = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Arrangements")[2]
    cells = re.findall(r"^\| `([\w-]+)` \| ([^|]*?) \|", rows.partition("\n## ")[0], re.M)
    formulas = {name: cell for name, cell in cells if re.match(r"[Nxλ]\S* ?[(+]", cell)}
    assert len(formulas) >= 5
    for name, formula in formulas.items():
        first = (ADDNORMS[name].__doc__ or "").partition("\n")[0]
        assert formula.replace(" ", "") in first.replace(" ", ""), name
