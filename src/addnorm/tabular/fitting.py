"""Train a model for tables: losses, batches, early stopping and the best weights.

    classes    loss = mean over members of the cross-entropy, with a class or with soft targets
    ordinal    loss = mean over members and thresholds k of −log P([y ≤ k])
    number     loss = mean over members of the cross-entropy of a smoothed label over bins
                      (models/bins.py) + 5 (y − ŷ)², y standardised, ŷ the mean of the bins

The losses of the members are averaged, not their outputs (Gorishniy et al. 2024, 2410.24210, §3).
With K folds, K models are trained side by side, each on the rows outside its fold; they are
evaluated together, on the out-of-fold prediction of every row.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.cpu import thread_candidates
from addnorm.data.table.encode import MISSING, OTHER, EncodedTable
from addnorm.data.table.frame import Array
from addnorm.metrics import classification_metrics, regression_metrics
from addnorm.models.bins import bin_means, positions_of, smoothed_labels
from addnorm.models.tabular import FoldModel, TabularModel
from addnorm.training.calibration import fit_temperature, logits_of, probabilities_of
from addnorm.training.loop import Loop, LoopSettings, LoopTask, Observer, TrainingState
from addnorm.training.optimizer import OPTIMIZERS
from addnorm.training.schedule import make_schedule
from addnorm.training.threads import ThreadTuner, make_tuner

SQUARED_ERROR = 5.0
"""Weight of the squared error of a number's mean beside the cross-entropy of its bins."""


CLASS_METRICS = {
    "loss": "loss",
    "logloss": "loss",
    "accuracy": "accuracy",
    "auc": "auc",
    "f1": "f1",
}
"""Names of the metrics that may decide which weights of a classifier are best."""
NUMBER_METRICS = {"loss": "loss", "rmse": "loss", "mae": "mae"}
"""The same for a regressor."""


@dataclass(frozen=True)
class Lesson:
    """What a teacher adds to training rows; see teacher.py."""

    soft: Tensor
    """(rows, classes): probabilities to learn in place of the classes."""
    second: EncodedTable
    """A second row beside each row."""
    second_soft: Tensor
    """(rows, classes): probabilities of the second rows."""


@dataclass(frozen=True)
class Rows:
    """Encoded rows with their targets and weights."""

    table: EncodedTable
    target: Tensor
    """(rows,): class indices as int64, or standardised numbers."""
    weight: Tensor
    """(rows,): 1 on average."""
    fold: Tensor | None = None
    """(rows,): the fold of each row, whose model is not trained on it; None without folds."""
    edges: Tensor | None = None
    """(bins + 1,): edges of the bins of a standardised number; None for classes."""
    ordered: bool = False
    """Whether the classes have an order."""
    given: Array | None = None
    """(rows,): class indices, or numbers as they were given, to the last digit."""
    lesson: Lesson | None = None
    """Soft targets and second rows, if there is a teacher."""

    def __len__(self) -> int:
        return len(self.target)


@dataclass(frozen=True)
class SplitRows:
    """Training rows and held-out rows.

    Parameters
    ----------
    rows : training rows
    valid : held-out rows, if any
    target : targets of the training rows: class indices, or numbers that are not standardised
    notes : remarks on the split and the columns
    """

    rows: Rows
    valid: Rows | None
    target: Array
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """The settings of a training, all resolved.

    Parameters
    ----------
    batch : rows in a batch.
    epochs : passes over the training rows.
    rate : peak learning rate.
    weight_decay, schedule, patience, drop_cells, swap_cells, ema, minutes : as for the estimators.
    warmup : fraction of the steps over which the learning rate rises.
    seed : seed of the order of the rows.
    metric : metric that decides which weights are best: one of CLASS_METRICS or NUMBER_METRICS.
    clip : largest norm of the gradient; 0 for no clipping.
    threads : threads of torch; None to choose by measurement, unless the user has set them.
    """

    batch: int
    epochs: int
    rate: float
    weight_decay: float = 1e-5
    schedule: str = "constant"
    warmup: float = 0.0
    patience: int = 16
    drop_cells: float = 0.0
    swap_cells: float = 0.0
    ema: float = 0.0
    minutes: float | None = None
    seed: int = 0
    metric: str = "loss"
    clip: float = 1.0
    threads: int | None = None


