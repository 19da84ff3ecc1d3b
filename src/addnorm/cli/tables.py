"""Verbs for tables: train table, predict, explain, schema. Results on stdout, talk on stderr."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.errors import ConfigError, InputError, nearest

if TYPE_CHECKING:
    from addnorm.data.frame import Array, Frame
    from addnorm.data.schema import Schema
    from addnorm.tabular.estimators import TableEstimator

MODELS = {"ft": "FTTransformer", "tab": "TabTransformer", "saint": "SAINT"}
PART = 20_000
"""Rows predicted at a time."""


def add_train_flags(parser: argparse._ActionsContainer) -> None:
    """Flags of `train table` beside those that all of `train` has: file, --target, --out, ..."""
    parser.add_argument("--model", choices=sorted(MODELS), default="ft", help="ft, tab or saint")
    parser.add_argument("--test", metavar="FILE", help="rows to measure the trained model on")
    parser.add_argument("--compare", action="store_true", help="gradient boosting beside it")
    parser.add_argument("--schema", metavar="FILE", help="what the columns are; see addnorm schema")
    parser.add_argument("--unlabelled", metavar="FILE", help="more rows, to learn from first")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")


def add_predict_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory that `train table` wrote")
    parser.add_argument("file", help="rows to predict: .csv, .tsv, .parquet or .feather")
    parser.add_argument("-o", "--out", metavar="FILE", help="where to write .csv, .tsv, .parquet")
    parser.add_argument("--proba", action="store_true", help="the probability of each class, too")


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


def schema(args: argparse.Namespace) -> None:
    """Print what each column of a table is taken for."""
    from addnorm.data.frame import read_frame
    from addnorm.data.schema import infer

    frame = read_frame(args.file)
    for note in frame.notes:
        _say(note)
    found = infer(frame, args.target)
    if args.out is not None:
        found.save(args.out)
        _say(f"written to {args.out}: edit it and give it to --schema.")
    print(found.dump(), end="")


def train_table(args: argparse.Namespace) -> None:
    """Train on a table, measure, save; the summary goes to stdout."""
    from addnorm.data.frame import read_frame
    from addnorm.machine import keep_memory
    from addnorm.tabular import save

    if args.file is None or args.target is None or args.out is None:
        raise ConfigError(
            "train table needs a file, --target COLUMN and --out RUN. "
            "Try: addnorm train table rows.csv --target price --out runs/price."
        )
    keep_memory()
    table = read_frame(args.file)
    for note in table.notes:
        _say(note)
    given = _schema(table, args)
    table, y = _with_target(table, args.target)
    X = table.without(args.target)
    estimator = _estimator(given, args)
    from addnorm.tabular.estimators import TableClassifier, TableRegressor

    assert isinstance(estimator, TableClassifier | TableRegressor)
    if args.unlabelled is not None:
        more = read_frame(args.unlabelled)
        estimator.pretrain(_joined(X, more.without(args.target)))
    estimator.fit(X, _targets(y, given.task, args.target))
    for note in estimator.report_["notes"]:
        _say(note)
    rows = [{"model": type(estimator).__name__, "on": "held-out rows", **_valid(estimator)}]
    if args.test is not None:
        test, answers = _with_target(read_frame(args.test), args.target)
        rows += _measure(estimator, X, y, test.without(args.target), answers, given, args)
    elif args.compare:
        _say("--compare needs rows that no model has seen: give --test FILE.")
    estimator.report_["results"] = rows
    save(estimator, args.out)
    page = _page(estimator, rows, Path(args.out))
    if args.json:
        print(json.dumps({"run": str(args.out), **estimator.report_}, indent=1))
        return
    _print_rows(rows)
    told = estimator.report_
    print(f"\n{told['rows']:,} rows, {told['parameters']:,} parameters, {told['epochs']} epochs")
    print(f"model: {args.out}   picture: {page}")


def predict(args: argparse.Namespace) -> None:
    """Predict the rows of a file, a part at a time; the file's columns come with them."""
    from addnorm.data.stream import open_sink, read_parts
    from addnorm.tabular import load

    estimator = load(args.run)
    target = estimator.recipe_.schema.target
    done = 0
    if args.out is None:
        for part in read_parts(args.file, PART):
            scored = _score(estimator, part, target, args.proba)
            _print_scored(scored, part, first=not done)
            done += len(part)
        return
    with open_sink(args.out) as sink:
        for part in read_parts(args.file, PART):
            scored = _score(estimator, part, target, args.proba)
            clash = [name for name in scored if name in part.columns]
            if clash:
                raise InputError(
                    f"{args.file!r} has a column {clash[0]!r} already. Rename it, or leave out -o."
                )
            sink.write(type(part)(part.name, {**part.columns, **scored}))
            done += len(part)
            if sys.stderr.isatty():
                print(f"\r{done:,} rows", end="", file=sys.stderr, flush=True)
    _say(f"{done:,} rows predicted: {args.out}")


