"""UTF-8 text files, plain or gzip, streamed by line; other content is refused with its position.

A line ends with \\n or \\r\\n and with nothing else: Unicode has more line separators, and they
occur inside sentences, so that splitting on them would misalign parallel files.
"""

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from addnorm.errors import InputError, SavedError
from addnorm.files import require_path

FILE_SIGNATURES = {
    b"\xff\xfe": "UTF-16 text. Convert it: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text. Convert it: iconv -f UTF-16 -t UTF-8",
    b"PK\x03\x04": "a zip archive or an office document. Unpack it, or save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an office document. Save it as text or CSV",
    b"%PDF-": "a PDF. Save its text as a .txt file",
    b"BZh9": "compressed with bzip2. Unpack it: bunzip2",
    b"\xfd7zXZ": "compressed with xz. Unpack it: unxz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd. Unpack it: unzstd",
    b"PAR1": "a Parquet table. Save it as CSV",
}
"""First bytes of files that are often passed in place of text, and what these files are."""
UNPACKED_LIMIT, UNPACKED_RATIO = 256 * 2**20, 50
"""A gzip file may unpack to this many bytes, or to this many times its size if that is more.

Text shrinks to a third or a tenth; a file made to fill the memory shrinks to a thousandth.
"""
MAX_GZIP_RATIO, MAX_SCANNED = 1032, 2**25
"""Bytes that a byte of gzip unpacks to at most; size of a file up to which that is checked first:
unpacking takes a second, parsing as much text minutes."""
BYTE_ORDER_MARK, GZIP_SIGNATURE = b"\xef\xbb\xbf", b"\x1f\x8b"


class _UnpackedStream(io.RawIOBase):
    """The unpacked bytes of a gzip file, up to a limit: beyond it, reading raises SavedError."""

    def __init__(self, raw: io.BufferedReader, path: Path, limit: int) -> None:
        self.source, self.path, self.limit, self.count = (
            gzip.GzipFile(fileobj=raw),
            path,
            limit,
            0,
        )

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.source.read1(len(buffer))
        self.count += len(content)
        if self.count > self.limit:
            raise SavedError(
                f"{str(self.path)!r} must unpack to at most {self.limit:,} bytes: it has more. "
                "If you trust it, unpack it (gunzip), or raise the limit: "
                f"addnorm --unpacked-limit={8 * self.limit} …"
            )
        buffer[: len(content)] = content
        return len(content)


def unpacked_limit(size: int) -> int:
    """Return the bytes that a gzip file of `size` bytes may unpack to.

    >>> unpacked_limit(1000), unpacked_limit(10**9)
    (268435456, 50000000000)
    """
    return limits.unpacked or max(UNPACKED_LIMIT, UNPACKED_RATIO * size)


@dataclass
class FileLimits:
    """Limits that can be set for the whole process."""

    unpacked: int | None = None
    """Bytes that any gzip file may unpack to; None for a limit that depends on its size."""


limits = FileLimits()


