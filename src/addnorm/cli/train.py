"""Train, and go on with what was begun."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.cli.learn import TABLE_ONLY
from addnorm.config import TASKS
from addnorm.errors import ConfigError, nearest

if TYPE_CHECKING:
    from addnorm.runs.recipe import Wish
    from addnorm.runs.train import Plan

BEGINNING = (
    *("task", "file", "source", "target", "valid_source", "valid_target", "text", "label"),
    *("out", "start", "size", "minutes", "seed", "settings", "dry_run"),
)
"""What is decided when a run begins, and not when it goes on."""


def train(args: argparse.Namespace) -> None:
    """Train a model from files of text."""
    from addnorm.machine import keep_memory

    if args.task == "table":
        if args.clinic:
            raise ConfigError("--clinic watches models of text: not tables. Leave it out.")
        from addnorm.cli.learn import train_table

        train_table(args)
        return
    _check(args)
    keep_memory()
    say = _talker()
    if args.resume is not None:
        from addnorm.runs.train import resume

        _finish(resume(args.resume, watch=_watch(args), say=say), args)
        return
    wish = make_wish(args)
    if args.dry_run:
        from addnorm.runs.train import plan

        _show_plan(plan(wish, measure=True, say=say), args)
        return
    from addnorm.runs.train import start

    _finish(start(wish, args.out, watch=_watch(args), say=say), args)


def make_wish(args: argparse.Namespace) -> "Wish":
    """What the flags ask for, over what the file asks for."""
    from addnorm.runs.recipe import Wish

    table: dict[str, Any] = {}
    if args.task not in TASKS:
        table = dict(Wish.load(args.task).table)
    named = {
        "run.task": args.task if args.task in TASKS else None,
        "run.size": args.size,
        "run.minutes": args.minutes,
        "run.seed": args.seed,
        "run.start": args.start,
        "data.source": args.source or args.file,
        "data.target": args.target,
        "data.valid_source": args.valid_source,
        "data.valid_target": args.valid_target,
        "data.text": args.text,
        "data.label": args.label,
    }
    for path, value in named.items():
        section, _, name = path.partition(".")
        if value is not None:
            table[section] = {**table.get(section, {}), name: value}
    return Wish(table, args.settings)


def _check(args: argparse.Namespace) -> None:
    """One clear error about flags that are missing or do not go together."""
    for name in TABLE_ONLY:
        if getattr(args, name):
            raise ConfigError(f"--{name} is for tables, not for models of text. Leave it out.")
    if args.resume is not None:
        if any(getattr(args, name) for name in BEGINNING):
            raise ConfigError(
                "--resume goes on with a run as it was begun: give nothing beside it. To change "
                "something, start a new run with --from."
            )
        return
    if args.task is None:
        raise ConfigError(f"train needs a task ({', '.join(TASKS)}), a TOML file or --resume RUN.")
    if args.task not in TASKS and not args.task.endswith(".toml"):
        raise ConfigError(f"there is no task {args.task!r}. {nearest(args.task, TASKS)}")
    if args.out is None and not args.dry_run:
        raise ConfigError("--out must name a directory for the run. Try --out runs/first.")
    if args.file is not None and args.source is not None:
        raise ConfigError(f"one file to learn from, not two: {args.file!r} and {args.source!r}.")


def _talker() -> Callable[[str], None]:
    """Talk goes to stderr, and only the first of several workers talks."""
    if not _is_first():
        return lambda text: None
    return lambda text: print(text, file=sys.stderr, flush=True)


def _watch(args: argparse.Namespace) -> Callable[[Path], Any]:
    from addnorm.runs.progress import watchers

    def watch(path: Path) -> list[Any]:
        usual = watchers(path, terminal=sys.stderr.isatty(), board=args.board)
        if not args.clinic:
            return [*usual]
        from addnorm.clinic.observer import Clinic

        return [*usual, Clinic(path)]

    return watch


def _show_plan(settled: "Plan", args: argparse.Namespace) -> None:
    """What would be trained, what it costs and how long it takes."""
    from addnorm.models.size import cost
    from addnorm.runs.progress import say_time

    config, pace = settled.config, settled.pace
    assert pace is not None and config.train.batch is not None
    length = min(config.model.length, 64)
    found = cost(config, length, max(1, config.train.batch // length))
    facts = {
        "parameters": found.parameters,
        "step_flops": found.forward + found.backward,
        "activation_bytes": found.activations,
        "step_seconds": round(pace.step, 4),
        "evaluation_seconds": round(pace.evaluation, 3),
        "total_seconds": round(pace.total(config)),
    }
    if args.json:
        print(json.dumps({"config": config.dump(), **facts}, indent=1))
        return
    print(config.dump())
    print(f"# {found.parameters:,} parameters; {facts['step_flops']:.3g} operations a step")
    print(f"# {pace.step:.3f} s a step, {pace.evaluation:.2f} s an evaluation, measured here")
    print(f"# expected duration: {say_time(pace.total(config))}")


def _finish(outcome: Any, args: argparse.Namespace) -> None:
    """Say how it ended: the summary on stdout, the way on on stderr."""
    if not _is_first():
        return
    from addnorm.report import sparkline
    from addnorm.runs.progress import say_figures, say_time

    run, figures = outcome.run, outcome.run.summary()
    if args.json:
        print(json.dumps({"run": str(run.path), **figures}, indent=1, ensure_ascii=False))
    else:
        curve = [row["valid_loss"] for row in run.metrics() if _number(row.get("valid_loss"))]
        if figures["best"]:
            print(f"best at step {figures['best_step']:,}: {say_figures(figures['best'])}")
            print(f"held-out loss  {sparkline(curve, 50)}")
        done = "trained" if figures["finished"] else "stopped"
        speed = figures["tokens"] / max(figures["seconds"], 1e-9)
        print(
            f"{done} after {figures['steps']:,} steps, {say_time(figures['seconds'])}, "
            f"{speed:,.0f} tokens/s"
        )
        print(f"model: {run.path / 'best'}   picture: {run.path / 'summary.html'}")
    if not figures["finished"]:
        print(f"go on with: addnorm train --resume {run.path}", file=sys.stderr)
        raise KeyboardInterrupt


def _is_first() -> bool:
    """Whether this is the only worker, or the first of several."""
    from addnorm.train.parallel import launched

    return (launched() or (0, 0, 1))[0] == 0


def _number(value: object) -> bool:
    return isinstance(value, int | float)
