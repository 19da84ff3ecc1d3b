"""Parquet and feather files, read up to a limit on the bytes that they unpack to.

A column of equal values takes a few bytes of a file, whatever its length, and so does a long text
that is repeated: a small file can be made to fill the memory. What it unpacks to is known before it
is unpacked (arrow_sizes.py); texts stay indices into their distinct values until their size is
known.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from addnorm.data.table.arrow_sizes import (
    feather_sizes,
    open_messages,
    parquet_layout,
    plain_size,
)
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
BATCH_ROWS = 2**16
"""Rows of a parquet file that are read at a time."""


def read_arrow_table(path: Path, kind: str) -> Any:
    """Return the table of a parquet or feather file, as `kind` says; SavedError if damaged."""
    require_file(path)
    try:
        schema, parts = _open(path, kind, BATCH_ROWS, whole=True)
        tables, total = [], 0
        for part, _ in parts:
            total += _plain_size(part)
            _require_size(path, total)
            tables.append(_decode_texts(part, schema))
        empty = _decode_texts(schema.empty_table(), schema)
        table = require("pyarrow", "tables").concat_tables(tables or [empty])
        table.validate(full=True)  # a damaged file may have offsets outside its buffers
    except ARROW_ERRORS as error:
        raise damaged_arrow(path, kind, error) from None
    return table


def arrow_batches(path: Path, kind: str, rows: int) -> Iterator[tuple[Any, float]]:
    """Yield tables of a file, each with the share of the file read after it.

    A table of a parquet file has at most `rows` rows; one of a feather file has as many as were
    written at once. An uncompressed feather file is memory-mapped, not read.
    """
    schema, parts = _open(path, kind, rows, whole=False)
    for part, share in parts:
        _require_size(path, _plain_size(part))
        yield _decode_texts(part, schema), share


def damaged_arrow(path: Path, kind: str, error: Exception) -> SavedError:
    """Return the error for a parquet or feather file that pyarrow cannot read."""
    if isinstance(error, SavedError):
        return error
    reason = str(error).splitlines()[0]
    return SavedError(f"{str(path)!r} is damaged or not a {kind} file: {reason}")


def _open(
    path: Path, kind: str, rows: int, *, whole: bool
) -> tuple[Any, Iterator[tuple[Any, float]]]:
    """Return the schema of a file and its parts, if it is not too large as a whole or in parts."""
    if kind == "parquet":
        file = require("pyarrow.parquet", "tables").ParquetFile(str(path))
        layout = parquet_layout(path, file.metadata)
        if layout.longest:
            rows = max(1, min(rows, unpacked_limit(path.stat().st_size) // layout.longest))
        parts = _parquet_parts(path, file.metadata, layout.indexed, rows)
        sizes, schema = layout.groups, file.schema_arrow
    else:
        reader = require("pyarrow.ipc", "tables").open_stream(open_messages(path))
        sizes = feather_sizes(path)
        schema, parts = reader.schema, _feather_parts(reader, 1 + len(sizes))
    total = sum(size.whole for size in sizes)
    _require_size(path, total if whole else max((size.part for size in sizes), default=0))
    return schema, parts


def _parquet_parts(
    path: Path, metadata: Any, indexed: list[bool], rows: int
) -> Iterator[tuple[Any, float]]:
    """Yield tables of at most `rows` rows, with texts as indices, and the share of rows read."""
    arrow, parquet = require("pyarrow", "tables"), require("pyarrow.parquet", "tables")
    columns = [metadata.schema.column(place) for place in range(metadata.num_columns)]
    texts = [
        column.path
        for column, by_index in zip(columns, indexed, strict=True)
        if by_index
        and column.physical_type == "BYTE_ARRAY"
        and column.logical_type.type != "DECIMAL"
    ]
    done = 0
    for batch in parquet.ParquetFile(str(path), read_dictionary=texts).iter_batches(rows):
        done += batch.num_rows
        yield arrow.Table.from_batches([batch]), done / max(metadata.num_rows, 1)


def _feather_parts(reader: Any, messages: int) -> Iterator[tuple[Any, float]]:
    """Yield tables as they were written, and the share of the messages read."""
    arrow = require("pyarrow", "tables")
    for batch in reader:
        yield arrow.Table.from_batches([batch]), reader.stats.num_messages / messages


def _plain_size(table: Any) -> int:
    return sum(plain_size(chunk) for column in table.columns for chunk in column.chunks)


def _decode_texts(table: Any, schema: Any) -> Any:
    """Return a table whose texts are no longer indices, unless they are declared as such.

    Nor are they views, which few functions of pyarrow accept.
    """
    arrow = require("pyarrow", "tables")
    views = {arrow.string_view(): arrow.large_string(), arrow.binary_view(): arrow.large_binary()}
    for place, field in enumerate(schema):
        kind = views.get(field.type, field.type)
        if table.schema.field(place).type != kind:
            column = table.column(place).cast(kind)
            table = table.set_column(place, field.with_type(kind), column)
    return table


def _require_size(path: Path, size: int) -> None:
    limit = unpacked_limit(path.stat().st_size)
    if size > limit:
        raise SavedError(
            f"{str(path)!r} must unpack to at most {limit:,} bytes: it has {size:,}. If you trust "
            f"it, raise the limit: addnorm --unpacked-limit={2 * size} …"
        )
