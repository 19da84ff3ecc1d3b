"""Verbs that use a trained run: evaluate, translate, generate, classify, label, predict, ...

Also `schema`, which shows how the columns of a table would be read.
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.cli.console import say
from addnorm.errors import ConfigError, InputError
from addnorm.files import require_writable_file, to_json

if TYPE_CHECKING:
    from addnorm.data.table.frame import Array
    from addnorm.tabular.explain import Explanation, RowExplanation
    from addnorm.tasks.table import NumberColumns


COUNTS = ("spans", "words")
"""Metrics of a type of label that are numbers of things."""


def _add_run(parser: argparse.ArgumentParser, *, int8: bool = False) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run or a Hugging Face model")
    if int8:
        parser.add_argument(
            "--int8", action="store_true", help="use 8-bit weights: faster on a CPU"
        )


def _add_engine(
    parser: argparse.ArgumentParser, default: str, names: str = "torch, ctranslate2 or onnx"
) -> None:
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help=f"what computes the answer: {names} (default: {default})",
    )


def _add_beam(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beam", type=int, default=5, help="hypotheses per sentence (default 5)")


def _add_json(parser: argparse.ArgumentParser, help: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=help)


def _add_stream(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stream",
        action="store_true",
        help="answer each line before reading the next (slower; the default in a terminal)",
    )


def add_evaluate_flags(parser: argparse.ArgumentParser) -> None:
    _add_run(parser, int8=True)
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="text or table to evaluate on (default: the held-out texts)",
    )
    parser.add_argument("--source", metavar="FILE", help="lines to translate")
    parser.add_argument("--target", metavar="FILE", help="translations of these lines")
    _add_beam(parser)
    _add_json(parser)


def add_translate_flags(parser: argparse.ArgumentParser) -> None:
    _add_run(parser, int8=True)
    parser.add_argument(
        "file",
        nargs="?",
        default="-",
        metavar="FILE",
        help="file with lines to translate (default: stdin)",
    )
    _add_beam(parser)
    parser.add_argument(
        "--nbest",
        type=int,
        default=1,
        help="translations per line (default 1); more than --beam raises --beam to the same number",
    )
    parser.add_argument(
        "--penalty", default="length", help="length penalty: length (default), gnmt or none"
    )
    parser.add_argument(
        "--alpha", type=float, default=1.0, help="exponent of the penalty (default 1)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="batches decoded in parallel (default 1)"
    )
    parser.add_argument(
        "--scores", action="store_true", help="also print the score of each translation"
    )
    _add_engine(parser, "the fastest that is installed, measured once")
    _add_stream(parser)
    _add_json(parser, "print one line of JSON per sentence")


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    _add_run(parser, int8=True)
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=300, help="tokens to add (default 300)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0 is greedy (default 0.8)",
    )
    parser.add_argument("--top-k", type=int, help="sample only from the k most probable tokens")
    parser.add_argument(
        "--top-p",
        type=float,
        help="sample only from the most probable tokens, up to this total probability",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    _add_engine(parser, "torch")
    _add_json(parser)


def add_classify_flags(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "file",
        nargs="?",
        default="-",
        metavar="FILE",
        help="one text per line, or a .csv or .tsv file with a column of texts (default: stdin)",
    )
    parser.add_argument(
        "--examples",
        metavar="FILE",
        help="a .csv or .tsv file of a few texts with labels: classify by these with any encoder, "
        "without training",
    )
    _add_engine(parser, "torch")
    _add_stream(parser)
    _add_json(parser, "print all probabilities as JSON")


def add_label_flags(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "file",
        nargs="?",
        default="-",
        metavar="FILE",
        help="one text per line, or words in a .conll or .jsonl file (default: stdin)",
    )
    _add_engine(parser, "torch")
    _add_stream(parser)
    _add_json(parser, "print one line of JSON per text, with the spans")


def add_predict_flags(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "file", metavar="FILE", help="rows to predict: .csv, .tsv, .parquet or .feather"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="write all columns to a .csv, .tsv or .parquet file"
    )
    parser.add_argument(
        "--proba", action="store_true", help="also output the probability of each class"
    )
    parser.add_argument(
        "--intervals",
        metavar="LEVELS",
        help="also output both ends of intervals of a predicted number, such as 0.8,0.95",
    )
    parser.add_argument(
        "--quantiles", metavar="LEVELS", help="also output quantiles, such as 0.1,0.5,0.9"
    )
    parser.add_argument(
        "--point",
        choices=("mean", "median"),
        default="mean",
        help="which number of the distribution is predicted (default mean)",
    )
    _add_engine(parser, "torch", "torch or onnx")
    _add_json(parser, "print one line of JSON per row")


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "file",
        metavar="TEXT|FILE",
        help="a text, or a file of texts (- for stdin), of which one is explained; an image, a "
        "folder or an .npz file; for a table, rows to explain, with the target column unless --row "
        "is used",
    )
    parser.add_argument(
        "--row", type=int, metavar="N", help="explain one row, line or image, counted from 1"
    )
    parser.add_argument("--report", metavar="FILE.html", help="also write an HTML page with charts")
    parser.add_argument(
        "--memory",
        type=int,
        metavar="MB",
        help="allow the explanation of a text or image this much memory (default 1024)",
    )
    _add_json(parser)


def add_schema_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="table to read: .csv, .tsv, .parquet or .feather"
    )
    parser.add_argument("--target", metavar="COLUMN", help="column to predict")
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE.toml",
        help="write the schema to a file, to edit and pass with --schema",
    )
    _add_json(parser)


def add_runs_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        default="runs",
        metavar="FOLDER",
        help="folder to search (default runs)",
    )
    _add_json(parser)


def evaluate(args: argparse.Namespace) -> None:
    """Print metrics on files that a run was not trained on."""
    from addnorm.runs.run import Run

    if args.file is not None and args.source is not None:
        raise ConfigError(
            f"there must be one file to evaluate on: got {args.file!r} and {args.source!r}."
        )
    run = Run.open(args.run, int8=args.int8)
    if run.task == "table" and args.target is not None:
        raise ConfigError("--target is for translations, not for tables. Leave it out.")
    source = args.source or args.file
    options = {} if args.target is None else {"target": args.target}
    if run.task == "translate":
        options["beam"] = args.beam
    metrics = run.evaluate(*([source] if source else []), say=say, **options)
    if args.json:
        print(to_json(metrics))
        return
    for name, value in metrics.items():
        if isinstance(value, dict):
            _print_by_type(name, value)
            continue
        is_share = name in ("accuracy", "f1", "exact")
        shown = (
            f"{value:.1%}" if is_share else f"{value:.4g}" if isinstance(value, float) else value
        )
        print(f"{name.replace('_', ' '):<22} {shown}")


def _print_by_type(name: str, rows: dict[str, Any]) -> None:
    """Print metrics with a line for each type of label."""
    if name != "types":
        return
    for kind, row in rows.items():
        cells = (f"{key} {value:.1%}" for key, value in row.items() if key not in COUNTS)
        count = next(f"{row[key]:.0f} {key}" for key in COUNTS if key in row)
        print(f"  {kind:<20} {', '.join(cells)}  ({count})")


def translate(args: argparse.Namespace) -> None:
    """Print the translation of each line; that of a blank line is a blank line."""
    from addnorm.generate import Decoding
    from addnorm.generate.settings import raise_beam
    from addnorm.runs.engines import engine_for_translation

    run, nbest = open_with_verb(args, "translate", int8=args.int8), args.nbest
    if nbest > args.beam > 0:
        say(f"--nbest {nbest} is above --beam {args.beam}: searching with --beam {nbest}.")
    decoding = Decoding(
        beam=raise_beam(args.beam, nbest),
        nbest=nbest,
        penalty=args.penalty,
        alpha=args.alpha,
        workers=args.workers,
        read_ahead=1 if _answers_each_line(args) else Decoding.read_ahead,
        scores=args.scores or args.json,
    )
    lines = read_lines_of(args.file)
    engine = engine_for_translation(run, args.engine, decoding, say)
    translations = run.trained.iter_translations(lines, decoding, engine=engine)
    for number, answers in enumerate(translations, start=1):
        if args.json:
            rows = [
                {"text": answer, "score": answer.score}
                | ({"pieces": answer.pieces} if args.scores else {})
                for answer in answers
            ]
            used = "torch" if engine is None else engine.name
            line = {"line": number, "engine": used, "answers": rows}
            print(to_json(line, indent=None), flush=True)
            continue
        for answer in answers:
            place = f"{number}\t" if nbest > 1 else ""
            score = f"{answer.score:.4f}\t" if args.scores else ""
            print(f"{place}{score}{answer}", flush=True)


def generate(args: argparse.Namespace) -> None:
    """Print a prompt and its continuation by a language model."""
    run = open_with_verb(args, "generate", int8=args.int8)
    names = ("tokens", "temperature", "top_k", "top_p", "seed")
    answer = run.generate(args.prompt, **{name: getattr(args, name) for name in names})
    if args.json:
        print(
            to_json({"prompt": args.prompt, "text": answer, "pieces": answer.pieces}, indent=None)
        )
        return
    print(args.prompt + answer)


def classify(args: argparse.Namespace) -> None:
    """Print the most probable label of each text, with its probability; both empty for a blank."""
    if args.examples is not None:
        rows: Iterable[dict[str, float]] = _classify_by_examples(args)
    else:
        trained = open_with_verb(args, "classify").trained
        texts = _stdin_lines() if args.file == "-" else trained.iter_file_texts(args.file, say)
        chunk = {"chunk": 1} if _answers_each_line(args) else {}
        rows = trained.iter_labels(texts, **chunk, say=say)
    for row in rows:
        if args.json:
            print(to_json(row, indent=None), flush=True)
            continue
        label = max(row, key=row.__getitem__, default="")
        print(f"{label}\t{row[label]:.4f}" if row else "\t", flush=True)


def _classify_by_examples(args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the probabilities of the labels of a file of examples, for each line."""
    from addnorm.data.delimited import is_delimited
    from addnorm.data.text.labelled import read_labelled, read_text_column

    run = open_with_verb(args, "classify_by_examples")
    few = read_labelled(args.examples, rare="keep")
    for note in few.report.lines():
        say(note)
    lines = read_text_column(args.file)[0] if is_delimited(args.file) else read_lines_of(args.file)
    rows: list[dict[str, float]] = run.classify_by_examples(list(lines), few.texts, few.labels)
    return rows


