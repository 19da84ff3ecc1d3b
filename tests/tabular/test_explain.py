"""Which columns matter, each view by hand: by shuffling, by gradients, by attention."""

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
    MOST_ROWS,
    Explanation,
    RowExplanation,
    attend,
    explain,
    explain_row,
    integrated,
    permute,
)
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
    """The tokens of each column, by their names: `start (month)` is one of start's."""
    found: dict[str, list[int]] = {}
    for place, name in enumerate(model.encoder_.names):
        found.setdefault(name.split(" (")[0], []).append(place)
    return found


@pytest.mark.trains
@pytest.mark.parametrize("task", ("numbers", "classes"))
def test_permutation_is_the_mean_rise_of_the_loss(
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
            told = model.model_(torch.from_numpy(x), torch.from_numpy(codes)).mean(dim=1)
        total = 0.0
        for y, t in zip(told, target, strict=True):
            if task == "numbers":
                total += float(y[0] - t) ** 2
            else:
                total -= float(y.log_softmax(0)[t])
        return total / len(target)

    x, codes = table.numbers.numpy(), table.codes.numpy()
    base, rng = loss(x, codes), np.random.default_rng(7)
    columns, count = tokens_of(model), x.shape[1]
    wanted = dict.fromkeys(columns, 0.0)
    for _ in range(2):
        order = rng.permutation(120)
        for name, tokens in columns.items():
            other, others = x.copy(), codes.copy()
            for t in tokens:
                if t < count:
                    other[:, t] = x[order, t]
                else:
                    others[:, t - count] = codes[order, t - count]
            wanted[name] += (loss(other, others) - base) / 2
    names = list(columns)
    member = [names.index(name.split(" (")[0]) for name in model.encoder_.names]
    found = permute(model.model_, table, target, member, np.random.default_rng(7), 2)
    assert found.tolist() == pytest.approx(list(wanted.values()), abs=1e-5)
    assert torch.equal(table.numbers.isnan(), model.encoder_.encode(X).numbers.isnan())
    told = explain(model, X, Z if task == "numbers" else THREE, seed=7, repeats=2)
    assert told.columns == tuple(names)
    assert told.permutation == pytest.approx(tuple(wanted.values()), abs=1e-5)


@pytest.mark.trains
def test_gradients_of_a_date_are_those_of_its_parts(numbers: FTTransformerRegressor) -> None:
    """Shares of the parts are added with their signs, then sized, then averaged over rows."""
    assert len(tokens_of(numbers)["start"]) > 1
    found = explain(numbers, X, Z)
    shares = integrated(numbers.model_, numbers.encoder_.encode(X))[0].double().numpy()
    for name, told in zip(found.columns, found.gradient, strict=True):
        each = [abs(sum(row[t] for t in tokens_of(numbers)[name])) for row in shares]
        assert told == pytest.approx(sum(each) / 120 * numbers.scale_, rel=1e-4)
    assert numbers.scale_ == pytest.approx(Z.std(), rel=0.3), "in the target's own unit"


@pytest.mark.trains
def test_attention_to_a_date_is_that_to_its_parts(numbers: FTTransformerRegressor) -> None:
    found = explain(numbers, X, Z)
    _, _, summary = attend(numbers, numbers.encoder_.encode(X))
    assert summary is not None and found.attention is not None
    for name, told in zip(found.columns, found.attention, strict=True):
        assert told == pytest.approx(sum(float(summary[t]) for t in tokens_of(numbers)[name]))


@pytest.mark.trains
def test_shares_of_one_row_are_in_the_targets_unit(numbers: FTTransformerRegressor) -> None:
    """The mean answer of the background rows, plus the shares, is the row's answer."""
    one = explain_row(numbers, X, 3)
    assert one.baseline == "64 rows of the table"
    assert one.answer == pytest.approx(float(numbers.predict(X)[3]), rel=1e-5)
    assert one.typical + sum(one.shares) == pytest.approx(one.answer, rel=0.01)
    assert one.about == "the number predicted" and one.columns == ("age", "noise", "start", "job")
    assert one.values[one.columns.index("job")] == X.columns["job"][3]
    given = X.take(np.arange(40, 60))
    other = explain_row(numbers, X, 3, background=given)
    assert other.baseline == "20 rows of the background"
    assert other.typical == pytest.approx(float(numbers.predict(given).mean()), rel=1e-5)
    assert other.typical + sum(other.shares) == pytest.approx(other.answer, rel=0.01)
    same = explain_row(numbers, X, 3, background=X.take(np.array([3])))
    assert same.shares == pytest.approx([0] * 4, abs=1e-3)


@pytest.mark.trains
def test_a_row_alone_is_compared_with_drawn_ones(
    numbers: FTTransformerRegressor, classes: FTTransformerClassifier
) -> None:
    for model in (numbers, classes):
        one = explain_row(model, X.take(np.array([3])), 0)
        assert one.baseline == "64 rows drawn column by column"
        assert one.typical + sum(one.shares) == pytest.approx(one.answer, rel=0.02, abs=0.02)
        assert one == explain_row(model, X.take(np.array([3])), 0)


@pytest.mark.trains
def test_a_row_has_its_interactions(numbers: FTTransformerRegressor) -> None:
    """By hand for one pair: what age and noise do together, less what each does alone."""
    rest = X.take(np.arange(40, 50))
    one = explain_row(numbers, X, 3, background=rest)
    found = {frozenset(pair[:2]): pair[2] for pair in one.interactions}
    assert len(found) == 6

    def mean(*kept: str) -> float:
        mixed = {name: column.copy() for name, column in rest.columns.items()}
        for name in kept:
            mixed[name][:] = X.columns[name][3]
        return float(numbers.predict(Frame("t", mixed)).mean())

    wanted = mean("age", "noise") - mean("age") - mean("noise") + mean()
    assert found[frozenset(("age", "noise"))] == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    sizes = [abs(pair[2]) for pair in one.interactions]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.trains
def test_one_row_of_several_classes_is_about_the_likeliest(
    classes: FTTransformerClassifier,
) -> None:
    for row in (0, 5, 119):
        one = explain_row(classes, X, row)
        likeliest = classes.predict(X.take(np.array([row])))[0]
        assert one.about == f"the logit of {likeliest}"
        told = classes._answers(X.take(np.array([row])))[0]
        assert one.answer == pytest.approx(float(told.max()) / classes.temperature_, rel=1e-4)
        sure = classes.predict_proba(X.take(np.array([row])))[0].max()
        assert one.probability == pytest.approx(float(sure), rel=1e-6)
    for row in (-1, 120):
        with pytest.raises(InputError, match=f"row must be 0 to 119: got {row}"):
            explain_row(classes, X, row)


def test_the_strongest_come_first() -> None:
    one = RowExplanation(
        columns=("a", "b", "c"),
        values=("1", "2", "3"),
        shares=(0.5, -2.0, 1.0),
        answer=0.0,
        typical=0.5,
        about="",
    )
    assert one.ranked() == [("b", "2", -2.0), ("c", "3", 1.0), ("a", "1", 0.5)]
    every = Explanation(
        columns=("a", "b", "c"),
        permutation=(0.1, -3.0, 0.7),
        gradient=(0.0, 0.0, 0.0),
        attention=None,
        looks=np.zeros((0, 0)),
        looking=(),
        agreement={},
    )
    assert every.ranked() == [("c", 0.7), ("a", 0.1), ("b", -3.0)]


@pytest.mark.trains
def test_no_more_rows_are_looked_at_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows some, drawn by the seed, with their own answers."""
    monkeypatch.setattr("addnorm.tabular.explain.MOST_ROWS", 50)
    monkeypatch.setattr("addnorm.lens.columns.CHUNK", 50)
    model = FTTransformerRegressor(**QUICK).fit(X, Z)
    rows: list[int] = []
    forward = model.model_.head.forward

    def count(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return forward(hidden)

    monkeypatch.setattr(model.model_.head, "forward", count)
    one, again, other = (explain(model, X, Z, seed=seed) for seed in (0, 0, 1))
    assert max(rows) <= 64 and one.permutation == again.permutation != other.permutation
    assert one.ranked()[0][0] == "noise", "rows keep their answers"
    assert MOST_ROWS == 500


@pytest.mark.trains
@pytest.mark.parametrize("kind", (TabTransformerClassifier, TabTransformerRegressor))
def test_tab_transformer_has_no_summary(kind: Any) -> None:
    """Categories look at one another; numbers stand beside, and are explained all the same."""
    table = Frame("t", {**X.columns, "other": X.columns["job"][::-1]})
    y = Y if kind is TabTransformerClassifier else Z
    model = kind(**QUICK | {"epochs": 1}).fit(table, y)
    found = explain(model, table, y)
    assert found.attention is None and set(found.agreement) == {"permutation and gradient"}
    assert found.looking == ("job", "other") and found.looks.shape == (2, 2)
    assert found.looks.sum(axis=1).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert len(found.gradient) == 5 and all(share >= 0 for share in found.gradient)
    plain = kind(**QUICK | {"epochs": 1}).fit(X.without("job"), y)
    assert isinstance(plain.model_, TabTransformerModel)
    alone = explain(plain, X.without("job"), y)
    assert alone.looking == () and alone.looks.shape == (0, 0)
    assert alone.gradient[alone.columns.index("noise")] > 0


@pytest.mark.trains
def test_gradients_of_numbers_beside_the_stack() -> None:
    """In TabTransformer a number is one place of the network's input, where its slope is taken."""
    model = TabTransformerRegressor(**QUICK | {"epochs": 1}).fit(X, Z)
    table = model.encoder_.encode(X.take(np.arange(5)))
    body: Any = model.model_
    filled = body.impute(table.numbers).detach()
    words = body.tokens(table.numbers, table.codes).detach()
    found, _, _ = integrated(body, table, table.take(torch.tensor([4])), draws=1, steps=1)
    for row in range(5):
        at = ((filled[4] + filled[row]) / 2).requires_grad_()
        body.from_tokens(at[None], ((words[4] + words[row]) / 2)[None]).sum().backward()
        assert at.grad is not None
        wanted = ((filled[row] - filled[4]) * at.grad).tolist()
        assert found[row, : len(filled[0])].tolist() == pytest.approx(wanted, abs=1e-5)


def test_what_is_not_fitted_cannot_be_explained() -> None:
    for ask in (lambda m: explain(m, X, Y), lambda m: explain_row(m, X, 0)):
        with pytest.raises(NotFittedError):
            ask(FTTransformerClassifier())


@pytest.mark.trains
def test_explaining_leaves_the_model_as_it_was(classes: FTTransformerClassifier) -> None:
    before = classes.predict_proba(X)
    weights = [p.grad for p in classes.model_.parameters()]
    explain(classes, X.take(np.arange(30)), THREE[:30])
    explain_row(classes, X, 1)
    assert np.array_equal(classes.predict_proba(X), before)
    assert [p.grad for p in classes.model_.parameters()] == weights
    assert list(classes.feature_names_in_) == X.names


@pytest.mark.trains
def test_columns_are_matched_by_name(classes: FTTransformerClassifier) -> None:
    """Their order in the rows to explain does not matter, and is not taken over."""
    some, answers = X.take(np.arange(30)), THREE[:30]
    turned = Frame("t", dict(reversed(some.columns.items())))
    one, other = explain(classes, some, answers), explain(classes, turned, answers)
    assert one.columns == other.columns and one.permutation == other.permutation
    assert explain_row(classes, turned, 2) == explain_row(classes, some, 2)
    assert list(classes.feature_names_in_) == X.names
    with pytest.raises(InputError, match="it lacks 'age'"):
        explain(classes, some.without("age"), answers)
    with pytest.raises(InputError, match="X has 3 features, but FTTransformerClassifier is expect"):
        explain_row(classes, np.zeros((5, 3)), 0)
    assert classes.n_features_in_ == 4


@pytest.mark.trains
def test_rows_alike_have_no_shares(classes: FTTransformerClassifier) -> None:
    """The typical row of rows that are all one is that row: nothing is left to share out."""
    same = X.take(np.zeros(4, dtype=int))
    table = classes.encoder_.encode(same)
    assert isinstance(table, EncodedTable)
    shares, end, start = integrated(classes.model_, table)
    assert torch.allclose(shares, torch.zeros_like(shares), atol=1e-6)
    assert torch.allclose(end, start, atol=1e-5)