class TableTraining:
    """The task of the training loop: batches, losses, metrics on held-out rows.

    Parameters
    ----------
    train : training rows.
    valid : held-out rows, if any.
    settings : the settings of the training.
    classes : number of classes; 0 for regression.
    """

    def __init__(
        self, train: Rows, valid: Rows | None, settings: FitSettings, classes: int
    ) -> None:
        self.train, self.valid, self.settings, self.classes = train, valid, settings, classes
        names = CLASS_METRICS if classes else NUMBER_METRICS
        self.metric = names.get(settings.metric, "loss")
        self.higher_is_better = self.metric in ("accuracy", "auc", "f1")

    def plan(self, epoch: int) -> Sequence[Tensor]:
        """Return the row indices of each batch of an epoch, in random order."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train), generator=generator)
        return torch.split(order, self.settings.batch)

    def batch(self, part: Tensor) -> dict[str, Tensor]:
        """Return the batch of some rows, with random cells dropped and swapped.

        With a teacher, their second rows follow them.
        """
        table, lesson = self.train.table.take(part), self.train.lesson
        target, weight = self.train.target[part], self.train.weight[part]
        soft = {}
        if lesson is not None:
            table = join_tables(table, lesson.second.take(part))
            target, weight = target.repeat(2), weight.repeat(2)
            soft["soft"] = torch.cat((lesson.soft[part], lesson.second_soft[part]))
        table = swap_cells(table, self.settings.swap_cells)
        numbers, codes = drop_cells(table, self.settings.drop_cells)
        batch = {"numbers": numbers, "codes": codes, "target": target, "weight": weight, **soft}
        return batch if self.train.fold is None else batch | {"fold": self.train.fold[part]}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """Return the number of rows of a batch."""
        return len(batch["target"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor], total: int) -> Tensor:
        """Return the weighted sum of the losses of a batch over the rows of the whole step."""
        if "fold" in batch:
            return self._fold_loss(model, batch, total)
        outputs = model(batch["numbers"], batch["codes"])
        if "soft" in batch:
            each = soft_losses(outputs, batch["soft"])
        else:
            each = self.losses(outputs, batch["target"])
        return (each * batch["weight"]).sum() / total

    def _fold_loss(self, model: nn.Module, batch: dict[str, Tensor], total: int) -> Tensor:
        """Return the mean over the models of their losses, each on the rows outside its fold."""
        assert isinstance(model, FoldModel)
        sums = []
        for fold, part in enumerate(model.parts()):
            inside = batch["fold"] != fold
            outputs = part(batch["numbers"][inside], batch["codes"][inside])
            each = self.losses(outputs, batch["target"][inside])
            sums.append((each * batch["weight"][inside]).sum())
        return torch.stack(sums).sum() / (total * (len(sums) - 1))

    def losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row."""
        if self.train.ordered:
            return ordinal_losses(outputs, target)
        return losses(outputs, target, self.classes, self.train.edges)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss and other metrics on the held-out rows, or on all rows out of fold.

        The loss of classes is that of calibrated probabilities.
        """
        assert isinstance(model, TabularModel)
        rows = self.train if self.train.fold is not None else self.valid
        if rows is None:
            return {"loss": 0.0}  # without held-out rows the last weights are kept
        outputs = mean_of_members(
            held_out_outputs(model, rows, self.settings.batch), self.train.edges
        )
        if self.classes:
            # Predictions are divided by a temperature that these rows decide. Without it the loss
            # rises as soon as a network is too sure of itself, and would choose weights too early.
            outputs = outputs / fit_temperature(outputs[:, 0], rows.target, rows.weight)
        each = self.losses(outputs, rows.target)
        outputs = outputs[:, 0]
        metrics = {"loss": float((each * rows.weight).sum() / rows.weight.sum())}
        if self.classes:
            correct = (likeliest_class(outputs) == rows.target).float()
            metrics["accuracy"] = float((correct * rows.weight).sum() / rows.weight.sum())
        if self.metric in ("auc", "f1"):
            probabilities = probabilities_of(outputs, 1.0).numpy()
            figures = classification_metrics(probabilities, rows.target.numpy())
            metrics[self.metric] = figures[self.metric]
        if self.metric in ("rmse", "mae"):
            numbers = outputs[:, 0]
            if self.train.edges is not None:
                numbers = outputs.softmax(dim=1) @ bin_means(self.train.edges)
            figures = regression_metrics(numbers.numpy(), rows.target.numpy())
            metrics[self.metric] = figures[self.metric]
        return metrics


def held_out_outputs(model: TabularModel, rows: Rows, batch: int) -> Tensor:
    """Return the outputs of every member, (rows, members, outputs), for rows that are held out.

    Of rows with folds, each is predicted by the model that was not trained on it.
    """
    if rows.fold is None:
        return predict_outputs(model, rows.table, batch)
    assert isinstance(model, FoldModel)
    outputs = torch.empty(len(rows), model.config.members, model.config.outputs)
    for fold, part in enumerate(model.parts()):
        inside = torch.nonzero(rows.fold == fold)[:, 0]
        outputs[inside] = predict_outputs(part, rows.table.take(inside), batch)
    return outputs


def losses(outputs: Tensor, target: Tensor, classes: int, edges: Tensor | None = None) -> Tensor:
    """Return the loss of each row, the mean over the members of (rows, members, outputs).

    Parameters
    ----------
    outputs : outputs of the network.
    target : class indices, or standardised numbers.
    classes : number of classes; 0 for a number.
    edges : edges of the bins of a number; None if the output is the number itself.
    """
    members = outputs.shape[1]
    if not classes and edges is not None:
        return _bin_losses(outputs, target.to(outputs.dtype), edges.to(outputs))
    if classes > 2:
        repeated = target[:, None].expand(-1, members)
        return F.cross_entropy(outputs.transpose(1, 2), repeated, reduction="none").mean(dim=1)
    expanded = target.to(outputs.dtype)[:, None].expand(-1, members)
    if classes:
        each = F.binary_cross_entropy_with_logits(outputs[..., 0], expanded, reduction="none")
    else:
        each = (outputs[..., 0] - expanded).square()
    return each.mean(dim=1)


def soft_losses(outputs: Tensor, soft: Tensor) -> Tensor:
    """Return −Σ_k t_k log p_k for soft targets t (rows, classes), the mean over the members."""
    logs = logits_of(outputs.flatten(0, 1)).log_softmax(dim=1).view(*outputs.shape[:2], -1)
    return -(soft[:, None] * logs).sum(dim=2).mean(dim=1)


def ordinal_losses(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each row for ordered classes, the mean over members and thresholds.

        −Σ_k ([y ≤ k] log F_k + [y > k] log(1 − F_k)) / (K − 1),   F_k = p_0 + … + p_k

    Every threshold is a question with two answers (Frank, Hall 2001), so that an error of two
    classes costs more than one of one class; the sum is the loss of CORAL (Cao et al. 2020,
    1901.07884, eq. 4). p is one softmax, so F rises whatever the network says.
    """
    logs = logits_of(outputs.flatten(0, 1)).log_softmax(dim=1)
    below = logs.logcumsumexp(dim=1)[:, :-1]
    above = logs.flip(1).logcumsumexp(dim=1).flip(1)[:, 1:]
    steps = torch.arange(below.shape[1], device=target.device)
    repeated = target.repeat_interleave(outputs.shape[1])
    each = torch.where(repeated[:, None] <= steps, below, above).mean(dim=1)
    return -each.view(len(target), -1).mean(dim=1)


