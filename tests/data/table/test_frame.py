"""Tables from files, arrays and data frames, all in one form."""

import datetime
import gzip
import math
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from addnorm.data.table.frame import (
    MISSING_CELLS,
    Frame,
    parse_cells,
    read_frame,
    to_frame,
    to_texts,
)
from addnorm.data.table.infer import infer
from addnorm.data.table.reader import open_table_writer, read_parts
from addnorm.errors import InputError, SavedError

pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
pyarrow = pytest.importorskip("pyarrow")

WHEN = datetime.datetime(2024, 2, 29, 13, 30)
DATA: dict[str, list[Any]] = {
    "n": [1, 2, None],
    "x": [0.5, None, -3.0],
    "text": ["a", None, "b "],
    "yes": [True, False, None],
    "when": [WHEN, None, WHEN],
}


def plain(frame: Frame) -> dict[str, list[Any]]:
    return {
        name: [None if isinstance(v, float) and math.isnan(v) else v for v in column.tolist()]
        for name, column in frame.columns.items()
    }


WANTED = {
    "n": [1.0, 2.0, None],
    "x": [0.5, None, -3.0],
    "text": ["a", None, "b"],
    "yes": ["True", "False", None],
    "when": [WHEN, None, WHEN],
}


@pytest.mark.parametrize("make", (pandas.DataFrame, polars.DataFrame, pyarrow.table))
def test_every_kind_of_frame_gives_the_same(make: Any) -> None:
    assert plain(to_frame(make(DATA))) == WANTED


def test_kinds_of_pandas_columns() -> None:
    frame = pandas.DataFrame(
        {
            "c": pandas.Categorical(["u", None]),
            "i": pandas.array([1, None], dtype="Int64"),
            "z": pandas.to_datetime(["2024-01-01", None]).tz_localize("Europe/Paris"),
            "mixed": [1, "x"],
        }
    )
    columns = plain(to_frame(frame))
    assert columns["c"] == ["u", None] and columns["i"] == [1.0, None]
    assert columns["z"] == [datetime.datetime(2023, 12, 31, 23), None]
    assert columns["mixed"] == ["1", "x"]


def arrow(values: list[Any]) -> Any:
    return pyarrow.table({"c": pyarrow.array(values).dictionary_encode()})


@pytest.mark.parametrize(
    "table",
    (
        pandas.DataFrame({"c": pandas.Categorical([1, 2, None], categories=[2, 1, 7])}),
        pandas.DataFrame({"c": pandas.Categorical([1, 2, None], ordered=True)}),
        polars.DataFrame({"c": polars.Series(["1", "2", None], dtype=polars.Enum(["1", "2"]))}),
        arrow([1, 2, None]),
    ),
    ids=("pandas", "ordered", "polars", "arrow"),
)
def test_declared_categories_are_categories(table: Any) -> None:
    frame = to_frame(table)
    assert frame.declared == {"c"} and frame.take(np.arange(2)).declared == {"c"}
    assert to_texts(frame.columns["c"]).tolist() == ["1", "2", None]
    (column,) = infer(frame).columns
    assert column.kind == "category" and column.note == "2 values, declared, 1 of 3 missing"


HOUR = datetime.timedelta(hours=1)


@pytest.mark.parametrize(
    ("values", "wanted", "message"),
    (
        (
            [HOUR, None, 2 * HOUR],
            [3600.0, None, 7200.0],
            "durations: they are converted to sec",
        ),
        (
            [datetime.time(0, 1), None],
            [60.0, None],
            "times of day: they are converted to",
        ),
        ([[1, 2], None, [3]], ["[1, 2]", None, "[3]"], "lists: each is converted to one text"),
        ([2**60, 3, 1], [2.0**60, 3.0, 1.0], "beyond 2^53, which are rounded"),
    ),
)
@pytest.mark.parametrize("make", (dict, pandas.DataFrame, polars.DataFrame, pyarrow.table))
def test_converted_values_have_a_note(
    values: list[Any], wanted: list[Any], message: str, make: Any
) -> None:
    frame = to_frame(make({"c": values}))
    assert plain(frame) == {"c": wanted}
    (note,) = frame.notes
    assert note.startswith("column 'c' h") and message in note


