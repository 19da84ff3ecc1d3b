"""Rules about the source code: imports, names, side effects, forbidden calls, documentation."""

import ast
import doctest
import functools
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import addnorm

ROOT = Path(addnorm.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in SOURCES}

_BASE = {"errors", "files"}
_SETTINGS = {*_BASE, "section", "config"}
_MODEL = {*_SETTINGS, "layers", "models", "data"}
_TASK = {*_MODEL, "tabular", "lens", "training", "generate", "presets", "metrics", "report"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "cpu": {"errors"},
    "doctor": {"errors", "cpu"},
    "files": {"errors"},
    "metrics": {"errors"},
    "section": {"errors"},
    "config": {*_BASE, "section"},
    "presets": {*_BASE, "config", "section"},
    "layers": {"errors"},
    "models": {*_SETTINGS, "layers", "presets", "cpu", "report"},
    "data": _SETTINGS,
    "training": _MODEL,
    "generate": {*_MODEL, "cpu"},
    "report": _BASE,
    "clinic": {*_BASE, "models", "layers", "config", "presets", "report", "cpu"},
    "lens": {*_BASE, "models", "layers", "config", "report", "metrics"},
    "tabular": {
        *_SETTINGS,
        *("models", "layers", "data", "training", "lens", "metrics", "report", "cpu"),
    },
    "tasks": _TASK,
    "runs": {*_TASK, "tasks", "cpu", "clinic", "interop"},
    "races": {*_TASK, "tasks", "runs", "clinic"},
    "demo": {*_BASE, "data"},
    "interop": {*_MODEL, "generate", "presets", "cpu"},
}
"""The parts of addnorm that each package may import besides itself; all others are forbidden."""
ENTRY_POINTS = {"web", "cli", "__main__"}
"""These may import anything, and nothing may import them."""


def package_of(path: Path) -> str:
    """Return the package that a file belongs to: its folder, or its own name."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    parts = ("addnorm", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def home(name: str) -> str:
    """Return the package that `from addnorm import name` imports from."""
    if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file():
        return name
    if name in addnorm._HOMES:
        return addnorm._HOMES[name].split(".")[1]
    return ""  # the version


@functools.cache
def parse(text: str) -> ast.Module:
    """Return the syntax tree of a source file, which several rules look at."""
    return ast.parse(text)


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and package of every import of addnorm, also inside functions and branches."""
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
    """Return the imports of a file that the table forbids."""
    own = package_of(path)
    if own in ENTRY_POINTS or own == "__init__":
        return []
    allowed = MAY_IMPORT.get(own, set()) | {own, ""}
    return [
        f"{path.relative_to(ROOT)}:{line} imports {part}"
        for line, part in imports(parse(text), path)
        if part not in allowed
    ]


# ── Allowed imports ───────────────────────────────────────────────────────────────────────────────


def test_there_are_sources() -> None:
    assert len(SOURCES) > 20


def test_imports_follow_the_table() -> None:
    assert [line for path, text in TEXTS.items() for line in broken_rules(path, text)] == []


def test_every_package_has_a_row_in_the_table() -> None:
    parts = {package_of(path) for path in SOURCES}
    assert parts <= set(MAY_IMPORT) | ENTRY_POINTS | {"__init__"}


def test_nothing_imports_the_entry_points() -> None:
    assert not ENTRY_POINTS & set().union(*MAY_IMPORT.values())


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
        ("lens/x.py", "from addnorm.training.loop import Loop", 1),
        ("unknown/x.py", "from addnorm.errors import nearest", 1),
        ("cli/x.py", "from addnorm.training.loop import Loop", 0),
    ),
)
def test_the_rule_detects_forbidden_imports(file: str, text: str, count: int) -> None:
    assert len(broken_rules(ROOT / file, text)) == count


# ── One name, one meaning ─────────────────────────────────────────────────────────────────────────

COMMANDS = {"cost", "explain", "generate", "race", "train", "translate", "tune"}
"""Commands of cli/ that have the name of the function they call."""