def label(args: argparse.Namespace) -> None:
    """Print each word with its label, and a blank line after each text."""
    from itertools import tee

    from addnorm.data.text.tagged import words_of_text
    from addnorm.metrics import find_spans, has_spans

    trained = open_with_verb(args, "label").trained
    if args.file == "-":
        sentences: Iterable[list[str]] = map(words_of_text, _stdin_lines())
    else:
        sentences = trained.iter_file_sentences(args.file)
    chunk = {"chunk": 1} if _answers_each_line(args) else {}
    words_of, sentences = tee(sentences)
    are_spans = has_spans(trained.labels)
    for words, tags in zip(words_of, trained.iter_labels(sentences, **chunk), strict=True):
        if args.json:
            spans = [
                {
                    "type": kind,
                    "first": first + 1,
                    "last": stop,
                    "text": " ".join(words[first:stop]),
                }
                for kind, first, stop in (find_spans(tags) if are_spans else ())
            ]
            row = {"tokens": words, "tags": tags} | ({"spans": spans} if are_spans else {})
            print(to_json(row, indent=None), flush=True)
            continue
        print(
            "".join(f"{word}\t{tag}\n" for word, tag in zip(words, tags, strict=True)), flush=True
        )


def predict(args: argparse.Namespace) -> None:
    """Predict the rows of a file in parts, so that memory does not grow with the file."""
    from addnorm.data.table.reader import open_table_writer
    from addnorm.tasks.table import UnknownValues

    require_writable_file(args.out)
    trained = open_with_verb(args, "predict").trained
    if args.out is not None and Path(args.out).resolve() == Path(args.file).resolve():
        raise ConfigError(f"-o must differ from the file that is read: both are {args.out!r}.")
    if args.proba:
        trained.require_classes("--proba")
    extras = _number_columns(args)
    for flag in ("intervals", "quantiles"):
        if getattr(extras, flag):
            trained.require_distribution(f"--{flag}")
    if args.point == "median":
        trained.require_distribution("--point median")
    unknown = UnknownValues(trained.estimator.encoder_)
    done = 0
    if args.out is None:
        for part, scored in trained.iter_predictions(
            args.file, proba=args.proba, unknown=unknown, extras=extras
        ):
            _print_scored(scored, done, args.json)
            done += len(part)
        for note in unknown.describe():
            say(note)
        return
    with ReadingBar() as bar, open_table_writer(args.out) as sink:
        for part, scored in trained.iter_predictions(
            args.file, proba=args.proba, unknown=unknown, on_read=bar.read, extras=extras
        ):
            clash = [name for name in scored if name in part.columns]
            if clash:
                raise InputError(
                    f"{args.file!r} already has a column {clash[0]!r}. Rename it, or leave out -o."
                )
            sink.write(part, scored)
            done += len(part)
            bar.done(done)
    for note in unknown.describe():
        say(note)
    if args.json:
        print(to_json({"rows": done, "out": args.out, "columns": list(scored)}, indent=None))
        return
    say(f"{done:,} rows predicted: {args.out}")


