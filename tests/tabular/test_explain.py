"""Each measure of which columns matter against a naive loop: permutation, gradients, attention."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from addnorm.data.table.encode import EncodedTable
from addnorm.data.table.frame import Frame
from addnorm.errors import InputError
from addnorm.models.tabular import TabTransformerModel
from addnorm.tabular import (
    FTTransformerClassifier,
    FTTransformerRegressor,
    TabTransformerClassifier,
    TabTransformerRegressor,
)
from addnorm.tabular.explain import (
    MAX_EXPLAINED_ROWS,
    Explanation,
    RowExplanation,
    expected_gradients,
    explain_row,
    explain_table,
    mean_attention,
)
from addnorm.tabular.importance import permutation_importance
from tests.tabular.data import QUICK, people

X, Y = people(120)
Z = 300 + 60 * X.columns["noise"] + np.nan_to_num(X.columns["age"], nan=40)
THREE = np.where(X.columns["noise"] > 0.4, "high", Y)


@pytest.fixture(scope="module")
def numbers() -> FTTransformerRegressor:
    return FTTransformerRegressor(**QUICK | {"members": 2}).fit(X, Z)


@pytest.fixture(scope="module")
def classes() -> FTTransformerClassifier:
    return FTTransformerClassifier(**QUICK).fit(X, THREE)


def tokens_of(model: Any) -> dict[str, list[int]]:
    """Return the tokens of each column, by name: `start (month)` is a token of `start`."""
    tokens: dict[str, list[int]] = {}
    for index, name in enumerate(model.encoder_.names):
        tokens.setdefault(name.split(" (")[0], []).append(index)
    return tokens


@pytest.mark.trains
@pytest.mark.parametrize("task", ("numbers", "classes"))
def test_permutation_importance_is_the_mean_increase_of_the_loss(
    task: str, numbers: FTTransformerRegressor, classes: FTTransformerClassifier
) -> None:
    """Each column's tokens are shuffled together, in the same order for every column."""
    model: Any = numbers if task == "numbers" else classes
    table = model.encoder_.encode(X)
    if task == "numbers":
        target = torch.from_numpy((Z - model.mean_) / model.scale_).float()
    else:
        target = torch.tensor([model.classes_.tolist().index(y) for y in THREE])

    def loss(x: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]) -> float:
        with torch.no_grad():
            value = model.model_.answers(model.model_(torch.from_numpy(x), torch.from_numpy(codes)))
        total = 0.0
        for y, t in zip(value, target, strict=True):
            if task == "numbers":
                total += float(y[0] - t) ** 2
            else:
                total -= float(y.log_softmax(0)[t])
        return total / len(target)

    x, codes = table.numbers.numpy(), table.codes.numpy()
    base, rng = loss(x, codes), np.random.default_rng(7)
    columns, count = tokens_of(model), x.shape[1]
    expected = dict.fromkeys(columns, 0.0)
    for _ in range(2):
        order = rng.permutation(120)
        for name, tokens in columns.items():
            other, others = x.copy(), codes.copy()
            for t in tokens:
                if t < count:
                    other[:, t] = x[order, t]
                else:
                    others[:, t - count] = codes[order, t - count]
            expected[name] += (loss(other, others) - base) / 2
    names = list(columns)
    column_of_token = [names.index(name.split(" (")[0]) for name in model.encoder_.names]
    result = permutation_importance(
        model.model_, table, target, column_of_token, np.random.default_rng(7), 2
    )
    assert result.mean(axis=0).tolist() == pytest.approx(list(expected.values()), abs=1e-5)
    assert torch.equal(table.numbers.isnan(), model.encoder_.encode(X).numbers.isnan())
    value = explain_table(model, X, Z if task == "numbers" else THREE, seed=7, repeats=2)
    assert value.columns == tuple(names)
    assert value.permutation == pytest.approx(tuple(expected.values()), abs=1e-5)


