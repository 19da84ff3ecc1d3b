"""The entries of a race: every combination of values, or a model and its remedies."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from addnorm.clinic.rules import Finding
from addnorm.config import Config
from addnorm.errors import ConfigError

UNCHANGED = "unchanged"
"""The entry without a remedy."""


@dataclass(frozen=True)
class Entry:
    """A name, and the settings that it stands for."""

    name: str
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The name in the characters of a file name.

        >>> Entry("addnorm=pre, warmup=0").folder
        'addnorm-pre-warmup-0'
        """
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.name).strip("-") or UNCHANGED


def entries_of(specifications: Sequence[str]) -> list[Entry]:
    """Return an entry for every combination of `section.field=value,value,...`.

    >>> [entry.name for entry in entries_of(["model.addnorm=post,pre", "train.warmup=0,400"])][1:3]
    ['addnorm=post, warmup=400', 'addnorm=pre, warmup=0']
    """
    choices = []
    for text in specifications:
        path, equals, values = text.partition("=")
        several = [value for value in values.split(",") if value]
        if not equals or "." not in path or not several:
            raise ConfigError(
                f"values to compare must read section.field=value,value: got {text!r}. "
                "Try model.addnorm=post,pre."
            )
        Config().override(f"{path}={several[0]}")
        choices.append([(path.strip(), value.strip()) for value in several])
    entries = []
    for combination in itertools.product(*choices):
        name = ", ".join(f"{path.partition('.')[2]}={value}" for path, value in combination)
        entries.append(Entry(name, tuple(f"{path}={value}" for path, value in combination)))
    if len({entry.folder for entry in entries}) != len(entries):
        raise ConfigError("every entry must differ from the others. List each value once.")
    return entries


def remedy_entries(findings: Sequence[Finding], config: Config) -> list[Entry]:
    """Return the configuration unchanged, and what to try against the findings."""
    steps = config.train.steps or 1000
    model = config.model
    entries = [Entry(UNCHANGED)]
    names = {finding.name for finding in findings}
    if names & {"token embeddings too small"}:
        entries.append(Entry("scaled embedding", ("model.scale_embedding=true",)))
    if names & {"attention logits too large", "attention collapsed"}:
        entries.append(Entry("normed queries and keys", ("model.qk_norm=head",)))
    if names & {"initial weights too large"}:
        entries.append(Entry("init=xavier", ("model.init=xavier",)))
    if model.addnorm != "pre":
        entries.append(Entry("addnorm=pre", ("model.addnorm=pre",)))
    if model.addnorm != "admin":
        entries.append(Entry("addnorm=admin", ("model.addnorm=admin",)))
    if not config.train.warmup:
        entries.append(Entry("warm-up", (f"train.warmup={max(1, steps // 4)}",)))
    if config.train.lr:
        lower = f"train.lr={config.train.lr / 10:.3g}"
        entries.append(Entry("a tenth of the learning rate", (lower,)))
    return entries
