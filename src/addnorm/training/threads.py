"""The number of threads, chosen by timing gradients with one thread and with several.

The threads of one operation wait for each other. If another process occupies a core, several
threads may train many times slower than one; on idle cores they train faster. Which is the case can
change while a run trains. Timing does not change the run: only a change of the number of threads
does, because sums are then computed in another order. Every change is recorded with its step.

Training is timed by gradients (`ThreadTuner`), and prediction, which may be over in milliseconds,
by a few matrix products now and then (`LoadProbe`).
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from addnorm.training.loop import LoopTask

PREFERENCE = 0.95
"""Fewer threads are used only if they take less than this share of the time of more threads."""
CLEAR = 1.5
"""Ratio of two durations above which one measurement decides."""
ROUNDS = 3
"""Measurements of each number of threads at most."""
DROP = 1.5
"""Ratio of the recent pace to the chosen one above which the choice is checked again."""
SLOW_STEP = 4.0
"""The same for a single step, while there is more than one thread."""
LOSS = 2.0
"""Slow steps lead to a check at once if they have lost this multiple of the time of the last one:
beside a load that starts, the next ones may take seconds each."""
COST = 25
"""The next check comes after this multiple of the time of the last one: at most 4 % in total."""
FIRST_WAIT, LAST_WAIT = 2.0, 60.0
"""Shortest and longest time between checks, in seconds, if they cost little."""
MIN_GRADIENTS, MIN_SECONDS = 20, 2.0
"""A run of fewer gradients, or of fewer seconds with one thread, is not measured.

