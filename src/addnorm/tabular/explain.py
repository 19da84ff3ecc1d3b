"""Explain a model for tables: three measures of which columns matter, and how far they agree.

    attention     mean attention weight over heads, blocks and rows, of the summary to each column
    gradient      integrated gradients from background rows: the part of f(x) − mean f(background)
                  that is due to each column; for several rows, its mean absolute value
    permutation   increase of the loss when one column is shuffled

Attention shows what the model reads, not what its prediction depends on; where the three disagree,
trust permutation. The values of columns that are several tokens (the parts of a date) are summed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]
from torch import Tensor

from addnorm.data.table.draw_rows import draw_rows, has_distributions
from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Array, Frame, to_texts
from addnorm.errors import InputError, require
from addnorm.lens.columns import (
    Interactions,
    column_contributions,
    column_interactions,
    embed_columns,
)
from addnorm.lens.explanation import SequenceExplanation
from addnorm.lens.shap_values import ShapValues, has_shap, shap_values
from addnorm.models.instant_table import InstantPredictor
from addnorm.models.tabular import TabTransformerModel, TabularModel
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.estimators import TableClassifier
from addnorm.tabular.importance import columns_of_tokens, permutation_importance
from addnorm.tabular.row_network import explain_network

MAX_EXPLAINED_ROWS = 500
"""Of more rows, this many are drawn at random."""
BACKGROUND_ROWS, MIN_BACKGROUND_ROWS = 64, 10
"""Rows that one row is compared with, and how many other rows a table must have to supply them."""
MIN_DRAWS, PAIRS = 4, 2000
"""Background rows for each row of a table: at least this many; of few rows, this many pairs."""
OLD_DISTRIBUTIONS = (
    "and evenly: the model was saved without frequencies, so give a file with more rows"
)
"""How columns are drawn if the encoder has no shares of categories."""
INTERACTION_COLUMNS, INTERACTION_ROWS = 6, 20
"""The most important columns, whose interactions are measured; rows, and background rows."""


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
    interactions : (column, column, strength, H) of pairs of the most important columns, the
        strongest first: their joint effect beyond the sum of their single effects, as its root
        mean square and as Friedman's H; see lens/columns.py
    shap : mean |SHAP value| of each column, for the first rows; None without the package `shap`
    shap_interactions : SHAP's joint effect of each pair of `interactions`, as its root mean square
    title : what is explained
    """

    columns: tuple[str, ...]
    permutation: tuple[float, ...]
    gradient: tuple[float, ...]
    attention: tuple[float, ...] | None
    column_attention: Array
    attention_columns: tuple[str, ...]
    agreement: Mapping[str, float]
    interactions: tuple[tuple[str, str, float, float], ...] = ()
    shap: tuple[float, ...] | None = None
    shap_interactions: tuple[float, ...] | None = None
    title: str = ""

    def __str__(self) -> str:
        """Return all measures of the columns, their agreement, and the strongest interactions."""
        measures = {"gradient": self.gradient, "attention": self.attention, "SHAP": self.shap}
        shown = {name: values for name, values in measures.items() if values is not None}
        lines = [f"{'':24}{'permutation':>14}" + "".join(f"{name:>12}" for name in shown)]
        for name, rise in self.ranked():
            i = self.columns.index(name)
            numbers = "".join(f"{values[i]:12.4f}" for values in shown.values())
            lines.append(f"{name[:23]:24}{rise:14.4f}{numbers}")
        agreement = ", ".join(f"{pair} {value:.2f}" for pair, value in self.agreement.items())
        lines += ["", f"agreement of ranks: {agreement}"]
        for i, (one, other, size, h) in enumerate(self.interactions[:5]):
            pairs = self.shap_interactions
            beside = "" if pairs is None else f", SHAP {pairs[i]:.4f}"
            lines.append(f"interaction {size:10.4f} (H {h:.2f}{beside})  {one} and {other}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from addnorm.tabular.page import explanation_page

        return explanation_page(self)._repr_html_()

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
    output : output of the network for the row; for classes on the calibrated scale, logits divided
        by the temperature
    baseline : mean output for the background rows, on the same scale
    output_name : what the output is: the log-odds of the second of two classes; of more, the margin
        of the likeliest (its logit minus the mean of the others'); or the predicted number
    probability : calibrated probability of that class; None for regression
    baseline_name : what the background rows are, such as "64 rows of the table"
    interactions : (column, column, effect): the joint effect of two columns beyond the sum of
        their single effects, the strongest first
    shap : SHAP value of each column, to compare with; None without the package `shap`
    shap_interactions : SHAP's joint effect of each pair of `interactions`
    network : heads, layers and pieces of the network for this row; None if it has no summary
    title : what is explained
    """

    columns: tuple[str, ...]
    values: tuple[str, ...]
    contributions: tuple[float, ...]
    output: float
    baseline: float
    output_name: str
    probability: float | None = None
    baseline_name: str = ""
    interactions: tuple[tuple[str, str, float], ...] = ()
    shap: tuple[float, ...] | None = None
    shap_interactions: tuple[float, ...] | None = None
    network: SequenceExplanation | None = field(default=None, compare=False, repr=False)
    title: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the maps as plain values, for JSON."""
        return vars(self) | {"network": None if self.network is None else self.network.to_dict()}

    def _repr_html_(self) -> str:
        from addnorm.tabular.page import row_page

        return row_page(self)._repr_html_()

    def ranked(self) -> list[tuple[str, str, float]]:
        """Return (column, value, contribution), the largest absolute contribution first."""
        rows = zip(self.columns, self.values, self.contributions, strict=True)
        return sorted(rows, key=lambda row: -abs(row[2]))


def explain_table(
    estimator: TableEstimator,
    X: Any,
    y: Any,
    *,
    seed: int = 0,
    repeats: int = 3,
    shap: bool | None = None,
) -> Explanation:
    """Return which columns matter to a fitted estimator, on labelled rows.

    Parameters
    ----------
    estimator : the fitted estimator.
    X, y : rows and their targets, preferably not those of the training.
    seed : seed of the permutations, and of the rows that are drawn if there are many.
    repeats : number of permutations of each column.
    shap : also ask the package `shap`; by default if it is installed.
    """
    rows = estimator.rows(X, y)
    table, target = rows.table, rows.target
    if not len(table):
        raise InputError("a table to explain must have one row or more: got none.")
    rng = np.random.default_rng(seed)
    if len(table) > MAX_EXPLAINED_ROWS:
        drawn = torch.from_numpy(rng.choice(len(table), MAX_EXPLAINED_ROWS, replace=False))
        table, target = table.take(drawn), target[drawn]
    names, column_of_token = columns_of_tokens(estimator)
    permutation = permutation_importance(
        estimator.model_, table, target, column_of_token, rng, repeats
    ).mean(axis=0)
    contributions = expected_gradients(estimator.model_, table)[0]
    gradient = _sum_by_column(contributions, column_of_token, len(names)).abs().mean(dim=0).numpy()
    pairs_of = _interactions(estimator, table, table, gradient, rows=INTERACTION_ROWS)
    others = _shap_values(estimator, table, table, pairs_of, INTERACTION_ROWS, shap)
    scale, order = _output_scale(estimator), _by_strength(pairs_of)
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
        gradient=tuple((gradient * scale).tolist()),
        attention=None if attention is None else tuple(attention.tolist()),
        column_attention=column_attention,
        attention_columns=tuple(attention_columns),
        agreement={f"{a} and {b}": spearman(measures[a], measures[b]) for a, b in pairs},
        interactions=tuple(
            (names[j], names[k], float(pairs_of.strength[i]) * scale, float(pairs_of.h[i]))
            for i, (j, k) in order
        ),
        shap=None
        if others is None
        else tuple((np.abs(others.values).mean(axis=0) * scale).tolist()),
        shap_interactions=None
        if others is None
        else tuple(
            float(np.sqrt(np.square(others.interactions[:, i]).mean())) * scale for i, _ in order
        ),
        title=_title(estimator),
    )


def explain_row(
    estimator: TableEstimator,
    X: Any,
    row: int,
    *,
    background: Any = None,
    shap: bool | None = None,
) -> RowExplanation:
    """Return what each column contributes to the prediction for one row.

    Parameters
    ----------
    estimator : the fitted estimator.
    X : rows that contain the one to explain.
    row : its index, counted from 0.
    background : rows to compare it with, such as training rows; by default the other rows of X,
        or if there are too few, rows whose columns are drawn independently from their training
        distributions, which the encoder stores.
    shap : also ask the package `shap`; by default if it is installed.
    """
    check_is_fitted(estimator)
    frame = estimator._frame(X, fitting=False)
    if not 0 <= row < len(frame):
        raise InputError(f"row must be 0 to {len(frame) - 1}: got {row}.")
    one = frame.take(np.array([row]))
    names, column_of_token = columns_of_tokens(estimator)
    others, baseline_name = _background_rows(estimator, frame, row, background)
    table = estimator.encoder_.encode(one)
    steps = 16
    if isinstance(estimator.model_, InstantPredictor):  # its paths bend more: docs/instant.md
        steps = 64 if estimator.model_.sizes.classes else 32
    by_token, end, start = expected_gradients(
        estimator.model_, table, others, draws=BACKGROUND_ROWS, steps=steps
    )
    contributions = _sum_by_column(by_token, column_of_token, len(names))[0]
    importance = contributions.abs().numpy()
    pairs_of = _interactions(estimator, table, others, importance, rows=BACKGROUND_ROWS)
    compared = _shap_values(estimator, table, others, pairs_of, BACKGROUND_ROWS, shap)
    scale, order = _output_scale(estimator), _by_strength(pairs_of)
    offset = getattr(estimator, "mean_", 0.0)
    title = f"{_title(estimator)}: row {row + 1}"
    return RowExplanation(
        columns=tuple(names),
        values=tuple(_format_value(one, name) for name in names),
        contributions=tuple((contributions.double() * scale).tolist()),
        output=float(end[0]) * scale + offset,
        baseline=float(start[0]) * scale + offset,
        baseline_name=baseline_name,
        interactions=tuple(
            (names[j], names[k], float(pairs_of.values[i, 0]) * scale) for i, (j, k) in order
        ),
        shap=None if compared is None else tuple((compared.values[0] * scale).tolist()),
        shap_interactions=None
        if compared is None
        else tuple(float(compared.interactions[0, i]) * scale for i, _ in order),
        network=explain_network(estimator, table, by_token, title=title),
        title=title,
        **_describe_output(estimator, one),
    )


def expected_gradients(
    model: TabularModel,
    table: EncodedTable,
    background: EncodedTable | None = None,
    *,
    draws: int | None = None,
    steps: int = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return contributions by token, (rows, tokens), the outputs and the mean background outputs.

    f is the output, with several classes the margin of the most likely one; the formula is in
    lens/columns.py.

    Parameters
    ----------
    model : the network.
    table : rows to explain.
    background : rows to compare them with; the table itself by default.
    draws : background rows for each row; by default 4, of few rows up to 64.
    steps : nodes of the integral.
    """
    model.eval()
    other = table if background is None else background
    if draws is None:
        draws = min(BACKGROUND_ROWS, max(MIN_DRAWS, PAIRS // max(1, len(table))))
    with torch.no_grad():
        tokens = embed_columns(model, table.numbers, table.codes)
        other_tokens = embed_columns(model, other.numbers, other.codes)
    result = column_contributions(model, tokens, other_tokens, draws=draws, steps=steps)
    return result.contributions, result.output, result.baseline


def _background_rows(
    estimator: TableEstimator, frame: Frame, row: int, background: Any
) -> tuple[EncodedTable, str]:
    """Return the rows to compare one with, and a name for them."""
    encoder = estimator.encoder_
    if background is not None:
        rows, source = estimator._frame(background, fitting=False), "of the background"
        indices = np.arange(len(rows))
    else:
        rows, source = frame, "of the table"
        indices = np.delete(np.arange(len(frame)), row)
        if len(indices) < MIN_BACKGROUND_ROWS:
            drawn = draw_rows(encoder, BACKGROUND_ROWS, np.random.default_rng(0))
            how = "from the training data" if has_distributions(encoder) else OLD_DISTRIBUTIONS
            return drawn, f"{BACKGROUND_ROWS} rows, columns drawn independently {how}"
    if len(indices) > BACKGROUND_ROWS:
        indices = np.random.default_rng(0).choice(indices, BACKGROUND_ROWS, replace=False)
    return encoder.encode(rows.take(np.sort(indices))), f"{len(indices)} rows {source}"


def _interactions(
    estimator: TableEstimator,
    table: EncodedTable,
    background: EncodedTable,
    importance: Array,
    *,
    rows: int,
) -> Interactions:
    """Return the interactions of the most important columns, on the first rows."""
    model, (_, column_of_token) = estimator.model_, columns_of_tokens(estimator)
    columns = sorted(np.argsort(-importance)[:INTERACTION_COLUMNS].tolist())
    with torch.no_grad():
        tokens, other_tokens = (
            embed_columns(model, part.numbers[:rows], part.codes[:rows])
            for part in (table, background)
        )
    return column_interactions(model, tokens, other_tokens, column_of_token, columns)


def _shap_values(
    estimator: TableEstimator,
    table: EncodedTable,
    background: EncodedTable,
    interactions: Interactions,
    rows: int,
    wanted: bool | None,
) -> ShapValues | None:
    """Return what SHAP says of the first rows, or None if it is not asked.

    It is asked one row at a time, so a model whose rows attend to one another is left out.
    """
    if wanted:
        require("shap", "shap")
    model, (_, column_of_token) = estimator.model_, columns_of_tokens(estimator)
    if wanted is False or model.along_rows or not has_shap():
        return None
    with torch.no_grad():
        tokens, other_tokens = (
            embed_columns(model, part.numbers[:rows], part.codes[:rows])
            for part in (table, background)
        )
    columns = sorted({column for pair in interactions.pairs for column in pair})
    return shap_values(model, tokens, other_tokens, column_of_token, columns)


def _title(estimator: TableEstimator) -> str:
    target = estimator.encoder_.schema.target
    return f"Why {target}" if target else "Why this prediction"


def _by_strength(interactions: Interactions) -> list[tuple[int, tuple[int, int]]]:
    """Return (index, pair of columns), the strongest pair first."""
    order = interactions.strength.argsort(descending=True).tolist()
    return [(index, interactions.pairs[index]) for index in order]


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


def _sum_by_column(tokens: Tensor, column_of_token: Sequence[int], count: int) -> Tensor:
    """Return the sums (rows, columns) of values (rows, tokens)."""
    sums = torch.zeros(len(tokens), count)
    return sums.index_add_(1, torch.tensor(list(column_of_token)), tokens.float())


def _output_scale(estimator: TableEstimator) -> float:
    """Return one unit of the network's output: in units of the target, or in calibrated logits."""
    return float(getattr(estimator, "scale_", 1.0)) / float(estimator.temperature_)


def _describe_output(estimator: TableEstimator, one: Frame) -> dict[str, Any]:
    """Return name and probability of the output: of the second of two classes, or the likeliest."""
    if not isinstance(estimator, TableClassifier):
        return {"output_name": "the predicted number"}
    probabilities = estimator.predict_proba(one)[0]
    binary = len(probabilities) == 2
    kind, index = ("log-odds", 1) if binary else ("margin", int(probabilities.argmax()))
    name = f"the {kind} of {estimator.classes_[index]!s}"
    return {"output_name": name, "probability": float(probabilities[index])}


def _format_value(one: Frame, name: str) -> str:
    text = to_texts(one.columns[name])[0]
    if text is None:
        return "missing"
    text = str(text)
    try:  # of a long fraction, six digits
        return f"{float(text):.6g}" if len(text) > 9 and "." in text else text
    except ValueError:
        return text
