"""What an examination covers: every check ends as passed, found, or not examined with a reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from addnorm.clinic.evidence import Evidence
    from addnorm.clinic.rules import Finding

PASSED, FOUND, NOT_EXAMINED = "passed", "found", "not examined"


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Parameters
    ----------
    name : what was checked
    essential : whether a model can only be called healthy if it was examined
    outcome : passed, found or not examined
    reason : why it was not examined; else empty
    findings : names of the findings
    """

    name: str
    essential: bool
    outcome: str
    reason: str = ""
    findings: tuple[str, ...] = ()


RULES_OF_CHECKS: dict[str, tuple[str, ...]] = {
    "forward pass": (
        "batch not finite", "weights not finite", "float16 overflow", "beyond float16",
        "not finite", "loss not finite",
    ),
    "attention": (
        "not a Transformer", "attention logits too large", "attention collapsed",
        "own token hidden", "attention without queries and keys", "softmax over the wrong axis",
    ),
    "residual stream": (
        "no residual connections", "residual missing", "branch subtracted", "shortcut scaled",
        "zero branch", "branches start at zero", "residual after the norm",
    ),
    "norms": ("no final norm", "norm gain too large", "norm gain is zero", "ε of a norm too large"),
    "gradients": (
        "nothing is trained", "backward pass fails", "loss without gradient",
        "gradient not finite", "gradient cut", "gradient shrinks", "weights not registered",
        "block not used", "no gradient in training mode",
    ),
    "frozen parameters": ("frozen layer", "frozen embeddings", "frozen head", "mostly frozen"),
    "initial weights": (
        "initial weights too large", "initial weights too small", "equal initial weights",
        "initial logits too large", "initial logits far too large", "embeddings drown the branches",
        "output layer starts at zero",
        "token representations collapse", "outlier channels",
    ),
    "activations": ("dead units", "feed-forward is linear"),
    "token embeddings": ("token embeddings too small",),
    "future": ("future leaks",),
    "padding": ("padding attended to",),
    "left padding": ("padding shifts positions",),
    "positions": ("positions not distinguished", "patch positions not distinguished"),
    "neighbours": ("neighbour not read",),
    "tokens read": ("one token read",),
    "labels": (
        "labels misaligned", "labels of another row", "answer reads its label",
        "padding in the loss", "softmax before the loss", "loss without softmax",
        "label smoothing too large",
    ),
    "rows of the batch": ("rows of the batch mixed",),
    "source": ("source not read",),
    "training mode": (
        "dropout too high", "dropout in evaluation mode", "batch statistics",
        "future in batch statistics",
    ),
    "optimizer": (
        "parameters not in the optimizer", "optimizer of another model", "weight decay too large",
        "β₂ out of range", "ε out of range", "learning rate is zero", "learning rate out of range",
        "loss is maximised", "group of rate zero", "momentum out of range", "steps lost in 16 bits",
    ),
}  # fmt: skip
"""The rules that each check applies; rules that are not listed are of the planned training."""
PLANNED = "planned training"
ESSENTIAL = {"forward pass", "attention", "residual stream", "norms", "gradients"}


def find_coverage(evidence: "Evidence", findings: Sequence["Finding"]) -> list[Check]:
    """Return the outcome of every check."""
    listed = {rule for rules in RULES_OF_CHECKS.values() for rule in rules}
    others = tuple(f.name for f in findings if f.name not in listed)
    checks = []
    for name, rules in {**RULES_OF_CHECKS, PLANNED: others}.items():
        above = tuple(f.name for f in findings if f.name in rules and f.severity != "note")
        reason = evidence.not_examined.get(name, "")
        essential = name in ESSENTIAL or (name == "future" and evidence.causal)
        essential = essential or (name == "padding" and evidence.padded)
        outcome = FOUND if above else NOT_EXAMINED if reason else PASSED
        checks.append(Check(name, essential, outcome, "" if above else reason, above))
    return checks
