"""The parser and the table of commands. Nothing heavy is imported here: --help must be instant."""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from addnorm import __version__
from addnorm.cli import clinic, learn, tables
from addnorm.cli.flags import add_set
from addnorm.errors import AddnormError
from addnorm.machine import wait_briefly

MISUSE, FAILURE, INTERRUPTED = 2, 1, 130


@dataclass(frozen=True)
class Command:
    """One verb: what it does, its flags, the function that does it, and commands that work."""

    help: str
    action: str
    """module:function, imported when the verb is used."""
    flags: Callable[[argparse.ArgumentParser], None]
    examples: tuple[str, ...]


def _target_flags(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("config", metavar="CONFIG|PRESET", help=what)
    add_set(parser)


def _cost_flags(parser: argparse.ArgumentParser) -> None:
    _target_flags(parser, "a preset's name, a TOML file or a saved model")
    parser.add_argument("--length", type=int, metavar="N", help="positions a sequence")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _show_flags(parser: argparse.ArgumentParser) -> None:
    _target_flags(parser, "a preset's name, a TOML file or a saved model")
    parser.add_argument(
        "--fields", action="store_true", help="explain every field beside its value"
    )


def _list_flags(parser: argparse.ArgumentParser) -> None:
    kinds = ("addnorms", "norms", "positions", "ffns", "presets")
    parser.add_argument("kind", nargs="?", default="addnorms", choices=kinds, help="what to list")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _demo_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", default="de", metavar="CODE", help="language (default de)")
    parser.add_argument("--minutes", type=float, default=2.5, help="time to train (default 2.5)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--out", metavar="FOLDER", help="where to write (default runs/demo-CODE)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task",
        nargs="?",
        metavar="TASK|FILE.toml",
        help="translate, language, masked, classify or table; or a file with a configuration",
    )
    parser.add_argument("file", nargs="?", help="what to learn from: a text, or a table")
    parser.add_argument("--source", help="lines to translate from, or the file to learn from")
    parser.add_argument("--target", help="lines to translate to, or the column to predict")
    parser.add_argument("--valid-source", help="file to validate with (else a part is held out)")
    parser.add_argument("--valid-target", help="translations of the lines to validate with")
    parser.add_argument("--text", metavar="COLUMN", help="column of the text, by name or number")
    parser.add_argument("--label", metavar="COLUMN", help="column of the label, by name or number")
    parser.add_argument("--out", metavar="RUN", help="directory for the run")
    parser.add_argument("--from", dest="start", metavar="RUN", help="begin with this run's weights")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped")
    parser.add_argument("--size", help="tiny, small, base or big (else chosen from the data)")
    parser.add_argument("--minutes", type=float, help="time to train (else chosen from the data)")
    add_set(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and stop")
    parser.add_argument("--board", action="store_true", help="write figures for TensorBoard, too")
    parser.add_argument(
        "--clinic", action="store_true", help="watch its health: warn early, keep what went wrong"
    )
    parser.add_argument("--seed", type=int, help="random seed (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    learn.add_train_flags(parser.add_argument_group("table"))


def _run_flags(parser: argparse.ArgumentParser, *, int8: bool = True) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    if int8:
        parser.add_argument("--int8", action="store_true", help="8-bit weights: faster on a CPU")


def _beam_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beam", type=int, default=5, help="hypotheses a sentence (default 5)")


def _evaluate_flags(parser: argparse.ArgumentParser) -> None:
    _run_flags(parser)
    parser.add_argument("file", nargs="?", help="text or table (else the run's held-out part)")
    parser.add_argument("--source", help="lines to translate")
    parser.add_argument("--target", help="their translations")
    _beam_flag(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _translate_flags(parser: argparse.ArgumentParser) -> None:
    _run_flags(parser)
    parser.add_argument("file", nargs="?", default="-", help="lines to translate (default: stdin)")
    _beam_flag(parser)
    parser.add_argument("--nbest", type=int, default=1, help="answers a sentence (default 1)")
    parser.add_argument("--penalty", default="length", help="length, gnmt or none")
    parser.add_argument("--alpha", type=float, default=1.0, help="exponent of the penalty")
    parser.add_argument("--workers", type=int, default=1, help="batches decoded at a time")
    parser.add_argument("--scores", action="store_true", help="print scores, too")
    parser.add_argument("--json", action="store_true", help="print JSON, a line each")


def _generate_flags(parser: argparse.ArgumentParser) -> None:
    _run_flags(parser)
    parser.add_argument("--prompt", required=True, help="the text to go on with")
    parser.add_argument("--tokens", type=int, default=300, help="tokens to add (default 300)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, help="only the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="only the likeliest tokens of this much weight")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _classify_flags(parser: argparse.ArgumentParser) -> None:
    _run_flags(parser, int8=False)
    parser.add_argument("file", nargs="?", default="-", help="a text a line (default: stdin)")
    parser.add_argument("--json", action="store_true", help="print all probabilities as JSON")


def _runs_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", help="where to look (default runs)")
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train a model: translate, language, masked, classify or table",
        "addnorm.cli.train:train",
        _train_flags,
        (
            "addnorm train translate --source train.en --target train.de --out runs/ende",
            "addnorm train language book.txt --out runs/book --minutes 5",
            "addnorm train classify reviews.csv --text review --label stars --out runs/stars",
            "addnorm train table adult.csv --target income --out runs/adult --compare",
            "addnorm train table visits.csv --target readmitted --groups patient --out runs/visits",
            "addnorm train --resume runs/ende",
        ),
    ),
    "evaluate": Command(
        "loss, BLEU, chrF, accuracy, bits per byte of a run on files it has not seen",
        "addnorm.cli.use:evaluate",
        _evaluate_flags,
        (
            "addnorm evaluate runs/ende --source test.en --target test.de",
            "addnorm evaluate runs/stars test.csv --json",
            "addnorm evaluate runs/adult later.csv",
        ),
    ),
    "translate": Command(
        "translate lines with a trained run",
        "addnorm.cli.use:translate",
        _translate_flags,
        (
            "echo 'a man rides a bicycle' | addnorm translate runs/ende",
            "addnorm translate runs/ende test.en --beam 5 --nbest 10 --scores --json",
        ),
    ),
    "generate": Command(
        "go on with a text, with a trained run",
        "addnorm.cli.use:generate",
        _generate_flags,
        (
            "addnorm generate runs/book --prompt 'Once upon a time'",
            "addnorm generate runs/book --prompt 'The' --temperature 0.7 --top-p 0.9 --seed 3",
        ),
    ),
    "classify": Command(
        "label texts with a trained run",
        "addnorm.cli.use:classify",
        _classify_flags,
        (
            "echo 'what a joy' | addnorm classify runs/stars",
            "addnorm classify runs/stars texts.txt --json",
        ),
    ),
    "schema": Command(
        "what each column of a table is taken for, to be edited and given back",
        "addnorm.cli.tables:schema",
        tables.add_schema_flags,
        ("addnorm schema adult.csv --target income", "addnorm schema adult.csv -o schema.toml"),
    ),
    "predict": Command(
        "predict the rows of a file, of any size, with a trained table run",
        "addnorm.cli.tables:predict",
        tables.add_predict_flags,
        (
            "addnorm predict runs/adult new.csv -o scored.parquet --proba",
            "addnorm predict runs/adult new.csv -o scored.csv",
            "addnorm predict runs/adult new.csv --proba --json",
        ),
    ),
    "explain": Command(
        "which columns matter, for all rows or for one",
        "addnorm.cli.tables:explain",
        tables.add_explain_flags,
        (
            "addnorm explain runs/adult new.csv --row 17",
            "addnorm explain runs/adult adult.csv --out explained.html",
        ),
    ),
    "clinic": Command(
        "examine a Transformer: will it train, what is wrong with it, what to try",
        "addnorm.cli.clinic:clinic",
        clinic.clinic_flags,
        clinic.CLINIC_EXAMPLES,
    ),
    "race": Command(
        "train variants of a configuration side by side, and say who won",
        "addnorm.cli.clinic:race",
        clinic.race_flags,
        clinic.RACE_EXAMPLES,
    ),
    "runs": Command(
        "list runs and their best scores",
        "addnorm.cli.use:runs",
        _runs_flags,
        ("addnorm runs", "addnorm runs /tmp --json"),
    ),
    "cost": Command(
        "parameters, operations and memory of a model, part by part",
        "addnorm.cli.inspect:cost",
        _cost_flags,
        ("addnorm cost base --length 64 --batch 32", "addnorm cost gpt2-medium --json"),
    ),
    "show": Command(
        "the configuration that a name or file stands for, as TOML",
        "addnorm.cli.inspect:show",
        _show_flags,
        ("addnorm show bert --fields", "addnorm show gpt2 --set model.addnorm=layerscale"),
    ),
    "list": Command(
        "the arrangements, norms, positions, feed-forwards or presets, with their formulas",
        "addnorm.cli.inspect:list_variants",
        _list_flags,
        ("addnorm list", "addnorm list presets"),
    ),
    "demo": Command(
        "train a translator of dates, amounts and names in minutes, and show how it works",
        "addnorm.cli.demo:demo",
        _demo_flags,
        ("addnorm demo", "addnorm demo --to fr --minutes 3"),
    ),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="addnorm",
        description="Build, train, examine and explain Transformers.",
        epilog="addnorm VERB --help explains a verb and ends with commands to try.",
    )
    parser.add_argument("--version", action="version", version=f"addnorm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, command in COMMANDS.items():
        verb = verbs.add_parser(
            name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog="try:\n  " + "\n  ".join(command.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.flags(verb)
        verb.set_defaults(action=command.action)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = make_parser().parse_args(arguments)
    module, _, function = args.action.partition(":")
    try:
        getattr(importlib.import_module(module), function)(args)
        sys.stdout.flush()
    except AddnormError as error:
        if args.debug:
            traceback.print_exc()
        print(f"addnorm: {error}", file=sys.stderr)
        # A run that diverged or lost a worker is no misuse.
        return FAILURE if isinstance(error, ArithmeticError | RuntimeError) else MISUSE
    except KeyboardInterrupt:
        print("addnorm: stopped.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away, as `| head` does: nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    return 0


def run() -> NoReturn:
    """The console entry point."""
    wait_briefly()
    sys.exit(main())
