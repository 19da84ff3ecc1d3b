"""From measurements to findings: every rule is asked, and the findings are put in order.

The rules themselves are in stream_rules.py, weight_rules.py, data_rules.py and optimizer_rules.py,
their thresholds in rule.py; what follows from a rehearsal is in plan_rules.py.
"""

from addnorm.clinic.data_rules import DATA_RULES
from addnorm.clinic.evidence import Evidence
from addnorm.clinic.optimizer_rules import OPTIMIZER_RULES
from addnorm.clinic.plan_rules import plan_findings
from addnorm.clinic.rule import SEVERITIES, THRESHOLDS, Finding, Rule
from addnorm.clinic.stream_rules import STREAM_RULES
from addnorm.clinic.weight_rules import WEIGHT_RULES

__all__ = ["RULES", "SEVERITIES", "THRESHOLDS", "Finding", "Rule", "apply_rules"]

RULES = (*STREAM_RULES, *WEIGHT_RULES, *DATA_RULES, *OPTIMIZER_RULES)


def apply_rules(evidence: Evidence) -> list[Finding]:
    """Return a finding for every rule that applies, the most severe first."""
    findings = [
        Finding(
            rule.name,
            rule.severity,
            rule.evidence.format(**quoted),
            rule.reason,
            rule.remedy_for(evidence),
        )
        for rule in RULES
        if (quoted := rule.condition(evidence)) is not None
    ]
    findings += [Finding(*each) for each in plan_findings(evidence)]
    if any(finding.name in NON_FINITE_RULES for finding in findings):
        findings = [finding for finding in findings if finding.name in NON_FINITE_RULES]
    if not evidence.transformer:
        findings = [finding for finding in findings if finding.name not in TRANSFORMER_RULES]
    return sorted(findings, key=_rank_of)


def _rank_of(finding: Finding) -> tuple[bool, int]:
    """Order what the model is before what is wrong with it, then by severity."""
    return finding.name not in FIRST_RULES, SEVERITIES.index(finding.severity)


FIRST_RULES = {"not a Transformer", "no residual connections"}
"""What is said first: the other measurements say little about such a model."""
TRANSFORMER_RULES = {
    "no residual connections", "residual missing", "branch subtracted", "shortcut scaled",
    "zero branch", "branches start at zero", "residual after the norm", "no final norm",
    "attention logits too large", "attention collapsed", "initial weights too large",
    "token embeddings too small", "positions not distinguished", "token representations collapse",
    "equal initial weights", "initial weights too small", "feed-forward is linear",
    "embeddings drown the branches", "patch positions not distinguished",
    "attention without queries and keys",
}  # fmt: skip
"""What is expected of a Transformer only."""
NON_FINITE_RULES = {
    "batch not finite",
    "weights not finite",
    "float16 overflow",
    "not finite",
    "loss not finite",
}
"""If one of these applies, no other measurement is meaningful."""
