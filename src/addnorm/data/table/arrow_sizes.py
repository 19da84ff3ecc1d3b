"""Bytes that the parts of a parquet or feather file unpack to, found without unpacking them.

Both formats store these lengths in front of what they compress: parquet in the header of each page
(Thrift's compact protocol), feather in the first eight bytes of each buffer (its places are in a
flatbuffer). The totals in the footer of a parquet file are not used: nothing compares them with the
pages. To these come 8 bytes for each value, because equal values take no space in a file.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from addnorm.errors import SavedError, require

VALUE_BYTES = 8
"""Bytes of a number, a date or an index in memory."""
FEATHER_MAGIC = b"ARROW1"
FEATHER_START = 8
"""The signature of a feather file, and where its messages start."""
_PLAIN, _DICTIONARY, _DELTA_BYTE_ARRAY, _RLE_DICTIONARY = 0, 2, 7, 8
"""Encodings of pages; DELTA_BYTE_ARRAY has the length of what a text shares with the one before."""
_REPEATING = {_DICTIONARY, _DELTA_BYTE_ARRAY, _RLE_DICTIONARY}
"""Encodings in which a few bytes can stand for a long text."""
_INDEXED = {_PLAIN, _DICTIONARY, _RLE_DICTIONARY}
"""Encodings that can be read as indices."""
_DATA_HEADERS = {5: 2, 8: 4}
"""Fields of a page header that describe a page of data, and their fields of its encoding."""


class LayoutError(SavedError):
    """A part of a file whose lengths cannot be read."""


@dataclass(frozen=True)
class PackedSize:
    """What a row group of a parquet file, or a message of a feather file, unpacks to."""

    unpacked: int
    """Bytes of its pages or buffers."""
    values: int
    """Values in memory, if all of its rows are read."""
    held: int
    """Values in memory, if only some of its rows are read at a time."""

    @property
    def whole(self) -> int:
        return self.unpacked + VALUE_BYTES * self.values

    @property
    def part(self) -> int:
        return self.unpacked + VALUE_BYTES * self.held


# ── Parquet ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ParquetLayout:
    """The sizes of the row groups of a parquet file, and which columns can be read as indices."""

    groups: list[PackedSize]
    indexed: list[bool]
    """For each column, whether its values can be read as indices into its distinct values."""
    longest: int
    """Most bytes of a value of the other columns that a few bytes can stand for; 0 for none."""


def parquet_layout(path: Path, metadata: Any) -> ParquetLayout:
    """Return what a parquet file unpacks to, by the headers of its pages."""
    columns = [metadata.schema.column(place) for place in range(metadata.num_columns)]
    groups = list[PackedSize]()
    encodings: list[set[int]] = [set() for _ in columns]
    pages = [0] * len(columns)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for number in range(metadata.num_row_groups):
            group, unpacked, values, held = metadata.row_group(number), 0, 0, 0
            for place, column in enumerate(columns):
                for page in _pages(content, group.column(place)):
                    encodings[place].add(page.encoding)
                    pages[place] = max(pages[place], page.unpacked)
                    unpacked, values = unpacked + page.unpacked, values + page.values
                    held += page.values if column.max_repetition_level else 0
            groups.append(PackedSize(unpacked, values, held))
    indexed = [found <= _INDEXED for found in encodings]
    repeated = [bool(found & _REPEATING) for found in encodings]
    longest = (
        size
        for size, by_index, repeats in zip(pages, indexed, repeated, strict=True)
        if repeats and not by_index
    )
    return ParquetLayout(groups, indexed, max(longest, default=0))


class _Page(NamedTuple):
    """What the header of a page says of it."""

    unpacked: int
    values: int
    encoding: int


def _pages(content: mmap.mmap, column: Any) -> Iterator[_Page]:
    """Yield what the headers of the pages of a column say; one without values is a dictionary."""
    place, dictionary = column.data_page_offset, column.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < place:
        place = dictionary
    end, values = place + column.total_compressed_size, 0
    while place < end and values < column.num_values:
        reader = _CompactReader(content, place)
        page = reader.read_struct()
        found, packed = _Page(page.get(2, -1), 0, _PLAIN), page.get(3, -1)
        for field, encoding in _DATA_HEADERS.items():
            if isinstance(data := page.get(field), dict):
                found = _Page(found.unpacked, data.get(1, -1), data.get(encoding, -1))
        numbers = (packed, *found)
        if any(type(number) is not int or number < 0 for number in numbers):
            raise LayoutError(f"a page of column {column.path_in_schema!r} has no length")
        yield found
        place, values = reader.place + packed, values + found.values


class _CompactReader:
    """Reads a struct of Thrift's compact protocol: whole numbers, and structs of them, by field."""

    def __init__(self, content: mmap.mmap, place: int) -> None:
        self.content, self.place = content, place

    def read_struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            number = number + step if step else self._signed()
            fields[number] = self._read(kind)
        return fields

    def _read(self, kind: int) -> Any:
        if kind in (1, 2):  # true and false, in the head of the field
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._unsigned())
        if kind == 12:
            return self.read_struct()
        raise LayoutError("the header of a page has a field of an unknown type")

    def _byte(self) -> int:
        try:
            value = self.content[self.place]
        except IndexError:
            raise LayoutError("the header of a page is not complete") from None
        self.place += 1
        return value

    def _skip(self, count: int) -> None:
        self.place += count

    def _unsigned(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            part = self._byte()
            value |= (part & 127) << shift
            if part < 128:
                return value
        raise LayoutError("the header of a page has a number that does not end")

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)  # zigzag: 0, -1, 1, -2, ...


