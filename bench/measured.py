"""What the scripts of docs/measured share: results in a file that an interrupted run continues.

Every script writes NAME.jsonl, one line for each finished measurement, and pictures as SVG:

    python -m bench.NAME --out FOLDER [--quick]

With --quick everything is tiny, so that a test can run the whole script.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from addnorm.report import write_picture
from addnorm.report.svg import Svg

Row = dict[str, Any]


class Results:
    """Measurements in a file of JSON lines, each with the settings that it belongs to."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / f"{name}.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]

    def measure(self, settings: Row, compute: Callable[[], Row]) -> Row:
        """Return the row of these settings: from the file, or computed and added to it."""
        wanted = json.loads(json.dumps(settings))
        for row in self.rows:
            if all(row.get(name) == value for name, value in wanted.items()):
                return row
        begin = time.process_time()
        row = {**wanted, **compute()}
        row |= {"cpu_seconds": round(time.process_time() - begin, 2), "date": str(date.today())}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print({k: v for k, v in shown.items() if not isinstance(v, list | dict)}, flush=True)
        return row

    def where(self, **settings: Any) -> list[Row]:
        """Return the rows that have these values."""
        return [r for r in self.rows if all(r.get(k) == v for k, v in settings.items())]

    def write(self, name: str, picture: Svg) -> None:
        """Write a picture into the folder."""
        write_picture(picture, self.folder / f"{name}.svg")


def arguments(name: str, description: str | None, **more: Any) -> argparse.Namespace:
    """Return --out, --quick and further flags, each with its keyword arguments."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results and pictures")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script")
    for flag, keywords in more.items():
        parser.add_argument(f"--{flag}", **keywords)
    args = parser.parse_args()
    torch.set_num_threads(1)
    return args


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; 0 for one value."""
    if len(values) < 2:
        return 0.0
    return (sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def repository_text() -> str:
    """Return the documentation of this repository: English that every checkout has."""
    root = Path(__file__).parents[1]
    return "\n".join(p.read_text() for p in sorted(root.glob("docs/**/*.md")))


def windows(ids: torch.Tensor, length: int, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of random windows, (rows, length + 1), for ever."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(ids) - length - 1, (rows,), generator=generator)
        yield ids[starts[:, None] + steps]