def test_numbers_of_every_size_and_kind() -> None:
    nan = Decimal("sNaN")
    odd = {"c": [10**400, -(10**400), Decimal("1.5"), nan, np.float32(2), True]}
    assert to_frame({"c": odd["c"][:5]}).columns["c"].tolist()[:3] == [math.inf, -math.inf, 1.5]
    assert plain(to_frame(odd))["c"] == ["inf", "-inf", "1.5", None, "2", "True"]
    assert plain(to_frame({"c": np.array([1, "NaT"], dtype="timedelta64[m]")})) == {
        "c": [60.0, None]
    }
    assert plain(to_frame({"c": [b"ab", b"\xff"]})) == {"c": ["ab", "\\xff"]}


@pytest.mark.parametrize("cell", (object(), {1}, 1j))
def test_cells_of_unsupported_types(cell: Any) -> None:
    with pytest.raises(InputError, match=r"column 'c': .*(must be a number, a text|complex num)"):
        to_frame(pandas.DataFrame({"c": pandas.Series([cell, cell], dtype=object)}))


def test_lazy_frames_repeated_names_and_dicts() -> None:
    with pytest.raises(InputError, match=r"frame in memory: got LazyFrame\. Try \.collect\(\)"):
        to_frame(polars.LazyFrame({"a": [1]}))
    with pytest.raises(InputError, match=r"a different name for each column\..*'a' 2 times"):
        to_frame(pandas.DataFrame([[1, 2]], columns=["a", "a"]))
    rows = [{"a": 1, "b": "x"}, {"b": "y"}]
    assert plain(to_frame(rows)) == {"a": [1.0, None], "b": ["x", "y"]}


def test_arrays_have_numbered_columns() -> None:
    frame = to_frame(np.array([[1, 2], [3, 4]]))
    assert frame.names == ["x0", "x1"] and not frame.named
    assert plain(to_frame(np.array([["a", 1], [None, 2]], dtype=object))) == {
        "x0": ["a", None],
        "x1": [1.0, 2.0],
    }
    with pytest.raises(InputError, match=r"must have rows and columns: got 1 dimensions"):
        to_frame(np.zeros(3))
    with pytest.raises(InputError, match="complex numbers are not supported"):
        to_frame(np.zeros((2, 2), dtype=complex))


def test_missing_texts_of_files() -> None:
    assert parse_cells([f" {cell} " for cell in MISSING_CELLS]) == [None] * len(MISSING_CELLS)
    assert parse_cells(["none", "-", "0"]) == ["none", "-", "0"]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b'a, b,\n1,"x, y",?\n\n 2 ,z,3\n'))
    frame = read_frame(path)
    assert plain(frame) == {"a": ["1", "2"], "b": ["x, y", "z"], "column 3": [None, "3"]}
    assert any("blank lines skipped: 1" in note for note in frame.notes)
    assert any("has no name in line 1: it is called 'column 3'" in note for note in frame.notes)


