"""Compressed texts are unpacked up to a limit that can be raised."""

import gzip
import os
from pathlib import Path

import pytest

from addnorm.data.text import files
from addnorm.data.text.files import limits, read_lines, unpacked_limit
from addnorm.errors import SavedError


def test_a_gzip_file_may_not_unpack_to_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "zeros.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 5_000_000))
    assert read_lines(path) == ["a" * 5_000_000]
    monkeypatch.setattr(files, "UNPACKED_LIMIT", 1_000_000)
    message = (
        r"zeros\.txt\.gz' must unpack to at most 1,000,000 bytes: it has more\. If you trust it, "
        r"unpack it \(gunzip\), or raise the limit: addnorm --unpacked-limit=8000000 …$"
    )
    with pytest.raises(SavedError, match=message):
        read_lines(path)
    monkeypatch.setattr(limits, "unpacked", 6_000_000)
    assert len(read_lines(path)[0]) == 5_000_000


def test_the_limit_grows_with_the_size() -> None:
    assert unpacked_limit(10) == 256 * 2**20 and unpacked_limit(2**30) == 50 * 2**30


def test_devices_and_fifos_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.txt")
    for path in (tmp_path / "fifo.txt", Path("/dev/zero")):
        with pytest.raises(SavedError, match=r"is not a regular file\. Give a file of text\."):
            read_lines(path)


def test_a_small_file_is_refused_before_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing the rows up to the limit would take minutes; unpacking takes a moment."""
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"x,y\n" + b"1,2\n" * 500_000))
    monkeypatch.setattr(limits, "unpacked", 1_000_000)
    lines: list[str] = []
    with pytest.raises(SavedError, match="must unpack to at most 1,000,000 bytes"):
        lines.extend(read_lines(path))
    assert lines == []
