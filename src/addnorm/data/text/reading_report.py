"""The report on reading a file: the rows with issues, counted, and what was done about them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from addnorm.errors import ConfigError, nearest

MAX_LINES_SHOWN = 5
"""Line numbers that a report names as examples."""
ACTIONS = {"drop": "left out", "cut": "cut", "keep": "kept"}
"""By choice, what was done with the rows."""


@dataclass(frozen=True, kw_only=True)
class ReadingIssue:
    """The rows that share an issue: their number, the first lines, and what was done with them."""

    verbs: tuple[str, str]
    """The verb after one row, and after several: has, have."""
    description: str
    """What follows the verb: an empty side."""
    choice: str
    """drop, cut or keep."""
    count: int = 0
    lines: tuple[int, ...] = ()

    def describe(self, row_name: str) -> str:
        """Return a sentence such as "3 pairs have an empty side (lines 2, 7, 9): left out."."""
        plural, verb = ("", self.verbs[0]) if self.count == 1 else ("s", self.verbs[1])
        lines = ", ".join(str(line) for line in self.lines)
        more = ", …" if self.count > len(self.lines) else ""
        return (
            f"{self.count} {row_name}{plural} {verb} {self.description} "
            f"(line{plural} {lines}{more}): {ACTIONS[self.choice]}."
        )


@dataclass(frozen=True, kw_only=True)
class ReadingReport:
    """How many rows were read and kept, and all issues."""

    name: str
    """The file or files."""
    row_name: str
    """What a row is called: pair, text."""
    read: int
    kept: int
    issues: dict[str, ReadingIssue] = field(default_factory=dict)
    """By name: empty, long, repeated and others."""
    notes: tuple[str, ...] = ()
    """What was inferred or decided, in sentences."""

    def lines(self) -> list[str]:
        """Return the report as sentences, without issues that no row has."""
        first = f"{self.name}: {self.read} {self.row_name}s read, {self.kept} kept."
        issues = [issue for issue in self.issues.values() if issue.count]
        return [first, *self.notes, *(issue.describe(self.row_name) for issue in issues)]


def count_issue(
    verbs: tuple[str, str], description: str, choice: str, lines: Sequence[int]
) -> ReadingIssue:
    """Return the issue of the rows that begin on these lines.

    Parameters
    ----------
    verbs, description, choice
        See `ReadingIssue`.
    lines
        The lines of all rows with the issue; the first are shown.
    """
    return ReadingIssue(
        verbs=verbs,
        description=description,
        choice=choice,
        count=len(lines),
        lines=tuple(lines[:MAX_LINES_SHOWN]),
    )


def check_positive(name: str, value: int | None) -> None:
    """Raise ConfigError unless a value is 1 or more, or None for no limit."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be 1 or more: got {value}. Try 1000, or leave it out.")


def check_choice(name: str, choice: str, choices: Sequence[str]) -> str:
    """Return the choice; ConfigError if it is not one of the choices."""
    if choice not in choices:
        raise ConfigError(
            f"{name} must be one of {', '.join(choices)}: got {choice!r}. "
            f"{nearest(choice, choices)}"
        )
    return choice
