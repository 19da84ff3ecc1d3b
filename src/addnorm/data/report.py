"""What reading found in a file, and what it did about it: counted and said, never silent."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from addnorm.errors import ConfigError, nearest

SHOWN = 5
"""Line numbers given as examples."""
DONE = {"drop": "left out", "cut": "cut", "keep": "kept"}
"""How a choice is said once it was made."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How often one thing was met, what was done about it, and the first lines where."""

    verbs: tuple[str, str]
    """Said after one row, and after several: has, have."""
    what: str
    """Said after the verb: an empty side."""
    choice: str
    """drop, cut or keep."""
    count: int = 0
    lines: tuple[int, ...] = ()

    def say(self, thing: str) -> str:
        """A sentence, such as "3 pairs have an empty side (lines 2, 7, 9): left out"."""
        plural, verb = ("", self.verbs[0]) if self.count == 1 else ("s", self.verbs[1])
        places = ", ".join(str(line) for line in self.lines)
        more = ", …" if self.count > len(self.lines) else ""
        return (
            f"{self.count} {thing}{plural} {verb} {self.what} (line{plural} {places}{more}): "
            f"{DONE[self.choice]}."
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was read, what was kept of it, and every finding."""

    name: str
    """The file or files."""
    thing: str
    """What a row is called: pair, text."""
    read: int
    kept: int
    findings: dict[str, Finding] = field(default_factory=dict)
    """By name: empty, long, repeated and others."""
    notes: tuple[str, ...] = ()
    """What was guessed or decided, in sentences."""

    def count(self, name: str) -> int:
        """How many rows a finding is about."""
        return self.findings[name].count

    def lines(self) -> list[str]:
        """The report for people: what is not the case is not mentioned."""
        first = f"{self.name}: {self.read} {self.thing}s read, {self.kept} kept."
        met = [finding for finding in self.findings.values() if finding.count]
        return [first, *self.notes, *(finding.say(self.thing) for finding in met)]


def find(verbs: tuple[str, str], what: str, choice: str, lines: Sequence[int]) -> Finding:
    """A finding about the rows that begin on these lines."""
    shown = tuple(lines[:SHOWN])
    return Finding(verbs=verbs, what=what, choice=choice, count=len(lines), lines=shown)


def need_positive(question: str, value: int | None) -> None:
    """1 or more, or None where that means no bound."""
    if value is not None and value < 1:
        raise ConfigError(f"{question} must be 1 or more: got {value}. Try 1000, or leave it out.")


def need_choice(question: str, choice: str, choices: Sequence[str]) -> str:
    """One of a few words; an error that names them if it is another."""
    if choice not in choices:
        raise ConfigError(
            f"{question} must be one of {', '.join(choices)}: got {choice!r}. "
            f"{nearest(choice, choices)}"
        )
    return choice
