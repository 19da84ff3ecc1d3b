"""A search for settings as an HTML page."""

from addnorm.races.halving import EPOCH_SHARES, TuneResult
from addnorm.report import Page, line_chart, scatter_chart


def tune_page(result: TuneResult, name: str) -> Page:
    """Return a page with the score of each trial and round, and whether tuning helped."""
    count, rounds = len(result.ranked(1)), result.last_round
    page = Page(f"Tuning: {name}", f"{count} settings, {rounds} rounds")
    page.section("Result")
    page.remark(result.verdict(), "good" if result.best.number else "note")
    page.text(
        "The best of several scores on the same held-out rows is a little too good: the difference "
        "on other rows is smaller on average. To measure it, evaluate the run on rows of another "
        "file."
    )
    page.section("Trials")
    groups = {
        f"round {number}": [
            (t.number, t.score) for t in result.ranked(number) if t.number and t.score is not None
        ]
        for number in range(1, rounds + 1)
    }
    groups["defaults"] = [
        (0, t.score) for t in result.trials if t.number == 0 and t.score is not None
    ]
    shares = ", ".join(f"{share:.0%}" for share in EPOCH_SHARES)
    page.figure(
        scatter_chart(groups, title="Score by trial", x="trial", y=f"held-out {result.metric}"),
        f"The rounds take {shares} of the epochs; the better half of each goes on to the next, the "
        "defaults (trial 0) always.",
    )
    finalists = {
        "defaults" if last.number == 0 else f"trial {last.number}": [
            (t.round, t.score)
            for t in result.trials
            if t.number == last.number and t.score is not None
        ]
        for last in result.ranked(rounds)
        if last.number in (0, *(t.number for t in result.ranked(rounds)[:4]))
    }
    page.figure(
        line_chart(finalists, title="Score by round", x="round", y=f"held-out {result.metric}"),
        "The best settings of the last round and the defaults.",
    )
    page.section("All trials")
    page.table(
        ["round", "trial", result.metric, "epochs", "seconds", "settings"],
        [
            [t.round, t.number, t.score, round(t.epochs, 1), round(t.seconds, 1), t.describe()]
            for number in range(rounds, 0, -1)
            for t in result.ranked(number)
        ],
    )
    return page