def explain(args: argparse.Namespace) -> None:
    """Print which columns matter, or what each adds to the answer for one row."""
    from addnorm.data.frame import read_frame
    from addnorm.tabular import load
    from addnorm.tabular.explain import explain as explain_all
    from addnorm.tabular.explain import explain_row

    estimator = load(args.run)
    kept = estimator.recipe_.schema
    table = read_frame(args.file)
    if args.row is not None:
        if not 1 <= args.row <= len(table):
            raise InputError(f"--row must be 1 to {len(table)}: got {args.row}.")
        one = explain_row(estimator, table, args.row - 1)
        if args.json:
            print(json.dumps(vars(one) | {"row": args.row}, indent=1))
            return
        print(
            f"row {args.row}: {one.about} is {one.answer:.4g}; of a row with nothing known, ",
            end="",
        )
        print(f"{one.typical:.4g}")
        for name, value, share in one.ranked():
            print(f"  {share:+10.4f}  {name} = {value}")
        return
    if kept.target is None:
        raise ConfigError("this model does not know its target's name. Explain one row: --row 1.")
    table, y = _with_target(table, kept.target)
    found = explain_all(estimator, table, _answers(estimator, y))
    if args.out is not None:
        _explanation_page(found, estimator).write(args.out)
        _say(f"picture: {args.out}")
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _schema(table: "Frame", args: argparse.Namespace) -> "Schema":
    """The schema given, checked against the table, or one that is guessed."""
    from dataclasses import replace

    from addnorm.data.schema import Schema, guess_task, infer

    table.column(args.target)
    if args.schema is None:
        return infer(table, args.target)
    found = Schema.load(args.schema)
    if found.target not in (None, args.target):
        raise ConfigError(f"{args.schema!r} has the target {found.target!r}, not {args.target!r}.")
    for column in found.columns:
        table.column(column.name)
    known = {column.name for column in found.columns} | {args.target}
    extra = [name for name in table.names if name not in known]
    if extra:
        raise ConfigError(
            f"{args.schema!r} says nothing of column {extra[0]!r}. Add it, with kind = 'ignore'."
        )
    task = found.task or guess_task(table.columns[args.target])
    return replace(found, target=args.target, task=task)


def _with_target(table: "Frame", target: str) -> tuple["Frame", "Array"]:
    """The rows whose target is there, and their targets; how many have none is said."""
    from addnorm.data.schema import gone

    missing = gone(table.column(target))
    if missing.all():
        raise InputError(f"column {target!r} of {table.name} must have values: it has none.")
    if missing.any():
        _say(f"{int(missing.sum())} rows of {table.name} have no {target!r}: they are left out.")
        table = table.take(~missing)
    return table, table.columns[target]