class TextFile:
    """An open text file: iterating yields its lines, each ending with \\n but possibly the last."""

    def __init__(self, path: str | Path) -> None:
        self.path = require_file(Path(path))
        self.size = self.path.stat().st_size

    def __enter__(self) -> Self:
        try:
            self.raw = self.path.open("rb")
        except OSError as error:
            raise self._unreadable(error) from None
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    def share_read(self) -> float:
        """Return the share of the file's bytes that have been read from disk."""
        return 1.0 if self.raw.closed else self.raw.tell() / self.size

    def __iter__(self) -> Iterator[str]:
        is_gzip = self.raw.peek(2).startswith(GZIP_SIGNATURE)
        if self.path.suffix == ".gz" and self.size and not is_gzip:
            raise SavedError(
                f"{str(self.path)!r} is not compressed with gzip. Name it without .gz."
            )
        stream: Iterable[bytes] = self.raw
        try:
            if is_gzip:
                limit = unpacked_limit(self.size)
                if limit / MAX_GZIP_RATIO < self.size <= MAX_SCANNED:
                    self._unpack_all(limit)
                stream = io.BufferedReader(_UnpackedStream(self.raw, self.path, limit), 2**16)
            for number, content in enumerate(stream, start=1):
                if number == 1:
                    yield from self._first_line(content)
                else:
                    yield self._decode(content, number)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise SavedError(
                f"{str(self.path)!r} is damaged: its gzip data is truncated."
            ) from None
        except OSError as error:
            raise error if isinstance(error, SavedError) else self._unreadable(error) from None

    def _unpack_all(self, limit: int) -> None:
        """Refuse a small file that unpacks to more than a limit before its rows are parsed."""
        with self.path.open("rb") as raw:
            stream = _UnpackedStream(raw, self.path, limit)
            buffer = bytearray(2**20)
            while stream.readinto(buffer):
                pass

    def _first_line(self, content: bytes) -> Iterator[str]:
        """Yield the first line without its byte order mark; of an old Macintosh file, all lines."""
        for signature, kind in FILE_SIGNATURES.items():
            if content.startswith(signature):
                raise SavedError(f"{str(self.path)!r} is not UTF-8 text: it is {kind}.")
        line = self._decode(content.removeprefix(BYTE_ORDER_MARK), 1)
        if line.endswith("\n") or "\r" not in line:
            yield from (line,) if line else ()
            return
        # Without a single \n, \r is the line end; elsewhere a lone \r is part of its line.
        *lines, last = line.split("\r")
        yield from (f"{each}\n" for each in lines)
        yield from (last,) if last else ()

    def _decode(self, content: bytes, line: int) -> str:
        if (place := content.find(b"\0")) >= 0:
            raise SavedError(
                f"{str(self.path)!r} is not text: byte {place + 1} of line {line} is 0. "
                "Give a file of UTF-8 text."
            )
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise SavedError(
                f"{str(self.path)!r} must be UTF-8 text: byte {error.start + 1} of line {line} is "
                f"0x{content[error.start]:02x}. If it is Latin-1, convert it: "
                "iconv -f LATIN1 -t UTF-8."
            ) from None
        return f"{text[:-2]}\n" if text.endswith("\r\n") else text

    def _unreadable(self, error: OSError) -> SavedError:
        return SavedError(f"{str(self.path)!r} cannot be read: {error.strerror}.")


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a file, plain or .gz, without their line ends.

    >>> _ = Path("book.txt").write_bytes(b"one\\r\\ntwo\\n")
    >>> read_lines("book.txt")
    ['one', 'two']
    """
    return [line.removesuffix("\n") for line in _nonempty_lines(path)]


def read_text_file(path: str | Path) -> str:
    """Return the whole text of a file, plain or .gz, with \\n as the line end."""
    return "".join(_nonempty_lines(path))


def _nonempty_lines(path: str | Path) -> list[str]:
    with TextFile(path) as file:
        lines = list(file)
    if not any(line.strip() for line in lines):
        raise empty_file(path)
    return lines


def empty_file(path: str | Path) -> InputError:
    """Return the error for a file without any text."""
    return InputError(f"{str(path)!r} must hold some text: it is empty.")


def require_file(path: Path) -> Path:
    """Return the path if it is a file; otherwise raise an error with a suggestion."""
    if require_path(path).is_dir():
        inside = sorted(entry for entry in path.iterdir() if entry.is_file())
        hint = f", such as {str(inside[0])!r}" if inside else ""
        raise SavedError(f"{str(path)!r} is a directory. Name a file in it{hint}.")
    if path.exists() and not path.is_file():
        raise SavedError(f"{str(path)!r} is not a regular file. Give a file of text.")
    if not path.is_file():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = get_close_matches(path.name, names, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Check the path."
        raise SavedError(f"there is no file {str(path)!r}. {hint}")
    return path