def _bin_losses(outputs: Tensor, target: Tensor, edges: Tensor) -> Tensor:
    logs = outputs.log_softmax(dim=-1)
    label = smoothed_labels(positions_of(target, edges), edges)
    entropy = -(label[:, None] * logs).sum(dim=-1).mean(dim=1)
    error = logs.exp() @ bin_means(edges) - target[:, None]
    return entropy + SQUARED_ERROR * error.square().mean(dim=1)


def mean_of_members(outputs: Tensor, edges: Tensor | None = None) -> Tensor:
    """Return (rows, 1, outputs): the mean output, or of bins the logarithm of the mean probability.

    Parameters
    ----------
    outputs : outputs of the network, (rows, members, outputs).
    edges : edges of the bins of a number; None for classes.
    """
    if edges is None:
        return outputs.mean(dim=1, keepdim=True)
    logs = outputs.log_softmax(dim=-1).logsumexp(dim=1, keepdim=True)
    return logs - math.log(outputs.shape[1])


def likeliest_class(outputs: Tensor) -> Tensor:
    """Return the most likely class of each row, from (rows, outputs)."""
    return (outputs[:, 0] > 0).long() if outputs.shape[1] == 1 else outputs.argmax(dim=1)


def join_tables(first: EncodedTable, second: EncodedTable) -> EncodedTable:
    """Return the rows of two tables, one after the other."""
    return EncodedTable(
        torch.cat((first.numbers, second.numbers)), torch.cat((first.codes, second.codes))
    )


