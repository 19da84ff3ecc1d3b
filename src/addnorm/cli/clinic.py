"""Verbs that examine models and compare settings: clinic, race."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.cli.console import say
from addnorm.cli.flags import add_set
from addnorm.errors import ConfigError
from addnorm.files import TABLE_MODEL, kind_of

if TYPE_CHECKING:
    from addnorm.clinic import TrainingPlan
    from addnorm.clinic.subject import Subject
    from addnorm.config import Config
    from addnorm.runs.request import RunRequest

TABLE_ROWS = 64
"""Rows in a batch of a table."""


def clinic_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `addnorm clinic`."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a preset, a TOML file, a run (text or table), a Hugging Face directory; or `replay`",
    )
    parser.add_argument("case", nargs="?", help="with replay: folder of the case")
    add_set(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        default=(),
        metavar="FILE",
        help="text or table to examine the model with; two files of parallel lines for translation "
        "(default: random batches)",
    )
    parser.add_argument("--report", metavar="FILE.html", help="also write an HTML page with charts")
    parser.add_argument(
        "--lr", type=float, help="planned learning rate; training is rehearsed with it"
    )
    parser.add_argument("--warmup", type=int, help="planned warm-up steps, with --lr (default 0)")
    parser.add_argument("--quick", action="store_true", help="skip the measurement of sharpness")
    parser.add_argument(
        "--try",
        dest="try_out",
        action="store_true",
        help="train the model and each remedy for some steps, and compare them",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder for the runs of --try (default runs/try-…)"
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="training steps of --try (default 200)"
    )
    parser.add_argument("--jobs", type=int, help="parallel runs of --try (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def race_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `addnorm race`."""
    parser.add_argument("config", metavar="FILE.toml", help="configuration with a task and data")
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="SECTION.FIELD=A,B",
        help="field and values to compare; may be repeated",
    )
    add_set(parser, "change one field of all entries; may be repeated")
    parser.add_argument("--out", metavar="FOLDER", help="folder for the runs (default runs/race-…)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds per entry (default 1)")
    parser.add_argument("--minutes", type=float, help="total time of all runs")
    parser.add_argument("--jobs", type=int, help="parallel runs (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print JSON")


CLINIC_EXAMPLES = (
    "addnorm clinic base --set model.width=64 --set model.vocab=500 --quick",
    "addnorm clinic gpt2 --set model.depth=4 --lr 1e-3 --report clinic.html",
    "addnorm clinic gpt2 --set model.depth=4 --data book.txt --lr 1e-3",
    "addnorm clinic run.toml --try --out runs/remedies",
    "addnorm clinic replay runs/mine/cases/step-00000412",
)
RACE_EXAMPLES = (
    "addnorm race run.toml --vary model.addnorm=post,pre,admin --out runs/race --seeds 3",
    "addnorm race run.toml --vary train.warmup=0,400 --out runs/warm --minutes 20",
)


def clinic(args: argparse.Namespace) -> None:
    """Examine a model and print the findings."""
    from addnorm.cpu import keep_memory

    if args.target == "replay":
        _replay(args)
        return
    if args.case is not None:
        raise ConfigError(f"clinic takes one target: got {args.target!r} and {args.case!r}.")
    if args.warmup is not None and args.lr is None:
        raise ConfigError(f"--warmup {args.warmup} needs a learning rate. Try adding --lr 1e-3.")
    keep_memory()
    if args.try_out:
        _try(args)
        return
    subject = find_subject(args)
    say(f"{subject.source}.")
    examination = subject.examine(sharpness=not args.quick)
    if args.report is not None:
        say(f"page: {examination.write_page(args.report)}")
    print(examination.json() if args.json else examination.text())


def race(args: argparse.Namespace) -> None:
    """Train the entries of a race and print the result, the best entry first."""
    from addnorm.races import race as run_race
    from addnorm.races import vary
    from addnorm.races.page import race_page
    from addnorm.runs.request import RunRequest

    request = RunRequest.load(args.config, args.settings)
    out = Path(args.out or Path("runs") / f"race-{Path(args.config).stem}")
    result = run_race(
        request,
        vary(args.vary),
        out,
        seeds=args.seeds,
        minutes=args.minutes,
        jobs=args.jobs,
        say=say,
    )
    page = race_page(result, f"Race: {out.name}", [*args.vary, *args.settings])
    say(f"page: {page.write(out / 'race.html')}")
    print(result.json() if args.json else result.text())


