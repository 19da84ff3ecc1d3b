"""Shares and interactions of columns: complete, exact by hand, and right on a planted table."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.lens.columns import (
    answer_from,
    column_interactions,
    column_shares,
    embed_columns,
)
from tests.conftest import close
from tests.lens.test_look import table_model, table_rows
from tests.portable import training


def tokens_of(model: Any, count: int) -> Tensor:
    return embed_columns(model, *table_rows(count)).detach()


@pytest.mark.parametrize("kind", ("ft", "tab", "saint"))
def test_tokens_give_the_models_answers(kind: str) -> None:
    model, rows = table_model(kind), table_rows()
    close(answer_from(model, embed_columns(model, *rows)), model(*rows).mean(dim=1))


@pytest.mark.parametrize("members", (1, 2))
@pytest.mark.parametrize("kind", ("ft", "tab"))
def test_shares_are_complete(kind: str, members: int) -> None:
    model = table_model(kind, members=members)
    rows, rest = tokens_of(model, 3), tokens_of(model, 7)
    found = column_shares(model, rows, rest, steps=64)
    spread = float((found.answer - found.baseline).abs().max())
    assert found.shares.shape == (3, 4) and found.completeness < 0.1 * spread
    whole = answer_from(model, rest).detach()
    for row in range(3):  # with as many draws as rows, every row meets every background row
        assert float(found.baseline[row]) == pytest.approx(
            float(whole[:, int(found.output[row])].mean())
        )


def test_rows_that_look_at_rows_are_explained_one_draw_at_a_time() -> None:
    model = table_model("saint")
    rows, rest = tokens_of(model, 3), tokens_of(model, 7)
    found = column_shares(model, rows, rest, draws=2, steps=4)
    assert found.shares.shape == (3, 4) and bool(found.shares.isfinite().all())


def test_interactions_by_hand() -> None:
    model = table_model("ft")
    rows, rest = tokens_of(model, 2), tokens_of(model, 5)
    found = column_interactions(model, rows, rest, (0, 0, 1, 2), (0, 1, 2))
    assert found.pairs == ((0, 1), (0, 2), (1, 2))
    output = answer_from(model, rows).argmax(dim=1)

    def mean(row: int, kept: list[int]) -> float:
        total = 0.0
        for other in rest:
            mixed = other.clone()
            mixed[kept] = rows[row, kept]
            total += float(answer_from(model, mixed[None]).detach()[0, output[row]]) / 5
        return total

    for row in range(2):
        alone = mean(row, [0, 1]) + mean(row, [3]) - mean(row, [])
        wanted = mean(row, [0, 1, 3]) - alone
        assert float(found.values[1, row]) == pytest.approx(wanted)
    close(found.strength, found.values.square().mean(dim=1).sqrt())
    assert bool((found.h >= 0).all())


def test_columns_that_only_add_up_do_not_interact() -> None:
    model = table_model("tab")
    with torch.no_grad():
        for layer in model.head:  # no ReLU is ever at 0, so the network is a sum of its inputs
            if isinstance(layer, torch.nn.Linear):
                layer.bias.add_(1000)
                layer.weight.abs_()
        model.norm = torch.nn.Identity()
    rows, rest = (torch.rand(n, 4, 16).double() for n in (3, 4))
    found = column_interactions(model, rows, rest, (0, 1, 2, 3), (0, 1))
    close(found.values, torch.zeros_like(found.values), 1e-8)
    with pytest.raises(InputError, match="one row or more"):
        column_shares(model, rows, rest[:0])


@pytest.mark.slow
@pytest.mark.trains
def test_a_planted_table_is_explained() -> None:
    """y = 1.5 main + 2 A·B + noise: the parts, their interaction, and nothing for noise columns."""
    from addnorm.tabular import FTTransformerRegressor
    from addnorm.tabular.explain import explain, explain_row

    rng = np.random.default_rng(0)
    names = ["main", "a", "b", *(f"noise {n}" for n in range(7))]
    x = rng.normal(size=(3000, 10))
    y = 1.5 * x[:, 0] + 2 * x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=len(x))
    table = dict(zip(names, x.T, strict=True))
    sizes = {"width": 32, "depth": 2, "heads": 4, "ffn_width": 32, "epochs": 40}
    still = {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}
    model = FTTransformerRegressor(
        **sizes, **still, learning_rate=1e-3, random_state=training.seed
    ).fit(table, y)
    some = {name: column[:300] for name, column in table.items()}
    found = explain(model, some, y[:300])
    shares = dict(zip(found.columns, found.gradient, strict=True))
    most = max(shares.values())
    assert {name for name, share in shares.items() if share > 0.05 * most} == {"main", "a", "b"}
    pair, *others = found.interactions
    assert set(pair[:2]) == {"a", "b"} and pair[2] == pytest.approx(2.0, rel=0.4)
    assert all(other[2] < 0.2 * pair[2] for other in others)
    totals = dict.fromkeys(names, 0.0)
    for row in range(20):
        one = explain_row(model, some, row)
        assert one.typical == pytest.approx(float(y.mean()), abs=0.5)
        assert sum(one.shares) == pytest.approx(one.answer - one.typical, abs=0.05)
        for name, share in zip(one.columns, one.shares, strict=True):
            totals[name] += abs(share)
    most = max(totals.values())
    assert all(totals[name] < 0.05 * most for name in names if name.startswith("noise"))
