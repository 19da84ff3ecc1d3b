"""Why a model answers as it does: three views of which columns matter, and how far they agree.

    attention     what the summary and the columns look at, the mean over heads, blocks and rows
    gradient      integrated gradients from a typical row: the shares of f(x) − f(typical) that each
                  column makes; of several rows the mean size
    permutation   how much worse the loss is when one column is shuffled

Attention says what was looked at, not what mattered; where the three disagree, believe permutation.
Columns that are several tokens (the parts of a date) are added up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]
from torch import Tensor

from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Array, Frame, to_texts
from addnorm.errors import InputError
from addnorm.models.instant import InstantPredictor
from addnorm.models.tabular import FTTransformerModel, TabTransformerModel, TabularModel
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.estimators import TableClassifier
from addnorm.tabular.fitting import answer, losses

MOST_ROWS = 500
"""Rows that are looked at; more would not change the picture."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Which columns matter, in three views."""

    columns: tuple[str, ...]
    permutation: tuple[float, ...]
    """Loss when the column is shuffled, less the loss as it is."""
    gradient: tuple[float, ...]
    """Mean |share of the answer| of the column, in logits or in units of the target."""
    attention: tuple[float, ...] | None
    """Mean weight the summary gives to the column; None where the model has no summary."""
    looks: Array
    """(from, to): mean attention of each column to each, as far as columns are tokens."""
    looking: tuple[str, ...]
    """The names of its rows and columns."""
    agreement: Mapping[str, float]
    """Rank correlation (Spearman) of each pair of views."""

    def ranked(self) -> list[tuple[str, float]]:
        """Columns by permutation importance, the greatest first."""
        pairs = zip(self.columns, self.permutation, strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])


@dataclass(frozen=True, kw_only=True)
class RowExplanation:
    """What each column adds to the answer for one row."""

    columns: tuple[str, ...]
    values: tuple[str, ...]
    shares: tuple[float, ...]
    """They add up to `answer` − `typical`, up to the steps of the integral."""
    answer: float
    typical: float
    about: str
    """What the answer is: the logit of which class, or the target's own unit."""
    probability: float | None = None
    """Of that class, calibrated; None of numbers."""

    def ranked(self) -> list[tuple[str, str, float]]:
        """(column, value, share), the strongest first."""
        rows = zip(self.columns, self.values, self.shares, strict=True)
        return sorted(rows, key=lambda row: -abs(row[2]))


def explain(
    estimator: TableEstimator, X: Any, y: Any, *, seed: int = 0, repeats: int = 3
) -> Explanation:
    """Explain a fitted estimator on rows whose answers are known, best ones it has not seen."""
    rows = estimator.rows(X, y)
    table, target = rows.table, rows.target
    rng = np.random.default_rng(seed)
    if len(table) > MOST_ROWS:
        some = torch.from_numpy(rng.choice(len(table), MOST_ROWS, replace=False))
        table, target = table.take(some), target[some]
    names, member = _columns(estimator)
    permutation = permute(estimator.model_, table, target, member, rng, repeats)
    shares = integrated(estimator.model_, table)[0]
    gradient = _sum_by(shares, member, len(names)).abs().mean(dim=0).numpy()
    looks, looking, summary = attend(estimator, table)
    attention = None if summary is None else _sum_by(summary[None], member, len(names))[0].numpy()
    views = {"permutation": permutation, "gradient": gradient}
    views |= {} if attention is None else {"attention": attention}
    pairs = [(a, b) for i, a in enumerate(views) for b in list(views)[i + 1 :]]
    return Explanation(
        columns=tuple(names),
        permutation=tuple(permutation.tolist()),
        gradient=tuple((gradient * _unit(estimator)).tolist()),
        attention=None if attention is None else tuple(attention.tolist()),
        looks=looks,
        looking=tuple(looking),
        agreement={f"{a} and {b}": spearman(views[a], views[b]) for a, b in pairs},
    )


def explain_row(estimator: TableEstimator, X: Any, row: int) -> RowExplanation:
    """Explain the answer for one row, counted from 0, by integrated gradients."""
    check_is_fitted(estimator)
    frame = estimator._frame(X, fitting=False)
    if not 0 <= row < len(frame):
        raise InputError(f"row must be 0 to {len(frame) - 1}: got {row}.")
    one = frame.take(np.array([row]))
    names, member = _columns(estimator)
    shares, end, start = integrated(estimator.model_, estimator.encoder_.encode(one), steps=64)
    grouped = _sum_by(shares, member, len(names))[0]
    unit = _unit(estimator)
    offset = getattr(estimator, "mean_", 0.0)
    return RowExplanation(
        columns=tuple(names),
        values=tuple(_say_value(one, name) for name in names),
        shares=tuple((grouped.double() * unit).tolist()),
        answer=float(end[0]) * unit + offset,
        typical=float(start[0]) * unit + offset,
        **_about(estimator, one),
    )


def permute(
    model: TabularModel,
    table: EncodedTable,
    target: Tensor,
    member: Sequence[int],
    rng: np.random.Generator,
    repeats: int,
) -> Array:
    """Mean rise of the loss when a column's tokens are shuffled together. Breiman 2001, §10."""
    classes = 0 if target.is_floating_point() else max(2, model.config.outputs)

    def loss(numbers: Tensor, codes: Tensor) -> float:
        answers = answer(model, EncodedTable(numbers, codes), 1024).mean(dim=1, keepdim=True)
        return float(losses(answers, target, classes).mean())

    base, count = loss(table.numbers, table.codes), table.numbers.shape[1]
    rise = np.zeros(max(member) + 1)
    for _ in range(repeats):
        order = torch.from_numpy(rng.permutation(len(table)))
        for column in range(len(rise)):
            numbers, codes = table.numbers.clone(), table.codes.clone()
            for token in (t for t, owner in enumerate(member) if owner == column):
                part = numbers[:, token] if token < count else codes[:, token - count]
                part.copy_(part[order].clone())
            rise[column] += (loss(numbers, codes) - base) / repeats
    return rise


