"""Calibration, training losses and explanations against naive loops."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Frame
from addnorm.errors import InputError
from addnorm.models.tabular import FTTransformerModel
from addnorm.tabular import (
    FTTransformerClassifier,
    FTTransformerRegressor,
    TabTransformerClassifier,
)
from addnorm.tabular.compare import compare, matrix, small_categories
from addnorm.tabular.explain import (
    expected_gradients,
    explain_row,
    explain_table,
    mean_attention,
    spearman,
)
from addnorm.tabular.fitting import drop_cells, losses, predict_outputs, swap_cells
from addnorm.training.calibration import fit_temperature, logits_of, probabilities_of
from tests.tabular.data import QUICK, people

# ── Temperature ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("classes", (2, 4))
@pytest.mark.parametrize("true", (0.5, 1.0, 3.0))
def test_the_true_temperature_is_recovered(classes: int, true: float) -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(20_000, classes)
    target = torch.distributions.Categorical(logits=logits).sample()
    scaled = true * (logits[:, 1:] - logits[:, :1] if classes == 2 else logits)
    result = fit_temperature(scaled, target, torch.ones(20_000))
    assert result == pytest.approx(true, rel=0.05)
    grid = true * torch.linspace(0.9, 1.1, 41)
    values = [
        float(-torch.log_softmax(logits_of(scaled) / t, 1).gather(1, target[:, None]).mean())
        for t in grid
    ]
    assert result == pytest.approx(float(grid[int(np.argmin(values))]), rel=0.005)


def test_temperature_keeps_the_order_of_classes_and_needs_rows() -> None:
    outputs = torch.randn(50, 3)
    for temperature in (0.3, 4.0):
        predicted = probabilities_of(outputs, temperature)
        assert torch.equal(predicted.argmax(dim=1), outputs.argmax(dim=1))
    assert fit_temperature(outputs[:5], torch.zeros(5).long(), torch.ones(5)) == 1.0
    assert fit_temperature(outputs, torch.zeros(50).long(), torch.ones(50)) == 1.0


def test_the_temperature_uses_weights() -> None:
    outputs = 2 * torch.randn(60, 3)
    target = torch.where(torch.arange(60) % 4 > 0, outputs.argmax(dim=1), torch.randint(3, (60,)))
    weight = (torch.arange(60) % 3).float()
    again = torch.repeat_interleave(torch.arange(60), weight.long())
    result = fit_temperature(outputs, target, weight)
    one = torch.ones(len(again))
    assert result == pytest.approx(fit_temperature(outputs[again], target[again], one), rel=1e-6)
    assert result != pytest.approx(fit_temperature(outputs, target, torch.ones(60)), rel=1e-3)


# ── Training ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("classes", (0, 2, 4))
def test_losses_are_means_over_members(classes: int) -> None:
    outputs = torch.randn(5, 3, classes if classes > 2 else 1)
    target = torch.randint(max(classes, 1), (5,)) if classes else torch.randn(5)
    result = losses(outputs, target, classes)
    for row in range(5):
        each = []
        for member in range(3):
            y = outputs[row, member]
            if classes > 2:
                each.append(-float(y.log_softmax(0)[target[row]]))
            elif classes:
                p = float(torch.sigmoid(y[0]))
                each.append(-math.log(p if target[row] else 1 - p))
            else:
                each.append(float((y[0] - target[row]) ** 2))
        assert float(result[row]) == pytest.approx(sum(each) / 3, rel=1e-4)


def test_cells_are_dropped_at_the_given_rate() -> None:
    table = EncodedTable(torch.zeros(4000, 3), torch.full((4000, 2), 5))
    numbers, codes = drop_cells(table, 0.2)
    assert float(numbers.isnan().float().mean()) == pytest.approx(0.2, abs=0.02)
    assert float((codes == 0).float().mean()) == pytest.approx(0.15, abs=0.02)
    assert float((codes == 1).float().mean()) == pytest.approx(0.05, abs=0.02)
    assert drop_cells(table, 0.0)[0] is table.numbers


@pytest.mark.trains
def test_cells_are_swapped_within_their_column() -> None:
    rows = torch.arange(4000)
    table = EncodedTable(torch.stack((rows, rows + 9000), dim=1).float(), rows[:, None] + 100)
    result = swap_cells(table, 0.2)
    for original, part in ((table.numbers, result.numbers), (table.codes, result.codes)):
        changed = (part != original).float().mean(dim=0)
        assert changed.tolist() == pytest.approx([0.2] * len(changed), abs=0.02)
        assert bool((part.amin(dim=0) >= original.amin(dim=0)).all())
        assert bool((part.amax(dim=0) <= original.amax(dim=0)).all())
    assert swap_cells(table, 0.0) is table
    settings = QUICK | {"epochs": 1, "swap_cells": 0.5}
    one, other = (FTTransformerClassifier(**s).fit(X, Y) for s in (settings, QUICK | {"epochs": 1}))
    assert not np.array_equal(one.predict_proba(X), other.predict_proba(X))


# ── Explanations ──────────────────────────────────────────────────────────────────────────────────

X, Y = people()


@pytest.fixture(scope="module")
def fitted() -> FTTransformerClassifier:
    return FTTransformerClassifier(**QUICK | {"epochs": 25}).fit(X, Y)


@pytest.mark.slow
@pytest.mark.trains
def test_informative_columns_rank_first(fitted: FTTransformerClassifier) -> None:
    result = explain_table(fitted, *people(seed=1))
    assert {name for name, _ in result.ranked()[:2]} == {"age", "job"}
    assert result.columns == ("age", "noise", "start", "job")
    assert result.attention is not None and 0 < sum(result.attention) < 1
    assert result.column_attention.shape == (len(result.attention_columns),) * 2
    assert set(result.agreement) == {
        "permutation and gradient",
        "permutation and attention",
        "gradient and attention",
    }
    with pytest.raises(
        InputError, match="X and y must have the same number of rows: got 240 and 2"
    ):
        explain_table(fitted, X, ["yes", "no"])


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("kind", (FTTransformerClassifier, TabTransformerClassifier))
def test_contributions_sum_to_the_difference_from_the_baseline(kind: Any) -> None:
    model = kind(**QUICK | {"epochs": 3}).fit(X, Y)
    one = explain_row(model, X, 4)
    assert sum(one.contributions) == pytest.approx(one.output - one.baseline, abs=0.02, rel=0.03)
    predicted = model.predict_proba(X.take(np.array([4])))[0]
    odds = math.log(predicted[1] / predicted[0])
    assert one.output == pytest.approx(odds, abs=1e-4) and one.output_name == "the log-odds of yes"
    assert one.values[0] == f"{X.columns['age'][4]:g}"
    contributions, end, start = expected_gradients(model.model_, model.encoder_.encode(X), steps=64)
    assert torch.allclose(contributions.sum(dim=1), end - start, atol=0.05, rtol=0.02)
    with pytest.raises(InputError, match="row must be 0 to 239: got 240"):
        explain_row(model, X, 240)


@pytest.mark.trains
def test_gradients_are_taken_on_the_paths_from_background_rows(
    fitted: FTTransformerClassifier,
) -> None:
    """Compare with a loop over rows, background rows, and the three Gauss-Legendre nodes."""
    model, table = fitted.model_, fitted.encoder_.encode(X.take(np.arange(4)))
    assert isinstance(model, FTTransformerModel)
    tokens = model.tokens(table.numbers, table.codes).detach()
    result, _, _ = expected_gradients(model, table, steps=3)
    half = 0.6**0.5 / 2
    nodes = ((0.5 - half, 5 / 18), (0.5, 8 / 18), (0.5 + half, 5 / 18))
    for row in range(4):
        contributions = torch.zeros(tokens.shape[1])
        for start in tokens:
            for node, weight in nodes:
                point = (start + node * (tokens[row] - start)).requires_grad_()
                model.head(model.hidden(point[None])).sum().backward()
                assert point.grad is not None
                contributions += weight * (point.grad * (tokens[row] - start)).sum(dim=1) / 4
        assert result[row].tolist() == pytest.approx(contributions.tolist(), abs=1e-5)


@pytest.mark.trains
def test_attention_of_the_summary_and_between_columns() -> None:
    model = FTTransformerClassifier(**QUICK | {"epochs": 1, "depth": 2}).fit(X, Y)
    table = model.encoder_.encode(X.take(np.arange(5)))
    column_attention, names, summary = mean_attention(model, table)
    assert names == model.encoder_.names and summary is not None
    maps: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        model.model_(table.numbers, table.codes, maps=maps)
    for i in range(len(names) + 1):
        for j in range(len(names)):
            each = [
                float(maps[f"{layer}.attention"][row, head, i, 1 + j])
                for layer in range(2)
                for row in range(5)
                for head in range(2)
            ]
            predicted = float(summary[j]) if i == 0 else float(column_attention[i - 1, j])
            assert predicted == pytest.approx(sum(each) / len(each), abs=1e-6)


@pytest.mark.slow
@pytest.mark.trains
def test_regression_is_explained_in_units_of_the_target() -> None:
    y = 500 + 10 * X.columns["noise"]
    model = FTTransformerRegressor(**QUICK).fit(X, y)
    one = explain_row(model, X, 0)
    assert one.output == pytest.approx(float(model.predict(X.take(np.array([0])))[0]), rel=1e-5)
    assert explain_table(model, X, y).ranked()[0][0] == "noise"


def test_spearman() -> None:
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 90])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert spearman(np.array([1.0, 1, 3, 4]), np.array([1.0, 2, 3, 3])) == pytest.approx(8 / 9)
    assert math.isnan(spearman(np.ones(3), np.arange(3.0)))


@pytest.mark.trains
def test_gradient_boosting_is_compared(fitted: FTTransformerClassifier) -> None:
    encode, target = fitted.encoder_.encode, (Y == "yes").astype(int)
    result = compare((encode(X), target), (encode(X), target), 2)
    assert result[0]["model"] == "HistGradientBoosting" and result[0]["accuracy"] > 0.9
    (first, *_) = compare((encode(X), X.columns["noise"]), (encode(X), X.columns["noise"]), 0)
    assert first["rmse"] < 0.5 and first["fit_seconds"] > 0


def test_missing_values_stay_missing_in_the_matrix() -> None:
    table = EncodedTable(torch.tensor([[1.0], [float("nan")]]), torch.tensor([[0], [7]]))
    assert np.array_equal(matrix(table), [[1.0, np.nan], [np.nan, 7.0]], equal_nan=True)
    many = EncodedTable(torch.zeros(1, 2), torch.tensor([[300, 4]]))
    assert small_categories(many) == [3]


@pytest.mark.trains
def test_outputs_do_not_depend_on_other_rows(fitted: FTTransformerClassifier) -> None:
    table = fitted.encoder_.encode(X)
    whole = predict_outputs(fitted.model_, table, 64)
    for rows in ([3], [9, 8], list(range(40))):
        part = predict_outputs(fitted.model_, table.take(torch.tensor(rows)), 64)
        assert torch.equal(part, whole[rows])
    empty = table.take(torch.tensor([], dtype=torch.long))
    assert predict_outputs(fitted.model_, empty, 64).shape == (0, 1, 1)


@pytest.mark.trains
def test_explaining_accepts_a_dictionary_of_columns(fitted: FTTransformerClassifier) -> None:
    assert isinstance(X, Frame)
    assert explain_row(fitted, dict(X.columns), 0) == explain_row(fitted, X, 0)