def drop_cells(table: EncodedTable, share: float) -> tuple[Tensor, Tensor]:
    """Return numbers and codes with random cells missing; of categories, a quarter of them unknown.

    Every column thereby learns vectors of missing and unknown values, even if the training rows
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
    """Return the table with random cells replaced by another row's value.

    A model that is trained with errors in its input depends less on any single column.

    Vincent et al. 2008, "Extracting and composing robust features with denoising autoencoders", §2,
    with noise that keeps each column's distribution.
    """
    if share <= 0:
        return table
    numbers, codes = (torch.rand(part.shape) < share for part in (table.numbers, table.codes))
    return replace_cells(table, numbers, codes, torch.randperm(len(table)))


def replace_cells(
    table: EncodedTable, numbers: Tensor, codes: Tensor, order: Tensor
) -> EncodedTable:
    """Return the table with some cells taken from other rows.

    Parameters
    ----------
    table : the rows.
    numbers, codes : masks of the cells to replace.
    order : for each row, the row to take them from.
    """
    other = table.take(order)
    return EncodedTable(
        torch.where(numbers, other.numbers, table.numbers),
        torch.where(codes, other.codes, table.codes),
    )


ROW_MULTIPLE = 32
"""Batches are padded to a multiple of this: products of fewer rows are rounded differently."""


@torch.inference_mode()
def predict_outputs(model: TabularModel, table: EncodedTable, batch: int) -> Tensor:
    """Return the outputs for rows, (rows, members, outputs), in evaluation mode.

    The output for a row does not depend on the other rows of its batch, bit for bit if the network
    has a width of 16 or more, unless the model attends to rows.
    """
    model.eval()
    rows, config, device = len(table), model.config, next(model.parameters()).device
    if not rows:
        return torch.empty(0, config.members * config.folds, config.outputs)
    parts = []
    for start in range(0, rows, batch):
        stop = min(start + batch, rows)
        padding = 0 if model.along_rows else -(stop - start) % ROW_MULTIPLE
        indices = [*range(start, stop), *[stop - 1] * padding] if padding else slice(start, stop)
        numbers, codes = table.numbers[indices].to(device), table.codes[indices].to(device)
        parts.append(model(numbers, codes)[: stop - start].cpu())
    return torch.cat(parts)


class FitLogger(Observer):
    """Collects the messages of the loop as notes, and prints progress if `verbose`."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.notes: list[str] = []

    def on_evaluate(self, loop: Loop, figures: dict[str, float], better: bool) -> None:
        """Print the metrics of an evaluation."""
        if self.verbose and figures["loss"]:
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
            state = loop.state
            position = f"epoch {state.epoch + 1:>3}  step {state.step:>6}"
            print(f"{position}  {metrics}{' *' if better else ''}", file=sys.stderr)

    def on_message(self, loop: Loop, text: str) -> None:
        """Add a message to the notes, and print it."""
        self.notes.append(text)
        if self.verbose:
            print(text, file=sys.stderr)


