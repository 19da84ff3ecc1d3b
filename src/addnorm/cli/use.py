"""Verbs that ask a trained run: evaluate, translate, generate, classify, runs."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from addnorm.cli.tableruns import is_table_run, table_runs_in, tell_table_run
from addnorm.cli.talk import say
from addnorm.errors import AddnormError, ConfigError, InputError


def evaluate(args: argparse.Namespace) -> None:
    """Print figures on files that a run has not seen."""
    if args.file is not None and args.source is not None:
        raise ConfigError(f"one file to evaluate on, not two: {args.file!r} and {args.source!r}.")
    if is_table_run(Path(args.run)):
        from addnorm.cli.tables import evaluate as evaluate_table

        figures = evaluate_table(args)
    else:
        from addnorm.runs.use import Trained

        figures = Trained(args.run, int8=args.int8).evaluate(
            args.source or args.file,
            args.target,
            beam=args.beam,
            say=say,
        )
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        words = name.replace("_", " ")
        percent = name in ("accuracy", "f1", "exact")
        said = f"{value:.1%}" if percent else f"{value:.4g}" if isinstance(value, float) else value
        print(f"{words:<22} {said}")


def translate(args: argparse.Namespace) -> None:
    """Print the translation of each line."""
    from addnorm.runs.use import Trained

    trained = Trained(args.run, int8=args.int8)
    nbest = args.nbest
    lines = _lines(args.file)
    for number, answers in enumerate(
        trained.translate(
            lines,
            beam=max(args.beam, nbest) if args.beam > 0 else args.beam,
            nbest=nbest,
            penalty=args.penalty,
            alpha=args.alpha,
            workers=args.workers,
            window=1 if args.file == "-" and sys.stdin.isatty() else 1024,
        ),
        start=1,
    ):
        if args.json:
            found = [
                {"text": a.text, "score": a.score, "pieces": a.pieces if args.scores else None}
                for a in answers
            ]
            rows = [{k: v for k, v in row.items() if v is not None} for row in found]
            print(json.dumps({"line": number, "answers": rows}, ensure_ascii=False), flush=True)
            continue
        for answer in answers:
            before = f"{number}\t" if nbest > 1 else ""
            score = f"{answer.score:.4f}\t" if args.scores else ""
            print(f"{before}{score}{answer.text}", flush=True)


def generate(args: argparse.Namespace) -> None:
    """Print what a language model goes on with."""
    from addnorm.runs.use import Trained

    trained = Trained(args.run, int8=args.int8)
    answer = trained.generate(
        args.prompt,
        new=args.tokens,
        sampler="greedy" if args.temperature == 0 else "sample",
        temperature=args.temperature or 1.0,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    if args.json:
        print(json.dumps({"prompt": args.prompt, "text": answer.text, "pieces": answer.pieces}))
        return
    print(args.prompt + answer.text)


def classify(args: argparse.Namespace) -> None:
    """Print the likeliest label of each line, with its probability."""
    from addnorm.runs.use import Trained

    for row in Trained(args.run).classify(_lines(args.file)):
        if args.json:
            print(json.dumps(row, ensure_ascii=False), flush=True)
            continue
        label = max(row, key=row.__getitem__)
        print(f"{label}\t{row[label]:.4f}", flush=True)


def runs(args: argparse.Namespace) -> None:
    """List runs, of text and of tables, and their best scores."""
    from addnorm.runs.progress import say_figures, say_time

    if not Path(args.folder).is_dir():
        raise InputError(f"there is no folder {args.folder!r}. Train something first.")
    found = []
    for path, told in _places(Path(args.folder)):
        try:
            found.append({"run": str(path), **told(path)})
        except AddnormError as error:
            print(f"left out: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    if not found:
        print(f"no runs in {args.folder}", file=sys.stderr)
        return
    width = max(len(row["run"]) for row in found) + 2
    for row in found:
        known = "seconds" in row
        state = "finished" if row.get("finished") else "stopped" if known else "running or killed"
        time = say_time(row["seconds"]) if known else ""
        best = say_figures(row.get("best") or {})
        print(f"{row['run']:<{width}}{row['task']:<11}{state:<18}{time:>8}  {best}")


def _places(folder: Path) -> "list[tuple[Path, Callable[[Path], dict[str, Any]]]]":
    """Where runs are, by name, and how each is read."""
    from addnorm.runs.directory import Run, runs_in

    def told(path: Path) -> dict[str, Any]:
        run = Run.open(path)
        return {"task": run.facts.task, **run.summary()}

    places = [(path, told) for path in runs_in(folder)]
    places += [(path, tell_table_run) for path in table_runs_in(folder)]
    return sorted(places, key=lambda place: place[0])


def _lines(path: str) -> Iterator[str]:
    """The lines of a file, or of the standard input as they come."""
    if path == "-":
        for number, line in enumerate(sys.stdin.buffer, start=1):
            try:
                yield line.decode().rstrip("\r\n")
            except UnicodeDecodeError:
                raise InputError(
                    f"the standard input must be UTF-8 text: line {number} is not. If it is "
                    "Latin-1, convert it: iconv -f LATIN1 -t UTF-8."
                ) from None
        return
    from addnorm.data.files import read_lines

    yield from read_lines(path)
