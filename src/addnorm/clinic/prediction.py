"""How a training will end, from the curves of its rehearsal.

Two curves decide, both relative to what needs no model at all:

    gain        trivial loss − loss: above 0, the model is better than the best constant answer
    advantage   loss with the targets of another row − loss: above 0, answers depend on the input

The gain at the end of the planned training is extrapolated along the sum of the rates: a training
whose rates add up to twice those of the rehearsal goes on for as long again, at a quarter of the
last slope. A model above the constant answer that learns at a steady pace is left open if its last
slope leads below it within the plan. Everything here is a pure function of numbers; the thresholds
were chosen on one half of bench/clinic_predictions.py, and its other half reports how often they
are right.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

WILL_TRAIN, WILL_NOT_TRAIN, CANNOT_TELL = "will train", "will not train", "cannot tell"
TRAINS_ABOVE, FAILS_BELOW = 0.05, 0.005
"""Expected gain, relative to the trivial loss, from which a training works, and below which not."""
ADVANTAGE = 0.001
"""Advantage, relative to the trivial loss, from which answers depend on their input."""
DAMPING = 0.25
"""Share of the last slope with which a curve is extrapolated: curves flatten."""
LONG_PLAN = 10.0
"""Ratio of plan to rehearsal, in sums of rates, beyond which a slow start rules nothing out."""
UNKNOWN_PLAN = 10.0
"""The same ratio, assumed if the planned steps are unknown."""
STEADY = 0.5
"""Least share of a quarter's rise in gain that the next one has, if learning does not stall."""
MIN_STEPS = 8
"""Fewest steps from which a curve is read."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The curves of a rehearsal. What could not be measured is None or empty.

    Parameters
    ----------
    losses : loss of each step's batch, before the step
    advantages : for each step, how much larger its loss is with the targets of another row
    factors : factor on the peak rate at each step
    held_out : step and loss of the batches that no step uses: at the start, every few steps, at
        the end
    held_out_advantages : the advantage of the same batches
    position_variance : share of the last site's variance between positions, at the same steps
    trivial : loss of the best constant answer, for the batch of each step
    held_out_trivial : the same for the batches that no step uses
    fresh : whether every step used another batch
    same_batch : whether the losses are those of the batch that is learnt from again and again
    planned_steps : steps of the whole training
    planned_progress : sum of the factors of the whole training
    planned_warmup : steps of the planned warm-up
    shortened_warmup : steps to which the warm-up was shortened, if it was
    confirmed : of a remedy: whether it was ahead of the plan again from other initial weights
    """

    losses: tuple[float, ...]
    advantages: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    held_out: tuple[tuple[int, float], ...] = ()
    held_out_advantages: tuple[float, ...] = ()
    position_variance: tuple[float, ...] = ()
    trivial: tuple[float, ...] = ()
    held_out_trivial: float | None = None
    fresh: bool = True
    same_batch: bool = False
    planned_steps: int | None = None
    planned_progress: float | None = None
    planned_warmup: int = 0
    shortened_warmup: int | None = None
    confirmed: bool = True

    @property
    def final(self) -> float:
        """The loss at the end: mean of the last quarter of steps, or held out if they repeat."""
        if self.fresh or self.same_batch or not self.held_out:
            return _mean(self.losses[-quarter(len(self.losses)) :])
        return self.held_out[-1][1]

    @property
    def trivial_mean(self) -> float | None:
        """The loss of the best constant answer, mean over the steps."""
        return _mean(self.trivial) if self.trivial else None

    def curve(self) -> "Curve | None":
        """Return gain and advantage at the end and before it; None without a trivial loss."""
        if not self.trivial or len(self.losses) < MIN_STEPS:
            return None
        if self.fresh or self.same_batch or self.held_out_trivial is None:
            return self._curve_of_steps()
        return self._curve_held_out(self.held_out_trivial)

    def _curve_of_steps(self) -> "Curve":
        n, q = len(self.losses), quarter(len(self.losses))
        gains = [a - b for a, b in zip(self.trivial, self.losses, strict=True)]
        parts = slice(n - 2 * q, n - q), slice(n - q, n)
        earlier = gains[n - 3 * q : n - 2 * q]
        positions = [sum(self.factors[: part.stop]) - sum(self.factors[part]) / 2 for part in parts]
        advantages = self.advantages if len(self.advantages) == n else ()
        return Curve(
            positions=(positions[0], positions[1]),
            gains=(_mean(gains[parts[0]]), _mean(gains[parts[1]])),
            earlier_gain=_mean(earlier) if earlier else None,
            gain_error=_error(gains[parts[1]]),
            advantages=tuple(_mean(advantages[part]) for part in parts) if advantages else (),
            advantage_error=_error(advantages[parts[1]]) if advantages else 0.0,
        )

    def _curve_held_out(self, trivial: float) -> "Curve":
        (before, first), (after, last) = self.held_out[-2:]
        return Curve(
            positions=(sum(self.factors[:before]), sum(self.factors[:after])),
            gains=(trivial - first, trivial - last),
            earlier_gain=trivial - self.held_out[-3][1] if len(self.held_out) > 2 else None,
            gain_error=0.0,
            advantages=tuple(self.held_out_advantages[-2:]),
            advantage_error=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Gain and advantage in the last quarter of a rehearsal and in the one before.

    Parameters
    ----------
    positions : sum of the rates' factors up to the middle of both quarters
    gains, gain_error : gain in both, and the standard error of the last
    earlier_gain : gain in the quarter before both, if there is one
    advantages, advantage_error : the same for the advantage; empty if unknown
    """

    positions: tuple[float, float]
    gains: tuple[float, float]
    earlier_gain: float | None = None
    gain_error: float = 0.0
    advantages: tuple[float, ...] = ()
    advantage_error: float = 0.0


def quarter(steps: int) -> int:
    """Return a quarter of the steps, at least one."""
    return max(1, steps // 4)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


@dataclass(frozen=True)
class Prediction:
    """The answer, why, what would settle an open question, and what is expected.

    Parameters
    ----------
    answer : will train, will not train or cannot tell
    reason : the curves in a sentence
    advice : if the answer is open, what to do about it
    expected : loss at the end of the planned training, extrapolated
    extrapolated : whether the plan is longer than the rehearsal
    """

    answer: str
    reason: str
    advice: str = ""
    expected: float | None = None
    extrapolated: bool = False


def predict_outcome(r: Rehearsal) -> Prediction:
    """Return whether the planned training will work, from the curves of its rehearsal.

    >>> falls = tuple(4.0 - 0.03 * step for step in range(64))
    >>> predict_outcome(Rehearsal(losses=falls, trivial=(3.0,) * 64, factors=(1.0,) * 64)).answer
    'will train'
    """
    bad = next((i for i, loss in enumerate(r.losses) if not math.isfinite(loss)), None)
    if bad is not None:
        return Prediction(WILL_NOT_TRAIN, f"the loss is not finite after {bad} steps")
    curve = r.curve()
    if curve is None:
        return _unknown(r)
    trivial = r.trivial_mean
    assert trivial is not None
    scale = max(abs(trivial), 1e-12)
    gain = expected_gain(r, curve) / scale
    facts = _facts(r, curve, trivial - gain * scale)
    if r.same_batch:
        return _of_one_batch(curve, scale, facts)
    depends = answers_depend_on_input(curve, scale)
    start = _mean(r.losses[: quarter(len(r.losses))])
    rises = r.final > start + 2 * curve.gain_error
    longer = r.planned_steps is None or r.planned_steps > len(r.losses)
    outlook = partial(Prediction, expected=trivial - gain * scale, extrapolated=longer)
    if gain >= TRAINS_ABOVE and depends is not False:
        return outlook(WILL_TRAIN, facts)
    if gain >= FAILS_BELOW and depends is not False:
        return outlook(CANNOT_TELL, facts, "Train for a while, and examine the loss curve.")
    if depends and (passes_trivial(r, curve) or (_is_long(r) and not rises)):
        return outlook(CANNOT_TELL, facts, "Train for a while, and examine the loss curve.")
    return outlook(WILL_NOT_TRAIN, facts)


def is_better(one: Rehearsal, other: Rehearsal) -> bool:
    """Return whether one is predicted to train, and is clearly ahead of the other already."""
    mine, others = one.curve(), other.curve()
    if mine is None or not one.confirmed or predict_outcome(one).answer != WILL_TRAIN:
        return False
    if others is None:
        return not all(map(math.isfinite, other.losses))
    error = math.hypot(mine.gain_error, others.gain_error)
    return mine.gains[1] > others.gains[1] + 2 * error


def expected_gain(r: Rehearsal, curve: Curve) -> float:
    """Return the gain at the end of the plan: the last slope goes on, damped, if it is not noise.

    g(P) = g₂ + DAMPING · (g₂ − g₁) / (p₂ − p₁) · (P − p₂),   p the sum of the rates' factors
    """
    (p1, p2), (g1, g2) = curve.positions, curve.gains
    planned = r.planned_progress
    if planned is None:
        planned = UNKNOWN_PLAN * sum(r.factors)
    if p2 <= p1 or g2 - g1 <= curve.gain_error:
        return g2
    return g2 + DAMPING * (g2 - g1) / (p2 - p1) * max(0.0, planned - p2)


def passes_trivial(r: Rehearsal, curve: Curve) -> bool:
    """Return whether learning that does not stall leads below the trivial loss within the plan.

    The gain rises by at least STEADY of what it rose by before, and g₂ + slope · (P − p₂) > 0.
    """
    (p1, p2), (g1, g2) = curve.positions, curve.gains
    if curve.earlier_gain is None or r.planned_progress is None or p2 <= p1:
        return False
    rise, before = g2 - g1, g1 - curve.earlier_gain
    steady = rise > 2 * curve.gain_error and rise >= STEADY * before > 0
    return steady and g2 + rise / (p2 - p1) * (r.planned_progress - p2) > 0


def answers_depend_on_input(curve: Curve, scale: float) -> bool | None:
    """Return whether the advantage is above noise; None if it is unknown."""
    if not curve.advantages:
        return None
    least = max(ADVANTAGE * scale, 2 * curve.advantage_error)
    return curve.advantages[-1] > least


def _is_long(r: Rehearsal) -> bool:
    """Return whether the plan is so much longer that nothing can be ruled out."""
    if r.planned_progress is None:
        return True
    return r.planned_progress > LONG_PLAN * sum(r.factors)


def _of_one_batch(curve: Curve, scale: float, facts: str) -> Prediction:
    """Return the prediction if the only batch was learnt again and again."""
    if max(curve.gains[1], curve.gains[1] - curve.gains[0]) < FAILS_BELOW * scale:
        return Prediction(WILL_NOT_TRAIN, f"{facts}; not even one batch is learnt by heart")
    return Prediction(
        CANNOT_TELL,
        f"{facts}; the only batch was learnt by heart, which says nothing about others",
        "Pass more batches of your data (more_batches).",
    )


def _unknown(r: Rehearsal) -> Prediction:
    if len(r.losses) < MIN_STEPS:
        reason = f"{len(r.losses)} steps are too few to see a trend"
    else:
        reason = "the loss of a constant answer could not be computed for this loss"
    return Prediction(
        CANNOT_TELL, reason, "Pass the loss and the targets: ClinicBatch(x, targets)."
    )


def _facts(r: Rehearsal, curve: Curve, expected: float) -> str:
    trivial = r.trivial_mean
    assert trivial is not None
    text = (
        f"the loss goes from {r.losses[0]:.2f} to {r.final:.2f} (a constant answer: {trivial:.2f})"
    )
    if curve.advantages:
        text += f"; with the targets of another row it is {curve.advantages[-1]:+.2g}"
    if r.planned_steps is not None and r.planned_steps > len(r.losses):
        text += f"; extrapolated to {r.planned_steps:,} steps, about {max(expected, 0.0):.2f}"
    if r.shortened_warmup is not None:
        text += f" (warm-up of {r.planned_warmup:,} rehearsed as {r.shortened_warmup})"
    return text
