"""The clinic on models that were written without sight of its rules.

    python -m bench.clinic_unseen FILE.json            examine all, store the result of each
    python -m bench.clinic_unseen FILE.json --write SECTION   and write the tables to docs/results

A sick model is *named* if a finding above a note matches the words fixed for its sickness before
the first run (clinic_sick_models_unseen.SICKNESSES), in its name or its evidence. For a healthy
model every finding above a note is a false alarm.
"""

import json
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from addnorm.clinic import examine
from bench.clinic_foreign import write_section
from bench.clinic_healthy_unseen import HEALTHY
from bench.clinic_sick_models_unseen import SICKNESSES, all_unseen
from bench.clinic_unseen_bases import Case

Row = dict[str, Any]


def look(case: Case) -> Row:
    """Return what the clinic says of one model."""
    start = time.process_time()
    try:
        result = examine(case.model, case.batch, case.loss, sharpness=False, **case.options)
    except Exception as error:  # a crash is a result of this benchmark
        return {"verdict": "crash", "found": [], "error": f"{type(error).__name__}: {error}"[:200]}
    found = [
        {"name": f.name, "severity": f.severity, "evidence": f.evidence}
        for f in result.findings
        if f.severity != "note"
    ]
    missed = [c.name for c in result.checks if c.essential and c.outcome == "not examined"]
    return {
        "verdict": result.verdict,
        "found": found,
        "not examined": missed,
        "seconds": round(time.process_time() - start, 2),
    }


def outcome(row: Row) -> str:
    """Return named, another finding, not examined, healthy or crash."""
    if row["verdict"] == "crash":
        return "crash"
    words = [f"{f['name']} {f['evidence']}".lower() for f in row["found"]]
    if any(re.search(SICKNESSES[row["sickness"]], text) for text in words):
        return "named"
    if words:
        return "another finding"
    return "healthy" if row["verdict"] == "healthy" else "not examined"


def run(only: str = "") -> list[Row]:
    rows: list[Row] = []
    for sick in all_unseen():
        if only in sick.sickness:
            torch.manual_seed(0)
            row = {"sickness": sick.sickness, "style": sick.style} | look(sick.make())
            row["outcome"] = outcome(row)
            _report(rows, row, f"{sick.sickness}, {sick.style}: {row['outcome']}")
    for name, make in HEALTHY.items():
        if only in name:
            torch.manual_seed(0)
            row = {"healthy": name} | look(make())
            _report(rows, row, f"healthy: {name}: {row['verdict']}")
    return rows


def _report(rows: list[Row], row: Row, text: str) -> None:
    rows.append(row)
    names = [f["name"] for f in row["found"]]
    print(f"{text} {names} {row.get('error', '')}", file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    sick = [row for row in rows if "sickness" in row]
    fit = [row for row in rows if "healthy" in row]
    counts = Counter(row["outcome"] for row in sick)
    alarms = [row for row in fit if row["found"]]
    crashes = [row for row in fit if row["verdict"] == "crash"]
    unsure = [row for row in fit if row["verdict"] == "not examined"]
    lines = [
        f"**{len(sick)} sick models of {len({r['sickness'] for r in sick})} kinds: "
        f"{counts['named']} named ({counts['named'] / len(sick):.0%}), {counts['another finding']} "
        f"with another finding, {counts['not examined']} not examined, {counts['healthy']} called "
        f"healthy, {counts['crash']} crashes. {len(fit)} healthy models: {len(alarms)} false "
        f"alarms, {len(crashes)} crashes, {len(unsure)} not examined.**",
        "",
        "| sickness | ours | torch.nn | hand-written | Hugging Face |",
        "|---|---|---|---|---|",
    ]
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in sick:
        names = ", ".join(dict.fromkeys(f["name"] for f in row["found"]))
        text = "✓" if row["outcome"] == "named" else f"✗ {row['outcome']} {names}".strip()
        cells[row["sickness"]][row["style"]].append(text)
    for name, styles in cells.items():
        columns = (
            "; ".join(styles[style]) or "–"
            for style in ("ours", "torch.nn", "hand-written", "Hugging Face")
        )
        lines.append(f"| {name} | {' | '.join(columns)} |")
    lines += [
        "",
        "Healthy models with a finding above a note, a crash or an incomplete examination:",
    ]
    for row in alarms + crashes + unsure:
        names = ", ".join(f["name"] for f in row["found"])
        reason = names or row.get("error") or ", ".join(row["not examined"])
        lines.append(f"- {row['healthy']}: {row['verdict']} ({reason})")
    if not alarms + crashes + unsure:
        lines.append("none.")
    return "\n".join(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    if path.exists():
        rows = json.loads(path.read_text(encoding="utf-8"))
    else:
        rows = run()
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table(rows))
    if "--write" in sys.argv:
        section = sys.argv[sys.argv.index("--write") + 1]
        write_section(table(rows), f"<!-- {section} -->", f"<!-- end of {section} -->")


if __name__ == "__main__":
    main()
