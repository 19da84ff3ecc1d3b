"""Sick models are found with the right name; healthy ones have no finding above a note."""

from functools import cache

import pytest

from addnorm.clinic import Examination, examine
from addnorm.clinic.findings import LIMITS, RULES, SEVERITIES
from tests.clinic.patients import SICK, WELL, Patient


@cache
def sick(name: str) -> Examination:
    return examined(SICK[name][0]())


def examined(patient: Patient) -> Examination:
    return examine(patient.model, patient.batch, patient.loss, sharp=False, **patient.told)


@pytest.mark.parametrize("name", SICK)
def test_sick_models_are_found(name: str) -> None:
    seen, expected = sick(name), SICK[name][1]
    assert expected in seen.names(), seen.text()
    assert not seen.healthy


def test_other_arrangements_are_built_and_rehearsed_in_the_patients_place() -> None:
    seen = sick("no warm-up on deep post-norm")
    assert set(seen.evidence.predictions) == {"addnorm=admin", "addnorm=pre"}
    finding = next(f for f in seen.findings if f.name == "needs warm-up")
    assert finding.evidence.startswith("post-norm, 16 branches, which carry 0.")
    assert "1% of weight change moves the output" in finding.evidence
    assert "the last FFN's gradient is" in finding.evidence
    assert "At lr 0.01 without warm-up, rehearsed for 48 steps" in finding.evidence
    assert finding.remedy.startswith("Warm-up of 100 steps or more; addnorm=admin (prediction: ")
    assert "addnorm=pre (prediction: it learns, and 1 % moves the output 2" in finding.remedy
    own = seen.evidence.amplification[-1] ** 0.5
    assert all(other.moved < own for other in seen.evidence.predictions.values())
    assert "rehearsal       addnorm=pre: learns" in seen.text()


@pytest.mark.parametrize("name", WELL)
def test_healthy_models_are_well(name: str) -> None:
    seen = examined(WELL[name]())
    assert seen.names() == [], seen.text()
    assert seen.healthy


def test_rules_are_complete() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.severity in SEVERITIES
        assert rule.reason.endswith(".")
        assert not isinstance(rule.remedy, str) or rule.remedy.endswith(".")
    assert {expected for _, expected in SICK.values()} <= {rule.name for rule in RULES}
    assert all(limit > 0 for limit in LIMITS.values())
