"""Every error message of addnorm is matched in a test.

The text of each `…Error("…")`, raised or returned, is compared with the source of all tests, and
with the examples of its own module, which are tests too: twelve characters in a row must be found
there.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "addnorm"
LENGTH = 12
"""Characters in a row that must occur in a test."""


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def messages(tree: ast.Module) -> list[tuple[int, list[str]]]:
    """Return line and constant parts of the messages of errors that a module raises or returns."""
    rows = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
            parts = [
                one_line(part.value)
                for argument in node.args
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
    for module in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(module.read_text("utf-8"))
        defined = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, defined)]
        examples = one_line(" ".join(ast.get_docstring(node) or "" for node in nodes))
        for line, parts in messages(tree):
            count += 1
            if not is_matched(parts, examples) and not is_matched(parts, tested):
                missing.append(f"{module.relative_to(ROOT)}:{line}: {' … '.join(parts)}")
    assert not missing
    assert count > 600, "the messages are found"
