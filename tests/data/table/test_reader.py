"""Tables read and written in parts: sizes of parts, separators, errors, written files."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from addnorm.data.table.frame import Frame, read_frame
from addnorm.data.table.reader import open_table_writer, read_parts
from addnorm.errors import InputError

pyarrow = pytest.importorskip("pyarrow")


def cells(path: Path, rows: int = 20_000) -> list[list[str | None]]:
    rows_read: list[list[str | None]] = []
    for part in read_parts(path, rows):
        rows_read += map(list, zip(*part.columns.values(), strict=True))
    return rows_read


@pytest.mark.parametrize("name", ("t.csv", "t.csv.gz", "t.parquet", "t.feather"))
@pytest.mark.parametrize(("rows", "wanted"), ((3, [3, 3, 1]), (7, [7]), (8, [7]), (1, [1] * 7)))
def test_parts_are_full_but_for_the_last(
    tmp_path: Path, name: str, rows: int, wanted: list[int]
) -> None:
    from pyarrow import feather, parquet

    path = tmp_path / name
    text = "a,b\n" + "".join(f"v{i},w{i}\n" for i in range(7))
    table = pyarrow.table({k: [f"{v}{i}" for i in range(7)] for k, v in (("a", "v"), ("b", "w"))})
    {
        "t.csv": lambda: path.write_text(text),
        "t.csv.gz": lambda: path.write_bytes(gzip.compress(text.encode())),
        "t.parquet": lambda: parquet.write_table(table, str(path)),
        "t.feather": lambda: feather.write_feather(table, str(path)),
    }[name]()
    shares: list[float] = []
    parts = list(read_parts(path, rows, shares.append))
    assert [len(part) for part in parts] == wanted and len(shares) == len(wanted)
    values = [value for part in parts for value in part.columns["a"].tolist()]
    assert values == [f"v{i}" for i in range(7)]
    assert all(0 < share <= 1 for share in shares) and shares[-1] == 1
    assert all(part.name == repr(str(path)) for part in parts)


def test_a_separator_is_that_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"a{i};b,{i}" for i in range(250)]
    path.write_text("x;y\n" + "\n".join(rows) + "\n")
    assert cells(path) == [row.split(";") for row in rows]


def test_a_quoted_line_end_far_down_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = ["x,y", *(f"{i},b" for i in range(198)), '9,"two', 'lines"', "10,c"]
    path.write_text("\n".join(lines) + "\n")
    rows_read = cells(path)
    assert rows_read[-2:] == [["9", "two\nlines"], ["10", "c"]] and len(rows_read) == 200


def test_one_column_with_a_line_break_in_a_cell(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("only\n1\n\n2\n3\n")
    assert cells(path) == [["1"], ["2"], ["3"]]
    path.write_text('a,b\n1,"x\ny"\n2,"say ""no"""\n')
    assert cells(path) == [["1", "x\ny"], ["2", 'say "no"']]


def test_a_mark_in_a_tsv_is_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text('a\tb\n5" pipe\t1\nplain\t2\n')
    assert cells(path) == [['5" pipe', "1"], ["plain", "2"]]
    path.write_text('a\tb\n"two\twords"\t1\nplain\t2\nmore\t3\n')
    assert cells(path) == [["two\twords", "1"], ["plain", "2"], ["more", "3"]]


@pytest.mark.parametrize("columns", (2, 4))
def test_a_line_of_another_length_is_named(tmp_path: Path, columns: int) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n1,2,3\n" + ",".join("x" * columns) + "\n4,5,6\n")
    with pytest.raises(InputError, match=f"line 3 has {columns}, line 1 has 3"):
        list(read_parts(path, 1))


def test_rows_before_an_invalid_line_are_yielded(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n3,4\n5\n")
    parts = read_parts(path, 2)
    assert next(parts).columns["a"].tolist() == ["1", "3"]
    with pytest.raises(InputError, match="line 4 has 1, line 1 has 2"):
        next(parts)


def test_byte_order_marks_and_old_line_ends_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\r\n1, x \r\n?,y\r\n")
    (part,) = read_parts(path)
    assert part.names == ["a", "b"] and cells(path) == [["1", "x"], [None, "y"]]


@pytest.mark.parametrize(
    ("name", "separator"),
    (
        ("o.csv", ","),
        ("o.tsv", "\t"),
        ("o.tsv.gz", "\t"),
        ("o.csv.gz", ","),
        ("my.tsv.old.csv", ","),
        ("my.tsv.csv", ","),
        ("O.TSV", "\t"),
        ("O.TSV.GZ", "\t"),
    ),
)
def test_files_are_written_as_their_name_says(tmp_path: Path, name: str, separator: str) -> None:
    """One header, complete lines, empty cells for missing values, compressed if .gz."""
    frame = Frame(
        "t",
        {
            "x": np.array([1.5, np.nan]),
            "t": np.array(["u v", "w"], dtype=object),
            "n": np.array(["a", None], dtype=object),
            "d": np.array(["2024-05-31", "NaT"], dtype="datetime64[s]"),
        },
    )
    path = tmp_path / name
    with open_table_writer(path) as sink:
        sink.write(frame)
        assert not path.exists(), "it appears whole"
        sink.write(frame.take(np.array([0])))
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if name.lower().endswith(".gz") else raw).decode()
    row = ("1.5", "u v", "a", "2024-05-31 00:00:00")
    lines = [separator.join(line) for line in ("xtnd", row, ("", "w", "", ""), row)]
    assert text == "\n".join(lines) + "\n"
    again = read_frame(path)
    assert again.names == ["x", "t", "n", "d"] and len(again) == 3 and again.notes == ()
    assert again.columns["d"].tolist() == ["2024-05-31 00:00:00", None, "2024-05-31 00:00:00"]


def test_parquet_keeps_kinds(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "x": np.array([1.5, np.nan]),
        "t": np.array(["u", None], dtype=object),
        "d": np.array(["2024-05-31T12:00:00", "NaT"], dtype="datetime64[s]"),
    }
    with open_table_writer(tmp_path / "o.pq") as sink:
        sink.write(Frame("t", columns))
    frame = read_frame(tmp_path / "o.pq")
    for name, column in columns.items():
        assert frame.columns[name].dtype == column.dtype
        assert frame.columns[name].tolist()[0] == column.tolist()[0]
    assert np.isnan(frame.columns["x"][1]) and np.isnat(frame.columns["d"][1])
    assert frame.columns["t"][1] is None
