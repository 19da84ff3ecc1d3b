"""Accuracy of the clinic's predictions: a grid of small runs, examined and then trained.

    python -m bench.clinic_grid [first|second] [--out grid.json] [--show grid.json]

Every configuration (arrangement × depth × rate × warm-up) is examined with its plan; the prediction
is whether the rehearsal learns. Then it is trained on a language of 32 tokens: with probability 0.9
the next token is a fixed permutation of the last one. It has trained if its loss is closer to the
entropy of the language than to that of a uniform answer. The rehearsal uses other text of the same
language, a new batch for every step. Its thresholds were chosen on the first grid; the second has
other rates, depths, arrangements, weights and text. About ten minutes each, on one core.
"""

import argparse
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm import ModelConfig, build
from addnorm.clinic import ClinicBatch, TrainingPlan
from addnorm.clinic.call_model import choose_objective, unchanged
from addnorm.clinic.rehearsal import REHEARSAL_STEPS, rehearse_once

VOCAB, LENGTH, ROWS, STEPS, SUCCESSOR_PROBABILITY = 32, 16, 16, 150, 0.9
P, Q = SUCCESSOR_PROBABILITY, 1 - SUCCESSOR_PROBABILITY
ENTROPY = -P * math.log(P + Q / VOCAB) - Q * math.log(Q / VOCAB)
"""Approximate entropy of the language for each token."""


@dataclass(frozen=True)
class Grid:
    """The values to combine, and the seeds of weights, training text and examined text."""

    arrangements: tuple[str, ...]
    depths: tuple[int, ...]
    rates: tuple[float, ...]
    warmups: tuple[int, ...]
    weights: int
    data: int
    examined: int


GRIDS = {
    "first": Grid(
        ("post", "pre", "admin"),
        (2, 6, 18),
        (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
        (0, 75),
        weights=1,
        data=3,
        examined=99,
    ),
    "second": Grid(
        ("post", "pre", "admin", "b2t", "res-post"),
        (4, 12),
        (5e-4, 2e-3, 7e-3, 2e-2),
        (0, 50),
        weights=21,
        data=23,
        examined=299,
    ),
}


def text(generator: torch.Generator) -> Tensor:
    """Return sequences of the language."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
    for t in range(LENGTH):
        follows = torch.rand(ROWS, generator=generator) < SUCCESSOR_PROBABILITY
        ids[:, t + 1] = torch.where(follows, order[ids[:, t]], ids[:, t + 1])
    return ids


def make(addnorm: str, depth: int, seed: int) -> Any:
    torch.manual_seed(seed)
    options = {"growth": "log"} if addnorm == "admin" else {}
    return build(
        ModelConfig(
            mode="decoder",
            vocab=VOCAB,
            width=32,
            depth=depth,
            heads=4,
            addnorm=addnorm,
            addnorm_options=options,
            dropout=0.0,
            length=LENGTH,
        )
    )


def train(model: Any, lr: float, warmup: int, seed: int) -> float:
    """Train a model and return the mean loss of the last 20 steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-9, fused=True)
    losses = []
    for step in range(1, STEPS + 1):
        ids = text(generator)
        optimizer.param_groups[0]["lr"] = lr * min(1.0, step / max(warmup, 1))
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-20:]) / 20


def examine_and_train(
    grid: Grid, addnorm: str, depth: int, lr: float, warmup: int
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(grid.examined)
    batches = [ClinicBatch(text(generator)[:, :-1]) for _ in range(1 + REHEARSAL_STEPS)]
    model = make(addnorm, depth, grid.weights)
    with unchanged(model):  # as `examine` does, but only what the prediction needs
        objective = choose_objective(model, batches[0], None)
        rehearsal = rehearse_once(model, batches, objective, TrainingPlan(lr=lr, warmup=warmup))
    loss = train(make(addnorm, depth, grid.weights), lr, warmup, grid.data)
    trained = loss < (ENTROPY + math.log(VOCAB)) / 2
    return {
        "addnorm": addnorm,
        "depth": depth,
        "lr": lr,
        "warmup": warmup,
        "predicted": rehearsal.learns,
        "steps": len(rehearsal.losses),
        "trained": trained,
        "loss": round(loss, 3) if math.isfinite(loss) else None,
        "position_variance": [round(each, 4) for each in rehearsal.position_variance],
        "rehearsed": [round(rehearsal.before, 3), round(rehearsal.after, 3)],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the losses as Markdown: – if it did not train, ✗ if the prediction was wrong."""
    columns = list(dict.fromkeys((r["lr"], r["warmup"]) for r in rows))
    lines: dict[str, list[str]] = {}
    for r in rows:
        loss = "NaN" if r["loss"] is None else f"{r['loss']:.2f}"
        marks = ("" if r["trained"] else " –") + ("" if r["predicted"] == r["trained"] else " ✗")
        lines.setdefault(f"{r['addnorm']}, {r['depth']}", []).append(loss + marks)
    head = "| | " + " | ".join(f"{lr:g}, {warmup}" for lr, warmup in columns) + " |"
    body = [f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items()]
    correct = sum(r["predicted"] == r["trained"] for r in rows)
    trained = sum(r["trained"] for r in rows)
    last = f"\n{correct} of {len(rows)} correct; {trained} trained"
    return "\n".join([head, "|---" * (len(columns) + 1) + "|", *body, last])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", nargs="?", default="second", choices=GRIDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--show", type=Path, help="print the table of a file that --out wrote, and exit"
    )
    args = parser.parse_args()
    if args.show is not None:
        print(table(json.loads(args.show.read_text())))
        return
    torch.set_num_threads(1)
    rows = []
    grid = GRIDS[args.grid]
    for each in itertools.product(grid.arrangements, grid.depths, grid.rates, grid.warmups):
        rows.append(examine_and_train(grid, *each))
        correct = sum(row["predicted"] == row["trained"] for row in rows)
        print(f"{correct} of {len(rows)} correct; last {rows[-1]}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(rows, indent=0))
    print(table(rows))


if __name__ == "__main__":
    main()
