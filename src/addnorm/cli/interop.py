"""Verbs between addnorm and other libraries: import, export, embed."""

import argparse
from pathlib import Path

from addnorm.cli.console import say
from addnorm.errors import ConfigError
from addnorm.files import require_writable_file, to_json, whole


def add_import_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIRECTORY", help="local directory of a Hugging Face model"
    )
    parser.add_argument("out", metavar="RUN", help="directory for the run")
    parser.add_argument(
        "--adapter", metavar="DIRECTORY", help="merge the LoRA or DoRA adapters of a PEFT directory"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run or a Hugging Face model")
    parser.add_argument("directory", metavar="DIRECTORY", help="where to write")
    parser.add_argument(
        "--to",
        default="huggingface",
        metavar="FORM",
        help="huggingface (default), peft (the adapters alone), ctranslate2, onnx or torch",
    )
    parser.add_argument(
        "--architecture", metavar="NAME", help="model_type to write, where several can express it"
    )
    parser.add_argument(
        "--precision",
        default="float32",
        metavar="TYPE",
        help="type of the weights, with --to ctranslate2: float32 (default), int8, int16, "
        "float16 or bfloat16",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_embed_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run or a Hugging Face model")
    parser.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help="one text per line (default: stdin)"
    )
    parser.add_argument("-o", "--out", metavar="FILE.npy", help="write the vectors to a NumPy file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per text")


def import_directory(args: argparse.Namespace) -> None:
    """Write a Hugging Face directory as a run."""
    from addnorm.runs.imported import import_model

    run = import_model(args.directory, args.out, adapter=args.adapter, say=say)
    if args.json:
        print(to_json({"run": str(run.path), "task": run.task, "labels": run.labels}))
        return
    say(f"{run.path}: a run for {run.task}. Start others from it with --from {run.path}")


def export(args: argparse.Namespace) -> None:
    """Write a run in a form that other libraries read."""
    from addnorm.runs.imported import export_run
    from addnorm.runs.run import Run

    run = Run.open(args.run)
    names = ("to", "architecture", "precision")
    notes = export_run(run, args.directory, **{name: getattr(args, name) for name in names})
    if args.json:
        print(to_json({"directory": args.directory, "to": args.to, "notes": notes}))
        return
    for note in notes:
        say(note)


def embed(args: argparse.Namespace) -> None:
    """Print or write one vector for each line."""
    from addnorm.cli.predict import open_with_verb, read_lines_of

    if args.out is not None and not args.out.endswith(".npy"):
        raise ConfigError(f"--out must end in .npy: got {args.out!r}.")
    require_writable_file(args.out)
    run = open_with_verb(args, "embed")
    vectors = run.embed(list(read_lines_of(args.file)), say=say)
    if args.out is not None:
        import numpy as np

        with whole(Path(args.out)) as temporary, temporary.open("wb") as file:
            np.save(file, vectors, allow_pickle=False)
        say(f"{len(vectors):,} vectors of {vectors.shape[1]} numbers: {args.out}")
        return
    for row in vectors.tolist():
        print(to_json(row, indent=None) if args.json else " ".join(f"{x:.6g}" for x in row))