One of fewer seconds takes the fewest threads: more would save it a second, and took 15 times as
long beside a load.
"""
PROBE_SECONDS = 1.0
"""Shortest time between two probes of prediction, in seconds."""
MAX_SHARE = 0.01
"""Share of the expected duration after which measuring at the start ends."""

Measure = Callable[[int], float]
"""A function from a number of threads to the seconds of a gradient computed with it."""


def fastest(times: Mapping[int, Sequence[float]]) -> int:
    """Return the number of threads with the smallest median; more threads win a near tie.

    >>> fastest({1: [1.0, 1.1, 9.0], 2: [0.7, 0.6, 0.8]}), fastest({1: [0.1], 2: [2.0]})
    (2, 1)
    >>> fastest({1: [0.97, 0.96], 2: [1.0, 1.0]})
    2
    """
    best, *fewer = sorted(times, reverse=True)
    for threads in fewer:
        if statistics.median(times[threads]) < PREFERENCE * statistics.median(times[best]):
            best = threads
    return best


class ThreadTuner:
    """Chooses the number of threads, and checks the choice when the pace drops.

    Parameters
    ----------
    candidates : numbers of threads to choose from
    measure : returns the seconds of a gradient computed with a number of threads
    chosen : the number in use; by default the largest candidate
    probe : the same for a few matrix products: beside a load, a gradient of several threads may
        take minutes, and this shows it in a moment. None to measure gradients always.
    gradients_per_step : gradients that are accumulated in a step
    """

    def __init__(
        self,
        candidates: Sequence[int],
        measure: Measure,
        chosen: int | None = None,
        probe: Measure | None = None,
        gradients_per_step: int = 1,
    ) -> None:
        self.candidates, self.measure = sorted(set(candidates), reverse=True), measure
        self.probe, self.gradients_per_step = probe, gradients_per_step
        self.chosen = chosen or self.candidates[0]
        self.pace = 0.0
        """Median seconds of the first steps with the chosen number; 0 before they are done."""
        self.measured = 0.0
        """Seconds of the gradients of a step when the number was chosen; 0 if not measured."""
        self.cost = self.lost = 0.0
        """Seconds of the last check, and those that slow steps have lost since."""
        self.recent: deque[float] = deque(maxlen=5)
        self.elapsed, self.next_check, self.wait = 0.0, FIRST_WAIT, FIRST_WAIT

    def choose(self, *, gradients: int = 0, seconds: float = 0.0) -> int:
        """Measure, and return the number of threads that is used from now on.

        `gradients` or `seconds` is what the whole run will take, if known. A run of a few gradients
        or seconds is not measured; others are measured for about a hundredth of their time, but
        at least once for each number of threads.
        """
        fewest, spent, expected = self.candidates[-1], 0.0, math.inf
        if gradients or seconds:  # the first choice
            spent = first = self.measure(fewest)  # allocates memory that later ones reuse
            expected = seconds or gradients * first
            if expected < MIN_SECONDS:
                self.chosen, self.next_check = fewest, self.elapsed + 2 * MIN_SECONDS
            if len(self.candidates) == 1 or expected < max(MIN_SECONDS, MIN_GRADIENTS * first):
                return self.chosen
        times = {} if self.probe is None else {n: [self.probe(n)] for n in self.candidates}
        spent += sum(sum(values) for values in times.values())
        crowded = bool(times) and times[fewest][0] * CLEAR < times[self.candidates[0]][0]
        if not crowded:
            times = {threads: [] for threads in self.candidates}
            for turn in range(ROUNDS):
                for threads in self.candidates if turn % 2 else reversed(self.candidates):
                    times[threads].append(self.measure(threads))
                    spent += times[threads][-1]
                medians = sorted(statistics.median(values) for values in times.values())
                if medians[-1] > CLEAR * medians[0] or spent > MAX_SHARE * expected:
                    break
        best = fastest(times)
        changed = best != self.chosen
        self.chosen, self.pace, self.cost, self.lost = best, 0.0, spent, 0.0
        self.measured = 0.0 if crowded else statistics.median(times[best]) * self.gradients_per_step
        self.recent.clear()
        self.wait = FIRST_WAIT if changed else min(LAST_WAIT, 2 * self.wait)
        self.next_check = self.elapsed + max(self.wait, COST * spent)
        return best

    def after_step(self, seconds: float) -> bool:
        """Take note of a step; return True if the number of threads was changed.

        The choice is checked when the pace drops, and from time to time while fewer threads are
        used than there are, because nothing else shows that the cores are idle again.
        """
        self.elapsed += seconds
        self.recent.append(seconds)
        if len(self.candidates) == 1:
            return False
        waiting = self.chosen < self.candidates[0]
        usual = self.pace or self.measured
        if not waiting and 0 < SLOW_STEP * usual < seconds:
            self.lost += seconds - usual
        hurried = self.lost > LOSS * self.cost
        if len(self.recent) < 5 and not hurried:
            return False
        recent = statistics.median(self.recent)
        self.pace = self.pace or min(recent, DROP * (self.measured or math.inf))
        due = self.elapsed >= self.next_check and (waiting or recent > DROP * self.pace)
        if not (due or hurried):
            return False
        before = self.chosen
        return self.choose() != before


class LoadProbe:
    """Chooses the number of threads of predictions by `time_matrix_products`.

    More threads must be faster twice: on a crowded machine they are at lucky moments, and then many
    times slower. The answer holds for at least a second, and for a multiple of the time it took
    (COST), so that probing takes at most 4 % of the time.

    Parameters
    ----------
    probe : returns the seconds of some products with a number of threads
    clock : returns the time in seconds
    """

    def __init__(
        self, probe: Measure | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.probe, self.clock = probe or time_matrix_products, clock
        self.chosen, self.until = 0, -math.inf
        self.candidates: tuple[int, ...] = ()

    def choose(self, candidates: Sequence[int]) -> int:
        """Return the number of threads that is faster now, or was a moment ago."""
        candidates, now = tuple(sorted(set(candidates))), self.clock()
        if len(candidates) == 1:
            return candidates[0]
        if candidates != self.candidates or now >= self.until:
            self.chosen = candidates[0]
            times = [[self.probe(n) for n in (candidates[0], candidates[-1])] for _ in range(2)]
            if all(more < PREFERENCE * fewer for fewer, more in times):
                self.chosen = candidates[-1]
            end = self.clock()
            self.candidates, self.until = candidates, end + max(PROBE_SECONDS, COST * (end - now))
        return self.chosen


def time_matrix_products(threads: int) -> float:
    """Return the seconds of twenty small matrix products with a number of threads.

    It takes about 20 ms with one thread. Beside a load, several threads wait for each other at the
    end of each product.
    """
    before = torch.get_num_threads()
    left, right = torch.full((256, 256), 0.5), torch.full((256, 1024), 0.5)
    torch.set_num_threads(threads)
    try:
        left @ right  # starts the threads
        start = time.perf_counter()
        for _ in range(20):
            left @ right
        return time.perf_counter() - start
    finally:
        torch.set_num_threads(before)


def gradient_timer(
    model: nn.Module, loss: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> Measure:
    """Return a function that times the gradient of a loss with a number of threads.

    Weights, gradients, buffers, RNG state and the number of threads stay as they are.

    Parameters
    ----------
    model : the model, in training mode while it is timed
    loss : returns the loss of a batch
    clock : returns the time in seconds
    """

    def measure(threads: int) -> float:
        before, state, training = torch.get_num_threads(), torch.get_rng_state(), model.training
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        parameters = [p for p in model.parameters() if p.requires_grad]
        model.train()
        torch.set_num_threads(threads)
        try:
            start = clock()
            with torch.enable_grad():
                torch.autograd.grad(loss(), parameters, allow_unused=True)
            return clock() - start
        finally:
            torch.set_num_threads(before)
            torch.set_rng_state(state)
            model.train(training)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])

    return measure


def make_tuner(
    candidates: Sequence[int], model: nn.Module, task: "LoopTask", gradients_per_step: int = 1
) -> ThreadTuner:
    """Return a tuner that times the gradient of a batch from the middle of the first epoch.

    Parameters
    ----------
    candidates : numbers of threads to choose from
    model : the model to train
    task : batches and loss
    gradients_per_step : gradients that are accumulated in a step
    """
    parts, state = task.plan(0), torch.get_rng_state()
    batch = task.batch(parts[len(parts) // 2])
    torch.set_rng_state(state)
    loss = partial(task.loss, model, batch, max(task.tokens(batch), 1))
    measure = gradient_timer(model, loss)
    return ThreadTuner(
        candidates, measure, probe=time_matrix_products, gradients_per_step=gradients_per_step
    )