def integrated(
    model: TabularModel, table: EncodedTable, steps: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Integrated gradients by token, (rows, tokens), with the answers at the end and the start.

        share_j = (t_j − t̄_j) · ∫₀¹ ∂f/∂t_j (t̄ + α (t − t̄)) dα

    Sundararajan et al. 2017 (1703.01365), eq. 1, over the tokens t; t̄ is the mean token of each
    column over the rows given, or for one row the token of a missing value. The middle of each of
    `steps` parts of the path is looked at. f is the answer, or of several classes that of the
    likeliest.
    """
    model.eval()
    numbers, codes = table.numbers, table.codes
    with torch.no_grad():
        whole = _tokens(model, numbers, codes)
        typical = _typical(model, numbers, codes, whole)
        likeliest = _answer_from(model, whole).argmax(dim=1, keepdim=True)
    total = torch.zeros_like(whole)
    for step in range(steps):
        at = (typical + (step + 0.5) / steps * (whole - typical)).detach().requires_grad_()
        with torch.enable_grad():
            told = _answer_from(model, at).gather(1, likeliest).sum()
        total += torch.autograd.grad(told, at)[0]
    shares = ((whole - typical) * total / steps).sum(dim=2)
    with torch.no_grad():
        end, start = (_answer_from(model, t).gather(1, likeliest)[:, 0] for t in (whole, typical))
    return shares, end, start


def attend(
    estimator: TableEstimator, table: EncodedTable
) -> tuple[Array, list[str], Tensor | None]:
    """Mean attention among tokens, their names, and what the summary gives each column's token."""
    model, names = estimator.model_, estimator.encoder_.names
    if isinstance(model, TabTransformerModel):
        names = names[model.config.numbers :]
        if not names:
            return np.zeros((0, 0)), [], None
    maps: dict[str, Tensor] = {}
    with torch.inference_mode():
        model(table.numbers, table.codes, maps=maps)
    found = [each for place, each in maps.items() if place.endswith(".attention")]
    mean = torch.stack([each.mean(dim=(0, 1)) for each in found]).mean(dim=0)
    if isinstance(model, TabTransformerModel):
        return mean.numpy(), list(names), None
    return mean[1:, 1:].numpy(), list(names), mean[0, 1:]


def spearman(one: Array, other: Array) -> float:
    """Correlation of ranks, ties sharing theirs; NaN where one view says nothing."""
    a, b = (_ranks(view) - _ranks(view).mean() for view in (one, other))
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else float("nan")


def _ranks(view: Array) -> Array:
    _, place, ties = np.unique(view, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(ties) - (ties - 1) / 2)[place])


def _tokens(model: TabularModel, numbers: Tensor, codes: Tensor) -> Tensor:
    """What the model is told, (rows, tokens, width); numbers beside the stack fill one place."""
    if isinstance(model, FTTransformerModel | InstantPredictor):
        return model.tokens(numbers, codes)
    assert isinstance(model, TabTransformerModel)
    width = model.config.trunk.width
    beside = torch.nn.functional.pad(model.impute(numbers)[..., None], (0, width - 1))
    if not model.config.categories:
        return beside
    return torch.cat((beside, model.tokens(numbers, codes)), dim=1)


def _answer_from(model: TabularModel, tokens: Tensor) -> Tensor:
    """The mean answer of the members, (rows, outputs), from tokens."""
    if isinstance(model, FTTransformerModel):
        return model.head(model.hidden(tokens)).mean(dim=1)
    if isinstance(model, InstantPredictor):
        return model.from_tokens(tokens)[:, 0]
    assert isinstance(model, TabTransformerModel)
    count = model.config.numbers
    return model.from_tokens(tokens[:, :count, 0], tokens[:, count:]).mean(dim=1)


def _typical(model: TabularModel, numbers: Tensor, codes: Tensor, whole: Tensor) -> Tensor:
    if len(whole) > 1:
        return whole.mean(dim=0, keepdim=True).expand_as(whole)
    return _tokens(model, torch.full_like(numbers, float("nan")), torch.zeros_like(codes))


def _columns(estimator: TableEstimator) -> tuple[list[str], list[int]]:
    """The columns that are used, and of each token which of them it is a part of."""
    encoder = estimator.encoder_
    owners = [*(rule.column for rule in encoder.numbers)]
    owners += [rule.column for rule in encoder.categories]
    names = list(dict.fromkeys(owners))
    return names, [names.index(owner) for owner in owners]


def _sum_by(tokens: Tensor, member: Sequence[int], count: int) -> Tensor:
    """(rows, tokens) added up to (rows, columns)."""
    found = torch.zeros(len(tokens), count)
    return found.index_add_(1, torch.tensor(list(member)), tokens.float())


def _unit(estimator: TableEstimator) -> float:
    return float(getattr(estimator, "scale_", 1.0))


def _about(estimator: TableEstimator, one: Frame) -> dict[str, Any]:
    """What the answer is: of two classes it is about the second, of more about the likeliest."""
    if not isinstance(estimator, TableClassifier):
        return {"about": "the number predicted"}
    told = estimator.predict_proba(one)[0]
    word, place = ("log-odds", 1) if len(told) == 2 else ("logit", int(told.argmax()))
    about = f"the {word} of {estimator.classes_[place]!s}"
    return {"about": about, "probability": float(told[place])}


def _say_value(one: Frame, name: str) -> str:
    text = to_texts(one.columns[name])[0]
    return "missing" if text is None else str(text)