@pytest.mark.trains
def test_gradients_of_the_parts_of_a_date_are_summed(numbers: FTTransformerRegressor) -> None:
    """Contributions of the parts are summed with their signs, then |sums| averaged over rows."""
    assert len(tokens_of(numbers)["start"]) > 1
    result = explain_table(numbers, X, Z)
    contributions = (
        expected_gradients(numbers.model_, numbers.encoder_.encode(X))[0].double().numpy()
    )
    for name, value in zip(result.columns, result.gradient, strict=True):
        each = [abs(sum(row[t] for t in tokens_of(numbers)[name])) for row in contributions]
        assert value == pytest.approx(sum(each) / 120 * numbers.scale_, rel=1e-4)
    assert numbers.scale_ == pytest.approx(Z.std(), rel=0.3), "in the target's own unit"


@pytest.mark.trains
def test_attention_to_the_parts_of_a_date_is_summed(numbers: FTTransformerRegressor) -> None:
    result = explain_table(numbers, X, Z)
    _, _, summary = mean_attention(numbers, numbers.encoder_.encode(X))
    assert summary is not None and result.attention is not None
    for name, value in zip(result.columns, result.attention, strict=True):
        assert value == pytest.approx(sum(float(summary[t]) for t in tokens_of(numbers)[name]))


@pytest.mark.trains
def test_contributions_are_in_units_of_the_target(numbers: FTTransformerRegressor) -> None:
    """The baseline (mean of the background rows) plus the contributions is the prediction."""
    one = explain_row(numbers, X, 3)
    assert one.baseline_name == "64 rows of the table"
    assert one.output == pytest.approx(float(numbers.predict(X)[3]), rel=1e-5)
    assert one.baseline + sum(one.contributions) == pytest.approx(one.output, rel=0.01)
    assert one.output_name == "the predicted number"
    assert one.columns == ("age", "noise", "start", "job")
    assert one.values[one.columns.index("job")] == X.columns["job"][3]
    background = X.take(np.arange(40, 60))
    other = explain_row(numbers, X, 3, background=background)
    assert other.baseline_name == "20 rows of the background"
    assert other.baseline == pytest.approx(float(numbers.predict(background).mean()), rel=1e-5)
    assert other.baseline + sum(other.contributions) == pytest.approx(other.output, rel=0.01)
    same = explain_row(numbers, X, 3, background=X.take(np.array([3])))
    assert same.contributions == pytest.approx([0] * 4, abs=1e-3)


@pytest.mark.trains
def test_values_of_a_row_with_everything_missing_are_shown_as_missing(
    numbers: FTTransformerRegressor,
) -> None:
    missing_row = Frame("t", {name: column[:1].copy() for name, column in X.columns.items()})
    missing_row.columns["age"][0] = missing_row.columns["noise"][0] = np.nan
    missing_row.columns["job"][0], missing_row.columns["start"][0] = None, np.datetime64("NaT")
    missing = explain_row(numbers, missing_row, 0, background=missing_row)
    assert set(missing.values) == {"missing"}
    assert missing.output == pytest.approx(float(numbers.predict(missing_row)[0]), rel=1e-5)
    assert not any(missing.contributions)


@pytest.mark.trains
def test_a_single_row_is_compared_with_rows_like_those_of_the_training(
    numbers: FTTransformerRegressor, classes: FTTransformerClassifier
) -> None:
    for model in (numbers, classes):
        one = explain_row(model, X.take(np.array([3])), 0)
        assert one.baseline_name == ("64 rows, columns drawn independently from the training data")
        total = one.baseline + sum(one.contributions)
        assert total == pytest.approx(one.output, rel=0.02, abs=0.02)
        assert one == explain_row(model, X.take(np.array([3])), 0)


@pytest.mark.trains
def test_the_baseline_of_a_single_row_is_near_the_base_rate() -> None:
    """A category that nearly all rows share is not drawn as often as the rare ones."""
    rng = np.random.default_rng(0)
    kind = rng.choice(["common", "a", "b", "c"], p=[0.91, 0.03, 0.03, 0.03], size=400)
    table = Frame("t", {"kind": kind.astype(object), "x": rng.normal(size=400)})
    rare = np.where(kind == "common", "no", "yes")
    model = FTTransformerClassifier(**QUICK | {"epochs": 20, "learning_rate": 1e-2})
    model.fit(table, rare)
    one = explain_row(model, table.take(np.array([0])), 0, shap=False)
    many = explain_row(model, table, 0, shap=False)
    assert one.baseline < 0 and one.baseline == pytest.approx(many.baseline, abs=1.0)
    old = tuple(replace(rule, shares=()) for rule in model.encoder_.categories)
    model.encoder_ = replace(model.encoder_, categories=old)
    evenly = explain_row(model, table.take(np.array([0])), 0, shap=False)
    assert "saved without frequencies" in evenly.baseline_name
    assert evenly.baseline > one.baseline + 1


