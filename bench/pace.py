"""Runs of minutes on a simulated clock beside noisy loads: `python -m bench.pace [--minutes 1]`.

Steps, evaluations, checkpoints and the summary take their time, times the load, times a random
factor. The loop's decisions are repeated here with the functions of `addnorm.training.pace`.
Counted are the runs that end outside 10 % of their budget, and those whose rate (cosine) ends above
a twentieth of its peak. Bursts of load, and a load that changes during the last evaluation, cannot
be foreseen: the fewer, the better.
"""

import argparse
import math
import random
import statistics
from collections.abc import Callable

from addnorm.training.pace import SUMMARY_CPU, Pace, Segment, complete, refit

LOADS: dict[str, Callable[[float, int], float]] = {
    "none": lambda t, seed: 1.0,
    "on and off, 10 s": lambda t, seed: 3.0 if t % 20 < 10 else 1.0,
    "on and off, 5 s": lambda t, seed: 4.0 if t % 10 < 5 else 1.0,
    "grows": lambda t, seed: 1 + t / 10,
    "starts": lambda t, seed: 5.0 if t > 30 else 1.0,
    "ends": lambda t, seed: 5.0 if t < 30 else 1.0,
    "starts late": lambda t, seed: 3.0 if t > 45 else 1.0,
    "ends late": lambda t, seed: 3.0 if t < 45 else 1.0,
    "bursts of 3 s": lambda t, seed: random.Random(f"{seed} {t // 3}").choice([1, 1, 2, 4]),
    "bursts of 8 s": lambda t, seed: random.Random(f"{seed} {t // 8}").choice([1, 2, 4]),
}
"""How much slower everything is at a second, for budgets of a minute."""
COSTS = ((0.02, 0.3, 0.05), (0.3, 1.5, 0.1), (0.6, 2.5, 0.2), (0.1, 4.0, 0.1))
"""Seconds of a step, an evaluation and a checkpoint."""
NOISE, BEFORE = 0.25, 6.0
"""Standard deviation of the logarithm of a duration; seconds before training."""


def simulate(
    load: Callable[[float, int], float], costs: tuple[float, float, float], budget: float, seed: int
) -> tuple[float, float]:
    """Return the duration of a run relative to its budget, and the share of its schedule done."""
    draw, seconds, cpu, limit = random.Random(seed), BEFORE, 0.0, budget / 60
    step_cost, evaluation, save = costs

    def spend(cost: float) -> float:
        nonlocal seconds, cpu
        spent = cost * load(seconds * 60 / budget, seed) * math.exp(draw.gauss(0, NOISE))
        seconds, cpu = seconds + spent, cpu + cost
        return spent

    pace = Pace(steps=[step_cost * load(0, seed)], window_seconds=seconds)
    pace.add_evaluation(evaluation * load(0, seed))
    steps = max(1, int(0.85 * (budget - BEFORE) / pace.step))
    now = Segment(steps, float(steps), evaluate_every=max(1, steps // 30), until=budget)
    step = last = 0
    excluded, clocks, finished = 0.0, (seconds, 0.0), False
    while not finished:
        spend(step_cost)
        step += 1
        due = step - last >= now.evaluate_every and pace.may_evaluate(seconds, excluded)
        if pace.close_window(now, step, seconds, excluded):
            pace.add("slowdowns", max(1.0, (seconds - clocks[0]) / (cpu - clocks[1])))
            clocks = seconds, cpu
            now = refit(now, pace, step, seconds, part_limit=limit) or now
        late = seconds + pace.evaluation + pace.summary(budget, limit) > budget
        if late and step < now.last_step and seconds < budget:
            longer = complete(now, pace, step)
            now, late = longer or now, longer is None
        finished = late or step >= now.last_step
        if due or finished:
            spent = spend(evaluation)
            pace.add_evaluation(spent)
            saved = spend(save)
            pace.add("saves", saved)
            excluded, last = excluded + spent + saved, step
    spend(SUMMARY_CPU)
    for _ in range(2):
        seconds += min(evaluation * load(seconds * 60 / budget, seed), limit)
    return seconds / budget, now.position(step) / now.end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    ratios, unfinished = [], 0
    print(
        "| load | runs | duration / budget | outside 10 % | unfinished |\n|---|---:|---|---:|---:|"
    )
    for name, load in LOADS.items():
        rows = [
            simulate(load, costs, 60 * args.minutes, seed)
            for costs in COSTS
            for seed in range(args.seeds)
        ]
        found = sorted(ratio for ratio, _ in rows)
        bad = sum((1 + math.cos(math.pi * share)) / 2 > 0.05 for _, share in rows)
        outside = sum(not 0.9 <= ratio <= 1.1 for ratio in found)
        spread = f"{statistics.median(found):.2f} [{found[0]:.2f}–{found[-1]:.2f}]"
        print(f"| {name} | {len(rows)} | {spread} | {outside} | {bad} |")
        ratios, unfinished = ratios + found, unfinished + bad
    outside = sum(not 0.9 <= ratio <= 1.1 for ratio in ratios)
    print(f"\n{len(ratios)} runs: {outside} outside 10 %, {unfinished} unfinished")


if __name__ == "__main__":
    main()