def find_subject(args: argparse.Namespace) -> "Subject":
    """Return the model and batches that the flags of `addnorm clinic` name."""
    from addnorm.clinic import TrainingPlan
    from addnorm.clinic.subject import is_transformers_directory, subject_from_config
    from addnorm.presets import find

    path = Path(args.target)
    plan = None if args.lr is None else TrainingPlan(lr=args.lr, warmup=args.warmup or 0)
    if is_transformers_directory(path):
        return _from_transformers(path, args.data, plan)
    if (path / "run.json").is_file():
        return _from_run(path, args.data, plan)
    if kind_of(path / "model.safetensors") == TABLE_MODEL.kind:
        from addnorm.tabular import load

        return _from_estimator(load(path), args.data, plan)
    request = find_request(args)
    if request is None:
        return subject_from_config(find(args.target, args.settings), plan)
    return from_request(request, plan)


def find_request(args: argparse.Namespace) -> "RunRequest | None":
    """Return the request for a target and its data; None if there are no data."""
    from addnorm.clinic.subject import text_task_of
    from addnorm.presets import find
    from addnorm.runs.request import RunRequest

    path = Path(args.target)
    if (path / "run.json").is_file():
        request = RunRequest.load(path / "config.toml", args.settings)
    elif path.suffix == ".toml" and path.is_file():
        request = RunRequest.load(path, args.settings)
    else:
        request = RunRequest({"preset": args.target}, args.settings)
    if not args.data:
        return request if request.task else None
    task = request.task or text_task_of(find(args.target, args.settings).model)
    files = {f"data.{name}": value for name, value in _data_fields(args.data).items()}
    return request.with_values({"run.task": task, **files})


def _data_fields(paths: Sequence[str]) -> dict[str, str | None]:
    """Return the path fields of the data section for one or two files."""
    if len(paths) > 2:
        raise ConfigError(f"--data takes one file, or two for translation: got {len(paths)}.")
    target = paths[1] if len(paths) > 1 else None
    return {"source": paths[0], "target": target, "valid_source": None, "valid_target": None}


def from_request(request: "RunRequest", plan: "TrainingPlan | None" = None) -> "Subject":
    """Return an untrained model with batches of its training data."""
    from addnorm.clinic.rehearsal import REHEARSAL_STEPS
    from addnorm.clinic.subject import plan_from_config, subject_from_task
    from addnorm.runs.train import plan_run

    planned = plan_run(request, say=say)
    config, task = planned.config, planned.task
    batches = [task.batch(part) for part in task.plan(0)[: 1 + REHEARSAL_STEPS]]
    source = f"the batches are the first {len(batches)} of {config.data.source}"
    plan = plan or plan_from_config(config)
    if task.name == "table":
        from addnorm.clinic import ClinicBatch

        rows = [ClinicBatch((b["numbers"], b["codes"]), b["target"]) for b in batches]
        subject = _table_subject(planned.model, rows, source, plan, len(task.labels))
        return replace(subject, config=config)
    return subject_from_task(planned.model, batches, source, plan, config)


def _from_run(path: Path, files: Sequence[str], plan: "TrainingPlan | None") -> "Subject":
    """Return the best model of a run with batches of its held-out data, or of other files."""
    from addnorm.clinic.subject import batch_count, subject_from_task
    from addnorm.runs.run import Run
    from addnorm.tasks import find_task

    run = Run.open(path)
    if run.task == "table":
        return _from_estimator(run.trained.estimator, files, plan)  # type: ignore[attr-defined]
    config: Config = run.config
    if files:
        config = config.replace(data=config.data.replace(**_data_fields(files)))
    task: Any = find_task(run.task).read(config, run.tokenizers).bind(config)
    parts = task.held_out()[: batch_count(plan)]
    batches = [task.collate(part, epoch=None) for part in parts]
    source = f"the batches are held out of {config.data.source}"
    return subject_from_task(run.model, batches, source, plan)


