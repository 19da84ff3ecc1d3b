"""Training a model for tables: what the loop is given, when it stops, and what is kept.

    classes    loss = mean over members of the cross-entropy
    number     loss = mean over members of (y − ŷ)², y standardised on the training rows

The losses of the members are averaged, not their answers (Gorishniy et al. 2024, 2410.24210, §3).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.data.table.encode import MISSING, OTHER, EncodedTable
from addnorm.data.table.frame import Array
from addnorm.models.tabular import TabularModel
from addnorm.training.loop import Loop, LoopSettings, LoopTask, Observer, TrainingState
from addnorm.training.optimizer import OPTIMIZERS
from addnorm.training.schedule import make_schedule


@dataclass(frozen=True)
class Rows:
    """EncodedTable rows with their targets and weights."""

    table: EncodedTable
    target: Tensor
    """(rows,): a class's place as int64, or a standardised number."""
    weight: Tensor
    """(rows,): 1 on average."""

    def __len__(self) -> int:
        return len(self.target)


@dataclass(frozen=True)
class SplitRows:
    """Rows to train on and rows held out."""

    rows: Rows
    valid: Rows | None
    target: Array
    """Targets of the training rows as given: places of classes, or numbers."""
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train, once what was left to chance or to us has been decided."""

    batch: int
    epochs: int
    rate: float
    weight_decay: float = 1e-5
    schedule: str = "constant"
    warmup: float = 0.0
    """Share of the steps that warm up."""
    patience: int = 16
    drop_cells: float = 0.0
    swap_cells: float = 0.0
    ema: float = 0.0
    minutes: float | None = None
    seed: int = 0
    metric: str = "loss"
    """What decides which weights are best: loss, or accuracy of classes."""
    clip: float = 1.0


class TableTraining:
    """What the loop asks of a table: batches, losses, figures on held-out rows."""

    def __init__(self, train: Rows, valid: Rows | None, plan: Plan, classes: int) -> None:
        self.train, self.valid, self.settings, self.classes = train, valid, plan, classes
        self.metric = plan.metric if classes else "loss"
        self.higher_is_better = self.metric == "accuracy"

    def plan(self, epoch: int) -> Sequence[Tensor]:
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train), generator=generator)
        return torch.split(order, self.settings.batch)

    def batch(self, part: Tensor) -> dict[str, Tensor]:
        some = swap_cells(self.train.table.take(part), self.settings.swap_cells)
        numbers, codes = drop_cells(some, self.settings.drop_cells)
        target, weight = self.train.target[part], self.train.weight[part]
        return {"numbers": numbers, "codes": codes, "target": target, "weight": weight}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return len(batch["target"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor], total: int) -> Tensor:
        answers = model(batch["numbers"], batch["codes"])
        each = losses(answers, batch["target"], self.classes)
        return (each * batch["weight"]).sum() / total

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, TabularModel)
        if self.valid is None:
            return {"loss": 0.0}  # nothing to look at: the last weights are as good as any
        answers = answer(model, self.valid.table, self.settings.batch).mean(dim=1, keepdim=True)
        each = losses(answers, self.valid.target, self.classes)
        weight = self.valid.weight
        found = {"loss": float((each * weight).sum() / weight.sum())}
        if self.classes:
            right = (pick(answers[:, 0]) == self.valid.target).float()
            found["accuracy"] = float((right * weight).sum() / weight.sum())
        return found


def losses(answers: Tensor, target: Tensor, classes: int) -> Tensor:
    """The loss of each row, the mean over its members; answers are (rows, members, outputs)."""
    members = answers.shape[1]
    if classes > 2:
        repeated = target[:, None].expand(-1, members)
        return F.cross_entropy(answers.transpose(1, 2), repeated, reduction="none").mean(dim=1)
    wanted = target.to(answers.dtype)[:, None].expand(-1, members)
    if classes:
        each = F.binary_cross_entropy_with_logits(answers[..., 0], wanted, reduction="none")
    else:
        each = (answers[..., 0] - wanted).square()
    return each.mean(dim=1)


def pick(answers: Tensor) -> Tensor:
    """The likeliest class of each row, from (rows, outputs)."""
    return (answers[:, 0] > 0).long() if answers.shape[1] == 1 else answers.argmax(dim=1)


def drop_cells(table: EncodedTable, share: float) -> tuple[Tensor, Tensor]:
    """Some cells as if missing (or, of categories, as if never seen), drawn anew for each batch.

    What missing and unseen values mean is thereby learnt in every column, also where training rows
    have none.
    """
    numbers, codes = table.numbers, table.codes
    if share <= 0:
        return numbers, codes
    numbers = numbers.masked_fill(torch.rand(numbers.shape) < share, float("nan"))
    draw = torch.rand(codes.shape)
    codes = codes.masked_fill(draw < share, MISSING).masked_fill(draw < share / 4, OTHER)
    return numbers, codes


def swap_cells(table: EncodedTable, share: float) -> EncodedTable:
    """Some cells with another row's value, drawn anew: a model that meets errors leans less on one.

    Vincent et al. 2008, "Extracting and composing robust features with denoising autoencoders", §2,
    with noise that keeps each column's distribution.
    """
    if share <= 0:
        return table
    numbers, codes = (torch.rand(part.shape) < share for part in (table.numbers, table.codes))
    return swap(table, numbers, codes, torch.randperm(len(table)))


def swap(table: EncodedTable, numbers: Tensor, codes: Tensor, order: Tensor) -> EncodedTable:
    """The table with the marked numbers and codes taken from the rows that `order` names."""
    other = table.take(order)
    return EncodedTable(
        torch.where(numbers, other.numbers, table.numbers),
        torch.where(codes, other.codes, table.codes),
    )


ALIKE = 32
"""Rows are answered in multiples of this: a matrix product of fewer rows rounds otherwise."""


@torch.inference_mode()
def answer(model: TabularModel, table: EncodedTable, batch: int) -> Tensor:
    """The model's answers to rows, (rows, members, outputs), in evaluation mode.

    A row's answer does not depend on the rows it comes with, unless the model itself looks along
    rows: not even in its last digit, but for networks narrower than 16.
    """
    model.eval()
    rows, config, device = len(table), model.config, next(model.parameters()).device
    if not rows:
        return torch.empty(0, config.members, config.outputs)
    parts = []
    for start in range(0, rows, batch):
        stop = min(start + batch, rows)
        more = 0 if model.along_rows else -(stop - start) % ALIKE
        some = [*range(start, stop), *[stop - 1] * more] if more else slice(start, stop)
        numbers, codes = table.numbers[some].to(device), table.codes[some].to(device)
        parts.append(model(numbers, codes)[: stop - start].cpu())
    return torch.cat(parts)


class Watch(Observer):
    """Keeps what is said, and says how it goes if asked."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.notes: list[str] = []

    def on_evaluate(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        if self.verbose and figures["loss"]:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
            at = loop.state
            mark = " *" if better else ""
            print(f"epoch {at.epoch + 1:>3}  step {at.step:>6}  {shown}{mark}", file=sys.stderr)

    def on_message(self, loop: Loop, text: str) -> None:
        self.notes.append(text)
        if self.verbose:
            print(text, file=sys.stderr)


@dataclass(frozen=True)
class Fitted:
    """What training left: where it got to, and what was said."""

    progress: TrainingState
    notes: list[str]
    stopped: bool
    """Whether it was asked to stop before the end."""


def train(
    model: TabularModel,
    rows: Rows,
    valid: Rows | None,
    plan: Plan,
    classes: int,
    *,
    verbose: bool = False,
) -> Fitted:
    """Train a model in place; with held-out rows it ends with the weights that did best on them."""
    task = TableTraining(rows, valid, plan, classes)
    watch = Watch(verbose)
    groups = model.parameter_groups(plan.weight_decay)
    progress, stopped = run(model, groups, task, plan, len(rows), valid is not None, watch)
    return Fitted(progress, watch.notes, stopped)


def run(
    model: nn.Module,
    groups: list[dict[str, Any]],
    task: LoopTask,
    plan: Plan,
    rows: int,
    held_out: bool,
    watch: Watch,
) -> tuple[TrainingState, bool]:
    """Run the loop over a task; returns where it got to, and whether it was asked to stop."""
    per_epoch = -(-rows // plan.batch)
    steps = per_epoch * plan.epochs
    warmup = round(plan.warmup * steps)
    optimizer = OPTIMIZERS["adamw"](model, groups, plan.rate, (0.9, 0.999), 1e-8)
    for group in optimizer.param_groups:
        group["peak"] = plan.rate
    best: dict[str, Tensor] = {}

    def keep(found: nn.Module) -> None:
        best.update({name: tensor.clone() for name, tensor in found.state_dict().items()})

    settings = LoopSettings(
        steps=steps,
        schedule=make_schedule(plan.schedule, warmup=warmup, steps=steps),
        clip=plan.clip,
        evaluate_every=per_epoch if held_out else 0,
        patience=plan.patience,
        ema=plan.ema,
        max_seconds=60 * (plan.minutes or 0.0),
    )
    loop = Loop(model, task, optimizer, settings, observers=[watch], on_best=keep)
    progress = loop.run()
    if loop.stop_requested and at_hand(progress):
        loop.evaluate()
    if best:
        model.load_state_dict(best)
    model.eval()
    return progress, loop.stop_requested


def at_hand(progress: TrainingState) -> bool:
    """Whether there are weights newer than those last looked at."""
    return not progress.history or progress.history[-1]["step"] != progress.step
