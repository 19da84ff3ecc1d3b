"""The clinic on models that were written without sight of its rules.

    python -m bench.clinic_unseen FILE.jsonl            examine all, store the result of each
    python -m bench.clinic_unseen FILE.jsonl --third    the third set instead of the second
    python -m bench.clinic_unseen FILE.jsonl --write SECTION   and write the tables to docs/results

An interrupted run is resumed. A sick model is *named* if a finding above a note matches the words
fixed for its sickness before the first run (`SICKNESSES` of its set), in its name or its evidence.
For a healthy model every finding above a note is a false alarm.
"""

import json
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from addnorm.clinic import examine
from bench.clinic_foreign import write_section
from bench.clinic_healthy_third_hub import Healthy
from bench.clinic_healthy_unseen import HEALTHY
from bench.clinic_sick_models_unseen import FAMILIES, SICKNESSES
from bench.clinic_unseen_bases import Case

Row = dict[str, Any]


@dataclass(frozen=True)
class ModelSet:
    """Sick and healthy models, and the words that name each sickness."""

    sicknesses: dict[str, str]
    families: Sequence[Callable[[], Iterable[tuple[str, str, Callable[[], Case]]]]]
    healthy: dict[str, Healthy]


def second_set() -> ModelSet:
    healthy = {name: Healthy(make) for name, make in HEALTHY.items()}
    return ModelSet(SICKNESSES, FAMILIES, healthy)


def third_set() -> ModelSet:
    from bench import clinic_healthy_third, clinic_sick_third

    return ModelSet(
        clinic_sick_third.SICKNESSES, clinic_sick_third.FAMILIES, clinic_healthy_third.HEALTHY
    )


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
    evidence = result.evidence
    arrangement = evidence.arrangement.name if evidence.transformer else "not a Transformer"
    return {
        "verdict": result.verdict,
        "arrangement": arrangement,
        "found": found,
        "not examined": missed,
        "seconds": round(time.process_time() - start, 2),
    }


def outcome(row: Row, sicknesses: dict[str, str]) -> str:
    """Return named, another finding, not examined, healthy or crash."""
    if row["verdict"] == "crash":
        return "crash"
    words = [f"{f['name']} {f['evidence']}".lower() for f in row["found"]]
    if any(re.search(sicknesses[row["sickness"]], text) for text in words):
        return "named"
    if words:
        return "another finding"
    return "healthy" if row["verdict"] == "healthy" else "not examined"


def run(models: ModelSet, path: Path) -> list[Row]:
    """Examine every model that is not in the file yet; each result is one line of it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows: list[Row] = [json.loads(line) for line in lines]
    done = {
        (row.get("sickness"), row.get("style"), row.get("healthy"), row["count"]) for row in rows
    }
    counts: Counter[tuple[str, str]] = Counter()
    for family in models.families:
        for sickness, style, make in family():
            counts[sickness, style] += 1
            row: Row = {"sickness": sickness, "style": style, "count": counts[sickness, style]}
            if (sickness, style, None, row["count"]) in done:
                continue
            torch.manual_seed(0)
            row |= look(make())
            row["outcome"] = outcome(row, models.sicknesses)
            _report(path, rows, row, f"{sickness}, {style}: {row['outcome']}")
    for name, healthy in models.healthy.items():
        if (None, None, name, 1) not in done:
            torch.manual_seed(0)
            row = {"healthy": name, "count": 1, "expected": healthy.arrangement}
            row |= look(healthy.make())
            _report(path, rows, row, f"healthy: {name}: {row['verdict']}")
    return rows


def _report(path: Path, rows: list[Row], row: Row, text: str) -> None:
    rows.append(row)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
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
    named = [row for row in fit if row.get("expected")]
    if named:
        wrong = [row for row in named if row.get("arrangement") != row["expected"]]
        lines += [
            "",
            f"Arrangement right in {len(named) - len(wrong)} of the {len(named)} healthy models "
            "for which it was written down beforehand"
            + "".join(
                f"; {row['healthy']}: {row.get('arrangement')} instead of {row['expected']}"
                for row in wrong
            )
            + ".",
        ]
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
    models = third_set() if "--third" in sys.argv else second_set()
    rows = run(models, Path(sys.argv[1]))
    print(table(rows))
    if "--write" in sys.argv:
        section = sys.argv[sys.argv.index("--write") + 1]
        write_section(table(rows), f"<!-- {section} -->", f"<!-- end of {section} -->")


if __name__ == "__main__":
    main()