def _from_estimator(estimator: Any, files: Sequence[str], plan: "TrainingPlan | None") -> "Subject":
    """Return a table model with rows and targets of a file, or random rows."""
    from addnorm.clinic import ClinicBatch
    from addnorm.clinic.subject import batch_count, subject_with_random_batches
    from addnorm.tasks.table import read_known_rows

    if not files:
        return subject_with_random_batches(estimator.model_, plan)
    if len(files) > 1:
        raise ConfigError(f"--data takes one file for a table: got {len(files)}.")
    rows = estimator.rows(*read_known_rows(estimator, files[0], say, "Leave out --data."))
    whole = ClinicBatch((rows.table.numbers, rows.table.codes), rows.target)
    starts = range(0, min(len(rows), batch_count(plan) * TABLE_ROWS), TABLE_ROWS)
    batches = [whole.rows(start, start + TABLE_ROWS) for start in starts]
    source = f"the batches are the first rows of {files[0]}, {TABLE_ROWS} each"
    classes = len(getattr(estimator, "classes_", ()))
    return _table_subject(estimator.model_, batches, source, plan, classes)


def _table_subject(
    model: Any, batches: list[Any], source: str, plan: "TrainingPlan | None", classes: int
) -> "Subject":
    from addnorm.clinic.call_model import Objective, answer_of
    from addnorm.clinic.subject import Subject
    from addnorm.tabular.fitting import losses

    loss = Objective(
        lambda output, targets: losses(answer_of(output), targets, classes).mean(),
        "the loss of the table's targets",
        by_rows=False,
    )
    return Subject(model, batches, source, plan, loss)


def _from_transformers(path: Path, files: Sequence[str], plan: "TrainingPlan | None") -> "Subject":
    """Return a model of Hugging Face transformers with lines of a file, or random batches."""
    from addnorm.clinic.subject import subject_from_transformers
    from addnorm.data.text.files import read_lines

    if len(files) > 1:
        raise ConfigError(f"--data takes one file for a Hugging Face model: got {len(files)}.")
    if not files:
        return subject_from_transformers(path, plan)
    lines = list(read_lines(files[0]))
    return subject_from_transformers(path, plan, lines=lines, text_name=files[0])


def _replay(args: argparse.Namespace) -> None:
    from addnorm.clinic.failed_step import replay

    if args.case is None:
        raise ConfigError(
            "replay needs the folder of a case. Try: addnorm clinic replay RUN/cases/STEP"
        )
    case = replay(args.case)
    print(case.json() if args.json else case.text())


def _try(args: argparse.Namespace) -> None:
    """Examine a model, then race it against the remedies."""
    from addnorm.races import race as run_race
    from addnorm.races.entries import remedy_entries
    from addnorm.races.page import race_page

    request = find_request(args)
    if request is None:
        raise ConfigError(
            f"--try trains, so it needs a run, a TOML file with task and data, or --data: got "
            f"{args.target!r}. Try --data text.txt."
        )
    request = request.with_settings(*_plan_settings(args), f"train.steps={args.steps}")
    subject = from_request(request)
    examination = subject.examine(sharpness=not args.quick)
    for finding in examination.findings:
        say(f"{finding.name}: {finding.evidence}.")
    out = Path(args.out or Path("runs") / f"try-{Path(args.target).stem}")
    assert subject.config is not None
    entries = remedy_entries(examination.findings, subject.config)
    result = run_race(request, entries, out, jobs=args.jobs, say=say)
    page = race_page(result, "The model and its remedies", request.settings)
    say(f"page: {page.write(out / 'race.html')}")
    print(result.json() if args.json else f"{result.text()}\n{result.recovery()}")


def _plan_settings(args: argparse.Namespace) -> list[str]:
    """Return --lr and --warmup as settings."""
    if args.lr is None:
        return []
    return [f"train.lr={args.lr}", f"train.warmup={args.warmup or 0}"]
