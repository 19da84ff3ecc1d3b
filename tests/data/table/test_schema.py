"""Schemas: used columns, changes, checks of a table, TOML files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from addnorm.data.table.column_arrays import is_missing
from addnorm.data.table.frame import Array, to_frame
from addnorm.data.table.schema import Column, Schema, list_names
from addnorm.errors import ConfigError, InputError


def objects(*values: Any) -> Array:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def test_missing_values_of_each_kind_of_column() -> None:
    when = np.array(["1970-01-02T00:00:01", "NaT"], dtype="datetime64[s]")
    assert is_missing(when).tolist() == [False, True]
    assert is_missing(np.array([1.0, np.nan, np.inf])).tolist() == [False, True, False]
    assert is_missing(objects("", None, "x")).tolist() == [False, True, False]


def test_names_are_listed_up_to_five() -> None:
    assert list_names(["a"]) == "'a'"
    assert list_names(list("abcde")) == "'a', 'b', 'c', 'd', 'e'"
    assert list_names(list("abcdefg")) == "'a', 'b', 'c', 'd', 'e' and 2 more"


SCHEMA = Schema(
    columns=(
        Column(name="a", kind="number", note="found"),
        Column(name="b", kind="ignore", note="constant"),
        Column(name="c", kind="category"),
    ),
    target="y",
    task="classes",
)


def test_used_columns_and_changed_kinds() -> None:
    assert [column.name for column in SCHEMA.used] == ["a", "c"]
    changed = SCHEMA.change({"b": "date"})
    assert changed.kinds() == {"a": "number", "b": "date", "c": "category"}
    assert [column.note for column in changed.columns] == ["found", "as requested", ""]
    assert (changed.target, changed.task) == ("y", "classes")
    assert SCHEMA.kinds()["b"] == "ignore"
    with pytest.raises(ConfigError, match=r"the schema has no column 'aa'\. Did you mean 'a'"):
        SCHEMA.change({"aa": "number"})
    with pytest.raises(ConfigError, match="column 'a' must be one of number, category, date"):
        SCHEMA.change({"a": "float"})


def test_target_and_ignored_columns_are_optional() -> None:
    SCHEMA.check(to_frame({"a": [1], "c": ["x"]}))
    SCHEMA.check(to_frame({"y": [1], "c": ["x"], "b": [1], "a": [1]}))
    with pytest.raises(InputError, match=r"it lacks 'c'\. Add or drop"):
        SCHEMA.check(to_frame({"a": [1], "b": [1]}))
    with pytest.raises(InputError, match=r"it has 'd', which training did not have\. Add"):
        SCHEMA.check(to_frame({"a": [1], "c": ["x"], "d": [1]}))


def test_new_columns_are_left_out_with_a_note() -> None:
    same = to_frame({"a": [1], "c": ["x"], "y": ["no"]})
    assert SCHEMA.select(same) is same
    more = SCHEMA.select(to_frame({"d": [1], "a": [1], "c": ["x"], "e": [2]}))
    assert more.names == ["a", "c"]
    assert more.notes == ("not used, because training did not have it: 'd', 'e'.",)
    with pytest.raises(InputError, match=r"it lacks 'c' and has 'cc', which training did not have"):
        SCHEMA.select(to_frame({"a": [1], "cc": ["x"]}))


def test_a_form_does_not_outlive_its_kind() -> None:
    price = Column(name="price", kind="number", form="$1,234.5")
    schema = Schema(columns=(price,))
    assert schema.change({"price": "date"}).columns[0].form == ""
    assert schema.change({"price": "number"}).columns[0].form == "$1,234.5"


def test_a_file_of_a_schema_can_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    SCHEMA.save(path)
    assert Schema.load(path) == SCHEMA
    text = path.read_text()
    assert text.startswith("# Kinds of column: number, category, date, text, ignore.")
    assert text.endswith('kind = "category"\n')
    path.write_text(text.replace('kind = "ignore"', 'kind = "number"'))
    assert Schema.load(path).kinds()["b"] == "number"
    short = 'version = 1\n[[columns]]\nname = "a"\nkind = "date"\n'
    assert Schema.parse(short) == Schema(columns=(Column(name="a", kind="date"),))


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("columns = [3]", r"every \[\[columns\]\] must have a name: got 3"),
        ("[[columns]]\nname = 3\nkind = 'date'", r"must have a name: got {'name': 3"),
        (
            "[[columns]]\nname = 'a'",
            "column 'a' must be one of number, category, date, text",
        ),
        (
            "[[columns]]\nname = 'a'\nkind = 'date'\n" * 2,
            r"the schema has column 'a' twice\. Remove one\.",
        ),
    ),
)
def test_a_column_must_have_a_name_and_a_kind(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schema.parse(text)
