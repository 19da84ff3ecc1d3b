"""Verbs for tables: predict, explain, schema; `train table` is in learn.py.

Results on stdout, talk on stderr.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.cli.talk import quiet, say
from addnorm.cli.targets import read_answered
from addnorm.errors import ConfigError, InputError

if TYPE_CHECKING:
    from addnorm.data.frame import Array, Frame
    from addnorm.data.prepare import Recipe, Strange
    from addnorm.tabular.base import TableEstimator

PART = 20_000
"""Rows predicted at a time."""


def add_predict_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory that `train table` wrote")
    parser.add_argument("file", help="rows to predict: .csv, .tsv, .parquet or .feather")
    parser.add_argument("-o", "--out", metavar="FILE", help="where to write .csv, .tsv, .parquet")
    parser.add_argument("--proba", action="store_true", help="the probability of each class, too")
    parser.add_argument("--json", action="store_true", help="print JSON, a line each")


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory that `train table` wrote")
    parser.add_argument("file", help="rows to explain on; with their targets, unless --row")
    parser.add_argument("--row", type=int, metavar="N", help="explain one row, counted from 1")
    parser.add_argument("--out", metavar="FILE.html", help="write a page with pictures, too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_schema_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a table: .csv, .tsv, .parquet or .feather")
    parser.add_argument("--target", metavar="COLUMN", help="what is to be predicted")
    parser.add_argument("-o", "--out", metavar="FILE.toml", help="write it, to edit and give back")
    parser.add_argument("--json", action="store_true", help="print JSON")


def schema(args: argparse.Namespace) -> None:
    """Print what each column of a table is taken for."""
    from addnorm.data.frame import read_frame
    from addnorm.data.guess import infer

    frame = read_frame(args.file)
    for note in frame.notes:
        say(note)
    found = infer(frame, args.target)
    if args.out is not None:
        found.save(args.out)
        say(f"written to {args.out}: edit it and give it to --schema.")
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
        return
    print(found.dump(), end="")


def predict(args: argparse.Namespace) -> None:
    """Predict the rows of a file, a part at a time; the file's columns come with them."""
    from addnorm.data.stream import open_sink, read_parts
    from addnorm.tabular import load

    estimator = load(args.run)
    if args.out is not None and Path(args.out).resolve() == Path(args.file).resolve():
        raise ConfigError(f"-o must name another file than the one that is read: {args.out!r}.")
    if args.proba and not hasattr(estimator, "classes_"):
        raise ConfigError("--proba is for models of classes: this one tells numbers. Leave it out.")
    seen = Strangers(estimator.recipe_)
    done = 0
    if args.out is None:
        for part in read_parts(args.file, PART):
            scored = _score(estimator, part, seen, args.proba)
            _print_scored(scored, done, args.json)
            done += len(part)
        seen.say()
        return
    with Bar() as bar, open_sink(args.out) as sink:
        for part in read_parts(args.file, PART, bar.read):
            scored = _score(estimator, part, seen, args.proba)
            clash = [name for name in scored if name in part.columns]
            if clash:
                raise InputError(
                    f"{args.file!r} has a column {clash[0]!r} already. Rename it, or leave out -o."
                )
            sink.write(type(part)(part.name, {**part.columns, **scored}))
            done += len(part)
            bar.done(done)
    seen.say()
    if args.json:
        print(json.dumps({"rows": done, "out": args.out, "columns": list(scored)}))
        return
    say(f"{done:,} rows predicted: {args.out}")


