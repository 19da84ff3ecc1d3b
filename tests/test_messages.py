"""Every error message of files, runs, tables and models is matched in a test.

The text of each `raise … Error("…")` is compared with the source of all tests, and with the
examples of its own module, which are tests too: twelve characters in a row must be found there.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = (
    *("files.py", "section.py", "cpu.py", "models/saved.py", "models/transformer.py"),
    *("tabular/saved.py", "tabular/choices.py", "training", "runs", "generate/settings.py"),
    *("layers/masks.py", "layers/cache.py", "layers/context.py", "layers/embeddings.py"),
    *("data/text/files.py", "data/text/tokenizer_file.py", "data/text/tokenizer.py"),
    *("data/delimited.py", "data/table", "cli/main.py", "cli/predict.py", "cli/train.py"),
    *("tasks/base.py", "tasks/classify.py", "tasks/language.py", "tasks/translate.py"),
)
"""Modules and packages whose messages are checked."""
LENGTH = 12
"""Characters in a row that must occur in a test."""


def modules() -> list[Path]:
    places = [ROOT / "src" / "addnorm" / place for place in PLACES]
    found = [sorted(place.rglob("*.py")) if place.is_dir() else [place] for place in places]
    return [module for part in found for module in part]


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def messages(tree: ast.Module) -> list[tuple[int, list[str]]]:
    """Return line and constant parts of the messages of errors that a module raises."""
    rows = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
            continue
        if getattr(node.exc.func, "id", "").endswith("Error"):
            parts = [
                one_line(part.value)
                for argument in node.exc.args
                for part in ast.walk(argument)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            rows.append((node.lineno, [part for part in parts if len(part) >= LENGTH]))
    return [(line, parts) for line, parts in rows if parts]


@pytest.fixture(scope="module")
def tested() -> str:
    """All tests as one text, with regular expressions and adjacent literals as they are read."""
    text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    return one_line(re.sub(r'"\s*\n\s*[rf]*"', "", re.sub(r"\\(.)", r"\1", text)))


def is_matched(parts: list[str], text: str) -> bool:
    return any(
        part[start : start + LENGTH] in text
        for part in parts
        for start in range(len(part) - LENGTH + 1)
    )


@pytest.mark.slow
def test_every_message_is_matched_in_a_test(tested: str) -> None:
    count, missing = 0, []
    for module in modules():
        tree = ast.parse(module.read_text("utf-8"))
        defined = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, defined)]
        examples = one_line(" ".join(ast.get_docstring(node) or "" for node in nodes))
        for line, parts in messages(tree):
            count += 1
            if not is_matched(parts, examples) and not is_matched(parts, tested):
                missing.append(f"{module.relative_to(ROOT)}:{line}: {' … '.join(parts)}")
    assert not missing
    assert count > 150, "the messages are found"
