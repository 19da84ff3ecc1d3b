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
from addnorm.errors import AddnormError

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
    _set_flag(parser)


def _set_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="change one field of the configuration; may be repeated",
    )


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
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")


def _train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task",
        nargs="?",
        metavar="TASK|FILE.toml",
        help="translate, language, masked or classify; or a file with a whole configuration",
    )
    parser.add_argument("file", nargs="?", help="what to learn from: a text, or a table")
    parser.add_argument("--source", help="lines to translate from, or the file to learn from")
    parser.add_argument("--target", help="lines to translate to")
    parser.add_argument("--valid-source", help="file to validate with (else a part is held out)")
    parser.add_argument("--valid-target", help="translations of the lines to validate with")
    parser.add_argument("--text", metavar="COLUMN", help="column of the text, by name or number")
    parser.add_argument("--label", metavar="COLUMN", help="column of the label, by name or number")
    parser.add_argument("--out", metavar="RUN", help="directory for the run")
    parser.add_argument("--from", dest="start", metavar="RUN", help="begin with this run's weights")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped")
    parser.add_argument("--size", help="tiny, small, base or big (else chosen from the data)")
    parser.add_argument("--minutes", type=float, help="time to train (else chosen from the data)")
    _set_flag(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and stop")
    parser.add_argument("--board", action="store_true", help="write figures for TensorBoard, too")
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train a model: translate, language, masked or classify",
        "addnorm.cli.train:train",
        _train_flags,
        (
            "addnorm train translate --source train.en --target train.de --out runs/ende",
            "addnorm train language book.txt --out runs/book --minutes 5",
            "addnorm train classify reviews.csv --text review --label stars --out runs/stars",
            "addnorm train --resume runs/ende",
        ),
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
        "build the classical Transformer, look at it, and train a small one in seconds",
        "addnorm.cli.demo:demo",
        _demo_flags,
        ("addnorm demo", "addnorm demo --seed 1"),
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
        return MISUSE
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
    sys.exit(main())
