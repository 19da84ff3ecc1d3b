"""The main job: a translator of dates, times, amounts and names, trained while one waits."""

import argparse
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.errors import InputError
from addnorm.files import to_json

if TYPE_CHECKING:
    from addnorm.demo.phrases import Phrase, Phrases
    from addnorm.runs.run import Run

SHOWN = 14
"""Held-out phrases in the table."""
VALID = 300
"""Held-out phrases that choose the best weights; the rest are looked at only at the end."""
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
"""A small world without noise: no dropout, small batches, a high rate. Copying digits needs to know
how far to look, which rotary positions tell."""


def demo(args: argparse.Namespace) -> None:
    """Train on localisation phrases, then translate new ones and show how."""
    from addnorm.cpu import keep_memory
    from addnorm.demo.phrases import make_phrases

    began = time.perf_counter()
    keep_memory()
    folder = _need_own(Path(args.out or f"runs/demo-{args.to}"))
    _say(f"drawing phrases in English and {args.to} from CLDR and num2words.")
    found = make_phrases(to=args.to, seed=args.seed)
    for note in found.notes:
        _say(note)
    _clear(folder)
    _write(found, folder)
    run = _train(found, folder, args)
    test = found.held_out[VALID:]
    said = run.translate([row.english for row in test], beam=1)
    figures = _measure(test, said, time.perf_counter() - began)
    page = _report(found, run, test, said, figures, folder / "report.html")
    _show(test, said, figures, page, as_json=args.json)


