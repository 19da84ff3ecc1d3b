"""Examine a model: measure it, apply the rules, show the result."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from addnorm.clinic.call_model import (
    ClinicBatch,
    Inputs,
    Loss,
    Objective,
    as_batch,
    complete_batch,
    require_same_form,
    unwrap,
)
from addnorm.clinic.coverage import NOT_EXAMINED, Check, find_coverage
from addnorm.clinic.evidence import Evidence, gather_evidence
from addnorm.clinic.rehearsal import TrainingPlan
from addnorm.clinic.rules import Finding, apply_rules
from addnorm.errors import InputError
from addnorm.files import to_json

JSON_SCHEMA = 2
"""Version of the JSON; 1 had neither checks nor arrangement."""


@dataclass(frozen=True, repr=False)
class Examination:
    """The measurements of a model, and the findings that follow from them."""

    evidence: Evidence
    findings: Sequence[Finding]

    @property
    def checks(self) -> list[Check]:
        """Every check: passed, found, or not examined with the reason."""
        return find_coverage(self.evidence, self.findings)

    @property
    def healthy(self) -> bool:
        """Whether there is no finding above a note, and every essential check was made."""
        made = all(c.outcome != NOT_EXAMINED for c in self.checks if c.essential)
        return made and all(finding.severity == "note" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """`healthy`, `not healthy`, or `not examined` if an essential check was not made."""
        if self.healthy:
            return "healthy"
        return "not healthy" if self.names() else "not examined"

    def names(self) -> list[str]:
        """Return the names of the findings above a note."""
        return [finding.name for finding in self.findings if finding.severity != "note"]

    def text(self) -> str:
        """Return findings, figures and every site as text for a terminal."""
        from addnorm.clinic.text import examination_text

        return examination_text(self)

    def json(self) -> str:
        """Return everything as JSON; values that are not finite are null.

        `schema` changes when a field is renamed or removed.
        """
        plain = dataclasses.asdict(self)
        plain["evidence"]["arrangement"]["name"] = self.evidence.arrangement.name
        return to_json(
            {
                "schema": JSON_SCHEMA,
                "verdict": self.verdict,
                "healthy": self.healthy,
                "findings": plain["findings"],
                "checks": [dataclasses.asdict(check) for check in self.checks],
                "evidence": plain["evidence"],
            }
        )

    def write_page(self, path: str | Path) -> Path:
        """Write one self-contained HTML file with charts, and return its path."""
        from addnorm.clinic.page import examination_page

        return examination_page(self).write(path)

    def __repr__(self) -> str:
        from addnorm.clinic.text import finding_line, headline

        return "\n".join([headline(self), *map(finding_line, self.findings)])

    def _repr_html_(self) -> str:
        from addnorm.clinic.page import examination_fragment

        return examination_fragment(self)


def _require_kinds(model: Any, loss: Any, plan: Any, pad: Any, optimizer: Any) -> None:
    """Raise an InputError if an argument of `examine` is of another kind."""
    kinds = (
        ("model", model, isinstance(model, nn.Module), "an nn.Module"),
        ("loss", loss, loss is None or callable(loss), "a function of output and targets"),
        ("plan", plan, isinstance(plan, TrainingPlan | None), "a TrainingPlan"),
        ("pad", pad, isinstance(pad, int | None), "an integer"),
        ("optimizer", optimizer, isinstance(optimizer, Optimizer | None), "an optimizer of torch"),
    )
    for name, value, fits, kind in kinds:
        if not fits:
            instance = " Pass an instance, not the class." if isinstance(value, type) else ""
            raise InputError(f"{name} must be {kind}: got {_kind_of(value)}.{instance}")
    if not any(True for _ in model.parameters()):
        raise InputError("a model must have parameters to be examined: this one has none.")


def _kind_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def examine(
    model: nn.Module,
    batch: ClinicBatch | Inputs,
    loss: Objective | Loss | None = None,
    *,
    plan: TrainingPlan | None = None,
    more_batches: Sequence[ClinicBatch | Inputs] = (),
    pad: int | None = None,
    causal: bool | None = None,
    sharpness: bool = True,
    optimizer: Optimizer | None = None,
    data: str = "",
    say: Callable[[str], object] = lambda text: None,
) -> Examination:
    """Examine any Transformer and return its findings; the model is left unchanged.

    Parameters
    ----------
    model : nn.Module
        A model of addnorm, Hugging Face, torch or your own, with at least one parameter.
    batch : Tensor, tuple, dict or ClinicBatch
        What the model is called with: one tensor, positional arguments, or named ones. A
        `ClinicBatch(inputs, targets)` also holds the targets that `loss` compares with.
    loss : callable, optional
        `loss(output, targets)` returns one number; without targets it is `loss(output, inputs)`.
        By default the model's own loss, or one that suits the shape of its output.
    plan : TrainingPlan, optional
        Learning rate and warm-up to rehearse for a few steps, on weights that are restored.
    more_batches : sequence, optional
        Further batches of the same form for the rehearsal to learn from; its loss is measured on
        `batch`.
    pad : int, optional
        The id of padding, by default that of the model's configuration.
    causal : bool, optional
        Whether later positions must be hidden, by default as the configuration says.
    sharpness : bool
        Whether to measure the sharpness of the loss, which takes most of the time.
    optimizer : torch.optim.Optimizer, optional
        The optimizer that will train the model; its settings and parameters are checked.
    data : str, optional
        What the batch is, for the page; by default its shapes.
    say : callable, optional
        Receives a message before each rehearsal, which may take a minute.

    Returns
    -------
    Examination
        The findings with evidence and remedy, and all measurements.

    Examples
    --------
    >>> import torch
    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=11, width=8, depth=2, heads=2))
    >>> examination = examine(model, torch.randint(11, (4, 8)), sharpness=False)
    >>> examination.healthy, examination.names()
    (True, [])
    """
    _require_kinds(model, loss, plan, pad, optimizer)
    model = unwrap(model)
    batches = [complete_batch(model, as_batch(each)) for each in (batch, *more_batches)]
    require_same_form(batches)
    evidence = gather_evidence(
        model,
        batches,
        loss,
        plan=plan,
        pad=pad,
        causal=causal,
        sharpness=sharpness,
        optimizer=optimizer,
        data=data,
        say=say,
    )
    return Examination(evidence, apply_rules(evidence))
