"""What a section of the configuration is: a frozen record of plain values that checks itself.

The line of text under each field is its help.
"""

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

from addnorm.errors import ConfigError, nearest

Plain = bool | int | float | str


class Options(Mapping[str, Plain]):
    """Settings of one arrangement or position scheme: an unchangeable table of plain values."""

    def __init__(self, values: Mapping[str, Plain] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, key: str) -> Plain:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, kw_only=True)
class Section:
    """The parts that every section shares: types are checked when it is made."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = fit(getattr(self, item.name), hints[item.name])
            if value is _UNFIT:
                raise ConfigError(
                    f"{self.title()}.{item.name} must be {say_type(hints[item.name])}: "
                    f"got {getattr(self, item.name)!r}."
                )
            object.__setattr__(self, item.name, value)
        self.check()

    def check(self) -> None:
        """Raise ConfigError where the values cannot stand together."""

    @classmethod
    def title(cls) -> str:
        return cls.__name__.removesuffix("Config").lower()

    def need(self, holds: bool, name: str, rule: str, advice: str) -> None:
        """One check: the message names the field, the rule, the value given and what to try."""
        if not holds:
            given = getattr(self, name)
            raise ConfigError(f"{self.title()}.{name} {rule}: got {given!r}. {advice}")

    def need_one_of(self, name: str, choices: Sequence[str]) -> None:
        given = getattr(self, name)
        self.need(
            given in choices, name, f"must be one of {', '.join(choices)}", nearest(given, choices)
        )

    def need_positive(self, *names: str) -> None:
        """Fields that must be above 0 where they are given."""
        for name in names:
            value = getattr(self, name)
            positive = value is None or 0 < value < math.inf
            self.need(positive, name, "must be positive", "Leave it out, or try 1.")

    def left_out(self) -> list[str]:
        """The fields that were not given and are worked out when the model is built."""
        return [item.name for item in dataclasses.fields(self) if getattr(self, item.name) is None]

    def replace(self, /, **changes: Any) -> Self:
        """A copy with some fields changed; an unknown field is an error."""
        known = [item.name for item in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"{self.title()} has no field {name!r}. {nearest(name, known)}")
        return dataclasses.replace(self, **changes)


def describe(section: type[Section]) -> dict[str, str]:
    """The line of help under each field of a section.

    >>> from addnorm.config import ModelConfig
    >>> describe(ModelConfig)["width"]
    'Numbers per position in the stream.'
    """
    kind: Any = section
    return _describe(kind)


@cache
def _describe(section: Any) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[before.target.id] = " ".join(text.value.split())
    return found


_UNFIT = object()


def fits(value: Any, hint: Any) -> bool:
    """Whether a field or option of this type can hold the value.

    >>> fits(3, float), fits(3.5, int), fits(True, int)
    (True, False, False)
    """
    return fit(value, hint) is not _UNFIT


def fit(value: Any, hint: Any) -> Any:
    """The value as a field of this type holds it, or _UNFIT."""
    if isinstance(hint, types.UnionType):
        if value is None or value == "none":
            return None
        return fit(value, next(part for part in hint.__args__ if part is not types.NoneType))
    if hint is Options:
        plain = isinstance(value, Mapping) and all(
            isinstance(key, str) and isinstance(item, Plain) for key, item in value.items()
        )
        return Options(value) if plain else _UNFIT
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        return _UNFIT
    return value if isinstance(value, hint) else _UNFIT


def say_type(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "a word",
        bool: "true or false",
        Options: "a table of plain values",
    }
    if isinstance(hint, types.UnionType):
        part = next(part for part in hint.__args__ if part is not types.NoneType)
        return f"{names[part]}, or left out"
    return names[hint]


def read_value(text: str) -> Any:
    """The value after `=` on the command line: TOML where it is TOML, else a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def write_value(value: Any) -> str:
    """A plain value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = re.sub(r'[\x00-\x1f\x7f"\\]', lambda found: f"\\u{ord(found.group()):04x}", value)
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{write_value(key)} = {write_value(item)}" for key, item in value.items()
        )
        return f"{{ {inner} }}" if inner else "{}"
    return repr(value)
