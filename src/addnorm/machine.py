"""What a training process should know about the machine it runs on.

Freed memory: glibc returns every large tensor to the system when it is freed, and the next one of
its size costs a page fault for every 4 KiB, although a training step frees and takes the same sizes
again and again. Threads: those of one operation wait for each other in a loop, and where another
process takes the core of one, the rest wait all of its turn. bfloat16: a CPU without instructions
for it is many times slower than in float32.
"""

import ctypes
import platform
import warnings

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


def wait_briefly() -> bool:
    """Ask for threads that give way after a tenth of the usual wait; True if that was asked for.

    It must be before torch is first imported, and what the user has set stays as it is. Alone on
    the machine nothing changes; beside one busy process two threads train some four times as fast
    (docs/results/bench.md). Only GNU's threads on Linux know it; elsewhere nothing is done.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    keep = 0  # do not overwrite
    return bool(ctypes.CDLL(None).setenv(b"GOMP_SPINCOUNT", b"30000", keep) == 0)


def warn_if_slow(device: str, dtype: str) -> bool:
    """Warn of bfloat16 or float16 on a CPU that has no instructions for it; True if it warned.

    Measured on such CPUs, bfloat16 autocast trains some 27 times slower than float32.
    """
    if not is_slow(device, dtype):
        return False
    warnings.warn(
        f"{dtype} on this CPU is many times slower than float32: it has no instructions for it. "
        "Leave autocast off, or use float32 weights.",
        RuntimeWarning,
        stacklevel=3,
    )
    return True


def is_slow(device: str, dtype: str) -> bool:
    """Whether this is a CPU without instructions for a narrow type of number."""
    if device != "cpu" or dtype not in ("bfloat16", "float16"):
        return False
    import torch

    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
