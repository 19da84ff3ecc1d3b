"""A tokenizer on disk: `tokenizer.json`, and `tokenizer.model` for the kinds that have one.

`tokenizer.json` is a document (files.py) with the digest of `tokenizer.model`.
"""

import hashlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from addnorm.errors import SavedError
from addnorm.files import (
    TOKENIZER,
    make_directory,
    read_bytes,
    read_document,
    write_document,
    write_whole,
)

RECORD_FILE, MODEL_FILE = "tokenizer.json", "tokenizer.model"


@dataclass(frozen=True, kw_only=True)
class TokenizerRecord:
    """The content of `tokenizer.json`."""

    kind: str
    lower: bool
    notes: list[str] = field(default_factory=list)
    settings: dict[str, object] = field(default_factory=dict)
    model: str = ""
    """SHA-256 of `tokenizer.model`; empty if there is none."""


def sha256(content: bytes) -> str:
    """Return the SHA-256 digest of some bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def write_tokenizer_record(directory: Path, record: TokenizerRecord, model: bytes | None) -> None:
    """Write the model first: a model that does not match the record is refused when read."""
    make_directory(directory)
    if model is not None:
        write_whole(directory / MODEL_FILE, model)
    write_document(directory / RECORD_FILE, *TOKENIZER, asdict(record))
    if model is None:
        (directory / MODEL_FILE).unlink(missing_ok=True)


def read_tokenizer_record(directory: Path) -> tuple[TokenizerRecord, bytes | None]:
    """Return what `write_tokenizer_record` wrote, checked field by field."""
    path = directory / RECORD_FILE
    values = read_document(path, *TOKENIZER)
    types = {"kind": str, "lower": bool, "notes": list, "settings": dict, "model": str}
    wrong = values.keys() ^ {item.name for item in fields(TokenizerRecord)}
    wrong |= {name for name, kind in types.items() if not isinstance(values.get(name), kind)}
    if wrong:
        raise SavedError(
            f"{str(path)!r} is damaged: {sorted(wrong)[0]!r} is missing, unknown or of the wrong "
            "type. Use a backup."
        )
    record = TokenizerRecord(**values)
    if not record.model:
        return record, None
    model = read_bytes(directory / MODEL_FILE)
    if sha256(model) != record.model:
        raise SavedError(
            f"{str(directory / MODEL_FILE)!r} was changed after {RECORD_FILE} was written. "
            "Use a backup of both."
        )
    return record, model
