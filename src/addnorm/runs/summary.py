"""How a run went: figures for programs, a page with the loss curve for people."""

import json
from typing import Any

from addnorm.disk import write_whole
from addnorm.report import Page, lines
from addnorm.report.svg import Svg
from addnorm.runs.directory import Run
from addnorm.runs.progress import say_figures, say_time
from addnorm.train.loop import Progress


def sum_up(run: Run, progress: Progress, parameters: int) -> dict[str, Any]:
    """Write summary.json and summary.html; returns the figures."""
    best = next((row for row in progress.history if row["step"] == progress.best_step), {})
    figures = {
        "task": run.facts.task,
        "finished": progress.finished,
        "steps": progress.step,
        "epochs": progress.epoch,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds + progress.evaluating, 1),
        "parameters": parameters,
        "metric": run.config.train.metric,
        "best_step": progress.best_step,
        "best": {name: value for name, value in best.items() if name != "step"},
    }
    text = json.dumps(figures, indent=1, ensure_ascii=False)
    write_whole(run.path / "summary.json", text.encode() + b"\n")
    make_page(run, figures).write(run.path / "summary.html")
    return figures


def make_page(run: Run, figures: dict[str, Any]) -> Page:
    """The page of a run: its figures, its loss curve, its data, its configuration."""
    page = Page(f"Run {run.path.name}", f"{run.facts.task}, {figures['parameters']:,} parameters")
    page.section("Result")
    rows = [
        ("best on held-out data", say_figures(figures["best"]) or "no evaluation yet"),
        ("at step", f"{figures['best_step']:,} of {figures['steps']:,}"),
        ("time", say_time(figures["seconds"])),
        ("tokens learnt from", f"{figures['tokens']:,}"),
    ]
    page.facts(rows)
    page.section("Loss")
    page.figure(loss_curve(run), "Loss of training batches, and of held-out data.")
    page.section("Data")
    for note in run.facts.notes:
        page.text(note)
    page.section("Configuration")
    page.code(run.config.dump())
    return page


def loss_curve(run: Run) -> Svg:
    """Training and held-out loss against the step."""
    found = run.metrics()
    series = {
        "training": [(row["step"], row["loss"]) for row in found if _is_number(row.get("loss"))],
        "held out": [
            (row["step"], row["valid_loss"]) for row in found if _is_number(row.get("valid_loss"))
        ],
    }
    return lines(series, title="Loss", x="step", y="loss", log_y=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
