"""The reader of .csv and .tsv: training, prediction and texts see the same rows of every file."""

import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from addnorm.data.delimited import PARSE_CHUNK, DelimitedFile, read_delimited
from addnorm.data.table.frame import Frame, read_frame
from addnorm.data.table.reader import read_parts
from addnorm.errors import AddnormError, InputError, SavedError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(content: str | bytes, name: str = "t.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return put


def rows_of(frame: Frame) -> list[list[str | None]]:
    return [list(row) for row in zip(*frame.columns.values(), strict=True)]


def read_in_parts(path: Path, rows: int = 3) -> list[list[str | None]]:
    return [row for part in read_parts(path, rows) for row in rows_of(part)]


def assert_refused(path: Path, message: str, kind: type[AddnormError] = InputError) -> None:
    """Every user of the reader raises the same error."""
    for read in (read_delimited, read_frame, lambda path: list(read_parts(path))):
        with pytest.raises(kind, match=message):
            read(path)


# ── What training and prediction once read differently ────────────────────────────────────────────


@pytest.mark.parametrize("above", (0, 300))
def test_a_tsv_with_a_quoted_tab_is_predicted_as_it_was_trained(above: int, write: Write) -> None:
    path = write("a\tb\n" + "plain\t1\n" * above + '"two\twords"\t2\nlast\t3\n', "t.tsv")
    assert rows_of(read_frame(path)) == read_in_parts(path)
    assert read_in_parts(path)[above:] == [["two\twords", "2"], ["last", "3"]]


@pytest.mark.parametrize("name", ("t.csv", "t.tsv", "t.csv.gz"))
def test_blank_rows_count_the_same_in_training_and_prediction(name: str, write: Write) -> None:
    """A blank line is skipped; a line with nothing but separators is a row of missing values."""
    text = "\n\na,b\n1,2\n\n,\n3,4\n , \n\n\n"
    text = text.replace(",", "\t") if name == "t.tsv" else text
    path = write(gzip.compress(text.encode()) if name.endswith("gz") else text, name)
    frame = read_frame(path)
    assert rows_of(frame) == [["1", "2"], [None, None], ["3", "4"], [None, None]]
    assert read_in_parts(path) == rows_of(frame)
    assert frame.names == ["a", "b"] and "blank lines skipped: 3." in frame.notes
    assert read_delimited(path).lines == [3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("quote", ("", '"'))
def test_a_cell_of_any_length_is_predicted_as_it_was_trained(quote: str, write: Write) -> None:
    limit = csv.field_size_limit()
    long = "x" * 140_000
    path = write(f"a,b\n{quote}{long}{quote},1\nshort,2\n")
    assert read_in_parts(path) == rows_of(read_frame(path)) == [[long, "1"], ["short", "2"]]
    parts = read_parts(path, 1)
    next(parts)
    assert csv.field_size_limit() == limit, "the limit of the process is lifted only while parsing"


def test_a_lone_carriage_return_is_read_the_same(write: Write) -> None:
    path = write("a\tb\nx\ry\t1\n", "t.tsv")
    assert read_in_parts(path) == rows_of(read_frame(path)) == [["x\ry", "1"]]
    path = write("a,b\rx,1\r")
    assert read_in_parts(path) == rows_of(read_frame(path)) == [["x", "1"]]


CELLS = st.text(st.characters(exclude_characters="\0\r", codec="utf-8"), max_size=4)


@given(
    body=st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=20),
    separator=st.sampled_from(",;\t|"),
    rows=st.integers(1, 7),
    byte_order_mark=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_readers_give_the_cells_that_were_written(
    body: list[tuple[str, ...]], separator: str, rows: int, byte_order_mark: bool, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    with path.open("w", encoding="utf-8-sig" if byte_order_mark else "utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows([("first", "second", "third"), *body])
    table = read_delimited(path)
    assert table.rows[1:] == [list(row) for row in body] and table.width == 3
    text = path.read_bytes().decode("utf-8-sig").split("\n")
    assert all(text[line - 1].startswith('"') for line in table.lines)
    assert read_in_parts(path, rows) == rows_of(read_frame(path))


# ── Positions in errors ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("content", "message"),
    (
        ('a,b\n"x\ny",1\n1,2,3\n', "line 4 has 3, line 1 has 2. Quote the fields that hold commas"),
        ('a,b\n1,2\n"x\ny,2\n', r"line 3 cannot be read \(.*Double the quotes"),
        ("  \n\n", "must hold some text: it is empty"),
    ),
)
def test_rows_that_cannot_be_read_are_named_by_line(
    content: str, message: str, write: Write
) -> None:
    assert_refused(write(content), message)


def test_a_row_beyond_the_first_chunk_is_named(write: Write) -> None:
    rows = 2 * PARSE_CHUNK
    assert_refused(write("a,b\n" + "1,2\n" * rows + "3\n"), f"line {rows + 2} has 1")


@pytest.mark.parametrize(
    ("content", "name", "message"),
    (
        (b"a,b\n1,\xe9\n", "t.csv", "byte 3 of line 2 is 0xe9"),
        (b"a,b\n1,\0\n", "t.csv", "byte 3 of line 2 is 0"),
        (gzip.compress("a,b".encode("utf-16"), mtime=0), "t.csv.gz", "it is UTF-16 text"),
        (b"a,b\n1,2\n", "t.csv.gz", "is not compressed with gzip. Name it without .gz"),
    ),
)
def test_all_readers_refuse_other_files(
    content: bytes, name: str, message: str, write: Write
) -> None:
    assert_refused(write(content, name), message, SavedError)


def test_names_of_columns_are_checked_with_their_line(write: Write) -> None:
    path = write("\n\na,b, a\n1,2,3\n")
    for read in (read_frame, lambda path: list(read_parts(path))):
        with pytest.raises(InputError, match="name for each column: 'a' occurs 2 times in line 3"):
            read(path)
    path = write("\na,\n1,2\n")
    note = f"column 2 of {str(path)!r} has no name in line 2: it is called 'column 2'."
    assert read_frame(path).notes == (note,) == next(read_parts(path)).notes


def test_memory_does_not_grow_with_the_rows(write: Write) -> None:
    """Rows are streamed: after the first, little of the file has been read."""
    file = DelimitedFile(write("a,b\n" + "1,2\n" * 50_000))
    rows = file.rows()
    assert next(rows) == (1, ["a", "b"]) and file.share_read() < 0.1
    assert sum(1 for _ in rows) == 50_000 and file.share_read() == 1
