"""The verb `train`: its flags for every task, and its output."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from addnorm.cli.console import is_first_worker, say
from addnorm.cli.flags import add_set
from addnorm.config import Config
from addnorm.errors import ConfigError
from addnorm.files import to_json
from addnorm.section import describe
from addnorm.tasks import TASKS

if TYPE_CHECKING:
    from addnorm.runs.train import Observers, PlannedRun

RESUME_ALONE = (
    "--resume takes no other options than --minutes +N, --steps +N, --board, --clinic and --json. "
    "To start a new run with changes, use --from."
)
NO_TASK = (
    f"train needs a task ({', '.join(TASKS)}), a TOML file or --resume RUN as its first argument."
)
COLUMN_OPTIONS = {"data.text", "data.label", "table.target", "table.groups"}
"""Fields whose option takes the name of a column."""
FILE_OPTIONS = {
    *("data.source", "data.target", "data.valid_source", "data.valid_target"),
    *("table.schema", "table.test", "table.unlabelled"),
}
"""Fields whose option takes a file."""
WHOLE_NUMBER_OPTIONS = {"table.folds"}
"""Fields that are unset by default, and whose option takes a whole number."""
FLAG_NAMES = {"table.task": "--task"}
"""Fields whose flag is not named like the option; the name of this one is that of the run's."""
INTERVAL_FIGURES = ("coverage_", "width_")
"""How the names of figures of intervals begin, which have a line of their own."""
OPTIONAL_VALUES = {"table.compare": "default"}
"""Fields whose option may be given without a value, which is then this one."""


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `addnorm train` without a task."""
    parser.add_argument("--resume", metavar="RUN", help="continue a run that was stopped")
    parser.add_argument(
        "--minutes", metavar="+N", help="with --resume: extend a finished or stopped run by a time"
    )
    parser.add_argument("--steps", metavar="+N", help="with --resume: extend it by steps")
    _add_output_flags(parser)


def add_task_flags(task: str) -> Callable[[argparse.ArgumentParser], None]:
    """Return a function that adds the flags of `addnorm train TASK`."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", nargs="?", metavar="FILE", help="file to train on")
        parser.add_argument("--config", metavar="FILE.toml", help="read settings from a file")
        plain = Config()
        for name, path in TASKS[task].options.items():
            section, _, field = path.partition(".")
            value = getattr(getattr(plain, section), field)
            kind: Any = type(getattr(plain, section))
            text = _as_phrase(describe(kind)[field])
            flag = FLAG_NAMES.get(path, f"--{name.replace('_', '-')}")
            if isinstance(value, bool):
                parser.add_argument(flag, action="store_true", default=None, help=text)
            else:
                metavar = "COLUMN" if path in COLUMN_OPTIONS else name.upper()
                metavar = "FILE" if path in FILE_OPTIONS else metavar
                whole = isinstance(value, int) or path in WHOLE_NUMBER_OPTIONS
                number = int if whole else str
                optional: Any = {}
                if path in OPTIONAL_VALUES:
                    optional = {"nargs": "?", "const": OPTIONAL_VALUES[path]}
                    metavar = "tuned"
                parser.add_argument(
                    flag, dest=name, metavar=metavar, help=text, type=number, **optional
                )
        parser.add_argument("--out", metavar="RUN", help="directory for the run")
        parser.add_argument(
            "--from",
            dest="start",
            metavar="RUN",
            help="start from the weights of this run or Hugging Face directory",
        )
        parser.add_argument(
            "--minutes", type=float, help="training time (default: chosen from the data)"
        )
        parser.add_argument("--seed", type=int, help="random seed (default 0)")
        add_set(parser)
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="show the configuration and the expected duration, and stop",
        )
        _add_output_flags(parser)

    return add


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--board", action="store_true", help="also write metrics for TensorBoard")
    parser.add_argument(
        "--clinic",
        action="store_true",
        help="examine the model during training and warn of problems",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _as_phrase(text: str) -> str:
    return text[0].lower() + text[1:].rstrip(".") if not text[:2].isupper() else text.rstrip(".")


def train(args: argparse.Namespace) -> None:
    """Start a run, or resume one."""
    from addnorm.cpu import keep_memory

    keep_memory()
    if args.resume is not None:
        from addnorm.runs.train import resume_run

        outcome = resume_run(
            args.resume,
            observers=_observers(args),
            minutes=args.minutes,
            steps=args.steps,
            began=args.began,
            say=say,
        )
        _finish(outcome, args)
        return
    from addnorm.runs.request import make_request
    from addnorm.runs.train import plan_run, start_run

    if args.task is None:
        raise ConfigError(NO_TASK)
    if args.file is not None and args.source is not None:
        raise ConfigError(
            f"there must be one file to train on: got {args.file!r} and {args.source!r}."
        )
    if args.out is None and not args.dry_run:
        raise ConfigError("--out must name a directory for the run. Try --out runs/first.")
    names = (*TASKS[args.task].options, "start", "minutes", "seed")
    options = {name: getattr(args, name) for name in names}
    options["source"] = options["source"] or args.file
    request = make_request(args.config or args.task, options, args.settings)
    if args.dry_run:
        _show_plan(plan_run(request, measure=True, began=args.began, say=say), args)
        return
    observers = _observers(args)
    outcome = start_run(request, args.out, observers=observers, began=args.began, say=say)
    _finish(outcome, args)


def _observers(args: argparse.Namespace) -> "Observers":
    from addnorm.runs.loggers import make_observers

    return partial(make_observers, board=args.board, clinic=args.clinic)


def _show_plan(planned: "PlannedRun", args: argparse.Namespace) -> None:
    """Print the configuration, the cost of a step and the expected duration."""
    from addnorm.runs.loggers import format_duration

    config, times = planned.config, planned.times
    assert times is not None
    facts = {
        **planned.task.cost(planned.model),
        "step_seconds": round(times.step, 4),
        "evaluation_seconds": round(times.evaluation, 3),
        "total_seconds": round(times.total(config)),
    }
    if args.json:
        print(to_json({"config": config.dump(), **facts}))
        return
    print(config.dump())
    print(f"# {facts['parameters']:,} parameters; {facts['step_flops']:.3g} operations per step")
    print(f"# measured: {times.step:.3f} s per step, {times.evaluation:.2f} s per evaluation")
    print(f"# expected duration: {format_duration(times.total(config))}")


def _finish(outcome: Any, args: argparse.Namespace) -> None:
    """Print the summary, and on stderr how to resume a run that was stopped."""
    if not is_first_worker():
        return
    run, summary = outcome.run, outcome.run.summary
    if args.json:
        print(to_json({"run": str(run.path), **summary}))
    else:
        _print_summary(run, summary)
    if not summary["finished"]:
        say(f"resume with: addnorm train --resume {run.path}")
        raise KeyboardInterrupt


def _print_summary(run: Any, summary: dict[str, Any]) -> None:
    from addnorm.report import sparkline
    from addnorm.runs.loggers import format_duration, format_metrics
    from addnorm.tasks import find_task
    from addnorm.tasks.base import BEST

    losses = [row.get("valid_loss") for row in run.history]
    curve = [loss for loss in losses if isinstance(loss, int | float)]
    if summary["best"]:
        print(f"best at step {summary['best_step']:,}: {format_metrics(summary['best'])}")
    if any(curve):
        print(f"held-out loss  {sparkline(curve, 50)}")
    if "results" in summary:
        print_results(summary["results"])
    state = "trained" if summary["finished"] else "stopped"
    line = f"{state} after {summary['steps']:,} steps, {format_duration(summary['seconds'])}"
    if summary["training_seconds"] > 0:
        speed = summary["tokens"] / summary["training_seconds"]
        line += f", {speed:,.0f} {find_task(run.task).unit}/s"
    print(line)
    page = f"page: {run.path / 'summary.html'}"
    if (run.path / BEST).is_dir():
        print(f"model: {run.path / BEST}   {page}")
    else:
        print(f"no model yet: there was no evaluation.   {page}")


def print_results(results: list[dict[str, Any]]) -> None:
    """Print metrics as a table, with a line for each model and set of rows."""
    words = ("model", "on", "version", "settings")
    names = dict.fromkeys(
        n for row in results for n in row if n not in words and not n.startswith(INTERVAL_FIGURES)
    )
    heads = [name.replace("_seconds", " s").replace("_", " ") for name in names]
    labels = [f"{row['model']} · {row['on']}" for row in results]
    width = max(map(len, labels), default=0) + 1
    print(f"{'':{width}}" + "".join(f"{head:>11}" for head in heads))
    for row, label in zip(results, labels, strict=True):
        cells = [f"{row[n]:11.4f}" if row.get(n) is not None else f"{'':11}" for n in names]
        print(f"{label:{width}}" + "".join(cells))
    for row in results:
        shares = [n for n in row if n.startswith(INTERVAL_FIGURES[0]) and row[n] is not None]
        if shares:
            parts = [
                f"{name.removeprefix('coverage_')} % hold {row[name]:.1%}, width "
                f"{row[name.replace('coverage', 'width')]:.4g}"
                for name in shares
            ]
            print(f"intervals, {row['on']}: {'; '.join(parts)}")
    for row in results:
        if "settings" in row:
            print(f"{row['model']}: {row['version']}, {row['settings']}")
