"""Verbs that examine models and compare settings: clinic, race."""

import argparse
from pathlib import Path

from addnorm.cli.console import say
from addnorm.cli.flags import add_set
from addnorm.errors import ConfigError
from addnorm.files import require_writable, require_writable_file

FOUND_CODE = 3
"""Exit code of --fail-on."""


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
        "--fail-on",
        choices=("problem", "warning"),
        help=f"exit with code {FOUND_CODE} if there is a finding of this severity or above, or if "
        "an essential check could not be made",
    )
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
    "addnorm clinic some/hugging-face/directory --data lines.txt --fail-on problem",
    "addnorm clinic replay runs/mine/cases/step-00000412",
)
RACE_EXAMPLES = (
    "addnorm race run.toml --vary model.addnorm=post,pre,admin --out runs/race --seeds 3",
    "addnorm race run.toml --vary train.warmup=0,400 --out runs/warm --minutes 20",
)


def clinic(args: argparse.Namespace) -> int:
    """Examine a model, print the findings, and return the exit code."""
    from addnorm.clinic import TrainingPlan
    from addnorm.cpu import keep_memory
    from addnorm.runs.clinic_subject import find_subject

    if args.target == "replay":
        _replay(args)
        return 0
    if args.case is not None:
        raise ConfigError(f"clinic takes one target: got {args.target!r} and {args.case!r}.")
    if args.warmup is not None and args.lr is None:
        raise ConfigError(f"--warmup {args.warmup} needs a learning rate. Try adding --lr 1e-3.")
    require_writable_file(args.report)
    keep_memory()
    if args.try_out:
        _try(args)
        return 0
    plan = None if args.lr is None else TrainingPlan(lr=args.lr, warmup=args.warmup or 0)
    subject = find_subject(args.target, args.data, args.settings, plan, say=say)
    say(f"{subject.source}.")
    say(f"the examination needs about {subject.memory_estimate() / 2**20:,.0f} MiB of memory.")
    if subject.plan is not None:
        steps, seconds = subject.rehearsal_estimate()
        say(
            f"the rehearsal of the plan takes {steps} steps, about {seconds:,.0f} s; if it fails, "
            "each remedy takes as long."
        )
    examination = subject.examine(sharpness=not args.quick, say=say)
    if args.report is not None:
        say(f"page: {examination.write_page(args.report)}")
    print(examination.json() if args.json else examination.text())
    if args.fail_on is None:
        return 0
    severities = {"problem": ("problem",), "warning": ("problem", "warning")}[args.fail_on]
    found = any(finding.severity in severities for finding in examination.findings)
    return FOUND_CODE if found or examination.verdict == "not examined" else 0


def race(args: argparse.Namespace) -> None:
    """Train the entries of a race and print the result, the best entry first."""
    from addnorm.races import entries_of, run_entries
    from addnorm.races.page import race_page
    from addnorm.runs.request import RunRequest

    request = RunRequest.load(args.config, args.settings)
    out = Path(args.out or Path("runs") / f"race-{Path(args.config).stem}")
    result = run_entries(
        request,
        entries_of(args.vary),
        out,
        seeds=args.seeds,
        minutes=args.minutes,
        jobs=args.jobs,
        say=say,
    )
    page = race_page(result, f"Race: {out.name}", [*args.vary, *args.settings])
    say(f"page: {page.write(out / 'race.html')}")
    print(result.json() if args.json else result.text())


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
    from addnorm.races import run_entries
    from addnorm.races.entries import remedy_entries
    from addnorm.races.page import race_page
    from addnorm.runs.clinic_subject import find_request, subject_from_request

    request = find_request(args.target, args.data, args.settings)
    if request is None:
        raise ConfigError(
            f"--try trains, so it needs a run, a TOML file with task and data, or --data: got "
            f"{args.target!r}. Try --data text.txt."
        )
    out = require_writable(args.out or Path("runs") / f"try-{Path(args.target).stem}")
    request = request.with_settings(*_plan_settings(args), f"train.steps={args.steps}")
    subject = subject_from_request(request, say=say)
    examination = subject.examine(sharpness=not args.quick, say=say)
    for finding in examination.findings:
        say(f"{finding.name}: {finding.evidence}.")
    assert subject.config is not None
    entries = remedy_entries(examination.findings, subject.config)
    result = run_entries(request, entries, out, jobs=args.jobs, say=say)
    page = race_page(result, "The model and its remedies", request.settings)
    say(f"page: {page.write(out / 'race.html')}")
    print(result.json() if args.json else f"{result.text()}\n{result.recovery()}")


def _plan_settings(args: argparse.Namespace) -> list[str]:
    """Return --lr and --warmup as settings."""
    if args.lr is None:
        return []
    return [f"train.lr={args.lr}", f"train.warmup={args.warmup or 0}"]
