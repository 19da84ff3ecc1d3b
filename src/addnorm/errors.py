"""What goes wrong, in words a user can act on: what must hold, what was given, what to try."""

import importlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import TypeVar

Value = TypeVar("Value")


class AddnormError(Exception):
    """Everything this library raises on purpose."""


class ConfigError(AddnormError, ValueError):
    """A configuration that cannot be: an unknown name, an impossible size."""


class InputError(AddnormError, ValueError):
    """A tensor, mask or token id that the model cannot take."""


class SavedError(AddnormError, OSError):
    """A file or directory that is missing, damaged, foreign or from another version."""


class ExtraError(AddnormError, ImportError):
    """A part that needs a package which is not installed; the message names the extra."""


def require(package: str, extra: str) -> ModuleType:
    """Import a package of an extra where it is used, or say which extra has it.

    >>> require("json", "text").__name__
    'json'
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not package.startswith(error.name):
            raise  # the package is there, and lacks something itself
        raise ExtraError(
            f"this needs the package {package}, which is not installed. "
            f"Try: pip install 'addnorm[{extra}]'."
        ) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that helps after an unknown name: the nearest known one, or all of them.

    >>> nearest("prelayer", ["pre", "post", "layer"])
    "Did you mean 'layer'?"
    """
    known = sorted(known)
    close = get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."


def choose(question: str, name: str, table: Mapping[str, Value]) -> Value:
    """The row of a table of variants that a configuration asks for by name."""
    if name not in table:
        raise ConfigError(f"{question} has no choice {name!r}. {nearest(name, table)}")
    return table[name]
