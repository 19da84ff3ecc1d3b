"""A race as an HTML page, and as a fragment for notebooks."""

import math
from collections.abc import Sequence
from html import escape

from addnorm.races.run import RaceResult
from addnorm.report import Mark, Page, interval_chart, line_chart


def race_fragment(race: RaceResult) -> str:
    """Return the standings as a small HTML table."""
    head = "".join(f"<th>{name}</th>" for name in ("entry", "held-out loss", "diverged"))
    rows = "".join(
        f"<tr><td>{escape(s.name)}</td><td>{escape(s.loss_text())}</td>"
        f"<td>{s.diverged} of {len(race.results_of(s.name))}</td></tr>"
        for s in race.standings()
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def race_page(race: RaceResult, title: str = "Race", settings: Sequence[str] = ()) -> Page:
    """Return a page with mean ± sd over the seeds, and the curve of each entry."""
    seeds = len({result.seed for result in race.results})
    page = Page(title, f"{len(race.entry_names())} entries, {seeds} seed{'s' * (seeds > 1)} each")
    standings = race.standings()
    page.section("Standings")
    best = standings[0]
    if math.isfinite(best.mean) and not best.diverged:
        page.remark(f"Best: {best.name}, held-out loss {best.mean:.4f}.", "good")
    for each in standings:
        if each.diverged:
            count = len(race.results_of(each.name))
            page.remark(f"{each.name}: {each.diverged} of {count} diverged.", "bad")
    finite = [(s.name, s.mean, s.deviation) for s in standings if math.isfinite(s.mean)]
    if finite:
        page.figure(
            interval_chart(finite, title="Held-out loss", x="held-out loss"),
            "The best held-out loss of each run: mean and standard deviation over the seeds.",
        )
    page.section("Curves")
    curves = {name: _mean_curve(race, name) for name in race.entry_names()}
    marks = [
        Mark(curve[-1][0], curve[-1][1], f"{name} diverged", "bad")
        for name, curve in curves.items()
        if curve and any(result.diverged for result in race.results_of(name))
    ]
    page.figure(
        line_chart(curves, title="Held-out loss by step", y="held-out loss", marks=marks),
        "The mean over the seeds.",
    )
    page.section("Every run")
    page.table(
        ["entry", "seed", "held-out loss", "steps", "seconds", "diverged"],
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


def _mean_curve(race: RaceResult, name: str) -> list[tuple[float, float]]:
    by_step: dict[float, list[float]] = {}
    for result in race.results_of(name):
        for step, loss in result.curve:
            by_step.setdefault(step, []).append(loss)
    return [(step, sum(losses) / len(losses)) for step, losses in sorted(by_step.items())]
