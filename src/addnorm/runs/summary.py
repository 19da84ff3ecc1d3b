"""The summary of a run: summary.json, and summary.html with the loss curve."""

from typing import Any

from addnorm.files import to_json, write_whole
from addnorm.models.drawing import draw
from addnorm.models.tabular import TabularModel
from addnorm.models.transformer import Base
from addnorm.report import Page, line_chart
from addnorm.report.svg import Svg
from addnorm.runs.loggers import format_duration, format_metrics
from addnorm.runs.run import SUMMARY_FILE, Run
from addnorm.tasks.base import BEST, Say, Task
from addnorm.training.loop import TrainingState


def write_summary(
    run: Run, task: Task, progress: TrainingState, parameters: int, say: Say
) -> dict[str, Any]:
    """Write summary.json and summary.html; return the summary.

    Parameters
    ----------
    run : the run.
    task : its task.
    progress : the state of training.
    parameters : number of parameters of the model.
    say : receives messages.
    """
    best = next((row for row in progress.history if row["step"] == progress.best_step), {})
    summary = {
        "task": run.task,
        "finished": progress.finished,
        "steps": progress.step,
        "epochs": progress.epoch,
        "tokens": progress.tokens,
        "seconds": round(progress.total_seconds, 1),
        "training_seconds": round(progress.training_seconds, 4),
        "parameters": parameters,
        "metric": task.metric,
        "best_step": progress.best_step,
        "best": {name: value for name, value in best.items() if name != "step"},
        **task.finish(run.path, progress, say),
    }
    make_page(run, task, summary).write(run.path / "summary.html")
    # Last, because a run that has it is not summarised again.
    write_whole(run.path / SUMMARY_FILE, to_json(summary).encode() + b"\n")
    return summary


def make_page(run: Run, task: Task, summary: dict[str, Any]) -> Page:
    """Return the page of a run: result, loss curve, notes on the data, configuration."""
    page = Page(f"Run {run.path.name}", f"{run.task}, {summary['parameters']:,} parameters")
    page.section("Result")
    rows = [
        ("best on held-out data", format_metrics(summary["best"]) or "no evaluation yet"),
        ("at step", f"{summary['best_step']:,} of {summary['steps']:,}"),
        ("time", format_duration(summary["seconds"])),
        (f"{task.unit} trained on", f"{summary['tokens']:,}"),
    ]
    page.facts(rows)
    page.section("Loss")
    page.figure(loss_curve(run), "Loss of training batches, and of held-out data.")
    has_model = (run.path / BEST).is_dir()
    task.add_to_page(page, summary, run.trained if has_model else None)
    page.section("Data")
    for note in run.record.notes:
        page.text(note)
    model = run.model if has_model else None
    if isinstance(model, Base | TabularModel):
        page.section("Model")
        drawing = draw(run.config, model=model)
        page.figure(drawing, "Its Add & Norm boxes; equal blocks are drawn once.")
    page.section("Configuration")
    page.code(run.config.dump())
    return page


def loss_curve(run: Run) -> Svg:
    """Return a chart of training and held-out loss against the step."""
    history = run.history
    series = {
        "training": [(row["step"], row["loss"]) for row in history if _is_number(row.get("loss"))],
        "held out": [
            (row["step"], row["valid_loss"]) for row in history if _is_number(row.get("valid_loss"))
        ],
    }
    return line_chart(series, title="Loss", x="step", y="loss", log_y=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
