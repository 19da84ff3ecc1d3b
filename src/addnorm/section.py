"""The base class of configuration sections: frozen records of plain values, checked when created.

The line of text under each field of a section is its help, and its entry in the docstring.
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
MAX_KEY_PARTS = 64
"""Parts that a dotted key of a TOML file may have."""
_LONG_KEY = re.compile(
    r"""(?:^|[\[{,])[ \t]*(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*)"""
    f"{{{MAX_KEY_PARTS}}}",
    re.MULTILINE,
)
"""The beginning of a key with too many parts, at the start of a line or in an inline table."""


class Options(Mapping[str, Plain]):
    """Immutable, hashable mapping of plain values: the options of an arrangement or the like."""

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
    """Base class of the sections; creating one checks the type of every field."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = convert(getattr(self, item.name), hints[item.name])
            if value is _INVALID:
                raise ConfigError(
                    f"{self.title()}.{item.name} must be {describe_type(hints[item.name])}: "
                    f"got {getattr(self, item.name)!r}."
                )
            object.__setattr__(self, item.name, value)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if a value is out of range or contradicts another."""

    @classmethod
    def title(cls) -> str:
        """Return the name of the section in a TOML file."""
        return cls.__name__.removesuffix("Config").lower()

    def require(self, holds: bool, name: str, rule: str, advice: str) -> None:
        """Raise ConfigError with the field, the rule, its value and what to try, unless `holds`.

        Parameters
        ----------
        holds : whether the value is valid
        name : the field
        rule : what must hold
        advice : what to try
        """
        if not holds:
            value = getattr(self, name)
            raise ConfigError(f"{self.title()}.{name} {rule}: got {value!r}. {advice}")

    def require_one_of(self, name: str, choices: Sequence[str]) -> None:
        """Raise ConfigError unless the value of a field is one of the choices."""
        value = getattr(self, name)
        rule = f"must be one of {', '.join(choices)}"
        self.require(value in choices, name, rule, nearest(value, choices))

    def require_positive(self, *names: str) -> None:
        """Raise ConfigError unless each of these fields is unset or above 0."""
        for name in names:
            value = getattr(self, name)
            positive = value is None or 0 < value < math.inf
            self.require(positive, name, "must be positive", "Leave it out, or try 1.")

    def unset_fields(self) -> list[str]:
        """Return the names of the fields that are None."""
        return [item.name for item in dataclasses.fields(self) if getattr(self, item.name) is None]

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with some fields changed; an unknown field is an error."""
        known = [item.name for item in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"{self.title()} has no field {name!r}. {nearest(name, known)}")
        return dataclasses.replace(self, **changes)


def describe(section: type[Section]) -> dict[str, str]:
    """Return the help of each field of a section: the line of text under it.

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
    lines = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                lines[before.target.id] = " ".join(text.value.split())
    return lines


class SectionDoc:
    """Descriptor for `__doc__` of a section: its summary, then a Parameters list of its fields.

    The list is generated when the docstring is read: finding the lines of help takes time.
    """

    def __init__(self, section: type[Section]) -> None:
        self.section, self.summary = section, inspect.getdoc(section)

    def __get__(self, instance: object, owner: type) -> str:
        lines = (f"{name} : {line}" for name, line in describe(self.section).items())
        summary, _, rest = str(self.summary).partition("\n\n")
        return "\n".join([summary, "", "Parameters", "----------", *lines, "", rest])


_INVALID = object()


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is valid for a field or option of this type.

    >>> fits(3, float), fits(3.5, int), fits(True, int)
    (True, False, False)
    """
    return convert(value, hint) is not _INVALID


def convert(value: Any, hint: Any) -> Any:
    """Return the value as a field of this type stores it, or _INVALID."""
    if isinstance(hint, types.UnionType):
        if value is None or value == "none":
            return None
        return convert(value, next(part for part in hint.__args__ if part is not types.NoneType))
    if hint is Options:
        plain = isinstance(value, Mapping) and all(
            isinstance(key, str) and isinstance(item, Plain) for key, item in value.items()
        )
        return Options(value) if plain else _INVALID
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        return _INVALID
    return value if isinstance(value, hint) else _INVALID


def describe_type(hint: Any) -> str:
    """Return the type of a field or option in words, for messages."""
    names = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        bool: "true or false",
        Options: "a table of plain values",
    }
    if isinstance(hint, types.UnionType):
        part = next(part for part in hint.__args__ if part is not types.NoneType)
        return f"{names[part]}, or left out"
    return names[hint]


def load_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text; RecursionError if it is nested too deeply.

    The time of `tomllib` grows with the square of the parts of a dotted key.
    """
    if _LONG_KEY.search(text):
        raise RecursionError(f"a dotted key has more than {MAX_KEY_PARTS} parts")
    return tomllib.loads(text)


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Return the table of a TOML text; ConfigError, which names the `source`, if it is not TOML.

    >>> parse_toml("[model]\\ndepth = 3", "run.toml")
    {'model': {'depth': 3}}
    """
    try:
        return load_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}.") from None
    except RecursionError:
        raise ConfigError(
            f"{source} is nested too deeply. A configuration has sections and fields only."
        ) from None


def read_value(text: str) -> Any:
    """Return the value after `=` on the command line: parsed as TOML, or else the text itself."""
    try:
        return load_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise ConfigError(
            f"the value {text[:20]}… is nested too deeply. Give a plain value."
        ) from None


def write_value(value: Any) -> str:
    """Return a plain value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = re.sub(r'[\x00-\x1f\x7f"\\]', lambda match: f"\\u{ord(match.group()):04x}", value)
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{write_value(key)} = {write_value(item)}" for key, item in value.items()
        )
        return f"{{ {inner} }}" if inner else "{}"
    return repr(value)
