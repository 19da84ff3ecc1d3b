"""Explain a model for tables: three measures of which columns matter, and how far they agree.

    attention     mean attention weight over heads, blocks and rows, of the summary to each column
    gradient      integrated gradients from a baseline row: the part of f(x) − f(baseline) that is
                  due to each column; for several rows, its mean absolute value
    permutation   increase of the loss when one column is shuffled

Attention shows what the model reads, not what its prediction depends on; where the three disagree,
trust permutation. The values of columns that are several tokens (the parts of a date) are summed.
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
from addnorm.models.tabular import FTTransformerModel, TabTransformerModel, TabularModel
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.estimators import TableClassifier
from addnorm.tabular.fitting import losses, predict_outputs

MAX_EXPLAINED_ROWS = 500
"""Of more rows, this many are drawn at random."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Which columns matter, by three measures.

    Parameters
    ----------
    columns : the columns
    permutation : loss with the column shuffled, minus the loss without
    gradient : mean |contribution| of the column, in logits or in units of the target
    attention : mean attention weight from the summary to the column; None if there is no summary
    column_attention : (from, to): mean attention weight between the columns that are tokens
    attention_columns : the names of its rows and columns
    agreement : rank correlation (Spearman) of each pair of measures
    """

    columns: tuple[str, ...]
    permutation: tuple[float, ...]
    gradient: tuple[float, ...]
    attention: tuple[float, ...] | None
    column_attention: Array
    attention_columns: tuple[str, ...]
    agreement: Mapping[str, float]

    def ranked(self) -> list[tuple[str, float]]:
        """Return (column, permutation importance), the most important first."""
        pairs = zip(self.columns, self.permutation, strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])


@dataclass(frozen=True, kw_only=True)
class RowExplanation:
    """What each column contributes to the prediction for one row.

    Parameters
    ----------
    columns : the columns
    values : their values as text
    contributions : their sum is `output` − `baseline`, up to the error of the numerical integral
    output : output of the network for the row
    baseline : output for a row with all values missing
    output_name : what the output is: the log-odds or logit of a class, or the predicted number
    probability : calibrated probability of that class; None for regression
    """

    columns: tuple[str, ...]
    values: tuple[str, ...]
    contributions: tuple[float, ...]
    output: float
    baseline: float
    output_name: str
    probability: float | None = None

    def ranked(self) -> list[tuple[str, str, float]]:
        """Return (column, value, contribution), the largest absolute contribution first."""
        rows = zip(self.columns, self.values, self.contributions, strict=True)
        return sorted(rows, key=lambda row: -abs(row[2]))


def explain_table(
    estimator: TableEstimator, X: Any, y: Any, *, seed: int = 0, repeats: int = 3
) -> Explanation:
    """Return which columns matter to a fitted estimator, on labelled rows.

    Parameters
    ----------
    estimator : the fitted estimator.
    X, y : rows and their targets, preferably not those of the training.
    seed : seed of the permutations, and of the rows that are drawn if there are many.
    repeats : number of permutations of each column.
    """
    rows = estimator.rows(X, y)
    table, target = rows.table, rows.target
    rng = np.random.default_rng(seed)
    if len(table) > MAX_EXPLAINED_ROWS:
        drawn = torch.from_numpy(rng.choice(len(table), MAX_EXPLAINED_ROWS, replace=False))
        table, target = table.take(drawn), target[drawn]
    names, column_of_token = _columns(estimator)
    permutation = permutation_importance(
        estimator.model_, table, target, column_of_token, rng, repeats
    )
    contributions = integrated_gradients(estimator.model_, table)[0]
    gradient = _sum_by_column(contributions, column_of_token, len(names)).abs().mean(dim=0).numpy()
    column_attention, attention_columns, summary = mean_attention(estimator, table)
    attention = None
    if summary is not None:
        attention = _sum_by_column(summary[None], column_of_token, len(names))[0].numpy()
    measures = {"permutation": permutation, "gradient": gradient}
    measures |= {} if attention is None else {"attention": attention}
    pairs = [(a, b) for i, a in enumerate(measures) for b in list(measures)[i + 1 :]]
    return Explanation(
        columns=tuple(names),
        permutation=tuple(permutation.tolist()),
        gradient=tuple((gradient * _target_scale(estimator)).tolist()),
        attention=None if attention is None else tuple(attention.tolist()),
        column_attention=column_attention,
        attention_columns=tuple(attention_columns),
        agreement={f"{a} and {b}": spearman(measures[a], measures[b]) for a, b in pairs},
    )


def explain_row(estimator: TableEstimator, X: Any, row: int) -> RowExplanation:
    """Return what each column contributes to the prediction for one row, counted from 0."""
    check_is_fitted(estimator)
    frame = estimator._frame(X, fitting=False)
    if not 0 <= row < len(frame):
        raise InputError(f"row must be 0 to {len(frame) - 1}: got {row}.")
    one = frame.take(np.array([row]))
    names, column_of_token = _columns(estimator)
    table = estimator.encoder_.encode(one)
    by_token, end, start = integrated_gradients(estimator.model_, table, steps=64)
    contributions = _sum_by_column(by_token, column_of_token, len(names))[0]
    scale = _target_scale(estimator)
    offset = getattr(estimator, "mean_", 0.0)
    return RowExplanation(
        columns=tuple(names),
        values=tuple(_format_value(one, name) for name in names),
        contributions=tuple((contributions.double() * scale).tolist()),
        output=float(end[0]) * scale + offset,
        baseline=float(start[0]) * scale + offset,
        **_describe_output(estimator, one),
    )


def permutation_importance(
    model: TabularModel,
    table: EncodedTable,
    target: Tensor,
    column_of_token: Sequence[int],
    rng: np.random.Generator,
    repeats: int,
) -> Array:
    """Return the mean increase of the loss when a column is shuffled. Breiman 2001, §10.

    Parameters
    ----------
    model : the network.
    table, target : encoded rows and their targets.
    column_of_token : the column that each token belongs to; its tokens are shuffled together.
    rng : source of the permutations.
    repeats : number of permutations.
    """
    classes = 0 if target.is_floating_point() else max(2, model.config.outputs)

    def loss(numbers: Tensor, codes: Tensor) -> float:
        outputs = predict_outputs(model, EncodedTable(numbers, codes), 1024)
        return float(losses(outputs.mean(dim=1, keepdim=True), target, classes).mean())

    before, count = loss(table.numbers, table.codes), table.numbers.shape[1]
    increase = np.zeros(max(column_of_token) + 1)
    for _ in range(repeats):
        order = torch.from_numpy(rng.permutation(len(table)))
        for column in range(len(increase)):
            numbers, codes = table.numbers.clone(), table.codes.clone()
            for token in (t for t, owner in enumerate(column_of_token) if owner == column):
                part = numbers[:, token] if token < count else codes[:, token - count]
                part.copy_(part[order].clone())
            increase[column] += (loss(numbers, codes) - before) / repeats
    return increase


def integrated_gradients(
    model: TabularModel, table: EncodedTable, steps: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return integrated gradients by token, (rows, tokens), and the outputs at end and start.

        contribution_j = (t_j − t̄_j) · ∫₀¹ ∂f/∂t_j (t̄ + α (t − t̄)) dα

    Sundararajan et al. 2017 (1703.01365), eq. 1, over the tokens t; t̄ is the mean token of each
    column over the rows, or for one row the token of a missing value. The integral is a sum over
    the midpoints of `steps` intervals. f is the output, with several classes that of the most
    likely one.
    """
    model.eval()
    numbers, codes = table.numbers, table.codes
    with torch.no_grad():
        tokens = _tokens(model, numbers, codes)
        baseline = _baseline_tokens(model, numbers, codes, tokens)
        likeliest = _outputs_from(model, tokens).argmax(dim=1, keepdim=True)
    total = torch.zeros_like(tokens)
    for step in range(steps):
        point = baseline + (step + 0.5) / steps * (tokens - baseline)
        point = point.detach().requires_grad_()
        with torch.enable_grad():
            output = _outputs_from(model, point).gather(1, likeliest).sum()
        total += torch.autograd.grad(output, point)[0]
    contributions = ((tokens - baseline) * total / steps).sum(dim=2)
    with torch.no_grad():
        end, start = (
            _outputs_from(model, t).gather(1, likeliest)[:, 0] for t in (tokens, baseline)
        )
    return contributions, end, start


