"""Segments and refits on a simulated clock: the time is kept whatever the load does."""

import statistics
from collections.abc import Callable
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from addnorm.training.pace import (
    GRACE,
    MAX_EVALUATING,
    Extension,
    Pace,
    Segment,
    complete,
    refit,
)
from addnorm.training.schedule import make_schedule

BUDGET = 600.0
LOADS: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "five times slower than rehearsed": lambda t: 5.0,
    "twenty times slower than rehearsed": lambda t: 20.0,
    "ten times faster than rehearsed": lambda t: 0.1,
    "a load that starts": lambda t: 20.0 if t > 0.4 * BUDGET else 1.0,
    "a load that starts near the end": lambda t: 8.0 if t > 0.95 * BUDGET else 1.0,
    "a load that ends": lambda t: 20.0 if t < 0.4 * BUDGET else 1.0,
    "a load that ends near the end": lambda t: 20.0 if t < 0.9 * BUDGET else 1.0,
    "a load that comes and goes": lambda t: 4.0 if t % 60 < 30 else 1.0,
    "a load that grows": lambda t: 1.0 + 4 * t / BUDGET,
}


class Simulation:
    """A run on a simulated clock: seconds of a step and of an evaluation times the load."""

    def __init__(
        self, load: Callable[[float], float], evaluation: float = 2.0, rehearsed: float = 0.1
    ) -> None:
        steps = round(BUDGET / rehearsed)
        self.segments = [
            Segment(steps=steps, end=float(steps), evaluate_every=max(1, steps // 40), until=BUDGET)
        ]
        self.pace = Pace(steps=[rehearsed])
        self.pace.add_evaluation(evaluation)
        self.load, self.evaluation, self.rehearsed = load, evaluation, rehearsed
        self.step, self.last, self.evaluations = 0, 0, 0
        self.seconds = self.excluded = 0.0
        self.over = False

    def run(self, until: float = float("inf")) -> None:
        while self.step < self.segments[-1].last_step and self.seconds < until:
            self.seconds += (
                self.rehearsed * self.load(self.seconds) * (3 if self.step % 5 else 0.5) / 2.5
            )
            self.step += 1
            now = self.segments[-1]
            if self.pace.close_window(now, self.step, self.seconds, self.excluded):
                segment = refit(now, self.pace, self.step, self.seconds)
                self.segments += [segment] if segment is not None else []
            now = self.segments[-1]
            if self.step < now.last_step and self.seconds + self.pace.evaluation > BUDGET:
                last = complete(now, self.pace, self.step)
                if last is None or self.seconds > BUDGET:
                    self.over = self.seconds > BUDGET
                    break  # the hard limit
                self.segments += [last] if last is not now else []
            due = self.step - self.last >= self.segments[-1].evaluate_every
            if due and self.pace.may_evaluate(self.seconds, self.excluded):
                self._evaluate()
        if self.seconds < until and self.last < self.step:
            self._evaluate()

    def _evaluate(self) -> None:
        seconds = self.evaluation * self.load(self.seconds)
        self.pace.add_evaluation(seconds)
        self.seconds, self.excluded = self.seconds + seconds, self.excluded + seconds
        self.last, self.evaluations = self.step, self.evaluations + 1

    @property
    def end(self) -> float:
        """Position at the end, as a share of the schedule."""
        return self.segments[-1].position(self.step) / self.segments[-1].end


@pytest.mark.parametrize("name", LOADS)
def test_the_time_is_kept_and_the_schedule_is_completed(name: str) -> None:
    run = Simulation(LOADS[name])
    run.run()
    assert 0.9 * BUDGET <= run.seconds <= 1.1 * BUDGET
    assert run.end > 0.96, "a cosine rate is below 0.5 % of its peak"
    assert len(run.segments) < 120


@pytest.mark.parametrize("name", LOADS)
def test_evaluations_take_at_most_a_fifth(name: str) -> None:
    run = Simulation(LOADS[name], evaluation=10.0)
    run.run()
    assert 0.9 * BUDGET <= run.seconds <= 1.15 * BUDGET, "the last evaluation may take its time"
    longest = run.evaluation * max(run.load(t) for t in range(601))
    # Beyond its share: the first one under a load, which nothing announces, and the last one.
    assert run.excluded <= MAX_EVALUATING * BUDGET + 2 * longest
    assert run.evaluations <= 48


@settings(max_examples=30)
@given(
    st.lists(st.floats(min_value=0.5, max_value=8.0), min_size=1, max_size=12),
    st.floats(min_value=0.0, max_value=4.0),
)
def test_any_sequence_of_loads_keeps_the_time(levels: list[float], evaluation: float) -> None:
    run = Simulation(
        lambda t: levels[min(len(levels) - 1, int(len(levels) * t / BUDGET))], evaluation, 0.3
    )
    run.run()
    assert 0.9 * BUDGET <= run.seconds <= 1.1 * BUDGET
    positions = [segment.position(segment.step) for segment in run.segments]
    assert positions == sorted(positions)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from((1.0, 1.0, 2.0, 4.0, 8.0)), min_size=30, max_size=60),
    st.sampled_from((0.5, 1.0, 5.0)),
    st.sampled_from((1.0, 15.0, 40.0)),
)
def test_a_noisy_load_leaves_no_schedule_unfinished(
    levels: list[float], step: float, evaluation: float
) -> None:
    """Bursts of 10 to 20 s, and evaluations of up to a fifteenth of the time."""
    run = Simulation(lambda t: levels[int(t * len(levels) / 600) % len(levels)], evaluation, step)
    run.run()
    if step * max(levels) < GRACE * BUDGET / 2:
        assert run.end > 0.99 or run.over, "an evaluation can take all of the time that is left"


