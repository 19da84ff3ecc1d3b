"""The sick models with the tools that people have today: who finds what.

    python -m bench.clinic_other_tools FILE.jsonl [--write]
        [--path DIR]   a directory with cockpit or torchinstruments, installed by pip --target

Three steps of SGD (rate 0.01) in training mode with each sick model of the first set, the one of
each kind of the third that is written by hand, and the healthy ones that are. None of the tools
gives a verdict, so a tool *shows* something if a number that it records is NaN or infinite, or is
exactly zero where a trained weight's gradient or a layer's output is recorded; torch's anomaly mode
*stops*. What it shows for healthy models is the measure of what that is worth. An interrupted run
is resumed.

    anomaly           torch.autograd.set_detect_anomaly
    cockpit           cockpit-for-pytorch: Loss, GradNorm (others need BackPACK's own layers)
    torchinstruments  statistics of the outputs and gradients of every module
"""

import json
import math
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import as_batch, call_model, choose_objective
from bench.clinic_foreign import write_section
from bench.clinic_sick import all_cases
from bench.clinic_unseen import third_set
from bench.clinic_unseen_bases import HAND

STEPS, RATE = 3, 0.01
SHOWS, NOTHING = "shows", "–"
Make = Callable[[], Any]


def all_models() -> Iterator[tuple[str, str, str, Make]]:
    """Yield the set, the sickness (or "healthy"), the style, and what makes the model."""
    for _, sickness in all_cases():
        for style, make in sickness.styles.items():
            yield "first", sickness.name, style, make
    models = third_set()
    seen = set()
    for family in models.families:
        for sickness_name, style, make_case in family():
            if style == HAND and sickness_name not in seen:
                seen.add(sickness_name)
                yield "third", sickness_name, style, make_case
    for name, healthy in models.healthy.items():
        if healthy.make.__module__ == "bench.clinic_healthy_third" and "compiled" not in name:
            yield "third", "healthy", name, healthy.make


Step = Callable[[int, nn.Module, Tensor, torch.optim.Optimizer], None]


def train(made: Any, step: Step) -> None:
    """Train for a few steps; `step` runs the backward pass."""
    model, batch = made.model.train(), as_batch(made.batch)
    objective = choose_objective(model, batch, made.loss)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained or [nn.Parameter(torch.zeros(1))], lr=RATE)
    for number in range(STEPS):
        loss = objective.value(call_model(model, batch), batch)
        step(number, model, loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def is_odd(value: Any) -> bool:
    """Return whether a recorded number is NaN, infinite or exactly zero."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(n, float) and (not math.isfinite(n) or n == 0.0) for n in numbers)


# ── The tools ─────────────────────────────────────────────────────────────────────────────────────


def anomaly(made: Any) -> str:
    def step(_: int, __: nn.Module, loss: Tensor, ___: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    with torch.autograd.set_detect_anomaly(True):
        try:
            train(made, step)
        except RuntimeError:
            return "stops"
    return NOTHING


def cockpit(made: Any) -> str:
    from cockpit import Cockpit, quantities

    trained = [p for p in made.model.parameters() if p.requires_grad]
    kinds = (quantities.Loss, quantities.GradNorm)
    watch = Cockpit(trained, [kind(track_schedule=lambda step: True) for kind in kinds])

    def step(number: int, model: nn.Module, loss: Tensor, optimizer: Any) -> None:
        rows = as_batch(made.batch).row_count
        info = {
            "batch_size": rows,
            "individual_losses": loss.detach().repeat(rows),
            "loss": loss,
            "optimizer": optimizer,
        }
        with watch(number, info=info):
            loss.backward(create_graph=watch.create_graph(number))  # type: ignore[no-untyped-call]

    train(made, step)
    outputs = [quantity.get_output() for quantity in watch.quantities]
    return SHOWS if any(is_odd(v) for out in outputs for v in out.values()) else NOTHING


def torchinstruments(made: Any) -> str:
    import torchinstruments as tool

    def step(_: int, __: nn.Module, loss: Tensor, ___: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    with tempfile.TemporaryDirectory() as folder:
        tool.inject_observer(made.model, output_dir=folder, sampler=tool.AlwaysSampler())
        try:
            train(made, step)
        finally:
            tool.remove_observer(made.model)
        layers = json.loads(next(Path(folder).rglob("result.json")).read_text())
    for layer in layers:
        for tensor in layer["tensors"]:
            numbers = tensor["statistics"]
            low, high = (numbers.get(name, {}).get("mean") for name in ("min", "max"))
            broken = numbers.get("nonfinite_fraction", {}).get("max")
            if broken or (low == 0.0 and high == 0.0):
                return SHOWS
    return NOTHING


TOOLS: dict[str, Callable[[Any], str]] = {
    "anomaly": anomaly,
    "cockpit": cockpit,
    "torchinstruments": torchinstruments,
}


def run_tool(name: str, make: Make) -> str:
    torch.manual_seed(0)
    made = make()
    try:
        return TOOLS[name](made)
    except Exception as error:  # what a tool cannot run with is a result
        return f"error: {type(error).__name__}: {str(error).splitlines()[:1]}"[:120]


# ── The table ─────────────────────────────────────────────────────────────────────────────────────


def table(rows: list[dict[str, str]]) -> str:
    fit = [row for row in rows if row["sickness"] == "healthy"]
    sick = [row for row in rows if row["sickness"] != "healthy"]
    lines = [
        f"| of {len(sick)} sick and {len(fit)} healthy models | " + " | ".join(TOOLS) + " |",
        "|---|" + "---|" * len(TOOLS),
    ]
    for label, part in (("sick models with a sign", sick), ("healthy models with a sign", fit)):
        cells = [str(sum(row[t] in (SHOWS, "stops") for row in part)) for t in TOOLS]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    cells = [str(sum(row[t].startswith("error") for row in rows)) for t in TOOLS]
    lines.append(f"| models that it does not run with | {' | '.join(cells)} |")
    lines += ["", "| sickness | models | " + " | ".join(TOOLS) + " |", "|---|---|---|---|---|"]
    kinds: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in sick:
        kinds[row["sickness"]].append(row)
    for name, part in kinds.items():
        cells = [str(sum(row[t] in (SHOWS, "stops") for row in part) or NOTHING) for t in TOOLS]
        lines.append(f"| {name} | {len(part)} | {' | '.join(cells)} |")
    errors = {row[t] for row in rows for t in TOOLS if row[t].startswith("error")}
    if errors:
        lines += ["", "Errors: " + "; ".join(sorted(errors)[:6]) + "."]
    return "\n".join(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path += [sys.argv[i + 1] for i, each in enumerate(sys.argv) if each == "--path"]
    path = Path(sys.argv[1])
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    for number, (which, sickness, style, make) in enumerate(all_models()):
        if number < len(rows):
            continue
        row = {"set": which, "sickness": sickness, "style": style}
        row |= {tool: run_tool(tool, make) for tool in TOOLS}
        rows.append(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(table(rows))
    if "--write" in sys.argv:
        write_section(table(rows), "<!-- other tools -->", "<!-- end of other tools -->")


if __name__ == "__main__":
    main()