def _joined(one: "Frame", other: "Frame") -> "Frame":
    """The rows of both, by the columns of the first."""
    import numpy as np

    from addnorm.data.frame import Frame, as_text

    columns = {}
    for name, column in one.columns.items():
        more = other.column(name)
        if column.dtype != more.dtype:
            column, more = as_text(column), as_text(more)
        columns[name] = np.concatenate((column, more))
    return Frame(one.name, columns)


def _targets(y: "Array", task: str | None, target: str) -> "Array":
    """Targets as the estimator takes them: texts of classes, or numbers."""
    from addnorm.data.frame import as_text
    from addnorm.data.schema import to_numbers

    if task != "number":
        return as_text(y).astype(str)
    numbers, stray = to_numbers(y)
    if stray:
        raise InputError(
            f"column {target!r} must hold numbers: got {stray[0]!r}. Set task = 'classes'."
        )
    return numbers


def _answers(estimator: "TableEstimator", y: "Array") -> "Array":
    """Targets of rows to be measured on: the classes that were trained, or numbers."""
    kept = estimator.recipe_.schema
    given = _targets(y, kept.task, str(kept.target))
    classes = getattr(estimator, "classes_", None)
    if classes is None:
        return given
    known = set(classes.tolist())
    strange = sorted(set(given.tolist()) - known)
    if strange and all(label.removesuffix(".") in known for label in strange):
        _say(f"labels such as {strange[0]!r} are taken for {strange[0].removesuffix('.')!r}.")
        return _strip_stops(given)
    if strange:
        raise InputError(
            f"column {kept.target!r} has a class that training had not: {strange[0]!r}. "
            f"{nearest(strange[0], known)}"
        )
    return given


def _strip_stops(labels: "Array") -> "Array":
    import numpy as np

    return np.array([label.removesuffix(".") for label in labels.tolist()])


def _estimator(given: "Schema", args: argparse.Namespace) -> "TableEstimator":
    from addnorm.tabular.estimators import ESTIMATORS, RECOMMENDED

    ending = "Regressor" if given.task == "number" else "Classifier"
    kind = ESTIMATORS[f"{MODELS[args.model]}{ending}"]
    settings: dict[str, Any] = dict(RECOMMENDED) if args.model == "ft" else {}
    settings |= _settings(args, kind)
    return kind(
        **{
            "schema": given,
            "random_state": args.seed,
            "minutes": args.minutes,
            "verbose": sys.stderr.isatty(),
            **settings,
        }
    )


def _settings(args: argparse.Namespace, kind: "type[TableEstimator]") -> dict[str, Any]:
    """Parameters from --set table.NAME=VALUE."""
    import tomllib

    found: dict[str, Any] = {}
    known = kind().get_params()
    for setting in getattr(args, "settings", None) or []:
        path, equals, text = setting.partition("=")
        section, _, name = path.strip().partition(".")
        if section != "table" or not equals:
            raise ConfigError(
                f"a setting of a table must read table.NAME=VALUE: got {setting!r}. "
                "Try table.width=64."
            )
        if name not in known:
            raise ConfigError(f"table has no field {name!r}. {nearest(name, known)}")
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = text.strip()
    return found


def _valid(estimator: "TableEstimator") -> dict[str, Any]:
    figures = estimator.report_.get("valid", {})
    return {**figures, "fit_seconds": estimator.report_["seconds"]}