def test_an_evaluation_takes_longer_beside_a_load() -> None:
    """As many steps as before: a load that has begun since slows both, as one that has ended."""
    pace = Pace(steps=[0.1])
    pace.add_evaluation(2.0)
    pace.steps = [0.4]
    assert pace.evaluation == pytest.approx(8.0)
    pace.steps = [0.05]
    assert pace.evaluation == pytest.approx(1.0)


def test_a_late_run_completes_its_schedule_in_a_few_steps() -> None:
    now = Segment(steps=100, end=100.0, evaluate_every=10, until=100.0)
    last = complete(now, Pace(steps=[0.5]), step=60)
    assert last is not None and last.steps == 4 == last.evaluate_every
    assert last.position(60) == 60.0 and last.position(64) == 100.0 and last.until == 100.0
    assert complete(now, Pace(steps=[0.5]), step=97) is now
    assert complete(now, Pace(steps=[3.0]), step=60) is None, "a step is longer than that"


def test_an_end_that_would_come_too_early_is_refitted() -> None:
    """Three steps are left of a heavy load; it has just ended."""
    now = Segment(steps=100, end=100.0, evaluate_every=10, until=100.0)
    segment = refit(now, Pace(steps=[5.0, 5.0, 0.5]), step=97, seconds=60.0)
    assert segment is not None and segment.steps == (40 - 0.5 - 100 * GRACE) / 0.5


def test_a_resumed_run_has_the_same_segments() -> None:
    """State as it is saved: plain values. The clock continues where it was."""
    load = LOADS["a load that comes and goes"]
    whole = Simulation(load)
    whole.run()
    cut = Simulation(load)
    cut.run(until=250.0)
    again = Simulation(load)
    again.segments = [Segment(**asdict(segment)) for segment in cut.segments]
    again.pace = Pace(**asdict(cut.pace))
    for name in ("step", "last", "evaluations", "seconds", "excluded"):
        setattr(again, name, getattr(cut, name))
    again.run()
    assert again.segments == whole.segments and again.seconds == whole.seconds


def test_a_refit_is_continuous_and_ends_with_the_schedule() -> None:
    now = Segment(steps=100, end=100.0, evaluate_every=10, until=100.0)
    segment = refit(now, Pace(steps=[0.5]), step=20, seconds=40.0)
    assert segment is not None
    assert segment.position(20) == now.position(20) == 20.0
    assert segment.position(segment.last_step) == 100.0
    assert segment.steps == (60 - 0.5 - 100 * GRACE) / 0.5 and segment.step == 20
    schedule = make_schedule("linear", warmup=10, steps=100)
    rates = [schedule(segment.position(step)) for step in range(20, segment.last_step + 1)]
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0.0)


def test_a_small_difference_is_not_refitted() -> None:
    now = Segment(steps=1000, end=1000.0, evaluate_every=25, until=100.0 / (1 - GRACE))
    assert refit(now, Pace(steps=[0.1005]), step=100, seconds=10.0) is None
    assert refit(now, Pace(steps=[0.11]), step=100, seconds=10.0) is not None
    assert refit(now, Pace(), step=100, seconds=10.0) is None, "nothing is measured yet"
    assert refit(now, Pace(steps=[0.1]), step=1000, seconds=10.0) is None, "it is at its end"


def test_a_refit_keeps_what_was_requested() -> None:
    now = Segment(steps=100, end=100.0, evaluate_every=7, until=100.0)
    segment = refit(
        now, Pace(steps=[0.1], evaluations=[0.7]), 50, 50.0, max_steps=120, evaluate_every=7
    )
    assert segment is not None and segment.last_step == 120 and segment.evaluate_every == 7
    segment = refit(now, Pace(steps=[1.0], evaluations=[7.0]), 50, 50.0, evaluate_every=7)
    assert segment is not None and segment.steps == round((50 - 8 - 7 - 100 * GRACE) / 2)


def test_the_position_of_an_untouched_run_is_its_step() -> None:
    for steps in (1, 3, 7, 49, 1000):
        segment = Segment(steps=steps, end=steps)
        assert [segment.position(step) for step in range(steps + 1)] == [*range(steps + 1)]


def test_the_pace_is_a_median_of_windows() -> None:
    pace, now = Pace(), Segment(steps=1000, end=1000.0, until=1000.0)
    seconds, expected = 0.0, []
    for number, duration in enumerate((1.0, 30.0, 1.2, 1.1), start=1):
        steps = 5
        seconds += steps * duration
        assert pace.close_window(now, number * steps, seconds, 0.0)
        expected.append(duration)
        assert pace.step == pytest.approx(statistics.median(expected[-3:]))
    assert not pace.close_window(now, 20, seconds, 0.0), "no step since the last window"


def test_an_extension_starts_a_new_schedule() -> None:
    segment = Extension(10, 40, 2, 5).segment(1, 10, 33.0)
    assert (segment.step, segment.last_step, segment.extension) == (10, 50, 1)
    assert segment.position(11) == 1 and segment.position(50) == 40 and segment.until == 0
    timed = Extension(10, 40, 2, 5, minutes=2.0).segment(2, 10, 33.0)
    assert timed.began == 33.0 and timed.until == 153.0
