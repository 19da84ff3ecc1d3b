"""Exceptions. Each message says what must hold, what was given, and what to try."""

import importlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import TypeVar

Value = TypeVar("Value")


class AddnormError(Exception):
    """Base class of all exceptions that addnorm raises.

    Examples
    --------
    >>> from addnorm import presets
    >>> try:
    ...     presets.gpt2("smal")
    ... except AddnormError as error:
    ...     print(error)
    gpt2 has no size 'smal'. Did you mean 'small'?
    """


class ConfigError(AddnormError, ValueError):
    """An invalid configuration: an unknown name, an impossible size."""


class InputError(AddnormError, ValueError):
    """An invalid input: a tensor, mask, token id or file content that cannot be used."""


class SavedError(AddnormError, OSError):
    """A file or directory that is missing, damaged, of another kind or of another version."""


class ExtraError(AddnormError, ImportError):
    """A package that is not installed; the message names the extra that includes it."""


def require(package: str, extra: str) -> ModuleType:
    """Import and return a package of an extra; raise ExtraError if it is not installed.

    >>> require("json", "text").__name__
    'json'
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not package.startswith(error.name):
            raise  # the package is installed, but one that it needs is not
        raise ExtraError(
            f"this needs the package {package}, which is not installed. "
            f"Try: pip install 'addnorm[{extra}]'."
        ) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known name, or all of them.

    >>> nearest("prelayer", ["pre", "post", "layer"])
    "Did you mean 'layer'?"
    """
    known = sorted(known)
    close = get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."


def choose(question: str, name: str, table: Mapping[str, Value]) -> Value:
    """Return the entry of a table, or raise a ConfigError that says `question` has no such choice.

    >>> choose("model.norm", "rms", {"layer": 1, "rms": 2})
    2
    """
    if name not in table:
        raise ConfigError(f"{question} has no choice {name!r}. {nearest(name, table)}")
    return table[name]
