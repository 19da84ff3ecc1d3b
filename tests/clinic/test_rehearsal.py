"""Rehearsals: equal to Adam, weights restored, and other plans if one fails."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm.clinic import ClinicBatch, TrainingPlan, examine, rehearsal
from addnorm.clinic.call_model import Objective, choose_objective
from addnorm.clinic.rehearsal import (
    MIN_REHEARSAL_STEPS,
    REHEARSAL_STEPS,
    Rehearsal,
    affordable_steps,
    recommended_warmup,
    rehearse,
    rehearse_alternatives,
    rehearse_once,
    rehearse_plan,
    training_batches,
)
from addnorm.clinic.sharpness import Sharpness
from addnorm.clinic.text import describe_schedule
from tests.clinic.subjects import VOCAB, decoder, ids


@pytest.mark.trains
@pytest.mark.parametrize("count", (1, 4))
def test_a_rehearsal_equals_adam_and_restores_the_weights(count: int) -> None:
    model, batches = decoder().eval(), [ClinicBatch(ids(4, 8)) for _ in range(count)]
    objective = choose_objective(model, batches[0], None)
    before = [p.detach().clone() for p in model.parameters()]
    result = rehearse(model, batches, objective, lr=0.01, warmup=5, steps=6)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert result.before == pytest.approx(float(objective(model, batches[0]).detach()), rel=1e-5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    halves = [batches[0].rows(0, 2), batches[0].rows(2, 4)]
    order = [halves[s % 2] if count == 1 else batches[1 + s % 3] for s in range(1, 7)]
    losses = []
    for step, batch in enumerate(order, start=1):
        loss = objective(model, batch)
        losses.append(float(loss.detach()))
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, step / 3)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert result.losses == pytest.approx(losses, rel=1e-4)
    assert len(result.position_variance) == 2
    assert result.after == pytest.approx(float(objective(model, batches[0]).detach()), rel=1e-4)


def test_training_batches_are_the_others_or_halves_or_the_batch_itself() -> None:
    model, batch, other = decoder().eval(), ClinicBatch(ids(4, 8)), ClinicBatch(ids(4, 8))
    objective = choose_objective(model, batch, None)
    assert [part is other for part in training_batches([batch, other], objective)] == [True]
    assert [part.row_count for part in training_batches([batch], objective)] == [2, 2]
    random = Objective(objective.loss, "noise", random_targets=True)
    assert [part is batch for part in training_batches([batch, other], random)] == [True]
    whole = training_batches([batch], Objective(objective.loss, "of whole batches", by_rows=False))
    assert [part is batch for part in whole] == [True]


@pytest.mark.slow
@pytest.mark.trains
def test_memorising_one_batch_does_not_count_as_learning() -> None:
    """Each row starts with its own token and the rest is noise, so it can only be memorised."""

    def noise() -> ClinicBatch:
        return ClinicBatch(torch.randint(1, VOCAB, (8, 12)))

    def even(output: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    model, objective = decoder().eval(), Objective(even, "the next token")
    with torch.no_grad():  # knows nothing, and says so
        model.tokens.weight.mul_(1e-3)
    batches = [noise() for _ in range(1 + REHEARSAL_STEPS)]
    alone = rehearse(model, batches[:1], objective, lr=0.01, warmup=0)
    several = rehearse(model, batches, objective, lr=0.01, warmup=0)
    assert alone.learns and alone.gain > 0.5
    assert not several.learns and several.gain < 0.05


def test_the_criteria_of_learning() -> None:
    def of(losses: tuple[float, ...], after: float, apart: float) -> Rehearsal:
        return Rehearsal(losses, losses[0], after, (0.3, 0.2, apart))

    assert of((4.0, 3.0), 1.0, 0.5).learns
    assert not of((4.0, 3.0), 1.0, 0.01).learns
    assert not of((4.0, 5.0), 7.0, 0.5).learns
    assert not of((4.0, float("nan")), 1.0, 0.5).learns
    assert not of((4.0, 3.0), float("nan"), 0.5).learns
    assert of((4.0, 3.0), 1.0, 0.5).gain == 3.0
    for apart, learns in (
        ((0.2, 0.001, 0.5), False),  # collapsed, though it came back
        ((0.001, 0.0005, 0.002), True),  # small from the start, and recovers
        ((0.001, 0.0005, 0.0009), False),
        ((0.001, 0.00005, 0.002), False),
    ):
        assert Rehearsal((4.0, 3.0), 4.0, 3.0, apart).learns is learns
    # Half the loss makes up for positions that met on the way, not for those that end as one.
    assert Rehearsal((4.0, 3.0), 4.0, 1.9, (0.3, 0.001, 0.3)).learns
    assert not Rehearsal((4.0, 3.0), 4.0, 2.1, (0.3, 0.001, 0.3)).learns
    assert not Rehearsal((4.0, 3.0), 4.0, 1.9, (0.3, 0.3, 0.001)).learns


@pytest.fixture
def supplied_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace rehearsals: any rate below 1 learns, no other does."""

    def rehearsed(*_: Any, lr: float, warmup: int, steps: int) -> Rehearsal:
        return Rehearsal((4.0,) * steps, 4.0, 3.0 if lr < 1 else 5.0, (0.3, 0.3))

    monkeypatch.setattr(rehearsal, "rehearse", rehearsed)


