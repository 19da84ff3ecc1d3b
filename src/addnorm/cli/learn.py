"""Verb for tables: train table. Results on stdout, talk on stderr."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.cli.tableruns import is_table_run
from addnorm.cli.talk import quiet, say, spoken
from addnorm.cli.targets import join, known_answers, settle_schema, to_answers, with_target
from addnorm.disk import to_json
from addnorm.errors import ConfigError, InputError, nearest

if TYPE_CHECKING:
    from addnorm.data.frame import Array, Frame
    from addnorm.data.schema import Schema
    from addnorm.tabular.base import TableEstimator
    from addnorm.tabular.estimators import TableClassifier, TableRegressor

MODELS = {"ft": "FTTransformer", "tab": "TabTransformer", "saint": "SAINT"}
TEXT_ONLY = (
    *("source", "valid_source", "valid_target", "text", "label", "start", "resume", "size"),
    *("dry_run", "board"),
)
"""Flags of `train` that mean nothing for tables."""
TABLE_ONLY = ("model", "test", "compare", "schema", "groups", "split", "unlabelled", "pretrain")
"""And those that mean nothing for texts."""
SPLITS = ("random", "time")
METHODS = ("masked", "replaced", "contrastive")
"""Ways to pre-train, as tabular/pretrain.py has them; named here, as help must be instant."""


def add_train_flags(parser: argparse._ActionsContainer) -> None:
    """Flags of `train table` beside those that all of `train` has: file, --target, --out, ..."""
    parser.add_argument("--model", choices=sorted(MODELS), help="ft (default), tab or saint")
    parser.add_argument("--test", metavar="FILE", help="rows to measure the trained model on")
    parser.add_argument("--compare", action="store_true", help="gradient boosting beside it")
    parser.add_argument("--schema", metavar="FILE", help="what the columns are; see addnorm schema")
    parser.add_argument("--groups", metavar="COLUMN", help="rows of one value stay together")
    parser.add_argument("--split", choices=SPLITS, help="hold out any rows, or the last (time)")
    parser.add_argument("--unlabelled", metavar="FILE", help="more rows, to learn from first")
    parser.add_argument("--pretrain", choices=METHODS, help="how (default masked)")


def train_table(args: argparse.Namespace) -> None:
    """Train on a table, measure, save; the summary goes to stdout."""
    from addnorm.data.frame import read_frame
    from addnorm.machine import keep_memory
    from addnorm.tabular import save
    from addnorm.tabular.holdout import need_one_way
    from addnorm.tabular.inputs import to_groups
    from addnorm.tabular.page import summary_page

    _check(args)
    keep_memory()
    table = read_frame(args.file)
    for note in table.notes:
        say(note)
    given = settle_schema(table, args.target, args.schema, args.groups)
    table, y = with_target(table, args.target)
    answers = to_answers(y, given)
    if given.form:
        say(f"column {args.target!r} is taken as numbers, written as {given.form}.")
    estimator = _estimator(given, args)
    need_one_way(estimator.split, args.groups is not None)
    groups = to_groups(None if args.groups is None else table.columns[args.groups], len(table))
    X, test = table.without(args.target), None
    if args.test is not None:
        test = _read_test(args.test, given, answers)
    elif args.compare:
        inside, aside = _set_aside(X, answers, groups, given, estimator)
        test = X.take(aside), answers[aside]
        X, answers = X.take(inside), answers[inside]
        groups = None if groups is None else groups[inside]
    if args.unlabelled is not None:
        more = read_frame(args.unlabelled)
        given.check(more)
        method = args.pretrain or METHODS[0]
        estimator.pretrain(join(X, more), method=method)
        say(f"pre-trained ({method}) on {len(X) + len(more):,} rows, those of both files.")
    with spoken():
        estimator.fit(X, answers, groups=groups)
    for note in estimator.report_["notes"]:
        if note not in table.notes:
            say(note)
    rows = [{"model": type(estimator).__name__, "on": "held-out rows", **_valid(estimator)}]
    if test is not None:
        with quiet():
            rows += _measure(estimator, (X, answers), test, args)
    estimator.report_["results"] = rows
    save(estimator, args.out)
    page = summary_page(estimator, rows).write(Path(args.out) / "summary.html")
    if args.json:
        print(to_json({"run": str(args.out), **estimator.report_}))
        return
    _print_rows(rows)
    told = estimator.report_
    print(f"\n{told['rows']:,} rows, {told['parameters']:,} parameters, {told['epochs']} epochs")
    print(f"model: {args.out}   picture: {page}")


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError where something is missing, or given that is for texts."""
    if args.file is None or args.target is None or args.out is None:
        raise ConfigError(
            "train table needs a file, --target COLUMN and --out RUN. "
            "Try: addnorm train table rows.csv --target price --out runs/price."
        )
    for name in TEXT_ONLY:
        if getattr(args, name, None):
            flag = "from" if name == "start" else name.replace("_", "-")
            raise ConfigError(f"--{flag} is for models of text, not for tables. Leave it out.")
    if Path(args.out).is_file():
        raise ConfigError(f"--out must name a directory for the run: {args.out!r} is a file.")
    if (Path(args.out) / "run.json").exists() or is_table_run(Path(args.out)):
        raise ConfigError(f"{args.out!r} holds a run already. Choose another --out, or delete it.")
    if args.pretrain is not None and args.unlabelled is None:
        raise ConfigError(
            f"--pretrain {args.pretrain} needs rows to learn from: give --unlabelled FILE, too."
        )


