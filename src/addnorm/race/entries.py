"""Who takes part in a race: every combination of what is varied, or a patient and its remedies."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from addnorm.clinic.findings import Finding
from addnorm.config import Config
from addnorm.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """One runner: its name, and the settings that make it."""

    name: str
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The name as a file may have it.

        >>> Entry("addnorm=pre, warmup=0").folder
        'addnorm-pre-warmup-0'
        """
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.name).strip("-") or "as-it-is"


def vary(specifications: Sequence[str]) -> list[Entry]:
    """Every combination of `section.field=value,value,...`.

    >>> [entry.name for entry in vary(["model.addnorm=post,pre", "train.warmup=0,400"])][1:3]
    ['addnorm=post, warmup=400', 'addnorm=pre, warmup=0']
    """
    choices = []
    for text in specifications:
        path, equals, values = text.partition("=")
        several = [value for value in values.split(",") if value]
        if not equals or "." not in path or not several:
            raise ConfigError(
                f"what varies must read section.field=value,value: got {text!r}. "
                "Try model.addnorm=post,pre."
            )
        Config().override(f"{path}={several[0]}")
        choices.append([(path.strip(), value.strip()) for value in several])
    entries = []
    for combination in itertools.product(*choices):
        name = ", ".join(f"{path.partition('.')[2]}={value}" for path, value in combination)
        entries.append(Entry(name, tuple(f"{path}={value}" for path, value in combination)))
    if len({entry.folder for entry in entries}) != len(entries):
        raise ConfigError("every runner must differ from the others. Give each value once.")
    return entries


def remedies(findings: Sequence[Finding], config: Config) -> list[Entry]:
    """The patient as it is, and what can be tried against what was found."""
    steps = config.train.steps or 1000
    model = config.model
    tries = [Entry("as it is")]
    names = {finding.name for finding in findings}
    if names & {"tokens drowned"}:
        tries.append(Entry("scaled embedding", ("model.scale_embedding=true",)))
    if names & {"attention logits too large", "attention collapsed"}:
        tries.append(Entry("queries and keys normed", ("model.qk_norm=head",)))
    if names & {"initial weights too large"}:
        tries.append(Entry("init=xavier", ("model.init=xavier",)))
    if model.addnorm != "pre":
        tries.append(Entry("addnorm=pre", ("model.addnorm=pre",)))
    if model.addnorm != "admin":
        tries.append(Entry("addnorm=admin", ("model.addnorm=admin",)))
    if not config.train.warmup:
        tries.append(Entry("warm-up", (f"train.warmup={max(1, steps // 4)}",)))
    if config.train.lr:
        tries.append(Entry("a tenth of the rate", (f"train.lr={config.train.lr / 10:.3g}",)))
    return tries
