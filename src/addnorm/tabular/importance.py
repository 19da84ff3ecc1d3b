"""Permutation importance: how much the loss rises when the values of one column are shuffled.

    I_c = mean over rows of  L(row with another row's value in column c) − L(row)

Breiman 2001, §10. Columns that carry the same information share it: shuffling one of them alone
may cost little.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Array
from addnorm.models.tabular import TabularModel
from addnorm.tabular.base import TableEstimator
from addnorm.tabular.fitting import Rows, losses, predict_outputs

SHUFFLES = 3
"""Permutations of each column."""
MAX_PREDICTED = 40_000
"""Rows predicted for the importance of all columns together, so that it takes a few seconds."""
MIN_SHUFFLED, MAX_SHUFFLED = 50, 1000
"""Rows that are shuffled, at least and at most."""


def columns_of_tokens(estimator: TableEstimator) -> tuple[list[str], list[int]]:
    """Return the names of the used columns, and for each token the index of its column."""
    encoder = estimator.encoder_
    owners = [*(rule.column for rule in encoder.numbers)]
    owners += [rule.column for rule in encoder.categories]
    names = list(dict.fromkeys(owners))
    return names, [names.index(owner) for owner in owners]


def permutation_importance(
    model: TabularModel,
    table: EncodedTable,
    target: Tensor,
    column_of_token: Sequence[int],
    rng: np.random.Generator,
    repeats: int,
) -> Array:
    """Return the increase of each row's loss when a column is shuffled, (rows, columns).

    It is the mean over permutations. The loss of a number is the squared error of its mean, in
    squared standard deviations.

    Parameters
    ----------
    model : the network.
    table, target : encoded rows and their targets.
    column_of_token : the column that each token belongs to; its tokens are shuffled together.
    rng : source of the permutations.
    repeats : number of permutations.
    """
    classes = 0 if target.is_floating_point() else max(2, model.config.outputs)

    def loss(numbers: Tensor, codes: Tensor) -> Array:
        outputs = predict_outputs(model, EncodedTable(numbers, codes), 1024)
        each = losses(model.answers(outputs)[:, None], target, classes)
        return np.asarray(each.reshape(len(target), -1).mean(dim=1).double().numpy())

    before, count = loss(table.numbers, table.codes), table.numbers.shape[1]
    increase = np.zeros((len(table), max(column_of_token) + 1))
    for _ in range(repeats):
        order = torch.from_numpy(rng.permutation(len(table)))
        for column in range(increase.shape[1]):
            numbers, codes = table.numbers.clone(), table.codes.clone()
            for token in (t for t, owner in enumerate(column_of_token) if owner == column):
                part = numbers[:, token] if token < count else codes[:, token - count]
                part.copy_(part[order].clone())
            increase[:, column] += (loss(numbers, codes) - before) / repeats
    return increase


def measure_importance(
    estimator: TableEstimator, rows: Rows, *, seed: int = 0, most: int = MAX_PREDICTED
) -> list[dict[str, Any]]:
    """Return column, importance and its standard error over rows, the most important first.

    Parameters
    ----------
    estimator : the fitted estimator.
    rows : encoded rows with targets, preferably not those of the training.
    seed : seed of the permutations, and of the rows that are drawn if there are many.
    most : rows to predict at most, for all columns together; 50 are shuffled at least.
    """
    names, column_of_token = columns_of_tokens(estimator)
    rng = np.random.default_rng(seed)
    count = min(max(most // (SHUFFLES * len(names)), MIN_SHUFFLED), MAX_SHUFFLED, len(rows))
    drawn = torch.from_numpy(np.sort(rng.choice(len(rows), count, replace=False)))
    table, target = rows.table.take(drawn), rows.target[drawn]
    rises = permutation_importance(estimator.model_, table, target, column_of_token, rng, SHUFFLES)
    errors = rises.std(axis=0) / np.sqrt(max(count - 1, 1))
    found = [
        {"column": name, "importance": float(mean), "error": float(error)}
        for name, mean, error in zip(names, rises.mean(axis=0), errors, strict=True)
    ]
    return sorted(found, key=lambda each: -float(str(each["importance"])))
