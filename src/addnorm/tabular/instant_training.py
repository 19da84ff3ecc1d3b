"""Training of the instant model on tables drawn from the prior: resumable, and measured as it goes.

    python -m addnorm.tabular.instant_training DIR --steps 20000              train, or resume
    python -m addnorm.tabular.instant_training DIR --anneal 3000 --out DIR2   decay the rate; export

The learning rate is constant after warm-up, so that training can be continued at any time. To use a
checkpoint, it is annealed: a copy is trained for some more steps with a rate that falls linearly to
0 (Hu et al. 2024, 2404.06395, §4). The original is left as it was, and annealing can be resumed,
too. With a budget that is known, `--schedule cosine` lets the rate fall over all of the steps, or
over the time if `--minutes` is given. Several processes: torchrun.

The curriculum is a function of the step: easy tables first, the whole prior mixed in linearly over
the first `curriculum` steps; small tables first, larger ones between `growth_start` and
`growth_end`. All tables of a step have one shape. `curve.jsonl` holds the losses on fixed
validation tables from the whole prior, which no step trains on, and `weights` the averaged weights
at each of its points; no real table is looked at.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor, nn

from addnorm.config import ModelConfig
from addnorm.cpu import keep_memory
from addnorm.errors import ConfigError
from addnorm.files import INSTANT_MODEL, make_directory, to_json, write_whole
from addnorm.metrics import auc
from addnorm.models.instant import (
    InstantConfig,
    InstantModel,
    standardise_target,
    write_instant,
)
from addnorm.models.saved import read_tensors
from addnorm.tabular.prior import MAX_CLASSES, Draw, Tables, sample_tables
from addnorm.training import parallel
from addnorm.training.loop import Batch, Loop, LoopSettings, Observer, Step
from addnorm.training.optimizer import make_optimizer
from addnorm.training.schedule import make_schedule

VALIDATION = (
    # known rows, unknown rows, columns, classes, tables
    (100, 60, 6, 2, 64),
    (100, 60, 16, 2, 32),
    (300, 60, 10, 2, 24),
    (100, 60, 8, 4, 32),
    (100, 60, 16, 8, 24),
    (150, 60, 40, 10, 12),
    (100, 60, 8, 0, 40),
    (300, 60, 12, 0, 16),
)
"""Shapes of the validation tables."""


@dataclass(frozen=True, kw_only=True)
class InstantSettings:
    """What decides the tables and the steps of a training run."""

    width: int = 64
    depth: int = 4
    heads: int = 2
    identity: int = 16
    solvers: int = 1
    addnorm: str = "pre"
    ffn: str = "relu"
    optimizer: str = "muon"
    rate: float = 3.5e-4
    schedule: str = "constant"
    warmup: int = 100
    cells: int = 8_000
    """Cells of a step, about."""
    curriculum: int = 1_000
    """Steps over which the whole prior is mixed in."""
    growth_start: int = 1_000
    growth_end: int = 3_000
    """Steps between which tables grow: small ones are cheap, and teach most of what there is."""
    small_rows: int = 130
    small_columns: int = 8
    """Most rows and columns of a table before."""
    rows: int = 1_000
    columns: int = 60
    """Most rows and columns of a table after."""
    ema: float = 0.995
    seed: int = 1


def make_model(settings: InstantSettings) -> InstantModel:
    """Return the network of a training run, with new weights."""
    torch.manual_seed(settings.seed)
    trunk = ModelConfig(
        mode="encoder",
        input="vectors",
        width=settings.width,
        depth=settings.depth,
        heads=settings.heads,
        ffn=settings.ffn,
        ffn_width=2 * settings.width,
        positions="none",
        addnorm=settings.addnorm,
        dropout=0.0,
        head="none",
    )
    return InstantModel(
        InstantConfig(trunk=trunk, identity=settings.identity, solvers=bool(settings.solvers))
    )


def draw_shape(draw: Draw, settings: InstantSettings, part: int) -> tuple[int, int, int, int]:
    """Return known rows, unknown rows, columns and classes of one step's tables."""
    s = settings
    size = min(1.0, max(0.0, (part - s.growth_start) / max(s.growth_end - s.growth_start, 1)))
    most_rows = s.small_rows + size * (s.rows - s.small_rows)
    most_columns = s.small_columns + size * (s.columns - s.small_columns)
    # Small tables stay common: the logarithm of the size is uniform.
    rows = round(float(draw.log_uniform(1, low=40, high=most_rows)))
    columns = int(draw.log_uniform(1, low=1.5, high=most_columns + 1))
    unknown = max(10, round(rows * float(draw.uniform(1, low=0.2, high=0.5))))
    kind = draw.pick({"two": 0.38, "more": 0.37, "number": 0.25})
    classes = {"two": 2, "more": draw.one(3, MAX_CLASSES), "number": 0}[kind]
    if part < 0.1 * s.curriculum and classes > 2:
        classes = draw.one(2, 4)
    return rows - unknown, unknown, columns, classes


