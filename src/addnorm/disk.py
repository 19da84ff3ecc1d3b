"""Files that appear whole or not at all, and text read with one clear error about why not."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
