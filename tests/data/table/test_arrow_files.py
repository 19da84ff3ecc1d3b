"""Parquet and feather files that are small and would fill the memory are refused."""

from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from addnorm.data.table.frame import read_frame
from addnorm.data.table.reader import read_parts
from addnorm.data.text.files import UNPACKED_LIMIT, limits
from addnorm.errors import SavedError

arrow = pytest.importorskip("pyarrow")

MESSAGE = (
    r"must unpack to at most [0-9,]+ bytes: it has [0-9,]+\. If you trust it, raise the limit: "
    r"addnorm --unpacked-limit=[0-9]+ …$"
)


def write_groups(path: Path, table: Any, groups: int) -> None:
    """Write a parquet file with the same rows again and again."""
    from pyarrow import parquet

    with parquet.ParquetWriter(str(path), table.schema, compression="zstd") as writer:
        for _ in range(groups):
            writer.write_table(table, row_group_size=len(table))


def test_equal_numbers(tmp_path: Path) -> None:
    path = tmp_path / "zeros.parquet"
    write_groups(path, arrow.table({"x": arrow.nulls(1_000_000, arrow.int64())}), 40)
    assert path.stat().st_size < 100_000 and UNPACKED_LIMIT < 40_000_000 * 8
    with pytest.raises(SavedError, match=MESSAGE):
        read_frame(path)
    assert len(next(read_parts(path, rows=100))) == 100, "a part is small"


@pytest.mark.parametrize("kind", ("string", "large_string", "binary"))
def test_a_long_text_that_is_repeated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "unpacked", 1_000_000)
    path = tmp_path / "texts.parquet"
    values = arrow.array(["x" * 20_000], getattr(arrow, kind)())
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 200, arrow.int32()), values)
    schema = arrow.schema([("t", getattr(arrow, kind)())])
    write_groups(path, arrow.table({"t": column}).cast(schema), 1)
    assert path.stat().st_size < 10_000
    with pytest.raises(SavedError, match=MESSAGE):
        read_frame(path)
    with pytest.raises(SavedError, match=MESSAGE):
        list(read_parts(path))


def test_equal_numbers_of_a_compressed_feather_file(tmp_path: Path) -> None:
    from pyarrow import feather

    path = tmp_path / "zeros.feather"
    table = arrow.table({"x": arrow.array([0], arrow.int8())})
    wide = arrow.table({f"x{i}": arrow.nulls(1_000_000, arrow.int8()) for i in range(40)})
    feather.write_feather(wide, str(path), compression="zstd")
    with pytest.raises(SavedError, match=MESSAGE):
        read_frame(path)
    feather.write_feather(table, str(path), compression="zstd")
    assert len(read_frame(path)) == 1


def write_feather(path: Path, table: Any, compression: str = "zstd") -> None:
    from pyarrow import ipc

    options = ipc.IpcWriteOptions(compression=compression)
    with ipc.new_file(str(path), table.schema, options=options) as writer:
        writer.write_table(table)


def as_views(long: str) -> Any:
    """Return texts of views, all of the same bytes."""
    body = long.encode()
    view = len(body).to_bytes(4, "little") + body[:4] + bytes(8)
    buffers = [None, arrow.py_buffer(view * 400), arrow.py_buffer(body)]
    return arrow.Array.from_buffers(arrow.string_view(), 400, buffers)


def as_indices(long: str) -> Any:
    return arrow.DictionaryArray.from_arrays(arrow.array([0] * 400, arrow.int32()), [long])


def as_lists(long: str) -> Any:
    return arrow.ListArray.from_arrays([0, 400], as_indices(long))


