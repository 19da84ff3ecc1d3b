"""Keeping freed memory instead of giving it back: the cheapest speed there is on a CPU.

glibc returns every large tensor to the system when it is freed, and the next one of its size costs
a page fault for every 4 KiB. A training step frees and takes the same sizes again and again.
"""

import ctypes
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_memory() -> bool:
    """Ask the C library to keep freed memory for reuse, for the whole process; True if it did.

    The command line does this for its own processes. A library should not change its host without
    being asked, so in Python it is yours to call, once, before training. The process may hold some
    15–20 % more memory at its peak. Only glibc (Linux) is known to gain; elsewhere nothing is done.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    largest = 32 * 1024 * 1024  # the most that glibc accepts; larger blocks are mapped as before
    asked = [
        libc.mallopt(_MMAP_THRESHOLD, largest),
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1),
        libc.mallopt(_TOP_PAD, 64 * 1024 * 1024),
    ]
    return all(asked)