# ── Feather ───────────────────────────────────────────────────────────────────────────────────────


def feather_sizes(path: Path) -> list[PackedSize]:
    """Return the size of each message of a feather file that has rows or a dictionary."""
    ipc = require("pyarrow.ipc", "tables")
    messages = ipc.MessageReader.open_stream(open_messages(path))
    return [message_size(message) for message in messages if message.type != "schema"]


def open_messages(path: Path) -> Any:
    """Return the mapped content of a feather file, at its first message.

    Its messages are read in their order: the places in its footer could be those of others.
    """
    content = require("pyarrow", "tables").memory_map(str(path))
    if content.read(len(FEATHER_MAGIC)) == FEATHER_MAGIC:
        content.seek(FEATHER_START)
    else:
        content.seek(0)
    return content


def message_size(message: Any) -> PackedSize:
    """Return the size of a record batch: of its buffers, and of the values of all its nodes.

    Message: header type 1, header 2. DictionaryBatch: data 1. RecordBatch: nodes 1, buffers 2,
    compression 3. Nodes and buffers are pairs of 8-byte integers: (values, nulls), (place, bytes).
    """
    try:
        batch = _Table.root(memoryview(message.metadata)).child(2)
        batch = batch.child(1) if message.type == "dictionary" else batch
        values, total = sum(count for count, _ in batch.pairs(1)), 0
        for place, size in batch.pairs(2):
            if batch.field(3) is not None and size >= 8:
                (unpacked,) = struct.unpack_from("<q", message.body, place)
                size = size if unpacked < 0 else unpacked  # −1: it was not compressed
            total += size
    except (struct.error, OverflowError):
        raise LayoutError("a message has no lengths") from None
    return PackedSize(total, values, values)


@dataclass(frozen=True)
class _Table:
    """A table of a flatbuffer: its place, and where its fields are relative to that."""

    content: memoryview
    place: int

    @classmethod
    def root(cls, content: memoryview) -> "_Table":
        return cls(content, 0)._follow(0)

    def field(self, number: int) -> int | None:
        """Return the place of a field; None if the table does not have it."""
        start = self.place - self._read("<i", self.place)
        if 4 + 2 * number >= self._read("<H", start):
            return None
        offset = self._read("<H", start + 4 + 2 * number)
        return self.place + offset if offset else None

    def child(self, number: int) -> "_Table":
        return self._follow(self._required(number))

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """Return a vector of pairs of 8-byte integers; empty if the table does not have it."""
        place = self.field(number)
        if place is None:
            return []
        start = place + self._read("<I", place)
        count = self._read("<I", start)
        return list(struct.iter_unpack("<qq", self.content[start + 4 :][: 16 * count]))

    def _required(self, number: int) -> int:
        place = self.field(number)
        if place is None:
            raise LayoutError("a message has no rows")
        return place

    def _follow(self, place: int) -> "_Table":
        return _Table(self.content, place + self._read("<I", place))

    def _read(self, form: str, place: int) -> int:
        (value,) = struct.unpack_from(form, self.content, place)
        return int(value)


# ── Arrays ────────────────────────────────────────────────────────────────────────────────────────


def plain_size(array: Any) -> int:
    """Return the bytes of an Arrow array whose indices are replaced by what they stand for.

    Raises TypeError for types that repeat values in other ways, which no table needs.
    """
    arrow, compute = require("pyarrow", "tables"), require("pyarrow.compute", "tables")
    kind, types = array.type, arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return plain_size(array.storage)
    if types.is_dictionary(kind):
        sizes = _text_sizes(array.dictionary)
        total = None if sizes is None else compute.sum(compute.take(sizes, array.indices)).as_py()
        return VALUE_BYTES * len(array) + (total or 0)
    if types.is_struct(kind):
        return sum(plain_size(array.field(place)) for place in range(kind.num_fields))
    if types.is_map(kind):
        return plain_size(array.keys) + plain_size(array.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return VALUE_BYTES * len(array) + plain_size(array.values)
    if types.is_nested(kind) or types.is_run_end_encoded(kind):
        raise TypeError(f"columns of type {kind} are not read")
    sizes = _text_sizes(array)
    return VALUE_BYTES * len(array) + (0 if sizes is None else compute.sum(sizes).as_py() or 0)


def _text_sizes(array: Any) -> Any:
    """Return the length of each text, as an Arrow array; None if the values are not texts."""
    arrow, compute = require("pyarrow", "tables"), require("pyarrow.compute", "tables")
    kind, types = array.type, arrow.types
    if types.is_string_view(kind) or types.is_binary_view(kind):
        # A view has 16 bytes, the first four of which are the length of its text.
        views = memoryview(array.buffers()[1])[16 * array.offset :][: 16 * len(array)]
        return arrow.array([max(0, size) for size, *_ in struct.iter_unpack("<iiii", views)])
    if types.is_dictionary(kind) or types.is_nested(kind):
        raise TypeError(f"dictionaries of type {kind} are not read")
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_text = is_text or types.is_binary(kind) or types.is_large_binary(kind)
    return compute.binary_length(array) if is_text else None
