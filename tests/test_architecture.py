"""Rules about the source itself: who imports whom, what an import does, what is never called."""

import ast
import doctest
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import addnorm

ROOT = Path(addnorm.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

_BASE = {"errors", "files"}
_SETTINGS = {*_BASE, "section", "config"}
_MODEL = {*_SETTINGS, "layers", "models", "data"}
_TASK = {*_MODEL, "tabular", "training", "generate", "presets", "metrics", "report"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "cpu": {"errors"},
    "files": {"errors"},
    "metrics": {"errors"},
    "section": {"errors"},
    "config": {*_BASE, "section"},
    "presets": {*_BASE, "config"},
    "layers": {"errors"},
    "models": {*_SETTINGS, "layers", "presets", "cpu"},
    "data": _SETTINGS,
    "training": _MODEL,
    "generate": _MODEL,
    "report": _BASE,
    "clinic": {*_BASE, "models", "layers", "config", "presets", "report"},
    "tabular": {*_SETTINGS, "models", "layers", "data", "training", "metrics", "report", "cpu"},
    "tasks": _TASK,
    "runs": {*_TASK, "tasks", "cpu"},
    "races": {*_TASK, "tasks", "runs", "clinic"},
    "demo": {*_BASE, "data"},
}
"""What each package may import of ours, besides itself; what is not listed is forbidden."""
TOPS = {"web", "cli", "__main__"}
"""These may import anything, and nothing imports them."""


def package_of(path: Path) -> str:
    """The part of the library that a file belongs to: its folder, or itself."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    parts = ("addnorm", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def home(name: str) -> str:
    """The part of the library that `from addnorm import name` reaches."""
    if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file():
        return name
    if name in addnorm._HOMES:
        return addnorm._HOMES[name].split(".")[1]
    return ""  # the version


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and part of every import of ours, wherever it stands: in functions, in branches, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "addnorm":
                    yield node.lineno, [*alias.name.split("."), "__init__"][1]
        elif isinstance(node, ast.ImportFrom):
            where = (node.module or "").split(".")
            if node.level:
                yield node.lineno, "a relative import"
            elif where == ["addnorm"]:
                for alias in node.names:
                    yield node.lineno, home(alias.name)
            elif where[0] == "addnorm":
                yield node.lineno, where[1]


def broken_rules(path: Path, text: str) -> list[str]:
    """Imports of one file that the table forbids."""
    own = package_of(path)
    if own in TOPS or own == "__init__":
        return []
    allowed = MAY_IMPORT.get(own, set()) | {own, ""}
    return [
        f"{path.relative_to(ROOT)}:{line} imports {part}"
        for line, part in imports(ast.parse(text), path)
        if part not in allowed
    ]


# ── Who imports whom ──────────────────────────────────────────────────────────────────────────────


def test_there_are_sources() -> None:
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_follow_the_table(path: Path) -> None:
    assert broken_rules(path, path.read_text(encoding="utf-8")) == []


def test_every_part_has_a_row_in_the_table() -> None:
    parts = {package_of(path) for path in SOURCES}
    assert parts <= set(MAY_IMPORT) | TOPS | {"__init__"}


def test_nothing_imports_the_tops() -> None:
    assert not TOPS & set().union(*MAY_IMPORT.values())


@pytest.mark.parametrize(
    ("file", "text", "count"),
    (
        ("layers/x.py", "from addnorm.config import Config", 1),
        ("layers/x.py", "import addnorm.config", 1),
        ("layers/x.py", "import addnorm", 1),
        ("layers/x.py", "from addnorm import Config, Mask", 1),
        ("layers/x.py", "from addnorm import build", 1),
        ("layers/x.py", "def f():\n    from addnorm.models.build import build", 1),
        ("layers/x.py", "if TYPE_CHECKING:\n    from addnorm.config import Config", 1),
        ("layers/x.py", "from . import norms", 1),
        ("layers/x.py", "from addnorm.layers.norms import NORMS\nimport torch", 0),
        ("layers/x.py", "from addnorm import __version__", 0),
        ("errors.py", "import addnorm.errors, addnorm.cpu", 1),
        ("models/x.py", "from addnorm.cli.main import run", 1),
        ("models/x.py", "from addnorm.training.loss import token_loss", 1),
        ("clinic/x.py", "from addnorm.training.loop import Loop", 1),
        ("unheard/x.py", "from addnorm.errors import nearest", 1),
        ("cli/x.py", "from addnorm.training.loop import Loop", 0),
    ),
)
def test_the_rule_sees_what_it_should(file: str, text: str, count: int) -> None:
    assert len(broken_rules(ROOT / file, text)) == count


# ── What an import does ───────────────────────────────────────────────────────────────────────────

WATCH = """
import json, logging, os, sys, warnings
def state():
    return {
        "environment": dict(os.environ),
        "loggers": sorted(logging.root.manager.loggerDict),
        "handlers": len(logging.root.handlers),
        "filters": len(warnings.filters),
        "path": list(sys.path),
        "working directory": os.getcwd(),
    }
before = state()
import addnorm
after = state()
changed = [name for name in before if before[name] != after[name]]
heavy = [n for n in ("torch", "numpy", "safetensors", "rich", "sentencepiece") if n in sys.modules]
with open(sys.argv[1], "w") as file:
    json.dump({"changed": changed, "heavy": heavy}, file)
"""


@pytest.mark.process
def test_an_import_is_quiet_and_light(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "-W", "error", "-c", WATCH, str(found)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads(found.read_text()) == {"changed": [], "heavy": []}
    assert {path.name for path in tmp_path.iterdir()} == {"found.json"}


def test_every_public_name_is_there() -> None:
    names = addnorm.__all__
    assert len(names) == len(set(names)) <= 25
    assert sorted(names) == sorted(addnorm._HOMES) == dir(addnorm)
    for name in names:
        assert getattr(addnorm, name) is not None, name
    assert addnorm.__version__.count(".") == 2


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.name: node.module
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == addnorm._HOMES


def test_the_types_are_marked_as_there() -> None:
    assert (ROOT / "py.typed").is_file()


# ── What is never called ──────────────────────────────────────────────────────────────────────────

NEVER_CALLED = {"eval", "exec", "compile", "__import__", "breakpoint"}
NEVER_IMPORTED = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NEVER_REACHED = {"torch.load", "numpy.load", "np.load", "os.system", "os.putenv", "os.setenv"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def dangers(text: str) -> list[str]:
    """Calls and imports that could run what is read, or change the process around us."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in NEVER_CALLED else []
        if isinstance(node, ast.Attribute) and dotted(node) in NEVER_REACHED:
            found.append(dotted(node))
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in NEVER_IMPORTED]
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in full if name in NEVER_REACHED]
            found += [node.module] if node.module.split(".")[0] in NEVER_IMPORTED else []
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant):
            found.append("assert of a constant")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_that_is_read_is_executed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert dangers(text) == []
    for words in ("pickle.load", "torch.load(", "yaml.load"):
        assert words not in text


@pytest.mark.parametrize(
    "text",
    (
        "eval('1')",
        "exec(code)",
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "read = torch.load",
        "from torch import load",
        "x = np.load(path)",
        "__import__('os')",
    ),
)
def test_the_rule_sees_dangers(text: str) -> None:
    assert dangers(text)


def test_the_rule_lets_evaluation_mode_be() -> None:
    assert dangers("model.eval()\nre.compile('a')\ntomllib.load(file)") == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_environment_decides_nothing(path: Path) -> None:
    if name_of(path) == "addnorm.training.parallel":
        return  # torchrun tells its workers who they are in no other way
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            assert dotted(node) not in ("os.environ", "os.getenv")


# ── Examples ──────────────────────────────────────────────────────────────────────────────────────

MODULES = [name_of(path) for path in SOURCES if path.name != "__main__.py"]


@pytest.mark.trains
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": torch})
    assert results.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    found = [
        example
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        for example in test.examples
    ]
    assert len(found) >= 10


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_file_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)) or not text.strip()
