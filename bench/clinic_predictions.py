"""Accuracy of the clinic's predictions on real tasks: hundreds of configurations, trained in full.

    python -m bench.clinic_predictions run FOLDER --out predictions [--count 220] [--steps 640]
    python -m bench.clinic_predictions advise FOLDER --out predictions [--minutes 9]
    python -m bench.clinic_predictions report --out predictions [--half 1]

`run` trains every configuration of bench/prediction_set.py as planned, which is the truth, and
rehearses it with other weights and batches, which is all that a prediction sees; both are written
as one JSON line each, with every curve, so that an interrupted benchmark is resumed and a rule can
be changed without training again. `advise` needs no earlier run: it rehearses the configurations of
one half as an examination does, and where the clinic lists remedies (another rate, a warm-up, for
models of addnorm another arrangement), it trains the plan and each remedy with two seeds; every
plan is trained once, so that `report` has the verdicts, too. `report` applies the present rules and
prints the tables as Markdown; half 0 is for choosing the rules, half 1 for reporting.

A configuration *trains* if its held-out loss ends below that of the best constant answer by at
least a fifth of the gain of the best configuration of its task. FOLDER holds tinyshakespeare.txt,
text/plato_republic.txt.gz, tatoeba/eng-fra_24k.tsv.gz, trec/train.txt.gz and
tabular/california_housing.csv.gz. About half an hour of one idle core.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from addnorm.clinic import ClinicBatch, TrainingPlan
from addnorm.clinic.call_model import Objective, unchanged
from addnorm.clinic.prediction import (
    CANNOT_TELL,
    WILL_NOT_TRAIN,
    WILL_TRAIN,
    Rehearsal,
    is_better,
    predict_outcome,
)
from addnorm.clinic.rehearsal import (
    REHEARSAL_BATCHES,
    other_plans,
    rehearse,
    rehearse_alternatives,
    rehearse_plan,
)
from bench.prediction_set import (
    Configuration,
    RealTask,
    draw_configurations,
    half_of,
    key_of,
    load_tasks,
    make_model,
)

HELD_OUT_BATCHES, HELD_OUT_ROWS = 2, 64
EVALUATIONS = 4
SHARE = 0.2
"""Share of the best gain from which a configuration counts as trained."""
OUTCOMES, REHEARSALS, ADVICE = "outcomes.jsonl", "rehearsals.jsonl", "advice.jsonl"


# ── The truth: training as planned ────────────────────────────────────────────────────────────────


def schedule_factor(config: Configuration, step: int, steps: int) -> float:
    """Return the factor on the peak rate at a step, counted from 1."""
    warmup = config["warmup"]
    if step < warmup:
        return step / warmup
    if config["schedule"] == "cosine":
        share = (step - warmup) / max(1, steps - warmup)
        return (1 + math.cos(math.pi * share)) / 2
    if config["schedule"] == "inverse-sqrt":
        return math.sqrt(max(1, warmup) / step)
    return 1.0


def make_optimizer(config: Configuration, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer with the settings of a configuration."""
    parameters, lr = list(model.parameters()), config["lr"]
    if config["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    kind = torch.optim.AdamW if config["optimizer"] == "adamw" else torch.optim.Adam
    return kind(
        parameters,
        lr=lr,
        betas=(0.9, config["beta2"]),
        weight_decay=config["weight_decay"],
        fused=True,
    )


def batch_of(
    config: Configuration, task: RealTask, generator: torch.Generator, held_out: bool = False
) -> Any:
    """Return a batch; labels of another row if the configuration says so."""
    inputs, targets = task.draw(generator, held_out, HELD_OUT_ROWS if held_out else 0)
    return inputs, targets.roll(1, 0) if config["labels"] == "of another row" else targets


@torch.no_grad()
def held_out_loss(config: Configuration, task: RealTask, model: nn.Module) -> float:
    """Return the mean loss of the same held-out batches, in evaluation mode."""
    generator = torch.Generator().manual_seed(77)
    model.eval()
    losses = []
    for _ in range(HELD_OUT_BATCHES):
        inputs, targets = batch_of(config, task, generator, held_out=True)
        losses.append(float(task.loss(model(*inputs), targets)))
    model.train()
    return sum(losses) / len(losses)


def train(config: Configuration, task: RealTask, seed: int) -> dict[str, Any]:
    """Train as planned; return the loss of every step, held-out losses, and the seconds."""
    start = time.perf_counter()
    model = make_model(config, task, seed).train()
    optimizer = make_optimizer(config, model)
    generator = torch.Generator().manual_seed(seed + 1)
    torch.manual_seed(seed + 2)
    losses: list[float] = []
    held_out = [(0, held_out_loss(config, task, model))]
    for step in range(1, task.steps + 1):
        inputs, targets = batch_of(config, task, generator)
        optimizer.zero_grad()
        loss = task.loss(model(*inputs), targets)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
        torch.autograd.backward(loss)
        if config["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
        for group in optimizer.param_groups:
            group["lr"] = config["lr"] * schedule_factor(config, step, task.steps)
        optimizer.step()
        if step % (task.steps // EVALUATIONS) == 0:
            held_out.append((step, held_out_loss(config, task, model)))
    final = held_out[-1][1] if math.isfinite(losses[-1]) else math.inf
    return {
        "final": final,
        "losses": losses,
        "held_out": held_out,
        "trivial": task.trivial_loss(),
        "seconds": time.perf_counter() - start,
    }


# ── What the prediction sees: a rehearsal with other weights and batches ──────────────────────────


def plan_of(config: Configuration, task: RealTask) -> TrainingPlan:
    """Return the plan of a configuration, as a user would write it for the clinic."""
    return TrainingPlan(
        lr=config["lr"],
        warmup=config["warmup"],
        steps=task.steps,
        schedule=config["schedule"],
        optimizer=config["optimizer"],
        betas=(0.9, config["beta2"]),
        eps=1e-8,
        weight_decay=config["weight_decay"],
        clip=config["clip"],
    )


def prepared(
    config: Configuration, task: RealTask, seed: int
) -> tuple[nn.Module, list[ClinicBatch], Objective, TrainingPlan]:
    """Return what a user would pass to the clinic; other weights and batches than in training."""
    model = make_model(config, task, seed + 5000)
    generator = torch.Generator().manual_seed(seed + 6000)
    batches = [ClinicBatch(*batch_of(config, task, generator)) for _ in range(REHEARSAL_BATCHES)]
    objective = Objective(lambda output, targets: task.loss(output, targets), "the task's loss")
    return model, batches, objective, plan_of(config, task)


def rehearsed(config: Configuration, task: RealTask, seed: int) -> tuple[Rehearsal, float]:
    """Return the rehearsal of the plan, and its seconds."""
    model, batches, objective, plan = prepared(config, task, seed)
    start = time.perf_counter()
    with unchanged(model):
        rehearsal = rehearse(model, batches, objective, plan)
    return rehearsal, time.perf_counter() - start


# ── Files of JSON lines ───────────────────────────────────────────────────────────────────────────


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a file by their key; a line that was cut short is ignored."""
    lines = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        lines[line["key"]] = line
    return lines


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def rehearsal_from_json(fields: dict[str, Any]) -> Rehearsal:
    """Return a rehearsal as it was before `asdict` and JSON."""
    values = {
        name: tuple(map(tuple, value))
        if name == "held_out"
        else tuple(value)
        if isinstance(value, list)
        else value
        for name, value in fields.items()
    }
    return Rehearsal(**values)


def run(
    folder: Path, out: Path, count: int, steps: int | None, half: int | None, minutes: float
) -> None:
    """Train and rehearse every configuration (of one half) that is not in the files yet."""
    out.mkdir(parents=True, exist_ok=True)
    tasks, end = load_tasks(folder), time.time() + 60 * minutes
    if steps is not None:
        tasks = {name: replace(task, steps=steps) for name, task in tasks.items()}
    trained, known = read_lines(out / OUTCOMES), read_lines(out / REHEARSALS)
    for number, config in enumerate(draw_configurations(count)):
        key, task = key_of(config), tasks[config["task"]]
        if half is not None and half_of(config) != half:
            continue
        if time.time() > end:
            break
        if key not in trained:
            append(out / OUTCOMES, {"key": key, "number": number, **train(config, task, number)})
        if key not in known:
            rehearsal, seconds = rehearsed(config, task, number)
            line = {"key": key, "number": number, "seconds": seconds}
            append(out / REHEARSALS, {**line, "rehearsal": asdict(rehearsal)})
            print(f"{number} {rehearsal.losses[0]:.3f} to {rehearsal.final:.3f} {key}", flush=True)


# ── Advice ────────────────────────────────────────────────────────────────────────────────────────


SEEDS = (0, 20_000)
"""Added to a configuration's number for its two trainings."""


def remedies_of(
    config: Configuration, task: RealTask, number: int
) -> tuple[Rehearsal, float, list[str]]:
    """Return the rehearsal of the plan, the seconds of all, and the remedies that it would list."""
    model, batches, objective, plan = prepared(config, task, number)
    start = time.perf_counter()
    with unchanged(model):
        rehearsals = rehearse_plan(model, batches, objective, plan)
        planned = rehearsals.pop("planned")
        if predict_outcome(planned).answer == WILL_NOT_TRAIN:
            others = rehearse_alternatives(model, batches, objective, plan, planned)
            rehearsals |= {name: other.rehearsal for name, other in others.items()}
    names = [name for name, r in rehearsals.items() if is_better(r, planned)]
    return planned, time.perf_counter() - start, names


def with_remedy(config: Configuration, plan: TrainingPlan, name: str) -> Configuration:
    """Return the configuration that follows a remedy."""
    if name.startswith("addnorm="):
        return {**config, "variant": name.removeprefix("addnorm=")}
    other = other_plans(plan)[name]
    return {**config, "lr": other.lr, "warmup": other.warmup}


def rate_from_middle(config: Configuration) -> float:
    """Return how far a rate is from those that usually train, in decades."""
    middle = 0.1 if config["optimizer"] == "sgd" else 2e-3
    return abs(math.log10(config["lr"] / middle))


def advise(
    folder: Path, out: Path, half: int, minutes: float, draw: int = 12, only: bool = False
) -> None:
    """Train the plan and every remedy that the clinic would list, until the time is over.

    The plan's first training and its rehearsal are stored as `run` stores them, so that `report`
    also gives the verdicts of the configurations that were reached. `draw` is the seed of the set.
    With `only`, rates far from the middle come first, and only plans with advice are trained.
    """
    out.mkdir(parents=True, exist_ok=True)
    tasks, done, end = load_tasks(folder), read_lines(out / ADVICE), time.time() + 60 * minutes
    trained, known = read_lines(out / OUTCOMES), read_lines(out / REHEARSALS)
    drawn = list(enumerate(draw_configurations(220, draw)))
    if only:
        drawn.sort(key=lambda each: -rate_from_middle(each[1]))
    for number, config in drawn:
        key, task = key_of(config), tasks[config["task"]]
        if half_of(config) != half or key in done:
            continue
        if time.time() > end:
            break
        if key not in trained and not only:
            trained[key] = {"key": key, "number": number, **train(config, task, number)}
            append(out / OUTCOMES, trained[key])
        rehearsal, seconds, names = remedies_of(config, task, number)
        if key not in known and not only:
            stored = {"key": key, "number": number, "seconds": seconds}
            append(out / REHEARSALS, {**stored, "rehearsal": asdict(rehearsal)})
        answer = predict_outcome(rehearsal).answer
        line: dict[str, Any] = {"key": key, "number": number, "answer": answer, "advised": {}}
        finals = [trained[key]["final"]] if key in trained else []
        if names:
            missing = SEEDS[len(finals) :]
            finals += [train(config, task, number + seed)["final"] for seed in missing]
        for name in names:
            other = with_remedy(config, plan_of(config, task), name)
            remedied = [train(other, task, number + seed)["final"] for seed in SEEDS]
            line["advised"][name] = remedied
        append(out / ADVICE, {**line, "planned": finals})
        print(number, answer, finals, line["advised"], flush=True)


def is_worse(planned: list[float], advised: list[float]) -> bool:
    """Return whether the advice ended above the plan by more than the seeds differ."""
    if not all(map(math.isfinite, advised)):
        return all(map(math.isfinite, planned))
    if not all(map(math.isfinite, planned)):
        return False
    spread = max(max(planned) - min(planned), max(advised) - min(advised))
    return sum(advised) / 2 > sum(planned) / 2 + spread


def report_advice(out: Path, half: int) -> None:
    """Print how often advice was given, and each case in which it was worse than the plan."""
    lines = [x for x in read_lines(out / ADVICE).values() if half_of(json.loads(x["key"])) == half]
    given = [(x, name, v) for x in lines for name, v in x["advised"].items()]
    better = sum(is_worse(values, x["planned"]) for x, _, values in given)
    worse = [each for each in given if is_worse(each[0]["planned"], each[2])]
    advised = sum(bool(x["advised"]) for x in lines)
    failing = sum(x["answer"] == WILL_NOT_TRAIN for x in lines)
    print(
        f"\nadvice: {len(lines)} configurations examined, {failing} predicted to fail, {advised} "
        f"of them with advice, {len(given)} remedies; clearly better {better}, worse {len(worse)}"
    )
    for line, name, values in worse:
        print(f"worse: {name}: {values} against {line['planned']}\n{line['key']}")


# ── The report ────────────────────────────────────────────────────────────────────────────────────


class Row:
    """A configuration with its truth and its prediction."""

    def __init__(self, outcome: dict[str, Any], line: dict[str, Any], best: float) -> None:
        self.key: str = outcome["key"]
        self.number: int = outcome["number"]
        self.config: Configuration = json.loads(self.key)
        self.half = half_of(self.config)
        self.final: float = outcome["final"]
        gain, most = outcome["trivial"] - self.final, outcome["trivial"] - best
        self.share = gain / most if most > 0 else 0.0  # nothing learnt the task: all of it failed
        self.trains = self.share >= SHARE
        self.rehearsal = rehearsal_from_json(line["rehearsal"])
        self.prediction = predict_outcome(self.rehearsal)
        self.answer = self.prediction.answer
        self.seconds = outcome["seconds"], line["seconds"]


def read_rows(out: Path) -> list[Row]:
    """Return every configuration that was trained and rehearsed."""
    outcomes, rehearsals = read_lines(out / OUTCOMES), read_lines(out / REHEARSALS)
    best: dict[str, float] = {}
    for key, outcome in outcomes.items():
        task = json.loads(key)["task"]
        if math.isfinite(outcome["final"]):
            best[task] = min(best.get(task, math.inf), outcome["final"])
    return [
        Row(outcome, rehearsals[key], best[json.loads(key)["task"]])
        for key, outcome in outcomes.items()
        if key in rehearsals
    ]


def matrix(rows: list[Row]) -> Iterator[str]:
    """Yield the confusion matrix of some configurations as Markdown, and its figures."""
    counts = {
        (trains, answer): sum(r.trains == trains and r.answer == answer for r in rows)
        for trains in (True, False)
        for answer in (WILL_TRAIN, WILL_NOT_TRAIN, CANNOT_TELL)
    }
    yield f"| in truth | {WILL_TRAIN} | {WILL_NOT_TRAIN} | {CANNOT_TELL} |"
    yield "|---|---|---|---|"
    for trains, name in ((True, "trains"), (False, "fails")):
        cells = [counts[trains, a] for a in (WILL_TRAIN, WILL_NOT_TRAIN, CANNOT_TELL)]
        yield f"| {name} | {cells[0]} | {cells[1]} | {cells[2]} |"
    found, missed = counts[True, WILL_TRAIN], counts[True, WILL_NOT_TRAIN]
    refused, wrong = counts[False, WILL_NOT_TRAIN], counts[False, WILL_TRAIN]
    sides = [found / max(1, found + missed), refused / max(1, refused + wrong)]
    silent = counts[True, CANNOT_TELL] + counts[False, CANNOT_TELL]
    yield ""
    yield (
        f"{len(rows)} configurations, {sum(not r.trains for r in rows) / len(rows):.0%} fail; "
        f"balanced accuracy {sum(sides) / 2:.1%} among answered ({sides[0]:.1%} of those that "
        f"train, {sides[1]:.1%} of those that fail); no answer {silent / len(rows):.1%}"
    )


def report(out: Path, half: int) -> None:
    """Print the figures of one half, every error, and the advice."""
    rows = [row for row in read_rows(out) if row.half == half]
    report_advice(out, half)
    if not rows:
        return
    print("\n".join(matrix(rows)))
    for name in ("task", "family", "optimizer", "depth"):
        print(f"\nby {name}:")
        for value in sorted({row.config[name] for row in rows}, key=str):
            part = [row for row in rows if row.config[name] == value]
            answered = [row for row in part if row.answer != CANNOT_TELL]
            right = sum((row.answer == WILL_TRAIN) == row.trains for row in answered)
            fail = sum(not row.trains for row in part)
            print(f"- {value}: {right} of {len(answered)} right, {len(part)} in all, {fail} fail")
    trained, examined = (sum(row.seconds[i] for row in rows) for i in (0, 1))
    spared = sum(row.seconds[0] for row in rows if row.answer == WILL_NOT_TRAIN)
    print(
        f"\ntraining {trained:.0f} s, rehearsals {examined:.0f} s, trainings spared {spared:.0f} s"
    )
    for row in sorted(rows, key=lambda row: row.share):
        if row.answer != CANNOT_TELL and (row.answer == WILL_TRAIN) != row.trains:
            print(
                f"\nwrong: share {row.share:.2f}, {row.answer}: {row.prediction.reason}\n{row.key}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "advise", "report"))
    parser.add_argument("folder", type=Path, nargs="?", help="folder of the data")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--count", type=int, default=220)
    parser.add_argument("--half", type=int, choices=(0, 1), help="1, for run both, by default")
    parser.add_argument("--steps", type=int, help="steps of every plan, instead of the task's own")
    parser.add_argument("--advice-only", action="store_true", help="advise: train no other plan")
    parser.add_argument("--draw", type=int, default=12, help="seed of the set, for advise")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "report":
        report(args.out, 1 if args.half is None else args.half)
    elif args.folder is None:
        parser.error(f"{args.what} needs the folder of the data")
    elif args.what == "run":
        run(args.folder, args.out, args.count, args.steps, args.half, args.minutes)
    else:
        half = 1 if args.half is None else args.half
        advise(args.folder, args.out, half, args.minutes, args.draw, args.advice_only)


if __name__ == "__main__":
    main()
