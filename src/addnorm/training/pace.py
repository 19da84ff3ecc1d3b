"""The schedule of a run against the clock: segments, and how they are refitted to a time budget.

A run moves along its schedule from position 0 to the end. Without a time budget the position is the
number of the step. With one, the position moves so that it reaches the end when the time does:

    position(s) = start + (end − start) · (s − step) / steps        for step < s ≤ step + steps

is a *segment*. A refit appends one that starts at the present position and lasts as many steps as
still fit. The rate is a function of the position, so it is continuous across refits and reaches its
last value at the end of the time, whatever the load of the machine does.
"""

import statistics
from dataclasses import dataclass, field, replace
from math import ceil, inf

RECENT = 3
"""Windows of steps, evaluations and checkpoints whose median counts."""
EVALUATIONS = 40
"""Evaluations in a run, if they cost little."""
MAX_EVALUATING = 0.2
"""Largest share of the time for evaluations and checkpoints, except for the last ones."""
LONG_WINDOW, SHORT_WINDOW = 0.02, 0.005
"""Longest and shortest time between refits, as shares of the budget."""
MAX_SUMMARY = 8.0
"""Most seconds to keep for the summary."""
SUMMARY_CPU = 0.5
"""Seconds of CPU time from the last evaluation to the end of the process, besides evaluations."""
GRACE = 0.02
"""Share of the budget that a refit leaves free, and that a run may take longer to end its schedule.
"""
REFIT_TOLERANCE = 0.02
"""Relative change of the remaining steps below which nothing is refitted."""


@dataclass(frozen=True)
class Segment:
    """A part of a run in which the position on the schedule moves at one speed.

    Parameters
    ----------
    steps : Steps that it lasts.
    end : Position at its end.
    step : Steps done when it begins.
    start : Position at its beginning.
    evaluate_every : Steps between evaluations; 0 for only one, at the end.
    extension : The extension whose schedule it is on, counted from 1; 0 for the run's own.
    began : Seconds of the run at which its time budget began.
    until : Seconds of the run at which it must end; 0 for no limit.

    Examples
    --------
    >>> half_speed = Segment(steps=20, end=10.0, step=5, start=0.0)
    >>> half_speed.position(6), half_speed.position(25), half_speed.last_step
    (0.5, 10.0, 25)
    """

    steps: int
    end: float
    step: int = 0
    start: float = 0.0
    evaluate_every: int = 0
    extension: int = 0
    began: float = 0.0
    until: float = 0.0

    @property
    def last_step(self) -> int:
        return self.step + self.steps

    def position(self, step: int) -> float:
        """Return the position on the schedule of a step, counted from 1."""
        span, done = self.end - self.start, step - self.step
        if span == self.steps:
            return self.start + done  # exact, without a rounded quotient
        return self.start + span * min(done, self.steps) / self.steps


@dataclass
class Pace:
    """Recent durations, by which a run is refitted to its time budget. Saved in checkpoints.

    Parameters
    ----------
    steps : Mean seconds of a step in each of the last windows; a window is the time of a refit.
    evaluations : Seconds of the last evaluations.
    ratios : The same in numbers of steps, at the pace of that time.
    saves : Seconds of the last checkpoints.
    slowdowns : Seconds of the clock per second of CPU time in each of the last windows, 1 or more.
    windows : Number of windows so far.
    window_step, window_seconds : Steps and seconds of the run at the start of the present window.
    window_excluded : Seconds of evaluations and checkpoints before the present window.
    """

    steps: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    slowdowns: list[float] = field(default_factory=list)
    windows: int = 0
    window_step: int = 0
    window_seconds: float = 0.0
    window_excluded: float = 0.0

    @property
    def step(self) -> float:
        """Median seconds of a step, over windows: their means add up, and the median is robust."""
        return statistics.median(self.steps) if self.steps else 0.0

    @property
    def evaluation(self) -> float:
        """Seconds that an evaluation and a checkpoint are expected to take at the usual pace."""
        return self.evaluation_at(self.step)

    def evaluation_at(self, step: float) -> float:
        """Return the seconds of an evaluation and a checkpoint while a step takes `step` seconds.

        As many steps as the last evaluations took, by their median: a load slows both.
        """
        if self.ratios and step:
            return statistics.median(self.ratios) * step + _high(self.saves)
        return _high(self.evaluations) + _high(self.saves)

    def summary(self, budget: float, part_limit: float = inf) -> float:
        """Return the seconds to keep for the summary, which comes after the last evaluation.

        It has two parts that cost about an evaluation each, at most `part_limit` seconds; writing
        the page and ending the process take longer beside other processes. A rough value is enough:
        it is at most an eighth of the budget.
        """
        slowdown = statistics.median(self.slowdowns) if self.slowdowns else 1.0
        seconds = SUMMARY_CPU * slowdown + 2 * min(_high(self.evaluations), part_limit)
        return min(seconds, MAX_SUMMARY, budget / 8)

    def may_evaluate(self, seconds: float, excluded: float) -> bool:
        """Return whether evaluations and checkpoints stay within their share after another one."""
        return excluded + self.evaluation <= MAX_EVALUATING * seconds

    def add(self, name: str, seconds: float) -> None:
        """Append a duration to a list of recent ones."""
        times = getattr(self, name)
        times.append(seconds)
        del times[:-RECENT]

    def add_evaluation(self, seconds: float) -> None:
        """Append the duration of an evaluation."""
        self.add("evaluations", seconds)
        if self.step:
            self.add("ratios", seconds / self.step)

    def open_window(self, step: int, seconds: float, excluded: float) -> None:
        """Start a new window at the present step."""
        self.window_step, self.window_seconds, self.window_excluded = step, seconds, excluded

    def close_window(self, now: Segment, step: int, seconds: float, excluded: float) -> bool:
        """Return whether a refit is due; if so, store the window's pace and start a new one.

        A window ends after a share of the budget, or when twice the expected steps are done: a
        machine that becomes idle must not run through the rest of the schedule in one window.

        Parameters
        ----------
        now : the present segment
        step : steps done
        seconds : seconds of the run
        excluded : seconds of evaluations and checkpoints of the run
        """
        done, spent = step - self.window_step, seconds - self.window_seconds
        if done < 1 or not now.until:
            return False
        budget, left = now.until - now.began, max(now.until - self.window_seconds, 1e-9)
        share = SHORT_WINDOW
        if self.windows >= 4:
            share = min(LONG_WINDOW, max(SHORT_WINDOW, 0.1 * left / budget))
        expected = (now.last_step - self.window_step) * share * budget / left
        if spent < share * budget and done < max(3.0, 2 * expected):
            return False
        own = spent - (excluded - self.window_excluded)
        self.add("steps", max(own, 0.0) / done)
        self.windows += 1
        self.open_window(step, seconds, excluded)
        return True


