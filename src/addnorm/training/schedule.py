"""Learning-rate schedules: functions from the step, counted from 1, to a factor on the peak rate.

Every schedule rises linearly over `warmup` steps and reaches 1 at the last of them.
"""

import math
from collections.abc import Callable

from addnorm.errors import choose

Schedule = Callable[[int], float]


def noam(step: int, warmup: int, steps: int, floor: float) -> float:
    """Return √w · min(s^−½, s w^−1.5): Vaswani et al. 2017, §5.3, divided by its peak.

    The paper's rate is width^−½ w^−½ times this: a peak of 7.0e-4 at width 512 and 4,000 steps.

    Parameters
    ----------
    step : number of the step, from 1
    warmup, steps, floor : as for `make_schedule`
    """
    w = max(warmup, 1)
    return math.sqrt(w) * min(step**-0.5, step * w**-1.5)


def cosine(step: int, warmup: int, steps: int, floor: float) -> float:
    """Return floor + (1 − floor) · ½ (1 + cos πt); t is the share of steps after warm-up so far.

    Loshchilov, Hutter 2017 (1608.03983), eq. 5.

    Parameters
    ----------
    step, warmup, steps, floor : as for `noam`
    """
    return _after_warmup(
        step, warmup, steps, lambda t: _above_floor(floor, (1 + math.cos(math.pi * t)) / 2)
    )


def linear(step: int, warmup: int, steps: int, floor: float) -> float:
    """Return floor + (1 − floor) · (1 − t); t as for `cosine`.

    Parameters
    ----------
    step, warmup, steps, floor : as for `noam`
    """
    return _after_warmup(step, warmup, steps, lambda t: _above_floor(floor, 1 - t))


def constant(step: int, warmup: int, steps: int, floor: float) -> float:
    """Return 1 after warm-up.

    Parameters
    ----------
    step, warmup, steps, floor : as for `noam`
    """
    return _after_warmup(step, warmup, steps, lambda t: 1.0)


SCHEDULES: dict[str, Callable[[int, int, int, float], float]] = {
    "noam": noam,
    "inverse-sqrt": noam,
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
}


def make_schedule(name: str, *, warmup: int, steps: int, floor: float = 0.0) -> Schedule:
    """Return the schedule of that name as a function of the step.

    Parameters
    ----------
    name : a key of SCHEDULES
    warmup : number of steps over which the rate rises
    steps : number of steps in total
    floor : factor at the end of a cosine or linear schedule

    >>> linear_decay = make_schedule("linear", warmup=2, steps=10)
    >>> [linear_decay(step) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    schedule = choose("train.schedule", name, SCHEDULES)
    return lambda step: schedule(step, warmup, steps, floor)


def _after_warmup(step: int, warmup: int, steps: int, decay: Callable[[float], float]) -> float:
    if step < warmup:
        return step / warmup
    return decay(min(1.0, (step - warmup) / max(steps - warmup, 1)))


def _above_floor(floor: float, share: float) -> float:
    return floor + (1 - floor) * share
