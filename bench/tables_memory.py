"""Peak memory of `addnorm predict` on files of different sizes.

    python -m bench.tables_memory [--rows 100000 1000000] --out F.json

A small model is trained, files are written row by row, and each is scored in its own process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from addnorm.files import write_whole

COLUMNS = ("age", "hours", "job", "town")
SCORE = (
    "import resource, sys\n"
    "from addnorm.cli.main import main\n"
    "main(sys.argv[1:])\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
)


def write_rows(path: Path, rows: int, *, target: bool) -> None:
    """Write a file of random rows, a part at a time."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        file.write(",".join((*COLUMNS, "rich") if target else COLUMNS) + "\n")
        for start in range(0, rows, 10_000):
            count = min(10_000, rows - start)
            age, hours = rng.integers(18, 90, count), rng.normal(40, 9, count)
            job, town = rng.integers(0, 12, count), rng.integers(0, 40, count)
            for a, h, j, t in zip(age, hours, job, town, strict=True):
                rich = f",{'yes' if a + h > 95 else 'no'}" if target else ""
                file.write(f"{a},{h:.2f},job {j},town {t}{rich}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument(
        "--ending", default="parquet", help="file name extension of the scored file"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "train.csv", 2000, target=True)
        train = ["train", "table", str(folder / "train.csv"), "--target", "rich"]
        settings = ["--set", "model.width=16", "--set", "model.depth=1", "--set", "train.epochs=2"]
        subprocess.run(
            [sys.executable, "-m", "addnorm", *train, "--out", str(folder / "run"), *settings],
            check=True,
            capture_output=True,
        )
        for rows in args.rows:
            write_rows(folder / "rows.csv", rows, target=False)
            out = folder / f"scored.{args.ending}"
            command = ["predict", str(folder / "run"), str(folder / "rows.csv"), "-o", str(out)]
            start_time = time.perf_counter()
            process = subprocess.run(
                [sys.executable, "-c", SCORE, *command, "--proba"],
                check=True,
                capture_output=True,
                text=True,
            )
            seconds = time.perf_counter() - start_time
            peak = int(process.stdout.split()[-1]) / 1024
            megabytes = (folder / "rows.csv").stat().st_size / 2**20
            facts = {"rows": rows, "file_mb": megabytes, "peak_mb": peak, "seconds": seconds}
            results.append(facts)
            write_whole(args.out, json.dumps(results, indent=1).encode())
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