@pytest.mark.parametrize("name", ("t.feather", "t.parquet"))
@pytest.mark.parametrize(
    "column",
    (
        lambda long: arrow.array([100 * long]),
        as_views,
        as_indices,
        as_lists,
        lambda long: arrow.StructArray.from_arrays([as_indices(long)], ["s"]),
        lambda long: arrow.array([[None] * 250_000], arrow.list_(arrow.null())),
        lambda long: arrow.array([[7] * 250_000], arrow.list_(arrow.int8())),
    ),
)
def test_what_is_unpacked_is_known_before(
    column: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 2 MB in one cell, 400 cells of one text, and lists that are long."""
    from pyarrow import parquet

    monkeypatch.setattr(limits, "unpacked", 1_000_000)
    table, path = arrow.table({"t": column("x" * 20_000)}), tmp_path / name
    if name == "t.feather":
        write_feather(path, table)
    else:
        parquet.write_table(table, str(path), compression="zstd")
    assert path.stat().st_size < 40_000
    pool, used = arrow.default_memory_pool(), arrow.proxy_memory_pool(arrow.default_memory_pool())
    arrow.set_memory_pool(used)
    try:
        for read in (read_frame, lambda path: list(read_parts(path))):
            with pytest.raises(SavedError, match=MESSAGE):
                read(path)
    finally:
        arrow.set_memory_pool(pool)
    assert used.max_memory() < 1_000_000


@pytest.mark.parametrize("encoding", ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"))
def test_texts_that_share_their_beginnings(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 20 kB is stored as the one before, and two characters."""
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    options: Any = {"use_dictionary": False, "column_encoding": {"t": encoding}}
    table = arrow.table({"t": ["x" * 20_000 + f"{i:02}" for i in range(100)]})
    parquet.write_table(table, str(path), compression="zstd", **options)
    assert path.stat().st_size < 30_000 and len(read_frame(path)) == 100
    monkeypatch.setattr(limits, "unpacked", 200_000)
    with pytest.raises(SavedError, match=MESSAGE):
        read_frame(path)
    if encoding == "DELTA_BYTE_ARRAY":
        assert [len(part) for part in read_parts(path)][:3] == [9, 9, 9], "a part is small"


@pytest.mark.parametrize("compression", ("zstd", "lz4", None))
def test_columns_of_every_type_are_read_from_both_formats(compression: Any, tmp_path: Path) -> None:
    from pyarrow import parquet

    values = {
        "text": arrow.array(["a", None, "c"]),
        "view": arrow.array(["a long text of a view", None, "c"], arrow.string_view()),
        "lists": arrow.array([["a", "b"], None, []]),
        "struct": arrow.array([{"q": "x", "n": 1}, None, {"q": "y", "n": None}]),
        "map": arrow.array([[("k", "v")], None, []], arrow.map_(arrow.string(), arrow.string())),
        "declared": arrow.array(["a", "b", None]).dictionary_encode(),
        "flag": arrow.array([True, None, False]),
        "price": arrow.array([Decimal("1.25"), None, Decimal("3")]),
        "day": arrow.array([date(2026, 1, 2), None, date(1999, 1, 1)]),
        "fixed": arrow.array([[1, 2], None, [3, 4]], arrow.list_(arrow.int8(), 2)),
        "nothing": arrow.nulls(3),
    }
    table = arrow.table(values)
    write_feather(tmp_path / "t.feather", table, compression)
    parquet.write_table(table, str(tmp_path / "t.parquet"), compression=compression or "NONE")
    frames = [read_frame(tmp_path / name) for name in ("t.feather", "t.parquet")]
    for frame in frames:
        assert frame.declared == {"declared"} and frame.names == list(values)
        assert frame.columns["view"].tolist() == ["a long text of a view", None, "c"]
        assert frame.columns["lists"].tolist()[0] == "['a', 'b']"
    assert [c.tolist() for c in frames[0].columns.values()].__repr__() == [
        c.tolist() for c in frames[1].columns.values()
    ].__repr__()


def test_a_type_that_repeats_values_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.feather"
    ends = arrow.RunEndEncodedArray.from_arrays(arrow.array([10**6], arrow.int32()), ["x" * 1000])
    write_feather(path, arrow.table({"t": ends}))
    with pytest.raises(SavedError, match=r"columns of type run_end_encoded<.*> are not read"):
        read_frame(path)


def test_a_stream_of_arrow_is_read_as_a_feather_file(tmp_path: Path) -> None:
    path, table = tmp_path / "t.arrow", arrow.table({"x": [1, 2], "t": ["a", "b"]})
    with arrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    assert read_frame(path).columns["t"].tolist() == ["a", "b"]


def test_a_message_without_lengths() -> None:
    """The root of a flatbuffer, whose table has no field; then one that ends too early."""
    from addnorm.data.table.arrow_sizes import LayoutError, message_size

    empty = b"\x08\0\0\0" + b"\x04\0\x04\0" + b"\x04\0\0\0"
    for metadata, problem in ((empty, "a message has no rows"), (b"", "a message has no lengths")):
        message = SimpleNamespace(metadata=metadata, body=b"", type="record batch")
        with pytest.raises(LayoutError, match=problem):
            message_size(message)


@pytest.mark.parametrize("name", ("t.feather", "t.parquet"))
def test_damaged_lengths_are_one_clear_error(name: str, tmp_path: Path) -> None:
    from pyarrow import parquet

    path, table = tmp_path / name, arrow.table({"t": ["a" * 500, "b"], "x": [1, 2]})
    if name == "t.feather":
        write_feather(path, table)
    else:
        parquet.write_table(table, str(path))
    content, refused = path.read_bytes(), 0
    for place in range(4, min(len(content), 400)):
        path.write_bytes(content[:place] + b"\xff" * 8 + content[place + 8 :])
        try:
            read_frame(path)
        except SavedError as error:
            refused += str(path) in str(error)
    assert refused > 10


def test_the_limit_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.parquet"
    write_groups(path, arrow.table({"x": [1.0, 2.0], "t": ["a", None]}), 2)
    monkeypatch.setattr(limits, "unpacked", 20)
    with pytest.raises(SavedError, match="must unpack to at most 20 bytes"):
        read_frame(path)
    monkeypatch.setattr(limits, "unpacked", 10_000)
    assert read_frame(path).columns["t"].tolist() == ["a", None, "a", None]


def test_declared_categories_stay(tmp_path: Path) -> None:
    path = tmp_path / "categories.parquet"
    column = arrow.array(["a", "b", "a"]).dictionary_encode()
    write_groups(path, arrow.table({"c": column, "t": ["a", "b", "a"]}), 1)
    frame = read_frame(path)
    assert frame.declared == {"c"} and frame.columns["t"].tolist() == ["a", "b", "a"]
