"""Files that appear whole or not at all."""

import os
from pathlib import Path

import pytest

from addnorm.disk import read_text, whole, write_whole
from addnorm.errors import SavedError


def test_a_file_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_whole(path, b"old")
    with pytest.raises(ZeroDivisionError), whole(path) as temporary:
        temporary.write_bytes(b"half of the n")
        assert path.read_bytes() == b"old" and temporary.parent == tmp_path
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["facts.json"]


def test_the_disk_has_the_contents_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "facts.json", []

    def flush(handle: int) -> None:
        seen.append((os.fstat(handle).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", flush)
    write_whole(path, b"12345")
    assert seen == [(5, False)]


def test_two_writers_do_not_share_a_temporary_name(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    with whole(path) as one, whole(path) as other:
        assert one != other
        one.write_bytes(b"1")
        other.write_bytes(b"2")
    assert path.read_bytes() == b"1" and len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"none/facts.json' cannot be written: No such file"):
        write_whole(tmp_path / "none" / "facts.json", b"")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file .*facts.toml'. Check the path."),
        (b"caf\xe9", "facts.toml' is not UTF-8 text: unexpected end of data"),
    ],
    ids=["missing", "latin-1"],
)
def test_what_cannot_be_read_is_one_clear_error(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "facts.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SavedError, match=message):
        read_text(path)
    with pytest.raises(SavedError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
    path.write_text("größer", encoding="utf-8")
    assert read_text(str(path)) == "größer"
