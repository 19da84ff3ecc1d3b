"""Broken models are found with the right name; healthy ones have no finding above a note."""

from typing import Any

import pytest

from addnorm.clinic import Examination, examine
from addnorm.clinic.rules import RULES, SEVERITIES, THRESHOLDS
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
    assert examination.evidence.prediction is not None


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
