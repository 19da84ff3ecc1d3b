"""Broken models are found with the right name; healthy ones have no finding above a note."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from addnorm.clinic import Evidence, Examination, TrainingPlan, examine
from addnorm.clinic.rehearsal import Alternative, Rehearsal
from addnorm.clinic.rules import RULES, SEVERITIES, THRESHOLDS, Finding, apply_rules
from addnorm.layers.addnorm import ADDNORMS
from tests.clinic.subjects import BROKEN, HEALTHY, Example, decoder, ids


def examined(example: Example, **more: Any) -> Examination:
    options = {name: value for name, value in example.options.items() if name != "plan"} | more
    return examine(example.model, example.batch, example.loss, sharpness=False, **options)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_models_are_found(name: str) -> None:
    examination, expected = examined(BROKEN[name][0]()), BROKEN[name][1]
    assert expected in examination.names(), examination.text()
    assert not examination.healthy


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_have_no_findings(name: str) -> None:
    examination = examined(HEALTHY[name]())
    assert examination.names() == [], examination.text()
    assert examination.healthy


PLANNED = set(HEALTHY) - {"BERT", "T5", "Llama", "torch's encoder"}


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("name", sorted(PLANNED))
def test_healthy_plans_have_no_findings(name: str) -> None:
    example = HEALTHY[name]()
    examination = examined(example, plan=example.options["plan"])
    assert examination.names() == [], examination.text()
    assert examination.evidence.rehearsals["planned"].learns


@pytest.mark.slow
@pytest.mark.trains
def test_an_absurd_learning_rate_is_found() -> None:
    """Which remedy works may depend on the CPU; that the plan fails does not."""
    examination = examine(
        decoder(addnorm="post"), ids(), plan=TrainingPlan(lr=1e4), sharpness=False
    )
    assert {"needs warm-up", "learning rate too high", "will not train"} & set(examination.names())
    assert not examination.evidence.rehearsals["planned"].learns


# ── Findings from supplied rehearsals (how a real one ends depends on the CPU) ────────────────────

LEARNS = Rehearsal((4.0,) * 48, 4.0, 3.0, (0.3, 0.3))
FAILS = Rehearsal((4.0,) * 48, 4.0, 4.5, (0.3, 0.2, 0.1))


@cache
def post_norm() -> Evidence:
    """Evidence for a deep post-norm decoder, without a rehearsal."""
    torch.manual_seed(0)
    return examine(decoder(addnorm="post", depth=8), ids(), sharpness=False).evidence


def findings_of(
    plan: TrainingPlan,
    rehearsals: dict[str, Rehearsal],
    alternatives: dict[str, Alternative] | None = None,
) -> list[Finding]:
    """Findings above a note for a post-norm decoder whose rehearsals are supplied."""
    supplied = {"plan": plan, "rehearsals": rehearsals, "alternatives": alternatives or {}}
    return [
        f for f in apply_rules(dataclasses.replace(post_norm(), **supplied)) if f.severity != "note"
    ]


@pytest.mark.parametrize(
    ("tries", "names"),
    (
        ({"planned": LEARNS}, []),
        ({"planned": FAILS, "with warm-up": LEARNS}, ["needs warm-up"]),
        (
            {"planned": FAILS, "with warm-up": FAILS, "at lr 0.03": LEARNS},
            ["learning rate too high"],
        ),
        ({"planned": FAILS, "with warm-up": FAILS, "at lr 0.03": FAILS}, ["will not train"]),
    ),
)
def test_the_first_remedy_that_works_decides_the_finding(
    tries: dict[str, Rehearsal], names: list[str]
) -> None:
    findings = findings_of(TrainingPlan(lr=0.3), tries)
    assert [finding.name for finding in findings] == names
    assert all(finding.severity == "problem" for finding in findings)


def test_other_arrangements_are_listed_in_the_remedy() -> None:
    alternatives = {
        "addnorm=admin": Alternative(0.08, FAILS),
        "addnorm=pre": Alternative(0.0234, LEARNS),
    }
    rehearsals = {"planned": FAILS, "with warm-up": LEARNS}
    (finding,) = findings_of(TrainingPlan(lr=1e-2), rehearsals, alternatives)
    assert finding.evidence.startswith("post-norm, 16 branches, which are 0.")
    assert "changing the weights by 1% moves the output" in finding.evidence
    assert "the last FFN's gradient is" in finding.evidence
    assert "At lr 0.01 without warm-up, rehearsed for 48 steps" in finding.evidence
    assert "the loss goes from 4.00 to 4.50 and 10.0% of the stream's variance is between" in (
        finding.evidence
    )
    assert finding.remedy == (
        "Warm-up of 100 steps or more; addnorm=admin (rehearsed: does not learn either, and 1 % "
        "of weight change moves the output 8.0%); addnorm=pre (rehearsed: it learns, and 1 % of "
        "weight change moves the output 2.3%)."
    )


@pytest.mark.slow
@pytest.mark.trains
def test_other_arrangements_are_built_and_rehearsed() -> None:
    examination = examine(
        decoder(addnorm="post", depth=8), ids(), plan=TrainingPlan(lr=1e4), sharpness=False
    )
    assert set(examination.evidence.alternatives) == {"addnorm=admin", "addnorm=pre"}
    own = examination.evidence.amplification[-1] ** 0.5
    assert all(other.output_change < own for other in examination.evidence.alternatives.values())
    assert "rehearsal       addnorm=pre: " in examination.text()


def test_a_model_too_large_to_rehearse_its_warmup_gets_a_note_only() -> None:
    short = dataclasses.replace(FAILS, losses=(4.0,) * 12)
    tries = {"planned": short, "at lr 0.03": LEARNS}
    assert findings_of(TrainingPlan(lr=0.3, warmup=1000), tries) == []
    (finding,) = findings_of(TrainingPlan(lr=0.3, warmup=3), tries)
    assert finding.name == "learning rate too high"
    assert "rehearsed for 12 steps" in finding.evidence
    supplied = {"plan": TrainingPlan(lr=0.3, warmup=1000), "rehearsals": {"planned": short}}
    notes = [finding.name for finding in apply_rules(dataclasses.replace(post_norm(), **supplied))]
    assert "warm-up not rehearsed" in notes


ONCE_WRONG = {"res-post", "rezero", "hyper"}
"""Arrangements that rules once applied to by mistake."""


@pytest.mark.parametrize(
    "addnorm",
    [
        pytest.param(name, marks=() if name in ONCE_WRONG else pytest.mark.slow)
        for name in ADDNORMS
        if name != "none"
    ],
)
def test_every_arrangement_is_healthy(addnorm: str) -> None:
    depth = 6 if addnorm == "res-post" else 2
    examination = examine(decoder(addnorm=addnorm, width=64, depth=depth), ids(), sharpness=False)
    expected = ["shortcut scaled"] if addnorm == "scaled" else []  # λ = ½: 0.1 after two blocks
    assert examination.names() == expected, examination.text()


def test_rules_are_complete() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.severity in SEVERITIES
        assert rule.reason.endswith(".")
        assert not isinstance(rule.remedy, str) or rule.remedy.endswith(".")
    assert {expected for _, expected in BROKEN.values()} <= {rule.name for rule in RULES}
    assert all(limit > 0 for limit in THRESHOLDS.values())
