"""Files that appear whole or not at all, text read with one clear error about why not, and JSON."""

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from addnorm.errors import SavedError


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`: what is written there gets its own name at the end.

    The disk has the contents before they have the name, so a power cut leaves the old or the new.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise SavedError(f"{str(path)!r} cannot be written: {error.strerror}.") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    with whole(path) as temporary:
        temporary.write_bytes(content)


def read_text(path: str | Path) -> str:
    """A text file, or one clear error about why not."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SavedError(f"there is no file {str(path)!r}. Check the path.") from None
    except UnicodeDecodeError as error:
        raise SavedError(f"{str(path)!r} is not UTF-8 text: {error.reason}.") from None
    except OSError as error:
        raise SavedError(f"{str(path)!r} cannot be read: {error.strerror}.") from None


def to_json(value: Any, indent: int | None = 1) -> str:
    """JSON that every reader takes: it knows no NaN and no infinity, so that these are null.

    >>> to_json({"loss": float("nan"), "steps": (1, 2)}, indent=None)
    '{"loss": null, "steps": [1, 2]}'
    """
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
