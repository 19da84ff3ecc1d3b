"""Encoders on both sides of every threshold; test_encode.py tests each kind of column."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from addnorm.data.table.encode import EncodedTable, TableEncoder, fit_encoder
from addnorm.data.table.frame import Frame, to_frame
from addnorm.data.table.infer import infer
from addnorm.errors import ConfigError


def frame(**columns: list[Any]) -> Frame:
    return to_frame(columns)


@pytest.mark.parametrize(
    ("rows", "often", "kept"), ((999, 1, True), (1000, 4, False), (1000, 5, True), (1001, 4, False))
)
def test_with_a_thousand_rows_values_must_occur_five_times(
    rows: int, often: int, kept: bool
) -> None:
    table = frame(
        c=["a", "b"] * ((rows - often) // 2) + ["b"] * ((rows - often) % 2) + ["z"] * often
    )
    assert len(table) == rows
    assert ("z" in fit_encoder(table, infer(table)).categories[0].values) is kept


def test_frequent_values_have_codes_and_the_rest_share_one() -> None:
    """The 2,000 most frequent of 2,100 values have codes, in alphabetical order."""
    values = [f"v{i}" for i in range(2100) for _ in range(2 if i % 21 else 1)]
    table = frame(c=values)
    schema = infer(table).change({"c": "category"})
    rule = fit_encoder(table, schema, rare=1).categories[0]
    often = sorted(value for value, count in Counter(values).items() if count == 2)
    assert list(rule.values) == often and len(often) == 2000 and rule.size == 2002
    encoded = fit_encoder(table, schema, rare=1).encode(frame(c=["v0", often[0], often[-1]]))
    assert encoded.codes[:, 0].tolist() == [1, 2, 2001]


def test_unknown_values_are_counted_and_the_most_frequent_named() -> None:
    table = frame(c=["a", "b"] * 4, d=["x", "y"] * 3 + ["x", "x"])
    encoder = fit_encoder(table, infer(table))
    new = frame(c=["q", "r", "r", "s", "t", "t", "t", None], d=["x"] * 7 + [None])
    (note,) = encoder.unknown_notes(new)
    assert note == (
        "c: 7 values are unknown or were rare in training (for example 't', 'r', 'q'); "
        "they share one code."
    )
    assert encoder.unknown_notes(table) == []


@pytest.mark.parametrize("impute", ("median", "mean"))
def test_imputed_values_come_from_the_training_rows(impute: str) -> None:
    table = frame(x=[0.0, 2.0, 10.0, None, 4.0], y=[1, 2, 4, 8, 3])
    middle = {"median": 3.0, "mean": 4.0}[impute]
    encoder = fit_encoder(table, infer(table), impute=impute, scaling="standard")
    spread = np.std([0.0, 2.0, 10.0, 4.0])
    scaled = encoder.encode(frame(x=[None, 4.0, None], y=[1, 1, 1])).numbers[:, 0]
    assert scaled.tolist() == pytest.approx([(middle - 4) / spread, 0, (middle - 4) / spread])
    left = fit_encoder(table, infer(table)).encode(frame(x=[None], y=[1])).numbers
    assert bool(left[0, 0].isnan())
    with pytest.raises(ConfigError, match=r"impute has no choice 'medain'\. Did you mean 'median'"):
        fit_encoder(table, infer(table), impute="medain")


def test_infinities_are_clipped_to_the_training_range() -> None:
    table = frame(x=[1.0, 5.0, float("inf"), 3.0, float("-inf")])
    encoder = fit_encoder(table, infer(table), scaling="none")
    assert (encoder.numbers[0].low, encoder.numbers[0].high) == (1.0, 5.0)
    scaled = encoder.encode(frame(x=[float("inf"), float("-inf"), 2.0])).numbers[:, 0]
    assert scaled.tolist() == [5.0, 1.0, 2.0]
    beyond = encoder.encode(frame(x=[7.0, -7.0])).numbers[:, 0]
    assert beyond.tolist() == [7.0, -7.0], "finite numbers may lie beyond"


def test_a_requested_number_column_without_numbers_is_encoded() -> None:
    """All values are missing in training; later numbers are finite."""
    table = frame(x=[None, None, None], c=["a", "b", "a"])
    schema = infer(table).change({"x": "number"})
    encoder = fit_encoder(table, schema)
    assert bool(encoder.encode(table).numbers.isnan().all())
    later = encoder.encode(frame(x=["3", None, "-2"], c=["a"] * 3)).numbers[:, 0]
    assert bool(later[[0, 2]].isfinite().all()) and bool(later[1].isnan())


def test_take_selects_numbers_and_codes() -> None:
    table = frame(x=[1.0, 2.0, 4.0], c=["a", "b", "c"])
    encoder: TableEncoder = fit_encoder(table, infer(table), scaling="none")
    assert encoder.names == ["x", "c"] and encoder.sizes == (5,)
    encoded = encoder.encode(table).take(torch.tensor([2, 0]))
    assert isinstance(encoded, EncodedTable) and len(encoded) == 2
    assert encoded.numbers[:, 0].tolist() == [4.0, 1.0] and encoded.codes[:, 0].tolist() == [4, 2]
    assert encoded.numbers.dtype == torch.float32 and encoded.codes.dtype == torch.int64


def test_dates_before_1970_and_after() -> None:
    """Days are counted from 1 January 1970, a Thursday."""
    table = frame(d=["1969-12-31", "1970-01-01", "1970-01-02 12:00", "1999-12-31 23:00", None])
    encoder = fit_encoder(table, infer(table), scaling="none")
    numbers = dict(zip(encoder.names, encoder.encode(table).numbers.T.tolist(), strict=True))
    assert numbers["d"][:3] == [-1.0, 0.0, 1.5]
    assert numbers["d (day)"][:4] == [30, 0, 1, 30] and numbers["d (month)"][:4] == [11, 0, 0, 11]
    assert numbers["d (weekday)"][:4] == [2, 3, 4, 4] and numbers["d (hour)"][:4] == [0, 0, 12, 23]
    assert all(np.isnan(part[4]) for part in numbers.values())


@pytest.mark.parametrize("scaling", ("robust", "standard", "quantile", "none"))
def test_an_infinity_does_not_change_other_rows(scaling: str) -> None:
    table = frame(x=[0.0, 1.0, 2.5, 3.0, 4.25, 5.5] * 20)
    encoder = fit_encoder(table, infer(table), scaling=scaling)
    alone = encoder.encode(frame(x=[20.0])).numbers
    together = encoder.encode(frame(x=[20.0, np.inf, -np.inf])).numbers
    ends = encoder.encode(frame(x=[5.5, 0.0])).numbers
    assert torch.equal(together[:1], alone) and torch.equal(together[1:], ends)
