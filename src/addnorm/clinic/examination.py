"""The examination: measure, conclude, and say it as text, JSON or a page."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from addnorm.clinic.call import Batch, Loss
from addnorm.clinic.evidence import Evidence, gather
from addnorm.clinic.findings import Finding, find
from addnorm.clinic.remedy import Plan
from addnorm.disk import to_json
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
        return to_json(dataclasses.asdict(self))

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
    more: Sequence[Batch] = (),
    pad: int | None = None,
    causal: bool | None = None,
    sharp: bool = True,
) -> Examination:
    """Examine any Transformer; nothing about it is changed.

    `batch` is what the model is called with (a tensor, a tuple, a dictionary); `loss` goes from the
    model's output and the batch to a number, and is made up where it is left out. With a `plan` the
    training is rehearsed for a few steps, on weights that are put back; it learns from `more`,
    further batches of the same form, and is judged by `batch`. `pad` is the id of padding, `causal`
    whether the future must be hidden, where the configuration does not say. `sharp=False` leaves
    out the sharpness, which takes most of the time.

    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=11, width=8, depth=2, heads=2))
    >>> examine(model, torch.randint(11, (4, 8)), sharp=False).healthy
    True
    """
    if not any(True for _ in model.parameters()):
        raise InputError("a model must have parameters to be examined: this one has none.")
    evidence = gather(model, batch, loss, plan=plan, more=more, pad=pad, causal=causal, sharp=sharp)
    return Examination(evidence, find(evidence))