@dataclass(frozen=True)
class FitResult:
    """The result of a training: the final state of the loop, and its messages."""

    progress: TrainingState
    notes: list[str]
    stopped: bool
    """Whether it was interrupted."""

    @property
    def threads(self) -> int | None:
        """Number of threads at the end of training; None if it was left alone."""
        return self.progress.threads[-1]["threads"] if self.progress.threads else None


def fit_network(
    model: TabularModel,
    rows: Rows,
    valid: Rows | None,
    settings: FitSettings,
    classes: int,
    *,
    verbose: bool = False,
) -> FitResult:
    """Train a model in place; with held-out rows it ends with the weights that were best on them.

    Parameters
    ----------
    model : the network.
    rows : training rows.
    valid : held-out rows for early stopping, if any.
    settings : the settings of the training.
    classes : number of classes; 0 for regression.
    verbose : whether to print each evaluation to stderr.
    """
    task = TableTraining(rows, valid, settings, classes)
    logger = FitLogger(verbose)
    groups = model.parameter_groups(settings.weight_decay)
    held_out = valid is not None or rows.fold is not None
    progress, stopped = run_loop(
        model, groups, task, settings, rows=len(rows), held_out=held_out, logger=logger
    )
    return FitResult(progress, logger.notes, stopped)


def run_loop(
    model: nn.Module,
    groups: list[dict[str, Any]],
    task: LoopTask,
    settings: FitSettings,
    *,
    rows: int,
    held_out: bool,
    logger: FitLogger,
) -> tuple[TrainingState, bool]:
    """Run the training loop; return its final state, and whether it was interrupted.

    Parameters
    ----------
    model : the module to train; it ends in evaluation mode with its best weights.
    groups : parameter groups of the optimizer.
    task : batches, loss and evaluation.
    settings : the settings of the training.
    rows : number of training rows.
    held_out : whether the task has held-out rows to evaluate on.
    logger : receives evaluations and messages.
    """
    per_epoch = -(-rows // settings.batch)
    steps = per_epoch * settings.epochs
    warmup = round(settings.warmup * steps)
    optimizer = OPTIMIZERS["adamw"](model, groups, settings.rate, (0.9, 0.999), 1e-8)
    for group in optimizer.param_groups:
        group["peak"] = settings.rate
    best: dict[str, Tensor] = {}

    def save_best(module: nn.Module) -> None:
        best.update({name: tensor.clone() for name, tensor in module.state_dict().items()})

    loop_settings = LoopSettings(
        steps=steps,
        schedule=make_schedule(settings.schedule, warmup=warmup, steps=steps),
        clip=settings.clip,
        evaluate_every=per_epoch if held_out else steps,
        patience=settings.patience,
        ema=settings.ema,
        max_seconds=60 * (settings.minutes or 0.0),
        refit=settings.minutes is not None,
        max_steps=steps,
        fixed_evaluations=not held_out,
    )
    loop = Loop(
        model,
        task,
        optimizer,
        loop_settings,
        observers=[logger],
        on_best=save_best,
        tuner=_choose_threads(model, task, settings, steps),
    )
    progress = loop.run()
    if loop.stop_requested and has_unevaluated_weights(progress):
        loop.evaluate()
    if best:
        model.load_state_dict(best)
    model.eval()
    return progress, loop.stop_requested


def _choose_threads(
    model: nn.Module, task: LoopTask, settings: FitSettings, steps: int
) -> ThreadTuner | None:
    """Return what chooses the number of threads, after its first choice; None to leave it alone."""
    candidates = thread_candidates(settings.threads)
    if next(model.parameters()).device.type != "cpu" or candidates == (torch.get_num_threads(),):
        return None
    tuner = make_tuner(candidates, model, task)
    if len(candidates) > 1:
        tuner.choose(gradients=steps)
    return tuner


def has_unevaluated_weights(progress: TrainingState) -> bool:
    """Return whether a step was taken since the last evaluation."""
    return not progress.history or progress.history[-1]["step"] != progress.step