class Strangers:
    """Values of a file that training did not know, counted over its parts."""

    def __init__(self, recipe: "Recipe") -> None:
        self.recipe = recipe
        self.found: Strange = {}
        self.empty = {column.name for column in recipe.schema.used}

    def meet(self, part: "Frame") -> None:
        from addnorm.data.schema import gone

        for name, (rows, values) in self.recipe.strange(part).items():
            before, shown = self.found.get(name, (0, []))
            self.found[name] = before + rows, list(dict.fromkeys([*shown, *values]))[:3]
        self.empty -= {name for name in self.empty if not gone(part.columns[name]).all()}

    def say(self) -> None:
        for note in self.recipe.say_strange(self.found):
            say(note)
        for name in sorted(self.empty):
            say(f"{name}: no row has a value; all are predicted as missing it.")


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of a model on rows of a file whose targets are known."""
    from addnorm.tabular import load

    for flag in ("target", "int8"):
        if getattr(args, flag):
            raise ConfigError(f"--{flag} is for models of text, not for tables. Leave it out.")
    estimator, path = load(args.run), args.file or args.source
    if path is None:
        raise ConfigError(
            "a model for tables keeps no rows to be evaluated on: give a file. "
            f"Try: addnorm evaluate {args.run} later.csv."
        )
    table, answers = read_answered(estimator, path, "Use its evaluate() from Python.")
    with quiet():
        return {**estimator.evaluate(table, answers), "rows": len(table)}


def explain(args: argparse.Namespace) -> None:
    """Print which columns matter, or what each adds to the answer for one row."""
    from addnorm.tabular import load
    from addnorm.tabular.explain import explain as explain_all
    from addnorm.tabular.page import explanation_page

    estimator = load(args.run)
    if args.row is not None:
        _explain_one(estimator, args)
        return
    table, answers = read_answered(estimator, args.file, "Explain one row: --row 1.")
    with quiet():
        found = explain_all(estimator, table, answers)
    if args.out is not None:
        say(f"picture: {explanation_page(found, estimator).write(args.out)}")
    if args.json:
        told = {**vars(found), "looks": found.looks.tolist()}
        print(json.dumps(told, indent=1))
        return
    print(f"{'':24}{'permutation':>14}{'gradient':>12}{'attention':>12}")
    for name, rise in found.ranked():
        i = found.columns.index(name)
        looked = "" if found.attention is None else f"{found.attention[i]:12.4f}"
        print(f"{name[:23]:24}{rise:14.4f}{found.gradient[i]:12.4f}{looked}")
    agree = ", ".join(f"{pair} {value:.2f}" for pair, value in found.agreement.items())
    print(f"\nagreement of ranks: {agree}")


def _explain_one(estimator: "TableEstimator", args: argparse.Namespace) -> None:
    """What each column adds to the answer for one row."""
    from addnorm.data.frame import read_frame
    from addnorm.tabular.explain import explain_row
    from addnorm.tabular.page import row_page

    table = read_frame(args.file)
    estimator.recipe_.schema.check(table)
    for note in estimator.recipe_.unseen(table):
        say(note)
    if not 1 <= args.row <= len(table):
        raise InputError(f"--row must be 1 to {len(table)}: got {args.row}.")
    with quiet():
        one = explain_row(estimator, table, args.row - 1)
    if args.out is not None:
        say(f"picture: {row_page(one, args.row, estimator).write(args.out)}")
    if args.json:
        print(json.dumps(vars(one) | {"row": args.row}, indent=1))
        return
    sure = "" if one.probability is None else f" (its probability {one.probability:.4g})"
    print(
        f"row {args.row}: {one.about} is {one.answer:.4g}{sure}; "
        f"of a row with nothing known, {one.typical:.4g}"
    )
    for name, value, share in one.ranked():
        print(f"  {share:+10.4f}  {name} = {value}")


class Bar:
    """How far a file is read and how many rows are done, on stderr where that is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        looks = (BarColumn(), TextColumn("{task.fields[done]:,} rows"), TimeRemainingColumn())
        shown = sys.stderr.isatty()
        console = Console(stderr=True)
        self.bar = Progress(*looks, console=console, transient=True, disable=not shown)
        self.task = self.bar.add_task("rows", total=1.0, done=0)

    def __enter__(self) -> "Bar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def read(self, share: float) -> None:
        self.bar.update(self.task, completed=share)

    def done(self, rows: int) -> None:
        self.bar.update(self.task, done=rows)


def _score(estimator: Any, part: "Frame", seen: Strangers, proba: bool) -> "dict[str, Array]":
    """The new columns of one part."""
    import numpy as np

    target = estimator.recipe_.schema.target
    rows = part if target is None or target not in part.columns else part.without(target)
    name = target or "target"
    classes = getattr(estimator, "classes_", None)
    with quiet():
        told = estimator.predict(rows) if classes is None else estimator.predict_proba(rows)
    seen.meet(rows)
    if classes is None:
        return {f"{name} (predicted)": told}
    likeliest = np.array(classes, dtype=object)[told.argmax(axis=1)]
    found = {f"{name} (predicted)": likeliest}
    if proba:
        for i, label in enumerate(estimator.classes_):
            found[f"p({label})"] = told[:, i]
    return found


def _print_scored(scored: "dict[str, Array]", done: int, as_json: bool) -> None:
    """The new columns as lines of .csv, or as a line of JSON for each row, counted from 1."""
    import csv

    lines = zip(*(column.tolist() for column in scored.values()), strict=True)
    if as_json:
        for row, line in enumerate(lines, start=done + 1):
            told = {"row": row, **dict(zip(scored, line, strict=True))}
            print(json.dumps(told, ensure_ascii=False))
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if not done:
        writer.writerow(scored)
    writer.writerows(lines)