def _read_test(path: str, given: "Schema", answers: "Array") -> "tuple[Frame, Array]":
    """Rows to measure on, refused before anything is trained if they do not match."""
    import numpy as np

    from addnorm.data.frame import read_frame

    target = str(given.target)
    test, wanted = with_target(read_frame(path), target)
    given.check(test)
    classes = None if given.task == "number" else np.unique(answers)
    return test.without(target), known_answers(given, classes, wanted)


def _set_aside(
    X: "Frame",
    answers: "Array",
    groups: "Array | None",
    given: "Schema",
    estimator: "TableEstimator",
) -> "tuple[Array, Array]":
    """A fifth of the rows that no model is to see, as there is no test file to compare on."""
    from addnorm.tabular.holdout import hold_out

    classes = None if given.task == "number" else answers
    seed, order = estimator.random_state, estimator.split
    inside, aside = hold_out(len(X), 0.2, classes=classes, groups=groups, order=order, seed=seed)
    if not len(aside):
        raise InputError(
            f"{X.name} must have rows enough to set some aside for --compare: got {len(X)}. "
            "Give --test FILE."
        )
    whole = "" if groups is None else f", {len(set(groups[aside]))} groups of {len(set(groups))}"
    say(
        f"{len(aside):,} rows{whole} are set aside to compare on; with --test FILE all would be "
        "learnt."
    )
    return inside, aside


def _estimator(given: "Schema", args: argparse.Namespace) -> "TableClassifier | TableRegressor":
    from addnorm.tabular.estimators import ESTIMATORS, RECOMMENDED

    ending = "Regressor" if given.task == "number" else "Classifier"
    model = args.model or "ft"
    kind = ESTIMATORS[f"{MODELS[model]}{ending}"]
    settings: dict[str, Any] = dict(RECOMMENDED[given.task or "classes"]) if model == "ft" else {}
    settings |= _settings(args, kind)
    if args.split is not None:
        settings.setdefault("split", args.split)
    return kind(
        **{
            "schema": given,
            "random_state": args.seed or 0,
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
    learnt: "tuple[Frame, Array]",
    test: "tuple[Frame, Array]",
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Figures on rows that were not learnt: ours, and those of gradient boosting if asked for."""
    import time

    import numpy as np

    from addnorm.tabular.compare import compare
    from addnorm.tabular.metrics import class_figures, number_figures, reliability_bins

    (X, answers), (X_test, wanted) = learnt, test
    for note in estimator.recipe_.unseen(X_test):
        say(note)
    classes = getattr(estimator, "classes_", None)
    if classes is not None:
        answers, wanted = (np.searchsorted(classes, y) for y in (answers, wanted))
    began = time.perf_counter()
    if classes is None:
        figures = number_figures(estimator.predict(X_test), wanted)
    else:
        told = estimator.predict_proba(X_test)
        figures = class_figures(told, wanted)
        pictures = estimator.report_.setdefault("reliability", {})
        pictures["test"] = reliability_bins(told, wanted)
    took = {
        "fit_seconds": estimator.report_["seconds"],
        "predict_seconds": time.perf_counter() - began,
    }
    rows = [{"model": type(estimator).__name__, **figures, **took}]
    if args.compare:
        encode, count = estimator.recipe_.encode, 0 if classes is None else len(classes)
        rows += compare((encode(X), answers), (encode(X_test), wanted), count, args.seed or 0)
    on = args.test or "rows set aside"
    return [{"model": row.pop("model"), "on": on, **row} for row in rows]


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """Figures as a table, a line for each model."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("model", "on")))
    heads = [name.replace("_seconds", " s").replace("_", " ") for name in names]
    print(f"{'':42}" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        label = f"{row['model']} · {row['on']}"
        cells = [f"{row[name]:11.4f}" if name in row else f"{'':11}" for name in names]
        print(f"{label[:41]:42}" + "".join(cells))
