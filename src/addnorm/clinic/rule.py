"""A rule of the clinic: a condition over the measurements, and the finding if it holds.

A condition returns the values that the evidence quotes if the rule applies, else None. Severities:
a `problem` will not train or gives wrong answers; a `warning` often leads to that; a `note` is
worth knowing. The thresholds are set so that the broken models of the tests are found and the
healthy ones are not; bench/clinic_limits.py prints the measurements of both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from addnorm.clinic.evidence import Evidence

SEVERITIES = ("problem", "warning", "note")
THRESHOLDS = {
    "attention spread": 2.3,
    "attention entropy": 0.35,
    "weight gain": 2.0,
    "small weight gain": 0.01,
    "adam rate": 0.1,
    "other rate": 10.0,
    "epsilon": 1e-3,
    "norm gain": 8.0,
    "token share": 0.12,
    "token share, other libraries": 5e-4,
    "dead units": 0.7,
    "dead positions": 64.0,
    "outlier": 20.0,
    "padding": 1e-3,
    "answer deviation": 4.0,
    "position variance": 0.05,
    "zero branch": 1e-6,
    "shortcut product": 6.0,
    "row change": 1e-3,
    "source change": 1e-5,
    "dropout": 0.6,
    "label smoothing": 0.5,
    "padding in the loss": 0.2,
    "weight decay": 1.0,
    "coupled weight decay": 0.2,
    "float16": 65504.0,
    "far too large answer deviation": 30.0,
    "drowning stream": 30.0,
    "drowned branch": 0.01,
    "momentum": 0.999,
    "lost steps": 0.25,
}
"""Healthy models of every arrangement stay on the right side of each."""

Quoted = Mapping[str, Any] | None


@dataclass(frozen=True)
class Finding:
    """A rule that applies to a model.

    Parameters
    ----------
    name : what is wrong, in a few words.
    severity : problem, warning or note.
    evidence : the measurements that show it, as a sentence.
    reason : why it matters.
    remedy : what to try.
    """

    name: str
    severity: str
    evidence: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    """A condition, and the finding if it holds.

    Parameters
    ----------
    name, severity, reason : as in the finding.
    condition : returns the values to quote, or None if the rule does not apply.
    evidence : format string for those values.
    remedy : what to try, or a function of the measurements that returns it.
    own : what to try with a model that addnorm built, in terms of its configuration.
    """

    name: str
    severity: str
    condition: Callable[[Evidence], Quoted]
    evidence: str
    reason: str
    remedy: str | Callable[[Evidence], str]
    own: str = ""

    def remedy_for(self, evidence: Evidence) -> str:
        """Return what to try, in the terms of the model's own library."""
        if self.own and evidence.built_by_addnorm:
            return self.own
        return self.remedy if isinstance(self.remedy, str) else self.remedy(evidence)


# ── What conditions quote ─────────────────────────────────────────────────────────────────────────


def quote_if(condition: object, **quoted: Any) -> Quoted:
    """Return the values if the condition holds."""
    return quoted if condition else None


def quote_sites(names: Sequence[str]) -> Quoted:
    """Quote up to three names of sites, if there are any."""
    shown = ", ".join(names[:3])
    more = "" if len(names) <= 3 else f" and {len(names) - 3} more"
    return quote_if(names, sites=shown + more)


def quote_largest(items: Sequence[Any], field: str, threshold: float) -> Quoted:
    """Quote all fields of the item with the largest value of one, if that is above a threshold."""
    largest = max(items, key=lambda item: getattr(item, field), default=None)
    above = largest is not None and getattr(largest, field) > threshold
    return quote_if(above, **({} if largest is None else vars(largest)))


def label_fact(e: Evidence, name: str) -> Any:
    """Return what the gradient of the loss says about the targets; None if it is unknown."""
    return None if e.experiments.labels is None else getattr(e.experiments.labels, name)
