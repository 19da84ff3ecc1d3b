"""The clinic on sick models: what it finds, and what other tools find in the same models.

    python -m bench.clinic_sick                  examine all, print the table
    python -m bench.clinic_sick --write          and write it to docs/results/clinic_models.md

A model is *found* if one of the right names is among the findings above a note. It is *missed* if
it is called healthy; "not examined" is neither. `MODULES` names the files with the models: the
first half was written before the rules, the second after they were frozen. To add one, write a
module with a list `CASES` of `bench.clinic_sick_models.Sickness` and add its name.

The other tools: torch's anomaly mode (an error in the backward pass), a check of the loss and of
the gradients for NaN and zero, as training loops and trackers have. Cockpit and torchinstruments
are in clinic_other_tools.py.
"""

import importlib
import importlib.util
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from addnorm.clinic import examine
from bench.clinic_foreign import write_section
from bench.clinic_sick_models import Patient, Sickness

MODULES = {
    "before the rules": "bench.clinic_sick_models",
    "after the rules": "bench.clinic_sick_more",
}
START, END = "<!-- sick -->", "<!-- end of sick -->"


@dataclass(frozen=True)
class Row:
    """One sick model in one style of code."""

    half: str
    sickness: Sickness
    style: str
    found: tuple[str, ...]
    verdict: str
    seconds: float
    anomaly: bool
    gradients: bool

    @property
    def is_right(self) -> bool:
        return bool(set(self.found) & set(self.sickness.findings))


def examine_one(half: str, sickness: Sickness, style: str) -> Row:
    patient = sickness.styles[style]()
    start = time.perf_counter()
    try:
        result = examine(
            patient.model, patient.batch, patient.loss, sharpness=False, **patient.options
        )
        found, verdict = tuple(result.names()), result.verdict
    except Exception as error:  # a crash is a result of this benchmark
        found, verdict = (), f"crash: {type(error).__name__}: {error}"[:120]
    seconds = time.perf_counter() - start
    return Row(half, sickness, style, found, verdict, seconds, *other_tools(patient))


def other_tools(patient: Patient) -> tuple[bool, bool]:
    """Return whether anomaly mode raises, and whether loss or gradients are NaN, zero, missing."""
    model, batch = patient.model, patient.batch
    model.zero_grad(set_to_none=True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            loss = patient.loss(_call(model, batch), batch)
            loss.backward()
    except RuntimeError:
        return True, True
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = [p.grad for p in trained]
    wrong = not bool(loss.isfinite()) or any(
        g is None or not bool(g.isfinite().all()) or not bool(g.any()) for g in grads
    )
    return False, wrong


def _call(model: Any, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def table(rows: list[Row]) -> str:
    lines = []
    for half in dict.fromkeys(row.half for row in rows):
        part = [row for row in rows if row.half == half]
        right, healthy = sum(r.is_right for r in part), sum(r.verdict == "healthy" for r in part)
        kinds = len({r.sickness.name for r in part})
        lines.append(
            f"**Written {half}: {len(part)} models of {kinds} kinds; "
            f"found with the right name {right} ({right / len(part):.0%}), called healthy "
            f"{healthy}.**"
        )
        lines.append("")
    anomaly, gradients = sum(r.anomaly for r in rows), sum(r.gradients for r in rows)
    lines += [
        f"Of all {len(rows)}: torch's anomaly mode stops at {anomaly}; loss or a gradient is NaN, "
        f"zero or missing in {gradients}. Other tools: below.",
        "",
        "| what was done | right name | ours | torch | hand | other | anomaly mode | gradients |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row.sickness.name for row in rows):
        part = [row for row in rows if row.sickness.name == name]
        cells = {row.style: _cell(row) for row in part}
        others = [cell for style, cell in cells.items() if style not in ("ours", "torch", "hand")]
        shown = [cells.get(style, "") for style in ("ours", "torch", "hand")]
        marks = ["stops" if any(r.anomaly for r in part) else "–"]
        marks.append("shows" if any(r.gradients for r in part) else "–")
        lines.append(
            f"| {name} | {' or '.join(part[0].sickness.findings)} | {' | '.join(shown)} | "
            f"{', '.join(others)} | {' | '.join(marks)} |"
        )
    return "\n".join(lines)


def _cell(row: Row) -> str:
    if row.is_right:
        return "found"
    return f"✗ {', '.join(row.found) or row.verdict}"


def all_cases() -> list[tuple[str, Sickness]]:
    """Return every case of the modules that exist, with its half."""
    cases = []
    for half, module in MODULES.items():
        if importlib.util.find_spec(module) is not None:
            cases += [(half, case) for case in importlib.import_module(module).CASES]
    return cases


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for half, sickness in all_cases():
        for style in sickness.styles:
            rows.append(examine_one(half, sickness, style))
            print(f"{sickness.name}, {style}: {rows[-1].found}", file=sys.stderr, flush=True)
    text = table(rows)
    print(text)
    if "--write" in sys.argv:
        write_section(text, START, END)


if __name__ == "__main__":
    main()
