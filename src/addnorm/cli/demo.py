"""The verb `demo`: train a small translation model in minutes, and report how it works."""

import argparse
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.cli.console import say
from addnorm.errors import InputError
from addnorm.files import require_writable, to_json

if TYPE_CHECKING:
    from addnorm.demo.phrases import Phrase, Phrases
    from addnorm.runs.run import Run

MAX_ROWS = 14
"""Held-out phrases in the printed table."""
VALID = 300
"""Held-out phrases for validation during training; the others are the test set."""
DEMO_STEPS = 1800
"""Enough for nearly all phrases, on a busy machine as on an idle one: it only takes longer."""
SETTINGS = (
    "data.vocab=1000",
    "model.addnorm=pre",
    "model.positions=rotary",
    "model.depth=2",
    "model.dropout=0.0",
    "train.batch=1536",
    "train.lr=3e-3",
    "train.label_smoothing=0.0",
)
"""The data are small and without noise: no dropout, small batches, a high learning rate. Copying
digits depends on relative positions, which rotary positions encode."""


def demo(args: argparse.Namespace) -> None:
    """Train on phrases of CLDR, translate the test phrases and write a report."""
    from addnorm.cpu import keep_memory
    from addnorm.demo.phrases import make_phrases

    start = time.perf_counter()
    keep_memory()
    folder = _require_demo_folder(Path(args.out or f"runs/demo-{args.to}"))
    phrases = make_phrases(to=args.to, seed=args.seed)
    say(f"phrases in English and {phrases.language}, generated from CLDR and num2words.")
    for note in phrases.notes:
        say(note)
    _clear(folder)
    _write_phrases(phrases, folder)
    run = _train_translator(phrases, folder, args)
    test = phrases.held_out[VALID:]
    translations = run.translate([row.english for row in test], beam=1, engine="torch")
    metrics = _measure(test, translations, time.perf_counter() - start)
    page = _report(phrases, run, test, translations, metrics, folder / "report.html")
    _show(test, translations, metrics, page, as_json=args.json)


