"""Files that are written atomically, and documents whose digest shows whether they were changed.

A document is JSON with a header: what kind of file it is, its format version, and a SHA-256 digest.

    {"kind": "tokenizer", "version": 2, "digest": "9f86d0…", "content": {…}}

It is a file by itself, or the metadata of a safetensors file (models/saved.py), whose digest then
covers the tensors, too. Nothing that is read is executed.
"""

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from addnorm.errors import InputError, SavedError


class FileFormat(NamedTuple):
    """A kind of file that addnorm writes, and the version of its format."""

    kind: str
    version: int


TEXT_MODEL = FileFormat("text-model", 2)
TABLE_MODEL = FileFormat("table-model", 2)
INSTANT_MODEL = FileFormat("instant-model", 1)
RUN = FileFormat("run", 2)
TOKENIZER = FileFormat("tokenizer", 2)
COLUMNS = FileFormat("columns", 2)
CHECKPOINT_MODEL = FileFormat("checkpoint-model", 2)
CHECKPOINT_STATE = FileFormat("checkpoint-state", 2)
ADAPTER = FileFormat("adapter", 2)
FAILED_STEP = FileFormat("failed-step", 2)
FAILED_STEP_MODEL = FileFormat("failed-step-model", 2)
FAILED_STEP_BATCH = FileFormat("failed-step-batch", 2)
FAILED_STEP_RNG = FileFormat("failed-step-rng", 2)

METADATA_KEY = "addnorm"
"""The one metadata key of our safetensors files: its value is the document."""
DOCUMENT_LIMIT = 64 * 2**20
"""Bytes that a document may have. A larger file is not one, and is not read."""
TEXT_LIMIT = 64 * 2**20
"""Bytes that a text file of settings or results may have."""
JOURNAL_LIMIT = 2**30
"""Bytes that the journal of a run, metrics.jsonl, may have."""
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}")
"""Names of the temporary files and directories of `whole` and of checkpoints."""
_SAFETENSORS_TEMPORARY = re.compile(r"\.tmp[0-9A-Za-z]{6}")
"""Names of the files that safetensors writes in the same directory, and renames."""
_MARKERS = ("run.json", "model.safetensors", "state.safetensors", "case.json", "tokenizer.json")
"""The file that says what a directory is: a run, a model, a checkpoint, a case, a tokenizer."""
_HINTS = {
    errno.EACCES: " Change its permissions (chmod u+w), or use another directory.",
    errno.EPERM: " Change its permissions (chmod u+w), or use another directory.",
    errno.EROFS: " Use a directory on another disk.",
    errno.ENOSPC: " Free some space on the disk.",
    errno.EDQUOT: " Free some space on the disk.",
}
"""What to try for an error of the operating system, by its number."""
HUGGING_FACE = "hugging-face-model"
"""The kind of a directory that another library wrote: its config.json has a model_type."""
_DOCUMENT_KEYS = ["kind", "version", "digest", "content"]
_KIND = re.compile(rb'\s*\{\s*"kind":\s*"([a-z-]+)"')
_TENSOR_FILE_KIND = re.compile(
    rb'.{8}\{"__metadata__":\{"%s":"\{\\"kind\\":\\"([a-z-]+)\\"' % METADATA_KEY.encode(), re.DOTALL
)