def defined_names(body: list[ast.stmt]) -> set[str]:
    """Return the names of the classes, functions and constants that a module defines."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            names |= {part.id for part in parts if isinstance(part, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            names |= defined_names([*node.body, *node.orelse])
    return {name for name in names if not name.startswith("__")}


def repeated_names(texts: dict[str, str]) -> dict[str, list[str]]:
    """Return the names that are defined in two or more modules, with the modules."""
    modules: dict[str, list[str]] = {}
    for module, text in texts.items():
        for name in defined_names(parse(text).body):
            is_command = module.startswith("addnorm.cli.") and name in COMMANDS
            modules.setdefault(name, []).extend([] if is_command else [module])
    return {name: places for name, places in modules.items() if len(places) > 1}


def test_no_name_is_defined_in_two_modules() -> None:
    repeated = repeated_names({name_of(path): text for path, text in TEXTS.items()})
    assert repeated == {}


@pytest.mark.parametrize(
    ("one", "two", "repeated"),
    (
        ("def f(): ...", "class f: ...", {"f"}),
        ("_SIZE, B = 1, 2", "_SIZE: int = 3", {"_SIZE"}),
        ("if TYPE_CHECKING:\n    T = int", "T = str", {"T"}),
        ("from a import f", "def f(): ...", set()),
        ("def f():\n    x = 1", "x = 2", set()),
        ("__all__ = []", "__all__ = []", set()),
        ("def cost(): ...", "def cost(): ...", {"cost"}),
    ),
)
def test_the_rule_detects_repeated_names(one: str, two: str, repeated: set[str]) -> None:
    assert set(repeated_names({"addnorm.a": one, "addnorm.b": two})) == repeated
    shared = repeated_names({"addnorm.a": one, "addnorm.cli.b": two})
    assert set(shared) == repeated - {"cost"}


# ── Side effects of imports ───────────────────────────────────────────────────────────────────────

IMPORT_SCRIPT = """
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
def test_an_import_has_no_side_effects_and_loads_no_torch(tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    command = [sys.executable, "-W", "error", "-c", IMPORT_SCRIPT, str(report)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert json.loads(report.read_text()) == {"changed": [], "heavy": []}
    assert {path.name for path in tmp_path.iterdir()} == {"found.json"}


def test_every_public_name_can_be_imported() -> None:
    names = addnorm.__all__
    assert len(names) == len(set(names)) <= 25
    assert sorted(names) == sorted(addnorm._HOMES) == dir(addnorm)
    for name in names:
        assert getattr(addnorm, name) is not None, name
    assert addnorm.__version__.count(".") == 2


def test_type_checkers_see_the_public_names() -> None:
    tree = parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.name: node.module
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == addnorm._HOMES


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "py.typed").is_file()


# ── Forbidden calls ───────────────────────────────────────────────────────────────────────────────

NEVER_CALLED = {"eval", "exec", "compile", "__import__", "breakpoint"}
NEVER_IMPORTED = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NEVER_REACHED = {"torch.load", "numpy.load", "np.load", "os.system", "os.putenv", "os.setenv"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def dangers(text: str) -> list[str]:
    """Return calls and imports that could execute a file's content or change the process."""
    dangers_found = []
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            dangers_found += [node.func.id] if node.func.id in NEVER_CALLED else []
        if isinstance(node, ast.Attribute) and dotted(node) in NEVER_REACHED:
            dangers_found.append(dotted(node))
        if isinstance(node, ast.Import):
            dangers_found += [a.name for a in node.names if a.name.split(".")[0] in NEVER_IMPORTED]
        if isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            dangers_found += [name for name in full if name in NEVER_REACHED]
            dangers_found += [node.module] if node.module.split(".")[0] in NEVER_IMPORTED else []
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant):
            dangers_found.append("assert of a constant")
    return dangers_found


def test_nothing_that_is_read_is_executed() -> None:
    found = {name_of(path): dangers(text) for path, text in TEXTS.items()}
    assert {name: calls for name, calls in found.items() if calls} == {}
    for words in ("pickle.load", "torch.load(", "yaml.load"):
        assert [name_of(path) for path, text in TEXTS.items() if words in text] == []


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
def test_the_rule_detects_dangerous_calls(text: str) -> None:
    assert dangers(text)


def test_the_rule_accepts_evaluation_mode() -> None:
    assert dangers("model.eval()\nre.compile('a')\ntomllib.load(file)") == []


READ_THE_ENVIRONMENT = {"addnorm.training.parallel", "addnorm.cpu"}
"""torchrun's ranks and oneDNN's limit of instructions are in environment variables only."""


def test_no_environment_variable_is_read() -> None:
    readers = {
        name_of(path)
        for path, text in TEXTS.items()
        for node in ast.walk(parse(text))
        if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.getenv")
    }
    assert readers <= READ_THE_ENVIRONMENT


# ── Examples ──────────────────────────────────────────────────────────────────────────────────────

MODULES = [name_of(path) for path in SOURCES if path.name != "__main__.py"]


@pytest.mark.trains
@pytest.mark.parametrize("name", [name_of(path) for path, text in TEXTS.items() if ">>> " in text])
def test_examples_in_docstrings_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": torch})
    assert results.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = [
        example
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        for example in test.examples
    ]
    assert len(examples) >= 10


@pytest.mark.parametrize("name", addnorm.__all__)
def test_public_names_document_their_parameters_and_have_an_example(name: str) -> None:
    public = getattr(addnorm, name)
    text = inspect.getdoc(public) or ""
    _, heading, example = text.partition("Examples\n--------\n")
    assert heading and doctest.DocTestParser().get_examples(example)
    if name in ("AddnormError", "lens", "presets"):
        return  # an exception and modules have no signature of their own
    parameters = set(inspect.signature(public).parameters)
    entries = re.findall(r"^(\w+(?:, \w+)*)(?: : .*)?$", text.partition("Examples")[0], re.M)
    assert parameters <= {word for entry in entries for word in entry.split(", ")}


def test_every_file_has_a_docstring() -> None:
    without = [path for path, text in TEXTS.items() if not ast.get_docstring(parse(text))]
    assert [name_of(path) for path in without if TEXTS[path].strip()] == []
