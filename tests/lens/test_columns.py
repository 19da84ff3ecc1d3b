"""Contributions and interactions of columns: complete and as they are defined."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.lens.columns import (
    column_contributions,
    column_interactions,
    embed_columns,
    outputs_from,
    scores_from,
)
from tests.conftest import close
from tests.lens.test_look import table_model, table_rows
from tests.portable import training


def tokens_of(model: Any, count: int) -> Tensor:
    return embed_columns(model, *table_rows(count)).detach()


@pytest.mark.parametrize("kind", ("ft", "tab", "saint"))
def test_outputs_from_tokens_are_those_of_the_model(kind: str) -> None:
    model, rows = table_model(kind), table_rows()
    close(outputs_from(model, embed_columns(model, *rows)), model(*rows).mean(dim=1))


@pytest.mark.parametrize("members", (1, 2))
@pytest.mark.parametrize("kind", ("ft", "tab"))
def test_contributions_are_complete(kind: str, members: int) -> None:
    model = table_model(kind, members=members)
    rows, rest = tokens_of(model, 3), tokens_of(model, 7)
    result = column_contributions(model, rows, rest, steps=256)
    spread = float((result.output - result.baseline).abs().max())
    assert result.contributions.shape == (3, 4) and result.completeness < 0.1 * spread
    whole = scores_from(model, rest).detach()
    for row in range(3):  # 7 draws: every row is compared with every background row
        assert float(result.baseline[row]) == pytest.approx(
            float(whole[:, int(result.output_index[row])].mean())
        )


def test_rows_that_attend_to_rows_are_explained_one_draw_at_a_time() -> None:
    model = table_model("saint")
    rows, rest = tokens_of(model, 3), tokens_of(model, 7)
    result = column_contributions(model, rows, rest, draws=2, steps=4)
    assert result.contributions.shape == (3, 4) and bool(result.contributions.isfinite().all())


@pytest.mark.parametrize("repeats", (False, True))
def test_few_draws_estimate_the_mean_over_all(repeats: bool) -> None:
    """Rows of a table are compared with others, not with themselves, whatever their order."""
    model, rows = table_model("ft"), tokens_of(table_model("ft"), 200)
    if repeats:  # the first column repeats every 25 rows, as in a file of days in several shops
        rows[:, 0] = rows[:25, 0].repeat(8, 1)
    few = column_contributions(model, rows, rows, draws=4).contributions.abs().mean(dim=0)
    many = column_contributions(model, rows, rows, draws=64).contributions.abs().mean(dim=0)
    assert bool((few > 0.9 * many).all()) and bool((few < 1.7 * many).all())


def test_interactions_by_hand() -> None:
    model = table_model("ft")
    rows, rest = tokens_of(model, 2), tokens_of(model, 5)
    result = column_interactions(model, rows, rest, (0, 0, 1, 2), (0, 1, 2))
    assert result.pairs == ((0, 1), (0, 2), (1, 2))
    output = scores_from(model, rows).argmax(dim=1)

    def mean(row: int, kept: list[int]) -> float:
        total = 0.0
        for other in rest:
            mixed = other.clone()
            mixed[kept] = rows[row, kept]
            total += float(scores_from(model, mixed[None]).detach()[0, output[row]]) / 5
        return total

    for row in range(2):
        alone = mean(row, [0, 1]) + mean(row, [3]) - mean(row, [])
        expected = mean(row, [0, 1, 3]) - alone
        assert float(result.values[1, row]) == pytest.approx(expected)
    close(result.strength, result.values.square().mean(dim=1).sqrt())
    assert bool((result.h >= 0).all())


def test_columns_that_only_add_up_do_not_interact() -> None:
    model = table_model("tab")
    with torch.no_grad():
        for layer in model.head:  # no ReLU is ever at 0, so the network is a sum of its inputs
            if isinstance(layer, torch.nn.Linear):
                layer.bias.add_(1000)
                layer.weight.abs_()
        model.norm = torch.nn.Identity()
    rows, rest = (torch.rand(n, 4, 16).double() for n in (3, 4))
    result = column_interactions(model, rows, rest, (0, 1, 2, 3), (0, 1))
    close(result.values, torch.zeros_like(result.values), 1e-8)
    with pytest.raises(InputError, match="at least one row"):
        column_contributions(model, rows, rest[:0])


def test_what_is_added_to_all_logits_is_not_explained() -> None:
    model, rows = table_model("ft"), tokens_of(table_model("ft"), 2)
    raw, margins = outputs_from(model, rows), scores_from(model, rows)
    assert raw.shape[1] > 1  # the model has several classes
    close(margins.sum(dim=1), torch.zeros_like(margins[:, 0]))
    others = (raw.sum(dim=1) - raw[:, 0]) / (raw.shape[1] - 1)
    close(margins[:, 0], raw[:, 0] - others)


@pytest.mark.slow
@pytest.mark.trains
def test_a_planted_table_is_explained() -> None:
    """y = 1.5 main + 2 A·B + noise: the parts, their interaction, and nothing for noise columns."""
    from addnorm.tabular import FTTransformerRegressor
    from addnorm.tabular.explain import explain_row, explain_table

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
    result = explain_table(model, some, y[:300])
    shares = dict(zip(result.columns, result.gradient, strict=True))
    most = max(shares.values())
    assert {name for name, share in shares.items() if share > 0.05 * most} == {"main", "a", "b"}
    pair, *others = result.interactions
    assert set(pair[:2]) == {"a", "b"} and pair[2] == pytest.approx(2.0, rel=0.4)
    assert all(other[2] < 0.2 * pair[2] for other in others)
    totals = dict.fromkeys(names, 0.0)
    for row in range(20):
        one = explain_row(model, some, row)
        assert one.baseline == pytest.approx(float(y.mean()), abs=0.5)
        assert sum(one.contributions) == pytest.approx(one.output - one.baseline, abs=0.05)
        for name, share in zip(one.columns, one.contributions, strict=True):
            totals[name] += abs(share)
    most = max(totals.values())
    assert all(totals[name] < 0.05 * most for name in names if name.startswith("noise"))


def mixed_table(count: int) -> tuple[dict[str, Any], Any]:
    """|m| + a · sign(b), b a category; noise that is correlated, skewed or categorical."""
    rng = np.random.default_rng(1000)
    base, columns = rng.normal(size=count), {}
    for n in range(4):  # correlated with one another alone
        columns[f"noise {n}"] = base + 0.3 * rng.normal(size=count)
    columns["noise 4"] = 1e5 * np.exp(2 * rng.normal(size=count))
    columns["noise 5"] = rng.choice(list("abcd"), count)
    columns["noise 6"] = rng.choice([0, 1], count)
    columns["m"] = rng.uniform(-2, 2, count)
    columns["a"] = np.exp(rng.normal(size=count)) / 1000
    columns["b"] = rng.choice(["up", "down"], count)
    sign = np.where(columns["b"] == "up", 1, -1)
    y = 2 * np.abs(columns["m"]) + 2 * np.log(1000 * columns["a"]) * sign
    return columns, y + 0.2 * rng.normal(size=count)


@pytest.mark.slow
@pytest.mark.trains
def test_a_planted_table_of_mixed_columns_is_explained_with_the_defaults() -> None:
    from addnorm.tabular import FTTransformerRegressor
    from addnorm.tabular.explain import explain_table

    table, y = mixed_table(2000)
    train, held = (
        {name: column[part] for name, column in table.items()}
        for part in (slice(1700), slice(1700, None))
    )
    model = FTTransformerRegressor(random_state=training.seed).fit(train, y[:1700])
    result = explain_table(model, held, y[1700:], shap=False)
    shares = dict(zip(result.columns, result.gradient, strict=True))
    most = max(shares.values())
    assert {name for name, share in shares.items() if share > 0.05 * most} == {"m", "a", "b"}
    assert set(result.interactions[0][:2]) == {"a", "b"}
    assert result.interactions[1][2] < 0.2 * result.interactions[0][2]