# ── Plain files ───────────────────────────────────────────────────────────────────────────────────


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory; at the end, rename that file to `path`.

    The file is flushed to the disk before it is renamed, and its directory after it, so that after
    a crash `path` has either its old content or the new one: docs/decisions/9-power-loss.md. Its
    permissions follow the umask, whoever writes it: safetensors would let only the owner read it.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch(exist_ok=False)
        permissions = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        temporary.chmod(permissions)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        with suppress(OSError):  # a disk that became read-only; what counts was raised above
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it has its old content or the new one."""
    with whole(path) as temporary:
        temporary.write_bytes(content)


def unwritable(path: Path, error: OSError, what: str = "written") -> SavedError:
    """Return the error for a file or directory that cannot be written, with what to try."""
    if isinstance(error, SavedError):
        return error
    hint = _HINTS.get(error.errno or 0, " Choose another path.")
    return SavedError(f"{str(path)!r} cannot be {what}: {error.strerror}.{hint}")


def make_directory(path: str | Path) -> Path:
    """Create a directory and its parents, unless it exists; return its path."""
    path = require_path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error, "created") from None
    return path


def require_writable(path: str | Path) -> Path:
    """Return the path of a directory to write to; SavedError if that will not be possible.

    The directory itself or, if it does not exist, the one that it would be created in is tried with
    a file without a name. So a long computation fails before it begins, not at its end.
    """
    path = folder = require_path(path)
    try:
        if path.is_symlink() and not path.exists():
            raise SavedError(f"{str(path)!r} is a link to nothing. Choose another path.")
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unwritable(path, error, "written" if folder == path else "created") from None
    return path


def require_writable_file(path: str | Path | None) -> None:
    """Raise SavedError if a file that is written at the end cannot be; None stands for no file."""
    if path is None:
        return
    path = require_path(path)
    if path.is_dir():
        raise SavedError(f"{str(path)!r} is a directory. Name a file.")
    if not path.parent.exists():
        folder = str(path.parent)
        raise SavedError(f"there is no directory {folder!r}. Create it: mkdir -p {folder}")
    require_writable(path.parent)


def require_empty(path: str | Path) -> Path:
    """Return the path of a directory to write to; SavedError unless it is free or empty."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SavedError(f"{str(path)!r} is not empty. Choose another directory.")
    return require_writable(path)


@contextmanager
def new_directory(path: str | Path) -> Iterator[Path]:
    """Create a directory that is written whole: after an error, it is as it was before."""
    path = require_empty(path)
    existed = path.exists()
    make_directory(path)
    try:
        yield path
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        if existed:
            make_directory(path)
        raise


def sweep_temporaries(directory: Path, names: Iterable[str]) -> list[str]:
    """Delete temporary files that a killed process left in a directory; return their names.

    Only those of files with one of the `names`, and those of safetensors, are deleted: other hidden
    files are the user's.
    """
    known, swept = set(names), []
    for path in sorted(directory.glob(".*")) if directory.is_dir() else ():
        match = _TEMPORARY.fullmatch(path.name)
        is_ours = match is not None and match[1] in known
        is_ours = is_ours or _SAFETENSORS_TEMPORARY.fullmatch(path.name) is not None
        if is_ours and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return swept


def sync_directory(directory: Path) -> None:
    """fsync a directory, so that a rename in it survives a power loss."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_path(path: str | Path) -> Path:
    """Return a path; an error if no file can have it, such as a whole text in place of a name.

    >>> require_path(None)
    Traceback (most recent call last):
    addnorm.errors.InputError: a path must be a text or a pathlib.Path: got None. Try 'runs/mine'.
    >>> require_path("a text " * 1000)
    Traceback (most recent call last):
    addnorm.errors.SavedError: 'a text a text a text a text a text a tex…' must be a path: it is \
too long for one. To use a text itself, give a list: [text].
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InputError(
            f"a path must be a text or a pathlib.Path: got {path!r:.60}. Try 'runs/mine'."
        )
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:  # a name of other bytes, which no file of a run could hold
        raise SavedError(f"{str(path)!r} must be a name in UTF-8. Rename it.") from None
    if "\0" in os.fspath(path):
        raise InputError(f"a path must have no null character: got {path!r:.60}.")
    if os.fspath(path) == "":
        raise InputError("a path must name a file or a directory: it is empty. Try 'runs/mine'.")
    try:
        Path(path).exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise SavedError(
            f"{str(path)[:40] + '…'!r} must be a path: it is too long for one. To use a text "
            "itself, give a list: [text]."
        ) from None
    return Path(path)


