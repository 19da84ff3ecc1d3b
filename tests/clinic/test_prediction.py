"""Predictions from supplied curves: they are pure functions of numbers."""

import dataclasses
import math
from typing import Any

import pytest

from addnorm.clinic.prediction import (
    CANNOT_TELL,
    WILL_NOT_TRAIN,
    WILL_TRAIN,
    Rehearsal,
    expected_gain,
    is_better,
    predict_outcome,
)

STEPS = 64


def rehearsal(start: float, end: float, advantage: float = 0.0, **changes: Any) -> Rehearsal:
    """A loss that goes straight from start to end, where a constant answer has 3."""
    steps = changes.pop("steps", STEPS)
    losses = tuple(start + (end - start) * i / (steps - 1) for i in range(steps))
    fields: dict[str, Any] = {
        "losses": losses,
        "advantages": tuple(advantage * i / (steps - 1) for i in range(steps)),
        "factors": (1.0,) * steps,
        "held_out": ((0, start), (steps // 2, (start + end) / 2), (steps, end)),
        "held_out_advantages": (0.0, advantage / 2, advantage),
        "trivial": (3.0,) * steps,
        "held_out_trivial": 3.0,
        "planned_steps": 160,
        "planned_progress": 160.0,
    }
    return Rehearsal(**(fields | changes))


LEARNS = rehearsal(4.0, 2.0, 1.0)
STALLS = rehearsal(4.0, 3.0, 0.0, losses=(4.0,) * 8 + (3.0,) * 56)


@pytest.mark.parametrize(
    ("curves", "answer"),
    (
        (LEARNS, WILL_TRAIN),
        (STALLS, WILL_NOT_TRAIN),
        (rehearsal(4.0, 3.05, 0.5), WILL_TRAIN),  # above a constant answer, on its way below it
        (rehearsal(4.0, 3.95, 0.0), WILL_NOT_TRAIN),  # falls far too slowly
        (rehearsal(3.0, 9.0, 0.0), WILL_NOT_TRAIN),
        (rehearsal(4.0, 2.9, 0.0), WILL_NOT_TRAIN),  # falls, but for any targets alike
    ),
)
def test_what_is_learnt_beyond_a_constant_answer_decides(curves: Rehearsal, answer: str) -> None:
    assert predict_outcome(curves).answer == answer


def test_a_loss_that_is_not_finite_will_not_train() -> None:
    losses = (4.0, 3.0, math.nan)
    prediction = predict_outcome(dataclasses.replace(LEARNS, losses=losses, trivial=(3.0,) * 3))
    assert prediction.answer == WILL_NOT_TRAIN and "not finite after 2 steps" in prediction.reason


def test_what_cannot_be_told_is_said() -> None:
    few = rehearsal(4.0, 2.0, 1.0, steps=4)
    assert predict_outcome(few).answer == CANNOT_TELL and "too few" in predict_outcome(few).reason
    unknown = predict_outcome(dataclasses.replace(LEARNS, trivial=()))
    assert unknown.answer == CANNOT_TELL and "constant answer" in unknown.reason
    assert unknown.advice
    alone = predict_outcome(dataclasses.replace(LEARNS, same_batch=True, fresh=False))
    assert alone.answer == CANNOT_TELL and "by heart" in alone.reason
    fails = predict_outcome(dataclasses.replace(STALLS, same_batch=True, fresh=False))
    assert fails.answer == WILL_NOT_TRAIN and "not even one batch" in fails.reason


def test_repeated_batches_are_judged_by_those_that_were_held_out() -> None:
    """The steps' own losses fall because their batches are known; the others do not."""
    memorised = dataclasses.replace(
        LEARNS, fresh=False, held_out=((0, 4.0), (32, 3.1), (64, 3.2)),
        held_out_advantages=(0.0, 0.0, 0.0),
    )  # fmt: skip
    assert predict_outcome(memorised).answer == WILL_NOT_TRAIN
    assert memorised.final == 3.2 and LEARNS.final < 2.3
    assert predict_outcome(dataclasses.replace(LEARNS, fresh=False)).answer == WILL_TRAIN


def test_the_gain_is_extrapolated_along_the_rates() -> None:
    curve = LEARNS.curve()
    assert curve is not None
    (p1, p2), (g1, g2) = curve.positions, curve.gains
    assert (p1, p2) == (40.0, 56.0)
    slope = 2 / 63
    assert (g2 - g1) / (p2 - p1) == pytest.approx(slope)
    assert expected_gain(LEARNS, curve) == pytest.approx(g2 + 0.25 * slope * (160 - 56))
    ended = dataclasses.replace(LEARNS, planned_steps=64, planned_progress=64.0)
    assert expected_gain(ended, curve) == pytest.approx(g2 + 0.25 * slope * 8)
    decayed = dataclasses.replace(LEARNS, planned_progress=50.0)  # rates that fall to nothing
    assert expected_gain(decayed, curve) == pytest.approx(g2)
    rises = rehearsal(2.0, 4.0)
    other = rises.curve()
    assert other is not None and expected_gain(rises, other) == pytest.approx(other.gains[1])


def test_a_slow_start_of_a_long_plan_rules_nothing_out() -> None:
    slow = rehearsal(4.0, 3.98, 0.2, planned_progress=1000.0, planned_steps=1000)
    noisy = tuple(4.0 + (0.3 if i % 2 else -0.3) for i in range(STEPS))
    slow = dataclasses.replace(slow, losses=noisy)
    assert predict_outcome(slow).answer == CANNOT_TELL
    rising = tuple(loss + 0.1 * i for i, loss in enumerate(noisy))
    for changes in (
        {"planned_progress": 160.0},
        {"advantages": (0.0,) * STEPS},
        {"losses": rising},
    ):
        assert predict_outcome(dataclasses.replace(slow, **changes)).answer == WILL_NOT_TRAIN


def test_a_steady_start_that_will_pass_a_constant_answer_is_left_open() -> None:
    slow = rehearsal(5.0, 3.9, 0.1, planned_progress=150.0, planned_steps=150)
    assert predict_outcome(slow).answer == CANNOT_TELL
    curve = slow.curve()
    assert curve is not None and expected_gain(slow, curve) < 0
    stalls = tuple(5.0 - 0.02 * min(i, 40) for i in range(STEPS))
    for changes in (
        {"planned_progress": 70.0, "planned_steps": 70},  # the plan ends before
        {"advantages": (0.0,) * STEPS},  # falls, but for any targets alike
        {"losses": stalls},
    ):
        assert predict_outcome(dataclasses.replace(slow, **changes)).answer == WILL_NOT_TRAIN
    repeated = dataclasses.replace(
        slow, fresh=False, held_out=((0, 5.0), (32, 4.4), (64, 3.9)), held_out_advantages=(0.1,) * 3
    )
    assert predict_outcome(repeated).answer == CANNOT_TELL


def test_the_reason_says_what_was_extrapolated_and_shortened() -> None:
    reason = predict_outcome(
        dataclasses.replace(LEARNS, planned_warmup=99, shortened_warmup=32)
    ).reason
    assert "(a constant answer: 3.00)" in reason and "extrapolated to 160 steps" in reason
    assert "(warm-up of 99 rehearsed as 32)" in reason
    assert predict_outcome(LEARNS).extrapolated
    assert not predict_outcome(dataclasses.replace(LEARNS, planned_steps=64)).extrapolated


def test_only_what_is_clearly_ahead_and_will_train_is_better() -> None:
    assert is_better(LEARNS, STALLS)
    assert not is_better(STALLS, LEARNS)
    assert not is_better(LEARNS, LEARNS)
    assert not is_better(rehearsal(4.0, 2.1, 1.0), LEARNS)
    assert not is_better(dataclasses.replace(LEARNS, trivial=()), STALLS)
    diverged = dataclasses.replace(STALLS, losses=(4.0, math.inf), trivial=(3.0, 3.0))
    assert is_better(LEARNS, diverged)
