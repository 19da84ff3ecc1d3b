"""What is given to estimators, and what is made of it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from addnorm.data.table.schema import Column, Schema
from addnorm.errors import InputError
from addnorm.tabular.inputs import (
    as_frame,
    left_out,
    normal,
    pair_of,
    seed_of,
    to_labels,
    to_targets,
)

pandas = pytest.importorskip("pandas")


def test_weights_are_one_on_average() -> None:
    found = normal(np.array([1.0, 3.0, 0.0]))
    assert found.tolist() == pytest.approx([0.75, 2.25, 0.0])
    assert normal(np.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_a_seed_is_kept_and_a_generator_gives_one() -> None:
    assert seed_of(7) == seed_of(np.int64(7)) == 7
    one, two = np.random.RandomState(3), np.random.RandomState(3)
    first = seed_of(one)
    assert first == seed_of(two) and 0 <= first < 2**31 and first != seed_of(one)


def test_a_pair_may_stand_in_a_list() -> None:
    X, y = np.zeros((2, 1)), np.ones(2)
    for given in ((X, y), [X, y], [(X, y)], ([X, y],)[0]):
        found = pair_of(given)
        assert found[0] is X and found[1] is y
    for bad in ((X,), (X, y, y), [(X, y), (X, y)][:1] * 3, 5, {"X": X, "y": y}):
        with pytest.raises(InputError, match=r"eval_set must be a pair \(X, y\)"):
            pair_of(bad)


@pytest.mark.parametrize(
    ("given", "kind"),
    (
        ([True, False], "b"),
        ([1, 2], "i"),
        (["a", "bb"], "U"),
        ([1.0, 2.0], "f"),
    ),
)
def test_labels_of_objects_are_of_their_own_kind(given: list[Any], kind: str) -> None:
    column = np.empty(len(given), dtype=object)
    column[:] = given
    found = to_labels(column)
    assert found.tolist() == given and found.dtype.kind in (kind, "O")
    assert to_labels(given).dtype.kind == kind
    if kind != "f":
        assert found.dtype.kind == kind


@pytest.mark.parametrize(
    ("given", "said"),
    (
        ([0.0, math.nan], "contains NaN or infinity: every row must have a class"),
        ([0.0, math.inf], "contains NaN or infinity: every row must have a class"),
        (["a", None, None], "contains NaN or None: 2 targets are missing"),
        (None, "y must be given"),
    ),
)
def test_every_row_must_have_a_class(given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        to_labels(given)


def test_numbers_may_be_texts_but_must_be_finite() -> None:
    assert to_targets(np.array(["1.5", "2"])).tolist() == [1.5, 2.0]
    assert to_targets([True, False]).dtype == np.float64
    for bad, said in (
        ([1.0, -math.inf], "contains NaN or infinity: every row must have a number"),
        (["x"], "y must be numbers"),
        (None, "y must be given"),
    ):
        with pytest.raises(InputError, match=said):
            to_targets(bad)


def test_tables_of_every_kind_are_frames(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,x\n2,\n")
    for given in (path, str(path)):
        assert as_frame(given).names == ["a", "b"]
    assert as_frame({"a": [1, 2]}).columns["a"].tolist() == [1.0, 2.0]
    frame = as_frame(pandas.DataFrame({"a": [1, 2]}))
    assert frame.named and frame.columns["a"].tolist() == [1.0, 2.0] and as_frame(frame) is frame
    rows = as_frame([[1, 2], [3, 4]])
    assert not rows.named and rows.columns["x1"].tolist() == [2.0, 4.0]
    assert as_frame(np.array([["a", 1.0], [None, 2.0]], dtype=object)).names == ["x0", "x1"]
    with pytest.raises(InputError, match="X must have a row: found array with 0 sample"):
        as_frame(pandas.DataFrame({"a": []}))


@pytest.mark.parametrize("cell", ({"k": 1}, [1], (1,), {1}))
def test_cells_are_plain(cell: Any) -> None:
    array = np.empty((2, 1), dtype=object)
    array[:, 0] = ["a", "b"]
    array[1, 0] = cell
    said = f"must be a string or a number: got {type(cell).__name__} in X"
    with pytest.raises(TypeError, match=said):
        as_frame(array)


def test_what_is_left_out_is_said() -> None:
    schema = Schema(
        columns=(
            Column(name="a", kind="number", note="found"),
            Column(name="b", kind="ignore", note="constant"),
            Column(name="c", kind="ignore"),
        )
    )
    assert left_out(schema) == [
        "column 'b' is left out: constant.",
        "column 'c' is left out: as requested.",
    ]
