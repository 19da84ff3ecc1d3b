"""Parquet and feather files that are small and would fill the memory are refused."""

from pathlib import Path
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
