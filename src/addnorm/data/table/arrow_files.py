"""Parquet and feather files, read up to a limit on the bytes that they unpack to.

A column of equal values takes a few bytes of a file, whatever its length, and so does a long text
that is repeated: a small file can be made to fill the memory. What a file declares is checked
before it is read; texts stay indices into their distinct values until their size is known.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from addnorm.data.text.files import require_file, unpacked_limit
from addnorm.errors import SavedError, require

ARROW_FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".feather": "feather",
    ".arrow": "feather",
}
ARROW_ERRORS = (OSError, ValueError, MemoryError, LookupError, TypeError, NotImplementedError)
"""What pyarrow raises for a damaged file; all of its exceptions are one of these, too."""
CELL_BYTES = 8
"""Bytes of a number or date in memory."""


def read_arrow_table(path: Path, kind: str) -> Any:
    """Return the table of a parquet or feather file, as `kind` says; SavedError if damaged."""
    require_file(path)
    try:
        if kind == "parquet":
            file, texts = _open_parquet(path)
            rows, columns = file.metadata.num_rows, len(file.schema_arrow)
            _require_size(path, rows * columns * CELL_BYTES)
            table = _decode_texts(file.read(), texts, path)
        else:
            dataset = require("pyarrow.dataset", "tables").dataset(str(path), format="feather")
            _require_size(path, dataset.count_rows() * len(dataset.schema) * CELL_BYTES)
            table = require("pyarrow.feather", "tables").read_table(str(path))
        table.validate(full=True)  # a damaged file may have offsets outside its buffers
    except ARROW_ERRORS as error:
        raise damaged_arrow(path, kind, error) from None
    return table


def parquet_batches(path: Path, rows: int) -> Iterator[tuple[Any, float]]:
    """Yield tables of at most `rows` rows, each with the share of the file read after it."""
    arrow = require("pyarrow", "tables")
    file, texts = _open_parquet(path)
    done = 0
    for batch in file.iter_batches(batch_size=rows):
        done += batch.num_rows
        table = arrow.Table.from_batches([batch])
        yield _decode_texts(table, texts, path), done / file.metadata.num_rows


def feather_batches(path: Path) -> Iterator[tuple[Any, float]]:
    """Yield tables as they were written; an uncompressed file is memory-mapped, not read."""
    arrow, ipc = require("pyarrow", "tables"), require("pyarrow.ipc", "tables")
    file = ipc.open_file(arrow.memory_map(str(path)))
    for number in range(file.num_record_batches):
        table = arrow.Table.from_batches([file.get_batch(number)])
        yield table, (number + 1) / file.num_record_batches


def damaged_arrow(path: Path, kind: str, error: Exception) -> SavedError:
    """Return the error for a parquet or feather file that pyarrow cannot read."""
    if isinstance(error, SavedError):
        return error
    reason = str(error).splitlines()[0]
    return SavedError(f"{str(path)!r} is damaged or not a {kind} file: {reason}")


def _open_parquet(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return an open file that reads texts as indices, and the types of these columns."""
    parquet, types = require("pyarrow.parquet", "tables"), require("pyarrow.types", "tables")
    file = parquet.ParquetFile(str(path))
    kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    texts = {
        field.name: field.type
        for field in file.schema_arrow
        if any(is_kind(field.type) for is_kind in kinds)
    }
    metadata = file.metadata
    groups = (metadata.row_group(place) for place in range(metadata.num_row_groups))
    _require_size(path, sum(max(group.total_byte_size, 0) for group in groups))
    return parquet.ParquetFile(str(path), read_dictionary=[*texts]), texts


def _decode_texts(table: Any, texts: dict[str, Any], path: Path) -> Any:
    """Return a table whose texts are no longer indices, if it is not too large then."""
    arrow, compute = require("pyarrow", "tables"), require("pyarrow.compute", "tables")
    encoded = {
        place: field.name
        for place, field in enumerate(table.schema)
        if field.name in texts and arrow.types.is_dictionary(field.type)
    }
    total = 0
    for place in encoded:
        for chunk in table.column(place).chunks:
            lengths = compute.take(compute.binary_length(chunk.dictionary), chunk.indices)
            total += compute.sum(lengths).as_py() or 0
    _require_size(path, total)
    for place, name in encoded.items():
        column = table.column(place).cast(texts[name])
        table = table.set_column(place, name, column)
    return table


def _require_size(path: Path, size: int) -> None:
    limit = unpacked_limit(path.stat().st_size)
    if size > limit:
        raise SavedError(
            f"{str(path)!r} must unpack to at most {limit:,} bytes: it has {size:,}. If you trust "
            f"it, raise the limit: addnorm --unpacked-limit={2 * size} …"
        )
