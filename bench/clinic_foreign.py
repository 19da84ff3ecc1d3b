"""The clinic on healthy models that the project did not make: no crash, no false alarm.

    python -m bench.clinic_foreign               examine all, print the table
    python -m bench.clinic_foreign --write       and write it to docs/results/clinic_models.md

For each model and its ordinary batch: what the clinic found above a note, the arrangement that it
names against that of the published code, and the seconds. Models of libraries that are not
installed are left out, and the table says how many of each there were. About four minutes.
"""

import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from addnorm.clinic import examine
from bench.clinic_foreign_models import Foreign, all_models

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "clinic_models.md"
START, END = "<!-- healthy -->", "<!-- end of healthy -->"


@dataclass(frozen=True)
class Row:
    """The examination of one model."""

    model: Foreign
    found: tuple[str, ...]
    arrangement: str
    verdict: str
    not_examined: tuple[str, ...]
    seconds: float
    error: str = ""

    @property
    def is_named_right(self) -> bool:
        return self.arrangement == self.model.arrangement


def examine_one(model: Foreign) -> Row:
    torch.manual_seed(0)
    made = model.make()
    start = time.perf_counter()
    try:
        result = examine(made.model, made.batch, made.loss, sharpness=False, **made.options)
    except Exception as error:  # a crash is a result of this benchmark
        text = f"{type(error).__name__}: {error}"[:120]
        return Row(model, (), "", "crash", (), time.perf_counter() - start, text)
    seconds = time.perf_counter() - start
    evidence = result.evidence
    name = evidence.arrangement.name if evidence.transformer else "not a Transformer"
    missed = tuple(c.name for c in result.checks if c.essential and c.outcome == "not examined")
    return Row(model, tuple(result.names()), name, result.verdict, missed, seconds)


def table(rows: list[Row]) -> str:
    crashes = sum(row.verdict == "crash" for row in rows)
    alarms = sum(bool(row.found) for row in rows)
    right = sum(row.is_named_right for row in rows)
    slowest = max(rows, key=lambda row: row.seconds)
    families = Counter(row.model.family for row in rows)
    counts = ", ".join(f"{family} {n}" for family, n in families.items())
    lines = [
        f"**{len(rows)} models: {crashes} crashes, {alarms} false alarms, arrangement right in "
        f"{right} ({right / len(rows):.0%}).** {counts}. Median "
        f"{sorted(row.seconds for row in rows)[len(rows) // 2]:.1f} s, slowest "
        f"{slowest.model.name} {slowest.seconds:.1f} s (one thread, without sharpness, while the "
        "machine was shared).",
        "",
        "| model | family | arrangement | found | verdict |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        mark = "" if row.is_named_right else f" ✗ ({row.model.arrangement})"
        found = row.error or ", ".join(row.found) or "–"
        verdict = row.verdict + (f": {', '.join(row.not_examined)}" if row.not_examined else "")
        lines.append(
            f"| {row.model.name} | {row.model.family} | {row.arrangement}{mark} | {found} | "
            f"{verdict} |"
        )
    return "\n".join(lines)


def write_section(text: str, start: str, end: str) -> None:
    """Replace one section of the page of results."""
    page = RESULTS.read_text(encoding="utf-8")
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    RESULTS.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for model in all_models():
        rows.append(examine_one(model))
        print(
            f"{model.name}: {rows[-1].arrangement}; {rows[-1].found}", file=sys.stderr, flush=True
        )
    text = table(rows)
    print(text)
    if "--write" in sys.argv:
        write_section(text, START, END)


if __name__ == "__main__":
    main()
