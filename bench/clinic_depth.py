"""Deep stacks on a real corpus: post-norm, pre-norm and Admin at 18+18 blocks, and at 6+6.

    python -m bench.clinic_depth FOLDER --out runs/depth [--jobs 1]

FOLDER holds Multi30k as train.en.gz, train.de.gz, val.en.gz, val.de.gz. Width 64, a joint
vocabulary of 2,000 pieces, about 1,000 tokens in a step, the same batches and number of steps for
all; Adam with a peak of 1e-3 after 200 steps of warm-up. Liu et al. 2020 (2004.08249), table 1: at
18+18 post-norm diverges and the others train; at 6+6 post-norm is not worse than pre-norm. About
twenty minutes on one core; an interrupted benchmark is resumed.
"""

import argparse
from pathlib import Path

from addnorm.races import entries_of, run_entries
from addnorm.races.page import race_page
from addnorm.runs.request import RunRequest

DEPTHS = {"18+18": (18, "post,pre,admin", 400), "6+6": (6, "post,pre", 800)}
"""Blocks on each side, arrangements, and steps."""


def make_request(folder: Path, depth: int, steps: int) -> RunRequest:
    files = {
        "source": "train.en.gz",
        "target": "train.de.gz",
        "valid_source": "val.en.gz",
        "valid_target": "val.de.gz",
    }
    data = {name: str(folder / file) for name, file in files.items()}
    return RunRequest(
        {
            "run": {"task": "translate", "size": "tiny", "device": "cpu"},
            "data": {**data, "vocab": 2000, "lowercase": True},
            "model": {
                "width": 64,
                "heads": 4,
                "ffn_width": 256,
                "depth": depth,
                "dropout": 0.1,
                "positions": "sinusoidal",
            },
            "train": {
                "steps": steps,
                "batch": 1000,
                "lr": 1e-3,
                "warmup": 200,
                "schedule": "inverse-sqrt",
                "optimizer": "adam",
                "evaluate_every": 100,
                "save_every": steps,
                "average_checkpoints": 0,
                "label_smoothing": 0.1,
            },
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    for name, (depth, kinds, steps) in DEPTHS.items():
        out = args.out / name
        request = make_request(args.folder, depth, steps)
        standings = run_entries(
            request, entries_of([f"model.addnorm={kinds}"]), out, jobs=args.jobs
        )
        race_page(standings, f"{name} blocks").write(out / "race.html")
        print(f"{name} blocks\n{standings.text()}", flush=True)
        for result in standings.results:
            curve = "  ".join(f"{step:.0f} {loss:.2f}" for step, loss in result.curve)
            print(f"    {result.name:14} {curve}", flush=True)


if __name__ == "__main__":
    main()
