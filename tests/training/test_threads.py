"""The number of threads: the decision on given durations, and measuring that changes nothing."""

from collections.abc import Callable

import pytest
import torch

from addnorm import ModelConfig, build
from addnorm.training.threads import (
    COST,
    FIRST_WAIT,
    LoadProbe,
    ThreadTuner,
    fastest,
    gradient_timer,
    time_matrix_products,
)


class Machine:
    """Durations of a gradient and of a step by the number of threads, beside a load."""

    def __init__(self, idle: dict[int, float], busy: dict[int, float]) -> None:
        self.idle, self.busy, self.load = idle, busy, False
        self.measured: list[int] = []
        self.spent = 0.0

    def __call__(self, threads: int) -> float:
        self.measured.append(threads)
        seconds = (self.busy if self.load else self.idle)[threads]
        self.spent += seconds
        return seconds


def usual() -> Machine:
    """Two threads are 1.8 times as fast on idle cores, and 20 times slower beside a load."""
    return Machine({1: 0.18, 2: 0.1}, {1: 0.18, 2: 3.6})


@pytest.mark.parametrize(
    ("one", "two", "chosen"),
    [
        ([1.0], [0.5], 2),
        ([1.0], [2.0], 1),
        ([0.95], [1.0], 2),  # a near tie
        ([0.9], [1.0], 1),
        ([1.0, 1.0, 50.0], [0.6, 0.7, 0.5], 2),
        ([0.6, 0.6, 50.0], [1.0, 1.0, 1.0], 1),
    ],
)
def test_the_faster_number_is_chosen(one: list[float], two: list[float], chosen: int) -> None:
    assert fastest({1: one, 2: two}) == chosen
    assert fastest({2: two}) == 2


def test_the_first_choice() -> None:
    machine = usual()
    assert ThreadTuner([1, 2], machine).choose(gradients=10_000) == 2
    assert machine.measured == [1, 1, 2], "a clear result needs one round"
    machine.load = True
    assert ThreadTuner([1, 2], machine).choose(gradients=10_000) == 1
    near = Machine({1: 0.1, 2: 0.1}, {})
    assert ThreadTuner([1, 2], near).choose(gradients=10_000) == 2
    assert near.measured == [1, 1, 2, 2, 1, 1, 2]


def test_a_crowded_machine_is_seen_by_small_products_alone() -> None:
    machine, probed = usual(), []

    def probe(threads: int) -> float:
        probed.append(threads)
        return 0.02 if threads == 1 or not machine.load else 0.1

    tuner = ThreadTuner([1, 2], machine, probe=probe)
    assert tuner.choose(gradients=10_000) == 2 and probed == [2, 1] and machine.measured
    machine.load = True
    machine.measured.clear()
    assert tuner.choose(gradients=10_000) == 1 and machine.measured == [1]
    assert tuner.next_check == pytest.approx(max(FIRST_WAIT, COST * (0.18 + 0.12)))
    assert time_matrix_products(1) > 0


def test_a_short_run_is_not_measured() -> None:
    machine = usual()
    for expected in ({"gradients": 10}, {"gradients": 3}, {"seconds": 1.5}):
        machine.measured.clear()
        assert ThreadTuner([1, 2], machine).choose(**expected) == 1  # type: ignore[arg-type]
        assert machine.measured == [1]
    slow = Machine({1: 10.0, 2: 6.0}, {})
    assert ThreadTuner([1, 2], slow).choose(gradients=19) == 2, "few gradients, but minutes"
    tiny = Machine({1: 0.001, 2: 0.002}, {})
    assert ThreadTuner([1, 2], tiny).choose(gradients=1900) == 1, "over in two seconds"
    assert tiny.measured == [1]
    assert ThreadTuner([1, 2], tiny).choose(gradients=6000) == 1


def train(tuner: ThreadTuner, machine: Machine, seconds: float) -> tuple[float, list[int]]:
    """Train for a time; return the seconds of all, measuring included, and the numbers used."""
    machine.spent, start, used = 0.0, tuner.elapsed, []
    while tuner.elapsed - start < seconds:
        used.append(tuner.chosen)
        tuner.after_step((machine.busy if machine.load else machine.idle)[tuner.chosen])
    return tuner.elapsed - start + machine.spent, used


def test_the_choice_follows_a_load_that_starts_and_ends() -> None:
    machine = usual()
    tuner = ThreadTuner([1, 2], machine)
    tuner.choose(gradients=10_000)
    _, used = train(tuner, machine, 60)
    assert set(used) == {2} and machine.measured == [1, 1, 2], "nothing is measured while it runs"
    machine.load = True
    total, used = train(tuner, machine, 300)
    assert used[-1] == 1 and used.count(2) == 1, "one slow step shows it"
    best = 0.18 * len(used)
    assert total < best * 1.1 + 3.6, "at most 5 % for measuring, and the step that showed it"
    machine.load = False
    _, used = train(tuner, machine, 200)
    assert used[-1] == 2


