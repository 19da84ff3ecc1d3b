"""Bin edges for piecewise-linear embeddings: quantiles, or the thresholds of a decision tree.

Gorishniy et al. 2022 (2203.05556), §3.2. Fitted on training rows; missing values are ignored.
"""

from collections.abc import Callable

import numpy as np

from addnorm.data.table.frame import Array
from addnorm.errors import choose, require


def quantile_edges(x: Array, bins: int) -> list[float]:
    """Return the distinct quantiles of a column.

    >>> quantile_edges(np.array([0.0, 1.0, 2.0, 3.0, 4.0]), bins=2)
    [0.0, 2.0, 4.0]
    """
    return _distinct_edges(np.quantile(x, np.linspace(0, 1, bins + 1)))


def tree_edges(x: Array, y: Array, classes: bool, bins: int, seed: int) -> list[float]:
    """Return the minimum and maximum of a column, and the thresholds of a decision tree for y.

    Parameters
    ----------
    x
        The column, without missing values.
    y
        The target.
    classes
        Whether the target is a class rather than a number.
    bins
        Leaves that the tree may have.
    seed
        Decides between splits that are equally good.
    """
    trees = require("sklearn.tree", "tables")
    kind = trees.DecisionTreeClassifier if classes else trees.DecisionTreeRegressor
    leaf = max(1, min(64, len(x) // 50))
    tree = kind(max_leaf_nodes=max(2, bins), min_samples_leaf=leaf, random_state=seed)
    nodes = tree.fit(x[:, None], y).tree_
    thresholds = nodes.threshold[nodes.children_left != nodes.children_right]
    return _distinct_edges(np.concatenate(([x.min(), x.max()], thresholds)))


def make_edges(
    numbers: Array, y: Array, *, kind: str, classes: bool, bins: int, seed: int
) -> list[list[float]]:
    """Return the bin edges of each column of scaled numbers.

    Parameters
    ----------
    numbers
        (rows, columns), NaN where missing.
    y
        The target.
    kind
        ``quantile`` or ``target`` (decision tree).
    classes, bins, seed
        See `tree_edges`.
    """
    makers: dict[str, Callable[[Array, Array], list[float]]] = {
        "quantile": lambda x, y: quantile_edges(x, bins),
        "target": lambda x, y: tree_edges(x, y, classes, bins, seed),
    }
    make = choose("bins", kind, makers)
    edges = []
    for column in numbers.T.astype(np.float64):
        present = ~np.isnan(column)
        edges.append(make(column[present], y[present]) if present.any() else [-1.0, 1.0])
    return edges


def _distinct_edges(values: Array) -> list[float]:
    """Return sorted edges that are distinct as float32; at least two."""
    edges = [float(edge) for edge in np.unique(values.astype(np.float32))]
    return edges if len(edges) > 1 else [edges[0] - 0.5, edges[0] + 0.5]