def _number_columns(args: argparse.Namespace) -> "NumberColumns":
    """Return the columns of a predicted number that the flags ask for."""
    from addnorm.tasks.table import NumberColumns

    return NumberColumns(
        args.point,
        _read_levels("--intervals", args.intervals),
        _read_levels("--quantiles", args.quantiles),
    )


def _read_levels(flag: str, text: str | None) -> tuple[float, ...]:
    """Return the levels of a flag: numbers between 0 and 1, separated by commas."""
    if text is None:
        return ()
    try:
        levels = tuple(float(part) for part in text.split(","))
    except ValueError:
        levels = (0.0,)
    if not all(0 < level < 1 for level in levels):
        raise ConfigError(
            f"{flag} must be numbers between 0 and 1, separated by commas: got {text!r}. "
            f"Try {flag} 0.8,0.95."
        )
    return levels


def explain(args: argparse.Namespace) -> None:
    """Print an explanation of the output for a text, an image, the rows of a table, or one row."""
    require_writable_file(args.report)
    run = open_with_verb(args, "explain")
    if run.task != "table":
        _explain_sequence(run.trained, args, is_image=run.task == "images")
        return
    from addnorm.tabular.explain import Explanation

    trained = run.trained
    explanation = trained.explain(args.file, args.row, say=say)
    if isinstance(explanation, Explanation):
        _print_explanation(explanation, trained.estimator, args)
    else:
        _print_row_explanation(explanation, trained.estimator, args)


