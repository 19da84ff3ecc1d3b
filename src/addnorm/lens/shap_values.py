"""SHAP's values and interactions of a table's columns, to compare ours with; needs `shap`.

    φ_j = mean over orders of the columns of f(columns before j and j) − f(columns before j)

where columns that are not yet in are those of background rows (Lundberg, Lee 2017, 1705.07874). The
interaction of two columns is the Shapley-Taylor index (Dhamdhere et al. 2020, 1902.05622).
"""

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from addnorm.errors import require
from addnorm.lens.columns import scores_from
from addnorm.models.tabular import TabularModel

PERMUTATIONS = 4
"""Orders of the columns, each forwards and backwards, that values are the mean of."""


@dataclass(frozen=True)
class ShapValues:
    """What SHAP says of some rows, in units of the model's output.

    Parameters
    ----------
    values
        φ of each column, (rows, columns).
    interactions
        Joint effect of each pair of the columns asked for, (rows, pairs).
    """

    values: NDArray[np.float64]
    interactions: NDArray[np.float64]


def has_shap() -> bool:
    """Whether the package `shap` is installed."""
    return importlib.util.find_spec("shap") is not None


def shap_values(
    model: TabularModel,
    tokens: Tensor,
    background: Tensor,
    column_of_token: Sequence[int],
    columns: Sequence[int],
) -> ShapValues:
    """Return SHAP's values of all columns and its interactions of some, for some rows.

    SHAP sees a table of row numbers: a cell says from which row a column is taken. So a column may
    be of any kind and have several tokens.

    Parameters
    ----------
    model
        The model; rows must not attend to one another.
    tokens, background
        Rows to explain and rows to compare them with, both from `embed_columns`.
    column_of_token
        The column that each token belongs to.
    columns
        Columns whose pairs are measured.
    """
    shap = _import_shap()
    owner = np.asarray(column_of_token)
    count = int(owner.max()) + 1
    # For pairs, all columns that were not asked for are one player: 2^players coalitions suffice.
    player_of_column = np.full(count, len(columns))
    player_of_column[list(columns)] = np.arange(len(columns))
    players = len(columns) + int(len(columns) < count)
    pairs = list(combinations(range(len(columns)), 2))
    values, effects = np.zeros((len(tokens), count)), np.zeros((len(tokens), len(pairs)))
    with torch.no_grad():
        indices = scores_from(model, tokens).argmax(dim=1)
    for row, index in enumerate(indices.tolist()):
        pool = torch.cat((tokens[row : row + 1], background))
        single = _game(model, pool, owner, index)
        values[row] = _explain(shap, single, count, len(background), permutations=PERMUTATIONS)
        if pairs:
            paired = _game(model, pool, player_of_column[owner], index)
            matrix = _explain(shap, paired, players, len(background), interactions=True)
            # The package divides an interaction between the two cells of its matrix.
            effects[row] = [matrix[i, j] + matrix[j, i] for i, j in pairs]
    return ShapValues(values, effects)


def _import_shap() -> Any:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return require("shap", "shap")


def _game(model: TabularModel, pool: Tensor, player_of_token: NDArray[Any], index: int) -> Any:
    """Return the function that SHAP calls: from row numbers (n, players) to outputs (n,)."""
    token = torch.arange(len(player_of_token))

    @torch.no_grad()
    def outputs(rows: NDArray[Any]) -> NDArray[np.float64]:
        source = torch.from_numpy(np.asarray(rows).astype(np.int64))[:, player_of_token]
        parts = [
            scores_from(model, pool[part, token])[:, index] for part in torch.split(source, 2048)
        ]
        return torch.cat(parts).double().numpy()

    return outputs


def _explain(
    shap: Any,
    game: Any,
    players: int,
    background: int,
    *,
    permutations: int = 0,
    interactions: bool = False,
) -> NDArray[np.float64]:
    """Return values (players,) or interactions (players, players) of row 0 of a game."""
    others = np.repeat(np.arange(1.0, background + 1)[:, None], players, axis=1)
    masker = shap.maskers.Independent(others, max_samples=background)
    row = np.zeros((1, players))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if interactions:
            explainer = shap.explainers.Exact(game, masker)
            result = explainer(row, interactions=2, silent=True)
        else:
            explainer = shap.explainers.Permutation(game, masker, seed=0)
            evaluations = permutations * (2 * players + 1)
            result = explainer(row, max_evals=evaluations, silent=True)
    return np.asarray(result.values[0], dtype=np.float64)