def _high(times: list[float]) -> float:
    """Return the median of recent durations or the last one, if that is more; 0 without any."""
    return max(statistics.median(times), times[-1]) if times else 0.0


def refit(
    now: Segment,
    pace: Pace,
    step: int,
    seconds: float,
    *,
    max_steps: int | None = None,
    evaluate_every: int | None = None,
    part_limit: float = inf,
) -> Segment | None:
    """Return the segment that ends with the time budget, or None if the present one does.

    With n steps of t seconds and k evaluations of e seconds, the last one included, in the r
    seconds that remain before the summary, without the share GRACE:

        n t + k e = r,    k = min(40 r / budget, r / 5e), and at least 1

    Parameters
    ----------
    now : the present segment, with a time budget
    pace : recent durations
    step : steps done
    seconds : seconds of the run
    max_steps : largest number of steps of the run, if there is one
    evaluate_every : steps between evaluations, if they are fixed
    part_limit : time limit of each part of the summary

    Examples
    --------
    >>> plan = Segment(steps=1000, end=1000.0, evaluate_every=100, until=100.0)
    >>> slower = refit(plan, Pace(steps=[0.2]), step=100, seconds=20.0)
    >>> slower.steps, slower.start, slower.end, slower.evaluate_every
    (388, 100.0, 1000.0, 13)
    """
    budget, remaining = now.until - now.began, now.last_step - step
    # An end that comes too early cannot be undone, but one that comes too late can be refitted.
    cost = min(pace.step, pace.steps[-1]) if 0 < remaining <= RECENT else pace.step
    if cost <= 0 or remaining <= 0:
        return None
    one = pace.evaluation_at(cost)
    left = now.until - seconds - pace.summary(budget, part_limit) - GRACE * budget
    if evaluate_every:
        steps = (left - one) / (cost + one / evaluate_every)
        count = max(1.0, steps / evaluate_every)
    else:
        count = EVALUATIONS * left / budget
        count = max(1.0, min(count, MAX_EVALUATING * left / one) if one else count)
        steps = (left - count * one) / cost
    whole = max(1, round(steps), min(remaining, last_steps(now, cost)))
    if max_steps is not None:
        whole = max(1, min(whole, max_steps - step))
    every = evaluate_every or max(1, ceil(whole / count))
    steady = abs(whole - remaining) <= REFIT_TOLERANCE * remaining
    if steady and now.evaluate_every and 0.8 < every / now.evaluate_every < 1.25:
        return None
    return Segment(
        steps=whole,
        end=now.end,
        step=step,
        start=now.position(step),
        evaluate_every=every,
        extension=now.extension,
        began=now.began,
        until=now.until,
    )


def last_steps(now: Segment, cost: float) -> int:
    """Return the steps of `cost` seconds in which a run that is late may end its schedule."""
    return int(GRACE * (now.until - now.began) / cost) if cost > 0 else 0


def complete(now: Segment, pace: Pace, step: int) -> Segment | None:
    """Return the segment that ends the schedule of a run whose time is over, in its last steps.

    So the rate reaches its end, whatever came in between. None if a step is too long for that.

    Parameters
    ----------
    now : the present segment, with a time budget
    pace : recent durations
    step : steps done
    """
    steps = last_steps(now, pace.step)
    if steps < 1 or now.last_step - step <= steps:
        return now if steps else None
    return replace(
        now, steps=steps, step=step, start=now.position(step), evaluate_every=max(1, steps)
    )


@dataclass(frozen=True)
class Extension:
    """Further training of a run, from a step on, with a schedule of its own. Saved in run.json.

    Parameters
    ----------
    step : Step that it starts after.
    steps : Steps that it lasts; with `minutes`, the steps that are expected to fit.
    warmup : Steps over which the rate rises again.
    evaluate_every : Steps between evaluations.
    minutes : Time that it lasts; 0 for exactly `steps`.
    """

    step: int
    steps: int
    warmup: int
    evaluate_every: int
    minutes: float = 0.0

    def segment(self, number: int, step: int, seconds: float) -> Segment:
        """Return the first segment of the extension.

        Parameters
        ----------
        number : number of the extension, from 1
        step : steps done
        seconds : seconds of the run
        """
        until = seconds + 60 * self.minutes if self.minutes else 0.0
        return Segment(
            steps=self.steps,
            end=float(self.steps),
            step=step,
            evaluate_every=self.evaluate_every,
            extension=number,
            began=seconds,
            until=until,
        )
