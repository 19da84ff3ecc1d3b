"""Files of text, read with suspicion: what is not UTF-8 text is refused, and said where.

A line ends with \\n or \\r\\n, and with nothing else: Unicode has more line separators, and they
occur inside sentences, so that splitting on them would put aligned files out of step.
"""

import gzip
import zlib
from difflib import get_close_matches
from pathlib import Path

from addnorm.errors import InputError, SavedError

SIGNS = {
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
"""How files begin that are often given for text, and what they are."""


def read_lines(path: str | Path) -> list[str]:
    """The lines of a file, plain or .gz, without their ends.

    >>> _ = Path("book.txt").write_bytes(b"one\\r\\ntwo\\n")
    >>> read_lines("book.txt")
    ['one', 'two']
    """
    lines = read_document(path).split("\n")
    # The last line end closes the last line; it does not begin another.
    return lines[:-1] if lines[-1] == "" else lines


def read_document(path: str | Path) -> str:
    """The whole text of a file, plain or .gz, its line ends made \\n."""
    path = Path(path)
    content = _unpack(path, _read(path))
    text = _decode(path, content.removeprefix(b"\xef\xbb\xbf"))
    if "\r" in text:
        text = text.replace("\r\n", "\n")
        # An old Macintosh file has no \n at all; elsewhere a lone \r belongs to its line.
        text = text if "\n" in text else text.replace("\r", "\n")
    if not text.strip():
        raise InputError(f"{str(path)!r} must hold some text: it is empty.")
    return text


def need_file(path: Path) -> Path:
    """The path, if a file is there; an error that helps if not."""
    if path.is_dir():
        inside = sorted(entry for entry in path.iterdir() if entry.is_file())
        hint = f", such as {str(inside[0])!r}" if inside else ""
        raise SavedError(f"{str(path)!r} is a directory. Name a file in it{hint}.")
    if not path.is_file():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = get_close_matches(path.name, names, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Check the path."
        raise SavedError(f"there is no file {str(path)!r}. {hint}")
    return path


def _read(path: Path) -> bytes:
    try:
        return need_file(path).read_bytes()
    except SavedError:
        raise
    except OSError as error:
        raise SavedError(f"{str(path)!r} cannot be read: {error.strerror}.") from None


def _unpack(path: Path, content: bytes) -> bytes:
    """The contents, unpacked if they begin as gzip does, whatever the file's name."""
    if content.startswith(b"\x1f\x8b"):
        try:
            return gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            raise SavedError(f"{str(path)!r} is damaged: its gzip data break off.") from None
    if path.suffix == ".gz" and content:
        raise SavedError(f"{str(path)!r} is not compressed with gzip. Name it without .gz.")
    return content


def _decode(path: Path, content: bytes) -> str:
    for sign, what in SIGNS.items():
        if content.startswith(sign):
            raise SavedError(f"{str(path)!r} is not UTF-8 text: it is {what}.")
    if (place := content.find(b"\0")) >= 0:
        raise SavedError(
            f"{str(path)!r} is not text: {_where(content, place)} is 0. Give a file of UTF-8 text."
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        place, value = error.start, content[error.start]
        raise SavedError(
            f"{str(path)!r} must be UTF-8 text: {_where(content, place)} is 0x{value:02x}. "
            "If it is Latin-1, convert it: iconv -f LATIN1 -t UTF-8."
        ) from None


def _where(content: bytes, place: int) -> str:
    """The place of a byte, as people count: from 1, by lines."""
    line = content.count(b"\n", 0, place) + 1
    start = content.rfind(b"\n", 0, place) + 1
    return f"byte {place - start + 1} of line {line}"