def mean_attention(
    estimator: TableEstimator, table: EncodedTable
) -> tuple[Array, list[str], Tensor | None]:
    """Return the mean attention between tokens, their names, and that of the summary to each."""
    model, names = estimator.model_, estimator.encoder_.names
    if isinstance(model, TabTransformerModel):
        names = names[model.config.numbers :]
        if not names:
            return np.zeros((0, 0)), [], None
    maps: dict[str, Tensor] = {}
    with torch.inference_mode():
        model(table.numbers, table.codes, maps=maps)
    weights = [tensor for name, tensor in maps.items() if name.endswith(".attention")]
    mean = torch.stack([each.mean(dim=(0, 1)) for each in weights]).mean(dim=0)
    if isinstance(model, TabTransformerModel):
        return mean.numpy(), list(names), None
    return mean[1:, 1:].numpy(), list(names), mean[0, 1:]


def spearman(one: Array, other: Array) -> float:
    """Return the correlation of ranks, ties with their mean rank; NaN if all values are equal."""
    a, b = (_ranks(values) - _ranks(values).mean() for values in (one, other))
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else float("nan")


def _ranks(values: Array) -> Array:
    _, index, ties = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(ties) - (ties - 1) / 2)[index])


def _tokens(model: TabularModel, numbers: Tensor, codes: Tensor) -> Tensor:
    """Return the tokens of rows, (rows, tokens, width).

    Numbers that do not pass through the stack are tokens with the number in the first element.
    """
    if isinstance(model, FTTransformerModel):
        return model.tokens(numbers, codes)
    assert isinstance(model, TabTransformerModel)
    width = model.config.trunk.width
    number_tokens = torch.nn.functional.pad(model.impute(numbers)[..., None], (0, width - 1))
    if not model.config.categories:
        return number_tokens
    return torch.cat((number_tokens, model.tokens(numbers, codes)), dim=1)


