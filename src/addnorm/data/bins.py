"""Edges of bins for piecewise-linear embeddings: by quantiles, or where a tree would split.

Gorishniy et al. 2022 (2203.05556), §3.2. Learnt from training rows; missing values take no part.
"""

from collections.abc import Callable

import numpy as np

from addnorm.data.frame import Array
from addnorm.errors import choose, require


def quantile_edges(x: Array, bins: int) -> list[float]:
    """The different ones among the quantiles of a column.

    >>> quantile_edges(np.array([0.0, 1.0, 2.0, 3.0, 4.0]), bins=2)
    [0.0, 2.0, 4.0]
    """
    return _edges(np.quantile(x, np.linspace(0, 1, bins + 1)))


def tree_edges(x: Array, y: Array, classes: bool, bins: int, seed: int) -> list[float]:
    """The ends of a column, and between them the thresholds of a small decision tree for y."""
    trees = require("sklearn.tree", "tables")
    kind = trees.DecisionTreeClassifier if classes else trees.DecisionTreeRegressor
    leaf = max(1, min(64, len(x) // 50))
    tree = kind(max_leaf_nodes=max(2, bins), min_samples_leaf=leaf, random_state=seed)
    found = tree.fit(x[:, None], y).tree_
    inside = found.threshold[found.children_left != found.children_right]
    return _edges(np.concatenate(([x.min(), x.max()], inside)))


def make_edges(
    numbers: Array, y: Array, *, kind: str, classes: bool, bins: int, seed: int
) -> list[list[float]]:
    """Edges for each column of scaled numbers; `kind` is quantile or target."""
    makers: dict[str, Callable[[Array, Array], list[float]]] = {
        "quantile": lambda x, y: quantile_edges(x, bins),
        "target": lambda x, y: tree_edges(x, y, classes, bins, seed),
    }
    make = choose("bins", kind, makers)
    found = []
    for column in numbers.T.astype(np.float64):
        here = ~np.isnan(column)
        found.append(make(column[here], y[here]) if here.any() else [-1.0, 1.0])
    return found


def _edges(values: Array) -> list[float]:
    """Different edges in order, as float32 can tell them apart; two at least."""
    edges = [float(edge) for edge in np.unique(values.astype(np.float32))]
    return edges if len(edges) > 1 else [edges[0] - 0.5, edges[0] + 0.5]