@pytest.mark.parametrize("ending", ("parquet", "feather"))
def test_arrow_files(tmp_path: Path, ending: str) -> None:
    from pyarrow import feather, parquet

    path = tmp_path / f"t.{ending}"
    write = {"parquet": parquet.write_table, "feather": feather.write_feather}[ending]
    write(pyarrow.table(DATA), str(path))
    assert plain(read_frame(path)) == WANTED
    shares: list[float] = []
    parts = [plain(part) for part in read_parts(path, rows=2, on_progress=shares.append)]
    assert [v for part in parts for v in part["n"]] == WANTED["n"]
    assert all(len(part["n"]) <= 2 for part in parts)
    assert shares == sorted(shares) and len(shares) == len(parts) and shares[-1] == 1
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(SavedError, match=f"is damaged or not a {ending} file"):
        read_frame(path)
    with pytest.raises(SavedError, match=f"is damaged or not a {ending} file"):
        list(read_parts(path))


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("a,a\n1,2\n", "a different name for each column"),
        ("a,b\n", "must have rows below its header"),
        ("a,b\n1,2\n3\n", "must have the same number of columns in every row"),
        ("", "must hold some text: it is empty"),
        ('a,b\n"1,2\n', "cannot be read"),
    ),
)
def test_bad_files_are_refused_whole_and_in_parts(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_frame(path)
    with pytest.raises(InputError, match=message):
        list(read_parts(path))


def test_other_files_are_refused_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for content, message in (
        (b"a,b\n1,\0\n", "byte 3 of line 2 is 0"),
        (b"a,b\n1,\xe9\n", "must be UTF-8 text"),
        (b"PK\x03\x04rest", "a zip archive"),
        (gzip.compress(b"a,b\n" + b"1,2\n" * 5000)[:-9], "gzip data is truncated"),
    ):
        path.write_bytes(content)
        with pytest.raises(SavedError, match=message):
            list(read_parts(path))
    with pytest.raises(InputError, match=r"give a .csv, .tsv, .parquet or .feather file"):
        read_frame(tmp_path / "t.xlsx")


@pytest.mark.parametrize("text", ("a;b\n1;2\n3;4\n", "a\tb\n1\t2\n3\t4\n", "a,b\n1,2\n3,4\n"))
def test_parts_find_the_separator(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    parts = list(read_parts(path, rows=1))
    assert [plain(part) for part in parts] == [{"a": ["1"], "b": ["2"]}, {"a": ["3"], "b": ["4"]}]
    assert plain(read_frame(path)) == {"a": ["1", "3"], "b": ["2", "4"]}


@pytest.mark.parametrize("name", ("t.csv", "t.csv.gz"))
def test_reading_progress_is_reported(tmp_path: Path, name: str) -> None:
    content = "a,b\n" + "".join(f"{i},{i * 7919 % 10007}\n" for i in range(40_000))
    packed = name.endswith(".gz")
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    shares: list[float] = []
    assert sum(len(part) for part in read_parts(tmp_path / name, 10_000, shares.append)) == 40_000
    assert shares == sorted(shares) and 0 < shares[0] < 0.6 and shares[-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("ending", ("csv", "csv.gz"))
def test_memory_does_not_grow_with_the_file(tmp_path: Path, ending: str) -> None:
    """Rows are read and written in parts: four times as many rows take no more memory."""
    peaks = []
    for rows in (4000, 16_000):
        path, out = tmp_path / f"t.{ending}", tmp_path / f"o.{ending}"
        column = np.array([f"value {i * 7919 % 10007}" for i in range(rows)], dtype=object)
        with open_table_writer(path) as sink:
            sink.write(Frame("t", {"a": column, "b": column}))
        del column
        tracemalloc.start()
        with open_table_writer(out) as sink:
            for part in read_parts(path, 500):
                sink.write(part)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(len(part) for part in read_parts(out, 5000)) == rows
    assert peaks[1] < 1.3 * peaks[0]


@pytest.mark.parametrize("name", ("o.csv", "o.tsv", "o.csv.gz", "o.parquet"))
def test_files_written_in_parts_read_back_equal(tmp_path: Path, name: str) -> None:
    part = Frame("t", {"x": np.array([1.5, np.nan]), "t": np.array(["a,b", None], dtype=object)})
    with open_table_writer(tmp_path / name) as sink:
        sink.write(part)
        sink.write(part)
    (part,) = read_parts(tmp_path / name)
    columns = plain(part)
    assert [None if v is None else float(v) for v in columns["x"]] == [1.5, None] * 2
    assert columns["t"] == ["a,b", None] * 2


def test_a_file_that_fails_on_the_way_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_table_writer(tmp_path / "o.csv") as sink:
        sink.write(Frame("t", {"x": np.array([1.0])}))
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=r"name a .csv, .tsv or .parquet file"):
        open_table_writer(tmp_path / "o.xls").__enter__()


def test_columns_as_text() -> None:
    assert to_texts(np.array([1.0, -2.5, np.nan, 1e300])).tolist() == ["1", "-2.5", None, "1e+300"]


def test_unknown_columns() -> None:
    with pytest.raises(InputError, match=r"has no column 'agee'\. Did you mean 'age'"):
        to_frame({"age": [1]}).column("agee")