def _explain_sequence(trained: Any, args: argparse.Namespace, *, is_image: bool) -> None:
    texts: str | list[str] = args.file
    if not is_image and (args.file == "-" or _is_file(args.file)):
        has_columns = args.file != "-" and hasattr(trained, "iter_file_texts")
        lines = trained.iter_file_texts(args.file, say) if has_columns else read_lines_of(args.file)
        texts = list(lines)
    limit = None if args.memory is None else args.memory * 2**20
    explanation = trained.explain(texts, args.row, limit=limit, say=say)
    if args.report is not None:
        say(f"page: {explanation.page().write(args.report)}")
    print(to_json(explanation.to_dict()) if args.json else explanation)


def _is_file(text: str) -> bool:
    """Whether an argument that is a text or a file is a file; one that is missing is an error."""
    try:
        if Path(text).is_file():
            return True
    except OSError:  # too long for a name
        return False
    suffix = Path(text).suffix.lower()
    if suffix in (".txt", ".csv", ".tsv", ".text") and not any(map(str.isspace, text)):
        raise InputError(
            f"there is no file {text!r}. To explain these characters as a text, add a space."
        )
    return False


def _print_explanation(
    explanation: "Explanation", estimator: Any, args: argparse.Namespace
) -> None:
    from addnorm.tabular.page import explanation_page

    if args.report is not None:
        say(f"page: {explanation_page(explanation, estimator).write(args.report)}")
    if args.json:
        attention_map = explanation.column_attention.tolist()
        print(to_json({**vars(explanation), "column_attention": attention_map}))
        return
    print(explanation)


