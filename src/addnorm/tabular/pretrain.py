"""Learning from rows without answers, before there are few with.

    masked       cells are hidden, and told from the others: their number, or their category
    replaced     cells are given another row's value, and found (Huang et al. 2020, §2)
    contrastive  a row and the same row with some cells replaced are told from the batch's others:
                 −log softmax over j of (z_i · z′_j / τ) at j = i, τ = 0.7
                 (Somepalli et al. 2021, 2106.01342, §3.3)

What is learnt is the tokenizer and the stack; the heads used here are thrown away.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm.data.table.encode import MISSING, EncodedTable
from addnorm.errors import ConfigError, choose
from addnorm.models.tabular import FTTransformerModel, TabTransformerModel, TabularModel
from addnorm.tabular.fitting import Fitted, Plan, Watch, run, swap

SHARE = 0.3
"""Of the cells that are hidden or replaced: TabTransformer's."""
TAU = 0.7
PROJECTED = 64


class Guesser(nn.Module):
    """A model's body and the heads that pre-training needs."""

    def __init__(self, body: TabularModel, method: str) -> None:
        super().__init__()
        config, width = body.config, body.config.trunk.width
        self.body, self.method = body, method
        self.alone = isinstance(body, TabTransformerModel)
        """Whether only categories are tokens."""
        numbers = 0 if self.alone else config.numbers
        if self.alone and (not config.categories or method == "contrastive"):
            raise ConfigError(
                "TabTransformer is pre-trained on its categories, masked or replaced: "
                f"got {len(config.categories)} categories and method={method!r}. Try FTTransformer."
            )
        self.numbers = nn.Linear(width, numbers) if numbers else None
        self.categories = nn.ModuleList(nn.Linear(width, size) for size in config.categories)
        self.found = nn.Linear(width, numbers + len(config.categories))
        self.project = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, PROJECTED)
        )

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        heads = [p for name, p in self.named_parameters() if not name.startswith("body.")]
        parts = self.body.parameter_groups(weight_decay)
        parts[0]["params"] = [*parts[0]["params"], *heads]
        return parts

    def states(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """The stream at every token, (rows, tokens, width)."""
        assert isinstance(self.body, FTTransformerModel | TabTransformerModel)
        return self.body.states(self.body.tokens(numbers, codes))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return METHODS[self.method](self, batch)

    def tell_masked(self, batch: dict[str, Tensor]) -> Tensor:
        hide_numbers, hide_codes = batch["hide_numbers"], batch["hide_codes"]
        numbers, codes = batch["numbers"], batch["codes"]
        hidden = self.states(
            numbers.masked_fill(hide_numbers, float("nan")), codes.masked_fill(hide_codes, MISSING)
        )
        loss, start = hidden.sum() * 0.0, 0
        if self.numbers is not None:
            start = numbers.shape[1]
            told = torch.einsum("bcw,cw->bc", hidden[:, :start], self.numbers.weight)
            told = told + self.numbers.bias
            asked = hide_numbers & ~numbers.isnan()
            loss = loss + F.mse_loss(told[asked], numbers[asked]) if asked.any() else loss
        for j, head in enumerate(self.categories):
            asked = hide_codes[:, j]
            if asked.any():
                logits = head(hidden[asked, start + j])
                loss = loss + F.cross_entropy(logits, codes[asked, j]) / len(self.categories)
        return loss

    def tell_replaced(self, batch: dict[str, Tensor]) -> Tensor:
        numbers, codes = replaced(batch)
        changed_numbers = batch["numbers"].nan_to_num(1e9) != numbers.nan_to_num(1e9)
        changed = codes != batch["codes"]
        changed = changed if self.alone else torch.cat((changed_numbers, changed), dim=1)
        hidden = self.states(numbers, codes)
        told = torch.einsum("bcw,cw->bc", hidden, self.found.weight) + self.found.bias
        return F.binary_cross_entropy_with_logits(told, changed.to(told.dtype))

    def tell_rows_apart(self, batch: dict[str, Tensor]) -> Tensor:
        assert isinstance(self.body, FTTransformerModel)
        views = []
        for numbers, codes in ((batch["numbers"], batch["codes"]), replaced(batch)):
            hidden = self.body.hidden(self.body.tokens(numbers, codes)).mean(dim=1)
            views.append(F.normalize(self.project(hidden), dim=1))
        alike = views[0] @ views[1].T / TAU
        own = torch.arange(len(alike))
        return (F.cross_entropy(alike, own) + F.cross_entropy(alike.T, own)) / 2


METHODS: dict[str, Callable[[Guesser, dict[str, Tensor]], Tensor]] = {
    "masked": Guesser.tell_masked,
    "replaced": Guesser.tell_replaced,
    "contrastive": Guesser.tell_rows_apart,
}


def replaced(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers and codes with the marked cells taken from the row that the batch names."""
    table = EncodedTable(batch["numbers"], batch["codes"])
    found = swap(table, batch["hide_numbers"], batch["hide_codes"], batch["order"])
    return found.numbers, found.codes


class GuessTask:
    """What the loop asks: batches with cells marked, and the loss of telling them."""

    metric, higher_is_better = "loss", False

    def __init__(self, train: EncodedTable, valid: EncodedTable | None, plan: Plan) -> None:
        self.train, self.valid, self.settings = train, valid, plan

    def plan(self, epoch: int) -> Sequence[Tensor]:
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        return torch.split(
            torch.randperm(len(self.train), generator=generator), self.settings.batch
        )

    def batch(self, part: Tensor) -> dict[str, Tensor]:
        return mark(self.train.take(part))

    def tokens(self, batch: dict[str, Tensor]) -> int:
        return len(batch["numbers"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor], total: int) -> Tensor:
        return model(batch) * (len(batch["numbers"]) / total)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if self.valid is None:
            return {"loss": 0.0}
        generator = torch.Generator().manual_seed(self.settings.seed)
        rows = torch.split(torch.arange(len(self.valid)), self.settings.batch)
        values = [float(model(mark(self.valid.take(part), generator))) for part in rows]
        total = sum(value * len(part) for value, part in zip(values, rows, strict=True))
        return {"loss": total / len(self.valid)}


def mark(table: EncodedTable, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Rows as a batch, with the cells drawn that are hidden or replaced."""

    def draw(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator) < SHARE

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
    plan: Plan,
    method: str,
    *,
    verbose: bool = False,
) -> Fitted:
    """Train a model's tokenizer and stack in place on rows without answers."""
    choose("method", method, METHODS)
    guesser, watch = Guesser(body, method), Watch(verbose)
    task = GuessTask(table, valid, plan)
    progress, stopped = run(
        guesser, guesser.groups(plan.weight_decay), task, plan, len(table), valid is not None, watch
    )
    return Fitted(progress, watch.notes, stopped)