@pytest.mark.trains
def test_interactions_of_a_row(numbers: FTTransformerRegressor) -> None:
    """Compare one pair with its definition: joint effect minus the single effects."""
    rest = X.take(np.arange(40, 50))
    one = explain_row(numbers, X, 3, background=rest)
    effects = {frozenset(pair[:2]): pair[2] for pair in one.interactions}
    assert len(effects) == 6

    def mean_with(*kept: str) -> float:
        mixed = {name: column.copy() for name, column in rest.columns.items()}
        for name in kept:
            mixed[name][:] = X.columns[name][3]
        return float(numbers.predict(Frame("t", mixed)).mean())

    expected = mean_with("age", "noise") - mean_with("age") - mean_with("noise") + mean_with()
    assert effects[frozenset(("age", "noise"))] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    sizes = [abs(pair[2]) for pair in one.interactions]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.trains
def test_a_row_explanation_is_for_the_most_likely_class(
    classes: FTTransformerClassifier,
) -> None:
    for row in (0, 5, 119):
        one = explain_row(classes, X, row)
        likeliest = classes.predict(X.take(np.array([row])))[0]
        assert one.output_name == f"the margin of {likeliest}"
        value = classes._predict(X.take(np.array([row])))[0]
        margin = float(value.max()) - (float(value.sum()) - float(value.max())) / (len(value) - 1)
        assert one.output == pytest.approx(margin / classes.temperature_, rel=1e-4)
        # The margin decides the probability: on the calibrated scale they agree.
        logits = torch.as_tensor(value) / classes.temperature_
        assert one.probability == pytest.approx(float(logits.softmax(-1).max()), rel=1e-4)
        probability = classes.predict_proba(X.take(np.array([row])))[0].max()
        assert one.probability == pytest.approx(float(probability), rel=1e-6)
    for row in (-1, 120):
        with pytest.raises(InputError, match=f"row must be 0 to 119: got {row}"):
            explain_row(classes, X, row)


def test_ranked_sorts_by_importance() -> None:
    one = RowExplanation(
        columns=("a", "b", "c"),
        values=("1", "2", "3"),
        contributions=(0.5, -2.0, 1.0),
        output=0.0,
        baseline=0.5,
        output_name="",
    )
    assert one.ranked() == [("b", "2", -2.0), ("c", "3", 1.0), ("a", "1", 0.5)]
    every = Explanation(
        columns=("a", "b", "c"),
        permutation=(0.1, -3.0, 0.7),
        gradient=(0.0, 0.0, 0.0),
        attention=None,
        column_attention=np.zeros((0, 0)),
        attention_columns=(),
        agreement={},
    )
    assert every.ranked() == [("c", 0.7), ("a", 0.1), ("b", -3.0)]