@pytest.mark.parametrize("load", [False, True])
def test_never_much_worse_than_the_better_number(load: bool) -> None:
    machine = usual()
    machine.load = load
    tuner = ThreadTuner([1, 2], machine)
    tuner.choose(gradients=100_000)
    total, used = train(tuner, machine, 1000)
    durations = machine.busy if load else machine.idle
    assert total <= 1.1 * min(durations.values()) * len(used)


def test_a_choice_at_a_lucky_moment_is_corrected_by_the_first_steps() -> None:
    """The machine is idle while it is measured, and beside a load from the first step on."""
    for per_step in (1, 4):
        machine = usual()
        tuner = ThreadTuner([1, 2], machine, gradients_per_step=per_step)
        assert tuner.choose(gradients=10_000) == 2
        machine.load = True
        steps = 0
        while tuner.chosen == 2:
            tuner.after_step(per_step * machine.busy[2])
            steps += 1
        assert steps == 1, "before the first regular check, at 11 s"
        machine.load = False
        tuner = ThreadTuner([1, 2], machine, gradients_per_step=per_step)
        tuner.choose(gradients=10_000)
        machine.measured.clear()
        for _ in range(500):
            assert not tuner.after_step(per_step * 0.13)
        assert machine.measured == [], "a step takes somewhat longer than its gradients"


def test_a_load_that_halves_the_pace_is_noticed_by_the_median() -> None:
    machine = Machine({1: 0.18, 2: 0.1}, {1: 0.18, 2: 0.25})
    tuner = ThreadTuner([1, 2], machine)
    tuner.choose(gradients=10_000)
    train(tuner, machine, 60)
    assert not tuner.after_step(0.3), "one step below the limit is no drop"
    machine.load = True
    _, used = train(tuner, machine, 30)
    assert used[-1] == 1 and used.count(2) <= 5


def test_a_check_waits_for_a_multiple_of_its_cost() -> None:
    machine = usual()
    tuner = ThreadTuner([1, 2], machine)
    tuner.choose(gradients=10_000)
    assert tuner.next_check == pytest.approx(max(2 * FIRST_WAIT, COST * 0.46))
    for _ in range(5):
        assert not tuner.after_step(0.1)
    assert tuner.pace == 0.1 and not tuner.after_step(0.3), "one slow step is no drop"
    assert machine.measured == [1, 1, 2]
    for _ in range(10):
        assert not tuner.after_step(0.2), "the pace has dropped, but the last check is recent"
    assert machine.measured == [1, 1, 2] and tuner.elapsed < tuner.next_check


def test_a_prediction_takes_the_number_that_products_show_to_be_faster() -> None:
    machine, now = usual(), [0.0]
    probe = LoadProbe(lambda threads: machine(threads) / 10, lambda: now[0])
    assert probe.choose([2, 1]) == 2 and machine.measured == [1, 2] * 2
    machine.load = True
    now[0] = 0.9
    assert probe.choose([2, 1]) == 2 and machine.measured == [1, 2] * 2, "not probed again yet"
    now[0] = 1.1
    assert probe.choose([2, 1]) == 1 and machine.measured == [1, 2] * 4
    assert probe.choose([3]) == 3, "set by the user"


def test_probing_takes_at_most_a_twentieth_of_the_time() -> None:
    now, spent = [0.0], [0.0]

    def slow(threads: int) -> float:
        now[0] += 1.0
        spent[0] += 1.0
        return float(threads)

    probe = LoadProbe(slow, lambda: now[0])
    while now[0] < 1000:
        assert probe.choose([1, 2]) == 1
        now[0] += 0.1  # a prediction
    assert 0 < spent[0] <= 0.05 * now[0]


def test_more_threads_must_be_faster_twice() -> None:
    seconds = iter([1.0, 0.5, 1.0, 9.0])
    assert LoadProbe(lambda threads: next(seconds)).choose([1, 2]) == 1


def test_one_candidate_is_never_measured_while_training() -> None:
    machine = usual()
    tuner = ThreadTuner([1], machine)
    for seconds in (0.1,) * 10 + (9.0,) * 50:
        assert not tuner.after_step(seconds)
    assert machine.measured == []


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_timing_a_gradient_changes_nothing(norm: str) -> None:
    model = build(
        ModelConfig(mode="decoder", vocab=9, width=8, depth=1, heads=2, norm=norm, dropout=0.3)
    ).eval()
    ids = torch.randint(9, (2, 5))
    ticks = iter(range(100))
    clock: Callable[[], float] = lambda: float(next(ticks))  # noqa: E731
    measure = gradient_timer(model, lambda: model(ids).square().sum(), clock)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad():
        assert measure(1) == 1.0
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == threads
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
