"""The lock of a run directory: only one process at a time writes to a run.

    run.lock    {"host": …, "process": …, "started": …}

The file is locked with flock, which the operating system releases when the process ends, however it
ends. A lock file without a lock is therefore stale: its process was killed. Where a file system has
no locks, a process of the same host that is no longer alive counts as ended.

The lock file is the first file of a new run. A directory with a stale lock and without run.json is
therefore a run that was killed while it was created, and its files can be deleted
(run.py, `sweep_unfinished`).
"""

import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from addnorm.errors import SavedError
from addnorm.files import make_directory, sync_directory, to_json

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "run.lock"
MAX_PROCESS = 2**31
"""Ids of processes are below this."""
RECORD_LIMIT = 10_000
"""Bytes of a lock file that are read."""


class InUseError(SavedError):
    """A run that another process is using."""


@dataclass(frozen=True)
class LockHolder:
    """The process that uses a run, as the lock file names it."""

    process: int
    host: str
    started: str

    def describe(self) -> str:
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.process}{where} since {self.started}"


@contextmanager
def locked(directory: Path) -> Iterator[LockHolder | None]:
    """Hold the lock of a run directory; yield the holder of a stale lock, or None.

    Raises InUseError if another process holds it.
    """
    make_directory(directory)
    path = directory / LOCK_FILE
    handle, stale = _acquire(path)
    try:
        yield stale
    finally:
        # Deleted while it is locked, so that nobody else can have locked this file.
        with suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(handle)


def stale_lock(directory: Path) -> bool:
    """Return whether a directory has a lock file that no process holds."""
    try:
        handle = _open_lock(directory / LOCK_FILE)
    except OSError:
        return False
    try:
        return _lock(handle, _read_holder(handle))
    finally:
        os.close(handle)


def _acquire(path: Path) -> tuple[int, LockHolder | None]:
    while True:
        handle = _open_lock(path, os.O_CREAT)
        holder = _read_holder(handle)
        if not _lock(handle, holder):
            os.close(handle)
            user = "another process" if holder is None else holder.describe()
            raise InUseError(
                f"{str(path.parent)!r} is in use by {user}. Wait until it ends, or stop it. If it "
                f"has ended, delete {str(path)!r}."
            )
        if _is_same_file(handle, path):
            own = LockHolder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S"))
            os.ftruncate(handle, 0)
            os.pwrite(handle, to_json(asdict(own), indent=None).encode(), 0)
            os.fsync(handle)
            sync_directory(path.parent)
            return handle, holder
        os.close(handle)  # the process before this one has deleted it


def _open_lock(path: Path, flags: int = 0) -> int:
    """Return a handle of a lock file, which must be a regular file: not a link, FIFO or device."""
    links = getattr(os, "O_NOFOLLOW", 0)  # the file that a link leads to must not be overwritten
    try:
        handle = os.open(path, os.O_RDWR | links | flags, 0o644)
    except OSError as error:
        if os.path.lexists(path) and not _is_regular(path.lstat()):
            raise _irregular_lock(path) from None
        raise SavedError(
            f"{str(path.parent)!r} cannot be locked for writing: {error.strerror}. Change its "
            "permissions (chmod u+w), or use another directory."
        ) from None
    if not _is_regular(os.fstat(handle)):
        os.close(handle)
        raise _irregular_lock(path)
    return handle


def _is_regular(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)


def _irregular_lock(path: Path) -> SavedError:
    return SavedError(f"{str(path)!r} must be a regular file, and is not one. Delete it.")


def _lock(handle: int, holder: LockHolder | None) -> bool:
    """Lock an open file; return whether no other process uses the run."""
    is_foreign = holder is not None and holder.host != socket.gethostname()
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not is_foreign  # network file systems may not share locks between hosts
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
    return holder is None or (not is_foreign and not _is_alive(holder.process))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        own, named = os.fstat(handle), path.stat()
    except OSError:
        return False
    return (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)


def _read_holder(handle: int) -> LockHolder | None:
    """Return the process that a lock file names; None if it is empty or damaged."""
    try:
        plain: Any = json.loads(os.pread(handle, RECORD_LIMIT, 0))
        holder = LockHolder(**plain)
        valid = all(isinstance(text, str) for text in (holder.host, holder.started))
        valid = valid and type(holder.process) is int and 0 < holder.process < MAX_PROCESS
        return holder if valid else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None