def _print_row_explanation(
    explanation: "RowExplanation", estimator: Any, args: argparse.Namespace
) -> None:
    from addnorm.tabular.page import row_page

    if args.report is not None:
        say(f"page: {row_page(explanation, estimator).write(args.report)}")
    if args.json:
        print(to_json(explanation.to_dict() | {"row": args.row}))
        return
    probability = explanation.probability
    note = "" if probability is None else f" (probability {probability:.4g})"
    print(
        f"row {args.row}: {explanation.output_name} is {explanation.output:.4g}{note}; "
        f"baseline (mean of {explanation.baseline_name}): {explanation.baseline:.4g}"
    )
    shap = dict(zip(explanation.columns, explanation.shap or (), strict=False))
    if shap:
        print(f"  {'':>10}{'SHAP':>12}")
    for name, value, share in explanation.ranked():
        beside = f"  {shap[name]:+10.4f}" if shap else ""
        print(f"  {share:+10.4f}{beside}  {name} = {value}")
    for i, (one, other, effect) in enumerate(explanation.interactions[:3]):
        pairs = explanation.shap_interactions
        beside = "" if pairs is None else f"  {pairs[i]:+10.4f}"
        print(f"  {effect:+10.4f}{beside}  {one} and {other}: joint effect beyond the sum of both")


def schema(args: argparse.Namespace) -> None:
    """Print how each column of a table would be read."""
    from addnorm.data.table.frame import read_frame
    from addnorm.data.table.infer import infer

    frame = read_frame(args.file)
    for note in frame.notes:
        say(note)
    inferred = infer(frame, args.target)
    if args.out is not None:
        inferred.save(args.out)
        say(f"written to {args.out}: edit it and pass it with --schema.")
    if args.json:
        print(to_json(dataclasses.asdict(inferred)))
        return
    print(inferred.dump(), end="")


def runs(args: argparse.Namespace) -> None:
    """List runs and their best metrics."""
    from addnorm.runs.loggers import format_duration, format_metrics
    from addnorm.runs.run import list_runs

    rows = list_runs(args.folder, lambda error: say(f"not listed: {error}"))
    if args.json:
        print(to_json(rows))
        return
    if not rows:
        say(f"no runs in {args.folder}")
        return
    width = max(len(row["run"]) for row in rows) + 2
    for row in rows:
        has_summary = "seconds" in row
        state = (
            "finished" if row.get("finished") else "stopped" if has_summary else "running or killed"
        )
        time = format_duration(row["seconds"]) if has_summary else ""
        best = format_metrics(row.get("best") or {})
        print(f"{row['run']:<{width}}{row['task']:<11}{state:<18}{time:>8}  {best}")


class ReadingBar:
    """A progress bar for reading a file, on stderr if that is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), TextColumn("{task.fields[done]:,} rows"), TimeRemainingColumn())
        shown = sys.stderr.isatty()
        console = Console(stderr=True)
        self.bar = Progress(*columns, console=console, transient=True, disable=not shown)
        self.task = self.bar.add_task("rows", total=1.0, done=0)

    def __enter__(self) -> "ReadingBar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def read(self, share: float) -> None:
        self.bar.update(self.task, completed=share)

    def done(self, rows: int) -> None:
        self.bar.update(self.task, done=rows)


def _print_scored(scored: "dict[str, Array]", done: int, as_json: bool) -> None:
    """Print predicted columns as .csv, or a line of JSON for each row, counted from 1."""
    lines = zip(*(column.tolist() for column in scored.values()), strict=True)
    if as_json:
        for row, line in enumerate(lines, start=done + 1):
            print(to_json({"row": row, **dict(zip(scored, line, strict=True))}, indent=None))
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if not done:
        writer.writerow(scored)
    writer.writerows(lines)


def open_with_verb(args: argparse.Namespace, verb: str, *, int8: bool = False) -> Any:
    """Return a run, or raise VerbError if it does not have the verb."""
    from addnorm.runs.run import Run

    run = Run.open(args.run, int8=int8)
    getattr(run, verb)
    if getattr(args, "engine", None) is not None:
        from addnorm.runs.engines import use_engine

        use_engine(run, args.engine, say)
    return run


def _answers_each_line(args: argparse.Namespace) -> bool:
    """Return whether every line is answered before the next one is read."""
    return bool(args.stream) or (args.file == "-" and sys.stdin.isatty())


def read_lines_of(path: str) -> Iterable[str]:
    """Return the lines of a file, or of stdin as they arrive."""
    from addnorm.data.text.files import read_lines

    return _stdin_lines() if path == "-" else read_lines(path)


def _stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin as they arrive."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise InputError(
                f"the standard input must be UTF-8 text: line {number} is not. If it is "
                "Latin-1, convert it: iconv -f LATIN1 -t UTF-8."
            ) from None
