"""A tokenizer on disk: `tokenizer.json`, and `tokenizer.model` for the kinds that have one.

Written whole and read strictly; nothing that is read is executed.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from addnorm.data.files import need_file
from addnorm.disk import write_whole
from addnorm.errors import SavedError

FORMAT, VERSION = "addnorm tokenizer", 1
RECORD, MODEL = "tokenizer.json", "tokenizer.model"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What `tokenizer.json` holds, besides its format and version."""

    kind: str
    lower: bool
    notes: list[str] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    model: str = ""
    """SHA-256 of `tokenizer.model`; empty if there is none."""
    digest: str = ""
    """The tokenizer's own digest: of all that decides its ids."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_record(directory: Path, record: Record, model: bytes | None) -> None:
    """Write the model, then the record: without a record that fits it, no model is read."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SavedError(f"{str(directory)!r} cannot be made: {error.strerror}.") from None
    if model is not None:
        write_whole(directory / MODEL, model)
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(record)}, indent=1)
    write_whole(directory / RECORD, text.encode() + b"\n")
    if model is None:
        (directory / MODEL).unlink(missing_ok=True)


def read_record(directory: Path) -> tuple[Record, bytes | None]:
    """What `write_record` wrote, checked field by field."""
    path = directory / RECORD
    record = _parse(path, need_file(path).read_bytes())
    if not record.model:
        return record, None
    model = need_file(directory / MODEL).read_bytes()
    if sha256(model) != record.model:
        raise SavedError(
            f"{str(directory / MODEL)!r} is not what was saved with {RECORD}: its digest differs. "
            "Use a backup of both."
        )
    return record, model


def _parse(path: Path, content: bytes) -> Record:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        raise SavedError(f"{str(path)!r} is damaged: it is not JSON. Use a backup.") from None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise SavedError(
            f"{str(path)!r} was not written by addnorm. Other libraries use this name too; train a "
            "tokenizer of our own."
        )
    version = values.pop("version", None)
    if version != VERSION:
        raise SavedError(
            f"{str(path)!r} has format version {version!r}; this addnorm reads {VERSION}. "
            "Update addnorm to open it."
        )
    kinds = {"kind": str, "lower": bool, "notes": list, "settings": dict, "model": str}
    wrong = values.keys() ^ {item.name for item in fields(Record)}
    wrong |= {name for name, kind in kinds.items() if not isinstance(values.get(name), kind)}
    if wrong:
        raise SavedError(
            f"{str(path)!r} is damaged: {sorted(wrong)[0]!r} is missing, unknown or of the wrong "
            "type. Use a backup."
        )
    return Record(**values)