def _outputs_from(model: TabularModel, tokens: Tensor) -> Tensor:
    """Return the mean output of the members, (rows, outputs), from tokens."""
    if isinstance(model, FTTransformerModel):
        return model.head(model.hidden(tokens)).mean(dim=1)
    assert isinstance(model, TabTransformerModel)
    count = model.config.numbers
    return model.from_tokens(tokens[:, :count, 0], tokens[:, count:]).mean(dim=1)


def _baseline_tokens(model: TabularModel, numbers: Tensor, codes: Tensor, tokens: Tensor) -> Tensor:
    if len(tokens) > 1:
        return tokens.mean(dim=0, keepdim=True).expand_as(tokens)
    return _tokens(model, torch.full_like(numbers, float("nan")), torch.zeros_like(codes))


def _columns(estimator: TableEstimator) -> tuple[list[str], list[int]]:
    """Return the names of the used columns, and for each token the index of its column."""
    encoder = estimator.encoder_
    owners = [*(rule.column for rule in encoder.numbers)]
    owners += [rule.column for rule in encoder.categories]
    names = list(dict.fromkeys(owners))
    return names, [names.index(owner) for owner in owners]


def _sum_by_column(tokens: Tensor, column_of_token: Sequence[int], count: int) -> Tensor:
    """Return the sums (rows, columns) of values (rows, tokens)."""
    sums = torch.zeros(len(tokens), count)
    return sums.index_add_(1, torch.tensor(list(column_of_token)), tokens.float())


def _target_scale(estimator: TableEstimator) -> float:
    return float(getattr(estimator, "scale_", 1.0))


def _describe_output(estimator: TableEstimator, one: Frame) -> dict[str, Any]:
    """Return name and probability of the output: of the second of two classes, or the likeliest."""
    if not isinstance(estimator, TableClassifier):
        return {"output_name": "the predicted number"}
    probabilities = estimator.predict_proba(one)[0]
    binary = len(probabilities) == 2
    kind, index = ("log-odds", 1) if binary else ("logit", int(probabilities.argmax()))
    name = f"the {kind} of {estimator.classes_[index]!s}"
    return {"output_name": name, "probability": float(probabilities[index])}


def _format_value(one: Frame, name: str) -> str:
    text = to_texts(one.columns[name])[0]
    return "missing" if text is None else str(text)