def _need_own(folder: Path) -> Path:
    """A folder that is not there, is empty, or holds what an earlier demo left and nothing else."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{str(folder)!r} must be a folder: it is a file. Choose another --out.")
    if folder.exists() and any(folder.iterdir()):
        strange = {entry.name for entry in folder.iterdir()} - {"phrases", "run", "report.html"}
        if strange or not (folder / "phrases" / "train.en").is_file():
            raise InputError(f"{str(folder)!r} is not empty, nor of a demo. Choose another --out.")
    return folder


def _clear(folder: Path) -> None:
    """Take away what an earlier demo left."""
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "phrases").mkdir(parents=True)


def _write(found: "Phrases", folder: Path) -> None:
    parts = {"train": found.train, "valid": found.held_out[:VALID], "test": found.held_out[VALID:]}
    for name, rows in parts.items():
        for side, texts in (
            ("en", [row.english for row in rows]),
            (found.to, [row.foreign for row in rows]),
        ):
            path = folder / "phrases" / f"{name}.{side}"
            path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")


def _train(found: "Phrases", folder: Path, args: argparse.Namespace) -> "Run":
    from addnorm.runs.loggers import make_observers
    from addnorm.runs.request import RunRequest
    from addnorm.runs.train import start_run

    texts = folder / "phrases"
    data = {
        "source": str(texts / "train.en"),
        "target": str(texts / f"train.{found.to}"),
        "valid_source": str(texts / "valid.en"),
        "valid_target": str(texts / f"valid.{found.to}"),
    }
    run = {"task": "translate", "size": "tiny", "minutes": args.minutes, "seed": args.seed}
    wish = RunRequest({"data": data, "run": run}, SETTINGS)
    outcome = start_run(
        wish,
        folder / "run",
        observers=make_observers,
        say=_say,
    )
    if not outcome.progress.finished:
        raise KeyboardInterrupt
    return outcome.run


def _measure(test: Sequence["Phrase"], said: Sequence[str], seconds: float) -> dict[str, Any]:
    from addnorm.metrics import bleu

    right: dict[str, list[bool]] = defaultdict(list)
    for row, text in zip(test, said, strict=True):
        right[row.kind].append(text == row.foreign)
    hits = [hit for kind in right.values() for hit in kind]
    score = bleu(said, [row.foreign for row in test])
    return {
        "held_out": len(test),
        "exact": sum(hits) / len(hits),
        "bleu": score["score"],
        "bleu_signature": score["signature"],
        "kinds": {kind: sum(found) / len(found) for kind, found in sorted(right.items())},
        "seconds": round(seconds, 1),
    }


def _show(
    test: Sequence["Phrase"],
    said: Sequence[str],
    figures: dict[str, Any],
    page: Path,
    *,
    as_json: bool,
) -> None:
    if as_json:
        print(to_json({**figures, "report": str(page)}))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("held-out phrase", "translation", ""):
        table.add_column(name, overflow="fold")
    for row, text in _sample(test, said):
        good = text == row.foreign
        table.add_row(row.english, text, "✓" if good else f"✗ {row.foreign}")
    Console().print(table)
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in figures["kinds"].items())
    print(f"exact: {figures['exact']:.1%} of {figures['held_out']} held-out phrases ({kinds})")
    print(f"BLEU: {figures['bleu']:.1f} ({figures['bleu_signature']})")
    print(f"report: {page}   in all {figures['seconds']:.0f} s")


def _sample(test: Sequence["Phrase"], said: Sequence[str]) -> list[tuple["Phrase", str]]:
    """One phrase of each kind in turn, the wrong ones of a kind first: nothing is hidden."""
    by_kind: dict[str, list[tuple[Phrase, str]]] = defaultdict(list)
    for row, text in zip(test, said, strict=True):
        by_kind[row.kind].append((row, text))
    for rows in by_kind.values():
        rows.sort(key=lambda pair: pair[1] == pair[0].foreign)
    turns = max(map(len, by_kind.values()))
    shown = [rows[turn] for turn in range(turns) for rows in by_kind.values() if turn < len(rows)]
    return shown[:SHOWN]


def _report(
    found: "Phrases",
    run: "Run",
    test: Sequence["Phrase"],
    said: Sequence[str],
    figures: dict[str, Any],
    path: Path,
) -> Path:
    """One page: what it learnt, how, and where it looks."""
    from addnorm.report import Page, bar_chart
    from addnorm.runs.summary import loss_curve

    config = run.config
    page = Page(
        f"English to {found.to}",
        f"{config.model.mode} of {run.model.count():,} parameters, trained on "
        f"{len(found.train):,} phrases",
    )
    page.facts(
        [
            ("exact on held-out phrases", f"{figures['exact']:.1%}"),
            ("BLEU", f"{figures['bleu']:.1f}"),
            ("seconds in all", f"{figures['seconds']:.0f}"),
            ("held-out phrases", figures["held_out"]),
        ]
    )
    page.section("Held-out phrases")
    page.text(
        "None of these stood in the training text. Of each kind the wrong ones come first, with "
        "what would have been right beside them."
    )
    page.table(
        ("phrase", "translation", "reference, if another"),
        [
            (row.english, text, None if text == row.foreign else row.foreign)
            for row, text in _sample(test, said)
        ],
    )
    kinds = [(kind, 100 * share) for kind, share in figures["kinds"].items()]
    page.figure(bar_chart(kinds, title="Exact match by kind of phrase", unit="%"))
    page.section("Loss")
    page.figure(loss_curve(run), "Of training batches, and of held-out phrases.")
    page.section("Where it looks")
    page.text(
        "Attention of the last decoder block to the source, the mean of its heads: each row is a "
        "token being written, each column a token that is read. Where the order of the two "
        "languages differs, the dark cells leave the diagonal."
    )
    page.gallery(_maps(run, test))
    page.section("What each sublayer adds")
    page.text(
        "Dependency is Var[F] / Var[x + F] in each Add & Norm box: the share of the stream's "
        "variance that the branch brought (Liu et al. 2020). The gradient is that of the loss in "
        "the branch's weights. Both are of the trained model."
    )
    page.gallery(_boxes(run, test))
    page.section("Configuration")
    page.code(config.dump())
    return page.write(path)


def _maps(run: "Run", test: Sequence["Phrase"]) -> list[Any]:
    """Attention to the source for a few phrases whose order changes."""
    import torch

    from addnorm.data.text.collate import collate_pairs
    from addnorm.data.text.special_tokens import END
    from addnorm.models.transformer import EncoderDecoder
    from addnorm.report import attention_map
    from addnorm.tasks.base import sides_of

    model = run.model
    assert isinstance(model, EncoderDecoder)
    one, other = sides_of(run.tokenizers)
    pictures = []
    for kind in ("moment", "money", "relative", "date"):
        row = next((row for row in test if row.kind == kind), None)
        if row is None:
            continue
        ids, target = one.encode(row.english), other.encode(row.foreign)
        batch = collate_pairs([ids], [target])
        maps: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            model(batch.source, batch.target_in, maps=maps)
        last = max(name for name in maps if name.startswith("decoder") and "memory" in name)
        weights = maps[last][0].mean(dim=0).tolist()
        names = [one.piece(i) for i in (*ids, END)], [other.piece(i) for i in (*target, END)]
        pictures.append((attention_map(weights, *names, title=row.english), row.foreign))
    return pictures


def _boxes(run: "Run", test: Sequence["Phrase"]) -> list[Any]:
    """Dependency and gradient of every Add & Norm box."""
    from addnorm.clinic import examine
    from addnorm.data.text.collate import collate_pairs
    from addnorm.report import bar_chart
    from addnorm.tasks.base import sides_of

    one, other = sides_of(run.tokenizers)
    sample = test[:64]
    batch = collate_pairs(
        [one.encode(row.english) for row in sample], [other.encode(row.foreign) for row in sample]
    )
    found = examine(run.model, (batch.source, batch.target_in), sharpness=False).evidence.sites
    depend = bar_chart([(site.name, site.dependency) for site in found], title="Dependency")
    gradient = bar_chart([(site.name, site.weight_gradient) for site in found], title="Gradient")
    return [(depend, "Var[F] / Var[x + F]"), (gradient, "norm of the gradient")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