@pytest.mark.trains
def test_at_most_500_rows_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows some are drawn by the seed, with their targets."""
    monkeypatch.setattr("addnorm.tabular.explain.MAX_EXPLAINED_ROWS", 50)
    monkeypatch.setattr("addnorm.lens.columns.CHUNK", 50)
    model = FTTransformerRegressor(**QUICK).fit(X, Z)
    rows: list[int] = []
    forward = model.model_.head.forward

    def count(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return forward(hidden)

    monkeypatch.setattr(model.model_.head, "forward", count)
    one, again, other = (explain_table(model, X, Z, seed=seed, shap=False) for seed in (0, 0, 1))
    assert max(rows) <= 64 and one.permutation == again.permutation != other.permutation
    assert one.ranked()[0][0] == "noise", "rows keep their targets"
    assert MAX_EXPLAINED_ROWS == 500


@pytest.mark.trains
@pytest.mark.parametrize("kind", (TabTransformerClassifier, TabTransformerRegressor))
def test_tab_transformer_has_no_summary(kind: Any) -> None:
    """Only categories attend to each other; numbers are explained too."""
    table = Frame("t", {**X.columns, "other": X.columns["job"][::-1]})
    y = Y if kind is TabTransformerClassifier else Z
    model = kind(**QUICK | {"epochs": 1}).fit(table, y)
    result = explain_table(model, table, y)
    assert result.attention is None and set(result.agreement) == {"permutation and gradient"}
    assert result.attention_columns == ("job", "other") and result.column_attention.shape == (2, 2)
    assert result.column_attention.sum(axis=1).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert len(result.gradient) == 5 and all(share >= 0 for share in result.gradient)
    plain = kind(**QUICK | {"epochs": 1}).fit(X.without("job"), y)
    assert isinstance(plain.model_, TabTransformerModel)
    alone = explain_table(plain, X.without("job"), y)
    assert alone.attention_columns == () and alone.column_attention.shape == (0, 0)
    assert alone.gradient[alone.columns.index("noise")] > 0


@pytest.mark.trains
def test_gradients_of_numbers_in_tab_transformer() -> None:
    """A number is one element of the input, and its gradient is taken there."""
    model = TabTransformerRegressor(**QUICK | {"epochs": 1}).fit(X, Z)
    table = model.encoder_.encode(X.take(np.arange(5)))
    body: Any = model.model_
    filled = body.impute(table.numbers).detach()
    words = body.tokens(table.numbers, table.codes).detach()
    result, _, _ = expected_gradients(body, table, table.take(torch.tensor([4])), draws=1, steps=1)
    for row in range(5):
        point = ((filled[4] + filled[row]) / 2).requires_grad_()
        outputs = body.from_tokens(point[None], ((words[4] + words[row]) / 2)[None])
        body.answers(outputs).sum().backward()
        assert point.grad is not None
        expected = ((filled[row] - filled[4]) * point.grad).tolist()
        assert result[row, : len(filled[0])].tolist() == pytest.approx(expected, abs=1e-5)


def test_explaining_needs_a_fitted_estimator() -> None:
    for explain in (lambda m: explain_table(m, X, Y), lambda m: explain_row(m, X, 0)):
        with pytest.raises(NotFittedError):
            explain(FTTransformerClassifier())


@pytest.mark.trains
def test_explaining_does_not_change_the_model(classes: FTTransformerClassifier) -> None:
    before = classes.predict_proba(X)
    weights = [p.grad for p in classes.model_.parameters()]
    explain_table(classes, X.take(np.arange(30)), THREE[:30])
    explain_row(classes, X, 1)
    assert np.array_equal(classes.predict_proba(X), before)
    assert [p.grad for p in classes.model_.parameters()] == weights
    assert list(classes.feature_names_in_) == X.names


@pytest.mark.trains
def test_columns_are_matched_by_name(classes: FTTransformerClassifier) -> None:
    """Their order in the explained rows does not matter, and does not change the estimator."""
    rows, labels = X.take(np.arange(30)), THREE[:30]
    reordered = Frame("t", dict(reversed(rows.columns.items())))
    one, other = explain_table(classes, rows, labels), explain_table(classes, reordered, labels)
    assert one.columns == other.columns and one.permutation == other.permutation
    assert explain_row(classes, reordered, 2) == explain_row(classes, rows, 2)
    assert list(classes.feature_names_in_) == X.names
    with pytest.raises(InputError, match="it lacks 'age'"):
        explain_table(classes, rows.without("age"), labels)
    with pytest.raises(InputError, match="X has 3 features, but FTTransformerClassifier is expect"):
        explain_row(classes, np.zeros((5, 3)), 0)
    assert classes.n_features_in_ == 4


@pytest.mark.trains
def test_identical_rows_have_zero_contributions(classes: FTTransformerClassifier) -> None:
    """The baseline of identical rows is the row itself."""
    same = X.take(np.zeros(4, dtype=int))
    table = classes.encoder_.encode(same)
    assert isinstance(table, EncodedTable)
    contributions, end, start = expected_gradients(classes.model_, table)
    assert torch.allclose(contributions, torch.zeros_like(contributions), atol=1e-6)
    assert torch.allclose(end, start, atol=1e-5)


@pytest.mark.trains
def test_a_table_without_rows_is_refused(numbers: FTTransformerRegressor) -> None:
    none = X.take(np.array([], dtype=int))
    with pytest.raises(InputError, match="must have one row or more: got none"):
        explain_table(numbers, none, Z[:0])
