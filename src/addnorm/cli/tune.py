"""The verb `tune`: search for settings on a table."""

import argparse
from pathlib import Path

from addnorm.cli.console import say
from addnorm.cli.flags import add_set

TUNE_EXAMPLES = (
    "addnorm tune adult.csv --target income --minutes 30 --out runs/adult",
    "addnorm tune visits.csv --target readmitted --set table.groups=patient --json",
)


def add_tune_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `addnorm tune`."""
    parser.add_argument("file", metavar="FILE", help="table to train on")
    parser.add_argument("--target", metavar="COLUMN", required=True, help="column to predict")
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="time for all trials and the final run (default 30)",
    )
    parser.add_argument(
        "--out",
        metavar="RUN",
        help="directory for the run and the trials; the same command continues a search "
        "(default runs/tune-…)",
    )
    parser.add_argument("--seed", type=int, help="random seed (default 0)")
    add_set(parser, "set one field of all trials, which is then not searched; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON")


def tune(args: argparse.Namespace) -> None:
    """Search for settings, train the best, and print all trials."""
    from addnorm.cpu import keep_memory
    from addnorm.races.tune import tune_request
    from addnorm.runs.request import make_request

    keep_memory()
    options = {"source": args.file, "target": args.target, "seed": args.seed}
    request = make_request("table", options, args.settings)
    out = Path("runs") / f"tune-{Path(args.file).stem}" if args.out is None else args.out
    result = tune_request(request, out, minutes=args.minutes, progress=True, say=say)
    print(result.json() if args.json else result.text())
    say(f"run: {result.run}")
