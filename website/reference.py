"""Pages of the reference: every public name, and every verb of the command line."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from addnorm.cli.main import make_parser

PACKAGES = {
    "addnorm": "The front door: what most programs need.",
    "addnorm.clinic": "Examine any PyTorch Transformer, and watch one while it trains.",
    "addnorm.lens": "Why a model predicts what it predicts.",
    "addnorm.tabular": "scikit-learn estimators for tables.",
    "addnorm.races": "Fair comparisons of settings.",
    "addnorm.generate": "Decoding: translations, continuations, scores.",
    "addnorm.report": "Self-contained HTML pages and SVG charts.",
}
"""Packages with public names (`__all__`), and what they are for."""
MODULES = {
    "addnorm.presets": "Published configurations, each a function with its source.",
    "addnorm.errors": "The kinds of errors, and the exit code of each.",
    "addnorm.layers.addnorm": "The arrangements: one class for each, beside its formula.",
    "addnorm.layers.norms": "The norms.",
    "addnorm.layers.positions": "The position schemes.",
    "addnorm.layers.feedforward": "The feed-forward networks.",
    "addnorm.layers.attention": "Attention, with every mask and position scheme.",
    "addnorm.layers.masks": "One mask type, with one polarity.",
    "addnorm.layers.cache": "Keys and values of positions already decoded.",
    "addnorm.layers.key_value": "Learned keys and values in place of a feed-forward network.",
    "addnorm.layers.residual_mlp": "The smallest network with residual connections.",
}
"""Modules all of whose public names are documented."""


def write_reference(folder: Path) -> None:
    """Write a page for each package and module, one for the command line, and an overview."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for package, about in PACKAGES.items():
        names = importlib.import_module(package).__all__
        body = "\n\n".join(f"::: {package}.{name}" for name in sorted(names, key=str.lower))
        rows.append(_write(folder, package, about, body))
    for module, about in MODULES.items():
        options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false"
        rows.append(_write(folder, module, about, f"::: {module}\n{options}"))
    (folder / "command-line.md").write_text(command_line(), encoding="utf-8")
    rows.append("| [Command line](command-line.md) | Every verb with its options. |")
    table = "\n".join(["| name | content |", "|---|---|", *rows])
    text = f"# Reference\n\nEvery public name, generated from the docstrings.\n\n{table}\n"
    (folder / "index.md").write_text(text, encoding="utf-8")


def _write(folder: Path, name: str, about: str, body: str) -> str:
    """Write one page, and return its row of the overview."""
    page = f"{name}.md"
    (folder / page).write_text(f"# `{name}`\n\n{about}\n\n{body}\n", encoding="utf-8")
    return f"| [`{name}`]({page}) | {about} |"


def command_line() -> str:
    """Return the page of the command line: the help of every verb."""
    parts = [
        "# Command line",
        "",
        "The help of every verb, as `addnorm VERB --help` prints it.",
        "",
    ]
    for name, parser in _iter_verbs(make_parser(), ""):
        parts += [f"## addnorm {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(parts)


def _iter_verbs(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, Any]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield f"{path}{name}", below
                yield from _iter_verbs(below, f"{path}{name} ")
