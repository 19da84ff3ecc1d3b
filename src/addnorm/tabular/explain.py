"""Why a model answers as it does: three views of which columns matter, and how far they agree.

    attention     what the summary and the columns look at, the mean over heads, blocks and rows
    gradient      integrated gradients from background rows: the share that each column has in
                  f(x) − mean f(background); of several rows the mean size (lens/columns.py)
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

from addnorm.data.table.encode import FIRST_VALUE, EncodedTable
from addnorm.data.table.frame import Array, Frame, to_texts
from addnorm.errors import InputError
from addnorm.lens.columns import Interactions, column_interactions, column_shares, embed_columns
from addnorm.models.tabular import TabTransformerModel, TabularModel
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.estimators import TableClassifier
from addnorm.tabular.fitting import answer, losses

MOST_ROWS = 500
"""Rows that are looked at; more would not change the picture."""
BACKGROUND, FEWEST = 64, 10
"""Rows that one row is compared with, and how many a file must have to supply them."""
PAIRED_COLUMNS, PAIRED_ROWS = 6, 20
"""Columns whose interactions are measured, the most important ones; rows and background rows."""


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
    interactions: tuple[tuple[str, str, float, float], ...] = ()
    """(column, column, strength, H), the strongest first: what pairs of the most important columns
    do beyond the sum of their single effects; see lens/columns.py."""

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
    """They add up to `answer` − `typical`, up to the steps of the integral; of classes both are on
    the calibrated scale (logits divided by the temperature)."""
    answer: float
    typical: float
    about: str
    """What the answer is: the logit of which class, or the target's own unit."""
    probability: float | None = None
    """Of that class, calibrated; None of numbers."""
    baseline: str = ""
    """What `typical` is the mean answer of."""
    interactions: tuple[tuple[str, str, float], ...] = ()
    """(column, column, effect of both beyond the sum of each), the strongest first."""

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
    pairs_of = _pairs(estimator, table, table, gradient, rows=PAIRED_ROWS)
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
        interactions=tuple(
            (names[j], names[k], float(size) * _unit(estimator), float(h))
            for (j, k), size, h in _strongest(pairs_of)
        ),
    )


def explain_row(
    estimator: TableEstimator, X: Any, row: int, *, background: Any = None
) -> RowExplanation:
    """Explain the answer for one row, counted from 0, by integrated gradients.

    Parameters
    ----------
    estimator : a fitted estimator.
    X : rows, among them the one to explain.
    row : its number.
    background : rows to compare it with, such as training rows; by default the rows of X, or if
        there are too few, rows whose columns are drawn from what the encoder knows of each.
    """
    check_is_fitted(estimator)
    frame = estimator._frame(X, fitting=False)
    if not 0 <= row < len(frame):
        raise InputError(f"row must be 0 to {len(frame) - 1}: got {row}.")
    one = frame.take(np.array([row]))
    names, member = _columns(estimator)
    others, baseline = _background(estimator, frame, row, background)
    table = estimator.encoder_.encode(one)
    shares, end, start = integrated(estimator.model_, table, others, draws=BACKGROUND, steps=16)
    grouped = _sum_by(shares, member, len(names))[0]
    pairs = _pairs(estimator, table, others, grouped.abs().numpy(), rows=BACKGROUND)
    unit = _unit(estimator)
    offset = getattr(estimator, "mean_", 0.0)
    return RowExplanation(
        baseline=baseline,
        interactions=tuple(
            (names[j], names[k], float(pairs.values[pairs.pairs.index((j, k)), 0]) * unit)
            for (j, k), _, _ in _strongest(pairs)
        ),
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
    model: TabularModel,
    table: EncodedTable,
    background: EncodedTable | None = None,
    *,
    draws: int = 4,
    steps: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Integrated gradients by token, (rows, tokens), with the answers at the end and the start.

    Each row is compared with `draws` rows of the background, by default of the table itself; see
    `addnorm.lens.columns.column_shares`. f is the answer, or of several classes that of the
    likeliest.
    """
    model.eval()
    other = table if background is None else background
    with torch.no_grad():
        tokens = embed_columns(model, table.numbers, table.codes)
        rest = embed_columns(model, other.numbers, other.codes)
    found = column_shares(model, tokens, rest, draws=draws, steps=steps)
    return found.shares, found.answer, found.baseline


def _background(
    estimator: TableEstimator, frame: Frame, row: int, background: Any
) -> tuple[EncodedTable, str]:
    """Rows to compare one with, and what they are."""
    encoder = estimator.encoder_
    if background is not None:
        rows = estimator._frame(background, fitting=False)
        places, name = np.arange(len(rows)), "of the background"
    else:
        rows, name = frame, "of the table"
        places = np.delete(np.arange(len(frame)), row)
        if len(places) < FEWEST:
            return _draw_rows(estimator), f"{BACKGROUND} rows drawn column by column"
    if len(places) > BACKGROUND:
        places = np.random.default_rng(0).choice(places, BACKGROUND, replace=False)
    return encoder.encode(rows.take(np.sort(places))), f"{len(places)} rows {name}"


def _draw_rows(estimator: TableEstimator) -> EncodedTable:
    """Rows whose numbers are standard normal, as scaled ones are, and whose categories are even.

    The encoder keeps no rows; this is what it knows of the training data.
    """
    encoder, rng = estimator.encoder_, np.random.default_rng(0)
    numbers = rng.normal(size=(BACKGROUND, len(encoder.numbers)))
    for place, rule in enumerate(encoder.numbers):
        if rule.scaling == "none":
            numbers[:, place] = rng.uniform(rule.low, rule.high, BACKGROUND)
    sizes = [max(len(rule.values), 1) for rule in encoder.categories]
    codes = [FIRST_VALUE + rng.integers(0, size, BACKGROUND) for size in sizes]
    stacked = np.stack(codes, axis=1) if codes else np.zeros((BACKGROUND, 0), dtype=np.int64)
    return EncodedTable(torch.from_numpy(numbers).float(), torch.from_numpy(stacked).long())


def _pairs(
    estimator: TableEstimator,
    table: EncodedTable,
    background: EncodedTable,
    importance: Array,
    *,
    rows: int,
) -> Interactions:
    """Interactions of the most important columns, on the first rows."""
    model, (_, member) = estimator.model_, _columns(estimator)
    columns = sorted(np.argsort(-importance)[:PAIRED_COLUMNS].tolist())
    with torch.no_grad():
        tokens, rest = (
            embed_columns(model, part.numbers[:rows], part.codes[:rows])
            for part in (table, background)
        )
    return column_interactions(model, tokens, rest, member, columns)


def _strongest(found: Interactions) -> list[tuple[tuple[int, int], Tensor, Tensor]]:
    order = found.strength.argsort(descending=True).tolist()
    return [(found.pairs[i], found.strength[i], found.h[i]) for i in order]


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
    """What one unit of the network's answer is: of the target, or of calibrated logits."""
    return float(getattr(estimator, "scale_", 1.0)) / float(estimator.temperature_)


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
