"""Conversion and checks of the arguments of estimators."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from addnorm.data.table.schema import Column, Schema
from addnorm.errors import InputError
from addnorm.tabular.inputs import (
    as_frame,
    describe_columns,
    normalise_weights,
    to_labels,
    to_pair,
    to_seed,
    to_targets,
)

pandas = pytest.importorskip("pandas")


def test_normalised_weights_have_mean_one() -> None:
    result = normalise_weights(np.array([1.0, 3.0, 0.0]))
    assert result.tolist() == pytest.approx([0.75, 2.25, 0.0])
    assert normalise_weights(np.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_a_seed_is_used_and_a_generator_draws_one() -> None:
    assert to_seed(7) == to_seed(np.int64(7)) == 7
    one, two = np.random.RandomState(3), np.random.RandomState(3)
    first = to_seed(one)
    assert first == to_seed(two) and 0 <= first < 2**31 and first != to_seed(one)


def test_an_eval_set_may_be_a_list_of_one_pair() -> None:
    X, y = np.zeros((2, 1)), np.ones(2)
    for values in ((X, y), [X, y], [(X, y)], ([X, y],)[0]):
        result = to_pair(values)
        assert result[0] is X and result[1] is y
    for bad in ((X,), (X, y, y), [(X, y), (X, y)][:1] * 3, 5, {"X": X, "y": y}):
        with pytest.raises(InputError, match=r"eval_set must be a pair \(X, y\)"):
            to_pair(bad)


@pytest.mark.parametrize(
    ("values", "kind"),
    (
        ([True, False], "b"),
        ([1, 2], "i"),
        (["a", "bb"], "U"),
        ([1.0, 2.0], "f"),
    ),
)
def test_object_labels_get_the_dtype_of_their_values(values: list[Any], kind: str) -> None:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    result = to_labels(column)
    assert result.tolist() == values and result.dtype.kind in (kind, "O")
    assert to_labels(values).dtype.kind == kind
    if kind != "f":
        assert result.dtype.kind == kind


@pytest.mark.parametrize(
    ("values", "message"),
    (
        ([0.0, math.nan], "contains NaN or infinity: every row must have a class"),
        ([0.0, math.inf], "contains NaN or infinity: every row must have a class"),
        (["a", None, None], "contains NaN or None: 2 targets are missing"),
        (None, "y must be given"),
    ),
)
def test_every_row_must_have_a_class(values: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        to_labels(values)


def test_numbers_may_be_texts_but_must_be_finite() -> None:
    assert to_targets(np.array(["1.5", "2"])).tolist() == [1.5, 2.0]
    assert to_targets([True, False]).dtype == np.float64
    for bad, message in (
        ([1.0, -math.inf], "contains NaN or infinity: every row must have a number"),
        (["x"], "y must be numbers"),
        (None, "y must be given"),
    ):
        with pytest.raises(InputError, match=message):
            to_targets(bad)


def test_tables_of_every_kind_become_frames(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,x\n2,\n")
    for values in (path, str(path)):
        assert as_frame(values).names == ["a", "b"]
    assert as_frame({"a": [1, 2]}).columns["a"].tolist() == [1.0, 2.0]
    frame = as_frame(pandas.DataFrame({"a": [1, 2]}))
    assert frame.named and frame.columns["a"].tolist() == [1.0, 2.0] and as_frame(frame) is frame
    rows = as_frame([[1, 2], [3, 4]])
    assert not rows.named and rows.columns["x1"].tolist() == [2.0, 4.0]
    assert as_frame(np.array([["a", 1.0], [None, 2.0]], dtype=object)).names == ["x0", "x1"]
    with pytest.raises(InputError, match="X must have a row: found array with 0 sample"):
        as_frame(pandas.DataFrame({"a": []}))


@pytest.mark.parametrize("cell", ({"k": 1}, [1], (1,), {1}))
def test_cells_must_be_scalars(cell: Any) -> None:
    array = np.empty((2, 1), dtype=object)
    array[:, 0] = ["a", "b"]
    array[1, 0] = cell
    message = f"must be a string or a number: got {type(cell).__name__} in X"
    with pytest.raises(TypeError, match=message):
        as_frame(array)


def test_ignored_columns_are_described() -> None:
    schema = Schema(
        columns=(
            Column(name="a", kind="number", note="found"),
            Column(name="b", kind="ignore", note="constant"),
            Column(name="c", kind="ignore"),
        )
    )
    assert describe_columns(schema) == [
        "column 'b' is left out: constant.",
        "column 'c' is left out: as requested.",
    ]
