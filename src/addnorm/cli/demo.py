"""The main job: a translator of dates, times, amounts and names, trained while one waits."""

import argparse
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.errors import InputError

if TYPE_CHECKING:
    from addnorm.data.phrases import Phrase, Phrases
    from addnorm.runs.directory import Run
    from addnorm.runs.use import Trained

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
    "train.smoothing=0.0",
)
"""A small world without noise: no dropout, small batches, a high rate. Copying digits needs to know
how far to look, which rotary positions tell."""


def demo(args: argparse.Namespace) -> None:
    """Train on localisation phrases, then translate new ones and show how."""
    from addnorm.data.phrases import phrases
    from addnorm.machine import keep_memory

    began = time.perf_counter()
    keep_memory()
    folder = _need_own(Path(args.out or f"runs/demo-{args.to}"))
    _say(f"drawing phrases in English and {args.to} from CLDR and num2words.")
    found = phrases(to=args.to, seed=args.seed)
    for note in found.notes:
        _say(note)
    _clear(folder)
    _write(found, folder)
    run = _train(found, folder, args)
    trained = _open(run.path)
    test = found.held_out[VALID:]
    said = [best[0].text for best in trained.translate([row.english for row in test], beam=1)]
    figures = _measure(test, said, time.perf_counter() - began)
    page = _report(found, run, trained, test, said, figures, folder / "report.html")
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
    from addnorm.runs.progress import watchers
    from addnorm.runs.recipe import Wish
    from addnorm.runs.train import start

    texts = folder / "phrases"
    data = {
        "source": str(texts / "train.en"),
        "target": str(texts / f"train.{found.to}"),
        "valid_source": str(texts / "valid.en"),
        "valid_target": str(texts / f"valid.{found.to}"),
    }
    run = {"task": "translate", "size": "tiny", "minutes": args.minutes, "seed": args.seed}
    wish = Wish({"data": data, "run": run}, SETTINGS)
    outcome = start(
        wish,
        folder / "run",
        watch=lambda path: watchers(path, terminal=sys.stderr.isatty()),
        say=_say,
    )
    if not outcome.progress.finished:
        raise KeyboardInterrupt
    return outcome.run


def _open(path: Path) -> "Trained":
    from addnorm.runs.use import Trained

    return Trained(path)


def _measure(test: Sequence["Phrase"], said: Sequence[str], seconds: float) -> dict[str, Any]:
    from addnorm.runs.metrics import bleu

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
        print(json.dumps({**figures, "report": str(page)}, indent=1, ensure_ascii=False))
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
    trained: "Trained",
    test: Sequence["Phrase"],
    said: Sequence[str],
    figures: dict[str, Any],
    path: Path,
) -> Path:
    """One page: what it learnt, how, and where it looks."""
    from addnorm.report import Page, bars
    from addnorm.runs.summary import loss_curve

    config = run.config
    page = Page(
        f"English to {found.to}",
        f"{config.model.mode} of {trained.model.count():,} parameters, trained on "
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
    page.figure(bars(kinds, title="Exact match by kind of phrase", unit="%"))
    page.section("Loss")
    page.figure(loss_curve(run), "Of training batches, and of held-out phrases.")
    page.section("Where it looks")
    page.text(
        "Attention of the last decoder block to the source, the mean of its heads: each row is a "
        "token being written, each column a token that is read. Where the order of the two "
        "languages differs, the dark cells leave the diagonal."
    )
    page.gallery(_maps(trained, test))
    page.section("What each sublayer adds")
    page.text(
        "Dependency is Var[F] / Var[x + F] in each Add & Norm box: the share of the stream's "
        "variance that the branch brought (Liu et al. 2020). The gradient is that of the loss in "
        "the branch's weights. Both are of the trained model."
    )
    page.gallery(_boxes(trained, test))
    page.section("Configuration")
    page.code(config.dump())
    return page.write(path)


def _maps(trained: "Trained", test: Sequence["Phrase"]) -> list[Any]:
    """Attention to the source for a few phrases whose order changes."""
    import torch

    from addnorm.data.collate import collate_pairs
    from addnorm.data.special import END
    from addnorm.models.transformer import EncoderDecoder
    from addnorm.report import attention
    from addnorm.runs.tasks.base import sides_of

    model = trained.model
    assert isinstance(model, EncoderDecoder)
    one, other = sides_of(trained.tokenizers)
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
        pictures.append((attention(weights, *names, title=row.english), row.foreign))
    return pictures


def _boxes(trained: "Trained", test: Sequence["Phrase"]) -> list[Any]:
    """Dependency and gradient of every Add & Norm box."""
    from addnorm.clinic import examine
    from addnorm.data.collate import collate_pairs
    from addnorm.report import bars
    from addnorm.runs.tasks.base import sides_of

    one, other = sides_of(trained.tokenizers)
    sample = test[:64]
    batch = collate_pairs(
        [one.encode(row.english) for row in sample], [other.encode(row.foreign) for row in sample]
    )
    found = examine(trained.model, (batch.source, batch.target_in), sharp=False).evidence.sites
    depend = bars([(site.name, site.dependency) for site in found], title="Dependency")
    gradient = bars([(site.name, site.weight_gradient) for site in found], title="Gradient")
    return [(depend, "Var[F] / Var[x + F]"), (gradient, "norm of the gradient")]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
