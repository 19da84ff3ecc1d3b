"""Rehearsals: equal to the planned training, weights restored, and other plans if one fails."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm.clinic import ClinicBatch, TrainingPlan, examine, rehearsal
from addnorm.clinic.call_model import Objective, choose_objective
from addnorm.clinic.prediction import Rehearsal, is_better
from addnorm.clinic.rehearsal import (
    MIN_REHEARSAL_STEPS,
    PLAN_SCHEDULES,
    REHEARSAL_STEPS,
    affordable_steps,
    hold_out_batches,
    other_initial_weights,
    other_plans,
    recommended_warmup,
    rehearse,
    rehearse_alternatives,
    rehearse_plan,
    with_targets_of_another_row,
)
from addnorm.clinic.sharpness import Sharpness
from addnorm.clinic.text import describe_schedule
from addnorm.errors import AddnormError
from addnorm.training.schedule import make_schedule
from tests.clinic.subjects import decoder, ids
from tests.clinic.test_prediction import LEARNS, STALLS

# ── The plan ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PLAN_SCHEDULES)
@pytest.mark.parametrize("warmup", (0, 1, 7))
def test_schedules_equal_those_of_training(name: str, warmup: int) -> None:
    plan = TrainingPlan(lr=1.0, warmup=warmup, steps=30, schedule=name, min_lr_ratio=0.1)
    expected = make_schedule(name, warmup=warmup, steps=30, floor=0.1)
    steps = range(1, 31)
    assert [plan.factor(s) for s in steps] == pytest.approx([expected(s) for s in steps])
    assert plan.progress(30) == pytest.approx(sum(map(expected, steps)))


def test_a_schedule_of_unknown_length_stays_at_its_peak() -> None:
    plan = TrainingPlan(lr=1.0, schedule="cosine")
    assert plan.factor(10_000) == 1.0


@pytest.mark.parametrize(
    "wrong",
    (
        {"lr": 0.0},
        {"lr": 1.0, "warmup": -1},
        {"lr": 1.0, "steps": 0},
        {"lr": 1.0, "schedule": "step"},
        {"lr": 1.0, "optimizer": "lion"},
    ),
)
def test_impossible_plans_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AddnormError):
        TrainingPlan(**wrong)


def test_optimizers_have_the_planned_settings() -> None:
    model = nn.Linear(2, 2)
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
    for name, kind in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        made = TrainingPlan(lr=0.1, optimizer=name, **options).optimizer_for(model)
        assert type(made) is kind and options.items() <= made.defaults.items()
    sgd = TrainingPlan(lr=0.1, optimizer="sgd", momentum=0.5).optimizer_for(model)
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["momentum"] == 0.5
    given = torch.optim.NAdam(model.parameters(), lr=0.02, weight_decay=0.3)
    plan = TrainingPlan.from_optimizer(given, warmup=5)
    copied = plan.optimizer_for(nn.Linear(3, 3))
    assert isinstance(copied, torch.optim.NAdam) and copied.defaults["weight_decay"] == 0.3
    assert (plan.lr, plan.warmup, plan.described().optimizer) == (0.02, 5, "NAdam")


# ── One rehearsal ─────────────────────────────────────────────────────────────────────────────────


def batches_of(count: int) -> list[ClinicBatch]:
    return [ClinicBatch(ids(4, 8)) for _ in range(count)]


@pytest.mark.trains
@pytest.mark.parametrize("warmup", (0, 1, 3, 5))
def test_a_rehearsal_equals_the_training_and_restores_the_weights(warmup: int) -> None:
    """A warm-up is as planned up to half of the steps; a longer one is shortened to that."""
    model, batches = decoder().eval(), batches_of(9)
    objective = choose_objective(model, batches[0], None)
    before = [p.detach().clone() for p in model.parameters()]
    plan = TrainingPlan(lr=0.01, warmup=warmup, clip=0.5, optimizer="adamw", weight_decay=0.1)
    result = rehearse(model, batches, objective, plan, steps=6)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters()) and not model.training
    assert result.shortened_warmup == (3 if warmup == 5 else None)
    used = dataclasses.replace(plan, warmup=min(warmup, 3))
    optimizer = used.optimizer_for(model)
    losses, advantages = [], []
    for step, batch in enumerate(batches[2:8] if len(batches) > 8 else [], start=1):
        output = model(batch.inputs)
        loss = objective.value(output, batch)
        moved = ClinicBatch(batch.inputs.roll(1, 0))  # type: ignore[union-attr]
        losses.append(float(loss.detach()))
        advantages.append(float(objective.value(output, moved).detach()) - losses[-1])
        optimizer.param_groups[0]["lr"] = 0.01 * used.factor(step)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert result.losses == pytest.approx(losses, rel=1e-4)
    assert result.advantages == pytest.approx(advantages, abs=1e-3)
    held_out = sum(float(objective(model, batch).detach()) for batch in batches[:2]) / 2
    assert result.held_out[-1] == (6, pytest.approx(held_out, rel=1e-4))
    assert len(result.trivial) == 6 and result.fresh and not result.same_batch


@pytest.mark.trains
def test_dropout_is_that_of_training() -> None:
    model, batches = decoder(dropout=0.5, depth=1).eval(), batches_of(9)
    objective = choose_objective(model, batches[0], None)
    first, again, other = (
        rehearse(model, batches, objective, TrainingPlan(lr=1e-9), steps=4, seed=seed)
        for seed in (0, 0, 1)
    )
    assert first.losses == again.losses != other.losses
    clean = float(objective(model, batches[2]).detach())
    assert abs(first.losses[0] - clean) > 1e-3


def test_batches_are_held_out_or_the_only_one_is_split() -> None:
    model, (batch, *others) = decoder().eval(), batches_of(12)
    objective = choose_objective(model, batch, None)
    held_out, learnt = hold_out_batches([batch, *others], objective)
    assert (len(held_out), len(learnt)) == (2, 10)
    assert [len(part) for part in hold_out_batches([batch, others[0]], objective)] == [1, 1]
    assert [part.row_count for part in hold_out_batches([batch], objective)[1]] == [2, 2]
    random = Objective(objective.loss, "noise", random_targets=True)
    assert all(part == [batch] for part in hold_out_batches([batch, others[0]], random))


def test_targets_of_another_row_move_everything_but_what_has_no_rows() -> None:
    x, mask = torch.arange(6).view(3, 2), torch.ones(5, 5)
    moved = with_targets_of_another_row(ClinicBatch({"x": x, "mask": mask}, x[:, 0]))
    assert moved.arguments["x"][:, 0].tolist() == [4, 0, 2] and moved.arguments["mask"] is mask
    assert moved.targets is not None and moved.targets.tolist() == [4, 0, 2]


@pytest.mark.trains
def test_a_models_own_loss_has_an_advantage_on_held_out_batches() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decoder(depth=1)

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            logits = self.inner(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return type("Output", (), {"logits": logits, "loss": loss})()

    batches = [ClinicBatch({"ids": b.inputs, "labels": b.inputs}) for b in batches_of(9)]
    model = Own().eval()
    objective = choose_objective(model, batches[0], None)
    result = rehearse(model, batches, objective, TrainingPlan(lr=1e-2), steps=4)
    assert result.advantages == () and len(result.held_out_advantages) == len(result.held_out)
    assert result.trivial and result.held_out_advantages[-1] != 0.0


# ── Where it fails ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def supplied_rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[TrainingPlan]:
    """Replace rehearsals: any rate below 1 learns, no other does; return the plans."""
    plans = []

    def rehearsed(model: Any, batches: Any, aim: Any, plan: TrainingPlan, **_: Any) -> Rehearsal:
        plans.append(plan)
        return LEARNS if plan.lr < 1 else STALLS

    monkeypatch.setattr(rehearsal, "rehearse", rehearsed)
    monkeypatch.setattr(rehearsal, "trivial_losses", lambda *_: [3.0])
    return plans


@pytest.mark.usefixtures("supplied_rehearsals")
def test_other_plans_are_tried_until_one_works() -> None:
    model, batch = decoder(depth=1).eval(), ClinicBatch(ids(4, 8))
    objective = choose_objective(model, batch, None)

    def tried(**plan: Any) -> list[str]:
        return list(rehearse_plan(model, [batch], objective, TrainingPlan(**plan)))

    assert tried(lr=1e-3) == ["planned"]
    assert tried(lr=3.0) == ["planned", "with warm-up 100", "at lr 0.3"]
    assert tried(lr=3.0, warmup=100) == ["planned", "at lr 0.3"]
    assert tried(lr=1e4) == [
        "planned", "with warm-up 100", "at lr 1e+03", "at lr 1e+02", "at lr 1e+05",
    ]  # fmt: skip


def test_a_remedy_that_is_ahead_from_one_draw_of_weights_only_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = decoder(depth=1).eval(), ClinicBatch(ids(4, 8))
    objective = choose_objective(model, batch, None)
    start = model.tokens.weight.detach().clone()

    def rehearsed(each: Any, batches: Any, aim: Any, plan: TrainingPlan, **_: Any) -> Rehearsal:
        lucky = plan.warmup and torch.equal(each.tokens.weight, start)
        return LEARNS if lucky or plan.lr < 1 else STALLS

    monkeypatch.setattr(rehearsal, "rehearse", rehearsed)
    monkeypatch.setattr(rehearsal, "trivial_losses", lambda *_: [3.0])
    messages: list[str] = []
    tried = rehearse_plan(model, [batch], objective, TrainingPlan(lr=3.0), messages.append)
    assert [text.split(":")[0] for text in messages] == [
        "rehearsing the plan",
        "rehearsing the plan with warm-up 100",
        "rehearsing the plan at lr 0.3",
    ]
    assert {name: each.confirmed for name, each in tried.items()} == {
        "planned": True, "with warm-up 100": False, "at lr 0.3": True,
    }  # fmt: skip
    assert not is_better(tried["with warm-up 100"], tried["planned"])
    assert is_better(tried["at lr 0.3"], tried["planned"])


def test_other_initial_weights_hold_the_same_numbers_and_are_restored() -> None:
    model = decoder(depth=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with other_initial_weights(model):
        for name, p in model.named_parameters():
            assert torch.equal(p.flatten().sort().values, before[name].flatten().sort().values)
        assert not torch.equal(model.tokens.weight, before["tokens.weight"])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    norm = next(m for m in model.modules() if isinstance(m, nn.LayerNorm))
    with torch.no_grad():
        norm.weight[0] = 2.0  # trained: its weights are not drawn
    with other_initial_weights(model):
        assert torch.equal(model.tokens.weight, before["tokens.weight"])


def test_other_rates_also_hold_for_a_function_that_makes_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    plan = TrainingPlan.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), steps=400)
    lower = other_plans(plan)["at lr 0.05"]
    made = lower.optimizer_for(model)
    assert made.param_groups[0]["lr"] == pytest.approx(0.05)
    assert lower.lr == 0.05 and lower.optimizer_name == "SGD"


@pytest.mark.trains
@pytest.mark.usefixtures("supplied_rehearsals")
def test_alternatives_exclude_the_same_arrangement_and_other_libraries() -> None:
    batch = ClinicBatch(ids(4, 8))
    model = decoder().eval()
    objective = choose_objective(model, batch, None)
    plan = TrainingPlan(lr=1e-3)
    planned = Rehearsal(losses=(1.0,))
    tried = rehearse_alternatives(model, [batch], objective, plan, planned)
    assert list(tried) == ["addnorm=admin"]
    foreign = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert rehearse_alternatives(foreign, [batch], objective, plan, planned) == {}


def test_large_models_are_rehearsed_for_fewer_steps() -> None:
    plan = TrainingPlan(lr=1e-3)
    assert affordable_steps(decoder(), ClinicBatch(ids()), plan) == REHEARSAL_STEPS
    short = TrainingPlan(lr=1e-3, steps=20)
    assert affordable_steps(decoder(), ClinicBatch(ids()), short) == 20
    wide = torch.nn.Linear(30_000, 9000, device="meta")
    assert affordable_steps(wide, ClinicBatch(ids(8, 32)), plan) == MIN_REHEARSAL_STEPS
    middle = torch.nn.Linear(10_000, 2000, device="meta")
    assert affordable_steps(middle, ClinicBatch(ids(8, 100)), plan) == int(2e12 / (6 * 2e7 * 800))


def test_the_recommended_warmup_grows_with_the_unstable_rate() -> None:
    plan = TrainingPlan(lr=1e-3)
    assert recommended_warmup(plan, None) == recommended_warmup(plan, 1.0) == 100
    assert recommended_warmup(plan, 1e-4) == 1000
    assert recommended_warmup(dataclasses.replace(plan, steps=200), 1e-4) == 50


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