def require_regular(path: Path) -> None:
    """Raise SavedError unless `path` is a regular file that can be read.

    So it is not a directory, device or FIFO.
    """
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
        if is_regular:
            path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise SavedError(f"there is no file {str(path)!r}. Check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = getattr(error, "strerror", None) or error
        is_closed = isinstance(error, PermissionError)
        hint = " Change its permissions (chmod u+r), or ask its owner." if is_closed else ""
        raise SavedError(f"{str(path)!r} cannot be read: {reason}.{hint}") from None
    if not is_regular:
        raise SavedError(f"{str(path)!r} is not a regular file. Check the path.")


def read_bytes(path: Path, limit: int = DOCUMENT_LIMIT) -> bytes:
    """Return the content of a regular file of at most `limit` bytes."""
    require_regular(path)
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise SavedError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    if len(content) > limit:
        raise SavedError(
            f"{str(path)!r} must have at most {limit:,} bytes: it has more. Check the path."
        )
    return content


def read_text(path: str | Path, limit: int = TEXT_LIMIT) -> str:
    """Return the content of a UTF-8 text file of at most `limit` bytes."""
    try:
        text = read_bytes(Path(path), limit).decode()
    except UnicodeDecodeError as error:
        raise SavedError(f"{str(path)!r} is not UTF-8 text: {error.reason}.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path, limit: int = TEXT_LIMIT) -> Any:
    """Return the value in a JSON file, or raise a SavedError that says why it is refused."""
    try:
        return json.loads(read_text(path, limit))
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise SavedError(f"{str(path)!r} is damaged: {reason}. Use a backup, or delete it.")


def to_json(value: Any, indent: int | None = 1) -> str:
    """Return strict JSON: NaN and infinities, which JSON does not have, become null.

    All JSON that addnorm writes or prints comes from here.

    >>> to_json({"loss": float("nan"), "steps": (1, 2)}, indent=None)
    '{"loss": null, "steps": [1, 2]}'
    """
    return json.dumps(nonfinite_to_null(value), indent=indent, ensure_ascii=False, allow_nan=False)


def nonfinite_to_null(value: Any) -> Any:
    """Return plain values with None in place of NaN and infinities.

    >>> nonfinite_to_null({"loss": [float("inf"), 0.5]})
    {'loss': [None, 0.5]}
    """
    if isinstance(value, dict):
        return {str(name): nonfinite_to_null(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [nonfinite_to_null(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ── Documents ─────────────────────────────────────────────────────────────────────────────────────


def write_document(path: Path, kind: str, version: int, content: Mapping[str, Any]) -> None:
    """Write a JSON file with kind, version and digest atomically.

    Parameters
    ----------
    path : the file to write
    kind, version : a FileFormat; `read_document` requires the same
    content : plain values; NaN and infinities are refused
    """
    try:
        text = dump_document(kind, version, content, indent=1)
    except ValueError as error:
        raise SavedError(f"{str(path)!r} cannot be written: {error}.") from None
    write_whole(path, f"{text}\n".encode())


def read_document(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Return the content of a file that `write_document` wrote, unless it was changed since."""
    text = read_bytes(path).decode(errors="replace")
    return parse_document(text.removesuffix("\n"), path, kind, version, indent=1)


def dump_document(
    kind: str,
    version: int,
    content: Mapping[str, Any],
    attached: Iterable[bytes | memoryview] = (),
    indent: int | None = None,
) -> str:
    """Return a document as JSON text: equal content gives equal text.

    Parameters
    ----------
    kind, version : a FileFormat
    content : plain values; ValueError for NaN and infinities
    attached : bytes that are stored outside the document and that its digest covers
    indent : spaces of indentation; None for one line
    """
    plain = _sorted_keys(content)
    canonical = {"content": plain, "kind": kind, "version": version}
    total = hashlib.sha256(_dump(canonical, None).encode())
    for part in attached:
        total.update(part)
    values = (kind, version, total.hexdigest(), plain)
    text = _dump(dict(zip(_DOCUMENT_KEYS, values, strict=True)), indent)
    if len(text) > DOCUMENT_LIMIT:
        raise ValueError(f"its document must have at most {DOCUMENT_LIMIT:,} bytes: {len(text):,}")
    return text


def parse_document(
    text: str,
    path: Path,
    kind: str,
    version: int,
    attached: Iterable[bytes | memoryview] = (),
    indent: int | None = None,
) -> dict[str, Any]:
    """Return the content of a document, or raise a SavedError that says why it is refused.

    Parameters
    ----------
    text : what `dump_document` returned
    path : the file it was read from, for messages
    kind, version : the FileFormat that the document must have
    attached, indent : as for `dump_document`
    """
    where = repr(str(path))
    try:
        document = json.loads(text)
    except RecursionError:
        raise SavedError(f"{where} is damaged: it is nested too deeply. Use a backup.") from None
    except ValueError:
        raise SavedError(f"{where} is damaged: it is not JSON. Use a backup.") from None
    name = kind.replace("-", " ")
    if not isinstance(document, dict) or list(document) != _DOCUMENT_KEYS:
        # Files of format 1 had a version and no document.
        number = document.get("version") if isinstance(document, dict) else None
        if not str(number).isdecimal():
            raise SavedError(f"{where} was not written by addnorm. Check the path.")
        document = {"kind": kind, "version": number, "content": None}
    if document["kind"] != kind:
        raise SavedError(
            f"{where} must be a {name}: it is a {str(document['kind']).replace('-', ' ')}. "
            "Check the path."
        )
    if document["version"] != version:
        raise SavedError(
            f"{where} is a {name} of format {document['version']}; this addnorm reads format "
            f"{version}. Train it again, or use the addnorm version that wrote it."
        )
    try:
        content = dict(document["content"])
        unchanged = text == dump_document(kind, version, content, attached, indent)
    except (TypeError, ValueError, RecursionError):
        unchanged = False
    if not unchanged:
        raise SavedError(f"{where} was changed after it was written. Use a backup.")
    return content


def parse_typed(kind: Any, plain: Any, where: str, name: str = "it") -> Any:
    """Return plain JSON as a value of a type; SavedError if it is of another type.

    Parameters
    ----------
    kind : a dataclass, bool, int, float, str, None, or a list, dict or union of them
    plain : what `json` read; a dataclass is a dict that may lack fields which have a default
    where : the file, for messages
    name : the value, for messages

    >>> parse_typed(list[int], [1, 2], "'run.json'"), parse_typed(float | None, 3, "'run.json'")
    ([1, 2], 3)
    >>> parse_typed(list[int], [1, "2"], "'run.json'", "steps")
    Traceback (most recent call last):
    addnorm.errors.SavedError: 'run.json' is damaged: steps cannot be '2'. Use a backup.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        kind = type(None) if plain is None else next(p for p in parts if p is not type(None))
        return parse_typed(kind, plain, where, name)
    if origin is list and isinstance(plain, list):
        return [parse_typed(parts[0], each, where, name) for each in plain]
    if origin is dict and isinstance(plain, dict):
        return {key: parse_typed(parts[1], each, where, name) for key, each in plain.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(plain, dict):
        hints = get_type_hints(kind)
        fields = {item.name: item for item in dataclasses.fields(kind)}
        required = {
            item.name
            for item in fields.values()
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        }
        for field in sorted({*plain} - {*fields} | required - {*plain}):
            problem = "is missing" if field in required else "is not known"
            raise SavedError(f"{where} is damaged: {field} {problem}. Use a backup.")
        return kind(**{key: parse_typed(hints[key], plain[key], where, key) for key in plain})
    if kind is float and type(plain) is int:
        return plain  # as it was written, so that it is written again with equal bytes
    if isinstance(kind, type) and type(plain) is kind:
        return plain
    raise SavedError(f"{where} is damaged: {name} cannot be {plain!r:.80}. Use a backup.")


def kind_of(path: str | Path) -> str | None:
    """Return the kind of a file that addnorm wrote, from its first bytes; None for other files.

    The file is not checked: `read_document` and `read_tensors` do that.

    >>> kind_of("nothing") is None
    True
    """
    path = Path(path)
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            start = file.read(128)
    except OSError:
        return None
    match = _TENSOR_FILE_KIND.match(start) or _KIND.match(start)
    return None if match is None else match[1].decode()


def kind_of_directory(path: str | Path) -> str | None:
    """Return what a directory holds, by the file that marks it; None if there is no such file.

    >>> kind_of_directory("nowhere") is None
    True
    """
    path = require_path(path)
    kinds = (kind_of(path / marker) for marker in _MARKERS)
    kind = next((kind for kind in kinds if kind is not None), None)
    return HUGGING_FACE if kind is None and _has_model_type(path / "config.json") else kind


def _has_model_type(path: Path) -> bool:
    """Return whether a file is a JSON object with a model_type."""
    try:
        content = json.loads(read_bytes(path).decode()) if path.is_file() else None
    except (OSError, SavedError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model_type" in content


def _dump(value: Any, indent: int | None) -> str:
    separators = (",", ":") if indent is None else None
    return json.dumps(value, indent=indent, separators=separators, allow_nan=False)


def _sorted_keys(value: Any, where: str = "") -> Any:
    """Return plain values as JSON has them: lists for tuples, and sorted strings as keys."""
    if isinstance(value, Mapping):
        parts = {str(name): part for name, part in value.items()}
        return {name: _sorted_keys(parts[name], f"{where}.{name}") for name in sorted(parts)}
    if isinstance(value, list | tuple):
        return [_sorted_keys(part, f"{where}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where.removeprefix('.')} must be finite: got {value}")
    return value
