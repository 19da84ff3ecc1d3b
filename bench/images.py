"""Test accuracy of `addnorm train images` with its default settings, on scikit-learn's digits.

    python -m bench.images [--out FOLDER] [--part test] [--seeds 3] [--set train.epochs=2]

A fifth of the 1,797 images, of each class the same share, is the test part; a fifth of the rest is
the development part, on which defaults were chosen. `--part development` trains without either and
evaluates on the development part; `--part test` trains on all but the test part.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

import addnorm


def digits(part: str) -> dict[str, tuple[Any, Any]]:
    """Return images and labels to train on and to evaluate on."""
    images, labels = load_digits().images.astype(np.uint8), load_digits().target
    rest, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels
    )
    if part == "development":
        rest, test = train_test_split(rest, test_size=0.2, random_state=0, stratify=labels[rest])
    return {"train": (images[rest], labels[rest]), part: (images[test], labels[test])}


def train(part: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Train with the default settings, and return accuracy and duration."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (images, labels) in digits(part).items():
            np.savez(f"{folder}/{name}.npz", images=images, labels=labels)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        run = addnorm.train(
            "images",
            f"{folder}/train.npz",
            out=f"{folder}/run",
            progress=False,
            set=[*settings, f"run.seed={seed}"],
        )
        seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        found = run.evaluate(f"{folder}/{part}.npz")
    return {
        "part": part,
        "seed": seed,
        "settings": settings,
        "accuracy": found["accuracy"],
        "images": found["images"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.images", description=__doc__)
    parser.add_argument("--part", choices=["development", "test"], default="development")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for seed in range(args.seeds):
        row = train(args.part, seed, args.set)
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            with (args.out / "images.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
