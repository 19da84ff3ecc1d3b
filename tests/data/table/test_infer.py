"""Inference of column types, on both sides of every threshold."""

from typing import Any

import pytest

from addnorm.data.table.frame import to_frame
from addnorm.data.table.infer import infer, infer_task
from addnorm.data.table.schema import Column
from addnorm.errors import InputError


def infer_column(values: list[Any], name: str = "x") -> Column:
    """Return the inferred column, in a table with one other column."""
    rows = len(values)
    other = [0.5 * (i % 2) for i in range(rows)]
    return next(c for c in infer(to_frame({name: values, "other": other})).columns)


def words(count: int) -> list[str]:
    return [f"w{i}" for i in range(count)]


@pytest.mark.parametrize(
    ("values", "kind"),
    (
        (words(50), "ignore"),
        (words(50) + words(17), "category"),
        (words(50) + words(16), "ignore"),
        (words(8), "ignore"),
        (words(7), "category"),
        (words(6) + words(2), "ignore"),
        (words(5) + words(3), "category"),
        (words(51), "ignore"),
        (words(51) + ["w0"] * 50, "ignore"),
        (words(51) + ["w0"] * 51, "category"),
        (words(60) * 3, "category"),
        ([*words(51), *[None] * 900], "ignore"),
    ),
)
def test_texts_that_hardly_repeat_are_ignored(values: list[Any], kind: str) -> None:
    """More than 50 values in over half of the rows; from 8 rows on, in over three quarters of them,
    or half of the rows with a value of their own."""
    assert infer_column(values).kind == kind


@pytest.mark.parametrize(("strays", "kind"), ((0, "number"), (2, "number"), (3, "category")))
def test_up_to_2_percent_of_a_number_column_may_be_texts(strays: int, kind: str) -> None:
    numbers = [str(i % 20) for i in range(100 - strays)]
    inferred = infer_column([*numbers, *["many"] * strays])
    assert inferred.kind == kind
    assert (f"{strays} values are not numeric ('many')" in inferred.note) is (strays == 2)


@pytest.mark.parametrize(
    ("values", "name", "kind"),
    (
        (list(range(51)), "n", "ignore"),
        (list(range(50)), "n", "number"),
        ([3 * i for i in range(51)], "n", "number"),
        ([3 * i for i in range(51)], "id", "ignore"),
        ([3 * i for i in range(51)], "customer_id", "ignore"),
        ([3 * i for i in range(51)], "customerId", "ignore"),
        ([3 * i for i in range(51)], "Customer Key", "ignore"),
        ([3 * i for i in range(51)], "AccountNumber", "ignore"),
        ([3 * i for i in range(51)], "paid", "number"),
        ([3 * i for i in range(51)], "hyaluronid", "number"),
        ([3.5 * i for i in range(51)], "customer_id", "number"),
        ([*range(50), 49], "customer_id", "number"),
        ([*range(100, 0, -1)], "n", "ignore"),
        ([*range(51), None], "customer_id", "number"),
    ),
)
def test_a_different_integer_in_every_row_is_an_identifier(
    values: list[Any], name: str, kind: str
) -> None:
    """If the integers are consecutive, or the name of the column is that of an id; from 51 rows."""
    inferred = infer_column(values, name)
    assert inferred.kind == kind
    assert ("looks like an identifier" in inferred.note) is (kind == "ignore")


@pytest.mark.parametrize(
    ("values", "kind", "note"),
    (
        (["a", "a"], "ignore", "constant: always 'a'"),
        ([7, 7, 7], "ignore", "constant: always '7'"),
        ([7, None, 7], "number", "1 values from 7 to 7, 1 of 3 missing"),
        ([None, "a", None], "category", "1 values, 2 of 3 missing"),
        ([None, None], "ignore", "all values are missing"),
        (["2024-05-31", None, "2024-06-01"], "date", "dates, 1 of 3 missing"),
        (["2024-05-31", "soon", "soon"], "category", "2 values"),
        ([1.0, float("inf"), 2.0], "number", "2 values from 1 to 2, with infinities"),
        (["1", "2.5", "-3"], "number", "3 values from -3 to 2.5"),
    ),
)
def test_notes_describe_the_columns(values: list[Any], kind: str, note: str) -> None:
    inferred = infer_column(values)
    assert (inferred.kind, inferred.note) == (kind, note)


def test_a_date_after_the_first_thousand_rows_is_checked() -> None:
    """The first thousand values are dates; the next is not."""
    days = [f"2024-01-{1 + i % 28:02}" for i in range(1000)]
    assert infer_column([*days, "2024-02-01"]).kind == "date"
    assert infer_column([*days, "never"]).kind == "category"