def _require_demo_folder(folder: Path) -> Path:
    """Return a folder that does not exist, is empty, or has only the files of an earlier demo."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{str(folder)!r} must be a folder: it is a file. Choose another --out.")
    if folder.exists() and any(folder.iterdir()):
        others = {entry.name for entry in folder.iterdir()} - {"phrases", "run", "report.html"}
        if others or not (folder / "phrases" / "train.en").is_file():
            raise InputError(
                f"{str(folder)!r} has other files than those of a demo. Choose another --out."
            )
    return require_writable(folder)


def _clear(folder: Path) -> None:
    """Delete the files of an earlier demo."""
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "phrases").mkdir(parents=True)


def _write_phrases(phrases: "Phrases", folder: Path) -> None:
    valid, test = phrases.held_out[:VALID], phrases.held_out[VALID:]
    parts = {"train": phrases.train, "valid": valid, "test": test}
    for name, rows in parts.items():
        for side, texts in (
            ("en", [row.english for row in rows]),
            (phrases.to, [row.foreign for row in rows]),
        ):
            path = folder / "phrases" / f"{name}.{side}"
            path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")


def _train_translator(phrases: "Phrases", folder: Path, args: argparse.Namespace) -> "Run":
    from addnorm.runs.loggers import make_observers
    from addnorm.runs.request import RunRequest
    from addnorm.runs.train import start_run

    texts = folder / "phrases"
    data = {
        "source": str(texts / "train.en"),
        "target": str(texts / f"train.{phrases.to}"),
        "valid_source": str(texts / "valid.en"),
        "valid_target": str(texts / f"valid.{phrases.to}"),
    }
    run: dict[str, Any] = {"task": "translate", "size": "tiny", "seed": args.seed}
    length: dict[str, Any] = {}
    if args.minutes is None:
        length["steps"] = DEMO_STEPS if args.steps is None else args.steps
    else:
        run["minutes"] = args.minutes
    request = RunRequest({"data": data, "run": run, "train": length}, SETTINGS)
    outcome = start_run(
        request,
        folder / "run",
        observers=make_observers,
        say=say,
    )
    if not outcome.progress.finished:
        raise KeyboardInterrupt
    return outcome.run


def _measure(
    test: Sequence["Phrase"], translations: Sequence[str], seconds: float
) -> dict[str, Any]:
    from addnorm.metrics import bleu

    correct: dict[str, list[bool]] = defaultdict(list)
    for row, text in zip(test, translations, strict=True):
        correct[row.kind].append(text == row.foreign)
    hits = [hit for kind in correct.values() for hit in kind]
    score = bleu(translations, [row.foreign for row in test])
    return {
        "held_out": len(test),
        "exact": sum(hits) / len(hits),
        "bleu": score["score"],
        "bleu_signature": score["signature"],
        "kinds": {kind: sum(each) / len(each) for kind, each in sorted(correct.items())},
        "seconds": round(seconds, 1),
    }


def _show(
    test: Sequence["Phrase"],
    translations: Sequence[str],
    metrics: dict[str, Any],
    page: Path,
    *,
    as_json: bool,
) -> None:
    if as_json:
        print(to_json({**metrics, "report": str(page)}))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("held-out phrase", "translation", ""):
        table.add_column(name, overflow="fold")
    for row, text in _sample(test, translations):
        good = text == row.foreign
        table.add_row(row.english, text, "✓" if good else f"✗ {row.foreign}")
    Console().print(table)
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in metrics["kinds"].items())
    print(f"exact: {metrics['exact']:.1%} of {metrics['held_out']} held-out phrases ({kinds})")
    print(f"BLEU: {metrics['bleu']:.1f} ({metrics['bleu_signature']})")
    print(f"report: {page}   total time: {metrics['seconds']:.0f} s")


def _sample(test: Sequence["Phrase"], translations: Sequence[str]) -> list[tuple["Phrase", str]]:
    """Return phrases of each kind in turn; within a kind, wrong translations come first."""
    by_kind: dict[str, list[tuple[Phrase, str]]] = defaultdict(list)
    for row, text in zip(test, translations, strict=True):
        by_kind[row.kind].append((row, text))
    for rows in by_kind.values():
        rows.sort(key=lambda pair: pair[1] == pair[0].foreign)
    turns = max(map(len, by_kind.values()))
    sample = [rows[turn] for turn in range(turns) for rows in by_kind.values() if turn < len(rows)]
    return sample[:MAX_ROWS]


def _report(
    phrases: "Phrases",
    run: "Run",
    test: Sequence["Phrase"],
    translations: Sequence[str],
    metrics: dict[str, Any],
    path: Path,
) -> Path:
    """Write a page with results, loss curve, attention and diagnosis; return its path."""
    from addnorm.report import Page, bar_chart
    from addnorm.runs.summary import loss_curve

    config = run.config
    page = Page(
        f"English to {phrases.language}",
        f"{config.model.mode} of {run.model.count():,} parameters, trained on "
        f"{len(phrases.train):,} phrases",
    )
    page.facts(
        [
            ("exact on held-out phrases", f"{metrics['exact']:.1%}"),
            ("BLEU", f"{metrics['bleu']:.1f}"),
            ("total seconds", f"{metrics['seconds']:.0f}"),
            ("held-out phrases", metrics["held_out"]),
        ]
    )
    page.section("Held-out phrases")
    page.text(
        "None of these phrases is in the training data. For each kind, wrong translations come "
        "first, with the reference."
    )
    page.table(
        ("phrase", "translation", "reference, if different"),
        [
            (row.english, text, None if text == row.foreign else row.foreign)
            for row, text in _sample(test, translations)
        ],
    )
    kinds = [(kind, 100 * share) for kind, share in metrics["kinds"].items()]
    page.figure(bar_chart(kinds, title="Exact match by kind of phrase", unit="%"))
    page.section("Loss")
    page.figure(loss_curve(run), "Loss of training batches, and of held-out phrases.")
    page.section("Attention")
    page.text(
        "Attention of the last decoder block to the source, averaged over its heads: each row is "
        "a generated token, each column a source token. Where the word order of the two languages "
        "differs, the dark cells leave the diagonal."
    )
    page.gallery(_maps(run, test))
    page.section("Contribution of each sublayer")
    page.text(
        "Dependency is Var[F] / Var[x + F] in each Add & Norm box: the share of the stream's "
        "variance that comes from the branch (Liu et al. 2020). The gradient is that of the loss "
        "with respect to the weights of the branch. Both are of the trained model."
    )
    page.gallery(_boxes(run, test))
    page.section("Configuration")
    page.code(config.dump())
    return page.write(path)


def _maps(run: "Run", test: Sequence["Phrase"]) -> list[Any]:
    """Return maps of the attention to the source, for kinds of phrase with another word order."""
    from addnorm.tasks.base import sides_of
    from addnorm.tasks.page_parts import cross_attention_map

    one, other = sides_of(run.tokenizers)
    pictures = []
    for kind in ("moment", "money", "relative", "date"):
        row = next((row for row in test if row.kind == kind), None)
        if row is not None:
            ids = one.encode(row.english), other.encode(row.foreign)
            picture = cross_attention_map(run.model, (one, other), ids, row.english)
            pictures.append((picture, row.foreign))
    return pictures


def _boxes(run: "Run", test: Sequence["Phrase"]) -> list[Any]:
    """Return charts of the dependency and gradient of every Add & Norm box."""
    from addnorm.clinic import examine
    from addnorm.data.text.collate import collate_pairs
    from addnorm.report import bar_chart
    from addnorm.tasks.base import sides_of

    one, other = sides_of(run.tokenizers)
    sample = test[:64]
    batch = collate_pairs(
        [one.encode(row.english) for row in sample], [other.encode(row.foreign) for row in sample]
    )
    sites = examine(run.model, (batch.source, batch.target_in), sharpness=False).evidence.sites
    depend = bar_chart([(site.name, site.dependency) for site in sites], title="Dependency")
    gradient = bar_chart([(site.name, site.weight_gradient) for site in sites], title="Gradient")
    return [(depend, "Var[F] / Var[x + F]"), (gradient, "norm of the gradient")]
