"""The examination: measure, conclude, and say it as text, JSON or a page."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from addnorm.clinic.call import Batch, Loss
from addnorm.clinic.evidence import Evidence, Plan, gather
from addnorm.clinic.findings import Finding, find
from addnorm.errors import InputError


@dataclass(frozen=True)
class Examination:
    """What was measured, and what follows from it."""

    evidence: Evidence
    findings: Sequence[Finding]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found above a note."""
        return all(finding.severity == "note" for finding in self.findings)

    def names(self) -> list[str]:
        """The names of the findings above a note."""
        return [finding.name for finding in self.findings if finding.severity != "note"]

    def text(self) -> str:
        """For a terminal: findings first, then every site."""
        from addnorm.clinic.words import as_text

        return as_text(self)

    def json(self) -> str:
        """Everything, as JSON; what is not finite is null."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=1, ensure_ascii=False)

    def write_page(self, path: str | Path) -> Path:
        """One HTML file with pictures, which needs nothing else."""
        from addnorm.clinic.page import make_page

        return make_page(self).write(path)


def examine(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None = None,
    *,
    plan: Plan | None = None,
    pad: int | None = None,
    causal: bool | None = None,
    sharp: bool = True,
) -> Examination:
    """Examine any Transformer; nothing about it is changed.

    `batch` is what the model is called with (a tensor, a tuple, a dictionary); `loss` goes from the
    model's output and the batch to a number, and is made up where it is left out. With a `plan` the
    training is rehearsed for a few steps, on weights that are put back. `pad` is the id of padding,
    `causal` whether the future must be hidden, where the configuration does not say. `sharp=False`
    leaves out the sharpness, which takes most of the time.

    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=11, width=8, depth=2, heads=2))
    >>> examine(model, torch.randint(11, (4, 8)), sharp=False).healthy
    True
    """
    if not any(True for _ in model.parameters()):
        raise InputError("a model must have parameters to be examined: this one has none.")
    evidence = gather(model, batch, loss, plan=plan, pad=pad, causal=causal, sharp=sharp)
    return Examination(evidence, find(evidence))


def _plain(value: Any) -> Any:
    """Plain values only: JSON knows no NaN."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
