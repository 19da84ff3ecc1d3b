"""Sick models are found with the right name; healthy ones have no finding above a note."""

import pytest

from addnorm.clinic import Examination, examine
from addnorm.clinic.findings import LIMITS, RULES, SEVERITIES
from tests.clinic.patients import SICK, WELL, Patient


def examined(patient: Patient) -> Examination:
    return examine(patient.model, patient.batch, patient.loss, sharp=False, **patient.told)


@pytest.mark.parametrize("name", SICK)
def test_sick_models_are_found(name: str) -> None:
    maker, expected = SICK[name]
    seen = examined(maker())
    assert expected in seen.names(), seen.text()
    assert not seen.healthy


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