def _measure(
    estimator: Any,
    X: "Frame",
    y: "Array",
    test: "Frame",
    answers: "Array",
    given: "Schema",
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Figures on the test file, ours and those of gradient boosting if asked for."""
    import time

    import numpy as np

    from addnorm.tabular.compare import compare
    from addnorm.tabular.metrics import class_figures, number_figures

    wanted = _answers(estimator, answers)
    for note in estimator.recipe_.unseen(test):
        _say(note)
    began = time.perf_counter()
    classes = 0 if given.task == "number" else len(estimator.classes_)
    if classes:
        wanted = np.searchsorted(estimator.classes_, wanted)
        figures = class_figures(estimator.predict_proba(test), wanted)
    else:
        figures = number_figures(estimator.predict(test), wanted)
    times = {
        "fit_seconds": estimator.report_["seconds"],
        "predict_seconds": time.perf_counter() - began,
    }
    rows = [{"model": type(estimator).__name__, "on": args.test, **figures, **times}]
    if args.compare:
        known = _targets(y, given.task, args.target)
        known = np.searchsorted(estimator.classes_, known) if classes else known
        encode = estimator.recipe_.encode
        found = compare((encode(X), known), (encode(test), wanted), classes, args.seed)
        rows += [{"model": row.pop("model"), "on": args.test, **row} for row in found]
    return rows


def _score(estimator: Any, part: "Frame", target: str | None, proba: bool) -> "dict[str, Array]":
    """The new columns of one part."""
    import numpy as np

    rows = part if target is None or target not in part.columns else part.without(target)
    name = target or "target"
    if not hasattr(estimator, "classes_"):
        return {f"{name} (predicted)": estimator.predict(rows)}
    probabilities = estimator.predict_proba(rows)
    likeliest = np.array(estimator.classes_, dtype=object)[probabilities.argmax(axis=1)]
    found = {f"{name} (predicted)": likeliest}
    if proba:
        for i, label in enumerate(estimator.classes_):
            found[f"p({label})"] = probabilities[:, i]
    return found


def _print_scored(scored: "dict[str, Array]", part: "Frame", *, first: bool) -> None:
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    if first:
        writer.writerow(scored)
    writer.writerows(zip(*(column.tolist() for column in scored.values()), strict=True))


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """Figures as a table, a line for each model."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("model", "on")))
    heads = [name.replace("_seconds", " s").replace("_", " ") for name in names]
    print(f"{'':42}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        label = f"{row['model']} · {row['on']}"
        cells = [f"{row[name]:11.4f}" if name in row else f"{'':11}" for name in names]
        print(f"{label[:41]:42}" + "".join(cells))


def _page(estimator: Any, rows: list[dict[str, Any]], out: Path) -> Path:
    """What was found in training, as a page."""
    from addnorm.report import Page, lines

    kept = estimator.recipe_.schema
    page = Page(f"{kept.target}", f"{type(estimator).__name__}, {estimator.report_['rows']:,} rows")
    page.section("Figures")
    names = list(dict.fromkeys(name for row in rows for name in row))
    page.table(names, [[row.get(name) for name in names] for row in rows])
    history = [(row["step"], row["loss"]) for row in estimator.report_["history"] if row["loss"]]
    if history:
        page.section("Training")
        page.figure(lines({"held-out loss": history}, title="Held-out loss", x="step", y="loss"))
    page.section("Columns")
    page.table(["column", "kind", "note"], [[c.name, c.kind, c.note] for c in kept.columns])
    return page.write(out / "summary.html")


def _explanation_page(found: Any, estimator: Any) -> Any:
    from addnorm.report import Page, bars, heat_map

    page = Page(f"Why {estimator.recipe_.schema.target}", type(estimator).__name__)
    page.section("Which columns matter")
    page.figure(bars(found.ranked(), title="Rise of the loss when the column is shuffled"))
    pairs = sorted(zip(found.columns, found.gradient, strict=True), key=lambda pair: -pair[1])
    page.figure(bars(pairs, title="Mean size of the column's share of the answer"))
    if found.attention is not None:
        looked = sorted(zip(found.columns, found.attention, strict=True), key=lambda p: -p[1])
        page.figure(bars(looked, title="Attention of the summary to the column"))
    page.table(["views", "rank correlation"], [list(pair) for pair in found.agreement.items()])
    page.section("Which columns look at which")
    names = list(found.looking)
    page.figure(heat_map(found.looks.tolist(), names, names, title="Attention", low=0.0))
    return page
