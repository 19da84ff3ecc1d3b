"""A race as one page: the standing, the curves, and who diverged."""

import math
from collections.abc import Sequence

from addnorm.race.run import Race
from addnorm.report import Mark, Page, intervals, lines


def make_page(race: Race, title: str = "A race", settings: Sequence[str] = ()) -> Page:
    """Mean ± sd over the seeds, a curve for each runner, divergence marked."""
    seeds = len({result.seed for result in race.results})
    page = Page(title, f"{len(race.names())} runners, {seeds} seed{'s' * (seeds > 1)} each")
    standing = race.standing()
    page.section("Standing")
    best = standing[0]
    if math.isfinite(best[1]) and not best[3]:
        page.remark(f"Best: {best[0]}, held-out loss {best[1]:.4f}.", "good")
    for name, _, _, bad in standing:
        if bad:
            page.remark(f"{name}: {bad} of {len(race.of(name))} diverged.", "bad")
    finite = [(name, mean, sd) for name, mean, sd, _ in standing if math.isfinite(mean)]
    if finite:
        page.figure(
            intervals(finite, title="Held-out loss", x="held-out loss"),
            "The best held-out loss of each run: mean and standard deviation over the seeds.",
        )
    page.section("Curves")
    curves = {name: _mean_curve(race, name) for name in race.names()}
    marks = [
        Mark(curve[-1][0], curve[-1][1], f"{name} diverged", "bad")
        for name, curve in curves.items()
        if curve and any(result.diverged for result in race.of(name))
    ]
    page.figure(
        lines(curves, title="Held-out loss by step", y="held-out loss", marks=marks),
        "The mean over the seeds.",
    )
    page.section("Every run")
    page.table(
        ["runner", "seed", "held-out loss", "steps", "seconds", "diverged"],
        [
            [r.name, r.seed, r.loss if math.isfinite(r.loss) else None, r.steps,
             round(r.seconds, 1), "yes" if r.diverged else ""]
            for r in race.results
        ],
    )  # fmt: skip
    if settings:
        page.section("Settings")
        page.code("\n".join(settings))
    return page


def _mean_curve(race: Race, name: str) -> list[tuple[float, float]]:
    at: dict[float, list[float]] = {}
    for result in race.of(name):
        for step, loss in result.curve:
            at.setdefault(step, []).append(loss)
    return [(step, sum(losses) / len(losses)) for step, losses in sorted(at.items())]
