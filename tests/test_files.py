"""Files that are written atomically, and documents whose digest shows whether they were changed."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import addnorm
from addnorm import files
from addnorm.errors import InputError, SavedError
from addnorm.files import (
    dump_document,
    kind_of,
    kind_of_directory,
    make_directory,
    read_bytes,
    read_document,
    read_text,
    require_path,
    require_writable,
    require_writable_file,
    to_json,
    whole,
    write_document,
    write_whole,
)
from addnorm.models.saved import read_tensors, write_tensors


def test_a_file_is_replaced_only_by_a_complete_one(tmp_path: Path) -> None:
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


def test_a_file_is_flushed_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, contents = tmp_path / "facts.json", []

    def flush(handle: int) -> None:
        contents.append((os.fstat(handle).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", flush)
    write_whole(path, b"12345")
    directory = tmp_path.stat().st_size
    assert contents == [(5, False), (directory, True)]


def test_two_writers_do_not_share_a_temporary_name(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    with whole(path) as one, whole(path) as other:
        assert one != other
        one.write_bytes(b"1")
        other.write_bytes(b"2")
    assert path.read_bytes() == b"1" and len(list(tmp_path.iterdir())) == 1


def test_unwritable_files_are_one_clear_error(tmp_path: Path) -> None:
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
def test_unreadable_files_are_one_clear_error(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "facts.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SavedError, match=message):
        read_text(path)
    with pytest.raises(SavedError, match=r"is not a regular file\. Check the path"):
        read_text(tmp_path)
    path.write_text("größer", encoding="utf-8")
    assert read_text(str(path)) == "größer"


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files cannot be opened, as if they were another user's: root may open all others."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("read", (read_text, lambda path: read_tensors(path, *files.TEXT_MODEL)))
def test_files_of_another_user_are_one_clear_error(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    message = (
        r"model\.safetensors' cannot be read: Permission denied\. Change its permissions "
        r"\(chmod u\+r\), or ask its owner\.$"
    )
    with pytest.raises(SavedError, match=message):
        read(path)


@pytest.mark.parametrize(("umask", "permissions"), ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)))
def test_permissions_follow_the_umask(tmp_path: Path, umask: int, permissions: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "facts.json", b"{}")
        weights = {"x": torch.zeros(2)}
        write_tensors(tmp_path / "model.safetensors", weights, *files.TEXT_MODEL, {})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"facts.json": permissions, "model.safetensors": permissions}


def refuse_constant(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("indent", (None, 1))
def test_json_has_null_for_nan_and_infinities(value: float, indent: int | None) -> None:
    nested = {"loss": value, "curve": [(1, value), (2, 0.5)], "best": {"auc": value}, "text": "nan"}
    assert json.loads(to_json(nested, indent), parse_constant=refuse_constant) == {
        "loss": None,
        "curve": [[1, None], [2, 0.5]],
        "best": {"auc": None},
        "text": "nan",
    }
    assert to_json([value, 1.0, 3, True, None, "größer"], None) == (
        '[null, 1.0, 3, true, null, "größer"]'
    )


OWN_JSON = {
    "files.py": "to_json itself",
    "data/text/tokenizer.py": "the text is hashed, not written",
    "models/saved.py": "names and shapes that are hashed, and a header of format 1",
    "tabular/saved.py": "whether a parameter can be written",
    "training/checkpoint.py": "plain values with NaN, kept exactly as text",
}


def test_one_function_writes_all_json() -> None:
    source = Path(addnorm.__file__).parent
    own = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "json.dump" in path.read_text(encoding="utf-8")
    }
    assert own <= set(OWN_JSON)


def test_a_directory_that_cannot_be_created_is_one_clear_error(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    write_whole(tmp_path / "file", b"")
    with pytest.raises(
        SavedError, match=r"file/x' cannot be created: Not a directory\. Choose another path\.$"
    ):
        make_directory(tmp_path / "file" / "x")


def test_where_nothing_can_be_written_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert require_writable(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    require_writable_file(tmp_path / "page.html")
    require_writable_file(None)
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for path, message in (
        ("file/run", r"file/run' cannot be created: Not a directory\. Choose another path\.$"),
        ("link", r"link' is a link to nothing\. Choose another path\.$"),
    ):
        with pytest.raises(SavedError, match=message):
            require_writable(tmp_path / path)
    for path, message in (
        (".", r"' is a directory\. Name a file\.$"),
        ("a/b.html", r"^there is no directory '.*/a'\. Create it: mkdir -p .*/a$"),
    ):
        with pytest.raises(SavedError, match=message):
            require_writable_file(tmp_path / path)

    def refuse_file(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse_file)
    message = "' cannot be {}: Read-only file system. Use a directory on another disk."
    for folder, what in ((tmp_path, "written"), (tmp_path / "a", "created")):
        with pytest.raises(SavedError) as caught:
            require_writable(folder)
        assert str(caught.value).endswith(message.format(what))


def test_a_name_that_is_not_utf8_is_refused_before_the_work() -> None:
    name = os.fsdecode(b"runs/\xff")
    with pytest.raises(SavedError, match=r"^'runs/.*' must be a name in UTF-8\. Rename it\.$"):
        require_path(name)
    with pytest.raises(InputError, match=r"a path must have no null character: got 'a\\x00b'\.$"):
        require_path("a\0b")


def test_a_disk_that_becomes_read_only_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_all(path: Path, **options: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refuse_all)
    monkeypatch.setattr(Path, "unlink", refuse_all)
    with pytest.raises(SavedError, match=r"facts\.json' cannot be written: Read-only file system"):
        write_whole(tmp_path / "facts.json", b"{}")


# ── Documents ─────────────────────────────────────────────────────────────────────────────────────

CONTENT = {"name": "größer \ud800 \x1b", "rates": (1e-5, -0.0, 3), "none": None, "on": True}


@pytest.fixture
def document(tmp_path: Path) -> Path:
    write_document(tmp_path / "run.json", "run", 2, CONTENT)
    return tmp_path / "run.json"


def refuse(path: Path, message: str) -> None:
    with pytest.raises(SavedError, match=message):
        read_document(path, "run", 2)


def test_a_document_reads_as_it_was_written(document: Path) -> None:
    assert read_document(document, "run", 2) == CONTENT | {"rates": [1e-5, -0.0, 3]}
    parsed = json.loads(document.read_text())
    assert list(parsed) == ["kind", "version", "digest", "content"]
    canonical = json.dumps(
        {"kind": "run", "version": 2, "content": CONTENT}, sort_keys=True, separators=(",", ":")
    )
    assert parsed["digest"] == hashlib.sha256(canonical.encode()).hexdigest()


def test_equal_content_gives_equal_bytes(document: Path, tmp_path: Path) -> None:
    other = dict(reversed(CONTENT.items())) | {"rates": [1e-5, -0.0, 3]}
    write_document(tmp_path / "other.json", "run", 2, other)
    assert (tmp_path / "other.json").read_bytes() == document.read_bytes()
    assert dump_document("run", 2, {10: 1, 9: 2}) == dump_document("run", 2, {"9": 2, "10": 1})  # type: ignore[dict-item]


def test_a_flipped_bit_of_a_document_is_refused(document: Path) -> None:
    content = document.read_bytes()
    for place in range(0, 8 * len(content), 7):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        document.write_bytes(changed)
        with pytest.raises(SavedError):
            read_document(document, "run", 2)


@pytest.mark.parametrize(
    ("content", "message"),
    (
        (b"", r"run\.json' is damaged: it is not JSON\. Use a backup\.$"),
        (b"\xff\xfe", r"run\.json' is damaged: it is not JSON\. Use a backup\.$"),
        (b"[" * 100_000, r"run\.json' is damaged: it is nested too deeply\. Use a backup\.$"),
        (b"[1]", r"run\.json' was not written by addnorm\. Check the path\.$"),
        (b'{"version": "1.0"}', r"run\.json' was not written by addnorm\. Check the path\.$"),
        (
            b'{"version": 1, "task": "language"}',
            r"run\.json' is a run of format 1; this addnorm reads format 2\. Train it again, or "
            r"use the addnorm version that wrote it\.$",
        ),
        (
            b'{"kind": "run", "version": 3, "digest": "", "content": {}}',
            r"run\.json' is a run of format 3; this addnorm reads format 2\. Train it again",
        ),
        (
            b'{"kind": "table-model", "version": 2, "digest": "", "content": {}}',
            r"run\.json' must be a run: it is a table model\. Check the path\.$",
        ),
        *(
            (
                b'{"kind": "run", "version": 2, "digest": "", "content": %s}' % content,
                r"run\.json' was changed after it was written\. Use a backup\.$",
            )
            for content in (b"{}", b"[]", b"5", b'{"a": NaN}', b'{"a": 1e999}')
        ),
    ),
)
def test_invalid_documents_are_refused(document: Path, content: bytes, message: str) -> None:
    document.write_bytes(content)
    refuse(document, message)


def test_a_document_that_was_reformatted_is_refused(document: Path) -> None:
    values = json.loads(document.read_text())
    document.write_text(json.dumps(values))
    refuse(document, "was changed after it was written")
    values["content"]["on"] = False
    document.write_text(json.dumps(values, indent=1) + "\n")
    refuse(document, "was changed after it was written")


def test_files_that_are_not_regular_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        refuse(path, r"' is not a regular file\. Check the path\.$")
        assert kind_of(path) is None
    refuse(tmp_path / "none", r"^there is no file '.*/none'\. Check the path\.$")


def test_files_above_the_limit_are_refused(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = document.stat().st_size
    assert len(read_bytes(document, size)) == size
    with pytest.raises(
        SavedError, match=rf"must have at most {size - 1} bytes: it has more\. Check"
    ):
        read_bytes(document, size - 1)
    monkeypatch.setattr(files, "DOCUMENT_LIMIT", 100)
    with pytest.raises(
        SavedError, match="cannot be written: its document must have at most 100 by"
    ):
        write_document(document, "run", 2, CONTENT)
    assert document.stat().st_size == size


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_values_that_are_not_finite_are_not_written(document: Path, value: float) -> None:
    before = document.read_bytes()
    message = rf"run\.json' cannot be written: a\.b\[1\] must be finite: got {value}\.$"
    with pytest.raises(SavedError, match=message):
        write_document(document, "run", 2, {"a": {"b": [0.5, value]}})
    assert document.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "kind"),
    (
        (b'{\n "kind": "run",\n "version": 2', "run"),
        (b'{"version": 2, "kind": "run"}', None),
        (b'{"kind": 5}', None),
        (b"", None),
        (b"\x00" * 200, None),
        (b"[[", None),
    ),
)
def test_the_kind_of_a_file(tmp_path: Path, content: bytes, kind: str | None) -> None:
    write_whole(tmp_path / "file", content)
    assert kind_of(tmp_path / "file") == kind
    write_document(tmp_path / "file", "text-model", 2, {})
    assert kind_of(str(tmp_path / "file")) == "text-model"


def test_a_text_in_place_of_a_path_is_one_clear_error() -> None:
    for function in (require_path, kind_of_directory):
        with pytest.raises(SavedError, match=r"must be a path: it is too long for one\. To use a"):
            function("a text " * 1000)