@pytest.mark.usefixtures("supplied_rehearsals")
def test_a_shortened_warmup_that_fails_is_repeated_three_times_as_long() -> None:
    model, batch = decoder(depth=1).eval(), ClinicBatch(ids(4, 8))
    objective = choose_objective(model, batch, None)
    for lr, warmup, steps in ((1e-3, 99, 48), (3.0, 99, 144), (3.0, 24, 48), (3.0, 0, 48)):
        result = rehearse_once(model, [batch], objective, TrainingPlan(lr=lr, warmup=warmup))
        assert (len(result.losses), result.learns) == (steps, lr < 1)


# ── Where it fails ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("supplied_rehearsals")
def test_other_plans_are_tried_until_one_learns() -> None:
    model, batch = decoder(depth=1).eval(), ClinicBatch(ids(4, 8))
    objective = choose_objective(model, batch, None)
    assert list(rehearse_plan(model, [batch], objective, TrainingPlan(lr=1e-3))) == ["planned"]
    result = rehearse_plan(model, [batch], objective, TrainingPlan(lr=3.0))
    assert list(result) == ["planned", "with warm-up", "at lr 0.3"] and result["at lr 0.3"].learns
    wild = rehearse_plan(model, [batch], objective, TrainingPlan(lr=1e4))
    assert list(wild) == ["planned", "with warm-up", "at lr 1e+03", "at lr 1e+02"]
    assert not any(tried.learns for tried in wild.values())
    assert "with warm-up" not in rehearse_plan(
        model, [batch], objective, TrainingPlan(lr=1e4, warmup=9)
    )


@pytest.mark.trains
def test_alternatives_exclude_the_same_arrangement_and_other_libraries() -> None:
    batch = ClinicBatch(ids(4, 8))
    model = decoder().eval()
    objective = choose_objective(model, batch, None)
    assert list(rehearse_alternatives(model, [batch], objective, TrainingPlan(lr=1e-3))) == [
        "addnorm=admin"
    ]
    foreign = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert rehearse_alternatives(foreign, [batch], objective, TrainingPlan(lr=1e-3)) == {}


def test_large_models_are_rehearsed_for_fewer_steps() -> None:
    assert affordable_steps(decoder(), ClinicBatch(ids())) == REHEARSAL_STEPS
    wide = torch.nn.Linear(30_000, 9000, device="meta")
    assert affordable_steps(wide, ClinicBatch(ids(8, 32))) == MIN_REHEARSAL_STEPS
    middle = torch.nn.Linear(10_000, 2000, device="meta")
    assert affordable_steps(middle, ClinicBatch(ids(8, 100))) == int(2e12 / (6 * 2e7 * 800))


def test_the_recommended_warmup_grows_with_the_unstable_rate() -> None:
    plan = TrainingPlan(lr=1e-3)
    assert recommended_warmup(plan, None) == recommended_warmup(plan, 1.0) == 100
    assert recommended_warmup(plan, 1e-4) == 1000


@pytest.mark.parametrize(
    ("lr", "warmup", "text"),
    (
        (1e-4, 0, "peak 0.0001, no warm-up; stable from the first step: needs no warm-up"),
        (1e-2, 0, "the peak is 20 times what is stable untrained: 2,000 or more would be stable"),
        (1e-2, 1999, "2,000 or more would be stable"),
        (1e-2, 2000, "peak 0.01, warm-up over 2,000 steps; the peak is 20 times what is stable"),
        (1e-2, 2000, "untrained: enough"),
    ),
)
def test_the_schedule_is_compared_with_the_sharpness(lr: float, warmup: int, text: str) -> None:
    evidence = examine(decoder(depth=1), ids(2, 4), sharpness=False).evidence
    sharp = Sharpness(plain=1.0, adam=38 / 5e-4, iterations=6)
    plan = TrainingPlan(lr=lr, warmup=warmup)
    assert text in describe_schedule(dataclasses.replace(evidence, plan=plan, sharpness=sharp))
    assert "stable" not in describe_schedule(dataclasses.replace(evidence, plan=plan))