def to_batch(tables: Tables, known: int) -> Batch:
    """Return the tensors of a step; numbers are standardised on the known rows."""
    target = tables.target
    if not tables.classes:
        target = standardise_target(target, known)[0]
    return {
        "cells": tables.cells,
        "is_category": tables.is_category,
        "known": target[:, :known],
        "target": target[:, known:],
        "classes": torch.tensor(tables.classes),
    }


def batch_loss(model: InstantModel, batch: Batch, total: int) -> Tensor:
    """Return the sum of the cross-entropies of the unknown rows, divided by `total`."""
    return -log_probabilities(model, batch)[1].sum() / total


def log_probabilities(model: InstantModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return those of all outcomes, (tables, unknown, outcomes), and those of the outcomes."""
    unknown, known = model.hidden(batch["cells"], batch["known"], batch["is_category"])
    classes = int(batch["classes"])
    if classes:
        logits = model.class_logits(unknown, known, batch["known"], classes)
        target = batch["target"]
    else:
        logits = model.bin_logits(unknown, known, batch["known"])
        target = model.bins_of(batch["target"])
    logs = logits.log_softmax(dim=-1)
    return logs, logs.gather(-1, target[..., None])[..., 0]


class InstantTraining:
    """What the loop asks for: tables, losses, and figures on validation tables."""

    metric = "loss"
    higher_is_better = False

    def __init__(self, settings: InstantSettings) -> None:
        self.settings = settings
        self.tables_by_step = [0]
        generator = Generator().manual_seed(987_654_321)
        self.validation = []
        for known, unknown, columns, classes, count in VALIDATION:
            tables = sample_tables(
                generator, tables=count, rows=known + unknown, columns=columns, classes=classes
            )
            self.validation.append(to_batch(tables, known))

    def plan(self, epoch: int) -> Sequence[int]:
        return range(epoch * 1000, (epoch + 1) * 1000)

    def batch(self, part: int) -> Batch:
        settings = self.settings
        seed = (settings.seed * 1_000_003 + part) * parallel.world_size() + parallel.rank()
        generator = Generator().manual_seed(seed)
        known, unknown, columns, classes, count = self.shape(part)
        tables = sample_tables(
            generator,
            tables=count,
            rows=known + unknown,
            columns=columns,
            classes=classes,
            difficulty=min(part / settings.curriculum, 1.0),
        )
        return to_batch(tables, known)

    def shape(self, part: int) -> tuple[int, int, int, int, int]:
        """Return known rows, unknown rows, columns, classes and tables of a step."""
        settings = self.settings
        draw = Draw(Generator().manual_seed(settings.seed * 999_983 + part))
        shape = draw_shape(draw, settings, part)
        known, unknown, columns, _ = shape
        return *shape, max(2, round(settings.cells / ((known + unknown) * (columns + 1))))

    def count_tables(self, steps: int) -> int:
        """Return how many tables one worker has trained on after some steps."""
        while len(self.tables_by_step) <= steps:
            self.tables_by_step.append(
                self.tables_by_step[-1] + self.shape(len(self.tables_by_step) - 1)[-1]
            )
        return self.tables_by_step[steps] * parallel.world_size()

    def tokens(self, batch: Batch) -> int:
        return batch["target"].numel()

    def loss(self, model: nn.Module, batch: Batch, total: int) -> Tensor:
        assert isinstance(model, InstantModel)
        loss = batch_loss(model, batch, total)
        if parallel.world_size() == 1:
            return loss
        # With several workers every parameter must take part in every step.
        return loss + 0.0 * torch.stack([p.sum() for p in model.parameters()]).sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return losses on validation tables; `loss` is their mean, relative to uniform guesses."""
        assert isinstance(model, InstantModel)
        figures, relative = {}, []
        device = next(model.parameters()).device
        for (known, _, columns, classes, _), batch in zip(VALIDATION, self.validation, strict=True):
            batch = {key: tensor.to(device) for key, tensor in batch.items()}
            logs, target_logs = log_probabilities(model, batch)
            loss = -float(target_logs.mean())
            name = f"{known}x{columns}/{classes}"
            figures[name] = loss
            relative.append(loss / math.log(classes or model.config.bins))
            if classes == 2:
                probability = logs[..., 1].exp()
                each = [
                    auc(p.numpy(), y.numpy())
                    for p, y in zip(probability.cpu(), batch["target"].cpu(), strict=True)
                    if 0 < int(y.sum()) < len(y)
                ]
                figures[f"auc {name}"] = float(np.mean(each))
        return {"loss": float(np.mean(relative)), **figures}


class CurveLogger(Observer):
    """Appends to curve.jsonl and prints how training goes."""

    def __init__(self, path: Path, task: InstantTraining, every: int = 50) -> None:
        self.path, self.task, self.every, self.losses = path, task, every, list[float]()

    def on_step(self, loop: Loop, step: Step) -> None:
        self.losses.append(step.loss)
        if step.number % self.every == 0 and parallel.rank() == 0:
            state = loop.state
            print(
                f"step {step.number}  loss {np.mean(self.losses):.4f}  norm {step.norm:.2f}  "
                f"rate {step.rate:.5f}  {state.training_seconds / state.step:.3f} s/step",
                flush=True,
            )
            self.losses.clear()

    def on_evaluate(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        state = loop.state
        row = {
            "step": state.step,
            "tables": self.task.count_tables(state.step),
            "seconds": round(state.training_seconds, 1),
            **{name: round(value, 5) for name, value in figures.items()},
        }
        if parallel.rank() == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(to_json(row, indent=None) + "\n")
            print(to_json(row, indent=None), flush=True)
            folder = self.path.parent / "weights"
            make_directory(folder)
            export_weights(loop, folder / f"step-{state.step:06d}.safetensors")

    def on_message(self, loop: Loop, text: str) -> None:
        print(text, flush=True)


def make_loop(
    settings: InstantSettings,
    directory: Path,
    *,
    steps: int,
    seconds: float = 0.0,
    anneal: int = 0,
    evaluate_every: int = 400,
    start: Path | None = None,
    weights: Path | None = None,
    device: str | torch.device = "cpu",
) -> Loop:
    """Return a loop that continues the newest checkpoint in `directory`, if there is one.

    Parameters
    ----------
    settings
        What decides tables and steps.
    directory
        Where checkpoints and the curve are written.
    steps, seconds
        Steps in total, and a limit on the time of all of them; 0 for none.
    anneal
        Steps over which the rate falls to 0, from the checkpoint of `start` on; 0 not to anneal.
    evaluate_every
        Steps between evaluations on validation tables.
    start
        A directory whose newest checkpoint is annealed. Where `directory` has a checkpoint already,
        that is continued, and `anneal` must be as it was.
    weights
        A file of weights to begin with, instead of random ones; parts of the model that it does not
        have stay as they are drawn.
    device
        Where to train.
    """
    device = torch.device(device)
    model, task = make_model(settings).to(device), InstantTraining(settings)
    if weights is not None:
        load_weights(model, weights)
    optimizer = make_optimizer(
        model, settings.optimizer, lr=settings.rate, betas=(0.9, 0.98), eps=1e-9
    )
    make_directory(directory)
    schedule = make_schedule(settings.schedule, warmup=settings.warmup, steps=steps)
    options = LoopSettings(
        steps=steps,
        schedule=schedule,
        clip=1.0,
        evaluate_every=evaluate_every,
        save_every=evaluate_every,
        ema=settings.ema,
        max_seconds=seconds,
        refit=seconds > 0 and settings.schedule != "constant",
        fixed_evaluations=True,
    )
    curve = CurveLogger(directory / "curve.jsonl", task)
    loop = Loop(
        model,
        task,
        optimizer,
        options,
        run_directory=directory,
        observers=[curve],
        forward=parallel.distribute(model, "ddp"),
    )
    plan = directory / "anneal.json"
    if start is not None and not plan.exists():
        loop.run_directory = start
    loop.resume()
    loop.run_directory = directory
    loop.state.finished = False
    if anneal:
        factor = loop.rate_factor(loop.state.step) if loop.state.step else 1.0
        began, factor = _annealed_from(plan, loop.state.step, anneal, factor)
        loop.state.segments.clear()  # a time limit of the run before
        loop.settings = replace(
            options,
            steps=began + anneal,
            schedule=lambda step: factor * max(0.0, 1 - (step - began) / anneal),
            max_seconds=0.0,
            refit=False,
        )
    return loop


def load_weights(model: InstantModel, path: Path) -> None:
    """Copy the weights of a file into a model that has them all, and perhaps others besides."""
    tensors, _ = read_tensors(path, *INSTANT_MODEL)
    own = model.state_dict()
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            raise ConfigError(
                f"the model has no weights {name!r} of shape {tuple(tensor.shape)}, but "
                f"{str(path)!r} has. Give the sizes that it was trained with."
            )
    model.load_state_dict(tensors, strict=False)


def _annealed_from(plan: Path, step: int, anneal: int, factor: float) -> tuple[int, float]:
    """Return the step at which annealing began, and the factor on the rate then.

    They are those given, or those of the plan of an earlier start.
    """
    if not plan.exists():
        facts = {"began": step, "steps": anneal, "factor": factor}
        write_whole(plan, to_json(facts).encode())
        return step, factor
    content = json.loads(plan.read_text(encoding="utf-8"))
    if content["steps"] != anneal:
        raise ConfigError(
            f"{str(plan.parent)!r} was begun with --anneal {content['steps']}: got {anneal}. "
            "Give the same number, or another --out."
        )
    return int(content["began"]), float(content["factor"])


def export_weights(loop: Loop, path: Path) -> None:
    """Write the averaged weights of a loop as the package stores them."""
    assert isinstance(loop.model, InstantModel)
    averages = {name.removeprefix("ema."): tensor for name, tensor in loop.averages.items()}
    write_instant(loop.model, averages or loop.model.state_dict(), path)


def train_instant(arguments: Sequence[str] | None = None) -> None:
    """Train or anneal, from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time in all")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after these steps")
    parser.add_argument("--anneal", type=int, default=0, help="decay the rate over these steps")
    parser.add_argument("--out", type=Path, help="where to anneal; DIRECTORY/annealed if left out")
    parser.add_argument("--weights", type=Path, help="begin with these weights, not random ones")
    parser.add_argument("--evaluate-every", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    for field in fields(InstantSettings):
        kind = type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    keep_memory()
    settings = InstantSettings(
        **{field.name: getattr(args, field.name) for field in fields(InstantSettings)}
    )
    directory: Path = args.directory
    if args.anneal:
        directory = args.out or args.directory / "annealed"
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", (parallel.torchrun_ranks() or (0, 0, 1))[1])
    parallel.init_process_group(device)
    loop = make_loop(
        settings,
        directory,
        steps=args.steps,
        seconds=60 * args.minutes,
        anneal=args.anneal,
        evaluate_every=args.evaluate_every,
        start=args.directory if args.anneal else None,
        weights=args.weights,
        device=device,
    )
    loop.run()
    if parallel.rank() == 0:
        export_weights(loop, directory / "instant.safetensors")
    parallel.destroy_process_group()


if __name__ == "__main__":
    train_instant()
