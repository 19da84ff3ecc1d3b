"""Verbs that examine and compare: clinic, race."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from addnorm.cli.flags import add_set
from addnorm.cli.patient import Patient, find_patient, find_wish, of_wish
from addnorm.cli.talk import say
from addnorm.errors import ConfigError

if TYPE_CHECKING:
    from addnorm.clinic import Examination


def clinic_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `addnorm clinic`."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a preset, a TOML file, a run (text or table), a Hugging Face directory; or `replay`",
    )
    parser.add_argument("case", nargs="?", help="with replay: the folder of a case")
    add_set(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        default=(),
        metavar="FILE",
        help="text or rows to examine it with, two files of lines to translate (else random ones)",
    )
    parser.add_argument("--report", metavar="FILE.html", help="write a page with pictures, too")
    parser.add_argument("--lr", type=float, help="the planned rate: the training is rehearsed")
    parser.add_argument("--warmup", type=int, help="the planned warm-up, with --lr (default 0)")
    parser.add_argument("--quick", action="store_true", help="leave out the sharpness")
    parser.add_argument(
        "--try",
        dest="try_out",
        action="store_true",
        help="train the patient and each remedy a little, and say who recovered",
    )
    parser.add_argument("--out", metavar="FOLDER", help="where --try trains (default runs/try-…)")
    parser.add_argument("--steps", type=int, default=200, help="steps of --try (default 200)")
    parser.add_argument("--jobs", type=int, help="runs at a time, with --try")
    parser.add_argument("--json", action="store_true", help="print JSON")


def race_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `addnorm race`."""
    parser.add_argument("config", metavar="FILE.toml", help="a configuration with task and data")
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="SECTION.FIELD=A,B",
        help="what the runners differ in; may be repeated",
    )
    add_set(parser, "change one field for all; may be repeated")
    parser.add_argument("--out", metavar="FOLDER", help="where the runs are (default runs/race-…)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds for each (default 1)")
    parser.add_argument("--minutes", type=float, help="time for all of them together")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one a core)")
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
    """Examine a model and say what was found."""
    from addnorm.machine import keep_memory

    if args.target == "replay":
        _replay(args)
        return
    if args.case is not None:
        raise ConfigError(f"one target at a time: got {args.target!r} and {args.case!r}.")
    if args.warmup is not None and args.lr is None:
        raise ConfigError(f"--warmup {args.warmup} is of a rate: give it with --lr. Try --lr 1e-3.")
    keep_memory()
    if args.try_out:
        _try(args)
        return
    patient = find_patient(args)
    say(f"{patient.said}.")
    seen = _examine(patient, args)
    if args.report is not None:
        say(f"page: {seen.write_page(args.report)}")
    print(seen.json() if args.json else seen.text())


def race(args: argparse.Namespace) -> None:
    """Run a race and say who won."""
    from addnorm.race import race as run_race
    from addnorm.race import vary
    from addnorm.race.page import make_page
    from addnorm.runs.recipe import Wish

    wish = Wish.load(args.config, args.settings)
    out = Path(args.out or Path("runs") / f"race-{Path(args.config).stem}")
    done = run_race(
        wish,
        vary(args.vary),
        out,
        seeds=args.seeds,
        minutes=args.minutes,
        jobs=args.jobs,
        say=say,
    )
    page = make_page(done, f"Race: {out.name}", [*args.vary, *args.settings])
    say(f"page: {page.write(out / 'race.html')}")
    print(done.json() if args.json else done.text())


def _examine(patient: Patient, args: argparse.Namespace) -> "Examination":
    from addnorm.clinic import examine

    first, *more = patient.batches
    return examine(
        patient.model, first, patient.loss, plan=patient.plan, more=more, sharp=not args.quick
    )


def _replay(args: argparse.Namespace) -> None:
    from addnorm.clinic.case import replay

    if args.case is None:
        raise ConfigError("replay needs the folder of a case. Try runs/mine/cases/step-00000412.")
    case = replay(args.case)
    print(case.json() if args.json else case.text())


def _try(args: argparse.Namespace) -> None:
    """Examine the patient, then race it against the remedies."""
    from addnorm.race import race as run_race
    from addnorm.race.entries import remedies
    from addnorm.race.page import make_page
    from addnorm.runs.recipe import Wish

    wish = find_wish(args)
    if wish is None:
        raise ConfigError(
            f"--try trains, so it needs a run, a TOML file with task and data, or --data: got "
            f"{args.target!r}. Try --data text.txt."
        )
    wish = Wish(wish.table, (*wish.settings, *_planned(args), f"train.steps={args.steps}"))
    patient = of_wish(wish)
    seen = _examine(patient, args)
    for finding in seen.findings:
        say(f"{finding.name}: {finding.evidence}.")
    out = Path(args.out or Path("runs") / f"try-{Path(args.target).stem}")
    assert patient.config is not None
    entries = remedies(seen.findings, patient.config)
    done = run_race(wish, entries, out, jobs=args.jobs, say=say)
    page = make_page(done, "The patient and its remedies", wish.settings)
    say(f"page: {page.write(out / 'race.html')}")
    print(done.json() if args.json else f"{done.text()}\n{done.recovery()}")


def _planned(args: argparse.Namespace) -> list[str]:
    """The flags of the plan as settings."""
    if args.lr is None:
        return []
    return [f"train.lr={args.lr}", f"train.warmup={args.warmup or 0}"]
