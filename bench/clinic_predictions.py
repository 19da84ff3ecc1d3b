"""Accuracy of the clinic's predictions on real tasks: hundreds of configurations, trained in full.

python -m bench.clinic_predictions train FOLDER --out outcomes.jsonl
"""

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from addnorm.clinic import ClinicBatch, TrainingPlan
from addnorm.clinic.call_model import Objective, unchanged
from addnorm.clinic.prediction import Rehearsal
from addnorm.clinic.rehearsal import HELD_OUT_BATCHES as REHEARSAL_HELD_OUT
from addnorm.clinic.rehearsal import REHEARSAL_STEPS, rehearse
from bench.prediction_set import (
    Configuration,
    RealTask,
    draw_configurations,
    key_of,
    load_tasks,
    make_model,
)

HELD_OUT_BATCHES, HELD_OUT_ROWS = 2, 64
EVALUATIONS = 4


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


def finished(path: Path) -> set[str]:
    """Return the keys of a file's lines; a line that was cut short is ignored."""
    keys = set()
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                keys.add(json.loads(line)["key"])
            except json.JSONDecodeError:
                continue
    return keys


def run_train(folder: Path, out: Path, count: int) -> None:
    tasks, done = load_tasks(folder), finished(out)
    for number, config in enumerate(draw_configurations(count)):
        key = key_of(config)
        if key in done:
            continue
        outcome = train(config, tasks[config["task"]], seed=number)
        with out.open("a") as file:
            file.write(json.dumps({"key": key, "number": number, **outcome}) + "\n")
        print(
            f"{number} {outcome['final']:.3f} of {outcome['trivial']:.3f}, "
            f"{outcome['seconds']:.1f} s {key}",
            flush=True,
        )


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


def rehearsed(
    config: Configuration, task: RealTask, seed: int, steps: int = REHEARSAL_STEPS
) -> tuple[Rehearsal, float]:
    """Rehearse with other weights and batches than those of the training; and the seconds."""
    model = make_model(config, task, seed + 5000)
    generator = torch.Generator().manual_seed(seed + 6000)
    batches = [
        ClinicBatch(*batch_of(config, task, generator))
        for _ in range(REHEARSAL_HELD_OUT + REHEARSAL_STEPS)
    ]
    start = time.perf_counter()
    objective = Objective(lambda output, targets: task.loss(output, targets), "the task's loss")
    plan = plan_of(config, task)
    with unchanged(model):
        rehearsal = rehearse(model, batches, objective, plan, steps=steps)
    return rehearsal, time.perf_counter() - start


def run_rehearse(folder: Path, out: Path, count: int) -> None:
    tasks, done = load_tasks(folder), finished(out)
    for number, config in enumerate(draw_configurations(count)):
        key = key_of(config)
        if key in done:
            continue
        rehearsal, seconds = rehearsed(config, tasks[config["task"]], number)
        line = {"key": key, "number": number, "seconds": seconds, "rehearsal": asdict(rehearsal)}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{number} {rehearsal.held_out[0][1]:.3f} to {rehearsal.held_out[-1][1]:.3f}, "
            f"{seconds:.1f} s {key}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "rehearse"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=220)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = {"train": run_train, "rehearse": run_rehearse}[args.what]
    run(args.folder, args.out, args.count)


if __name__ == "__main__":
    main()
