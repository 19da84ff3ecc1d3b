"""SHAP's numbers of a model for tables: complete, and those of a game that is computed by hand."""

from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.lens.columns import embed_columns, scores_from
from tests.lens.test_look import table_model, table_rows

pytest.importorskip("shap")

OWNERS = (0, 0, 1, 2)
"""The column of each token of the models here."""


def by_hand(model: Any, row: Any, rest: Any) -> tuple[list[float], dict[tuple[int, int], float]]:
    """Return Shapley values and Shapley-Taylor interactions of the three columns."""
    index = int(scores_from(model, row[None]).argmax())

    def value(columns: frozenset[int]) -> float:
        inside = torch.tensor([owner in columns for owner in OWNERS])
        mixed = torch.where(inside[:, None], row, rest)
        return float(scores_from(model, mixed)[:, index].mean())

    values = [0.0] * 3
    for order in permutations(range(3)):
        for place, column in enumerate(order):
            before = frozenset(order[:place])
            values[column] += (value(before | {column}) - value(before)) / 6
    pairs = {}
    for i, j in combinations(range(3), 2):
        (third,) = {0, 1, 2} - {i, j}
        effects = [
            value(base | {i, j}) - value(base | {i}) - value(base | {j}) + value(base)
            for base in (frozenset[int](), frozenset({third}))
        ]
        pairs[i, j] = (2 * effects[0] + effects[1]) / 3
    return values, pairs


@torch.no_grad()
def test_values_and_interactions_by_hand() -> None:
    from addnorm.lens.shap_values import shap_values

    model = table_model("ft")
    rows, rest = (embed_columns(model, *table_rows(n)) for n in (2, 5))
    result = shap_values(model, rows, rest, OWNERS, (0, 1, 2))
    for row in range(2):
        values, pairs = by_hand(model, rows[row], rest)
        np.testing.assert_allclose(result.interactions[row], list(pairs.values()), atol=1e-6)
        exact = scores_from(model, rows[row : row + 1]).max() - sum(values)
        assert result.values[row].sum() == pytest.approx(sum(values), abs=1e-6)
        assert float(exact) == pytest.approx(
            float(scores_from(model, rest)[:, int(scores_from(model, rows)[row].argmax())].mean())
        )
    few = shap_values(model, rows, rest, OWNERS, (0, 2))  # the third column is all others
    np.testing.assert_allclose(few.interactions[:, 0], result.interactions[:, 1], atol=1e-6)


@pytest.mark.trains
def test_our_numbers_agree_with_shap_and_can_do_without() -> None:
    from addnorm.tabular import FTTransformerRegressor
    from addnorm.tabular.explain import explain_row

    rng = np.random.default_rng(0)
    table = {name: rng.normal(size=40) for name in "abc"}
    model = FTTransformerRegressor(width=8, depth=1, heads=2, ffn_width=8, epochs=1)
    torch.manual_seed(0)
    model.fit(table, table["a"])
    one = explain_row(model, table, 3)
    assert one.shap is not None and one.shap_interactions is not None
    assert len(one.shap_interactions) == len(one.interactions) == 3
    assert sum(one.shap) == pytest.approx(one.output - one.baseline, rel=0.01, abs=1e-4)
    plain = explain_row(model, table, 3, shap=False)
    assert plain.shap is None and plain.contributions == one.contributions