def test_what_keeps_a_column_from_being_dates_is_named() -> None:
    """One cell of a thousand, or another form: else nobody knows why the column is left out."""
    days = [f"{1 + i % 28:02}.{1 + i // 28:02}.2024" for i in range(300)]
    note = infer_column([*days, "31.02.2024"]).note
    assert "300 of 301 are dates like day/month/year, but '31.02.2024' is not" in note
    isos = [f"2024-{1 + i // 28:02}-{1 + i % 28:02}" for i in range(200)]
    assert "300 of 500 are dates, but" not in (note := infer_column([*days, *isos]).note)
    assert infer_column([*days, *isos]).kind == "date", note
    american = ["12/25/2024", "12/26/2024"]
    assert "but '12/25/2024' is not" in infer_column([*days, *isos, *american]).note
    assert "dates" not in infer_column(["red", "blue", "2024-01-01"] * 20).note


@pytest.mark.parametrize(
    ("values", "task"),
    (
        (list(range(20)), "classes"),
        (list(range(21)), "number"),
        (list(range(20)) * 50, "classes"),
        ([0, 1, None], "classes"),
        ([0.5, 1, None], "number"),
        (["1", "2"] * 9, "classes"),
        ([*(str(i) for i in range(30)), "many"], "classes"),
        ([None, None], "classes"),
        (["2024-05-31", "2024-06-01"], "classes"),
    ),
)
def test_up_to_twenty_integers_are_classes(values: list[Any], task: str) -> None:
    assert infer_task(to_frame({"y": values}).columns["y"]) == task
    assert infer(to_frame({"y": values, "x": words(len(values))}), "y").task == task


def test_the_task_can_be_chosen() -> None:
    table = to_frame({"y": [0, 1, 1], "x": ["a", "b", "b"]})
    assert infer(table, "y", "number").task == "number"
    with pytest.raises(InputError, match="must have a column besides the target 'y'"):
        infer(table.without("x"), "y")


@pytest.mark.parametrize(
    ("column", "is_leak"),
    (
        ([i % 2 for i in range(100)], True),
        ([i % 4 for i in range(100)], True),
        ([i % 9 if i % 9 % 2 == i % 2 else i % 2 for i in range(100)], True),
        ([*(i % 2 for i in range(99)), 0], False),
        ([i % 10 for i in range(100)], False),
        ([f"n{i}" for i in range(100)], False),
    ),
)
def test_a_column_that_determines_the_target_is_noted(column: list[Any], is_leak: bool) -> None:
    """Each value has one label, and there are fewer values than a tenth of the rows."""
    table = to_frame({"y": [i % 2 for i in range(100)], "x": column, "z": ["q", "r"] * 50})
    (inferred,) = (c for c in infer(table, "y").columns if c.name == "x")
    assert ("determines 'y' exactly: is it known when predicting?" in inferred.note) is is_leak


def test_a_constant_target_has_no_leaks() -> None:
    table = to_frame({"y": [1] * 40, "x": ["a", "b"] * 20})
    assert "determines" not in infer(table, "y").columns[0].note


def test_equal_columns_are_duplicates() -> None:
    """Numbers equal their texts; columns that differ in one cell are distinct."""
    rows = [float(i % 7) for i in range(30)]
    table = to_frame(
        {
            "x": rows,
            "text": [f"{v:g}" for v in rows],
            "nearly": [*rows[:-1], 99.0],
            "gone": [*rows[:-1], None],
            "word": ["ab"[i % 2] for i in range(30)],
            "again": ["ab"[i % 2] for i in range(30)],
            "hole": [*("ab"[i % 2] for i in range(29)), None],
            "nil": ["z"] * 30,
            "nix": ["z"] * 30,
        }
    )
    kinds = infer(table).kinds()
    copies = {name for name, kind in kinds.items() if kind == "ignore"}
    assert copies == {"text", "again", "nil", "nix"}
    notes = {c.name: c.note for c in infer(table).columns}
    assert notes["text"] == "equal to 'x' in every row"
    assert notes["nix"] == "constant: always 'z'"


def infer_kind(values: list[str]) -> str:
    return infer_column(values).kind


def test_values_that_belong_to_somebody_are_no_categories() -> None:
    shared = [f"family {i}" for i in range(10)] * 2
    assert infer_kind(shared + [f"name {i}" for i in range(20)]) == "ignore"
    assert infer_kind(shared + [f"name {i}" for i in range(19)]) == "category"
    emails = [f"person{i}@example.org" for i in range(40)] * 5
    assert infer_kind(emails) == "ignore" and infer_kind(["a @ b", "c @ d"] * 20) == "category"
    assert infer_kind(["www.example.org", "www.example.com"] * 20) == "category"
