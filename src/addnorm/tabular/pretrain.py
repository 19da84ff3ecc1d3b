"""Pre-training on unlabelled rows.

    masked       predict the number or category of hidden cells from the others
    replaced     detect the cells that have another row's value (Huang et al. 2020, §2)
    contrastive  match each row with a copy of which some cells are replaced, among all rows of the
                 batch: −log softmax over j of (z_i · z′_j / τ) at j = i, τ = 0.7
                 (Somepalli et al. 2021, 2106.01342, §3.3)

The column embeddings and the stack are trained; the heads used here are discarded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.data.table.encode import MISSING, EncodedTable
from addnorm.errors import ConfigError, choose
from addnorm.models.tabular import FTTransformerModel, TabTransformerModel, TabularModel
from addnorm.tabular.fitting import FitLogger, FitResult, FitSettings, replace_cells, run_loop

MASKED_SHARE = 0.3
"""Fraction of cells that are hidden or replaced, as in TabTransformer."""
CONTRASTIVE_TEMPERATURE = 0.7
PROJECTION_WIDTH = 64


class PretrainingModel(nn.Module):
    """A network without its head, and the heads of pre-training."""

    def __init__(self, body: TabularModel, method: str) -> None:
        super().__init__()
        config, width = body.config, body.config.trunk.width
        self.body, self.method = body, method
        self.categories_only = isinstance(body, TabTransformerModel)
        """Whether only categories are tokens."""
        numbers = 0 if self.categories_only else config.numbers
        if self.categories_only and (not config.categories or method == "contrastive"):
            raise ConfigError(
                "TabTransformer can only be pre-trained on categorical columns, with method masked "
                f"or replaced: got {len(config.categories)} of them and method={method!r}. Try "
                "FTTransformer."
            )
        self.numbers = nn.Linear(width, numbers) if numbers else None
        self.categories = nn.ModuleList(nn.Linear(width, size) for size in config.categories)
        self.detector = nn.Linear(width, numbers + len(config.categories))
        self.project = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, PROJECTION_WIDTH)
        )

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return the parameter groups of the body, with the heads in the first."""
        heads = [p for name, p in self.named_parameters() if not name.startswith("body.")]
        parts = self.body.parameter_groups(weight_decay)
        parts[0]["params"] = [*parts[0]["params"], *heads]
        return parts

    def states(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the stream at every token, (rows, tokens, width)."""
        assert isinstance(self.body, FTTransformerModel | TabTransformerModel)
        return self.body.states(self.body.tokens(numbers, codes))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return METHODS[self.method](self, batch)

    def masked_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the squared error of hidden numbers plus the cross-entropy of categories."""
        hide_numbers, hide_codes = batch["hide_numbers"], batch["hide_codes"]
        numbers, codes = batch["numbers"], batch["codes"]
        hidden = self.states(
            numbers.masked_fill(hide_numbers, float("nan")), codes.masked_fill(hide_codes, MISSING)
        )
        loss, start = hidden.sum() * 0.0, 0
        if self.numbers is not None:
            start = numbers.shape[1]
            predicted = torch.einsum("bcw,cw->bc", hidden[:, :start], self.numbers.weight)
            predicted = predicted + self.numbers.bias
            masked = hide_numbers & ~numbers.isnan()
            loss = loss + F.mse_loss(predicted[masked], numbers[masked]) if masked.any() else loss
        for j, head in enumerate(self.categories):
            masked = hide_codes[:, j]
            if masked.any():
                logits = head(hidden[masked, start + j])
                loss = loss + F.cross_entropy(logits, codes[masked, j]) / len(self.categories)
        return loss

    def replaced_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the binary cross-entropy of which cells were replaced."""
        numbers, codes = replace_marked(batch)
        changed_numbers = batch["numbers"].nan_to_num(1e9) != numbers.nan_to_num(1e9)
        changed = codes != batch["codes"]
        changed = changed if self.categories_only else torch.cat((changed_numbers, changed), dim=1)
        hidden = self.states(numbers, codes)
        logits = torch.einsum("bcw,cw->bc", hidden, self.detector.weight) + self.detector.bias
        return F.binary_cross_entropy_with_logits(logits, changed.to(logits.dtype))

    def contrastive_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross-entropy of matching rows with their copies, both ways."""
        assert isinstance(self.body, FTTransformerModel)
        views = []
        for numbers, codes in ((batch["numbers"], batch["codes"]), replace_marked(batch)):
            hidden = self.body.hidden(self.body.tokens(numbers, codes)).mean(dim=1)
            views.append(F.normalize(self.project(hidden), dim=1))
        similarity = views[0] @ views[1].T / CONTRASTIVE_TEMPERATURE
        own = torch.arange(len(similarity))
        return (F.cross_entropy(similarity, own) + F.cross_entropy(similarity.T, own)) / 2


METHODS: dict[str, Callable[[PretrainingModel, dict[str, Tensor]], Tensor]] = {
    "masked": PretrainingModel.masked_loss,
    "replaced": PretrainingModel.replaced_loss,
    "contrastive": PretrainingModel.contrastive_loss,
}


def replace_marked(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return numbers and codes with the marked cells taken from the row of `order`."""
    table = EncodedTable(batch["numbers"], batch["codes"])
    mixed = replace_cells(table, batch["hide_numbers"], batch["hide_codes"], batch["order"])
    return mixed.numbers, mixed.codes


class PretrainingTask:
    """The task of the training loop: batches with marked cells, and their loss."""

    metric, higher_is_better = "loss", False

    def __init__(
        self, train: EncodedTable, valid: EncodedTable | None, settings: FitSettings
    ) -> None:
        self.train, self.valid, self.settings = train, valid, settings

    def plan(self, epoch: int) -> Sequence[Tensor]:
        """Return the row indices of each batch of an epoch, in random order."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        return torch.split(
            torch.randperm(len(self.train), generator=generator), self.settings.batch
        )

    def batch(self, part: Tensor) -> dict[str, Tensor]:
        """Return the batch of some rows, with random cells marked."""
        return mark_cells(self.train.take(part))

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """Return the number of rows of a batch."""
        return len(batch["numbers"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor], total: int) -> Tensor:
        """Return the loss of a batch, times its share of the rows of the whole step."""
        return model(batch) * (len(batch["numbers"]) / total)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss on the held-out rows; the marked cells are always the same."""
        if self.valid is None:
            return {"loss": 0.0}
        generator = torch.Generator().manual_seed(self.settings.seed)
        rows = torch.split(torch.arange(len(self.valid)), self.settings.batch)
        values = [float(model(mark_cells(self.valid.take(part), generator))) for part in rows]
        total = sum(value * len(part) for value, part in zip(values, rows, strict=True))
        return {"loss": total / len(self.valid)}


def mark_cells(table: EncodedTable, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Return rows as a batch, with random masks of the cells to hide or replace."""

    def draw(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator) < MASKED_SHARE

    return {
        "numbers": table.numbers,
        "codes": table.codes,
        "hide_numbers": draw(table.numbers),
        "hide_codes": draw(table.codes),
        "order": torch.randperm(len(table), generator=generator),
    }


def pretrain(
    body: TabularModel,
    table: EncodedTable,
    valid: EncodedTable | None,
    settings: FitSettings,
    method: str,
    *,
    verbose: bool = False,
) -> FitResult:
    """Train column embeddings and stack of a network in place, on unlabelled rows.

    Parameters
    ----------
    body : the network.
    table : encoded training rows.
    valid : encoded held-out rows for early stopping, if any.
    settings : the settings of the training.
    method : masked, replaced or contrastive.
    verbose : whether to print each evaluation to stderr.
    """
    choose("method", method, METHODS)
    model, logger = PretrainingModel(body, method), FitLogger(verbose)
    progress, stopped = run_loop(
        model,
        model.parameter_groups(settings.weight_decay),
        PretrainingTask(table, valid, settings),
        settings,
        rows=len(table),
        held_out=valid is not None,
        logger=logger,
    )
    return FitResult(progress, logger.notes, stopped)
