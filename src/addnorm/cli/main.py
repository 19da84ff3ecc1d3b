"""The parser and the table of commands. It imports no heavy package, so that --help is fast."""

import argparse
import atexit
import csv
import importlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from addnorm import __version__
from addnorm.cli import clinic, completion, doctor, interop, predict, train, tune
from addnorm.cli.flags import add_set
from addnorm.cpu import avoid_broken_amx, reduce_thread_spinning
from addnorm.errors import AddnormError, ConfigError, nearest
from addnorm.tasks import TASKS

MISUSE, FAILURE, INTERRUPTED = 2, 1, 130
UNPACKED_FLAG = "--unpacked-limit"
"""The one option before the verb that takes a value."""


@dataclass(frozen=True)
class Command:
    """One verb: its help, the function that runs it, its flags, and example commands."""

    help: str
    action: str
    """module:function, which is imported when the verb is used."""
    flags: Callable[[argparse.ArgumentParser], None]
    examples: tuple[str, ...]


def _target_flags(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("config", metavar="CONFIG|PRESET", help=what)
    add_set(parser)


def _cost_flags(parser: argparse.ArgumentParser) -> None:
    _target_flags(parser, "a preset's name, a TOML file or a saved model")
    parser.add_argument(
        "--length", type=int, metavar="N", help="positions per sequence (default: model.length)"
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="B", help="sequences per batch (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _draw_flags(parser: argparse.ArgumentParser) -> None:
    _target_flags(parser, "a preset's name, a TOML file, a saved model or a run")
    parser.add_argument(
        "-o", "--out", metavar="FILE.svg", help="file to write (default: CONFIG.svg)"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="positions per sequence (default: model.length)"
    )


def _show_flags(parser: argparse.ArgumentParser) -> None:
    _target_flags(parser, "a preset's name, a TOML file or a saved model")
    parser.add_argument(
        "--fields", action="store_true", help="add a comment to each field that explains it"
    )


def _list_flags(parser: argparse.ArgumentParser) -> None:
    kinds = ("addnorms", "norms", "positions", "ffns", "presets")
    parser.add_argument("kind", nargs="?", default="addnorms", choices=kinds, help="what to list")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _demo_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to", default="de", metavar="CODE", help="language to translate to (default de)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="training steps (default 1800: about 2 minutes on two idle cores)",
    )
    length.add_argument("--minutes", type=float, metavar="N", help="train for N minutes instead")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder for the results (default runs/demo-CODE)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMANDS: dict[str, Command] = {
    "train": Command(
        f"train a model: {', '.join(TASKS)}; or a TOML file that names one of them",
        "addnorm.cli.train:train",
        train.add_train_flags,
        (
            *(entry.examples[0] for entry in TASKS.values()),
            "addnorm train run.toml --out runs/mine --set train.lr=1e-3",
            "addnorm train --resume runs/ende --minutes +10",
            "addnorm train --resume runs/ende",
        ),
    ),
    "evaluate": Command(
        "evaluate a run on other files: loss, BLEU, chrF, accuracy, F1, AUC, bits per byte",
        "addnorm.cli.predict:evaluate",
        predict.add_evaluate_flags,
        (
            "addnorm evaluate runs/ende --source test.en --target test.de",
            "addnorm evaluate runs/stars test.csv --json",
            "addnorm evaluate runs/adult later.csv",
        ),
    ),
    "translate": Command(
        "translate the lines of a file with a trained run",
        "addnorm.cli.predict:translate",
        predict.add_translate_flags,
        (
            "echo 'a man rides a bicycle' | addnorm translate runs/ende",
            "addnorm translate runs/ende test.en --beam 5 --nbest 10 --scores --json",
        ),
    ),
    "generate": Command(
        "continue a prompt with a trained language model",
        "addnorm.cli.predict:generate",
        predict.add_generate_flags,
        (
            "addnorm generate runs/book --prompt 'Once upon a time'",
            "addnorm generate runs/book --prompt 'The' --temperature 0.7 --top-p 0.9 --seed 3",
        ),
    ),
    "classify": Command(
        "classify the lines of a file with a trained run",
        "addnorm.cli.predict:classify",
        predict.add_classify_flags,
        (
            "echo 'what a joy' | addnorm classify runs/stars",
            "addnorm classify runs/stars texts.txt --json",
            "addnorm classify models/minilm texts.txt --examples few.csv",
        ),
    ),
    "label": Command(
        "label the words of each line of a file with a trained run: names, parts of speech",
        "addnorm.cli.predict:label",
        predict.add_label_flags,
        (
            "echo 'Ada Lovelace lived in London' | addnorm label runs/names",
            "addnorm label runs/names texts.txt --json",
        ),
    ),
    "schema": Command(
        "infer the type of each column; edit the file and pass it back with --schema",
        "addnorm.cli.predict:schema",
        predict.add_schema_flags,
        ("addnorm schema adult.csv --target income", "addnorm schema adult.csv -o schema.toml"),
    ),
    "predict": Command(
        "predict a column for each row of a file with a trained table run",
        "addnorm.cli.predict:predict",
        predict.add_predict_flags,
        (
            "addnorm predict runs/adult new.csv -o scored.parquet --proba",
            "addnorm predict runs/adult new.csv -o scored.csv",
            "addnorm predict runs/adult new.csv --proba --json",
        ),
    ),
    "explain": Command(
        "explain an output: words, layers and heads of a text; patches of an image; columns of a "
        "table or one row",
        "addnorm.cli.predict:explain",
        predict.add_explain_flags,
        (
            "addnorm explain runs/adult new.csv --row 17",
            "addnorm explain runs/ende 'a man rides a bicycle' --report why.html",
            "addnorm explain runs/digits new.npz --row 5 --report why.html",
        ),
    ),
    "import": Command(
        "read a Hugging Face directory as a run, without transformers",
        "addnorm.cli.interop:import_directory",
        interop.add_import_flags,
        (
            "addnorm import models/minilm runs/minilm",
            "addnorm train classify reviews.csv --from models/minilm --out runs/stars",
        ),
    ),
    "export": Command(
        "write a run as a Hugging Face directory, verified by reading it again",
        "addnorm.cli.interop:export",
        interop.add_export_flags,
        (
            "addnorm export runs/stars exported/stars",
            "addnorm export runs/book exported/book --architecture llama --json",
            "addnorm export runs/ende exported/ende --to ctranslate2 --precision int8",
        ),
    ),
    "embed": Command(
        "turn texts into vectors: mean-pooled, of length 1",
        "addnorm.cli.interop:embed",
        interop.add_embed_flags,
        (
            "echo 'what a joy' | addnorm embed models/minilm --json",
            "addnorm embed models/minilm texts.txt -o vectors.npy",
        ),
    ),
    "clinic": Command(
        "examine a model: predict whether it will train, find problems, suggest remedies",
        "addnorm.cli.clinic:clinic",
        clinic.clinic_flags,
        clinic.CLINIC_EXAMPLES,
    ),
    "race": Command(
        "train variants of a configuration and rank them by their results",
        "addnorm.cli.clinic:race",
        clinic.race_flags,
        clinic.RACE_EXAMPLES,
    ),
    "tune": Command(
        "search for the settings that suit a table, and train a run with the best ones",
        "addnorm.cli.tune:tune",
        tune.add_tune_flags,
        tune.TUNE_EXAMPLES,
    ),
    "runs": Command(
        "list runs and their best metrics",
        "addnorm.cli.predict:runs",
        predict.add_runs_flags,
        ("addnorm runs", "addnorm runs /tmp --json"),
    ),
    "cost": Command(
        "show the parameters, operations and memory of each part of a model",
        "addnorm.cli.inspect:cost",
        _cost_flags,
        ("addnorm cost base --length 64 --batch 32", "addnorm cost gpt2-medium --json"),
    ),
    "draw": Command(
        "draw a model as SVG: blocks, Add & Norm boxes, shapes, parameters and operations",
        "addnorm.cli.inspect:draw_model",
        _draw_flags,
        (
            "addnorm draw gpt2 -o gpt2.svg",
            "addnorm draw base --set model.addnorm=dual -o residual.svg",
        ),
    ),
    "show": Command(
        "show the configuration of a preset, file or saved model as TOML",
        "addnorm.cli.inspect:show",
        _show_flags,
        ("addnorm show bert --fields", "addnorm show gpt2 --set model.addnorm=layerscale"),
    ),
    "list": Command(
        "list arrangements, norms, positions, feed-forwards or presets, with their formulas",
        "addnorm.cli.inspect:list_variants",
        _list_flags,
        ("addnorm list", "addnorm list presets"),
    ),
    "doctor": Command(
        "check versions, CPU, threads, kernels, memory and extras, and say what to do about each",
        "addnorm.cli.doctor:doctor",
        doctor.doctor_flags,
        ("addnorm doctor", "addnorm doctor --json"),
    ),
    "demo": Command(
        "train a small translation model in minutes, and show how it works",
        "addnorm.cli.demo:demo",
        _demo_flags,
        ("addnorm demo", "addnorm demo --to fr --minutes 3"),
    ),
    "completion": Command(
        "print a script that completes verbs, tasks and options in bash, zsh or fish",
        "addnorm.cli.completion:completion",
        completion.add_completion_flags,
        ("addnorm completion bash", "addnorm completion zsh", "addnorm completion fish"),
    ),
}


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError, with the nearest known name for an unknown one."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            advice = nearest(str(value), action.choices)
            raise ConfigError(f"there is no {action.dest} {value!r}. {advice}")

    def flags(self) -> list[str]:
        """Return the names of all options."""
        return [flag for action in self._actions for flag in action.option_strings]


def _add_command(
    verbs: Any, name: str, help: str, examples: Sequence[str], flags: Callable[[Parser], None]
) -> Parser:
    parser: Parser = verbs.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="examples:\n  " + "\n  ".join(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags(parser)
    parser.set_defaults(parser=parser)
    return parser


def _count_bytes(text: str) -> int:
    """Return the number of bytes in a text; an error unless it is a whole number above 0."""
    if not re.fullmatch("[0-9]{1,18}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"it must be a number of bytes above 0: got {text!r:.40}")
    return int(text)


def _no_flags(parser: argparse.ArgumentParser) -> None:
    """Add no flags: another verb is used, and this one is only listed."""


def make_parser(verb: str | None = None, *, tasks: bool = True) -> Parser:
    """Return the parser of all verbs.

    Parameters
    ----------
    verb : the verb whose options are added; None for those of all verbs.
    tasks : whether `train` takes a task, which it does not with --resume.
    """
    parser = Parser(
        prog="addnorm",
        description="Build, train, examine and explain Transformers.",
        epilog="addnorm VERB --help describes a verb and ends with example commands.",
    )
    parser.set_defaults(began=None)
    parser.add_argument("--version", action="version", version=f"addnorm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        UNPACKED_FLAG,
        type=_count_bytes,
        metavar="BYTES",
        help="bytes that a .gz file may unpack to (default: 256 MiB, or 50 times its size)",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for name, command in COMMANDS.items():
        flags = command.flags if verb in (None, name) else _no_flags
        added = _add_command(verbs, name, command.help, command.examples, flags)
        added.set_defaults(action=command.action)
        if name == "train" and verb in (None, name):
            added.set_defaults(task=None)
            if tasks:
                _add_tasks(added, command)
    return parser


def _add_tasks(parser: Parser, command: Command) -> None:
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", dest="task")
    for task, entry in TASKS.items():
        out = entry.examples[0].partition("--out ")[2].split()[0]
        examples = (*entry.examples, f"addnorm train --resume {out}")
        _add_command(tasks, task, entry.help, examples, train.add_task_flags(task))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line; an unknown option gets the nearest known one."""
    first = _find_verb(arguments)
    verb, rest = "".join(arguments[first : first + 1]), list(arguments[first + 1 :])
    resume = verb == "train" and any(word.partition("=")[0] == "--resume" for word in rest)
    if verb == "train" and not resume:
        rest = _name_task(rest)
    words = [*arguments[: first + 1], *rest]
    args, unknown = make_parser(verb, tasks=not resume).parse_known_args(words)
    if not unknown:
        return args
    if resume:
        raise ConfigError(train.RESUME_ALONE)
    command = args.parser.prog.removeprefix("addnorm ")
    flag = next((word for word in unknown if word.startswith("-")), None)
    if flag is None:
        raise ConfigError(f"{command} takes no argument {unknown[0]!r}. See addnorm {command} -h")
    name = flag.partition("=")[0]
    raise ConfigError(f"{command} has no option {name!r}. {nearest(name, args.parser.flags())}")


def _find_verb(words: Sequence[str]) -> int:
    """Return the index of the first word that is neither an option nor the value of one."""
    is_value = False
    for index, word in enumerate(words):
        if not word.startswith("-") and not is_value:
            return index
        # As argparse does, accept a beginning of the name: --unpacked.
        is_value = len(word) > 2 and UNPACKED_FLAG.startswith(word)
    return 0


def _name_task(words: list[str]) -> list[str]:
    """Return `FILE.toml ...` as `TASK --config FILE.toml ...`; the task must come first."""
    if not words or words[0] in ("-h", "--help"):
        return words
    if words[0].startswith("-"):
        raise ConfigError(train.NO_TASK)
    if not words[0].endswith(".toml"):
        return words
    from addnorm.runs.request import RunRequest

    path = words[0]
    task = RunRequest.load(path).task
    if task not in TASKS:
        problem = "got none." if task is None else f"got {task!r}. {nearest(task, TASKS)}"
        raise ConfigError(f"run.task of {path} must be one of {', '.join(TASKS)}: {problem}")
    return [task, "--config", path, *words[1:]]


@contextmanager
def _unpacked_limit(count: int | None) -> Iterator[None]:
    """Let compressed files unpack to `count` bytes within the block; None for the default."""
    if count is None:
        yield
        return
    from addnorm.data.text.files import limits

    before, limits.unpacked = limits.unpacked, count
    try:
        yield
    finally:
        limits.unpacked = before


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words, began = sys.argv[1:] if arguments is None else arguments, time.perf_counter()
    try:
        args = parse(words)
        args.began = began
        module, _, function = args.action.partition(":")
        with _unpacked_limit(args.unpacked_limit):
            code = getattr(importlib.import_module(module), function)(args)
        sys.stdout.flush()
    except AddnormError as error:
        if "--debug" in words:
            traceback.print_exc()
        print(f"addnorm: {error}", file=sys.stderr)
        # A run that diverged or lost a worker failed; everything else is misuse.
        return FAILURE if isinstance(error, ArithmeticError | RuntimeError) else MISUSE
    except KeyboardInterrupt:
        print("addnorm: stopped.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe, as `| head` does: nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except Exception as error:
        known = describe_failure(error)
        if known is None:
            raise
        if "--debug" in words:
            traceback.print_exc()
        message, code = known
        print(f"addnorm: {message}", file=sys.stderr)
        return code
    return code if isinstance(code, int) else 0


def describe_failure(error: Exception) -> tuple[str, int] | None:
    """Return a message and an exit code for an error of the system or of input; else None.

    None means a bug of addnorm, whose traceback is worth showing. The errors here should have been
    caught where more is known about them: this is the last net.
    """
    reason = " ".join(str(error).split()) or type(error).__name__
    is_allocation = isinstance(error, RuntimeError) and any(
        words in reason for words in ("can't allocate memory", "out of memory", "overflowed")
    )
    if isinstance(error, MemoryError) or is_allocation:
        return (
            f"there is not enough memory ({reason[:200]}). Try a smaller batch, model or file.",
            FAILURE,
        )
    if isinstance(error, UnicodeEncodeError):
        return (
            f"the output has {error.object[error.start]!r}, which {error.encoding} cannot express. "
            "Set the environment variable PYTHONIOENCODING=utf-8.",
            FAILURE,
        )
    if isinstance(error, RecursionError):
        return "the input is nested too deeply. Simplify it.", MISUSE
    if type(error).__module__.partition(".")[0] == "pyarrow":
        return f"the table cannot be read: {reason[:200]}. Save it as CSV.", MISUSE
    if isinstance(error, csv.Error):
        return f"the table cannot be read: {reason}. Check its quotes and separators.", MISUSE
    if isinstance(error, OSError):
        named = "" if error.filename is None else f"{error.filename!r}: "
        is_input = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
        hint = "Check the path." if is_input else "Check the permissions and the free disk space."
        return f"{named}{error.strerror or reason}. {hint}", MISUSE if is_input else FAILURE
    return None


def run() -> NoReturn:
    """Run the command line and exit.

    Torch's modules take most of a second of CPU time to be destroyed one by one. So the process
    ends after the functions of `atexit`, once everything is written.
    """
    reduce_thread_spinning()
    avoid_broken_amx()
    code = main()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed by the caller
            stream.flush()
    os._exit(code)
